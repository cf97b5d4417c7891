"""``farandole bench``: how fast a collective is, size by size, in the manner of nccl-tests."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from farandole.cli.algorithm_argument import MAX_RANKS, schedules_of
from farandole.cli.bench_check import numpy_dtype
from farandole.cli.bench_report import Report
from farandole.cli.bench_settings import COLLECTIVES, Settings
from farandole.cli.run import report_failure
from farandole.cli.verify import prove
from farandole.collectives import is_parted, is_reducing
from farandole.dtypes import DTYPES, REDUCE_OPS, dtype_named, require_reducible
from farandole.errors import ArgumentError
from farandole.launch import run_processes

__all__ = ["bench", "counts_between", "parse_size"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str | int) -> int:
    """The number of bytes that "64M" means; K, M and G are powers of 1024."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write bytes, or K, M or G: 8, 64K, 1G")
    return int(match[1]) * _UNITS[match[2].upper()]


def bench(
    collective: Annotated[
        str, typer.Option("-c", "--collective", metavar="NAME", help=f"One of {', '.join(COLLECTIVES)}.")
    ] = "all_reduce",
    ranks: Annotated[
        int, typer.Option("-n", "-g", "--ranks", min=1, max=MAX_RANKS, metavar="N", help="Number of ranks.")
    ] = 2,
    min_bytes: Annotated[
        int, typer.Option("-b", "--min-bytes", parser=parse_size, metavar="SIZE", help="Smallest S, e.g. 8, 64K, 1G.")
    ] = 8,
    max_bytes: Annotated[
        int,
        typer.Option("-e", "--max-bytes", parser=parse_size, metavar="SIZE", help="Largest S.", show_default="64M"),
    ] = 64 << 20,
    factor: Annotated[int, typer.Option("-f", "--factor", min=2, help="Each size is this many times the last.")] = 2,
    dtype: Annotated[
        str, typer.Option("-d", "--dtype", metavar="NAME", help=f"One of {', '.join(DTYPES)}.")
    ] = "float32",
    op: Annotated[str, typer.Option("-o", "--op", metavar="NAME", help=f"One of {', '.join(REDUCE_OPS)}.")] = "sum",
    root: Annotated[
        int,
        typer.Option("--root", min=0, help="Root of broadcast, reduce, gather and scatter (src or dst in Python)."),
    ] = 0,
    algorithm: Annotated[
        str | None,
        typer.Option(
            "-a",
            "--algorithm",
            metavar="ALGORITHM",
            help="A name, or PATH.py:FUNCTION.",
            show_default="what farandole chooses",
        ),
    ] = None,
    iterations: Annotated[int, typer.Option("-i", "--iterations", min=1, help="Timed calls per row.")] = 20,
    warmup: Annotated[int, typer.Option("-w", "--warmup", min=0, help="Calls per row before those.")] = 5,
    registered: Annotated[
        bool, typer.Option("--registered", help="Buffers in registered memory, as Communicator.empty gives.")
    ] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Before each timed call, fill the caches with other data.")
    ] = False,
    check: Annotated[bool, typer.Option(help="Count wrong elements; any makes the exit code 1.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV instead: a line per size, and per out-of-place and in-place.")
    ] = False,
) -> None:
    """Measure a collective on processes of this machine, size by size.

    S, the size, is that of the whole buffer, as in nccl-tests: for all_gather the gathered result, for reduce_scatter
    what goes in. It is rounded up so that every rank's part has equally many elements, and at least one.

    time is the median over the iterations, p99 their 99th percentile (of fewer than 100 iterations: the slowest). An
    iteration takes as long as it takes the slowest rank, from the call in Python to its return; the ranks meet in a
    barrier before each.

    algbw = S / time, in GB/s (1e9 bytes).

    busbw = algbw x factor. The factor is 2(N-1)/N for all_reduce; (N-1)/N for reduce_scatter, all_gather, all_to_all,
    gather and scatter; 1 for broadcast and reduce.

    Beware: busbw is a normalised figure, there so that results can be compared across N and with the speed of a link.
    It is not what went over any link or through memory: that depends on the algorithm.

    Buffers are the same in all iterations, so small ones stay in the cache, which flatters the figures; with --cold,
    every rank overwrites twice the last-level cache before each iteration.

    transport: staged data are copied through shared memory; mapped data are read where they lie, in registered memory.

    #wrong counts, over all ranks, the elements of one call on real data that are not what they must be.

    Examples:

        farandole bench -n 4 --collective all_gather
        farandole bench -n 2 -b 1M -e 1G -f 4 --algorithm ring --iterations 100
        farandole bench -n 8 -c reduce_scatter --dtype bfloat16 --json > result.json
    """
    if as_json and as_csv:
        raise ArgumentError("--json and --csv exclude each other; choose one")
    counts = _checked_counts(collective, ranks, min_bytes, max_bytes, factor, dtype, op, root, algorithm)
    settings = Settings(collective, counts, dtype, op, root, algorithm, iterations, warmup, check, registered, cold)
    report = Report(settings, ranks, "json" if as_json else "csv" if as_csv else "table")
    command = ["farandole.cli.bench_worker", json.dumps(asdict(settings))]
    with report:
        result = run_processes(command, ranks, module=True, on_line=report.take_line)
    if result.exit_code:
        report_failure(result, ranks)
        raise typer.Exit(result.exit_code)
    if report.num_wrong:
        raise typer.Exit(1)


