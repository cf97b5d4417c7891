"""Messages from rank to rank: in any order on both sides, beside collectives, and what is said when they fail."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest
import torch
from reference import DTYPES, data, numpy_dtype

import farandole
from farandole import (
    ArgumentError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    CommunicatorClosedError,
    PeerLostError,
)
from farandole.store import StoreServer

JOIN_S = 60  # for a process that is about to end; only a failure takes so long
LARGE = 700_001  # int32 elements: more than the slots of a channel hold


def contents(src: int, dst: int, tag: int, count: int) -> np.ndarray:
    """What differs per message and element."""
    return np.arange(count, dtype=np.int32) * 7 + (src * 1009 + dst * 10_007 + tag * 100_003)


def wait_until(condition) -> None:
    while not condition():
        threading.Event().wait(0.001)


# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [50_000, 0])
def test_what_is_kept_for_later_receives_is_bounded(monkeypatch, count):
    """A rank that waits for one message, while others without end come before it, says so in time."""
    monkeypatch.setattr(farandole.runner, "_memory_bytes", lambda: 4 << 20)
    world = farandole.local(2, timeout_s=20)

    def body(comm):
        def send_without_end():
            while True:
                comm.send(contents(0, 1, 0, count), dst=1)

        with pytest.raises(CommunicationError, match="rank 0 has sent rank 1 more than it can keep") as raised:
            send_without_end() if comm.rank == 0 else comm.recv(np.zeros(3), src=0, tag=1)
        assert "rank 1: recv(3 x float64, src=0, tag=1)" in str(raised.value)

    world.run(body)
    world.close()


def test_what_is_too_much_to_keep_waits_where_a_receive_may_be_met_by_others(monkeypatch):
    monkeypatch.setattr(farandole.runner, "_memory_bytes", lambda: 6 << 20)
    with farandole.local(3, timeout_s=20) as world:
        large = contents(2, 0, 9, 700_001)
        began = threading.Event()

        def body(comm):
            if comm.rank == 2:
                work = comm.send(large, dst=0, tag=9, async_op=True)
                began.set()
                return work.wait()
            if comm.rank == 1:
                began.wait()
                return comm.send(contents(1, 0, 1, 5), dst=0, tag=1)
            began.wait()
            assert (comm.recv(np.zeros(5, dtype=np.int32), tag=1) == contents(1, 0, 1, 5)).all()
            return (comm.recv(np.zeros(700_001, dtype=np.int32), tag=9) == large).all()

        assert world.run(body)[0]


def test_what_was_received_counts_no_more_for_what_is_kept(monkeypatch):
    monkeypatch.setattr(farandole.runner, "_memory_bytes", lambda: 4 << 20)
    with farandole.local(2, timeout_s=20) as world:

        def body(comm):
            for round_ in range(20):  # in all far more than the bound
                if comm.rank == 0:
                    for tag in range(4):
                        comm.send(contents(0, 1, tag + round_, 50_000), dst=1, tag=tag)
                else:
                    for tag in reversed(range(4)):
                        got = comm.recv(np.zeros(50_000, dtype=np.int32), src=0, tag=tag)
                        assert (got == contents(0, 1, tag + round_, 50_000)).all()

        world.run(body)


# -- what arrives ------------------------------------------------------------------------------------------------------


def test_every_dtype_and_size(worlds):
    cases = [(dtype, count, i) for i, dtype in enumerate(DTYPES) for count in (0, 1, 13, 9001)]

    def body(comm):
        results = []
        for dtype, count, tag in cases:
            if comm.rank == 2:
                comm.send(data(2, count, dtype), dst=0, tag=tag)
            elif comm.rank == 0:
                results.append(comm.recv(np.zeros(count, dtype=numpy_dtype(dtype)), src=2, tag=tag))
        return results

    received = worlds(3).run(body)[0]
    for (dtype, count, _), result in zip(cases, received, strict=True):
        assert result.tobytes() == data(2, count, dtype).tobytes()


def random_messages(choice: random.Random, n: int, sizes: list[int]) -> list[tuple[int, int, int, int]]:
    """(src, dst, tag, count); those of a pair differ in their tags."""
    pairs = [(src, dst) for src in range(n) for dst in range(n) if src != dst]
    return [(*choice.choice(pairs), tag, choice.choice(sizes)) for tag in choice.sample(range(-50, 1000), 25)]


def exchange(comm, messages, seed: int, collectives: int = 0) -> None:
    """Post this rank's part in an order of its own, wait in another, and check what arrived."""
    choice = random.Random(f"{seed} {comm.rank}")
    mine = [message for message in messages if comm.rank in message[:2]]
    choice.shuffle(mine)
    works = []
    for src, dst, tag, count in mine:
        if src == comm.rank:
            works.append(comm.send(contents(src, dst, tag, count), dst, tag=tag, async_op=True))
        else:
            works.append(comm.recv(np.full(count, -1, np.int32), src, tag=tag, async_op=True))
    for i in range(collectives):
        assert comm.all_reduce(np.full(5000, i)).tolist() == [i * comm.world_size] * 5000
    for (src, dst, tag, count), work in choice.sample(list(zip(mine, works, strict=True)), len(mine)):
        result = work.wait()
        if src == comm.rank:
            assert (result, work.source) == (None, None)
        else:
            np.testing.assert_array_equal(result, contents(src, dst, tag, count))
            assert work.source == src


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_random_messages_in_any_order(worlds, n):
    for seed in range(4):
        messages = random_messages(random.Random(seed), n, [0, 1, 8, 9, 5000, 70_000, LARGE])
        worlds(n).run(exchange, messages, seed)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("kind", ["tight_worlds", "wired_worlds"])
