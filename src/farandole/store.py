"""A small key-value store through which the ranks of a job meet.

One process serves it behind a door (see `farandole.door`); the others set keys and wait for keys. Messages are JSON,
never pickle.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from farandole.door import HANDSHAKE_S, Address, Door, knock
from farandole.errors import RendezvousError

__all__ = ["StoreClient", "StoreServer"]

_MAX_MESSAGE_BYTES = 1 << 16
"""Of a request: what one process says."""

_MAX_ANSWER_BYTES = 1 << 26
"""That a client takes from the server that it trusts: what all ranks say, at once."""

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
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._num_asking = 0  # requests that are not answered yet
        self._door = Door(address, secret, self._serve)
        self.address = self._door.address

    @property
    def num_refused(self) -> int:
        """Connections that did not prove the secret."""
        return self._door.num_refused

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
            self._changed.wait_for(lambda: is_settled() or self._door.is_closing, timeout_s)
            if self._door.is_closing and not is_settled() and timeout_s > 0:
                raise EOFError("closing")
            return [self._values.get(key) for key in keys]

    def close(self) -> None:
        """Stop serving. Who waits for what is not set is disconnected; others are answered for as long as this process
        lives."""
        self._door.close()
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_asking)  # when this returns, the process may end

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(Exception):  # the client is done, or gone, or asks what makes no sense
            while True:
                request = json.loads(connection.recv_bytes(_MAX_MESSAGE_BYTES))
                with self._counted():
                    connection.send_bytes(json.dumps(self._answer(request)).encode())

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
                if not self._connection.poll(float(request.get("timeout_s", 0)) + HANDSHAKE_S):
                    raise OSError("it gives no answer")
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes(_MAX_ANSWER_BYTES))
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
            return knock(address, secret, limit - time.monotonic())
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
