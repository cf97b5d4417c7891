"""The ``farandole`` command: a file per verb."""

from __future__ import annotations

import sys

import typer

from farandole.cli.bench import bench
from farandole.cli.draw import draw
from farandole.cli.run import run
from farandole.cli.verify import verify
from farandole.errors import FarandoleError

__all__ = ["app", "main"]

app = typer.Typer(
    name="farandole",
    help="Collective communication for distributed training: run it, prove it, draw it, measure it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)(run)
app.command()(verify)
app.command()(draw)
app.command()(bench)


def main() -> None:
    """Entry point of the console script: errors of farandole end it with status 2 and one clear message."""
    try:
        app()
    except FarandoleError as error:
        print(f"farandole: {error}", file=sys.stderr)
        sys.exit(2)
