"""Every body is made once a snapshot, off the event loop, ahead of the request where one is to be expected."""

from __future__ import annotations

import asyncio
import gzip
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from ceilingd.web.renderings import ASKED_SECONDS, Renderings, Variant
from support import snapshots
from support.clock import FakeClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ceilingd.records import Snapshot

PLAIN, ZIPPED = Variant("text", False), Variant("text", True)


@dataclass
class Recorder:
    """A renderer that says what it was asked for, on which thread; it waits while `gate` is closed and fails on demand."""

    rendered: list[int] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)
    fails: bool = False

    def __call__(self, snapshot: Snapshot) -> bytes:
        self.threads.add(threading.get_ident())
        self.rendered.append(snapshot.sequence)
        assert self.gate.wait(10)
        if self.fails:
            raise RuntimeError("broken")
        return b"snapshot %d" % snapshot.sequence


def snapshot(sequence: int) -> Snapshot:
    return replace(snapshots.bare(), sequence=sequence)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    made.gate.set()
    yield made
    made.gate.set()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def renderings(recorder: Recorder, clock: FakeClock) -> Iterator[Renderings]:
    made = Renderings({"text": recorder}, clock)
    yield made
    made.close()


async def test_nothing_is_there_before_the_first_snapshot(renderings: Renderings) -> None:
    with pytest.raises(LookupError):
        await renderings.body(PLAIN)


async def test_a_snapshot_is_rendered_once_however_often_it_is_asked_for(renderings: Renderings, recorder: Recorder) -> None:
    renderings.publish(snapshot(1))
    bodies = await asyncio.gather(*(renderings.body(PLAIN) for _ in range(5)))
    assert [*bodies, await renderings.body(PLAIN)] == [b"snapshot 1"] * 6
    assert recorder.rendered == [1]
    assert threading.get_ident() not in recorder.threads


async def test_a_compressed_body_holds_the_same(renderings: Renderings) -> None:
    renderings.publish(snapshot(1))
    body = await renderings.body(ZIPPED)
    assert body is not None
    assert gzip.decompress(body) == b"snapshot 1"


async def test_nobody_asked_nothing_is_rendered(renderings: Renderings, recorder: Recorder) -> None:
    for sequence in range(3):
        renderings.publish(snapshot(sequence))
    await renderings.body(PLAIN)
    assert recorder.rendered == [2]


async def test_what_was_asked_for_lately_is_rendered_on_publication(
    renderings: Renderings, recorder: Recorder, clock: FakeClock
) -> None:
    renderings.publish(snapshot(1))
    await renderings.body(PLAIN)
    clock.advance(ASKED_SECONDS)
    renderings.publish(snapshot(2))
    assert await renderings.body(PLAIN) == b"snapshot 2"
    clock.advance(ASKED_SECONDS + 1)
    renderings.publish(snapshot(3))
    renderings.publish(snapshot(4))
    assert await renderings.body(PLAIN) == b"snapshot 4"
    assert recorder.rendered == [1, 2, 4]


async def test_work_ahead_does_not_pile_up_behind_a_slow_rendering(renderings: Renderings, recorder: Recorder) -> None:
    renderings.publish(snapshot(1))
    await renderings.body(PLAIN)
    recorder.gate.clear()
    renderings.publish(snapshot(2))  # under way, and held
    for sequence in range(3, 100):
        renderings.publish(snapshot(sequence))
    recorder.gate.set()
    assert await renderings.body(PLAIN) == b"snapshot 99"
    assert recorder.rendered == [1, 2, 99]


async def test_a_client_that_goes_away_does_not_take_the_body_from_the_others(
    renderings: Renderings, recorder: Recorder
) -> None:
    recorder.gate.clear()
    renderings.publish(snapshot(1))
    leaving, staying = asyncio.create_task(renderings.body(PLAIN)), asyncio.create_task(renderings.body(PLAIN))
    await asyncio.sleep(0)
    leaving.cancel()
    recorder.gate.set()
    assert await staying == b"snapshot 1"
    assert leaving.cancelled()


async def test_a_defect_is_logged_once_and_over_when_it_is_over(renderings: Renderings, recorder: Recorder) -> None:
    recorder.fails = True
    with capture_logs() as logs:
        for sequence in range(3):
            renderings.publish(snapshot(sequence))
            assert await renderings.body(PLAIN) is None
    assert [(entry["event"], entry["kind"]) for entry in logs] == [("defect while rendering", "text")]
    recorder.fails = False
    renderings.publish(snapshot(3))
    assert await renderings.body(PLAIN) == b"snapshot 3"
