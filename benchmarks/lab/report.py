"""The tables of a run in the laboratory."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.compare.report import short_size
from benchmarks.compare.sweep import Result, Row, Timing, bus_factor
from benchmarks.lab.commands import SYSTEMS

__all__ = ["limit_s", "print_results"]


def limit_s(collective: str, size: int, num_hosts: int, rate_bits_per_s: float) -> float:
    """How long the links take at least: what the busiest of them must carry, over its rate.

    A host must send, or receive, as much as a rank of a world of ``num_hosts``, however many ranks it has: those of one
    host can add and share among themselves.
    """
    return bus_factor(collective, num_hosts) * size * 8 / rate_bits_per_s


def print_results(to: Console, result: Result, laboratory: dict[str, Any]) -> None:
    """Print a table for each collective, what the links gave, and what is missing.

    Args:
        to: where.
        result: of the run.
        laboratory: as ``python -m benchmarks.lab --json`` writes it.
    """
    hosts, rate = laboratory["num_hosts"], laboratory["rate_bits_per_s"]
    place = f"{hosts} hosts x {laboratory['ranks_per_host']} ranks, {laboratory['order']}"
    for collective in result.settings.collectives:
        rows = [row for row in result.rows if row.collective == collective]
        names = [name for name in SYSTEMS if any(name in row.timings for row in rows)]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for title in ("size", "limit", *(title for name in names for title in (name, "p99", "%"))):
            table.add_column(title, justify="right", no_wrap=True)
        if "farandole" in names:
            for title in ("best peer / it", "lo..hi"):
                table.add_column(title, justify="right", no_wrap=True)
        for row in rows:
            least_s = limit_s(collective, row.size, hosts, rate)
            cells = [cell for name in names for cell in _cells(row.timings.get(name), least_s)]
            ratio = _ratio(row) if "farandole" in names else []
            table.add_row(short_size(row.size), _ms(least_s), *cells, *ratio)
        to.print(f"{collective}, {place}: median and p99 of a call in ms, % of the links' limit", style="bold")
        to.print(table, "")
    links = " ".join(f"{100 * measured / rate:.1f}" for measured in laboratory["measured_bits_per_s"])
    to.print(
        f"links of {rate / 1e6:g} Mbit/s; plain TCP, on all at once, got {links} % of that; "
        f"{result.settings.repetitions} interleaved repetitions",
        soft_wrap=True,
    )
    for name, reason in result.missing.items():
        to.print(Text(f"missing {name}: {reason}", style="yellow"), soft_wrap=True)


def _cells(timing: Timing | None, least_s: float) -> list[str]:
    if timing is None:
        return ["-"] * 3
    return [_ms(timing.median_s), _ms(timing.p99_s), f"{100 * least_s / timing.median_s:.1f}"]


def _ratio(row: Row) -> list[Text]:
    ratio = row.ratio("farandole", "median")
    if ratio is None:
        return [Text("-"), Text("-")]
    return [Text(f"{ratio[0]:.2f}", style="green" if ratio[0] >= 1 else "red"), Text(f"{ratio[1]:.2f}..{ratio[2]:.2f}")]


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.3f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"