def _checked_counts(
    collective: str,
    ranks: int,
    min_bytes: int,
    max_bytes: int,
    factor: int,
    dtype: str,
    op: str,
    root: int,
    algorithm: str | None,
) -> tuple[int, ...]:
    """The counts to measure, once it is certain that the calls will work: better refused here than on every rank."""
    if collective not in COLLECTIVES:
        raise ArgumentError(f"collective is {collective!r}; it must be one of {', '.join(COLLECTIVES)}")
    if root >= ranks:
        raise ArgumentError(f"root is {root}, but the ranks are 0..{ranks - 1}")
    if min_bytes > max_bytes:
        raise ArgumentError(f"the sizes go from {min_bytes} to {max_bytes} bytes; -b must not be above -e")
    element = dtype_named(dtype)
    numpy_dtype(dtype)
    if is_reducing(collective) and collective != "barrier":
        require_reducible(element, op)
    if algorithm is not None:
        for schedule in schedules_of(algorithm, ranks, collective=collective, root=root):
            error = prove(schedule).error
            if error is not None:
                raise error
    counts = counts_between(collective, ranks, element.itemsize, min_bytes, max_bytes, factor)
    _require_memory(ranks, max(counts) * element.itemsize)
    return counts


def _require_memory(ranks: int, largest_bytes: int) -> None:
    """Refuse what cannot fit: while data are filled in, each rank holds the largest buffer twice, and often more."""
    needed = 2 * ranks * largest_bytes
    available = _available_bytes()
    if needed > available:
        raise ArgumentError(
            f"the largest size is {largest_bytes:,} bytes; {ranks} ranks need at least 2 x {ranks} times that, "
            f"{needed:,} bytes, and {available:,} bytes of memory are available; choose a smaller --max-bytes"
        )


def _available_bytes() -> int:
    """What the kernel says can be allocated without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")  # every Linux since 3.14 has it


def counts_between(
    collective: str, num_ranks: int, itemsize: int, min_bytes: int, max_bytes: int, factor: int
) -> tuple[int, ...]:
    """Elements of the whole buffer for each row.

    Args:
        collective: one of `COLLECTIVES`; where every rank owns a part, counts are multiples of ``num_ranks``.
        num_ranks: N.
        itemsize: bytes per element.
        min_bytes: the smallest size.
        max_bytes: no size is larger.
        factor: each size is this many times the one before.

    Returns:
        The sizes, rounded up to whole counts >= 1, without repetition; (0,) for barrier.
    """
    if collective == "barrier":
        return (0,)
    granule = num_ranks if is_parted(collective) else 1
    counts = []
    size = max(min_bytes, 1)
    while size <= max_bytes:
        counts.append(-(-size // (itemsize * granule)) * granule)
        size *= factor
    return tuple(dict.fromkeys(counts)) or (granule,)
