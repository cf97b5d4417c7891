"""torch's Store as a place where ranks meet: that of a process group, or that of torchrun's agent."""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from farandole.errors import CommunicationError, RendezvousError

__all__ = ["StoreMeetingPlace", "meeting_name"]

_FIRST_LOOK_S = 0.001
_LONGEST_LOOK_S = 0.02


def meeting_name(store: Any, members: Sequence[int], rank: int) -> str:
    """What tells the next meeting of these ranks at ``store`` from all before it: the store may outlive groups, whose
    names come again, and under torchrun the processes. Members meet equally often at one store.

    Args:
        store: where they meet.
        members: what tells this group from others at the store.
        rank: of this process in the group.
    """
    who = hashlib.sha256(repr(list(members)).encode()).hexdigest()[:16]
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    number = store.add(f"made/{restart}/{who}/{rank}", 1)
    return f"meeting/{restart}/{who}/{number}"


class StoreMeetingPlace:
    """A `farandole.rendezvous.MeetingPlace` in a `torch.distributed.Store`.

    torch's stores believe whoever can reach them. With a ``secret``, values that were not set for this meeting by
    somebody who knows it are refused. (So a stranger may still spoil the meeting, but not take part in it.)

    Args:
        store: where no other has keys that begin with ``name``.
        name: of the meeting.
        secret: of the job; empty if there is none.
        require_alive: raises once somebody who is waited for cannot come.
    """

    def __init__(self, store: Any, name: str, secret: bytes, require_alive: Callable[[], None] = lambda: None) -> None:
        self._require_alive = require_alive
        self._store = store
        self._name = name
        self._secret = secret

    def set(self, key: str, value: str) -> str:
        """See `MeetingPlace`."""
        try:
            standing = self._store.compare_set(self._full(key), "", self._sealed(key, value))
        except RuntimeError as error:
            raise RendezvousError(f"torch's store does not answer: {error}") from error
        return self._opened(key, standing)

    def get_all(self, keys: Sequence[str], timeout_s: float, *, unless: Sequence[str] = ()) -> list[str | None]:
        """See `MeetingPlace`."""
        limit = time.monotonic() + timeout_s
        pause_s = _FIRST_LOOK_S
        try:
            while not self._has(keys):
                is_over = time.monotonic() >= limit or any(self._has([key]) for key in unless)
                if is_over:
                    return [self._get(key) if self._has([key]) else None for key in keys]
                self._require_alive()
                time.sleep(min(pause_s, max(0.0, limit - time.monotonic())))
                pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
            return [self._get(key) for key in keys]
        except CommunicationError:  # which are RuntimeErrors, too
            raise
        except RuntimeError as error:
            raise RendezvousError(f"torch's store does not answer: {error}") from error

    def _full(self, key: str) -> str:
        return f"{self._name}/{key}"

    def _has(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check([self._full(key) for key in keys]))

    def _get(self, key: str) -> str:
        return self._opened(key, self._store.get(self._full(key)))

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
