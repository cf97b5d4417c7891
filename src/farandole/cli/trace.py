"""``farandole trace``: how much communication a trace shows, and how much of it was exposed."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from farandole.errors import ArgumentError
from farandole.exposure import Exposure
from farandole.trace_file import RankExposure, read_trace

__all__ = ["trace"]

_WIDTH = 120
"""Characters in a line where there is no terminal that says."""

_COLUMNS = ("seconds", "computing", "waiting", "communicating", "exposed", "hidden")


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="What farandole.trace wrote; several for ranks on their own."),
    ],
    steps: Annotated[bool, typer.Option("--steps", help="A line for each step of training of each rank.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show how long each rank of a trace communicated, and how much of that was exposed.

    All is in seconds. Communication is exposed while a thread of the rank waits for it, in a blocking call or for one
    in the background; the rest is hidden. Computing is what forward, backward, optimizers and the program's own spans
    took, without waiting. The file itself opens in https://ui.perfetto.dev.

    Examples:

        farandole trace steps.json
        farandole trace steps.json --steps
        farandole trace steps.rank0.json steps.rank2.json --json
    """
    exposures = [part.exposure() for path in files for part in read_trace(path)]
    exposures.sort(key=lambda one: one.rank)
    ranks = [one.rank for one in exposures]
    for rank in ranks:
        if ranks.count(rank) > 1:
            raise ArgumentError(f"rank {rank} is in several of these files; give those of one trace")
    if as_json:
        print(json.dumps({"ranks": [asdict(one) for one in exposures]}, indent=2))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    console.print(_table(exposures, steps))
    for one in exposures:
        if one.num_missing:
            console.print(f"not complete: there was no room for {one.num_missing:,} spans of rank {one.rank}")


def _table(exposures: list[RankExposure], steps: bool) -> Table:
    hosts = sorted({one.host for one in exposures})
    title = f"{len(exposures)} rank{'s' if len(exposures) > 1 else ''} on {', '.join(hosts[:5])}, seconds"
    table = Table(title=Text(title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("rank", "step" if steps else "steps", *_COLUMNS, "% exposed"):
        table.add_column(name, justify="right")
    for one in exposures:
        if steps:
            for number, step in enumerate(one.steps, 1):
                table.add_row(str(one.rank), str(number), *_cells(step))
        table.add_row(str(one.rank), "all" if steps else str(len(one.steps)), *_cells(one.total))
    return table


def _cells(exposure: Exposure) -> list[str]:
    share = f"{100 * exposure.exposed / exposure.communicating:.0f}" if exposure.communicating else "-"
    return [*(f"{getattr(exposure, name):.4f}" for name in _COLUMNS), share]
