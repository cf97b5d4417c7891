"""Ranks that die, at random, in real processes: the survivors say who it was, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import farandole
from farandole.store import StoreServer

CASES = 40
CASES_PER_TEST = 20
PHASES = ("before init", "after init", "in calls", "in background calls", "in a large call")
JOIN_S = 60  # for a process that is about to end; only a failure takes so long

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["farandole", "numpy"])


def die_soon(delay_s: float) -> None:
    threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


STOPPED = """
import os, signal, sys
import numpy as np
import farandole
comm = farandole.init()
comm.barrier()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
call = {"all_reduce": lambda: comm.all_reduce(np.ones(4), timeout=0.5),
        "recv": lambda: comm.recv(np.ones(4), 1, timeout=0.5)}[sys.argv[1]]
try:
    call()
except farandole.CollectiveTimeoutError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_a_timeout_names_the_rank_whose_process_is_stopped(call):
    server = StoreServer(("127.0.0.1", 0), b"secret")
    place = {"WORLD_SIZE": "2", "FARANDOLE_SECRET": "secret"}
    place["FARANDOLE_RENDEZVOUS"] = f"{server.address[0]}:{server.address[1]}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", STOPPED, call],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | place | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]
    text, _ = ranks[0].communicate(timeout=JOIN_S)
    ranks[1].send_signal(signal.SIGCONT)
    ranks[1].communicate(timeout=JOIN_S)
    server.close()
    assert (
        "the timeout of 0.5 s is over; the process of rank 1 is stopped (by SIGSTOP or a debugger): rank 1 has" in text
    )


def one_call(comm: farandole.Communicator, choice: random.Random, largest: int) -> None:
    """A random collective; every rank that seeded ``choice`` alike makes the same one."""
    n, count = comm.world_size, choice.choice([0, 1, 100, 5000, largest])
    root, background = choice.randrange(n), choice.random() < 0.5
    name = choice.choice(
        ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "barrier", "messages"]
    )
    mine = np.arange(count * n, dtype=np.float32) + comm.rank
    if choice.random() < 0.3:
        mine, private = comm.empty(mine.shape), mine
        mine[:] = private
    if name == "barrier":
        work = comm.barrier(async_op=background)
    elif name == "messages":  # around a ring; all send first
        comm.send(mine, (comm.rank + 1) % n, async_op=background)
        work = comm.recv(np.empty_like(mine), None if root else (comm.rank - 1) % n, async_op=background)
    elif name in ("broadcast", "reduce"):
        work = getattr(comm, name)(mine, root, async_op=background)
    else:
        work = getattr(comm, name)(mine, async_op=background)
    if background and choice.random() < 0.5:
        work.wait()


def rank_main(rank: int, n: int, address: tuple[str, int], victim: int, phase: str, seed: int, pipe) -> None:
    """Work until a peer dies; tell the parent how that looked from here."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        "FARANDOLE_RENDEZVOUS": f"{address[0]}:{address[1]}",
        "FARANDOLE_SECRET": "of this test",
    }
    delay_s = random.Random(seed).uniform(0, 0.03)
    if rank == victim and phase == "before init":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm = farandole.init(timeout_s=1 if phase == "before init" else 30)
        if rank == victim and phase == "after init":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == victim:
            die_soon(delay_s)
        choice = random.Random(seed)
        while True:
            one_call(comm, choice, largest=2_000_000 if phase == "in a large call" else 20_000)
    except farandole.CommunicationError as error:
        pipe.send((type(error).__name__, str(error)))


def run_case(seed: int) -> None:
    choice = random.Random(seed)
    n, phase = choice.randrange(2, 6), choice.choice(PHASES)
    victim = choice.randrange(n)
    server = StoreServer(("127.0.0.1", 0), b"of this test")
    pipes = [context.Pipe(duplex=False) for _ in range(n)]
    ranks = [
        context.Process(target=rank_main, args=(r, n, server.address, victim, phase, seed, pipes[r][1]))
        for r in range(n)
    ]
    for process in ranks:
        process.start()
    for _, sender in pipes:
        sender.close()
    what = f"case {seed}: {n} ranks, rank {victim} dies {phase}"
    try:
        for rank, process in enumerate(ranks):
            process.join(JOIN_S)
            assert process.exitcode is not None, f"{what}: rank {rank} hangs"
            assert process.exitcode == (-signal.SIGKILL if rank == victim else 0), f"{what}: rank {rank}"
        for rank, (receiver, _) in enumerate(pipes):
            if rank == victim:
                continue
            kind, text = receiver.recv()
            if phase == "before init":
                assert kind == "RendezvousError", f"{what}: rank {rank} says {kind}: {text}"
                assert f"have not joined: {victim}" in text, f"{what}: rank {rank} says {text}"
            elif kind == "RendezvousError":  # it died while others were still on their way out of the rendezvous
                assert f"rank {victim} " in text, f"{what}: rank {rank} says {text}"
            else:
                assert kind == "PeerLostError", f"{what}: rank {rank} says {kind}: {text}"
                assert f"rank {victim} ended while others needed it" in text, f"{what}: rank {rank} says {text}"
    finally:
        for process in ranks:
            process.kill()
            process.join()
        server.close()
        for receiver, _ in pipes:
            receiver.close()


@pytest.mark.parametrize("first", range(0, CASES, CASES_PER_TEST))
def test_survivors_of_a_killed_rank_name_it(first):
    for seed in range(first, first + CASES_PER_TEST):
        run_case(seed)


# -- the launcher ------------------------------------------------------------------------------------------------------

WAITS_FOR_EVER = """
import os, pathlib, sys, farandole
comm = farandole.init()
pathlib.Path(sys.argv[1], str(comm.rank)).write_text(str(os.getpid()))
if comm.rank == 0:
    comm.barrier(timeout=1000)
