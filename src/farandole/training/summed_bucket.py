"""Gradients that every rank has whole: the buckets of `farandole.training.DataParallel`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from farandole.training.bucket import Bucket, Kind, Seen
from farandole.training.layout import Layout
from farandole.training.memory import zeros
from farandole.training.summing import Summing

__all__ = ["SummedBucket"]


class SummedBucket(Bucket):
    """Gradients in one flat tensor, summed where they lie."""

    def __init__(self, indices: Sequence[int], parameters: Sequence[nn.Parameter], summing: Summing) -> None:
        super().__init__(indices)
        self._parameters = [parameters[index] for index in indices]
        self._summing = summing
        self._layout = Layout([one.shape for one in self._parameters], summing.world_size)
        self._spare: Tensor | None = None
        self._carried: Tensor | None = None  # the sum so far, if gradients were not set to None since
        self._carried_views: list[Tensor] = []
        self.is_carried = [False] * len(indices)
        self._seen: list[Seen] = []  # when backward paused
        self._use(self._zeros())
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not None:  # what an earlier bucket has delivered
                parameter.grad = view.copy_(parameter.grad)

    def _zeros(self) -> Tensor:
        one = self._parameters[0]
        return zeros(self._layout.flat_numel, one.dtype, one.device, self._summing.group)

    def _use(self, flat: Tensor) -> None:
        self._flat = flat
        self._views = [
            _as_parameter(place.view(flat.data), one)  # of each of which it is seen whether it is changed
            for place, one in zip(self._layout.places, self._parameters, strict=True)
        ]

    def begin(self) -> None:
        super().begin()
        if self._carried is None:
            self._carry()
        else:  # since before a backward that was not summed
            self.keep([not seen.was_let_go(one) for seen, one in zip(self._seen, self._parameters, strict=True)])
            for parameter, view in zip(self._parameters, self._carried_views, strict=True):
                if parameter.grad is view:
                    parameter.grad = None

    def _carry(self) -> None:
        self.is_carried = [one.grad is view for one, view in zip(self._parameters, self._views, strict=True)]
        if not any(self.is_carried):
            return
        for parameter, view, carried in zip(self._parameters, self._views, self.is_carried, strict=True):
            if carried:
                parameter.grad = None
            else:
                view.zero_()
        self._carried, self._carried_views = self._flat, self._views
        self._use(self._zeros() if self._spare is None else self._spare)
        self._spare = None

    def keep(self, is_carried: Sequence[bool]) -> None:
        """Carry no others."""
        for position, kept in enumerate(is_carried):
            if self.is_carried[position] and not kept:
                self._carried_views[position].zero_()
                self.is_carried[position] = False

    def pause(self) -> None:
        if self._carried is None:
            return
        for parameter, view, carried in zip(self._parameters, self._carried_views, self.is_carried, strict=True):
            if carried and parameter.grad is None:
                parameter.grad = view  # so that it is seen whether it is let go of
        self._seen = [Seen.of(one) for one in self._parameters]

    def _view(self, position: int) -> Tensor:
        return self._views[position]

    def start(self) -> None:
        self._leave_out_others()
        self._pending = self._summing.all_reduce(self._flat, self._layout, self._carried)

    def wait(self) -> None:
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        if self._carried is not None:
            self._spare, self._carried = self._carried, None

    def deliver(self, has_gradient: Sequence[bool]) -> None:
        for position, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            parameter.grad = view if has_gradient[position] or self.is_carried[position] else None

    def abandon(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def held(self) -> Iterator[tuple[Kind, Tensor]]:
        for flat in (self._flat, self._spare, self._carried):
            if flat is not None:
                yield "gradients", flat


def _as_parameter(view: Tensor, parameter: Tensor) -> Tensor:
    """With the strides of the parameter, if these leave no gaps: then optimizers go through both in one way."""
    is_dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return view.as_strided(parameter.shape, parameter.stride(), view.storage_offset()) if is_dense else view
