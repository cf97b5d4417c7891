"""The torch backend's groups: every operation on every dtype, reduction and layout, against plain references.

The ranks are threads here, each with a group of its own that met at a store of torch's; programs of several processes
are in test_torch_programs.py.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import farandole.torch_backend
from farandole import arrival
from farandole.errors import (
    ArgumentError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorClosedError,
    RendezvousError,
)
from farandole.torch_backend import group as group_module
from farandole.torch_backend import works
from farandole.torch_backend.group import ProcessGroup, create

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
BYTES_ALONE = [torch.float8_e4m3fn, torch.float8_e5m2]
ALL = [*FLOATS, *INTEGERS, *UNSIGNED, *COMPLEX, torch.bool]
WAIT_S = 30


def meet(world_size: int, *, timeout_s: float = WAIT_S, job_ranks=()) -> list[ProcessGroup]:
    """A group per rank."""
    store = dist.HashStore()
    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(lambda rank: join(store, rank, world_size, timeout_s, job_ranks), range(world_size)))


def join(store, rank: int, world_size: int, timeout_s: float, job_ranks=()) -> ProcessGroup:
    """The group of one rank."""
    options = c10d._DistributedBackendOptions()
    options.store = dist.PrefixStore("group/", store)
    options.group_rank, options.group_size = rank, world_size
    options.timeout = timedelta(seconds=timeout_s)
    options.group_id = "group"
    options.global_ranks_in_group = list(job_ranks)
    return create(options)


class World:
    """Groups of all sizes, made when first asked for."""

    def __init__(self) -> None:
        self._groups: dict[int, list[ProcessGroup]] = {}
        self._threads = ThreadPoolExecutor(5)

    def run(self, world_size: int, body) -> list:
        """``body(group)`` on every rank."""
        if world_size not in self._groups:
            self._groups[world_size] = meet(world_size)
        return list(self._threads.map(body, self._groups[world_size]))

    def close(self) -> None:
        for group in itertools.chain.from_iterable(self._groups.values()):
            group.shutdown()
        self._threads.shutdown()


@pytest.fixture(scope="module")
def world():
    made = World()
    yield made
    made.close()


def with_options(kind, is_async: bool, **fields):
    """Options of that kind."""
    options = kind()
    options.asyncOp = is_async
    for name, value in fields.items():
        setattr(options, name, value)
    return options


# --- Data and layouts -------------------------------------------------------------------------------------------------


def values(rank: int, shape, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Data that differ per rank, element and salt; so small that sums and products of five are exact."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * 7 + rank * 3 + salt * 5) % 11
    if dtype == torch.bool:
        return (numbers % 2 == 0).view(shape)
    if dtype.is_complex:
        return (numbers + 1j * ((numbers * 3 + rank) % 7)).to(dtype).view(shape)
    if dtype in UNSIGNED or dtype == torch.uint8:
        return (numbers % 3).to(dtype).view(shape)
    return ((numbers % 5) - 2).to(dtype).view(shape)


def contiguous(tensor):
    return tensor.clone()


def transposed(tensor):
    return tensor.t().contiguous().t() if tensor.dim() == 2 else every_second(tensor)


def every_second(tensor):
    wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1])) if tensor.dim() else tensor.new_zeros(2)
    part = wide[..., ::2] if tensor.dim() else wide[1]
    part.copy_(tensor)
    return part


def with_offset(tensor):
    wide = tensor.new_zeros(tensor.numel() + 3)
    wide[3:].copy_(tensor.reshape(-1))
    return wide[3:].view(tensor.shape)


def expanded(tensor):
    """As input alone: all rows are one and the same."""
    return tensor[:1].expand(tensor.shape) if tensor.dim() and tensor.shape[0] else tensor


LAYOUTS = [contiguous, transposed, every_second, with_offset]
SHAPES = [(6, 4), (5,), (), (0,), (1, 0, 2)]


# --- The operations: each says what it did and what must have come of it ----------------------------------------------


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Exactly equal, NaN included."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype in BYTES_ALONE:
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    torch.testing.assert_close(actual.contiguous(), expected.contiguous(), rtol=0, atol=0, equal_nan=True)


def reduced(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """By the book, in a dtype that holds it all."""
    dtype = tensors[0].dtype
    if dtype == torch.bool:
        wide = [tensor.to(torch.int64) for tensor in tensors]
    elif dtype.is_complex:
        wide = [tensor.to(torch.complex128) for tensor in tensors]
    elif dtype.is_floating_point:
        wide = [tensor.to(torch.float64) for tensor in tensors]
    else:
        wide = [tensor.to(torch.int64) for tensor in tensors]
    stacked = torch.stack(wide)
    if op == "SUM":
        result = stacked.sum(0)
    elif op == "AVG":
        result = stacked.sum(0)
        result = (
            result / len(tensors) if result.dtype != torch.int64 else result.div(len(tensors), rounding_mode="trunc")
        )
    elif op == "PRODUCT":
        result = stacked.prod(0)
    elif op in ("MIN", "MAX"):
        result = stacked.amin(0) if op == "MIN" else stacked.amax(0)
    else:
        combine = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[op]
        result = wide[0]
        for more in wide[1:]:
            result = combine(result, more)
    return result.to(dtype)


def inputs(group, shape, dtype, salt=0):
    """Every rank's data."""
    return [values(rank, shape, dtype, salt) for rank in range(group.size())]


def all_reduce(group, shape, dtype, layout, is_async, op="SUM"):
    everyones = inputs(group, shape, dtype)
    tensor = layout(everyones[group.rank()])
    options = with_options(c10d.AllreduceOptions, is_async, reduceOp=getattr(dist.ReduceOp, op))
    yield group.allreduce([tensor], options)
    same(tensor, reduced(everyones, op))


