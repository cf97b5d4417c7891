"""Proves that a schedule does what its collective promises.

The proof runs the schedule on *values* instead of numbers. A value is what a slot holds: a leaf (one rank's
contribution to one chunk), or the fold of several values in a given order. So it knows, exactly, which contributions a
slot holds, how often each, and in which order they were added. Four things are shown, or the first counterexample is
raised:

1. every slot that is read holds something, and only values of one chunk are added to each other;
2. at the end, every slot that the collective promises holds each promised contribution exactly once;
3. where several ranks end with the same chunk, they folded it in the same order, so they hold the same bits;
4. within a step, what is read is what was there when the step began, however the transfers interleave.

That a schedule cannot deadlock, and that nothing is overwritten while it is still being read, is shown on the
program that it is lowered to, for every interleaving: see `farandole.program_verifier`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from farandole.collectives import Promise, is_reducing, promise_of
from farandole.errors import ArgumentError, MalformedScheduleError, VerificationError
from farandole.schedule import Schedule

__all__ = ["Assignment", "Interpretation", "Values", "interpret", "verify"]

NOTHING = -1
"""The value of a slot that nothing was ever put into."""

_PATH_LINES = 12

_MAX_SLOTS = 1 << 22
"""Slots of all ranks together that a proof keeps track of; more would fill memory."""


class Values:
    """Interned values: equal values have equal ids, so comparing two folds is comparing two integers."""

    def __init__(self) -> None:
        self.chunk: list[int] = []  # the chunk that a value is of
        self.ranks: list[int] = []  # bit r: holds rank r's contribution
        self.doubled: list[int] = []  # bit r: holds it more than once
        self.operands: list[tuple[int, ...]] = []  # of a fold, in order; empty for a leaf
        self._ids: dict[tuple[int, ...], int] = {}

    def leaf(self, chunk: int, rank: int) -> int:
        """The value that is rank ``rank``'s contribution to chunk ``chunk``."""
        key = (NOTHING, chunk, rank)
        if key not in self._ids:
            self._ids[key] = self._append(chunk, 1 << rank, 0, ())
        return self._ids[key]

    def fold(self, operands: tuple[int, ...]) -> int:
        """The value of adding ``operands`` (at least two, all of one chunk) from left to right.

        Addition of two numbers commutes to the bit, so the first two count as one order, whichever comes first.
        """
        first, second = operands[:2]
        key = operands if first <= second else (second, first, *operands[2:])
        known = self._ids.get(key)
        if known is not None:
            return known
        ranks = doubled = 0
        for value in key:
            doubled |= self.doubled[value] | (ranks & self.ranks[value])
            ranks |= self.ranks[value]
        self._ids[key] = self._append(self.chunk[first], ranks, doubled, key)
        return self._ids[key]

    def times(self, value: int, rank: int) -> int:
        """How often ``value`` holds the contribution of ``rank``."""
        counts: dict[int, int] = {}
        for current in range(value + 1):  # operands have smaller ids than their fold
            if self.operands[current]:
                counts[current] = sum(counts[operand] for operand in self.operands[current])
            else:
                counts[current] = self.ranks[current] >> rank & 1
        return counts[value]

    def _append(self, chunk: int, ranks: int, doubled: int, operands: tuple[int, ...]) -> int:
        self.chunk.append(chunk)
        self.ranks.append(ranks)
        self.doubled.append(doubled)
        self.operands.append(operands)
        return len(self.chunk) - 1


class Assignment(NamedTuple):
    """All that arrives in one slot within one step.

    Attributes:
        step, rank, slot: where.
        transfers: indices into the schedule, in the order in which they are folded.
        keeps_old: True if what the slot held before is the first operand.
        value: what the slot holds afterwards.
        completes: True if the value became the whole sum just here (the place where an average is divided).
    """

    step: int
    rank: int
    slot: int
    transfers: tuple[int, ...]
    keeps_old: bool
    value: int
    completes: bool


