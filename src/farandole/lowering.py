"""Turns a proved schedule into one program per rank.

The rules, one per step of the schedule, for each rank:

1. What it sends becomes publications. Slots that it sends to every other rank in that step are published once, on its
   shared channel, and read by all; others once per reader.
2. All that arrives in one slot becomes one combination of all its operands, so that each block of memory passes once,
   and 16-bit floats are rounded once.
3. Slots that the collective promises but that never change are copied from input to output.

Order on a channel must be the same at both ends. A reader takes publications in the order of its combinations: by
step, then by their first transfer. A writer therefore publishes in the order of its *readers'* combinations. For
shared channels all readers must agree on that order; where they do not, that step falls back to a publication per
reader. Between hosts there are no shared channels at all.

What must wait for what follows from the places: a read waits for the last write, a write waits for the last write and
for all reads since. Which publications may travel mapped follows from that (`farandole.program_verifier.with_mapped`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from farandole.collectives import Promise, owner_of_chunk
from farandole.program import Combine, Local, Operation, Place, Program, Publish, Region, Remote
from farandole.program_verifier import with_mapped
from farandole.schedule import Schedule
from farandole.verifier import Assignment, Interpretation

__all__ = ["EVERYONE", "lower", "size_index"]

EVERYONE = -1
"""The reader of a publication that all other ranks read."""


def lower(interpretation: Interpretation, *, shared: bool = True) -> tuple[Program, ...]:
    """The programs of all ranks, from the execution that proved the schedule.

    Args:
        interpretation: what `farandole.verifier.verify` returned.
        shared: whether there are shared channels, which all ranks of one host can read.

    Returns:
        A program per rank, indexed by rank.
    """
    schedule = interpretation.schedule
    builders = [_Builder(interpretation, rank) for rank in range(schedule.world_size)]
    rows = schedule.rows.tolist()
    position = _arrival_positions(interpretation)
    for assignments in _by_step(interpretation.assignments):
        once_for_all = _shared_sources(schedule, rows, assignments) if shared else set()
        publications = [
            (position[index], index) for a in assignments for index in a.transfers if rows[index][1] != rows[index][3]
        ]
        published: set[tuple[int, int]] = set()
        for _, index in sorted(publications):
            _, src, slot, dst, _, _ = rows[index]
            if (src, slot) not in once_for_all:
                builders[src].publish(slot, interpretation.sent[index], dst)
            elif (src, slot) not in published:
                published.add((src, slot))
                builders[src].publish(slot, interpretation.sent[index], EVERYONE)
        for assignment in assignments:
            builders[assignment.rank].combine(assignment, rows, once_for_all)
    return with_mapped(tuple(builder.finish() for builder in builders))


def size_index(schedule: Schedule, chunk: int, rank: int) -> int:
    """Where a program of ``rank`` looks up how large chunk ``chunk`` is.

    Chunks are sized by their number. In all_to_all a rank knows the sizes of what it sends (first), of what it receives
    (next), and of what it passes on for others: one size per position in a part (last).
    """
    if schedule.collective != "all_to_all":
        return chunk
    src, slot = divmod(chunk, schedule.num_chunks)
    if src == rank:
        return slot
    per_part = schedule.num_chunks // schedule.world_size
    if owner_of_chunk(schedule, slot) == rank:
        return schedule.num_chunks + src * per_part + slot % per_part
    return 2 * schedule.num_chunks + slot % per_part


def _size_classes(schedule: Schedule) -> tuple[int, ...]:
    if schedule.collective != "all_to_all":
        return tuple(range(schedule.num_chunks))
    per_part = schedule.num_chunks // schedule.world_size
    return tuple(index % per_part for index in range(2 * schedule.num_chunks + per_part))


def _arrival_positions(interpretation: Interpretation) -> dict[int, tuple[int, int]]:
    """Per transfer, when its reader takes it: (its combination, its place in there)."""
    return {
        index: (order, place)
        for order, assignment in enumerate(interpretation.assignments)
        for place, index in enumerate(assignment.transfers)
    }


def _by_step(assignments: list[Assignment]) -> Iterable[list[Assignment]]:
    start = 0
    for end in range(1, len(assignments) + 1):
        if end == len(assignments) or assignments[end].step != assignments[start].step:
            yield assignments[start:end]
            start = end


def _shared_sources(schedule: Schedule, rows: list[list[int]], assignments: list[Assignment]) -> set[tuple[int, int]]:
    """The (rank, slot) pairs that this step publishes once for everyone."""
    if schedule.world_size <= 2:
        return set()
    readers: dict[tuple[int, int], list[int]] = {}
    for assignment in assignments:
        for index in assignment.transfers:
            _, src, slot, dst, _, _ = rows[index]
            if src != dst:
                readers.setdefault((src, slot), []).append(dst)
    everyone_else = schedule.world_size - 1
    shared = {s for s, ranks in readers.items() if len(ranks) == everyone_else and len(set(ranks)) == everyone_else}
    return shared if _readers_agree(rows, assignments, shared) else set()


def _readers_agree(rows: list[list[int]], assignments: list[Assignment], shared: set[tuple[int, int]]) -> bool:
    """Whether every reader takes each rank's shared publications in one and the same order."""
    order: dict[tuple[int, int], list[int]] = {}
    for assignment in assignments:
        for index in assignment.transfers:
            _, src, slot, dst, _, _ = rows[index]
            if src != dst and (src, slot) in shared:
                order.setdefault((src, dst), []).append(slot)
    agreed: dict[int, list[int]] = {}
    return all(agreed.setdefault(src, slots) == slots for (src, _), slots in order.items())


