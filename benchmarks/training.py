"""Training steps of farandole.training at each stage, beside torch's own wrappers: a GPT, in one run.

Equal models, one for each way, see the same data and take turns, A B C A B C ..., of --steps steps, --rounds times:
only ratios within one run count. The ways are

    alone            a plain model, without any communication
    DDP              DistributedDataParallel over farandole
    DDP over gloo    the same over Gloo
    stage 0          DataParallel over farandole
    stage 1, 2       ZeroOptimizer
    stage 3          FullyShardedParallel, each block a unit
    fully_shard      torch's, each block a unit, over farandole

A step is forward, backward, the step of AdamW and zero_grad. It takes as long as on the slowest rank; the ranks meet in
a barrier before, which is not timed. The first turn of each is not counted. A ratio is that of medians in the median
round; lo..hi is the least and the most of any round. Exposed is communication that was not hidden behind computation,
measured in another turn of each of farandole's.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from examples.small_gpt import Block, SmallGpt
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import farandole
from benchmarks.beside import groups, parser_of, run_ranks, say, turn
from benchmarks.report import console, print_machine, save
from farandole.training import DataParallel, FullyShardedParallel, ZeroOptimizer

WAYS = ("alone", "DDP", "DDP over gloo", "stage 0", "stage 1", "stage 2", "stage 3", "fully_shard")
RATIOS = (
    ("DDP", "stage 0", 1.0),
    ("DDP over gloo", "stage 0", 1.3),
    ("stage 1", "stage 0", None),
    ("stage 2", "stage 0", None),
    ("fully_shard", "stage 3", 1.0),
)
"""How many times as long the first takes as the second, and how many times it should at least."""

NUM_TOKENS = 256
_NUM_FIRST = 4
"""Steps of the first turn at least: by then buckets are as they stay."""


class Trainer:
    """A model on one rank, and how to take steps with it."""

    def __init__(
        self, way: str, gpt: SmallGpt, by_name: dict[str, dist.ProcessGroup], settings: dict[str, Any]
    ) -> None:
        model: nn.Module = copy.deepcopy(gpt)
        zero: dict[str, Any] = {}
        if way == "DDP":
            model = DistributedDataParallel(model, process_group=by_name["farandole"])
        elif way == "DDP over gloo":
            model = DistributedDataParallel(model, process_group=by_name["gloo"])
        elif way == "stage 3":
            model = FullyShardedParallel(model, units=Block)
        elif way.startswith("stage"):
            model = DataParallel(model)
            zero = {"stage": int(way[-1])} if way != "stage 0" else {}
        elif way == "fully_shard":
            mesh = DeviceMesh.from_group(by_name["farandole"], "cpu")
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self._model = model
        self._optimizer: torch.optim.Optimizer = (
            ZeroOptimizer(model, torch.optim.AdamW, lr=1e-3, **zero)
            if zero
            else torch.optim.AdamW(model.parameters(), lr=1e-3)
        )
        self._shape = settings["batch"], settings["length"] + 1
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    def turn(self, num_steps: int) -> list[float]:
        """Seconds of each step, on the slowest rank."""
        return turn(num_steps, self._batch, self._step)

    def _batch(self) -> torch.Tensor:
        return torch.randint(NUM_TOKENS, self._shape, generator=self._generator)

    def _step(self, tokens: torch.Tensor) -> None:
        self._model(tokens[:, :-1], tokens[:, 1:]).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def exposed(self, num_steps: int) -> dict[str, float]:
        """Seconds of communication in a step on this rank, without computation meanwhile and with it."""
        with tempfile.TemporaryDirectory() as folder, farandole.trace(Path(folder) / "trace.json") as trace:
            self.turn(num_steps)
        own = next(one.total for one in trace.exposed if one.rank == dist.get_rank())
        return {"exposed_s": own.exposed / num_steps, "hidden_s": own.hidden / num_steps}


def measure(settings: dict[str, Any]) -> None:
    """One rank."""
    rounds, steps = settings["rounds"], settings["steps"]
    with groups() as by_name:
        say(total=len(WAYS) * (rounds + 1))
        torch.manual_seed(0)
        gpt = SmallGpt(NUM_TOKENS, settings["width"], settings["depth"], 8, settings["length"])
        trainers = {way: Trainer(way, gpt, by_name, settings) for way in WAYS}
        turns: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        for number in range(rounds + 1):
            for way, trainer in trainers.items():
                seconds = trainer.turn(steps if number else max(steps, _NUM_FIRST))
                if number:
                    turns[way].append(seconds)
                say(progress=way)
        for way, seconds in turns.items():
            together = np.concatenate(seconds)
            exposed = trainers[way].exposed(steps) if way.startswith("stage") else {}
            say(
                row={
                    "way": way,
                    "median_s": float(np.median(together)),
                    "p99_s": float(np.percentile(together, 99, method="higher")),
                    "rounds_s": [float(np.median(one)) for one in seconds],
                    "num_parameters": sum(one.numel() for one in gpt.parameters()),
                    **exposed,
                }
            )


def show(result: dict[str, Any]) -> None:
    """Two tables: the steps, and the ratios."""
    to, settings, rows = console(), result["settings"], result["rows"]
    to.print(
        f"{settings['ranks']} ranks, GPT of {rows[0]['num_parameters']:,} parameters, {settings['batch']} x "
        f"{settings['length']} tokens per rank, {settings['rounds']} interleaved rounds of {settings['steps']} steps: "
        f"ms per step",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "median", "p99", "exposed", "hidden", "% hidden"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in rows:
        cells = [f"{row[key] * 1e3:.1f}" for key in ("median_s", "p99_s", "exposed_s", "hidden_s") if key in row]
        if "hidden_s" in row:
            cells.append(f"{100 * row['hidden_s'] / max(row['exposed_s'] + row['hidden_s'], 1e-9):.0f}")
        table.add_row(row["way"], *cells)
    to.print(table, "")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "ratio", "lo..hi", "wanted"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    by_way = {row["way"]: row["rounds_s"] for row in rows}
    for above, below, wanted in RATIOS:
        ratios = [a / b for a, b in zip(by_way[above], by_way[below], strict=True)]
        target = f"at least {wanted}" if wanted else "at most 1.15"
        table.add_row(f"{above} / {below}", f"{np.median(ratios):.2f}", f"{min(ratios):.2f}..{max(ratios):.2f}", target)
    to.print(table, "")
    print_machine(to, result["machine"])


def main() -> None:
    """The command, or a rank of it."""
    parser = parser_of("benchmarks.training", __doc__)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each way (default: 8)")
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn (default: 4)")
    parser.add_argument("--width", type=int, default=384, help="of the GPT (default: 384)")
    parser.add_argument("--depth", type=int, default=6, help="blocks of the GPT (default: 6)")
    parser.add_argument("--batch", type=int, default=1, help="texts per rank (default: 1)")
    parser.add_argument("--length", type=int, default=32, help="tokens of a text (default: 32)")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        measure(arguments.rank)
        return
    names = ("rounds", "steps", "width", "depth", "batch", "length")
    settings = {name: getattr(arguments, name) for name in names}
    if min(arguments.ranks, *settings.values()) < 1:
        parser.error("all numbers must be at least 1")
    result = run_ranks("benchmarks.training", settings, arguments.ranks)
    save(result, arguments.json)
    show(result)


if __name__ == "__main__":
    main()
