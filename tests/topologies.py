"""Ranks on several hosts: few and many, as many on each or not, in any order."""

from __future__ import annotations

import random

from farandole import algorithms
from farandole.algorithms import HIERARCHICAL
from farandole.schedule import Schedule
from farandole.topology import Topology

NAMED = tuple(map(Topology.parse, ("1x4", "2x1", "5x1", "2x2", "3+1", "1+3", "0,1,0,1", "0,1,1,0,1", "4x3", "2+5+1")))


def random_topology(choice: random.Random, most_ranks: int = 13) -> Topology:
    """With one to five hosts, each of at least one rank."""
    num_ranks = choice.randrange(1, most_ranks + 1)
    num_hosts = choice.randrange(1, min(5, num_ranks) + 1)
    hosts = [*range(num_hosts), *(choice.randrange(num_hosts) for _ in range(num_ranks - num_hosts))]
    choice.shuffle(hosts)
    return Topology.of_hosts(hosts)


def random_topologies(seed: int, number: int) -> list[Topology]:
    choice = random.Random(seed)
    return [random_topology(choice) for _ in range(number)]


def scattered(world_size: int) -> Topology:
    """As many ranks, dealt unevenly and in no simple order to at most half as many hosts, and two if there are two."""
    num_hosts = (world_size + 2) // 2
    return Topology.of_hosts(rank * (rank + 1) // 2 % num_hosts for rank in range(world_size))


def build(collective: str, name: str, world_size: int, root: int = 0) -> Schedule:
    """As `farandole.algorithms.build`; those that know hosts are given several."""
    topology = scattered(world_size) if name in HIERARCHICAL else None
    return algorithms.build(collective, name, world_size, root, topology)
