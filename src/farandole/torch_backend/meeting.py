"""Meets the other ranks of a group at torch's own Store, once to make it and then in monitored barriers."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from farandole.errors import CollectiveTimeoutError, RendezvousError

__all__ = ["StoreMeetingPlace", "monitored_barrier"]

_FIRST_LOOK_S = 0.001
_LONGEST_LOOK_S = 0.02
_VERDICT_S = 5.0
"""How much longer than rank 0 the others wait in a monitored barrier: it has the last word."""

_ALL_CAME = "all came"


class StoreMeetingPlace:
    """A `farandole.rendezvous.MeetingPlace` in a `torch.distributed.Store`.

    torch's stores believe whoever can reach them. With a ``secret``, values that were not set for this meeting by
    somebody who knows it are refused. (So a stranger may still spoil the meeting, but not take part in it.)

    Args:
        store: of the group alone.
        name: of the meeting: no other at this store has it.
        secret: of the job; empty if there is none.
    """

    def __init__(self, store: Any, name: str, secret: bytes) -> None:
        self._store = dist.PrefixStore(name, store)
        self._name = name
        self._secret = secret

    def set(self, key: str, value: str) -> str:
        """See `MeetingPlace`."""
        try:
            return self._opened(key, self._store.compare_set(key, "", self._sealed(key, value)))
        except RuntimeError as error:
            raise RendezvousError(f"torch's store does not answer: {error}") from error

    def get_all(self, keys: Sequence[str], timeout_s: float, *, unless: Sequence[str] = ()) -> list[str | None]:
        """See `MeetingPlace`."""
        limit = time.monotonic() + timeout_s
        pause_s = _FIRST_LOOK_S
        try:
            while not self._store.check(list(keys)):
                is_over = time.monotonic() >= limit or any(self._store.check([key]) for key in unless)
                if is_over:
                    return [self._get(key) if self._store.check([key]) else None for key in keys]
                time.sleep(min(pause_s, max(0.0, limit - time.monotonic())))
                pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
            return [self._get(key) for key in keys]
        except RuntimeError as error:
            raise RendezvousError(f"torch's store does not answer: {error}") from error

    def _get(self, key: str) -> str:
        return self._opened(key, self._store.get(key))

    def _sealed(self, key: str, value: str) -> str:
        return f"{self._seal(key, value)}{value}" if self._secret else value

    def _opened(self, key: str, stored: bytes) -> str:
        text = stored.decode(errors="replace")
        if not self._secret:
            return text
        size = hashlib.sha256().digest_size * 2
        seal, value = text[:size], text[size:]
        if not hmac.compare_digest(seal.encode(), self._seal(key, value).encode()):
            raise RendezvousError(
                f"what torch's store holds under {key!r} was not set by a rank that knows FARANDOLE_SECRET; give all "
                f"ranks the same"
            )
        return value

    def _seal(self, key: str, value: str) -> str:
        return hmac.new(self._secret, f"{self._name}\0{key}\0{value}".encode(), hashlib.sha256).hexdigest()


def monitored_barrier(
    place: StoreMeetingPlace, number: int, rank: int, world_size: int, timeout_s: float, wait_all_ranks: bool
) -> None:
    """The barrier of that number at a meeting place; see `ProcessGroup.monitored_barrier`."""
    key = f"monitored_barrier/{number}"
    if rank != 0:
        place.set(f"{key}/{rank}", "here")
        (verdict,) = place.get_all([f"{key}/verdict"], timeout_s + _VERDICT_S)
        place.set(f"{key}/{rank}/told", "yes")
        if verdict != _ALL_CAME:
            raise CollectiveTimeoutError(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                f"from rank 0: {verdict or 'it has not come in time'}"
            )
        return
    others = range(1, world_size)
    came = place.get_all([f"{key}/{other}" for other in others], timeout_s)
    missing = [str(other) for other, word in zip(others, came, strict=True) if word is None]
    if missing and timeout_s <= 0:
        problem = "Rank 0 timed out in monitoredBarrier, as its timeout is 0"
    elif missing and wait_all_ranks and len(missing) > 1:
        problem = f"Ranks {', '.join(missing)} failed to pass monitoredBarrier in {timeout_s * 1000:g} ms"
    elif missing:
        problem = f"Rank {missing[0]} failed to pass monitoredBarrier in {timeout_s * 1000:g} ms"
    else:
        problem = _ALL_CAME
    place.set(f"{key}/verdict", problem)
    # The store may end with this process: not before they know.
    present = [other for other, word in zip(others, came, strict=True) if word is not None]
    place.get_all([f"{key}/{other}/told" for other in present], _VERDICT_S)
    if problem != _ALL_CAME:
        raise CollectiveTimeoutError(problem)
