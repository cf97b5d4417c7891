"""The store, the meetings of a job at it, and the launcher that serves it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import farandole
from farandole import _native, arrival, door, membership, rendezvous
from farandole.calibration import SHIPPED
from farandole.communicator import Communicator
from farandole.errors import ArgumentError, PeerLostError, RendezvousError
from farandole.hosts import HostProof
from farandole.launch import processes, run_processes
from farandole.meeting import Identity, Meeting
from farandole.membership import Membership
from farandole.rendezvous import _meet, join, tell_of_end
from farandole.store import StoreClient, StoreServer

WAIT_S = 60  # for what happens at once; only a failure takes so long


def card(process: int, world_size: int, proof: HostProof | None = None) -> str:
    """What a rank says of itself."""
    proof = proof or HostProof(process, 0, "", "", "elsewhere")
    return json.dumps(arrival.Card(arrival.version(), process, world_size, [*proof], [0], None, "")._asdict())


def come_as_rank_1(server: StoreServer, process: int) -> None:
    """What rank 1 of two on this host says."""
    server.set("0/rank/1", card(process, 2, HostProof.offer()))
    server.set("0/host/1", json.dumps(arrival.HostCard([0, 1], [], [], 0, "tcp")._asdict()))


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
    monkeypatch.setattr(door, "MAX_UNPROVED", 3)
    monkeypatch.setattr(door, "HANDSHAKE_S", 1e6)
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
        if thread.name == "farandole-guest" and not failures:
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
    listener = server._door._listener
    monkeypatch.setattr(server._door._closing, "wait", lambda seconds: pauses.set())
    server._door._listener = Full()
    socket.create_connection(server.address, timeout=WAIT_S).close()  # lets the last accept() return
    assert pauses.wait(WAIT_S)
    server._door._listener = listener


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
    connection = door.knock(server.address, b"secret", WAIT_S)
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


def test_what_all_ranks_of_a_large_job_say_is_got_at_once(server, client):
    """256 ranks with 256 cores each."""
    words = {f"rank/{rank}": json.dumps([*range(256), rank]) for rank in range(256)}
    for key, word in words.items():
        server.set(key, word)
    assert client.get_all([*words], 0) == [*words.values()]


def test_closing_the_store_disconnects_who_waits(server, client):
    closer = threading.Thread(target=server.close)
    closer.start()
    with pytest.raises(RendezvousError, match="the process that served the rendezvous of this job has ended"):
        client.get("nobody sets this", 1e6)
    closer.join()


def test_the_store_is_closed_when_what_is_settled_has_been_answered(server, client, monkeypatch):
    """Its process may end then."""
    asked, may_answer, answer = threading.Event(), threading.Event(), server._answer

    def slowly(request):
        asked.set()
        assert may_answer.wait(WAIT_S)
        return answer(request)

    monkeypatch.setattr(server, "_answer", slowly)
    server.set("key", "value")
    values = []
    asker = threading.Thread(target=lambda: values.append(client.get("key", 1e6)))
    asker.start()
    assert asked.wait(WAIT_S)
    closer = threading.Thread(target=server.close)
    closer.start()
    closer.join(0.5)
    assert closer.is_alive()
    may_answer.set()
    for thread in (closer, asker):
        thread.join()
    assert values == ["value"]


def test_shutting_down_what_is_not_connected_leaves_its_descriptor_open():
    connection = Connection(socket.socket().detach())
    door._shut_down(connection)
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
    server.set("0/rank/2", card(1, 3))
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


class Ranks:
    """Meetings of several ranks in threads of this process, and how they end."""

    def __init__(self, server: StoreServer, world_size: int) -> None:
        self.ends: list[Membership | BaseException | None] = [None] * world_size
        self.threads = [threading.Thread(target=self._meet, args=(rank, server)) for rank in range(world_size)]
        for thread in self.threads:
            thread.start()

    def _meet(self, rank: int, server: StoreServer) -> None:
        with contextlib.closing(StoreClient(server.address, b"secret", WAIT_S)) as client:
            identity = Identity(rank, len(self.ends), server.address, False, b"secret")
            try:
                self.ends[rank] = _meet(Meeting(client, identity, 0, time.monotonic() + 1e6, 1e6))
            except BaseException as error:
                self.ends[rank] = error

    def join(self) -> list[Membership | BaseException | None]:
        for thread in self.threads:
            thread.join()
        return self.ends


@pytest.mark.parametrize("is_too_late", [False, True], ids=["others hear of it", "others have joined"])
def test_a_rank_that_gives_up_while_others_join_decides_for_all_or_joins_too(server, monkeypatch, is_too_late):
    """Rank 2 maps the memory only after rank 1 has waited for it in vain."""
    has_waited, may_give_up = threading.Event(), threading.Event()
    set_, wait, give_up = Meeting.set, Meeting._wait, Meeting.give_up

    def hold_rank_2(meeting, phase, value="yes"):
        if (meeting.identity.rank, phase) == (2, "mapped"):
            assert has_waited.wait(WAIT_S)
        return set_(meeting, phase, value)

    def hurry_rank_1(meeting, phase, unless=()):
        if (meeting.identity.rank, phase) != (1, "mapped"):
            return wait(meeting, phase, unless)
        assert meeting.store.get("0/mapped/0", WAIT_S)
        return wait(dataclasses.replace(meeting, limit=0), phase, unless)

    def hold_rank_1(meeting, error):
        if meeting.identity.rank == 1 and is_too_late:
            has_waited.set()
            assert may_give_up.wait(WAIT_S)
        verdict = give_up(meeting, error)
        has_waited.set()
        return verdict

    monkeypatch.setattr(Meeting, "set", hold_rank_2)
    monkeypatch.setattr(Meeting, "_wait", hurry_rank_1)
    monkeypatch.setattr(Meeting, "give_up", hold_rank_1)
    ranks = Ranks(server, 3)
    if is_too_late:
        for rank in (0, 2):
            ranks.threads[rank].join()
        may_give_up.set()
    ends = ranks.join()
    if is_too_late:
        assert [end.rank for end in ends] == [0, 1, 2]
    else:
        why = "rank 1 waited 1e+06 s; of 3 ranks these have not mapped the shared memory: 2"
        assert [str(end) for end in ends] == [f"rank 1 could not join: {why}", why, f"rank 1 could not join: {why}"]


def test_rank_0_has_joined_though_a_rank_that_has_too_does_not_leave(server):
    """The meeting has succeeded: rank 0 cannot fail alone."""
    come_as_rank_1(server, os.getpid())
    server.set("0/mapped/1", "yes")
    over = time.monotonic() - 1
    assert _meet(Meeting(server, Identity(0, 2, server.address, True, b"secret"), 0, over, 1)).world_size == 2


@pytest.mark.parametrize(
    "junk",
    [
        "",
        "x",
        "[]",
        "[" * 60_000,
        "7",
        "{}",
        card(0, 2),
        card(2**70, 2),
        card("../1", 2),
        card(1, 2, HostProof(1, -1, "", "", "")),
        card(1, 2, HostProof("../1", 0, "", "", "")),
        card(1, 2, HostProof(1, 0, "", "", 5)),
        card(1, 2).replace('"elsewhere"', '"", ""'),
        card(1, 2).replace('"secret": ""', '"secret": null'),
    ],
)
def test_what_is_no_card_of_a_rank_is_refused(server, junk):
    """Also what would be a path, where a number must be."""
    server.set("0/rank/1", junk)
    over = time.monotonic() + WAIT_S
    with pytest.raises(RendezvousError, match="what stands for rank 1 where the ranks meet is not what a rank says"):
        _meet(Meeting(server, Identity(0, 2, server.address, True, b"secret"), 0, over, 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("arena", []),
        ("arena", [1, 2]),
        ("arena", ["1", 2, 3]),
        ("arena", [1, 2, True]),
        ("arena", [2**31, 2, 3]),
        ("mates", []),
        ("mates", [1]),
        ("mates", ["0"]),
        ("mates", [-1, 0]),
        ("addresses", [5]),
        ("addresses", None),
        ("port", 2**16),
        ("port", "80"),
        ("transport", 1),
    ],
)
def test_what_is_no_word_of_a_host_is_refused(server, client, field, value):
    server.set("0/rank/0", card(os.getppid(), 2, HostProof.offer()))
    good = arrival.HostCard([0, 1], [1, 2, 3], [], 0, "tcp")._asdict()
    server.set("0/host/0", json.dumps({**good, field: value}))
    over = time.monotonic() + WAIT_S
    with pytest.raises(RendezvousError, match="what stands for the host of rank 0"):
        _meet(Meeting(client, Identity(1, 2, server.address, False, b"secret"), 0, over, 1))


INTERRUPTED = """
import signal, farandole
signal.signal(signal.SIGINT, signal.default_int_handler)
farandole.init(timeout_s=1e6)
"""


def test_others_are_told_of_ctrl_c(server, client):
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "2",
        "FARANDOLE_RENDEZVOUS": f"{server.address[0]}:{server.address[1]}",
        "FARANDOLE_SECRET": "secret",
    }
    command = [sys.executable, "-c", INTERRUPTED]
    rank = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert client.get("0/rank/0", WAIT_S)
    rank.send_signal(signal.SIGINT)
    _, errors = rank.communicate(timeout=WAIT_S)
    assert "KeyboardInterrupt" in errors
    assert client.get("0/verdict", 0) == "rank 0 could not join: it was interrupted (KeyboardInterrupt)"


def test_others_that_have_joined_are_told_of_ctrl_c_too(server, monkeypatch):
    agree = Meeting.agree

    def interrupt_rank_1(meeting):
        agree(meeting)
        if meeting.identity.rank == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Meeting, "agree", interrupt_rank_1)
    membership, error = Ranks(server, 2).join()
    assert isinstance(error, KeyboardInterrupt)
    with Communicator(membership, timeout_s=WAIT_S) as comm, pytest.raises(PeerLostError, match="rank 1"):
        comm.barrier()


def too_large(*_):
    """More shared memory than there are addresses."""
    return 1 << 20, 0xFFFFFFC0


def test_others_are_told_that_rank_0_cannot_make_the_memory(server, monkeypatch):
    monkeypatch.setattr(membership, "_geometry", too_large)
    first, second = Ranks(server, 2).join()
    assert isinstance(first, RendezvousError)
    assert re.match(r"cannot map \d+ bytes of shared memory: .*\(see ulimit -n\).*\(see ulimit -v\)", str(first))
    assert isinstance(second, RendezvousError)
    assert str(second) == f"rank 0 could not join: {first}"


FAILS_TO_SERVE = """
import os, sys, time, pathlib, farandole
from farandole import membership
from farandole.store import StoreClient
has_come = pathlib.Path(sys.argv[1])
geometry, get_all = membership._geometry, StoreClient.get_all

