"""The dissemination barrier: nobody leaves before everybody has come.

In round k every rank tells the rank 2^k further on what it knows: that it has come, and whom it has heard of. After
round k it has heard, directly or not, of the 2^(k+1) ranks up to itself; after ceil(log2 N) rounds of all. If N is not
a power of two it hears of some twice, which does no harm here, since hearing is not counting.

As a schedule, "has come" is a contribution, and "has heard of" is a sum; the engine moves no bytes for it.
"""

from __future__ import annotations

from farandole.schedule import Schedule, Transfer

__all__ = ["dissemination"]


def dissemination(world_size: int) -> Schedule:
    """Everybody tells the ranks 1, 2, 4, ... further on whom it has heard of.

    Cost: ceil(log2 N) rounds; ceil(log2 N) messages sent per rank.
    Source: Hensgen, Finkel & Manber 1988, "Two algorithms for barrier synchronization".
    """
    transfers = []
    step, distance = 0, 1
    while distance < world_size:
        transfers += [Transfer(step, rank, 0, (rank + distance) % world_size, 0, True) for rank in range(world_size)]
        step, distance = step + 1, 2 * distance
    return Schedule("barrier", world_size, 1, transfers, name="dissemination")
