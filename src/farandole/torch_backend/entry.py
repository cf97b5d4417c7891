"""How torch comes into the methods of a group.

It gives options; torch's users may give their values one by one in place of them, and a tensor in place of a list of
one. What is wrong with a call that does not even begin is told to the other ranks, which may be in theirs. While
torch's profiler runs, every call is an event.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import profiler

from farandole.errors import ArgumentError
from farandole.torch_backend.works import Handle

__all__ = ["entry", "message_entry"]

_Method = TypeVar("_Method", bound=Callable[..., Any])

_OPTIONS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def entry(call: str, kind: type, num_data: int, *names: str, takes_lists: bool = False) -> Callable[[_Method], _Method]:
    """Make a method of a group, of tensors and options, one that torch can call in all its ways.

    Args:
        call: what users call it.
        kind: of the options.
        num_data: how many arguments come before the options.
        names: of the options that may come by themselves, in that order: of ``root``, ``op`` and ``timeout``.
        takes_lists: the data are lists with one entry; others are put into such lists if one of them is a tensor.
    """

    def decorate(method: _Method) -> _Method:
        def settle(arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
            data, rest = list(arguments[:num_data]), arguments[num_data:]
            if len(data) < num_data:
                raise ArgumentError(f"{call} of a group needs {num_data} arguments by position; there are {len(data)}")
            if takes_lists and any(isinstance(one, torch.Tensor) for one in data):
                data = [[one] for one in data]
            options = named.pop("opts", None)
            if rest and options is None and isinstance(rest[0], kind):
                options, rest = rest[0], rest[1:]
            values = dict(zip(names, rest, strict=False)) | named
            if len(rest) > len(names) or not values.keys() <= set(names) or (options is not None and values):
                known = "".join(f", {name}=" for name in names)
                raise ArgumentError(f"{call} of a group takes, after its data, opts= of {kind.__name__}; or{known[1:]}")
            if options is None:
                options = kind()
                for name, value in values.items():
                    if value is not None:
                        setattr(options, _OPTIONS[name], value)
            return [*data, options]

        @functools.wraps(method)
        def enter(self: Any, *arguments: Any, **named: Any) -> Any:
            try:
                if named or len(arguments) <= num_data or type(arguments[num_data]) is not kind:
                    arguments = tuple(settle(arguments, named))
                if profiler._is_profiler_enabled:
                    return _profiled(call, method, self, arguments)
                return method(self, *arguments)
            except Exception as error:
                self.communicator.refuse(call, error)
                raise

        return enter  # type: ignore[return-value]

    return decorate


def message_entry(call: str) -> Callable[[_Method], _Method]:
    """As `entry`, for a method without options.

    Args:
        call: what users call it.
    """

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def enter(self: Any, *arguments: Any, **named: Any) -> Any:
            try:
                run = functools.partial(method, **named)
                return _profiled(call, run, self, arguments) if profiler._is_profiler_enabled else run(self, *arguments)
            except Exception as error:
                self.communicator.refuse(call, error)
                raise

        return enter  # type: ignore[return-value]

    return decorate


def _profiled(call: str, method: Callable[..., Any], group: Any, arguments: tuple[Any, ...]) -> Any:
    """Run the call within an event, which ends with the call, also if that goes on in the background."""
    with profiler.record_function(f"{group.name()}:{call}") as event:
        work = method(group, *arguments)
        if isinstance(work, Handle):
            event._call_end_callbacks_on_future(work.get_future())
        return work
