"""Checks of what the wrappers of this package are given."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farandole.errors import ArgumentError

__all__ = [
    "device_of",
    "group_or_world",
    "require_choice",
    "require_dense",
    "require_own_elements",
    "require_size",
    "require_wire_dtype",
]


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Raises:
    ArgumentError: there is no group, or this rank is not of it.
    """
    if not dist.is_initialized():
        raise ArgumentError('no process group; call torch.distributed.init_process_group("farandole") first')
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise ArgumentError(f"group is {found!r}; it must be one that this rank belongs to")
    return found


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises:
    ArgumentError: ``value`` is none of them.
    """
    if value not in (known := list(choices)):
        raise ArgumentError(f"{name}={value!r}; it must be {' or '.join(map(repr, known))}")


def require_size(name: str, value: object) -> None:
    """Raises:
    ArgumentError: ``value`` is no positive whole number.
    """
    if type(value) is not int or value < 1:
        raise ArgumentError(f"{name}={value!r}; it must be a whole number of bytes, at least 1")


def require_wire_dtype(name: str, value: torch.dtype | None) -> None:
    """Raises:
    ArgumentError: ``value`` is neither None nor 16-bit floats.
    """
    if value not in (None, torch.bfloat16, torch.float16):
        raise ArgumentError(f"{name}={value!r}; it must be torch.bfloat16, torch.float16 or None")


def device_of(module: nn.Module) -> torch.device:
    """The device of all parameters and buffers.

    Raises:
        ArgumentError: they are on several, or on none where memory is.
    """
    tensors: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if tensor.device != tensors[0][1].device:
            raise ArgumentError(
                f"{name!r} is on {tensor.device}, {tensors[0][0]!r} on {tensors[0][1].device}; move the module to one "
                f"device first"
            )
        if tensor.is_meta:
            raise ArgumentError(f"{name!r} is on the meta device; give the module values first, with to_empty()")
    return tensors[0][1].device if tensors else torch.device("cpu")


def require_own_elements(module: nn.Module) -> None:
    """Raises:
    ArgumentError: elements of a parameter or buffer share memory, so it cannot be written into.
    """
    for name, one in [*module.named_parameters(), *module.named_buffers()]:
        if any(size > 1 and stride == 0 for size, stride in zip(one.shape, one.stride(), strict=True)):
            raise ArgumentError(
                f"{name!r} was made by expand(), and rank 0's values cannot be copied into it; clone() it"
            )


def require_dense(module: nn.Module) -> None:
    """Raises:
    ArgumentError: a layer makes sparse gradients.
    """
    for name, layer in module.named_modules():
        if getattr(layer, "sparse", False) is True:
            raise ArgumentError(
                f"the layer {name or type(layer).__name__!r} makes sparse gradients; make it with sparse=False, or sum "
                f"its gradients as dense ones, with sparse='dense'"
            )
