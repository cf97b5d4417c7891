"""What ``farandole bench`` asks of its ranks, and what they answer: plain data, sent as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from farandole.cost_model import BUS_FACTORS

__all__ = ["COLLECTIVES", "Measurement", "Row", "Settings"]


COLLECTIVES = tuple(BUS_FACTORS)
"""What can be measured."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    Attributes:
        collective: one of `COLLECTIVES`.
        counts: elements of the whole buffer, one per row; a multiple of N where each rank owns a part.
        dtype, op, root: of each call.
        algorithm: a name, PATH.py:FUNCTION, or None to let farandole choose.
        iterations, warmup: timed calls, and calls before those.
        check: whether to count wrong elements.
        registered: whether the buffers lie in registered memory.
        cold: whether caches are filled with other data before each timed call.
    """

    collective: str
    counts: tuple[int, ...]
    dtype: str
    op: str
    root: int
    algorithm: str | None
    iterations: int
    warmup: int
    check: bool
    registered: bool
    cold: bool


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of one row, out-of-place or in-place.

    Attributes:
        median_s, p99_s: over the iterations, of the slowest rank in each.
        num_wrong: wrong elements on all ranks together; None if there was no check, or nothing to check.
    """

    median_s: float
    p99_s: float
    num_wrong: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured for one size.

    Attributes:
        count: elements of the whole buffer.
        algorithm: that ran.
        transport: how data travelled: "staged", copied through shared memory; "mapped", read where it lay, or "both";
            "local" for a single rank.
        out_of_place, in_place: None where the collective has no such form.
    """

    count: int
    algorithm: str
    transport: str
    out_of_place: Measurement | None
    in_place: Measurement | None
