"""Very many calls, very many communicators, and very large buffers.

A million small collectives: of random kinds, sizes, dtypes, operations, roots and groups, some of them in the
background; not one element may be wrong. Each rank has a *pool* of numbers per dtype. A call takes a run of it that
begins at a random offset; as a collective treats all positions alike, what must come out is a run of results that the
reference computes once, for whole pools. So results are cheap to check, and hard to guess:

- all numbers in the pools of all ranks differ, if the dtype has room for that: what is left of another call, comes from
  another rank or is off by some elements is wrong in every element;
- where a result goes lies the complement of what is expected, bit by bit, or in place the input: what is not written is
  wrong;
- every byte is compared; at the end those of the pools, too, for no call may write to its input.
"""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from reference import PAIRS, reduced

import farandole
from farandole import Communicator, Work

# -- a million small collectives ---------------------------------------------------------------------------------------

PROCESSES, THREADS, TIGHT = {2: 500_000, 4: 300_000}, {5: 100_000}, {3: 100_000}
"""By number of ranks, how many collectives. Each is counted once, however many ranks take part in it."""

NUM_KINDS = 1000
SMALL, LARGE = 64, 3000  # elements of the largest buffer of a rank; one kind in ten is large
POOL = 20_000
DTYPES = ("int8", "uint8", "int16", "int32", "uint32", "int64", "bool", "float16", "float32", "float64", "complex64")
EXACT = [(dtype, op) for dtype, op in PAIRS if dtype in DTYPES and (op != "prod" or np.dtype(dtype).kind in "iub")]
COMPLEMENT = bytes(255 - byte for byte in range(256))
BURST, BURSTS = 12, 1 / 16  # calls in a burst, some of them in the background; how much of all are bursts

CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda comm, kind, given, out, more: comm.all_reduce(given, kind.op, out=out, **more),
    "reduce_scatter": lambda comm, kind, given, out, more: comm.reduce_scatter(given, kind.op, out=out, **more),
    "all_gather": lambda comm, kind, given, out, more: comm.all_gather(given, out=out, **more),
    "broadcast": lambda comm, kind, given, out, more: comm.broadcast(given, kind.root, **more),
    "reduce": lambda comm, kind, given, out, more: comm.reduce(given, kind.root, kind.op, out=out, **more),
    "gather": lambda comm, kind, given, out, more: comm.gather(given, kind.root, out=out, **more),
    "scatter": lambda comm, kind, given, out, more: comm.scatter(given, kind.root, out=out, **more),
    "all_to_all": lambda comm, kind, given, out, more: comm.all_to_all(given, out=out, **more),
    "barrier": lambda comm, kind, given, out, more: comm.barrier(**more),
}


class Kind(NamedTuple):
    """What a call is but for its data; the same on all ranks.

    Attributes:
        ranks: of the group that it runs in.
        collective, dtype, op, root: see `farandole`.
        length: elements of each part; of the whole where there are no parts.
        in_place: whether the result replaces the input, where that can be.
    """

    ranks: tuple[int, ...]
    collective: str
    dtype: str
    op: str
    root: int
    length: int
    in_place: bool


def groups_of(world_size: int) -> list[tuple[int, ...]]:
    """The world, the world with its ranks in another order, and groups that overlap."""
    everyone = tuple(range(world_size))
    return list(dict.fromkeys([everyone, everyone[::-1], everyone[:2], everyone[1:], everyone[::2]]))


def random_kinds(world_size: int) -> list[Kind]:
    choice = random.Random(world_size)
    kinds = []
    for _ in range(NUM_KINDS):
        ranks, collective = choice.choice(groups_of(world_size)), choice.choice(list(CALLS))
        length = choice.randrange((SMALL if choice.random() < 0.9 else LARGE) + 1)
        if collective not in ("all_reduce", "broadcast", "reduce"):
            length //= len(ranks)
        in_place = collective in ("all_reduce", "reduce") and choice.random() < 0.5
        kinds.append(Kind(ranks, collective, *choice.choice(EXACT), choice.randrange(len(ranks)), length, in_place))
    return kinds


