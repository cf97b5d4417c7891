"""Proves the programs that a schedule was lowered to.

The programs of all ranks are run on values (see `farandole.verifier`), each operation cut into segments, through
channels that hold only a few segments. One run proves every interleaving. An operation that could go on stays able to
go on until it does: nothing that another rank does takes room or data away from it. In such a system every run that
goes as far as it can takes the same actions (it is a marked graph, and those are confluent). So if this run ends, no
run deadlocks; if it stops early, every run does.

That is for chunks of a few segments. Chunks of any number of segments, each its own, are the matter of a second
argument. Let an operation *need* another if some segment of it waits for some segment of the other: a publication needs
the combinations that make room, a combination the publications that it takes, and each what it runs after or comes next
to on a channel; after a publication that may travel mapped, also the combinations that take it. Operations that need
one another in a circle must go on side by side, segment by segment. They can, unless one of them waits for the *end* of
another of the circle: then, for chunks long enough to fill the channels, none of them ever ends. So no circle may hold
such a wait; that is checked, and is enough for all sizes and rooms.

Contents are the same in every run as well, if any two operations of a rank that touch one place, one of them writing
it, are ordered. That is checked operation by operation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from farandole.collectives import Promise
from farandole.errors import VerificationError
from farandole.program import Combine, Local, Operation, Place, Program, Publish, Region, Remote
from farandole.verifier import NOTHING, Interpretation, Values

__all__ = ["CHANNEL_SEGMENTS", "verify_programs"]

CHANNEL_SEGMENTS = 2
"""Segments that a channel is assumed to hold; the engine's hold at least as many."""

Channel = tuple[int, int]  # (src, dst), or (src, -1) for a shared channel


def verify_programs(
    programs: Sequence[Program], interpretation: Interpretation, *, channel_segments: int = CHANNEL_SEGMENTS
) -> None:
    """Prove that ``programs`` together do what the schedule promises, on every interleaving.

    Args:
        programs: one per rank, in order of rank.
        interpretation: the proof of the schedule; its promise is what the programs must keep.
        channel_segments: room in each channel, in segments.

    Raises:
        VerificationError: two operations race, some rank waits for ever, or a place ends with the wrong contents.
    """
    for program in programs:
        _require_ordered(program)
    run = _Run(programs, interpretation.promise, channel_segments)
    run.execute()
    run.require_finished()
    _Needs(run).require_no_circle()
    run.require_promise_kept(interpretation)


def _require_ordered(program: Program) -> None:
    """Any two operations that touch one place, one of them writing it, must be ordered."""
    writer: dict[tuple[bool, int], int] = {}
    readers: dict[tuple[bool, int], list[int]] = {}
    for index, operation in enumerate(program.operations):
        reads = {_memory(place) for place in _reads(operation)}
        writes = {_memory(operation.place)} if isinstance(operation, Combine) else set()
        for place in reads | writes:
            earlier = list(readers.get(place, ())) if place in writes else []
            if place in writer:
                earlier.append(writer[place])
            for other in earlier:
                if other not in operation.after and not _waits_for(program, index, other):
                    raise VerificationError(
                        f"rank {program.rank}: operation {index} ({_describe(operation)}) may run before operation "
                        f"{other} ({_describe(program.operations[other])}), and both touch the same place",
                        rank=program.rank,
                        chunk=operation.place.slot,
                    )
        for place in reads - writes:
            readers.setdefault(place, []).append(index)
        for place in writes:
            writer[place] = index
            readers[place] = []


def _waits_for(program: Program, index: int, other: int) -> bool:
    seen = {index}
    stack = [index]
    while stack:
        for earlier in program.operations[stack.pop()].after:
            if earlier == other:
                return True
            if earlier > other and earlier not in seen:
                seen.add(earlier)
                stack.append(earlier)
    return False


