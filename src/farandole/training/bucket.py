"""What a bucket is: the interface between `farandole.training.gradient_sync` and the stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from torch import Tensor

__all__ = ["Bucket", "Kind"]

Kind = Literal["parameters", "gradients", "optimizer", "buffers"]
"""What memory is held for; buffers are for what is on its way between ranks."""


class Bucket(Protocol):
    """Some of the parameters, whose gradients travel together.

    Attributes:
        indices: which ones.
    """

    indices: Sequence[int]

    def begin(self) -> None:
        """Put aside what was delivered, so that gradients are only what is accumulated from now on."""

    def pause(self) -> None:
        """Backward is through, and is not summed."""

    def take(self, position: int, gradient: Tensor) -> None:
        """Add a gradient, of the parameter at ``indices[position]``; one that is never taken counts as zero."""

    def start(self) -> None:
        """Start to sum over all ranks."""

    def advance(self) -> None:
        """See `farandole.training.summing.Pending`."""

    def wait(self) -> None:
        """Return when the sum is there."""

    def deliver(self, has_gradient: Sequence[bool]) -> None:
        """Give each parameter its sum; nothing new to those that had no gradient on any rank."""

    def abandon(self) -> None:
        """Let go of all gradients, delivered before or not."""

    def held(self) -> Iterator[tuple[Kind, Tensor]]:
        """The memory that is held now, and what for; some of it perhaps more than once."""
