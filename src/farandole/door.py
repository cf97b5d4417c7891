"""Doors: ports that let in whoever proves a secret, and nobody else.

Connections are those of `multiprocessing.connection`, whose challenge-response over the secret (HMAC, both ways) comes
before anything else is read. Whoever connects and proves nothing costs little: it is dropped after 10 seconds, and
earlier if others come that have proved nothing either.

A stranger who knows no secret could still listen where a guest looks for a door, and pass on what both say to the real
one. Behind a *bound* door the proof is therefore of the address too: the guest proves that it came where it went, which
is not where the door is. Only a door that no other address stands for can be bound.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hmac
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from farandole.errors import RendezvousError

__all__ = ["HANDSHAKE_S", "MAX_UNPROVED", "Address", "Door", "knock"]

Address = tuple[str, int]

MAX_UNPROVED = 256
"""Connections that have not yet proved the secret; one more, and the oldest of them is dropped."""

HANDSHAKE_S = 10.0
_RETRY_S = 0.05


class Door:
    """Listens until `close`, in threads of its own.

    Args:
        address: host and port to listen on; an empty host is all of this machine's addresses, port 0 a free one.
        secret: what who comes in must prove that it knows.
        welcome: called with each connection that has, in a thread of its own; the connection is closed when it returns.
        bound: whether the proof is of the address too by which a guest comes.

    Attributes:
        address: where it listens.
        num_refused: how many have proved nothing.

    Raises:
        RendezvousError: the address cannot be listened on.
    """

    def __init__(
        self, address: Address, secret: bytes, welcome: Callable[[Connection], None], *, bound: bool = False
    ) -> None:
        self._secret = secret
        self._bound = bound
        self._welcome = welcome
        self._closing = threading.Event()
        self._unproved: dict[Connection, None] = {}  # oldest first
        self._unproved_lock = threading.Lock()
        self.num_refused = 0
        try:
            self._listener = _listen(address)
        except OSError as error:
            remedy = "is another job using the port?"
            if error.errno == errno.EADDRNOTAVAIL:
                remedy = "this host has no such address; see MASTER_ADDR and FARANDOLE_INTERFACE"
            raise RendezvousError(
                f"cannot listen on {address[0]}:{address[1]} for the ranks of this job: {error}; {remedy}"
            ) from error
        host, port = self._listener.getsockname()[:2]
        self.address: Address = (host, port)
        self._acceptor = threading.Thread(target=self._accept, name="farandole-door", daemon=True)
        self._acceptor.start()

    @property
    def is_closing(self) -> bool:
        """Whether `close` has been called."""
        return self._closing.is_set()

    def close(self) -> None:
        """Let nobody in any more."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # lets accept() return
        self._acceptor.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                stream, _ = self._listener.accept()
            except OSError:  # we are closing; or there is no descriptor left, and there may be one soon
                self._closing.wait(_RETRY_S)
                continue
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is said here is short, and waited for
            secret = _bound_to(stream.getsockname(), self._secret) if self._bound else self._secret
            connection = Connection(stream.detach())
            self._admit(connection)
            try:
                threading.Thread(
                    target=self._serve, args=(connection, secret), name="farandole-guest", daemon=True
                ).start()
            except RuntimeError:  # there can be no more threads now; an honest client comes again
                self._dismiss(connection)
                connection.close()

    def _admit(self, connection: Connection) -> None:
        """Let a connection prove the secret, if need be in place of the one that has not done so for the longest."""
        with self._unproved_lock:
            self._unproved[connection] = None
            if len(self._unproved) > MAX_UNPROVED:
                oldest = next(iter(self._unproved))
                del self._unproved[oldest]
                _shut_down(oldest)  # not closed before it is dismissed, which waits for the lock

    def _dismiss(self, connection: Connection) -> None:
        with self._unproved_lock:
            self._unproved.pop(connection, None)

    def _serve(self, connection: Connection, secret: bytes) -> None:
        with contextlib.closing(connection), _known(connection):
            is_trusted = _is_trusted(connection, secret)
            self._dismiss(connection)
            if is_trusted:
                self._welcome(connection)
            else:
                with self._unproved_lock:
                    self.num_refused += 1


def _is_trusted(connection: Connection, secret: bytes) -> bool:
    try:
        with _limited(connection, HANDSHAKE_S):
            deliver_challenge(connection, secret)
            answer_challenge(connection, secret)
    except Exception:  # whatever a stranger's bytes lead to
        return False
    return True


def _bound_to(address: Sequence[Any], secret: bytes) -> bytes:
    """A secret for one end of a connection alone: ``address`` is the door's, as either side knows it."""
    host = ipaddress.ip_address(address[0])
    if isinstance(host, ipaddress.IPv6Address):
        host = host.ipv4_mapped or host
    return hmac.digest(secret, f"{host} {address[1]}".encode(), "sha256")


_guests: set[Connection] = set()


@contextlib.contextmanager
def _known(connection: Connection) -> Iterator[None]:
    """Have a connection shut down when the process ends: its thread ends then, but the process may live on for long, as
    where MPI is finalised, and nobody is to wait for it."""
    _guests.add(connection)
    try:
        yield
    finally:
        _guests.discard(connection)


def _shut_down_guests() -> None:
    for connection in list(_guests):
        _shut_down(connection)


atexit.register(_shut_down_guests)
os.register_at_fork(after_in_child=_guests.clear)  # they are the parent's


def knock(address: Address, secret: bytes, seconds: float, *, bound: bool = False) -> Connection:
    """A connection to the door at ``address``, both ends of which have proved the secret; ``bound`` as the door is.

    Raises:
        AuthenticationError: who answers has another secret.
        OSError, EOFError: nobody answers within so many seconds, or is as far as that.
    """
    limit = time.monotonic() + seconds
    with socket.create_connection(address, timeout=max(_RETRY_S, seconds)) as stream:
        stream.settimeout(None)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if bound:
            secret = _bound_to(stream.getpeername(), secret)
        connection = Connection(stream.detach())
    with contextlib.ExitStack() as stack:
        stack.callback(connection.close)
        with _limited(connection, limit - time.monotonic()):
            answer_challenge(connection, secret)
            deliver_challenge(connection, secret)
        stack.pop_all()
    return connection


def _listen(address: Address) -> socket.socket:
    host, port = address
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(address, family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # there may be no IPv6 here
            return socket.create_server(address, family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(address, backlog=1024)


@contextlib.contextmanager
def _limited(connection: Connection, seconds: float) -> Iterator[None]:
    """Whoever is at the other end may say nothing: its silence must not last for longer than ``seconds``."""
    watchdog = threading.Timer(max(_RETRY_S, seconds), _shut_down, (connection,))
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
        watchdog.join()  # whoever closes the connection next must not do so under its hands


def _shut_down(connection: Connection) -> None:
    with contextlib.suppress(OSError):
        stream = socket.socket(fileno=connection.fileno())
        try:
            stream.shutdown(socket.SHUT_RDWR)
        finally:
            stream.detach()  # or else the descriptor would be closed with it
