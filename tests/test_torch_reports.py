"""What people reported of torch's backends, each as the kind of fault that it is: at every operation, dtype and entry
point that it could hit.

As in test_torch_backend.py, whose operations these are, the ranks are threads.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import test_torch_backend
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from test_many_calls import HUGE, available_gib, fill, require_sum
from test_torch_backend import (
    ALL,
    BYTES_ALONE,
    COMPLEX,
    FLOATS,
    INTEGERS,
    LAYOUTS,
    MOVING,
    REDUCING,
    SHAPES,
    UNSIGNED,
    check,
    contiguous,
    every_second,
    inputs,
    meet,
    reduced,
    same,
    values,
    with_options,
)

from farandole import algorithms, runner
from farandole.errors import (
    ArgumentError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    CommunicatorClosedError,
    UnsupportedReductionError,
)

SOON = timedelta(seconds=0.02)
"""How long to wait for what must not happen: a rank that is not stuck would be through by then, most often."""


def run_on(groups: list, body: Callable) -> list:
    """``body(group)`` on every rank; once it fails on one, it ends on all."""

    def run(group):
        try:
            return body(group)
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(len(groups)) as threads:
        outcomes = [threads.submit(run, group) for group in groups]
    errors = [error for outcome in outcomes if (error := outcome.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, CommunicatorClosedError)):
        raise error
    return [outcome.result() for outcome in outcomes]


class World:
    """Groups of all sizes, made when first asked for, and made again after a test that failed on them."""

    def __init__(self) -> None:
        self._groups: dict[int, list] = {}

    def run(self, world_size: int, body: Callable) -> list:
        """``body(group)`` on every rank."""
        if world_size not in self._groups:
            self._groups[world_size] = meet(world_size, timeout_s=10)
        try:
            return run_on(self._groups[world_size], body)
        except BaseException:
            leave(self._groups.pop(world_size))
            raise

    def close(self) -> None:
        for groups in self._groups.values():
            leave(groups)


def wait_for(event: threading.Event, group) -> None:
    """Which another rank sets, unless it fails."""
    while not event.wait(0.01):
        if group.communicator.aborted:
            raise CommunicatorClosedError("the other rank has failed")


def leave(groups: list) -> None:
    for group in groups:
        group.shutdown()


@pytest.fixture(scope="module")
def world():
    made = World()
    yield made
    made.close()


@contextlib.contextmanager
def ranks(world_size: int, timeout_s: float = 10) -> Iterator[Callable[[Callable], list]]:
    """Groups of their own, that may break: what runs a body on each."""
    groups = meet(world_size, timeout_s=timeout_s)
    try:
        yield lambda body: run_on(groups, body)
    finally:
        leave(groups)


# --- More operations --------------------------------------------------------------------------------------------------


def reduce_scatter_coalesced(group, shape, dtype, layout, is_async, op="SUM"):
    size, mine = group.size(), group.rank()
    whole = (size * shape[0], *shape[1:]) if shape else (size,)
    everyones = [inputs(group, whole, dtype, salt) for salt in range(2)]
    outputs = [layout(torch.ones(shape, dtype=torch.uint8).to(dtype)) for _ in everyones]
    options = with_options(c10d.ReduceScatterOptions, is_async, reduceOp=getattr(dist.ReduceOp, op))
    yield group.reduce_scatter_single_coalesced(outputs, [layout(each[mine]) for each in everyones], options)
    for output, each in zip(outputs, everyones, strict=True):
        same(output, reduced(each, op).reshape(size, *shape)[mine])


def all_gather_single_coalesced(group, shape, dtype, layout, is_async):
    size, mine = group.size(), group.rank()
    everyones = [inputs(group, shape, dtype, salt) for salt in range(2)]
    whole = (size * shape[0], *shape[1:]) if shape else (size,)
    outputs = [layout(torch.ones(whole, dtype=torch.uint8).to(dtype)) for _ in everyones]
    options = with_options(c10d.AllgatherOptions, is_async)
    yield group.all_gather_single_coalesced(outputs, [layout(each[mine]) for each in everyones], options)
    for output, each in zip(outputs, everyones, strict=True):
        same(output.reshape(size, *shape), torch.stack(each))


def messages(group, shape, dtype, layout, is_async):
    """Round the ring; asynchronous, as torch's messages always are."""
    everyones = inputs(group, shape, dtype)
    right, left = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    got = layout(torch.ones(shape, dtype=torch.uint8).to(dtype))
    sent = group.send([layout(everyones[group.rank()])], right, 3)
    yield group.recv([got], left, 3)
    assert sent.wait()
    same(got, everyones[left])


ALL_REDUCING = [*REDUCING, reduce_scatter_coalesced]
ALL_MOVING = [*MOVING, all_gather_single_coalesced]
COLLECTIVES = [*ALL_REDUCING, *ALL_MOVING]
EVERYTHING = [*COLLECTIVES, messages]


def writes(operation, group) -> bool:
    """Whether the operation writes anything on this rank; the roots are those of the operations."""
    rank, last = group.rank(), group.size() - 1
    if operation.__name__ == "broadcast":
        return rank != group.size() // 2
    return rank == last if operation.__name__ in ("reduce", "gather") else True


class Meddler:
    """A group with somebody between it and its caller, who may give it other tensors.

    Args:
        group: the group.
        read: from a tensor that a call only reads, to the one that it gets.
        written: from one that a call writes, to the one that it gets.
        within: what calls are made in.
    """

    def __init__(self, group, *, read=lambda tensor: tensor, written=lambda tensor: tensor, within=None) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._read, self._written = group, read, written
        self._within = within or contextlib.nullcontext

    def __getattr__(self, name: str) -> Callable:
        def call(first, *rest):
            root = getattr(rest[-1], "rootRank", None) if rest else None
            reads_first = name == "send" or (name, root == self.rank()) in {("broadcast", True), ("reduce", False)}
            first = each(self._read if reads_first else self._written, first)
            with self._within():
                return getattr(self._group, name)(first, *[each(self._read, value) for value in rest])

        return call


