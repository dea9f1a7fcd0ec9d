# The commands for people and for CI; `make` alone lists them. Needs python3 (3.11 or newer) and make, nothing else.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo run test lint format unit bench docs clean

help: ## list the commands
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 16
	@echo 'Arguments: make demo ARGS="--listen-address 127.0.0.1:0"; another interpreter: make PYTHON=python3.13 demo'

demo: $(VENV)/.installed ## run the daemon on the embedded demo; no GPU, no server, no configuration
	@$(BIN)/ceilingd demo $(ARGS)

run: $(VENV)/.installed ## run the daemon on this host
	@$(BIN)/ceilingd run $(ARGS)

test: $(VENV)/.installed-test ## lint, types and all tests; installs the system packages they need
	@tests/install-system-packages
	@$(MAKE) --no-print-directory lint
	$(PYTEST) -n 2 -m "not benchmark" $(ARGS)

lint: $(VENV)/.installed-test ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

unit: $(VENV)/.installed-test ## the tests of single modules: seconds, no system packages
	$(PYTEST) tests/unit tests/property $(ARGS)

bench: $(VENV)/.installed-test ## measure the daemon with 8 fake GPUs and 2 fake servers; about two minutes
	@tests/install-system-packages
	@PYTHONPATH=tests $(BIN)/python tests/benchmarks/daemon.py $(ARGS)

docs: $(VENV)/.installed-test ## write anew what is generated: daemon/METRICS.md, the settings in README.md
	$(BIN)/ceilingd metrics --markdown > daemon/METRICS.md
	PYTHONPATH=tests $(BIN)/python -m support.readme

clean: ## remove the virtual environment and everything that was built
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
	find daemon tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps depend on pyproject.toml: a second `make demo` installs nothing, a changed dependency does.
$(VENV)/.installed: pyproject.toml tools/make-venv
	@tools/make-venv "$(PYTHON)" "$(VENV)"
	@echo "Installing ceilingd into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml tools/make-venv
	@tools/make-venv "$(PYTHON)" "$(VENV)"
	@echo "Installing ceilingd and its test tools into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $(VENV)/.installed $@
