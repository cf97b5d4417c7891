"""What a rank holds of a model and its optimizer, by the keys of a checkpoint; see `farandole.training.checkpoint`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
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
from farandole.training.shards import Holding
from farandole.training.zero import ZeroOptimizer

__all__ = ["State"]

_ABOUT = "about"
"""The key of what is known besides tensors, as JSON: the optimizer's groups, the names of tied parameters, and whatever
the user adds."""

_MAX_NAMED = 10


class State:
    """Of one rank.

    Args:
        model: as it is wrapped.
        optimizer: its own; None leaves that out.

    Raises:
        ArgumentError: the two do not belong together.
    """

    def __init__(self, model: DataParallel | FullyShardedParallel, optimizer: torch.optim.Optimizer | None) -> None:
        if not isinstance(optimizer, (torch.optim.Optimizer, NoneType)):
            raise ArgumentError(
                f"the optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer or None"
            )
        if isinstance(optimizer, ZeroOptimizer) and optimizer.model is not model:
            raise ArgumentError("the ZeroOptimizer is that of another model")
        if isinstance(model, DataParallel) and model.is_sharded and optimizer not in (None, model.sharded_by):
            raise ArgumentError("the parameters are sharded by a ZeroOptimizer; give that one, or none")
        self._model = model
        self._optimizer = optimizer
        self._pieces: list[Holding] = []
        self._sharded: dict[str, torch.Size] = {}
        sharding = optimizer if isinstance(optimizer, ZeroOptimizer) else model
        if not isinstance(sharding, DataParallel):
            self._pieces, self._sharded = list(sharding.holdings()), sharding.sharded_shapes()
        module = model.module
        persistent = module.state_dict(keep_vars=True).keys()
        self._wholes = {name: one for name, one in module.named_parameters() if name not in self._sharded}
        self._buffers = {name: one for name, one in module.named_buffers() if name in persistent}
        self._read: dict[Tensor, dict[str, Tensor]] = {}  # of the optimizer's state

    def _parameters(self) -> dict[str, Any]:
        """What is here of each, by the keys of a checkpoint."""
        pieces = {f"model.{one.name}": _Piece.of(one, one.value.detach()) for one in self._pieces}
        return {**pieces, **{f"model.{name}": one.detach() for name, one in self._wholes.items()}}

    def _of_optimizer(self) -> list[Holding]:
        """What it has a state for. Not what is empty here: that is never stepped, and would not count steps."""
        wholes = [Holding(name, one.shape, 0, one.numel(), one) for name, one in self._wholes.items()]
        return [one for one in self._pieces + wholes if one.value.numel() or not one.shape.numel()]

    def _names_in_groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        names = {id(one.value): one.name for one in self._pieces} | {
            id(one): name for name, one in self._wholes.items()
        }
        for group in optimizer.param_groups:
            if strange := [tuple(one.shape) for one in group["params"] if id(one) not in names]:
                raise ArgumentError(
                    f"the optimizer has a parameter of shape {strange[0]} that is not the model's; make it from "
                    f"model.parameters(), after the model is wrapped"
                )
        return [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]

    # -- saving ------------------------------------------------------------------------------------------------------

    def to_save(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """What goes into a checkpoint.

        Args:
            extra: what the user adds.

        Raises:
            ArgumentError: something cannot be saved.
        """
        if isinstance(self._optimizer, ZeroOptimizer):
            self._optimizer.take_over()
        state = self._parameters()
        if self._optimizer is not None:
            for holding in self._of_optimizer():
                for key, value in self._optimizer.state.get(holding.value, {}).items():
                    if value is not None:
                        state[f"optimizer.state.{holding.name}.{key}"] = _saved(holding, key, value)
        about = self._about(extra)
        if self._model.group.rank() == 0:  # ranks may differ in these
            state |= {f"model.{name}": one for name, one in self._buffers.items()}
            state[_ABOUT] = about
        return state

    def _about(self, extra: Mapping[str, Any]) -> str:
        about: dict[str, Any] = {"extra": dict(extra), "aliases": self._model.aliases, "groups": None}
        if self._optimizer is not None:
            about["groups"] = [
                {"params": list(some), **{key: _plain(value) for key, value in group.items() if key != "params"}}
                for group, some in zip(
                    self._optimizer.param_groups, self._names_in_groups(self._optimizer), strict=True
                )
            ]
        try:
            return json.dumps(about)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"extra and the options of groups must be values that JSON knows: {error}") from error

    # -- loading -----------------------------------------------------------------------------------------------------

    def to_load(self, metadata: Metadata) -> dict[str, Any]:
        """Where what is in a checkpoint goes: for the optimizer's state, that is memory which it has not yet.

        Raises:
            CheckpointError: the checkpoint has other tensors than this model.
        """
        self._require_match(metadata)
        state = self._parameters()
        state |= {f"model.{name}": one for name, one in self._buffers.items()}
        state[_ABOUT] = ""
        if self._optimizer is not None:
            found = _states_by_name(metadata)
            for holding in self._of_optimizer():
                made = {key: _room_for(holding, key, known) for key, known in found.get(holding.name, {}).items()}
                self._read[holding.value] = {key: values for key, (values, _) in made.items()}
                state |= {f"optimizer.state.{holding.name}.{key}": goal for key, (_, goal) in made.items()}
        return state

    def _require_match(self, metadata: Metadata) -> None:
        known = metadata.state_dict_metadata
        if _ABOUT not in known:
            raise CheckpointError("save_checkpoint has not made this checkpoint")
        wanted = {f"model.{name}": one.shape for name, one in {**self._wholes, **self._buffers}.items()}
        wanted |= {f"model.{name}": shape for name, shape in self._sharded.items()}
        missing = sorted(key for key in wanted if key not in known)
        unexpected = sorted(key for key in known if key.startswith("model.") and key not in wanted)
        if missing or unexpected:
            problems = [
                *([f"it lacks {_listed(missing)}"] if missing else []),
                *([f"it has {_listed(unexpected)}, which the model has not"] if unexpected else []),
            ]
            raise CheckpointError(f"the checkpoint is of another model: {'; '.join(problems)}")
        for key, shape in wanted.items():
            if known[key].size != shape:
                raise CheckpointError(
                    f"{key!r} is of shape {tuple(known[key].size)} in the checkpoint, {tuple(shape)} in the model"
                )

    def require_groups(self, state: Mapping[str, Any]) -> None:
        """Args:
            state: as `to_load` has made it, filled.

        Raises:
            ArgumentError: the optimizer has a parameter that is not the model's.
            CheckpointError: the optimizer had other groups.
        """
        if self._optimizer is None:
            return
        names, groups = self._names_in_groups(self._optimizer), self._optimizer.param_groups
        saved = json.loads(state[_ABOUT])["groups"]
        if saved is None:
            raise CheckpointError("the checkpoint was saved without an optimizer; load it without one")
        known = {name for name in self._model.gradient_sync.names if self._shape_of(name).numel()}  # what is stepped
        was, now = [known.intersection(one["params"]) for one in saved], [known.intersection(some) for some in names]
        if was != now:
            where = next(
                (index for index, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now))
            )
            raise CheckpointError(
                f"the optimizer has {len(now)} groups, the checkpoint {len(was)}, and group {where} is not of the same "
                f"parameters; make the groups that were saved"
            )
        for group, one in zip(groups, saved, strict=True):
            if one.keys() != group.keys():
                raise CheckpointError(
                    f"the checkpoint is of another kind of optimizer: its options are {sorted(one.keys())}, those here "
                    f"{sorted(group.keys())}"
                )

    def have_loaded(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Hand on what was read; returns what the user had added. All ranks call this.

        Args:
            state: as `to_load` has made it, filled; of the groups that are here.
        """
        about = json.loads(state[_ABOUT])
        if self._optimizer is not None:
            for group, one in zip(self._optimizer.param_groups, about["groups"], strict=True):
                for key, value in one.items():
                    before = group.get(key)
                    if isinstance(before, Tensor):
                        before.fill_(value)
                    elif key != "params":
                        group[key] = tuple(value) if isinstance(before, tuple) else value
            for parameter, entries in self._read.items():
                self._optimizer.state.pop(parameter, None)
                if entries:
                    self._optimizer.state[parameter] = entries
        if isinstance(self._optimizer, ZeroOptimizer):
            self._optimizer.gather()
        return dict(about["extra"])

    def _shape_of(self, name: str) -> torch.Size:
        return self._sharded[name] if name in self._sharded else self._wholes[name].shape


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _MAX_NAMED} more" if len(keys) > _MAX_NAMED else ""
    return ", ".join(map(repr, keys[:_MAX_NAMED])) + more


