"""The tables of a run."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.compare.jobs import SYSTEMS
from benchmarks.compare.sweep import Result, Row, Timing, bus_factor

__all__ = ["print_report", "short_size"]

_FILE_WIDTH = 160
_OWN = ("farandole", "farandole-registered")


def short_size(size: int) -> str:
    """16M, or 16000000 where no unit divides it."""
    for unit, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if size % unit == 0:
            return f"{size // unit}{letter}"
    return str(size)


def print_report(result: Result) -> None:
    """Print tables of times, ratios included, and one of bandwidths for each collective; then what is missing."""
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if is_sized else _FILE_WIDTH)
    settings = result.settings
    for collective in settings.collectives:
        rows = [row for row in result.rows if row.collective == collective]
        if not rows:
            continue
        names = [name for name in SYSTEMS if any(name in row.timings for row in rows)]
        title = (
            f"{collective}, {settings.ranks} ranks, {settings.dtype}, {settings.repetitions} interleaved repetitions: "
            f"median / p99 of a call in us"
        )
        console.print(title, style="bold")
        console.print(_times("median", names, rows), "")
        console.print(
            "a call and the barrier before it, together, in us: mean of a repetition, median of those", style="bold"
        )
        console.print(_times("period", names, rows), "")
        console.print(
            "bus bandwidth in GB/s (1e9 bytes); of copy: bytes read and written, by all ranks together", style="bold"
        )
        console.print(_bandwidths(collective, names, rows, settings.ranks), "")
    machine = result.machine
    console.print(
        f"{machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}; load average (1 min) "
        f"{machine['load_before']:.2f} before, {machine['load_after']:.2f} after; began {machine['began']}"
    )
    for name, version in result.versions.items():
        idle = f"; took {result.idle[name]:.1%} of a core while it waited" if name in result.idle else ""
        console.print(f"{name}: {version}{idle}", soft_wrap=True)
    for name, reason in result.missing.items():
        console.print(Text(f"missing {name}: {reason}", style="yellow"), soft_wrap=True)


def _times(what: str, names: list[str], rows: list[Row]) -> Table:
    table = _table(names)
    own = [name for name in _OWN if name in names]
    for name in own:
        table.add_column("best peer / it" if name == "farandole" else "/ registered", justify="right")
        table.add_column("lo..hi", justify="right")
    table.add_column("best peer")
    for row in rows:
        best = row.best_peer(what)
        cells = [
            Text(_cell(row.timings.get(name), what), style="bold" if name == best or name in _OWN else "")
            for name in names
        ]
        ratios: list[Text] = []
        for name in own:
            ratio = row.ratio(name, what)
            if ratio is None:
                ratios += [Text("-"), Text("-")]
            else:
                style = "green" if ratio[0] >= 1 else "red"
                ratios += [Text(f"{ratio[0]:.2f}", style=style), Text(f"{ratio[1]:.2f}..{ratio[2]:.2f}")]
        table.add_row(short_size(row.size), *cells, *ratios, best or "-")
    return table


def _bandwidths(collective: str, names: list[str], rows: list[Row], ranks: int) -> Table:
    table = _table(names)
    for row in rows:
        cells = []
        for name in names:
            factor = 2 * ranks if name == "copy" else bus_factor(collective, ranks)
            timing = row.timings.get(name)
            cells.append("-" if timing is None else f"{factor * row.size / timing.median_s / 1e9:.2f}")
        table.add_row(short_size(row.size), *cells)
    return table


def _table(names: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("size", justify="right", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cell(timing: Timing | None, what: str) -> str:
    if timing is None:
        return "-"
    return _us(timing.period_s) if what == "period" else f"{_us(timing.median_s)} / {_us(timing.p99_s)}"


def _us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"
