FROM python:3.13-slim AS build
WORKDIR /src
RUN python -m venv /opt/ceilingd
COPY pyproject.toml README.md LICENSE ./
COPY daemon daemon
RUN /opt/ceilingd/bin/python -m pip install --no-cache-dir .

FROM python:3.13-slim
COPY --from=build /opt/ceilingd /opt/ceilingd
ENV PATH=/opt/ceilingd/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 9939
ENTRYPOINT ["ceilingd"]
CMD ["run", "--listen-address", ":9939"]
