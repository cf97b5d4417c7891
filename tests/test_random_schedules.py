"""Random schedules: whatever is proved must also run, and give what numpy gives, on sizes of all kinds.

The schedules wander: chunks are copied through scratch slots at random, which are used again for other chunks, of other
sizes; at the end each rank gets what it lacks from anyone who has it. Most are proved, the others must be refused.
"""

from __future__ import annotations

import mmap
import random
import tempfile

import numpy as np
import pytest

from farandole import ArgumentError, Schedule, VerificationError
from farandole.collectives import promise_of

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "gather", "scatter", "all_to_all")
SCHEDULES_PER_SEED = 40


def random_schedule(choice: random.Random) -> Schedule:
    n = choice.randrange(2, 6)
    collective = choice.choice(COLLECTIVES)
    num_chunks, num_scratch = n * choice.choice([1, 2]), choice.randrange(1, 4)
    root = choice.randrange(n) if collective in ("broadcast", "gather", "scatter") else 0
    promise = promise_of(Schedule(collective, n, num_chunks, [], num_scratch=num_scratch, root=root))
    held = {(rank, slot): (chunk, 1 << rank) for (rank, slot), chunk in promise.before.items()}
    rows: list[tuple[int, ...]] = []
    step = 0
    for step in range(choice.randrange(8)):
        moved = {}
        for _ in range(choice.randrange(1, 2 * n)):
            (src, src_slot), dst = choice.choice(list(held)), choice.randrange(n)
            place = (dst, num_chunks + choice.randrange(num_scratch))
            if place not in moved and not (src == dst and (src, src_slot) in moved):
                rows.append((step, src, src_slot, *place, 0))
                moved[place] = held[src, src_slot]
        held |= moved
    wanted = []
    for place, (chunk, ranks) in promise.after.items():
        whole = (chunk, sum(1 << rank for rank in ranks))
        if held.get(place) != whole:
            parts = [whole] if whole in held.values() else [(chunk, 1 << rank) for rank in ranks]
            sources = [choice.choice([p for p, value in held.items() if value == part]) for part in parts]
            wanted.append((place, sources))
    choice.shuffle(wanted)
    while wanted:
        step += 1
        now, wanted = np.split(np.array(wanted, dtype=object), [choice.randrange(1, len(wanted) + 1)])
        wanted = wanted.tolist()
        rows.extend((step, *src, *place, int(i > 0)) for place, sources in now for i, src in enumerate(sources))
    return Schedule(collective, n, num_chunks, rows, num_scratch=num_scratch, root=root)


def plain_numbers(rank: int, count: int, salt: int = 0) -> np.ndarray:
    return (np.arange(count) * 7 + rank * 1_000_003 + salt * 31) % 100_003


def run(comm, schedule: Schedule, counts: list[int], in_place: bool, registered: int = 0) -> np.ndarray | None:
    """The collective of ``schedule``, on parts of ``counts`` elements, or that many in all; in registered memory on
    the ranks whose bit is set."""
    rank, n, root, total = comm.rank, comm.world_size, schedule.root, sum(counts)

    def numbers(*which: int) -> np.ndarray:
        given = plain_numbers(*which)
        if registered >> rank & 1:
            given, plain = comm.empty(given.shape, given.dtype), given
            given[:] = plain
        return given

    start = sum(counts[:rank])
    mine = numbers(rank, total)
    if schedule.collective == "all_reduce":
        return comm.all_reduce(mine, out=mine if in_place else np.zeros_like(mine), algorithm=schedule)
    if schedule.collective == "reduce_scatter":
        out = mine[start : start + counts[rank]] if in_place else None
        return comm.reduce_scatter(mine, out=out, counts=counts, algorithm=schedule)
    if schedule.collective == "broadcast":
        return comm.broadcast(mine, root, algorithm=schedule)
    if schedule.collective in ("all_gather", "gather"):
        whole = np.zeros(total, dtype=np.int64)
        own = whole[start : start + counts[rank]] if in_place else np.zeros(counts[rank], dtype=np.int64)
        own[...] = numbers(rank, counts[rank])
        if schedule.collective == "all_gather":
            return comm.all_gather(own, out=whole, counts=counts, algorithm=schedule)
        return comm.gather(own, root, out=whole, counts=counts, algorithm=schedule)
    if schedule.collective == "scatter":
        out = np.zeros(counts[rank], dtype=np.int64)
        return comm.scatter(mine if rank == root else None, root, out=out, counts=counts, algorithm=schedule)
    if in_place:
        mine = np.concatenate([numbers(rank, counts[0], peer) for peer in range(n)])
        return comm.all_to_all(mine, out=mine, algorithm=schedule)
    sends, receives = ([counts[(rank + peer) % n] for peer in range(n)],) * 2  # from i to j: counts[(i + j) % n]
    mine = np.concatenate([numbers(rank, sends[peer], peer) for peer in range(n)])
    try:
        return comm.all_to_all(mine, counts=sends, output_counts=receives, algorithm=schedule)
    except ArgumentError:  # all ranks raise it, or none does: they have the same counts, in other orders
        return None


