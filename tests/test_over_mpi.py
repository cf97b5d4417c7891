"""Data between hosts over MPI. What are hosts here, FARANDOLE_HOST_ID says."""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path

import pytest
from jobs import LIMIT_S, mpirun, run, write_script

from farandole.errors import RendezvousError
from farandole.launch import over_mpi
from farandole.launch.environment import join_job, transport_from
from farandole.mpi_pump import LineName, Pump, PumpStopped

TESTS = Path(__file__).parent

HEAD = f"""
import os, sys, time
sys.path.insert(0, {str(TESTS)!r})
from mpi4py import MPI
rank, n = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
os.environ["FARANDOLE_TRANSPORT"] = "mpi"
os.environ["FARANDOLE_HOST_ID"] = "abc"[rank % int(sys.argv[1])]
import numpy as np
import farandole

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

"""


def dedented(text: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in text.splitlines())


def job(mpi, tmp_path, n, hosts, body, **more):
    """Run ``body`` on so many ranks, dealt out to so many hosts."""
    return mpirun(mpi, n, mpi / "python", write_script(tmp_path, HEAD + body), hosts, **more)


def require_through(done, n) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("through") == n, done.stdout + done.stderr[-3000:]


# -- data --------------------------------------------------------------------------------------------------------------

DATA = """
from test_hosts import check_all, numbers
reached = []

def watch(event, arguments):
    if event in ("socket.connect", "socket.bind") and isinstance(arguments[1], tuple) and arguments[0].type == 1:
        reached.append((event, arguments[1][1]))

sys.addaudithook(watch)
with farandole.init(timeout_s=60) as comm:
    for count in (0, 1, n, 1000 * n + 1, 100_000 * n, 0, n):
        check_all(comm, count, np.copy)
    for size in (0, 1, 1000, 3_000_000):  # both ways at once, with all ranks
        received = [np.zeros(size, "int64") for _ in range(n)]
        works = [comm.recv(received[other], other, tag=size, async_op=True) for other in range(n) if other != rank]
        works += [comm.send(numbers(rank, size), other, tag=size, async_op=True) for other in range(n) if other != rank]
        for work in works:
            work.wait()
        for other in set(range(n)) - {rank}:
            assert np.array_equal(received[other], numbers(other, size))
    for color in (rank % 2, rank // 2, 0):
        with comm.split(color, key=-rank) as group, group.split(group.rank % 2) as inner:
            for one in (group, inner):
                check_all(one, 5 * one.world_size, np.copy)
    sent, received = comm.wire_bytes()
    assert sent > 0 and received > 0
ports = {port for event, port in reached if event == "socket.connect"}
assert len(ports) <= 1, reached  # the store's
assert [event for event, _ in reached if event == "socket.bind"] == ["socket.bind"] * (rank == 0), reached
say("through")
"""


@pytest.mark.parametrize(("n", "hosts"), [(2, 2), (3, 3), (4, 2)])
def test_data_of_every_kind_and_none_over_tcp(mpi, tmp_path, n, hosts):
    require_through(job(mpi, tmp_path, n, hosts, DATA), n)


def test_a_job_may_meet_again_and_hold_several_groups(mpi, tmp_path):
    body = """
    comms = [farandole.init(timeout_s=60) for _ in range(3)]
    for turn in range(20):
        for comm in comms:
            assert comm.all_reduce(np.ones(turn * 1000 + 1))[-1] == n
    comms.pop().close()
    for comm in comms:
        comm.barrier()
    say("through")  # and the others are closed at the end of the process
    """
    require_through(job(mpi, tmp_path, 3, 2, dedented(body)), 3)


def test_messages_of_the_program_over_mpi_go_on_beside(mpi, tmp_path):
    """Even those that are received from anybody, with any tag."""
    body = """
    with farandole.init(timeout_s=60) as comm:
        for turn in range(200):
            work = comm.all_reduce(np.full(5000, 1.0), async_op=True)
            request = MPI.COMM_WORLD.Isend(np.array([turn]), (rank + 1) % n, turn)
            got = np.zeros(1, int)
            MPI.COMM_WORLD.Recv(got, MPI.ANY_SOURCE, MPI.ANY_TAG)
            assert got[0] == turn
            request.Wait()
            assert (work.wait() == n).all()
    say("through")
    """
    require_through(job(mpi, tmp_path, 2, 2, dedented(body)), 2)


# -- when ranks differ, leave, or are late -----------------------------------------------------------------------------


