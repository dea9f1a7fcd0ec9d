"""The page says what the snapshot says, whatever is missing, and lets nothing from outside become markup."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from typing import Any

import pytest

from ceilingd.records import DecodeObservation, LinkState, NoCeiling, NvmlStatus, RankStatus, Snapshot
from ceilingd.web.page import CONTENT_SECURITY_POLICY, page, verdict
from support import snapshots

FOUNDING = snapshots.founding()
VOID = ("meta", "br", "rect")


class Document(HTMLParser):
    """The text of a page and its links; fails on tags that do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)
        self.close()
        assert self.open == []

    @property
    def text(self) -> str:
        """What a person reads, with single spaces."""
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        assert not [name for name, _ in attrs if name == "style" or name.startswith("on")], "the security policy forbids it"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def text_of(snapshot: Snapshot) -> str:
    return Document(page(snapshot)).text


def rank(observation: DecodeObservation | None) -> RankStatus:
    return replace(FOUNDING.servers[0].ranks[0], observation=observation)


# ------------------------------------------------------------------------------------------------------------ verdict


def test_the_verdict_of_the_founding_case() -> None:
    assert verdict(FOUNDING.servers[0].ranks[0]) == (
        "Bound by weight reads: 33.4 of 42.6 ms at peak memory bandwidth. Observed: 55.4 ms, 76.9% of the ceiling; "
        "12.8 ms above it, 2.6 ms unexplained at 80% of the bandwidth, assumed."
    )


def test_a_configured_bandwidth_is_not_called_assumed() -> None:
    configured = replace(snapshots.ceiling(), assumed=())
    assert verdict(replace(FOUNDING.servers[0].ranks[0], ceiling=configured)).endswith("unexplained at 80% of the bandwidth.")


def test_a_round_faster_than_what_is_taken_for_achievable() -> None:
    assert verdict(rank(snapshots.observation(round_seconds=50e-3))).endswith(
        "7.4 ms above it, 2.8 ms faster than at 80% of the bandwidth, assumed."
    )


def test_a_round_faster_than_possible_proves_an_input_wrong() -> None:
    assert verdict(rank(snapshots.observation(round_seconds=30e-3))).endswith(
        "Observed: 30.0 ms, which is less than this hardware can take: an input of the model is wrong."
    )


@pytest.mark.parametrize("observation", [None, snapshots.observation(round_seconds=None)], ids=["idle", "no round"])
def test_without_an_observed_round_there_is_nothing_to_compare(observation: DecodeObservation | None) -> None:
    assert verdict(rank(observation)).endswith("at peak memory bandwidth. No round is observed now to compare with it.")


def test_no_ceiling_says_why() -> None:
    reason = NoCeiling("gpus_unknown", "which GPUs serve this model is not known: list them")
    assert verdict(replace(rank(None), ceiling=reason)) == "No ceiling: which GPUs serve this model is not known: list them."


# --------------------------------------------------------------------------------------------------------------- page


def test_the_founding_case_at_a_glance() -> None:
    text = text_of(FOUNDING)
    for words in (
        "qwen Qwen/Qwen3.6-27B, SGLang 0.5.23, http://127.0.0.1:30000",
        "decoded, tokens/s 60.1 ceiling at this accept length 78.2",
        "ceiling, all drafts accepted 93.9 accept length 3.33",
        "weights 33.37 41.71 78.4% 25.628 memory",
        "round 42.59 52.82",
        "Assumed, neither measured nor configured: bandwidth efficiency, fixed seconds, gpu mapping.",
        "Observations rejected, counter reset: 1.",
        "0 NVIDIA RTX A6000 0000:41:00.0 at the expected link Gen4 x16 31.5 GB/s Gen4 x16 31.5 GB/s 98% 288 of 300 W "
        "45.0 of 51.5 GB 1.50 GB/s / 1.25 GB/s",
        "sglang/qwen up 0.2 s ago 100 0",
    ):
        assert words in text
    assert "Demo." not in text


def test_a_degraded_link_stands_out() -> None:
    html = page(replace(FOUNDING, links=(snapshots.link(0), snapshots.link(1, "degraded"))))
    assert '<td class="text bad">below the expected link under load</td><td>Gen1 x16<br><span class="dim">4.0 GB/s' in html


@pytest.mark.parametrize("state", ["full", "idle_downshift"])
def test_a_working_link_below_what_is_expected_is_not_called_fine(state: LinkState) -> None:
    below = replace(snapshots.link(1), state=state, generation=1)
    html = page(replace(FOUNDING, links=(snapshots.link(0), below)))
    assert '<td class="text warn">below the expected link, not judged yet</td><td>Gen1 x16' in html
    idle = page(replace(FOUNDING, links=(snapshots.link(0), replace(below, working=False))))
    assert "not judged yet" not in idle


def test_the_verdict_of_a_server_names_its_degraded_gpu() -> None:
    links = (snapshots.link(0), snapshots.link(1, "degraded"))
    sentence = "at peak memory bandwidth. GPU 1's link is degraded (Gen1 x16, expected Gen4 x16). Observed: 55.4 ms"
    assert sentence in text_of(replace(FOUNDING, links=links))
    elsewhere = replace(FOUNDING, links=links, servers=(snapshots.server(gpus=(0,)),))
    assert "link is degraded" not in text_of(elsewhere)


