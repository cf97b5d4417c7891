"""Measures farandole beside the peers; `scripts/compare --help` says how."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import among, parse_size, signals_interrupt
from benchmarks.compare.environments import install
from benchmarks.compare.jobs import SYSTEMS, Command, commands_here
from benchmarks.compare.plot import save_plot
from benchmarks.compare.report import print_report
from benchmarks.compare.run import run_all
from benchmarks.compare.sweep import COLLECTIVES, Result, Settings

__all__ = ["compare", "main"]

_DTYPES = ("float32", "float64", "int32", "int64")


def compare(
    collectives: Annotated[
        str, typer.Option("-c", "--collectives", metavar="NAMES", help=f"Some of {','.join(COLLECTIVES)}.")
    ] = "all_reduce",
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=2, max=256, help="Number of ranks.")] = 2,
    min_bytes: Annotated[
        int, typer.Option("-b", "--min-bytes", parser=parse_size, metavar="SIZE", help="Smallest S, e.g. 8, 64K.")
    ] = 64,
    max_bytes: Annotated[
        int, typer.Option("-e", "--max-bytes", parser=parse_size, metavar="SIZE", help="Largest S.", show_default="64M")
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
        among(collectives, COLLECTIVES, "--collectives"),
        ranks,
        tuple(sizes),
        among(dtype, _DTYPES, "--dtype")[0],
        repetitions,
        block_seconds,
    )
    wanted = among(systems, tuple(SYSTEMS), "--systems")
    wanted = tuple(name for name in SYSTEMS if name in wanted)
    _require_memory(ranks * len(wanted), sizes[-1])
    result = Result(settings)
    interrupted_by = 0
    try:
        with signals_interrupt():
            run_all(wanted, result, lambda name, _folder: _commands_of(name, ranks))
    except KeyboardInterrupt as error:
        interrupted_by = int(error.args[0])
        print(f"compare: ended by {signal.Signals(interrupted_by).name}; this is what there is", file=sys.stderr)
    _show(result, json_file, plot)
    if interrupted_by:
        raise typer.Exit(128 + interrupted_by)
    raise typer.Exit(0 if result.rows and "farandole" not in result.missing else 1)


def _commands_of(name: str, num_ranks: int) -> list[Command]:
    environment = SYSTEMS[name].environment
    if environment is not None:
        install(environment)
    return commands_here(name, num_ranks)


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
