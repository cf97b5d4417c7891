"""The ranks of a trace: how they tell one another what they have, apart from what the program communicates.

They do so on a group of their own, of the same ranks as one of the program's: so it does not matter what is still under
way there, or failed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from typing import Any, Protocol

import numpy as np

from farandole.communicator import Communicator
from farandole.errors import ArgumentError, CommunicationError
from farandole.job import current_job

__all__ = ["Alone", "Ranks", "ranks_of"]

_CLOCK_TAG = 1


class Ranks(Protocol):
    """A group. Methods but `close` are called by all ranks, and raise a RuntimeError if that fails.

    Attributes:
        rank, size: of this process, and how many there are.
    """

    rank: int
    size: int

    def all_gather(self, data: bytes) -> list[bytes]:
        """What every rank gave."""

    def gather(self, data: bytes) -> list[bytes]:
        """On rank 0, what every rank gave; nothing elsewhere."""

    def send(self, number: int, dst: int) -> None:
        """To rank ``dst`` alone."""

    def receive(self, src: int) -> int:
        """From rank ``src``."""

    def hurry(self, seconds: float) -> None:
        """Wait for no other rank longer than that, from now on."""

    def close(self) -> None:
        """Leave the group."""


def ranks_of(communicator: Communicator | None) -> Ranks:
    """Those of ``communicator``; else of torch.distributed, if that is initialised; else of `farandole.init`, if that
    was called; else this process alone. All of them call this.

    Raises:
        ArgumentError: this process was started as one of several ranks, and does not know the others yet.
        CommunicationError, RendezvousError: the others did not come.
    """
    if communicator is not None:
        return _OfCommunicator(communicator)
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        inner = getattr(_cpu_backend(dist.group.WORLD), "communicator", None)
        return _OfTorch(dist) if inner is None else _OfCommunicator(inner)
    job = current_job()
    if job is not None:
        return _OfCommunicator(job)
    size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "?")
    if size != "1":
        raise ArgumentError(
            f"this process is rank {rank} of {size}, and knows the others only after farandole.init() or "
            f"torch.distributed.init_process_group(): call that before farandole.trace()"
        )
    return Alone()


def _cpu_backend(group: Any) -> Any:
    """What serves tensors of the CPU in a group of torch; None if nothing does."""
    try:
        return group._get_backend(sys.modules["torch"].device("cpu"))
    except RuntimeError:
        return None


class Alone:
    """No other rank."""

    rank = 0
    size = 1

    def all_gather(self, data: bytes) -> list[bytes]:
        """That."""
        return [data]

    def gather(self, data: bytes) -> list[bytes]:
        """That."""
        return [data]

    def send(self, number: int, dst: int) -> None:
        """There is nobody."""
        raise AssertionError("sent to nobody")

    def receive(self, src: int) -> int:
        """There is nobody."""
        raise AssertionError("received from nobody")

    def hurry(self, seconds: float) -> None:
        """Nothing is waited for."""

    def close(self) -> None:
        """Nothing is there."""


class _OfCommunicator:
    def __init__(self, communicator: Communicator) -> None:
        group = communicator.split(0)
        assert group is not None
        self._group = group
        self.rank, self.size = group.rank, group.world_size
        self.communicator = communicator  # that of the program
        group.leave_out_of_traces()

    def all_gather(self, data: bytes) -> list[bytes]:
        sizes = self._sizes(data)
        return _split(self._group.all_gather(np.frombuffer(data, np.uint8), counts=sizes), sizes)

    def gather(self, data: bytes) -> list[bytes]:
        sizes = self._sizes(data)
        gathered = self._group.gather(np.frombuffer(data, np.uint8), counts=sizes)
        return [] if gathered is None else _split(gathered, sizes)

    def _sizes(self, data: bytes) -> list[int]:
        sizes: list[int] = self._group.all_gather(np.array([len(data)])).tolist()
        return sizes

    def send(self, number: int, dst: int) -> None:
        self._group.send(np.array([number]), dst, tag=_CLOCK_TAG)

    def receive(self, src: int) -> int:
        return int(self._group.recv(np.zeros(1, dtype=np.int64), src, tag=_CLOCK_TAG)[0])

    def hurry(self, seconds: float) -> None:
        self._group.timeout_s = min(self._group.timeout_s, seconds)

    def close(self) -> None:
        with contextlib.suppress(CommunicationError):  # told before, where it mattered
            self._group.close()


def _split(joined: np.ndarray[Any, Any], sizes: list[int]) -> list[bytes]:
    ends = np.cumsum(sizes)
    return [joined[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)]


class _OfTorch:
    """Over gloo, whatever the program uses: it takes what is in ordinary memory."""

    def __init__(self, dist: Any) -> None:
        self._dist = dist
        self._group = dist.new_group(backend="gloo")
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)

    def all_gather(self, data: bytes) -> list[bytes]:
        gathered: list[Any] = [None] * self.size
        self._dist.all_gather_object(gathered, data, group=self._group)
        return gathered

    def gather(self, data: bytes) -> list[bytes]:
        gathered: list[Any] = [None] * self.size
        self._dist.gather_object(data, gathered if self.rank == 0 else None, group=self._group, group_dst=0)
        return gathered if self.rank == 0 else []

    def send(self, number: int, dst: int) -> None:
        self._dist.send(sys.modules["torch"].tensor([number]), group=self._group, group_dst=dst, tag=_CLOCK_TAG)

    def receive(self, src: int) -> int:
        number = sys.modules["torch"].zeros(1, dtype=sys.modules["torch"].int64)
        self._dist.recv(number, group=self._group, group_src=src, tag=_CLOCK_TAG)
        return int(number.item())

    def hurry(self, seconds: float) -> None:
        self._dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), self._group)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the program may have left torch.distributed altogether
            self._dist.destroy_process_group(self._group)
