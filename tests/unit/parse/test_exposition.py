import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from ceilingd.parse.exposition import NotAnExpositionError, Sample, parse_exposition
from ceilingd.parse.sglang import WANTED_NAMES

DATA = Path(__file__).parents[2] / "data"
BODIES = sorted([*DATA.glob("sglang/*.prom"), *DATA.glob("sglang/*.openmetrics"), *DATA.glob("h200/*.prom")])
WANTED = {"x": "x", "sglang:x": "x", "sglang_x": "x"}


def everything(sample: Sample) -> tuple[str, tuple[tuple[str, str], ...], str]:
    """Comparable and sortable, NaN included."""
    return sample.name, tuple(sorted(sample.labels.items())), repr(sample.value)


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.name)
def test_agrees_with_prometheus_client(path: Path) -> None:
    body = path.read_bytes()
    families = (parse_openmetrics if path.suffix == ".openmetrics" else parse_text)(body.decode())
    expected = [
        Sample(WANTED_NAMES[sample.name], sample.labels, float(sample.value))
        for family in families
        for sample in family.samples
        if sample.name in WANTED_NAMES
    ]
    exposition = parse_exposition(body, WANTED_NAMES)
    assert sorted(map(everything, exposition.samples)) == sorted(map(everything, expected))
    assert len(exposition.samples) >= 4
    assert exposition.malformed_lines == 0


def test_there_are_bodies() -> None:
    assert len(BODIES) > 60


@pytest.mark.parametrize(
    ("line", "labels", "value"),
    [
        ("x 1", {}, 1.0),
        ("x\t1.5e3", {}, 1500.0),
        ("  x 1", {}, 1.0),
        ("x{} 1", {}, 1.0),
        ('x{a="b"} 1', {"a": "b"}, 1.0),
        ('x {a="b",} 1', {"a": "b"}, 1.0),
        ('x{a="b", c = "d"} 1', {"a": "b", "c": "d"}, 1.0),
        ('x{a="}, b=\\"c\\" {"} 1', {"a": '}, b="c" {'}, 1.0),
        ('x{a="one\\ntwo\\\\three"} 1', {"a": "one\ntwo\\three"}, 1.0),
        ('x{a="\\\\n"} 1', {"a": "\\n"}, 1.0),
        ('x{a="π"} 1', {"a": "π"}, 1.0),
        ("x 1 1395066363000", {}, 1.0),
        ('x{a="b"} 1 1796000000.250', {"a": "b"}, 1.0),
        ('x{a="b"} 1 # {trace="t"} 0.5', {"a": "b"}, 1.0),
        ('x 1 # {trace="t"} 0.5 1796000000.25', {}, 1.0),
        ("x +Inf", {}, math.inf),
        ("x 1\r", {}, 1.0),
    ],
)
def test_lines(line: str, labels: dict[str, str], value: float) -> None:
    exposition = parse_exposition(f"# TYPE x gauge\n{line}\n".encode(), WANTED)
    assert exposition.samples == (Sample("x", labels, value),)
    assert exposition.malformed_lines == 0


def test_nan_is_a_value_of_the_format() -> None:
    (sample,) = parse_exposition(b"x NaN\n", WANTED).samples
    assert math.isnan(sample.value)


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "x{",
        'x{a="b" 1',
        'x{a="b}  1',
        "x{a=b} 1",
        'x{a="b",a="c"} 1',
        'x{a="b"c="d"} 1',
        'x{a="b"}',
        "x one",
        "x 1_000",
        "x 1 yesterday",
        "x 0x10",
    ],
)
def test_malformed_lines_are_counted_and_skipped(line: str) -> None:
    exposition = parse_exposition(f"# TYPE x gauge\n{line}\nsglang:x 2\n".encode(), WANTED)
    assert exposition.samples == (Sample("x", {}, 2.0),)
    assert exposition.malformed_lines == 1


def test_only_wanted_names_are_looked_at() -> None:
    body = b"# HELP y .\ny{ broken\nx_total 3\nx_bucket{} 1\nsglang:x 1\nsglang_x 2\nxx 4\n"
    exposition = parse_exposition(body, WANTED)
    assert [sample.value for sample in exposition.samples] == [1.0, 2.0]
    assert exposition.malformed_lines == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty"),
        (b" \n\n", "the body is empty"),
        (b"<!DOCTYPE html><html><body>x 1</body></html>", "the body is HTML or XML, not Prometheus metrics"),
        (b'{"x": 1}', "the body is JSON, not Prometheus metrics"),
        (b"[1, 2]", "the body is JSON, not Prometheus metrics"),
        (b"Internal Server Error", "the body is not Prometheus metrics"),
        (b"# A title\n\nNot Found\n", "the body is not Prometheus metrics"),
        (b"\x00\xff\x10" * 5000, "the body is not Prometheus metrics"),
    ],
)
def test_what_is_no_exposition(body: bytes, message: str) -> None:
    with pytest.raises(NotAnExpositionError, match=f"^{message}$"):
        parse_exposition(body, WANTED)


def test_a_body_without_samples_is_an_exposition() -> None:
    assert parse_exposition(b"# HELP x .\n# TYPE x gauge\n", WANTED).samples == ()


@given(st.binary(max_size=400))
def test_no_bytes_disturb_the_lines_before_them(body: bytes) -> None:
    assert parse_exposition(b"x 1\n" + body, WANTED).samples[0] == Sample("x", {}, 1.0)


@given(st.binary(max_size=400))
def test_any_bytes_are_refused_or_read(body: bytes) -> None:
    try:
        names = {sample.name for sample in parse_exposition(body, WANTED).samples}
    except NotAnExpositionError:
        return
    assert names <= {"x"}


@given(st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), st.text()), st.floats(allow_nan=False))
def test_reads_back_what_is_written(labels: dict[str, str], value: float) -> None:
    def escape(text: str) -> str:
        return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

    labels = {name: text.encode(errors="replace").decode() for name, text in labels.items()}
    written = ",".join(f'{name}="{escape(text)}"' for name, text in labels.items())
    assert parse_exposition(f"x{{{written}}} {value!r}\n".encode(), WANTED).samples == (Sample("x", labels, value),)