def all_reduce_coalesced(group, shape, dtype, layout, is_async, op="SUM"):
    everyones = [inputs(group, shape, dtype, salt) for salt in range(3)]
    tensors = [layout(each[group.rank()]) for each in everyones]
    options = with_options(c10d.AllreduceCoalescedOptions, is_async, reduceOp=getattr(dist.ReduceOp, op))
    yield group.allreduce_coalesced(tensors, options)
    for tensor, each in zip(tensors, everyones, strict=True):
        same(tensor, reduced(each, op))


def reduce(group, shape, dtype, layout, is_async, op="SUM"):
    root = group.size() - 1
    everyones = inputs(group, shape, dtype)
    tensor = layout(everyones[group.rank()])
    options = with_options(c10d.ReduceOptions, is_async, reduceOp=getattr(dist.ReduceOp, op), rootRank=root)
    yield group.reduce([tensor], options)
    same(tensor, reduced(everyones, op) if group.rank() == root else everyones[group.rank()])


def uneven(shape, rank):
    """The shape of a rank's tensor, where they may differ."""
    return (shape[0] + rank, *shape[1:]) if shape else shape


def reduce_scatter(group, shape, dtype, layout, is_async, op="SUM"):
    def parts(rank):
        return [values(rank, uneven(shape, dst), dtype, dst) for dst in range(group.size())]

    mine = group.rank()
    output = layout(values(9, uneven(shape, mine), dtype))
    options = with_options(c10d.ReduceScatterOptions, is_async, reduceOp=getattr(dist.ReduceOp, op))
    yield group.reduce_scatter([output], [[layout(part) for part in parts(mine)]], options)
    same(output, reduced([parts(rank)[mine] for rank in range(group.size())], op))


def reduce_scatter_single(group, shape, dtype, layout, is_async, op="SUM"):
    size, mine = group.size(), group.rank()
    whole = (size * shape[0], *shape[1:]) if shape else (size,)
    everyones = inputs(group, whole, dtype)
    output = layout(values(9, shape, dtype))
    options = with_options(c10d.ReduceScatterOptions, is_async, reduceOp=getattr(dist.ReduceOp, op))
    yield group.reduce_scatter_single(output, layout(everyones[mine]), options)
    same(output, reduced(everyones, op).reshape(size, *shape)[mine])


def broadcast(group, shape, dtype, layout, is_async):
    root = group.size() // 2
    everyones = inputs(group, shape, dtype)
    tensor = layout(everyones[group.rank()])
    yield group.broadcast([tensor], with_options(c10d.BroadcastOptions, is_async, rootRank=root))
    same(tensor, everyones[root])


def all_gather(group, shape, dtype, layout, is_async):
    everyones = [values(rank, uneven(shape, rank), dtype) for rank in range(group.size())]
    outputs = [layout(values(9, uneven(shape, rank), dtype)) for rank in range(group.size())]
    mine = layout(everyones[group.rank()])
    yield group.allgather([outputs], [mine], with_options(c10d.AllgatherOptions, is_async))
    for output, expected in zip(outputs, everyones, strict=True):
        same(output, expected)


def all_gather_adjacent(group, shape, dtype, layout, is_async):
    """Into tensors that lie in a row."""
    everyones = inputs(group, shape, dtype)
    whole = values(9, (group.size(), *shape), dtype)
    mine = layout(everyones[group.rank()])
    yield group.allgather([list(whole.unbind())], [mine], with_options(c10d.AllgatherOptions, is_async))
    same(whole, torch.stack(everyones))


def all_gather_single(group, shape, dtype, layout, is_async):
    everyones = inputs(group, shape, dtype)
    output = layout(values(9, (group.size() * shape[0], *shape[1:]) if shape else (group.size(),), dtype))
    options = with_options(c10d.AllgatherOptions, is_async)
    yield group.all_gather_single(output, layout(everyones[group.rank()]), options)
    same(output.reshape(group.size(), *shape), torch.stack(everyones))


def all_gather_coalesced(group, shape, dtype, layout, is_async):
    everyones = [[values(rank, shape, dtype, salt) for salt in range(2)] for rank in range(group.size())]
    outputs = [[layout(values(9, shape, dtype)) for _ in range(2)] for _ in range(group.size())]
    mine = [layout(tensor) for tensor in everyones[group.rank()]]
    yield group.allgather_coalesced(outputs, mine, with_options(c10d.AllgatherOptions, is_async))
    for output, expected in zip(itertools.chain(*outputs), itertools.chain(*everyones), strict=True):
        same(output, expected)


def gather(group, shape, dtype, layout, is_async):
    root = group.size() - 1
    everyones = inputs(group, shape, dtype)
    outputs = [layout(values(9, shape, dtype)) for _ in range(group.size())] if group.rank() == root else []
    options = with_options(c10d.GatherOptions, is_async, rootRank=root)
    yield group.gather([outputs] if outputs else [], [layout(everyones[group.rank()])], options)
    for output, expected in zip(outputs, everyones, strict=False):
        same(output, expected)


def scatter(group, shape, dtype, layout, is_async):
    root = group.size() - 1
    parts = [values(root, shape, dtype, salt) for salt in range(group.size())]
    output = layout(values(9, shape, dtype))
    options = with_options(c10d.ScatterOptions, is_async, rootRank=root)
    yield group.scatter([output], [[layout(part) for part in parts]] if group.rank() == root else [], options)
    same(output, parts[group.rank()])


def all_to_all(group, shape, dtype, layout, is_async):
    size, mine = group.size(), group.rank()

    def part(src, dst):
        return values(src, uneven(shape, (src + 2 * dst) % 3), dtype, dst)

    outputs = [layout(values(9, part(src, mine).shape, dtype)) for src in range(size)]
    sources = [layout(part(mine, dst)) for dst in range(size)]
    yield group.alltoall(outputs, sources, with_options(c10d.AllToAllOptions, is_async))
    for src, output in enumerate(outputs):
        same(output, part(src, mine))


