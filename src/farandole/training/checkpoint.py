"""Checkpoints of `torch.distributed.checkpoint`: saved at any stage on any number of ranks, loaded at any other.

A checkpoint has each parameter and buffer under ``model.NAME``, as the module that is wrapped names it, and the
optimizer's state under ``optimizer.state.NAME.KEY``, all in their whole shapes, so that any reader of such checkpoints
finds them. A rank writes and reads the elements it holds: of a piece (see `farandole.training.layout`), the boxes that it
consists of. So each element is written once, and the planner of torch checks that.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from farandole.errors import ArgumentError
from farandole.training.data_parallel import DataParallel
from farandole.training.errors import CheckpointError
from farandole.training.fully_sharded import FullyShardedParallel
from farandole.training.layout import boxes_of
from farandole.training.replicas import broadcast
from farandole.training.shards import Holding
from farandole.training.zero import ZeroOptimizer

__all__ = ["export_weights", "load_checkpoint", "save_checkpoint"]

_GROUPS = "optimizer.groups"
_EXTRA = "extra"
_ALIASES = "aliases"


def save_checkpoint(
    path: str | Path,
    model: DataParallel | FullyShardedParallel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save a model, its optimizer and what else is to be known, in a folder. All ranks call this; all must see the
    folder. What was there before is replaced once all is written, and stays whole until then.

    Args:
        path: of the folder.
        model: whose parameters and persistent buffers are saved, frozen ones too.
        optimizer: of this model: of torch, or a `ZeroOptimizer`.
        extra: values that JSON knows, such as the number of the step.

    Raises:
        ArgumentError: the optimizer has parameters that are not the model's, a state that is neither a number nor one
            for each element, or ``extra`` is not for JSON.
        OSError: the folder cannot be written.
    """
    path = Path(path)
    state = _Holdings(model, optimizer).to_save(extra or {})
    group = model.group
    partial = path.with_name(f"{path.name}.partial")
    with _on_all_ranks(group):
        if group.rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    dcp.save(state, checkpoint_id=partial, process_group=group)
    with _on_all_ranks(group):
        if group.rank() == 0:
            before = path.with_name(f"{path.name}.before")
            shutil.rmtree(before, ignore_errors=True)
            if path.exists():
                path.rename(before)
            partial.rename(path)
            shutil.rmtree(before, ignore_errors=True)


def load_checkpoint(
    path: str | Path, model: DataParallel | FullyShardedParallel, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load what `save_checkpoint` has saved, at any stage and number of ranks. All ranks call this.

    Args:
        path: of the folder.
        model: takes the values; its parameters and buffers must be those of the checkpoint.
        optimizer: takes the state, if given; its groups must have the parameters that they had.

    Returns:
        What was saved as ``extra``.

    Raises:
        CheckpointError: there is no checkpoint, something is missing there or not known here, or a shape differs.
    """
    holdings = _Holdings(model, optimizer)
    with _on_all_ranks(model.group):
        metadata = _metadata(Path(path))
        holdings.require_match(metadata)
        state = holdings.to_load(metadata)
    dcp.load(state, checkpoint_id=path, process_group=model.group)
    holdings.have_loaded(state)
    return dict(json.loads(state[_EXTRA]))
