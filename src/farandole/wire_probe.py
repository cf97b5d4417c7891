"""What the wire between hosts takes and carries, measured as ranks meet."""

from __future__ import annotations

import contextlib
import os
import select
import statistics
import time
from dataclasses import replace

from farandole.calibration import WIRE
from farandole.cost_model import Link
from farandole.errors import RendezvousError

__all__ = ["measure", "wire_from"]

_ROUNDS = 21
_BYTES = 512 * 1024
_ENGINE_S = 6e-5
"""Besides the wire, until the engine of another host has what one publishes: threads are woken at both ends."""


def measure(following: int, preceding: int, limit: float) -> list[float]:
    """Seconds that a byte takes, and bytes per second, with all hosts in a ring that do this at the same time.

    Args:
        following, preceding: connected sockets to the next host and from the one before; one and the same of two hosts.
        limit: what time.monotonic() says when the time is over.

    Raises:
        RendezvousError: it takes too long, or the other end is gone. The connections are of no use then.
    """
    for connection in (following, preceding):
        os.set_blocking(connection, False)
    try:
        times = [_exchange(following, preceding, 1, limit) for _ in range(_ROUNDS)]
        return [statistics.median(times), _BYTES / _exchange(following, preceding, _BYTES, limit)]
    except OSError as error:
        raise RendezvousError(f"the wire between two hosts could not be measured: {error}") from error


def wire_from(figures: list[list[float]]) -> Link:
    """The wire that all count with, from what every host has measured: the slowest."""
    measured = [both for both in figures if both]
    latencies_s, rates_bytes_per_s = zip(*measured, strict=True)
    return replace(WIRE, bandwidth_bytes_per_s=min(rates_bytes_per_s), step_s=max(latencies_s) + _ENGINE_S)


def _exchange(following: int, preceding: int, nbytes: int, limit: float) -> float:
    """Seconds that it takes to send so many bytes and to receive as many."""
    started = time.perf_counter()
    unsent, awaited = memoryview(bytes(nbytes)), nbytes
    while unsent or awaited:
        to_send, to_read = [following] if unsent else [], [preceding] if awaited else []
        readable, writable, _ = select.select(to_read, to_send, [], max(0.0, limit - time.monotonic()))
        if not readable and not writable:
            raise TimeoutError(f"{nbytes} bytes did not come through in time")
        if writable:
            with contextlib.suppress(BlockingIOError):  # there was less room than that
                unsent = unsent[os.write(following, unsent[: 1 << 16]) :]
        if readable:
            got = len(os.read(preceding, min(awaited, 1 << 16)))
            awaited -= got
            if not got:
                raise ConnectionError("the other end is gone")
    return time.perf_counter() - started
