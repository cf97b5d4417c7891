"""Every algorithm: it is proved, it computes the right numbers, and it costs what its docstring says."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from schedule_executor import SUMMING, cut, execute, expected, keeps_promise, receivers_of
from topologies import build as build_on_hosts

from farandole.algorithms import (
    ALGORITHMS,
    HIERARCHICAL,
    IDENTITIES,
    ROOTED,
    build,
    circulant,
    closed_form,
    compose,
    direct,
    double_tree,
    halving_doubling,
    naive,
    names,
    ring,
    tree,
)
from farandole.collectives import COLLECTIVES
from farandole.errors import MalformedScheduleError
from farandole.schedule import Schedule
from farandole.verifier import verify

WORLD_SIZES = [*range(1, 18), 32]
PAIRS = [(collective, name) for collective in ALGORITHMS for name in names(collective)]


def algorithms_for(collectives: set[str], *, flat: bool = False) -> pytest.MarkDecorator:
    """Runs a test once per algorithm for one of ``collectives``; ``flat`` leaves out those that know hosts."""
    chosen = [pair for pair in PAIRS if pair[0] in collectives and not (flat and pair[1] in HIERARCHICAL)]
    return pytest.mark.parametrize(("collective", "name"), chosen, ids=[f"{c}-{n}" for c, n in chosen])


every_algorithm = algorithms_for(set(ALGORITHMS))


def schedules(collective: str, name: str, world_sizes: list[int] | None = None) -> list[Schedule]:
    """The algorithm on every world size that it is for, from several roots."""
    built = []
    for world_size in world_sizes or WORLD_SIZES:
        roots = sorted({0, 1 % world_size, world_size // 2, world_size - 1}) if collective in ROOTED else [0]
        built += [build_on_hosts(collective, name, world_size, root) for root in roots]
    return built


# --- Right ------------------------------------------------------------------------------------------------------------


@every_algorithm
def test_is_proved_for_every_world_size_and_root(collective: str, name: str) -> None:
    for schedule in schedules(collective, name):
        verify(schedule)
        assert schedule.collective == collective
        assert schedule.name == name


@algorithms_for(set(ALGORITHMS) - {"barrier"})
def test_computes_the_float64_reference_on_data_that_differ_per_rank_and_element(collective: str, name: str) -> None:
    random = np.random.default_rng(7)
    for schedule in schedules(collective, name):
        # Chunks of two sizes, and some empty ones; in all_to_all what one sends has to fit where another receives.
        for length in {0, 1, schedule.num_chunks - 1, 3 * schedule.num_chunks + 1}:
            if collective == "all_to_all":
                length *= schedule.num_chunks
            data = random.standard_normal((schedule.world_size, length))
            final = execute(schedule, cut(schedule, data))
            for slot, wanted in expected(schedule, data).items():
                np.testing.assert_allclose(final[slot], wanted, rtol=1e-12, atol=1e-12, err_msg=f"{schedule} {slot}")


@pytest.mark.parametrize("name", names("barrier"))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_in_a_barrier_everyone_hears_of_everyone(name: str, world_size: int) -> None:
    assert keeps_promise(build("barrier", name, world_size), seed=0)


@algorithms_for({"all_reduce"})
def test_all_ranks_that_hold_the_same_sum_hold_the_same_bits(collective: str, name: str) -> None:
    for schedule in schedules(collective, name):
        data = np.random.default_rng(3).standard_normal((schedule.world_size, 50 * schedule.num_chunks))
        final = execute(schedule, cut(schedule, data.astype(np.float32)))
        for rank in range(schedule.world_size):
            for chunk in range(schedule.num_chunks):
                np.testing.assert_array_equal(final[rank, chunk].view(np.uint32), final[0, chunk].view(np.uint32))


@pytest.mark.parametrize(
    "builder",
    [direct.one_shot, direct.reduce_scatter, direct.reduce, direct.all_reduce, halving_doubling.all_reduce_whole],
)
@pytest.mark.parametrize("world_size", range(2, 18))
def test_sums_that_ranks_make_for_themselves_are_added_in_the_order_of_ranks(
    builder: Callable[[int], Schedule], world_size: int
) -> None:
    schedule = builder(world_size)
    inputs = {(r, c): (r,) for r in range(world_size) for c in range(schedule.num_chunks)}
    final = execute(schedule, inputs, lambda left, right: left + right)
    for chunk in range(schedule.num_chunks):
        for rank in receivers_of(schedule, chunk):
            assert final[rank, chunk] == tuple(range(world_size))


@pytest.mark.parametrize("root", range(5))
def test_direct_reduce_adds_in_the_order_of_ranks_whatever_the_root(root: int) -> None:
    schedule = direct.reduce(5, root)
    final = execute(schedule, {(r, 0): (r,) for r in range(5)}, lambda left, right: left + right)
    assert final[root, 0] == (0, 1, 2, 3, 4)


@algorithms_for(SUMMING - {"barrier"})
def test_an_average_is_divided_exactly_where_a_sum_becomes_whole(collective: str, name: str) -> None:
    for schedule in schedules(collective, name, [2, 3, 5, 8]):
        proof = verify(schedule)
        whole = {assignment.value for assignment in proof.assignments if assignment.completes}
        assert whole == {proof.final[slot] for slot in proof.promise.after}


@every_algorithm
def test_one_rank_alone_moves_nothing(collective: str, name: str) -> None:
    assert len(build(collective, name, 1)) == 0


@every_algorithm
def test_no_step_is_empty_and_no_slot_beyond_the_scratch_is_asked_for(collective: str, name: str) -> None:
    for schedule in schedules(collective, name):
        assert {transfer.step for transfer in schedule} == set(range(schedule.num_steps))
        if collective != "all_to_all":
            assert schedule.num_scratch == 0


# --- Cost -------------------------------------------------------------------------------------------------------------


def log2_up(number: int) -> int:
    return (number - 1).bit_length()


def log2_down(number: int) -> int:
    return number.bit_length() - 1


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def rounds_of(schedule: Schedule) -> int:
    return len({transfer.step for transfer in schedule if transfer.src != transfer.dst})


def sent(schedule: Schedule) -> list[Fraction]:
    """Per rank, what it sends to others, in units of S."""
    chunks = Counter(transfer.src for transfer in schedule if transfer.src != transfer.dst)
    return [Fraction(chunks[rank], schedule.num_chunks) for rank in range(schedule.world_size)]


def received(schedule: Schedule) -> list[Fraction]:
    """Per rank, what it receives from others, in units of S."""
    chunks = Counter(transfer.dst for transfer in schedule if transfer.src != transfer.dst)
    return [Fraction(chunks[rank], schedule.num_chunks) for rank in range(schedule.world_size)]


def without_own(n: int) -> Fraction:
    return Fraction(n - 1, n)


def height(n: int) -> int:
    """Of the double tree."""
    return 0 if n == 1 else log2_up(n) if n % 2 == 0 else 1 + log2_up(n - 1)


def fold_rounds(n: int) -> int:
    return 0 if is_power_of_two(n) else 2


def volume_of_doubling(n: int) -> Fraction:
    """What a leader of two collects from teams of up to two, and then hands to its follower."""
    power = 1 << log2_down(n)
    blocks = sum((1 << k) + min(1 << k, n - power) for k in range(log2_down(n)))
    return Fraction(blocks + (0 if is_power_of_two(n) else n - 1), n)


def if_folded(n: int) -> int:
    return 0 if is_power_of_two(n) else 1


def volume_of_halving(n: int) -> Fraction:
    return without_own(1 << log2_down(n))


# (collective, name) -> N -> (rounds, what the rank that sends most sends, in units of S).
COSTS: dict[tuple[str, str], Callable[[int], tuple[int, Fraction | int]]] = {
    ("all_reduce", "naive"): lambda n: (2 * (n - 1), n - 1),
    ("all_reduce", "ring"): lambda n: (2 * (n - 1), 2 * without_own(n)),
    ("all_reduce", "tree"): lambda n: (2 * log2_up(n), log2_up(n)),
    ("all_reduce", "double_tree"): lambda n: (2 * height(n), [0, 1, Fraction(3, 2)][n - 1] if n < 4 else 2),
    ("all_reduce", "halving_doubling"): lambda n: (
        2 * log2_down(n) + fold_rounds(n),
        2 * volume_of_halving(n) + if_folded(n),
    ),
    ("all_reduce", "recursive_doubling"): lambda n: (log2_down(n) + fold_rounds(n), log2_down(n) + if_folded(n)),
    ("all_reduce", "circulant"): lambda n: (2 * log2_up(n), 2 * without_own(n)),
    ("all_reduce", "direct"): lambda n: (min(2, 2 * (n - 1)), 2 * without_own(n)),
    ("all_reduce", "one_shot"): lambda n: (min(1, n - 1), n - 1),
    ("reduce_scatter", "naive"): lambda n: (2 * (n - 1), min(1, n - 1)),
    ("reduce_scatter", "ring"): lambda n: (n - 1, without_own(n)),
    ("reduce_scatter", "halving_doubling"): lambda n: (
        log2_down(n) + fold_rounds(n),
        without_own(n) if is_power_of_two(n) else 1,
    ),
    ("reduce_scatter", "circulant"): lambda n: (log2_up(n), without_own(n)),
    ("reduce_scatter", "direct"): lambda n: (min(1, n - 1), without_own(n)),
    ("all_gather", "naive"): lambda n: (2 * (n - 1), n - 1),
    ("all_gather", "ring"): lambda n: (n - 1, without_own(n)),
    ("all_gather", "halving_doubling"): lambda n: (log2_down(n) + fold_rounds(n), volume_of_doubling(n)),
    ("all_gather", "circulant"): lambda n: (log2_up(n), without_own(n)),
    ("all_gather", "bruck"): lambda n: (log2_up(n), without_own(n)),
    ("all_gather", "direct"): lambda n: (min(1, n - 1), without_own(n)),
    ("broadcast", "naive"): lambda n: (n - 1, n - 1),
    ("broadcast", "ring"): lambda n: (n - 2 + 8 if n > 1 else 0, min(1, n - 1)),
    ("broadcast", "tree"): lambda n: (log2_up(n), log2_up(n)),
    ("broadcast", "double_tree"): lambda n: (height(n), min(1, n - 1)),
    ("broadcast", "direct"): lambda n: (min(1, n - 1), n - 1),
    ("reduce", "naive"): lambda n: (n - 1, min(1, n - 1)),
    ("reduce", "ring"): lambda n: (n - 2 + 8 if n > 1 else 0, min(1, n - 1)),
    ("reduce", "tree"): lambda n: (log2_up(n), min(1, n - 1)),
    ("reduce", "double_tree"): lambda n: (height(n), min(1, n - 1)),
    ("reduce", "direct"): lambda n: (min(1, n - 1), min(1, n - 1)),
    ("gather", "naive"): lambda n: (n - 1, Fraction(min(1, n - 1), n)),
    ("gather", "tree"): lambda n: (
        log2_up(n),
        Fraction(max(min(v & -v, n - v) for v in range(1, n)), n) if n > 1 else 0,
    ),
    ("gather", "direct"): lambda n: (min(1, n - 1), Fraction(min(1, n - 1), n)),
    ("scatter", "naive"): lambda n: (n - 1, without_own(n)),
    ("scatter", "tree"): lambda n: (log2_up(n), without_own(n)),
    ("scatter", "direct"): lambda n: (min(1, n - 1), without_own(n)),
    ("all_to_all", "naive"): lambda n: (2 * (n - 1), (n - 1) * without_own(n)),
    ("all_to_all", "bruck"): lambda n: (log2_up(n), Fraction(sum(i.bit_count() for i in range(n)), n)),
    ("all_to_all", "direct"): lambda n: (min(1, n - 1), without_own(n)),
    ("all_to_all", "pairwise"): lambda n: (n if n > 2 else n - 1, without_own(n)),
    ("barrier", "naive"): lambda n: (2 * (n - 1), n - 1),
    ("barrier", "dissemination"): lambda n: (log2_up(n), log2_up(n)),
}


@algorithms_for(set(ALGORITHMS), flat=True)
def test_takes_the_rounds_and_sends_the_volume_that_its_docstring_gives(collective: str, name: str) -> None:
    for schedule in schedules(collective, name):
        assert (rounds_of(schedule), max(sent(schedule))) == COSTS[collective, name](schedule.world_size), schedule


@every_algorithm
def test_docstring_gives_cost_and_source(collective: str, name: str) -> None:
    doc = inspect.getdoc(ALGORITHMS[collective][name]) or ""
    assert "Source:" in doc
    assert "round" in closed_form(collective, name)
    assert "Source" not in closed_form(collective, name)


@pytest.mark.parametrize("name", ["ring", "circulant", "direct"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reduce_scatter_and_all_gather_send_and_receive_n_minus_1_chunks_on_every_rank(
    name: str, world_size: int
) -> None:
    for collective in ("reduce_scatter", "all_gather"):
        schedule = build(collective, name, world_size)
        assert set(sent(schedule)) == set(received(schedule)) == {without_own(world_size)}


@pytest.mark.parametrize("world_size", range(3, 18))
def test_folding_costs_the_volumes_that_the_docstrings_give(world_size: int) -> None:
    power = 1 << log2_down(world_size)
    pairs = world_size - power
    followers = list(range(1, 2 * pairs, 2))
    leaders_of_two = list(range(0, 2 * pairs, 2))
    others = list(range(2 * pairs, world_size))
    whole, scattered = halving_doubling.all_reduce_whole(world_size), halving_doubling.all_reduce(world_size)
    halved, doubled = halving_doubling.reduce_scatter(world_size), halving_doubling.all_gather(world_size)
    for rank in followers:
        assert [sent(s)[rank] for s in (whole, scattered, halved, doubled)] == [1, 1, 1, Fraction(1, world_size)]
    for rank in leaders_of_two:
        assert sent(whole)[rank] == log2_down(world_size) + 1
        assert sent(scattered)[rank] == 2 * Fraction(power - 1, power) + 1
    for rank in others:
        assert sent(whole)[rank] == log2_down(world_size)
        assert sent(scattered)[rank] == 2 * Fraction(power - 1, power)
    for rank in leaders_of_two + others:
        assert sent(halved)[rank] == without_own(world_size)
        assert sent(doubled)[rank] < 3


@pytest.mark.parametrize("world_size", range(2, 18))
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 8])
def test_chains_and_double_trees_take_any_number_of_chunks(world_size: int, num_chunks: int) -> None:
    for schedule in (
        ring.broadcast(world_size, 1, num_chunks),
        ring.reduce(world_size, 1, num_chunks),
        double_tree.broadcast(world_size, 1, num_chunks),
        double_tree.reduce(world_size, 1, num_chunks),
        double_tree.all_reduce(world_size, num_chunks),
    ):
        verify(schedule)
    assert rounds_of(ring.broadcast(world_size, 1, num_chunks)) == world_size - 2 + num_chunks
    pipelined = height(world_size) - 1 + (num_chunks + 1) // 2
    assert rounds_of(double_tree.broadcast(world_size, 1, num_chunks)) == pipelined
    assert rounds_of(double_tree.all_reduce(world_size, num_chunks)) == 2 * pipelined


# --- Shape ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ring_sends_to_the_right_neighbour_only_one_chunk_per_step(world_size: int) -> None:
    schedule = ring.all_reduce(world_size)
    assert all(transfer.dst == (transfer.src + 1) % world_size for transfer in schedule)
    assert set(Counter((transfer.step, transfer.src) for transfer in schedule).values()) <= {1}


@pytest.mark.parametrize("world_size", range(2, 40))
def test_circulant_and_bruck_talk_to_one_peer_each_way_per_round(world_size: int) -> None:
    for schedule in (
        circulant.all_reduce(world_size),
        build("all_gather", "bruck", world_size),
        build("all_to_all", "bruck", world_size),
    ):
        skips = {}
        for transfer in schedule:
            if transfer.src != transfer.dst:
                skip = (transfer.dst - transfer.src) % world_size
                assert skips.setdefault(transfer.step, skip) == skip


@pytest.mark.parametrize("world_size", range(1, 70))
def test_double_tree_inner_nodes_of_one_tree_are_leaves_of_the_other(world_size: int) -> None:
    first, second = double_tree.parents(world_size)
    for edges in (first, second):
        assert set(edges) == set(range(1, world_size)), "spans all but the root"
        children = Counter(edges.values())
        assert max(children.values(), default=0) <= 2
        assert children[0] == min(1, world_size - 1), "the root has one child in each tree"
        for virtual in edges:
            depth = 0
            while virtual:
                virtual, depth = edges[virtual], depth + 1
            assert depth <= height(world_size)
    assert set(first.values()) & set(second.values()) <= {0}


@pytest.mark.parametrize("world_size", range(1, 18))
def test_pairwise_has_one_partner_per_round_and_it_is_mutual(world_size: int) -> None:
    partner: dict[tuple[int, int], int] = {}
    for transfer in direct.pairwise(world_size):
        assert partner.setdefault((transfer.step, transfer.src), transfer.dst) == transfer.dst
    assert all(partner[step, peer] == rank for (step, rank), peer in partner.items())


def test_bruck_moves_only_the_blocks_of_a_single_hop_within_a_rank_for_powers_of_two() -> None:
    for log in range(1, 6):
        local = [t for t in build("all_to_all", "bruck", 2**log) if t.src == t.dst]
        assert len(local) == log * 2**log


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16])
def test_halving_doubling_is_its_two_halves_for_powers_of_two(world_size: int) -> None:
    halves = compose(halving_doubling.reduce_scatter(world_size), halving_doubling.all_gather(world_size))
    assert halving_doubling.all_reduce(world_size) == halves


# --- Composition ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), IDENTITIES, ids=[f"{a}+{b}" for a, b in IDENTITIES])
def test_identities_hold_for_every_pair_of_algorithms_whose_chunks_agree(first: str, second: str) -> None:
    num_composed = 0
    for world_size in (1, 2, 3, 5, 8):
        root = world_size - 1
        for a in schedules(first, "naive", [world_size])[-1:] + [
            build(first, n, world_size, root if first in ROOTED else 0) for n in names(first)
        ]:
            for b in [build(second, n, world_size, root if second in ROOTED else 0) for n in names(second)]:
                if a.num_chunks == b.num_chunks:
                    both = compose(a, b)
                    verify(both)
                    assert both.collective == IDENTITIES[first, second]
                    assert both.root == (root if both.collective in ROOTED else 0)
                    assert both.num_steps == a.num_steps + b.num_steps
                    num_composed += 1
    assert num_composed


def test_composition_of_two_names_names_both() -> None:
    assert compose(ring.reduce_scatter(3), circulant.all_gather(3)).name == "ring+circulant"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (ring.all_gather(4), ring.reduce_scatter(4), "all_gather + reduce_scatter makes no collective; known are"),
        (ring.reduce_scatter(4), ring.all_gather(5), "world_size is 4 in the first, 5 in the second"),
        (tree.reduce(4), ring.broadcast(4), "num_chunks is 1 in the first, 8 in the second"),
        (tree.reduce(4, 1), tree.broadcast(4, 2), "root is 1 in the first, 2 in the second"),
    ],
)
def test_composing_what_does_not_fit_says_why(first: Schedule, second: Schedule, message: str) -> None:
    with pytest.raises(MalformedScheduleError, match=message.replace("+", r"\+")):
        compose(first, second)


# --- Table ------------------------------------------------------------------------------------------------------------


def test_every_collective_has_an_algorithm() -> None:
    assert set(ALGORITHMS) == set(COLLECTIVES)
    assert set(COSTS) == {pair for pair in PAIRS if pair[1] not in HIERARCHICAL}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduce", "rign", 4), "there is no all_reduce named 'rign'; known are naive, ring, tree"),
        (("allreduce", "ring", 4), "collective is 'allreduce'; known are all_reduce, reduce_scatter"),
        (("all_reduce", "ring", 0), "world_size is 0; it must be >= 1"),
        (("broadcast", "tree", 4, 4), r"root is 4, but the ranks are 0\.\.3"),
        (("broadcast", "tree", 4, -1), r"root is -1, but the ranks are 0\.\.3"),
        (("all_reduce", "ring", 4, 2), "root is 2, but all_reduce has no root"),
    ],
)
def test_building_what_does_not_exist_says_what_does(arguments: tuple[str, str, int], message: str) -> None:
    with pytest.raises(MalformedScheduleError, match=message):
        build(*arguments)


def test_asking_for_unknown_names_says_what_is_known() -> None:
    with pytest.raises(MalformedScheduleError, match="collective is 'scan'"):
        names("scan")
    with pytest.raises(MalformedScheduleError, match="no barrier named 'ring'"):
        closed_form("barrier", "ring")


def test_naive_all_to_all_keeps_what_passes_through_in_scratch() -> None:
    assert naive.all_to_all(5).num_scratch == 20
