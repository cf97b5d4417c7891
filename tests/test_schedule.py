"""A schedule is data: it keeps what it is given, refuses what cannot be, and hashes alike everywhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from farandole.algorithms import build
from farandole.errors import MalformedScheduleError, ScheduleError
from farandole.schedule import COLUMNS, Schedule, Transfer

EXCHANGE = [(0, 0, 0, 1, 0, 1), (0, 1, 0, 0, 0, 1)]


def test_hash_is_pinned_so_that_ranks_on_other_machines_and_versions_agree() -> None:
    schedule = Schedule("all_reduce", 2, 1, [(0, 0, 0, 1, 0, 1), (1, 1, 0, 0, 0, 0)])
    assert schedule.hash == "01ff766b743b26e9255fbd05d0c18c9c419534cc42a7f7b8021a49c587176707"


def test_hash_of_the_ring_is_pinned_so_that_a_change_of_an_algorithm_is_seen() -> None:
    assert build("all_reduce", "ring", 4).hash == "8e39d98e93e433ead6a8a094d160bcae9c848a4b3f034e2ea45300618ecb1a9a"


def test_equal_schedules_have_equal_hashes_whatever_their_name_and_the_type_of_their_rows() -> None:
    given = Schedule("all_reduce", 2, 1, EXCHANGE, name="mine")
    same = [
        Schedule("all_reduce", 2, 1, [Transfer(0, 0, 0, 1, 0, True), Transfer(0, 1, 0, 0, 0, True)]),
        Schedule("all_reduce", 2, 1, np.array(EXCHANGE)),
        Schedule("all_reduce", 2, 1, np.array(EXCHANGE, dtype=np.uint8)),
        Schedule("all_reduce", 2, 1, (row for row in EXCHANGE)),
    ]
    for other in same:
        assert other == given
        assert hash(other) == hash(given)
        assert other.hash == given.hash


def test_schedules_that_do_something_else_are_not_equal() -> None:
    different = [
        Schedule("all_reduce", 2, 1, EXCHANGE),
        Schedule("barrier", 2, 1, EXCHANGE),
        Schedule("all_reduce", 3, 1, EXCHANGE),
        Schedule("all_reduce", 2, 2, EXCHANGE),
        Schedule("all_reduce", 2, 1, EXCHANGE, num_scratch=1),
        Schedule("all_reduce", 2, 1, EXCHANGE, root=1),
        Schedule("all_reduce", 2, 1, EXCHANGE[::-1]),
        Schedule("all_reduce", 2, 1, EXCHANGE[:1]),
        Schedule("all_reduce", 2, 1, [(1, *EXCHANGE[0][1:]), EXCHANGE[1]]),
    ]
    for one, other in itertools.combinations(different, 2):
        assert one != other
    assert different[0] != "a schedule"


def test_steps_are_put_in_order_and_the_order_within_a_step_is_kept() -> None:
    rows = [(2, 0, 0, 1, 0, 0), (0, 1, 0, 0, 0, 1), (2, 1, 0, 0, 0, 0), (0, 0, 0, 1, 0, 1)]
    schedule = Schedule("all_reduce", 2, 1, rows)
    assert [tuple(map(int, transfer)) for transfer in schedule] == [rows[1], rows[3], rows[0], rows[2]]
    assert schedule.num_steps == 3


def test_columns_are_the_fields_of_a_transfer_and_cannot_be_written() -> None:
    schedule = Schedule("all_reduce", 2, 3, [(0, 1, 2, 0, 3, 1), (4, 0, 1, 1, 2, 0)], num_scratch=1)
    assert Transfer._fields == COLUMNS
    assert {name: schedule.column(name).tolist() for name in COLUMNS} == {
        "step": [0, 4],
        "src": [1, 0],
        "src_slot": [2, 1],
        "dst": [0, 1],
        "dst_slot": [3, 2],
        "reduce": [1, 0],
    }
    assert schedule.transfer(1) == Transfer(4, 0, 1, 1, 2, False)
    assert schedule.num_slots == 4
    with pytest.raises(ValueError, match="read-only"):
        schedule.rows[0, 0] = 1


def test_an_array_that_was_given_may_be_changed_afterwards() -> None:
    given = np.array(EXCHANGE, dtype=np.int32)
    schedule = Schedule("all_reduce", 2, 1, given)
    given[:] = 0
    assert schedule == Schedule("all_reduce", 2, 1, EXCHANGE)


def test_no_transfers_make_no_steps() -> None:
    schedule = Schedule("broadcast", 1, 1, [])
    assert (len(schedule), schedule.num_steps, list(schedule), schedule.rows.shape) == (0, 0, [], (0, 6))


def test_words_for_people() -> None:
    schedule = Schedule("all_reduce", 2, 1, EXCHANGE, name="exchange")
    text = f"<Schedule exchange all_reduce: 2 ranks, 1 chunks, 1 steps, 2 transfers, {schedule.hash[:12]}>"
    assert repr(schedule) == text
    assert str(Transfer(3, 0, 1, 2, 4)) == "step 3: rank 0 slot 1 replaces rank 2 slot 4"
    assert str(Transfer(3, 0, 1, 2, 4, True)) == "step 3: rank 0 slot 1 is added to rank 2 slot 4"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((-1, 0, 0, 1, 0, 0), "transfer 1 of 2: step is -1; it must be >= 0"),
        ((0, 2, 0, 1, 0, 0), r"transfer 1 of 2: src is 2; it must be in 0\.\.1"),
        ((0, 0, 3, 1, 0, 0), r"transfer 1 of 2: src_slot is 3; it must be in 0\.\.2"),
        ((0, 0, 0, -1, 0, 0), r"transfer 1 of 2: dst is -1; it must be in 0\.\.1"),
        ((0, 0, 0, 1, 3, 0), r"transfer 1 of 2: dst_slot is 3; it must be in 0\.\.2"),
        ((0, 0, 0, 1, 0, 2), r"transfer 1 of 2: reduce is 2; it must be in 0\.\.1"),
        ((2**31, 0, 0, 1, 0, 0), r"transfer 1 of 2 is \(2147483648, 0, .* a number that does not fit 32 bits"),
        ((-(2**63), 0, 0, 1, 0, 0), r"transfer 1 of 2 is \(-9223372036854775808, 0, .* that does not fit 32 bits"),
        ((10**30, 0, 0, 1, 0, 0), r"transfer 1 of 2 is \(10{30}, 0, .* a number that does not fit 32 bits"),
        ((0, 0, 0, 1, 0), r"transfer 1 of 2 is \(0, 0, 0, 1, 0\); it must be 6 integers: step, src, src_slot, dst,"),
        ((0, 0, 0, 1, 0, None), r"transfer 1 of 2 is \(0, 0, 0, 1, 0, None\); it must be 6 integers: step, src"),
        (None, "transfer 1 of 2 is None; it must be 6 integers: step, src"),
    ],
)
def test_a_transfer_out_of_range_is_refused_by_its_index_and_field(row: tuple[int, ...], message: str) -> None:
    with pytest.raises(MalformedScheduleError, match=message):
        Schedule("all_reduce", 2, 2, [(0, 0, 0, 1, 0, 1), row], num_scratch=1)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"world_size": 0}, "world_size is 0; it must be an integer >= 1"),
        ({"world_size": 2.0}, r"world_size is 2\.0; it must be an integer >= 1"),
        ({"num_chunks": 0}, "num_chunks is 0; it must be an integer >= 1"),
        ({"num_scratch": -1}, "num_scratch is -1; it must be an integer >= 0"),
        ({"root": -1}, "root is -1; it must be an integer >= 0"),
        ({"root": 2}, r"root is 2, but the ranks are 0\.\.1"),
        ({"world_size": 10**12}, "world_size is 1000000000000; it must be at most 2147483647"),
        ({"num_chunks": 10**12}, "num_chunks is 1000000000000; it must be at most 2147483647"),
        ({"num_scratch": 2**31}, "num_scratch is 2147483648; it must be at most 2147483647"),
        ({"collective": ["all_reduce"]}, r"collective is \['all_reduce'\]; it must be a name"),
        ({"transfers": None}, "transfers is None; give a list of Transfer, which may be empty"),
        ({"transfers": 5}, "transfers is 5; give a list of Transfer, which may be empty"),
    ],
)
def test_a_header_out_of_range_is_refused(header: dict[str, int], message: str) -> None:
    with pytest.raises(MalformedScheduleError, match=message):
        Schedule(**{"collective": "all_reduce", "world_size": 2, "num_chunks": 1, "transfers": [], **header})


@pytest.mark.parametrize(
    "transfers", [[(0, 0, 0, 1, 0)], [0, 0, 0, 1, 0, 0], np.zeros((2, 6)), np.zeros((1, 2, 6), int)]
)
def test_rows_of_another_shape_or_type_are_refused(transfers: object) -> None:
    with pytest.raises(
        MalformedScheduleError, match="each must be 6 integers: step, src, src_slot, dst, dst_slot, red"
    ):
        Schedule("all_reduce", 2, 1, transfers)


def test_the_error_is_a_schedule_error_and_a_value_error() -> None:
    assert issubclass(MalformedScheduleError, ScheduleError)
    assert issubclass(MalformedScheduleError, ValueError)


def test_a_schedule_cannot_be_changed() -> None:
    schedule = Schedule("all_reduce", 2, 1, EXCHANGE)
    for name in ("num_chunks", "collective", "root", "anything"):
        with pytest.raises(AttributeError, match="cannot be changed"):
            setattr(schedule, name, 7)
    with pytest.raises(ValueError, match="read-only"):
        schedule.rows[0, 0] = 1
    assert schedule.hash == Schedule("all_reduce", 2, 1, EXCHANGE).hash
