"""The store, the meetings of a job at it, and the launcher that serves it."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from farandole import rendezvous, store
from farandole.errors import ArgumentError, RendezvousError
from farandole.launch import processes, run_processes
from farandole.rendezvous import Identity, identity_from, join, tell_of_end
from farandole.store import StoreClient, StoreServer

WAIT_S = 60  # for what happens at once; only a failure takes so long


@pytest.fixture
def server():
    made = StoreServer(("127.0.0.1", 0), b"secret")
    yield made
    made.close()


@pytest.fixture
def client(server):
    made = StoreClient(server.address, b"secret", WAIT_S)
    yield made
    made.close()


def run_ranks(tmp_path: Path, num_ranks: int, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "farandole", "run", "-n", str(num_ranks), str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


# -- the store ---------------------------------------------------------------------------------------------------------


def test_of_too_many_strangers_the_oldest_is_dropped_and_a_client_gets_through(server, monkeypatch):
    monkeypatch.setattr(store, "MAX_UNPROVED", 3)
    monkeypatch.setattr(store, "_HANDSHAKE_S", 1e6)
    strangers = []
    try:
        for _ in range(4):
            strangers.append(socket.create_connection(server.address, timeout=WAIT_S))
            assert strangers[-1].recv(4)  # it has been admitted: this is the challenge
        while strangers[0].recv(100):
            pass  # until it is dropped
        client = StoreClient(server.address, b"secret", WAIT_S)
        assert client.set("key", "value") == "value"
        client.close()
        strangers[3].setblocking(False)
        strangers[3].recv(100)  # the rest of the challenge: this one is still there
        with pytest.raises(BlockingIOError):
            strangers[3].recv(100)
    finally:
        for stranger in strangers:
            stranger.close()


def test_where_no_thread_can_be_started_the_client_comes_again(server, monkeypatch):
    start, failures = threading.Thread.start, []

    def start_later(thread):
        if thread.name == "farandole-store-client" and not failures:
            failures.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    client = StoreClient(server.address, b"secret", WAIT_S)
    assert failures
    assert client.set("key", "value") == "value"
    client.close()


def test_where_no_connection_can_be_accepted_the_store_pauses(server, monkeypatch):
    class Full:
        def accept(self):
            raise OSError(errno.EMFILE, "Too many open files")

    pauses = threading.Event()
    listener = server._listener
    monkeypatch.setattr(server._closing, "wait", lambda seconds: pauses.set())
    server._listener = Full()
    socket.create_connection(server.address, timeout=WAIT_S).close()  # lets the last accept() return
    assert pauses.wait(WAIT_S)
    server._listener = listener


@pytest.mark.parametrize(
    "request_text",
    [
        b"[]",
        b'"text"',
        b"{}",
        b'{"key": "k"}',
        b'{"value": "v"}',
        b'{"keys": 5, "unless": [], "timeout_s": 0}',
        b'{"keys": ["k"], "unless": [], "timeout_s": "soon"}',
        b'{"keys": ["k"], "unless": [], "timeout_s": 1e300}',
        b"\xff\xfe",
        b"[" * 60000,
        b"1" * (1 << 17),
    ],
    ids=lambda text: repr(text[:50]),
)
def test_a_request_that_makes_no_sense_ends_its_connection_alone(server, client, request_text):
    connection = store._connect(server.address, b"secret", WAIT_S)
    connection.send_bytes(request_text)
    assert connection.poll(WAIT_S)
    with pytest.raises((EOFError, ConnectionResetError)):
        connection.recv_bytes()
    connection.close()
    assert client.set("key", "value") == "value"


def test_keys_are_waited_for_together_unless_something_else_happens(server, client):
    server.set("a", "1")
    assert client.get_all(["b", "a"], 0) == [None, "1"]
    setter = threading.Thread(target=server.set, args=("stop", "now"))
    setter.start()
    assert client.get_all(["a", "b"], 1e6, unless=["never", "stop"]) == ["1", None]
    setter.join()
    server.set("b", "2")
    assert client.get_all(["a", "b"], 1e6, unless=["stop"]) == ["1", "2"]


def test_closing_the_store_disconnects_who_waits(server, client):
    closer = threading.Thread(target=server.close)
    closer.start()
    with pytest.raises(RendezvousError, match="the process that served the rendezvous of this job has ended"):
        client.get("nobody sets this", 1e6)
    closer.join()


def test_shutting_down_what_is_not_connected_leaves_its_descriptor_open():
    connection = Connection(socket.socket().detach())
    store._shut_down(connection)
    os.fstat(connection.fileno())
    connection.close()


# -- meetings ----------------------------------------------------------------------------------------------------------


def test_a_rank_that_ends_without_joining_is_named_at_once(tmp_path):
    done = run_ranks(
        tmp_path,
        3,
        "import os, farandole\nif os.environ['RANK'] != '1':\n    farandole.init(timeout_s=1e6)\n",
    )
    assert done.returncode == 1
    message = "RendezvousError: rank 1 ended without joining (exit code 0); every rank must call farandole.init()\n"
    assert message in done.stderr


def test_a_rank_that_joins_once_where_others_join_twice_is_named_at_once(tmp_path):
    done = run_ranks(
        tmp_path,
        3,
        "import farandole\n"
        "with farandole.init(timeout_s=1e6) as comm:\n"
        "    rank = comm.rank\n"
        "if rank != 1:\n"
        "    farandole.init(timeout_s=1e6)\n",
    )
    assert done.returncode == 1
    message = "rank 1 ended without joining again (exit code 0); every rank must call farandole.init() equally often\n"
    assert message in done.stderr


def test_a_rank_that_ends_in_the_middle_of_a_meeting_is_named_though_another_is_missing_too(server, monkeypatch):
    monkeypatch.setattr(rendezvous, "_num_joins", 0)
    server.set("0/rank/2", '{"process": 1, "world_size": 3, "arena": []}')
    tell_of_end(server, 2)
    with pytest.raises(RendezvousError, match="rank 2 ended without joining"):
        join(Identity(0, 3, server.address, False, b"secret"), 1e6)


FAILS_FIRST = """
import os, sys, time, pathlib, farandole
told = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    try:
        farandole.init(timeout_s=0.2)
    except farandole.RendezvousError:
        told.write_text("")
