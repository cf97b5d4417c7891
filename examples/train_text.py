"""Trains a small GPT on real text: the documentation of Python that pydoc shows, which every Python brings with it.

    farandole run -n 2 examples/train_text.py --stage 2 --steps 200

The text is that of the module pydoc_data.topics, about 465,000 characters, under the licence of Python (PSF-2.0). The
training can be stopped at any time: started again with the same --folder it goes on from its last checkpoint, on any
number of ranks and at any stage, to the same bits. At the end the folder has a plot of the loss, weights.safetensors
for other programs, and a sample of what was learned is printed. Under torchrun and mpirun, too. Needs torch,
safetensors, rich and matplotlib: pip install ".[demo]".
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pydoc_data.topics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from small_gpt import Block, SmallGpt
from torch import Tensor

from farandole.training import (
    DataParallel,
    FullyShardedParallel,
    ZeroOptimizer,
    clip_grad_norm_,
    export_weights,
    load_checkpoint,
    save_checkpoint,
)

NUM_MICRO_BATCHES = 4
"""That a step consists of. Each is dealt to a rank; so any number of ranks computes the same sum."""


def main() -> None:
    """One rank."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    dist.init_process_group(arguments.backend)
    text = load_text()
    gpt = SmallGpt(256, arguments.width, arguments.depth, num_heads=4, context=arguments.context)
    model, optimizer = shard(gpt, arguments.stage, arguments.learning_rate)
    checkpoint = arguments.folder / "checkpoint"
    losses: list[float] = []
    if agreed(lambda: checkpoint.exists() or checkpoint.with_name("checkpoint.before").exists()):
        losses = load_checkpoint(checkpoint, model, optimizer)["losses"]
    with progress(len(losses), arguments.steps) as show:
        for step in range(len(losses), arguments.steps):
            losses.append(train_step(model, optimizer, text, step, arguments))
            show(losses)
            if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
                save_checkpoint(checkpoint, model, optimizer, extra={"losses": losses})
    export_weights(arguments.folder / "weights.safetensors", model)
    if dist.get_rank() == 0:
        plot(losses, arguments.folder / "loss.png")
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last; see {arguments.folder}/loss.png")
    sample = write_on(model, "The ", arguments.context)
    if dist.get_rank() == 0:
        print(f"It writes on from 'The ': {sample!r}")
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """What can be chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=0, choices=range(4), help="of ZeRO: what is sharded (default: 0)")
    parser.add_argument("--steps", type=int, default=200, help="in all, with those of earlier runs (default: 200)")
    parser.add_argument("--batch", type=int, default=16, help="texts in a step, over all ranks (default: 16)")
    parser.add_argument("--context", type=int, default=64, help="bytes that it looks at (default: 64)")
    parser.add_argument("--width", type=int, default=256, help="of the network (default: 256)")
    parser.add_argument("--depth", type=int, default=4, help="blocks (default: 4)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of AdamW (default: 1e-3)")
    parser.add_argument("--folder", type=Path, default=Path("train_text"), help="for results (default: train_text)")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints (default: 50)")
    parser.add_argument("--backend", default="farandole", help="of torch.distributed (default: farandole)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    arguments = parser.parse_args()
    if arguments.batch < NUM_MICRO_BATCHES or arguments.batch % NUM_MICRO_BATCHES:
        parser.error(f"--batch must be a multiple of {NUM_MICRO_BATCHES}, not {arguments.batch}")
    if min(arguments.steps, arguments.save_every) < 1:
        parser.error("--steps and --save-every must be at least 1")
    return arguments


def agreed(ask: Callable[[], bool]) -> bool:
    """What rank 0 finds: others may not see yet what it has written."""
    answer = [ask() if dist.get_rank() == 0 else False]
    dist.broadcast_object_list(answer)
    return answer[0]


def load_text() -> Tensor:
    """All of it, as bytes."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def shard(
    gpt: SmallGpt, stage: int, learning_rate: float
) -> tuple[DataParallel | FullyShardedParallel, torch.optim.Optimizer]:
    """A model on all ranks, and its optimizer."""
    if stage == 3:
        sharded = FullyShardedParallel(gpt, units=Block, reduction="sum", reproducible=True)
        return sharded, torch.optim.AdamW(sharded.parameters(), lr=learning_rate)
    model = DataParallel(gpt, reduction="sum", reproducible=True)
    if stage == 0:
        return model, torch.optim.AdamW(model.parameters(), lr=learning_rate)
    return model, ZeroOptimizer(model, torch.optim.AdamW, stage=stage, lr=learning_rate)


def train_step(
    model: DataParallel | FullyShardedParallel,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    step: int,
    arguments: argparse.Namespace,
) -> float:
    """One step of all ranks; returns the mean loss."""
    generator = torch.Generator().manual_seed(arguments.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - arguments.context - 1, (arguments.batch,), generator=generator)
    places = starts[:, None] + torch.arange(arguments.context + 1)
    batches = text[places].long().chunk(NUM_MICRO_BATCHES)
    optimizer.zero_grad()
    total = torch.zeros(NUM_MICRO_BATCHES)
    for turn in range(0, NUM_MICRO_BATCHES, dist.get_world_size()):
        number = turn + dist.get_rank()
        if number < NUM_MICRO_BATCHES:
            batch = batches[number]
            loss = model(batch[:, :-1], batch[:, 1:]) / NUM_MICRO_BATCHES
            total[number] = loss.detach()
        else:  # more ranks than micro-batches: this one counts nothing
            loss = model(batches[0][:, :-1], batches[0][:, 1:]) * 0
        loss.backward()
    clip_grad_norm_(optimizer if isinstance(optimizer, ZeroOptimizer) else model, 1.0)
    optimizer.step()
    dist.all_reduce(total)
    return float(total.sum())


@contextlib.contextmanager
def progress(done: int, steps: int) -> Iterator:
    """A bar, from rank 0. Yields what shows the losses so far."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=Console(stderr=True), disable=dist.get_rank() != 0) as bar:
        task = bar.add_task("", total=steps, completed=done, loss="")
        yield lambda losses: bar.update(task, completed=len(losses), loss=f"loss {losses[-1]:.4f}")


def plot(losses: list[float], path: Path) -> None:
    """The loss of each step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A small GPT on the documentation of Python")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    (path.parent / "losses.json").write_text(json.dumps(losses))


def write_on(model: DataParallel | FullyShardedParallel, prompt: str, context: int) -> str:
    """What the model takes for the likeliest to follow. All ranks call this: at stage 3 each has a part."""
    tokens = torch.tensor([list(prompt.encode())])
    with torch.no_grad():
        for _ in range(60):
            following = model(tokens[:, -context:])[0, -1].argmax()
            tokens = torch.cat([tokens, following[None, None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    main()
