"""A small key-value store through which the ranks of a job meet.

One process serves it; the others set keys and wait for keys. Connections are those of `multiprocessing.connection`,
whose challenge-response over the job's secret (HMAC, both ways) comes before anything else is read. Messages are JSON,
never pickle. Whoever connects and proves nothing costs little: it is dropped after 10 seconds, and earlier if others
come that have proved nothing either.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from farandole.errors import RendezvousError

__all__ = ["MAX_UNPROVED", "Address", "StoreClient", "StoreServer"]

Address = tuple[str, int]

MAX_UNPROVED = 256
"""Connections that have not yet proved the secret; one more, and the oldest of them is dropped."""

_MAX_MESSAGE_BYTES = 1 << 16
_HANDSHAKE_S = 10.0
_RETRY_S = 0.05


class StoreServer:
    """Serves the store until `close`, in threads of its own.

    Args:
        address: host and port to listen on; port 0 takes a free one.
        secret: what a client must prove that it knows.

    Raises:
        RendezvousError: the address cannot be listened on.
    """

    def __init__(self, address: Address, secret: bytes) -> None:
        self._secret = secret
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._num_asking = 0  # requests that are not answered yet
        self._closing = threading.Event()
        self._unproved: dict[Connection, None] = {}  # oldest first
        self._unproved_lock = threading.Lock()
        self.num_refused = 0
        try:
            self._listener = socket.create_server(address, backlog=1024)
        except OSError as error:
            raise RendezvousError(
                f"cannot listen on {address[0]}:{address[1]} for the ranks of this job: {error}; is another job "
                f"using the port?"
            ) from error
        host, port = self._listener.getsockname()
        self.address: Address = (host, port)
        self._acceptor = threading.Thread(target=self._accept, name="farandole-store", daemon=True)
        self._acceptor.start()

    def set(self, key: str, value: str) -> str:
        """Set ``key``, for all to see, unless it has been set before. Returns the value that stands."""
        with self._changed:
            standing = self._values.setdefault(key, value)
            self._changed.notify_all()
            return standing

    def get_all(self, keys: Sequence[str], timeout_s: float, *, unless: Sequence[str] = ()) -> list[str | None]:
        """As `StoreClient.get_all`."""
        wanted, never = set(keys), set(unless)

        def is_settled() -> bool:
            values = self._values.keys()
            return wanted <= values or not never.isdisjoint(values)

        with self._changed:
            self._changed.wait_for(lambda: is_settled() or self._closing.is_set(), timeout_s)
            if self._closing.is_set() and not is_settled() and timeout_s > 0:
                raise EOFError("closing")
            return [self._values.get(key) for key in keys]

    def close(self) -> None:
        """Stop serving. Who waits for what is not set is disconnected; others are answered for as long as this process
        lives."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # lets accept() return
        self._acceptor.join()
        self._listener.close()
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_asking)  # when this returns, the process may end

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                stream, _ = self._listener.accept()
            except OSError:  # we are closing; or there is no descriptor left, and there may be one soon
                self._closing.wait(_RETRY_S)
                continue
            connection = Connection(stream.detach())
            self._admit(connection)
            try:
                threading.Thread(
                    target=self._serve, args=(connection,), name="farandole-store-client", daemon=True
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

    def _serve(self, connection: Connection) -> None:
        with contextlib.closing(connection):
            is_trusted = self._is_trusted(connection)
            self._dismiss(connection)
            if not is_trusted:
                self.num_refused += 1
                return
            try:
                while True:
                    request = json.loads(connection.recv_bytes(_MAX_MESSAGE_BYTES))
                    with self._counted():
                        connection.send_bytes(json.dumps(self._answer(request)).encode())
            except Exception:
                return  # the client is done, or gone, or asks what makes no sense: that ends its connection alone

    def _is_trusted(self, connection: Connection) -> bool:
        try:
            with _limited(connection, _HANDSHAKE_S):
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
        except Exception:  # whatever a stranger's bytes lead to
            return False
        return True

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "value" in request:
            return {"value": self.set(str(request["key"]), str(request["value"]))}
        keys, unless = list(map(str, request["keys"])), list(map(str, request["unless"]))
        return {"values": self.get_all(keys, float(request["timeout_s"]), unless=unless)}

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._changed:
            self._num_asking += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_asking -= 1
                self._changed.notify_all()


class StoreClient:
    """One process's connection to the store.

    Args:
        address: of the server.
        secret: of the job.
        timeout_s: how long to try to connect.
        limit: what time.monotonic() says when that is over, if the time has begun before.

    Raises:
        RendezvousError: nobody answers at the address in time, or whoever does has another secret.
    """

    def __init__(self, address: Address, secret: bytes, timeout_s: float, *, limit: float | None = None) -> None:
        self._connection = _connect(address, secret, timeout_s, limit)
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> str:
        """Set ``key``, for all to see, unless it has been set before. Returns the value that stands."""
        standing: str = self._ask({"key": key, "value": value})["value"]
        return standing

    def get(self, key: str, timeout_s: float) -> str | None:
        """The value of ``key`` once somebody has set it; None if nobody has within ``timeout_s`` seconds."""
        (value,) = self.get_all([key], timeout_s)
        return value

    def get_all(self, keys: Sequence[str], timeout_s: float, *, unless: Sequence[str] = ()) -> list[str | None]:
        """The values of ``keys`` once all are set; None for those that nobody has set within ``timeout_s`` seconds, or
        by the time that any of ``unless`` is set."""
        values: list[str | None] = self._ask({"keys": keys, "unless": unless, "timeout_s": timeout_s})["values"]
        return values

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            try:
                self._connection.send_bytes(json.dumps(request).encode())
                if not self._connection.poll(float(request.get("timeout_s", 0)) + _HANDSHAKE_S):
                    raise OSError("it gives no answer")
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes(_MAX_MESSAGE_BYTES))
            except (EOFError, OSError) as error:
                self.close()  # a late answer must not be taken for that to the next request
                raise RendezvousError(
                    f"the process that served the rendezvous of this job has ended, or is stopped "
                    f"({str(error) or 'closed'})"
                ) from error
        return answer


def _connect(address: Address, secret: bytes, timeout_s: float, limit: float | None = None) -> Connection:
    from multiprocessing import AuthenticationError

    if limit is None:
        limit = time.monotonic() + timeout_s
    while True:
        try:
            connection = _open(address, limit)
            with contextlib.ExitStack() as stack:
                stack.callback(connection.close)
                with _limited(connection, limit - time.monotonic()):
                    answer_challenge(connection, secret)
                    deliver_challenge(connection, secret)
                stack.pop_all()
            return connection
        except AuthenticationError as error:
            raise RendezvousError(
                f"the process at {address[0]}:{address[1]} has another secret: it belongs to another job, or "
                f"FARANDOLE_SECRET differs"
            ) from error
        except socket.gaierror as error:
            raise RendezvousError(f"the host name {address[0]!r} cannot be resolved: {error}") from error
        except (EOFError, OSError) as error:
            if time.monotonic() > limit:
                raise RendezvousError(
                    f"nobody answers at {address[0]}:{address[1]} after {timeout_s:g} s "
                    f"({str(error) or 'it closes the connection'}); is rank 0 running?"
                ) from error
            time.sleep(_RETRY_S)


def _open(address: Address, limit: float) -> Connection:
    """Connect until `time.monotonic` says ``limit``; `multiprocessing.connection.Client` has no limit of its own."""
    with socket.create_connection(address, timeout=max(_RETRY_S, limit - time.monotonic())) as stream:
        stream.settimeout(None)
        return Connection(stream.detach())


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
