"""The status page: one snapshot as HTML that needs nothing but itself. Pure; every text from outside is escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape

from ceilingd import __version__
from ceilingd.collectors.ceiling import efficiency_ratio, unexplained_seconds
from ceilingd.collectors.gpu import gpu_readings
from ceilingd.collectors.health import sources
from ceilingd.collectors.link import bandwidth
from ceilingd.collectors.server import assumed_inputs, context_tokens, queue_requests, running_requests
from ceilingd.records import (
    Ceiling,
    Component,
    DecodeObservation,
    GpuReading,
    LinkState,
    LinkStatus,
    NoCeiling,
    RankStatus,
    ServerStatus,
    Snapshot,
    SourceHealth,
)

REFRESH_SECONDS = 5
ABSENT = "–"
"""Shown for what is not known."""

_STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #fff; --text: #16202c; --dim: #55616f; --line: #dde2e8;
  --bar: #2f6fde; --good: #17713a; --warn: #8a5300; --bad: #b3211c; --banner: #fff1cc }
@media (prefers-color-scheme: dark) { :root { --back: #0f1419; --card: #182029; --text: #e6ebf0; --dim: #9aa7b4;
  --line: #2b3642; --bar: #6ea2ff; --good: #62c988; --warn: #f0b35a; --bad: #ff8a80; --banner: #43350c } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 66rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif }
header, footer { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; align-items: baseline; color: var(--dim) }
h1 { margin: 0; font-size: 1.5rem; color: var(--text) }
h2 { margin: 2rem 0 .5rem; font-size: 1.1rem }
h3 { margin: 0; font-size: 1.05rem }
h3, p, td.text { overflow-wrap: anywhere }
h3 .dim { font-weight: 400 }
a { color: var(--bar) }
p { margin: .5rem 0 }
section.card { margin: .75rem 0; padding: 1rem 1.25rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px }
.verdict { font-size: 1.1rem }
.dim { color: var(--dim) }
.good { color: var(--good) } .warn { color: var(--warn) } .bad { color: var(--bad) }
.banner { padding: .6rem 1rem; background: var(--banner); border-radius: 10px }
.scroll { overflow-x: auto }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums }
caption { padding: .5rem 0 0; text-align: left; color: var(--dim) }
th, td { padding: .3rem .75rem .3rem 0; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap }
td.text { white-space: normal }
thead th { font-weight: 600; color: var(--dim) }
tbody th { font-weight: 400 }
.total th, .total td { font-weight: 600 }
.number { text-align: right }
svg { display: block; width: 100%; min-width: 5rem; height: .7rem; fill: var(--bar) }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .75rem 1.25rem; margin: 1rem 0 .5rem }
dt { color: var(--dim); font-size: .875rem }
dd { margin: 0; font-size: 1.2rem; font-variant-numeric: tabular-nums }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing but the page's own style sheet: no script, no image, no other host."""

_COMPONENT_NAMES = {
    "weights": "weight reads",
    "experts": "expert weight reads",
    "kv_cache": "KV cache reads",
    "linear_state": "linear-attention state",
    "allreduce": "all-reduces",
    "logits_gather": "the logits gather",
    "draft": "drafting",
    "fixed": "scheduling and sampling",
}
_STATES: dict[LinkState, tuple[str, str]] = {
    "full": ("good", "at the expected link"),
    "idle_downshift": ("dim", "lowered while idle, normal"),
    "degraded": ("bad", "below the expected link under load"),
    "unverified": ("warn", "below the expected link, no work seen yet"),
    "unsupported": ("dim", "this platform gives no meaningful link"),
}


def page(snapshot: Snapshot) -> str:
    """The whole document."""
    title = "ceilingd (demo)" if snapshot.demo else "ceilingd"
    parts = (
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<header><h1>{title}</h1><span>{_time(snapshot.timestamp_seconds)}</span></header>",
        *_demo_banner(snapshot),
        "<main>",
        "<h2>Servers</h2>",
        *_servers(snapshot),
        "<h2>GPUs and links</h2>",
        *_gpus(snapshot),
        "<h2>Sources</h2>",
        *_sources(snapshot),
        "</main><footer>",
        # Relative, so that they work behind a path prefix.
        '<a href="metrics">metrics</a><a href="-/healthy">healthy</a><a href="-/ready">ready</a>',
        f"<span>ceilingd {escape(__version__)}, refreshed every {REFRESH_SECONDS} s</span></footer></body></html>",
    )
    return "\n".join(parts) + "\n"