def each(change: Callable, value: Any) -> Any:
    """``value`` with all tensors in it changed."""
    if isinstance(value, (list, tuple)):
        return [each(change, one) for one in value]
    return change(value) if isinstance(value, torch.Tensor) else value


def every_reduction(group, rows: torch.Tensor, op, *, is_async: bool = False):
    """By every entry point, of ``rows``, one per rank: what comes out here, and of which of the rows."""
    size, mine = group.size(), group.rank()

    def options(kind, **more):
        return with_options(kind, is_async, reduceOp=op, **more)

    tensor = rows.clone()
    assert group.allreduce([tensor], options(c10d.AllreduceOptions)).wait()
    yield tensor, slice(None)
    tensors = [rows.clone(), every_second(rows)]
    assert group.allreduce_coalesced(tensors, options(c10d.AllreduceCoalescedOptions)).wait()
    yield from ((tensor, slice(None)) for tensor in tensors)
    for root in range(size):
        tensor = rows.clone()
        assert group.reduce([tensor], options(c10d.ReduceOptions, rootRank=root)).wait()
        if root == mine:
            yield tensor, slice(None)
    output = torch.zeros_like(rows[0])
    parts = [row.clone() for row in rows]
    assert group.reduce_scatter([output], [parts], options(c10d.ReduceScatterOptions)).wait()
    yield output, mine
    tensor = rows.clone()
    assert group.reduce_scatter_single(tensor[mine], tensor, options(c10d.ReduceScatterOptions)).wait()
    yield tensor[mine], mine
    outputs = [torch.zeros_like(rows[0]) for _ in range(2)]
    both = [rows.clone(), rows.clone()]
    assert group.reduce_scatter_single_coalesced(outputs, both, options(c10d.ReduceScatterOptions)).wait()
    yield from ((output, mine) for output in outputs)


# --- Layouts ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def columns_alike(monkeypatch):
    """All columns of the data are one and the same."""

    def alike(rank, shape, dtype, salt=0):
        return values(rank, (*shape[:-1], 1), dtype, salt).expand(shape).clone()

    monkeypatch.setattr(test_torch_backend, "values", alike)


def expanded(tensor):
    """One column, many times."""
    return tensor[..., :1].expand(tensor.shape)


def window(tensor):
    """A sliding one: most places are several elements."""
    return torch.zeros(tensor.numel(), dtype=torch.uint8).to(tensor.dtype).as_strided(tensor.shape, [1] * tensor.dim())


@pytest.mark.parametrize("operation", EVERYTHING)
def test_expanded_inputs_are_taken(world, columns_alike, operation):
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.complex64]
    if operation not in ALL_REDUCING:
        dtypes += BYTES_ALONE

    def body(group):
        for dtype, is_async in itertools.product(dtypes, [False, True]):
            check(Meddler(group, read=expanded), operation, (4, 3), dtype, contiguous, is_async)

    for world_size in (2, 3):
        world.run(world_size, body)


@pytest.mark.parametrize("overlapping", [expanded, window])
@pytest.mark.parametrize("operation", EVERYTHING)
def test_outputs_that_overlap_themselves_are_refused_before_anything_is_sent(operation, overlapping):
    def body(group):
        number = group._get_sequence_number_for_group()
        for dtype, is_async in itertools.product([torch.float32, torch.bool], [False, True]):
            if writes(operation, group):
                with pytest.raises(ArgumentError, match="overlaps itself"):
                    next(operation(Meddler(group, written=overlapping), (4, 3), dtype, contiguous, is_async)).wait()
        assert group._get_sequence_number_for_group() == number

    def afterwards(group):
        check(group, operation, (4, 3), torch.float32, contiguous, False)

    with ranks(3, timeout_s=3) as run:
        run(body)
        if operation is not messages:  # of which each sends before it would be refused
            run(afterwards)


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_empty_tensors_wait_for_the_others_and_are_counted(world, operation):
    waiting_rank = 0 if operation.__name__ in ("broadcast", "scatter") else 1
    shapes = [(0,), (1, 0, 2)]
    waits = [threading.Event() for _ in shapes]

    def body(group):
        before = group._get_sequence_number_for_group()
        for shape, others_may_come in zip(shapes, waits, strict=True):
            if group.rank() == waiting_rank:
                steps = operation(group, shape, torch.float32, contiguous, True)
                work = next(steps)
                with pytest.raises(CollectiveTimeoutError, match="goes on"):
                    work.wait(SOON)
                assert not work.is_completed()
                others_may_come.set()
                assert work.wait()
                list(steps)
            else:
                wait_for(others_may_come, group)
                check(group, operation, shape, torch.float32, contiguous, False)
        return group._get_sequence_number_for_group() - before

    one, other = world.run(2, body)
    assert one == other >= len(shapes)


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_calls_on_empty_tensors_are_compared_too(operation):
    other = test_torch_backend.all_reduce if operation is not test_torch_backend.all_reduce else operation

    def body(group):
        mine, dtype = (operation, torch.float32) if group.rank() else (other, torch.float64)

        def call():
            for _ in range(2):  # it may show in the next call alone
                next(mine(group, (1, 0, 2), dtype, contiguous, False)).wait()
                group.barrier().wait()

        with pytest.raises(CollectiveMismatchError, match="different calls"):
            call()

    with ranks(2, timeout_s=5) as run:
        run(body)


@pytest.mark.parametrize("sizes", [(3, 5, 1), (0, 4, 0), (2, 0, 7), (0, 0, 1)])
def test_lists_of_tensors_of_any_sizes(world, sizes):
    def body(group):
        mine = group.rank()
        for layout, dtype, is_async in itertools.product(LAYOUTS, [torch.float32, torch.bfloat16], [False, True]):
            everyones = [values(rank, (size, 2), dtype) for rank, size in enumerate(sizes)]
            outputs = [layout(torch.full((size, 2), 9, dtype=dtype)) for size in sizes]
            options = with_options(c10d.AllgatherOptions, is_async)
            assert group.allgather([outputs], [layout(everyones[mine])], options).wait()
            for output, expected in zip(outputs, everyones, strict=True):
                same(output, expected)
            lists = [[values(rank, (size, 2), dtype, dst) for dst, size in enumerate(sizes)] for rank in range(3)]
            output = layout(torch.full((sizes[mine], 2), 9, dtype=dtype))
            options = with_options(c10d.ReduceScatterOptions, is_async)
            assert group.reduce_scatter([output], [[layout(part) for part in lists[mine]]], options).wait()
            same(output, reduced([parts[mine] for parts in lists], "SUM"))

    world.run(3, body)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.all_to_all_single(torch.ones(7), torch.ones(6), [], []), "output has 7 rows, which 3 ranks"),
        (lambda g: g.all_to_all_single(torch.ones(6), torch.ones(7), [], []), "input has 7 rows, which 3 ranks"),
        (lambda g: g.all_to_all_single(torch.ones(1), torch.ones(()), [], []), "1 rows, which 3 ranks"),
        (lambda g: g.all_to_all_single(torch.ones(6), torch.ones(7), [1, 2, 3], []), "input has 7 rows, which 3"),
        (lambda g: g.all_to_all_single(torch.ones(7), torch.ones(6), [], [1, 2, 3]), "output has 7 rows, which 3"),
        (lambda g: g.reduce_scatter_single(torch.ones(2), torch.ones(7)), "7 elements .*must have 6.* output's 2"),
        (lambda g: g.all_gather_single(torch.ones(7), torch.ones(2)), "7 elements .*must have 6.* input's 2"),
        (
            lambda g: g.reduce_scatter_single_coalesced([torch.ones(2), torch.ones(2)], [torch.ones(6), torch.ones(7)]),
            "7 elements .*must have 6",
        ),
        (
            lambda g: g.all_gather_single_coalesced([torch.ones(6), torch.ones(7)], [torch.ones(2), torch.ones(2)]),
            "7 elements .*must have 6",
        ),
    ],
)
def test_rows_that_the_ranks_cannot_share_are_refused_on_every_rank(world, call, message):
    def body(group):
        number = group._get_sequence_number_for_group()
        with pytest.raises(ArgumentError, match=message):
            call(group)
        assert group._get_sequence_number_for_group() == number
        group.barrier().wait()

    world.run(3, body)


def mismatch(group, call: Callable) -> str:
    """What the call ends with, or that after it."""
    with pytest.raises(CollectiveMismatchError) as caught:
        [call().wait(), group.barrier(with_options(c10d.BarrierOptions, False))]
    return str(caught.value)


def lists_to_all(group, leaving, arriving, is_async):
    options = with_options(c10d.AllToAllOptions, is_async)
    return group.alltoall(list(map(torch.zeros, arriving)), list(map(torch.ones, leaving)), options)


def rows_to_all(group, leaving, arriving, is_async):
    options = with_options(c10d.AllToAllOptions, is_async)
    splits = [[shape[0] for shape in shapes] for shapes in (arriving, leaving)]
    output, source = (torch.cat(list(map(torch.zeros, shapes))) for shapes in (arriving, leaving))
    return group.all_to_all_single(output, source, *splits, options)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("form", [lists_to_all, rows_to_all])
@pytest.mark.parametrize(
    ("leaving", "arriving", "pair", "sent", "expected"),
    [
        # What each rank sends to, and expects from, each rank: rows, and their width on the rank
        (([2, 3], [1, 2]), ([2, 1], [1, 2]), (0, 1), 3, 1),
        (([1, 1], [4, 1]), ([1, 0], [1, 1]), (1, 0), 4, 0),
        (([1, 0], [1, 1]), ([1, 1], [5, 1]), (0, 1), 0, 5),
        (([1, 1, 1], [1, 1, 6], [1, 1, 1]), ([1, 1, 1], [1, 1, 1], [1, 2, 1]), (1, 2), 6, 2),
    ],
)
def test_parts_that_do_not_fit_are_told_to_both_with_the_pair_and_both_numbers(
    form, leaving, arriving, pair, sent, expected, is_async
):
    def body(group):
        mine = group.rank()
        shapes = [[(rows, 1) for rows in sizes[mine]] for sizes in (leaving, arriving)]
        return mismatch(group, lambda: form(group, *shapes, is_async))

    with ranks(len(leaving), timeout_s=10) as run:
        texts = run(body)
    src, dst = pair
    for rank in pair:
        assert f"rank {src} sends rank {dst} {sent} elements, and rank {dst} expects {expected}" in texts[rank]


@pytest.mark.parametrize("form", [lists_to_all, rows_to_all])
def test_rows_of_another_width_on_one_rank_are_told_to_both(form):
    def body(group):
        width = (4, 3)[group.rank()]
        return mismatch(group, lambda: form(group, [(2, width)] * 2, [(2, width)] * 2, False))

    with ranks(2, timeout_s=10) as run:
        for text in run(body):
            assert re.search("rank [01] sends rank [01] (8 elements, .* expects 6|6 elements, .* expects 8)", text), (
                text
            )


