"""What this kind of machine costs in the terms of `farandole.cost_model`: measured once, kept in a file, read by all.

``farandole calibrate`` measures and writes the file. Without one for this kind of machine, figures that were measured
elsewhere (`SHIPPED`) are used: choosing needs only their proportions to be about right.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import warnings
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from farandole.cost_model import Link
from farandole.errors import ArgumentError

__all__ = [
    "SHIPPED",
    "WIRE",
    "Calibration",
    "calibration_file",
    "calibration_in_use",
    "last_level_cache_bytes",
    "load_calibration",
    "processor",
    "usable_cores",
]

_FIELDS: dict[str, Any] = {
    "latency_s": float,
    "step_s": float,
    "turn_s": float,
    "cached_bytes_per_s": float,
    "memory_bytes_per_s": float,
    "reduce_bytes_per_s": float,
    "cache_bytes": int,
    "cores": int,
    "source": str,
}

WIRE = Link(latency_s=1e-5, bandwidth_bytes_per_s=1.25e9, reduce_bytes_per_s=4.5e10, step_s=4e-5)
"""Between hosts unless said otherwise: 10 Gbit/s; a message costs a rank 10 us, and arrives 40 us later. The bytes that
come from there are added up as fast as those in memory."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What ranks on one host cost one another.

    Attributes:
        latency_s: to publish, or to take, one chunk.
        step_s: until a rank hears of what another did, both running.
        turn_s: the same where there are more ranks than cores, so that the other has to get a core first.
        cached_bytes_per_s: at which a rank copies while all buffers fit the last-level cache.
        memory_bytes_per_s: at which it copies when they do not.
        reduce_bytes_per_s: at which it adds up.
        cache_bytes: of the last-level cache.
        cores: that the ranks may use.
        source: where the figures come from.
        wire: between hosts; not measured by ``farandole calibrate``.

    Raises:
        ArgumentError: a figure is of another type, or not positive.
    """

    latency_s: float
    step_s: float
    turn_s: float
    cached_bytes_per_s: float
    memory_bytes_per_s: float
    reduce_bytes_per_s: float
    cache_bytes: int
    cores: int
    source: str
    wire: Link = WIRE

    def __post_init__(self) -> None:
        for field, kind in _FIELDS.items():
            value: Any = getattr(self, field)
            if type(value) is not kind or (kind is not str and not 0 < value < math.inf):
                raise ArgumentError(f"calibration: {field} is {value!r}; it must be a {kind.__name__}, and positive")
        if type(self.wire) is not Link or self.wire.cores or math.inf in astuple(self.wire):
            raise ArgumentError(
                f"calibration: wire is {self.wire!r}; it must be a Link of finite figures, without cores"
            )

    @classmethod
    def from_fields(cls, fields: Any) -> Calibration:
        """From what `asdict` and JSON made of one; one without a wire, as files of before have none, gets `WIRE`.

        Raises:
            ArgumentError: that is not what ``fields`` is.
        """
        if not isinstance(fields, dict) or fields.keys() - {"wire"} != _FIELDS.keys():
            raise ArgumentError(f"a calibration has the fields {', '.join(_FIELDS)} and wire; this is {fields!r}")
        return cls(**fields | {"wire": _wire_from_fields(fields.get("wire", asdict(WIRE)))})

    def link(self, world_size: int, nbytes: int) -> Link:
        """Between ``world_size`` ranks that work on buffers of ``nbytes`` bytes each, one to read and one to write."""
        fits = 2 * nbytes * world_size <= self.cache_bytes
        copied_bytes_per_s = self.cached_bytes_per_s if fits else self.memory_bytes_per_s
        return Link(
            latency_s=self.latency_s,
            bandwidth_bytes_per_s=copied_bytes_per_s,
            reduce_bytes_per_s=min(self.reduce_bytes_per_s, copied_bytes_per_s),
            step_s=self.step_s if world_size <= self.cores else self.turn_s * world_size / self.cores,
            cores=self.cores,
        )


def _wire_from_fields(fields: Any) -> Link:
    usual = asdict(WIRE)
    is_like = isinstance(fields, dict) and fields.keys() == usual.keys()
    if not is_like or any(type(fields[name]) is not type(usual[name]) for name in usual):
        raise ArgumentError(f"the wire of a calibration has fields as in {usual}; this is {fields!r}")
    return Link(**fields)


SHIPPED = Calibration(
    latency_s=5e-8,
    step_s=3.5e-7,
    turn_s=1.5e-6,
    cached_bytes_per_s=4.5e10,
    memory_bytes_per_s=1.8e10,
    reduce_bytes_per_s=4.5e10,
    cache_bytes=32 << 20,
    cores=2,
    source="shipped with farandole: measured on 2 cores of an AMD EPYC",
)
"""Used where this kind of machine was not calibrated; `load_calibration` puts in the number of cores."""


def load_calibration() -> Calibration:
    """Of this kind of machine, from `calibration_file`; else `SHIPPED`.

    Raises:
        ArgumentError: the file is there and is no calibration.
    """
    try:
        return Calibration.from_fields(json.loads(calibration_file().read_text()))
    except OSError:
        return replace(SHIPPED, cores=usable_cores())
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{calibration_file()} is no calibration ({error}); delete it, or run farandole calibrate again"
        ) from None


def calibration_in_use() -> Calibration:
    """As `load_calibration`; but a file that is none is warned of, and `SHIPPED` is used: it is but a hint."""
    try:
        return load_calibration()
    except ArgumentError as error:
        warnings.warn(f"{error}; until then the figures shipped with farandole are used", RuntimeWarning, stacklevel=2)
        return replace(SHIPPED, cores=usable_cores())


def calibration_file() -> Path:
    """Where the calibration of this kind of machine is kept, below ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Homes are shared between machines, so processor and number of cores are in the name.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kind = re.sub(r"[^\w.-]+", "-", f"{processor()}-{usable_cores()}-cores")
    return cache / "farandole" / f"{kind}.json"


def processor() -> str:
    """The name of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1] if model else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def last_level_cache_bytes() -> int:
    """Of the first core; `SHIPPED`'s where the kernel does not say."""
    sizes = [
        int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]]
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if (text := path.read_text().strip())[-1:] in ("K", "M", "G")
    ]
    return max(sizes, default=SHIPPED.cache_bytes)
