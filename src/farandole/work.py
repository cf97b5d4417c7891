"""The handle of a call that goes on in the background."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import farandole._native as _native
from farandole import timeline
from farandole.buffers import Buffer
from farandole.errors import ArgumentError, CollectiveTimeoutError, CommunicatorClosedError

__all__ = ["Receipt", "Work", "require_timeout"]

_FOR_EVER_S = 1e9
"""Thirty years; longer times would not fit the engine's clock."""

Receipt = tuple[int, int]
"""What the engine says of a call: status, and the rank that it is about."""


def require_timeout(name: str, seconds: object) -> float:
    """``seconds`` as a float, once it is certain that it is a time to wait; infinity if it is longer than anyone waits.

    Raises:
        ArgumentError: it is not a number > 0.
    """
    if not isinstance(seconds, bool) and isinstance(seconds, (int, float, np.integer, np.floating)):
        if seconds >= _FOR_EVER_S:  # even where it is too large for a float
            return math.inf
        if float(seconds) > 0:
            return float(seconds)
    raise ArgumentError(f"{name} is {seconds!r}; it must be a number of seconds > 0 (math.inf: no limit)")


class Work:
    """A call that a communicator runs in the background; made by ``async_op=True``.

    Until it is done, its buffers belong to the call: do not write to them, and do not read the outputs. The handle need
    not be kept; the call goes on, and keeps its buffers, without it.
    """

    def __init__(
        self,
        finish: Callable[[Receipt], Any],
        describe: str,
        tell: Callable[[], None],
        buffers: tuple[Buffer, ...],
    ) -> None:
        self._native: _native.Work | _native.Message | None = None
        self._finish: Callable[[Receipt], Any] | None = finish
        self._describe = describe
        self.buffers = buffers  # that the call uses: they live for as long as it may, until it is settled
        self._tell = tell  # called once the user has been told of an error
        self._result: Any = None
        self._error: BaseException | None = None
        self._lock = threading.RLock()  # a signal handler may come in between
        self._process = os.getpid()

    def attach(self, native: _native.Work | _native.Message) -> None:
        """Say which call of the engine this is the handle of. The runner keeps the handle, and with it the buffers,
        from before the engine knows of the call: an interruption in between must not free them."""
        self._native = native

    def has_ended(self) -> bool:
        """Whether the engine is through with the call; its result may not be delivered yet."""
        return self._native is not None and self._native.is_done()

    @property
    def source(self) -> int | None:
        """The rank that a `recv` got its message from, once it is done; None for all else."""
        if isinstance(self._native, _native.Message) and self._native.is_done():
            return self._native.source()
        return None

    def is_done(self) -> bool:
        """Whether the call has ended, well or not, and its result is delivered. Does not block."""
        if self.has_ended():
            self.settle()
            return True
        return False

    def ends_within(self, timeout_s: float) -> bool:
        """Whether the engine is through with the call after up to ``timeout_s`` seconds."""
        return self._native is not None and self._native.wait(timeout_s)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the call to end.

        Args:
            timeout: seconds to wait here; None waits as long as the call itself may take. When it is over, the call
                goes on, and may be waited for again.

        Returns:
            What the same call returns without ``async_op``.

        Raises:
            ArgumentError: ``timeout`` is not a number > 0.
            CollectiveTimeoutError: not done within ``timeout``.
            CommunicationError: what the call itself raised; the same at every wait.
        """
        if self._process != os.getpid() and not self.has_ended():
            raise CommunicatorClosedError(
                f"{self._describe} goes on in process {self._process}, not in this one, its child"
            )
        timeout = math.inf if timeout is None else require_timeout("timeout", timeout)
        if timeline.is_on() and not self.has_ended():
            with timeline.span("waiting", f"for {self._describe}"):
                ended = self.ends_within(timeout)
        else:
            ended = self.ends_within(timeout)
        if not ended:
            raise CollectiveTimeoutError(
                f"{self._describe} is not done after {timeout:g} s; it goes on, and can be waited for again"
            )
        self.settle()
        if self._error is not None:
            self._tell()
            raise self._error
        return self._result

    def settle(self) -> None:
        """Deliver the result of a call that has ended, and let go of its buffers; what it raised is kept for `wait`."""
        with self._lock:
            if self._finish is None or self._native is None:
                return
            try:
                self._result = self._finish(self._native.receipt())
            except Exception as error:
                self._error = error
            self.buffers = ()
            self._finish = None  # not before: an interruption must not lose the result

    def __repr__(self) -> str:
        return f"<Work {self._describe}, {'done' if self.has_ended() else 'going on'}>"
