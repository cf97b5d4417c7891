"""Groups on several hosts: data over the wire, and what happens when ranks differ, leave, die or are kept out."""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import several_hosts
from several_hosts import LIMIT_S, on_all

import farandole
from farandole import (
    ArgumentError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorClosedError,
    PeerLostError,
    RendezvousError,
    addresses,
)
from farandole.communicator import Communicator
from farandole.connections import RankDoor
from farandole.hosts import HostProof, topology_from
from farandole.membership import join_threads
from farandole.topology import Topology
from farandole.wire_probe import measure

TOPOLOGIES = ["1x2", "2x1", "2x2", "0,1,0,1", "1+2", "2+1+1", "0,1,2,0,1"]


def numbers(rank: int, count: int, dtype: str = "int64") -> np.ndarray:
    return ((np.arange(count) * 7 + rank * 13) % 101).astype(dtype)


# -- data --------------------------------------------------------------------------------------------------------------


def check_all(comm, count: int, array) -> None:
    """Every collective, with ``count`` elements in the whole buffer, which ``array`` makes from values."""
    n, r = comm.world_size, comm.rank
    everyone = [numbers(rank, count) for rank in range(n)]
    own, last, total = everyone[r], n - 1, sum(everyone)
    assert np.array_equal(comm.all_reduce(array(own)), total)
    assert np.array_equal(comm.broadcast(array(own), last), everyone[last])
    reduced = comm.reduce(array(own), last)
    assert r != last or np.array_equal(reduced, total)
    comm.barrier()
    if count % n:
        return
    parts = [slice(count // n * rank, count // n * (rank + 1)) for rank in range(n)]
    gathered = np.concatenate([everyone[rank][parts[rank]] for rank in range(n)])
    assert np.array_equal(comm.reduce_scatter(array(own)), total[parts[r]])
    assert np.array_equal(comm.all_gather(array(own[parts[r]])), gathered)
    at_root = comm.gather(array(own[parts[r]]), last)
    assert (at_root is not None) == (r == last)
    assert at_root is None or np.array_equal(at_root, gathered)
    mine = comm.scatter(array(own) if r == 0 else None, 0, out=array(own[parts[r]] * 0))
    assert np.array_equal(mine, everyone[0][parts[r]])
    exchanged = comm.all_to_all(array(own))
    assert np.array_equal(exchanged, np.concatenate([everyone[rank][parts[r]] for rank in range(n)]))


@pytest.mark.parametrize("text", TOPOLOGIES)
@pytest.mark.parametrize("registered", [False, True], ids=["private", "registered"])
def test_every_collective_at_every_size(text, registered):
    """Below and above a slot; a few times, so that slots are used again."""
    n = Topology.parse(text).world_size

    def body(comm):
        def array(values):
            if not registered:
                return values.copy()
            mine = comm.empty(values.shape, values.dtype)
            mine[:] = values
            return mine

        for count in (0, 1, n, 1000 * n + 1, 100_000 * n, 0, n):
            check_all(comm, count, array)
        return comm.stats()

    with farandole.local(n, timeout_s=LIMIT_S, hosts=text) as world:
        for stats in world.run(body):
            for entry in stats:
                assert entry.bytes_sent == entry.scheduled_bytes_sent


@pytest.mark.parametrize("text", ["2x1", "2x2", "0,1,0,1", "2+1+1"])
def test_bytes_on_the_wire_are_those_that_the_schedule_sends_to_other_hosts(text):
    topology = Topology.parse(text)
    n, count = topology.world_size, 1200
    for name in farandole.algorithms.names("all_reduce"):
        schedule = farandole.algorithms.build("all_reduce", name, n, topology=topology)
        sizes = farandole.plans.chunk_counts(schedule, [count])
        sent = [0] * n
        for _, src, src_slot, dst, _, _ in schedule.rows.tolist():
            if topology.host_of[src] != topology.host_of[dst] and not schedule.num_scratch:
                sent[src] += 8 * sizes[src_slot]
        if schedule.num_scratch:
            continue  # slots hold other chunks there
        with farandole.local(n, timeout_s=LIMIT_S, hosts=text) as world:
            world.run(lambda comm, one=schedule: comm.all_reduce(numbers(comm.rank, count), algorithm=one))
            world.run(lambda comm: comm.barrier())
            assert [comm.wire_bytes()[0] for comm in world] == sent, name
            assert sum(comm.wire_bytes()[1] for comm in world) == sum(sent), name


def test_all_messages_that_were_sent_before_leaving_arrive():
    """Whoever leaves waits for nobody, and what it sent is lost to nobody."""

    def body(comm):
        if comm.rank == 0:
            for size in (5, 300_000, 0, 70_000):
                comm.send(numbers(0, size), 1, tag=size)
            comm.broadcast(numbers(0, 200_000), 0)
            comm.close()
            return None
        is_late.wait(LIMIT_S)
        if comm.rank == 1:
            for size in (5, 300_000, 0, 70_000):
                assert np.array_equal(comm.recv(np.zeros(size, dtype="int64"), 0, tag=size), numbers(0, size))
        return np.array_equal(comm.broadcast(np.zeros(200_000, dtype="int64"), 0), numbers(0, 200_000))

    is_late = threading.Event()
    world = farandole.local(3, timeout_s=LIMIT_S, hosts="0,1,1")
    timer = threading.Timer(0.3, is_late.set)
    timer.start()
    assert world.run(body) == [None, True, True]
    world.close()


def test_what_is_sent_after_a_long_silence_arrives_though_its_sender_leaves_at_once():
    with farandole.local(2, timeout_s=LIMIT_S, hosts="1+1") as world:
        world.run(lambda comm: comm.barrier())
        time.sleep(5.5)  # longer than who leaves waits for a host that takes nothing
        world[0].send(np.arange(8.0), 1)
        world[0].close()
        assert np.array_equal(world[1].recv(np.zeros(8), 0), np.arange(8.0))


def test_messages_that_nobody_takes_hide_no_rank_that_has_left():
    """There are more than there are slots."""
    with farandole.local(2, timeout_s=LIMIT_S, hosts="1+1") as world:
        works = [world[0].send(np.arange(2.0) + number, 1, async_op=True) for number in range(16)]
        for work in works:
            work.wait()
        world[0].close()
        with pytest.raises(PeerLostError, match=r"rank 0 \(on host host0\) closed its communicator"):
            world[1].all_reduce(np.ones(1))
        assert world[1].is_lost(0)


@pytest.mark.parametrize("hosts", ["1x2", "2x1"])
def test_ranks_that_leave_together_after_different_numbers_of_calls_are_told(hosts):
    """Which had to wait for nobody in those."""

    def body(comm):
        comm.barrier()
        if comm.rank == 0:
            comm.broadcast(np.ones(3), 0)
        comm.close()

    for _ in range(10):
        world = farandole.local(2, timeout_s=LIMIT_S, hosts=hosts)
        errors = on_all(world, body)
        assert any(isinstance(error, CollectiveMismatchError) for error in errors), errors


@pytest.mark.parametrize("text", ["2x2", "0,1,0,1", "0,1,2,0,1"])
def test_groups_of_groups(text):
    """Some of them on one host."""
    topology = Topology.parse(text)

    def body(comm):
        results = []
        for color in (comm.rank % 2, topology.host_of[comm.rank], comm.rank // 2, 0):
            group = comm.split(color, key=-comm.rank)
            inner = group.split(group.rank % 2)
            for one in (group, inner):
                check_all(one, 5 * one.world_size, np.copy)
            results.append(int(group.all_reduce(np.array([comm.rank]))[0]))
            inner.close()
            group.close()
        return results

    n = topology.world_size
    with farandole.local(n, timeout_s=LIMIT_S, hosts=text) as world:
        found = world.run(body)
    for which, key in enumerate((lambda r: r % 2, topology.host_of.__getitem__, lambda r: r // 2, lambda r: 0)):
        assert [row[which] for row in found] == [sum(o for o in range(n) if key(o) == key(r)) for r in range(n)]


# -- when ranks differ, leave, or are late -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 10_000_000 // 8])
def test_different_calls_are_told_on_every_host(count):
    calls = {
        "collective": lambda comm: comm.broadcast(numbers(comm.rank, count), 0),
        "dtype": lambda comm: comm.all_reduce(numbers(comm.rank, count, "float32")),
        "op": lambda comm: comm.all_reduce(numbers(comm.rank, count), "max"),
        "count": lambda comm: comm.all_reduce(numbers(comm.rank, count + 1)),
        "algorithm": lambda comm: comm.all_reduce(numbers(comm.rank, count), algorithm="ring"),
        "one too few": lambda comm: comm.close(),
    }
    for what, other in calls.items():
        world = farandole.local(4, timeout_s=LIMIT_S, hosts="0,1,0,1")

        def body(comm, other=other):
            comm.barrier()
            return other(comm) if comm.rank == 3 else comm.all_reduce(numbers(comm.rank, count))

        errors = on_all(world, body)
        for rank, error in enumerate(errors[: 3 if what == "one too few" else 4]):
            if what == "one too few":
                assert isinstance(error, PeerLostError), (what, rank, error)
                assert "rank 3 (on host host1) closed its communicator" in str(error)
            else:
                assert isinstance(error, CollectiveMismatchError), (what, rank, error)
                for other_rank in range(4):
                    assert f"rank {other_rank} on host host{other_rank % 2}: " in str(error)
        for comm in world:
            comm.close()


def test_a_late_rank_is_named_on_every_host():
    def body(comm):
        if comm.rank != 1:
            return comm.all_reduce(np.ones(3), timeout=0.3)
        while not comm.aborted:
            time.sleep(0.01)
        return comm.all_reduce(np.ones(3), timeout=0.3)

    world = farandole.local(4, timeout_s=LIMIT_S, hosts="0,1,0,1")
    for error in on_all(world, body):
        assert isinstance(error, CollectiveTimeoutError)
        assert "rank 1 has not arrived at collective number 1" in str(error)
    world.close()


def test_abort_ends_the_calls_of_every_host_at_once():
    def body(comm):
        if comm.rank == 1:
            comm.abort()
        return comm.recv(np.zeros(1), 1) if comm.rank != 1 else comm.barrier()

    world = farandole.local(4, timeout_s=LIMIT_S, hosts="0,1,0,1")
    for error in on_all(world, body):
        assert isinstance(error, CommunicatorClosedError)
        assert "rank 1 aborted the communicator" in str(error)
    world.close()


def test_a_refused_call_is_told_to_other_hosts():
    def body(comm):
        return comm.all_reduce(np.ones(3), timeout=1) if comm.rank == 0 else comm.all_reduce("no array")

    world = farandole.local(2, timeout_s=LIMIT_S, hosts="2x1")
    late, refused = on_all(world, body)
    assert isinstance(refused, ArgumentError)
    assert "rank 1 on host host1: " in str(late)
    assert "all_reduce: " in str(late)
    for comm in world:
        comm.close()


# -- death -------------------------------------------------------------------------------------------------------------

DIES = """
import os, signal, sys, time, threading
import numpy as np
import farandole
how, when, lost = sys.argv[1], sys.argv[2], int(sys.argv[3])

def die():
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), int(how))

rank = int(os.environ["RANK"])
if when == "before" and rank == lost:
    die()
try:
    comm = farandole.init(timeout_s=60 if when != "before" else 8)
    if when == "idle":
        if rank == lost:
            die()
    else:
        comm.barrier()
    large = np.ones(20_000_000 if when == "large" else 10)
    if rank == lost and when in ("large", "small", "messages"):
        threading.Timer(0.05, die).start()
    while True:
        if when == "messages":
            comm.recv(large, (lost) % comm.world_size) if rank != lost else time.sleep(1)
        else:
            comm.all_reduce(large)
except farandole.CommunicationError as error:
    print(type(error).__name__, error, flush=True)
"""


@pytest.mark.parametrize("when", ["idle", "small", "large", "messages"])
@pytest.mark.parametrize("how", ["exit", str(int(signal.SIGKILL)), str(int(signal.SIGSEGV))])
def test_death_is_told_on_every_host(when, how):
    lost = {"idle": 0, "small": 1, "large": 2, "messages": 1}[when]
    done = several_hosts.run(["a", "b", "a"], DIES, how, when, str(lost))
    for rank, (code, out, err) in enumerate(done):
        if rank != lost:
            assert code == 0, err
            name = f"{os.uname().nodename}/{'aba'[lost]}"
            assert out.startswith(f"PeerLostError rank {lost} (on host {name}) ended while others needed it"), out


def test_a_rank_that_never_comes_is_named():
    done = several_hosts.run(["a", "b", "c"], DIES, "exit", "before", "2")
    reason = "rank 0 waited 8 s; of 3 ranks these have not joined: 2"
    for code, out, _ in done[:2]:
        assert code == 0
        assert reason in out or "rank 1 waited 8 s; of 3 ranks these have not joined: 2" in out


STOPPED = """
import os, signal, sys, numpy as np, farandole
comm = farandole.init(timeout_s=60)
comm.barrier()
if comm.rank == 1:
    for other in (0, 2):  # which are through the barrier then
        comm.recv(np.zeros(1), other)
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    comm.send(np.zeros(1), 1)
try:
    comm.all_reduce(np.ones(3), timeout=1)
except farandole.CommunicationError as error:
    print(type(error).__name__, error, flush=True)
"""


def test_a_stopped_rank_is_named_at_the_timeout_and_holds_up_no_end():
    job = several_hosts.start(["a", "b", "a"], STOPPED)
    try:
        for rank in (0, 2):
            out, err = job.ranks[rank].communicate(timeout=LIMIT_S)
            assert "CollectiveTimeoutError" in out, err
            assert "; rank 1 does not answer, as if stopped or cut off: rank 1 has not arrived" in out
        job.ranks[1].send_signal(signal.SIGCONT)
        assert "rank 1 has not arrived" in job.ranks[1].communicate(timeout=LIMIT_S)[0]
    finally:
        job.end()


FORKS = """
import os, sys, time, numpy as np, farandole
comm = farandole.init(timeout_s=60)
if comm.rank == 1:
    comm.barrier()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    os._exit(0)
try:
    comm.barrier()  # rank 1 may be gone before it has told that it was there
    comm.all_reduce(np.ones(3))
except farandole.PeerLostError as error:
    print("lost", flush=True)
"""


def test_a_child_of_a_lost_rank_does_not_keep_its_connections_open():
    job = several_hosts.start(["a", "b"], FORKS)
    try:
        assert job.ranks[0].communicate(timeout=LIMIT_S)[0] == "lost\n"
        child = int(job.ranks[1].stdout.readline())
        os.kill(child, signal.SIGKILL)
    finally:
        job.end()


FORKS_TWICE = """
import os, farandole
comm = farandole.init(timeout_s=60)
comm.barrier()
if os.fork() == 0:
    kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]  # with numbers that are free now
    if os.fork() == 0:
        for one in kept:
            os.fstat(one)
        print("kept", flush=True)
        os._exit(0)
    os.wait()
    os._exit(0)
os.wait()
comm.barrier()
"""


def test_a_grandchild_closes_nothing_of_its_parent():
    for code, out, err in several_hosts.run(["a", "b"], FORKS_TWICE):
        assert (code, out) == (0, "kept\n"), err


def test_a_group_that_cannot_be_watched_leaves_no_connection(monkeypatch):
    """As there are no descriptors left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first, second = join_threads(Topology((0, 1)))
    first_free = os.dup(0)
    os.close(first_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
        with pytest.raises(RendezvousError, match="ulimit -n"):
            first.make_engine()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with Communicator(second, timeout_s=LIMIT_S) as comm, pytest.raises(PeerLostError, match="rank 0"):
        comm.barrier()


# -- who shares a host -------------------------------------------------------------------------------------------------


def test_memory_is_shared_where_it_can_be_opened_and_holds_the_right_token():
    one, other = HostProof.offer(), HostProof.offer()
    try:
        assert one.is_shared_with(one)
        assert one.is_shared_with(other)
        assert not one.is_shared_with(other._replace(token=one.token))
        assert not one.is_shared_with(other._replace(host_id="another"))
        assert not one.is_shared_with(other._replace(descriptor=10**6))
        assert not one.is_shared_with(other._replace(process=2**22 + 1))
        assert not one.is_shared_with(other._replace(descriptor=0))
    finally:
        one.withdraw()
        other.withdraw()


def test_ranks_that_do_not_agree_on_who_shares_memory_are_named():
    proofs = [HostProof(1, 1, "", "", f"h{rank}") for rank in range(3)]
    assert topology_from([[0, 2], [1], [0, 2]], proofs) == Topology((0, 1, 0))
    with pytest.raises(RendezvousError, match=r"rank 0 \(h0\) shares memory with ranks \[0, 1\], but rank 1 \(h1\)"):
        topology_from([[0, 1], [1], [2]], proofs)


def test_one_host_id_where_memory_is_not_shared_is_refused():
    proofs = [HostProof(1, 1, "", "here", f"h{rank}") for rank in range(2)]
    with pytest.raises(RendezvousError, match=r"FARANDOLE_HOST_ID is 'here' on ranks 0 \(h0\) and 1 \(h1\)"):
        topology_from([[0], [1]], proofs)


SAYS_HELLO = """
import farandole
with farandole.init(timeout_s=60) as comm:
    comm.barrier()
"""


@pytest.mark.parametrize("hosts", ["ab", "aa"])
def test_without_a_secret_rank_0_warns_where_others_can_reach_the_ranks(hosts):
    own = addresses.own_addresses({})[0]
    place = {"FARANDOLE_SECRET": "", "MASTER_ADDR": own}
    (code, _, first), (other_code, _, second) = several_hosts.run(hosts, SAYS_HELLO, **place)
    assert code == other_code == 0, first + second
    if hosts == "ab":
        assert "RuntimeWarning: this job runs on several hosts without a secret" in first
    elif not addresses.is_loopback(own):
        assert f"RuntimeWarning: this job runs and meets at {own}, which others can reach, without" in first
    assert "RuntimeWarning" not in second


# -- addresses ---------------------------------------------------------------------------------------------------------


def test_an_interface_gives_its_addresses():
    assert addresses.own_addresses({"FARANDOLE_INTERFACE": "lo"})[0] == "127.0.0.1"
    assert addresses.own_addresses({"FARANDOLE_INTERFACE": "10.1.2.3"}) == ["10.1.2.3"]
    assert addresses.own_addresses({"FARANDOLE_INTERFACE": "fe80::1"}) == ["fe80::1"]


def test_an_unknown_interface_is_named_with_those_there_are():
    with pytest.raises(RendezvousError, match=r"FARANDOLE_INTERFACE is 'ib7'; the interfaces of this host are .*lo"):
        addresses.own_addresses({"FARANDOLE_INTERFACE": "ib7"})


def test_no_loopback_address_is_handed_out_where_there_is_another():
    found = addresses.own_addresses({}, "127.0.0.1")
    if any(not addresses.is_loopback(address) for address in found):
        assert not any(addresses.is_loopback(address) for address in found)
    else:
        assert found == ["127.0.0.1"]


@pytest.mark.parametrize("interface", ["127.0.0.1", "::1"])
def test_ranks_meet_over_either_kind_of_address(interface):
    if interface == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    script = (
        "import numpy as np, farandole\n"
        "with farandole.init(timeout_s=60) as comm:\n"
        "    print(comm.all_reduce(np.ones(5))[0], comm._membership.network.addresses)\n"
    )
    for code, out, err in several_hosts.run(["a", "b"], script, FARANDOLE_INTERFACE=interface):
        assert code == 0, err
        assert out == f"2.0 (({interface!r},), ({interface!r},))\n"


# -- doors -------------------------------------------------------------------------------------------------------------


def connected() -> tuple[RankDoor, RankDoor]:
    return tuple(RankDoor(rank, b"secret", addresses=["127.0.0.1"]) for rank in range(2))


def go_on() -> None:
    pass


def connect(doors, tokens=("t", "t"), limit_s=LIMIT_S) -> list:
    """What each gets; or the error."""
    ways = [door.way for door in doors]
    results = [None] * len(doors)

    def run(rank):
        own = [None if other == rank else way for other, way in enumerate(ways)]
        try:
            results[rank] = doors[rank].connect(tokens[rank], own, time.monotonic() + limit_s, go_on)
        except RendezvousError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(doors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    for door in doors:
        door.close()
    return results


def test_two_doors_are_connected():
    first, second = connect(connected())
    assert first[0] == second[1] == -1
    os.write(first[1], b"hello")
    assert os.read(second[0], 100) == b"hello"
    os.close(first[1])
    os.close(second[0])


def test_another_meeting_or_secret_does_not_come_in():
    doors = connected()
    for result in connect(doors, ("t", "u"), limit_s=0.5):
        assert isinstance(result, RendezvousError)
    doors = RankDoor(0, b"secret", addresses=["127.0.0.1"]), RankDoor(1, b"other", addresses=["127.0.0.1"])
    first, second = connect(doors, limit_s=0.5)
    assert "waited in vain for connections from ranks [1]" in str(first)
    assert "rank 1 cannot connect to rank 0 (127.0.0.1 port" in str(second)


def test_strangers_at_a_door_change_nothing_but_a_counter():
    """Random bytes, the beginning of a handshake, silence, and a great many of them."""
    choice = random.Random(1)
    doors = connected()
    strangers = []
    for number in range(400):
        stranger = socket.create_connection(("127.0.0.1", doors[0].way.port), timeout=LIMIT_S)
        if number % 4:
            stranger.sendall(choice.randbytes(choice.randrange(1, 200)))
        if number % 4 == 3:
            stranger.close()
        strangers.append(stranger)
    first, second = connect(doors)
    os.write(second[0], b"hello")
    assert os.read(first[1], 100) == b"hello"
    os.close(first[1])
    os.close(second[0])
    for stranger in strangers:
        stranger.close()


def test_no_port_is_left_open_once_the_ranks_have_met():
    script = """
import os, farandole
from pathlib import Path
with farandole.init(timeout_s=60) as comm:
    comm.barrier()
    own = {os.readlink(f) for f in Path("/proc/self/fd").iterdir() if os.path.islink(f)}
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if os.path.exists(table):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                    listening.append(fields[1])
    print(listening)
    comm.barrier()
"""
    for code, out, err in several_hosts.run(["a", "b"], script):
        assert code == 0, err
        assert out == "[]\n"


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_the_wire_is_measured_through_small_buffers_and_nothing_is_left_on_it(num_hosts):
    pairs = [socket.socketpair() for _ in range(num_hosts if num_hosts > 2 else 1)]
    for end in itertools.chain(*pairs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ends = [(pairs[host][0], pairs[host - 1][1]) for host in range(num_hosts)] if num_hosts > 2 else []
    ends = ends or [(pairs[0][0], pairs[0][0]), (pairs[0][1], pairs[0][1])]
    figures = [None] * num_hosts

    def run(host):
        following, preceding = (end.fileno() for end in ends[host])
        figures[host] = measure(following, preceding, time.monotonic() + LIMIT_S)

    threads = [threading.Thread(target=run, args=(host,)) for host in range(num_hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert all(len(both) == 2 and min(both) > 0 for both in figures)
    for end in itertools.chain(*pairs):
        with pytest.raises(BlockingIOError):
            end.recv(1, socket.MSG_DONTWAIT)
    for end in itertools.chain(*pairs):
        end.close()


def test_a_wire_whose_other_end_is_gone_fails_the_measure():
    one, other = socket.socketpair()
    other.close()
    with one, pytest.raises(RendezvousError, match="the wire between two hosts could not be measured"):
        measure(one.fileno(), one.fileno(), time.monotonic() + LIMIT_S)
