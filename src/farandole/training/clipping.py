"""Clipping by the norm of all gradients, wherever they are."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.errors import ArgumentError
from farandole.training.data_parallel import DataParallel
from farandole.training.fully_sharded import FullyShardedParallel
from farandole.training.recorded import blocking
from farandole.training.zero import ZeroOptimizer

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    holder: DataParallel | ZeroOptimizer | FullyShardedParallel, max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale all gradients so that their norm, as that of one vector, is at most ``max_norm``; call it on all ranks
    between ``backward`` and ``step``. A parameter that is used in several places counts once. Norms are summed in 64
    bits, so that they are the same at every stage, but for the order in which the last bits add up.

    Args:
        holder: whoever has the gradients: the `ZeroOptimizer`, if there is one, else the model.
        max_norm: the limit, at least 0.
        norm_type: which norm; ``math.inf`` for the largest element.

    Returns:
        The norm before, of float64, the same on all ranks.

    Raises:
        ArgumentError: the holder has no gradients of its own kind, or a number makes no sense.
    """
    if not max_norm >= 0 or not norm_type > 0:
        raise ArgumentError(f"max_norm={max_norm!r}, norm_type={norm_type!r}; they must be at least 0 and above 0")
    if not isinstance(holder, (DataParallel, ZeroOptimizer, FullyShardedParallel)):
        raise ArgumentError(
            f"{type(holder).__name__} holds no gradients of several ranks; give a DataParallel, a ZeroOptimizer or a "
            f"FullyShardedParallel"
        )
    model = holder.model if isinstance(holder, ZeroOptimizer) else holder
    if isinstance(holder, ZeroOptimizer) and holder.is_joining:
        raise ArgumentError("within join(), ranks that are through cannot clip their parts; clip at stage 0, or not")
    model.gradient_sync.settle()
    if isinstance(holder, DataParallel):
        if holder.is_sharded:
            raise ArgumentError("the gradients are with the ZeroOptimizer of this model; give that to clip_grad_norm_")
        gradients, group = [one.grad for one in holder.gradient_sync.parameters if one.grad is not None], None
    else:
        gradients, group = [one.value.grad for one in holder.holdings() if one.value.grad is not None], model.group
    total = _norm(gradients, norm_type, model.device, group)
    if not math.isinf(norm_type) and not 0 < total < math.inf:  # powers may be too large or small for 64 bits
        largest = _norm(gradients, math.inf, model.device, group)
        if bool(0 < largest < math.inf):
            scaled = (one.to(_wide(one.dtype)) / largest for one in gradients)
            total = _norm(scaled, norm_type, model.device, group) * largest
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
    return total


def _norm(
    gradients: Iterable[Tensor], norm_type: float, device: torch.device, group: dist.ProcessGroup | None
) -> Tensor:
    """Of these, on all ranks of ``group`` together, if given."""
    norms = [
        torch.linalg.vector_norm(one, norm_type, dtype=_wide(one.dtype)).double() for one in gradients if one.numel()
    ]
    none = torch.zeros((), dtype=torch.float64, device=device)
    total = torch.linalg.vector_norm(torch.stack([none, *norms]), norm_type)
    if group is None:
        return total
    is_max = math.isinf(norm_type)
    if not is_max:
        total = total.pow_(norm_type)
    with blocking("all_reduce", total, group):
        dist.all_reduce(total, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
    return total if is_max else total.pow_(1 / norm_type)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64
