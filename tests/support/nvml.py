"""The real NVML sources on the fake library."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ceilingd.clock import SystemClock
from ceilingd.sources.nvml import Nvml

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.fake_nvml import FakeNvml


@asynccontextmanager
async def nvml_on(fake: FakeNvml, **settings: Any) -> AsyncIterator[Nvml]:
    """`Nvml` on the fake's hardware; closed at the end, when no call hangs any more."""
    nvml = Nvml(SystemClock(), library=fake.library, **settings)
    try:
        yield nvml
    finally:
        fake.set({})
        await nvml.close()
