"""All metrics, in the order in which they are shown. A new subject is one file and one line here."""

from __future__ import annotations

from ceilingd.collectors import build, ceiling, gpu, health, link, server
from ceilingd.collectors.family import Family

FAMILIES: tuple[Family, ...] = (
    *build.FAMILIES,
    *health.FAMILIES,
    *gpu.FAMILIES,
    *link.FAMILIES,
    *server.FAMILIES,
    *ceiling.FAMILIES,
)