def test_random_messages_through_channels_of_two_cache_lines(request, kind, n):
    get_world = request.getfixturevalue(kind)
    for seed in range(4):
        messages = random_messages(random.Random(seed), n, [0, 1, 8, 9, 16, 17, 500])
        get_world(n).run(exchange, messages, seed)


def test_messages_and_collectives_side_by_side(worlds):
    messages = random_messages(random.Random(99), 3, [0, 1, 5000, LARGE])
    worlds(3).run(exchange, messages, 99, 20)


@pytest.mark.parametrize("count", [0, 1, LARGE])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_all_may_send_first(worlds, n, count):
    """Around a ring, and both ways between two."""

    def body(comm):
        right, left = (comm.rank + 1) % n, (comm.rank - 1) % n
        for tag in range(3):
            assert comm.send(contents(comm.rank, right, tag, count), right, tag=tag) is None
            result = comm.recv(np.zeros(count, np.int32), left, tag=tag)
            np.testing.assert_array_equal(result, contents(left, comm.rank, tag, count))

    worlds(n).run(body)


def test_both_may_wait_for_their_sends_before_either_receives(worlds):
    def body(comm):
        peer = 1 - comm.rank
        works = [comm.send(contents(comm.rank, peer, t, LARGE), peer, tag=t, async_op=True) for t in range(3)]
        for work in works:
            work.wait()
        for tag in (2, 0, 1):
            result = comm.recv(np.zeros(LARGE, np.int32), peer, tag=tag)
            np.testing.assert_array_equal(result, contents(peer, comm.rank, tag, LARGE))

    worlds(2).run(body)


def test_tags_are_received_in_any_order(worlds):
    sizes = [LARGE, 3, 0, 50_000, 1, LARGE, 2]

    def body(comm):
        if comm.rank == 0:
            works = [comm.send(contents(0, 1, tag, n), 1, tag=tag, async_op=True) for tag, n in enumerate(sizes)]
            for work in works:
                work.wait()
        else:
            for tag in (6, 1, 5, 2, 0, 4, 3):
                result = comm.recv(np.zeros(sizes[tag], np.int32), 0, tag=tag)
                np.testing.assert_array_equal(result, contents(0, 1, tag, sizes[tag]))

    worlds(2).run(body)


def test_messages_with_one_tag_keep_their_order(worlds):
    def body(comm):
        counts = [(i * 977) % 9000 for i in range(100)]
        if comm.rank == 0:
            works = [comm.send(contents(0, 1, i, n), 1, async_op=True) for i, n in enumerate(counts)]
        else:
            works = [comm.recv(np.zeros(n, np.int32), 0, async_op=True) for n in counts]
        results = [work.wait() for work in works]
        if comm.rank == 1:
            for i, result in enumerate(results):
                np.testing.assert_array_equal(result, contents(0, 1, i, counts[i]))

    worlds(2).run(body)


