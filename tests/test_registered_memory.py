"""Arrays in registered memory: the same results as in any other, on every algorithm; and where the memory goes."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import assert_close, data, numpy_dtype, reduced

import farandole
from farandole import ArgumentError, CommunicatorClosedError, algorithms

COUNT = 2003  # elements per part; with channels of cache lines, many segments of which the last is shorter
WORLD_SIZES = (1, 2, 3, 4, 5)
EVERY_ALGORITHM = [
    (collective, name)
    for collective in algorithms.ALGORITHMS
    if collective != "barrier"
    for name in algorithms.names(collective)
]


def registered(comm: farandole.Communicator, values: np.ndarray) -> np.ndarray:
    array = comm.empty(values.shape, values.dtype)
    array[...] = values
    return array


def call(comm: farandole.Communicator, collective: str, name: str, in_place: bool) -> np.ndarray | None:
    """The collective on int32 data, with everything in registered memory."""
    n, rank, root = comm.world_size, comm.rank, comm.world_size - 1
    whole = registered(comm, data(rank, n * COUNT, "int32"))
    part = registered(comm, data(rank, COUNT, "int32"))
    mine = slice(rank * COUNT, (rank + 1) * COUNT)
    if collective == "all_reduce":
        return comm.all_reduce(whole, out=None if in_place else comm.empty(n * COUNT, "int32"), algorithm=name)
    if collective == "reduce_scatter":
        return comm.reduce_scatter(
            whole, out=whole[mine] if in_place else comm.empty(COUNT, "int32"), algorithm=name
        ).copy()
    if collective in ("all_gather", "gather"):
        out = comm.empty(n * COUNT, "int32")
        out[mine] = part
        if collective == "all_gather":
            return comm.all_gather(out[mine] if in_place else part, out=out, algorithm=name)
        return comm.gather(out[mine] if in_place else part, root, out=out, algorithm=name)
    if collective == "broadcast":
        return comm.broadcast(whole, root, algorithm=name)
    if collective == "reduce":
        result = comm.reduce(whole, root, algorithm=name)
        return result if rank == root else None
    if collective == "scatter":
        return comm.scatter(whole if rank == root else None, root, out=part, algorithm=name)
    return comm.all_to_all(whole, out=whole if in_place else comm.empty(n * COUNT, "int32"), algorithm=name)


def expected(collective: str, rank: int, n: int) -> np.ndarray | None:
    root = n - 1
    mine = slice(rank * COUNT, (rank + 1) * COUNT)
    wholes = [data(peer, n * COUNT, "int32") for peer in range(n)]
    total = reduced(wholes, "int32", "sum")[0].astype(np.int32)
    gathered = np.concatenate([data(peer, COUNT, "int32") for peer in range(n)])
    return {
        "all_reduce": total,
        "reduce_scatter": total[mine],
        "all_gather": gathered,
        "gather": gathered if rank == root else None,
        "broadcast": wholes[root],
        "reduce": total if rank == root else None,
        "scatter": wholes[root][mine],
        "all_to_all": np.concatenate([whole[mine] for whole in wholes]),
    }[collective]


@pytest.mark.parametrize(("collective", "name"), EVERY_ALGORITHM)
@pytest.mark.parametrize("in_place", [False, True])
def test_every_algorithm_is_right_on_registered_memory(mapped_worlds, collective, name, in_place):
    for n in WORLD_SIZES:
        for rank, result in enumerate(mapped_worlds(n).run(call, collective, name, in_place)):
            wanted = expected(collective, rank, n)
            assert (result is None) == (wanted is None), f"N={n} rank={rank}"
            assert wanted is None or np.array_equal(result, wanted), f"N={n} rank={rank}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex128", "bool", "uint8"])
@pytest.mark.parametrize("who", ["one rank", "all but one"])
def test_ranks_may_mix_registered_and_other_memory(mapped_worlds, dtype, who):
    n = 4

    def body(comm):
        mine = data(comm.rank, 5 * COUNT, dtype)
        if (comm.rank == 1) == (who == "one rank"):
            mine = registered(comm, mine)
        return comm.all_reduce(mine, algorithm="ring").copy()

    wanted, bound = reduced([data(rank, 5 * COUNT, dtype) for rank in range(n)], dtype, "sum")
    for result in mapped_worlds(n).run(body):
        assert_close(result, wanted, bound, f"{dtype}, registered: {who}")


def test_large_calls_are_mapped_by_themselves(worlds):
    """With the sizes that users get: a chunk of 1 MiB is read where it lies."""

    def body(comm):
        array = registered(comm, data(comm.rank, 1 << 19, "float32"))
        comm.all_reduce(array, algorithm="ring")
        return array.copy()

    wanted, _ = reduced([data(rank, 1 << 19, "float32") for rank in range(2)], "float32", "sum")
    assert all(np.array_equal(result, wanted) for result in worlds(2).run(body))


def test_a_rank_may_write_to_its_array_as_soon_as_the_call_returns(mapped_worlds):
    """Nobody reads it any more: what comes next in the array never shows up in the results of others."""

    def body(comm):
        array = comm.empty(COUNT, "int64")
        totals = []
        for round_ in range(50):
            array[:] = comm.rank + round_
            comm.broadcast(array, round_ % comm.world_size)
            totals.append((array == array[0]).all() and int(array[0]))
            array[:] = -1
        return totals

    for totals in mapped_worlds(3).run(body):
        assert totals == [round_ + round_ % 3 for round_ in range(50)]


def test_arrays_of_another_communicator_are_as_any_other(mapped_worlds):
    with farandole.local(2) as other:

        def body(comm):
            array = other[comm.rank].empty(COUNT, "float64")
            array[:] = comm.rank + 1
            return comm.all_reduce(array)

        assert all((result == 3).all() for result in mapped_worlds(2).run(body))


def test_groups_have_registered_memory_of_their_own(mapped_worlds):
    def body(comm):
        with comm.split(comm.rank % 2) as group:
            array = registered(group, np.full(300_000, comm.rank, dtype=np.float32))
            return group.all_reduce(array, algorithm="ring")[[0, -1]].tolist()

    assert mapped_worlds(4).run(body) == [[2.0, 2.0], [4.0, 4.0], [2.0, 2.0], [4.0, 4.0]]


def test_a_torch_dtype_gives_a_tensor(mapped_worlds):
    def body(comm):
        tensor = comm.empty((3, COUNT), torch.bfloat16)
        assert isinstance(tensor, torch.Tensor)
        assert not tensor.any()
        tensor.fill_(comm.rank + 1)
        comm.all_reduce(tensor)
        return tensor.float().unique().tolist(), tuple(tensor.shape)

    assert mapped_worlds(2).run(body) == [([3.0], (3, COUNT))] * 2


def anonymous_files() -> set[int]:
    """Descriptors of farandole's anonymous files in this process."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "memfd:farandole" in os.readlink(entry):  # noqa: PTH115 (a link to nothing)
                found.add(int(entry.name))
    return found


