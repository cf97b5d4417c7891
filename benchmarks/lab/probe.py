"""What a link gives to plain TCP: every host sends to the next while it receives from the one before.

Usage: python -m benchmarks.lab.probe OWN_ADDRESS NEXT_ADDRESS BYTES, on all hosts at once. Prints the seconds from
before the first byte was sent until the receiver said that it has them all: however busy the machine is, a link does
not look faster than it is.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

from benchmarks.compare.environments import ROOT
from benchmarks.lab.laboratory import Laboratory

__all__ = ["probe"]

_PORT = 5001
_START_S = 30.0


def probe(laboratory: Laboratory, seconds: float = 1.0) -> list[float]:
    """The bits per second that each host's link gives, all links and both directions at once.

    Args:
        laboratory: with two hosts or more.
        seconds: how long that takes at the rate that was set.
    """
    num_bytes = round(laboratory.rate_bits_per_s / 8 * seconds)
    addresses = [laboratory.address(host) for host in range(laboratory.num_hosts)]
    senders = []
    for host, address in enumerate(addresses):
        arguments = [address, addresses[(host + 1) % len(addresses)], str(num_bytes)]
        command = [sys.executable, "-m", "benchmarks.lab.probe", *arguments]
        senders.append(laboratory.start(host, command, cwd=ROOT, stdout=subprocess.PIPE))
    limit_s = _START_S + 20 * seconds
    return [8 * num_bytes / float(sender.communicate(timeout=limit_s)[0]) for sender in senders]


def _receive(listener: socket.socket, num_bytes: int) -> None:
    link, _ = listener.accept()
    with link:
        while num_bytes > 0:
            data = link.recv(1 << 18)
            if not data:
                return
            num_bytes -= len(data)
        link.sendall(b"!")


def _reach(address: str) -> socket.socket:
    """A connection to the next host, which may still be starting."""
    limit = time.monotonic() + _START_S
    while True:
        try:
            return socket.create_connection((address, _PORT), timeout=_START_S)
        except OSError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.01)


def _main() -> None:
    own, following, num_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with socket.create_server((own, _PORT)) as listener:
        receiver = threading.Thread(target=_receive, args=(listener, num_bytes), daemon=True)
        receiver.start()
        with _reach(following) as link:
            began = time.monotonic()
            link.sendall(bytes(num_bytes))
            link.recv(1)
            print(time.monotonic() - began, flush=True)
        receiver.join(_START_S)  # the one before may be slower


if __name__ == "__main__":
    _main()
