"""Connections between ranks of different hosts over MPI, for fabrics that TCP does not reach.

Of each two ranks, both open a line (see `farandole.mpi_pump`), whose name is the meeting and the two ranks. Whoever is
in the MPI job is trusted, as MPI trusts it: there is no secret to prove.

Messages go over a duplicate of MPI's world, so that they never meet those of the program. It is made the first time
that ranks are to be connected. A rank that is not there then holds up nobody for longer than the meeting lasts: the
duplicate stays begun, and is there once that rank has come to a later one.

MPI.Finalize() first ends the pump: it calls what is attached to MPI's COMM_SELF before anything else. A program that
calls it should have closed its communicators before: lines that are still open hold it up for `_GRACE_S`, and are cut.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farandole.addresses import own_addresses
from farandole.connections import Way
from farandole.errors import RendezvousError
from farandole.mpi_pump import Line, LineName, Pump, PumpStopped

__all__ = ["MpiLines"]

_PAUSE_S = 0.001
_NOTICING_S = 0.2
_GRACE_S = 6.0
"""What lines have left to be closed in, when the process ends; more than a host that takes nothing is waited for."""


class MpiLines:
    """The `farandole.connections.Transport`. There is one duplicate, and one pump, per process.

    Args:
        MPI: the module of mpi4py, whose world is the job.

    Raises:
        RendezvousError: MPI was not initialised for many threads.
    """

    name = "mpi"

    def __init__(self, MPI: Any) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RendezvousError(
                "data can go over MPI only if several threads may use it, and it was initialised for fewer; this MPI "
                "may have been built without (MPI_THREAD_MULTIPLE), or mpi4py.rc.thread_level was changed"
            )
        self._MPI = MPI

    def open(self, rank: int, secret: bytes, *, addresses: Sequence[str] | None = None, toward: str = "") -> _Connector:
        """See `farandole.connections.Transport`; the secret is not needed, nor are the addresses for data."""
        return _Connector(self._MPI, rank, own_addresses(os.environ, toward) if addresses is None else addresses)


class _Connector:
    """One rank's part in connecting a group."""

    def __init__(self, MPI: Any, rank: int, addresses: Sequence[str]) -> None:
        self._MPI = MPI
        self._rank = rank
        self.way = Way(tuple(addresses), MPI.COMM_WORLD.rank)

    def connect(
        self, token: str, ways: Sequence[Way | None], limit: float, require_going: Callable[[], None]
    ) -> list[int]:
        """See `farandole.connections.RankDoor.connect`."""

        def require_time(what: str) -> None:
            require_going()
            if time.monotonic() > limit:
                raise RendezvousError(
                    f"rank {self._rank} waited in vain for {what}, over MPI; are all ranks of this mpirun or srun in "
                    f"farandole.init(), and has none of them ended?"
                )

        pump = _pump(self._MPI, require_time)
        lines: dict[int, Line] = {}
        try:
            for rank, way in enumerate(ways):
                if way is not None:
                    lines[rank] = _open(pump, LineName(int(token, 16), self._rank, rank), way.port)
            while missing := _unanswered(pump, lines):
                require_time(f"ranks {missing}")
        except BaseException:
            for line in lines.values():
                pump.abandon(line)
                os.close(line.socket)
            raise
        return [lines[rank].socket if rank in lines else -1 for rank in range(len(ways))]

    def close(self) -> None:
        """Nobody comes uncalled."""


def _open(pump: Pump, name: LineName, peer: int) -> Line:
    try:
        return pump.open(name, peer)
    except OSError as error:
        raise RendezvousError(
            f"cannot open a line to rank {name.other} over MPI: {error}; raise the limit with ulimit -n"
        ) from error
    except PumpStopped as error:
        raise _stopped(error) from error


def _unanswered(pump: Pump, lines: Mapping[int, Line]) -> list[int]:
    try:
        return pump.unanswered(lines, _NOTICING_S)
    except PumpStopped as error:
        raise _stopped(error) from error


def _stopped(error: PumpStopped) -> RendezvousError:
    return RendezvousError(f"nothing is carried over MPI any more, as {error}; start the job again")


class _Shared:
    """What all transports of this process have in common.

    Attributes:
        request: of MPI, for the duplicate; None until that is begun.
        world: the duplicate, of use once the request is through.
        pump: None until then.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.world: Any = None
        self.request: Any = None
        self.pump: Pump | None = None


_shared = _Shared()


def _pump(MPI: Any, require_time: Callable[[str], None]) -> Pump:
    """The pump of this process, once all ranks of MPI's world have come so far."""
    while True:
        with _shared.lock:
            if _shared.pump is not None:
                return _shared.pump
            if _shared.request is None:
                _shared.world, _shared.request = MPI.COMM_WORLD.Idup()
            if _shared.request.Test():
                _shared.pump = Pump(MPI, _shared.world)
                key = MPI.Comm.Create_keyval(delete_fn=_end_before_finalize)
                MPI.COMM_SELF.Set_attr(key, None)
                return _shared.pump
        require_time("all ranks of MPI's world")
        time.sleep(_PAUSE_S)


def _end() -> None:
    if _shared.pump is not None:
        _shared.pump.end(_GRACE_S)


def _end_before_finalize(_communicator: Any, _key: int, _value: Any) -> None:
    _end()


def _forget() -> None:
    """In a forked child, where there is no such thread, and MPI is not to be used."""
    global _shared
    before, _shared = _shared, _Shared()
    if before.pump is not None:
        before.pump.close()


# Handlers run in reverse: this after that of `farandole.job`, which closes communicators, and before MPI is finalised.
atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