@cache
def pools(world_size: int, dtype: str) -> np.ndarray:
    """The numbers of all ranks, one row each."""
    numbers = np.random.default_rng(DTYPES.index(dtype)).permutation(world_size * (POOL + LARGE))
    if dtype == "bool":
        values = numbers % 3 == 0
    elif np.dtype(dtype).kind in "iu":
        values = (numbers.astype(np.uint64) * 0x9E3779B9).view(np.int64)
    else:  # whole numbers: sums of them are exact
        values = numbers % 512 - 256.0 if dtype == "float16" else numbers - len(numbers) // 2
        values = values + 1j * values[::-1] if dtype == "complex64" else values
    return values.astype(dtype).reshape(world_size, -1)


@cache
def pool_bytes(world_size: int, dtype: str, rank: int) -> bytes:
    return pools(world_size, dtype)[rank].tobytes()


@cache
def result_bytes(world_size: int, dtype: str, op: str, ranks: tuple[int, ...]) -> bytes:
    """The reduction of the pools of ``ranks``."""
    parts = [pools(world_size, dtype)[rank] for rank in ranks]
    return reduced(parts, dtype, op)[0].astype(dtype).tobytes()


class Begun(NamedTuple):
    """A call: what it returned, where its result is or will be, and what that must be."""

    caller: Caller
    offset: int
    returned: Any
    memory: bytearray
    wanted: bytes


class Caller:
    """Makes calls of one kind on one rank, and checks what they give.

    Attributes:
        num_given: elements that go in, where any do.
        sources: what comes out is a run of each, `num_before` elements behind the offset.
    """

    def __init__(self, kind: Kind, comm: Communicator, world_size: int) -> None:
        self.kind, self.comm, self.call = kind, comm, CALLS[kind.collective]
        place, collective = comm.rank, kind.collective
        pool = partial(pool_bytes, world_size, kind.dtype)
        self.pool, self.pool_bytes = pools(world_size, kind.dtype)[kind.ranks[place]], pool(kind.ranks[place])
        has_parts, is_root = collective in ("reduce_scatter", "scatter", "all_to_all"), place == kind.root
        self.num_given = kind.length * (len(kind.ranks) if has_parts else 1)
        self.num_before = kind.length * place if has_parts else 0
        self.is_given = collective != "barrier" and (is_root or collective not in ("broadcast", "scatter"))
        self.sources: list[bytes] = []
        if collective in ("all_gather", "all_to_all") or (collective == "gather" and is_root):
            self.sources = [pool(rank) for rank in kind.ranks]
        elif collective == "scatter" or (collective == "broadcast" and not is_root):
            self.sources = [pool(kind.ranks[kind.root])]
        elif collective in ("all_reduce", "reduce_scatter") or (collective == "reduce" and is_root):
            self.sources = [result_bytes(world_size, kind.dtype, kind.op, kind.ranks)]

    def begin(self, offset: int, **more: bool) -> Begun:
        """Make the call on what begins at ``offset``."""
        dtype, itemsize = self.pool.dtype, self.pool.itemsize
        begin = (offset + self.num_before) * itemsize
        end = begin + self.kind.length * itemsize
        wanted = b"".join([source[begin:end] for source in self.sources])
        given = self.pool[offset : offset + self.num_given] if self.is_given else None
        out, memory = None, bytearray()
        if wanted and self.kind.in_place:
            memory = bytearray(self.pool_bytes[begin:end])
            given = np.frombuffer(memory, dtype)
        elif wanted:
            memory = bytearray(wanted.translate(COMPLEMENT))
            out = np.frombuffer(memory, dtype)
        elif self.sources:
            out = np.empty(0, dtype)
        if given is None and self.kind.collective == "broadcast":
            given, out = out, None
        return Begun(self, offset, self.call(self.comm, self.kind, given, out, more), memory, wanted)

    def require(self, begun: Begun) -> None:
        _, offset, _, memory, wanted = begun
        if memory != wanted:
            found, expected = np.frombuffer(memory, self.pool.dtype), np.frombuffer(wanted, self.pool.dtype)
            wrong = np.flatnonzero(np.frombuffer(memory, "u1") != np.frombuffer(wanted, "u1")) // self.pool.itemsize
            raise AssertionError(
                f"{self.kind}, offset {offset}, rank {self.comm.rank}: {len(set(wrong.tolist()))} of {len(found)} "
                f"elements wrong, first at {wrong[0]}: {found[wrong[0]]!r} in place of {expected[wrong[0]]!r}"
            )