def with_mapped(programs: Sequence[Program]) -> tuple[Program, ...]:
    """``programs``, with each publication marked that may travel mapped: as many as there can be without a circle."""
    staged: set[tuple[int, int]] = set()
    while True:
        chosen = tuple(_mapped_but_for(program, staged) for program in programs)
        circular = _Needs(_Wiring(chosen)).mapped_in_circles()
        if not circular:
            return chosen
        staged |= circular


def _mapped_but_for(program: Program, staged: set[tuple[int, int]]) -> Program:
    operations = tuple(
        operation._replace(mapped=(program.rank, index) not in staged) if isinstance(operation, Publish) else operation
        for index, operation in enumerate(program.operations)
    )
    return program._replace(operations=operations)


class _Needs:
    """Which operation of all ranks needs which: see the top of this file."""

    def __init__(self, wiring: _Wiring) -> None:
        self.programs = wiring.programs
        self.first = [0, *accumulate(len(program.operations) for program in self.programs)]
        self.at_once: list[list[int]] = [[] for _ in range(self.first[-1])]  # needed for one and the same segment
        self.room: list[tuple[int, int]] = []  # needed for an earlier segment: publication, combination
        self.ends: list[tuple[int, int]] = []  # of at_once, those whose end is needed
        self.mapped: list[tuple[int, int, tuple[int, int]]] = []  # of at_once, those due to a mapped publication
        for program in self.programs:
            self._add_program(program, wiring)
        for (src, _), queue in wiring.queues.items():
            writers = [self.first[src] + index for index in queue.writers]
            takers = [[self.first[rank] + index for index in line] for rank, line in queue.takers.items()]
            for line in (writers, *takers):
                for earlier, later in pairwise(line):
                    self.at_once[later].append(earlier)
                    self.ends.append((later, earlier))
            for line in takers:
                for writer, taker in zip(writers, line, strict=False):
                    self.room.append((writer, taker))
                    self.at_once[taker].append(writer)

    def _add_program(self, program: Program, wiring: _Wiring) -> None:
        classes = program.size_classes
        for index, operation in enumerate(program.operations):
            me = self.first[program.rank] + index
            for earlier in operation.after:
                other = program.operations[earlier]
                needed = [self.first[program.rank] + earlier]
                if isinstance(other, Publish) and other.mapped:
                    takers = [self.first[r] + taker for r, taker in wiring.takers_of(program.rank, earlier)]
                    needed += takers
                    self.mapped += [(me, taker, (program.rank, earlier)) for taker in takers]
                self.at_once[me] += needed
                if classes[other.size] != classes[operation.size]:
                    self.ends += [(me, item) for item in needed]

    def mapped_in_circles(self) -> set[tuple[int, int]]:
        """(rank, operation) of the mapped publications that make a circle in which nothing could go on."""
        if not self.mapped:
            return set()
        circle = _strong_components(self.at_once)
        found = {publication for me, taker, publication in self.mapped if circle[me] == circle[taker]}
        if not found:
            circle, stuck = self._stuck_circles()
            found = {publication for me, taker, publication in self.mapped if circle[me] == circle[taker] in stuck}
        return found

    def _stuck_circles(self) -> tuple[list[int], set[int]]:
        """Per operation the number of its circle, and the circles in which one needs the end of another."""
        edges = [list(needed) for needed in self.at_once]
        for publication, combination in self.room:
            edges[publication].append(combination)
        circle = _strong_components(edges)
        return circle, {circle[me] for me, awaited in self.ends if circle[me] == circle[awaited]}

    def require_no_circle(self) -> None:
        """No operation may wait for the end of one that needs it in turn."""
        circle, _ = self._stuck_circles()
        for waiting, awaited in self.ends:
            if circle[waiting] == circle[awaited]:
                rank, index = self._name(waiting)
                other_rank, other = self._name(awaited)
                operation = self.programs[rank].operations[index]
                raise VerificationError(
                    f"deadlock once chunks are long enough to fill their channels: rank {rank} waits, in operation "
                    f"{index} ({_describe(operation)}), for the end of operation {other} of rank {other_rank} "
                    f"({_describe(self.programs[other_rank].operations[other])}), which needs the first to go on; put "
                    f"what is sent between them into another step or slot",
                    rank=rank,
                    chunk=operation.place.slot,
                )

    def _name(self, item: int) -> tuple[int, int]:
        rank = bisect_right(self.first, item) - 1
        return rank, item - self.first[rank]


