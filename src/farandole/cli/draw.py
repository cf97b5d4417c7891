"""``farandole draw``: an algorithm, step by step, in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from farandole.cli.algorithm_argument import (
    CollectiveOption,
    HostsOption,
    RanksOption,
    RootOption,
    is_file,
    schedules_of,
    topology_of,
)
from farandole.errors import ArgumentError, VerificationError
from farandole.schedule import Schedule
from farandole.topology import Topology
from farandole.verifier import verify
from farandole.views.execution import Execution, execute
from farandole.views.terminal import draw_step, draw_steps, heading

__all__ = ["draw"]


def draw(
    context: typer.Context,
    algorithm: Annotated[str, typer.Argument(metavar="ALGORITHM", help="A name, or PATH.py:FUNCTION.")],
    ranks: RanksOption = 4,
    hosts: HostsOption = None,
    collective: CollectiveOption = None,
    root: RootOption = None,
    step: Annotated[int | None, typer.Option("--step", metavar="K", help="Draw this step alone.")] = None,
    max_ranks: Annotated[
        int, typer.Option("--max-ranks", min=1, metavar="M", help="Draw no more ranks than that.")
    ] = 16,
) -> None:
    """Draw an algorithm: who sends what in each step, and what every rank then holds.

    A schedule that is wrong is drawn as far as it makes sense; the counterexample follows, and the exit code is 1.
    Without --collective, that is all_reduce if there is an algorithm of that name for it.

    Examples:

        farandole draw ring --ranks 4
        farandole draw tree --collective broadcast --ranks 7 --root 3
        farandole draw hierarchical --hosts 2x2
        farandole draw plans/mine.py:all_reduce --ranks 6 --step 2
    """
    schedule, others = _one_schedule(algorithm, topology_of(context, ranks, hosts), collective, root)
    execution = execute(schedule)
    console = Console(highlight=False)
    console.print(heading(schedule))
    if step is None:
        for renderable in draw_steps(execution, max_ranks=max_ranks):
            console.print(renderable)
    else:
        _require_step(execution, step)
        console.print(draw_step(execution, step, max_ranks=max_ranks))
    error = _counterexample(execution)
    console.print()
    if error is not None:
        console.print(Text(f"refused: {error}", style="red"))
        raise typer.Exit(1)
    console.print(Text(f"Proved: this is {_with_article(schedule.collective)}.", style="green"))
    if others:
        console.print(Text(f"There is a {schedule.name} for {', '.join(others)} too: see --collective.", style="dim"))


def _one_schedule(
    algorithm: str, topology: Topology, collective: str | None, root: int | None
) -> tuple[Schedule, list[str]]:
    """The schedule to draw, and the collectives that have an algorithm of the same name."""
    world_size = topology.world_size
    if collective is not None or is_file(algorithm):
        return schedules_of(algorithm, world_size, collective=collective, root=root, topology=topology)[0], []
    schedules = schedules_of(algorithm, world_size, root=root, topology=topology)
    # A root that was asked for says that a collective with a root is meant.
    first, *others = sorted(schedules, key=lambda schedule: schedule.root != (root or 0))
    return first, [schedule.collective for schedule in others]


def _require_step(execution: Execution, step: int) -> None:
    last = execution.num_steps - (execution.error is None)
    if not 0 <= step <= last:
        broken = " that can be drawn" if execution.error else ""
        raise ArgumentError(f"step is {step}; the steps{broken} are 0..{last}" if last >= 0 else "there are no steps")


def _counterexample(execution: Execution) -> VerificationError | None:
    if execution.error is not None:
        return execution.error
    try:
        verify(execution.schedule)
    except VerificationError as error:
        return error
    return None


def _with_article(collective: str) -> str:
    return f"{'an' if collective[0] in 'aeiou' else 'a'} {collective}"
