"""Judging a PCIe link under load. Pure: readings and a state in, a state out."""
