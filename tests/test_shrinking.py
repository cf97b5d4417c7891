"""Ranks that go on without those that are lost."""

from __future__ import annotations

import itertools
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import several_hosts

import farandole
from farandole import ArgumentError, CommunicatorClosedError, PeerLostError, RendezvousError, shrinking
from farandole.launch import run_processes
from farandole.topology import Topology

EXAMPLE = Path(__file__).parent.parent / "examples" / "survivors.py"
LIMIT_S = 100  # for what takes a second; only a failure takes so long


def on_all(world, ranks, body) -> list:
    """``body(comm)`` on some ranks of a world, each in a thread; what it returns, or the error that it raises."""
    results: dict[int, object] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = body(world[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    return [results[rank] for rank in ranks]


def works(comm: farandole.Communicator) -> tuple[int, int, list]:
    """A rank, the size of its world, and what all have in order; once every collective has been through."""
    n = comm.world_size
    total = comm.all_reduce(np.arange(7.0) + comm.rank)
    assert total.tolist() == (n * np.arange(7.0) + n * (n - 1) / 2).tolist()
    comm.send(np.array([comm.rank]), (comm.rank + 1) % n, async_op=True) if n > 1 else None
    if n > 1:
        assert comm.recv(np.zeros(1, dtype=int), (comm.rank - 1) % n)[0] == (comm.rank - 1) % n
    return comm.rank, n, comm.all_gather(np.array([comm.rank])).tolist()


@pytest.mark.parametrize("hosts", ["1x2", "1x3", "1x4", "1x5", "2x1", "0,1,0", "2x2"])
def test_whoever_is_left_goes_on_in_order(hosts):
    """Whichever ranks are lost, the first among them."""
    n = Topology.parse(hosts).world_size
    for num_lost in range(1, n):
        for lost in itertools.combinations(range(n), num_lost):
            world = farandole.local(n, timeout_s=LIMIT_S, hosts=hosts)
            for rank in lost:
                world[rank].close()
            left = [rank for rank in range(n) if rank not in lost]

            def body(comm):
                if comm.world_size > 1:
                    with pytest.raises(PeerLostError):
                        comm.barrier()
                with comm.shrink() as smaller:
                    assert comm.closed
                    assert smaller.timeout_s == LIMIT_S
                    return works(smaller)

            expected = [(index, len(left), list(range(len(left)))) for index in range(len(left))]
            assert on_all(world, left, body) == expected
            world.close()


@pytest.mark.parametrize("hosts", ["1x5", "0,1,0,1,2"])
def test_again_and_again(hosts):
    """Down to one; the first of them is lost each time."""

    def body(comm):
        sizes = []
        for _ in range(comm.rank):
            while not comm._runner._engine.is_gone(0):
                threading.Event().wait(0.001)
            comm = comm.shrink()
            sizes.append(works(comm)[1])
        comm.close()
        return sizes

    world = farandole.local(5, timeout_s=LIMIT_S, hosts=hosts)
    assert on_all(world, range(5), body) == [[], [4], [4, 3], [4, 3, 2], [4, 3, 2, 1]]
    world.close()


def test_a_group_goes_on_by_itself():
    world = farandole.local(4, timeout_s=LIMIT_S)

    def body(comm):
        group = comm.split(comm.rank % 2)
        if comm.rank == 1:
            group.close()
        if comm.rank == 3:
            while not group._runner._engine.is_gone(0):
                threading.Event().wait(0.001)
            group = group.shrink()
        comm.barrier()  # this one is whole
        result = works(group) if comm.rank != 1 else None
        group.close()
        return result

    assert world.run(body) == [(0, 2, [0, 1]), None, (1, 2, [0, 1]), (0, 1, [0])]
    world.close()


def test_nobody_is_left_behind_where_nothing_has_failed():
    with farandole.local(2, timeout_s=LIMIT_S) as world:
        with pytest.raises(ArgumentError, match="nothing has failed"):
            world[0].shrink()
        assert world.run(lambda comm: comm.all_reduce(np.ones(1))[0]) == [2.0, 2.0]


def test_a_closed_communicator_does_not_shrink():
    with farandole.local(2) as world:
        world[0].close()
        with pytest.raises(CommunicatorClosedError, match="was closed on this rank"):
            world[0].shrink()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "1"])
def test_a_timeout_that_is_none_is_refused(timeout):
    with farandole.local(2) as world:
        world[0].close()
        with pytest.raises(ArgumentError, match="timeout is"):
            world[1].shrink(timeout=timeout)


