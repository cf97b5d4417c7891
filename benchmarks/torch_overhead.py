"""farandole and Gloo under torch.distributed, call by call: how long each takes, in the same processes and run.

Both have a group in the same ranks, and take turns, A B A B ..., --rounds times for each row: only ratios within one
run count. A turn has as many calls as fit into --block-seconds, from 3 to 5000, after a tenth as many to warm up.
Before each call the ranks meet in a barrier that is not timed, of farandole for both, so that they start together. A
call takes as long as on the slowest rank, from the call in Python to its return.

S is the size of the whole buffer: what all_gather_into_tensor gives, what goes into reduce_scatter_tensor. Each row is
checked first, on data that differ per rank and element. Median and p99 are over the calls of all rounds. ratio is
Gloo's median / farandole's in the median round: above 1, farandole is faster; lo..hi is the least and the most of any
round.

  wait            async_op=True, and wait()
  future          async_op=True, until work.get_future() is complete
  registered      farandole's tensor is of farandole.torch_backend.empty; Gloo's is a plain one, as it has no other
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from rich.text import Text

from benchmarks.beside import (
    BACKENDS,
    groups,
    parser_of,
    run_ranks,
    say,
    slowest,
    summary,
)
from benchmarks.report import console, print_machine, save

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier")
DEFAULT_SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
REGISTERED_SIZES = (1 << 20, 64 << 20)
ASYNC_SIZES = (8,)
_NEW_NAMES = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
"""Of torch 2.13 on, which warns at every call of the old ones."""
_PERIOD = 1021
"""A prime: data do not repeat from rank to rank, and sums over 1000 ranks are exact in float32."""


class Case:
    """A row on one rank: a call, ready to be made over either backend.

    Args:
        collective: of `COLLECTIVES`.
        size: S, in bytes, of float32.
        form: "", "wait", "future" or "registered".
    """

    def __init__(self, collective: str, size: int, form: str, group: dist.ProcessGroup) -> None:
        self.collective, self.form, self.group = collective, form, group
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        part = -(-size // (4 * ranks))
        self.count = part * ranks if collective != "barrier" else 0
        self.mine = slice(self.rank * part, (self.rank + 1) * part)
        self.whole = self._empty()
        self.part = torch.zeros(part)

    def _empty(self) -> torch.Tensor:
        if self.form == "registered" and self.group is dist.group.WORLD:
            from farandole.torch_backend import empty

            return empty(self.count, torch.float32)
        return torch.zeros(self.count)

    def bind(self) -> Callable[[], Any]:
        """The call."""
        new_name = _NEW_NAMES.get(self.collective, "")
        function, group = getattr(dist, new_name if hasattr(dist, new_name) else self.collective), self.group
        whole, part = self.whole, self.part
        if self.form in ("wait", "future"):
            wait_for = _wait if self.form == "wait" else _wait_for_future
            return lambda: wait_for(function(whole, group=group, async_op=True))
        return {
            "all_reduce": lambda: function(whole, group=group),
            "all_gather_into_tensor": lambda: function(whole, part, group=group),
            "reduce_scatter_tensor": lambda: function(part, whole, group=group),
            "broadcast": lambda: function(whole, 0, group=group),
            "barrier": lambda: function(group=group),
        }[self.collective]

    def check(self) -> None:
        """Call it once on real data, and leave zeros.

        Raises:
            RuntimeError: something else came out than must.
        """
        rows = [(torch.arange(self.count) * 31 + rank * 977) % _PERIOD for rank in range(dist.get_world_size())]
        self.whole.copy_(rows[self.rank])
        self.part.copy_(rows[self.rank][self.mine])
        self.bind()()
        if self.collective == "all_gather_into_tensor":
            shares = [row.chunk(len(rows))[rank] for rank, row in enumerate(rows)] if self.count else rows
            got, expected = self.whole, torch.cat(shares)
        elif self.collective == "reduce_scatter_tensor":
            got, expected = self.part, sum(rows)[self.mine]
        else:
            got, expected = self.whole, rows[0] if self.collective == "broadcast" else sum(rows)
        if not torch.equal(got, expected.float()):
            raise RuntimeError(f"{self.collective} of {4 * self.count} bytes over {self.group.name()} is wrong")
        self.whole.zero_()
        self.part.zero_()


def _wait(work: dist.Work) -> None:
    work.wait()


def _wait_for_future(work: dist.Work) -> None:
    work.get_future().wait()


def measure(settings: dict[str, Any]) -> None:
    """One rank."""
    sizes, collectives = settings["sizes"], settings["collectives"]
    rows = [(name, size, "") for name in collectives for size in (sizes if name != "barrier" else [0])]
    if "all_reduce" in collectives:
        rows += [("all_reduce", size, form) for form in ("wait", "future") for size in ASYNC_SIZES]
        rows += [("all_reduce", size, "registered") for size in REGISTERED_SIZES if size <= max(sizes)]
    with groups() as by_name:
        say(total=len(rows) * settings["rounds"])
        for collective, size, form in rows:
            calls = {}
            for name in BACKENDS:
                case = Case(collective, size, form, by_name[name])
                case.check()
                calls[name] = case.bind()
            num_calls = {name: _num_calls(call, settings["block_seconds"]) for name, call in calls.items()}
            turns: dict[str, list[list[float]]] = {name: [] for name in BACKENDS}
            for _ in range(settings["rounds"]):
                for name, call in calls.items():
                    turns[name].append(_turn(call, num_calls[name]))
                say(progress=f"{collective} {form}")
            say(row={"collective": collective, "size_bytes": size, "form": form, **summary(turns)})


def _num_calls(call: Callable[[], Any], block_s: float) -> int:
    """How many fit into a turn; the same on all ranks."""
    first_s = sorted(_turn(call, 5))[2]
    return max(3, min(5000, int(block_s / first_s)))


def _turn(call: Callable[[], Any], num_calls: int) -> list[float]:
    """Seconds of each call, on the slowest rank."""
    clock, seconds = time.perf_counter, [0.0] * num_calls
    for _ in range(1 + num_calls // 10):
        dist.barrier()
        call()
    gc.collect()
    gc.disable()
    try:
        for index in range(num_calls):
            dist.barrier()
            start = clock()
            call()
            seconds[index] = clock() - start
    finally:
        gc.enable()
    return slowest(seconds)


def show(result: dict[str, Any]) -> None:
    """The table."""
    to, settings = console(), result["settings"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("call", "size", "farandole", "p99", "gloo", "p99", "ratio", "lo..hi"):
        table.add_column(name, justify="left" if name == "call" else "right", no_wrap=True)
    for row in result["rows"]:
        times = [_us(row[name][what]) for name in BACKENDS for what in ("median_s", "p99_s")]
        ratio = Text(f"{row['ratio']:.2f}", style="green" if row["ratio"] >= 1 else "red")
        label = f"{row['collective']} {row['form']}".strip()
        size = _short(row["size_bytes"]) if row["size_bytes"] else "-"
        table.add_row(label, size, *times, ratio, f"{row['least_ratio']:.2f}..{row['most_ratio']:.2f}")
    to.print(f"{settings['ranks']} ranks, float32, {settings['rounds']} interleaved rounds: median and p99 in us")
    to.print(table, "")
    print_machine(to, result["machine"])


def _us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _short(size: int) -> str:
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if size % unit == 0:
            return f"{size // unit}{letter}"
    return str(size)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or K, M or G: 8, 64K, 1M")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def main() -> None:
    """The command, or a rank of it."""
    parser = parser_of("benchmarks.torch_overhead", __doc__)
    parser.add_argument("-c", "--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES, help="default: all")
    parser.add_argument(
        "-s", "--sizes", nargs="+", type=_size, default=DEFAULT_SIZES, help="default: 8 1K 64K 1M 16M 64M"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each backend, per row (default: 5)")
    parser.add_argument("--block-seconds", type=float, default=0.2, help="how long a turn aims to be (default: 0.2)")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        measure(arguments.rank)
        return
    if arguments.ranks < 1 or arguments.rounds < 1 or arguments.block_seconds <= 0:
        parser.error("--ranks, --rounds and --block-seconds must be above 0")
    settings = {name: getattr(arguments, name) for name in ("collectives", "sizes", "rounds", "block_seconds")}
    result = run_ranks("benchmarks.torch_overhead", settings, arguments.ranks)
    save(result, arguments.json)
    show(result)


if __name__ == "__main__":
    main()
