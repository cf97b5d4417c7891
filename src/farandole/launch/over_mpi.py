"""The meeting of ranks that mpirun has started.

Rank 0 tells the others over MPI where it serves the store, and a secret that it has just made. No data go over MPI.
"""

from __future__ import annotations

import json
import secrets
import time

from farandole.errors import RendezvousError
from farandole.membership import Membership
from farandole.rendezvous import Identity, join
from farandole.store import StoreServer

__all__ = ["join_over_mpi"]

_NUM_BYTES = 512
_PAUSE_S = 0.001


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
        from mpi4py import MPI
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
    server = None
    words = bytearray(_NUM_BYTES)
    if rank == 0:
        secret = secrets.token_hex(32)
        server = StoreServer(("127.0.0.1", 0), secret.encode())
        text = json.dumps([*server.address, secret]).encode()
        words[: len(text)] = text
    told = world.Ibcast(words, root=0)
    while not told.Test():
        if time.monotonic() > limit:
            raise RendezvousError(f"rank {rank} waited {timeout_s:g} s for rank 0 to call farandole.init() as often")
        time.sleep(_PAUSE_S)
    host, port, secret = json.loads(words.rstrip(b"\0"))
    identity = Identity(rank, world_size, (host, port), True, secret.encode())
    return join(identity, max(_PAUSE_S, limit - time.monotonic()), server)
