"""What a running job tells of itself, to the command and to whoever else asks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

import farandole
from farandole import status
from farandole.errors import ArgumentError

FARANDOLE = Path(sys.executable).parent / "farandole"
LIMIT_S = 60  # for what takes a second; only a failure takes so long

PROGRAM = """
import os, sys, threading
import numpy as np
import farandole

def computes():
    while True:  # until it is ended
        threading.Event().wait(0.01)

def calls():
    comm.all_reduce(np.ones(1000, dtype="f4"))

comm = farandole.init()
group = comm.split(comm.rank % 2)
comm.barrier()
print(os.getpid(), flush=True)
{1: computes, 3: computes, 2: lambda: comm.recv(np.ones(5), 1, tag=7)}.get(comm.rank, calls)()
"""


@pytest.fixture
def job(tmp_path):
    """The processes of a job: ranks 0 and 4 in an all_reduce, 1 and 3 in code of their own, 2 in a recv."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    environment = os.environ | {"FARANDOLE_TIMEOUT_S": "600"}
    command = [FARANDOLE, "run", "-n", "5", "--prefix", path]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    processes = {}
    try:
        while len(processes) < 5:
            rank, process = re.fullmatch(r"\[(\d)\] (\d+)\n", launcher.stdout.readline()).groups()
            processes[int(rank)] = int(process)
        yield processes
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=LIMIT_S)


