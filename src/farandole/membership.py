"""A rank's place in a group that shares memory: the arena, and everyone's process.

The first rank makes the arena as an anonymous file (a memfd), which has no name that could be left behind; the others
open it through that rank's process, which only the same user may, and check a random number in it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import farandole._native as _native
from farandole.calibration import Calibration, calibration_in_use
from farandole.errors import RendezvousError

__all__ = ["LONGEST_REASON", "Membership", "create_arena", "join_alone", "join_threads", "map_arena", "words"]

LONGEST_REASON = 1000
"""Characters of what one rank tells the others of its failure."""


@dataclass(frozen=True, slots=True)
class Membership:
    """A rank's place in a group that shares memory.

    Attributes:
        rank, world_size: in the group.
        arena: what the group shares.
        processes: per rank, its process id.
        job_ranks: per rank, its rank in the job.
        calibration: what communication costs here; the same on all ranks.

    Raises:
        RendezvousError: this process may not open as many files as it needs to watch the others.
    """

    rank: int
    world_size: int
    arena: _native.Arena
    processes: tuple[int, ...]
    job_ranks: tuple[int, ...]
    calibration: Calibration
    _descriptors: list[int] = field(init=False, repr=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        try:
            for process in self.processes:
                self._descriptors.append(-1 if process == os.getpid() else _open_process(process))
        except OSError as error:
            raise RendezvousError(
                f"cannot watch the processes of {self.world_size} ranks: {error}; raise the limit with ulimit -n"
            ) from error

    def open_process_descriptors(self) -> list[int]:
        """Per rank, a descriptor that tells when its process ends; -1 for this process itself, -2 if it has ended.
        Hands them over: from now on they are the caller's to close, and there are no others."""
        handed = self._descriptors.copy()
        self._descriptors.clear()
        return handed

    def __del__(self) -> None:
        is_own = self.processes[self.rank] == os.getpid()  # else a process forked from it drops its copy
        if self._descriptors and is_own:
            self.leave()

    def leave(self) -> None:
        """Let the others, who may have joined, know that this rank does not take part."""
        _native.Engine(self.arena, self.rank, self.open_process_descriptors()).close()

    def split(self, ranks: Sequence[int], exchange: Callable[[Sequence[int]], list[list[int]]]) -> Membership | None:
        """A new membership for the ranks of this group that are in ``ranks``; None for the others. Called by all ranks.

        Args:
            ranks: in their new order, or none; the new group of this rank.
            exchange: gathers equally many integers from every rank of this group.

        Raises:
            RendezvousError: on every rank, if any of them could not join its new group.
        """
        arena = membership = None
        problem = ""
        offer = [0, 0, 0]
        if ranks and ranks[0] == self.rank:
            try:
                arena, nonce = create_arena(len(ranks))
                offer = [os.getpid(), arena.descriptor, nonce]
            except Exception as error:
                problem = words(error)
        offers = exchange(offer)
        if ranks and any(offers[ranks[0]]):  # else its first rank says why
            try:
                membership = Membership(
                    ranks.index(self.rank),
                    len(ranks),
                    arena or map_arena(*offers[ranks[0]]),
                    tuple(self.processes[rank] for rank in ranks),
                    tuple(self.job_ranks[rank] for rank in ranks),
                    self.calibration,
                )
            except Exception as error:
                problem = words(error)
        try:
            _require_no_problem(problem, exchange)
        except BaseException:
            if membership is not None:
                membership.leave()
            raise
        if membership is not None:
            membership.arena.close_descriptor()
        return membership


def _require_no_problem(problem: str, exchange: Callable[[Sequence[int]], list[list[int]]]) -> None:
    """Raise the ``problem`` of any rank on all of them."""
    text = problem[:LONGEST_REASON].encode()
    sizes = [size for (size,) in exchange([len(text)])]
    if any(sizes):
        rank = next(rank for rank, size in enumerate(sizes) if size)
        why = bytes(exchange(list(text.ljust(max(sizes))))[rank][: sizes[rank]]).decode()
        raise RendezvousError(f"rank {rank} could not join its new group: {why}")


def join_alone() -> Membership:
    """A world of one."""
    arena, _ = create_arena(1)
    arena.close_descriptor()
    return Membership(0, 1, arena, (os.getpid(),), (0,), calibration_in_use())


def join_threads(world_size: int) -> list[Membership]:
    """A membership per rank, all of them in this process."""
    arena, _ = create_arena(world_size)
    arena.close_descriptor()
    everyone = tuple(range(world_size))
    processes, calibration = (os.getpid(),) * world_size, calibration_in_use()
    return [Membership(rank, world_size, arena, processes, everyone, calibration) for rank in everyone]


def create_arena(world_size: int) -> tuple[_native.Arena, int]:
    """An arena for so many ranks, and the number that tells it from others.

    Raises:
        RendezvousError: there is no room for it.
    """
    nonce = secrets.randbits(63)
    num_slots, slot_bytes = _geometry(world_size)
    try:
        arena = _native.Arena.create(world_size=world_size, num_slots=num_slots, slot_bytes=slot_bytes, nonce=nonce)
    except (RuntimeError, MemoryError) as error:
        raise RendezvousError(
            f"{error}; the memory that {world_size} ranks share takes an open file (see ulimit -n) and as much address "
            f"space (see ulimit -v)"
        ) from error
    return arena, nonce


def _geometry(world_size: int) -> tuple[int, int]:
    """Slots per channel and bytes per slot. There are N x N channels for collectives, and nearly as many for messages,
    so slots shrink as worlds grow."""
    num_channels = world_size * world_size
    slot_bytes = 256 * 1024
    while slot_bytes > 8 * 1024 and num_channels * 4 * slot_bytes > 64 * 1024 * 1024:
        slot_bytes //= 2
    return 4, slot_bytes


def map_arena(process: int, descriptor: int, nonce: int) -> _native.Arena:
    """The arena that ``process`` offers, if it is one, is this user's, and has no name that others could open."""
    try:
        own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RendezvousError(
            f"cannot open the shared memory of process {process}: {error}; all ranks must run on one host, as one user"
        ) from error
    try:
        is_ours = os.fstat(own).st_uid == os.geteuid()
        if not is_ours or not str(Path(f"/proc/self/fd/{own}").readlink()).startswith("/memfd:farandole"):
            raise RuntimeError(f"process {process} offers a file that is not the shared memory of this user's job")
        arena = _native.Arena.map(own)
    except RuntimeError as error:
        os.close(own)
        raise RendezvousError(f"{error}; all ranks must run on one host") from error
    if arena.nonce != nonce:
        raise RendezvousError(
            f"process {process} on this host is not the rank it should be; all ranks must run on one host"
        )
    return arena


def _open_process(process: int) -> int:
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        return -2


def words(error: BaseException) -> str:
    """What the others are told of ``error``."""
    if not isinstance(error, Exception):
        return f"it was interrupted ({type(error).__name__})"
    return str(error) or type(error).__name__