FAILURES = {
    "different calls": (
        "comm.all_reduce(np.ones(8 + (rank == 1)))",
        "CollectiveMismatchError the ranks made different calls",
    ),
    "different large calls": (
        "comm.all_reduce(np.ones(4_000_000 + (rank == 1)))",
        "CollectiveMismatchError the ranks made different calls",
    ),
    "leaving early": (
        "comm.close() if rank == 1 else comm.all_reduce(np.ones(8))",
        "PeerLostError rank 1 (on host",
    ),
    "abort": (
        "comm.abort() if rank == 1 else None; comm.all_reduce(np.ones(8))",
        "CommunicatorClosedError rank 1 aborted the communicator",
    ),
    "a late rank": (
        "MPI.COMM_WORLD.Barrier() if rank == 1 else comm.all_reduce(np.ones(8), timeout=1)",
        "rank 1 has not arrived at collective number 2",
    ),
}


@pytest.mark.parametrize("what", FAILURES)
def test_failures_are_told_on_every_host_and_the_process_ends(mpi, tmp_path, what):
    call, message = FAILURES[what]
    body = f"""
    comm = farandole.init(timeout_s=60)
    try:
        comm.barrier()
        {call}
    except farandole.CommunicationError as error:
        say(type(error).__name__, str(error).splitlines()[0])
    if {what == "a late rank"} and rank != 1:
        MPI.COMM_WORLD.Barrier()
    """
    done = job(mpi, tmp_path, 4, 2, dedented(body))
    expected = 3 if what in ("leaving early", "a late rank") else 4
    assert done.stdout.count(message) == expected, done.stdout + done.stderr[-2000:]


def test_ranks_that_are_left_go_on_over_mpi(mpi, tmp_path):
    body = """
    comm = farandole.init(timeout_s=60)
    if rank == 1:
        comm.close()
    else:
        try:
            comm.barrier()
            comm.barrier()
        except farandole.PeerLostError:
            comm = comm.shrink()
        for size in (1, 1_000_000):
            assert comm.all_reduce(np.ones(size))[-1] == 3
        assert type(comm._membership.network.transport).__name__ == "MpiLines"
        comm.close()
    say("through")
    """
    require_through(job(mpi, tmp_path, 4, 2, dedented(body)), 4)


def test_what_was_sent_before_leaving_arrives(mpi, tmp_path):
    body = """
    comm = farandole.init(timeout_s=60)
    sizes = (5, 3_000_000, 0, 70_000)
    if rank == 0:
        for size in sizes:
            comm.send(np.arange(size), 1, tag=size)
        comm.close()
    else:
        time.sleep(0.3)
        for size in sizes:
            assert np.array_equal(comm.recv(np.zeros(size, int), 0, tag=size), np.arange(size))
    say("through")
    """
    require_through(job(mpi, tmp_path, 2, 2, dedented(body)), 2)


@pytest.mark.parametrize("how", ["sys.exit(3)", "os._exit(3)", "os.kill(os.getpid(), 9)", "raise ValueError"])
def test_a_rank_that_ends_badly_ends_the_job(mpi, tmp_path, how):
    """Or at least holds up no other."""
    body = f"""
    comm = farandole.init(timeout_s=60)
    comm.barrier()
    if rank == 1:
        {how}
    for _ in range(100):
        comm.all_reduce(np.ones(100_000))
    """
    assert job(mpi, tmp_path, 3, 3, dedented(body)).returncode != 0


def test_ranks_that_missed_one_another_meet_when_all_come_again(mpi, tmp_path):
    body = """
    from farandole import mpi_lines
    open_line, mpi_lines._open = mpi_lines._open, None  # a failure of one rank alone, while the others connect
    def failing(pump, name, peer):
        if rank == 1:
            raise farandole.RendezvousError("no room")
        return open_line(pump, name, peer)
    mpi_lines._open = failing
    try:
        farandole.init(timeout_s=20)
    except farandole.RendezvousError as error:
        say(error)
    mpi_lines._open = open_line
    with farandole.init(timeout_s=60) as comm:
        comm.all_reduce(np.ones(10_000))
    say("through")
    """
    done = job(mpi, tmp_path, 3, 3, dedented(body))
    require_through(done, 3)
    assert done.stdout.count("no room") == 3


