"""The handles that torch waits for, and the threads that complete its futures.

torch's C++ code calls `wait` and `get_future` of a handle. It keeps those alive that it got from a group itself, but
not those that Python code hands it, as join does: `Handles` does that.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from farandole import timeline
from farandole.runner import close_at_exit
from farandole.torch_backend.backward import record_end_of_backward
from farandole.torch_eager import eager
from farandole.work import Work

__all__ = ["Completer", "FinishedHandle", "Handle", "Handles", "seconds_of"]

_CALLBACKS_S = 10.0
_MOST_UNASKED = 8
_NO_TIME_S = 1e-9
_FEW = 32


def seconds_of(timeout: timedelta) -> float | None:
    """What torch's ``timeout`` says: None if it is unset (negative), infinity if it is 0."""
    seconds = timeout.total_seconds()
    return None if seconds < 0 else seconds or math.inf


@eager
class FinishedHandle(dist.Work):
    """Of calls that were over before they returned."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def exception(self) -> None:
        """None."""

    def synchronize(self) -> None:
        """Do nothing."""

    def result(self) -> list[torch.Tensor]:
        """What came out."""
        return self._tensors

    def get_future(self) -> Any:
        """A future that is done."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def _source_rank(self) -> int:
        return -1

    source_rank = _source_rank


@eager
class Handle(dist.Work):
    """Of calls that go on in the background.

    Args:
        works: of the calls.
        deliveries: put what came out where it belongs, once all are done.
        tensors: what comes out, for `result` and the future.
        completer: completes the future.
    """

    def __init__(
        self,
        works: Sequence[Work],
        deliveries: Sequence[Callable[[], None]],
        tensors: Sequence[torch.Tensor],
        completer: Completer,
    ) -> None:
        super().__init__()
        self._works = works
        self._deliveries = list(deliveries)
        self._tensors = list(tensors)
        self._completer = completer
        self._future: Any = None
        self._to_complete: Any = None  # what the future waits for, until somebody completes it
        self._lock = threading.RLock()
        self._was_waited_for = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until all is done, or ``timeout`` is over; 0 waits as long as the calls may take.

        Raises:
            CommunicationError: what a call failed with.
        """
        try:
            self.settle(seconds_of(timeout))
        finally:
            if self.is_completed():
                self.complete_future()
        self._was_waited_for = True
        return True

    def is_through(self) -> bool:
        """Whether all is done, and somebody has been told."""
        return self._was_waited_for or (self._future is not None and self._future.done())

    def wait_for_calls(self) -> None:
        """Wait until all calls have ended, well or not."""
        for work in self._works:
            work.ends_within(math.inf)

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until all is done and delivered."""
        limit = math.inf if timeout_s is None else time.monotonic() + timeout_s
        for work in self._works:
            work.wait(None if limit == math.inf else max(_NO_TIME_S, limit - time.monotonic()))
        with self._lock:
            while self._deliveries:
                self._deliveries[0]()
                del self._deliveries[0]

    def is_completed(self) -> bool:
        """Whether all is done, well or not, and what came out is where it belongs."""
        if not all(work.has_ended() for work in self._works):
            return False
        with contextlib.suppress(Exception):  # told by `wait` and `exception`
            self.settle()
        return True

    def is_success(self) -> bool:
        """Whether all is done, and well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What a call failed with; None if all is well so far."""
        if not self.is_completed():
            return None
        try:
            self.settle()
        except Exception as error:
            return error
        return None

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """What came out."""
        self.wait()
        return self._tensors

    def get_future(self) -> Any:
        """A future of the tensors that come out; it raises what a call fails with."""
        if timeline.is_on():
            record_end_of_backward()
        with self._lock:
            if self._future is None:
                self._to_complete = torch.futures.Future()
                # An exception that is set as such counts as success in torch's C++ code; one that a callback raises
                # does not.
                self._future = self._to_complete.then(_unwrap)
                if not self.is_completed():
                    self._completer.add(self)
        if self.is_completed():  # torch's C++ code takes its value at once
            self.complete_future()
        return self._future

    def complete_future(self) -> None:
        """See that the future, if anybody has asked for it, is complete. pre: `is_completed`"""
        with self._lock:
            to_complete, self._to_complete = self._to_complete, None
        if to_complete is not None:
            to_complete.set_result(self.exception() or self._tensors)
        elif self._future is not None:  # another thread is at it
            with contextlib.suppress(Exception):
                self._future.wait()

    def _source_rank(self) -> int:
        sources = [work.source for work in self._works if work.source is not None]
        return sources[0] if sources else -1

    source_rank = _source_rank


