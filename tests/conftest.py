"""Fixtures for all tests."""

pytest_plugins = ["support.fake_nvml"]
