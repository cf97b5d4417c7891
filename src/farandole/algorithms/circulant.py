"""The circulant graph: the rounds of halving and doubling, the volume of the ring, for any N.

Rank r numbers the blocks from itself on: its block i is block r+i modulo N, so block 0 is the one it ends with.

Reduce-scatter. At first a rank holds a sum, of just its own contribution, for all of its blocks 0..N-1. In each round
it keeps the lower half of what it holds and sends the upper half away: of its blocks 0..s-1 it keeps those below s' =
ceil(s/2) and sends those from s' on to the rank s' further on. That rank counts from s' further on too, so what the
sender calls block s'+j the receiver calls block j, and adds it to what it keeps. The next round goes on with s'. After
ceil(log2 N) rounds only block 0 is left. A block leaves a rank at most once, so a rank sends N-1 blocks in all, and
receives as many.

Why the sum is whole and nothing is in it twice: follow one chunk. Every rank but its owner sends its sum of it exactly
once, in the round in which its number for that chunk lies in the upper half, and receives nothing for it afterwards.
The receiver's number for it is smaller. So the sends form a tree with the owner as its root, and a sum along a tree
has all in it once.

All-gather runs the rounds backwards: the skips grow, and a rank receives from s' further on what it would have sent
there.

The order in which a sum is added up is not the order of ranks, so the operation must commute.
"""

from __future__ import annotations

from farandole.algorithms.composition import compose
from farandole.schedule import Schedule, Transfer

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def _halvings(world_size: int) -> list[tuple[int, int]]:
    """Per round, (blocks held, blocks kept): (N, ceil(N/2)), ... down to (2, 1)."""
    rounds = []
    held = world_size
    while held > 1:
        kept = (held + 1) // 2
        rounds.append((held, kept))
        held = kept
    return rounds


def reduce_scatter(world_size: int) -> Schedule:
    """Each round, keep the lower half of the blocks and send the upper half that far along.

    Cost: ceil(log2 N) rounds; (N-1)/N·S sent per rank (N-1 blocks), for every N.
    Source: Träff 2024, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv:2410.14234.
    """
    transfers = []
    for step, (held, kept) in enumerate(_halvings(world_size)):
        for rank in range(world_size):
            peer = (rank + kept) % world_size
            for block in range(kept, held):
                chunk = (rank + block) % world_size
                transfers.append(Transfer(step, rank, chunk, peer, chunk, True))
    return Schedule("reduce_scatter", world_size, world_size, transfers, name="circulant")


def all_gather(world_size: int) -> Schedule:
    """Each round, get from that far along the blocks that come next after those already held.

    Cost: ceil(log2 N) rounds; (N-1)/N·S sent per rank (N-1 blocks), for every N.
    Source: Träff 2024.
    """
    transfers = []
    for step, (held, kept) in enumerate(reversed(_halvings(world_size))):
        for rank in range(world_size):
            peer = (rank + kept) % world_size
            for block in range(kept, held):
                chunk = (rank + block) % world_size
                transfers.append(Transfer(step, peer, chunk, rank, chunk))
    return Schedule("all_gather", world_size, world_size, transfers, name="circulant")


def all_reduce(world_size: int) -> Schedule:
    """Reduce-scatter with shrinking skips, then all-gather with growing ones.

    Cost: 2·ceil(log2 N) rounds; 2(N-1)/N·S sent per rank (2(N-1) blocks), for every N.
    Source: Träff 2024.
    """
    return compose(reduce_scatter(world_size), all_gather(world_size))
