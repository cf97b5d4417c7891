"""The meeting of ranks that mpirun has started.

Rank 0 tells the others over MPI where it serves the store, and a secret that it has just made. No data go over MPI.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from typing import Any, NamedTuple

from farandole.errors import RendezvousError
from farandole.membership import Membership
from farandole.rendezvous import Identity, join, next_meeting
from farandole.store import StoreServer

__all__ = ["join_over_mpi"]

_TAG = 32_067
"""Of these messages on MPI's world: below the largest that every MPI has, and of no use to anyone else."""

_PAUSE_S = 0.001
_CONNECT_S = 10.0

_being_sent: list[tuple[Any, bytes]] = []
"""Requests of MPI, with the memory that they read."""


def join_over_mpi(rank: int, world_size: int, timeout_s: float) -> Membership:
    """Meet the others. mpi4py is loaded for that, and so MPI is initialised.

    Args:
        rank, world_size: as mpirun says.
        timeout_s: how long to wait for the others.

    Raises:
        RendezvousError: there is no mpi4py, or it belongs to another MPI than mpirun; or as in
            `farandole.rendezvous.join`.
    """
    try:
        MPI = _mpi()
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py finds no MPI
        raise RendezvousError(
            f"mpirun started this process, and mpi4py, over which the ranks would meet, cannot be loaded: {error}; "
            f"install it, or set MASTER_ADDR and MASTER_PORT"
        ) from error
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank, world_size):
        raise RendezvousError(
            f"mpirun says that this is rank {rank} of {world_size}, and mpi4py that it is rank {world.rank} of "
            f"{world.size}: it uses another MPI than mpirun's ({MPI.Get_library_version().split(chr(10))[0]}); install "
            f"mpi4py for that, or set MASTER_ADDR and MASTER_PORT"
        )
    limit = time.monotonic() + timeout_s
    if rank == 0:
        number, secret = next_meeting(), secrets.token_hex(32)
        server = StoreServer(("127.0.0.1", 0), secret.encode())
        _tell(world, _Place(*server.address, secret, number))
        return join(Identity(rank, world_size, server.address, True, secret.encode()), timeout_s, server=server)
    place = _last_told(world, limit)
    if place is None:
        raise RendezvousError(f"rank {rank} waited {timeout_s:g} s for rank 0 to call farandole.init()")
    identity = Identity(rank, world_size, (place.host, place.port), True, place.secret.encode())
    return join(identity, max(_PAUSE_S, limit - time.monotonic()), number=place.number)


class _Place(NamedTuple):
    """Where rank 0 serves the store of which meeting, and its secret."""

    host: str
    port: int
    secret: str
    number: int


def _tell(world: Any, place: _Place) -> None:
    """Send ``place`` to all other ranks, whenever they come for it."""
    text = json.dumps(place).encode()
    _being_sent[:] = [(request, text) for request, text in _being_sent if not request.Test()]
    _being_sent.extend((world.Isend([text, _mpi().BYTE], other, _TAG), text) for other in range(1, world.size))


def _last_told(world: Any, limit: float) -> _Place | None:
    """What rank 0 has told last, and still serves: this rank may have missed meetings before. None if time is over."""
    place = None
    while True:
        status = _mpi().Status()
        if world.Iprobe(0, _TAG, status):
            text = bytearray(status.Get_count(_mpi().BYTE))
            world.Recv([text, _mpi().BYTE], 0, _TAG)
            place = _Place(*json.loads(text))
        elif place is not None and _is_served(place):
            return place
        elif time.monotonic() > limit:
            return None
        else:
            place = None
            time.sleep(_PAUSE_S)


def _is_served(place: _Place) -> bool:
    """Whether anybody listens there. Rank 0 does before it tells, and until that meeting is over."""
    try:
        socket.create_connection((place.host, place.port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI
