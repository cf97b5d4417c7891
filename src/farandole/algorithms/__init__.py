"""Every algorithm, by collective and name.

An algorithm is a pure function from a world size (and a root, where the collective has one) to a `Schedule`. There is
one file per family; this table is the only list of them. All work for any world size from 1 on. Those in `HIERARCHICAL`
take a `Topology` in place of the world size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from farandole.algorithms import (
    barrier,
    bruck,
    circulant,
    direct,
    double_tree,
    halving_doubling,
    hierarchical,
    naive,
    ring,
    tree,
)
from farandole.algorithms.composition import IDENTITIES, compose
from farandole.errors import MalformedScheduleError
from farandole.schedule import Schedule
from farandole.topology import Topology

__all__ = [
    "ALGORITHMS",
    "COMPLETES_ON_SEVERAL",
    "HIERARCHICAL",
    "IDENTITIES",
    "ROOTED",
    "ROUND_ONCE",
    "build",
    "closed_form",
    "compose",
    "names",
]

Builder = Callable[..., Schedule]

ALGORITHMS: dict[str, dict[str, Builder]] = {
    "all_reduce": {
        "naive": naive.all_reduce,
        "ring": ring.all_reduce,
        "tree": tree.all_reduce,
        "double_tree": double_tree.all_reduce,
        "halving_doubling": halving_doubling.all_reduce,
        "recursive_doubling": halving_doubling.all_reduce_whole,
        "circulant": circulant.all_reduce,
        "direct": direct.all_reduce,
        "one_shot": direct.one_shot,
        "hierarchical": hierarchical.all_reduce,
        "hierarchical_circulant": hierarchical.all_reduce_circulant,
        "hierarchical_direct": hierarchical.all_reduce_direct,
        "hierarchical_doubling": hierarchical.all_reduce_doubling,
        "hierarchical_one_shot": hierarchical.all_reduce_one_shot,
    },
    "reduce_scatter": {
        "naive": naive.reduce_scatter,
        "ring": ring.reduce_scatter,
        "halving_doubling": halving_doubling.reduce_scatter,
        "circulant": circulant.reduce_scatter,
        "direct": direct.reduce_scatter,
        "hierarchical": hierarchical.reduce_scatter,
        "hierarchical_circulant": hierarchical.reduce_scatter_circulant,
        "hierarchical_direct": hierarchical.reduce_scatter_direct,
    },
    "all_gather": {
        "naive": naive.all_gather,
        "ring": ring.all_gather,
        "halving_doubling": halving_doubling.all_gather,
        "circulant": circulant.all_gather,
        "bruck": bruck.all_gather,
        "direct": direct.all_gather,
        "hierarchical": hierarchical.all_gather,
        "hierarchical_circulant": hierarchical.all_gather_circulant,
        "hierarchical_direct": hierarchical.all_gather_direct,
    },
    "broadcast": {
        "naive": naive.broadcast,
        "ring": ring.broadcast,
        "tree": tree.broadcast,
        "double_tree": double_tree.broadcast,
        "direct": direct.broadcast,
        "hierarchical": hierarchical.broadcast,
        "hierarchical_tree": hierarchical.broadcast_tree,
        "hierarchical_direct": hierarchical.broadcast_direct,
    },
    "reduce": {
        "naive": naive.reduce,
        "ring": ring.reduce,
        "tree": tree.reduce,
        "double_tree": double_tree.reduce,
        "direct": direct.reduce,
        "hierarchical": hierarchical.reduce,
        "hierarchical_tree": hierarchical.reduce_tree,
        "hierarchical_direct": hierarchical.reduce_direct,
    },
    "gather": {"naive": naive.gather, "tree": tree.gather, "direct": direct.gather},
    "scatter": {"naive": naive.scatter, "tree": tree.scatter, "direct": direct.scatter},
    "all_to_all": {
        "naive": naive.all_to_all,
        "bruck": bruck.all_to_all,
        "pairwise": direct.pairwise,
        "direct": direct.all_to_all,
    },
    "barrier": {"naive": naive.barrier, "dissemination": barrier.dissemination},
}
"""collective -> name -> the function that builds the schedule."""

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
"""The collectives whose builders take a root."""

HIERARCHICAL = frozenset(
    {
        "hierarchical",
        "hierarchical_circulant",
        "hierarchical_direct",
        "hierarchical_one_shot",
        "hierarchical_doubling",
        "hierarchical_tree",
    }
)
"""The algorithms whose builders take a topology in place of a world size."""

ROUND_ONCE = frozenset({"direct", "one_shot"})
"""The algorithms that fold all contributions to an element at once, whatever the number of ranks: sums of 16-bit floats
are rounded once, and no partial sum overflows."""

COMPLETES_ON_SEVERAL = frozenset({"recursive_doubling", "one_shot", "hierarchical_doubling", "hierarchical_one_shot"})
"""The all-reduces in which several ranks complete one and the same sum, each for itself: what is rounded on its way to
some of them would not be the same on all."""


def build(collective: str, name: str, world_size: int, root: int = 0, topology: Topology | None = None) -> Schedule:
    """The schedule of algorithm ``name`` for ``collective``.

    Args:
        collective: a key of `ALGORITHMS`.
        name: one of ``names(collective)``.
        world_size: number of ranks, N >= 1.
        root: for broadcast, reduce, gather and scatter; 0 for all others.
        topology: for those in `HIERARCHICAL`, which ranks share a host; None if all do.

    Raises:
        MalformedScheduleError: no such collective or algorithm, or it does not exist for this world size, root or
            topology.
    """
    builder = _find(collective, name)
    if world_size < 1:
        raise MalformedScheduleError(f"world_size is {world_size}; it must be >= 1")
    if topology is not None and topology.world_size != world_size:
        raise MalformedScheduleError(
            f"the topology {topology} has {topology.world_size} ranks, but world_size is {world_size}"
        )
    if not 0 <= root < world_size:
        raise MalformedScheduleError(f"root is {root}, but the ranks are 0..{world_size - 1}")
    if root and collective not in ROOTED:
        raise MalformedScheduleError(f"root is {root}, but {collective} has no root")
    ranks = (topology or Topology.one_host(world_size)) if name in HIERARCHICAL else world_size
    return builder(ranks, root) if collective in ROOTED else builder(ranks)


def names(collective: str) -> tuple[str, ...]:
    """The algorithms for ``collective``, by name.

    Raises:
        MalformedScheduleError: there is no such collective.
    """
    if collective not in ALGORITHMS:
        raise MalformedScheduleError(f"collective is {collective!r}; known are {', '.join(ALGORITHMS)}")
    return tuple(ALGORITHMS[collective])


def closed_form(collective: str, name: str) -> str:
    """What the algorithm costs, as a formula in N and S: the Cost paragraph of its docstring.

    Raises:
        MalformedScheduleError: no such collective or algorithm.
    """
    paragraphs = (inspect.getdoc(_find(collective, name)) or "").partition("Cost:")[2]
    return " ".join(paragraphs.partition("Source:")[0].split())


def _find(collective: str, name: str) -> Builder:
    known = names(collective)
    if name not in known:
        raise MalformedScheduleError(f"there is no {collective} named {name!r}; known are {', '.join(known)}")
    return ALGORITHMS[collective][name]
