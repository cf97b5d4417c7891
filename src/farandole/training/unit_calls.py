"""When the backward of a unit begins, and when it is through."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from farandole.torch_eager import eager
from farandole.training.outputs import is_computed, tensors_in
from farandole.training.units import Unit

__all__ = ["Caller", "UnitCall"]


_OF_ANY_MODULE = vars(nn.Module()).keys() - {"_buffers"}

_MOST_KEPT = 64
"""Of a list or dictionary in which a module keeps tensors; what is larger, or deeper, is for something else."""


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
        modules: that have them. What one keeps as an attribute in this forward, such as a loss of its own, is also
            known by its backward.
    """

    def __init__(self, model: Caller, unit: Unit, modules: Sequence[nn.Module]) -> None:
        # Weakly, as what the modules keep would keep this, out of sight of Python's garbage collector.
        self._model = weakref.ref(model)
        self._unit = weakref.ref(unit)
        self._entered = -1  # in which backward
        self._num_inputs = 0  # that have gradients
        self._num_arrived = 0
        self._kept_before = [(tensor, tensor.grad_fn) for tensor in _kept_by(modules)]

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
            self._kept_before.append((view, view.grad_fn))
        return pytree.tree_unflatten([watched.get(id(one), one) for one in leaves], structure)

    def watch_outputs(self, outputs: object, modules: Sequence[nn.Module]) -> None:
        """Know when backward begins."""
        before = {(id(tensor), id(node)) for tensor, node in self._kept_before}
        kept = [one for one in _kept_by(modules) if (id(one), id(one.grad_fn)) not in before]
        self._kept_before.clear()
        for tensor in [*tensors_in(outputs), *kept]:
            if is_computed(tensor):
                tensor.register_hook(lambda _: self._enter())

    def _enter(self) -> None:
        model, unit = self._model(), self._unit()
        if model is not None and unit is not None and self._entered != model.num_backwards:
            self._entered, self._num_arrived = model.num_backwards, 0
            unit.num_entered += 1
            model.use_in_backward(unit)

    def _arrive(self) -> None:
        """At one of the inputs; at the last of them, backward is through with this call."""
        model, unit = self._model(), self._unit()
        self._num_arrived += 1
        if (
            model is not None
            and unit is not None
            and self._entered == model.num_backwards
            and self._num_arrived == self._num_inputs
        ):
            self._entered = -1
            model.leave_in_backward(unit)


def _kept_by(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    """The tensors that modules have as attributes, but for their parameters."""
    for one in modules:
        for name, value in vars(one).items():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (list, tuple, dict)) and name not in _OF_ANY_MODULE and len(value) <= _MOST_KEPT:
                some = value.values() if isinstance(value, dict) else value
                yield from (item for item in some if isinstance(item, Tensor))
