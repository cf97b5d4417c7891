"""Data parallelism as plainly as it can be written: the reference for the fast one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farandole.training.arguments import group_or_world
from farandole.training.recorded import blocking
from farandole.training.replicas import broadcast, require_same_model

__all__ = ["NaiveDataParallel"]


class NaiveDataParallel(nn.Module):
    """As `farandole.training.DataParallel`, with one all_reduce per parameter when backward is through.

    Every parameter's ``grad`` is then the mean over ranks of what has been accumulated; one that has none on this rank
    counts as zero. Nothing is overlapped, packed or agreed on.

    Args:
        module: the same on each rank.
        group: of ranks; the world if None.
    """

    def __init__(self, module: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group_or_world(group)
        self.module = module
        require_same_model(module, self.group)
        broadcast([*module.parameters(), *module.buffers()], self.group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the module."""
        return self.module(*args, **kwargs)

    def average_gradients(self) -> None:
        """Call after ``backward``, on every rank."""
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                with blocking("all_reduce", parameter.grad, self.group):
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=self.group)