def test_a_long_model_path_is_broken() -> None:
    assert "h3, p, td.text { overflow-wrap: anywhere }" in page(FOUNDING)


def test_links_lead_to_the_other_endpoints_behind_any_prefix() -> None:
    assert Document(page(FOUNDING)).links == ["metrics", "-/healthy", "-/ready"]


def test_the_demo_says_so_first() -> None:
    assert text_of(replace(FOUNDING, demo=True)).startswith("ceilingd (demo) ceilingd (demo) 2026-11-30 00:53:20 UTC Demo.")


def test_a_bare_host_says_what_to_do() -> None:
    text = text_of(snapshots.bare())
    assert (
        'No SGLang server is configured. Add one to the configuration file and start again: [[servers]] url = "http://' in text
    )
    assert "The NVIDIA driver is not read: libnvidia-ml.so.1 was not found: install the NVIDIA driver on this host." in text
    assert "nvml down – 0 7 libnvidia-ml.so.1 was not found" in text


def test_a_server_that_is_down_says_why() -> None:
    down = snapshots.down(FOUNDING.servers[0], "refused", "it refuses connections: start it")
    text = text_of(replace(FOUNDING, servers=(down,), sources=()))
    assert "qwen http://127.0.0.1:30000 Does not answer: it refuses connections: start it." in text
    assert "60.1" not in text


def test_nothing_attempted_yet() -> None:
    snapshot = replace(snapshots.bare(), sources=(replace(snapshots.bare().sources[0], attempted=False, last_error=None),))
    text = text_of(snapshot)
    assert "The NVIDIA driver is not read: it has not answered yet." in text
    assert "nvml not read yet" in text


def test_lost_gpus_and_a_stuck_driver_are_named() -> None:
    reading = FOUNDING.nvml.reading
    assert reading is not None
    nvml = NvmlStatus(True, replace(reading, gpus=(), unreadable=((1, "the GPU has fallen off the bus"),)), 12.0)
    text = text_of(replace(FOUNDING, nvml=nvml, links=()))
    assert "An NVML call has been stuck for 12 s." in text
    assert "no GPU that can be read" in text
    assert "GPU 1 cannot be read: the GPU has fallen off the bus" in text


def test_ranks_are_told_apart_where_there_are_several() -> None:
    snapshot = replace(FOUNDING, servers=(snapshots.server(dp_ranks=("0", "1")),))
    assert "DP rank 1 Bound by weight reads" in text_of(snapshot)
    assert "DP rank" not in text_of(FOUNDING)


def test_the_large_host_renders() -> None:
    assert text_of(snapshots.large()).count("NVIDIA RTX A6000") == 8


def everything_absent(record: Any) -> Any:
    """The record with `None` wherever its type allows."""
    if isinstance(record, tuple):
        return tuple(everything_absent(part) for part in record)
    if not is_dataclass(record) or isinstance(record, type):
        return record
    return replace(
        record,
        **{
            field.name: None
            if "None" in str(field.type) and not is_dataclass(getattr(record, field.name))
            else everything_absent(getattr(record, field.name))
            for field in fields(record)
        },
    )


def test_every_value_may_be_absent() -> None:
    absent = everything_absent(FOUNDING)
    assert absent.servers[0].ranks[0].observation.tokens_per_second is None
    text = text_of(absent)
    assert "None" not in text
    assert "nan" not in text
    assert "decoded, tokens/s – ceiling at this accept length –" in text


def hostile(record: Any, text: str) -> Any:
    """The record with `text` as every free text in it; texts from a fixed list stay."""
    if isinstance(record, tuple):
        return tuple(hostile(part, text) for part in record)
    if isinstance(record, str):
        return text
    if not is_dataclass(record) or isinstance(record, type):
        return record
    fixed = [
        field.name for field in fields(record) if "Literal" in str(field.type) or field.type in ("LinkState", "DecodeSource")
    ]
    return replace(
        record,
        **{field.name: hostile(getattr(record, field.name), text) for field in fields(record) if field.name not in fixed},
    )


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "'\"><img src=x onerror=alert(1)>", "&lt;b&gt; & </td>", "\udcff\x00é"]
)
def test_no_text_becomes_markup(text: str) -> None:
    reason = NoCeiling("model_config_missing", "the config")
    down = snapshots.down(snapshots.server("two"), "refused", "it refuses")
    servers = (*FOUNDING.servers, down, snapshots.without_ceiling(snapshots.server("three"), reason))
    snapshot = replace(FOUNDING, servers=servers, sources=(*FOUNDING.sources, down.health))
    harmless, attacked = (Document(page(hostile(snapshot, words))) for words in ("harmless", text))
    assert attacked.tags == harmless.tags
    assert attacked.links == harmless.links
    assert text.replace("\x00", "") in attacked.text.replace("\ufffd", "").replace("\x00", "")


def test_the_policy_allows_exactly_the_style_of_the_page() -> None:
    [style] = re.findall(r"<style>(.*?)</style>", page(FOUNDING), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in CONTENT_SECURITY_POLICY
    assert "prefers-color-scheme: dark" in style


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    document = Document(page(FOUNDING))
    assert document.tags.isdisjoint({"script", "img", "link", "iframe", "object", "form"})
    assert "url(" not in page(FOUNDING)
