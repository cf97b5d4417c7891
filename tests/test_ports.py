"""Strangers at every port that a job opens: ten thousand inputs each change nothing but a counter."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from farandole.connections import RankDoor
from farandole.door import Door, knock
from farandole.errors import RendezvousError
from farandole.store import StoreClient, StoreServer

NUM_INPUTS = 10_000
WAIT_S = 60  # for what happens at once; only a failure takes so long


class StorePort:
    """The store, with a client that is served all the time."""

    def __init__(self) -> None:
        self.server = StoreServer(("127.0.0.1", 0), b"secret")
        self.address = self.server.address
        self.client = StoreClient(self.address, b"secret", WAIT_S)

    def num_refused(self) -> int:
        return self.server.num_refused

    def come_in(self, port: int) -> None:
        """As somebody who knows the secret, by way of ``port``."""
        with contextlib.closing(StoreClient(("127.0.0.1", port), b"secret", WAIT_S)) as client:
            assert client.set("key", "value") == "value"

    def check(self) -> None:
        assert self.client.get("key", 0) == "value"
        assert self.client.get("another", 0) is None

    def close(self) -> None:
        self.client.close()
        self.server.close()


class RankPort:
    """The door of a rank, while others are expected."""

    def __init__(self) -> None:
        self.door = RankDoor(0, b"secret", addresses=["127.0.0.1"])
        self.address = ("127.0.0.1", self.door.way.port)

    def num_refused(self) -> int:
        return self.door._door.num_refused

    def come_in(self, port: int) -> None:
        """As rank 1, by way of ``port``."""
        other = RankDoor(1, b"secret", addresses=["127.0.0.1"])
        ends = []

        def connect(door: RankDoor, ways: list) -> None:
            ends.extend(door.connect("t", ways, time.monotonic() + WAIT_S, lambda: None))

        threads = [
            threading.Thread(target=connect, args=(self.door, [None, other.way])),
            threading.Thread(target=connect, args=(other, [self.door.way._replace(port=port), None])),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        other.close()
        assert len([end for end in ends if end >= 0]) == 2
        for end in ends:
            if end >= 0:
                socket.socket(fileno=end).close()

    def check(self) -> None:
        self.come_in(self.address[1])

    def close(self) -> None:
        self.door.close()


@contextlib.contextmanager
def between(port, said: bytearray) -> Iterator[int]:
    """A port that passes on, both ways, what one guest and the door say; ``said`` takes the guest's words."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def forward() -> None:
            client, _ = listener.accept()
            with client, socket.create_connection(port.address) as server:
                answers = threading.Thread(target=pump, args=(server, client, bytearray()))
                answers.start()
                pump(client, server, said)
                answers.join(WAIT_S)

        thread = threading.Thread(target=forward)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(WAIT_S)


def recorded(port) -> bytes:
    """What somebody who knows the secret says, word for word."""
    said = bytearray()
    with mock.patch("farandole.door._bound_to", lambda _, secret: secret), between(port, said) as number:
        port.come_in(number)
    return bytes(said)


def pump(source: socket.socket, target: socket.socket, copy: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(4096):
            copy += data
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def junk(choice: random.Random, genuine: bytes) -> bytes:
    """Random bytes, what looks like a message, and what somebody once said: whole, cut, or changed."""
    kind = choice.randrange(5)
    if kind == 0:
        return choice.randbytes(choice.randrange(300))
    if kind == 1:
        return struct.pack("!i", choice.choice([-1, 0, 20, 2**31 - 1])) + choice.randbytes(choice.randrange(60))
    if kind == 2:
        return genuine
    cut = bytearray(genuine[: choice.randrange(len(genuine) + 1)])
    if kind == 3 and cut:
        cut[choice.randrange(len(cut))] ^= 1 << choice.randrange(8)
    return bytes(cut)


def test_whoever_passes_on_what_ranks_say_to_one_another_lets_nobody_in():
    said = bytearray()
    with contextlib.closing(RankPort()) as port, contextlib.closing(RankDoor(1, b"secret", addresses=["::1"])) as other:
        with between(port, said) as number, pytest.raises(RendezvousError, match=f"port {number}: "):
            other.connect("t", [port.door.way._replace(port=number), None], time.monotonic() + 0.1, lambda: None)
        assert said  # it was heard
        assert port.num_refused() == 1
        port.check()


@pytest.mark.parametrize(
    ("listens_on", "address"),
    [("", "127.0.0.1"), ("", "::1"), ("", "::ffff:127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1")],
)
def test_a_bound_door_lets_in_by_each_of_its_addresses(listens_on, address):
    came = threading.Event()
    door = Door((listens_on, 0), b"secret", lambda _: came.set(), bound=True)
    with contextlib.closing(door):
        knock((address, door.address[1]), b"secret", WAIT_S, bound=True).close()
        assert came.wait(WAIT_S)


@pytest.mark.parametrize("kind", [StorePort, RankPort])
def test_ten_thousand_strangers_change_nothing_but_a_counter(kind):
    choice = random.Random(kind.__name__)
    with contextlib.closing(kind()) as port:
        genuine = recorded(port)
        assert len(genuine) > 40
        before = port.num_refused()
        for number in range(NUM_INPUTS):
            stranger = socket.create_connection(port.address, timeout=WAIT_S)
            with stranger, contextlib.suppress(OSError):  # it may have been turned away already
                stranger.sendall(junk(choice, genuine))
            if number % 1000 == 999:
                port.check()
        limit = time.monotonic() + WAIT_S
        while port.num_refused() - before < NUM_INPUTS and time.monotonic() < limit:
            time.sleep(0.01)
        assert port.num_refused() - before == NUM_INPUTS
        port.check()
