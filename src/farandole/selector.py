"""Which algorithm a collective uses when the caller names none.

On one host every pair of ranks is equally near and a step costs a few cache misses, so the fewest steps win: small
all_reduce messages go to everyone at once; larger ones are reduced where they belong, each by one rank, and gathered.
"""

from __future__ import annotations

from farandole.errors import ArgumentError

__all__ = ["choose"]

ONE_SHOT_BYTES = 40 * 1024
"""Up to a buffer of this many bytes, sending everything to everyone beats sending it twice in parts: measured with 2,
3, 4 and 8 ranks on 2 cores. With more ranks the limit is lower, so that no rank reads more than 8 ranks do."""


def choose(collective: str, world_size: int, nbytes: int) -> str:
    """The name of the algorithm for ``nbytes`` bytes of the whole buffer; the same on every rank that asks the same.

    Raises:
        ArgumentError: there is no such collective.
    """
    if collective == "all_reduce":
        return "one_shot" if nbytes * max(world_size - 1, 7) <= ONE_SHOT_BYTES * 7 else "direct"
    if collective == "barrier":
        return "dissemination"
    if collective in ("reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all", "send"):
        return "direct"
    raise ArgumentError(f"there is no collective {collective!r}")