def show(*arguments) -> str:
    patient = () if "--timeout" in arguments else ("--timeout", "30")  # of processes that are there, on a busy machine
    done = subprocess.run(
        [FARANDOLE, "status", *map(str, arguments), *patient],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def world_of(text: str) -> dict[int, dict]:
    """By rank, of the communicator of all five."""
    (whole,) = [one for one in json.loads(text)["communicators"] if one["world_size"] == 5]
    return {rank["rank"]: rank for rank in whole["ranks"]}


def when(condition, process: int) -> dict[int, dict]:
    """What is told once ``condition`` holds."""
    for _ in range(1000):
        ranks = world_of(show(process, "--json"))
        if condition(ranks):
            return ranks
        threading.Event().wait(0.01)
    raise AssertionError(ranks)


def test_what_each_rank_is_in(job):
    ranks = when(lambda r: r[0]["is_in_it"] and r[2]["last_message"], job[1])
    assert {rank: told["process"] for rank, told in ranks.items()} == job
    assert ranks[0]["call"] == "all_reduce(1000 x float32, sum)"
    assert ranks[0]["collectives"] == ranks[1]["collectives"] + 1
    assert (ranks[0]["bytes"], ranks[0]["is_behind"], ranks[1]["is_behind"]) == (4000, False, True)
    assert 0 <= ranks[0]["seconds"] < LIMIT_S
    assert (ranks[1]["call"], ranks[1]["is_in_it"], ranks[1]["seconds"]) == ("barrier()", False, None)
    assert ranks[2]["last_message"] == "recv(5 x float64, src=1, tag=7)"
    lines = PROGRAM.splitlines()
    assert lines[int(re.search(r":(\d+) in calls", ranks[0]["lines"][0])[1]) - 1].strip().startswith("comm.all_reduce")
    assert "in <lambda>" in ranks[2]["lines"][0]
    assert any("in computes" in line for line in ranks[1]["lines"])
    for rank, members in ((0, [0, 2, 4]), (1, [1, 3])):
        groups = [one for one in json.loads(show(job[rank], "--json"))["communicators"] if one["world_size"] < 5]
        assert [[told["job_rank"] for told in one["ranks"]] for one in groups] == [members]


def test_a_table_for_people(job):
    when(lambda r: r[0]["is_in_it"] and r[4]["is_in_it"] and r[2]["last_message"], job[0])
    text = show(job[0])
    assert re.search(
        rf"0 +{job[0]} +\d+ +all_reduce\(1000 x float32, sum\), waits for ranks 1, 2, 3 +\d+\.\d +\S+program\.py:11",
        text,
    )
    assert re.search(rf"1 +{job[1]} +\d+ +no collective; the last was barrier\(\)", text)
    assert "3 ranks, in the job 0, 2, 4" in text
    assert str(job[0]) in show()  # among all jobs of this host


def test_a_process_that_is_stopped_is_told_of_by_the_others(job):
    when(lambda r: r[0]["is_in_it"], job[1])
    os.kill(job[0], signal.SIGSTOP)
    try:
        ranks = when(lambda r: r[0]["is_stopped"] and r[0]["is_in_it"], job[1])
        text = show(job[1], "--timeout", "0.1")
        alone = show(job[0], "--timeout", "0.1")
    finally:
        os.kill(job[0], signal.SIGCONT)
    assert not ranks[0]["answers"]
    assert ranks[1]["answers"]
    assert "stopped, in all_reduce" in alone
    assert re.search(r"stopped, in all_reduce\(1000 x float32, sum\).*\(does not answer\)", text)


def test_a_failure_that_stopped_a_communicator_is_shown():
    world = farandole.local(3, timeout_s=LIMIT_S)
    with pytest.raises(farandole.CollectiveTimeoutError):
        world[2].all_gather(np.ones(4), timeout=0.05)
    with pytest.raises(ArgumentError):
        world[1].all_gather(np.ones(4), out=np.ones(4))
    told = [one for one in status.ask(os.getpid(), LIMIT_S)["communicators"] if one["stopped"] == "timeout, rank 2"]
    assert told
    assert told[0]["ranks"][2]["call"] == "all_gather(4 x float64)"
    world.close()


def test_ranks_that_have_left_are_shown():
    world = farandole.local(3, timeout_s=LIMIT_S)
    world.run(lambda comm: comm.barrier())
    identity = world[0]._runner.snapshot()["identity"]
    world[1].close()
    (told,) = [one for one in status.ask(os.getpid(), LIMIT_S)["communicators"] if one["identity"] == identity][:1]
    assert [rank["has_closed"] for rank in told["ranks"]] == [False, True, False]
    assert [rank["is_gone"] for rank in told["ranks"]][1]
    assert "has closed it" in show(os.getpid())
    world.close()


def test_who_asks_for_what_is_not_there():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    done = subprocess.run([FARANDOLE, "status", str(gone.pid)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"process {gone.pid} has no communicator of farandole, or has ended" in done.stderr


def test_other_users_are_not_answered(monkeypatch):
    with farandole.local(1):
        monkeypatch.setattr(os, "geteuid", lambda: 4321)

        class Credentials:
            size = status._CREDENTIALS.size

            @staticmethod
            def unpack(_):
                return 1, 777, 777

        monkeypatch.setattr(status, "_CREDENTIALS", Credentials)
        with pytest.raises(ArgumentError, match="belongs to another user"):
            status.ask(os.getpid(), LIMIT_S)
        with status.socket.socket(status.socket.AF_UNIX) as client:  # and if it asks all the same
            client.connect(f"\0farandole-status-2-{os.getpid()}")
            assert client.recv(10) == b""


def test_a_forked_child_answers_for_itself(tmp_path):
    code = """
    import os, farandole
    from farandole import status
    world = farandole.local(2)
    child = os.fork()
    if child == 0:
        assert status._server is None
        world = farandole.local(3)
        assert [one["world_size"] for one in status.ask(os.getpid(), 60)["communicators"]] == [3, 3, 3]
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert child not in status.processes_that_answer()
    assert os.getpid() in status.processes_that_answer()
    world.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_whoever_connects_and_goes_does_no_harm():
    with farandole.local(1):
        for _ in range(300):
            with contextlib.closing(status.socket.socket(status.socket.AF_UNIX)) as client:
                client.connect(f"\0farandole-status-2-{os.getpid()}")
                client.setblocking(False)
                with contextlib.suppress(OSError):
                    client.send(b"x" * 100)
        assert status.ask(os.getpid(), LIMIT_S)["process"] == os.getpid()


def test_what_keeps_a_process_from_answering_is_told(monkeypatch):
    with farandole.local(1) as world:
        monkeypatch.setattr(type(world[0]._runner), "snapshot", lambda runner: 1 / 0)
        assert f"process {os.getpid()} could not say what it is doing: ZeroDivisionError" in show(os.getpid())