def all_to_all_single(group, shape, dtype, layout, is_async):
    size, mine = group.size(), group.rank()

    def part(src, dst):
        return values(src, uneven(shape or (1,), (src + 2 * dst) % 3), dtype, dst)

    leaving = [part(mine, dst) for dst in range(size)]
    arriving = [part(src, mine) for src in range(size)]
    output = layout(torch.cat([torch.zeros_like(tensor) for tensor in arriving]))
    splits = [[len(tensor) for tensor in tensors] for tensors in (arriving, leaving)]
    options = with_options(c10d.AllToAllOptions, is_async)
    yield group.all_to_all_single(output, layout(torch.cat(leaving)), *splits, options)
    same(output, torch.cat(arriving))


def all_to_all_equal(group, shape, dtype, layout, is_async):
    size, mine = group.size(), group.rank()
    parts = [[values(src, shape or (1,), dtype, dst) for dst in range(size)] for src in range(size)]
    output = layout(torch.cat([torch.zeros_like(tensor) for tensor in parts[mine]]))
    options = with_options(c10d.AllToAllOptions, is_async)
    yield group.all_to_all_single(output, layout(torch.cat(parts[mine])), [], [], options)
    same(output, torch.cat([parts[src][mine] for src in range(size)]))


REDUCING = [all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_single]
MOVING = [
    broadcast,
    all_gather,
    all_gather_adjacent,
    all_gather_single,
    all_gather_coalesced,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    all_to_all_equal,
]


def check(group, operation, *arguments, **more) -> None:
    """Run an operation, wait for it, and compare."""
    steps = operation(group, *arguments, **more)
    work = next(steps)
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    with contextlib.suppress(StopIteration):
        next(steps)


# --- The matrix -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("operation", [*REDUCING, *MOVING])
def test_every_operation_on_every_layout_and_shape(world, operation, world_size):
    def body(group):
        for shape, layout, is_async in itertools.product(SHAPES, LAYOUTS, [False, True]):
            check(group, operation, shape, torch.float32, layout, is_async)

    world.run(world_size, body)


@pytest.mark.parametrize("operation", MOVING)
def test_every_operation_moves_every_dtype(world, operation):
    def body(group):
        for dtype, layout, is_async in itertools.product(
            [*ALL, *BYTES_ALONE], [contiguous, every_second], [False, True]
        ):
            check(group, operation, (3, 4), dtype, layout, is_async)

    world.run(3, body)


def ops_of(dtype: torch.dtype) -> list[str]:
    if dtype.is_complex:
        return ["SUM", "AVG", "PRODUCT"]
    if dtype.is_floating_point:
        return ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]
    return ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", *(["AVG"] if dtype != torch.bool else [])]


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("operation", REDUCING)
def test_every_reduction_of_every_dtype(world, operation, dtype):
    def body(group):
        for op, is_async in itertools.product(ops_of(dtype), [False, True]):
            if op == "AVG" and dtype in (torch.float16, torch.bfloat16, torch.float32, *COMPLEX) and group.size() == 3:
                continue  # a third is not exact; worlds of 2 and 4 have it
            check(group, operation, (3, 4), dtype, contiguous, is_async, op=op)

    for world_size in (2, 3, 4):
        world.run(world_size, body)


@pytest.mark.parametrize("operation", [*REDUCING, *MOVING])
def test_the_check_of_each_operation_finds_one_wrong_element(world, operation, monkeypatch):
    """Whatever comes out, one element of it is then spoiled on one rank."""
    run = ProcessGroup._run

    def spoiled(self, opts, *parts):
        handle = run(self, opts, *parts)
        handle.wait()
        if self.rank() == self.size() - 1:
            tensor = parts[-1].tensors[-1]
            row = tensor.view(torch.uint8).view(-1)
            row[0] += 1
        return handle

    monkeypatch.setattr(ProcessGroup, "_run", spoiled)

    def body(group):
        try:
            check(group, operation, (3, 4), torch.float32, contiguous, True)
        except AssertionError:
            return "found"
        return "missed"

    assert world.run(3, body)[-1] == "found"


def test_expanded_inputs_are_taken_and_outputs_that_overlap_themselves_are_refused(world):
    def body(group):
        size = group.size()
        row = values(group.rank(), (1, 4), torch.float32).expand(3, 4)
        output = torch.zeros(3 * size, 4)
        assert group.all_gather_single(output, row).wait()
        same(output, torch.cat([values(rank, (1, 4), torch.float32).expand(3, 4) for rank in range(size)]))
        with pytest.raises(ArgumentError, match="overlaps itself"):
            group.allreduce([row])

    world.run(3, body)


def test_channels_last_tensors_are_reduced_by_element(world):
    def body(group):
        everyones = inputs(group, (2, 3, 4, 5), torch.float32)
        is_last = group.rank() % 2 == 0  # and not on the others
        mine = everyones[group.rank()]
        tensor = mine.to(memory_format=torch.channels_last) if is_last else mine.clone()
        group.allreduce([tensor]).wait()
        same(tensor, reduced(everyones, "SUM"))

    world.run(3, body)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_premul_sum_scales_before_it_sums_and_rounds_once(world, dtype, as_tensor):
    """Every rank has a factor of its own."""

    def body(group):
        factors = [0.5 + rank for rank in range(group.size())]
        own = factors[group.rank()]
        op = dist._make_nccl_premul_sum(torch.tensor([own]) if as_tensor else own)
        everyones = inputs(group, (3, 4), dtype)
        pairs = zip(factors, everyones, strict=True)
        expected = sum(factor * tensor.to(torch.float64) for factor, tensor in pairs).to(dtype)
        tensor = everyones[group.rank()].clone()
        group.allreduce([tensor], with_options(c10d.AllreduceOptions, True, reduceOp=op)).wait()
        same(tensor, expected)
        tensor = everyones[group.rank()].clone()
        group.reduce([tensor], with_options(c10d.ReduceOptions, False, reduceOp=op, rootRank=1)).wait()
        same(tensor, expected if group.rank() == 1 else everyones[group.rank()])
        output = torch.zeros(4, dtype=dtype)
        whole = everyones[group.rank()].reshape(-1)
        options = with_options(c10d.ReduceScatterOptions, True, reduceOp=op)
        group.reduce_scatter_single(output, whole, options).wait()
        same(output, expected.reshape(-1)[4 * group.rank() :][:4])

    world.run(3, body)