@dataclass
class _Places:
    """Who touched a place last: what a new reader and a new writer must wait for."""

    writer: int = -1
    readers: list[int] = field(default_factory=list)


class _Builder:
    """Builds one rank's program, operation by operation."""

    def __init__(self, interpretation: Interpretation, rank: int) -> None:
        self.schedule = interpretation.schedule
        self.rank = rank
        self.values = interpretation.values
        self.promise: Promise = interpretation.promise
        self.operations: list[Operation] = []
        self.places: dict[int, Place] = {}  # of the slots that were written: where what they hold is
        self.work_slots: dict[int, int] = {}
        self.touched: dict[tuple[Region, int], _Places] = {}

    def publish(self, slot: int, value: int, reader: int) -> None:
        place = self._current(slot)
        after = self._read(place, len(self.operations))
        self.operations.append(Publish(place, self._size(value), reader, after))

    def combine(self, assignment: Assignment, rows: list[list[int]], shared: set[tuple[int, int]]) -> None:
        operands: list[Remote | Local] = [Local(self._current(assignment.slot))] if assignment.keeps_old else []
        for index in assignment.transfers:
            _, src, slot, dst, _, _ = rows[index]
            operands.append(Local(self._current(slot)) if src == dst else Remote(src, (src, slot) in shared))
        place = self._home(assignment.slot, self.values.chunk[assignment.value])
        self._append_combine(place, assignment.value, operands, completes=assignment.completes)
        self.places[assignment.slot] = place

    def finish(self) -> Program:
        """Copy what is promised but was never written, and hand out the program."""
        for slot in range(self.schedule.num_chunks):
            if self._has_output(slot) and slot not in self.places:
                chunk = self.promise.before[self.rank, slot]
                operands: list[Remote | Local] = [Local(self._current(slot))]
                value = self.values.leaf(chunk, self.rank)
                self._append_combine(self._home(slot, chunk), value, operands, completes=False)
        return Program(
            rank=self.rank,
            world_size=self.schedule.world_size,
            operations=tuple(self.operations),
            num_work_slots=len(self.work_slots),
            size_classes=_size_classes(self.schedule),
        )

    def _append_combine(self, place: Place, value: int, operands: list[Remote | Local], *, completes: bool) -> None:
        index = len(self.operations)
        after: set[int] = set()
        for operand in operands:
            if isinstance(operand, Local):
                after.update(self._read(operand.place, index))
        after.update(self._write(place, index))
        after.discard(index)
        self.operations.append(Combine(place, self._size(value), tuple(operands), tuple(sorted(after)), completes))

    def _has_output(self, slot: int) -> bool:
        return (self.rank, slot) in self.promise.after and self.rank not in self.promise.read_only

    def _home(self, slot: int, chunk: int) -> Place:
        """Where ``chunk`` is kept when it arrives in ``slot``: in the output only if it belongs there, as each slot of
        the output has room for its own chunk and no other."""
        if self._has_output(slot) and self.promise.after[self.rank, slot][0] == chunk:
            return Place(Region.OUTPUT, slot)
        return Place(Region.WORK, self.work_slots.setdefault(slot, len(self.work_slots)))

    def _current(self, slot: int) -> Place:
        return self.places.get(slot, Place(Region.INPUT, slot))

    def _touch(self, place: Place) -> _Places:
        # Slot s of input and output may be one and the same memory.
        region = Region.WORK if place.region == Region.WORK else Region.INPUT
        return self.touched.setdefault((region, place.slot), _Places())

    def _read(self, place: Place, index: int) -> tuple[int, ...]:
        touch = self._touch(place)
        touch.readers.append(index)
        return (touch.writer,) if touch.writer >= 0 else ()

    def _write(self, place: Place, index: int) -> list[int]:
        touch = self._touch(place)
        # Whoever read since the last write has waited for that write already.
        waits = touch.readers or ([touch.writer] if touch.writer >= 0 else [])
        self.touched[Region.WORK if place.region == Region.WORK else Region.INPUT, place.slot] = _Places(index)
        return waits

    def _size(self, value: int) -> int:
        return size_index(self.schedule, self.values.chunk[value], self.rank)