@dataclass(frozen=True)
class Interpretation:
    """A schedule executed on values.

    Attributes:
        schedule: what was executed.
        promise: what its collective promises.
        values: the table that value ids index.
        assignments: in order of step, then of their first transfer.
        sent: per transfer, the value that it carried.
        final: (rank, slot) -> value at the end; slots that hold nothing are absent.
    """

    schedule: Schedule
    promise: Promise
    values: Values
    assignments: list[Assignment]
    sent: list[int]
    final: dict[tuple[int, int], int]

    @cached_property
    def everyone(self) -> int:
        """The ``ranks`` mask of a value that holds a contribution of every rank."""
        return (1 << self.schedule.world_size) - 1

    @cached_property
    def completes_once(self) -> bool:
        """Whether each whole sum is made in one place, and all others have copies: so that all ranks hold the same
        bits even if what crosses to another host is rounded on its way."""
        completed = [self.values.chunk[a.value] for a in self.assignments if a.completes]
        return len(completed) == len(set(completed))

    @cached_property
    def promised(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(rank, slot) -> chunk and ``ranks`` mask of the value that the slot must hold at the end."""
        masks: dict[tuple[int, ...], int] = {}  # many slots have the same contributors
        promised = {}
        for place, (chunk, contributors) in self.promise.after.items():
            if contributors not in masks:
                masks[contributors] = sum(1 << rank for rank in contributors)
            promised[place] = (chunk, masks[contributors])
        return promised


def verify(schedule: Schedule) -> Interpretation:
    """Prove ``schedule``, or raise the first counterexample.

    Returns:
        The execution that is the proof; lowering and views go on from it.

    Raises:
        ArgumentError: ``schedule`` is no `Schedule`.
        MalformedScheduleError: the collective is unknown, its chunks do not divide among the ranks, or it has more
            slots than can be kept track of.
        VerificationError: the schedule breaks its promise; carries rank, chunk, transfer and the path that led there.
    """
    interpretation = interpret(schedule)
    _require_promise_kept(interpretation)
    return interpretation


def interpret(schedule: Schedule) -> Interpretation:
    """Execute ``schedule`` on values, step by step, without asking whether the outcome is right.

    Raises:
        ArgumentError, MalformedScheduleError: as in `verify`.
        VerificationError: a transfer reads an empty slot, mixes chunks, or contradicts another in its step.
    """
    if not isinstance(schedule, Schedule):
        raise ArgumentError(f"schedule is {schedule!r:.80}; it must be a farandole.Schedule")
    if schedule.world_size * schedule.num_slots > _MAX_SLOTS:
        raise MalformedScheduleError(
            f"world_size is {schedule.world_size} and there are {schedule.num_slots} slots per rank; a proof keeps "
            f"track of at most {_MAX_SLOTS} slots of all ranks together: take fewer chunks, or fewer ranks"
        )
    promise = promise_of(schedule)
    values = Values()
    state = {(rank, slot): values.leaf(chunk, rank) for (rank, slot), chunk in promise.before.items()}
    everyone = (1 << schedule.world_size) - 1
    assignments: list[Assignment] = []
    sent: list[int] = []
    rows = schedule.rows.tolist()
    start = 0
    while start < len(rows):
        step = rows[start][0]
        end = start
        groups: dict[tuple[int, int], list[int]] = {}
        while end < len(rows) and rows[end][0] == step:
            _, src, src_slot, dst, dst_slot, _ = rows[end]
            value = state.get((src, src_slot), NOTHING)
            if value == NOTHING:
                raise _reads_nothing(schedule, end)
            if src == dst and (src, src_slot) in groups and src_slot != dst_slot:
                raise _reads_late(schedule, end)
            sent.append(value)
            groups.setdefault((dst, dst_slot), []).append(end)
            end += 1
        new_state = {}
        for (rank, slot), transfers in groups.items():
            keeps_old = bool(rows[transfers[0]][5])
            operands = [sent[index] for index in transfers]
            if keeps_old:
                old = state.get((rank, slot), NOTHING)
                if old == NOTHING:
                    raise _adds_to_nothing(schedule, transfers[0])
                operands.insert(0, old)
            senders = {rows[transfers[0]][1]}
            for index in transfers[1:]:
                if not rows[index][5]:
                    raise _replaces_twice(schedule, transfers[0], index)
                if rows[index][1] in senders:
                    raise _arrives_twice(schedule, index)
                senders.add(rows[index][1])
            if len(operands) > 1 and not is_reducing(schedule.collective):
                raise _adds_where_nothing_is_added(schedule, transfers[0 if keeps_old else 1])
            value = _fold(schedule, values, operands, transfers)
            completes = len(operands) > 1 and values.ranks[value] == everyone
            completes = completes and all(values.ranks[operand] != everyone for operand in operands)
            new_state[rank, slot] = value
            assignments.append(Assignment(step, rank, slot, tuple(transfers), keeps_old, value, completes))
        state.update(new_state)
        start = end
    return Interpretation(schedule, promise, values, assignments, sent, state)


def _fold(schedule: Schedule, values: Values, operands: list[int], transfers: list[int]) -> int:
    if len(operands) == 1:
        return operands[0]
    chunk = values.chunk[operands[0]]
    for operand in operands[1:]:
        if values.chunk[operand] != chunk:
            culprit = transfers[max(0, operands.index(operand) - (len(operands) - len(transfers)))]
            transfer = schedule.transfer(culprit)
            raise VerificationError(
                f"{_describe(schedule, culprit)} adds chunk {values.chunk[operand]} to chunk {chunk}; "
                f"only contributions to one chunk can be added",
                rank=transfer.dst,
                chunk=chunk,
                transfer=culprit,
                path=_path_to(schedule, transfer.dst, transfer.dst_slot, culprit + 1),
            )
    return values.fold(tuple(operands))


def _require_promise_kept(interpretation: Interpretation) -> None:
    values, promise = interpretation.values, interpretation.promise
    fold_of_chunk: dict[int, tuple[int, int]] = {}
    for (rank, slot), (chunk, contributors) in promise.after.items():
        value = interpretation.final.get((rank, slot), NOTHING)
        if value == NOTHING:
            raise _ends_wrong(interpretation, rank, slot, "holds nothing")
        if values.chunk[value] != chunk:
            held = _name_chunk(interpretation.schedule, values.chunk[value])
            wanted = _name_chunk(interpretation.schedule, chunk)
            raise _ends_wrong(interpretation, rank, slot, f"holds {held} in place of {wanted}")
        missing = [r for r in contributors if not values.ranks[value] >> r & 1]
        doubled = 0 if promise.duplicates_allowed else values.doubled[value]
        problems = [f"lacks the contribution of {_name_ranks(missing)}"] if missing else []
        twice = (doubled & -doubled).bit_length() - 1
        if doubled:
            problems.append(f"holds the contribution of rank {twice} {values.times(value, twice)} times")
        if problems:
            contributor = missing[0] if missing else twice
            raise _ends_wrong(interpretation, rank, slot, " and ".join(problems), contributor)
        if promise.duplicates_allowed:
            continue
        first_rank, first_value = fold_of_chunk.setdefault(chunk, (rank, value))
        if first_value != value:
            problem = f"was added up in another order than on rank {first_rank}, so their last bits may differ"
            raise _ends_wrong(interpretation, rank, slot, problem)


def _ends_wrong(
    interpretation: Interpretation, rank: int, slot: int, problem: str, contributor: int | None = None
) -> VerificationError:
    schedule = interpretation.schedule
    path = list(_path_to(schedule, rank, slot, len(schedule)))
    if not path:
        path = [f"no transfer ever writes rank {rank} slot {slot}"]
    if contributor is not None:
        path.append(_whereabouts(interpretation, rank, slot, contributor))
    writers = [a for a in interpretation.assignments if (a.rank, a.slot) == (rank, slot)]
    return VerificationError(
        f"{schedule.name} {schedule.collective} on {schedule.world_size} ranks: at the end, rank {rank} chunk "
        f"{slot} {problem}",
        rank=rank,
        chunk=slot,
        transfer=writers[-1].transfers[-1] if writers else None,
        path=tuple(path),
    )


def _whereabouts(interpretation: Interpretation, rank: int, slot: int, contributor: int) -> str:
    """Which ranks the contribution that is missing, or doubled, did reach."""
    values, schedule = interpretation.values, interpretation.schedule
    chunk = interpretation.promise.after[rank, slot][0]
    holders = sorted(
        {
            holder
            for (holder, _), value in interpretation.final.items()
            if values.chunk[value] == chunk and values.ranks[value] >> contributor & 1
        }
    )
    where = _name_ranks(holders) if holders else "no rank"
    return f"rank {contributor}'s contribution to {_name_chunk(schedule, chunk)} is, at the end, on {where}"


def _path_to(schedule: Schedule, rank: int, slot: int, before: int) -> tuple[str, ...]:
    """The transfers before row ``before`` that what is in (rank, slot) came through, oldest first."""
    rows = schedule.rows.tolist()
    wanted = {(rank, slot)}
    path: list[int] = []
    end = min(before, len(rows))
    while end > 0:
        start = end
        while start > 0 and rows[start - 1][0] == rows[end - 1][0]:
            start -= 1
        hits = [i for i in range(start, end) if (rows[i][3], rows[i][4]) in wanted]
        replaced = {(rows[i][3], rows[i][4]) for i in hits if not rows[i][5]}
        wanted = (wanted - replaced) | {(rows[i][1], rows[i][2]) for i in hits}
        path.extend(reversed(hits))
        end = start
    lines = [_describe(schedule, index) for index in reversed(path)]
    if len(lines) > _PATH_LINES:
        lines = [f"... {len(lines) - _PATH_LINES} earlier transfers", *lines[-_PATH_LINES:]]
    return tuple(lines)


def _reads_nothing(schedule: Schedule, index: int) -> VerificationError:
    transfer = schedule.transfer(index)
    return VerificationError(
        f"{_describe(schedule, index)}, but rank {transfer.src} slot {transfer.src_slot} holds nothing yet",
        rank=transfer.src,
        chunk=transfer.src_slot,
        transfer=index,
    )


def _adds_to_nothing(schedule: Schedule, index: int) -> VerificationError:
    transfer = schedule.transfer(index)
    return VerificationError(
        f"{_describe(schedule, index)}, but there is nothing there to add to",
        rank=transfer.dst,
        chunk=transfer.dst_slot,
        transfer=index,
    )


def _adds_where_nothing_is_added(schedule: Schedule, index: int) -> VerificationError:
    transfer = schedule.transfer(index)
    return VerificationError(
        f"{_describe(schedule, index)}, beside something else in that slot; but {schedule.collective} only moves "
        f"data and adds nothing: one transfer per slot and step, without reduce",
        rank=transfer.dst,
        chunk=transfer.dst_slot,
        transfer=index,
    )


def _replaces_twice(schedule: Schedule, first: int, index: int) -> VerificationError:
    transfer = schedule.transfer(index)
    return VerificationError(
        f"{_describe(schedule, index)}, and transfer {first} writes the same slot in the same step; only the first "
        f"may replace, "
        f"the others must reduce, or go into another step",
        rank=transfer.dst,
        chunk=transfer.dst_slot,
        transfer=index,
    )


def _arrives_twice(schedule: Schedule, index: int) -> VerificationError:
    transfer = schedule.transfer(index)
    return VerificationError(
        f"{_describe(schedule, index)}, and an earlier transfer of the same step brings something else from rank "
        f"{transfer.src} "
        f"into the same slot; put one of them into a step of its own",
        rank=transfer.dst,
        chunk=transfer.dst_slot,
        transfer=index,
    )


def _reads_late(schedule: Schedule, index: int) -> VerificationError:
    transfer = schedule.transfer(index)
    return VerificationError(
        f"{_describe(schedule, index)}, but an earlier transfer of the same step writes rank {transfer.src} slot "
        f"{transfer.src_slot}; "
        f"put the local transfer before it, or go through a scratch slot",
        rank=transfer.dst,
        chunk=transfer.src_slot,
        transfer=index,
    )


def _describe(schedule: Schedule, index: int) -> str:
    return f"transfer {index} ({schedule.transfer(index)})"


def _name_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown}"


def _name_chunk(schedule: Schedule, chunk: int) -> str:
    if schedule.collective == "all_to_all":
        src, slot = divmod(chunk, schedule.num_chunks)
        return f"the data in slot {slot} of rank {src}"
    return f"chunk {chunk}"