def _strong_components(edges: list[list[int]]) -> list[int]:
    """Per node, a number that it shares with exactly those that it reaches and that reach it (Tarjan 1972)."""
    order = [-1] * len(edges)
    lowest = [0] * len(edges)
    component = [-1] * len(edges)
    open_nodes: list[int] = []
    visited = found = 0
    for root in range(len(edges)):
        path = [(root, 0)] if order[root] < 0 else []
        while path:
            node, seen = path.pop()
            if seen == 0:
                order[node] = lowest[node] = visited
                visited += 1
                open_nodes.append(node)
            descends = False
            for position in range(seen, len(edges[node])):
                child = edges[node][position]
                if order[child] < 0:
                    path += [(node, position + 1), (child, 0)]
                    descends = True
                    break
                if component[child] < 0:
                    lowest[node] = min(lowest[node], order[child])
            if descends:
                continue
            if lowest[node] == order[node]:
                while component[node] < 0:
                    component[open_nodes.pop()] = found
                found += 1
            if path:
                lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[node])
    return component


def _reads(operation: Operation) -> list[Place]:
    if isinstance(operation, Publish):
        return [operation.place]
    return [operand.place for operand in operation.operands if isinstance(operand, Local)]


def _memory(place: Place) -> tuple[bool, int]:
    """Input and output may be the same memory."""
    return place.region == Region.WORK, place.slot


def _describe(operation: Operation) -> str:
    place = f"{operation.place.region.name.lower()} slot {operation.place.slot}"
    if isinstance(operation, Publish):
        return f"publish {place} to {'everyone' if operation.reader < 0 else f'rank {operation.reader}'}"
    sources = ", ".join(
        f"rank {o.peer}" if isinstance(o, Remote) else f"{o.place.region.name.lower()} slot {o.place.slot}"
        for o in operation.operands
    )
    return f"combine {sources} into {place}"


@dataclass
class _Queue:
    """The state of one channel."""

    readers: tuple[int, ...]
    writers: list[int] = field(default_factory=list)  # operations of the source, in order
    takers: dict[int, list[int]] = field(default_factory=dict)  # per reader: its operations, in order
    values: list[int] = field(default_factory=list)  # of every segment published so far
    taken: dict[int, int] = field(default_factory=dict)  # per reader: segments taken so far