def test_a_thousand_small_ones_at_once(worlds):
    def body(comm):
        peer = 1 - comm.rank
        received = np.zeros((1000, 2), np.int32)
        works = []
        for tag in range(1000):
            works.append(comm.recv(received[tag], peer, tag=tag, async_op=True))
            works.append(comm.send(contents(comm.rank, peer, tag, 2), peer, tag=tag, async_op=True))
        for work in works:
            work.wait()
        np.testing.assert_array_equal(received, [contents(peer, comm.rank, tag, 2) for tag in range(1000)])

    worlds(2).run(body)


@pytest.mark.parametrize("count", [1, 60_000])
def test_any_source(worlds, count):
    def body(comm):
        if comm.rank:
            for i in range(5):
                comm.send(contents(comm.rank, 0, i, count), 0, tag=7)
            return comm.send(contents(comm.rank, 0, 9, 3), 0, tag=8)
        last = [comm.recv(np.zeros(3, np.int32), tag=8, async_op=True) for _ in range(3)]
        seen = dict.fromkeys((1, 2, 3), 0)
        for _ in range(15):
            work = comm.recv(np.zeros(count, np.int32), None, tag=7, async_op=True)
            result = work.wait()
            np.testing.assert_array_equal(result, contents(work.source, 0, seen[work.source], count))
            seen[work.source] += 1
        assert seen == {1: 5, 2: 5, 3: 5}
        for work in last:
            np.testing.assert_array_equal(work.wait(), contents(work.source, 0, 9, 3))
        assert sorted(work.source for work in last) == [1, 2, 3]
        return None

    worlds(4).run(body)


def test_any_source_without_a_handle(worlds):
    def body(comm):
        if comm.rank == 1:
            comm.send(np.arange(4), 0)
            return None
        return comm.recv(np.zeros(4, int)).tolist()

    assert worlds(2).run(body)[0] == [0, 1, 2, 3]


def test_a_receive_for_one_rank_leaves_the_others_alone(worlds):
    def body(comm):
        if comm.rank:
            return comm.send(np.full(LARGE, comm.rank), 0)
        return [comm.recv(np.zeros(LARGE, int), src)[-1] for src in (2, 1)]

    assert worlds(3).run(body)[0] == [2, 1]


def test_arrays_of_all_kinds(worlds):
    def body(comm):
        if comm.rank == 0:
            comm.send(np.arange(24).reshape(4, 6)[::2, 1::2], 1)
            comm.send(torch.arange(12, dtype=torch.float32).reshape(3, 4).T, 1)
            comm.send(b"abcd", 1)
            comm.send(np.array(5.0), 1)
            return None
        strided = np.zeros((4, 6), int)
        comm.recv(strided[1::2, ::2], 0)
        transposed = torch.zeros(3, 4)
        result = comm.recv(transposed.T, 0, async_op=True).wait()
        assert result.shape == (4, 3)
        text = bytearray(4)
        assert comm.recv(text, 0) is text
        scalar = np.zeros(())
        comm.recv(scalar, 0)
        return strided.tolist(), transposed.tolist(), bytes(text), float(scalar)

    strided, transposed, text, scalar = worlds(2).run(body)[1]
    assert strided == [[0] * 6, [1, 0, 3, 0, 5, 0], [0] * 6, [13, 0, 15, 0, 17, 0]]
    assert transposed == torch.arange(12.0).reshape(3, 4).tolist()
    assert (text, scalar) == (b"abcd", 5.0)


def test_registered_memory_may_be_sent(worlds):
    def body(comm):
        array = comm.empty(LARGE, "int32")
        if comm.rank == 0:
            array[:] = contents(0, 1, 0, LARGE)
            comm.send(array, 1)
            array[:] = 0  # it is the sender's again
        else:
            np.testing.assert_array_equal(comm.recv(array, 0), contents(0, 1, 0, LARGE))

    worlds(2).run(body)


# -- beside other calls ------------------------------------------------------------------------------------------------


def test_what_is_pending_blocks_no_collective_and_no_collective_blocks_it(worlds):
    def body(comm):
        peer = 1 - comm.rank
        late = comm.recv(np.zeros(LARGE, np.int32), peer, tag=1, async_op=True)
        sent = comm.send(contents(comm.rank, peer, 0, LARGE), peer, async_op=True)
        total = np.ones(100)
        for _ in range(10):
            comm.all_reduce(total, "max")
            comm.barrier()
        in_background = [comm.barrier(async_op=True) for _ in range(3)]
        np.testing.assert_array_equal(comm.recv(np.zeros(LARGE, np.int32), peer), contents(peer, comm.rank, 0, LARGE))
        sent.wait()
        for work in in_background:
            work.wait()
        assert not late.is_done()
        comm.barrier()
        comm.send(contents(comm.rank, peer, 1, LARGE), peer, tag=1)
        np.testing.assert_array_equal(late.wait(), contents(peer, comm.rank, 1, LARGE))

    worlds(2).run(body)


