"""How the gradients of all ranks become one sum.

A flat tensor has a part per rank (see `farandole.training.layout`). *Plainly*, it is summed by an all_reduce, or by a
reduce_scatter that leaves each rank its own part. But a backend sums in an order of its own choice, and in the dtype
that travels. Where the order is to be that of the ranks, or where 16 bits are to travel and 32 to be summed, the parts
are *exchanged*: an all_to_all brings each rank its part of every rank's gradients, which it sums itself; for an
all_reduce an all_gather follows. That is what the two halves of an all_reduce send anyway: (N-1)/N of the bytes each.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.training.layout import Layout
from farandole.training.recorded import started, wait_for

__all__ = ["Pending", "Summing"]


class Pending(Protocol):
    """A sum that is under way."""

    def advance(self) -> None:
        """Start what must wait for what was started before. All ranks call this at the same place among their
        collectives."""

    def wait(self) -> None:
        """Return when the sum is there; all ranks call this at the same place, too."""


class Summing:
    """Sums over the ranks of a group.

    Args:
        group: whose ranks take part.
        mean: divide by the number of ranks, or what ``divisor`` is set to.
        reproducible: sum in the order of the ranks, so that the bits of an element depend on nothing but the ranks'
            values.
        wire_dtype: what travels in place of wider floats; sums are as wide as before.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, mean: bool, reproducible: bool, wire_dtype: torch.dtype | None
    ) -> None:
        self.group = group
        self.world_size = group.size()
        self.rank = group.rank()
        self.is_mean = mean
        self.divisor = self.world_size if mean else 1
        self._reproducible = reproducible
        self._wire_dtype = wire_dtype

    def all_reduce(self, flat: Tensor, layout: Layout, carried: Tensor | None) -> Pending:
        """Sum ``flat`` in place, and add ``carried``: the sum so far."""
        if not self._must_exchange(flat.dtype, flat.dtype):
            op, divisor = self._op_and_divisor()
            work = dist.all_reduce(flat, op=op, group=self.group, async_op=True)
            started(work, "all_reduce", flat, self.group)
            return _Plain(work, flat, divisor, flat, carried)
        own = layout.part(flat, self.rank)
        exchanged = _Exchanged(self, flat, own, None if carried is None else layout.part(carried, self.rank))
        return _Gathered(self, exchanged, flat, own)

    def reduce_scatter(self, flat: Tensor, layout: Layout, into: Tensor, *, accumulate: bool) -> Pending:
        """Sum this rank's part of ``flat`` into ``into``, or add it to what is there. ``flat`` must be left alone until
        then, and its content is lost."""
        carried = into if accumulate else None
        if self._must_exchange(flat.dtype, into.dtype):
            return _Exchanged(self, flat, into, carried)
        op, divisor = self._op_and_divisor()
        part = layout.part(flat, self.rank) if accumulate else into
        work = dist.reduce_scatter_single(part, flat, op=op, group=self.group, async_op=True)
        started(work, "reduce_scatter", flat, self.group)
        return _Plain(work, part, divisor, into, part if accumulate else None)

    def _op_and_divisor(self) -> tuple[dist.ReduceOp.RedOpType, int]:
        """What the backend does, and what is left to do."""
        if self.divisor == self.world_size:
            return dist.ReduceOp.AVG, 1
        return dist.ReduceOp.SUM, self.divisor

    def travelling(self, dtype: torch.dtype) -> torch.dtype:
        """What travels in place of ``dtype``."""
        is_wide = dtype in (torch.float32, torch.float64)
        return self._wire_dtype if is_wide and self._wire_dtype is not None else dtype

    def _must_exchange(self, given: torch.dtype, wanted: torch.dtype) -> bool:
        if given != wanted:
            return True
        return self.world_size > 1 and (self._reproducible or self.travelling(given) != given)


class _Plain:
    """The backend sums; what is there is divided, and what there is ``more`` is added to ``target``."""

    def __init__(self, work: dist.Work, result: Tensor, divisor: int, target: Tensor, more: Tensor | None) -> None:
        self._work = work
        self._result = result
        self._divisor = divisor
        self._target = target
        self._more = more

    def advance(self) -> None:
        pass

    def wait(self) -> None:
        wait_for(self._work)
        if self._divisor != 1:
            self._result.div_(self._divisor)
        if self._more is not None:
            self._target.add_(self._more)


class _Exchanged:
    """This rank's part of ``flat``, summed here: what was carried first, then rank by rank, in 32 bits or more; then
    divided and rounded once."""

    def __init__(self, summing: Summing, flat: Tensor, target: Tensor, carried: Tensor | None) -> None:
        self._summing = summing
        sent = flat.to(summing.travelling(flat.dtype))
        self._received = torch.empty_like(sent)
        self._work = dist.all_to_all_single(self._received, sent, group=summing.group, async_op=True)
        started(self._work, "all_to_all", sent, summing.group)
        self._sent = sent  # in use until the work is done
        self._target = target
        self._carried = carried

    def advance(self) -> None:
        pass

    def wait(self) -> None:
        wait_for(self._work)
        first, *others = self._received.chunk(self._summing.world_size)
        total = first.to(torch.promote_types(self._target.dtype, torch.float32), copy=True)
        if self._carried is not None:
            total = self._carried.to(total.dtype, copy=True).mul_(self._summing.divisor).add_(total)
        for other in others:
            total.add_(other)
        self._target.copy_(total.div_(self._summing.divisor))


class _Gathered:
    """An exchange, and an all_gather of the parts."""

    def __init__(self, summing: Summing, exchanged: _Exchanged, flat: Tensor, own: Tensor) -> None:
        self._summing = summing
        self._exchanged = exchanged
        self._flat = flat
        self._own = own
        self._work: dist.Work | None = None

    def advance(self) -> None:
        if self._work is not None:
            return
        self._exchanged.wait()
        dtype = self._summing.travelling(self._flat.dtype)
        self._sent = self._own.to(dtype)
        self._received = self._flat if dtype == self._flat.dtype else torch.empty_like(self._flat, dtype=dtype)
        self._work = dist.all_gather_single(self._received, self._sent, group=self._summing.group, async_op=True)
        started(self._work, "all_gather", self._received, self._summing.group)

    def wait(self) -> None:
        self.advance()
        assert self._work is not None
        wait_for(self._work)
        if self._received is not self._flat:
            self._flat.copy_(self._received)