def test_who_does_not_come_in_time_is_left_behind_and_told():
    """After an abort or a timeout, too, nobody has ended."""
    world = farandole.local(3, timeout_s=LIMIT_S)
    world[0].abort()
    first, second = on_all(world, [0, 2], lambda comm: comm.shrink(timeout=2))
    assert (first.rank, second.rank, second.world_size) == (0, 1, 2)
    with pytest.raises(CommunicatorClosedError, match=r"have gone on without rank 1, which called shrink\(\) too late"):
        world[1].shrink()
    for comm in (first, second):
        comm.close()
    world.close()


@pytest.mark.parametrize("problem", ["create_arena", "map_arena"])
def test_if_one_cannot_join_none_does(monkeypatch, problem):
    real = getattr(shrinking, problem)

    def fail(*arguments):
        if problem == "create_arena" or threading.current_thread().name == "unable":
            raise RendezvousError("there is no memory left")
        return real(*arguments)

    monkeypatch.setattr(shrinking, problem, fail)
    world = farandole.local(4, timeout_s=LIMIT_S)
    world[1].close()

    def body(comm):
        threading.current_thread().name = "unable" if comm.rank == 2 else "able"
        return comm.shrink()

    errors = on_all(world, [0, 2, 3], body)
    assert all(isinstance(error, RendezvousError) for error in errors), errors
    assert any("there is no memory left" in str(error) for error in errors)
    world.close()


def goes_on_without(smaller: farandole.Communicator, rank: int) -> tuple[int, int, list]:
    """What is left, once the new communicator has lost a rank, too."""
    with pytest.raises(PeerLostError, match=f"rank {rank}"):
        smaller.barrier()
    with smaller.shrink() as again:
        return works(again)


def test_who_is_interrupted_is_not_waited_for(monkeypatch):
    """It was there, and lives; but it is no member that the others would wait for."""

    class Interrupted(BaseException):
        pass

    real = shrinking._Shrinking._accept

    def accept(self, leader, board):
        if self._own == 2:
            raise Interrupted
        return real(self, leader, board)

    monkeypatch.setattr(shrinking._Shrinking, "_accept", accept)
    world = farandole.local(4, timeout_s=LIMIT_S)
    world[3].close()

    def body(comm):
        if comm.rank == 2:
            with pytest.raises(Interrupted):
                comm.shrink()
            assert comm.closed
            return None
        with comm.shrink() as smaller:
            assert smaller.world_size == 3
            return goes_on_without(smaller, 2)

    assert on_all(world, range(3), body) == [(0, 2, [0, 1]), (1, 2, [0, 1]), None]
    world.close()


def test_a_member_that_is_stopped_until_after_the_verdict_takes_no_part(monkeypatch):
    monkeypatch.setattr(shrinking, "_MAPPING_S", 0.3)
    decided = threading.Event()
    real = shrinking._Shrinking._accept

    def accept(self, leader, board):
        if self._own == 2:
            decided.wait()
        return real(self, leader, board)

    monkeypatch.setattr(shrinking._Shrinking, "_accept", accept)
    world = farandole.local(3, timeout_s=LIMIT_S)
    world[0].abort()

    def body(comm):
        if comm.rank == 2:
            with pytest.raises(CommunicatorClosedError, match="have gone on without rank 2"):
                comm.shrink()
            return None
        smaller = comm.shrink()
        decided.set()
        return goes_on_without(smaller, 2)

    assert on_all(world, range(3), body) == [(0, 2, [0, 1]), (1, 2, [0, 1]), None]
    world.close()


def test_a_rank_shrinks_once(monkeypatch):
    world = farandole.local(2, timeout_s=LIMIT_S)
    world[0].abort()
    world[0]._runner._is_shrinking = True  # another thread is at it
    with pytest.raises(ArgumentError, match="is called once"):
        world[0].shrink()
    world.close()


def test_ranks_that_differed_go_on_together():
    """Also those that did not meet the failure themselves."""
    world = farandole.local(3, timeout_s=LIMIT_S)

    def body(comm):
        if comm.rank != 2:
            with pytest.raises(farandole.CollectiveMismatchError):
                comm.all_reduce(np.ones(3 + comm.rank))
        while not comm.aborted:
            threading.Event().wait(0.001)
        with comm.shrink() as again:
            return works(again)

    assert on_all(world, range(3), body) == [(rank, 3, [0, 1, 2]) for rank in range(3)]
    world.close()