def test_messages_arrive_while_the_rank_is_in_a_collective(worlds):
    arrived = threading.Event()

    def body(comm):
        if comm.rank == 0:
            work = comm.recv(np.zeros(LARGE, np.int32), 1, async_op=True)
            threading.Thread(target=lambda: (wait_until(work.is_done), arrived.set())).start()
            comm.barrier()
            return work.wait()
        comm.send(contents(1, 0, 0, LARGE), 0)
        arrived.wait()  # rank 0 is in the barrier, or on its way there
        comm.barrier()
        return None

    np.testing.assert_array_equal(worlds(2).run(body)[0], contents(1, 0, 0, LARGE))


def test_messages_between_two_are_nothing_that_all_must_agree_on():
    with farandole.local(3, timeout_s=20) as world:

        def body(comm):
            for i in range(100):
                if comm.rank < 2:
                    comm.send(np.full(3, i), 1 - comm.rank)
                    comm.recv(np.zeros(3, int), 1 - comm.rank)
            return comm.all_reduce(np.ones(1))[0]

        assert world.run(body) == [3, 3, 3]


def test_threads_of_one_rank_wait_side_by_side(worlds):
    def body(comm):
        peer = 1 - comm.rank
        failures = []

        def talk(thread: int) -> None:
            try:
                for i in range(30):
                    tag, count = thread * 100 + i, LARGE if i % 10 == 0 else i
                    if (comm.rank + thread) % 2:
                        comm.send(contents(comm.rank, peer, tag, count), peer, tag=tag)
                    result = comm.recv(np.zeros(count, np.int32), peer, tag=tag)
                    if (comm.rank + thread) % 2 == 0:
                        comm.send(contents(comm.rank, peer, tag, count), peer, tag=tag)
                    np.testing.assert_array_equal(result, contents(peer, comm.rank, tag, count))
            except BaseException as error:
                failures.append(error)
                comm.abort()

        threads = [threading.Thread(target=talk, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures

    worlds(2).run(body)


def test_they_are_counted():
    with farandole.local(2, timeout_s=20) as world:

        def body(comm):
            if comm.rank == 0:
                for _ in range(3):
                    comm.send(np.ones(1000, "f4"), 1)
            else:
                comm.recv(np.ones(1000, "f4"), 0)
                comm.recv(np.ones(1000, "f4"), 0, tag=0, async_op=True).wait()
                comm.recv(np.ones(1000, "f4"))
            return comm.stats()

        (sent,), (received,) = world.run(body)
    assert (sent.collective, sent.calls, sent.bytes_sent, sent.bytes_received) == ("send", 3, 12_000, 0)
    assert (received.collective, received.calls, received.bytes_sent) == ("recv", 3, 0)
    assert (received.bytes_received, received.payload_bytes) == (12_000, 12_000)


# -- their memory ------------------------------------------------------------------------------------------------------


def test_buffers_are_let_go_once_a_message_is_done_whether_or_not_anybody_waits():
    with farandole.local(2, timeout_s=20) as world:
        first, second = world
        pending = second.recv(np.zeros(1), 0, tag=99, async_op=True)  # takes longer than all others
        gone = []
        for tag in range(50):
            array, target = np.ones(10), np.zeros(10)
            gone += [weakref.ref(array), weakref.ref(target)]
            first.send(array, 1, tag=tag, async_op=True)
            work = second.recv(target, 0, tag=tag, async_op=True)
            del array, target
            if tag % 2:
                assert work.wait().tolist() == [1] * 10
            else:
                wait_until(work.has_ended)
            del work
        first.send(np.ones(1), 1, tag=99)
        assert pending.wait().tolist() == [1]
        for comm in world:
            for _ in range(100):
                comm._runner._settle_some_messages()
            assert not comm._runner._messages
        gc.collect()
        assert [reference for reference in gone if reference() is not None] == []


def test_a_dropped_handle_ends_nothing(worlds):
    def body(comm):
        peer = 1 - comm.rank
        target = np.zeros(LARGE, np.int32)
        comm.recv(target, peer, async_op=True)
        comm.send(contents(comm.rank, peer, 0, LARGE), peer, async_op=True)
        gc.collect()
        comm.send(np.ones(1), peer, tag=1)
        comm.recv(np.ones(1), peer, tag=1)  # comes behind the large one
        np.testing.assert_array_equal(target, contents(peer, comm.rank, 0, LARGE))

    worlds(2).run(body)


# -- when they fail ----------------------------------------------------------------------------------------------------


def raises_on_all(n, body, kind, message):
    """Each rank must raise ``kind`` with ``message``, in ``body`` or in the next call. Returns the texts."""
    texts = []

    def until_it_is_told(comm):
        body(comm)
        comm.barrier()

    def guarded(comm):
        with pytest.raises(kind, match=message) as caught:
            until_it_is_told(comm)
        texts.append(str(caught.value))
        with pytest.raises(kind, match=message):  # an aborted communicator says so again
            comm.send(np.ones(1), (comm.rank + 1) % n)

    with farandole.local(n, timeout_s=20) as world:
        world.run(guarded)
    return texts


MISFITS = {
    "size": (np.ones(2), np.ones(3), "send(2 x float64, dst=1, tag=7)", "recv(3 x float64, src=0, tag=7)"),
    "dtype": (np.ones(2), np.ones(2, "i8"), "send(2 x float64, dst=1, tag=7)", "recv(2 x int64, src=0, tag=7)"),
    "large": (
        np.ones(LARGE, "i4"),
        np.ones(1),
        f"send({LARGE} x int32, dst=1, tag=7)",
        "recv(1 x float64, src=0, tag=7)",
    ),
    "empty": (np.ones(0), np.ones(1), "send(0 x float64, dst=1, tag=7)", "recv(1 x float64, src=0, tag=7)"),
}


@pytest.mark.parametrize("case", MISFITS)
@pytest.mark.parametrize("way", ["posted first", "sent first", "unexpected"])
def test_a_message_that_does_not_fit_is_told_on_both_ranks(case, way):
    sent, received, send_text, recv_text = MISFITS[case]
    sent_something, is_posted = threading.Event(), threading.Event()

    def body(comm):
        if comm.rank == 2:
            return
        if comm.rank == 0:
            if way == "posted first":
                is_posted.wait()
            work = comm.send(sent, 1, tag=7, async_op=True)
            comm.send(np.ones(1), 1, tag=8, async_op=True)
            sent_something.set()
            work.wait()
            return
        if way == "posted first":
            work = comm.recv(received.copy(), 0, tag=7, async_op=True)
            is_posted.set()
            work.wait()
        sent_something.wait()
        if way == "unexpected":
            comm.recv(np.ones(1), 0, tag=8)
        comm.recv(received.copy(), 0, tag=7)

    for text in raises_on_all(3, body, CollectiveMismatchError, "different calls: what rank 0 sent is not"):
        assert f"    rank 0: {send_text}" in text
        assert f"    rank 1: {recv_text}" in text


def test_a_misfit_that_the_sender_could_not_see_is_told_when_it_closes():
    with farandole.local(2, timeout_s=20) as world:
        world[0].send(np.ones(2), 1)
        with pytest.raises(CollectiveMismatchError, match="what rank 0 sent is not"):
            world[1].recv(np.ones(3), 0)
        with pytest.raises(CollectiveMismatchError, match="what rank 0 sent is not"):
            world[0].close()


def test_a_misfit_in_a_group_gives_the_ranks_of_the_job():
    def body(comm):
        group = comm.split(comm.rank % 2)
        if comm.rank % 2 == 0:
            with group:
                return
        if group.rank == 0:
            group.send(np.ones(3), 1)
        with pytest.raises(CollectiveMismatchError, match=r"ranks of a group; in the job they are 1, 3\."):
            group.recv(np.ones(4), 1 - group.rank)

    with farandole.local(4, timeout_s=20) as world:
        world.run(body)


LATE = {
    "recv": (lambda c: c.recv(np.ones(4), src=1, timeout=0.1), r"rank 1 has not sent, in recv\(4 x float64, src=1\)"),
    "any": (lambda c: c.recv(np.ones(4), tag=3, timeout=0.1), r"no rank has sent, in recv\(.*, src=None, tag=3\)"),
    "send": (lambda c: c.send(np.ones(LARGE), 1, timeout=0.1), rf"rank 1 has not received, in send\({LARGE} x"),
    "async": (lambda c: c.recv(np.ones(4), 1, timeout=0.1, async_op=True).wait(), "rank 1 has not sent"),
}


@pytest.mark.parametrize("case", LATE)
def test_a_timeout_names_who_was_waited_for(case):
    call, message = LATE[case]

    def body(comm):
        if comm.rank == 0:
            comm.recv(np.ones(1), 1, tag=55, async_op=True)  # has more time
            call(comm)
        else:
            wait_until(lambda: comm.aborted)

    for text in raises_on_all(2, body, CollectiveTimeoutError, message):
        assert "the timeout of 0.1 s" in text


def test_a_timeout_with_nobody_waiting():
    with farandole.local(2, timeout_s=20) as world:
        work = world[0].recv(np.ones(4), 1, timeout=0.05, async_op=True)
        wait_until(work.has_ended)
        with pytest.raises(CollectiveTimeoutError, match="rank 1 has not sent"):
            work.wait()


def test_waiting_may_end_before_the_message_does(worlds):
    def body(comm):
        if comm.rank == 0:
            work = comm.recv(np.zeros(3), 1, async_op=True)
            with pytest.raises(CollectiveTimeoutError, match=r"recv on rank 0 is not done after 0\.05 s; it goes on"):
                work.wait(0.05)
            assert (work.source, work.is_done()) == (None, False)
            comm.barrier()
            return work.wait().tolist()
        comm.barrier()
        return comm.send(np.ones(3), 0)

    assert worlds(2).run(body)[0] == [1, 1, 1]


@pytest.mark.parametrize("src", [1, None])
def test_abort_ends_messages_on_all_ranks(src):
    def body(comm):
        work = comm.recv(np.ones(4), src if comm.rank == 0 else 0, async_op=True)
        if comm.rank == 1:
            threading.Timer(0.05, comm.abort).start()
        work.wait()

    raises_on_all(2, body, CommunicatorClosedError, "rank 1 aborted")


def test_a_rank_that_closed_is_lost_to_messages():
    with farandole.local(3, timeout_s=20) as world:

        def body(comm):
            if comm.rank == 2:
                comm.send(np.ones(3), 0, tag=1)
                return comm.close()
            if comm.rank == 1:
                return comm.close()
            assert comm.recv(np.zeros(3), tag=1).tolist() == [1] * 3  # sent before it closed
            with pytest.raises(
                PeerLostError, match=r"rank 2 closed its communicator .* send\(3 x float64, dst=0, tag=1"
            ):
                comm.recv(np.ones(1))  # nobody is left
            return None

        world.run(body)


def test_closing_with_messages_on_their_way_warns_and_aborts():
    with farandole.local(2, timeout_s=20) as world:
        works = [world[0].recv(np.ones(1), 1, async_op=True), world[0].send(np.ones(LARGE), 1, async_op=True)]
        with pytest.warns(RuntimeWarning, match="2 background calls still wait"):
            world[0].close()
        for work in works:
            with pytest.raises(CommunicatorClosedError):
                work.wait()
        with pytest.raises(CommunicatorClosedError, match="rank 0 aborted"):
            world[1].recv(np.ones(1), 0)


ARGUMENTS = {
    "itself": (lambda c: c.send(np.zeros(2), dst=c.rank), "which is this rank itself"),
    "from itself": (lambda c: c.recv(np.zeros(2), src=c.rank), "which is this rank itself"),
    "no rank": (lambda c: c.recv(np.zeros(2), src=2), r"src is 2; the ranks .* 0\.\.1"),
    "no dst": (lambda c: c.send(np.zeros(2), None), "dst is None"),
    "a text for a tag": (lambda c: c.send(np.zeros(2), 1 - c.rank, tag="a"), "tag is 'a'"),
    "a tag of more than 64 bits": (lambda c: c.recv(np.zeros(2), tag=2**63), "tag is 9223372036854775808"),
    "no time": (lambda c: c.recv(np.zeros(2), 1 - c.rank, timeout=0), "timeout is 0"),
    "read-only": (lambda c: c.recv(b"abc", 1 - c.rank), "read-only"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_what_can_never_work_is_refused_at_once(worlds, case):
    call, message = ARGUMENTS[case]
    with pytest.raises(ArgumentError, match=message):
        call(worlds(2)[0])


def test_there_is_no_other_rank_in_a_world_of_one(worlds):
    with pytest.raises(ArgumentError, match="there is no other rank to receive from"):
        worlds(1)[0].recv(np.zeros(1))


@pytest.mark.parametrize("tag", [-(2**63), 2**63 - 1])
def test_tags_of_64_bits(worlds, tag):
    def body(comm):
        return comm.recv(np.zeros(1), 1, tag=tag).tolist() if comm.rank == 0 else comm.send(np.ones(1), 0, tag=tag)

    assert worlds(2).run(body)[0] == [1]


# -- in processes ------------------------------------------------------------------------------------------------------


def run_ranks(tmp_path, n: int, body: str) -> subprocess.CompletedProcess:
    script = tmp_path / "ranks.py"
    head = "import os, signal, sys, threading, numpy as np, farandole\ncomm = farandole.init(timeout_s=50)\n"
    script.write_text(head + textwrap.dedent(body))
    command = [sys.executable, "-m", "farandole", "run", "--prefix", "-n", str(n), str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=JOIN_S, check=False)


def test_between_processes(tmp_path):
    done = run_ranks(
        tmp_path,
        3,
        """
        x = np.arange(3_000_000) + comm.rank
        y = np.zeros_like(x)
        for i in range(3):
            work = comm.recv(y, async_op=True)
            comm.send(x, (comm.rank + 1) % 3)
            work.wait()
            assert work.source == (comm.rank - 1) % 3
            assert (y == np.arange(3_000_000) + work.source).all()
            comm.barrier()
        """,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "call",
    [
        "comm.recv(np.ones(4), 1)",
        "comm.recv(np.ones(4), 1, async_op=True).wait()",
        "comm.send(np.ones(1_000_000), 1)",
        "comm.recv(np.ones(4))",
    ],
)
def test_a_rank_that_dies_is_named(call):
    """Without the launcher, which would end the other rank."""
    code = f"""
import os, signal, numpy as np, farandole
comm = farandole.init(timeout_s=50)
comm.barrier()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    {call}
except farandole.PeerLostError as error:
    print(error)
"""
    server = StoreServer(("127.0.0.1", 0), b"of this test")
    meeting = {
        "WORLD_SIZE": "2",
        "FARANDOLE_RENDEZVOUS": "{}:{}".format(*server.address),
        "FARANDOLE_SECRET": "of this test",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, **meeting, "RANK": rank}, stdout=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    try:
        said = [rank.communicate(timeout=JOIN_S)[0] for rank in ranks]
    finally:
        server.close()
    assert said[0].startswith("rank 1 ended while others needed it; its last call was barrier()")
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL]


def test_ctrl_c_while_waiting_for_a_handle_leaves_the_message_alone(tmp_path):
    done = run_ranks(
        tmp_path,
        2,
        """
        if comm.rank == 0:
            work = comm.recv(np.zeros(3), 1, async_op=True)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                work.wait()
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            comm.barrier()
            print(work.wait(), flush=True)
        else:
            comm.barrier()
            comm.send(np.ones(3), 0)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0] interrupted\n[0] [1. 1. 1.]\n"


@pytest.mark.parametrize("end", ["abort", "close"])
def test_a_signal_handler_may_end_the_message_that_it_interrupts(tmp_path, end):
    done = run_ranks(
        tmp_path,
        2,
        f"""
        if comm.rank == 0:
            signal.signal(signal.SIGUSR1, lambda *_: comm.{end}())
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        try:
            comm.recv(np.zeros(3), 1 - comm.rank)
        except farandole.CommunicatorClosedError as error:
            print(error, flush=True)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "[1] rank 0 aborted the communicator\n" in done.stdout
    assert done.stdout.count("\n") == 2


def test_a_forked_child_leaves_the_messages_of_its_parent_alone():
    with farandole.local(2, timeout_s=20) as world:
        work = world[0].recv(np.zeros(3), 1, async_op=True)
        child = os.fork()
        if child == 0:
            code = 9
            try:
                work.wait()
            except CommunicatorClosedError:
                code = 0
            finally:
                del work
                world.close()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert status == 0
        world[1].send(np.ones(3), 0)
        assert work.wait().tolist() == [1, 1, 1]
