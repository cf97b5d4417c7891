"""Who a process is in its job, as what started it says in the environment, and where the ranks then meet.

==================== ========================================== ==========================================
started by           rank and world size                        the ranks meet
==================== ========================================== ==========================================
farandole run        RANK, WORLD_SIZE                           at FARANDOLE_RENDEZVOUS, which it serves
torchrun             RANK, WORLD_SIZE                           at the store of torchrun's agent
mpirun of Open MPI   OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE where rank 0 says, over MPI
mpirun of Hydra      PMI_RANK, PMI_SIZE                         where rank 0 says, over MPI
srun                 SLURM_PROCID, SLURM_STEP_NUM_TASKS         on the first host of the step
anything             RANK, WORLD_SIZE                           at MASTER_ADDR and MASTER_PORT
==================== ========================================== ==========================================

(Hydra is the mpirun of MPICH and Intel MPI.) MASTER_ADDR and MASTER_PORT go before what mpirun and srun would do.

FARANDOLE_TRANSPORT says how data travel between hosts: "tcp", or "mpi" in a job of MPI.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from farandole.addresses import is_loopback
from farandole.connections import Tcp, Transport
from farandole.door import Address
from farandole.errors import RendezvousError
from farandole.launch.over_mpi import join_over_mpi, mpi_of_job
from farandole.launch.under_torchrun import join_at_agent
from farandole.meeting import Identity
from farandole.membership import Membership, join_alone
from farandole.mpi_lines import MpiLines
from farandole.rendezvous import join

__all__ = ["TRANSPORT", "Seat", "join_job", "seat_from", "secret_from", "transport_from"]

_LAUNCHERS = {
    "plain": ("RANK", "WORLD_SIZE"),
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "hydra": ("PMI_RANK", "PMI_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
TRANSPORT = "FARANDOLE_TRANSPORT"
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
"""Where jobs of Slurm meet: below the ports that Linux gives to anyone."""


class Seat(NamedTuple):
    """A rank of a job.

    Attributes:
        rank, world_size: in the job.
        launcher: "plain", "mpi", "hydra" or "slurm": who says so.
    """

    rank: int
    world_size: int
    launcher: str


def seat_from(environment: Mapping[str, str]) -> Seat | None:
    """Who the environment says this process is; None if it says nothing: then it is alone.

    Raises:
        RendezvousError: a variable makes no sense, or is missing.
    """
    for launcher, (rank_name, size_name) in _LAUNCHERS.items():
        given = [name for name in (rank_name, size_name) if name in environment]
        if not given or (launcher != "plain" and len(given) < 2):
            continue
        rank, world_size = (_number(environment, name, f"{rank_name} and {size_name}") for name in _LAUNCHERS[launcher])
        if not 0 <= rank < world_size:
            raise RendezvousError(
                f"{rank_name} is {rank} and {size_name} is {world_size}; {rank_name} must be in 0..{size_name} - 1"
            )
        if launcher == "hydra" and _says_the_same(environment, "slurm", rank, world_size):
            launcher = "slurm"  # srun sets the variables of PMI, too, if so configured
        return Seat(rank, world_size, launcher)
    return None


def _says_the_same(environment: Mapping[str, str], launcher: str, rank: int, world_size: int) -> bool:
    return [environment.get(name) for name in _LAUNCHERS[launcher]] == [str(rank), str(world_size)]


def secret_from(environment: Mapping[str, str]) -> bytes:
    """The secret of the job, from FARANDOLE_SECRET or the file that FARANDOLE_SECRET_FILE names; else none, b"".

    Raises:
        RendezvousError: the file cannot be read, is empty, or others may read it.
    """
    if environment.get("FARANDOLE_SECRET") or not environment.get("FARANDOLE_SECRET_FILE"):
        return environment.get("FARANDOLE_SECRET", "").encode()
    path = Path(environment["FARANDOLE_SECRET_FILE"])
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read().strip()
    except OSError as error:
        raise RendezvousError(f"FARANDOLE_SECRET_FILE cannot be read: {error}") from error
    if mode & 0o077:
        raise RendezvousError(f"FARANDOLE_SECRET_FILE is {path}, which others may read; chmod 600 {path}")
    if not secret:
        raise RendezvousError(f"FARANDOLE_SECRET_FILE is {path}, which is empty; put a long random text into it")
    return secret


def transport_from(environment: Mapping[str, str]) -> Transport:
    """How data travel between the hosts of the job, as FARANDOLE_TRANSPORT says. For "mpi", that is initialised.

    Raises:
        RendezvousError: it says something else; or this is no job of MPI, or mpi4py does not work here.
    """
    wanted = environment.get(TRANSPORT) or "tcp"
    if wanted == "tcp":
        return Tcp()
    if wanted != "mpi":
        raise RendezvousError(f"{TRANSPORT} is {wanted!r}; it must be tcp or mpi")
    seat = seat_from(environment)
    names = [name for launcher in ("mpi", "hydra", "slurm") for name in _LAUNCHERS[launcher]]
    if seat is None or not any(name in environment for name in names):
        raise RendezvousError(
            f"{TRANSPORT} is mpi, and neither mpirun nor srun has started this process; start the job with one of "
            f"them, or unset it: then data go over TCP"
        )
    return MpiLines(mpi_of_job(seat.rank, seat.world_size, f"unset {TRANSPORT}"))


def join_job(environment: Mapping[str, str], timeout_s: float) -> Membership:
    """Meet the other ranks of the job that this process was started for; see above.

    Args:
        environment: of this process.
        timeout_s: how long to wait for them.

    Raises:
        RendezvousError: see `farandole.rendezvous.join`; or the environment does not say enough.
    """
    seat = seat_from(environment)
    transport = transport_from(environment)
    if seat is None or seat.world_size == 1:
        return join_alone()
    rank, world_size, launcher = seat
    secret = secret_from(environment)
    if "FARANDOLE_RENDEZVOUS" in environment:
        store = _address(environment["FARANDOLE_RENDEZVOUS"], "FARANDOLE_RENDEZVOUS")
        return join(Identity(rank, world_size, store, False, secret, transport), timeout_s)
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _master(environment)
        return join_at_agent(store, rank, world_size, secret, timeout_s, transport)
    job = ""
    if "MASTER_ADDR" in environment:
        store = _master(environment)
    elif launcher in ("mpi", "hydra"):
        return join_over_mpi(rank, world_size, timeout_s, transport)
    elif launcher == "slurm":
        store, job = _slurm_address(environment), _slurm_step(environment)
    else:
        raise RendezvousError(
            "RANK and WORLD_SIZE are set, but MASTER_ADDR is not; start with farandole run, torchrun, mpirun or srun, "
            "or set MASTER_ADDR and MASTER_PORT"
        )
    return join(Identity(rank, world_size, store, True, secret, transport, job=job), timeout_s)


def _master(environment: Mapping[str, str]) -> Address:
    host = environment.get("MASTER_ADDR", "")
    return _address(f"{host}:{environment.get('MASTER_PORT', '')}", "MASTER_PORT")


def _slurm_address(environment: Mapping[str, str]) -> Address:
    """The first host of the step, and a port made from the numbers of job and step."""
    port = _FIRST_PORT + zlib.crc32(_slurm_step(environment).encode()) % _NUM_PORTS
    if environment.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1", port
    if environment.get("SLURM_PROCID") == "0" and environment.get("SLURM_NODEID", "0") != "0":
        raise RendezvousError(
            "rank 0 is not on the first host of the step, where the ranks meet; set MASTER_ADDR to the host of rank 0, "
            "and MASTER_PORT"
        )
    hosts = environment.get("SLURM_STEP_NODELIST", "")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    if not first:
        raise RendezvousError(f"SLURM_STEP_NODELIST is {hosts!r}; set MASTER_ADDR and MASTER_PORT")
    host = re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first.group())  # of what is in brackets, the first
    if environment.get("SLURM_PROCID") == "0" and _stands_for_loopback(host):
        return "", port
    return host, port


def _stands_for_loopback(host: str) -> bool:
    """As the name of a host often does on that host itself, while others know it by an address that they can reach."""
    try:
        return all(is_loopback(str(found[4][0])) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except OSError:
        return False


def _slurm_step(environment: Mapping[str, str]) -> str:
    return f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"


def _number(environment: Mapping[str, str], name: str, together: str) -> int:
    text = environment.get(name)
    try:
        return int(text or "")
    except ValueError:
        raise RendezvousError(f"{name} is {text!r}; it must be a whole number ({together} are set together)") from None


def _address(text: str, name: str) -> Address:
    host, _, port = text.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise RendezvousError(f"{name} is {port!r}; it must give a port in 1..65535")
    return host.strip("[]"), int(port)
