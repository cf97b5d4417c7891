"""What a bucket is: the interface between `farandole.training.gradient_sync` and the stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from farandole.training.summing import Pending

__all__ = ["Bucket", "Kind", "Seen"]

Kind = Literal["parameters", "gradients", "optimizer", "buffers"]
"""What memory is held for; buffers are for what is on its way between ranks."""


class Seen(NamedTuple):
    """The gradient of a parameter when a backward was through that was not summed.

    Attributes:
        gradient: that, if there was one.
        version: of it.
    """

    gradient: Tensor | None
    version: int

    @classmethod
    def of(cls, parameter: Tensor) -> Seen:
        """As it is now."""
        return cls(parameter.grad, -1 if parameter.grad is None else parameter.grad._version)

    def was_let_go(self, parameter: Tensor) -> bool:
        """Set to None, or to zero, since."""
        now = parameter.grad
        if now is None or self.gradient is None:
            return now is None
        return now is self.gradient and now._version != self.version and not bool(now.any())


class Bucket(ABC):
    """Some of the parameters, whose gradients travel together.

    Args:
        indices: which ones.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = indices
        self._taken = [False] * len(indices)
        self._pending: Pending | None = None

    def begin(self) -> None:
        """Put aside what was delivered, so that gradients are only what is accumulated from now on."""
        self._taken = [False] * len(self.indices)

    @abstractmethod
    def pause(self) -> None:
        """Backward is through, and is not summed."""

    def take(self, position: int, gradient: Tensor) -> None:
        """Add a gradient, of the parameter at ``indices[position]``; one that is never taken counts as zero."""
        view = self._view(position)
        if self._taken[position]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self._taken[position] = True

    def _leave_out_others(self) -> None:
        """Zero for what was not taken."""
        for position, taken in enumerate(self._taken):
            if not taken:
                self._view(position).zero_()

    @abstractmethod
    def _view(self, position: int) -> Tensor:
        """Where the gradient at ``indices[position]`` lies until it is summed."""

    @abstractmethod
    def start(self) -> None:
        """Start to sum over all ranks."""

    def advance(self) -> None:
        """See `farandole.training.summing.Pending`."""
        if self._pending is not None:
            self._pending.advance()

    @abstractmethod
    def wait(self) -> None:
        """Return when the sum is there."""

    @abstractmethod
    def deliver(self, has_gradient: Sequence[bool]) -> None:
        """Give each parameter its sum; nothing new to those that had no gradient on any rank."""

    @abstractmethod
    def abandon(self) -> None:
        """Let go of all gradients, delivered before or not."""

    @abstractmethod
    def held(self) -> Iterator[tuple[Kind, Tensor]]:
        """The memory that is held now, and what for; some of it perhaps more than once."""
