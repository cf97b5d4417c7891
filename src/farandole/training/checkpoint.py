"""Checkpoints of `torch.distributed.checkpoint`: saved at any stage on any number of ranks, loaded at any other.

A checkpoint has each parameter and buffer under ``model.NAME``, as the module that is wrapped names it, and the
optimizer's state under ``optimizer.state.NAME.KEY``, all in their whole shapes, so that any reader of such checkpoints
finds them. A rank writes and reads the elements it holds: of a piece (see `farandole.training.layout`), the boxes that
it consists of. So each element is written once, and the planner of torch checks that.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from farandole.errors import ArgumentError
from farandole.training.data_parallel import DataParallel
from farandole.training.errors import CheckpointError
from farandole.training.fully_sharded import FullyShardedParallel
from farandole.training.state import State

__all__ = ["export_weights", "load_checkpoint", "save_checkpoint"]

_T = TypeVar("_T")


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
        model: whose parameters and persistent buffers are saved, frozen ones too; buffers as rank 0 has them.
        optimizer: of this model: of torch, or a `ZeroOptimizer`.
        extra: values that JSON knows, such as the number of the step; those of rank 0 are saved.

    Raises:
        ArgumentError: the optimizer has parameters that are not the model's, or a state that is neither a number nor
            one for each element, or a value is not for JSON.
        CheckpointError: another rank has failed, or the folder cannot be written.
    """
    path = Path(path).resolve()  # of a link, what it leads to
    partial, before = path.with_name(f"{path.name}.partial"), _before(path)
    state = _state_of(model, optimizer)
    group = model.group

    def prepare() -> dict[str, Any]:
        if group.rank() == 0:
            if path.exists() and not (path / ".metadata").exists() and not _is_empty_folder(path):
                raise CheckpointError(f"{str(path)!r} is no checkpoint, and would be replaced; give another folder")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        return state.to_save(extra or {})

    saved = _on_all_ranks(group, prepare)
    with _failures_named():
        dcp.save(saved, checkpoint_id=partial, process_group=group)

    def replace() -> None:
        if group.rank() == 0:
            if path.exists():
                shutil.rmtree(before, ignore_errors=True)
                path.rename(before)
            partial.rename(path)
            shutil.rmtree(before, ignore_errors=True)

    _on_all_ranks(group, replace)


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
        ArgumentError: the optimizer is not that of the model.
        CheckpointError: there is no checkpoint, a file of it cannot be read, it lacks something or has what is not
            known here, or a shape differs. Where the optimizer's groups differ, or a file cannot be read, some of the
            model's values are those of the checkpoint by then; the optimizer's state is as it was.
    """
    path = Path(path).resolve()
    state = _state_of(model, optimizer)
    group = model.group
    if not path.exists() and _before(path).exists():  # a save was interrupted between its last two steps
        path = _before(path)
    goals = _on_all_ranks(group, lambda: state.to_load(_metadata_of(path)))
    with _failures_named():
        dcp.load(goals, checkpoint_id=path, process_group=group)
    _on_all_ranks(group, lambda: state.require_groups(goals))
    return state.have_loaded(goals)


def export_weights(path: str | Path, model: DataParallel | FullyShardedParallel) -> None:
    """Write all parameters and buffers into one file of safetensors, from rank 0: for those who use the model
    elsewhere. All ranks call this. Tied parameters are there under each of their names; the file's metadata says, under
    ``aliases``, which are the same. Needs safetensors.

    Args:
        path: of the file.
        model: on which every rank has room for all parameters.

    Raises:
        ArgumentError: safetensors is not installed.
        CheckpointError: the file cannot be written.
    """
    path = Path(path)
    model.gradient_sync.settle()
    weights = model.state_dict()

    def write() -> None:
        if model.group.rank() == 0:
            try:
                from safetensors.torch import save_file
            except ImportError as error:
                raise ArgumentError("this needs safetensors: pip install safetensors") from error
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.partial")
            contents = {
                name: one.detach().clone().contiguous()
                for name, one in weights.items()
                if isinstance(one, torch.Tensor)
            }
            save_file(contents, partial, metadata={"format": "pt", "aliases": json.dumps(model.aliases)})
            partial.replace(path)

    _on_all_ranks(model.group, write)


def _state_of(model: DataParallel | FullyShardedParallel, optimizer: torch.optim.Optimizer | None) -> State:
    if not isinstance(model, (DataParallel, FullyShardedParallel)):
        raise ArgumentError(
            f"the model is a {type(model).__name__}; it must be a DataParallel or a FullyShardedParallel"
        )
    model.gradient_sync.settle()
    return _on_all_ranks(model.group, lambda: State(model, optimizer))


def _before(path: Path) -> Path:
    """Where the checkpoint before is while it is replaced."""
    return path.with_name(f"{path.name}.before")


@contextlib.contextmanager
def _failures_named() -> Iterator[None]:
    """What goes wrong with files on some ranks, torch raises on all, as no Exception."""
    try:
        yield
    except CheckpointException as error:
        said = [f"rank {rank}: {problem}" for rank, (problem, _) in sorted(error.failures.items())]
        raise CheckpointError("; ".join(said)) from error


def _metadata_of(path: Path) -> Metadata:
    if not (path / ".metadata").is_file():
        raise CheckpointError(f"there is no checkpoint in {str(path)!r}")
    try:
        return dcp.FileSystemReader(path).read_metadata()
    except Exception as error:  # whatever a file that is none leads to
        raise CheckpointError(f"{str(path / '.metadata')!r} cannot be read: {error}") from error


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _on_all_ranks(group: dist.ProcessGroup, function: Callable[[], _T]) -> _T:
    """What ``function`` returns here, once it has on every rank; an error on any is raised on all."""
    problem: Exception | None = None
    results: list[_T] = []
    try:
        results.append(function())
    except (ArgumentError, CheckpointError) as error:
        problem = error
    except OSError as error:
        problem = CheckpointError(str(error))
    except Exception as error:  # none is left waiting
        problem = error
    said: list[Any] = [None] * group.size()
    dist.all_gather_object(said, f"{type(problem).__name__}: {problem}" if problem else "", group=group)
    if problem:
        raise problem
    for rank, text in enumerate(said):
        if text:
            raise CheckpointError(f"rank {rank}: {text}")
    return results[0]
