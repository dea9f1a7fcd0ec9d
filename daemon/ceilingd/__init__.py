"""ceilingd: the decode ceiling of SGLang servers and the state of their PCIe links, live, as Prometheus metrics."""

__version__ = "0.1.0"
