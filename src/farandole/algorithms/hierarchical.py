"""Hierarchical: inside each host over the memory that its ranks share, between hosts as little as possible.

A wire between hosts is far slower than memory, and all ranks of a host share it. So what crosses it is added up on its
host before, or spread there afterwards. Both are left to flat algorithms, which are *placed* on some of the ranks:
inside a host `direct` or `tree`, and between hosts one whose "ranks" are the hosts.

Which rank speaks for a host? One alone, its *leader*, for the shortest vectors and where there is a root. Else all do:
*rail* k joins the k-th rank of every host, and each rail runs the flat algorithm on data of its own, all at once. There
are K rails, as many as the largest host has ranks. On a host of R < K ranks, rail k passes through local rank k modulo
R.

All-reduce. The buffer is cut into K shards. Every host adds up shard k on its rank of rail k; rail k makes the
all-reduce of that shard between hosts; then the ranks of a host hand one another their shards. Whatever the order of
ranks, a host sends and receives 2(H-1)/H·S, as if it were a single rank: no algorithm sends less.

Reduce-scatter and all-gather. The part of the k-th rank of a host is a matter of rail k alone.

Broadcast and reduce. The leaders do it between hosts; on the root's host the leader is the root.

Sums are folded on each host, then between hosts, each time in the order of the flat algorithm, so all ranks hold the
same bits. With one rank per host these are the flat algorithms.

The name says what runs between hosts; `hierarchical` alone is for long vectors: the ring, or pipelined double trees.
Costs are for H hosts of R > 1 ranks each, and what is sent is what leaves a host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from farandole.algorithms import circulant, direct, double_tree, halving_doubling, ring, tree
from farandole.schedule import Schedule, Transfer
from farandole.topology import Topology

__all__ = [
    "all_gather",
    "all_gather_circulant",
    "all_gather_direct",
    "all_reduce",
    "all_reduce_circulant",
    "all_reduce_direct",
    "all_reduce_one_shot",
    "all_reduce_doubling",
    "broadcast",
    "broadcast_direct",
    "broadcast_tree",
    "reduce",
    "reduce_direct",
    "reduce_scatter",
    "reduce_scatter_circulant",
    "reduce_scatter_direct",
    "reduce_tree",
]

Flat = Callable[[int], Schedule]
"""From the number of hosts to what they do with one another."""

RootedFlat = Callable[[int, int], Schedule]
"""The same, with a root."""

Slots = Sequence[Sequence[int]]
"""Per chunk of a flat schedule, the slots that it stands for."""

_NUM_PIPELINED = 8
_BROADCAST_IN_PARTS: RootedFlat = partial(double_tree.broadcast, num_chunks=_NUM_PIPELINED)
_REDUCE_IN_PARTS: RootedFlat = partial(double_tree.reduce, num_chunks=_NUM_PIPELINED)


# -- all-reduce --------------------------------------------------------------------------------------------------------


def all_reduce(topology: Topology, between: Flat = ring.all_reduce, num_rails: int | None = None) -> Schedule:
    """Reduce-scatter on every host, all-reduce of each shard between hosts, all-gather on every host.

    Args:
        topology: which ranks share a host.
        between: the all-reduce of the hosts; a ring unless asked otherwise.
        num_rails: K, if the leaders (1), or some rails only, shall speak for their hosts.

    Cost: 2H rounds, two of them inside hosts; 2(H-1)/H·S sent per host, which is the least possible.
    Source: Mikami et al. 2018, "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash" (2D-torus
        all-reduce); with leaders, Jia et al. 2018, "Highly Scalable Deep Learning Training System with
        Mixed-Precision".
    """
    flat = between(topology.num_hosts)
    rails = _rails(topology)[:num_rails]
    shards = [[[k * flat.num_chunks + chunk] for chunk in range(flat.num_chunks)] for k in range(len(rails))]
    transfers = _inside(topology, direct.reduce, shards, 0)
    transfers += _across(rails, flat, shards, _next_step(transfers))
    transfers += _inside(topology, direct.broadcast, shards, _next_step(transfers))
    num_chunks = len(rails) * flat.num_chunks
    return Schedule("all_reduce", topology.world_size, num_chunks, transfers, name=_name(flat, "ring"))


def all_reduce_circulant(topology: Topology) -> Schedule:
    """As `all_reduce`, with `circulant` between hosts: for many of them.

    Cost: 2·ceil(log2 H) + 2 rounds; 2(H-1)/H·S sent per host.
    Source: Träff 2024 between hosts; else as `all_reduce`.
    """
    return all_reduce(topology, circulant.all_reduce)


def all_reduce_direct(topology: Topology) -> Schedule:
    """As `all_reduce`, with `direct` between hosts.

    Cost: 4 rounds; 2(H-1)/H·S sent per host, by each rank in 2(H-1) messages.
    Source: as `all_reduce`.
    """
    return all_reduce(topology, direct.all_reduce)


def all_reduce_doubling(topology: Topology) -> Schedule:
    """As `all_reduce`, but the hosts exchange whole shards, with partners 1, 2, 4, ... hosts away: for short vectors.

    Cost: log2 H + 2 rounds if H is a power of two P, else floor(log2 H) + 4; log2 H·S sent per host, else at most
        (floor(log2 H) + 1)·S.
    Source: Thakur, Rabenseifner & Gropp 2005 between hosts; else as `all_reduce`.
    """
    return all_reduce(topology, halving_doubling.all_reduce_whole)


def all_reduce_one_shot(topology: Topology) -> Schedule:
    """Every host adds up on its leader; all leaders exchange all that they have; each hands the sum to its host.

    For the shortest vectors: only leaders send messages between hosts.

    Cost: 3 rounds; (H-1)·S sent per host, in H-1 messages.
    Source: Jia et al. 2018, with one step in place of a ring between the leaders.
    """
    return all_reduce(topology, direct.one_shot, num_rails=1)


# -- reduce-scatter and all-gather -------------------------------------------------------------------------------------


def reduce_scatter(topology: Topology, between: Flat = ring.reduce_scatter) -> Schedule:
    """On every host all parts of rail k are added up on its rank of that rail; then each rail makes its reduce-scatter.

    Args:
        topology: which ranks share a host.
        between: the reduce-scatter of the hosts; a ring unless asked otherwise.

    Cost: H rounds, one of them inside hosts; (H-1)/H·S sent per host: all but its own parts.
    Source: as `all_reduce`, whose first half it is.
    """
    flat, parts = between(topology.num_hosts), _parts(topology)
    transfers = _inside(topology, direct.reduce, parts, 0)
    transfers += _across(_rails(topology), flat, parts, _next_step(transfers))
    return Schedule("reduce_scatter", topology.world_size, topology.world_size, transfers, name=_name(flat, "ring"))


def reduce_scatter_circulant(topology: Topology) -> Schedule:
    """As `reduce_scatter`, with `circulant` between hosts: for many of them.

    Cost: ceil(log2 H) + 1 rounds; (H-1)/H·S sent per host.
    Source: Träff 2024 between hosts.
    """
    return reduce_scatter(topology, circulant.reduce_scatter)


def reduce_scatter_direct(topology: Topology) -> Schedule:
    """As `reduce_scatter`, with `direct` between hosts.

    Cost: 2 rounds; (H-1)/H·S sent per host, by each rank in H-1 messages.
    Source: as `reduce_scatter`.
    """
    return reduce_scatter(topology, direct.reduce_scatter)


def all_gather(topology: Topology, between: Flat = ring.all_gather) -> Schedule:
    """Each rail makes its all-gather; then on every host each rank hands the others all that has come on its rail.

    So each part crosses to each other host once.

    Args:
        topology: which ranks share a host.
        between: the all-gather of the hosts; a ring unless asked otherwise.

    Cost: H rounds, one of them inside hosts; (H-1)/H·S sent per host.
    Source: as `all_reduce`, whose second half it is.
    """
    flat, parts = between(topology.num_hosts), _parts(topology)
    transfers = _across(_rails(topology), flat, parts, 0)
    transfers += _inside(topology, direct.broadcast, parts, _next_step(transfers))
    return Schedule("all_gather", topology.world_size, topology.world_size, transfers, name=_name(flat, "ring"))


def all_gather_circulant(topology: Topology) -> Schedule:
    """As `all_gather`, with `circulant` between hosts: for many of them.

    Cost: ceil(log2 H) + 1 rounds; (H-1)/H·S sent per host.
    Source: Träff 2024 between hosts.
    """
    return all_gather(topology, circulant.all_gather)


def all_gather_direct(topology: Topology) -> Schedule:
    """As `all_gather`, with `direct` between hosts.

    Cost: 2 rounds; (H-1)/H·S sent per host, by each rank in H-1 messages.
    Source: as `all_gather`.
    """
    return all_gather(topology, direct.all_gather)


# -- broadcast and reduce ----------------------------------------------------------------------------------------------


def broadcast(topology: Topology, root: int = 0, between: RootedFlat = _BROADCAST_IN_PARTS) -> Schedule:
    """The root hands its buffer to the leaders of the other hosts, and each of them down a tree of its host.

    Args:
        topology: which ranks share a host.
        root: where the buffer is.
        between: the broadcast of the hosts; double trees with 8 chunks unless asked otherwise.

    Cost: h + 3 + ceil(log2 R) rounds, where h is the height of the double tree of the hosts; at most S sent per host.
    Source: Kielmann et al. 1999, "MagPIe: MPI's collective communication operations for clustered wide area systems".
    """
    flat = between(topology.num_hosts, topology.host_of[root])
    leaders = _leaders(topology, root)
    transfers = _placed(flat, leaders, _in_order(flat), 0)
    transfers += _around_leaders(topology, leaders, tree.broadcast, flat.num_chunks, _next_step(transfers))
    name = _name(flat, "double_tree")
    return Schedule("broadcast", topology.world_size, flat.num_chunks, transfers, root=root, name=name)


def broadcast_tree(topology: Topology, root: int = 0) -> Schedule:
    """As `broadcast`, with a binomial tree between hosts: for short vectors.

    Cost: ceil(log2 H) + ceil(log2 R) rounds; ceil(log2 H)·S sent by the root's host.
    Source: as `broadcast`.
    """
    return broadcast(topology, root, tree.broadcast)


def broadcast_direct(topology: Topology, root: int = 0) -> Schedule:
    """As `broadcast`; the root sends to all leaders at once: for the shortest vectors.

    Cost: 1 + ceil(log2 R) rounds; (H-1)·S sent by the root's host.
    Source: as `broadcast`.
    """
    return broadcast(topology, root, direct.broadcast)


def reduce(topology: Topology, root: int = 0, between: RootedFlat = _REDUCE_IN_PARTS) -> Schedule:
    """Every host adds up its buffers up a tree to its leader; the leaders reduce to the root.

    Args:
        topology: which ranks share a host.
        root: where the sum goes.
        between: the reduce of the hosts; double trees with 8 chunks unless asked otherwise.

    Cost: h + 3 + ceil(log2 R) rounds, where h is the height of the double tree of the hosts; S sent per host, nothing
        by the root's.
    Source: Kielmann et al. 1999.
    """
    flat = between(topology.num_hosts, topology.host_of[root])
    leaders = _leaders(topology, root)
    transfers = _around_leaders(topology, leaders, tree.reduce, flat.num_chunks, 0)
    transfers += _placed(flat, leaders, _in_order(flat), _next_step(transfers))
    name = _name(flat, "double_tree")
    return Schedule("reduce", topology.world_size, flat.num_chunks, transfers, root=root, name=name)


def reduce_tree(topology: Topology, root: int = 0) -> Schedule:
    """As `reduce`, with a binomial tree between hosts: for short vectors.

    Cost: ceil(log2 H) + ceil(log2 R) rounds; S sent per host, nothing by the root's, which receives ceil(log2 H)·S.
    Source: as `reduce`.
    """
    return reduce(topology, root, tree.reduce)


def reduce_direct(topology: Topology, root: int = 0) -> Schedule:
    """As `reduce`; all leaders send to the root at once: for the shortest vectors.

    Cost: 1 + ceil(log2 R) rounds; S sent per host, nothing by the root's, which receives (H-1)·S.
    Source: as `reduce`.
    """
    return reduce(topology, root, direct.reduce)


# -- placing flat schedules --------------------------------------------------------------------------------------------


def _rails(topology: Topology) -> list[list[int]]:
    """Per rail, its rank on each host."""
    hosts = [topology.ranks_on(host) for host in range(topology.num_hosts)]
    return [[ranks[k % len(ranks)] for ranks in hosts] for k in range(topology.most_ranks_on_a_host)]


def _leaders(topology: Topology, root: int) -> list[int]:
    """Per host, the rank that speaks for it: the root on its own host, elsewhere the first."""
    firsts = [topology.ranks_on(host)[0] for host in range(topology.num_hosts)]
    firsts[topology.host_of[root]] = root
    return firsts


def _parts(topology: Topology) -> list[Slots]:
    """Per rail and host, the part that the host's rank on it owns; none where the host has too few ranks."""
    hosts = [topology.ranks_on(host) for host in range(topology.num_hosts)]
    return [[ranks[k : k + 1] for ranks in hosts] for k in range(topology.most_ranks_on_a_host)]