def test_sparse_tensors_of_16_bits_are_rounded_once(world):
    def body(group):
        value = 256.0 if group.rank() == 0 else 1.0
        tensor = torch.sparse_coo_tensor(
            [[1]], torch.tensor([value], dtype=torch.bfloat16), (3,), check_invariants=True
        )
        group.allreduce([tensor], with_options(c10d.AllreduceOptions, False)).wait()
        same(tensor.to_dense(), torch.tensor([0, 260, 0], dtype=torch.bfloat16))

    world.run(5, body)


@pytest.mark.parametrize("op", ["SUM", "AVG"])
def test_sparse_tensors_are_summed(world, op):
    """Also where ranks have different numbers of entries, entries twice, or none."""

    def body(group):
        def own(rank):
            indices = torch.tensor([[rank, 2, 2][: rank + 1 if rank < 2 else 0]])
            return torch.sparse_coo_tensor(
                indices, torch.ones(indices.shape[1], 2) * (rank + 1), (5, 2), check_invariants=True
            )

        tensor = own(group.rank())
        options = with_options(c10d.AllreduceOptions, False, reduceOp=getattr(dist.ReduceOp, op))
        group.allreduce([tensor], options).wait()
        dense = torch.stack([own(rank).to_dense() for rank in range(group.size())])
        same(tensor.to_dense(), dense.sum(0) if op == "SUM" else dense.sum(0) / group.size())
        with pytest.raises(ArgumentError, match="the sum and the average alone"):
            group.allreduce([own(0)], with_options(c10d.AllreduceOptions, False, reduceOp=dist.ReduceOp.MAX))

    world.run(4, body)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_numbers_that_are_but_moved_may_be_strided_and_of_any_size(world):
    """Those of 16 + 16 bits, whose bytes torch itself views only where they lie in a row."""

    def body(group):
        for shape, take in [((4,), 2), ((1,), 2), ((0,), 2), ((3, 5), 3), ((1, 1), 4)]:
            wide = torch.zeros(*shape[:-1], shape[-1] * take, dtype=torch.complex32)
            for rank in range(group.size()):
                mine, output = wide.clone()[..., ::take], wide.clone()[..., ::take]
                expected = torch.complex(torch.arange(mine.numel()) + 1.0, torch.full((mine.numel(),), rank + 0.5))
                mine.copy_(expected.view(mine.shape))
                group.broadcast([mine if group.rank() == rank else output], root=rank).wait()
                outputs = [wide.clone()[..., ::take] for _ in range(group.size())]
                group.allgather([outputs], [mine if group.rank() == rank else output]).wait()
                for tensor in outputs:
                    same(tensor.to(torch.complex64), expected.view(mine.shape))

    world.run(3, body)


def test_sparse_tensors_of_different_shapes_are_refused_on_every_rank(world):
    """Their indices would lie outside of the sum."""

    def body(group):
        shape = (4,) if group.rank() == 0 else (10**9,)
        tensor = torch.sparse_coo_tensor([[shape[0] - 1]], torch.ones(1), shape, check_invariants=True)
        with pytest.raises(CollectiveMismatchError, match=r"rank 0: \(4,\), 1 .*\n.*rank 1: \(1000000000,\), 1 "):
            group.allreduce([tensor], with_options(c10d.AllreduceOptions, False))
        group.barrier().wait()

    world.run(3, body)


def test_lists_with_conjugated_parts_are_no_row(world):
    def body(group):
        whole = torch.tensor([1 + 1j, 2 + 2j])
        parts = [whole[:1], whole[1:].conj()]
        output = torch.zeros(1, dtype=whole.dtype)
        group.scatter([output], [parts] if group.rank() == 0 else [], with_options(c10d.ScatterOptions, False)).wait()
        same(output, torch.tensor([1 + 1j]) if group.rank() == 0 else torch.tensor([2 - 2j]))
        real = torch.view_as_complex(torch.ones(2, 2)).conj().imag  # lazily negated
        assert real.is_neg()
        group.scatter([output.real], [[real[:1], real[1:]]] if group.rank() == 0 else []).wait()
        same(output.real, torch.tensor([-1.0]))

    world.run(2, body)


# --- In how many ways torch calls a method ----------------------------------------------------------------------------


def rows(group, shape=(4,)):
    return values(group.rank(), shape, torch.float32), inputs(group, shape, torch.float32)


