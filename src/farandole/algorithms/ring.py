"""The ring: every rank sends to its right neighbour only.

Reduce-scatter. The buffer is cut into N chunks. Think of chunk c as a parcel that travels once around the ring, from
rank c+1 to rank c, and to which every rank on the way adds its own contribution. All N parcels travel at once, one
link apart, so in each step every link carries exactly one. After N-1 steps parcel c is whole, and at home on rank c.

All-gather. Now chunk c starts at rank c and travels N-1 links; whoever it passes keeps a copy.

All-reduce is the one after the other. A rank sends 2(N-1) chunks of S/N bytes: no algorithm sends less.

Broadcast and reduce use the ring as a chain that ends, or starts, before the root. The buffer is cut into K chunks
that follow one another, so that the chain is a pipeline: it takes N-1 steps to fill and K-1 more to drain. The engine
pipelines within chunks by itself, so a small K is enough.
"""

from __future__ import annotations

from farandole.algorithms.composition import compose
from farandole.schedule import Schedule, Transfer

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"]


def reduce_scatter(world_size: int) -> Schedule:
    """Chunk c travels from rank c+1 around to rank c, and everybody on its way adds to it.

    Cost: N-1 rounds; (N-1)/N·S sent per rank.
    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    transfers = []
    for step in range(world_size - 1):
        for rank in range(world_size):
            chunk = (rank - 1 - step) % world_size
            transfers.append(Transfer(step, rank, chunk, (rank + 1) % world_size, chunk, True))
    return Schedule("reduce_scatter", world_size, world_size, transfers, name="ring")


def all_gather(world_size: int) -> Schedule:
    """Chunk c travels from rank c around to rank c-1, and everybody on its way keeps a copy.

    Cost: N-1 rounds; (N-1)/N·S sent per rank.
    Source: Patarasuk & Yuan 2009.
    """
    transfers = []
    for step in range(world_size - 1):
        for rank in range(world_size):
            chunk = (rank - step) % world_size
            transfers.append(Transfer(step, rank, chunk, (rank + 1) % world_size, chunk))
    return Schedule("all_gather", world_size, world_size, transfers, name="ring")


def all_reduce(world_size: int) -> Schedule:
    """Reduce-scatter around the ring, then all-gather around the ring.

    Cost: 2(N-1) rounds; 2(N-1)/N·S sent per rank, which is the least possible.
    Source: Patarasuk & Yuan 2009.
    """
    return compose(reduce_scatter(world_size), all_gather(world_size))


def broadcast(world_size: int, root: int = 0, num_chunks: int = 8) -> Schedule:
    """Chunks leave the root one after the other and run down the chain root, root+1, ..., root-1.

    Args:
        world_size: number of ranks, N.
        root: where the chain starts.
        num_chunks: how many chunks follow one another, K.

    Cost: N-2+K rounds (K = 8 unless asked otherwise); S sent per rank, nothing by the last one of the chain.
    Source: folklore; as "pipelined chain" in many MPI libraries.
    """
    transfers = []
    for virtual in range(world_size - 1):
        src, dst = (virtual + root) % world_size, (virtual + 1 + root) % world_size
        transfers += [Transfer(virtual + chunk, src, chunk, dst, chunk) for chunk in range(num_chunks)]
    return Schedule("broadcast", world_size, num_chunks, transfers, root=root, name="ring")


def reduce(world_size: int, root: int = 0, num_chunks: int = 8) -> Schedule:
    """Chunks run up the chain root-1, ..., root+1, root, and everybody on the way adds to them.

    Args:
        world_size: number of ranks, N.
        root: where the chain ends.
        num_chunks: how many chunks follow one another, K.

    Cost: N-2+K rounds (K = 8 unless asked otherwise); S sent per rank, nothing by the root.
    Source: folklore; the broadcast chain backwards.
    """
    transfers = []
    for virtual in range(world_size - 1, 0, -1):
        src, dst = (virtual + root) % world_size, (virtual - 1 + root) % world_size
        first_step = world_size - 1 - virtual
        transfers += [Transfer(first_step + chunk, src, chunk, dst, chunk, True) for chunk in range(num_chunks)]
    return Schedule("reduce", world_size, num_chunks, transfers, root=root, name="ring")
