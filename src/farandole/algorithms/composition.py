"""Two collectives, one after the other, make a third.

If every rank first ends with its own part of the sum (reduce_scatter) and then everybody collects all parts
(all_gather), every rank holds the whole sum: that is an all_reduce. `IDENTITIES` lists the pairs that name a
collective. The second schedule starts where the first ends, so both must cut the buffer into the same chunks, and
where both have a root it must be the same one.

Nothing is lost by composing: the engine orders transfers by the data that they move, so a rank starts on the second
schedule while others are still in the first.
"""

from __future__ import annotations

import numpy as np

from farandole.errors import MalformedScheduleError
from farandole.schedule import Schedule

__all__ = ["IDENTITIES", "compose"]

IDENTITIES: dict[tuple[str, str], str] = {
    ("reduce_scatter", "all_gather"): "all_reduce",
    ("reduce", "broadcast"): "all_reduce",
    ("scatter", "all_gather"): "broadcast",
    ("reduce_scatter", "gather"): "reduce",
    ("reduce", "scatter"): "reduce_scatter",
    ("gather", "broadcast"): "all_gather",
}
"""(first, second) -> the collective that running second after first makes."""

_ROOTED = {"broadcast", "reduce", "gather", "scatter"}


def compose(first: Schedule, second: Schedule) -> Schedule:
    """The schedule that runs ``second`` after ``first``.

    Args:
        first: e.g. a reduce_scatter.
        second: e.g. an all_gather, of as many ranks and chunks.

    Returns:
        A schedule for the collective that `IDENTITIES` names.

    Raises:
        MalformedScheduleError: the pair makes nothing known, or the two differ in world size, chunks or root.

    Cost: the sum of both.
    Source: Chan et al. 2007, who build the long-vector algorithms from pairs like these.
    """
    pair = (first.collective, second.collective)
    if pair not in IDENTITIES:
        known = ", ".join(f"{a} + {b}" for a, b in IDENTITIES)
        raise MalformedScheduleError(f"{pair[0]} + {pair[1]} makes no collective; known are {known}")
    for field in ("world_size", "num_chunks"):
        values = getattr(first, field), getattr(second, field)
        if values[0] != values[1]:
            raise MalformedScheduleError(
                f"cannot compose {pair[0]} + {pair[1]}: {field} is {values[0]} in the first, {values[1]} in the second"
            )
    roots = sorted({schedule.root for schedule in (first, second) if schedule.collective in _ROOTED})
    if len(roots) > 1:
        raise MalformedScheduleError(
            f"cannot compose {pair[0]} + {pair[1]}: root is {first.root} in the first, {second.root} in the second"
        )
    collective = IDENTITIES[pair]
    later = second.rows + np.array([first.num_steps, 0, 0, 0, 0, 0], dtype=np.int32)
    return Schedule(
        collective,
        first.world_size,
        first.num_chunks,
        np.concatenate([first.rows, later]),
        num_scratch=max(first.num_scratch, second.num_scratch),
        root=roots[0] if collective in _ROOTED else 0,
        name=first.name if first.name == second.name else f"{first.name}+{second.name}",
    )
