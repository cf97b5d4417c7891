"""Training steps over farandole and over Gloo: a GPT of 10.5 million parameters, in the same processes and run.

Two equal models, one over each backend, see the same data. They take turns, A B A B ..., of --steps steps, --rounds
times: only ratios within one run count. This is done with DistributedDataParallel and with fully_shard, each layer a
unit. "alone" is a plain model that takes its turns, too, without any communication. Every rank computes with one
thread.

A step is forward, backward, the optimizer and zero_grad. It takes as long as on the slowest rank; the ranks meet in a
barrier before, which is not timed. The first turn of each is not counted. ratio is Gloo's median / farandole's in the
median round: above 1, farandole is faster; lo..hi is the least and the most of any round. "over alone" is the median
step less the median step alone: what distribution adds.

At the end the weights of both models are compared; if they differ, the exit code is 1.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from rich.text import Text
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.beside import (
    BACKENDS,
    groups,
    parser_of,
    run_ranks,
    say,
    summary,
    turn,
)
from benchmarks.report import console, print_machine, save

WAYS = ("DistributedDataParallel", "fully_shard")
VOCABULARY, WIDTH, NUM_HEADS, NUM_LAYERS, LENGTH, BATCH = 1000, 320, 5, 8, 32, 2
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-3, 1e-5


class Gpt(nn.Module):
    """Predicts the next token of each place."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0, batch_first=True, norm_first=True)
            for _ in range(NUM_LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, length, vocabulary) from tokens (batch, length)."""
        states = self.tokens(tokens) + self.places.weight
        for layer in self.layers:
            states = layer(states, src_mask=self.mask, is_causal=True)
        return self.head(states)


class Trainer:
    """A model on one rank, and how to take a step with it.

    Args:
        way: of `WAYS`, or "alone".
        group: to train with; of no use to "alone".
    """

    def __init__(self, way: str, group: dist.ProcessGroup) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Gpt()
        if way == "DistributedDataParallel":
            self.model = DistributedDataParallel(self.model, process_group=group)
        elif way == "fully_shard":
            mesh = DeviceMesh.from_group(group, "cpu")
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.num_steps = 0

    def turn(self, num_steps: int) -> list[float]:
        """Seconds of each step, on the slowest rank."""
        return turn(num_steps, self._batch, self._step)

    def _step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        tokens, targets = batch
        logits = self.model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their successors: of this rank, and of how many steps this model has seen."""
        generator = torch.Generator().manual_seed(self.num_steps * dist.get_world_size() + dist.get_rank())
        self.num_steps += 1
        text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        return text[:, :-1], text[:, 1:]

    def weights(self) -> torch.Tensor:
        """All of the model, in one row."""
        state = self.model.state_dict().values()
        whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in state]
        return torch.cat([value.flatten() for value in whole])


def measure(settings: dict[str, Any]) -> None:
    """One rank."""
    rounds, steps = settings["rounds"], settings["steps"]
    with groups() as by_name:
        say(total=len(WAYS) * rounds)
        for way in WAYS:
            trainers = {name: Trainer(way, group) for name, group in by_name.items()}
            trainers["alone"] = Trainer("alone", by_name["gloo"])
            for trainer in trainers.values():
                trainer.turn(steps)
            turns: dict[str, list[list[float]]] = {name: [] for name in trainers}
            for _ in range(rounds):
                for name, trainer in trainers.items():
                    turns[name].append(trainer.turn(steps))
                say(progress=way)
            ours, theirs = (trainers[name].weights() for name in BACKENDS)
            agree = torch.allclose(ours, theirs, rtol=RELATIVE_TOLERANCE, atol=ABSOLUTE_TOLERANCE)
            compared = {"num_parameters": len(ours), "agree": agree, "distance": (ours - theirs).abs().max().item()}
            say(row={"way": way, **compared, "num_steps": (1 + rounds) * steps, **summary(turns)})


def show(result: dict[str, Any]) -> None:
    """The table, and whether the weights agree."""
    to, settings, rows = console(), result["settings"], result["rows"]
    to.print(
        f"{settings['ranks']} ranks, GPT of {rows[0]['num_parameters']:,} parameters, {BATCH} x {LENGTH} tokens per "
        f"rank: median step in ms, {settings['rounds']} interleaved rounds of {settings['steps']}"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "farandole", "gloo", "alone", "ratio", "lo..hi", "over alone: farandole", "gloo"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in rows:
        ms = {name: row[name]["median_s"] * 1e3 for name in (*BACKENDS, "alone")}
        over = [f"{ms[name] - ms['alone']:.1f}" for name in BACKENDS]
        ratio = Text(f"{row['ratio']:.2f}", style="green" if row["ratio"] >= 1 else "red")
        spread = f"{row['least_ratio']:.2f}..{row['most_ratio']:.2f}"
        table.add_row(row["way"], *[f"{value:.1f}" for value in ms.values()], ratio, spread, *over)
    to.print(table, "")
    for row in rows:
        verdict = "[green]agree[/]" if row["agree"] else "[red]DIFFER[/]"
        to.print(
            f"{row['way']}: the weights of both {verdict} after {row['num_steps']} steps "
            f"(largest difference {row['distance']:.1e})"
        )
    print_machine(to, result["machine"])


def main() -> None:
    """The command, or a rank of it."""
    parser = parser_of("benchmarks.ddp", __doc__)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each backend (default: 8)")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn (default: 5)")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        measure(arguments.rank)
        return
    if min(arguments.ranks, arguments.rounds, arguments.steps) < 1:
        parser.error("--ranks, --rounds and --steps must be at least 1")
    settings = {"rounds": arguments.rounds, "steps": arguments.steps}
    result = run_ranks("benchmarks.ddp", settings, arguments.ranks)
    save(result, arguments.json)
    show(result)
    sys.exit(not all(row["agree"] for row in result["rows"]))


if __name__ == "__main__":
    main()