class Mortal:
    """An engine whose rank may die in the middle: it then says nothing more."""

    def __init__(self, engine) -> None:
        self._engine = engine
        self.is_dead = False

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def write_board(self, word, value):
        if not self.is_dead:
            self._engine.write_board(word, value)

    def die(self):
        self.is_dead = True
        self._engine.close()


@pytest.mark.parametrize("when", ["before its offer", "after its offer was taken", "after its verdict"])
def test_a_leader_that_is_lost_is_replaced_unless_it_has_given_its_verdict(monkeypatch, when):
    world = farandole.local(4, timeout_s=LIMIT_S)
    world[3].close()
    leader = Mortal(world[0]._runner._engine)
    real_wait, real_create = shrinking._Shrinking._wait_for_mappings, shrinking.create_arena

    def create(*arguments):
        if threading.current_thread().name == "leader" and when == "before its offer":
            leader.die()
            raise RendezvousError("dead")
        return real_create(*arguments)

    def wait(self, members):
        answers = real_wait(self, members)
        if self._own == 0 and when == "after its offer was taken":
            leader.die()
            raise RendezvousError("dead")
        return answers

    monkeypatch.setattr(shrinking, "create_arena", create)
    monkeypatch.setattr(shrinking._Shrinking, "_wait_for_mappings", wait)

    def body(comm):
        if comm.rank == 0:
            threading.current_thread().name = "leader"
            try:
                shrinking.shrink(leader, comm._membership, LIMIT_S).leave()
                leader.die()
            except RendezvousError:
                assert leader.is_dead
            return None
        with comm.shrink() as smaller:
            if when == "after its verdict":  # it is a rank that the new one has lost
                return goes_on_without(smaller, 0)
            return works(smaller)

    assert on_all(world, range(3), body) == [None, (0, 2, [0, 1]), (1, 2, [0, 1])]
    world.close()


# -- processes that die ------------------------------------------------------------------------------------------------

VICTIMS = """
import os, random, signal, sys, threading, time
import numpy as np
import farandole

n, num_victims, seed = int(os.environ["WORLD_SIZE"]), int(sys.argv[1]), int(sys.argv[2])
choice = random.Random(seed)
victims = choice.sample(range(n), num_victims)
at_once = choice.random() < 0.5
delays = {victim: 0.02 if at_once else choice.random() * 0.1 for victim in victims}
comm = farandole.init(timeout_s=90)
me = comm.rank
comm.barrier()
if me in victims:
    threading.Timer(delays[me], os.kill, (os.getpid(), signal.SIGKILL)).start()
has_lost = False
members = np.arange(n)
while True:
    try:
        if has_lost:
            comm = comm.shrink()
            has_lost = False
        members = comm.all_gather(np.array([me]))
        total = comm.all_reduce(np.full(5000, float(me)))
        assert (total == members.sum()).all()
        done = comm.all_reduce(np.array([len(members) == n - num_victims]), "min")
        if done[0]:
            break
    except (farandole.PeerLostError, farandole.CommunicatorClosedError):
        has_lost = True
os.write(1, f"{me}: {members.tolist()}\\n".encode())
"""


@pytest.mark.parametrize("seeds", [range(start, start + 10) for start in range(0, 60, 10)], ids=str)
def test_survivors_of_random_deaths_agree_who_they_are(tmp_path, seeds):
    """Also of deaths while others agree on those before."""
    program = tmp_path / "victims.py"
    program.write_text(VICTIMS)
    for seed in seeds:
        choice = random.Random(seed)
        n = choice.choice([2, 3, 4, 6])
        num_victims = choice.randrange(1, n)
        lines: list[str] = []
        result = run_processes(
            [str(program), str(num_victims), str(seed)],
            n,
            on_line=lambda rank, stream, line, lines=lines: lines.append(line.decode()),
            max_lost=num_victims,
        )
        assert result.exit_code == 0, lines
        said = dict(line.split(": ") for line in lines if re.match(r"\d+: \[", line))
        assert len(said) == n - num_victims, (seed, lines)
        assert set(said.values()) == {str(sorted(map(int, said)))}, (seed, lines)


def test_a_job_that_loses_two_of_four_ranks_ends_with_the_right_weights():
    command = [Path(sys.executable).parent / "farandole", "run", "-n", "4", "--max-lost", "2", "--prefix", EXAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("that are left: largest difference", done.stdout)) == 2
    assert "rank 1 of 4 exited with code 3; the others go on" in done.stderr
    assert "rank 2 of 4 exited with code 3; the others go on" in done.stderr


