"""Schedules that know hosts: proved and run for any topology, and what crosses between hosts is counted."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from reference import data
from schedule_executor import cut, execute, expected
from topologies import NAMED, random_topologies

from farandole import algorithms
from farandole.algorithms import ALGORITHMS, HIERARCHICAL, ROOTED, double_tree, halving_doubling, hierarchical, ring
from farandole.errors import MalformedScheduleError
from farandole.lowering import lower
from farandole.program import Publish
from farandole.program_verifier import verify_programs
from farandole.schedule import Schedule
from farandole.topology import Topology
from farandole.verifier import verify

PAIRS = [(collective, name) for collective in ALGORITHMS for name in ALGORITHMS[collective] if name in HIERARCHICAL]
every_algorithm = pytest.mark.parametrize(("collective", "name"), PAIRS, ids=[f"{c}-{n}" for c, n in PAIRS])
of_all_reduce = pytest.mark.parametrize("name", [name for collective, name in PAIRS if collective == "all_reduce"])


def built(collective: str, name: str, topology: Topology, root: int = 0) -> Schedule:
    return algorithms.build(collective, name, topology.world_size, root, topology)


def schedules(collective: str, name: str, seed: int, number: int = 25) -> list[tuple[Topology, Schedule]]:
    """On the named topologies and on random ones, with random roots."""
    choice = random.Random(seed)
    made = []
    for topology in (*NAMED, *random_topologies(seed, number)):
        root = choice.randrange(topology.world_size) if collective in ROOTED else 0
        made.append((topology, built(collective, name, topology, root)))
    return made


# --- Right ------------------------------------------------------------------------------------------------------------


@every_algorithm
def test_is_proved_on_any_topology(collective: str, name: str) -> None:
    for _, schedule in schedules(collective, name, seed=1):
        verify(schedule)
        assert (schedule.collective, schedule.name) == (collective, name)
        assert {transfer.step for transfer in schedule} == set(range(schedule.num_steps)), "no step is empty"
        assert schedule.num_scratch == 0


@every_algorithm
@pytest.mark.parametrize("shared", [True, False])
def test_its_programs_are_proved_with_and_without_shared_channels(collective: str, name: str, shared: bool) -> None:
    for _, schedule in schedules(collective, name, seed=2, number=12):
        proof = verify(schedule)
        programs = lower(proof, shared=shared)
        verify_programs(programs, proof)
        publications = [o for program in programs for o in program.operations if isinstance(o, Publish)]
        assert shared or all(publication.reader >= 0 for publication in publications)


@every_algorithm
def test_computes_the_float64_reference(collective: str, name: str) -> None:
    random_numbers = np.random.default_rng(7)
    for _, schedule in schedules(collective, name, seed=3):
        for length in {0, 1, schedule.num_chunks - 1, 3 * schedule.num_chunks + 1}:
            numbers = random_numbers.standard_normal((schedule.world_size, length))
            final = execute(schedule, cut(schedule, numbers))
            for slot, wanted in expected(schedule, numbers).items():
                np.testing.assert_allclose(final[slot], wanted, rtol=1e-12, atol=1e-12, err_msg=f"{schedule} {slot}")


@of_all_reduce
def test_all_ranks_hold_the_same_bits(name: str) -> None:
    for _, schedule in schedules("all_reduce", name, seed=4):
        numbers = np.random.default_rng(3).standard_normal((schedule.world_size, 20 * schedule.num_chunks))
        final = execute(schedule, cut(schedule, numbers.astype(np.float32)))
        for (rank, chunk), value in final.items():
            np.testing.assert_array_equal(value.view(np.uint32), final[0, chunk].view(np.uint32), err_msg=f"{rank}")


@every_algorithm
def test_runs_on_the_engine(worlds, collective: str, name: str) -> None:
    for topology in (*NAMED, *random_topologies(seed=5, number=4)):
        n = topology.world_size
        root = n - 1 if collective in ROOTED else 0
        schedule = built(collective, name, topology, root)
        for count in (0, n, 9001 * n):

            def body(comm, schedule=schedule, count=count, root=root):
                arguments = [root] if collective in ROOTED else []
                return getattr(comm, collective)(data(comm.rank, count, "float32"), *arguments, algorithm=schedule)

            given = [data(rank, count, "float32") for rank in range(n)]
            wanted = {
                "all_reduce": [sum(given)] * n,
                "reduce_scatter": np.split(sum(given), n),
                "all_gather": [np.concatenate(given)] * n,
                "broadcast": [given[root]] * n,
                "reduce": [*given[:root], sum(given)],
            }[collective]
            for rank, result in enumerate(worlds(n).run(body)):
                assert np.array_equal(result, wanted[rank]), f"{topology}, {count} elements, rank {rank}"


@pytest.mark.parametrize(
    "between", [ring.all_reduce, halving_doubling.all_reduce, double_tree.all_reduce], ids=["ring", "halving", "trees"]
)
@pytest.mark.parametrize("num_rails", [1, 2, None])
def test_any_all_reduce_runs_between_hosts_on_any_rails(
    between: Callable[[int], Schedule], num_rails: int | None
) -> None:
    for topology in random_topologies(seed=6, number=10):
        verify(hierarchical.all_reduce(topology, between, num_rails))


def test_128_ranks() -> None:
    for topology in (Topology.parse("16x8"), Topology.parse("2x64"), Topology.of_hosts(r % 7 for r in range(128))):
        verify(built("all_reduce", "hierarchical", topology))


# --- What crosses -----------------------------------------------------------------------------------------------------


def crossing(schedule: Schedule, topology: Topology) -> tuple[list[Fraction], list[Fraction]]:
    """Per host, what leaves it and what enters it, in units of S."""
    left, entered = ([Fraction(0)] * topology.num_hosts for _ in range(2))
    for transfer in schedule:
        src, dst = topology.host_of[transfer.src], topology.host_of[transfer.dst]
        if src != dst:
            left[src] += Fraction(1, schedule.num_chunks)
            entered[dst] += Fraction(1, schedule.num_chunks)
    return left, entered


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical_circulant", "hierarchical_direct"])
def test_all_reduce_sends_no_more_from_a_host_than_if_it_were_one_rank(name: str) -> None:
    for topology, schedule in schedules("all_reduce", name, seed=8):
        least = Fraction(2 * (topology.num_hosts - 1), topology.num_hosts)
        assert crossing(schedule, topology) == ([least] * topology.num_hosts,) * 2, topology


def test_a_flat_ring_sends_many_times_as_much_over_badly_ordered_ranks() -> None:
    topology = Topology.of_hosts(rank % 2 for rank in range(8))
    flat, known = (built("all_reduce", name, topology) for name in ("ring", "hierarchical"))
    assert crossing(known, topology)[0] == [1, 1]
    assert crossing(flat, topology)[0] == [7, 7]
    in_order = Topology.parse("2x4")
    assert crossing(built("all_reduce", "ring", in_order), in_order)[0] == [Fraction(7, 4)] * 2


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical_circulant", "hierarchical_direct"])
def test_a_part_enters_each_other_host_once_and_a_sum_leaves_it_once(name: str) -> None:
    for topology, schedule in schedules("all_gather", name, seed=9):
        own = [Fraction(len(topology.ranks_on(host)), topology.world_size) for host in range(topology.num_hosts)]
        assert crossing(schedule, topology)[1] == [1 - share for share in own]
        if name == "hierarchical_direct":
            assert crossing(schedule, topology)[0] == [(topology.num_hosts - 1) * share for share in own]
        summing = built("reduce_scatter", name, topology)
        assert crossing(summing, topology)[0] == [1 - share for share in own]


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical_tree", "hierarchical_direct"])
def test_a_buffer_enters_each_other_host_once_and_leaves_it_once_if_it_is_reduced(name: str) -> None:
    for collective, end in (("broadcast", 1), ("reduce", 0)):
        for topology, schedule in schedules(collective, name, seed=10):
            at_root = topology.host_of[schedule.root]
            others = [int(host != at_root) for host in range(topology.num_hosts)]
            assert crossing(schedule, topology)[end] == others


def test_rails_share_the_work_among_the_ranks_of_a_host() -> None:
    topology = Topology.parse("3x4")
    for collective in ("all_reduce", "reduce_scatter", "all_gather"):
        schedule = built(collective, "hierarchical", topology)
        across = [t.src for t in schedule if topology.host_of[t.src] != topology.host_of[t.dst]]
        assert len({across.count(rank) for rank in range(12)}) == 1


def test_only_leaders_speak_with_other_hosts_in_one_shot_and_with_a_root() -> None:
    topology = Topology.parse("0,1,0,1,2")
    for collective, name, leaders in (
        ("all_reduce", "hierarchical_one_shot", {0, 1, 4}),
        ("broadcast", "hierarchical", {0, 3, 4}),
        ("reduce", "hierarchical_tree", {0, 3, 4}),
    ):
        schedule = built(collective, name, topology, 3 if collective in ROOTED else 0)
        across = [t for t in schedule if topology.host_of[t.src] != topology.host_of[t.dst]]
        assert {t.src for t in across} | {t.dst for t in across} == leaders


# --- Cost -------------------------------------------------------------------------------------------------------------


def log2_up(number: int) -> int:
    return (number - 1).bit_length()


def height(n: int) -> int:
    return 0 if n == 1 else log2_up(n) if n % 2 == 0 else 1 + log2_up(n - 1)


def doubling(hosts: int) -> tuple[int, int]:
    """Rounds, and what the busiest host sends."""
    whole = hosts.bit_length() - 1
    return (whole, whole) if hosts & (hosts - 1) == 0 else (whole + 2, whole + 1)


# (collective, name) -> H, R -> (rounds, what the host that sends most sends, in units of S), for H > 1 and R > 1.
COSTS: dict[tuple[str, str], Callable[[int, int], tuple[int, Fraction | int]]] = {
    ("all_reduce", "hierarchical"): lambda h, r: (2 * h, Fraction(2 * (h - 1), h)),
    ("all_reduce", "hierarchical_circulant"): lambda h, r: (2 * log2_up(h) + 2, Fraction(2 * (h - 1), h)),
    ("all_reduce", "hierarchical_direct"): lambda h, r: (4, Fraction(2 * (h - 1), h)),
    ("all_reduce", "hierarchical_doubling"): lambda h, r: (doubling(h)[0] + 2, doubling(h)[1]),
    ("all_reduce", "hierarchical_one_shot"): lambda h, r: (3, h - 1),
    ("reduce_scatter", "hierarchical"): lambda h, r: (h, Fraction(h - 1, h)),
    ("reduce_scatter", "hierarchical_circulant"): lambda h, r: (log2_up(h) + 1, Fraction(h - 1, h)),
    ("reduce_scatter", "hierarchical_direct"): lambda h, r: (2, Fraction(h - 1, h)),
    ("all_gather", "hierarchical"): lambda h, r: (h, Fraction(h - 1, h)),
    ("all_gather", "hierarchical_circulant"): lambda h, r: (log2_up(h) + 1, Fraction(h - 1, h)),
    ("all_gather", "hierarchical_direct"): lambda h, r: (2, Fraction(h - 1, h)),
    ("broadcast", "hierarchical"): lambda h, r: (height(h) + 3 + log2_up(r), 1),
    ("broadcast", "hierarchical_tree"): lambda h, r: (log2_up(h) + log2_up(r), log2_up(h)),
    ("broadcast", "hierarchical_direct"): lambda h, r: (1 + log2_up(r), h - 1),
    ("reduce", "hierarchical"): lambda h, r: (height(h) + 3 + log2_up(r), 1),
    ("reduce", "hierarchical_tree"): lambda h, r: (log2_up(h) + log2_up(r), 1),
    ("reduce", "hierarchical_direct"): lambda h, r: (1 + log2_up(r), 1),
}


@every_algorithm
def test_takes_the_rounds_and_sends_the_volume_that_its_docstring_gives(collective: str, name: str) -> None:
    for hosts in (2, 3, 4, 5, 7, 8, 9):
        for ranks in (2, 3, 5):
            topology = Topology.of_hosts(rank % hosts for rank in range(hosts * ranks))
            schedule = built(collective, name, topology)
            rounds = len({transfer.step for transfer in schedule if transfer.src != transfer.dst})
            assert (rounds, max(crossing(schedule, topology)[0])) == COSTS[collective, name](hosts, ranks), topology


def test_every_algorithm_has_a_cost() -> None:
    assert set(COSTS) == set(PAIRS)
    assert {name for _, name in PAIRS} == HIERARCHICAL


# --- Shape ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collective", "name", "flat"),
    [
        ("all_reduce", "hierarchical", "ring"),
        ("all_reduce", "hierarchical_direct", "direct"),
        ("all_reduce", "hierarchical_doubling", "recursive_doubling"),
        ("all_reduce", "hierarchical_one_shot", "one_shot"),
        ("reduce_scatter", "hierarchical_circulant", "circulant"),
        ("all_gather", "hierarchical", "ring"),
        ("broadcast", "hierarchical_tree", "tree"),
        ("reduce", "hierarchical_direct", "direct"),
    ],
)
def test_with_one_rank_per_host_it_is_the_flat_algorithm(collective: str, name: str, flat: str) -> None:
    for hosts in range(1, 9):
        assert built(collective, name, Topology.of_hosts(range(hosts))) == algorithms.build(collective, flat, hosts)


@every_algorithm
def test_without_a_topology_all_ranks_share_a_host(collective: str, name: str) -> None:
    for world_size in (1, 2, 5):
        schedule = algorithms.build(collective, name, world_size)
        assert schedule == built(collective, name, Topology.one_host(world_size))
        assert schedule.num_steps <= (2 if collective == "all_reduce" else log2_up(world_size))


def test_a_topology_of_other_ranks_is_refused() -> None:
    with pytest.raises(MalformedScheduleError, match="the topology 2x4 has 8 ranks, but world_size is 6"):
        algorithms.build("all_reduce", "hierarchical", 6, topology=Topology.parse("2x4"))
