"""Two binary trees at once: the rounds of a tree, at nearly the volume of a ring.

In one binary tree a leaf, and half of the ranks are leaves, has only one thing to send: its links lie idle
most of the time. So lay two trees over the same ranks, so that whoever is an inner node of one is a leaf of the other,
and let each tree carry half of the chunks. Then nobody is busy twice.

The root stands above both trees. The other ranks are virtual ranks 1..M with M = N-1, v = (rank - root) mod N, and the
trees are laid over them like this:

* First tree, M odd: a binary search tree over 1..M in which every inner node has two children. Read from left to
  right, leaves and inner nodes alternate: 1 is a leaf, 2 an inner node, 3 a leaf, ...
  M even: virtual rank 1 stands on top, with one child, and such a tree over 2..M hangs below it: now the odd
  ones are inner nodes, the even ones leaves.
* Second tree: the first with every virtual rank moved on by one, M to 1. A neighbour of an inner node is a leaf, so no
  inner node of the first tree is an inner node of the second.

Going down, a rank gets each half once, and passes on one half, twice. Going up, it receives one half twice,
and sends each half once.
"""

from __future__ import annotations

from farandole.algorithms.composition import compose
from farandole.schedule import Schedule, Transfer

__all__ = ["all_reduce", "broadcast", "parents", "reduce"]


def parents(world_size: int) -> tuple[dict[int, int], dict[int, int]]:
    """Both trees, as child -> parent in virtual ranks; virtual rank 0, the root, is above both.

    Args:
        world_size: number of ranks, N.

    Source: Sanders, Speck & Träff 2009; the second tree is made by their "shift".
    """
    num_others = world_size - 1
    first: dict[int, int] = {}
    if num_others % 2:
        _hang_below(first, 1, num_others, 0)
    elif num_others:
        first[1] = 0
        _hang_below(first, 2, num_others, 1)

    def moved_on(virtual: int) -> int:
        return virtual % num_others + 1 if virtual else 0

    return first, {moved_on(child): moved_on(parent) for child, parent in first.items()}


def _hang_below(tree: dict[int, int], low: int, high: int, parent: int) -> None:
    """Hang the search tree over low..high, an odd number of nodes, below ``parent``."""
    num_leaves = (high - low) // 2 + 1
    middle = low + 2 * ((num_leaves + 1) // 2) - 1 if num_leaves > 1 else low
    tree[middle] = parent
    if num_leaves > 1:
        _hang_below(tree, low, middle - 1, middle)
        _hang_below(tree, middle + 1, high, middle)


def _depth(tree: dict[int, int], virtual: int) -> int:
    return 0 if virtual == 0 else 1 + _depth(tree, tree[virtual])


def reduce(world_size: int, root: int = 0, num_chunks: int = 2) -> Schedule:
    """Even chunks are added up along the first tree, odd chunks along the second.

    Args:
        world_size: number of ranks, N.
        root: where the sum ends.
        num_chunks: K; each tree carries every other chunk, and its chunks follow one another, one round apart.

    Cost: h - 1 + ceil(K/2) rounds (K = 2 unless asked otherwise), where h = ceil(log2 N) for even N and 1 +
        ceil(log2(N-1)) for odd N > 1; S sent per rank, nothing by the root.
    Source: Sanders, Speck & Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan".
    """
    trees = parents(world_size)
    transfers = []
    for chunk in range(num_chunks):
        tree = trees[chunk % 2]
        height = max((_depth(tree, virtual) for virtual in tree), default=0)
        for child in sorted(tree):
            step = chunk // 2 + height - _depth(tree, child)
            src, dst = (child + root) % world_size, (tree[child] + root) % world_size
            transfers.append(Transfer(step, src, chunk, dst, chunk, True))
    return Schedule("reduce", world_size, num_chunks, transfers, root=root, name="double_tree")


def broadcast(world_size: int, root: int = 0, num_chunks: int = 2) -> Schedule:
    """Even chunks run down the first tree, odd chunks down the second.

    Args:
        world_size: number of ranks, N.
        root: where the data starts.
        num_chunks: K; each tree carries every other chunk, and its chunks follow one another, one round apart.

    Cost: h - 1 + ceil(K/2) rounds (K = 2 unless asked otherwise), where h = ceil(log2 N) for even N and 1 +
        ceil(log2(N-1)) for odd N > 1; at most S sent per rank.
    Source: Sanders, Speck & Träff 2009.
    """
    trees = parents(world_size)
    transfers = []
    for chunk in range(num_chunks):
        tree = trees[chunk % 2]
        for child in sorted(tree):
            step = chunk // 2 + _depth(tree, child) - 1
            src, dst = (tree[child] + root) % world_size, (child + root) % world_size
            transfers.append(Transfer(step, src, chunk, dst, chunk))
    return Schedule("broadcast", world_size, num_chunks, transfers, root=root, name="double_tree")


def all_reduce(world_size: int, num_chunks: int = 2) -> Schedule:
    """Reduce up both trees to rank 0, then broadcast down both.

    Args:
        world_size: number of ranks, N.
        num_chunks: K; each tree carries every other chunk.

    Cost: 2(h - 1 + ceil(K/2)) rounds (K = 2 unless asked otherwise), where h = ceil(log2 N) for even N and
        1 + ceil(log2(N-1)) for odd N > 1; at most 2·S sent per rank.
    Source: Sanders, Speck & Träff 2009; Jeaugey 2019 on the same idea in NCCL.
    """
    return compose(reduce(world_size, 0, num_chunks), broadcast(world_size, 0, num_chunks))
