"""The waits of DistributedDataParallel, in a timeline: they happen in C++, at the end of backward."""

from __future__ import annotations

import torch

from farandole import timeline

__all__ = ["record_end_of_backward"]

_last_backward = -1


def record_end_of_backward() -> None:
    """Record what the end of the backward takes that this thread is in, if it is in one. Called when a future is asked
    for: DistributedDataParallel does that with each bucket, and when all are started has backward call it at its end,
    where it waits for them. What backward is told to call before comes before."""
    global _last_backward
    backward = torch._C._current_graph_task_id()
    if backward in (-1, _last_backward):
        return
    _last_backward = backward

    def before() -> None:
        began_ns = timeline.moment()
        queue(lambda: timeline.add("waiting", "at the end of backward", began_ns))

    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(before)
