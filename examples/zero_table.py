"""What each stage of ZeRO sends, holds and waits for: counted on a small GPT, and beside the formulas.

    farandole run -n 2 examples/zero_table.py
    farandole run -n 4 examples/zero_table.py --weights bfloat16

Stage 0 is DataParallel, 1 and 2 are ZeroOptimizer, 3 is FullyShardedParallel. Bytes sent are what the engine counted
on rank 0, per step; memory is the most that this rank held of each kind. Communication is exposed while a rank waits
for it, else hidden.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from small_gpt import Block, SmallGpt

import farandole
from farandole.training import DataParallel, FullyShardedParallel, PeakMemory, ZeroOptimizer, expected_memory

NUM_TOKENS = 256
KINDS = ("parameters", "gradients", "optimizer", "buffers")


def main() -> None:
    """One rank."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group("farandole")
    torch.manual_seed(0)
    gpt = SmallGpt(NUM_TOKENS, arguments.width, arguments.depth, num_heads=4, context=arguments.context)
    rows = [measure(copy.deepcopy(gpt), stage, arguments) for stage in range(4)]
    if dist.get_rank() == 0:
        if arguments.json:
            print(json.dumps(rows, indent=1))
        else:
            show(rows, sum(one.nbytes for one in gpt.parameters()))
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """What can be chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256, help="of the network (default: 256)")
    parser.add_argument("--depth", type=int, default=6, help="blocks (default: 6)")
    parser.add_argument("--context", type=int, default=64, help="bytes that it looks at (default: 64)")
    parser.add_argument("--batch", type=int, default=4, help="texts of each rank (default: 4)")
    parser.add_argument("--steps", type=int, default=5, help="that are counted, after 3 others (default: 5)")
    parser.add_argument("--bucket-bytes", type=int, default=4 << 20, help="of gradients (default: 4 MiB)")
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32", help="(default: float32)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    return parser.parse_args()


def measure(gpt: SmallGpt, stage: int, arguments: argparse.Namespace) -> dict:
    """Train at one stage; returns what was counted on this rank, per step."""
    world_size = dist.get_world_size()
    narrow = torch.bfloat16 if arguments.weights == "bfloat16" else None
    if narrow is not None and stage < 3:
        gpt = gpt.to(narrow)
    param_dtype = narrow if stage == 3 else None  # there, what is gathered is narrow
    expected = expected_memory(
        gpt, stage, world_size, bucket_bytes=arguments.bucket_bytes, units=Block, param_dtype=param_dtype
    )
    whole, units = (sum(one.nbytes for one in part.parameters()) for part in (gpt, gpt.blocks[:-1]))
    # Stage 3 gathers blocks once more for backward, but for the last one, with which backward begins.
    scale = param_dtype.itemsize / 4 if param_dtype else 1
    model, optimizer = shard(gpt, stage, arguments, param_dtype)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def train(steps: int) -> None:
        for _ in range(steps):
            tokens = torch.randint(NUM_TOKENS, (arguments.batch, arguments.context + 1), generator=generator)
            optimizer.zero_grad()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()

    train(3)
    communicator = dist.group.WORLD.communicator
    before = sum(one.bytes_sent for one in communicator.stats())
    train(arguments.steps)
    sent = sum(one.bytes_sent for one in communicator.stats()) - before
    with PeakMemory(model, optimizer) as peak:
        train(1)
    with tempfile.TemporaryDirectory() as folder, farandole.trace(Path(folder) / "trace.json") as trace:
        train(arguments.steps)
    own = next(one for one in trace.exposed if one.rank == dist.get_rank())
    return {
        "stage": stage,
        "bytes_sent": sent / arguments.steps,
        "bytes_sent_by_formula": (world_size - 1) / world_size * scale * (2 * whole + (units if stage == 3 else 0)),
        "memory": {kind: getattr(peak.most, kind) for kind in KINDS},
        "memory_by_formula": {kind: getattr(expected, kind) for kind in KINDS},
        "exposed_s": own.total.exposed / arguments.steps,
        "hidden_s": own.total.hidden / arguments.steps,
        "seconds": own.total.seconds / arguments.steps,
    }


def shard(
    gpt: SmallGpt, stage: int, arguments: argparse.Namespace, param_dtype: torch.dtype | None
) -> tuple[DataParallel | FullyShardedParallel, torch.optim.Optimizer]:
    """A model at a stage, and its optimizer."""
    if stage == 3:
        sharded = FullyShardedParallel(gpt, units=Block, param_dtype=param_dtype)
        return sharded, torch.optim.AdamW(sharded.parameters())
    model = DataParallel(gpt, bucket_bytes=arguments.bucket_bytes)
    if stage == 0:
        return model, torch.optim.AdamW(model.parameters())
    return model, ZeroOptimizer(model, torch.optim.AdamW, stage=stage)


def show(rows: list[dict], num_bytes: int) -> None:
    """Print the table."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    table = Table(
        title=f"A rank of {dist.get_world_size()}, {num_bytes / 4e6:.1f} million parameters; MB, and ms per step",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name in ("stage", "sent", "formula", *KINDS, "all", "formula", "step", "communication exposed", "hidden"):
        table.add_column(name, justify="right")
    for row in rows:
        memory, expected = row["memory"], row["memory_by_formula"]
        table.add_row(
            str(row["stage"]),
            *(f"{row[key] / 1e6:.2f}" for key in ("bytes_sent", "bytes_sent_by_formula")),
            *(f"{memory[kind] / 1e6:.2f}" for kind in KINDS),
            *(f"{sum(one.values()) / 1e6:.2f}" for one in (memory, expected)),
            *(f"{row[key] * 1e3:.1f}" for key in ("seconds", "exposed_s", "hidden_s")),
        )
    console.print(table)


if __name__ == "__main__":
    main()