@pytest.mark.parametrize("count", [0, 1, 4, 71, 100_003])
def test_a_reduction_to_one_rank_leaves_the_tensors_of_the_others_alone(world, count):
    def body(group):
        for root, dtype, layout, is_async in itertools.product(
            range(group.size()),
            [torch.int64, torch.float32, torch.bfloat16],
            [contiguous, every_second],
            [False, True],
        ):
            everyones = inputs(group, (count,), dtype)
            for op in ("SUM", "MAX"):
                tensor = layout(everyones[group.rank()])
                options = with_options(c10d.ReduceOptions, is_async, reduceOp=getattr(dist.ReduceOp, op), rootRank=root)
                assert group.reduce([tensor], options).wait()
                same(tensor, reduced(everyones, op) if group.rank() == root else everyones[group.rank()])

    for world_size in (2, 3, 4):
        world.run(world_size, body)


# --- Modes of torch ---------------------------------------------------------------------------------------------------


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad, autocast])
@pytest.mark.parametrize("operation", EVERYTHING)
def test_every_operation_on_tensors_made_in_a_mode_and_outside(world, operation, mode):
    def body(group):
        for layout, is_async in itertools.product(LAYOUTS, [False, True]):
            with mode():
                check(group, operation, (6, 4), torch.float32, layout, is_async)
            check(Meddler(group, within=mode), operation, (6, 4), torch.float32, layout, is_async)

    world.run(3, body)


@pytest.mark.parametrize("operation", EVERYTHING)
def test_tensors_made_in_inference_mode_may_be_used_outside_of_it(world, operation):
    @contextlib.contextmanager
    def outside():
        with torch.inference_mode(False):
            yield

    def body(group):
        for layout, is_async in itertools.product(LAYOUTS, [False, True]):
            with torch.inference_mode():
                steps = operation(Meddler(group, within=outside), (6, 4), torch.float32, layout, is_async)
                work = next(steps)
                with outside():
                    assert work.wait()
                list(steps)

    world.run(3, body)


@pytest.mark.parametrize("operation", EVERYTHING)
def test_the_default_device_and_dtype_of_tensors_do_not_matter(world, operation):
    dtypes = [torch.float32, torch.bfloat16, torch.int32]

    def device():
        return torch.device("meta")

    def body(group):
        for dtype, layout, is_async in itertools.product(dtypes, [contiguous, every_second], [False, True]):
            steps = operation(Meddler(group, within=device), (6, 4), dtype, layout, is_async)
            work = next(steps)
            with device():
                assert work.wait()
            list(steps)

    torch.set_default_dtype(torch.float64)
    try:
        world.run(3, body)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, autocast, lambda: torch.device("meta")])
def test_sparse_and_scaled_sums_in_every_mode(world, mode):
    def body(group):
        size, mine = group.size(), group.rank()
        tensor = torch.sparse_coo_tensor(
            torch.tensor([[mine, 3]]), torch.tensor([1.0 + mine, 2.0]), (4,), check_invariants=True
        )
        scaled = torch.full((3,), 1.0 + mine)
        with mode():
            group.allreduce([tensor], with_options(c10d.AllreduceOptions, False)).wait()
            half = with_options(c10d.AllreduceOptions, True, reduceOp=dist._make_nccl_premul_sum(0.5))
            group.allreduce([scaled], half).wait()
        same(tensor.to_dense(), torch.tensor([*(1.0 + rank for rank in range(size)), *[0.0] * (3 - size), 2.0 * size]))
        same(scaled, torch.full((3,), 0.5 * sum(1.0 + rank for rank in range(size))))

    world.run(3, body)


# --- Dtypes -----------------------------------------------------------------------------------------------------------

BITS = ("BAND", "BOR", "BXOR")
MEANINGLESS = [
    *((dtype, op) for dtype in COMPLEX for op in ("MIN", "MAX", *BITS)),
    *((dtype, op) for dtype in FLOATS for op in BITS),
    (torch.bool, "AVG"),
    *((dtype, op) for dtype in BYTES_ALONE for op in ("SUM", "MAX")),
]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("dtype", "op"), MEANINGLESS, ids=str)
def test_what_has_no_meaning_is_refused_at_every_entry_point_before_any_rank_sends(world, dtype, op, is_async):
    """Also where it comes last among tensors that can be reduced."""
    reduce_op = getattr(dist.ReduceOp, op)

    def body(group):
        size = group.size()
        bad = values(group.rank(), (size, 3), torch.float32).to(dtype)
        good = values(group.rank(), (size, 3), torch.int64)
        before = good.clone()
        number = group._get_sequence_number_for_group()

        def options(kind, **more):
            return with_options(kind, is_async, reduceOp=reduce_op, **more)

        calls = {
            "all_reduce": lambda: group.allreduce([bad], options(c10d.AllreduceOptions)),
            "coalesced": lambda: group.allreduce_coalesced([good, bad], options(c10d.AllreduceCoalescedOptions)),
            "reduce": lambda: group.reduce([bad], options(c10d.ReduceOptions, rootRank=1)),
            "lists": lambda: group.reduce_scatter([bad[0]], [list(bad)], options(c10d.ReduceScatterOptions)),
            "single": lambda: group.reduce_scatter_single(bad[0].clone(), bad, options(c10d.ReduceScatterOptions)),
            "singles": lambda: group.reduce_scatter_single_coalesced(
                [torch.zeros_like(good[0]), bad[0].clone()], [good, bad], options(c10d.ReduceScatterOptions)
            ),
        }
        problems = []
        for name, call in calls.items():
            with pytest.raises(UnsupportedReductionError) as caught:
                call()
            text = str(caught.value)
            if dtype not in BYTES_ALONE:
                assert f"{op.lower()} has no meaning for {str(dtype)[6:]}; " in text
                assert "can be reduced with" in text
            else:
                assert str(dtype) in text
                assert f"{op.lower()} has no meaning for " in text
            group.barrier(with_options(c10d.BarrierOptions, False))
            number += 1
            if not torch.equal(good, before) or group._get_sequence_number_for_group() != number:
                problems.append(name)
                good, number = before.clone(), group._get_sequence_number_for_group()
        assert problems == []

    world.run(2, body)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *UNSIGNED, *COMPLEX], ids=str)
