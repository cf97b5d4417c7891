"""Scaling losses of 16-bit floats where gradients are in parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable

from farandole.errors import ArgumentError
from farandole.training.wrapper import Wrapper

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """As `torch.amp.GradScaler`, for all stages: if the gradients of any rank have an infinity or NaN, no rank steps,
    and the scale shrinks on all. torch's own would look at this rank's part alone.

    Args:
        model: whose gradients these are.
        options: of `torch.amp.GradScaler`, such as ``init_scale``.
    """

    def __init__(self, model: Wrapper, **options: Any) -> None:
        super().__init__(model.device.type, **options)
        self._model = model

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if isinstance(self._model, Joinable) and self._model._join_config.enable:
            raise ArgumentError(
                "within join(), ranks that are through cannot look for infinities; use bfloat16, and scale nothing"
            )
        self._model.gradient_sync.settle()
        found: dict[torch.device, Tensor] = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found.setdefault(self._model.device, found_inf)  # a rank may have no gradients
        for one in found.values():
            dist.all_reduce(one, op=dist.ReduceOp.MAX, group=self._model.group)
        return found
