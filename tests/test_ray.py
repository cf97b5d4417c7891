"""Ranks that are actors of Ray."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from jobs import ROOT, environment_of, run, write_script

from farandole import ArgumentError
from farandole.ray import Group

HEAD = """
import os, sys, time
import numpy as np
import ray
import farandole
from farandole.ray import Group

@ray.remote(num_cpus=0)
class Rank:
    def use(self, group, rank, function, *arguments):
        try:
            return function(group, rank, *arguments)
        except farandole.FarandoleError as error:
            return f"{type(error).__name__} {error} after {time.monotonic():.3f}"

def start(n, hosts="aaaa"):
    return [Rank.options(runtime_env={"env_vars": {"FARANDOLE_HOST_ID": host}}).remote() for host in hosts[:n]]

def begin(ranks, group, function, *arguments):
    return [actor.use.remote(group, rank, function, *arguments) for rank, actor in enumerate(ranks)]

def total(group, rank):
    with group.join(rank, timeout_s=60) as comm:
        return comm.all_reduce(np.arange(100_000) + rank).sum(), comm.broadcast(np.array([rank]), 0)[0]

def main():
"""

TAIL = """
ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=sys.argv[1])
main()
ray.shutdown()
print("through")
"""


@pytest.fixture(scope="module")
def python():
    """With Ray; made once."""
    try:
        return environment_of("ray") / "python"
    except subprocess.CalledProcessError as error:
        pytest.skip(f"Ray cannot be installed here ({error}); it has wheels for some Pythons only, and is 70 MB large")


def run_ray(python, *command) -> str:
    with tempfile.TemporaryDirectory(prefix="farandole-ray") as home:  # paths of sockets must be short
        done = run(
            python, *command, home, HOME=home, RAY_USAGE_STATS_ENABLED="0", PYTHONWARNINGS="error::RuntimeWarning"
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def run_main(python, tmp_path: Path, body: str) -> str:
    return run_ray(python, write_script(tmp_path, HEAD + body + TAIL))


def test_the_example(python):
    """As it stands, but for what Ray is told of the machine."""
    code = (
        "import ray, runpy, sys\n"
        "ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=sys.argv[1])\n"
        f"runpy.run_path({str(ROOT / 'examples' / 'with_ray.py')!r}, run_name='example')['main']()\n"
    )
    out = run_ray(python, "-c", code)
    assert re.search(r"3 actors, weights bit-identical, accuracy 0\.9\d\d", out), out


def test_groups_of_actors_and_tasks_on_one_host_and_on_several(python, tmp_path):
    body = """
    expected = [(3 * np.arange(100_000).sum() + 300_000, 0)] * 3
    for hosts in ("aaa", "aba", "abc"):
        ranks = start(3, hosts)
        for _ in range(2):  # each time in a group of its own
            assert ray.get(begin(ranks, Group(3), total)) == expected
    group = Group(3)
    assert ray.get([ray.remote(num_cpus=0)(total).remote(group, rank) for rank in range(3)]) == expected
    assert ray.get(begin(ranks[:1], Group(1), total)) == [(np.arange(100_000).sum(), 0)]
    """
    assert "through" in run_main(python, tmp_path, body)


def test_an_actor_that_dies_or_fails_is_named_by_the_others(python, tmp_path):
    body = """
    def lose(group, rank, how):
        with group.join(rank, timeout_s=60) as comm:
            comm.barrier()
            for turn in range(100_000):
                comm.all_reduce(np.ones(1000))
                if rank == 1 and turn == 50:
                    if how == "fails":
                        raise ValueError(f"on purpose at {time.monotonic():.3f}")
                    with open(how, "w") as file:
                        file.write(f"{time.monotonic():.3f}")
                    os._exit(3)

    for hosts in ("aaaa", "abab"):
        for how in ("fails", os.path.join(sys.argv[1], "died")):
            ranks = start(4, hosts)
            group = Group(4)
            answers = begin(ranks, group, lose, how)
            try:
                ray.get(answers[1])
                raise AssertionError
            except ray.exceptions.RayError as error:
                when = str(error).rpartition(" at ")[2].split()[0] if how == "fails" else open(how).read()
            for rank in (0, 2, 3):
                text = ray.get(answers[rank])
                assert text.startswith("PeerLostError rank 1 "), text
                assert ("closed its communicator" if how == "fails" else "ended") in text.splitlines()[0], text
                seconds = float(text.rpartition(" ")[2]) - float(when)
                assert seconds < 10, seconds  # it takes 0.06; a timeout takes 60
    """
    assert "through" in run_main(python, tmp_path, body)


def test_ranks_that_do_not_come_or_come_twice_are_named(python, tmp_path):
    body = """
    ranks = start(3)
    for text in ray.get(begin(ranks[:2], Group(3), lambda group, rank: group.join(rank, timeout_s=2) and None)):
        assert text.startswith("RendezvousError"), text
        assert "these have not joined: 2" in text, text
    group = Group(2)
    assert len(set(ray.get(begin(ranks[:2], group, total)))) == 1
    text = ray.get(ranks[1].use.remote(group, 1, total))
    assert "RendezvousError rank 1 of this group has been joined before, by process" in text, text
    text = ray.get(ranks[0].use.remote(group, 2, total))
    assert "ArgumentError rank is 2; it must be a whole number in 0..1" in text, text
    group._board.__ray_terminate__.remote()
    time.sleep(1)
    text = ray.get(ranks[0].use.remote(group, 0, total))
    assert "RendezvousError the place where the ranks of this group meet does not answer" in text, text
    """
    assert "through" in run_main(python, tmp_path, body)


def test_a_rank_that_cannot_come_holds_up_nobody(python, tmp_path):
    body = """
    others = start(2)
    for transport, message in (("smoke", "is 'smoke'; it must be"), ("mpi", "is mpi, and MPI does not know")):
        odd = Rank.options(runtime_env={"env_vars": {"FARANDOLE_TRANSPORT": transport}}).remote()
        began = time.monotonic()
        for rank, text in enumerate(ray.get(begin([others[0], odd, others[1]], Group(3), total))):
            told = "" if rank == 1 else "rank 1 could not join: "
            assert f"RendezvousError {told}FARANDOLE_TRANSPORT {message}" in text, text
        assert time.monotonic() - began < 40  # the timeout is 60
    """
    assert "through" in run_main(python, tmp_path, body)


def test_where_ray_starts_again_what_died_while_the_ranks_met_all_are_told(python, tmp_path):
    body = """
    def die_once(group, rank, path):
        import farandole.ray
        if not os.path.exists(path):
            open(path, "w").close()
            farandole.ray.join_at = lambda *_, **__: os._exit(3)
        try:
            return total(group, rank)
        except farandole.FarandoleError as error:
            return str(error)

    others = start(2)
    for what in ("task", "actor"):
        began, group = time.monotonic(), Group(3)
        arguments = group, 2, os.path.join(sys.argv[1], what)
        if what == "task":
            answer = ray.remote(num_cpus=0, max_retries=1)(die_once).remote(*arguments)
        else:
            actor = Rank.options(max_restarts=1, max_task_retries=1).remote()
            answer = actor.use.remote(*arguments[:2], die_once, *arguments[2:])
        answers = [answer, *begin(others, group, total)]
        for text in ray.get(answers):
            assert "rank 2 of this group has been joined before, by process" in text, text
        assert time.monotonic() - began < 40  # the timeout is 60
    """
    assert "through" in run_main(python, tmp_path, body)


def test_a_place_to_meet_that_ray_starts_late_is_waited_for_and_one_that_it_never_starts_is_named(python, tmp_path):
    body = """
    def wait(group, rank, patience_s, timeout_s):
        import farandole.ray
        farandole.ray._ANSWERING_S = patience_s
        with group.join(rank, timeout_s=timeout_s) as comm:
            return comm.all_reduce(np.ones(3))[0]

    class Late(farandole.ray._Board):
        def __init__(self, seconds):
            time.sleep(seconds)
            super().__init__()

    ranks = start(2)
    group = Group(2)
    group._board = ray.remote(num_cpus=0)(Late).remote(5)
    assert ray.get(begin(ranks, group, wait, 1, 60)) == [2, 2]
    group = Group(2)
    group._board = ray.remote(num_cpus=0, resources={"none": 1})(Late).remote(0)
    for text in ray.get(begin(ranks, group, wait, 1.5, 1)):
        assert "an actor of Ray, has not answered for 1.5 s; has Ray started it" in text, text
    """
    assert "through" in run_main(python, tmp_path, body)


def test_actors_that_are_left_go_on(python, tmp_path):
    """On one host and on two, after one of them was killed by Ray."""
    body = """
    ready = os.path.join(sys.argv[1], "ready")

    def survive(group, rank):
        comm = group.join(rank, timeout_s=60)
        try:
            for turn in range(100_000):
                comm.all_reduce(np.ones(1000))
                if rank == 1 and turn == 20:
                    open(ready, "w").close()
        except farandole.PeerLostError:
            with comm.shrink() as left:
                return left.world_size, left.all_reduce(np.array([rank]))[0]

    for hosts in ("aaaa", "abab"):
        ranks = start(4, hosts)
        answers = begin(ranks, Group(4), survive)
        while not os.path.exists(ready):
            time.sleep(0.01)
        os.remove(ready)
        ray.kill(ranks[1])
        assert [ray.get(answers[rank]) for rank in (0, 2, 3)] == [(3, 5)] * 3
    """
    assert "through" in run_main(python, tmp_path, body)


def test_without_ray_it_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape('pip install "farandole[ray]"')):
        Group(2)


@pytest.mark.parametrize("size", [0, -1, 257, 2.5, True, "3"])
def test_a_size_that_makes_no_sense_is_refused(size):
    with pytest.raises(ArgumentError, match=r"it must be a whole number in 1\.\.256"):
        Group(size)
