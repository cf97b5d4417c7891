"""Traces: what is recorded, how ranks put it together, and what becomes of failures."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import threading
import time
import warnings

import numpy as np
import pytest
from tests import jobs
from tests.test_exposure import assert_rows_are_stacks

import farandole
from farandole import ArgumentError, CommunicatorClosedError, timeline, trace_file, tracing
from farandole.clocks import clock_identity, clock_offset
from farandole.timeline import Record, Span
from farandole.trace_file import read_trace

SECOND = 10**9
LIMIT_S = 60  # for what takes a moment

# --- Clocks -----------------------------------------------------------------------------------------------------------


class ThreadRanks:
    """Ranks as threads, with queues between them."""

    def __init__(self, rank, size, queues, gathered, barrier):
        self.rank, self.size = rank, size
        self._queues, self._gathered, self._barrier = queues, gathered, barrier

    def all_gather(self, data):
        self._gathered[self.rank] = data
        self._barrier.wait(LIMIT_S)
        return list(self._gathered)

    def send(self, number, dst):
        self._queues[self.rank, dst].put(number)

    def receive(self, src):
        return self._queues[src, self.rank].get(timeout=LIMIT_S)


def offsets(shifts, identities) -> list[tuple[int, int]]:
    size = len(shifts)
    queues = {(src, dst): queue.Queue() for src in range(size) for dst in range(size)}
    shared = queues, [b""] * size, threading.Barrier(size)
    found = [(0, 0)] * size

    def find(rank):
        ranks = ThreadRanks(rank, size, *shared)
        found[rank] = clock_offset(ranks, identities[rank], lambda: time.monotonic_ns() + shifts[rank])

    threads = [threading.Thread(target=find, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return found


def test_clocks_that_are_apart_are_aligned_as_well_as_they_say():
    shifts = [0, 3600 * SECOND, -SECOND // 7, 5]
    found = offsets(shifts, ["a", "b", "c", "d"])
    assert found[0] == (0, 0)
    for shift, (offset, uncertainty) in zip(shifts[1:], found[1:], strict=True):
        assert abs(offset + shift) <= uncertainty < SECOND


def test_ranks_of_one_machine_have_one_clock():
    assert offsets([0, 0, 0], [clock_identity()] * 3) == [(0, 0)] * 3


def test_clocks_are_measured_over_a_communicator(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    monkeypatch.setattr(tracing, "clock_identity", lambda: threading.current_thread().name)
    traced(path, lambda comm, trace: comm.barrier(), 3)
    assert_one_clock_was_measured(path)


def assert_one_clock_was_measured(path) -> None:
    first, *others = json.loads(path.read_text())["farandole"]["ranks"]
    assert (first["clock_offset_ns"], first["clock_uncertainty_ns"]) == (0, 0)
    for rank in others:
        assert abs(rank["clock_offset_ns"]) <= rank["clock_uncertainty_ns"]
        assert rank["clock_uncertainty_ns"] > 0


# --- What is recorded -------------------------------------------------------------------------------------------------


def traced(path, body, size=2):
    """``body(comm, trace)`` on ranks as threads. Returns what was exposed, as each rank has it."""

    def run(comm):
        with farandole.trace(path, communicator=comm) as trace:
            body(comm, trace)
        return trace.exposed

    with farandole.local(size, timeout_s=LIMIT_S) as world:
        return world.run(run)


def named(part, kind) -> list[Span]:
    return sorted((span for span in part.spans if span.kind == kind), key=lambda span: span.began_ns)


def test_all_of_many_collectives_are_there(tmp_path):
    path = tmp_path / "trace.json"

    def body(comm, trace):
        for index in range(2500):
            if index % 2:
                comm.all_reduce(np.ones(10), algorithm="ring")
            else:
                comm.barrier()

    exposed = traced(path, body, 3)
    parts = read_trace(path)
    assert [part.rank for part in parts] == [0, 1, 2]
    assert all(some == [part.exposure() for part in parts] for some in exposed)
    for part in parts:
        assert part.num_missing == 0
        calls = named(part, "communication")
        assert len(calls) == 2500
        numbers = [call.details["number"] for call in calls]
        assert numbers == list(range(numbers[0], numbers[0] + 2500))
        assert {(call.name, call.details["algorithm"], call.details["bytes"]) for call in calls} == {
            ("barrier", "dissemination", 0),
            ("all_reduce", "ring", 80),
        }
        assert {(call.details["ranks"], call.details["blocking"]) for call in calls} == {(3, True)}
        waits = named(part, "waiting")
        assert len(waits) == 2500
        assert all(wait.began_ns <= call.began_ns <= call.ended_ns for wait, call in zip(waits, calls, strict=True))
        total = part.exposure().total
        assert total.communicating == total.exposed > 0
        assert total.hidden == 0
        assert all(part.began_ns <= span.began_ns <= span.ended_ns <= part.ended_ns for span in part.spans)
    assert_rows_are_stacks(path)


def test_communication_behind_computation_is_hidden(tmp_path):
    path = tmp_path / "trace.json"

    def body(comm, trace):
        for _ in range(3):
            works = [comm.all_reduce(np.ones(1000), async_op=True) for _ in range(2)]
            with trace.span("work"):
                while not all(work.is_done() for work in works):
                    time.sleep(0.001)
            for work in works:
                work.wait()
            trace.end_step()

    for one in traced(path, body)[0]:
        assert one.total.hidden == one.total.communicating > 0
        assert one.total.exposed == 0
        assert one.total.computing > one.total.hidden / 2
        assert len(one.steps) == 3
        assert all(step.communicating > 0 for step in one.steps)
        assert sum(step.communicating for step in one.steps) == pytest.approx(one.total.communicating)
    assert {span.name for span in named(read_trace(path)[0], "compute")} == {"work"}


def test_a_wait_for_what_goes_on_in_the_background_is_exposed(tmp_path):
    path = tmp_path / "trace.json"
    came = threading.Event()

    def body(comm, trace):
        if comm.rank == 1:
            assert came.wait(LIMIT_S)
            time.sleep(0.02)
        work = comm.all_reduce(np.ones(10), async_op=True)
        came.set()
        work.wait()

    one = traced(path, body)[0][0]
    (wait,) = named(read_trace(path)[0], "waiting")
    assert wait.name == "for all_reduce on rank 0"
    assert one.total.exposed > 0


def test_groups_made_meanwhile_and_messages_are_there(tmp_path):
    path = tmp_path / "trace.json"

    def body(comm, trace):
        with contextlib.closing(comm.split(comm.rank % 2)) as group:
            group.all_gather(np.ones(2))
        if comm.rank == 0:
            comm.send(np.ones(3), 1)
        if comm.rank == 1:
            comm.recv(np.ones(3), 0)

    traced(path, body, 4)
    parts = read_trace(path)
    for part in parts:
        calls = named(part, "communication")
        assert [call.details["ranks"] for call in calls if call.name == "all_gather"] == [2]
        assert "split" in {call.name for call in calls}
    assert [[name for name in ("send", "recv") if name in {one.name for one in part.spans}] for part in parts] == [
        ["send"],
        ["recv"],
        [],
        [],
    ]


def test_what_has_not_ended_is_there_as_such(tmp_path):
    path = tmp_path / "trace.json"
    works = []

    def run(comm):
        with farandole.trace(path, communicator=comm):
            if comm.rank == 0:
                works.append(comm.all_reduce(np.ones(3), async_op=True))
                while not comm.flight_record() or comm.flight_record()[-1].call != "all_reduce(3 x float64, sum)":
                    time.sleep(0.001)
        if comm.rank == 1:
            comm.all_reduce(np.ones(3))

    with farandole.local(2, timeout_s=LIMIT_S) as world:
        world.run(run)
        works[0].wait()
    (call,) = named(read_trace(path)[0], "communication")
    assert call.details["unfinished"]
    assert named(read_trace(path)[1], "communication") == []


@pytest.mark.parametrize("most", [0, 1, 100])
def test_what_there_is_no_room_for_is_counted_and_said(tmp_path, monkeypatch, most):
    path = tmp_path / "trace.json"
    monkeypatch.setattr(tracing, "Record", functools.partial(Record, most))

    def body(comm, trace):
        for _ in range(150):
            comm.barrier()
            with trace.span("x"):
                pass

    with pytest.warns(RuntimeWarning, match=f"no room for {2 * (150 - most)} spans of rank 0, "):
        exposed = traced(path, body)
    assert [one.num_missing for one in exposed[1]] == [2 * (150 - most)] * 2
    assert [part.num_missing for part in read_trace(path)] == [2 * (150 - most)] * 2


def test_nothing_is_done_while_there_is_no_trace(monkeypatch):
    def fail(*_):
        raise AssertionError("called while there is no trace")

    for name in ("now_ns", "Span", "_Context", "ranks_in_words"):
        monkeypatch.setattr(timeline, name, fail)
    monkeypatch.setattr(Record, "add", fail)
    assert timeline.span("compute", "x") is timeline.span("waiting", "y")
    with timeline.span("compute", "x"):
        timeline.start("compute", "x")()
        timeline.add("compute", "x", timeline.moment())
        timeline.mark_step()

    def body(comm):
        comm.all_reduce(np.ones(3))
        comm.all_reduce(np.ones(3), async_op=True).wait()
        (comm.send if comm.rank == 0 else comm.recv)(np.ones(3), 1 - comm.rank)
        return comm._runner._engine.logged_flights()

    with farandole.local(2, timeout_s=LIMIT_S) as world:
        assert world.run(body) == [([], 0)] * 2


def test_a_forked_process_has_no_record(tmp_path):
    with farandole.trace(tmp_path / "trace.json"):
        child = os.fork()
        if child == 0:
            os._exit(timeline.is_on() or timeline.current() is not None)
        assert os.waitpid(child, 0)[1] == 0
        assert timeline.is_on()


# --- Who takes part, and what goes wrong ------------------------------------------------------------------------------


def test_a_process_by_itself(tmp_path):
    path = tmp_path / "trace.json"
    with farandole.trace(path) as trace:
        with pytest.raises(ArgumentError, match="known when the trace has ended"):
            _ = trace.exposed
        with trace.span("x"):
            pass
    (one,) = trace.exposed
    assert (one.rank, one.total.communicating) == (0, 0)
    assert [span.name for span in read_trace(path)[0].spans] == ["x"]


def test_ranks_that_do_not_know_one_another_yet_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ArgumentError, match=r"rank 1 of 4, .*call that before"), farandole.trace(tmp_path / "x.json"):
        pass


def test_two_traces_at_once_are_refused(tmp_path):
    with farandole.trace(tmp_path / "one.json"):
        with (
            pytest.raises(ArgumentError, match="a trace is on already"),
            farandole.trace(tmp_path / "two.json"),
        ):
            pass
        assert timeline.is_on()
    assert not timeline.is_on()

    def within(comm, _):
        with (
            pytest.raises(ArgumentError, match=r"^a trace is on already"),
            farandole.trace(tmp_path / "two.json", communicator=comm),
        ):
            pass
        comm.barrier()

    traced(tmp_path / "three.json", within)
    for part in read_trace(tmp_path / "three.json"):
        assert named(part, "communication")[-1].name == "barrier"
    assert not (tmp_path / "two.json").exists()


def test_ranks_that_are_threads_are_told_to_give_their_communicators(tmp_path):
    both = threading.Barrier(2)

    def run(comm):
        refusal = ""
        both.wait(LIMIT_S)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(farandole.trace(tmp_path / "x.json"))
            except ArgumentError as error:
                refusal = str(error)
            both.wait(LIMIT_S)
        (tmp_path / "x.json").unlink(missing_ok=True)
        return refusal

    with farandole.local(2) as world:
        for _ in range(50):  # they look at the same moment whether the path can be written
            refusals = sorted(world.run(run))
            assert refusals[0] == ""
            assert "communicator=comm" in refusals[1]


@pytest.mark.parametrize("place", ["a folder that is not there/trace.json", ".", "a file/trace.json"])
def test_a_path_that_cannot_be_written_is_told_on_every_rank(tmp_path, place):
    (tmp_path / "a file").touch()
    path = tmp_path / place

    def run(comm):
        with (
            pytest.raises(ArgumentError, match="cannot be written") as caught,
            farandole.trace(path, communicator=comm),
        ):
            raise AssertionError("entered")
        return str(caught.value)

    with farandole.local(3) as world:
        first, *others = world.run(run)
    assert not timeline.is_on()
    assert others == [f"on rank 0: {first}"] * 2


def test_a_file_that_cannot_be_written_after_all_is_told_on_every_rank(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text("what was there")

    def run(comm):
        with pytest.raises(OSError, match=r"could not be written: .*full"), farandole.trace(path, communicator=comm):
            pass

    dumps = json.dumps

    def full_disk(value, **more):
        if isinstance(value, dict) and "displayTimeUnit" in value:
            raise OSError(28, "the disk is full")
        return dumps(value, **more)

    monkeypatch.setattr(trace_file.json, "dumps", full_disk)
    with farandole.local(2, timeout_s=LIMIT_S) as world:
        world.run(run)
    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_whose_body_fails_everywhere_is_written(tmp_path):
    path = tmp_path / "trace.json"

    def run(comm):
        with pytest.raises(ZeroDivisionError), farandole.trace(path, communicator=comm):
            fail(comm)

    def fail(comm):
        comm.barrier()
        raise ZeroDivisionError

    with farandole.local(2, timeout_s=LIMIT_S) as world:
        world.run(run)
    assert [len(named(part, "communication")) for part in read_trace(path)] == [1, 1]


def test_where_one_rank_fails_and_the_others_wait_each_writes_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "_AFTER_A_FAILURE_S", 0.2)
    failures = []

    def run(comm):
        try:
            with farandole.trace(tmp_path / "trace.json", communicator=comm):
                comm.barrier()
                if comm.rank == 1:
                    raise ZeroDivisionError
                comm.all_reduce(np.ones(3))
        except Exception as error:
            failures.append(type(error))
            raise

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with farandole.local(3, timeout_s=LIMIT_S) as world, pytest.raises(ZeroDivisionError):
            world.run(run)
    for rank in range(3):
        assert any(f"that of rank {rank} alone is in {tmp_path}" in str(one.message) for one in told)
    assert sorted(failures, key=str) == sorted([ZeroDivisionError, *[CommunicatorClosedError] * 2], key=str)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"trace.rank{rank}.json" for rank in range(3)]
    for rank in range(3):
        (part,) = read_trace(tmp_path / f"trace.rank{rank}.json")
        assert part.rank == rank
        assert part.uncertainty_ns is None
        assert "barrier" in {span.name for span in part.spans}
        failed = [call for call in named(part, "communication") if call.details.get("failed")]
        assert [call.name for call in failed] == ([] if rank == 1 else ["all_reduce"])
        assert part.exposure().total.hidden == 0
    assert not timeline.is_on()


def test_a_warning_that_is_an_error_does_not_leave_the_trace_on(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "Record", functools.partial(Record, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with (
            pytest.raises(RuntimeWarning, match="no room"),
            farandole.trace(tmp_path / "x.json") as trace,
            trace.span("x"),
        ):
            pass
    assert not timeline.is_on()


def test_a_warning_of_what_is_missing_comes_when_all_ranks_have_the_file(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    monkeypatch.setattr(tracing, "Record", functools.partial(Record, 0))
    traces = {}

    def run(comm):
        with farandole.trace(path, communicator=comm) as trace:
            traces[comm.rank] = trace
            comm.barrier()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with farandole.local(3, timeout_s=LIMIT_S) as world, pytest.raises(RuntimeWarning, match="no room"):
            world.run(run)
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]
    assert len(read_trace(path)) == 3
    assert traces[2].exposed == traces[0].exposed


def test_what_threads_did_before_the_ranks_had_come_together_is_left_out():
    record = Record()
    record.add(Span("compute", "before", timeline.now_ns() - 10, timeline.now_ns()))
    record.steps.append(timeline.now_ns())
    end = record.begin(Span("compute", "across", timeline.now_ns(), 0))
    record.began_ns = timeline.now_ns()
    end()
    record.steps.append(timeline.now_ns())
    record.close()
    assert [span.name for span in record.spans] == ["across"]
    assert record.spans[0].began_ns == record.began_ns <= record.spans[0].ended_ns <= record.ended_ns
    assert len(record.steps) == 1


def test_the_job_of_init_takes_part(tmp_path):
    program = jobs.write_script(
        tmp_path,
        """
        import sys
        import numpy as np
        import farandole

        comm = farandole.init()
        with farandole.trace(sys.argv[1]) as trace:
            comm.all_reduce(np.ones(1000))
        assert [one.rank for one in trace.exposed] == [0, 1, 2]
        assert "torch" not in sys.modules
        """,
    )
    done = jobs.run(jobs.sysconfig.get_path("scripts") + "/farandole", "run", "-n", 3, program, tmp_path / "trace.json")
    assert done.returncode == 0, done.stderr
    parts = read_trace(tmp_path / "trace.json")
    assert [[span.name for span in named(part, "communication")] for part in parts] == [["all_reduce"]] * 3
    assert len({part.process for part in parts}) == 3
