"""The backend "farandole" of `torch.distributed`.

``import farandole.torch_backend`` registers it; where farandole is installed, ``import torch`` does so by itself. After
that, ``torch.distributed.init_process_group("farandole")`` and everything above it works on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from farandole.errors import ArgumentError
from farandole.torch_backend.group import ProcessGroup, create
from farandole_torch import register

__all__ = ["ProcessGroup", "create", "empty"]


def empty(
    shape: int | Sequence[int], dtype: torch.dtype | None = None, *, group: dist.ProcessGroup | None = None
) -> Any:
    """A tensor of zeros in registered memory, which the other ranks of ``group`` read where it lies: calls on it need
    no copies in between. Not a collective.

    Args:
        shape: of the tensor.
        dtype: torch's default dtype if None.
        group: of this backend; the world if None. Of use to this group alone.

    Raises:
        ArgumentError: the group is of another backend; or there is no memory for it.
    """
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, ProcessGroup):
        raise ArgumentError(f"the group is a {type(group).__name__}; registered memory needs a group of farandole")
    return group.empty(shape, torch.get_default_dtype() if dtype is None else dtype)


register()