else:
    while not told.exists():
        time.sleep(0.01)
    try:
        farandole.init(timeout_s=1e6)
    except farandole.RendezvousError as error:
        print(error, flush=True)
with farandole.init(timeout_s=50) as comm:
    comm.barrier()
"""


@pytest.mark.parametrize("is_launched", [True, False], ids=["served by the launcher", "served by rank 0"])
def test_a_meeting_that_fails_for_one_rank_fails_for_all_and_the_next_one_works(tmp_path, server, is_launched):
    environment = {**os.environ, "WORLD_SIZE": "2"}
    if is_launched:
        environment["FARANDOLE_RENDEZVOUS"] = f"{server.address[0]}:{server.address[1]}"
        environment["FARANDOLE_SECRET"] = "secret"
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    command = [sys.executable, "-c", FAILS_FIRST, str(tmp_path / "told")]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    outputs = [rank.communicate(timeout=WAIT_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs[0] == ""
    assert re.match("rank 0 (could not join: rank 0 waited 0.2 s|has given up on this meeting)", outputs[1])


def test_a_rank_that_never_reached_the_store_has_missed_no_meeting(tmp_path):
    done = run_ranks(
        tmp_path,
        2,
        "import os, farandole\n"
        "if os.environ['RANK'] == '1':\n"
        "    real = os.environ['FARANDOLE_SECRET']\n"
        "    os.environ['FARANDOLE_SECRET'] = 'wrong'\n"
        "    try:\n"
        "        farandole.init()\n"
        "    except farandole.RendezvousError:\n"
        "        os.environ['FARANDOLE_SECRET'] = real\n"
        "with farandole.init(timeout_s=50) as comm:\n"
        "    comm.barrier()\n",
    )
    assert done.returncode == 0, done.stderr


MEETS_OFTEN = """
import sys, farandole
for _ in range(20):
    if sys.argv[1] == "2":
        sys.stdin.readline()  # the others are ahead: they come back while this rank has not left
    farandole.init(timeout_s=50)
    print("joined", flush=True)
