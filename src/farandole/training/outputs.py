"""The tensors in what a module returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from types import ModuleType

from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["is_computed", "tensors_in"]


def is_computed(tensor: Tensor) -> bool:
    """Whether backward goes through it. Not so a parameter or an input, which keeps its hooks for ever."""
    return tensor.grad_fn is not None


def tensors_in(outputs: object) -> Iterator[Tensor]:
    """The tensors in containers of any kind: those of Python and what is derived from them, what torch knows,
    dataclasses, and other objects with attributes; in one another, too."""
    seen: set[int] = set()
    waiting = [outputs]
    while waiting:
        for leaf in pytree.tree_leaves(waiting.pop()):
            if isinstance(leaf, Tensor):
                yield leaf
            elif id(leaf) not in seen and not isinstance(leaf, (type, nn.Module, ModuleType)):
                seen.add(id(leaf))
                waiting.extend(_attributes_of(leaf))


def _attributes_of(leaf: object) -> Iterator[object]:
    if isinstance(leaf, Mapping):
        yield from leaf.values()
    elif isinstance(leaf, (Sequence, Set)) and not isinstance(leaf, (str, bytes, bytearray, range)):
        yield from leaf
    yield from getattr(leaf, "__dict__", {}).values()
    for kind in type(leaf).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(leaf, name, None)
