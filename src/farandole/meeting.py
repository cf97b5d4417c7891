"""A meeting of ranks, as one of them takes part in it: what it says, waits for, and hears of the others.

A meeting fails for all of its ranks or for none: the first who has seen that all can join, or who gives up, says so for
everyone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from farandole.connections import Tcp, Transport
from farandole.door import Address
from farandole.errors import RendezvousError
from farandole.membership import LONGEST_REASON, words
from farandole.store import StoreClient

__all__ = ["Identity", "Meeting", "MeetingPlace", "card_key", "ended_key"]

_TELLING_S = 10.0
_HEARING_S = 2.0

_JOINED = "joined"
"""The verdict on a meeting in which all ranks are connected; any other is the reason why it failed."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is in its job, and where the job meets.

    Attributes:
        rank, world_size: in the job.
        store: where the store is served.
        rank_0_serves: True if rank 0 serves the store, a new one for each meeting; else it is there as long as the job.
        secret: of the job.
        transport: what connects its hosts.
        addresses: where other hosts reach this one, if that is known.
        job: its name, where other jobs may come to meet at the same place: see `join`; empty if none will.
    """

    rank: int
    world_size: int
    store: Address
    rank_0_serves: bool
    secret: bytes
    transport: Transport = field(default_factory=Tcp)
    addresses: Sequence[str] | None = None
    job: str = ""


class MeetingPlace(Protocol):
    """A key-value store, as a meeting needs it."""

    def set(self, key: str, value: str) -> str:
        """Give ``key`` a value, unless it has one. Returns the value that stands."""

    def get_all(self, keys: Sequence[str], timeout_s: float, *, unless: Sequence[str] = ()) -> list[str | None]:
        """The values of all keys, once all have one; what there is when the time is over, or once one of ``unless``
        has a value."""


def ended_key(rank: int) -> str:
    """The key of the exit code of a rank whose process has ended, where a launcher says so."""
    return f"ended/{rank}"


def card_key(rank: int, meeting: int = 0) -> str:
    """The key of what a rank says of itself, where it has come to a meeting."""
    return f"{meeting}/rank/{rank}"


@dataclass(frozen=True, slots=True)
class Meeting:
    """One meeting at the store, as one rank sees it. A job may have several: each has its own keys.

    Attributes:
        store: where the ranks meet; what rank 0 serves, it speaks to without a connection.
        identity: of this rank.
        number: of the meeting.
        limit: what time.monotonic() says when this rank has waited for ``timeout_s``.
        counted: whether it is one of those of `join`, which are counted, and where a launcher may say which ranks have
            ended.
    """

    store: MeetingPlace
    identity: Identity
    number: int
    limit: float
    timeout_s: float
    counted: bool = True

    def set(self, phase: str, value: str = "yes") -> str:
        """Say that this rank is through ``phase``. Returns the value that stands."""
        return self.store.set(f"{self.number}/{phase}/{self.identity.rank}", value)

    def get_all(self, phase: str, did: str) -> list[str]:
        """What every rank has set for ``phase``, once all have.

        Raises:
            RendezvousError: not all have in time, or some never will.
        """
        ended = [ended_key(rank) for rank in range(self.identity.world_size) if self.counted]
        values = self._wait(phase, unless=[self._verdict, *ended])
        missing = [rank for rank, value in enumerate(values) if value is None]
        if missing and self.counted:
            self._require_all_alive()
        self._require_no_failure()
        if missing:
            raise RendezvousError(
                f"rank {self.identity.rank} waited {self.timeout_s:g} s; of {self.identity.world_size} ranks these "
                f"have not {did}: {', '.join(map(str, missing))}"
            )
        return [value for value in values if value is not None]

    def require_going(self) -> None:
        """Raise if this meeting has failed, or never can succeed.

        Raises:
            RendezvousError: it has.
        """
        if self.counted:
            self._require_all_alive()
        self._require_no_failure()

    def _require_no_failure(self) -> None:
        (verdict,) = self.store.get_all([self._verdict], 0)
        if verdict not in (None, _JOINED):
            raise RendezvousError(verdict)

    def agree(self) -> None:
        """Join if all do: the first to see that all can, or to give up, decides for everyone.

        Raises:
            RendezvousError: the meeting has failed.
        """
        self.set("mapped")
        try:
            self.get_all("mapped", "mapped the shared memory")
        except RendezvousError as error:
            if self.give_up(error) == _JOINED:  # all had mapped it after all
                return
            raise
        verdict = self.store.set(self._verdict, _JOINED)
        if verdict != _JOINED:
            raise RendezvousError(verdict)

    def give_up(self, error: BaseException) -> str | None:
        """Say why this rank cannot join, so that the others need not wait for it. Returns the verdict that stands;
        None where nobody can be told."""
        store, identity = self.store, self.identity
        reason = f"rank {identity.rank} could not join: {words(error)}"[:LONGEST_REASON]
        try:
            with contextlib.ExitStack() as stack:
                if isinstance(store, StoreClient) and not isinstance(error, Exception):
                    # Ctrl-C may have cut off a request, and what answers that must not be taken for what answers this.
                    store = StoreClient(identity.store, identity.secret, _TELLING_S)
                    stack.callback(store.close)
                return store.set(self._verdict, reason)
        except RendezvousError:
            return None

    def part_in_failure(self) -> None:
        """Leave a meeting that has failed. Rank 0, if it serves the store, stays a moment, so that all who have come
        can hear of it: its process may be about to end."""
        with contextlib.suppress(RendezvousError):
            self.set("left")
            if self.identity.rank_0_serves and self.identity.rank == 0:
                everyone = range(self.identity.world_size)
                cards = self.store.get_all([card_key(rank, self.number) for rank in everyone], 0)
                present = [f"{self.number}/left/{rank}" for rank, card in enumerate(cards) if card is not None]
                self.store.get_all(present, _HEARING_S)

    def part(self) -> None:
        """Leave a meeting that has succeeded. Rank 0, if it serves the store, or may do so, stays until all have: they
        must learn of it. If one takes too long, it has joined nevertheless."""
        if self.identity.rank_0_serves or not self.counted:
            with contextlib.suppress(RendezvousError):  # rank 0 has gone before
                self.set("left")
                if self.identity.rank == 0:
                    self._wait("left")

    @property
    def _verdict(self) -> str:
        return f"{self.number}/verdict"

    def _wait(self, phase: str, unless: Sequence[str] = ()) -> list[str | None]:
        keys = [f"{self.number}/{phase}/{rank}" for rank in range(self.identity.world_size)]
        return self.store.get_all(keys, max(0.0, self.limit - time.monotonic()), unless=unless)

    def _require_all_alive(self) -> None:
        codes = self.store.get_all([ended_key(rank) for rank in range(self.identity.world_size)], 0)
        for rank, code in enumerate(codes):
            if code is not None:
                again, equally_often = (" again", " equally often") if self.number else ("", "")
                raise RendezvousError(
                    f"rank {rank} ended without joining{again} (exit code {code}); every rank must call "
                    f"farandole.init(){equally_often}"
                )
