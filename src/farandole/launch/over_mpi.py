"""The meeting of ranks that mpirun has started.

Rank 0 tells the others over MPI where it serves the store, and a secret that it has just made. Data go over MPI only
where `farandole.mpi_lines` carries them.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from typing import Any, NamedTuple

from farandole.addresses import INTERFACE, own_addresses
from farandole.connections import Transport
from farandole.door import Address, knock
from farandole.errors import RendezvousError
from farandole.meeting import Identity
from farandole.membership import Membership
from farandole.rendezvous import join, next_meeting
from farandole.store import StoreServer

__all__ = ["join_over_mpi", "mpi_of_job"]

_TAG = 32_067
"""Of these messages on MPI's world: below the largest that every MPI has, and of no use to anyone else."""

_PAUSE_S = 0.001
_CONNECT_S = 5.0

_NAMES_OF_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Where mpirun says how many ranks it has started on this host."""

_being_sent: list[tuple[Any, bytes]] = []
"""Requests of MPI, with the memory that they read."""


def mpi_of_job(rank: int, world_size: int, otherwise: str) -> Any:
    """The module of mpi4py, which is loaded, so that MPI is initialised, and whose world is the job.

    Args:
        rank, world_size: as mpirun says.
        otherwise: what the user can do without it.

    Raises:
        RendezvousError: there is no mpi4py, or it belongs to another MPI than mpirun; or MPI is not initialised, or not
            any more.
    """
    try:
        MPI = _mpi()
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py finds no MPI
        raise RendezvousError(
            f"mpirun started this process, and mpi4py, over which the ranks would meet, cannot be loaded: {error}; "
            f"install it, or {otherwise}"
        ) from error
    if not MPI.Is_initialized():
        raise RendezvousError(
            f"MPI is not initialised, as mpi4py.rc.initialize was changed; call MPI.Init_thread() before "
            f"farandole.init(), or {otherwise}"
        )
    if MPI.Is_finalized():
        raise RendezvousError(
            f"MPI has been finalised, and the ranks would meet over it; call farandole.init() before MPI.Finalize(), "
            f"or {otherwise}"
        )
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank, world_size):
        raise RendezvousError(
            f"what started this process says that it is rank {rank} of {world_size}, and mpi4py that it is rank "
            f"{world.rank} of {world.size}: it uses another MPI than mpirun's "
            f"({MPI.Get_library_version().split(chr(10))[0]}), or srun was not told which it is (srun --mpi=pmix); "
            f"install mpi4py for that of mpirun, or {otherwise}"
        )
    return MPI


def join_over_mpi(rank: int, world_size: int, timeout_s: float, transport: Transport) -> Membership:
    """Meet the others. mpi4py is loaded for that.

    Args:
        rank, world_size: as mpirun says.
        timeout_s: how long to wait for the others.
        transport: what connects hosts.

    Raises:
        RendezvousError: as `mpi_of_job` and `farandole.rendezvous.join`.
    """
    world = mpi_of_job(rank, world_size, "set MASTER_ADDR and MASTER_PORT").COMM_WORLD
    limit = time.monotonic() + timeout_s
    if rank == 0:
        number, secret = next_meeting(), secrets.token_hex(32)
        addresses = _addresses(os.environ, world_size)
        server = StoreServer((addresses[0] if len(addresses) == 1 else "", 0), secret.encode())
        _tell(world, _Place(addresses, server.address[1], secret, number))
        identity = Identity(rank, world_size, server.address, True, secret.encode(), transport)
        return join(identity, timeout_s, server=server)
    told = _last_told(world, limit)
    if told is None:
        raise RendezvousError(f"rank {rank} waited {timeout_s:g} s for rank 0 to call farandole.init()")
    place, address = told
    identity = Identity(rank, world_size, address, True, place.secret.encode(), transport)
    return join(identity, max(_PAUSE_S, limit - time.monotonic()), number=place.number)


def _addresses(environment: Mapping[str, str], world_size: int) -> list[str]:
    """Where the others can reach this host; nobody else need be able to where all ranks are on it."""
    is_one_host = any(environment.get(name) == str(world_size) for name in _NAMES_OF_LOCAL_SIZE)
    return ["127.0.0.1"] if is_one_host and not environment.get(INTERFACE) else own_addresses(environment)


class _Place(NamedTuple):
    """Where rank 0 serves the store of which meeting, and its secret. Any of the addresses may be what works."""

    addresses: list[str]
    port: int
    secret: str
    number: int


def _tell(world: Any, place: _Place) -> None:
    """Send ``place`` to all other ranks, whenever they come for it."""
    text = json.dumps(place).encode()
    _being_sent[:] = [(request, text) for request, text in _being_sent if not request.Test()]
    _being_sent.extend((world.Isend([text, _mpi().BYTE], other, _TAG), text) for other in range(1, world.size))


def _last_told(world: Any, limit: float) -> tuple[_Place, Address] | None:
    """What rank 0 has told last, and still serves, and where it answers: this rank may have missed meetings before.
    None if time is over."""
    place = None
    while True:
        status = _mpi().Status()
        if world.Iprobe(0, _TAG, status):
            text = bytearray(status.Get_count(_mpi().BYTE))
            world.Recv([text, _mpi().BYTE], 0, _TAG)
            place = _Place(*json.loads(text))
        elif place is not None and (address := _answering(place, limit)):
            return place, address
        elif time.monotonic() > limit:
            return None
        else:
            place = None
            time.sleep(_PAUSE_S)


def _answering(place: _Place, limit: float) -> Address | None:
    """Where rank 0 answers, if it does. It serves before it tells, and until that meeting is over."""
    for host in place.addresses:
        seconds = min(_CONNECT_S, limit - time.monotonic())
        try:
            knock((host, place.port), place.secret.encode(), seconds).close()
        except (OSError, EOFError, AuthenticationError):  # also if it is another host that has that address here
            continue
        return host, place.port
    return None


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI
