"""What is looked at before each step of any optimizer: whether its parameters are to be stepped, and now."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from farandole.errors import ArgumentError

__all__ = ["Watcher", "refuse_whole", "watch_steps"]


class Watcher(Protocol):
    """Who knows of some parameters."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before ``optimizer``, which has some of them, steps. Raises if it is not to."""


class _Known(NamedTuple):
    """Of an optimizer, which is not looked through at each step.

    Attributes:
        num_calls: of `watch_steps` there were when it was.
        num_parameters: that it had.
        watchers: of these.
    """

    num_calls: int
    num_parameters: int
    watchers: Collection[weakref.ref[Watcher]]


_watcher_of = WeakTensorKeyDictionary()
"""Of a parameter, a weak reference to who knows of it last."""

_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Known] = weakref.WeakKeyDictionary()
_num_calls = 0


def watch_steps(parameters: Iterable[nn.Parameter], watcher: Watcher) -> None:
    """Have ``watcher`` asked, as long as it is there, before an optimizer steps any of these; in place of who was."""
    global _num_calls
    reference = weakref.ref(watcher)
    for parameter in parameters:
        _watcher_of[parameter] = reference
    _num_calls += 1
    _register_hook()


def refuse_whole(optimizer: torch.optim.Optimizer) -> NoReturn:
    """Raises:
    ArgumentError: always.
    """
    raise ArgumentError(
        f"the {type(optimizer).__name__} has parameters that are sharded, and get no gradients; make it after that: a "
        f"ZeroOptimizer of the model, or one of FullyShardedParallel(...).parameters()"
    )


@functools.cache
def _register_hook() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    num_parameters = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _known.get(optimizer)
    if known is None or known[:2] != (_num_calls, num_parameters):
        found = {_watcher_of.get(one): None for group in optimizer.param_groups for one in group["params"]}
        known = _known[optimizer] = _Known(_num_calls, num_parameters, [one for one in found if one is not None])
    for reference in known.watchers:
        if (watcher := reference()) is not None:
            watcher.before_step(optimizer)
