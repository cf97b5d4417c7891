"""Which ranks share a host, found by proof: those that can open one another's fresh memory.

Not by names, which containers and clones have in common, nor by what a launcher says. FARANDOLE_HOST_ID in the
environment divides further: ranks that give different ones are taken to be on different hosts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from farandole.errors import RendezvousError
from farandole.topology import Topology

__all__ = ["HOST_ID", "HostProof", "open_memory_of", "topology_from"]

HOST_ID = "FARANDOLE_HOST_ID"
_TOKEN_BYTES = 16


class HostProof(NamedTuple):
    """What a rank shows to those that may be on its host.

    Attributes:
        process, descriptor: of an anonymous file (a memfd).
        token: what is in it.
        host_id: what FARANDOLE_HOST_ID says; empty if nothing.
        host_name: for people; with the host_id, if there is one.
    """

    process: int
    descriptor: int
    token: str
    host_id: str
    host_name: str

    @classmethod
    def offer(cls) -> HostProof:
        """This process's. Withdrawn when the others have looked.

        Raises:
            OSError: there is no descriptor left.
        """
        token = secrets.token_hex(_TOKEN_BYTES)
        descriptor = os.memfd_create("farandole-host", os.MFD_CLOEXEC)
        os.write(descriptor, token.encode())
        host_id, host_name = os.environ.get(HOST_ID, ""), os.uname().nodename
        return cls(os.getpid(), descriptor, token, host_id, f"{host_name}/{host_id}" if host_id else host_name)

    def withdraw(self) -> None:
        """Close the file."""
        os.close(self.descriptor)

    def is_shared_with(self, other: HostProof) -> bool:
        """Whether ``other`` is on this process's host."""
        if self.host_id != other.host_id:
            return False
        try:
            own = open_memory_of(other.process, other.descriptor)
        except (OSError, RuntimeError):
            return False
        with contextlib.closing(os.fdopen(own, "rb")) as file:
            return os.pread(file.fileno(), 2 * _TOKEN_BYTES + 1, 0) == other.token.encode()


def open_memory_of(process: int, descriptor: int) -> int:
    """A descriptor of this process for an anonymous file of another, of this user and this library.

    Raises:
        OSError: it cannot be opened.
        RuntimeError: it is another file.
    """
    path = Path(f"/proc/{process}/fd/{descriptor}")
    if not _is_memory(path):  # what else a stranger's numbers name is not even opened
        raise RuntimeError(f"process {process} offers a file that is not the shared memory of this user's job")
    own = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    is_ours = os.fstat(own).st_uid == os.geteuid()
    if not is_ours or not _is_memory(Path(f"/proc/self/fd/{own}")):
        os.close(own)
        raise RuntimeError(f"process {process} offers a file that is not the shared memory of this user's job")
    return own


def _is_memory(path: Path) -> bool:
    return str(path.readlink()).startswith("/memfd:farandole")


def topology_from(mates: Sequence[Sequence[int]], proofs: Sequence[HostProof]) -> Topology:
    """The topology, from what ranks each rank shares memory with.

    Raises:
        RendezvousError: they do not agree, or some that say they are on one host share no memory.
    """
    for rank, others in enumerate(mates):
        for other in others:
            if mates[other] != others:
                raise RendezvousError(
                    f"rank {rank} ({proofs[rank].host_name}) shares memory with ranks {list(others)}, but rank {other} "
                    f"({proofs[other].host_name}) with {list(mates[other])}; ranks on one host must all be allowed to "
                    f"open one another's files in /proc, or none: give each part its own {HOST_ID}"
                )
    for rank, proof in enumerate(proofs):
        strangers = [r for r, other in enumerate(proofs) if other.host_id == proof.host_id and r not in mates[rank]]
        if proof.host_id and strangers:
            raise RendezvousError(
                f"{HOST_ID} is {proof.host_id!r} on ranks {rank} ({proof.host_name}) and {strangers[0]} "
                f"({proofs[strangers[0]].host_name}), which cannot open one another's memory; give them different ones"
            )
    return Topology.of_hosts(others[0] for others in mates)