def _unwrap(future: torch.futures.Future[Any]) -> Any:
    outcome = future.value()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


class Completer:
    """Completes futures in the order in which they were asked for, on threads of its own.

    One thread waits for the next handle. Callbacks run on it, and may wait for a future that comes later; so another
    thread goes on while they do. For handles that end in this order: the collectives of one group.

    Args:
        idle_s: how long a thread stays that has nothing to do.
    """

    def __init__(self, idle_s: float = 5.0) -> None:
        self._idle_s = idle_s
        self._threads: set[threading.Thread] = set()
        self._changed = threading.Condition()
        self._pending: deque[Handle] = deque()
        self._waits = False  # whether a thread waits for a handle
        self._num_idle = 0
        self._is_closing = False

    def add(self, handle: Handle) -> None:
        """Complete the future of ``handle`` when it is done."""
        with self._changed:
            self._pending.append(handle)
            self._pass_on()

    def _pass_on(self) -> None:
        """Have a thread go on with what is pending, if none does."""
        if not self._pending or self._waits:
            return
        if self._num_idle:
            self._changed.notify()
        elif not (self._is_closing and self._threads):  # else one of them comes to it
            thread = threading.Thread(target=self._serve, name="farandole futures", daemon=True)
            thread.start()
            self._threads.add(thread)
            _completers.add(self)

    def stop(self) -> None:
        """Have the threads end when nothing is pending, and start no more: when the interpreter ends it allows none."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def join(self) -> None:
        """Let callbacks end that still run, once all calls have ended: CPython cannot end a thread within one. Does not
        wait for ever, nor for itself."""
        limit = time.monotonic() + _CALLBACKS_S
        self.stop()
        with self._changed:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, limit - time.monotonic()))

    def _serve(self) -> None:
        try:
            self._complete_all()
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _complete_all(self) -> None:
        while True:
            with self._changed:
                while not self._pending or self._waits:
                    if self._is_closing and not self._pending:
                        return
                    self._num_idle += 1
                    was_notified = self._changed.wait(self._idle_s)
                    self._num_idle -= 1
                    if not was_notified and (not self._pending or self._waits):
                        return
                self._waits = True
                handle = self._pending.popleft()
            handle.wait_for_calls()
            with self._changed:
                self._waits = False
                self._pass_on()
            handle.complete_future()
            del handle


class Handles:
    """Keeps handles alive until they are through; and the last of those that nobody may ever ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Handle] = []
        self._many = 0

    def keep(self, handle: Handle) -> Handle:
        """Keep ``handle``, and let go of those that are through."""
        with self._lock:
            if len(self._kept) < self._many:  # many are going on: not every time
                self._kept.append(handle)
                return handle
            going_on = [kept for kept in self._kept if not kept.is_through()]
            ended = [kept for kept in going_on if kept.is_completed()]
            let_go = set(map(id, ended[:-_MOST_UNASKED]))
            self._kept = [kept for kept in going_on if id(kept) not in let_go] + [handle]
            self._many = 2 * len(self._kept) if len(self._kept) > _FEW else 0
        return handle


_completers: weakref.WeakSet[Completer] = weakref.WeakSet()


def _join_at_exit() -> None:
    completers = list(_completers)
    for completer in completers:
        completer.stop()
    close_at_exit()  # ends all calls
    for completer in completers:
        completer.join()


atexit.register(_join_at_exit)
os.register_at_fork(after_in_child=_completers.clear)  # their threads are not there, and may have held a lock
