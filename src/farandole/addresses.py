"""The addresses of this host that ranks on other hosts can reach it at."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from farandole.errors import RendezvousError

__all__ = ["INTERFACE", "is_loopback", "own_addresses"]

INTERFACE = "FARANDOLE_INTERFACE"

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9  # nothing is sent there


def own_addresses(environment: Mapping[str, str], toward: str = "") -> list[str]:
    """Where this host can be reached, what is most likely to work first.

    Those of the interface that FARANDOLE_INTERFACE names (or the one address that it gives); else the one from which
    the route to host ``toward`` starts. Where that is a loopback address, as ``toward`` is this host itself, all that
    others might use. A loopback address comes only where this host has no other.

    Raises:
        RendezvousError: there is no such interface, or it has no address.
    """
    wanted = environment.get(INTERFACE, "")
    if wanted:
        return _addresses_of_interface(wanted)
    route = _start_of_route(toward) if toward else None
    if route is not None and not is_loopback(route):
        return [route]
    others = [address for name in _interfaces() for address in _addresses_of(name) if not is_loopback(address)]
    return others or ["127.0.0.1"]


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address, or "localhost"."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _addresses_of_interface(wanted: str) -> list[str]:
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(wanted))]
    names = _interfaces()
    if wanted not in names:
        raise RendezvousError(f"{INTERFACE} is {wanted!r}; the interfaces of this host are {', '.join(names)}")
    addresses = _addresses_of(wanted)
    if not addresses:
        raise RendezvousError(f"{INTERFACE} is {wanted!r}, which has no IP address")
    return addresses


def _start_of_route(host: str) -> str | None:
    """This host's address on the way to another; None if there is no way."""
    try:
        candidates = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, _, _, address in candidates:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)
            name: str = probe.getsockname()[0]
            return name
    return None


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _addresses_of(name: str) -> list[str]:
    """Of an interface; of IPv6 only such as are valid beyond the link."""
    addresses = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        addresses.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, interface = line.split()
            if interface == name and int(scope, 16) in (0x00, 0x10):  # global, or this host
                addresses.append(str(ipaddress.IPv6Address(int(digits, 16))))
    return addresses