def verdict(rank: RankStatus, degraded: tuple[LinkStatus, ...] = ()) -> str:
    """A few sentences with the numbers: what binds, which of its GPUs' links are degraded, how far from the ceiling, how
    much of it nothing explains."""
    ceiling, observation = rank.ceiling, rank.observation
    if isinstance(ceiling, NoCeiling):
        return f"No ceiling: {_stopped(ceiling.message)}"
    longest = max(ceiling.peak.components, key=lambda component: component.seconds)
    bound = (
        f"Bound by {_component_name(longest)}: {_milliseconds(longest.seconds)} of {_milliseconds(ceiling.peak.seconds)} ms "
        "at peak memory bandwidth."
    )
    for link in degraded:
        bound += (
            f" GPU {link.index}'s link is degraded (Gen{link.generation} x{link.width_lanes}, "
            f"expected Gen{link.generation_expected} x{link.width_expected_lanes})."
        )
    efficiency = efficiency_ratio(ceiling.peak.seconds, rank)
    unexplained = unexplained_seconds(rank)
    if observation is None or observation.round_seconds is None or efficiency is None or unexplained is None:
        return f"{bound} No round is observed now to compare with it."
    if efficiency > 1:
        return (
            f"{bound} Observed: {_milliseconds(observation.round_seconds)} ms, which is less than this hardware can take: "
            "an input of the model is wrong."
        )
    assumption = ", assumed" if "bandwidth_efficiency" in ceiling.assumed else ""
    share = f"{ceiling.bandwidth_efficiency:.0%} of the bandwidth{assumption}"
    rest = (
        f"{_milliseconds(unexplained)} ms unexplained at {share}"
        if unexplained >= 0
        else f"{_milliseconds(-unexplained)} ms faster than at {share}"
    )
    above = observation.round_seconds - ceiling.peak.seconds
    return (
        f"{bound} Observed: {_milliseconds(observation.round_seconds)} ms, {efficiency:.1%} of the ceiling; "
        f"{_milliseconds(above)} ms above it, {rest}."
    )


# ------------------------------------------------------------------------------------------------------------ servers


def _servers(snapshot: Snapshot) -> Iterator[str]:
    if not snapshot.servers:
        yield (
            '<section class="card"><p>No SGLang server is configured. Add one to the configuration file and start again:</p>'
            '<pre>[[servers]]\nurl = "http://127.0.0.1:30000"</pre></section>'
        )
    for server in snapshot.servers:
        yield f'<section class="card"><h3>{escape(server.name)} <span class="dim">{escape(_model(server))}</span></h3>'
        if not server.health.up:
            why = f": {_stopped(server.health.last_error)}" if server.health.last_error else "."
            yield f'<p class="verdict bad">Does not answer{escape(why)}</p>'
        elif not server.ranks:
            yield '<p class="verdict">It answers, but has said nothing about decoding yet.</p>'
        for rank in server.ranks:
            yield from _rank(rank, len(server.ranks) > 1, _degraded(server, rank, snapshot.links))
        assumed = assumed_inputs(server)
        if assumed:
            names = ", ".join(name.replace("_", " ") for name in assumed)
            yield f'<p class="dim">Assumed, neither measured nor configured: {escape(names)}.</p>'
        for reason, count in server.rejected_total:
            yield f'<p class="dim">Observations rejected, {escape(reason.replace("_", " "))}: {count}.</p>'
        yield "</section>"


def _model(server: ServerStatus) -> str:
    identity = server.reading.identity if server.reading is not None else None
    if identity is None:
        return server.url
    engine = f"SGLang {identity.version}" if identity.version else "SGLang"
    return ", ".join(text for text in (identity.model_path, engine, server.url) if text)


def _degraded(server: ServerStatus, rank: RankStatus, links: tuple[LinkStatus, ...]) -> tuple[LinkStatus, ...]:
    uuids = {gpu.uuid for gpu in server.gpus if gpu.dp_rank == rank.dp_rank}
    return tuple(link for link in links if link.state == "degraded" and link.uuid in uuids)


