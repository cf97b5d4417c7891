"""What each stage of ZeRO sends, holds and waits for, counted on a small GPT and beside the formula.

    farandole run -n 2 examples/zero_table.py
    farandole run -n 4 examples/zero_table.py --param-dtype bfloat16

Stage 0 is DataParallel, 1 and 2 are ZeroOptimizer, 3 is FullyShardedParallel. Bytes are what the engine counted on this
rank, per step; seconds are those in which a rank had gradients or parameters under way, in all and without computing
meanwhile. All stages train on the same batches, and at the end of the run hold the same weights to the bit.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from small_gpt import Block, SmallGpt

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
    """Train at one stage; returns what was counted on this rank."""
    world_size = dist.get_world_size()
    narrow = torch.bfloat16 if arguments.weights == "bfloat16" else None
    if narrow is not None and stage < 3:
        gpt = gpt.to(narrow)  # FullyShardedParallel narrows what it gathers
    expected = expected_memory(
        gpt, stage, world_size, bucket_bytes=arguments.bucket_bytes, units=Block, param_dtype=narrow if stage == 3 else None
    )
    model, optimizer = shard(gpt, stage, arguments, narrow)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        train_step(model, optimizer, arguments, generator)
    communicator = dist.group.WORLD.communicator
    before = sum(one.bytes_sent for one in communicator.stats())
    waited, begun = model.waited_s, time.perf_counter()
    for _ in range(arguments.steps):
        train_step(model, optimizer, arguments, generator)
    seconds = (time.perf_counter() - begun) / arguments.steps
    sent = (sum(one.bytes_sent for one in communicator.stats()) - before) / arguments.steps
    with PeakMemory(model, optimizer) as peak:
        train_step(model, optimizer, arguments, generator)
    return {
        "stage": stage,
        "bytes_sent": sent,
        "seconds": seconds,
        "memory": {kind: getattr(peak.most, kind) for kind in KINDS},
        "expected_memory": {kind: getattr(expected, kind) for kind in KINDS},
        "peak_bytes": peak.most_total,
        "waited_s": (model.waited_s - waited) / arguments.steps,
    }
