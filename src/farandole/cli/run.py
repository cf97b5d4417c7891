"""``farandole run``: start a program as the ranks of a job."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from farandole.launch import JobResult, RankFailure, run_processes

__all__ = ["report_failure", "run"]


_OWN_OPTIONS = re.compile(r"-n\d*|-m|--(ranks|prefix|module|max-lost)(=.*)?")


def run(
    command: Annotated[list[str], typer.Argument(help="A Python script, or any program, with its arguments.")],
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", min=1, help="Number of ranks to start.", show_default="2")
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="The command is a Python module, as in python -m.")
    ] = False,
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Put the rank before every line of output, and keep lines whole.")
    ] = False,
    max_lost: Annotated[
        int,
        typer.Option(
            min=0, help="Let the others go on where up to so many ranks fail after init; see Communicator.shrink."
        ),
    ] = 0,
) -> None:
    """Run a program on several ranks of this machine; one that fails ends all, unless --max-lost allows it.

    Each rank finds RANK, WORLD_SIZE, LOCAL_RANK and the job's rendezvous in its environment, and calls
    farandole.init(). Options of farandole run come before the program; all that follows it is the program's own.

    Without --prefix, ranks write to the terminal themselves, as progress bars and colours need it; lines of several
    ranks may then mix. With --prefix they write to farandole run, which prints whole lines.

    Examples:

        farandole run -n 4 train.py --epochs 3
        farandole run -n 2 --prefix -m my_package.train
        farandole run -n 2 -- ./my_program --its-own-option
        farandole run -n 4 --max-lost 2 examples/survivors.py
    """
    if ranks is None:
        ranks = 2
        _hint_at_misplaced_option(command, ranks)

    def say_lost(failure: RankFailure) -> None:
        print(f"farandole: rank {failure.rank} of {ranks} {failure.reason}; the others go on", file=sys.stderr)
        print(failure.traceback, file=sys.stderr, end="")

    on_line = _print_line if prefix else None
    result = run_processes(command, ranks, module=module, on_line=on_line, max_lost=max_lost, on_lost=say_lost)
    report_failure(result, ranks)
    raise typer.Exit(result.exit_code)


def _hint_at_misplaced_option(command: Sequence[str], ranks: int) -> None:
    program, *arguments = command
    if not arguments or not _OWN_OPTIONS.fullmatch(arguments[0]):
        return
    misplaced = " ".join(arguments[:2] if arguments[0] in ("-n", "--ranks", "--max-lost") else arguments[:1])
    print(
        f"farandole: note: {misplaced} goes to {program}, and {ranks} ranks are started; options of farandole run come "
        f"before the program: farandole run {misplaced} {program}",
        file=sys.stderr,
    )


def report_failure(result: JobResult, ranks: int) -> None:
    """Say on stderr which rank failed first, and how; nothing if none did."""
    failure = result.failure
    if failure is None:
        return
    print(f"farandole: rank {failure.rank} of {ranks} {failure.reason}; all ranks were ended", file=sys.stderr)
    if failure.traceback:
        print(failure.traceback, file=sys.stderr, end="")


def _print_line(rank: int, stream: str, line: bytes) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.write(f"[{rank}] {line.decode(errors='replace')}\n")
    target.flush()