class _Wiring:
    """Who uses which channel when, and who waits for whom."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self.queues: dict[Channel, _Queue] = {}
        self.turn: list[list[dict[Channel, int]]] = []  # per rank and operation: its turn on each channel it uses
        self.followers: list[list[list[int]]] = []  # per rank and operation: who waits for it
        for program in programs:
            self._plan(program)

    def takers_of(self, rank: int, index: int) -> list[tuple[int, int]]:
        """(rank, operation) of the combinations that take publication ``index`` of ``rank``."""
        ((channel, turn),) = self.turn[rank][index].items()
        takers = self.queues[channel].takers
        return [(reader, line[turn]) for reader, line in takers.items() if turn < len(line)]

    def _plan(self, program: Program) -> None:
        turns: list[dict[Channel, int]] = []
        followers: list[list[int]] = [[] for _ in program.operations]
        for index, operation in enumerate(program.operations):
            turn: dict[Channel, int] = {}
            for earlier in operation.after:
                followers[earlier].append(index)
            if isinstance(operation, Publish):
                queue = self._queue((program.rank, operation.reader))
                turn[program.rank, operation.reader] = len(queue.writers)
                queue.writers.append(index)
            else:
                for operand in operation.operands:
                    if isinstance(operand, Remote):
                        channel = (operand.peer, -1 if operand.shared else program.rank)
                        takers = self._queue(channel).takers.setdefault(program.rank, [])
                        turn[channel] = len(takers)
                        takers.append(index)
            turns.append(turn)
        self.turn.append(turns)
        self.followers.append(followers)

    def _queue(self, channel: Channel) -> _Queue:
        if channel not in self.queues:
            src, dst = channel
            readers = (dst,) if dst >= 0 else tuple(r for r in range(len(self.programs)) if r != src)
            self.queues[channel] = _Queue(readers, taken=dict.fromkeys(readers, 0))
        return self.queues[channel]


class _Run(_Wiring):
    """One run of all programs, as far as it goes. All publications travel mapped that may: the others wait for less."""

    def __init__(self, programs: Sequence[Program], promise: Promise, channel_segments: int) -> None:
        super().__init__(programs)
        self.room = channel_segments
        self.segments = channel_segments + 1  # a chunk that does not fit its channel
        self.values = Values()
        self.done = [[0] * len(program.operations) for program in programs]
        self.contents: list[dict[Place, list[int]]] = [{} for _ in programs]
        for (rank, slot), chunk in promise.before.items():
            self.contents[rank][Place(Region.INPUT, slot)] = [self.values.leaf(chunk, rank)] * self.segments

    def execute(self) -> None:
        """Let every operation go on until none can."""
        ready = deque((p.rank, index) for p in self.programs for index in range(len(p.operations)))
        waiting = set(ready)
        while ready:
            rank, index = item = ready.popleft()
            waiting.discard(item)
            operation = self.programs[rank].operations[index]
            advanced = False
            while self._may_advance(rank, index, operation):
                advanced = True
                if isinstance(operation, Publish):
                    self._publish(rank, index, operation)
                else:
                    self._combine(rank, index, operation)
                self.done[rank][index] += 1
            if not advanced:
                continue
            followers = [(rank, follower) for follower in self.followers[rank][index]]
            for item in followers + self._neighbours(rank, index, operation):
                if item not in waiting:
                    waiting.add(item)
                    ready.append(item)

    def _neighbours(self, rank: int, index: int, operation: Operation) -> list[tuple[int, int]]:
        """Operations at either end of a channel that this one's progress may have let go on."""
        found = []
        for channel, turn in self.turn[rank][index].items():
            queue = self.queues[channel]
            if isinstance(operation, Publish):
                ends = [(reader, queue.takers.get(reader, [])) for reader in queue.readers]
                own = queue.writers
            else:
                ends = [(channel[0], queue.writers)]
                own = queue.takers[rank]
            if turn + 1 < len(own):
                found.append((rank, own[turn + 1]))
            for other, operations in ends:
                found.extend((other, operations[t]) for t in (turn, turn + 1) if t < len(operations))
            if isinstance(operation, Combine) and turn < len(queue.writers):
                src = channel[0]
                found.extend((src, follower) for follower in self.followers[src][queue.writers[turn]])
        return found

    def _progress(self, rank: int, index: int) -> int:
        """Segments of an operation that are over and done with, for those that run after it."""
        operation = self.programs[rank].operations[index]
        done = self.done[rank][index]
        if isinstance(operation, Publish) and operation.mapped:
            ((channel, turn),) = self.turn[rank][index].items()
            done = min(done, min(self.queues[channel].taken.values()) - turn * self.segments)
        return done

    def _may_advance(self, rank: int, index: int, operation: Operation) -> bool:
        segment = self.done[rank][index]
        if segment == self.segments:
            return False
        program = self.programs[rank]
        for earlier in operation.after:
            other = program.operations[earlier].size
            segmentwise = program.size_classes[other] == program.size_classes[operation.size]
            if self._progress(rank, earlier) < (segment + 1 if segmentwise else self.segments):
                return False
        for channel, turn in self.turn[rank][index].items():
            queue = self.queues[channel]
            number = turn * self.segments + segment
            if isinstance(operation, Publish):
                if len(queue.values) != number or number - min(queue.taken.values()) >= self.room:
                    return False
            elif queue.taken[rank] != number or len(queue.values) <= number:
                return False
        return True

    def _publish(self, rank: int, index: int, operation: Publish) -> None:
        held = self.contents[rank].get(operation.place)
        value = NOTHING if held is None else held[self.done[rank][index]]
        self.queues[rank, operation.reader].values.append(value)

    def _combine(self, rank: int, index: int, operation: Combine) -> None:
        segment = self.done[rank][index]
        operands = []
        for operand in operation.operands:
            if isinstance(operand, Local):
                held = self.contents[rank].get(operand.place)
                operands.append(NOTHING if held is None else held[segment])
            else:
                queue = self.queues[operand.peer, -1 if operand.shared else rank]
                operands.append(queue.values[queue.taken[rank]])
                queue.taken[rank] += 1
        chunks = {self.values.chunk[value] for value in operands if value != NOTHING}
        if NOTHING in operands or len(chunks) != 1:
            what = "a place that holds nothing" if NOTHING in operands else f"chunks {sorted(chunks)} together"
            raise VerificationError(
                f"rank {rank}: operation {index} ({_describe(operation)}) takes {what}",
                rank=rank,
                chunk=operation.place.slot,
            )
        result = operands[0] if len(operands) == 1 else self.values.fold(tuple(operands))
        self.contents[rank].setdefault(operation.place, [NOTHING] * self.segments)[segment] = result

    def require_finished(self) -> None:
        """Raise if some operation never ran to its end."""
        stuck = []
        for program in self.programs:
            for index, operation in enumerate(program.operations):
                if self.done[program.rank][index] < self.segments:
                    stuck.append((program.rank, index, operation))
                    break
        if not stuck:
            return
        lines = tuple(
            f"rank {rank} stays at operation {index}: {_describe(operation)}; "
            f"it waits for {self._blocker(rank, index, operation)}"
            for rank, index, operation in stuck
        )
        raise VerificationError(
            f"deadlock with {self.room} segments of room in each channel: {len(stuck)} of {len(self.programs)} "
            f"ranks wait for ever",
            rank=stuck[0][0],
            chunk=stuck[0][2].place.slot,
            path=lines[:16],
        )

    def _blocker(self, rank: int, index: int, operation: Operation) -> str:
        unfinished = [earlier for earlier in operation.after if self._progress(rank, earlier) < self.segments]
        if unfinished:
            return f"its operation {unfinished[0]}"
        if isinstance(operation, Publish):
            return f"room in the channel to {'everyone' if operation.reader < 0 else f'rank {operation.reader}'}"
        for channel, turn in self.turn[rank][index].items():
            if len(self.queues[channel].values) <= turn * self.segments + self.done[rank][index]:
                return f"a publication of rank {channel[0]}"
        return "its turn on a channel"

    def require_promise_kept(self, interpretation: Interpretation) -> None:
        """Raise unless every promised output place ends as the collective says, to the contribution."""
        promise = interpretation.promise
        for (rank, slot), promised in interpretation.promised.items():
            if rank in promise.read_only:
                continue
            for value in self.contents[rank].get(Place(Region.OUTPUT, slot), [NOTHING]):
                doubled = value != NOTHING and self.values.doubled[value] and not promise.duplicates_allowed
                if value == NOTHING or doubled or (self.values.chunk[value], self.values.ranks[value]) != promised:
                    raise VerificationError(
                        f"the program of rank {rank} leaves the wrong contents in output slot {slot}",
                        rank=rank,
                        chunk=slot,
                    )
        for channel, queue in self.queues.items():
            for reader, taken in queue.taken.items():
                if taken != len(queue.values):
                    raise VerificationError(
                        f"rank {reader} takes {taken} of {len(queue.values)} segments that rank {channel[0]} "
                        f"publishes to it",
                        rank=reader,
                    )