def _rank(rank: RankStatus, several: bool, degraded: tuple[LinkStatus, ...]) -> Iterator[str]:
    if several:
        yield f"<h3>DP rank {escape(rank.dp_rank)}</h3>"
    yield f'<p class="verdict">{escape(verdict(rank, degraded))}</p>'
    yield "<dl>"
    for term, value in _figures(rank, rank.observation, rank.ceiling if isinstance(rank.ceiling, Ceiling) else None):
        yield f"<div><dt>{term}</dt><dd>{value}</dd></div>"
    yield "</dl>"
    if isinstance(rank.ceiling, Ceiling):
        yield from _components(rank.ceiling)


def _figures(rank: RankStatus, observed: DecodeObservation | None, ceiling: Ceiling | None) -> Iterator[tuple[str, str]]:
    """What a person looks for first, by name; the names hold no text from outside."""
    yield "decoded, tokens/s", _number(observed.tokens_per_second if observed else None, 1)
    yield "ceiling at this accept length", _number(ceiling.observed_peak if ceiling else None, 1)
    if ceiling:
        yield f"the same at {ceiling.bandwidth_efficiency:.0%} bandwidth", _number(ceiling.observed_achievable, 1)
    yield "ceiling, all drafts accepted", _number(ceiling.perfect_peak if ceiling else None, 1)
    yield "accept length", _number(observed.accept_length if observed else None, 2)
    yield "running requests", _number(running_requests(rank), 1)
    yield "context tokens", _number(context_tokens(rank), 0)
    yield "queued requests", _number(queue_requests(rank), 0)


def _components(ceiling: Ceiling) -> Iterator[str]:
    yield f"{_table('predicted round')}<caption>The predicted round on the slowest rank</caption>"
    yield _head("component", "ms at peak", f"ms at {ceiling.bandwidth_efficiency:.0%}", "share", "", "GB per GPU", "bound by")
    yield "<tbody>"
    achievable = {component.name: component.seconds for component in ceiling.achievable.components}
    for component in ceiling.peak.components:
        share = component.seconds / ceiling.peak.seconds if ceiling.peak.seconds else 0.0
        yield (
            f'<tr><th scope="row">{escape(component.name.replace("_", " "))}</th>'
            f'<td class="number">{_number(component.seconds * 1e3, 2)}</td>'
            f'<td class="number">{_number(_scaled(achievable.get(component.name), 1e3), 2)}</td>'
            f'<td class="number">{share:.1%}</td><td>{_bar(share)}</td>'
            f'<td class="number">{_number(component.bytes_per_gpu / 1e9, 3)}</td><td>{escape(component.bound)}</td></tr>'
        )
    yield (
        f'<tr class="total"><th scope="row">round</th><td class="number">{_number(ceiling.peak.seconds * 1e3, 2)}</td>'
        f'<td class="number">{_number(ceiling.achievable.seconds * 1e3, 2)}</td><td></td><td></td><td></td><td></td></tr>'
    )
    yield "</tbody></table></div>"


def _bar(share: float) -> str:
    """Width as an attribute: the security policy refuses styles in the text."""
    return (
        '<svg viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{100 * share:.1f}" height="1"/></svg>'
    )


def _component_name(component: Component) -> str:
    return _COMPONENT_NAMES.get(component.name, component.name.replace("_", " "))


# --------------------------------------------------------------------------------------------------------------- GPUs


def _gpus(snapshot: Snapshot) -> Iterator[str]:
    readings = gpu_readings(snapshot)
    unreadable = snapshot.nvml.reading.unreadable if snapshot.nvml.reading is not None else ()
    yield '<section class="card">'
    if snapshot.nvml.stuck_seconds > 0:
        yield f'<p class="bad">An NVML call has been stuck for {snapshot.nvml.stuck_seconds:.0f} s.</p>'
    if snapshot.nvml.reading is None:
        yield f"<p>The NVIDIA driver is not read: {escape(_stopped(_nvml_error(snapshot)))}</p>"
    elif not readings:
        yield "<p>The NVIDIA driver answers, but has no GPU that can be read.</p>"
    for index, reason in unreadable:
        yield f'<p class="bad">GPU {index} cannot be read: {escape(reason)}</p>'
    if readings:
        links = {link.uuid: link for link in snapshot.links}
        yield _table("GPUs")
        yield _head("GPU", "link", "now", "expected", "use", "power", "memory", "PCIe out / in")
        yield "<tbody>"
        for gpu in readings:
            yield _gpu(gpu, links.get(gpu.info.uuid))
        yield "</tbody></table></div>"
    yield "</section>"