"""


def test_ranks_may_meet_again_while_rank_0_still_serves_the_meeting_before():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEETS_OFTEN, str(rank)],
            env={**environment, "WORLD_SIZE": "4", "RANK": str(rank)},
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for rank in range(4)
    ]
    for _ in range(20):
        ranks[2].stdin.write("\n")
        ranks[2].stdin.flush()
        assert ranks[2].stdout.readline() == "joined\n"
    for rank in ranks:
        _, errors = rank.communicate(timeout=WAIT_S)
        assert (rank.returncode, errors) == (0, "")


def test_a_rank_may_wait_for_ever(tmp_path):
    done = run_ranks(tmp_path, 2, "import farandole\nfarandole.init(timeout_s=float('inf')).close()\n")
    assert done.returncode == 0, done.stderr


def test_torchrun_is_refused_by_name():
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert identity_from(environment) is not None
    with pytest.raises(RendezvousError, match=r"started by torchrun.*use 'farandole run -n N' in place of 'torchrun"):
        identity_from({**environment, "TORCHELASTIC_RUN_ID": "none"})
    launched = {**environment, "TORCHELASTIC_RUN_ID": "none", "FARANDOLE_RENDEZVOUS": "127.0.0.1:5"}
    assert identity_from(launched).store == ("127.0.0.1", 5)
    with pytest.raises(RendezvousError, match=r"MASTER_ADDR is not; start with 'farandole run' \(in place of torchrun"):
        identity_from({"RANK": "0", "WORLD_SIZE": "2"})


# -- the launcher ------------------------------------------------------------------------------------------------------

WITH_LIMIT = """
import os, resource, sys
from farandole.errors import ArgumentError
from farandole.launch import run_processes
room, is_hard = int(sys.argv[1]), sys.argv[2] == "hard"
soft = len(os.listdir("/proc/self/fd")) + room
hard = soft if is_hard else resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    result = run_processes([sys.argv[3]], 8, on_line=lambda rank, stream, line: None)
    print(result.exit_code)
except ArgumentError as error:
    print(error)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
"""


def test_the_launcher_may_open_as_many_files_as_the_job_needs_while_it_runs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import farandole\nfarandole.init().close()\n")
    done = run_python(WITH_LIMIT, "20", "soft", str(script))
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_where_it_may_not_the_limit_and_the_need_are_named(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")
    done = run_python(WITH_LIMIT, "20", "hard", str(script))
    message = (
        r"a job of 8 ranks needs (\d+) open files, and this process may have \d+; raise the limit with ulimit -n \1"
    )
    assert re.match(message, done.stdout), done.stderr


def test_a_process_that_cannot_be_started_leaves_no_descriptor(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    script = tmp_path / "script.py"
    script.write_text("")
    monkeypatch.setattr(processes.subprocess, "Popen", refuse)
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(BlockingIOError):
        run_processes([str(script)], 2)
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_job_may_run_beside_the_main_thread(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import farandole\nfarandole.init().close()\n")
    results = []
    thread = threading.Thread(target=lambda: results.append(run_processes([str(script)], 2)))
    thread.start()
    thread.join()
    assert [result.exit_code for result in results] == [0]


def test_sigquit_ends_the_job_in_order(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('asked to end'))\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    )
    command = [sys.executable, "-m", "farandole", "run", "-n", "1", str(script)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert launcher.stdout.readline() == "ready\n"
    launcher.send_signal(signal.SIGQUIT)
    _, errors = launcher.communicate(timeout=WAIT_S)
    assert launcher.returncode == 128 + signal.SIGQUIT
    assert "asked to end" in errors


def test_a_launcher_refuses_no_ranks(tmp_path):
    with pytest.raises(ArgumentError, match=r"the number of ranks is 0; it must be in 1\.\.256"):
        run_processes([str(tmp_path / "script.py")], 0)
