"""Fixtures and options for all tests."""

from __future__ import annotations

import pytest

pytest_plugins = ["support.fake_nvml"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the committed scrapes of tests/golden")
