"""When the backward of a unit begins, and when it is through."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from farandole.torch_eager import eager
from farandole.training.outputs import is_computed, tensors_in
from farandole.training.units import Unit

__all__ = ["Caller", "UnitCall", "is_in_backward"]


class Caller(Protocol):
    """Whose units these are.

    Attributes:
        num_backwards: that there were.
    """

    num_backwards: int

    def use_in_backward(self, unit: Unit) -> None:
        """Backward begins with a call of the unit."""

    def leave_in_backward(self, unit: Unit) -> None:
        """Backward is through with one."""


@eager
class UnitCall:
    """One forward of a unit, whose backward is to come."""

    def __init__(self, model: Caller, unit: Unit) -> None:
        self._model = model
        self._unit = unit
        self._entered = -1  # in which backward
        self._num_inputs = 0  # that have gradients
        self._num_arrived = 0

    def watch_inputs(self, inputs: Any) -> Any:
        """Know when backward arrives at them: ``inputs`` to go on with."""
        leaves, structure = pytree.tree_flatten(inputs)
        given = {id(one): one for one in leaves if isinstance(one, Tensor) and one.requires_grad}
        if not given:
            return inputs
        # Views of torch's own may be written into. The unit is kept to the end of backward if one is, or is not used.
        watched = {key: tensor.view_as(tensor) for key, tensor in given.items()}
        self._num_inputs = len(watched)
        for view in watched.values():
            view.register_hook(lambda _: self._arrive())
        return pytree.tree_unflatten([watched.get(id(one), one) for one in leaves], structure)

    def watch_outputs(self, outputs: object) -> None:
        """Know when backward begins."""
        for tensor in tensors_in(outputs):
            if is_computed(tensor):
                tensor.register_hook(lambda _: self._enter())

    def _enter(self) -> None:
        if self._entered != self._model.num_backwards:
            self._entered, self._num_arrived = self._model.num_backwards, 0
            self._unit.num_entered += 1
            self._model.use_in_backward(self._unit)

    def _arrive(self) -> None:
        """At one of the inputs; at the last of them, backward is through with this call."""
        self._num_arrived += 1
        if self._entered == self._model.num_backwards and self._num_arrived == self._num_inputs:
            self._entered = -1
            self._model.leave_in_backward(self._unit)


def is_in_backward() -> bool:
    """Whether autograd computes gradients now, in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
