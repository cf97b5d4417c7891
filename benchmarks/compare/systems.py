"""The systems, as one rank of each sees them: a barrier, room for data, and the collectives bound to buffers.

Only the worker imports this, in the environment of one system; so each imports what it needs when it is made.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Call", "System", "make"]

Array = npt.NDArray[Any]
Call = Callable[[], object]


class System(ABC):
    """One rank of a system.

    Attributes:
        rank, num_ranks: of its job.
        version: of the library, in words.
    """

    rank: int
    num_ranks: int
    version: str

    def empty(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Room for data; not filled."""
        return np.empty(count, dtype)

    @abstractmethod
    def barrier(self) -> object:
        """Wait for all ranks."""

    @abstractmethod
    def bind(self, collective: str, source: Array, target: Array) -> Call:
        """A function that runs a collective on these buffers; where it works in place, both are the same."""

    @abstractmethod
    def close(self) -> None:
        """Leave the job."""


class Farandole(System):
    """farandole on numpy arrays."""

    def __init__(self) -> None:
        import farandole

        self.comm = farandole.init()
        self.rank, self.num_ranks = self.comm.rank, self.comm.world_size
        self.version = f"farandole {version('farandole')}"

    def barrier(self) -> object:
        return self.comm.barrier()

    def bind(self, collective: str, source: Array, target: Array) -> Call:
        comm = self.comm
        calls: dict[str, Call] = {
            "all_reduce": lambda: comm.all_reduce(source),
            "all_gather": lambda: comm.all_gather(source, out=target),
            "reduce_scatter": lambda: comm.reduce_scatter(source, out=target),
            "broadcast": lambda: comm.broadcast(target, 0),
        }
        return calls[collective]

    def close(self) -> None:
        self.comm.close()


class FarandoleRegistered(Farandole):
    """farandole on arrays in memory that the ranks share, for farandoles that have such."""

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(self.comm, "empty"):
            raise RuntimeError("this farandole has no registered buffers (Communicator.empty)")

    def empty(self, count: int, dtype: np.dtype[Any]) -> Array:
        comm: Any = self.comm
        return np.asarray(comm.empty((count,), dtype))


class Gloo(System):
    """torch.distributed on tensors that share the memory of numpy arrays: no system has a better allocator."""

    def __init__(self) -> None:
        import torch
        import torch.distributed

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.torch: Any = torch
        self.dist: Any = torch.distributed
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        meeting = f"file://{os.environ['COMPARE_DIR']}/gloo"
        self.dist.init_process_group(
            "gloo", init_method=meeting, rank=self.rank, world_size=self.num_ranks, timeout=timedelta(seconds=120)
        )
        self.version = f"Gloo of torch {torch.__version__}"

    def barrier(self) -> object:
        return self.dist.barrier()

    def bind(self, collective: str, source: Array, target: Array) -> Call:
        dist = self.dist
        put, get = self.torch.from_numpy(source), self.torch.from_numpy(target)
        calls: dict[str, Call] = {
            "all_reduce": lambda: dist.all_reduce(put),
            "all_gather": lambda: dist.all_gather_into_tensor(get, put),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(get, put),
            "broadcast": lambda: dist.broadcast(get, 0),
        }
        return calls[collective]

    def close(self) -> None:
        self.dist.destroy_process_group()


class Mpi(System):
    """Whatever MPI the environment has."""

    def __init__(self) -> None:
        import mpi4py  # type: ignore[import-not-found,unused-ignore]

        # The default, "multiple", would have the library take locks that nobody here needs.
        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI

        self.mpi: Any = MPI
        self.comm: Any = MPI.COMM_WORLD
        self.rank, self.num_ranks = self.comm.rank, self.comm.size
        first_line = MPI.Get_library_version().strip("\0 \n").splitlines()[0]
        self.version = " ".join(first_line.split(", package")[0].split())

    def barrier(self) -> object:
        return self.comm.Barrier()

    def bind(self, collective: str, source: Array, target: Array) -> Call:
        comm, in_place = self.comm, self.mpi.IN_PLACE
        calls: dict[str, Call] = {
            "all_reduce": lambda: comm.Allreduce(in_place, source),
            "all_gather": lambda: comm.Allgather(source, target),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(source, target),
            "broadcast": lambda: comm.Bcast(target, 0),
        }
        return calls[collective]

    def close(self) -> None:
        self.mpi.Finalize()


class Copy(System):
    """No system, but the machine's limit: every rank copies S bytes from one array to another, all at once."""

    def __init__(self) -> None:
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        file = Path(os.environ["COMPARE_DIR"]) / "arrived"
        with file.open("ab") as opened:
            opened.truncate(8 * self.num_ranks)
        self.arrived = np.memmap(file, np.int64, "r+", shape=(self.num_ranks,))
        self.version = f"numpy {np.__version__}"

    def barrier(self) -> object:
        self.arrived[self.rank] += 1
        while self.arrived.min() < self.arrived[self.rank]:
            os.sched_yield()
        return None

    def bind(self, collective: str, source: Array, target: Array) -> Call:
        return lambda: np.copyto(target, source)

    def close(self) -> None:
        """Nothing to leave."""


_SYSTEMS: dict[str, Callable[[], System]] = {
    "farandole": Farandole,
    "farandole-registered": FarandoleRegistered,
    "gloo": Gloo,
    "openmpi": Mpi,
    "mpich": Mpi,
    "intel-mpi": Mpi,
    "copy": Copy,
}


def make(name: str) -> System:
    """Join the job of a system, as one of its ranks."""
    return _SYSTEMS[name]()