def too_large(*_):
    while not has_come.exists():
        time.sleep(0.01)
    return 1 << 20, 0xFFFFFFC0

def come(client, keys, *arguments, **more):
    if keys[0] == "0/rank/0":
        has_come.write_text("")
    return get_all(client, keys, *arguments, **more)

if os.environ["RANK"] == "0":
    membership._geometry = too_large
else:
    StoreClient.get_all = come
try:
    farandole.init(timeout_s=1e6)
except farandole.RendezvousError as error:
    print(error, flush=True)
membership._geometry = geometry
with farandole.init(timeout_s=50) as comm:
    comm.barrier()
"""


def test_a_meeting_that_rank_0_serves_in_vain_is_one_for_all(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    command = [sys.executable, "-c", FAILS_TO_SERVE, str(tmp_path / "has come")]
    ranks = [
        subprocess.Popen(
            command, env={**environment, "WORLD_SIZE": "2", "RANK": rank}, stdout=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    first, second = (rank.communicate(timeout=WAIT_S)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert first.startswith("cannot map ")
    assert second == f"rank 0 could not join: {first}"


def test_a_rank_that_missed_several_meetings_is_told_once(server, monkeypatch):
    monkeypatch.setattr(rendezvous, "_num_joins", 1)
    server.set("meeting", "5")
    with pytest.raises(RendezvousError, match="rank 0 has given up on this meeting"):
        join(Identity(1, 2, server.address, True, b"secret"), 1e6)
    assert rendezvous._num_joins == 5


def test_the_whole_wait_for_the_store_is_named_though_it_was_there_for_a_while():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
    with pytest.raises(RendezvousError, match=r"nobody answers at 127\.0\.0\.1:\d+ after 4 s"):
        rendezvous._connect(Identity(1, 2, address, True, b"secret"), 1, time.monotonic() - 1, 4)


def test_a_second_process_that_claims_a_rank_has_missed_no_meeting(server, monkeypatch):
    monkeypatch.setattr(rendezvous, "_num_joins", 0)
    server.set("0/rank/1", card(1, 3))
    with pytest.raises(RendezvousError, match="two processes claim rank 1"):
        join(Identity(1, 3, server.address, False, b"secret"), 1e6)
    assert rendezvous._num_joins == 0
    assert server.get_all(["0/verdict"], 0) == [None]  # the others go on


def test_others_are_told_that_a_rank_cannot_watch_them(server, client, monkeypatch):
    def refuse(_process):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(rendezvous, "_num_joins", 0)
    come_as_rank_1(server, os.getppid())
    with pytest.raises(RendezvousError, match=r"cannot watch the processes of 2 ranks: .*raise the limit with ulimit"):
        join(Identity(0, 2, server.address, False, b"secret"), 1e6)
    assert client.get("0/verdict", 0).startswith("rank 0 could not join: cannot watch the processes of 2 ranks")


def test_descriptors_of_processes_are_handed_over_once():
    arena = _native.Arena.create(world_size=2, num_slots=2, slot_bytes=64, nonce=0)
    membership = Membership(0, 2, arena, (os.getpid(), os.getppid()), (0, 1), SHIPPED)
    own, other = membership.open_process_descriptors()
    assert own == -1
    assert membership.open_process_descriptors() == []
    del membership
    os.close(other)  # it is still open


def test_a_membership_that_nobody_takes_over_has_left_and_leaves_no_descriptor():
    arena = _native.Arena.create(world_size=2, num_slots=2, slot_bytes=64, nonce=0)
    gc.collect()  # what earlier tests left
    before = set(Path("/proc/self/fd").iterdir())
    membership = Membership(0, 2, arena, (os.getpid(), os.getppid()), (0, 1), SHIPPED)
    assert set(Path("/proc/self/fd").iterdir()) != before
    del membership
    assert set(Path("/proc/self/fd").iterdir()) == before
    other = Membership(1, 2, arena, (os.getpid(),) * 2, (0, 1), SHIPPED)
    with Communicator(other, timeout_s=WAIT_S) as comm, pytest.raises(PeerLostError, match="rank 0"):
        comm.barrier()


@pytest.mark.parametrize("name", ["create_arena", "map_arena", "_open_process"])
def test_a_group_that_cannot_be_made_fails_on_every_rank_with_the_reason(monkeypatch, name):
    """Groups are {0, 2} and {1, 3}; it is the second that fails."""
    real = getattr(membership, name)
    failing = "rank 1" if name == "create_arena" else "rank 3"

    def fail(*arguments, **more):
        if threading.current_thread().name == failing:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*arguments, **more)

    def split(comm):
        with pytest.raises(RendezvousError) as info:
            comm.split(comm.rank % 2)
        return str(info.value)

    with farandole.local(4, timeout_s=WAIT_S) as world:
        if name == "_open_process":
            for comm in world:  # as if the ranks were other processes
                comm._membership = dataclasses.replace(comm._membership, processes=(os.getppid(),) * 4)
        monkeypatch.setattr(membership, name, fail)
        messages = world.run(split)
        monkeypatch.undo()
        assert len(set(messages)) == 1
        assert messages[0].startswith(f"{failing} could not join its new group: ")
        assert "Too many open files" in messages[0]
        assert world.run(lambda comm: comm.split(comm.rank % 2).world_size) == [2] * 4


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
    gc.collect()  # what earlier tests left
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


NOHUP = """
import signal, sys
from farandole.launch import run_processes
signal.signal(signal.SIGHUP, signal.SIG_IGN)
print(run_processes([sys.argv[1]], 1))
assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
"""


def test_a_signal_that_was_ignored_stays_ignored(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nos.kill(os.getppid(), signal.SIGHUP)\n")
    done = run_python(NOHUP, str(script))
    assert (done.stdout, done.stderr) == ("JobResult(failure=None, interrupted_by=None)\n", "")


def test_a_handler_that_is_not_pythons_is_left_alone(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("")
    replaced = []
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: replaced.append(number))
    assert run_processes([str(script)], 1).exit_code == 0
    assert replaced == []


def test_a_launcher_refuses_no_ranks(tmp_path):
    with pytest.raises(ArgumentError, match=r"the number of ranks is 0; it must be in 1\.\.256"):
        run_processes([str(tmp_path / "script.py")], 0)
