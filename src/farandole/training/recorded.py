"""What training communicates, in a timeline (see `farandole.trace`); nothing happens here while there is none.

Collectives of farandole are recorded by its engine; those of other backends here, from when they are started until they
are done; or, where a backend's handle does not tell, until they are waited for. What runs on a GPU is not timed: the
host does not see when it is done.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from farandole import timeline

__all__ = ["blocking", "started", "wait_for"]

_ends: weakref.WeakKeyDictionary[dist.Work, Callable[[], None]] = weakref.WeakKeyDictionary()
"""Of what is recorded until it is waited for."""


def started(work: dist.Work, name: str, tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Record the collective ``name`` on ``tensor``, which has just been started. Returns ``work``."""
    if timeline.is_on() and _is_to_record(tensor.device, group):
        details = _details(tensor, group)
        try:
            future = work.get_future()
        except RuntimeError:  # gloo has none for a reduce_scatter
            _ends[work] = timeline.start("communication", name, _track(group), until="it was waited for", **details)
        else:
            end = timeline.start("communication", name, _track(group), **details)
            future.add_done_callback(lambda _: end())
    return work


def wait_for(work: dist.Work) -> None:
    """Wait, and record that."""
    try:
        if timeline.is_on() and not work.is_completed():
            with timeline.span("waiting", "for communication"):
                work.wait()
        else:
            work.wait()
    finally:
        if _ends and work in _ends:
            _ends.pop(work)()


@contextlib.contextmanager
def blocking(name: str, tensor: Tensor, group: dist.ProcessGroup) -> Iterator[None]:
    """A context in which the collective ``name`` on ``tensor`` is made and waited for."""
    if not (timeline.is_on() and _is_to_record(tensor.device, group)):
        yield
        return
    end = timeline.start("communication", name, _track(group), blocking=True, **_details(tensor, group))
    try:
        with timeline.span("waiting", f"in {name}"):
            yield
    finally:
        end()


def _is_to_record(device: torch.device, group: dist.ProcessGroup) -> bool:
    """A backend with a communicator records by itself."""
    return bool(device.type == "cpu" and not hasattr(group._get_backend(device), "communicator"))


def _track(group: dist.ProcessGroup) -> str:
    ranks = dist.get_process_group_ranks(group)
    return f"communication of {timeline.ranks_in_words(ranks)}"


def _details(tensor: Tensor, group: dist.ProcessGroup) -> dict[str, object]:
    return {"bytes": tensor.nbytes, "ranks": group.size(), "backend": dist.get_backend(group)}
