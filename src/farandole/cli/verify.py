"""``farandole verify``: prove algorithms, and say what they cost next to what no algorithm can beat."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from farandole import algorithms
from farandole.cli.algorithm_argument import (
    CollectiveOption,
    HostsOption,
    RanksOption,
    RootOption,
    schedules_of,
    topology_of,
)
from farandole.cost_model import lower_bound
from farandole.errors import ScheduleError, VerificationError
from farandole.lowering import lower
from farandole.program_verifier import verify_programs
from farandole.schedule import Schedule
from farandole.topology import Topology
from farandole.verifier import verify as verify_schedule

__all__ = ["Outcome", "prove", "verify"]

_WIDE = 140
"""Columns from which closed forms have a place beside the numbers."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one proof.

    Attributes:
        schedule: what was to be proved.
        topology: which ranks share a host; None if all do.
        error: the counterexample, or None if it was proved.
        proof_s: seconds that proving the schedule, lowering it and proving the programs took.
    """

    schedule: Schedule
    topology: Topology | None
    error: ScheduleError | None
    proof_s: float


def verify(
    context: typer.Context,
    algorithm: Annotated[
        str | None,
        typer.Argument(metavar="[ALGORITHM]", help="A name, or PATH.py:FUNCTION; all algorithms if left out."),
    ] = None,
    ranks: RanksOption = 4,
    hosts: HostsOption = None,
    collective: CollectiveOption = None,
    root: RootOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list, an object per schedule.")] = False,
) -> None:
    """Prove that algorithms do what they promise, for any data and any timing.

    Proved are the schedule (every promised sum holds each rank's contribution exactly once, in the same order on all
    ranks) and the programs it is lowered to (no deadlock, no race). What is refused is shown with the first wrong
    chunk and the transfers that led there; the exit code is then 1.

    Sent and received are those of the busiest rank; S is the size of the whole buffer.

    Examples:

        farandole verify --ranks 8
        farandole verify ring --ranks 5 --collective all_reduce
        farandole verify hierarchical --hosts 3+2
        farandole verify plans/mine.py:all_reduce --ranks 6 --json
    """
    topology = topology_of(context, ranks, hosts)
    schedules = schedules_of(algorithm, topology.world_size, collective=collective, root=root, topology=topology)
    outcomes = [prove(schedule, topology) for schedule in _with_progress(schedules)]
    if as_json:
        print(json.dumps([_as_json(outcome) for outcome in outcomes], indent=2))
    else:
        console = Console(highlight=False)
        for renderable in _report(outcomes, wide=console.width >= _WIDE):
            console.print(renderable)
    if any(outcome.error for outcome in outcomes):
        raise typer.Exit(1)


def prove(schedule: Schedule, topology: Topology | None = None) -> Outcome:
    """Prove ``schedule`` and the programs it is lowered to; a proof that fails is an outcome too."""
    start = time.perf_counter()
    error: ScheduleError | None = None
    try:
        interpretation = verify_schedule(schedule)
        programs = lower(interpretation, shared=topology is None or topology.is_one_host)
        verify_programs(programs, interpretation)
    except ScheduleError as refusal:
        error = refusal
    return Outcome(schedule, topology, error, time.perf_counter() - start)


def _with_progress(schedules: Sequence[Schedule]) -> Iterator[Schedule]:
    console = Console(stderr=True)
    columns = (TextColumn("proving {task.description}"), BarColumn(), MofNCompleteColumn())
    shown = console.is_terminal and len(schedules) > 1
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task("...", total=len(schedules))
        for schedule in schedules:
            progress.update(task, description=f"{schedule.collective} {schedule.name}")
            yield schedule
            progress.advance(task)


# -- what a schedule moves ---------------------------------------------------------------------------------------------


def _num_rounds(schedule: Schedule) -> int:
    travels = schedule.column("src") != schedule.column("dst")
    return len(np.unique(schedule.column("step")[travels]))


def _busiest_share(schedule: Schedule, end: str) -> Fraction | None:
    """What the busiest rank sends (end "src") or receives ("dst"), as a share of S; None for barrier: it moves none."""
    if schedule.collective == "barrier":
        return None
    travels = schedule.column("src") != schedule.column("dst")
    per_rank = np.bincount(schedule.column(end)[travels], minlength=schedule.world_size)
    return Fraction(int(per_rank.max()), schedule.num_chunks)


def _bound(schedule: Schedule) -> tuple[int, Fraction | None]:
    """What no algorithm can beat: rounds, and the share of S that the busiest rank moves."""
    bound = lower_bound(schedule.collective, schedule.world_size, schedule.world_size)
    if schedule.collective == "barrier":
        return bound.rounds, None
    return bound.rounds, Fraction(round(bound.bytes_per_rank), schedule.world_size)


def _closed_form(outcome: Outcome) -> str | None:
    """The algorithm's own formula; None for one that is not in the table, or not as it is there."""
    schedule = outcome.schedule
    collective, name = schedule.collective, schedule.name
    if name not in algorithms.ALGORITHMS.get(collective, {}):
        return None
    if algorithms.build(collective, name, schedule.world_size, schedule.root, outcome.topology) != schedule:
        return None
    return algorithms.closed_form(collective, name)


