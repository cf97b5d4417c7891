"""The binomial tree: few rounds, for short messages.

Number the ranks from the root on: virtual rank v = (rank - root) mod N. The parent of v > 0 is v without its lowest
set bit: the distance to it, `reach`, is that bit. So v speaks for the run of virtual ranks v .. v + reach - 1, its
subtree. N ranks make a tree of ceil(log2 N) levels.

Towards the root (reduce, gather), round k is for those with reach 2^k: they have heard from all their subtree by then,
and send what they hold to their parent. Away from the root (broadcast, scatter) the same rounds run backwards.

A reduce thus adds up runs of neighbouring ranks, and a gather moves runs of neighbouring parts.
"""

from __future__ import annotations

from farandole.algorithms.composition import compose
from farandole.schedule import Schedule, Transfer

__all__ = ["all_reduce", "broadcast", "gather", "reduce", "scatter"]


def _edges_by_round(world_size: int) -> list[list[tuple[int, int, int]]]:
    """Per round towards the root, the edges (child, parent, reach) in virtual ranks."""
    rounds = []
    reach = 1
    while reach < world_size:
        rounds.append([(child, child - reach, reach) for child in range(reach, world_size, 2 * reach)])
        reach *= 2
    return rounds


def reduce(world_size: int, root: int = 0) -> Schedule:
    """Everybody adds up its subtree and passes the sum to its parent.

    Cost: ceil(log2 N) rounds; S sent per rank, nothing by the root, which receives ceil(log2 N)·S.
    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    transfers = []
    for step, edges in enumerate(_edges_by_round(world_size)):
        for child, parent, _ in edges:
            transfers.append(Transfer(step, (child + root) % world_size, 0, (parent + root) % world_size, 0, True))
    return Schedule("reduce", world_size, 1, transfers, root=root, name="tree")


def broadcast(world_size: int, root: int = 0) -> Schedule:
    """Everybody who has the buffer passes it on to one child per round, the largest subtree first.

    Cost: ceil(log2 N) rounds; ceil(log2 N)·S sent by the root, less by the others.
    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    transfers = []
    for step, edges in enumerate(reversed(_edges_by_round(world_size))):
        for child, parent, _ in edges:
            transfers.append(Transfer(step, (parent + root) % world_size, 0, (child + root) % world_size, 0))
    return Schedule("broadcast", world_size, 1, transfers, root=root, name="tree")


def all_reduce(world_size: int) -> Schedule:
    """Reduce up the tree to rank 0, then broadcast down the same tree.

    Cost: 2·ceil(log2 N) rounds; at most ceil(log2 N)·S sent per rank.
    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    return compose(reduce(world_size), broadcast(world_size))


def gather(world_size: int, root: int = 0) -> Schedule:
    """Everybody passes the parts of its whole subtree to its parent.

    Cost: ceil(log2 N) rounds; at most S/2 sent per rank, nothing by the root, which receives (N-1)/N·S.
    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    transfers = []
    for step, edges in enumerate(_edges_by_round(world_size)):
        for child, parent, reach in edges:
            for part in _parts_of_subtree(world_size, root, child, reach):
                transfers.append(Transfer(step, (child + root) % world_size, part, (parent + root) % world_size, part))
    return Schedule("gather", world_size, world_size, transfers, root=root, name="tree")


def scatter(world_size: int, root: int = 0) -> Schedule:
    """Everybody passes each child the parts of that child's whole subtree.

    Cost: ceil(log2 N) rounds; (N-1)/N·S sent by the root, at most S/2 by the others.
    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    transfers = []
    for step, edges in enumerate(reversed(_edges_by_round(world_size))):
        for child, parent, reach in edges:
            for part in _parts_of_subtree(world_size, root, child, reach):
                transfers.append(Transfer(step, (parent + root) % world_size, part, (child + root) % world_size, part))
    return Schedule("scatter", world_size, world_size, transfers, root=root, name="tree")


def _parts_of_subtree(world_size: int, root: int, child: int, reach: int) -> list[int]:
    return [(virtual + root) % world_size for virtual in range(child, min(child + reach, world_size))]