def _across(rails: Sequence[Sequence[int]], flat: Schedule, slots: Sequence[Slots], step: int) -> list[Transfer]:
    """``flat`` between hosts, on every rail with slots of its own."""
    return [transfer for k, rail in enumerate(rails) for transfer in _placed(flat, rail, slots[k], step)]


def _inside(topology: Topology, flat: RootedFlat, slots: Sequence[Slots], step: int) -> list[Transfer]:
    """On every host, ``flat`` to or from the rank of each rail, with the slots of that rail."""
    transfers = []
    for host in range(topology.num_hosts):
        ranks = topology.ranks_on(host)
        for k, of_rail in enumerate(slots):
            everything = [slot for of_chunk in of_rail for slot in of_chunk]
            transfers += _placed(flat(len(ranks), k % len(ranks)), ranks, [everything], step)
    return transfers


def _around_leaders(
    topology: Topology, leaders: Sequence[int], flat: RootedFlat, num_chunks: int, step: int
) -> list[Transfer]:
    """On every host, ``flat`` to or from its leader, with the whole buffer."""
    transfers = []
    for host, leader in enumerate(leaders):
        ranks = topology.ranks_on(host)
        transfers += _placed(flat(len(ranks), ranks.index(leader)), ranks, [range(num_chunks)], step)
    return transfers


def _placed(flat: Schedule, ranks: Sequence[int], slots: Slots, step: int) -> list[Transfer]:
    """``flat`` from ``step`` on: its rank i is ``ranks[i]``, its chunk c stands for ``slots[c]``."""
    return [
        Transfer(step + transfer.step, ranks[transfer.src], slot, ranks[transfer.dst], slot, transfer.reduce)
        for transfer in flat
        for slot in slots[transfer.src_slot]
    ]


def _in_order(flat: Schedule) -> Slots:
    return [[chunk] for chunk in range(flat.num_chunks)]


def _name(flat: Schedule, usual: str) -> str:
    return "hierarchical" if flat.name == usual else f"hierarchical_{flat.name.removeprefix('recursive_')}"


def _next_step(transfers: Sequence[Transfer]) -> int:
    return 1 + max((transfer.step for transfer in transfers), default=-1)
