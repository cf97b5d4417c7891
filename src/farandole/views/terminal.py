"""A schedule in the terminal: step by step, who sends what to whom, and what every rank then holds.

Everything here returns rich renderables; printing them is up to the caller. A wrong schedule can be drawn too, as far
as it can be executed: see `Execution`.

Notation. ``chunk 2 → rank 1`` replaces what the slot held, ``chunk 2 +→ rank 1`` is added to it; ``chunks 1-3 → ranks
1-3, one each`` is chunk 1 to rank 1, and so on. A cell of the grid names the ranks whose contributions a slot holds:
``0-2,5``, or ``Σ`` for all of them. Where there is no room for names, it says of how many ranks only; where
slots are very many, a cell is a bar as high as the part of the ranks that have contributed. ``c2:`` says that it is of
chunk 2, where the slot is not that chunk's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from farandole.algorithms import ROOTED
from farandole.collectives import is_reducing
from farandole.schedule import Schedule, Transfer
from farandole.verifier import NOTHING, Interpretation
from farandole.views.execution import Execution, State

__all__ = ["HeldGrid", "draw_step", "draw_steps", "heading"]

_NOTHING = "·"
_SUM = "Σ"
_SOME = "■"
_TIMES = "\N{MULTIPLICATION SIGN}"
_BARS = "▁▂▃▄▅▆▇"


# -- the whole drawing -------------------------------------------------------------------------------------------------


def heading(schedule: Schedule) -> RenderableType:
    """What is drawn, and how to read it."""
    of_root = f", root {schedule.root}" if schedule.collective in ROOTED else ""
    parts = [_count(schedule.num_chunks, "chunk")]
    if schedule.num_scratch:
        parts.append(_count(schedule.num_scratch, "scratch slot"))
    parts += [_count(schedule.num_steps, "step"), _count(len(schedule), "transfer")]
    where = f" on {_count(schedule.world_size, 'rank')}{of_root}: {', '.join(parts)}"
    title = Text.assemble((f"{schedule.collective} {schedule.name}", "bold"), where)
    if schedule.collective == "all_to_all":
        cells = "A cell says what it holds: 2→5 is what rank 2 has for rank 5."
    else:
        cells = f"A cell names the ranks whose contributions it holds; {_SUM} is all of them."
    arrows = "→ replaces what the slot held, +→ is added to it. " if schedule.column("reduce").any() else ""
    colours = "Bold: written in this step. Green: as promised at the end."
    steps = "The transfers of a step may run at the same time; each reads what its slot held when the step began. "
    slots = "Each rank has a slot per chunk"
    slots += ", and behind them scratch slots, s0 and so on, for data in transit. " if schedule.num_scratch else ". "
    return Group(title, Text(f"{steps}{slots}{arrows}{cells} {colours}", style="dim"))


def draw_steps(execution: Execution, *, max_ranks: int = 16) -> Iterator[RenderableType]:
    """Everything: what is held at the start, each step, and the step that could not be executed, if there is one."""
    width = _longest_name(execution)
    yield Group(Text("\nbefore", style="bold"), HeldGrid(execution, 0, max_ranks, width))
    num_steps = execution.num_steps + (execution.error is not None)
    for step in range(num_steps):
        yield draw_step(execution, step, max_ranks=max_ranks, cell_width=width)


def draw_step(execution: Execution, step: int, *, max_ranks: int = 16, cell_width: int = 1) -> RenderableType:
    """One step: its transfers by sender, and what every rank holds afterwards.

    Args:
        execution: see `execute`.
        step: in 0..num_steps - 1; num_steps itself if that step could not be executed.
        max_ranks: draw no more rows than that.
        cell_width: characters that a cell has at least, where there is room.
    """
    title = Text(f"\nstep {step}", style="bold")
    transfers = _transfers(execution, step, max_ranks)
    if step == execution.num_steps:
        return Group(title, transfers, Text("This step cannot be executed.", style="bold red"))
    return Group(title, transfers, "", HeldGrid(execution, step + 1, max_ranks, cell_width))


# -- transfers ---------------------------------------------------------------------------------------------------------


def _transfers(execution: Execution, step: int, max_ranks: int) -> RenderableType:
    schedule = execution.schedule
    wrong = execution.error.transfer if execution.error is not None and step == execution.num_steps else None
    by_sender: dict[int, list[int]] = {}
    for index in np.flatnonzero(schedule.column("step") == step).tolist():
        by_sender.setdefault(schedule.transfer(index).src, []).append(index)
    senders = sorted(by_sender)
    shown = senders[:max_ranks]
    if wrong is not None and schedule.transfer(wrong).src not in shown:
        shown.append(schedule.transfer(wrong).src)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column()
    for sender in shown:
        phrases = _merged([schedule.transfer(index) for index in by_sender[sender] if index != wrong])
        lines = [_phrase_text(schedule, phrase) for phrase in phrases]
        if wrong in by_sender[sender]:
            (phrase,) = _merged([schedule.transfer(wrong)])
            lines.append(_phrase_text(schedule, phrase).append(" (the first wrong one)"))
            lines[-1].stylize("red")
        grid.add_row(f"rank {sender}", Text("; ").join(lines))
    if not senders:
        return Text("no transfers", style="dim")
    if len(shown) < len(senders):
        return Group(grid, Text(f"not shown: what {len(senders) - len(shown)} more ranks send", style="dim"))
    return grid


@dataclass
class _Phrase:
    """Transfers of one rank that are said in one phrase: these slots go to those slots of these ranks."""

    src_slots: list[int]
    dst_slots: list[int]
    dsts: list[int]
    reduce: bool
    local: bool
    one_each: bool = False  # the first slot goes to the first rank, the second to the second, ...


def _merged(transfers: Sequence[Transfer]) -> list[_Phrase]:
    """Join the transfers of one rank: the slots that one rank gets, then the ranks that get the same, or one each."""
    to_rank: dict[tuple[int, bool, bool], _Phrase] = {}
    for _, src, src_slot, dst, dst_slot, reduce in transfers:
        key = (dst, reduce, src_slot == dst_slot)
        phrase = to_rank.setdefault(key, _Phrase([], [], [dst], reduce, src == dst))
        phrase.src_slots.append(src_slot)
        phrase.dst_slots.append(dst_slot)
    same: dict[tuple[object, ...], _Phrase] = {}
    for phrase in to_rank.values():
        first = same.setdefault((phrase.local, phrase.reduce, *phrase.src_slots, *phrase.dst_slots), phrase)
        if first is not phrase:
            first.dsts += phrase.dsts
    each: dict[tuple[object, ...], _Phrase] = {}
    for index, phrase in enumerate(same.values()):
        is_single = len(phrase.src_slots) == len(phrase.dsts) == 1 and not phrase.local
        goes_to = "its own" if phrase.dst_slots == phrase.src_slots else phrase.dst_slots[0]
        first = each.setdefault(("one each", phrase.reduce, goes_to) if is_single else ("as it is", index), phrase)
        if first is not phrase:
            first.one_each = True
            first.src_slots += phrase.src_slots
            first.dsts += phrase.dsts
            first.dst_slots = first.src_slots if goes_to == "its own" else first.dst_slots
    return list(each.values())


def _phrase_text(schedule: Schedule, phrase: _Phrase) -> Text:
    text = Text(_name_slots(schedule, phrase.src_slots))
    text.append(" +→ " if phrase.reduce else " → ", style="cyan")
    if phrase.local:
        return text.append(_name_slots(schedule, phrase.dst_slots)).append(" (local)", style="dim")
    text.append(f"{'ranks' if len(phrase.dsts) > 1 else 'rank'} {_ranges(phrase.dsts)}")
    if phrase.dst_slots != phrase.src_slots or max(phrase.dst_slots) >= schedule.num_chunks:
        text.append(f" {_name_slots(schedule, phrase.dst_slots)}")
    return text.append(", one each", style="dim") if phrase.one_each else text


def _name_slots(schedule: Schedule, slots: Sequence[int]) -> str:
    chunks = [slot for slot in slots if slot < schedule.num_chunks]
    scratch = [slot - schedule.num_chunks for slot in slots if slot >= schedule.num_chunks]
    names = []
    if chunks:
        names.append(f"{'chunks' if len(chunks) > 1 else 'chunk'} {_ranges(chunks)}")
    if scratch:
        names.append(f"scratch {_ranges(scratch)}")
    return " and ".join(names)


# -- the grid ----------------------------------------------------------------------------------------------------------

_Cell = tuple[str, str]
"""What it says, and its style."""


@dataclass(frozen=True)
class HeldGrid:
    """What every rank holds: a row per rank, a cell per slot, scratch slots apart, as wide as the terminal allows.

    Attributes:
        execution: of the schedule.
        position: which of its states: 0 is before the first step, k is after step k - 1.
        max_ranks: draw no more rows than that.
        cell_width: characters that a cell has at least, where there is room.
    """

    execution: Execution
    position: int
    max_ranks: int = 16
    cell_width: int = 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        schedule = self.execution.schedule
        ranks = range(min(schedule.world_size, self.max_ranks))
        slots = self._used_slots()
        room = (
            options.max_width - len(f"rank {schedule.world_size - 1} ") - (2 if slots[-1] >= schedule.num_chunks else 0)
        )
        is_dense = 2 * len(slots) > room  # no blanks between cells then, and no names
        shown = slots[:room] if is_dense else slots
        width = max(1, room // len(shown) - 1)
        rows = [[self._cell(rank, slot, width) for slot in shown] for rank in ranks]
        yield self._dense_table(shown, rows) if is_dense else self._table(shown, rows, width)
        if is_dense and is_reducing(schedule.collective):
            yield Text("the higher a bar, the more ranks have contributed", style="dim")
        elif any(name.startswith(_TIMES) for row in rows for name, _ in row):
            yield Text(f"{_TIMES}3: the contributions of three ranks", style="dim")
        hidden = []
        if len(ranks) < schedule.world_size:
            hidden.append(f"{schedule.world_size - len(ranks)} more ranks")
        if len(shown) < len(slots):
            hidden.append(f"{len(slots) - len(shown)} more slots of each rank")
        if hidden:
            yield Text(f"not shown: {' and '.join(hidden)}", style="dim")

    @property
    def _state(self) -> State:
        return self.execution.states[self.position]

    def _used_slots(self) -> list[int]:
        """All chunks, then the scratch slots that are in use on some rank."""
        num_chunks = self.execution.schedule.num_chunks
        in_use = (self._state != NOTHING).any(axis=0)
        return [slot for slot in range(len(in_use)) if slot < num_chunks or in_use[slot]]

    def _table(self, slots: Sequence[int], rows: Sequence[Sequence[_Cell]], width: int) -> Table:
        num_chunks = self.execution.schedule.num_chunks
        table = _empty_table()
        table.add_column("chunk", no_wrap=True, style="dim")
        for slot in slots:
            if slot == num_chunks:
                table.add_column("│", style="dim", width=1)
            name = str(slot) if slot < num_chunks else f"s{slot - num_chunks}"
            name = name if len(name) <= width else name[-1]  # of many chunks only the last digit
            table.add_column(name, justify="center", no_wrap=True, min_width=min(width, self.cell_width))
        for rank, cells in enumerate(rows):
            row: list[RenderableType] = [f"rank {rank}"]
            for slot, (name, style) in zip(slots, cells, strict=True):
                row += ["│"] if slot == num_chunks else []
                row.append(Text(name, style))
            table.add_row(*row)
        return table

    def _dense_table(self, slots: Sequence[int], rows: Sequence[Sequence[_Cell]]) -> Table:
        table = _empty_table()
        table.add_column("chunk", no_wrap=True, style="dim")
        table.add_column("".join(str(slot % 10) for slot in slots), no_wrap=True)
        for rank, cells in enumerate(rows):
            runs = groupby(cells, key=lambda cell: cell[1])
            table.add_row(f"rank {rank}", Text.assemble(*(("".join(mark for mark, _ in run), s) for s, run in runs)))
        return table

    def _cell(self, rank: int, slot: int, width: int) -> _Cell:
        execution = self.execution
        value = int(self._state[rank, slot])
        promised = (rank, slot) in execution.interpretation.promised
        at_end = self.position == execution.schedule.num_steps
        colour = "green" if _is_as_promised(execution, rank, slot, value) else "red" if promised and at_end else ""
        if value == NOTHING:
            return _NOTHING, colour or "dim"
        name = _mark(execution.interpretation, value)
        if width > 1:
            forms = _forms(execution.interpretation, slot, value)
            name = next((form for form in forms if len(form) <= width), name)
        return name, f"bold {colour}".strip() if (rank, slot) in execution.written[self.position] else colour


def _empty_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, header_style="dim")


def _longest_name(execution: Execution) -> int:
    """Characters of the longest cell there ever is, and a blank, so that columns stay where they are in all steps."""
    start = execution.states[0]
    held = {(slot, int(start[rank, slot])) for rank, slot in zip(*np.nonzero(start != NOTHING), strict=True)}
    held |= {(assignment.slot, assignment.value) for assignment in execution.interpretation.assignments}
    return 1 + max(len(_forms(execution.interpretation, slot, value)[0]) for slot, value in held)


def _forms(interpretation: Interpretation, slot: int, value: int) -> list[str]:
    """What a slot holds, from the most telling form to the shortest; `_mark` is shorter still."""
    schedule, values = interpretation.schedule, interpretation.values
    chunk, mask = values.chunk[value], values.ranks[value]
    if schedule.collective == "all_to_all":
        src, src_slot = divmod(chunk, schedule.num_chunks)
        dst, part = divmod(src_slot, schedule.num_chunks // schedule.world_size)
        which = f".{part}" if schedule.num_chunks > schedule.world_size else ""
        return [f"{src}→{dst}{which}", f"{src}→{dst}", str(src)]
    elsewhere = f"c{chunk}:" if chunk != slot else ""
    members = [rank for rank in range(schedule.world_size) if mask >> rank & 1]
    if not is_reducing(schedule.collective) or schedule.world_size == 1:
        names, count = _ranges(members), str(members[0])
    elif mask == interpretation.everyone:
        names = count = _SUM
    else:
        names, count = _ranges(members), f"{_TIMES}{len(members)}"
    if _is_doubled(interpretation, value):
        doubled = [rank for rank in members if values.doubled[value] >> rank & 1]
        names += "".join(f"+{rank}" * (values.times(value, rank) - 1) for rank in doubled)
        count = f"{count}!"
    return [f"{elsewhere}{names}", f"{elsewhere}{count}", names, count]


def _mark(interpretation: Interpretation, value: int) -> str:
    """What a slot holds, in a single character."""
    schedule, mask = interpretation.schedule, interpretation.values.ranks[value]
    if _is_doubled(interpretation, value):
        return "!"
    if not is_reducing(schedule.collective) or schedule.world_size == 1:
        return _SOME
    return _SUM if mask == interpretation.everyone else _BARS[mask.bit_count() * len(_BARS) // schedule.world_size]


def _is_doubled(interpretation: Interpretation, value: int) -> bool:
    return bool(interpretation.values.doubled[value]) and not interpretation.promise.duplicates_allowed


def _is_as_promised(execution: Execution, rank: int, slot: int, value: int) -> bool:
    """Whether the slot holds, by now, exactly what the collective promises for the end."""
    if value == NOTHING or (rank, slot) not in execution.interpretation.promised:
        return False
    values = execution.interpretation.values
    whole = (values.chunk[value], values.ranks[value]) == execution.interpretation.promised[rank, slot]
    return whole and not _is_doubled(execution.interpretation, value)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers with runs drawn together, in the order given: 0-3,5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}-{b}" for a, b in runs)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
