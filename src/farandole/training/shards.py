"""Parameters in flat memory of which each rank owns a part, and the gradients for that part.

A `FlatShard` holds what an optimizer works on: this rank's part of the parameters, piece by piece (see
`farandole.training.layout`). A `ScatterBucket` takes the gradients of the whole parameters, and delivers those of the
pieces: the first half of an all_reduce. The other half is the all_gather of the parts once the optimizer has changed
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farandole.errors import ArgumentError
from farandole.training.bucket import Bucket, Kind, Seen
from farandole.training.layout import Layout
from farandole.training.memory import zeros
from farandole.training.stepping import watch_steps
from farandole.training.summing import Summing

__all__ = ["MAX_ON_THE_WAY", "BufferPool", "FlatShard", "Holding", "ScatterBucket", "master_dtype"]

MAX_ON_THE_WAY = 2
"""Sums that are under way before a pool waits for the oldest."""

_OF_WHOLE_PARAMETERS = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)


class Holding(NamedTuple):
    """What this rank holds of a parameter.

    Attributes:
        name: of the parameter in the module that is wrapped.
        shape: of the whole parameter.
        start: its first element that is here.
        stop: behind the last one.
        value: these, which an optimizer works on.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    value: nn.Parameter


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which an optimizer keeps parameters of ``dtype``: of 16-bit floats it would round small steps away."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class FlatShard:
    """This rank's part of some parameters.

    Args:
        names: of the parameters.
        parameters: whole ones.
        own: where the part is; of the dtype that the optimizer works in.
        layout: of the parameters.
        rank: of this process.

    Attributes:
        pieces: of the layout, on this rank.
        values: per piece, a parameter of one dimension: for the optimizer.
        gradient: of the part.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], own: Tensor, layout: Layout, rank: int
    ) -> None:
        self.names = names
        self.layout = layout
        self.own = own
        self.pieces = layout.pieces(rank)
        self.values = [
            nn.Parameter(piece.view(own), requires_grad=parameters[piece.tensor].requires_grad) for piece in self.pieces
        ]
        self.gradient = torch.zeros(0, dtype=own.dtype, device=own.device)  # grows with the first backward
        # Since a backward that was not summed, what pieces had then, and whether that is but zero in place of nothing.
        self._paused: dict[int, tuple[Seen, bool]] = {}
        watch_steps(self.values, self)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See `farandole.training.stepping.Watcher`.

        Raises:
            ArgumentError: the optimizer needs whole parameters, or gradients of this rank alone are left.
        """
        if isinstance(optimizer, _OF_WHOLE_PARAMETERS):
            raise ArgumentError(
                f"{type(optimizer).__name__} needs whole parameters, and these are pieces; take one that treats each "
                f"element by itself, such as AdamW, or DataParallel without a ZeroOptimizer"
            )
        for position in self._paused:
            if not self._was_let_go(position):
                raise ArgumentError(
                    f"{self.names[self.pieces[position].tensor]!r} has a gradient of this rank alone; run the last "
                    f"backward before step() outside no_sync()"
                )

    def holdings(self) -> Iterator[Holding]:
        """Of each parameter."""
        for piece, value in zip(self.pieces, self.values, strict=True):
            shape = self.layout.places[piece.tensor].shape
            yield Holding(self.names[piece.tensor], shape, piece.start, piece.stop, value)

    def pause(self, have_gradients: Sequence[bool]) -> None:
        """Some whole parameters have gradients of this rank alone. So that it is seen whether these are let go of, each
        piece has a gradient, too."""
        for position, (piece, value) in enumerate(zip(self.pieces, self.values, strict=True)):
            if have_gradients[piece.tensor]:
                is_new = value.grad is None
                if is_new:
                    value.grad = piece.view(self.require_gradient().data).zero_()
                self._paused[position] = Seen.of(value), is_new

    def resume(self) -> list[int]:
        """Backward goes on. Returns those parameters whose gradients were let go of."""
        let_go = [position for position in self._paused if self._was_let_go(position)]
        for position, (_, is_new) in self._paused.items():
            if is_new:
                self.values[position].grad = None
        self._paused.clear()
        return [self.pieces[position].tensor for position in let_go]

    def _was_let_go(self, position: int) -> bool:
        seen, _ = self._paused[position]
        return seen.was_let_go(self.values[position])

    def carry(self) -> bool:
        """Have in ``gradient`` what was not let go of, as it is now, and zero elsewhere; whether there is any."""
        if all(value.grad is None for value in self.values):
            return False
        gradient = self.require_gradient()
        for piece, value in zip(self.pieces, self.values, strict=True):
            view = piece.view(gradient)
            if value.grad is None:
                view.zero_()
            elif value.grad.data_ptr() != view.data_ptr():
                view.copy_(value.grad)
        return True

    def require_gradient(self) -> Tensor:
        """The memory of the part's gradients."""
        if self.gradient.numel() != self.own.numel():
            self.gradient = torch.zeros_like(self.own)
        return self.gradient

    def deliver(self, has_gradient: Sequence[bool]) -> None:
        """Give the pieces of those tensors their gradients, as they lie in ``gradient``."""
        for piece, value in zip(self.pieces, self.values, strict=True):
            if has_gradient[piece.tensor] and value.numel():
                value.grad = piece.view(self.gradient.data)  # of which it is seen whether it is changed by itself


