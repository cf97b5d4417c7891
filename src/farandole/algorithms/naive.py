"""The obviously right algorithms: everything goes to one rank, and comes back.

One rank, the root (rank 0 where the collective has none), speaks with the others one at a time. To reduce, it takes in
each other rank's buffer in turn. To broadcast, it sends its buffer to each in turn. Every other collective here is one
such pass to the root and one back.

These are the references that the others are compared with. Nobody should run them on more than a few ranks: the
root's link carries everything.

Names: "others" are the ranks root+1, root+2, ... modulo N, which is virtual ranks 1..N-1.
"""

from __future__ import annotations

from farandole.algorithms.composition import compose
from farandole.schedule import Schedule, Transfer

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def _others(world_size: int, root: int) -> list[int]:
    return [(root + virtual) % world_size for virtual in range(1, world_size)]


def reduce(world_size: int, root: int = 0, num_chunks: int = 1) -> Schedule:
    """The root adds every other rank's buffer to its own, one after the other.

    Cost: N-1 rounds; S sent per rank other than the root, which receives (N-1)·S.
    Source: folklore.
    """
    transfers = [
        Transfer(step, rank, chunk, root, chunk, True)
        for step, rank in enumerate(_others(world_size, root))
        for chunk in range(num_chunks)
    ]
    return Schedule("reduce", world_size, num_chunks, transfers, root=root, name="naive")


def broadcast(world_size: int, root: int = 0, num_chunks: int = 1) -> Schedule:
    """The root sends its buffer to every other rank, one after the other.

    Cost: N-1 rounds; (N-1)·S sent by the root, nothing by the others.
    Source: folklore.
    """
    transfers = [
        Transfer(step, root, chunk, rank, chunk)
        for step, rank in enumerate(_others(world_size, root))
        for chunk in range(num_chunks)
    ]
    return Schedule("broadcast", world_size, num_chunks, transfers, root=root, name="naive")


def gather(world_size: int, root: int = 0) -> Schedule:
    """Every other rank sends its part to the root, one after the other.

    Cost: N-1 rounds; S/N sent per rank other than the root, which receives (N-1)/N·S.
    Source: folklore.
    """
    transfers = [Transfer(step, rank, rank, root, rank) for step, rank in enumerate(_others(world_size, root))]
    return Schedule("gather", world_size, world_size, transfers, root=root, name="naive")


def scatter(world_size: int, root: int = 0) -> Schedule:
    """The root sends every other rank its part, one after the other.

    Cost: N-1 rounds; (N-1)/N·S sent by the root, nothing by the others.
    Source: folklore.
    """
    transfers = [Transfer(step, root, rank, rank, rank) for step, rank in enumerate(_others(world_size, root))]
    return Schedule("scatter", world_size, world_size, transfers, root=root, name="naive")


def all_reduce(world_size: int) -> Schedule:
    """Reduce to rank 0, then broadcast from there.

    Cost: 2(N-1) rounds; (N-1)·S sent by rank 0, S by each other.
    Source: folklore.
    """
    return compose(reduce(world_size), broadcast(world_size))


def reduce_scatter(world_size: int) -> Schedule:
    """Reduce to rank 0, then scatter from there.

    Cost: 2(N-1) rounds; (N-1)/N·S sent by rank 0, S by each other; rank 0 receives (N-1)·S.
    Source: folklore.
    """
    return compose(reduce(world_size, num_chunks=world_size), scatter(world_size))


def all_gather(world_size: int) -> Schedule:
    """Gather at rank 0, then broadcast from there.

    Cost: 2(N-1) rounds; (N-1)·S sent by rank 0, S/N by each other.
    Source: folklore.
    """
    return compose(gather(world_size), broadcast(world_size, num_chunks=world_size))


def all_to_all(world_size: int) -> Schedule:
    """Rank 0 takes in everything into scratch, then hands every rank what is meant for it.

    Cost: 2(N-1) rounds; (N-1)^2/N·S sent by rank 0, (N-1)/N·S by each other; (N-1)·S of scratch on rank 0.
    Source: folklore.
    """
    others = range(1, world_size)

    def kept_at_0(src: int, dst: int) -> int:
        """The slot of rank 0 that holds what src has for dst."""
        return dst if src == 0 else world_size * src + dst

    transfers = [
        Transfer(src - 1, src, dst, 0, kept_at_0(src, dst)) for src in others for dst in range(world_size) if dst != src
    ]
    transfers += [
        Transfer(world_size + dst - 2, 0, kept_at_0(src, dst), dst, src)
        for dst in others
        for src in range(world_size)
        if src != dst
    ]
    # Last, when nothing that rank 0 had for others is left in the way.
    transfers += [Transfer(2 * world_size - 2, 0, kept_at_0(src, 0), 0, src) for src in others]
    num_scratch = (world_size - 1) * world_size
    return Schedule("all_to_all", world_size, world_size, transfers, num_scratch=num_scratch, name="naive")


def barrier(world_size: int) -> Schedule:
    """Everybody reports to rank 0, which then releases everybody.

    Cost: 2(N-1) rounds; N-1 messages sent by rank 0, one by each other.
    Source: folklore.
    """
    return Schedule("barrier", world_size, 1, all_reduce(world_size).rows, name="naive")
