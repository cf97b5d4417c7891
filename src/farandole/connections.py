"""The connections between ranks of different hosts: one for each two of them.

What makes them is a `Transport`: `Tcp` here, or `farandole.mpi_lines.MpiLines` where MPI carries them.

Over TCP, each rank opens a door (see `farandole.door`) for as long as the ranks meet. Of two ranks the higher one comes
to the lower one's door; both prove the secret, and say which rank of which meeting they are.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

from farandole.addresses import own_addresses
from farandole.door import HANDSHAKE_S, Door, knock
from farandole.errors import RendezvousError

__all__ = ["Connector", "RankDoor", "Tcp", "Transport", "Way"]

_MAX_GREETING_BYTES = 1000
_TRY_S = 2.0
_PAUSE_S = 0.02
_IDLE_S, _PROBE_S, _NUM_PROBES = 15, 5, 9
"""A host that has vanished without a word is found out within a minute, by the kernel."""


class Way(NamedTuple):
    """How to come to a rank.

    Attributes:
        addresses: of its host, in the order in which they are to be tried.
        port: of its door; over MPI, its rank there.
    """

    addresses: tuple[str, ...]
    port: int


class Connector(Protocol):
    """One rank's part in connecting a group.

    Attributes:
        way: how the others come to this rank.
    """

    way: Way

    def connect(
        self, token: str, ways: Sequence[Way | None], limit: float, require_going: Callable[[], None]
    ) -> list[int]:
        """See `RankDoor.connect`."""

    def close(self) -> None:
        """Let nobody in any more, and drop connections that nobody took."""


class Transport(Protocol):
    """How ranks of different hosts are connected.

    Attributes:
        name: of it, for users.
    """

    name: str

    def open(self, rank: int, secret: bytes, *, addresses: Sequence[str] | None = None, toward: str = "") -> Connector:
        """Be there for the others of a group that is made; see `RankDoor` for the arguments.

        Raises:
            RendezvousError: that cannot be.
        """


class Tcp:
    """Over TCP, between doors."""

    name = "tcp"

    def open(self, rank: int, secret: bytes, *, addresses: Sequence[str] | None = None, toward: str = "") -> RankDoor:
        """See `Transport`."""
        return RankDoor(rank, secret, addresses=addresses, toward=toward)


class RankDoor:
    """This rank's door, and the connections that were made so far.

    Args:
        rank: of this process.
        secret: of the job.
        addresses: of this host, see `own_addresses`; None finds them.
        toward: a host of the job.

    Raises:
        RendezvousError: there is no port.
    """

    def __init__(self, rank: int, secret: bytes, *, addresses: Sequence[str] | None = None, toward: str = "") -> None:
        self._rank = rank
        self._secret = secret
        self._token: str | None = None
        self._sockets: dict[int, int] = {}
        self._expected: frozenset[int] = frozenset()
        self._changed = threading.Condition()  # guards the three
        found = tuple(own_addresses(os.environ, toward) if addresses is None else addresses)
        self._door = Door((found[0] if len(found) == 1 else "", 0), secret, self._welcome, bound=True)
        self.way = Way(found, self._door.address[1])

    def connect(
        self, token: str, ways: Sequence[Way | None], limit: float, require_going: Callable[[], None]
    ) -> list[int]:
        """Connect with all ranks that have a way; call once, then `close`.

        Args:
            token: tells this meeting from any other.
            ways: per rank; None for those of this host.
            limit: what time.monotonic() says when the time is over.
            require_going: raises once the meeting has failed.

        Returns:
            Per rank a connected socket, the caller's to close; -1 where there is no way.

        Raises:
            RendezvousError: a rank does not come, or cannot be reached.
        """
        others = {rank for rank, way in enumerate(ways) if way is not None}
        with self._changed:
            self._token, self._expected = token, frozenset(rank for rank in others if rank > self._rank)
            self._changed.notify_all()
        for rank in sorted(others):
            way = ways[rank]
            if rank < self._rank and way is not None:
                self._put(rank, self._come_to(rank, way, limit, require_going))
        with self._changed:
            while not self._changed.wait_for(lambda: others <= self._sockets.keys(), 10 * _PAUSE_S):
                require_going()
                if time.monotonic() > limit:
                    missing = sorted(others - self._sockets.keys())
                    raise RendezvousError(
                        f"rank {self._rank} waited in vain for connections from ranks {missing}; can their hosts reach "
                        f"{' or '.join(self.way.addresses)}, port {self.way.port}?"
                    )
            sockets = [self._sockets.pop(rank, -1) for rank in range(len(ways))]
        for stream in sockets:
            if stream >= 0:
                _prepare(stream)
        return sockets

    def close(self) -> None:
        """Let nobody in any more, and drop connections that nobody took."""
        self._door.close()
        with self._changed:
            self._token, self._expected = "", frozenset()
            self._changed.notify_all()
            for stream in self._sockets.values():
                os.close(stream)
            self._sockets.clear()

    def _welcome(self, connection: Connection) -> None:
        """Take a connection from a rank that is expected; any other is closed."""
        with contextlib.suppress(EOFError, OSError, ValueError):
            if not connection.poll(HANDSHAKE_S):
                return
            greeting = json.loads(connection.recv_bytes(_MAX_GREETING_BYTES))
            rank = greeting.get("rank") if isinstance(greeting, dict) else None
            if type(rank) is not int:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._token is not None, HANDSHAKE_S)
                if greeting != _greeting(self._token or "", rank) or rank not in self._expected:
                    return
                connection.send_bytes(json.dumps(_greeting(self._token or "", self._rank)).encode())
                self._put(rank, os.dup(connection.fileno()))

    def _put(self, rank: int, stream: int) -> None:
        """Keep a connection; one that a rank comes with again is in place of that before."""
        with self._changed:
            before = self._sockets.pop(rank, -1)
            if before >= 0:
                os.close(before)
            self._sockets[rank] = stream
            self._changed.notify_all()

    def _come_to(self, rank: int, way: Way, limit: float, require_going: Callable[[], None]) -> int:
        problem = ""
        while True:
            for address in way.addresses:
                seconds = min(_TRY_S, limit - time.monotonic())
                if seconds > 0:
                    try:
                        return self._greet(rank, (address, way.port), seconds)
                    except (OSError, EOFError, AuthenticationError, ValueError) as error:
                        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                            raise RendezvousError(
                                f"rank {self._rank} cannot connect to rank {rank}: {error}; raise the limit with "
                                f"ulimit -n"
                            ) from error
                        problem = f"{address} port {way.port}: {str(error) or type(error).__name__}"
                require_going()
            if time.monotonic() > limit:
                raise RendezvousError(
                    f"rank {self._rank} cannot connect to rank {rank} ({problem}); if its host has an address that "
                    f"this one can reach, name its interface there in FARANDOLE_INTERFACE"
                )
            time.sleep(_PAUSE_S)

    def _greet(self, rank: int, address: tuple[str, int], seconds: float) -> int:
        with contextlib.closing(knock(address, self._secret, seconds, bound=True)) as connection:
            connection.send_bytes(json.dumps(_greeting(self._token or "", self._rank)).encode())
            if not connection.poll(max(seconds, HANDSHAKE_S)):
                raise OSError("it does not answer")
            if json.loads(connection.recv_bytes(_MAX_GREETING_BYTES)) != _greeting(self._token or "", rank):
                raise OSError("it is another rank, or of another meeting")
            return os.dup(connection.fileno())


def _greeting(token: str, rank: object) -> dict[str, object]:
    return {"meeting": token, "rank": rank}


def _prepare(descriptor: int) -> None:
    stream = socket.socket(fileno=descriptor)
    try:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
        silence_s = _IDLE_S + _PROBE_S * _NUM_PROBES  # also where something was sent that nobody acknowledges
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silence_s)
    finally:
        stream.detach()
