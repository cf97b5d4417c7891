"""What the commands of the benchmarks share: their options, their progress, and how they are interrupted."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from types import FrameType

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["among", "parse_size", "progress_on_stderr", "signals_interrupt"]

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


def parse_size(text: str | int) -> int:
    """Bytes, from 8, 64K or 1G."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write bytes, or K, M or G: 8, 64K, 1G")
    return int(match[1]) << _UNITS[match[2].upper()]


def among(text: str, allowed: tuple[str, ...], option: str) -> tuple[str, ...]:
    """The names of a list with commas, each of them allowed."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in allowed]
    if unknown or not names:
        raise typer.BadParameter(f"{option} is {text!r}; it must be some of {','.join(allowed)}")
    return names


def progress_on_stderr() -> Progress:
    """Seen on a terminal alone, and redrawn only when asked to: a spinner would take a core from the ranks."""
    shown = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=shown,
        transient=True,
        auto_refresh=False,
        disable=not shown.is_terminal,
    )


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Have all signals that ask for the end do what Ctrl-C does, so that no rank is left."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for again in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(again, signal.SIG_IGN)  # the jobs are ended in peace
        raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