def test_the_average_is_the_sum_divided_by_the_size_of_the_group(world, dtype):
    """Rounded once; of integers truncated. The number of elements is no multiple of that of ranks."""

    def body(group):
        size = group.size()
        for is_async, shape in itertools.product([False, True], [(5,), (7, 1), ()]):
            everyones = inputs(group, (size, *shape), dtype)
            if dtype.is_complex:  # torch's own division of complex numbers rounds more than once
                parts = [torch.view_as_real(tensor) for tensor in everyones]
                expected = torch.view_as_complex(reduced(parts, "AVG"))
            else:
                expected = reduced(everyones, "AVG")
            averages = every_reduction(group, everyones[group.rank()], dist.ReduceOp.AVG, is_async=is_async)
            for average, part in averages:
                same(average, expected[part])

    for world_size in (2, 3, 4):
        world.run(world_size, body)


def test_the_average_of_integers_is_that_of_the_wrapped_sum_truncated(world):
    def body(group):
        for dtype in INTEGERS[:4]:
            largest = torch.iinfo(dtype).max
            numbers = [[-3, -4, -1, 0], [7, 0, 1, 2], [largest, largest, 0, 0], [-largest, -2, 0, 0]]
            own = torch.tensor([row[group.rank()] for row in numbers], dtype=dtype).repeat(group.size(), 1)
            expected = []
            for row in numbers:
                total = sum(row[: group.size()])
                wrapped = (total + largest + 1) % (2 * largest + 2) - largest - 1
                expected.append(abs(wrapped) // group.size() * (1 if wrapped > 0 else -1))
            for average, _ in every_reduction(group, own, dist.ReduceOp.AVG):
                same(average, torch.tensor(expected, dtype=dtype).expand(average.shape))

    for world_size in (2, 3, 4):
        world.run(world_size, body)


@pytest.mark.parametrize("count", [1, 5, 1000, 100_003, 1_000_003])
def test_averages_of_16_bit_floats_neither_overflow_nor_vanish(world, count):
    """The sum is no float16: it is too large, or each share of it too small."""

    def body(group):
        for number, dtype in [(40000.0, torch.float16), (1e-7, torch.float16), (1e-40, torch.bfloat16)]:
            own = torch.full((group.size(), count // group.size() + 1), number).to(dtype)
            for average, part in every_reduction(group, own, dist.ReduceOp.AVG):
                same(average, own[part])
        sparse = torch.sparse_coo_tensor(
            [[1]], torch.tensor([40000.0], dtype=torch.float16), (3,), check_invariants=True
        )
        group.allreduce([sparse], with_options(c10d.AllreduceOptions, False, reduceOp=dist.ReduceOp.AVG)).wait()
        same(sparse.to_dense(), torch.tensor([0, 40000.0, 0], dtype=torch.float16))

    world.run(4, body)


@pytest.mark.parametrize("count", [1, 5, 1000, 100_003, 1_000_003])
def test_sums_of_16_bit_floats_are_rounded_once(world, count):
    def body(group):
        for (large, dtype), where in itertools.product([(4096.0, torch.float16), (512.0, torch.bfloat16)], range(4)):
            # Added to it one by one in 16 bits, the ones would vanish.
            own = torch.full((4, count // 4 + 1), large if group.rank() == where else 1.0).to(dtype)
            expected = torch.full_like(own, large + 3)
            for total, part in every_reduction(group, own, dist.ReduceOp.SUM):
                same(total, expected[part])

    world.run(4, body)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        *itertools.product(FLOATS, ["MIN", "MAX", "SUM", "AVG", "PRODUCT"]),
        *itertools.product(COMPLEX, ["SUM", "AVG", "PRODUCT"]),
    ],
    ids=str,
)
def test_a_nan_on_any_one_rank_is_nan_on_all(world, dtype, op):
    def body(group):
        for odd_one in range(group.size()):
            everyones = inputs(group, (group.size(), 5), dtype)
            everyones[odd_one][:, 2] = float("nan")
            is_nan = torch.zeros(group.size(), 5, dtype=torch.bool)
            is_nan[:, 2] = True
            for result, part in every_reduction(group, everyones[group.rank()], getattr(dist.ReduceOp, op)):
                same(torch.isnan(result), is_nan[part])

    for world_size in (2, 3, 4):
        world.run(world_size, body)


@pytest.mark.parametrize(
    ("op", "true"),
    [("SUM", any), ("MAX", any), ("BOR", any), ("PRODUCT", all), ("MIN", all), ("BAND", all), ("BXOR", None)],
)
def test_bools_stay_0_or_1_whatever_their_bytes_add_up_to(world, op, true):
    """As with more contributions than a byte can count: 128 + 128, 255 + 1, 2 * 128 are 0 in a byte, 2 & 4 as well."""
    rows = [[128, 128, 128, 128], [255, 1, 0, 0], [2, 4, 1, 8], [0, 0, 0, 0], [0, 0, 16, 0], [2, 128, 1, 1], [64] * 4]

    def body(group):
        size = group.size()
        column = torch.tensor([row[group.rank()] for row in rows], dtype=torch.uint8)
        own = column.repeat(size, 1).view(torch.bool)
        truths = [list(map(bool, row[:size])) for row in rows]
        expected = torch.tensor([true(row) if true else sum(row) % 2 == 1 for row in truths])
        for result, _ in every_reduction(group, own, getattr(dist.ReduceOp, op)):
            same(result.view(torch.uint8), expected.to(torch.uint8).expand(result.shape))

    for world_size in (2, 3, 4):
        world.run(world_size, body)


def test_bools_of_more_contributions_than_a_byte_can_count_stay_true_with_every_algorithm(world):
    """Each sum goes into the next, 4 ^ 5 contributions in all."""

    def body(group):
        for algorithm in algorithms.names("all_reduce"):
            tensor = torch.tensor([True, False, True, group.rank() == 1])
            for _ in range(5):
                group.communicator.all_reduce(tensor, algorithm=algorithm)
            same(tensor.view(torch.uint8), torch.tensor([1, 0, 1, 1], dtype=torch.uint8))

    world.run(4, body)


COPIES = {"copied": copy.copy, "deep-copied": copy.deepcopy, "pickled": lambda op: pickle.loads(pickle.dumps(op))}


@pytest.mark.parametrize("how", COPIES)
def test_reductions_may_be_copied_and_pickled(world, how):
    def body(group):
        size, mine = group.size(), group.rank()
        everyones = inputs(group, (size, 5), torch.int32)
        for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", *BITS):
            for op in (getattr(dist.ReduceOp, name), dist.ReduceOp(getattr(dist.ReduceOp, name))):
                again = COPIES[how](op)
                assert again == op
                for result, part in every_reduction(group, everyones[mine], again):
                    same(result, reduced(everyones, name)[part])

    world.run(3, body)


FACTORS = {"a float": lambda x: x, "0-dimensional": torch.tensor, "of one element": lambda x: torch.tensor([x])}


@pytest.mark.parametrize("how", [*COPIES, "used as it is"])
@pytest.mark.parametrize("given", FACTORS)
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, torch.int32], ids=str)
def test_scaled_sums_by_every_entry_point_with_every_kind_of_factor(world, dtype, given, how):
    """Every rank has a factor of its own; scaled before they are summed, rounded once."""

    def body(group):
        size, mine = group.size(), group.rank()
        scale = 1.0 if dtype == torch.int32 else 0.125
        factors = [(1 + 2 * rank) * scale for rank in range(size)]
        op = COPIES.get(how, lambda op: op)(dist._make_nccl_premul_sum(FACTORS[given](factors[mine])))
        everyones = [tensor + 257 if dtype == torch.bfloat16 else tensor for tensor in inputs(group, (size, 5), dtype)]
        wide = torch.complex128 if dtype.is_complex else torch.float64
        total = sum(factor * tensor.to(wide) for factor, tensor in zip(factors, everyones, strict=True)).to(dtype)
        for is_async in (False, True):
            for result, part in every_reduction(group, everyones[mine], op, is_async=is_async):
                same(result, total[part])

    world.run(3, body)


@pytest.mark.parametrize("operation", EVERYTHING)
def test_single_numbers_and_every_count_up_to_70(world, operation):
    dtypes = [torch.float32, torch.int8, torch.bfloat16, torch.complex128, torch.float64]

    def body(group):
        for shape, dtype in zip([(), *((count,) for count in range(1, 71))], itertools.cycle(dtypes)):
            check(group, operation, shape, dtype, contiguous, is_async=len(shape) == 0)
        for dtype, layout, is_async in itertools.product(ALL, LAYOUTS, [False, True]):
            check(group, operation, (), dtype, layout, is_async)

    for world_size in (2, 3):
        world.run(world_size, body)


# --- Futures, threads, tags -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["then", "add_done_callback"])
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_every_operation_may_be_called_from_a_callback(world, operation, how):
    """Of a call that is still going on, and of one that is over: then the callback runs at once."""

    def body(group):
        for is_over, is_async in itertools.product([False, True], [False, True]):
            tensor = torch.full((3,), 1.0 + group.rank())
            work = group.allreduce([tensor], with_options(c10d.AllreduceOptions, True))
            outcomes, is_called = [], threading.Event()

            def call(future, outcomes=outcomes, is_called=is_called, is_async=is_async):
                try:
                    check(group, operation, (6, 4), torch.float32, contiguous, is_async)
                    outcomes.append((future.value()[0][0].item(), None))
                except BaseException as error:
                    outcomes.append((math.nan, error))
                is_called.set()

            if is_over:
                work.wait()
            getattr(work.get_future(), how)(call)
            assert is_called.wait(20)
            assert outcomes == [(6.0, None)]

    world.run(3, body)


def in_threads(*bodies: Callable[[], None]) -> None:
    """All at once, each on a thread; raises what one of them raised."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        for outcome in [threads.submit(body) for body in bodies]:
            outcome.result()


@pytest.mark.parametrize(
    "operation", [one for one in COLLECTIVES if "coalesced" not in one.__name__]
)  # of which each is several calls
def test_two_threads_may_make_equal_calls_on_one_group(world, operation):
    """Which of one rank's meets which of another's is anybody's guess: so they are alike."""

    def body(group):
        def many():
            for count in range(20):
                check(group, operation, (6, 4), torch.float32, contiguous, count % 3 == 0)

        in_threads(many, many)

    world.run(2, body)


def test_two_threads_that_make_calls_on_one_group_in_different_orders_are_told():
    def body(group):
        def call(tensor):
            try:
                works.append(group.allreduce([tensor], with_options(c10d.AllreduceOptions, True)))
            except CollectiveMismatchError as error:  # that of the call before it, if it is known by then
                assert works
                told.append(error)

        works, told = [], []
        tensors = [torch.ones(3), torch.ones(4)]
        for tensor in tensors if group.rank() == 0 else reversed(tensors):
            thread = threading.Thread(target=call, args=(tensor,))
            thread.start()
            thread.join()
        for work in works:
            with pytest.raises(CollectiveMismatchError, match=r"all_reduce\([34] x float32, sum\)"):
                work.wait()
        assert len(works) + len(told) == 2

    with ranks(2) as run:
        run(body)


def test_two_threads_that_race_on_one_group_get_right_results_or_are_told():
    def body(group):
        told = []

        def many(count):
            try:
                for number in range(200):
                    tensor = torch.full((count,), float(number + group.rank()))
                    group.allreduce([tensor], with_options(c10d.AllreduceOptions, False)).wait()
                    same(tensor, torch.full((count,), 2.0 * number + 1))
            except CollectiveMismatchError as error:
                told.append(error)

        in_threads(lambda: many(5), lambda: many(7))
        return bool(told)

    with ranks(2) as run:
        assert len(set(run(body))) == 1  # both ranks are told, or neither


@pytest.mark.parametrize("operation", EVERYTHING)
def test_two_threads_may_use_two_groups_of_the_same_ranks(world, operation):
    others = meet(2)

    def body(group):
        def many(group, dtype):
            for count in range(20):
                check(group, operation, (6, 4), dtype, contiguous, count % 3 == 0)

        in_threads(lambda: many(group, torch.float32), lambda: many(others[group.rank()], torch.int16))

    try:
        world.run(2, body)
    finally:
        leave(others)


def test_messages_that_wait_behind_others_are_kept_within_a_bound(monkeypatch):
    """Within it they come out in any order; beyond it both ranks are told who sent too much."""
    monkeypatch.setattr(runner, "_memory_bytes", lambda: 2 * 2 * 64 * 1024)

    def body(group):
        for tags in (range(3), range(100)):
            sizes = dict.fromkeys(tags, 8 * 1024)
            if group.rank() == 0:
                works = [group.send([values(tag, (size,), torch.uint8)], 1, tag) for tag, size in sizes.items()]
                for work in works:
                    work.wait()
            else:
                for tag in reversed(tags):
                    got = torch.full((sizes[tag],), 9, dtype=torch.uint8)
                    group.recv([got], 0, tag).wait()
                    same(got, values(tag, (sizes[tag],), torch.uint8))
        group.barrier(with_options(c10d.BarrierOptions, False))

    def told(group):
        with pytest.raises(CommunicationError, match="rank 0 has sent rank 1 more than it can keep"):
            body(group)

    with ranks(2) as run:
        run(told)


# --- Outputs that are spoiled until they are there --------------------------------------------------------------------


@pytest.fixture
def poison(monkeypatch):
    monkeypatch.setenv("FARANDOLE_POISON", "1")


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Element by element."""
    if tensor.dtype == torch.bool:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.isnan(tensor.to(torch.float32) if tensor.dtype in BYTES_ALONE else tensor)
    as_bytes = tensor.contiguous().view(torch.uint8).reshape(tensor.numel(), -1)
    return (as_bytes == 255).all(1).view(tensor.shape)


@pytest.mark.parametrize("operation", EVERYTHING)
def test_every_operation_is_right_on_groups_that_spoil_outputs(poison, operation):
    def body(group):
        for shape, layout, is_async in itertools.product(SHAPES, LAYOUTS, [False, True]):
            taken = []

            def keep(tensor, taken=taken):
                taken.append((tensor, tensor.clone()))
                return tensor

            check(Meddler(group, read=keep), operation, shape, torch.float32, layout, is_async)
            for tensor, before in taken:
                same(tensor, before)
        for dtype in ALL if operation in ALL_REDUCING else [*ALL, *BYTES_ALONE]:
            check(group, operation, (3, 4), dtype, contiguous, True)

    with ranks(3) as run:
        run(body)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "operation", [one for one in EVERYTHING if one.__name__ not in ("all_reduce", "all_reduce_coalesced", "reduce")]
)
def test_outputs_are_spoiled_until_they_are_there(poison, operation, layout):
    """What comes from the rank itself may be there at once."""
    waiting_rank = 0 if operation.__name__ in ("broadcast", "scatter") else 1
    dtypes = [torch.float32, torch.bfloat16, torch.complex64, torch.int16, torch.uint8]
    dtypes += [torch.float64] if operation in ALL_REDUCING else [torch.bool, *BYTES_ALONE]
    waits = [threading.Event() for _ in dtypes]
    has_own_part = "gather" in operation.__name__ or "all_to_all" in operation.__name__

    def body(group):
        for dtype, others_may_come in zip(dtypes, waits, strict=True):
            if group.rank() != waiting_rank:
                wait_for(others_may_come, group)
                check(group, operation, (4, 3), dtype, contiguous, False)
                continue
            outputs = []

            def keep(tensor, outputs=outputs):
                outputs.append(tensor)
                return tensor

            steps = operation(Meddler(group, written=keep), (4, 3), dtype, layout, True)
            try:
                work = next(steps)
                before = [tensor.clone() for tensor in outputs]
            finally:
                others_may_come.set()
            assert work.wait()
            list(steps)
            spoiled = [is_poison(tensor) for tensor in before]
            assert all(map(torch.any, spoiled)) or has_own_part
            assert any(map(torch.any, spoiled))
            for tensor, is_spoiled, after in zip(before, spoiled, outputs, strict=True):
                if dtype in BYTES_ALONE:
                    tensor, after = tensor.view(torch.uint8), after.contiguous().view(torch.uint8)
                may_be = is_spoiled | (tensor == after) if has_own_part else is_spoiled
                assert may_be.all(), (dtype, tensor)

    with ranks(2) as run:
        run(body)


def test_what_is_input_too_is_never_spoiled(poison):
    """In place, of a part of the output, of the tensor of a list."""

    def body(group):
        size, mine = group.size(), group.rank()
        everyones = inputs(group, (size, 3), torch.float32)
        for _ in range(3):
            whole = torch.full((size, 3), 9.0)
            whole[mine] = everyones[mine][mine]
            options = with_options(c10d.AllgatherOptions, True)
            assert group.all_gather_single(whole, whole[mine], options).wait()
            same(whole, torch.stack([tensor[rank] for rank, tensor in enumerate(everyones)]))
            for make in (
                lambda: list(torch.full((size, 3), 9.0)),
                lambda: [torch.full((3,), 9.0) for _ in range(size)],
            ):
                tensors = make()
                tensors[mine].copy_(everyones[mine][mine])
                assert group.allgather([tensors], [tensors[mine]], options).wait()
                same(torch.stack(tensors), whole)
                tensors = make()
                tensors[mine].copy_(everyones[mine][mine])
                gathering = with_options(c10d.GatherOptions, True, rootRank=1)
                assert group.gather([tensors] if mine == 1 else [], [tensors[mine]], gathering).wait()
                assert mine != 1 or torch.equal(torch.stack(tensors), whole)
                tensors = make()
                for tensor, row in zip(tensors, everyones[mine], strict=True):
                    tensor.copy_(row)
                scattering = with_options(c10d.ScatterOptions, True, rootRank=1)
                assert group.scatter([tensors[mine]], [tensors] if mine == 1 else [], scattering).wait()
                same(tensors[mine], everyones[1][mine])
                tensors = make()
                for tensor, row in zip(tensors, everyones[mine], strict=True):
                    tensor.copy_(row)
                reducing = with_options(c10d.ReduceScatterOptions, True)
                assert group.reduce_scatter([tensors[mine]], [tensors], reducing).wait()
                same(tensors[mine], reduced(everyones, "SUM")[mine])
                tensors = make()
                for tensor, row in zip(tensors, everyones[mine], strict=True):
                    tensor.copy_(row)
                assert group.alltoall(tensors, tensors, with_options(c10d.AllToAllOptions, True)).wait()
                same(torch.stack(tensors), torch.stack([tensor[mine] for tensor in everyones]))
            tensor = everyones[mine].clone()
            assert group.reduce_scatter_single(tensor[mine], tensor, reducing).wait()
            same(tensor[mine], reduced(everyones, "SUM")[mine])
            tensor = everyones[mine].clone()
            options = with_options(c10d.AllToAllOptions, True)
            assert group.all_to_all_single(tensor, tensor, [], [], options).wait()
            same(tensor, torch.stack([tensor[mine] for tensor in everyones]))

    with ranks(3) as run:
        run(body)


# --- More than 31 and 32 bits can count -------------------------------------------------------------------------------


def large_calls(group):
    """Each takes up what the last one left, so that the numbers are made only once."""
    mine = group.rank()
    tensor = torch.zeros(HUGE, dtype=torch.uint8)
    fill(tensor.numpy(), mine)
    group.allreduce([tensor], with_options(c10d.AllreduceOptions, False)).wait()
    require_sum(tensor.numpy(), (0, 1))
    if mine == 1:
        tensor.zero_()
    group.broadcast([tensor], with_options(c10d.BroadcastOptions, False, rootRank=0)).wait()
    if mine == 1:
        require_sum(tensor.numpy(), (0, 1))
    # All but three elements go from rank 1 to rank 0, which sends five.
    kept, few = tensor[:3].clone(), tensor[1000:1005].clone()
    options = with_options(c10d.AllToAllOptions, False)
    if mine == 0:
        tensor.zero_()
        group.all_to_all_single(tensor, torch.cat([kept, few]), [3, HUGE - 3], [3, 5], options)
        require_sum(tensor.numpy(), (0, 1))
    else:
        got = torch.zeros(5, dtype=torch.uint8)
        group.all_to_all_single(got, tensor[3:], [5, 0], [HUGE - 3, 0], options)
        same(got, few)


def large_messages(group):
    """Of 2 ** 31 bytes, and of more than 2 ** 32."""
    most = 2**29 + 1
    tensor = torch.arange(most) if group.rank() == 0 else torch.zeros(most, dtype=torch.int64)
    for count in (2**28, most):
        if group.rank() == 0:
            group.send([tensor[:count]], 1).wait()
        else:
            group.recv([tensor[:count]], 0).wait()
            block = np.arange(2**16)
            for start in range(0, count, len(block)):
                part = tensor[start : min(start + len(block), count)].numpy()
                assert np.array_equal(part, block[: len(part)] + start)
            assert count == most or not tensor[count : count + 1000].any()
        group.barrier(with_options(c10d.BarrierOptions, False))


@pytest.mark.parametrize("calls", [large_calls, large_messages])
def test_more_elements_than_31_bits_and_more_bytes_than_32_bits_can_count(calls):
    if available_gib() < 12:
        pytest.skip(f"needs 12 GiB of memory, and {available_gib():.1f} GiB are available")
    with ranks(2, timeout_s=60) as run:
        run(calls)
