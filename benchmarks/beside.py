"""What the benchmarks of the torch backend share: ranks with a group of each backend, and the report.

The command starts itself again as the ranks of a job. Rank 0 prints JSON lines, each with one of "versions", "total",
"progress" and "row", which the command takes up.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.command import progress_on_stderr
from benchmarks.report import machine
from farandole.launch import run_processes

__all__ = [
    "BACKENDS",
    "groups",
    "parser_of",
    "run_ranks",
    "say",
    "slowest",
    "summary",
    "turn",
]

BACKENDS = ("farandole", "gloo")
_Batch = TypeVar("_Batch")


# -- the command ---------------------------------------------------------------------------------------------------


def parser_of(module: str, description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has; ``--rank`` is what `run_ranks` starts a rank with."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    return parser


def run_ranks(module: str, settings: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Run the ranks of a benchmark: ``python -m module --rank SETTINGS``.

    Returns:
        The machine, the settings and the rows that rank 0 printed.

    Raises:
        SystemExit: a rank failed, or somebody interrupted.
    """
    result: dict[str, Any] = {"machine": machine(), "settings": {"ranks": ranks, **settings}, "rows": []}
    progress = progress_on_stderr()
    task = progress.add_task("starting")

    def take(rank: int, stream: str, line: bytes) -> None:
        if stream == "stderr":
            sys.stderr.write(f"[{rank}] {line.decode(errors='replace')}\n")
            return
        for what, value in json.loads(line).items():
            if what == "total":
                progress.update(task, total=value)
            elif what == "progress":
                progress.update(task, advance=1, description=value)
            elif what == "row":
                result["rows"].append(value)
            else:
                result["machine"][what] = value
        progress.refresh()

    with progress:
        job = run_processes([module, "--rank", json.dumps(settings)], ranks, module=True, on_line=take)
    if job.failure is not None:
        print(f"rank {job.failure.rank} {job.failure.reason}\n{job.failure.traceback or ''}", file=sys.stderr)
    if job.exit_code:
        sys.exit(job.exit_code)
    result["machine"]["load_after"] = os.getloadavg()[0]
    return result


# -- a rank --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def groups() -> Iterator[dict[str, dist.ProcessGroup]]:
    """A group of all ranks for each backend, in the same processes, with one thread for computing in each."""
    torch.set_num_threads(1)
    dist.init_process_group("farandole")
    try:
        versions = {"farandole": importlib.metadata.version("farandole"), "torch": torch.__version__}
        say(versions={**versions, "Python": platform.python_version()})
        yield {"farandole": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    finally:
        dist.destroy_process_group()


def say(**what: Any) -> None:
    """Tell the command, once for all ranks."""
    if dist.get_rank() == 0:
        print(json.dumps(what), flush=True)


def slowest(seconds: Sequence[float]) -> list[float]:
    """The longest that each call took on any rank."""
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.tolist()


def turn(num_steps: int, make_batch: Callable[[], _Batch], step: Callable[[_Batch], None]) -> list[float]:
    """Seconds of each step of training, on the slowest rank. Making its batch is not timed."""
    seconds = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(num_steps):
            batch = make_batch()
            dist.barrier()
            start = time.perf_counter()
            step(batch)
            seconds.append(time.perf_counter() - start)
    finally:
        gc.enable()
    return slowest(seconds)


def summary(turns: dict[str, list[list[float]]]) -> dict[str, Any]:
    """What the turns come to, and by how much farandole is faster: in the median round, at least and at most."""
    row: dict[str, Any] = {}
    for name, seconds in turns.items():
        together = np.concatenate(seconds)
        row[name] = {
            "median_s": float(np.median(together)),
            "p99_s": float(np.percentile(together, 99, method="higher")),
            "num_calls": len(together),
        }
    pairs = zip(turns["gloo"], turns["farandole"], strict=True)
    ratios = [float(np.median(theirs) / np.median(ours)) for theirs, ours in pairs]
    row["ratio"], row["least_ratio"], row["most_ratio"] = float(np.median(ratios)), min(ratios), max(ratios)
    return row
