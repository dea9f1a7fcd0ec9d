"""Peak figures of GPUs by name, from the packaged table `data/gpus.toml`: for what a device does not report about itself,
and for devices that are not there."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class GpuSpec(BaseModel):
    """One GPU's peak figures."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    aliases: tuple[str, ...]
    """Names that NVML returns and that people use; `GpuTable.find` adds the vendor's prefixes."""
    memory: str
    memory_bytes: Positive
    memory_bandwidth_bytes_per_second: Positive
    memory_bus_width_bits: int | None = Field(default=None, gt=0)
    memory_clock_hertz: Positive | None = None
    """As NVML reports it; `None` where it reports none (unified memory)."""
    matrix_flops_per_second: Mapping[str, Positive]
    """Dense tensor rates; `bf16` holds the fp16 rate where the GPU has no bf16. A format it lacks is absent."""
    pcie_generation: int | None = Field(default=None, ge=1, le=6)
    pcie_width_lanes: int | None = Field(default=None, ge=1, le=16)
    """`None` for a GPU that is not on PCIe."""
    nvlink: Literal["built_in", "bridge"] | None = None
    nvlink_bytes_per_second: Positive | None = None
    """One way, all links together."""
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _pairs(self) -> GpuSpec:
        if (self.nvlink is None) != (self.nvlink_bytes_per_second is None):
            raise ValueError("nvlink and nvlink_bytes_per_second belong together")
        if (self.pcie_generation is None) != (self.pcie_width_lanes is None):
            raise ValueError("pcie_generation and pcie_width_lanes belong together")
        if not {"bf16"} <= set(self.matrix_flops_per_second) <= {"bf16", "fp8", "fp4"}:
            raise ValueError("matrix_flops_per_second needs bf16, and besides it knows only fp8 and fp4")
        return self


_TABLES = TypeAdapter(tuple[GpuSpec, ...])


class GpuTable:
    """GPUs by name and alias, spelled with or without vendor, in any case, with spaces or dashes."""

    def __init__(self, specs: Iterable[GpuSpec]) -> None:
        """Raises `ValueError` for a name that two GPUs share."""
        self._by_name: dict[str, GpuSpec] = {}
        for spec in specs:
            for name in (spec.name, *spec.aliases):
                if self._by_name.setdefault(_normalized(name), spec) is not spec:
                    raise ValueError(f"GPU table: {name} names two GPUs")

    def __iter__(self) -> Iterator[GpuSpec]:
        """Every GPU once, in the order of the table."""
        return iter({spec.name: spec for spec in self._by_name.values()}.values())

    def find(self, name: str) -> GpuSpec | None:
        """The GPU called `name`, as NVML spells it or as people do; `None` where the table has none.

        Only whole names match: an "RTX 4090 D" is not an "RTX 4090", and a bare "H100" could be three different boards."""
        return self._by_name.get(_normalized(name))

    def similar(self, name: str, most: int = 5) -> tuple[str, ...]:
        """Names that `name` may have meant, best first; empty when nothing is near."""
        wanted = _normalized(name)
        containing = [key for key in self._by_name if wanted and wanted in key]
        near = difflib.get_close_matches(wanted, self._by_name, n=2 * most, cutoff=0.6)
        return tuple(dict.fromkeys(self._by_name[key].name for key in (*containing, *near)))[:most]


def parse_gpus(text: str) -> GpuTable:
    """The table in this TOML. Raises `ValueError` naming the entry and field that are wrong."""
    try:
        return GpuTable(_TABLES.validate_python(tomllib.loads(text).get("gpu", ())))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"GPU table: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"GPU table: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


@cache
def load_gpus() -> GpuTable:
    """The packaged table."""
    return parse_gpus(files("ceilingd").joinpath("data/gpus.toml").read_text(encoding="utf-8"))


def _normalized(name: str) -> str:
    """Lower case, letters and digits only, without vendor and product line: "NVIDIA GeForce RTX 4090" is "rtx4090"."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in ("nvidia", "tesla", "geforce"))
