"""The ``farandole`` command: a file per verb."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from farandole.cli.bench import bench
from farandole.cli.calibrate import calibrate
from farandole.cli.draw import draw
from farandole.cli.explain import explain
from farandole.cli.run import run
from farandole.cli.status import status
from farandole.cli.trace import trace
from farandole.cli.verify import verify
from farandole.errors import FarandoleError

__all__ = ["app", "main"]

app = typer.Typer(
    name="farandole",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# What follows the program belongs to the program: run takes no option behind it.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(verify)
app.command()(draw)
app.command()(bench)
app.command()(explain)
app.command()(calibrate)
app.command()(status)
app.command()(trace)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"farandole {version('farandole')}")
        raise typer.Exit


@app.callback()
def farandole(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Collective communication for distributed training: run it, prove it, draw it, measure it.

    Examples:

        farandole run -n 4 train.py

        farandole verify ring --ranks 8

        farandole draw ring --ranks 4

        farandole bench -n 2 --collective all_reduce

        farandole explain all_reduce 1M --ranks 4
    """


def main() -> None:
    """Entry point of the console script: errors of farandole end it with status 2 and one clear message."""
    try:
        app()
    except FarandoleError as error:
        print(f"farandole: {error}", file=sys.stderr)
        sys.exit(2)
