"""The steps of torch's optimizers in a timeline, and what they mark: the ends of steps of training."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

from farandole import timeline

__all__ = ["recorded_steps"]


class _Step(NamedTuple):
    optimizer: Any
    frame: FrameType  # of what called the hook
    began_ns: int


class _GoingOn(threading.local):
    """Steps that this thread is in, the outermost first; perhaps some that have failed, too: these have no end."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []


@contextlib.contextmanager
def recorded_steps(record: timeline.Record) -> Iterator[None]:
    """Record those of threads whose record this is; nothing if torch is not imported yet."""
    optim = sys.modules.get("torch.optim.optimizer")
    if optim is None:
        yield
        return
    going_on = _GoingOn()

    def before(optimizer: Any, *_: object) -> None:
        if timeline.current() is record:
            frame = sys._getframe(1)
            running = list(_up_from(frame))
            kept = [step for step in going_on.steps if step.frame in running]
            going_on.steps = [*kept, _Step(optimizer, frame, timeline.now_ns())]

    def after(optimizer: Any, *_: object) -> None:
        while going_on.steps and going_on.steps[-1].frame is not sys._getframe(1):
            going_on.steps.pop()
        if going_on.steps:
            timeline.add("compute", f"{type(optimizer).__name__}.step", going_on.steps.pop().began_ns)
            if not going_on.steps:
                timeline.mark_step()

    hooks = [optim.register_optimizer_step_pre_hook(before), optim.register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _up_from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
