"""The verifier accepts what keeps its promise and names what does not: mutants of algorithms, and plans by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_executor import keeps_promise
from topologies import build

from farandole.algorithms import ALGORITHMS, ROOTED, names
from farandole.errors import ArgumentError, MalformedScheduleError, VerificationError
from farandole.schedule import Schedule, Transfer
from farandole.verifier import Values, verify

PAIRS = [(collective, name) for collective in ALGORITHMS for name in names(collective)]
every_algorithm = pytest.mark.parametrize(("collective", "name"), PAIRS, ids=[f"{c}-{n}" for c, n in PAIRS])


def originals(collective: str, name: str) -> list[Schedule]:
    return [build(collective, name, n, n // 2 if collective in ROOTED else 0) for n in (2, 3, 4, 5)]


def with_transfers(schedule: Schedule, transfers: list[Transfer]) -> Schedule:
    return Schedule(
        schedule.collective,
        schedule.world_size,
        schedule.num_chunks,
        transfers,
        num_scratch=schedule.num_scratch,
        root=schedule.root,
        name=schedule.name,
    )


def require_named(error: VerificationError) -> None:
    """The error says where and by what, in fields and in words."""
    text = str(error)
    assert error.rank is not None
    assert error.chunk is not None
    assert f"rank {error.rank}" in text
    assert f"chunk {error.chunk}" in text or f"slot {error.chunk}" in text
    if error.transfer is None:
        assert "no transfer ever writes" in text
    else:
        assert f"transfer {error.transfer} (" in text


def is_rejected(mutant: Schedule) -> bool:
    """What the verifier says; if it accepts, the mutant has to compute its collective."""
    try:
        verify(mutant)
    except VerificationError as error:
        require_named(error)
        return True
    assert keeps_promise(mutant, seed=1), f"accepted, but wrong: {mutant}\n" + "\n".join(map(str, mutant))
    return False


def sampled(mutants: Iterator[list[Transfer]], schedule: Schedule, most: int = 150) -> list[Schedule]:
    everything = list(mutants)
    chosen = random.Random(5).sample(everything, min(most, len(everything)))
    return [with_transfers(schedule, transfers) for transfers in chosen]


# --- Mutants ----------------------------------------------------------------------------------------------------------


def dropped(schedule: Schedule) -> Iterator[list[Transfer]]:
    transfers = list(schedule)
    return (transfers[:i] + transfers[i + 1 :] for i in range(len(transfers)))


def duplicated(schedule: Schedule) -> Iterator[list[Transfer]]:
    """Again in the same step, in the next one, and at the end."""
    transfers = list(schedule)
    for i, transfer in enumerate(transfers):
        for step in (transfer.step, transfer.step + 1, schedule.num_steps):
            yield [*transfers[: i + 1], transfer._replace(step=step), *transfers[i + 1 :]]


def redirected(schedule: Schedule) -> Iterator[list[Transfer]]:
    transfers = list(schedule)
    limits = {
        "src": schedule.world_size,
        "dst": schedule.world_size,
        "src_slot": schedule.num_slots,
        "dst_slot": schedule.num_slots,
    }
    for i, transfer in enumerate(transfers):
        for field, limit in limits.items():
            for value in set(range(limit)) - {getattr(transfer, field)}:
                yield [*transfers[:i], transfer._replace(**{field: value}), *transfers[i + 1 :]]


def flipped(schedule: Schedule) -> Iterator[list[Transfer]]:
    transfers = list(schedule)
    for i, transfer in enumerate(transfers):
        yield [*transfers[:i], transfer._replace(reduce=not transfer.reduce), *transfers[i + 1 :]]


def moved(schedule: Schedule) -> Iterator[list[Transfer]]:
    """One transfer into another step."""
    transfers = list(schedule)
    for i, transfer in enumerate(transfers):
        for step in {transfer.step - 1, transfer.step + 1, 0, schedule.num_steps} - {-1, transfer.step}:
            yield [*transfers[:i], transfer._replace(step=step), *transfers[i + 1 :]]


def with_steps_swapped(schedule: Schedule) -> Iterator[list[Transfer]]:
    for step in range(schedule.num_steps - 1):
        other = {step: step + 1, step + 1: step}
        yield [transfer._replace(step=other.get(transfer.step, transfer.step)) for transfer in schedule]


@every_algorithm
def test_every_transfer_is_needed_so_dropping_any_is_rejected(collective: str, name: str) -> None:
    for schedule in originals(collective, name):
        for mutant in sampled(dropped(schedule), schedule, 200):
            # The naive all_gather hands everybody its own part back: that can be left out, and nothing else can.
            assert is_rejected(mutant) or (collective, name) == ("all_gather", "naive")


@every_algorithm
def test_adding_the_same_twice_in_one_step_is_rejected(collective: str, name: str) -> None:
    for schedule in originals(collective, name):
        transfers = list(schedule)
        twice = ([*transfers[: i + 1], *transfers[i:]] for i, transfer in enumerate(transfers) if transfer.reduce)
        for mutant in sampled(twice, schedule):
            assert is_rejected(mutant) or collective == "barrier"


@every_algorithm
def test_duplicated_transfers_are_rejected_unless_the_result_is_still_right(collective: str, name: str) -> None:
    for schedule in originals(collective, name):
        for mutant in sampled(duplicated(schedule), schedule):
            is_rejected(mutant)


@every_algorithm
def test_turning_add_into_replace_or_back_is_rejected(collective: str, name: str) -> None:
    for schedule in originals(collective, name):
        for mutant in sampled(flipped(schedule), schedule):
            # In a barrier hearing twice does no harm, so adding to what was there before does none.
            assert is_rejected(mutant) or collective == "barrier"


@every_algorithm
def test_redirected_transfers_are_rejected_unless_the_result_is_still_right(collective: str, name: str) -> None:
    rejected = [is_rejected(m) for s in originals(collective, name) for m in sampled(redirected(s), s)]
    assert sum(rejected) >= 0.5 * len(rejected)


@every_algorithm
def test_moved_transfers_are_rejected_unless_the_result_is_still_right(collective: str, name: str) -> None:
    for schedule in originals(collective, name):
        for mutant in sampled(moved(schedule), schedule):
            is_rejected(mutant)


@pytest.mark.parametrize(
    ("collective", "name"),
    [
        ("all_reduce", "ring"),
        ("all_reduce", "tree"),
        ("all_reduce", "halving_doubling"),
        ("all_reduce", "circulant"),
        ("all_gather", "ring"),
        ("broadcast", "tree"),
        ("gather", "tree"),
    ],
)
def test_swapping_any_two_neighbouring_steps_of_a_chain_of_needs_is_rejected(collective: str, name: str) -> None:
    for world_size in (4, 8):
        schedule = build(collective, name, world_size)
        rejected = [is_rejected(with_transfers(schedule, mutant)) for mutant in with_steps_swapped(schedule)]
        assert any(rejected)
        if name == "ring":
            assert all(rejected)


@every_algorithm
def test_swapped_steps_are_rejected_unless_the_result_is_still_right(collective: str, name: str) -> None:
    for schedule in originals(collective, name):
        for mutant in sampled(with_steps_swapped(schedule), schedule):
            is_rejected(mutant)


@settings(max_examples=1500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_nothing_that_breaks_its_promise_is_accepted_after_several_mutations(data: st.DataObject) -> None:
    collective, name = data.draw(st.sampled_from(PAIRS))
    world_size = data.draw(st.integers(2, 6))
    root = data.draw(st.integers(0, world_size - 1)) if collective in ROOTED else 0
    schedule = build(collective, name, world_size, root)
    transfers = list(schedule)
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, len(transfers) - 1))
        transfers[i] = Transfer(
            data.draw(st.sampled_from([transfers[i].step, max(0, transfers[i].step - 1), transfers[i].step + 1])),
            data.draw(st.sampled_from([transfers[i].src, (transfers[i].src + 1) % world_size])),
            data.draw(st.sampled_from([transfers[i].src_slot, (transfers[i].src_slot + 1) % schedule.num_slots])),
            data.draw(st.sampled_from([transfers[i].dst, (transfers[i].dst + 1) % world_size])),
            data.draw(st.sampled_from([transfers[i].dst_slot, (transfers[i].dst_slot + 1) % schedule.num_slots])),
            data.draw(st.sampled_from([transfers[i].reduce, not transfers[i].reduce])),
        )
    is_rejected(with_transfers(schedule, transfers))


# --- Plans by hand ----------------------------------------------------------------------------------------------------


def refusal(schedule: Schedule) -> VerificationError:
    with pytest.raises(VerificationError) as caught:
        verify(schedule)
    require_named(caught.value)
    return caught.value


def test_all_gather_that_writes_a_peers_part_over_ones_own_is_rejected() -> None:
    error = refusal(Schedule("all_gather", 2, 2, [(0, 0, 0, 1, 1, 0), (0, 1, 1, 0, 1, 0)]))
    assert (error.rank, error.chunk) == (1, 0)
    assert "at the end, rank 1 chunk 0 holds nothing" in str(error)
    error = refusal(Schedule("all_gather", 2, 2, [(0, 0, 0, 1, 0, 0), (0, 0, 0, 1, 1, 0), (0, 1, 1, 0, 1, 0)]))
    assert (error.rank, error.chunk, error.transfer) == (1, 1, 1)
    assert "rank 1 chunk 1 holds chunk 0 in place of chunk 1" in str(error)
    assert error.path == ("transfer 1 (step 0: rank 0 slot 0 replaces rank 1 slot 1)",)


def test_all_reduce_without_transfers_is_rejected() -> None:
    error = refusal(Schedule("all_reduce", 3, 1, []))
    assert (error.rank, error.chunk, error.transfer) == (0, 0, None)
    assert "rank 0 chunk 0 lacks the contribution of ranks 1, 2" in str(error)
    assert "rank 1's contribution to chunk 0 is, at the end, on rank 1" in str(error)


def test_a_contribution_that_is_added_twice_is_rejected_with_its_count() -> None:
    twice = [(0, 1, 0, 0, 0, 1), (1, 1, 0, 0, 0, 1), (2, 1, 0, 0, 0, 1)]
    error = refusal(Schedule("reduce", 2, 1, twice))
    assert (error.rank, error.chunk, error.transfer) == (0, 0, 2)
    assert "holds the contribution of rank 1 3 times" in str(error)
    assert len(error.path) == 4, "the three transfers, and where the contribution is"


def test_what_is_missing_and_what_is_there_twice_are_both_said() -> None:
    error = refusal(Schedule("reduce", 4, 1, [(0, 1, 0, 0, 0, 1), (1, 1, 0, 0, 0, 1), (2, 2, 0, 0, 0, 1)]))
    assert "lacks the contribution of rank 3 and holds the contribution of rank 1 2 times" in str(error)
    assert error.path[-1] == "rank 3's contribution to chunk 0 is, at the end, on rank 3"
    error = refusal(Schedule("barrier", 4, 1, [(0, 1, 0, 0, 0, 1), (1, 1, 0, 0, 0, 1), (2, 2, 0, 0, 0, 1)]))
    assert "rank 0 chunk 0 lacks the contribution of rank 3\n" in str(error), "hearing twice does no harm in a barrier"


def test_a_contribution_that_comes_twice_by_way_of_another_rank_is_rejected() -> None:
    error = refusal(Schedule("reduce", 3, 1, [(0, 2, 0, 1, 0, 1), (1, 1, 0, 0, 0, 1), (1, 2, 0, 0, 0, 1)], name="plan"))
    assert "plan reduce on 3 ranks: at the end, rank 0 chunk 0 holds the contribution of rank 2 2 times" in str(error)


def test_reading_an_empty_slot_is_rejected_at_the_transfer_that_reads() -> None:
    error = refusal(Schedule("broadcast", 3, 1, [(0, 0, 0, 1, 0, 0), (0, 1, 0, 2, 0, 0)]))
    assert (error.rank, error.chunk, error.transfer) == (1, 0, 1)
    assert "rank 1 slot 0 holds nothing yet" in str(error)


def test_adding_to_an_empty_slot_is_rejected_at_the_transfer_that_adds() -> None:
    error = refusal(Schedule("broadcast", 2, 1, [(0, 0, 0, 1, 0, 1)]))
    assert (error.rank, error.chunk, error.transfer) == (1, 0, 0)
    assert "there is nothing there to add to" in str(error)


def test_adding_one_chunk_to_another_is_rejected_at_the_transfer_that_mixes() -> None:
    error = refusal(Schedule("all_reduce", 2, 2, [(0, 1, 0, 0, 0, 1), (0, 1, 0, 0, 1, 1)]))
    assert (error.rank, error.transfer) == (0, 1)
    assert "adds chunk 0 to chunk 1; only contributions to one chunk can be added" in str(error)


def test_two_that_replace_one_slot_in_one_step_are_rejected() -> None:
    error = refusal(Schedule("reduce", 3, 1, [(0, 1, 0, 0, 0, 0), (0, 2, 0, 0, 0, 0)]))
    assert (error.rank, error.chunk, error.transfer) == (0, 0, 1)
    assert "transfer 0 writes the same slot in the same step" in str(error)


def test_a_local_transfer_that_would_read_what_its_step_writes_is_rejected() -> None:
    error = refusal(Schedule("all_gather", 2, 2, [(0, 0, 0, 1, 0, 0), (0, 1, 0, 1, 1, 0)]))
    assert "holds nothing yet" in str(error)
    late = [(0, 1, 0, 0, 0, 1), (0, 0, 0, 0, 1, 0), (1, 0, 0, 1, 0, 0)]
    error = refusal(Schedule("all_reduce", 2, 1, late, num_scratch=1))
    assert "an earlier transfer of the same step writes rank 0 slot 0" in str(error)


def test_ranks_that_add_up_in_different_orders_are_rejected() -> None:
    transfers = [Transfer(0, src, 0, dst, 0, True) for dst in range(3) for src in range(3) if src != dst]
    error = refusal(Schedule("all_reduce", 3, 1, transfers))
    assert (error.rank, error.chunk) == (2, 0)
    assert "rank 2 chunk 0 was added up in another order than on rank 0" in str(error)


def test_two_operands_commute_so_an_exchange_of_two_ranks_is_accepted() -> None:
    verify(Schedule("all_reduce", 2, 1, [(0, 0, 0, 1, 0, 1), (0, 1, 0, 0, 0, 1)]))


def test_a_step_reads_what_was_there_when_it_began_so_a_swap_in_place_is_accepted() -> None:
    verify(Schedule("all_to_all", 2, 2, [(0, 0, 1, 1, 0, 0), (0, 1, 0, 0, 1, 0)]))


def test_the_same_swap_in_two_steps_is_rejected_naming_the_data_that_was_lost() -> None:
    error = refusal(Schedule("all_to_all", 2, 2, [(0, 0, 1, 1, 0, 0), (1, 1, 0, 0, 1, 0)]))
    assert "rank 0 chunk 1 holds the data in slot 1 of rank 0 in place of the data in slot 0 of rank 1" in str(error)


def test_a_barrier_in_which_somebody_hears_twice_is_accepted_and_in_which_somebody_does_not_is_rejected() -> None:
    twice = [(0, 0, 0, 1, 0, 1), (0, 1, 0, 0, 0, 1), (1, 0, 0, 1, 0, 1), (1, 1, 0, 0, 0, 1)]
    verify(Schedule("barrier", 2, 1, twice))
    assert refusal(Schedule("barrier", 2, 1, twice[:1])).rank == 0


def test_scratch_slots_carry_what_they_are_given() -> None:
    verify(Schedule("broadcast", 3, 1, [(0, 0, 0, 1, 1, 0), (1, 1, 1, 2, 0, 0), (1, 1, 1, 1, 0, 0)], num_scratch=1))


def test_a_long_path_is_cut_to_its_last_transfers() -> None:
    schedule = build("reduce", "naive", 20)
    error = refusal(with_transfers(schedule, list(schedule)[1:]))
    assert error.path[0] == "... 6 earlier transfers"
    assert error.path[-2] == "transfer 17 (step 18: rank 19 slot 0 is added to rank 0 slot 0)"
    assert "rank 1's contribution to chunk 0 is, at the end, on rank 1" in error.path[-1]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule("scan", 2, 1, []), "collective is 'scan'; known are all_reduce"),
        (Schedule("all_gather", 3, 4, []), "all_gather on 3 ranks has 4 chunks; it needs a multiple of 3"),
        (
            Schedule("all_reduce", 10**6, 10**6, []),
            "world_size is 1000000 and there are 1000000 slots per rank; a proof",
        ),
        (Schedule("barrier", 2, 1, [], num_scratch=10**9), "world_size is 2 and there are 1000000001 slots per rank"),
    ],
)
def test_a_collective_that_cannot_be_is_refused_before_the_proof(schedule: Schedule, message: str) -> None:
    with pytest.raises(MalformedScheduleError, match=message):
        verify(schedule)


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"schedule is None; it must be a farandole\.Schedule"):
        verify(None)


# --- Values -----------------------------------------------------------------------------------------------------------


def test_folds_are_equal_exactly_where_their_bits_are_sure_to_be() -> None:
    values = Values()
    a, b, c = (values.leaf(0, rank) for rank in range(3))
    assert values.fold((a, b)) == values.fold((b, a))
    assert values.fold((a, b, c)) == values.fold((b, a, c))
    assert values.fold((a, b, c)) != values.fold((a, c, b))
    assert values.fold((values.fold((a, b)), c)) != values.fold((values.fold((b, c)), a))


def test_folds_count_how_often_they_hold_a_rank() -> None:
    values = Values()
    a, b = values.leaf(0, 0), values.leaf(0, 1)
    pair = values.fold((a, b))
    assert values.times(values.fold((pair, pair, a)), 0) == 3
    assert values.doubled[values.fold((pair, pair, a))] == 0b11
    assert values.doubled[pair] == 0


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("broadcast", 2, 1, [(0, 1, 0, 1, 0, 1), (0, 1, 0, 0, 0, 0), (1, 0, 0, 1, 0, 0)], root=1),
        Schedule("broadcast", 2, 1, [(0, 0, 0, 1, 0, 0), (1, 1, 0, 1, 0, 1), (2, 0, 0, 1, 0, 0)]),
        Schedule(
            "broadcast", 2, 1, [(0, 1, 0, 0, 0, 0), (1, 0, 0, 0, 1, 0), (2, 0, 1, 0, 1, 1)], root=1, num_scratch=1
        ),
        Schedule("all_gather", 2, 2, [(0, 0, 0, 1, 0, 0), (0, 1, 1, 0, 1, 0), (1, 0, 1, 0, 1, 1), (2, 1, 1, 0, 1, 0)]),
    ],
)
def test_a_collective_that_only_moves_data_may_add_nothing_even_if_it_is_thrown_away(schedule: Schedule) -> None:
    with pytest.raises(VerificationError, match=f"{schedule.collective} only moves data and adds nothing") as caught:
        verify(schedule)
    assert caught.value.transfer is not None
    assert caught.value.rank is not None
