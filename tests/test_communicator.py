"""The public API: what it accepts, what it refuses and how it says so, and what it counts."""

from __future__ import annotations

import array
import gc
import math
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest
import torch
from conftest import WORLD_SIZES
from reference import data

import farandole
from farandole import (
    ArgumentError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorClosedError,
    PeerLostError,
    Schedule,
    UnsupportedReductionError,
    VerificationError,
    algorithms,
)


def total(n: int, count: int, dtype: str = "float64") -> np.ndarray:
    return sum(data(rank, count, dtype) for rank in range(n))


# -- what goes in ------------------------------------------------------------------------------------------------------


def test_torch_tensors_are_taken_as_they_are(worlds):
    def body(comm):
        mine = torch.from_numpy(data(comm.rank, 60, "float32")).reshape(3, 4, 5)
        address = mine.data_ptr()
        summed = comm.all_reduce(mine)
        assert summed is mine
        assert mine.data_ptr() == address
        half = torch.full((7,), 0.5, dtype=torch.bfloat16)
        gathered = comm.all_gather(torch.tensor(float(comm.rank)))
        part = comm.reduce_scatter(torch.arange(6.0).reshape(6, 1))
        return summed.numpy(), comm.all_reduce(half), gathered, part

    for rank, (summed, half, gathered, part) in enumerate(worlds(3).run(body)):
        assert np.allclose(summed.ravel(), total(3, 60, "float32"), rtol=1e-5)
        assert half.dtype == torch.bfloat16
        assert (half == 1.5).all()
        assert gathered.tolist() == [0.0, 1.0, 2.0]
        assert part.tolist() == [[6.0 * rank], [6.0 * rank + 3]]


STRIDED = {
    "transposed": lambda a: a.reshape(6, 10).T,
    "every other": lambda a: np.repeat(a, 2)[::2],
    "reversed": lambda a: a[::-1],
    "offset": lambda a: np.concatenate([a[:1], a])[1:],
    "unaligned": lambda a: np.frombuffer(bytearray(b"x" + a.tobytes()), dtype=np.uint8)[1:].view(a.dtype),
}


@pytest.mark.parametrize("layout", STRIDED)
def test_strided_arrays_give_what_their_contiguous_copies_would(worlds, layout):
    def body(comm):
        mine = STRIDED[layout](data(comm.rank, 60, "float64"))
        expected = sum(STRIDED[layout](data(r, 60, "float64")) for r in range(comm.world_size))
        gathered = comm.all_gather(mine)
        background = comm.all_reduce(
            mine.copy(order="K") if layout != "every other" else STRIDED[layout](mine.copy()), async_op=True
        )
        comm.all_reduce(mine)
        return expected, mine, gathered, background.wait()

    per_rank = worlds(3).run(body)
    for expected, mine, gathered, background in per_rank:
        assert np.allclose(mine, expected, rtol=1e-14)
        assert np.allclose(background, expected, rtol=1e-14)
        parts = [STRIDED[layout](data(r, 60, "float64")) for r in range(3)]
        assert np.array_equal(gathered, np.concatenate(parts))


def test_strided_torch_tensors_are_written_through(worlds):
    def body(comm):
        base = torch.zeros(4, 6)
        view = base.t()[1:5:2]
        view.fill_(comm.rank + 1)
        assert comm.all_reduce(view) is view
        expanded = torch.tensor([float(comm.rank)]).expand(4)
        return base, comm.all_gather(expanded)

    for base, gathered in worlds(2).run(body):
        assert base.t()[1].tolist() == [3.0] * 4
        assert base.t()[3].tolist() == [3.0] * 4
        assert base.sum() == 24
        assert gathered.tolist() == [0.0] * 4 + [1.0] * 4


def test_anything_with_the_buffer_protocol_is_taken(worlds):
    def body(comm):
        numbers = array.array("i", [comm.rank, 10])
        comm.all_reduce(numbers)
        raw = bytearray([comm.rank + 1] * 3)
        comm.all_reduce(memoryview(raw), "max")
        return numbers.tolist(), raw

    assert worlds(3).run(body) == [([3, 30], bytearray([3, 3, 3]))] * 3


def test_zero_dimensional_and_empty_arrays_keep_their_shapes(worlds):
    def body(comm):
        scalar = comm.all_reduce(np.array(comm.rank + 1.0))
        empty = comm.all_reduce(np.empty((0, 3, 2), dtype=np.float32))
        return scalar.shape, float(scalar), empty.shape, comm.all_gather(np.empty((0, 4))).shape

    assert worlds(4).run(body) == [((), 10.0, (0, 3, 2), (0, 4))] * 4


def test_rows_are_the_unit_of_counts(worlds):
    def body(comm):
        counts = [2, 0, 1]
        mine = np.full((counts[comm.rank], 2, 2), comm.rank, dtype=np.int16)
        gathered = comm.all_gather(mine, counts=counts)
        part = comm.reduce_scatter(np.ones((3, 5), dtype=np.int64), counts=counts)
        return gathered[:, 0, 0].tolist(), part.shape

    assert worlds(3).run(body) == [([0, 0, 2], (2, 5)), ([0, 0, 2], (0, 5)), ([0, 0, 2], (1, 5))]


# -- what is refused ---------------------------------------------------------------------------------------------------


class Unhashable:
    __hash__ = None

    def __call__(self, world_size):
        return algorithms.build("all_reduce", "ring", world_size)