def make_calls(comm: Communicator, num_calls: int) -> None:
    """``num_calls`` random collectives, the same on all ranks."""
    world_size, rank = comm.world_size, comm.rank
    groups: dict[tuple[int, ...], Any] = {tuple(range(world_size)): comm}
    for ranks in groups_of(world_size)[1:]:
        groups[ranks] = split(comm, ranks)
    own_groups = [group for group in groups.values() if group is not None]
    kinds = random_kinds(world_size)
    callers = [Caller(kind, groups[kind.ranks], world_size) if rank in kind.ranks else None for kind in kinds]
    choice = np.random.default_rng(world_size)
    which, offsets = choice.integers(NUM_KINDS, size=num_calls), choice.integers(POOL, size=num_calls)
    in_burst = np.repeat(choice.random(num_calls // BURST + 1) < BURSTS, BURST)[:num_calls]
    in_background = in_burst & (choice.random(num_calls) < 0.6)
    begun: list[Begun] = []
    num_begun, num_before = 0, num_finished(own_groups)
    for number, (kind, offset) in enumerate(zip(which.tolist(), offsets.tolist(), strict=True)):
        caller = callers[kind]
        if caller is not None:
            num_begun += 1
            if in_burst[number]:
                begun.append(caller.begin(offset, async_op=bool(in_background[number])))
            else:
                caller.require(caller.begin(offset))
        if begun and not in_burst[number]:
            settle(begun)
    settle(begun)
    assert num_finished(own_groups) - num_before == num_begun
    for caller in filter(None, callers):
        assert caller.pool.tobytes() == caller.pool_bytes, f"{caller.kind} wrote to its input"
    for group in own_groups[1:]:
        group.close()


def split(comm: Communicator, ranks: tuple[int, ...]) -> Communicator | None:
    """The group of ``ranks``, in this order."""
    return comm.split(0, ranks.index(comm.rank)) if comm.rank in ranks else comm.split(None)


def settle(begun: list[Begun]) -> None:
    """Wait for what was begun in the background, the last first, and check all."""
    while begun:
        call = begun.pop()
        if isinstance(call.returned, Work):
            call.returned.wait()
        call.caller.require(call)


def num_finished(groups: list[Communicator]) -> int:
    """As the engines have counted."""
    return sum(entry.calls for group in groups for entry in group.stats())


def run_processes(world_size: int, *arguments: object) -> None:
    """This file as a program of so many processes."""
    command = [sys.executable, "-m", "farandole", "run", "-n", world_size, __file__, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("world_size", PROCESSES)
def test_many_calls_of_processes(world_size):
    run_processes(world_size, "calls", PROCESSES[world_size])


@pytest.mark.parametrize("world_size", THREADS)
def test_many_calls_of_threads(worlds, world_size):
    worlds(world_size).run(make_calls, THREADS[world_size])


@pytest.mark.parametrize("world_size", TIGHT)
@pytest.mark.parametrize("kind", ["tight_worlds", "wired_worlds"])
def test_many_calls_in_tight_channels(request, kind, world_size):
    request.getfixturevalue(kind)(world_size).run(make_calls, TIGHT[world_size])


def test_they_are_a_million():
    assert sum(sum(calls.values()) for calls in (PROCESSES, THREADS, TIGHT)) == 1_000_000


# -- a thousand communicators ------------------------------------------------------------------------------------------

NUM_THREAD_ROUNDS, NUM_PROCESS_ROUNDS = 125, 500  # of 8 communicators; of 5, two of them in one process


def held() -> dict[str, int]:
    """How much this process has of what the kernel gives."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "mapped files": sum(int(mapping.split()[4]) != 0 for mapping in mappings),
        "mappings": len(mappings),
    }


def require_nothing_left(use: Callable[[int], None], num_rounds: int) -> None:
    """Compares what a fresh process has after ten rounds and after ``num_rounds`` more. Threads, which the kernel may
    list for a moment after they were joined, with those of the start; and malloc has mappings that come and go."""
    num_threads = held()["threads"]
    use(10)
    gc.collect()
    before = {**held(), "threads": num_threads}
    use(num_rounds)
    gc.collect()
    for _ in range(1000):
        if held()["threads"] == num_threads:
            break
        time.sleep(0.01)
    after = held()
    num_more = after.pop("mappings") - before.pop("mappings")
    assert after == before
    assert num_more < num_rounds / 10, f"{num_rounds} rounds left {num_more} mappings"


def acquire(comm: Communicator) -> None:
    """All that a communicator can have: a thread, memory of its own, and a view of that of others."""
    mine = comm.empty(100_000)
    mine[:] = comm.rank
    assert comm.all_reduce(mine, async_op=True).wait()[-1] == sum(range(comm.world_size))
    comm.barrier()


def use_groups(comm: Communicator, num_rounds: int) -> None:
    for ranks in ((2, 1, 0), (1, 2)) * num_rounds:
        group = split(comm, ranks)
        if group is not None:
            with group:
                acquire(group)


def use_worlds(num_rounds: int) -> None:
    for _ in range(num_rounds):
        with farandole.local(3) as world:
            world.run(acquire)
            world.run(use_groups, 1)


def test_a_thousand_communicators_of_threads_leave_nothing():
    run_processes(1, "worlds", NUM_THREAD_ROUNDS)


def test_a_thousand_communicators_of_processes_leave_nothing():
    run_processes(3, "groups", NUM_PROCESS_ROUNDS)


# -- more elements than 31 bits can count ------------------------------------------------------------------------------

HUGE = 2**31 + 1000
BLOCK = 2**20 - 3


def available_gib() -> float:
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) / 2**20


@cache
def block_of(rank: int, dtype: str) -> np.ndarray:
    limits = np.iinfo(dtype)
    return np.random.default_rng(rank).integers(limits.min, limits.max, BLOCK, dtype, endpoint=True)


def numbers_of(rank: int, dtype: str, start: int, count: int) -> Iterator[tuple[slice, np.ndarray]]:
    """The numbers of a rank from ``start`` on, some at a time: those of a block, plus another number for each block."""
    done = 0
    while done < count:
        block, within = divmod(start + done, BLOCK)
        part = block_of(rank, dtype)[within : within + count - done]
        yield slice(done, done + len(part)), part + np.array((2 * rank + 3) * block).astype(dtype)
        done += len(part)


def fill(array: np.ndarray, rank: int, start: int = 0) -> None:
    for where, part in numbers_of(rank, array.dtype.name, start, len(array)):
        array[where] = part


def require_sum(array: np.ndarray, ranks: tuple[int, ...], start: int = 0) -> None:
    for parts in zip(*(numbers_of(rank, array.dtype.name, start, len(array)) for rank in ranks), strict=True):
        where = parts[0][0]
        assert np.array_equal(array[where], sum(part for _, part in parts)), f"wrong in {where} of {len(array)}"


def huge_call(comm: Communicator, collective: str, dtype: str, is_registered: bool) -> None:
    rank, half = comm.rank, HUGE // 2
    array = comm.empty(HUGE, dtype) if is_registered else np.zeros(HUGE, dtype)
    halves = array[:half], array[half:]
    if collective == "all_gather":
        fill(halves[rank], rank, rank * half)
        comm.all_gather(halves[rank], out=array)
        for peer in range(2):
            require_sum(halves[peer], (peer,), peer * half)
        return
    if collective != "broadcast" or rank == 1:
        fill(array, rank)
    if collective == "all_reduce":
        comm.all_reduce(array)
        require_sum(array, (0, 1))
    elif collective == "broadcast":
        comm.broadcast(array, 1)
        require_sum(array, (1,))
    elif collective == "reduce_scatter":
        comm.reduce_scatter(array, out=halves[rank])
        require_sum(halves[rank], (0, 1), rank * half)
    else:
        comm.all_to_all(array, out=array)
        for peer in range(2):
            require_sum(halves[peer], (peer,), rank * half)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all"])
def test_more_elements_than_31_bits_can_count(collective):
    run_huge(collective, "int8")


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
def test_more_elements_than_31_bits_can_count_in_registered_memory(collective):
    run_huge(collective, "int8", is_registered=True)


def test_more_bytes_than_32_bits_can_count():
    run_huge("all_reduce", "int16")


def run_huge(collective: str, dtype: str, is_registered: bool = False) -> None:
    needed_gib = 8 * np.dtype(dtype).itemsize  # twice the buffers of the two ranks
    if available_gib() < needed_gib:
        pytest.skip(f"needs {needed_gib} GiB of memory, and {available_gib():.1f} GiB are available")
    with farandole.local(2) as world:
        world.run(huge_call, collective, dtype, is_registered)


if __name__ == "__main__":
    what, how_many = sys.argv[1], int(sys.argv[2])
    with farandole.init() as everyone:
        if what == "calls":
            make_calls(everyone, how_many)
        else:
            require_nothing_left(partial(use_groups, everyone) if what == "groups" else use_worlds, how_many)