def test_a_forked_child_holds_up_nothing(mpi, tmp_path):
    body = """
    import signal
    comm = farandole.init(timeout_s=60)
    comm.barrier()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    if rank == 0:
        comm.close()
    else:
        try:
            comm.barrier()
        except farandole.PeerLostError:
            pass
        comm.close()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    say("through")
    """
    require_through(job(mpi, tmp_path, 2, 2, dedented(body)), 2)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_program_may_finalise_mpi_itself(mpi, tmp_path, is_closed):
    """Right after it closed its communicators, while lines may still be ending; and with some open, which are cut."""
    body = f"""
    comms = [farandole.init(timeout_s=60) for _ in range(3)]
    for comm in comms:
        comm.all_reduce(np.ones(100_000))
        if {is_closed}:
            comm.close()
    MPI.Finalize()
    try:
        farandole.init(timeout_s=60)
    except farandole.RendezvousError as error:
        say(error)
    say("through")
    """
    done = job(mpi, tmp_path, 3, 3, dedented(body))
    require_through(done, 3)
    assert done.stdout.count("MPI has been finalised, and the ranks would meet over it; call farandole.init()") == 3


def test_where_mpi_fails_on_one_rank_all_are_told_then_and_when_they_meet_again(mpi, tmp_path):
    body = """
    from farandole import mpi_pump
    with farandole.init(timeout_s=60) as kept:
        comm = farandole.init(timeout_s=60)
        if rank == 1:
            def failing(self):
                raise MPI.Exception(MPI.ERR_OTHER)
            mpi_pump.Pump._receive = failing
        for one in (comm, kept):
            try:
                while True:
                    one.all_reduce(np.ones(1000))
            except farandole.PeerLostError:
                say("lost")
        try:
            farandole.init(timeout_s=60)
        except farandole.RendezvousError as error:
            say(error)
    """
    began = time.monotonic()
    done = job(mpi, tmp_path, 3, 3, dedented(body))
    assert done.stdout.count("lost") == 6, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("nothing is carried over MPI any more, as MPI failed in this process") == 3
    assert done.stderr.count("Traceback") == 1
    assert time.monotonic() - began < 50  # nobody waited for the timeout


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FARANDOLE_TRANSPORT": "smoke"}, "FARANDOLE_TRANSPORT is 'smoke'; it must be tcp or mpi"),
        ({"FARANDOLE_TRANSPORT": "mpi"}, "neither mpirun nor srun has started this process"),
        (
            {"FARANDOLE_TRANSPORT": "mpi", "RANK": "0", "WORLD_SIZE": "1"},
            "neither mpirun nor srun has started this process",
        ),
    ],
)
def test_a_transport_that_makes_no_sense_is_refused(variables, message):
    with pytest.raises(RendezvousError, match=message):
        join_job(variables, 1)


def test_tcp_is_what_there_is_without_asking():
    assert type(transport_from({})) is type(transport_from({"FARANDOLE_TRANSPORT": "tcp"}))


def test_ranks_that_use_different_transports_are_named_at_once_on_all(mpi, tmp_path):
    body = """
    os.environ["FARANDOLE_TRANSPORT"] = "tcp" if rank == 1 else "mpi"
    try:
        farandole.init(timeout_s=60)
    except farandole.RendezvousError as error:
        say(error)
    MPI.COMM_WORLD.Barrier()
    """
    done = job(mpi, tmp_path, 3, 3, dedented(body))
    assert done.stdout.count("disagree on FARANDOLE_TRANSPORT: {0: 'mpi', 1: 'tcp', 2: 'mpi'}") == 3, (
        done.stdout + done.stderr[-2000:]
    )


def test_without_mpi4py_it_says_what_to_do(mpi):
    code = "import sys; sys.modules['mpi4py'] = None; import farandole; farandole.init()"
    done = mpirun(mpi, 2, mpi / "python", "-c", code, FARANDOLE_TRANSPORT="mpi")
    assert done.returncode != 0
    assert "install it, or unset FARANDOLE_TRANSPORT" in done.stderr


def test_an_mpi_for_one_thread_is_refused(mpi):
    code = "import mpi4py; mpi4py.rc.thread_level = 'single'; import farandole; farandole.init()"
    done = mpirun(mpi, 2, mpi / "python", "-c", code, FARANDOLE_TRANSPORT="mpi")
    assert done.returncode != 0
    assert "several threads may use it, and it was initialised for fewer" in done.stderr


@pytest.mark.parametrize("transport", ["tcp", "mpi"])
def test_mpi_that_is_not_initialised_is_no_reason_to_abort(mpi, transport):
    code = "import mpi4py; mpi4py.rc.initialize = False; import farandole; farandole.init()"
    done = mpirun(mpi, 2, mpi / "python", "-c", code, FARANDOLE_TRANSPORT=transport)
    assert done.returncode != 0
    assert "MPI is not initialised, as mpi4py.rc.initialize was changed; call MPI.Init_thread() before" in done.stderr


