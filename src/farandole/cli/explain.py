"""``farandole explain``: which algorithm a call would use, and why."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from farandole.calibration import load_calibration
from farandole.cli.algorithm_argument import HostsOption, RanksOption, topology_of
from farandole.cli.bench import parse_size
from farandole.cost_model import bus_factor
from farandole.selector import Explanation
from farandole.selector import explain as explain_choice

__all__ = ["explain"]


def explain(
    context: typer.Context,
    collective: Annotated[str, typer.Argument(metavar="COLLECTIVE", help="For example all_reduce.")],
    size: Annotated[
        int, typer.Argument(parser=parse_size, metavar="SIZE", help="S, of the whole buffer, e.g. 8, 64K, 1G.")
    ],
    ranks: RanksOption = 2,
    hosts: HostsOption = None,
    dtype: Annotated[
        str, typer.Option(help="Of the elements; 16-bit floats are summed so that they round once.")
    ] = "float32",
    wire_dtype: Annotated[
        str | None, typer.Option(help="What float32 is rounded to between hosts: bfloat16 or int8.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say which algorithm farandole would choose for a call on this machine, and what each would cost.

    The times are predictions of the cost model, with the figures of farandole calibrate; farandole bench measures. With
    several hosts, each is taken to be like this machine. In Python: Communicator.explain.

    Examples:

        farandole explain all_reduce 1M --ranks 4
        farandole explain broadcast 64K -n 16 --json
        farandole explain reduce 16M -n 4 --dtype bfloat16
        farandole explain all_reduce 16M --hosts 2x4 --wire-dtype bfloat16
    """
    topology = topology_of(context, ranks, hosts)
    explanation = explain_choice(collective, topology.world_size, size, load_calibration(), dtype, topology, wire_dtype)
    if as_json:
        print(json.dumps(asdict(explanation), indent=2))
        return
    console = Console(highlight=False)
    console.print(f"{collective}, {size:,} bytes, {explanation.ranks}: [bold]{explanation.chosen}[/]", soft_wrap=True)
    console.print(explanation.reason, soft_wrap=True)
    console.print()
    console.print(_table(explanation))
    console.print(f"[dim]calibration: {explanation.calibration}[/]", soft_wrap=True)


def _table(explanation: Explanation) -> Table:
    factor = bus_factor(explanation.collective, explanation.world_size)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("algorithm", no_wrap=True)
    for name in ("predicted us", "busbw GB/s", "steps", "most bytes sent by a rank"):
        table.add_column(name, justify="right")
    for one in explanation.candidates:
        busbw = explanation.nbytes / one.seconds * factor / 1e9 if one.seconds else 0.0
        style = "bold green" if one.algorithm == explanation.chosen else ""
        cells = (f"{one.seconds * 1e6:.2f}", f"{busbw:.2f}", str(one.rounds), f"{one.max_bytes_sent:,}")
        table.add_row(one.algorithm, *cells, style=style)
    return table