def test_memory_goes_back_with_the_last_view_of_it():
    gc.collect()  # what earlier tests left closes its files now, and not below
    with farandole.local(1) as (comm,):
        others = anonymous_files()
        array = comm.empty(1 << 20, np.uint8)
        (heap,) = anonymous_files() - others
        array[:] = 1
        assert os.fstat(heap).st_blocks == (1 << 20) // 512
        view = array[10:20]
        address = array.ctypes.data
        del array
        gc.collect()
        assert view.tolist() == [1] * 10
        del view
        gc.collect()
        assert os.fstat(heap).st_blocks == 0
        again = comm.empty(1 << 20, np.uint8)
        assert again.ctypes.data == address
        assert not again.any(), "a new array is zero"


def test_arrays_lie_apart_and_holes_are_used_again():
    with farandole.local(1) as (comm,):
        arrays = [comm.empty(size, np.uint8) for size in (1, 4096, 4097, 100_000, 1)]
        ends = [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays]
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        first = arrays[0].ctypes.data
        arrays[:] = arrays[-1:]
        gc.collect()
        assert comm.empty(100_000, np.uint8).ctypes.data == first


def test_an_array_outlives_its_communicator():
    with farandole.local(2) as world:
        arrays = world.run(lambda comm: registered(comm, np.arange(5.0)))
    del world
    gc.collect()
    assert [array.tolist() for array in arrays] == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2
    arrays[0][:] = 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "shape is -1"),
        (((2, -3),), r"shape is \(2, -3\)"),
        (("x",), "shape is 'x'"),
        ((2, "object"), "object cannot be communicated"),
        ((2, "no such"), "dtype 'no such'"),
        ((1 << 60,), "no registered memory for shape"),
    ],
)
def test_what_cannot_be_allocated_is_refused(arguments, message):
    with farandole.local(1) as (comm,), pytest.raises(ArgumentError, match=message):
        comm.empty(*arguments)


def test_a_closed_communicator_gives_no_memory():
    (comm,) = world = farandole.local(1)
    world.close()
    with pytest.raises(CommunicatorClosedError):
        comm.empty(3)


def test_shapes_and_dtypes():
    with farandole.local(1) as (comm,):
        assert comm.empty(3).dtype == np.float32
        assert comm.empty(()).shape == ()
        assert comm.empty((0, 4), "int8").shape == (0, 4)
        assert comm.empty((2, 3), numpy_dtype("bfloat16")).shape == (2, 3)
        assert re.match("complex64", comm.empty([2], "complex64").dtype.name)
