"""When the backward of a unit begins, and when it is through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from farandole.torch_eager import eager
from farandole.training.outputs import is_computed, tensors_in
from farandole.training.units import Unit

__all__ = ["Caller", "UnitCall"]


_OF_ANY_MODULE = vars(nn.Module()).keys() - {"_buffers"}


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
    """One forward of a unit, whose backward is to come.

    Args:
        model: whose unit it is.
        unit: of parameters.
        module: that has them. What it keeps as attributes in its forward, such as a loss of its own, is also known by
            its backward.
    """

    def __init__(self, model: Caller, unit: Unit, module: nn.Module) -> None:
        self._model = model
        self._unit = unit
        self._module = module
        self._kept_before = list(_kept_by(module))
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
        before = {*map(id, self._kept_before)}
        kept = [one for one in _kept_by(self._module) if id(one) not in before]
        self._kept_before = []
        for tensor in [*tensors_in(outputs), *kept]:
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


def _kept_by(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that a module or a part of it has as attributes, but for its parameters."""
    for one in module.modules():
        for name, value in vars(one).items():
            if isinstance(value, Tensor):
                yield value
            elif name not in _OF_ANY_MODULE and isinstance(value, (list, tuple, dict)):
                yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
