"""Measures collectives between the hosts of a laboratory; `python -m benchmarks.lab --help` says how."""

from __future__ import annotations

import os
import platform
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import among, parse_size, signals_interrupt
from benchmarks.compare.run import run_all
from benchmarks.compare.sweep import COLLECTIVES, Result, Settings
from benchmarks.lab.commands import ORDERS, SYSTEMS, commands_of
from benchmarks.lab.laboratory import Laboratory, UnavailableError
from benchmarks.lab.probe import probe
from benchmarks.lab.report import print_results
from benchmarks.report import console, machine, print_machine, save

__all__ = ["lab", "main"]


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({parse_size(size) for size in text.split(",")}))


def lab(
    hosts: Annotated[int, typer.Option("--hosts", min=2, max=32, help="Number of hosts.")] = 4,
    ranks_per_host: Annotated[int, typer.Option("-n", "--ranks-per-host", min=1, max=32, help="Of each system.")] = 1,
    order: Annotated[
        str, typer.Option("--order", metavar="ORDER", help="packed: ranks in a row on one host; cyclic: dealt in turn.")
    ] = "packed",
    rate_mbit: Annotated[
        float, typer.Option("--rate", min=0.1, max=1e5, metavar="MBIT", help="Of each link, in 1e6 bits per second.")
    ] = 200.0,
    collectives: Annotated[
        str, typer.Option("-c", "--collectives", metavar="NAMES", help=f"Some of {','.join(COLLECTIVES)}.")
    ] = "all_reduce",
    sizes: Annotated[str, typer.Option("-s", "--sizes", metavar="SIZES", help="S of float32.")] = "1K,64K,1M,16M",
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, help="Turns of every system, per size.")] = 5,
    block_seconds: Annotated[
        float, typer.Option(min=0.01, help="How long a turn aims to be; it has 2 to 1000 timed calls.")
    ] = 0.5,
    systems: Annotated[
        str, typer.Option("--systems", metavar="NAMES", help=f"Some of {','.join(SYSTEMS)}.")
    ] = ",".join(SYSTEMS),
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all results there.")] = None,
) -> None:
    """Measure collectives between several "hosts" on this machine, joined by links of a limited rate.

    The systems take turns and are timed as in scripts/compare. The limit is the least time in which the links can carry
    what one host must send or receive: 2(H-1)/H S over the rate for all_reduce on H hosts, however many ranks each has.
    The rate counts Ethernet frames, so that TCP gets 95 % of it at best; what it does get is measured first.

    It needs root, and the packages iproute2 and util-linux. The hosts are gone at the end, even if this is killed.

    Examples:

        python -m benchmarks.lab
        python -m benchmarks.lab --hosts 2 -n 2 --order cyclic --json cyclic.json
        python -m benchmarks.lab --systems gloo,openmpi -c all_gather,broadcast -s 64K,1M
    """
    num_ranks = hosts * ranks_per_host
    settings = Settings(
        among(collectives, COLLECTIVES, "--collectives"),
        num_ranks,
        _sizes(sizes),
        "float32",
        repetitions,
        block_seconds,
    )
    chosen_order = among(order, ORDERS, "--order")[0]
    wanted = among(systems, SYSTEMS, "--systems")
    result = Result(settings)
    place: dict[str, Any] = {
        "num_hosts": hosts,
        "ranks_per_host": ranks_per_host,
        "order": chosen_order,
        "rate_bits_per_s": rate_mbit * 1e6,
    }
    began = machine()
    interrupted_by = 0
    try:
        with signals_interrupt(), Laboratory(hosts, rate_mbit * 1e6) as laboratory:
            place["measured_bits_per_s"] = probe(laboratory)
            run_all(
                [name for name in SYSTEMS if name in wanted],
                result,
                lambda name, folder: commands_of(name, laboratory, ranks_per_host, chosen_order, folder),
            )
    except UnavailableError as error:
        print(f"lab: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt as error:
        interrupted_by = int(error.args[0])
        print(f"lab: ended by {signal.Signals(interrupted_by).name}; this is what there is", file=sys.stderr)
    versions = {name: version.removeprefix(f"{name} ") for name, version in result.versions.items()}
    versions["Python"] = platform.python_version()
    result.machine = {**began, "load_after": os.getloadavg()[0], "versions": versions}
    save({**result.as_dict(), "laboratory": place}, json_file)
    if "measured_bits_per_s" in place:
        print_results(console(), result, place)
        print_machine(console(), result.machine)
    raise typer.Exit(128 + interrupted_by if interrupted_by else 0 if result.rows else 1)


def main() -> None:
    """The command."""
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
    app.command()(lab)
    app(prog_name="python -m benchmarks.lab")


if __name__ == "__main__":
    main()