def _as_json(outcome: Outcome) -> dict[str, Any]:
    schedule, error = outcome.schedule, outcome.error
    rounds, share = _bound(schedule)
    counterexample: dict[str, Any] | None = None
    if error is not None:
        fields = ("rank", "chunk", "transfer")
        counterexample = {"message": str(error).partition("\n")[0]}
        counterexample |= {field: getattr(error, field, None) for field in fields}
        counterexample["path"] = list(error.path) if isinstance(error, VerificationError) else []
    return {
        "collective": schedule.collective,
        "algorithm": schedule.name,
        "world_size": schedule.world_size,
        "root": schedule.root if schedule.collective in algorithms.ROOTED else None,
        "proved": error is None,
        "counterexample": counterexample,
        "num_steps": schedule.num_steps,
        "num_rounds": _num_rounds(schedule),
        "num_transfers": len(schedule),
        "num_chunks": schedule.num_chunks,
        "sent_share_of_S": _exact(_busiest_share(schedule, "src")),
        "received_share_of_S": _exact(_busiest_share(schedule, "dst")),
        "bound_num_rounds": rounds,
        "bound_share_of_S": _exact(share),
        "closed_form": _closed_form(outcome),
        "proof_s": round(outcome.proof_s, 6),
        "hash": schedule.hash,
    }


def _exact(share: Fraction | None) -> str | None:
    return None if share is None else str(share)


# -- for people --------------------------------------------------------------------------------------------------------


def _report(outcomes: Sequence[Outcome], *, wide: bool) -> Iterator[RenderableType]:
    for _, group in groupby(outcomes, key=lambda outcome: outcome.schedule.collective):
        members = list(group)
        yield _table(members, wide=wide)
        forms = [(outcome.schedule.name, _closed_form(outcome)) for outcome in members]
        known = [(name, form) for name, form in forms if form]
        if known and not wide:
            yield Group("", _closed_forms(known))
        yield ""
    refused = [outcome for outcome in outcomes if outcome.error]
    for outcome in refused:
        title = f"refused: {outcome.schedule.collective} {outcome.schedule.name}"
        yield Group(Text(title, style="bold red"), Text(str(outcome.error)), "")
    yield _summary(len(outcomes) - len(refused), len(refused), sum(outcome.proof_s for outcome in outcomes))


def _summary(num_proved: int, num_refused: int, seconds: float) -> Text:
    refused = (f", {num_refused} refused", "bold red") if num_refused else ""
    note = (" Bounds on rounds are for one message per rank and round.", "dim")
    return Text.assemble((f"{num_proved} proved", "green"), refused, f" in {seconds:.2f} s.", note)


def _table(outcomes: Sequence[Outcome], *, wide: bool) -> Table:
    schedule = outcomes[0].schedule
    of_root = f", root {schedule.root}" if schedule.collective in algorithms.ROOTED else ""
    bound_rounds, bound_share = _bound(schedule)
    bound = _share(bound_share, wide=wide)
    # A reduce or gather is bounded by what its root receives, all else by what someone sends.
    receiving = schedule.collective in ("reduce", "gather")
    table = Table(
        title=f"{schedule.collective} on {_count(schedule.world_size, 'rank')}{of_root}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE,
        show_edge=False,
        show_footer=True,
        footer_style="dim",
        pad_edge=False,
        padding=(0, 1, 0, 0) if wide else 0,
    )
    table.add_column("algorithm", "lower bound", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("steps", justify="right")
    table.add_column("rounds", str(bound_rounds), justify="right")
    table.add_column("transfers", justify="right")
    table.add_column("sent", "" if receiving else bound, justify="right", no_wrap=True)
    table.add_column("received", bound if receiving else "", justify="right", no_wrap=True)
    table.add_column("proof", justify="right", no_wrap=True)
    if wide:
        table.add_column("closed form", ratio=1)
    for outcome in outcomes:
        table.add_row(*_cells(outcome, wide=wide))
    return table


def _cells(outcome: Outcome, *, wide: bool) -> Iterable[RenderableType]:
    schedule = outcome.schedule
    yield schedule.name
    yield Text("refused", style="bold red") if outcome.error else Text("proved", style="green")
    yield str(schedule.num_steps)
    yield str(_num_rounds(schedule))
    yield str(len(schedule))
    for end in ("src", "dst"):
        yield _share(_busiest_share(schedule, end), wide=wide)
    yield f"{outcome.proof_s * 1e3:.1f} ms"
    if wide:
        yield _closed_form(outcome) or ""


def _closed_forms(forms: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(style="dim")
    for name, form in forms:
        grid.add_row(name, form)
    return grid


def _share(share: Fraction | None, *, wide: bool) -> str:
    if share is None:
        return "-"
    if share.denominator == 1:
        return "0" if share == 0 else "S" if share == 1 else f"{share} S"
    return f"{share} S = {float(share):.4g} S" if wide else f"{share} S"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
