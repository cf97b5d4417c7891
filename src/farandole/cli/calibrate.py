"""``farandole calibrate``: measures what this machine costs, and keeps it for the choice of algorithms."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from farandole.calibration import (
    Calibration,
    calibration_file,
    last_level_cache_bytes,
    load_calibration,
    processor,
    usable_cores,
)
from farandole.cli.run import report_failure
from farandole.errors import ArgumentError
from farandole.launch import run_processes

__all__ = ["SAMPLES", "calibrate"]

SAMPLES: dict[str, tuple[str, str, int]] = {
    "tiny in one step": ("all_reduce", "one_shot", 8),
    "tiny in two steps": ("all_reduce", "direct", 8),
    "one message": ("broadcast", "direct", 512),
    "eight messages": ("broadcast", "ring", 512),
    "gather, 64 KiB": ("all_gather", "direct", 64 << 10),
    "gather, 512 KiB": ("all_gather", "direct", 512 << 10),
    "gather, 64 MiB": ("all_gather", "direct", 64 << 20),
    "reduce, 64 KiB": ("all_reduce", "direct", 64 << 10),
    "reduce, 512 KiB": ("all_reduce", "direct", 512 << 10),
}
"""name -> collective, algorithm, bytes of the whole buffer."""

_MOST_CROWDED_CORES = 16
_MOST_APART = 1.5


def calibrate(
    show: Annotated[bool, typer.Option("--show", help="Measure nothing; show what is in use.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure what communication costs on this machine, for the choice of algorithms and for predictions.

    Takes a few seconds, of which the machine should be idle otherwise. The result is kept in a file below
    $XDG_CACHE_HOME or ~/.cache, for machines with this processor and number of cores. Communicators made from then on
    use it; where there is none, figures that are shipped with farandole are used.

    Examples:

        farandole calibrate
        farandole calibrate --show
        farandole explain all_reduce 1M --ranks 8
    """
    if show:
        calibration = load_calibration()
    else:
        _require_place()
        calibration = _measured()
        _keep(calibration)
    if as_json:
        print(json.dumps(asdict(calibration), indent=2))
        return
    console = Console(highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    figures = asdict(calibration)
    figures |= {f"wire {name}": value for name, value in figures.pop("wire").items() if value is not None}
    for name, value in figures.items():
        table.add_row(name, f"{value:.3g}" if isinstance(value, float) else str(value))
    console.print(table)
    if not show:
        console.print(f"kept in {calibration_file()}", soft_wrap=True)


def _measured() -> Calibration:
    """From two measurements that agree.

    Raises:
        ArgumentError: they do not.
    """
    own_cores = os.sched_getaffinity(0)
    crowded_cores = sorted(own_cores)[:_MOST_CROWDED_CORES]
    console = Console(stderr=True)
    measured = []
    for attempt in ("first", "second"):
        with console.status(f"measuring, {attempt} time") if console.is_terminal else contextlib.nullcontext():
            seconds = _run(2, list(SAMPLES))
            os.sched_setaffinity(0, crowded_cores)  # of the ranks, too
            try:
                crowded_s = _run(2 * len(crowded_cores), ["tiny in one step"])["tiny in one step"]
            finally:
                os.sched_setaffinity(0, own_cores)
            measured.append(seconds | {"crowded": crowded_s})
    first, second = measured
    differing = [name for name in first if not 1 / _MOST_APART < first[name] / second[name] < _MOST_APART]
    if differing:
        figures = ", ".join(f"{name}: {first[name] * 1e6:.3g} and {second[name] * 1e6:.3g} us" for name in differing)
        raise ArgumentError(
            f"two measurements in a row differ too much ({figures}), so nothing was kept; calibrate when the machine "
            f"is idle (its load is {os.getloadavg()[0]:.1f})"
        )
    return _calibration({name: min(first[name], second[name]) for name in first}, len(crowded_cores))


def _calibration(seconds: dict[str, float], crowded_cores: int) -> Calibration:
    """What the model must cost for the samples to take these times."""
    latency_s = max(1e-9, (seconds["eight messages"] - seconds["one message"]) / 7)
    step_s = max(latency_s, seconds["tiny in two steps"] - seconds["tiny in one step"] - 2 * latency_s)
    middle, large = 64 << 10, 512 << 10
    copying_s = max(1e-12, (seconds["gather, 512 KiB"] - seconds["gather, 64 KiB"]) / (large - middle))
    reducing_s = (seconds["reduce, 512 KiB"] - seconds["reduce, 64 KiB"]) / (large - middle)
    return Calibration(
        latency_s=latency_s,
        step_s=step_s,
        # With two ranks to a core a step takes two turns, beside the 2 x 2 x cores messages that each core moves.
        turn_s=max(step_s, (seconds["crowded"] - 4 * crowded_cores * latency_s) / 2),
        cached_bytes_per_s=1 / copying_s,
        memory_bytes_per_s=(64 << 20) / seconds["gather, 64 MiB"],
        # A rank copies half of it three times and adds up half of it, which is no faster than copying.
        reduce_bytes_per_s=0.5 / max(reducing_s - 1.5 * copying_s, copying_s / 2),
        cache_bytes=last_level_cache_bytes(),
        cores=usable_cores(),
        source=f"measured on {time.strftime('%Y-%m-%d')} on {processor()}",
    )


def _run(ranks: int, samples: Sequence[str]) -> dict[str, float]:
    lines: list[bytes] = []

    def take_line(rank: int, stream: str, line: bytes) -> None:
        if rank == 0 and stream == "stdout":
            lines.append(line)
        else:
            print(f"[{rank}] {line.decode(errors='replace')}", file=sys.stderr)

    result = run_processes(["farandole.cli.calibrate_worker", *samples], ranks, module=True, on_line=take_line)
    if result.exit_code:
        report_failure(result, ranks)
        raise typer.Exit(result.exit_code)
    seconds: dict[str, float] = json.loads(lines[-1])
    return seconds


def _require_place() -> None:
    """Raise an ArgumentError, before anything is measured, if the result could not be kept."""
    folder = calibration_file().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"cannot keep the result in {folder}: {error}; set XDG_CACHE_HOME to a folder") from error


def _keep(calibration: Calibration) -> None:
    """At once for every reader, whoever else writes."""
    path = calibration_file()
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(calibration), indent=2) + "\n")
    temporary.replace(path)