elif sys.argv[2] == "SIGKILL":  # nobody is left to end what a rank has started
    comm.recv(bytearray(1), src=0, timeout=1000)
else:
    import subprocess
    subprocess.run(["sleep", "1000"])
"""


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition) -> None:
    limit = time.monotonic() + JOIN_S
    while not condition():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda s: s.name)
def test_the_end_of_the_launcher_is_the_end_of_every_rank(tmp_path, number):
    script = tmp_path / "wait.py"
    script.write_text(WAITS_FOR_EVER)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "farandole", "run", "-n", "3", str(script), str(tmp_path), number.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: all((tmp_path / str(rank)).exists() and (tmp_path / str(rank)).read_text() for rank in range(3)))
    ranks = [int((tmp_path / str(rank)).read_text()) for rank in range(3)]
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=JOIN_S)
    wait_until(lambda: not any(is_running(rank) for rank in ranks))
    assert launcher.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in errors


ENDS = {
    "raise": ("raise ValueError('told to')", 1, "rank 1 of 3 raised an exception"),
    "exit": ("sys.exit(7)", 7, "rank 1 of 3 exited with code 7"),
    "kill": ("os.kill(os.getpid(), 9)", 137, "rank 1 of 3 was ended by SIGKILL"),
    "crash": ("import ctypes; ctypes.string_at(0)", 139, "rank 1 of 3 was ended by SIGSEGV"),
    "os._exit": ("os._exit(3)", 3, "rank 1 of 3 exited with code 3"),
}


@pytest.mark.parametrize("way", ENDS)
def test_one_rank_that_fails_ends_all_and_is_named(tmp_path, way):
    statement, code, message = ENDS[way]
    script = tmp_path / "fail.py"
    script.write_text(
        f"import os, sys, numpy, farandole\n"
        f"comm = farandole.init()\n"
        f"comm.barrier()\n"
        f"if comm.rank == 1:\n    {statement}\n"
        f"comm.all_reduce(numpy.ones(9), timeout=1000)\n"
    )
    command = [sys.executable, "-m", "farandole", "run", "-n", "3", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=JOIN_S, check=False)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert done.stderr.count("Traceback") == (way == "raise")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["missing.py"], "there is no script 'missing.py' here"),
        (["no-such-program"], "there is no program 'no-such-program'"),
    ],
)
def test_what_is_not_there_is_not_started(command, message):
    arguments = [sys.executable, "-m", "farandole", "run", "-n", "2", *command]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=JOIN_S, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_in_a_call_raises_and_aborts_the_others(tmp_path):
    script = tmp_path / "interrupt.py"
    script.write_text(
        "import os, signal, threading, numpy, farandole\n"
        "comm = farandole.init()\n"
        "comm.barrier()\n"
        "if comm.rank == 0:\n"
        "    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    comm.recv(numpy.ones(4), src=1 - comm.rank, timeout=1000)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
        "except farandole.CommunicatorClosedError as error:\n"
        "    print(error, flush=True)\n"
    )
    command = [sys.executable, "-m", "farandole", "run", "--prefix", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=JOIN_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "[0] interrupted\n" in done.stdout
    assert "[1] rank 0 was interrupted in the middle of a call" in done.stdout


def test_a_forked_child_is_told_to_join_anew():
    with farandole.local(1) as world:
        comm = world[0]
        comm.all_reduce(np.ones(3), async_op=True).wait()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                comm.all_reduce(np.ones(3))
            except farandole.CommunicatorClosedError as error:
                os.write(write, str(error).encode())
            finally:
                del comm
                world.close()
                os._exit(0)
        os.close(write)
        _, status = os.waitpid(child, 0)
        with os.fdopen(read) as text:
            assert "forked from it; call farandole.init() in the new process" in text.read()
        assert status == 0
        assert comm.all_reduce(np.ones(3)).tolist() == [1, 1, 1]  # the parent's goes on


FORKS = """
import os, sys, numpy as np, farandole
world = farandole.local(2, timeout_s=30)
if sys.argv[1] == "idle":
    world.run(lambda comm: comm.all_reduce(np.ones(5), async_op=True).wait())
