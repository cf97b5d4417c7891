"""Which ranks share a host: told in several ways, and read from the command line."""

from __future__ import annotations

import pytest
from topologies import random_topologies

from farandole.errors import ArgumentError
from farandole.topology import Topology


def test_hosts_are_numbered_in_the_order_of_their_first_ranks() -> None:
    topology = Topology.of_hosts(["b", "a", "b", "c", "a"])
    assert topology == Topology((0, 1, 0, 2, 1))
    assert (topology.world_size, topology.num_hosts, topology.most_ranks_on_a_host) == (5, 3, 2)
    assert [topology.ranks_on(host) for host in range(3)] == [(0, 2), (1, 4), (3,)]


def test_one_host_holds_all_ranks() -> None:
    topology = Topology.one_host(3)
    assert topology.is_one_host
    assert topology.ranks_on(0) == (0, 1, 2)
    assert not Topology.of_hosts([0, 1]).is_one_host


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("2x4", (0, 0, 0, 0, 1, 1, 1, 1)),
        ("1x1", (0,)),
        ("3x1", (0, 1, 2)),
        ("3+1", (0, 0, 0, 1)),
        ("1+2+1", (0, 1, 1, 2)),
        ("4", (0, 0, 0, 0)),
        ("0,1,0,1", (0, 1, 0, 1)),
        ("7,7,3", (0, 0, 1)),
    ],
)
def test_the_command_line_says_it_in_three_ways(text: str, hosts: tuple[int, ...]) -> None:
    assert Topology.parse(text) == Topology(hosts)


@pytest.mark.parametrize(
    "text", ["", "x", "2x", "0x4", "2x0", "3+", "3+0", "+", "a,b", "0,", "2x4x2", "-1", "2 x 4", "1.5", "²x2"]
)
def test_what_is_no_topology_is_named(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"hosts is '.*'; give '2x4' \(2 hosts of 4 ranks\), '3\+1'"):
        Topology.parse(text)


@pytest.mark.parametrize("text", ["9999999x9999999", "9999999+1", "2x999999"])
def test_more_ranks_than_memory_holds_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=f"hosts is '{text.replace('+', '.')}', .* at most"):
        Topology.parse(text)


@pytest.mark.parametrize("hosts", [(1, 0), (0, 2), (0, 1, 3)])
def test_hosts_in_another_order_are_refused(hosts: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"host_of is .*; hosts are numbered .* Topology.of_hosts"):
        Topology(hosts)


def test_no_rank_is_no_topology() -> None:
    with pytest.raises(ArgumentError, match=r"host_of is \(\)"):
        Topology(())


def test_the_text_of_a_topology_is_read_again() -> None:
    for text in ("2x4", "3+1", "0,1,0,1", "3x1"):
        assert str(Topology.parse(text)) == text
    for topology in random_topologies(seed=1, number=50):
        assert Topology.parse(str(topology)) == topology