def test_one_rank_more_than_may_be_lost_ends_the_job():
    command = [Path(sys.executable).parent / "farandole", "run", "-n", "4", "--max-lost", "1", EXAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 3
    assert "rank 1 of 4 exited with code 3; the others go on" in done.stderr
    assert "rank 2 of 4 exited with code 3; all ranks were ended" in done.stderr


@pytest.mark.parametrize("max_lost", [-1, 2])
def test_a_number_of_ranks_that_cannot_be_lost_is_refused(max_lost):
    with pytest.raises(ArgumentError, match=r"max_lost is -?\d; of 2 ranks 0\.\.1 may be lost"):
        run_processes([sys.executable, "-c", ""], 2, max_lost=max_lost)


# -- across hosts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [["a", "b", "a", "b"], ["a", "b", "c", "d"], ["a", "a", "b", "b"]])
def test_training_on_several_hosts_survives_two_ranks(hosts):
    done = several_hosts.run(hosts, EXAMPLE.read_text())
    assert [code for code, _, _ in done] == [0, 3, 3, 0], done
    for rank, index in ((0, 0), (3, 1)):
        assert f"rank {index} of 2 that are left: largest difference" in done[rank][1]
        assert "ended while others needed it" in done[rank][1]


COMES_LATE = """
import contextlib, os, signal, sys, time
import numpy as np, farandole
late = int(sys.argv[1])
comm = farandole.init(timeout_s=60)
rank, everyone = comm.rank, range(comm.world_size)
comm.barrier()
if rank == late:
    with contextlib.suppress(farandole.CommunicationError):  # one may have waited long enough before another has sent
        for other in set(everyone) - {rank}:
            comm.recv(np.zeros(1), other)
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    comm.send(np.zeros(1), late)
try:
    comm.all_reduce(np.ones(3), timeout=0.5)
except farandole.CommunicationError as error:  # a timeout; to the late one the others may be lost by then
    try:
        with comm.shrink(timeout=1) as smaller:
            print(smaller.world_size, smaller.all_reduce(np.array([rank]))[0], flush=True)
            if rank != late:
                sys.stdin.readline()  # they work on
    except farandole.CommunicatorClosedError as error:
        print(error, flush=True)
"""


@pytest.mark.parametrize(("hosts", "late"), [("aab", 2), ("abc", 0), ("abc", 2), ("aba", 1)])
def test_a_rank_that_comes_too_late_is_told_so_across_hosts(hosts, late):
    job = several_hosts.start(hosts, COMES_LATE, str(late))
    try:
        others = [rank for rank in range(3) if rank != late]
        for rank in others:
            assert job.ranks[rank].stdout.readline() == f"2 {sum(others)}\n"
        job.ranks[late].send_signal(signal.SIGCONT)
        text = job.ranks[late].stdout.readline() or job.ranks[late].stderr.read()
        assert f"the others have gone on without rank {late}, which called shrink() too late" in text
    finally:
        job.end()


DIES_AGAIN = """
import os, random, signal, sys, threading, time
import numpy as np, farandole
seed = int(sys.argv[1])
comm = farandole.init(timeout_s=60)
rank, n = comm.rank, comm.world_size
choice = random.Random(seed)
victims = choice.sample(range(n), choice.randrange(1, n))
delays = {victim: choice.uniform(0, 0.15) for victim in victims}
comm.barrier()
if rank in victims:
    threading.Timer(delays[rank], os.kill, (os.getpid(), signal.SIGKILL)).start()
while True:
    try:
        if comm.world_size == n - len(victims):
            total = comm.all_reduce(np.array([rank]))
            print(comm.world_size, total[0] == sum(set(range(n)) - set(victims)), flush=True)
            break
        comm.all_reduce(np.arange(choice.choice([3, 300_000])) * 1.0)
    except farandole.PeerLostError:
        comm = comm.shrink(timeout=30)
        choice = random.Random(seed)  # some may have drawn once more than others, whose last call had failed
"""


@pytest.mark.parametrize("seed", range(12))
def test_ranks_that_die_at_any_time_are_left_behind(seed):
    """Also while the others agree how to go on without one that died before."""
    hosts = random.Random(seed).choice([["a", "b", "a", "b"], ["a", "b", "c"], ["a", "a", "b", "b", "c"]])
    for code, out, err in several_hosts.run(hosts, DIES_AGAIN, str(seed)):
        if code != -9:
            assert code == 0, err
            assert out.split()[1] == "True", out
