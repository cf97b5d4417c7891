"""Training on several ranks: data parallelism, and the sharding of what it replicates.

Everything here is written on `torch.distributed` alone, so it runs on any backend: farandole, gloo or nccl.
"""

from __future__ import annotations

from farandole.training.accounting import MemoryUse, PeakMemory, expected_memory, memory_use
from farandole.training.checkpoint import export_weights, load_checkpoint, save_checkpoint
from farandole.training.clipping import clip_grad_norm_
from farandole.training.data_parallel import DataParallel
from farandole.training.errors import (
    BackwardFailedError,
    CheckpointError,
    DifferentModelsError,
    NotGatheredError,
    OutOfStepError,
    SparseGradientError,
    UnusedParametersError,
)
from farandole.training.fully_sharded import FullyShardedParallel
from farandole.training.naive import NaiveDataParallel
from farandole.training.scaling import GradScaler
from farandole.training.zero import ZeroOptimizer

__all__ = [
    "BackwardFailedError",
    "CheckpointError",
    "DataParallel",
    "DifferentModelsError",
    "FullyShardedParallel",
    "GradScaler",
    "MemoryUse",
    "NaiveDataParallel",
    "NotGatheredError",
    "OutOfStepError",
    "PeakMemory",
    "SparseGradientError",
    "UnusedParametersError",
    "ZeroOptimizer",
    "clip_grad_norm_",
    "expected_memory",
    "export_weights",
    "load_checkpoint",
    "memory_use",
    "save_checkpoint",
]
