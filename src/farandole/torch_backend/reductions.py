"""torch's reductions in farandole's words."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from farandole.dtypes import dtype_named, require_reducible
from farandole.errors import ArgumentError, UnsupportedReductionError
from farandole.torch_backend.tensors import OWN_DTYPES, Delivery

__all__ = ["Reducing", "name_of_op", "wide"]

_OPS = {
    dist.ReduceOp.RedOpType.SUM: "sum",
    dist.ReduceOp.RedOpType.AVG: "avg",
    dist.ReduceOp.RedOpType.PRODUCT: "prod",
    dist.ReduceOp.RedOpType.MIN: "min",
    dist.ReduceOp.RedOpType.MAX: "max",
    dist.ReduceOp.RedOpType.BAND: "band",
    dist.ReduceOp.RedOpType.BOR: "bor",
    dist.ReduceOp.RedOpType.BXOR: "bxor",
}


def name_of_op(kind: Any) -> str | None:
    """What farandole calls that kind of ``dist.ReduceOp``; None if it has none of its own for it."""
    return _OPS.get(kind)


class Reducing:
    """What torch's reduction of a tensor is in farandole's words.

    Attributes:
        op: the name of the reduction.
        operand: what is reduced, and where the result goes: the tensor, or a scaled copy.
        is_scaled: whether it is a copy.

    Raises:
        ArgumentError: farandole has no such reduction.
        UnsupportedReductionError: it has no meaning for the tensor's dtype.
    """

    def __init__(self, tensor: torch.Tensor, reduce_op: Any) -> None:
        kind, factor = reduce_op.__getstate__() if isinstance(reduce_op, dist.ReduceOp) else (reduce_op, None)
        self.is_scaled = kind == dist.ReduceOp.RedOpType.PREMUL_SUM
        self.operand = tensor.detach()
        if self.is_scaled:
            dtype = wide(tensor.dtype)
            self.operand = (self.operand.to(dtype) * factor).to(dtype)
            kind = dist.ReduceOp.RedOpType.SUM
        if kind not in _OPS:
            raise ArgumentError(f"op is {kind}; the backend has {', '.join(op.name for op in _OPS)}, PREMUL_SUM")
        self.op = _OPS[kind]
        if tensor.dtype not in OWN_DTYPES:
            raise UnsupportedReductionError(
                f"{self.op} has no meaning for {tensor.dtype}, which can be moved but not reduced; convert it first"
            )
        require_reducible(dtype_named(str(tensor.dtype).removeprefix("torch.")), self.op)

    def deliver_to(self, tensor: torch.Tensor) -> Delivery:
        """How the result gets into ``tensor``, if it is not there."""
        if not self.is_scaled:
            return None

        def deliver() -> None:
            tensor.detach().copy_(self.operand)

        return deliver


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in here: 16-bit floats are summed in 32 bits, and rounded once."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
