"""Direct: everything goes straight from where it is to where it is wanted, in one step.

No rank forwards anything, so these have the fewest rounds and, for all but the one-shot all-reduce, the least volume.
The price is that a rank talks to all others at once: N-1 messages. Within a host, where peers read one another's
memory, that is often the fastest there is.

Where sums are made, a rank sees all contributions at once and adds them in the order of ranks, its own in its place (a
local transfer says where). So the result has the same bits on whatever rank it is computed.

`one_shot` is the all-reduce in one step: every rank gets everybody's whole buffer and adds up all of it.
`pairwise` is the all-to-all that talks to one partner at a time. In round k, ranks r and p are partners if r + p = k
modulo N. So each is the other's partner, and the two swap blocks in place. Some ranks are their own partner in a
round, and rest.
"""

from __future__ import annotations

from farandole.algorithms.composition import compose
from farandole.schedule import Schedule, Transfer

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "one_shot",
    "pairwise",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def reduce_scatter(world_size: int) -> Schedule:
    """Everybody sends each rank its chunk; that rank adds them up in the order of ranks.

    Cost: 1 round; (N-1)/N·S sent per rank, in N-1 messages.
    Source: folklore.
    """
    transfers = [transfer for owner in range(world_size) for transfer in _all_into(world_size, owner, slot=owner)]
    return Schedule("reduce_scatter", world_size, world_size, transfers, name="direct")


def all_gather(world_size: int) -> Schedule:
    """Everybody sends its chunk to everybody.

    Cost: 1 round; (N-1)/N·S sent per rank, in N-1 messages.
    Source: folklore.
    """
    ranks = range(world_size)
    transfers = [Transfer(0, src, src, dst, src) for dst in ranks for src in ranks if src != dst]
    return Schedule("all_gather", world_size, world_size, transfers, name="direct")


def all_reduce(world_size: int) -> Schedule:
    """Direct reduce-scatter, then direct all-gather ("two-shot").

    Cost: 2 rounds; 2(N-1)/N·S sent per rank, in 2(N-1) messages.
    Source: folklore.
    """
    return compose(reduce_scatter(world_size), all_gather(world_size))


def one_shot(world_size: int) -> Schedule:
    """Everybody sends everything to everybody, and everybody adds it up in the order of ranks.

    Cost: 1 round; (N-1)·S sent per rank, in N-1 messages.
    Source: folklore.
    """
    transfers = [transfer for dst in range(world_size) for transfer in _all_into(world_size, dst, slot=0)]
    return Schedule("all_reduce", world_size, 1, transfers, name="one_shot")


def broadcast(world_size: int, root: int = 0) -> Schedule:
    """The root sends its buffer to everybody.

    Cost: 1 round; (N-1)·S sent by the root, in N-1 messages.
    Source: folklore.
    """
    transfers = [Transfer(0, root, 0, rank, 0) for rank in range(world_size) if rank != root]
    return Schedule("broadcast", world_size, 1, transfers, root=root, name="direct")


def reduce(world_size: int, root: int = 0) -> Schedule:
    """Everybody sends its buffer to the root, which adds them up in the order of ranks.

    Cost: 1 round; S sent per rank other than the root, which receives (N-1)·S in N-1 messages.
    Source: folklore.
    """
    return Schedule("reduce", world_size, 1, _all_into(world_size, root, slot=0), root=root, name="direct")


def gather(world_size: int, root: int = 0) -> Schedule:
    """Everybody sends its part to the root.

    Cost: 1 round; S/N sent per rank other than the root, which receives (N-1)/N·S in N-1 messages.
    Source: folklore.
    """
    transfers = [Transfer(0, rank, rank, root, rank) for rank in range(world_size) if rank != root]
    return Schedule("gather", world_size, world_size, transfers, root=root, name="direct")


def scatter(world_size: int, root: int = 0) -> Schedule:
    """The root sends everybody its part.

    Cost: 1 round; (N-1)/N·S sent by the root, in N-1 messages.
    Source: folklore.
    """
    transfers = [Transfer(0, root, rank, rank, rank) for rank in range(world_size) if rank != root]
    return Schedule("scatter", world_size, world_size, transfers, root=root, name="direct")


def all_to_all(world_size: int) -> Schedule:
    """Everybody sends everybody its block, all at once.

    Cost: 1 round; (N-1)/N·S sent per rank, in N-1 messages.
    Source: folklore.
    """
    ranks = range(world_size)
    transfers = [Transfer(0, src, dst, dst, src) for dst in ranks for src in ranks if src != dst]
    return Schedule("all_to_all", world_size, world_size, transfers, name="direct")


def pairwise(world_size: int) -> Schedule:
    """In round k, ranks r and k-r modulo N swap their blocks for one another.

    Cost: N rounds (one for N = 2, none for N = 1); (N-1)/N·S sent per rank.
    Source: folklore; cf. the pairwise exchange in Thakur, Rabenseifner & Gropp 2005.
    """
    transfers = []
    # Round 0 of two ranks pairs nobody, and would leave an empty step.
    for step, turn in enumerate(range(world_size) if world_size > 2 else range(1, world_size)):
        for rank in range(world_size):
            partner = (turn - rank) % world_size
            if partner != rank:
                transfers.append(Transfer(step, rank, partner, partner, rank))
    return Schedule("all_to_all", world_size, world_size, transfers, name="pairwise")


def _all_into(world_size: int, dst: int, slot: int) -> list[Transfer]:
    """All contributions to one slot of ``dst``, in the order of ranks; rank 0's own is there already."""
    return [Transfer(0, src, slot, dst, slot, src > 0) for src in range(world_size) if (src, dst) != (0, 0)]