WAYS = {
    "allreduce: a tensor": (lambda g, t: g.allreduce(t), lambda e, r: reduced(e, "SUM")),
    "allreduce: an op": (lambda g, t: g.allreduce([t], dist.ReduceOp.MAX), lambda e, r: reduced(e, "MAX")),
    "allreduce: both": (
        lambda g, t: g.allreduce(t, dist.ReduceOp.MIN, timedelta(seconds=9)),
        lambda e, r: reduced(e, "MIN"),
    ),
    "allreduce: by name": (
        lambda g, t: g.allreduce(t, timeout=timedelta(seconds=9), op=dist.ReduceOp.PRODUCT),
        lambda e, r: reduced(e, "PRODUCT"),
    ),
    "allreduce: opts by name": (
        lambda g, t: g.allreduce([t], opts=with_options(c10d.AllreduceOptions, True, reduceOp=dist.ReduceOp.MAX)),
        lambda e, r: reduced(e, "MAX"),
    ),
    "broadcast": (lambda g, t: g.broadcast(t, 1), lambda e, r: e[1]),
    "broadcast: by name": (lambda g, t: g.broadcast(t, root=2, timeout=None), lambda e, r: e[2]),
    "reduce": (lambda g, t: g.reduce(t, 1, dist.ReduceOp.MAX), lambda e, r: reduced(e, "MAX") if r == 1 else e[r]),
    "reduce: a root alone": (lambda g, t: g.reduce(t, root=2), lambda e, r: reduced(e, "SUM") if r == 2 else e[r]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_and_values_stand_for_a_list_and_options(world, way):
    call, expected = WAYS[way]

    def body(group):
        mine, everyones = rows(group)
        assert call(group, mine).wait()
        same(mine, expected(everyones, group.rank()))

    world.run(3, body)


def test_single_tensors_stand_for_lists_in_what_gathers_and_scatters(world):
    def body(group):
        size, rank = group.size(), group.rank()
        mine, everyones = rows(group)
        outputs = [torch.zeros(4) for _ in range(size)]
        group.allgather(outputs, mine).wait()
        same(torch.stack(outputs), torch.stack(everyones))
        outputs = [torch.zeros(4) for _ in range(size)] if rank == 1 else []
        group.gather(outputs, mine, 1).wait()
        if rank == 1:
            same(torch.stack(outputs), torch.stack(everyones))
        output = torch.zeros(4)
        group.scatter(output, everyones if rank == 2 else [], root=2).wait()
        same(output, everyones[rank])
        parts = [values(rank, (4,), torch.float32, salt) for salt in range(size)]
        group.reduce_scatter(output, parts, dist.ReduceOp.MAX).wait()
        same(output, reduced([values(other, (4,), torch.float32, rank) for other in range(size)], "MAX"))
        output = torch.zeros(size * 2)
        group.all_to_all_single(output, torch.arange(2.0 * size) + 100 * rank, [], [], timedelta(seconds=9)).wait()
        same(output, torch.cat([torch.arange(2.0) + 2 * rank + 100 * other for other in range(size)]))
        group.barrier(timedelta(seconds=9)).wait()
        group.barrier(timeout=timedelta(seconds=9)).wait()
        group.barrier().wait()

    world.run(3, body)


def test_the_profiler_sees_every_call():
    groups = meet(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pending = groups[0].allreduce([torch.ones(3)], with_options(c10d.AllreduceOptions, True))
        sent = groups[0].send([torch.ones(3)], 1)
        groups[1].allreduce([torch.ones(3)], with_options(c10d.AllreduceOptions, False))
        groups[1].recv([torch.ones(3)], 0).wait()
        sent.wait()
        pending.get_future().wait()
    events = {event.key: event.count for event in profile.key_averages()}
    assert {name: events.get(f"farandole:{name}") for name in ("all_reduce", "send", "recv")} == {
        "all_reduce": 2,
        "send": 1,
        "recv": 1,
    }
    for group in groups:
        group.shutdown()


# --- Autograd, modes, futures -----------------------------------------------------------------------------------------


def test_tensors_under_autograd_and_inference_mode(world):
    def body(group):
        size = group.size()
        leaf = torch.nn.Parameter(torch.ones(3))
        grown = leaf * 2
        for tensor, expected in ((leaf, 1.0 * size), (grown, 2.0 * size)):
            group.allreduce([tensor], with_options(c10d.AllreduceOptions, False)).wait()
            same(tensor.detach(), torch.full((3,), expected))
        with torch.inference_mode():
            inside = torch.ones(3)
            group.allreduce([inside]).wait()
            strided = torch.ones(3, 2).t()
            group.allreduce([strided]).wait()
        group.allreduce([inside]).wait()
        same(inside, torch.full((3,), float(size**2)))
        same(strided.clone(), torch.full((2, 3), float(size)))

    world.run(2, body)


def test_a_reduction_does_not_bump_the_version_that_autograd_watches(world):
    def body(group):
        weight = torch.ones(3, requires_grad=True)
        buffer = torch.ones(3)
        result = (weight * buffer).sum()
        group.broadcast([buffer]).wait()
        result.backward()

    world.run(2, body)


def test_futures_hold_the_tensors_and_run_callbacks_that_may_wait_for_later_ones(world):
    def body(group):
        tensors = [torch.full((4,), float(index)) for index in range(3)]
        options = with_options(c10d.AllreduceOptions, True)
        futures = [group.allreduce([tensor], options).get_future() for tensor in tensors]
        seen = []

        def waits_for_the_next(future):
            seen.append(future.value()[0][0].item())
            return futures[1].wait()[0] + 1

        chained = futures[0].then(waits_for_the_next)
        same(chained.wait(), torch.full((4,), 1.0 * group.size() + 1))
        same(futures[2].wait()[0], torch.full((4,), 2.0 * group.size()))
        assert seen == [0.0]

    world.run(3, body)


def test_a_future_can_be_asked_for_twice_and_of_a_call_that_is_over(world):
    def body(group):
        work = group.allreduce([torch.ones(2)], with_options(c10d.AllreduceOptions, True))
        work.wait()
        assert work.get_future() is work.get_future()
        same(work.get_future().wait()[0], torch.full((2,), float(group.size())))
        same(work.result()[0], torch.full((2,), float(group.size())))
        done = group.allreduce([torch.ones(2)], with_options(c10d.AllreduceOptions, False))
        assert done.get_future().wait() == []

    world.run(2, body)


def test_a_work_that_is_complete_has_delivered_its_result(world):
    """Also where that takes a copy, or a conversion, at the end."""

    def body(group):
        strided = torch.ones(3, 4).t()[:, ::2]
        scaled = torch.ones(3)
        parts = [torch.zeros(2) for _ in range(group.size())]
        half = with_options(c10d.AllreduceOptions, True, reduceOp=dist._make_nccl_premul_sum(0.5))
        works = [
            group.allreduce([strided], with_options(c10d.AllreduceOptions, True)),
            group.allreduce([scaled], half),
            group.allgather([parts], [torch.full((2,), 5.0)], with_options(c10d.AllgatherOptions, True)),
        ]
        while not all(work.is_completed() for work in works):
            threading.Event().wait(0.001)
        same(strided.contiguous(), torch.full((4, 2), float(group.size())))
        same(scaled, torch.full((3,), 0.5 * group.size()))
        same(torch.stack(parts), torch.full((group.size(), 2), 5.0))

    world.run(3, body)


def test_the_future_of_a_message_is_in_no_other_futures_way(world):
    def body(group):
        peer = 1 - group.rank()
        got = torch.zeros(2)
        message = group.recv([got], peer, 4).get_future()
        total = torch.ones(2)
        group.allreduce([total], with_options(c10d.AllreduceOptions, True)).get_future().wait()
        same(total, torch.full((2,), 2.0))
        assert not message.done()
        group.barrier(with_options(c10d.BarrierOptions, False))
        group.send([torch.full((2,), 7.0)], peer, 4).wait()
        same(message.wait()[0], torch.full((2,), 7.0))

    world.run(2, body)


@pytest.mark.parametrize("use", ["nothing", "wait", "future"])
def test_nothing_holds_the_tensors_of_a_call_that_is_over(world, use):
    def body(group):
        pending = group.recv([torch.zeros(1)], 1 - group.rank(), 8)  # others come and go meanwhile
        references = []
        for _ in range(20):
            tensor = torch.ones(1000)
            work = group.allreduce([tensor], with_options(c10d.AllreduceOptions, True))
            if use == "wait":
                work.wait()
            if use == "future":
                work.get_future().wait()
            references.append(weakref.ref(tensor))
            del tensor, work
        group.barrier(with_options(c10d.BarrierOptions, False))
        group.allreduce([torch.ones(1)], with_options(c10d.AllreduceOptions, True)).wait()
        most = 8 if use == "nothing" else 0  # torch's C++ code may still ask for the last ones
        for _ in range(100):  # a thread that completes futures may be about to let go
            gc.collect()
            alive = [reference for reference in references if reference() is not None]
            if len(alive) <= most:
                break
            threading.Event().wait(0.01)
        assert len(alive) <= most
        group.send([torch.zeros(1)], 1 - group.rank(), 8).wait()
        pending.wait()

    world.run(2, body)


def test_many_works_in_flight_on_two_groups_from_two_threads(world):
    def body(group):
        tensors = [torch.full((7,), float(index + group.rank())) for index in range(200)]
        works = [group.allreduce([tensor], with_options(c10d.AllreduceOptions, True)) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        for index, tensor in enumerate(tensors):
            same(tensor, torch.full((7,), float(sum(index + rank for rank in range(group.size())))))

    threads = [threading.Thread(target=world.run, args=(size, body)) for size in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- Wrong calls, failures, the group's life --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.allreduce([torch.ones(1), torch.ones(1)]), "are 2; there must be one"),
        (lambda g: g.allgather([[torch.ones(1)]], [torch.ones(1)]), "tensor_list has 1 tensors; it must have 2"),
        (lambda g: g.alltoall([torch.ones(1)], [torch.ones(1)]), "output_tensor_list has 1 tensors"),
        (lambda g: g.all_gather_single(torch.ones(2), torch.ones(1, dtype=torch.float64)), "they must be equal"),
        (lambda g: g.all_to_all_single(torch.ones(3), torch.ones(4), [], []), "output has 3 rows"),
        (lambda g: g.all_to_all_single(torch.ones(4), torch.ones(4), [1, 2], [2, 2]), r"_split_sizes is \[1, 2\]"),
        (
            lambda g: g.allreduce([torch.ones(2, dtype=torch.float32)], with_options(
                c10d.AllreduceOptions, False, reduceOp=dist.ReduceOp.BAND)),
            "band",
        ),
        (lambda g: g.broadcast([torch.ones(2, device="meta")]), "meta"),
        (lambda g: g.broadcast([torch.eye(2).to_sparse()]), r"the tensor is sparse_coo; all_reduce alone .*to_dense"),
        (lambda g: g.allgather([[torch.eye(2).to_sparse()] * 2], [torch.eye(2).to_sparse()]), "the tensor is sparse"),
        (lambda g: g.send([torch.eye(2).to_sparse()], 1 - g.rank()), "the tensor is sparse"),
        (lambda g: g.allreduce(), "needs 1 arguments by position; there are 0"),
        (lambda g: g.allreduce(torch.ones(1), root=1), "after its data, opts= of AllreduceOptions; or op=, timeout="),
        (lambda g: g.broadcast(torch.ones(1), 0, None, 1), "opts= of BroadcastOptions; or root=, timeout="),
        (lambda g: g.barrier(timeout=None, opts=c10d.BarrierOptions()), "opts= of BarrierOptions; or timeout="),
    ],
)  # fmt: skip
def test_what_can_never_work_is_refused(world, call, message):
    def body(group):
        with pytest.raises(ArgumentError, match=message):
            call(group)

    world.run(2, body)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_mismatch_ends_in_its_error_on_every_rank_also_out_of_futures(is_async):
    groups = meet(2)

    def body(group):
        options = with_options(c10d.AllreduceOptions, is_async)
        tensor = torch.ones(3 + group.rank())
        with pytest.raises(
            CollectiveMismatchError, match=r"all_reduce\(3 x float32, sum\)[^\n]*\n.*all_reduce\(4 x float32, sum\)"
        ):
            group.allreduce([tensor], options).wait()
        later = None
        with contextlib.suppress(CollectiveMismatchError):
            later = group.allreduce([torch.ones(3)], with_options(c10d.AllreduceOptions, True))
        if later is not None:
            with pytest.raises(RuntimeError, match="different"):
                later.get_future().wait()
            assert not later.is_success()
            assert isinstance(later.exception(), CollectiveMismatchError)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(body, groups))
    for group in groups:
        group.shutdown()


def test_timeouts_of_the_call_of_the_group_and_set_later():
    groups = meet(2, timeout_s=0.2)
    tensor = torch.ones(2)
    with pytest.raises(CollectiveTimeoutError, match=r"the timeout of 0\.2 s is over: rank 1 has not arrived"):
        groups[0].allreduce([tensor], with_options(c10d.AllreduceOptions, False))
    others = meet(2)
    others[0]._set_default_timeout(timedelta(seconds=0.1))
    with pytest.raises(CollectiveTimeoutError, match=r"the timeout of 0\.1 s is over"):
        others[0].barrier(with_options(c10d.BarrierOptions, False))
    third = meet(2)
    options = with_options(c10d.AllreduceOptions, False, timeout=timedelta(seconds=0.3))
    with pytest.raises(CollectiveTimeoutError, match=r"the timeout of 0\.3 s is over"):
        third[0].allreduce([tensor], options)
    for group in (*groups, *others, *third):
        group.shutdown()


def test_a_wait_with_a_timeout_ends_and_may_be_repeated():
    groups = meet(2)
    work = groups[0].allreduce([torch.ones(2)], with_options(c10d.AllreduceOptions, True))
    with pytest.raises(CollectiveTimeoutError, match="it goes on"):
        work.wait(timedelta(seconds=0.05))
    assert not work.is_completed()
    groups[1].allreduce([torch.ones(2)], with_options(c10d.AllreduceOptions, False))
    assert work.wait()
    for group in groups:
        group.shutdown()


def test_the_parts_of_a_work_share_its_time(monkeypatch):
    clock = [100.0]
    waited = []

    class Slow:
        def wait(self, timeout_s):
            waited.append(timeout_s)
            clock[0] += 0.4

    monkeypatch.setattr(works.time, "monotonic", lambda: clock[0])
    handle = works.Handle([Slow(), Slow(), Slow(), Slow()], [], [], works.Completer())
    handle.settle(1.0)
    assert waited == pytest.approx([1.0, 0.6, 0.2, 0.0], abs=1e-6)
    assert min(waited) > 0  # as a Work wants it
    handle.settle()
    assert waited[4:] == [None] * 4


def test_abort_ends_the_calls_of_all_ranks():
    groups = meet(2)
    work = groups[0].allreduce([torch.ones(2)], with_options(c10d.AllreduceOptions, True))
    groups[1].abort()
    with pytest.raises(CommunicatorClosedError, match="rank 1 aborted"):
        work.wait()
    for group in groups:
        group.shutdown()


def test_a_monitored_barrier_names_who_is_missing_and_the_group_goes_on():
    groups = meet(3)

    def arrive(rank):
        groups[rank].monitored_barrier(timedelta(seconds=10))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(arrive, range(3)))
        first = threads.submit(groups[0].monitored_barrier, timedelta(seconds=0.2), wait_all_ranks=True)
        with pytest.raises(CollectiveTimeoutError, match="Ranks 1, 2 failed to pass monitoredBarrier in 200 ms"):
            first.result()
        with pytest.raises(
            CollectiveTimeoutError, match=r"Rank 1 successfully reached monitoredBarrier, but.*Ranks 1, 2"
        ):
            groups[1].monitored_barrier(timedelta(seconds=1))
        with pytest.raises(CollectiveTimeoutError, match="Rank 2 successfully reached"):
            groups[2].monitored_barrier(timedelta(seconds=1))
        list(threads.map(lambda group: group.barrier().wait(), groups))
    for group in groups:
        group.shutdown()


def test_what_the_group_says_of_itself(world):
    def body(group):
        assert (group.rank(), group.size()) == (group.getRank(), group.getSize())
        assert group.name() == "farandole"
        group._set_group_name("mine")
        group._set_group_desc("for tests")
        assert (group.group_name, group.group_desc) == ("mine", "for tests")
        assert group._get_backend(torch.device("cpu")) is group
        assert group._device_types == [torch.device("cpu")]
        return group._get_sequence_number_for_group()

    assert len(set(world.run(2, body))) == 1


def test_messages_are_no_part_of_the_sequence_number(world):
    def body(group):
        before = group._get_sequence_number_for_group()
        if group.rank() == 0:
            group.send([torch.ones(1)], 1).wait()
        if group.rank() == 1:
            group.recv([torch.ones(1)], 0).wait()
        group.barrier(with_options(c10d.BarrierOptions, False))
        return group._get_sequence_number_for_group() - before

    assert world.run(3, body) == [1, 1, 1]


def test_errors_name_the_ranks_of_the_job():
    groups = meet(2, timeout_s=0.1, job_ranks=[5, 7])
    with pytest.raises(CollectiveTimeoutError, match="in the job they are 5, 7"):
        groups[0].barrier(with_options(c10d.BarrierOptions, False))
    for group in groups:
        group.shutdown()


def test_registered_memory_is_used_where_it_is(world):
    def body(group):
        tensor = group.empty((1 << 19,), torch.float32)
        tensor.copy_(torch.arange(1 << 19) % 1000)
        output = group.empty((1 << 19) * 2, torch.float32)
        group.all_gather_single(output, tensor).wait()
        same(output, torch.cat([tensor.clone()] * 2))
        stats = group.communicator.stats()
        return sum(entry.bytes_mapped for entry in stats)

    assert min(world.run(2, body)) >= 1 << 21


def test_memory_of_another_backends_group_is_refused():
    with pytest.raises(ArgumentError, match="needs a group of farandole"):
        farandole.torch_backend.empty(3)


# --- Meeting at torch's store -----------------------------------------------------------------------------------------


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(RendezvousError, match="have not joined: 1, 2"):
        join(dist.HashStore(), 0, 3, 0.2)


def test_groups_meet_again_at_a_store_that_outlives_them():
    store = dist.HashStore()
    for _ in range(3):
        for members in ([], [], [4, 6], [6, 4], [4, 6]):
            with ThreadPoolExecutor(2) as threads:
                groups = list(threads.map(lambda rank, members=members: join(store, rank, 2, 10, members), range(2)))
                list(threads.map(lambda group: group.barrier().wait(), groups))
            for group in groups:
                group.shutdown()


def test_a_monitored_barrier_of_a_group_made_again_waits_for_everybody():
    store = dist.HashStore()
    for _ in range(2):
        with ThreadPoolExecutor(2) as threads:
            groups = list(threads.map(lambda rank: join(store, rank, 2, 10), range(2)))
            with pytest.raises(CollectiveTimeoutError, match="Rank 1 failed to pass"):
                groups[0].monitored_barrier(timedelta(seconds=0.1))
            with pytest.raises(CollectiveTimeoutError, match="Rank 1 failed to pass"):
                groups[1].monitored_barrier(timedelta(seconds=1))
            list(threads.map(lambda group: group.monitored_barrier(timedelta(seconds=10)), groups))
        for group in groups:
            group.shutdown()


def test_a_rank_meets_a_new_peer_at_a_new_store():
    """It has made more groups than the other."""
    for group in meet(2):
        group.shutdown()
    with pytest.raises(RendezvousError):
        join(dist.HashStore(), 0, 2, 0.1)
    for group in meet(2):
        group.shutdown()


def test_two_that_claim_one_rank_are_told_apart(monkeypatch):
    monkeypatch.setattr(group_module, "meeting_name", lambda *arguments: "now")
    store = dist.HashStore()
    other = arrival.Card(arrival.version(), 1, 2, [1, 0, "", "", ""], [0], None, "")
    dist.PrefixStore("now", dist.PrefixStore("group/", store)).set("0/rank/0", json.dumps(other._asdict()))
    with pytest.raises(RendezvousError, match="two processes claim rank 0"):
        join(store, 0, 2, 1)


def test_with_a_secret_what_a_stranger_sets_is_refused(monkeypatch):
    monkeypatch.setenv("FARANDOLE_SECRET", "a long random text")
    groups = meet(2)
    for group in groups:
        group.shutdown()
    monkeypatch.setattr(group_module, "meeting_name", lambda *arguments: "now")
    store = dist.HashStore()
    dist.PrefixStore("now", dist.PrefixStore("group/", store)).set(
        "0/rank/1", '{"process": 1, "world_size": 2, "arena": [], "cores": [0], "calibration": null}'
    )
    with pytest.raises(RendezvousError, match="was not set by a rank that knows FARANDOLE_SECRET"):
        join(store, 0, 2, 5)


# --- Messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [*LAYOUTS])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_messages_of_every_dtype_and_shape_in_a_ring(world, world_size, layout):
    """All send before any receives."""

    def body(group):
        right, left = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
        for shape, dtype in [
            *((shape, torch.float32) for shape in SHAPES),
            *(((3, 4), d) for d in [*ALL, *BYTES_ALONE]),
        ]:
            sent = group.send([layout(values(group.rank(), shape, dtype))], right, 3)
            got = layout(values(9, shape, dtype))
            assert group.recv([got], left, 3).wait()
            assert sent.wait()
            same(got, values(left, shape, dtype))

    world.run(world_size, body)


def test_messages_with_tags_in_any_order_and_from_anyone(world):
    def body(group):
        if group.rank() == 0:
            later = [torch.zeros(2) for _ in range(3)]
            for tag in (2, 0, 1):
                group.recv([later[tag]], 1, tag).wait()
            assert [tensor[0].item() for tensor in later] == [0.0, 1.0, 2.0]
            sources = set()
            for _ in range(group.size() - 1):
                got = torch.zeros(3)
                work = group.recv_anysource([got], 9)
                work.wait()
                sources.add(work._source_rank())
                same(got, torch.full((3,), float(work._source_rank())))
            return sources
        works = [group.send([torch.full((2,), float(tag))], 0, tag) for tag in range(3) if group.rank() == 1]
        works.append(group.send([torch.full((3,), float(group.rank()))], 0, 9))
        for work in works:
            work.wait()
        return set()

    assert world.run(4, body)[0] == {1, 2, 3}


def test_a_message_that_is_on_its_way_is_in_no_collectives_way(world):
    def body(group):
        count = 1 << 21
        peer = 1 - group.rank()
        sent = group.send([values(group.rank(), (count,), torch.float32)], peer)
        total = torch.ones(5)
        group.allreduce([total], with_options(c10d.AllreduceOptions, False))
        got = torch.zeros(count)
        group.recv([got], peer).wait()
        sent.wait()
        same(got, values(peer, (count,), torch.float32))
        same(total, torch.full((5,), 2.0))

    world.run(2, body)