work = world[0].all_reduce(np.ones(5), async_op=True) if sys.argv[1] == "pending" else None
child = os.fork()
if child == 0:
    for call in (world[0].abort, work.wait if work else world[0].barrier):
        try:
            call()
        except farandole.CommunicatorClosedError:
            continue
        os._exit(9)
    sys.exit(0)  # runs the exit handlers, and destroys what there is
_, status = os.waitpid(child, 0)
assert status == 0, status
if work:
    world[1].all_reduce(np.ones(5))
    assert work.wait().tolist() == [2.0] * 5
assert world.run(lambda comm: comm.all_reduce(np.ones(1)).tolist()) == [[2.0]] * 2
"""


@pytest.mark.parametrize("state", ["unused", "idle", "pending"])
def test_a_forked_child_ends_by_itself_and_leaves_its_parent_alone(state):
    for _ in range(5):
        arguments = [sys.executable, "-c", FORKS, state]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=JOIN_S, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_signal_while_ranks_are_being_started_ends_the_job(tmp_path):
    script = tmp_path / "idle.py"
    script.write_text("import time\ntime.sleep(1000)\n")
    command = [sys.executable, "-m", "farandole", "run", "-n", "40", str(script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as launcher:

        def children() -> list[str]:
            return Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()

        wait_until(children)
        launcher.terminate()
        launcher.communicate(timeout=JOIN_S)
    assert launcher.returncode == 128 + signal.SIGTERM


def test_more_ranks_than_a_host_can_hold_are_refused():
    arguments = [sys.executable, "-m", "farandole", "run", "-n", "100000", __file__]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=JOIN_S, check=False)
    assert done.returncode == 2
    assert "the number of ranks is 100000; it must be in 1..256" in done.stderr


# -- the rendezvous ----------------------------------------------------------------------------------------------------


def join_results(environments: list[dict[str, str]], timeout_s: float) -> list[str]:
    """What farandole.init says in processes with these environments."""
    code = (
        "import sys, farandole\n"
        "try:\n"
        f"    comm = farandole.init(timeout_s={timeout_s})\n"
        "    print('joined', comm.rank, comm.world_size)\n"
        "except farandole.FarandoleError as error:\n"
        "    print(type(error).__name__ + ':', error)\n"
    )
    base = {key: value for key, value in os.environ.items() if not key.startswith("FARANDOLE_")}
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], env={**base, **extra}, stdout=subprocess.PIPE, text=True)
        for extra in environments
    ]
    return [rank.communicate(timeout=JOIN_S)[0] for rank in ranks]


def free_port() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_master_addr_and_port_are_enough_on_one_host():
    base = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    results = join_results([{**base, "RANK": str(rank)} for rank in range(3)], 30)
    assert results == [f"joined {rank} 3\n" for rank in range(3)]


def test_a_missing_rank_is_named_when_the_time_is_over():
    base = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    results = join_results([{**base, "RANK": rank} for rank in ("0", "2")], 2)
    assert all("RendezvousError" in text for text in results)
    assert any("have not joined: 1" in text for text in results)


def test_two_processes_with_one_rank_are_found_out():
    base = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    results = join_results([{**base, "RANK": rank} for rank in ("0", "1", "1")], 2)
    assert sum("two processes claim rank 1" in text for text in results) == 1, results
    assert sum("have not joined: 2" in text for text in results) >= 1, results


def test_another_secret_is_refused():
    base = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [{**base, "RANK": "0", "FARANDOLE_SECRET": "a"}, {**base, "RANK": "1", "FARANDOLE_SECRET": "b"}]
    results = join_results(ranks, 2)
    assert "has another secret" in results[1]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is None"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be in"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}, "MASTER_PORT is '0'"),
        ({"FARANDOLE_TIMEOUT_S": "soon"}, "FARANDOLE_TIMEOUT_S is 'soon'"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused_at_once(monkeypatch, environment, message):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FARANDOLE_RENDEZVOUS", "FARANDOLE_SECRET"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(farandole.FarandoleError, match=message):
        farandole.init(timeout_s=None)


def test_strangers_at_the_store_change_nothing():
    import socket

    server = StoreServer(("127.0.0.1", 0), b"secret")
    strangers = []
    try:
        for i in range(50):
            stranger = socket.create_connection(server.address)
            strangers.append(stranger)
            if i % 3 == 0:
                stranger.sendall(random.Random(i).randbytes(200))
            elif i % 3 == 1:
                stranger.shutdown(socket.SHUT_WR)
        client = farandole.store.StoreClient(server.address, b"secret", 10)
        client.set("key", "value")
        assert client.get("key", 1) == "value"
        assert client.get("nobody sets this", 0.01) is None
        client.close()
    finally:
        for stranger in strangers:
            stranger.close()
        server.close()


def test_the_launcher_also_starts_torch_distributed(tmp_path):
    script = tmp_path / "gloo.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(3) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(x)\n"
        "assert x.tolist() == [3.0] * 3\n"
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "farandole", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=JOIN_S, check=False)
    assert done.returncode == 0, done.stderr
