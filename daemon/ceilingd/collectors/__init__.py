"""All metrics, in the order in which they are shown. A new subject is one file and one line here."""

from __future__ import annotations

from ceilingd.collectors import build, ceiling, gpu, health, link, server
from ceilingd.collectors.family import Family

SUBJECTS: tuple[tuple[str, tuple[Family, ...]], ...] = (
    ("Links", link.FAMILIES),
    ("GPUs", gpu.FAMILIES),
    ("Servers, observed", server.FAMILIES),
    ("Ceiling, predicted", ceiling.FAMILIES),
    ("Sources and daemon", health.FAMILIES),
    ("Build and process", build.FAMILIES),
)
FAMILIES: tuple[Family, ...] = tuple(family for _, families in SUBJECTS for family in families)
