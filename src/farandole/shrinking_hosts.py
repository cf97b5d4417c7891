"""How the ranks of a communicator on several hosts go on without those that are lost; see `farandole.shrinking`.

What each says reaches the others with its records, so there is no memory in which one exchange could decide for all.
The *leader* is the lowest rank that is not gone or, when the time is over, the lowest that is present. It decides who
the *members* are, and serves a store where these meet, as the ranks of a job do: so who shares memory is found by proof
again, and they connect anew. If the leader or a member is lost meanwhile, that meeting fails for all, and the others
try again. Each place to meet is tried once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import farandole._native as _native
from farandole.call_records import CallRecord
from farandole.errors import CollectiveTimeoutError, CommunicatorClosedError, RendezvousError
from farandole.meeting import MeetingPlace, card_key
from farandole.membership import Membership, Network
from farandole.rendezvous import join_at
from farandole.shrinking import ranks_in_words, words_of_ranks
from farandole.store import StoreClient, StoreServer

__all__ = ["shrink_across_hosts"]

_DECIDED, _PRESENT, _MEMBERS = range(3)
"""The words of a rank's board, the last of them the first of those for the members' bits. What a rank has decided: how
often it has, and in the lowest bits the port where it serves the store."""

_PORT_BITS = 16

_MEETING_S = 10.0
"""How long the members may take to meet: they are present, so only one that is stopped takes long."""

_PAUSE_S = 0.005
_SLICE_S = 0.1


def shrink_across_hosts(
    engine: _native.Engine, membership: Membership, network: Network, timeout_s: float
) -> Membership:
    """As `farandole.shrinking.shrink`."""
    return _Regrouping(engine, membership, network, timeout_s).run()


class _Regrouping:
    """One rank's part in it; see above."""

    def __init__(self, engine: _native.Engine, membership: Membership, network: Network, timeout_s: float) -> None:
        self._engine = engine
        self._old = membership
        self._network = network
        self._own = membership.rank
        self._timeout_s = timeout_s
        self._limit = time.monotonic() + timeout_s
        self._tried: set[tuple[int, int]] = set()  # leader and what it has decided
        self._silent: set[int] = set()  # were present, and did not come
        self._problem: RendezvousError | None = None

    def run(self) -> Membership:
        """Follow or lead until a meeting succeeds."""
        self._engine.write_board(_PRESENT, 1)
        while True:
            self._require_in_time()
            leader = self._leader()
            self._require_time(leader)
            if leader == self._own and self._is_settled():
                attempt = self._lead
            elif leader != self._own and self._is_called_by(leader):
                attempt = self._follow
            else:
                time.sleep(_PAUSE_S)
                continue
            try:
                return attempt(leader)
            except RendezvousError as error:
                self._problem = error
                time.sleep(_PAUSE_S)

    def _require_in_time(self) -> None:
        """Those that were present and have closed since have gone on."""
        for rank, record in enumerate(self._engine.calls()):
            if CallRecord(*record).closed and self._is_gone(rank) and self._engine.board(rank)[_PRESENT]:
                raise self._too_late(rank)

    def _too_late(self, other: int) -> CommunicatorClosedError:
        return CommunicatorClosedError(
            f"the others have gone on without rank {self._own}, which called shrink() too late; rank {other} is one of "
            f"them"
        )

    def _leader(self) -> int:
        left = [rank for rank in range(self._old.world_size) if not self._is_gone(rank)]
        if time.monotonic() > self._limit:
            left = [rank for rank in left if self._engine.board(rank)[_PRESENT]]
        return left[0]

    def _is_gone(self, rank: int) -> bool:
        return rank != self._own and self._engine.is_gone(rank)

    def _is_settled(self) -> bool:
        """Whether all others are present or gone, or the time is over."""
        everyone = range(self._old.world_size)
        is_complete = all(self._is_gone(rank) or self._engine.board(rank)[_PRESENT] for rank in everyone)
        return is_complete or time.monotonic() > self._limit

    def _is_called_by(self, leader: int) -> bool:
        decided = self._engine.board(leader)[_DECIDED]
        return decided != 0 and (leader, decided) not in self._tried

    def _require_time(self, leader: int) -> None:
        if time.monotonic() > self._limit + 3 * _MEETING_S:
            why = f"; the last attempt failed: {self._problem}" if self._problem else ""
            raise CollectiveTimeoutError(
                f"shrink() is not done after {self._timeout_s:g} s: rank {leader} leads, and does not decide{why}"
            )

    def _lead(self, leader: int) -> Membership:
        everyone = range(self._old.world_size)
        left = [rank for rank in everyone if not self._is_gone(rank) and rank not in self._silent]
        members = [rank for rank in left if self._engine.board(rank)[_PRESENT]]
        own = self._network.addresses[leader]
        with contextlib.closing(StoreServer((own[0] if len(own) == 1 else "", 0), self._network.secret)) as server:
            for word, value in enumerate(words_of_ranks(members, len(everyone)), _MEMBERS):
                self._engine.write_board(word, value)
            number = (self._engine.board(leader)[_DECIDED] >> _PORT_BITS) + 1
            self._engine.write_board(_DECIDED, number << _PORT_BITS | server.address[1])
            try:
                return self._meet(server, members)
            except RendezvousError:
                came = server.get_all([card_key(rank) for rank in range(len(members))], 0)
                self._silent |= {rank for rank, card in zip(members, came, strict=True) if card is None}
                raise

    def _follow(self, leader: int) -> Membership:
        board = self._engine.board(leader)
        port, members = board[_DECIDED] & (1 << _PORT_BITS) - 1, ranks_in_words(board[_MEMBERS:])
        self._tried.add((leader, board[_DECIDED]))
        if self._own not in members:
            raise self._too_late(leader)
        with contextlib.closing(self._open_store(leader, port)) as store:
            return self._meet(store, members)

    def _open_store(self, leader: int, port: int) -> StoreClient:
        *others, last = self._network.addresses[leader]
        for address in others:
            with contextlib.suppress(RendezvousError):
                return StoreClient((address, port), self._network.secret, _MEETING_S / 5)
        return StoreClient((last, port), self._network.secret, _MEETING_S / 5)

    def _meet(self, store: StoreServer | StoreClient, members: Sequence[int]) -> Membership:
        def require_alive() -> None:
            for rank in members:
                if self._is_gone(rank):
                    raise RendezvousError(f"rank {rank} of the communicator that has failed is lost, too")

        job_ranks = [self._old.job_ranks[rank] for rank in members]
        place = _WatchedPlace(store, require_alive)
        network = self._network
        return join_at(
            place,
            members.index(self._own),
            job_ranks,
            _MEETING_S,
            network.secret,
            transport=network.transport,
            addresses=network.addresses[self._own],
        )


class _WatchedPlace:
    """A place to meet where nobody waits for who cannot come.

    Args:
        place: the place.
        require_alive: raises once somebody who is waited for is lost.
    """

    def __init__(self, place: MeetingPlace, require_alive: Callable[[], None]) -> None:
        self._place = place
        self._require_alive = require_alive

    def set(self, key: str, value: str) -> str:
        """See `MeetingPlace`."""
        return self._place.set(key, value)

    def get_all(self, keys: Sequence[str], timeout_s: float, *, unless: Sequence[str] = ()) -> list[str | None]:
        """See `MeetingPlace`."""
        limit = time.monotonic() + timeout_s
        while True:
            left_s = limit - time.monotonic()
            values = self._place.get_all(keys, max(0.0, min(_SLICE_S, left_s)), unless=unless)
            if None not in values or left_s <= _SLICE_S or None not in self._place.get_all(unless, 0):
                return values
            self._require_alive()
