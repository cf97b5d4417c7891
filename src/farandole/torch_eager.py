"""What torch.compile leaves alone.

In a program that uses it, every Python function that comes to run within a compiled one may be compiled, too: also what
torch calls of a process group, and what modules call of those who watch them. That has nothing in it for a compiler,
which fails on it.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["eager"]

_T = TypeVar("_T", bound=Any)

# What torch.compiler.disable does, which imports the compiler first: that takes as long as to import torch.
_SKIPPED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def eager(what: _T) -> _T:
    """Decorate a function, or a class for all its methods: neither they nor what they call is compiled."""
    members = vars(what).values() if isinstance(what, type) else [what]
    for member in members:
        function = member.fget if isinstance(member, property) else member
        while isinstance(function, FunctionType):
            if function.__globals__["__name__"].startswith("farandole."):  # else of a decorator that others use, too
                eval_frame.set_code_exec_strategy(function.__code__, _SKIPPED)  # where what calls it is not compiled
                function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where it is
            function = getattr(function, "__wrapped__", None)
    return what
