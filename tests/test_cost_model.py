"""The cost model: exact sizes, bytes that equal the closed forms, and seconds that can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from topologies import NAMED, build, random_topologies

from farandole import algorithms
from farandole.algorithms import ALGORITHMS, ROOTED, names, ring
from farandole.collectives import COLLECTIVES
from farandole.cost_model import CONTENTION, Bound, Cost, Link, chunk_bytes, lower_bound, price
from farandole.errors import ArgumentError, MalformedScheduleError
from farandole.schedule import Schedule
from farandole.topology import Topology

PAIRS = [(collective, name) for collective in ALGORITHMS for name in names(collective)]
MACHINE = Link(latency_s=3.0, bandwidth_bytes_per_s=2.0, reduce_bytes_per_s=4.0)
MEMORY = replace(MACHINE, step_s=100.0, cores=2)
WIRE = Link(latency_s=64.0, bandwidth_bytes_per_s=0.5, reduce_bytes_per_s=8.0, step_s=1000.0)


# --- Sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 6, 7, 8, 1000, 2**40 + 5])
@pytest.mark.parametrize("num_chunks", [1, 2, 7, 128])
def test_chunk_sizes_add_up_and_differ_by_one_at_most(nbytes: int, num_chunks: int) -> None:
    sizes = chunk_bytes(Schedule("all_reduce", 2, num_chunks, []), nbytes)
    assert sizes.shape == (num_chunks,)
    assert sizes.sum() == nbytes
    assert sizes.max() - sizes.min() <= 1
    assert (np.diff(sizes) <= 0).all(), "the larger ones first"


def test_chunks_are_cut_between_elements() -> None:
    assert chunk_bytes(Schedule("all_reduce", 2, 3, []), 40, item_bytes=8).tolist() == [16, 16, 8]


@pytest.mark.parametrize(("nbytes", "item_bytes"), [(-1, 1), (10, 4), (8, 0)])
def test_sizes_that_cannot_be_are_refused(nbytes: int, item_bytes: int) -> None:
    with pytest.raises(ArgumentError, match=f"nbytes is {nbytes}; .* item_bytes, which is {item_bytes}"):
        chunk_bytes(Schedule("all_reduce", 2, 1, []), nbytes, item_bytes=item_bytes)


# --- By hand ----------------------------------------------------------------------------------------------------------


def test_one_message_costs_its_latency_and_its_bytes() -> None:
    cost = price(Schedule("broadcast", 2, 1, [(0, 0, 0, 1, 0, 0)]), 10, MACHINE)
    assert cost == Cost(1, (1, 0), (10, 0), (0, 10), (0, 0), 3 + 10 / 2)


def test_chunks_to_one_peer_in_one_step_are_one_message() -> None:
    cost = price(Schedule("broadcast", 2, 2, [(0, 0, 0, 1, 0, 0), (0, 0, 1, 1, 1, 0)]), 10, MACHINE)
    assert (cost.rounds, cost.max_messages_sent, cost.seconds) == (1, 1, 3 + 10 / 2)


def test_chunks_in_two_steps_are_two_messages_and_a_gap_between_steps_is_no_round() -> None:
    cost = price(Schedule("broadcast", 2, 2, [(0, 0, 0, 1, 0, 0), (9, 0, 1, 1, 1, 0)]), 10, MACHINE)
    assert (cost.rounds, cost.max_messages_sent, cost.seconds) == (2, 2, 2 * 3 + 10 / 2)


def test_sending_and_receiving_overlap_and_adding_up_comes_after() -> None:
    cost = price(Schedule("all_reduce", 2, 1, [(0, 0, 0, 1, 0, 1), (0, 1, 0, 0, 0, 1)]), 8, MACHINE)
    assert cost == Cost(1, (1, 1), (8, 8), (8, 8), (8, 8), 3 + 8 / 2 + 8 / 4)


def test_a_rank_receives_from_one_peer_at_a_time() -> None:
    cost = price(Schedule("reduce", 3, 1, [(0, 1, 0, 0, 0, 1), (0, 2, 0, 0, 0, 1)]), 8, MACHINE)
    assert cost == Cost(1, (0, 1, 1), (0, 8, 8), (16, 0, 0), (16, 0, 0), 2 * (3 + 8 / 2) + 16 / 4)


def test_a_step_lasts_as_long_as_its_slowest_rank() -> None:
    schedule = Schedule("all_gather", 4, 4, [(0, 0, 0, 1, 0, 0), (0, 2, 2, 3, 2, 0), (0, 2, 2, 1, 2, 0)])
    assert price(schedule, 16, MACHINE).seconds == 2 * (3 + 4 / 2)


def test_local_moves_are_free_and_no_round_but_local_adding_is_not() -> None:
    cost = price(Schedule("reduce", 2, 1, [(0, 0, 0, 0, 1, 0), (1, 0, 1, 0, 0, 1)], num_scratch=1), 8, MACHINE)
    assert cost == Cost(0, (0, 0), (0, 0), (0, 0), (8, 0), 8 / 4)


def test_nothing_costs_nothing() -> None:
    assert price(Schedule("all_reduce", 1, 1, []), 8, MACHINE) == Cost(0, (0,), (0,), (0,), (0,), 0.0)


def test_a_chunk_keeps_its_size_in_whatever_slot_it_lies() -> None:
    through_scratch = [(0, 0, 0, 1, 2, 0), (1, 1, 2, 2, 2, 0), (2, 2, 2, 1, 0, 0)]
    assert price(Schedule("broadcast", 3, 2, through_scratch, num_scratch=1), 3, MACHINE).bytes_sent == (2, 2, 2)


def test_a_scratch_slot_that_is_read_before_it_is_written_is_refused() -> None:
    schedule = Schedule("broadcast", 2, 1, [(0, 0, 0, 1, 0, 0), (1, 0, 1, 1, 0, 0)], num_scratch=1)
    with pytest.raises(MalformedScheduleError, match=r"transfer 1 \(step 1: .*\) reads an empty scratch slot"):
        price(schedule, 8, MACHINE)


@pytest.mark.parametrize(
    ("field", "value"),
    [("latency_s", -1.0), ("bandwidth_bytes_per_s", 0.0), ("reduce_bytes_per_s", -2.0), ("latency_s", math.nan)],
)
def test_a_link_that_cannot_be_is_refused(field: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=f"{field} is {value}"):
        replace(MACHINE, **{field: value})


# --- Against plain counting, and the closed forms ---------------------------------------------------------------------


def counted(schedule: Schedule, nbytes: int) -> Cost:
    """The same model, one transfer at a time."""
    sizes = chunk_bytes(schedule, nbytes).tolist()
    held = {(rank, slot): sizes[slot] for rank in range(schedule.world_size) for slot in range(schedule.num_chunks)}
    zeros = [0] * schedule.world_size
    messages_sent, sent, received, reduced = zeros[:], zeros[:], zeros[:], zeros[:]
    rounds, seconds = 0, 0.0
    for step in range(schedule.num_steps):
        transfers = [transfer for transfer in schedule if transfer.step == step]
        size = {transfer: held[transfer.src, transfer.src_slot] for transfer in transfers}
        held.update({(t.dst, t.dst_slot): size[t] for t in transfers})
        travelling = [t for t in transfers if t.src != t.dst]
        rounds += bool(travelling)
        slowest = 0.0
        for rank in range(schedule.world_size):
            to = {t.dst for t in travelling if t.src == rank}
            out = sum(size[t] for t in travelling if t.src == rank)
            back = sum(size[t] for t in travelling if t.dst == rank)
            added = sum(size[t] for t in transfers if t.dst == rank and t.reduce)
            messages_sent[rank] += len(to)
            sent[rank] += out
            received[rank] += back
            reduced[rank] += added
            sending = len(to) * MACHINE.latency_s + out / MACHINE.bandwidth_bytes_per_s
            num_from = len({t.src for t in travelling if t.dst == rank})
            receiving = num_from * MACHINE.latency_s + back / MACHINE.bandwidth_bytes_per_s
            slowest = max(slowest, max(sending, receiving) + added / MACHINE.reduce_bytes_per_s)
        seconds += slowest
    return Cost(rounds, tuple(messages_sent), tuple(sent), tuple(received), tuple(reduced), seconds)


@pytest.mark.parametrize(("collective", "name"), PAIRS, ids=[f"{c}-{n}" for c, n in PAIRS])
def test_equals_plain_counting_on_chunks_of_unequal_size(collective: str, name: str) -> None:
    for world_size in [1, 2, 3, 6, 7]:
        schedule = build(collective, name, world_size, world_size - 1 if collective in ROOTED else 0)
        # Quarters and halves are exact in binary, so the seconds are equal to the last bit.
        assert price(schedule, 1001, MACHINE) == counted(schedule, 1001)


@pytest.mark.parametrize("world_size", [2, 3, 8, 17, 128])
def test_ring_all_reduce_sends_2_n_minus_1_over_n_of_the_buffer(world_size: int) -> None:
    nbytes = 1000 * world_size
    cost = price(ring.all_reduce(world_size), nbytes, MACHINE)
    each = 2 * (world_size - 1) * nbytes // world_size
    assert set(cost.bytes_sent) == set(cost.bytes_received) == {each}
    assert set(cost.bytes_reduced) == {each // 2}
    assert cost.rounds == 2 * (world_size - 1)
    assert cost.seconds == cost.rounds * (3 + 1000 / 2) + (world_size - 1) * 1000 / 4


def test_what_is_sent_is_received() -> None:
    cost = price(build("all_to_all", "bruck", 13), 10**6 + 1, MACHINE)
    assert sum(cost.bytes_sent) == sum(cost.bytes_received)
    assert cost.max_bytes_received == max(cost.bytes_received)
    assert cost.max_bytes_sent == max(cost.bytes_sent)
    assert cost.max_bytes_reduced == 0


def test_step_numbers_may_be_as_large_as_they_like() -> None:
    cost = price(Schedule("broadcast", 2, 1, [(2**31 - 1, 0, 0, 1, 0, 0)]), 10, MACHINE)
    assert (cost.rounds, cost.seconds) == (1, 8.0)


# --- Between hosts ----------------------------------------------------------------------------------------------------


def between(topology: str, transfers: list[tuple[int, ...]], nbytes: int, link: Link = MEMORY) -> float:
    """Seconds of a broadcast by these transfers."""
    hosts = Topology.parse(topology)
    schedule = Schedule("broadcast", hosts.world_size, 1, transfers)
    return price(schedule, nbytes, link, topology=hosts, wire=WIRE).seconds


def test_what_crosses_costs_the_wire_and_no_memory() -> None:
    assert between("2x1", [(0, 0, 0, 1, 0, 0)], 8) == 1000 + 64 + 8 / 0.5


def test_what_stays_on_a_host_costs_its_memory_and_no_wire() -> None:
    assert between("2+1", [(0, 0, 0, 1, 0, 0)], 8) == 100 + (3 + 8 / 2)


def test_ranks_of_a_host_share_its_wire_each_way() -> None:
    out = [(0, 0, 0, 2, 0, 0), (0, 1, 0, 3, 0, 0)]
    back = [(0, 2, 0, 0, 0, 0), (0, 3, 0, 1, 0, 0)]
    assert between("2x2", out, 8) == between("2x2", out + back, 8) == 1000 + 64 + 2 * 8 / 0.5
    assert between("2+1+1", out, 8) == 1000 + 64 + (1 + CONTENTION) * 2 * 8 / 0.5, "to two hosts it takes longer"
    assert between("1+1+1+1", out, 8) == 1000 + 64 + 8 / 0.5, "each has a wire of its own"


def test_messages_of_a_rank_follow_one_another_and_those_of_ranks_share_the_cores() -> None:
    to_two = [(0, 0, 0, 2, 0, 0), (0, 0, 0, 3, 0, 0)]
    assert between("2+1+1", to_two, 8) == 1000 + 2 * 64 + (1 + CONTENTION) * 2 * 8 / 0.5
    three = [(0, rank, 0, 3 + rank, 0, 0) for rank in range(3)]
    assert between("3+1+1+1", three, 8) == 1000 + 3 * 64 / 2 + (1 + CONTENTION) * 3 * 8 / 0.5


def test_a_step_takes_a_host_what_stays_and_what_crosses_one_after_the_other() -> None:
    both = [(0, 0, 0, 1, 0, 0), (0, 0, 0, 2, 0, 0)]
    assert between("2+1", both, 8) == 1000 + 100 + (3 + 8 / 2) + (64 + 8 / 0.5)


def test_with_several_hosts_nothing_is_put_once_for_all() -> None:
    to_both = [(0, 0, 0, 1, 0, 0), (0, 0, 0, 2, 0, 0)]
    assert between("3+1", to_both, 8) == 100 + 2 * (3 + 8 / 2)
    assert price(Schedule("broadcast", 3, 1, to_both), 8, MEMORY).seconds == 100 + 3 * (3 + 8 / 2) / 2


def test_what_comes_from_another_host_is_added_up_at_the_rate_of_the_wire() -> None:
    schedule = Schedule("reduce", 2, 1, [(0, 1, 0, 0, 0, 1)])
    cost = price(schedule, 8, MEMORY, topology=Topology.parse("2x1"), wire=WIRE)
    assert cost == Cost(1, (0, 1), (0, 8), (8, 0), (8, 0), 1000 + 64 + 8 / 0.5 + 8 / 8)


def counted_on_hosts(schedule: Schedule, nbytes: int, topology: Topology, link: Link) -> float:
    """The seconds of the same model, one step and host at a time."""
    sizes = chunk_bytes(schedule, nbytes).tolist()
    held = {(rank, slot): sizes[slot] for rank in range(schedule.world_size) for slot in range(schedule.num_chunks)}
    seconds, partners = 0.0, None
    for step in range(schedule.num_steps):
        transfers = [transfer for transfer in schedule if transfer.step == step]
        size = {transfer: held[transfer.src, transfer.src_slot] for transfer in transfers}
        held.update({(t.dst, t.dst_slot): size[t] for t in transfers})
        crossing = [t for t in transfers if topology.host_of[t.src] != topology.host_of[t.dst]]
        staying = [t for t in transfers if t not in crossing and t.src != t.dst]
        seconds += link.step_s * bool(staying) + WIRE.step_s * bool(crossing)
        pairs = {(topology.host_of[t.src], topology.host_of[t.dst]) for t in crossing}
        is_crowded = any(len({pair[end] for pair in pairs}) < len(pairs) for end in (0, 1))
        is_crowded |= bool(crossing) and partners not in (None, pairs)
        partners = pairs or partners
        slower = 1 + CONTENTION * is_crowded
        seconds += max(
            memory_s(topology.ranks_on(host), transfers, staying, crossing, size, link)
            + max(
                wire_s(topology.ranks_on(host), [(t.src, t.dst, size[t]) for t in crossing], link, slower),
                wire_s(topology.ranks_on(host), [(t.dst, t.src, size[t]) for t in crossing], link, slower),
            )
            for host in range(topology.num_hosts)
        )
    return seconds


def memory_s(ranks, transfers, staying, crossing, size, link: Link) -> float:
    busy = []
    for rank in ranks:
        out, back = ([t for t in staying if end(t) == rank] for end in (lambda t: t.src, lambda t: t.dst))
        arrived = [t for t in crossing if t.dst == rank and t.reduce]
        added_up = sum(size[t] for t in arrived) / WIRE.reduce_bytes_per_s
        if link.cores is None:
            ways = [
                len({other(t) for t in some}) * link.latency_s + sum(size[t] for t in some) / link.bandwidth_bytes_per_s
                for some, other in ((out, lambda t: t.dst), (back, lambda t: t.src))
            ]
            added = [t for t in transfers if t.dst == rank and t.reduce and t not in crossing]
            added_up += max(ways) + sum(size[t] for t in added) / link.reduce_bytes_per_s
        else:
            copied = sum(size[t] for t in out) + sum(size[t] for t in back if not t.reduce)
            added_up += (len(out) + len(back)) * link.latency_s + copied / link.bandwidth_bytes_per_s
            added_up += sum(size[t] for t in back if t.reduce) / link.reduce_bytes_per_s
        busy.append(added_up)
    return max(busy) if link.cores is None else max(*busy, sum(busy) / link.cores, 0.0)


def wire_s(ranks, crossing: list[tuple[int, int, int]], link: Link, slower: float) -> float:
    """One way: of (rank of this host or not, the other end, bytes)."""
    mine = [(here, there, nbytes) for here, there, nbytes in crossing if here in ranks]
    messages = [len({there for here, there, _ in mine if here == rank}) for rank in ranks]
    turns = max(messages) if link.cores is None else max(max(messages), sum(messages) / link.cores)
    return turns * WIRE.latency_s + slower * sum(nbytes for _, _, nbytes in mine) / WIRE.bandwidth_bytes_per_s


@pytest.mark.parametrize("link", [MACHINE, MEMORY], ids=["wire", "memory"])
@pytest.mark.parametrize(("collective", "name"), PAIRS, ids=[f"{c}-{n}" for c, n in PAIRS])
def test_equals_plain_counting_on_hosts(collective: str, name: str, link: Link) -> None:
    for topology in (*NAMED, *random_topologies(seed=3, number=6)):
        if not topology.is_one_host:
            n = topology.world_size
            schedule = algorithms.build(collective, name, n, n - 1 if collective in ROOTED else 0, topology)
            seconds = price(schedule, 1001, link, topology=topology, wire=WIRE).seconds
            assert seconds == pytest.approx(counted_on_hosts(schedule, 1001, topology, link), rel=1e-12), topology


def test_with_one_host_there_is_no_wire() -> None:
    schedule = ring.all_reduce(4)
    assert price(schedule, 1001, MEMORY, topology=Topology.one_host(4)) == price(schedule, 1001, MEMORY)


def test_seconds_alone_depend_on_where_ranks_are() -> None:
    topology = Topology.parse("0,1,0,1")
    apart = price(ring.all_reduce(4), 1001, MEMORY, topology=topology, wire=WIRE)
    together = price(ring.all_reduce(4), 1001, MEMORY)
    assert apart.seconds > together.seconds
    assert replace(apart, seconds=0.0) == replace(together, seconds=0.0)


@pytest.mark.parametrize(
    ("hosts", "wire", "message"),
    [
        ("2x4", WIRE, "the topology 2x4 has 8 ranks, the schedule 4"),
        ("2x2", None, "wire is None; between the 2 hosts give a Link without cores"),
        ("2x2", MEMORY, "wire is Link.*; between the 2 hosts give a Link without cores"),
    ],
)
def test_hosts_that_cannot_be_priced_are_refused(hosts: str, wire: Link | None, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        price(ring.all_reduce(4), 8, MEMORY, topology=Topology.parse(hosts), wire=wire)


# --- Bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collective", "bound"),
    [
        ("all_reduce", Bound(3, 1600.0)),
        ("reduce_scatter", Bound(3, 800.0)),
        ("all_gather", Bound(3, 800.0)),
        ("broadcast", Bound(3, 1000.0)),
        ("reduce", Bound(3, 1000.0)),
        ("gather", Bound(3, 800.0)),
        ("scatter", Bound(3, 800.0)),
        ("all_to_all", Bound(3, 800.0)),
        ("barrier", Bound(3, 0.0)),
    ],
)
def test_bounds_are_those_of_the_literature(collective: str, bound: Bound) -> None:
    assert lower_bound(collective, 5, 1000) == bound
    assert lower_bound(collective, 1, 1000) == Bound(0, 0.0)


@pytest.mark.parametrize(("collective", "name"), PAIRS, ids=[f"{c}-{n}" for c, n in PAIRS])
def test_no_algorithm_beats_the_bound(collective: str, name: str) -> None:
    for world_size in range(1, 18):
        schedule = build(collective, name, world_size)
        nbytes = 1000 * schedule.num_chunks
        cost, bound = price(schedule, nbytes, MACHINE), lower_bound(collective, world_size, nbytes)
        assert max(cost.max_bytes_sent, cost.max_bytes_received) >= bound.bytes_per_rank * (1 - 1e-12)
        alphas_alone = price(schedule, 0, MACHINE).seconds / MACHINE.latency_s
        assert alphas_alone >= bound.rounds, "one message after the other, on one port"


@pytest.mark.parametrize("name", ["ring", "circulant", "direct"])
def test_some_all_reduces_move_no_more_than_they_must(name: str) -> None:
    for world_size in range(1, 18):
        nbytes = 1000 * world_size
        cost = price(build("all_reduce", name, world_size), nbytes, MACHINE)
        assert cost.max_bytes_sent == pytest.approx(lower_bound("all_reduce", world_size, nbytes).bytes_per_rank)


def test_every_collective_has_a_bound() -> None:
    for collective in COLLECTIVES:
        assert lower_bound(collective, 2, 0).rounds == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scan", 4, 8), "collective is 'scan'; known are all_reduce"),
        (("all_reduce", 0, 8), "world_size is 0 and nbytes is 8"),
        (("all_reduce", 4, -8), "world_size is 4 and nbytes is -8"),
    ],
)
def test_bounds_of_what_cannot_be_are_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        lower_bound(*arguments)
