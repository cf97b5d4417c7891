"""Measures farandole beside the peers; `scripts/compare --help` says how."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.compare.environments import MissingError, install
from benchmarks.compare.jobs import SYSTEMS, Job
from benchmarks.compare.plot import save_plot
from benchmarks.compare.report import print_report
from benchmarks.compare.sweep import COLLECTIVES, Result, Settings, counts_of, measure

__all__ = ["compare", "main"]

_DTYPES = ("float32", "float64", "int32", "int64")
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


def _size(text: str | int) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write bytes, or K, M or G: 8, 64K, 1G")
    return int(match[1]) << _UNITS[match[2].upper()]


def _among(text: str, allowed: tuple[str, ...], option: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in allowed]
    if unknown or not names:
        raise typer.BadParameter(f"{option} is {text!r}; it must be some of {','.join(allowed)}")
    return names


def compare(
    collectives: Annotated[
        str, typer.Option("-c", "--collectives", metavar="NAMES", help=f"Some of {','.join(COLLECTIVES)}.")
    ] = "all_reduce",
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=2, max=256, help="Number of ranks.")] = 2,
    min_bytes: Annotated[
        int, typer.Option("-b", "--min-bytes", parser=_size, metavar="SIZE", help="Smallest S, e.g. 8, 64K.")
    ] = 64,
    max_bytes: Annotated[
        int, typer.Option("-e", "--max-bytes", parser=_size, metavar="SIZE", help="Largest S.", show_default="64M")
    ] = 64 << 20,
    factor: Annotated[int, typer.Option("-f", "--factor", min=2, help="Each size is this many times the last.")] = 16,
    dtype: Annotated[
        str, typer.Option("-d", "--dtype", metavar="NAME", help=f"One of {','.join(_DTYPES)}.")
    ] = "float32",
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, help="Turns of every system, per size.")] = 5,
    block_seconds: Annotated[
        float, typer.Option(min=0.01, help="How long a turn aims to be; it has 2 to 1000 timed calls.")
    ] = 0.3,
    systems: Annotated[
        str, typer.Option("--systems", metavar="NAMES", help=f"Some of {','.join(SYSTEMS)}.", show_default="all")
    ] = ",".join(SYSTEMS),
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all results there.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Write FILE as .png and .svg.", dir_okay=False)
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", exists=True, help="Measure nothing; show what --json wrote there."),
    ] = None,
) -> None:
    """Measure collectives of farandole and of the libraries people would use instead, interleaved in one run.

    The systems take turns, A B C A B C ..., since a machine that others use is soon twice as slow as before: only
    ratios within one run count. Each runs as one job that sleeps while it is not its turn.

    The ratio is the best peer's median / farandole's median: above 1, farandole is faster. lo..hi is the
    least and the most that any repetition gave. Sizes, bus bandwidth and times are as in farandole bench; all_reduce
    and broadcast are in place, the others not.

    The clock of a rank that waits for a core has not started yet. So where there are more ranks than cores, trust the
    second table alone, which has the whole time, barriers included.

    copy is no system: every rank copies S bytes at the same time, which shows what the memory gives.

    A run takes about sizes x systems x repetitions x block seconds, and some seconds to start. What cannot be installed
    or started is reported as missing.

    Examples:

        scripts/compare
        scripts/compare -n 4 -c all_reduce,broadcast -b 1K -e 256M -f 4 --plot docs/images/compare.svg
        scripts/compare --systems farandole,openmpi -b 64 -e 64 --repetitions 20 --json result.json
        scripts/compare --from result.json --plot compare.png
    """
    if from_file is not None:
        _show(Result.from_dict(json.loads(from_file.read_text())), None, plot)
        return
    if min_bytes > max_bytes or min_bytes < 1:
        raise typer.BadParameter(f"the sizes go from {min_bytes} to {max_bytes} bytes")
    sizes = [min_bytes]
    while sizes[-1] * factor <= max_bytes:
        sizes.append(sizes[-1] * factor)
    settings = Settings(
        _among(collectives, COLLECTIVES, "--collectives"),
        ranks,
        tuple(sizes),
        _among(dtype, _DTYPES, "--dtype")[0],
        repetitions,
        block_seconds,
    )
    wanted = _among(systems, tuple(SYSTEMS), "--systems")
    wanted = tuple(name for name in SYSTEMS if name in wanted)
    _require_memory(ranks * len(wanted), sizes[-1])
    result = Result(settings)
    interrupted_by = 0
    try:
        with _signals():
            _run(wanted, result)
    except KeyboardInterrupt as error:
        interrupted_by = int(error.args[0])
        print(f"compare: ended by {signal.Signals(interrupted_by).name}; this is what there is", file=sys.stderr)
    _show(result, json_file, plot)
    if interrupted_by:
        raise typer.Exit(128 + interrupted_by)
    raise typer.Exit(0 if result.rows and "farandole" not in result.missing else 1)


def _run(wanted: tuple[str, ...], result: Result) -> None:
    settings = result.settings
    console = Console(stderr=True)
    num_rows = sum(len(counts_of(collective, settings)) for collective in settings.collectives)
    # Redrawn only between turns: a spinner would take a core from the ranks ten times a second.
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        auto_refresh=False,
        disable=not console.is_terminal,
    )
    jobs: dict[str, Job] = {}
    with tempfile.TemporaryDirectory(prefix="compare-") as folder, contextlib.ExitStack() as stack:
        stack.callback(_close, jobs)
        for name in wanted:
            try:
                environment = SYSTEMS[name].environment
                if environment is not None:
                    install(environment)
                jobs[name] = Job(name, settings.ranks, Path(folder))
            except (MissingError, OSError) as error:
                result.missing[name] = str(error)
            else:
                result.versions[name] = jobs[name].version
        with progress:
            task = progress.add_task("measuring", total=num_rows * settings.repetitions * len(jobs))

            def advance(description: str) -> None:
                progress.update(task, advance=1, description=description)
                progress.refresh()

            measure(jobs, result, advance)


def _close(jobs: dict[str, Job]) -> None:
    for job in jobs.values():
        job.close()


@contextlib.contextmanager
def _signals() -> Iterator[None]:
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


def _require_memory(num_processes: int, largest_bytes: int) -> None:
    """Refuse what cannot fit: the ranks of all systems hold their buffers, and their libraries about as much again."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    needed = 2 * num_processes * largest_bytes
    if needed > available:
        raise typer.BadParameter(
            f"{num_processes} processes with {largest_bytes:,} bytes need about {needed:,} bytes, and {available:,} "
            f"bytes of memory are available; choose a smaller --max-bytes, or fewer --systems"
        )


def _show(result: Result, json_file: Path | None, plot: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_dict(), indent=1) + "\n")
    if result.machine:
        print_report(result)
    else:
        for name, reason in result.missing.items():
            print(f"missing {name}: {reason}", file=sys.stderr)
    if plot is not None and result.rows:
        print("wrote " + ", ".join(str(path) for path in save_plot(result, plot)))


def main() -> None:
    """The command."""
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
    app.command()(compare)
    app(prog_name="scripts/compare")


if __name__ == "__main__":
    main()
