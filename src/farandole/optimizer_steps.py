"""The steps of torch's optimizers in a timeline, and what they mark: the ends of steps of training."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from farandole import timeline

__all__ = ["recorded_steps"]


class _GoingOn(threading.local):
    """Steps that this thread is in, the outermost first: the optimizer, and when it began."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, int]] = []


@contextlib.contextmanager
def recorded_steps() -> Iterator[None]:
    """Record them; nothing if torch is not imported yet."""
    optim = sys.modules.get("torch.optim.optimizer")
    if optim is None:
        yield
        return
    going_on = _GoingOn()

    def before(optimizer: Any, *_: object) -> None:
        kept = [step for step in going_on.steps if step[0] is not optimizer]  # one that failed has no end
        going_on.steps = [*kept, (optimizer, timeline.now_ns())]

    def after(optimizer: Any, *_: object) -> None:
        if going_on.steps and going_on.steps[-1][0] is optimizer:
            _, began_ns = going_on.steps.pop()
            timeline.add("compute", f"{type(optimizer).__name__}.step", began_ns)
            if not going_on.steps:
                timeline.mark_step()

    hooks = [optim.register_optimizer_step_pre_hook(before), optim.register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