def _nvml_error(snapshot: Snapshot) -> str:
    errors = (health.last_error for health in sources(snapshot) if health.name == "nvml")
    return next((error for error in errors if error), "it has not answered yet")


def _gpu(gpu: GpuReading, link: LinkStatus | None) -> str:
    limit = gpu.power_limit_watts if gpu.power_limit_watts is not None else gpu.info.power_limit_watts
    cells = (
        _setting(link.generation, link.width_lanes) if link else ABSENT,
        _setting(link.generation_expected, link.width_expected_lanes) if link else ABSENT,
        ABSENT if gpu.utilization_ratio is None else f"{gpu.utilization_ratio:.0%}",
        f"{_number(gpu.power_watts, 0)} of {_number(limit, 0)} W",
        f"{_number(_scaled(gpu.memory_used_bytes, 1e-9), 1)} of {_number(_scaled(gpu.memory_total_bytes, 1e-9), 1)} GB",
        f"{_rate(link.transmit_bytes_per_second)} / {_rate(link.receive_bytes_per_second)}" if link else ABSENT,
    )
    name = f'{gpu.info.index} {escape(gpu.info.name)}<br><span class="dim">{escape(gpu.info.pci_bus_id)}</span>'
    return f'<tr><th scope="row">{name}</th>{_state(link)}{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _setting(generation: int | None, width_lanes: int | None) -> str:
    rate = bandwidth(generation, width_lanes)
    return ABSENT if rate is None else f'Gen{generation} x{width_lanes}<br><span class="dim">{rate / 1e9:.1f} GB/s</span>'


def _below_expected(link: LinkStatus) -> bool:
    pairs = ((link.generation, link.generation_expected), (link.width_lanes, link.width_expected_lanes))
    return any(now is not None and expected is not None and now < expected for now, expected in pairs)


def _state(link: LinkStatus | None) -> str:
    if link is None:
        return f"<td>{ABSENT}</td>"
    kind, meaning = _STATES[link.state]
    if link.working and link.state in ("full", "idle_downshift") and _below_expected(link):
        kind, meaning = "warn", "below the expected link, not judged yet"
    return f'<td class="text {kind}">{meaning}</td>'


# ------------------------------------------------------------------------------------------------------------ sources


def _sources(snapshot: Snapshot) -> Iterator[str]:
    yield f'<section class="card">{_table("sources")}'
    yield _head("source", "", "last success", "readings", "errors", "what to do")
    yield "<tbody>"
    for health in sources(snapshot):
        age = health.last_success_monotonic_seconds
        cells = (
            _source_state(health),
            ABSENT if age is None else f"{max(snapshot.monotonic_seconds - age, 0.0):.1f} s ago",
            str(health.samples_total),
            str(sum(count for _, count in health.errors_total)),
        )
        yield (
            f'<tr><th scope="row">{escape(health.name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}'
            f'<td class="text">{escape(health.last_error or "")}</td></tr>'
        )
    yield "</tbody></table></div></section>"


def _source_state(health: SourceHealth) -> str:
    if not health.attempted:
        return '<span class="dim">not read yet</span>'
    return '<span class="good">up</span>' if health.up else '<span class="bad">down</span>'


# ----------------------------------------------------------------------------------------------------------- wording


def _demo_banner(snapshot: Snapshot) -> Iterator[str]:
    if snapshot.demo:
        yield (
            '<p class="banner" role="note"><strong>Demo.</strong> '
            "Everything here is played: two RTX A6000 serving "
            "Qwen3.6-27B, with idle phases and a link that gets stuck. Nothing of this host is measured.</p>"
        )


def _table(label: str) -> str:
    """The start of a table that can be scrolled sideways, by keyboard too."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'


def _head(*titles: str) -> str:
    return f"<thead><tr>{''.join(_title(title) for title in titles)}</tr></thead>"


def _title(title: str) -> str:
    return f'<th scope="col">{title}</th>' if title else "<td></td>"


def _number(value: float | None, digits: int) -> str:
    return ABSENT if value is None else f"{value:,.{digits}f}"


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _rate(bytes_per_second: float | None) -> str:
    return ABSENT if bytes_per_second is None else f"{bytes_per_second / 1e9:.2f} GB/s"


def _stopped(sentence: str) -> str:
    """With a full stop. Without a capital: it may begin with a URL or a file name."""
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."


def _time(timestamp_seconds: float) -> str:
    return datetime.fromtimestamp(timestamp_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