REFUSED = {
    "a list": (lambda c: c.all_reduce([1.0, 2.0]), ArgumentError, "a list is no array"),
    "a dtype": (lambda c: c.all_reduce(np.array(["x"])), ArgumentError, "cannot be communicated"),
    "an object array": (lambda c: c.all_gather(np.array([None])), ArgumentError, "object cannot be communicated"),
    "byte order": (lambda c: c.all_reduce(np.zeros(2, dtype=">f4")), ArgumentError, "byte order"),
    "an op": (lambda c: c.all_reduce(np.zeros(2), "median"), ArgumentError, "op is 'median'; known are sum"),
    "avg of bool": (lambda c: c.all_reduce(np.zeros(2, bool), "avg"), UnsupportedReductionError, "avg .* bool"),
    "max of complex": (
        lambda c: c.reduce_scatter(np.zeros(2, "c8"), "max"),
        UnsupportedReductionError,
        "max .* complex64",
    ),
    "band of floats": (lambda c: c.reduce(np.zeros(2), 0, "band"), UnsupportedReductionError, "band .* float64"),
    "a root": (lambda c: c.broadcast(np.zeros(2), src=2), ArgumentError, r"src is 2; the ranks .* 0\.\.1"),
    "a negative root": (lambda c: c.gather(np.zeros(2), dst=-1), ArgumentError, "dst is -1"),
    "uneven rows": (lambda c: c.reduce_scatter(np.zeros(5)), ArgumentError, r"5 rows, .* counts=\[3, 2\]"),
    "uneven all_to_all": (lambda c: c.all_to_all(np.zeros(3)), ArgumentError, "3 rows, which 2 ranks"),
    "counts that do not add up": (lambda c: c.reduce_scatter(np.zeros(5), counts=[1, 1]), ArgumentError, "add up to 2"),
    "too few counts": (lambda c: c.all_gather(np.zeros(5), counts=[5]), ArgumentError, "2 whole numbers >= 0"),
    "counts without output_counts": (
        lambda c: c.all_to_all(np.zeros(3), counts=[1, 2]),
        ArgumentError,
        "output_counts",
    ),
    "another's count": (lambda c: c.all_gather(np.zeros(5), counts=[9, 9]), ArgumentError, "whose array has 5"),
    "the size of out": (lambda c: c.all_reduce(np.zeros(5), out=np.zeros(4)), ArgumentError, "out has 4 elements"),
    "the dtype of out": (lambda c: c.all_reduce(np.zeros(5), out=np.zeros(5, "f4")), ArgumentError, "dtype float32"),
    "read-only": (lambda c: c.all_reduce(np.broadcast_to(1.0, 3)), ArgumentError, "read-only"),
    "out that overlaps itself": (
        lambda c: c.all_reduce(torch.zeros(3), out=torch.zeros(1).expand(3)),
        ArgumentError,
        "overlaps itself",
    ),
    "out that partly overlaps": (
        lambda c: (lambda a: c.all_reduce(a[:4], out=a[1:]))(np.zeros(5)),
        ArgumentError,
        "partly overlaps",
    ),
    "an algorithm": (
        lambda c: c.all_reduce(np.zeros(5), algorithm="magic"),
        ArgumentError,
        "'magic', which is no algorithm for all_reduce; known are",
    ),
    "a file for an algorithm": (
        lambda c: c.all_reduce(np.zeros(5), algorithm="mine.py:ring"),
        ArgumentError,
        "import that function and pass it",
    ),
    "an algorithm that cannot be told from another": (
        lambda c: c.all_reduce(np.zeros(5), algorithm=Unhashable()),
        ArgumentError,
        "give a name, a Schedule, or a function",
    ),
    "a schedule of another size": (
        lambda c: c.all_reduce(np.zeros(5), algorithm=algorithms.build("all_reduce", "ring", 3)),
        ArgumentError,
        "all_reduce of 3 ranks",
    ),
    "a schedule of another collective": (
        lambda c: c.all_reduce(np.zeros(5), algorithm=lambda n: algorithms.build("all_gather", "ring", n)),
        ArgumentError,
        "an all_gather of 2 ranks",
    ),
    "a schedule that is wrong": (
        lambda c: c.all_reduce(np.zeros(5), algorithm=Schedule("all_reduce", 2, 1, [])),
        VerificationError,
        "rank 0 chunk 0 lacks the contribution of rank 1",
    ),
    "no op": (lambda c: c.all_reduce(np.zeros(2), None), ArgumentError, "op is None; known are sum"),
    "no op for reduce": (lambda c: c.reduce(np.zeros(2), 0, None), ArgumentError, "op is None"),
    "no op for reduce_scatter": (lambda c: c.reduce_scatter(np.zeros(2), None), ArgumentError, "op is None"),
    "a timeout of 0": (lambda c: c.all_reduce(np.zeros(2), timeout=0), ArgumentError, "timeout is 0; it must be"),
    "a timeout that is no number": (lambda c: c.barrier(timeout=float("nan")), ArgumentError, "timeout is nan"),
    "a text for a root": (lambda c: c.broadcast(np.zeros(2), "0"), ArgumentError, "src is '0'"),
    "a truth for a root": (lambda c: c.broadcast(np.zeros(2), True), ArgumentError, "src is True"),
    "a text for counts": (lambda c: c.all_gather(np.zeros(2), counts=["a", 1]), ArgumentError, "counts is"),
    "fractions for counts": (lambda c: c.all_gather(np.zeros(2), counts=[2.0, 2.0]), ArgumentError, "whole numbers"),
    "one number for counts": (
        lambda c: c.all_gather(np.zeros(2), counts=2),
        ArgumentError,
        "counts is 2; it must",
    ),
    "a number for an algorithm": (lambda c: c.barrier(algorithm=3), ArgumentError, "algorithm is 3; give a name"),
    "a fraction for a color": (lambda c: c.split(1.5), ArgumentError, "color is 1.5"),
    "a text for a key": (lambda c: c.split(0, "a"), ArgumentError, "key is 'a'"),
    "no root": (lambda c: c.broadcast(np.zeros(2), None), ArgumentError, "src is None"),
    "no root for reduce": (lambda c: c.reduce(np.zeros(2), None), ArgumentError, "dst is None"),
    "two roots": (lambda c: c.reduce(np.zeros(2), np.array([0, 1]), out=np.zeros(2)), ArgumentError, "dst is array"),
    "two roots for gather": (
        lambda c: c.gather(np.zeros(2), np.array([0, 1]), out=np.zeros(4)),
        ArgumentError,
        "dst is array",
    ),
    "a huge count": (lambda c: c.all_gather(np.zeros((0, 4)), counts=[0, 2**70]), ArgumentError, "more than memory"),
    "a numpy scalar": (lambda c: c.all_reduce(np.float64(3)), ArgumentError, r"scalar .* np\.array\(3\.0\)"),
    "a tensor in a graph": (
        lambda c: c.all_reduce(torch.ones(2, requires_grad=True) * 2),
        ArgumentError,
        r"autograd, .* give tensor\.detach\(\)\.clone\(\)",
    ),
    "None": (lambda c: c.all_reduce(None), ArgumentError, "a NoneType is no array"),
    "a color": (lambda c: c.split(-3), ArgumentError, "color is -3"),
    "a sparse tensor": (lambda c: c.all_reduce(torch.eye(3).to_sparse()), ArgumentError, "to_dense"),
    "a tensor without data": (lambda c: c.all_reduce(torch.zeros(3, device="meta")), ArgumentError, "on meta"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_call_is_refused_on_every_rank_and_harms_nothing(worlds, case):
    call, kind, message = REFUSED[case]

    def body(comm):
        with pytest.raises(kind, match=message):
            call(comm)
        return comm.all_reduce(np.array([comm.rank + 1])).tolist()

    assert worlds(2).run(body) == [[3], [3]]


@pytest.mark.parametrize("name", ["naive", "bruck"])
def test_all_to_all_that_passes_data_on_needs_equal_parts(worlds, name):
    def body(comm):
        with pytest.raises(ArgumentError, match="passes data on for other ranks, so all counts must be equal"):
            comm.all_to_all(np.zeros(5), counts=[1, 2, 2, 0], output_counts=[1, 2, 2, 0], algorithm=name)
        return comm.all_reduce(np.array([1])).tolist()

    assert worlds(4).run(body) == [[4]] * 4


def test_scatter_needs_out_where_nothing_tells_the_shape(worlds):
    def body(comm):
        if comm.rank == 1:
            with pytest.raises(ArgumentError, match="needs it on every rank but src=0"):
                comm.scatter(src=0)
        else:
            with pytest.raises(ArgumentError, match="tensor is None on rank 0"):
                comm.scatter(src=0)

    worlds(2).run(body)


@pytest.mark.parametrize("bad", [0, -1, 2.5, "4", True, 10**5, 2**70])
def test_a_local_world_needs_a_whole_number_of_ranks(bad):
    with pytest.raises(ArgumentError, match="world_size is"):
        farandole.local(bad)


# -- order, groups, background -----------------------------------------------------------------------------------------


def test_background_calls_and_synchronous_ones_keep_their_order(worlds):
    """Each call depends on the one before it, so any other order gives other numbers."""

    def body(comm):
        value = np.full(5000, 1.0 + comm.rank)
        works = []
        for i in range(50):
            works.append(comm.all_reduce(value, "avg", async_op=True))
            if i % 7 == 3:
                comm.all_reduce(value, "sum")
        assert all(work.wait() is value for work in works)
        return value

    expected = 2.0 * 3.0 ** len([i for i in range(50) if i % 7 == 3])
    for value in worlds(3).run(body):
        assert np.allclose(value, expected)


def test_background_work_need_not_be_waited_for(worlds):
    def body(comm):
        results = [np.full(1000, comm.rank + i) for i in range(20)]
        for result in results:
            comm.all_reduce(result, async_op=True)  # the handle is dropped
        comm.barrier()
        return [int(result[7]) for result in results]

    assert worlds(2).run(body) == [[1 + 2 * i for i in range(20)]] * 2


@pytest.mark.parametrize("bad", [float("nan"), -1, 0, True, "x", [1]])
def test_waiting_for_work_needs_a_number_of_seconds(worlds, bad):
    work = worlds(1)[0].all_reduce(np.ones(2), async_op=True)
    with pytest.raises(ArgumentError, match="timeout is"):
        work.wait(bad)
    assert work.wait(np.int64(30)).tolist() == [1, 1]
    assert work.wait(10**400).tolist() == [1, 1]


def test_bytes_may_be_sent_but_not_overwritten(worlds):
    def body(comm):
        with pytest.raises(ArgumentError, match="read-only"):
            comm.all_reduce(b"abc")
        return bytes(comm.all_gather(b"abc"))

    assert worlds(2).run(body) == [b"abcabc"] * 2


def test_waiting_for_work_with_a_timeout_leaves_it_going(worlds):
    late = threading.Event()

    def body(comm):
        if comm.rank == 0:
            work = comm.all_reduce(np.ones(3), async_op=True)
            with pytest.raises(CollectiveTimeoutError, match="goes on"):
                work.wait(timeout=0.01)
            assert not work.is_done()
            late.set()
            return work.wait().tolist()
        late.wait()
        return comm.all_reduce(np.ones(3)).tolist()

    assert worlds(2).run(body) == [[2.0] * 3] * 2


@pytest.mark.parametrize("n", [n for n in WORLD_SIZES if n > 1])
def test_split_makes_working_groups_in_the_order_of_their_keys(n):
    with farandole.local(n, timeout_s=60) as world:

        def body(comm):
            group = comm.split(comm.rank % 3, key=-comm.rank)
            members = [r for r in range(n - 1, -1, -1) if r % 3 == comm.rank % 3]
            assert (group.rank, group.world_size) == (members.index(comm.rank), len(members))
            assert group.all_gather(np.array([comm.rank])).tolist() == members
            mean = group.all_reduce(np.array([float(comm.rank)]), "avg")
            assert mean[0] == sum(members) / len(members)  # of the group, not of the world
            nested = group.split(0 if group.rank < 2 else None)
            assert (nested is None) == (group.rank >= 2)
            if nested is not None:
                assert nested.all_gather(np.array([comm.rank])).tolist() == members[:2]
                nested.close()
            comm.barrier()
            group.close()

        world.run(body)


def test_threads_may_use_different_groups_at_once():
    with farandole.local(2, timeout_s=60) as world:

        def body(comm):
            groups = [comm.split(0) for _ in range(3)]
            wrong = []

            def loop(group, number):
                for i in range(200):
                    result = group.all_reduce(np.array([number * 1000 + i + comm.rank]))
                    if result[0] != 2 * (number * 1000 + i) + 1:
                        wrong.append((number, i, result[0]))

            threads = [threading.Thread(target=loop, args=(g, k)) for k, g in enumerate(groups)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for group in groups:
                group.close()
            return wrong

        assert world.run(body) == [[], []]


# -- what is counted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 7, 9001])
@pytest.mark.parametrize(("collective", "factor"), [("reduce_scatter", 1), ("all_gather", 1), ("all_reduce", 2)])
def test_the_ring_sends_exactly_its_closed_form(collective, factor, count):
    for n in WORLD_SIZES:
        parts = [count // n + (part < count % n) for part in range(n)]

        def body(comm, parts=parts):
            mine = data(comm.rank, count, "float32")
            if collective == "all_reduce":
                comm.all_reduce(mine, algorithm="ring")
            elif collective == "reduce_scatter":
                comm.reduce_scatter(mine, counts=parts, algorithm="ring")
            else:
                comm.all_gather(mine[: parts[comm.rank]], counts=parts, algorithm="ring")
            return comm.stats()[0]

        with farandole.local(n, timeout_s=60) as world:
            stats = world.run(body)
        assert sum(s.bytes_sent for s in stats) == factor * (n - 1) * count * 4
        for s in stats:
            assert s.bytes_sent == s.scheduled_bytes_sent
            assert s.bytes_sent <= factor * (n - 1) * -(-count // n) * 4
            if count % n == 0:
                assert s.bytes_sent * n == factor * (n - 1) * count * 4


@pytest.mark.parametrize(("collective", "name"), [(c, a) for c in algorithms.ALGORITHMS for a in algorithms.names(c)])
def test_every_algorithm_sends_and_receives_what_its_schedule_says(collective, name):
    for n in (1, 2, 3, 5, 8):

        def body(comm, n=n):
            rows = data(comm.rank, 40 * n, "int32")
            own = rows[:40]
            calls = {
                "all_reduce": lambda: comm.all_reduce(rows, algorithm=name),
                "reduce_scatter": lambda: comm.reduce_scatter(rows, algorithm=name),
                "all_gather": lambda: comm.all_gather(own, algorithm=name),
                "broadcast": lambda: comm.broadcast(rows, n - 1, algorithm=name),
                "reduce": lambda: comm.reduce(rows, n - 1, algorithm=name),
                "gather": lambda: comm.gather(own, n - 1, algorithm=name),
                "scatter": lambda: comm.scatter(rows, n - 1, out=np.empty(40, "i4"), algorithm=name),
                "all_to_all": lambda: comm.all_to_all(rows, algorithm=name),
                "barrier": lambda: comm.barrier(algorithm=name),
            }
            calls[collective]()
            calls[collective]()
            (entry,) = comm.stats()
            return entry

        with farandole.local(n, timeout_s=60) as world:
            stats = world.run(body)
        assert all((s.collective, s.algorithm, s.calls) == (collective, name, 2) for s in stats)
        assert [s.bytes_sent for s in stats] == [s.scheduled_bytes_sent for s in stats]
        assert sum(s.bytes_sent for s in stats) == sum(s.bytes_received for s in stats)


# -- an algorithm of one's own -----------------------------------------------------------------------------------------


def test_a_schedule_written_in_ten_lines_runs(worlds):
    def star(n):
        rows = [(0, r, 0, 0, 0, 1) for r in range(1, n)]
        rows += [(1, 0, 0, r, 0, 0) for r in range(1, n)]
        return Schedule("all_reduce", n, 1, rows, name="star")

    def body(comm):
        return comm.all_reduce(data(comm.rank, 30, "float64"), algorithm=star)

    for result in worlds(4).run(body):
        assert np.allclose(result, total(4, 30))


# -- when it goes wrong ------------------------------------------------------------------------------------------------


def raises_everywhere(n, body, kind, message):
    """Run ``body`` on ``n`` ranks; every rank must raise ``kind`` with ``message``. Returns the texts."""
    texts = []

    def guarded(comm):
        with pytest.raises(kind, match=message) as caught:
            body(comm)
        texts.append(str(caught.value))
        with pytest.raises(kind, match=message):  # an aborted communicator says so again
            comm.all_reduce(np.ones(1))

    with farandole.local(n, timeout_s=20) as world:
        world.run(guarded)
    return texts


DIFFERENT_CALLS = {
    "dtype": lambda c: c.all_reduce(np.ones(8, "f4" if c.rank else "i4")),
    "count": lambda c: c.all_reduce(np.ones(8 + c.rank)),
    "op": lambda c: c.all_reduce(np.ones(8), "max" if c.rank else "sum"),
    "collective": lambda c: c.all_reduce(np.ones(8)) if c.rank else c.all_gather(np.ones(8)),
    "algorithm": lambda c: c.all_reduce(np.ones(8), algorithm="ring" if c.rank else "one_shot"),
    "root": lambda c: (c.broadcast(np.ones(8), src=c.rank), c.barrier()),
    "number of calls": lambda c: [c.all_reduce(np.ones(8), "max") for _ in range(2 + (c.rank == 1))] + [c.barrier()],
}


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("case", DIFFERENT_CALLS)
def test_ranks_that_make_different_calls_all_hear_of_it(case, n):
    texts = raises_everywhere(n, DIFFERENT_CALLS[case], CollectiveMismatchError, "different calls")
    for text in texts:
        assert all(f"rank {rank}: " in text for rank in range(n))


def test_a_size_mismatch_names_each_rank_and_its_call():
    texts = raises_everywhere(2, DIFFERENT_CALLS["count"], CollectiveMismatchError, "different calls")
    for text in texts:
        assert "rank 0: all_reduce(8 x float64, sum)" in text
        assert "rank 1: all_reduce(9 x float64, sum)" in text


def test_all_to_all_with_counts_that_do_not_fit_is_a_mismatch():
    def body(comm):
        expects = [2, 3] if comm.rank == 0 else [2, 2]  # rank 1 sends 2
        comm.all_to_all(np.ones(4), counts=[2, 2], output_counts=expects)
        comm.barrier()

    for text in raises_everywhere(2, body, CollectiveMismatchError, "different calls"):
        assert "rank 1 sends rank 0 2 elements, and rank 0 expects 3" in text


REFUSED_OF_EACH = {
    "all_reduce": (lambda c: c.all_reduce(np.ones(4), "band"), "band has no meaning for float64"),
    "reduce_scatter": (lambda c: c.reduce_scatter(np.ones(5)), "5 rows, which 3 ranks"),
    "all_gather": (lambda c: c.all_gather(np.ones(4), out=np.ones(4)), "out has 4 elements"),
    "broadcast": (lambda c: c.broadcast(np.ones(4), src=3), "src is 3"),
    "reduce": (lambda c: c.reduce(object(), dst=0), "object"),
    "gather": (lambda c: c.gather(np.ones(4), dst=-1), "dst is -1"),
    "scatter": (lambda c: c.scatter(np.ones(5), src=c.rank), "5 rows, which 3 ranks"),
    "all_to_all": (lambda c: c.all_to_all(np.ones(4), counts=[1, 2, 1]), "output_counts is needed"),
    "barrier": (lambda c: c.barrier(algorithm="magic"), "'magic', which is no algorithm"),
    "split": (lambda c: c.split(-1), "color is -1"),
    "send": (lambda c: c.send(np.ones(4), dst=c.rank), "is this rank itself"),
    "recv": (lambda c: c.recv(np.ones(4), src=7), "src is 7"),
}


@pytest.mark.parametrize("name", REFUSED_OF_EACH)
@pytest.mark.parametrize("then", ["closes", "does not come"])
def test_the_others_hear_that_a_rank_has_refused_its_call(name, then):
    call, message = REFUSED_OF_EACH[name]
    world = farandole.local(3, timeout_s=20)
    world.run(lambda comm: comm.barrier())
    with pytest.raises((farandole.FarandoleError, TypeError)):
        call(world[1])
    if then == "closes":
        world[1].close()
    error = PeerLostError if then == "closes" else CollectiveTimeoutError
    with pytest.raises(error) as raised:
        world[0].all_reduce(np.ones(4), timeout=20 if then == "closes" else 0.1)
    assert f"rank 1: barrier(), collective number 1, which it has finished; then it refused {name}: " in str(
        raised.value
    )
    assert message in str(raised.value)
    if then == "closes":
        assert "rank 1 closed its communicator while others needed it; it had refused a call" in str(raised.value)
    world.close()


def test_a_refusal_is_forgotten_with_the_next_call():
    world = farandole.local(2, timeout_s=20)
    with pytest.raises(ArgumentError):
        world[1].all_gather(np.ones(4), out=np.ones(4))
    world.run(lambda comm: comm.barrier())
    with pytest.raises(CollectiveTimeoutError) as raised:
        world[0].barrier(timeout=0.05)
    assert "refused" not in str(raised.value)
    world.close()


def test_a_refusal_is_forgotten_with_the_next_message():
    world = farandole.local(2, timeout_s=20)
    with pytest.raises(ArgumentError):
        world[1].recv(np.ones(4), src=7)
    text = told_by_a_timeout(world)
    assert "rank 1: no call yet; then it refused recv: src is 7" in text
    world.close()

    world = farandole.local(2, timeout_s=20)
    with pytest.raises(ArgumentError):
        world[1].recv(np.ones(4), src=7)
    world.run(lambda comm: comm.send(np.ones(1), 1) if comm.rank == 0 else comm.recv(np.ones(1), 0))
    text = told_by_a_timeout(world)
    assert "refused" not in text
    assert "rank 1: recv(1 x float64, src=0)" in text
    with pytest.raises(farandole.CollectiveTimeoutError):
        world[1].recv(np.ones(4), src=0)
    world.close()


def test_a_refusal_is_told_where_there_were_only_messages():
    world = farandole.local(2, timeout_s=20)
    world.run(lambda comm: comm.send(np.ones(1), 1) if comm.rank == 0 else comm.recv(np.ones(1), 0))
    with pytest.raises(ArgumentError):
        world[1].all_gather(np.ones(4), out=np.ones(4))
    assert "rank 1: recv(1 x float64, src=0); then it refused all_gather: out has 4" in told_by_a_timeout(world)
    world.close()


def test_a_refusal_stands_while_calls_before_it_wait():
    world = farandole.local(2, timeout_s=20)
    waiting = [world[1].barrier(async_op=True) for _ in range(3)]
    with pytest.raises(ArgumentError):
        world[1].all_gather(np.ones(4), out=np.ones(4))
    for _ in range(3):
        world[0].barrier()
    for work in waiting:
        work.wait()
    assert "then it refused all_gather: out has 4" in told_by_a_timeout(world)
    world.close()


def told_by_a_timeout(world) -> str:
    """What rank 0 says when rank 1 does not come."""
    with pytest.raises(CollectiveTimeoutError) as raised:
        world[0].barrier(timeout=0.05)
    return str(raised.value)


def test_after_an_abort_nothing_is_told_any_more():
    world = farandole.local(2, timeout_s=20)
    told_by_a_timeout(world)
    world[1].refuse("all_gather", ValueError("late"))
    with pytest.raises(CollectiveTimeoutError) as raised:
        world[1].barrier()
    assert "late" not in str(raised.value)
    world.close()


def test_a_refusal_of_any_length_and_script_is_told():
    world = farandole.local(2, timeout_s=20)
    for text in ("é" * 400, "", "one line\nand another", "half \ud800 a letter"):
        world[1].refuse("all_reduce", ValueError(text))
        told = world[0]._runner._engine.calls()[1][-1].decode(errors="ignore")
        line = text.splitlines()[0] if text else "ValueError"
        assert told == f"all_reduce: {line}".encode(errors="replace")[:503].decode(errors="ignore")
    world.close()


def test_all_to_all_to_oneself_must_fit(worlds):
    def body(comm):
        counts, expects = ([4, 0], [0, 4]) if comm.rank == 0 else ([0, 4], [4, 0])
        with pytest.raises(ArgumentError, match="sends itself 4 rows by counts, but expects 0"):
            comm.all_to_all(np.arange(4), out=np.zeros(4, dtype=np.int64), counts=counts, output_counts=expects)

    worlds(2).run(body)


UNMET = {
    "broadcast": (lambda c: c.broadcast(np.ones(8), src=c.rank), r"rank 1: broadcast\(8 x float64, src=1\)"),
    "scatter": (lambda c: c.scatter(np.ones(8), src=c.rank, out=np.ones(4)), r"rank 0: scatter\(4 x .*, src=0\)"),
    "reduce": (lambda c: c.reduce(np.ones(8), dst=1 - c.rank), r"rank 0: reduce\(8 x float64, sum, dst=1\)"),
    "gather": (lambda c: c.gather(np.ones(8), dst=1 - c.rank), r"rank 1: gather\(8 x float64, dst=0\)"),
}


@pytest.mark.parametrize("case", UNMET)
def test_last_calls_that_differ_without_meeting_are_told_on_closing(case):
    """Each rank of these only sends, so neither has to wait for the other."""
    call, message = UNMET[case]
    world = farandole.local(2, timeout_s=20)
    world.run(call)
    with pytest.raises(CollectiveMismatchError, match=message):
        world[0].close()
    with pytest.raises(CollectiveMismatchError, match=message):
        world[1].close()
    world.close()


SHOWN = {
    "split": (
        lambda c: c.split(0) if c.rank else c.all_gather(np.ones(2, dtype=np.int64)),
        ["rank 0: all_gather(2 x int64), ", "rank 1: split(), "],
    ),
    "algorithm": (
        lambda c: c.all_reduce(np.ones(2), algorithm="ring" if c.rank else None),
        ["rank 0: all_reduce(2 x float64, sum), ", "rank 1: all_reduce(2 x float64, sum, algorithm='ring'), "],
    ),
    "own algorithm": (
        lambda c: c.all_reduce(np.ones(2), algorithm=algorithms.build("all_reduce", "ring", 2) if c.rank else None),
        ["rank 1: all_reduce(2 x float64, sum, algorithm=a schedule of the caller's own), "],
    ),
    "parts of all": (
        lambda c: c.all_gather(np.ones(4), counts=[4, 4 + c.rank] if c.rank == 0 else [5, 4]),
        ["rank 0: all_gather(4 x float64)", "rank 1: all_gather(4 x float64)", "as the ranks see it, 8, 9 elements"],
    ),
    "parts of all, scattered": (
        lambda c: c.reduce_scatter(np.ones(8 + c.rank), counts=[4, 4 + c.rank]),
        ["rank 0: reduce_scatter(8 x float64, sum)", "rank 1: reduce_scatter(9 x float64, sum)"],
    ),
    "uneven parts": (
        lambda c: c.all_gather(np.ones(5 + c.rank)),
        ["rank 0: all_gather(5 x float64)", "rank 1: all_gather(6 x float64)", "need counts=", "elements: [5, 6]"],
    ),
}


@pytest.mark.parametrize("case", SHOWN)
def test_a_mismatch_shows_what_the_calls_differ_in(case):
    call, shown = SHOWN[case]

    def body(comm):
        call(comm)
        while not comm.aborted:  # whoever only sent hears of it from the other
            threading.Event().wait(0.01)
        comm.barrier()

    for text in raises_everywhere(2, body, CollectiveMismatchError, "different calls"):
        for part in shown:
            assert part in text


def test_a_mismatch_names_the_ranks_that_are_not_as_the_others():
    others_called = threading.Barrier(5)

    def body(comm):
        if comm.rank == 3:
            others_called.wait()
        work = comm.all_reduce(np.ones(9 if comm.rank == 3 else 8), "max", async_op=True)
        if comm.rank != 3:
            while comm._runner._engine.calls()[comm.rank][0] == 0:  # until the engine has begun it
                threading.Event().wait(0.001)
            others_called.wait()
        work.wait()

    for text in raises_everywhere(5, body, CollectiveMismatchError, "different calls"):
        assert "different calls (rank 3 not as the others)" in text
        assert "rank 3: all_reduce(9 x float64, max)" in text


def test_a_failure_in_a_group_gives_the_ranks_of_the_job():
    def body(comm):
        group = comm.split(comm.rank % 2)
        if comm.rank % 2 == 0:
            with group:
                return
        with pytest.raises(CollectiveMismatchError, match=r"ranks of a group; in the job they are 1, 3\."):
            group.all_reduce(np.ones(1 + group.rank))

    with farandole.local(4, timeout_s=20) as world:
        world.run(body)


def test_a_timeout_names_the_ranks_that_are_missing():
    gone_on = threading.Barrier(5)

    def body(comm):
        comm.all_reduce(np.ones(4))
        if comm.rank in (1, 3):
            gone_on.wait()  # the others have given up by then
            comm.barrier()
        try:
            comm.all_reduce(np.ones(4), timeout=0.2)
        finally:
            gone_on.wait()

    texts = raises_everywhere(5, body, CollectiveTimeoutError, "ranks 1, 3 have not arrived at collective number 2")
    assert all("the timeout of 0.2 s is over" in text for text in texts)


def test_a_rank_that_closes_early_is_named():
    def body(comm):
        comm.all_reduce(np.ones(3))
        if comm.rank == 1:
            comm.close()
            with pytest.raises(CommunicatorClosedError, match="was closed"):
                comm.barrier()
            return
        with pytest.raises(
            PeerLostError, match=r"rank 1 closed its communicator .* all_reduce\(3 x float64, sum\).* fewer calls"
        ):
            comm.all_reduce(np.ones(3))

    with farandole.local(3, timeout_s=20) as world:
        world.run(body)


def test_abort_from_another_thread_ends_a_wait_at_once():
    with farandole.local(2, timeout_s=60) as world:

        def body(comm):
            if comm.rank == 0:
                threading.Timer(0.1, comm.abort).start()
                with pytest.raises(CommunicatorClosedError, match="rank 0 aborted"):
                    comm.barrier()

        world.run(body)


def test_the_first_failure_of_a_local_world_is_raised_with_its_rank():
    with farandole.local(3, timeout_s=60) as world:

        def body(comm):
            if comm.rank == 1:
                raise KeyError("mine")
            comm.barrier()

        with pytest.raises(KeyError, match="mine") as caught:
            world.run(body)
        assert caught.value.__notes__ == ["raised on rank 1 of 3"]


def test_closing_with_unfinished_work_warns_and_ends_it():
    world = farandole.local(2, timeout_s=60)
    work = world[0].all_reduce(np.ones(3), async_op=True)
    with pytest.warns(RuntimeWarning, match="1 background calls still wait"):
        world[0].close()
    with pytest.raises(CommunicatorClosedError):
        work.wait()
    world.close()
    assert world[0].closed


def test_close_is_safe_to_repeat_and_needs_no_other_rank():
    world = farandole.local(2)
    world[0].close()
    world[0].close()
    assert "closed" in repr(world[0])
    world.close()


def test_work_is_done_once_its_result_is_where_it_belongs():
    """A strided output is filled by a copy at the end: that must be over, too, as the array is then the caller's."""
    with farandole.local(2, timeout_s=20) as world:
        arrays = [np.ones((4, 2)) for _ in world]
        works = [world[rank].all_reduce(array[:, 0], async_op=True) for rank, array in enumerate(arrays)]
        while not all(work.is_done() for work in works):
            threading.Event().wait(0.001)
        for array in arrays:
            assert array[:, 0].tolist() == [2.0] * 4
            array[:, 0] = 99
        for communicator, work in zip(world, works, strict=True):
            communicator.stats()
            work.wait()
        assert all(array[:, 0].tolist() == [99.0] * 4 for array in arrays)


class InterruptedEngine:
    """An engine that is interrupted as soon as it has taken a call."""

    def __init__(self, engine) -> None:
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def submit(self, *arguments):
        self.engine.submit(*arguments)
        raise KeyboardInterrupt


def test_an_interrupted_start_keeps_the_arrays_for_as_long_as_the_engine_uses_them():
    with farandole.local(2, timeout_s=20) as world:
        runner = world[0]._runner
        runner._engine = InterruptedEngine(runner._engine)
        array = np.arange(100_000.0)
        alive = weakref.ref(array)
        with pytest.raises(KeyboardInterrupt):
            world[0].all_reduce(array, async_op=True)
        del array
        gc.collect()
        assert alive() is not None
        assert world[1].all_reduce(np.arange(100_000.0))[7] == 14.0
        runner._engine = runner._engine.engine
        world.run(lambda comm: comm.barrier())
        assert alive()[7] == 14.0


def run_alone(body: str, timeout: int = 60) -> subprocess.CompletedProcess:
    """``body`` as a program of its own, in a world of one or with local worlds."""
    program = "import threading, time, signal, sys, os, gc\nimport numpy as np\nimport farandole\n" + textwrap.dedent(
        body
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize("how", ["close", "barrier", "abort"])
def test_a_signal_handler_may_not_call_but_may_end_the_call_that_it_interrupts(how):
    ended = run_alone(
        f"""
        world = farandole.local(2, timeout_s=60)
        def handler(number, frame):
            try:
                world[0].{how}()
            except farandole.ArgumentError as error:
                print("refused:", "from within another" in str(error))
                world[0].abort()
        signal.signal(signal.SIGUSR1, handler)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        try:
            world[0].all_reduce(np.ones(3))
        except farandole.CommunicatorClosedError as error:
            print("ended:", error)
        world[1].close()
        """
    )
    assert ended.returncode == 0, ended.stderr
    assert ("refused: True" in ended.stdout) == (how == "barrier")
    assert ("closed on this rank" if how == "close" else "rank 0 aborted") in ended.stdout


@pytest.mark.parametrize("waits_in", ["world[r].all_reduce(a)", "world[r].all_reduce(a, async_op=True).wait()"])
def test_daemon_threads_in_a_call_do_not_spoil_the_end_of_the_process(waits_in):
    for _ in range(5):
        ended = run_alone(
            f"""
            world = farandole.local(2, timeout_s=60)
            a = np.ones(9)
            threading.excepthook = lambda error: None  # the threads' calls end with an error
            def forever(r):
                while True: {waits_in}
            for r in (0, 0, 1, 0, 0): threading.Thread(target=forever, args=(r,), daemon=True).start()
            time.sleep(0.2)  # nothing depends on how far they are
            sys.setswitchinterval(1000)  # from now on the main thread keeps the GIL from them as long as it can
            """
        )
        assert (ended.returncode, ended.stderr) == (0, "")


FAILS_AT_THE_END = {
    "a mismatch that nobody waited for": """
        world = farandole.local(2, timeout_s=60)
        works = [world[r].all_reduce(np.ones(3 + r), async_op=True) for r in range(2)]
        while not all(work.has_ended() for work in works): time.sleep(0.001)
        """,
    "roots that differ": """
        world = farandole.local(2, timeout_s=60)
        for comm in world: comm.broadcast(np.ones(3), comm.rank)
        """,
    "roots that differ, in communicators that are gone": """
        def main():
            world = farandole.local(2, timeout_s=60)
            for comm in world: comm.broadcast(np.ones(3), comm.rank)
        main()
        gc.collect()
        """,
}


@pytest.mark.parametrize("case", FAILS_AT_THE_END)
def test_what_nobody_was_told_of_fails_the_process_at_its_end(case):
    ended = run_alone(FAILS_AT_THE_END[case])
    assert ended.returncode == 1
    assert "CollectiveMismatchError: the ranks made different calls" in ended.stderr


def test_a_rank_that_forgets_the_last_call_is_noticed_on_closing():
    world = farandole.local(3, timeout_s=20)
    world.run(lambda comm: comm.rank and comm.gather(np.ones(5), dst=0))
    with pytest.raises(CollectiveMismatchError, match="rank 0: no call yet"):
        world.close()


def test_closing_tells_once_of_what_nobody_waited_for():
    world = farandole.local(2, timeout_s=20)
    works = [comm.all_reduce(np.ones(3 + comm.rank), async_op=True) for comm in world]
    while not all(work.has_ended() for work in works):
        threading.Event().wait(0.001)
    with pytest.raises(CollectiveMismatchError):
        works[0].wait()
    world[0].close()  # rank 0 has been told
    with pytest.raises(CollectiveMismatchError):
        world[1].close()


def test_a_rank_that_is_behind_in_another_call_is_a_mismatch_not_a_timeout():
    """Rank 1 waits for rank 2; the others are one call further, and wait for rank 1."""

    def body(comm):
        comm.broadcast(np.ones(3), src=2 if comm.rank == 1 else 0)
        comm.reduce(np.ones(3), 0)
        comm.scatter(np.ones(3), 0, out=np.ones(1))

    for text in raises_everywhere(3, body, CollectiveMismatchError, "different calls"):
        assert "rank 1: broadcast(3 x float64, src=2), collective number 1" in text


def test_background_calls_go_on_without_their_communicator():
    def start(world):
        return weakref.ref(world[0]), world[0].all_reduce(np.arange(5.0), async_op=True)

    world = farandole.local(2, timeout_s=20)
    peer = world[1]
    gone, work = start(world)
    del world
    gc.collect()
    assert gone() is None
    assert peer.all_reduce(np.ones(5)).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert work.wait().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    peer.close()


def test_the_error_of_a_body_is_not_replaced_by_that_of_closing():
    def body():
        with farandole.local(2, timeout_s=20) as world:
            for comm in world:
                comm.broadcast(np.ones(3), comm.rank)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        body()


def test_an_interruption_while_a_result_is_delivered_does_not_lose_it():
    with farandole.local(2, timeout_s=20) as world:
        array = np.ones((4, 2))
        work = world[0].all_reduce(array[:, 0], async_op=True)
        world[1].all_reduce(np.ones(4))
        while not work.has_ended():
            threading.Event().wait(0.001)
        finish, work._finish = work._finish, lambda receipt: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        work._finish = finish
        assert work.wait().tolist() == [2.0] * 4
        assert array[:, 0].tolist() == [2.0] * 4


def test_closing_that_is_interrupted_still_closes():
    world = farandole.local(2, timeout_s=20)
    work = world[0].all_reduce(np.ones(3), async_op=True)
    with pytest.raises(RuntimeWarning):  # pytest makes errors of warnings
        world[0].close()
    assert work.has_ended()
    with pytest.raises(CommunicatorClosedError, match="closed on this rank"):
        world[0].barrier()
    world[1].close()


@pytest.mark.parametrize("timeout", [5e-324, 1e10, 1e300, math.inf])
def test_timeouts_of_any_length(timeout):
    with farandole.local(2, timeout_s=20) as world:

        def body(comm):
            return [comm.all_reduce(np.ones(2), timeout=timeout if comm.rank else 20.0)[0] for _ in range(3)]

        if timeout > 1:
            assert world.run(body) == [[2.0] * 3] * 2
        else:
            with pytest.raises(CollectiveTimeoutError, match="the timeout of 1e-09 s is over"):
                world[1].all_reduce(np.ones(2), timeout=timeout)
