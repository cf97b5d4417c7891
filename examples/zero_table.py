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