def expected(schedule: Schedule, rank: int, counts: list[int], in_place: bool) -> np.ndarray | None:
    n, root, total = schedule.world_size, schedule.root, sum(counts)
    part = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    reduced = sum(plain_numbers(peer, total) for peer in range(n))
    gathered = np.concatenate([plain_numbers(peer, counts[peer]) for peer in range(n)])
    return {
        "all_reduce": reduced,
        "reduce_scatter": reduced[part],
        "broadcast": plain_numbers(root, total),
        "all_gather": gathered,
        "gather": gathered if rank == root else None,
        "scatter": plain_numbers(root, total)[part],
        "all_to_all": np.concatenate(
            [plain_numbers(peer, counts[0 if in_place else (rank + peer) % n], rank) for peer in range(n)]
        ),
    }[schedule.collective]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_proved_runs_and_is_right(worlds, tight_worlds, mapped_worlds, wired_worlds, seed):
    choice = random.Random(seed)
    get_world = (worlds, tight_worlds, mapped_worlds, wired_worlds)[seed % 4]
    num_run = 0
    for number in range(SCHEDULES_PER_SEED):
        schedule = random_schedule(choice)
        n = schedule.world_size
        counts = [choice.choice([0, 1, 3, 7000, choice.randrange(60_000)]) for _ in range(n)]
        in_place = choice.random() < 0.5
        registered = choice.randrange(1 << n) if seed % 4 >= 2 else 0
        try:
            results = get_world(n).run(run, schedule, counts, in_place, registered)
        except VerificationError:
            continue
        num_run += 1
        for rank, result in enumerate(results):
            what = f"seed {seed} number {number}: {schedule}, rank {rank}, counts {counts}, in place: {in_place}, "
            what += f"registered: {registered:b}"
            wanted = expected(schedule, rank, counts, in_place)
            if schedule.collective == "all_to_all" and not in_place and result is None:
                continue  # refused for its counts
            assert (result is None) == (wanted is None), what
            assert wanted is None or np.array_equal(result, wanted), what
    assert num_run > SCHEDULES_PER_SEED / 4


# Proved once, and stuck as soon as the chunks that chain were longer than a few segments.
CHAINED = Schedule(
    "reduce",
    3,
    2,
    [
        (0, 0, 0, 0, 2, 0),
        (0, 0, 1, 0, 3, 0),
        (1, 0, 2, 1, 0, 1),
        (1, 2, 0, 1, 0, 1),
        (1, 0, 3, 0, 2, 0),
        (1, 2, 0, 0, 3, 0),
        (2, 0, 1, 1, 1, 1),
        (2, 2, 1, 1, 1, 1),
    ],
    num_scratch=2,
    root=1,
)


def test_a_circle_of_segments_that_waits_for_an_end_is_refused(tight_worlds):
    with pytest.raises(VerificationError, match="deadlock once chunks are long enough to fill their channels") as error:
        tight_worlds(3).run(lambda comm: comm.reduce(plain_numbers(comm.rank, 4), 1, algorithm=CHAINED))
    assert error.value.rank in (0, 1, 2)


def test_a_chunk_may_pass_through_a_slot_that_is_smaller(worlds):
    """Rank 1 keeps chunk 0 for a while in the slot of chunk 1, whose room in the output is one element."""
    rows = [(0, 0, 0, 1, 0, 0), (0, 1, 1, 0, 1, 0), (1, 1, 1, 1, 2, 0), (2, 1, 0, 1, 1, 0), (3, 1, 2, 1, 1, 0)]
    schedule = Schedule("all_gather", 2, 2, rows, num_scratch=1)

    def body(comm):
        memory = np.full(64, -7)
        comm.all_gather(
            plain_numbers(comm.rank, [10, 1][comm.rank]), out=memory[:11], counts=[10, 1], algorithm=schedule
        )
        return memory

    wanted = np.concatenate([plain_numbers(0, 10), plain_numbers(1, 1), np.full(53, -7)])
    for memory in worlds(2).run(body):
        assert np.array_equal(memory, wanted)


def test_the_root_of_a_broadcast_is_never_written(worlds):
    """Its array may lie in memory that cannot be written to, even if the schedule sends it its own data back."""
    schedule = Schedule("broadcast", 2, 1, [(0, 0, 0, 1, 0, 0), (1, 1, 0, 0, 0, 0)])
    given = plain_numbers(0, 5000)
    with tempfile.TemporaryFile() as file:
        file.write(given.tobytes())
        file.flush()
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=given.dtype)
        copy = worlds(2).run(
            lambda comm: comm.broadcast(mapped if comm.rank == 0 else np.zeros_like(given), algorithm=schedule)
        )[1]
    assert np.array_equal(copy, given)


def test_a_scratch_slot_that_holds_parts_of_different_sizes_is_refused(worlds):
    """Rank 0 keeps first what is for rank 1 in the scratch slot, and then what is for itself."""
    rows = [(0, 0, 3, 1, 1, 0), (0, 0, 2, 0, 4, 0), (0, 1, 0, 0, 2, 0), (0, 1, 1, 0, 3, 0)]
    rows += [(1, 0, 4, 1, 0, 0), (2, 0, 0, 0, 4, 0), (3, 0, 4, 0, 0, 0)]
    schedule = Schedule("all_to_all", 2, 4, rows, num_scratch=1)

    def body(comm):
        counts = [30, 5] if comm.rank == 0 else [5, 30]
        with pytest.raises(ArgumentError, match="keeps one chunk after the other in a scratch slot"):
            comm.all_to_all(np.zeros(35), counts=counts, output_counts=counts, algorithm=schedule)
        return comm.all_to_all(plain_numbers(comm.rank, 40), algorithm=schedule)

    for rank, result in enumerate(worlds(2).run(body)):
        wanted = [plain_numbers(peer, 40)[rank * 20 : rank * 20 + 20] for peer in range(2)]
        assert np.array_equal(result, np.concatenate(wanted))