class BufferPool:
    """Flat memory for gradients on their way, shared by buckets of one dtype.

    Attributes:
        free: what is not in use.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> None:
        self._kind = dtype, device, group
        self.free: list[Tensor] = []
        self._lent: list[ScatterBucket] = []  # whose sums were started, oldest first

    def take(self, numel: int) -> Tensor:
        """So much memory or more, with anything in it. Waits for the oldest sum if several are under way."""
        if len(self._lent) >= MAX_ON_THE_WAY:
            self._lent[0].wait()
        fitting = [one for one in self.free if one.numel() >= numel]
        if fitting:
            best = min(fitting, key=Tensor.numel)
            self.free = [one for one in self.free if one is not best]
            return best
        self.free.clear()  # too small ones
        return zeros(numel, *self._kind)

    def lend(self, bucket: ScatterBucket) -> None:
        """The memory of ``bucket`` comes back when it has waited."""
        self._lent.append(bucket)

    def take_back(self, bucket: ScatterBucket, memory: Tensor) -> None:
        """What ``bucket`` took is free again."""
        self._lent.remove(bucket)
        self.free.append(memory)


class ScatterBucket(Bucket):
    """Gradients of which this rank's part is summed.

    Args:
        indices: of the parameters, among all that are trained.
        parameters: these: whole ones, which accumulate gradients.
        shard: whose pieces get the sums.
        memory: where gradients lie until they are summed: a pool, or a flat tensor of this bucket's own.
        summing: how.
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[nn.Parameter],
        shard: FlatShard,
        memory: BufferPool | Tensor,
        summing: Summing,
    ) -> None:
        super().__init__(indices)
        self._parameters = parameters
        self.shard = shard
        self._memory = memory
        self._summing = summing
        self._buffer: Tensor | None = None  # while it is in use

    def begin(self) -> None:
        super().begin()
        for position in self.shard.resume():
            self._parameters[position].grad = None

    def pause(self) -> None:
        self.shard.pause([one.grad is not None for one in self._parameters])

    def _view(self, position: int) -> Tensor:
        return self.shard.layout.places[position].view(self._flat())

    def _flat(self) -> Tensor:
        if self._buffer is None:
            self._buffer = (
                self._memory.take(self.shard.layout.flat_numel)
                if isinstance(self._memory, BufferPool)
                else self._memory
            )
        return self._buffer[: self.shard.layout.flat_numel]

    def start(self) -> None:
        flat = self._flat()
        self._leave_out_others()
        flat[self.shard.layout.numel :].zero_()
        into, accumulate = self.shard.require_gradient(), self.shard.carry()
        self._pending = self._summing.reduce_scatter(flat, self.shard.layout, into, accumulate=accumulate)
        if isinstance(self._memory, BufferPool):
            self._memory.lend(self)

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            if isinstance(self._memory, BufferPool) and self._buffer is not None:
                self._memory.take_back(self, self._buffer)
            self._buffer = None

    def deliver(self, has_gradient: Sequence[bool]) -> None:
        self.shard.deliver(has_gradient)

    def held(self) -> Iterator[tuple[Kind, Tensor]]:
        yield "gradients", self.shard.gradient
        if isinstance(self._memory, Tensor):
            yield "gradients", self._memory
        else:
            yield from (("buffers", one) for one in self._memory.free)
            if self._buffer is not None:
                yield "buffers", self._buffer

    def abandon(self) -> None:
        for value in self.shard.values:
            value.grad = None
