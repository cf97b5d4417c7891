"""A small key-value store through which the ranks of a job meet.

One process serves it; the others set keys and wait for keys. Connections are those of `multiprocessing.connection`,
whose challenge-response over the job's secret (HMAC, both ways) comes before anything else is read. Messages are JSON,
never pickle.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from farandole.errors import RendezvousError

__all__ = ["Address", "StoreClient", "StoreServer"]

Address = tuple[str, int]

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
        self._closing = threading.Event()
        self.num_refused = 0
        try:
            self._listener = Listener(address, backlog=1024)
        except OSError as error:
            raise RendezvousError(
                f"cannot listen on {address[0]}:{address[1]} for the ranks of this job: {error}; is another job "
                f"using the port?"
            ) from error
        host, port = self._listener.address
        self.address: Address = (host, port)
        threading.Thread(target=self._accept, name="farandole-store", daemon=True).start()

    def close(self) -> None:
        """Stop serving. Clients that still wait for a key are disconnected."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        with contextlib.suppress(OSError), socket.create_connection(self.address, timeout=1):
            pass  # lets accept() return, so that it sees that we are closing
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection = self._listener.accept()
            except OSError:
                continue
            if self._closing.is_set():
                connection.close()
                return
            threading.Thread(target=self._serve, args=(connection,), name="farandole-store-client", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with contextlib.closing(connection):
            if not self._is_trusted(connection):
                self.num_refused += 1
                return
            try:
                while True:
                    request = json.loads(connection.recv_bytes(_MAX_MESSAGE_BYTES))
                    connection.send_bytes(json.dumps(self._answer(request)).encode())
            except (EOFError, OSError):
                return  # the client is done, or gone

    def _is_trusted(self, connection: Connection) -> bool:
        try:
            with _limited(connection, _HANDSHAKE_S):
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
        except Exception:  # whatever a stranger's bytes lead to
            return False
        return True

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        key = str(request["key"])
        with self._changed:
            if "value" in request:
                standing = self._values.setdefault(key, str(request["value"]))
                self._changed.notify_all()
                return {"value": standing}
            timeout_s = float(request["timeout_s"])
            self._changed.wait_for(lambda: key in self._values or self._closing.is_set(), timeout_s)
            return {"value": self._values.get(key)}


class StoreClient:
    """One process's connection to the store.

    Args:
        address: of the server.
        secret: of the job.
        timeout_s: how long to try to connect.

    Raises:
        RendezvousError: nobody answers at the address in time, or whoever does has another secret.
    """

    def __init__(self, address: Address, secret: bytes, timeout_s: float) -> None:
        self._connection = _connect(address, secret, timeout_s)
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> str:
        """Set ``key``, for all to see, unless it has been set before. Returns the value that stands."""
        standing: str = self._ask({"key": key, "value": value})["value"]
        return standing

    def get(self, key: str, timeout_s: float) -> str | None:
        """The value of ``key`` once somebody has set it; None if nobody has within ``timeout_s`` seconds."""
        value: str | None = self._ask({"key": key, "timeout_s": timeout_s})["value"]
        return value

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
                raise RendezvousError(
                    f"the process that served the rendezvous of this job has ended, or is stopped ({str(error) or 'closed'})"
                ) from error
        return answer


def _connect(address: Address, secret: bytes, timeout_s: float) -> Connection:
    from multiprocessing import AuthenticationError

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


def _shut_down(connection: Connection) -> None:
    with contextlib.suppress(OSError):
        duplicate = socket.socket(fileno=connection.fileno())
        duplicate.shutdown(socket.SHUT_RDWR)
        duplicate.detach()
