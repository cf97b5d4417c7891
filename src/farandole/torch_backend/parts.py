"""A call of a communicator within one of torch's, which may be several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from farandole.torch_backend.tensors import Delivery

__all__ = ["Part"]


class Part(NamedTuple):
    """A call of a communicator, the tensors of the user that it is for, and what is left to do when it is done."""

    call: partial[Any]
    tensors: Sequence[torch.Tensor]
    deliver: Delivery

    def poison(self, is_in_use: Callable[[int, int], bool]) -> None:
        """Spoil tensors that are delivered to when the call is done, so that nobody reads them before, unless the call
        reads them. (Those that it writes itself, the communicator spoils.)

        Args:
            is_in_use: whether a call before this one uses so many bytes from that address on.
        """
        if self.deliver is None:
            return
        read = {row.untyped_storage().data_ptr() for row in self.call.args if torch.is_tensor(row)}
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in read or is_in_use(storage.data_ptr(), storage.nbytes()):
                continue
            byte = 1 if tensor.dtype == torch.bool else 0xFF
            spoiled = torch.full((tensor.nbytes,), byte, dtype=torch.uint8, device="cpu")
            tensor.detach().copy_(spoiled.view(tensor.dtype).view(tensor.shape))
