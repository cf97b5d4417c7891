"""What each collective promises, slot by slot.

A *contribution* is what one rank put into one chunk: the pair (rank, chunk). Before a collective runs, some slots hold
one contribution each. After it, some slots must hold exact sums of contributions, each exactly once. That pair
of tables is the whole definition of the collective: the verifier proves it, the lowering takes from it which slots are
a rank's input and output, and the views colour it.

Where every rank owns a part of the buffer (reduce_scatter, all_gather, gather, scatter, all_to_all), part r is the r-th
run of num_chunks / N consecutive chunks.

In all_to_all, slot c means two things: before, the data *for* the owner of c; after, the data *from* the owner of c.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from farandole.errors import MalformedScheduleError
from farandole.schedule import Schedule

__all__ = ["COLLECTIVES", "Promise", "chunks_of_part", "owner_of_chunk", "promise_of"]

COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)
"""Every collective a schedule may claim."""

_PARTED = {"reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"}
_REDUCING = {"all_reduce", "reduce_scatter", "reduce", "barrier"}


@dataclass(frozen=True, slots=True)
class Promise:
    """The contract of one schedule's collective.

    Attributes:
        before: (rank, chunk) -> the chunk id of the one contribution that slot holds at the start. Its rank is that
            rank.
        after: (rank, chunk) -> (chunk id, contributing ranks): what that slot must hold at the end.
        duplicates_allowed: True for barrier alone, where hearing of a rank twice does no harm.
        read_only: ranks whose buffer is never written: the root of a broadcast holds the result from the start.
    """

    before: dict[tuple[int, int], int]
    after: dict[tuple[int, int], tuple[int, tuple[int, ...]]]
    duplicates_allowed: bool = False
    read_only: frozenset[int] = frozenset()


def is_parted(collective: str) -> bool:
    """True where every rank owns a part of the buffer."""
    return collective in _PARTED


def is_reducing(collective: str) -> bool:
    """True where the result is a reduction over ranks."""
    return collective in _REDUCING


def chunks_of_part(schedule: Schedule, part: int) -> range:
    """The chunks that make up part ``part`` of a buffer that every rank owns a part of."""
    per_part = schedule.num_chunks // schedule.world_size
    return range(part * per_part, (part + 1) * per_part)


def owner_of_chunk(schedule: Schedule, chunk: int) -> int:
    """The rank whose part chunk ``chunk`` lies in."""
    return chunk // (schedule.num_chunks // schedule.world_size)


def promise_of(schedule: Schedule) -> Promise:
    """The promise of ``schedule.collective`` on the schedule's ranks and chunks.

    Raises:
        MalformedScheduleError: the collective is unknown, or the chunks do not divide among the ranks.
    """
    _require_known(schedule)
    build = _BUILDERS[schedule.collective]
    return build(schedule)


def _require_known(schedule: Schedule) -> None:
    if schedule.collective not in COLLECTIVES:
        raise MalformedScheduleError(f"collective is {schedule.collective!r}; known are {', '.join(COLLECTIVES)}")
    if is_parted(schedule.collective) and schedule.num_chunks % schedule.world_size:
        raise MalformedScheduleError(
            f"{schedule.collective} on {schedule.world_size} ranks has {schedule.num_chunks} chunks; "
            f"it needs a multiple of {schedule.world_size}, so that every rank owns equally many"
        )


def _everywhere(schedule: Schedule) -> Iterator[tuple[int, int]]:
    return ((rank, chunk) for rank in range(schedule.world_size) for chunk in range(schedule.num_chunks))


def _all_reduce(schedule: Schedule) -> Promise:
    everyone = tuple(range(schedule.world_size))
    slots = list(_everywhere(schedule))
    return Promise({slot: slot[1] for slot in slots}, {slot: (slot[1], everyone) for slot in slots})


def _barrier(schedule: Schedule) -> Promise:
    promise = _all_reduce(schedule)
    return Promise(promise.before, promise.after, duplicates_allowed=True)


def _reduce_scatter(schedule: Schedule) -> Promise:
    everyone = tuple(range(schedule.world_size))
    return Promise(
        {slot: slot[1] for slot in _everywhere(schedule)},
        {(owner_of_chunk(schedule, c), c): (c, everyone) for c in range(schedule.num_chunks)},
    )


def _reduce(schedule: Schedule) -> Promise:
    everyone = tuple(range(schedule.world_size))
    return Promise(
        {slot: slot[1] for slot in _everywhere(schedule)},
        {(schedule.root, c): (c, everyone) for c in range(schedule.num_chunks)},
    )


def _all_gather(schedule: Schedule) -> Promise:
    return Promise(
        {(owner_of_chunk(schedule, c), c): c for c in range(schedule.num_chunks)},
        {(rank, c): (c, (owner_of_chunk(schedule, c),)) for rank, c in _everywhere(schedule)},
    )


def _gather(schedule: Schedule) -> Promise:
    return Promise(
        {(owner_of_chunk(schedule, c), c): c for c in range(schedule.num_chunks)},
        {(schedule.root, c): (c, (owner_of_chunk(schedule, c),)) for c in range(schedule.num_chunks)},
    )


def _broadcast(schedule: Schedule) -> Promise:
    return Promise(
        {(schedule.root, c): c for c in range(schedule.num_chunks)},
        {slot: (slot[1], (schedule.root,)) for slot in _everywhere(schedule)},
        read_only=frozenset({schedule.root}),
    )


def _scatter(schedule: Schedule) -> Promise:
    return Promise(
        {(schedule.root, c): c for c in range(schedule.num_chunks)},
        {(owner_of_chunk(schedule, c), c): (c, (schedule.root,)) for c in range(schedule.num_chunks)},
    )


def _all_to_all(schedule: Schedule) -> Promise:
    """Chunk ids tell every pair of ranks apart: id = src * num_chunks + slot at src."""
    per_part = schedule.num_chunks // schedule.world_size
    after: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
    for rank, slot in _everywhere(schedule):
        src = owner_of_chunk(schedule, slot)
        after[rank, slot] = (src * schedule.num_chunks + rank * per_part + slot % per_part, (src,))
    return Promise({(r, c): r * schedule.num_chunks + c for r, c in _everywhere(schedule)}, after)


_BUILDERS = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}