def _plain(value: object) -> object:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _saved(holding: Holding, key: str, value: object) -> Tensor:
    """One entry of the optimizer's state."""
    if isinstance(value, Tensor) and value.shape == holding.value.shape:
        return _Piece.of(holding, value)
    if isinstance(value, (int, float)):
        return torch.tensor(value)
    if isinstance(value, Tensor) and value.dim() == 0:
        return value
    raise ArgumentError(
        f"the optimizer keeps {key!r} of {holding.name!r} in a form that is neither one number nor one for each "
        f"element of the parameter; such state cannot be saved"
    )


def _states_by_name(metadata: Metadata) -> dict[str, dict[str, TensorStorageMetadata]]:
    found: dict[str, dict[str, TensorStorageMetadata]] = {}
    for key, known in metadata.state_dict_metadata.items():
        if key.startswith("optimizer.state.") and isinstance(known, TensorStorageMetadata):
            name, _, entry = key.removeprefix("optimizer.state.").rpartition(".")
            found.setdefault(name, {})[entry] = known
    return found


def _room_for(holding: Holding, key: str, known: TensorStorageMetadata) -> tuple[Tensor, Tensor]:
    """An entry of the optimizer's state, and what a checkpoint reads into it."""
    dtype = known.properties.dtype
    if dtype.is_floating_point and holding.value.is_floating_point():
        dtype = holding.value.dtype  # a stage may work in another one
    is_per_element = known.size == holding.shape and not (known.size == () and key == "step")
    if is_per_element:
        values = torch.empty_like(holding.value.detach(), dtype=dtype)
        return values, _Piece.of(holding, values)
    values = torch.empty(known.size, dtype=known.properties.dtype)
    return values, values


class _Piece(Tensor):
    """The elements of a parameter that this rank has, as torch.distributed.checkpoint takes them: boxes."""

    _boxes: list[tuple[ChunkStorageMetadata, Tensor]]

    @staticmethod
    def of(holding: Holding, values: Tensor) -> Tensor:
        """``values`` are the elements of ``holding``: all in one dimension, or the whole tensor."""
        if values.shape == holding.shape:
            return values
        if holding.stop - holding.start == holding.shape.numel():
            return values.view(holding.shape)
        piece: _Piece = Tensor._make_wrapper_subclass(_Piece, holding.shape, dtype=values.dtype, device=values.device)
        piece._boxes = [
            (
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                values[first - holding.start :][: torch.Size(sizes).numel()].view(sizes),
            )
            for offsets, sizes, first in boxes_of(holding.shape, holding.start, holding.stop)
        ]
        return piece

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"a piece of a checkpoint is read and written, not computed with: {function}")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(values), size=self.size()
                ),
            )
            for chunk, values in self._boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for chunk, values in self._boxes:
            if chunk.offsets == index.offset:
                return values
        raise AssertionError(f"no box of {index}")