def test_where_torchrun_says_who_a_rank_is_data_go_over_mpi_too(mpi, tmp_path):
    """As where mpirun starts one torchrun per host, each with one process."""
    body = """
    import socket
    import torch.distributed as dist
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = MPI.COMM_WORLD.bcast(free.getsockname()[1])
    agent = dist.TCPStore("127.0.0.1", port, n, rank == 0)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(n), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FARANDOLE_SECRET": "secret"}
    with farandole.init(timeout_s=60) as comm:
        assert comm.all_reduce(np.ones(1000))[0] == n
        assert type(comm._membership.network.transport).__name__ == "MpiLines"
        comm.barrier()
    MPI.COMM_WORLD.Barrier()
    say("through")
    """
    require_through(job(mpi, tmp_path, 2, 2, dedented(body)), 2)


# -- where rank 0 serves the store -------------------------------------------------------------------------------------


def test_rank_0_tells_addresses_that_others_can_reach():
    assert over_mpi._addresses({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4) == ["127.0.0.1"]
    assert over_mpi._addresses({"MPI_LOCALNRANKS": "4"}, 4) == ["127.0.0.1"]
    assert over_mpi._addresses({"MPI_LOCALNRANKS": "2", "FARANDOLE_INTERFACE": "10.1.2.3"}, 2) == ["10.1.2.3"]
    assert over_mpi._addresses({"MPI_LOCALNRANKS": "2"}, 4) == over_mpi.own_addresses({})


def test_others_take_the_first_address_where_rank_0_proves_the_secret():
    from farandole.store import StoreServer

    server, stranger = StoreServer(("127.0.0.1", 0), b"secret"), None
    port = server.address[1]
    try:
        stranger = StoreServer(("127.0.0.2", port), b"another")
        place = over_mpi._Place(["127.0.0.3", "127.0.0.2", "127.0.0.1"], port, "secret", 0)
        limit = time.monotonic() + LIMIT_S
        assert over_mpi._answering(place, limit) == ("127.0.0.1", port)
        assert over_mpi._answering(place._replace(secret="other"), limit) is None
    finally:
        server.close()
        stranger.close()


@pytest.mark.parametrize("transport", ["tcp", "mpi"])
def test_mpirun_on_what_may_be_several_hosts(mpi, tmp_path, transport):
    """As mpirun does not say that there is one, rank 0 tells all its addresses."""
    path = write_script(
        tmp_path,
        """
        import os
        for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
            os.environ.pop(name, None)
        from mpi4py import MPI
        os.environ["FARANDOLE_HOST_ID"] = str(MPI.COMM_WORLD.rank % 2)
        import farandole, numpy as np
        with farandole.init(timeout_s=60) as comm:
            assert comm.all_reduce(np.ones(3))[0] == 3
        os.write(1, b"through\\n")
        """,
    )
    require_through(mpirun(mpi, 3, mpi / "python", path, FARANDOLE_TRANSPORT=transport), 3)


# -- the pump, on a world without MPI ----------------------------------------------------------------------------------


class FakeMPI:
    """As much of MPI as a pump uses, between threads."""

    ANY_SOURCE = ANY_TAG = BYTE = None
    THREAD_MULTIPLE = 3

    class Status:
        def Get_count(self, _):
            return self.count


class FakeRank:
    def __init__(self, world, rank):
        self.world, self.rank = world, rank
        self.most_bytes = 0

    def Improbe(self, _source, _tag, status):
        queue = self.world[self.rank]
        if not queue:
            return None
        self.most_bytes = max(self.most_bytes, sum(map(len, list(queue))))
        message = queue.popleft()
        status.count = len(message)

        class Message:
            def Recv(self, target):
                target[0][: len(message)] = message

        return Message()

    def Isend(self, source, peer):
        self.world[peer].append(bytes(source[0]))

        class Request:
            def Test(self):
                return True

        return Request()


@pytest.fixture
def pumps():
    world = [deque(), deque()]
    ranks = [FakeRank(world, rank) for rank in range(2)]
    made = [Pump(FakeMPI, rank) for rank in ranks]
    made[0].ranks = ranks
    yield made
    for pump in made:
        pump.end(0.2)
        assert not pump._thread.is_alive()
        pump.close()


def line(pumps, token=7):
    lines = [pump.open(LineName(token, own, 1 - own), 1 - own) for own, pump in enumerate(pumps)]
    for pump, one in zip(pumps, lines, strict=True):
        assert pump.unanswered({0: one}, LIMIT_S) == []
    return [socket.socket(fileno=one.socket) for one in lines]


def read_all(stream) -> bytes:
    parts = []
    while part := stream.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def test_lines_carry_streams_both_ways_to_their_end(pumps):
    choice = random.Random(1)
    results = {}

    def use(stream, number, end):
        data = random.Random(number).randbytes(number * 400_000)
        reader = threading.Thread(target=lambda: results.update({(number, end): read_all(stream)}))
        reader.start()
        position = 0
        while position < len(data):
            size = choice.choice([1, 40, 5000, 300_000])
            stream.sendall(data[position : position + size])
            position += size
        stream.shutdown(socket.SHUT_WR)
        reader.join(LIMIT_S)
        stream.close()

    threads = []
    for number in range(6):
        threads += [
            threading.Thread(target=use, args=(stream, number, end))
            for end, stream in enumerate(line(pumps, token=number))
        ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    for number in range(6):
        data = random.Random(number).randbytes(number * 400_000)
        assert results[number, 0] == results[number, 1] == data
    limit = time.monotonic() + LIMIT_S
    while any(pump._lines for pump in pumps) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not any(pump._lines or pump._by_stream or pump._early for pump in pumps)


def test_what_nobody_reads_stays_where_it_is_and_holds_up_no_other(pumps):
    first, second = line(pumps, 1), line(pumps, 2)
    first[0].setblocking(False)
    written, is_full_since = 0, None
    while is_full_since is None or time.monotonic() < is_full_since + 0.2:
        try:
            written += first[0].send(bytes(100_000))
            is_full_since = None
        except BlockingIOError:
            is_full_since = is_full_since or time.monotonic()
            time.sleep(0.01)
    assert written < 4 << 20
    second[0].sendall(b"hello")
    assert second[1].recv(100) == b"hello"
    first[0].setblocking(True)
    first[0].shutdown(socket.SHUT_WR)
    assert len(read_all(first[1])) == written
    for stream in (*first, *second):
        stream.close()


def test_the_end_of_one_end_is_seen_at_the_other_though_it_has_not_read_all(pumps):
    one, other = line(pumps)
    one.sendall(bytes(3_000_000 // 8))
    other.close()
    assert one.recv(100) == b""
    one.close()


def test_a_line_that_is_given_up_is_over(pumps):
    given_up = pumps[0].open(LineName(3, 0, 1), 1)
    assert pumps[0].unanswered({1: given_up}, 0.05) == [1]
    pumps[0].abandon(given_up)
    os.close(given_up.socket)
    others = line(pumps, 4)  # so that both pumps have looked
    limit = time.monotonic() + LIMIT_S
    while (len(pumps[0]._lines) > 1 or pumps[1]._early) and time.monotonic() < limit:
        time.sleep(0.01)
    assert len(pumps[0]._lines) == 1
    assert not pumps[1]._early
    for stream in others:
        stream.close()


def test_what_writes_to_a_socket_that_nobody_reads_is_not_ended_by_a_signal():
    """Programs that are ended by SIGPIPE, as filters are, ask for it for the whole process."""
    code = f"""
    import sys
    sys.path.insert(0, {str(TESTS)!r})
    import os, signal, socket
    from test_over_mpi import FakeMPI, FakeRank, LineName, Pump, deque
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    world = [deque(), deque()]
    pumps = [Pump(FakeMPI, FakeRank(world, rank)) for rank in range(2)]
    lines = [pump.open(LineName(7, own, 1 - own), 1 - own) for own, pump in enumerate(pumps)]
    assert not any(pump.unanswered({{0: line}}, 60) for pump, line in zip(pumps, lines))
    one, other = (socket.socket(fileno=line.socket) for line in lines)
    other.close()
    one.send(b"hello")
    one.shutdown(socket.SHUT_WR)
    while not lines[1]._has_received_end:
        pass
    print("through", flush=True)
    os._exit(0)
    """
    done = run(sys.executable, "-c", dedented(code))
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr[-2000:]


def test_a_pump_that_has_stopped_says_so(pumps):
    waiting = pumps[0].open(LineName(1, 0, 1), 1)
    pumps[0].end(0.05)
    with pytest.raises(PumpStopped, match="MPI has been finalised"):
        pumps[0].unanswered({1: waiting}, LIMIT_S)
    before = {*Path("/proc/self/fd").iterdir()}
    with pytest.raises(PumpStopped, match="MPI has been finalised"):
        pumps[0].open(LineName(2, 0, 1), 1)
    assert {*Path("/proc/self/fd").iterdir()} <= before
    os.close(waiting.socket)
