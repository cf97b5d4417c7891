"""Memory for flat tensors: registered where the backend of the group has such memory, else torch's own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["zeros"]


def zeros(numel: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> Tensor:
    """A flat tensor of zeros. Registered memory is what the backend reads and writes where it lies, with no copy."""
    backend = group._get_backend(device)
    if numel and backend.supports_tensor_alloc(device):
        return backend.allocate_tensor(numel, dtype=dtype, device=device).zero_()
    return torch.zeros(numel, dtype=dtype, device=device)
