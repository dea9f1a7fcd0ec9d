"""The installed demo and a real Prometheus beside it: started once for all tests of a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support import installed, prometheus

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[installed.Daemon]:
    """`ceilingd demo` on a free port."""
    with installed.daemon("demo", "--listen-address", "127.0.0.1:0", directory=tmp_path_factory.mktemp("demo")) as running:
        yield running


@pytest.fixture(scope="module")
def scraped_demo(demo: installed.Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[prometheus.Prometheus]:
    """A Prometheus that has scraped the demo at least once."""
    with prometheus.prometheus([demo.address], tmp_path_factory.mktemp("prometheus")) as running:
        running.wait_for("up == 1")
        yield running
