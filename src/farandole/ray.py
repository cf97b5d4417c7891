"""Ranks that are actors or tasks of Ray.

::

    # the driver
    group = farandole.ray.Group(len(actors))
    ray.get([actor.train.remote(group, rank) for rank, actor in enumerate(actors)])

    # in the actor
    def train(self, group, rank):
        with group.join(rank) as comm:
            comm.all_reduce(gradient)

The group holds a secret and a key-value store, where its ranks meet; the store is an actor of its own, which takes no
CPU and ends with the last handle to the group. Ray brings both to the ranks: whoever can take part in the Ray job is
trusted. The data go past Ray, over shared memory and connections of farandole's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

from farandole.communicator import Communicator, is_whole
from farandole.connections import Transport
from farandole.errors import ArgumentError, RendezvousError
from farandole.job import default_timeout_s
from farandole.launch.environment import TRANSPORT, transport_from
from farandole.membership import join_alone
from farandole.rendezvous import MAX_WORLD_SIZE, give_up_at, join_at
from farandole.work import require_timeout

__all__ = ["Group"]

_ANSWERING_S = 30.0


class Group:
    """So many ranks, which meet once.

    Made by the driver, handed to the ranks as an argument, and kept by the driver until they have joined. For another
    meeting of the same actors make another.

    Args:
        world_size: number of ranks, >= 1.

    Attributes:
        world_size: that number.

    Raises:
        ArgumentError: that is not a whole number from 1 to `MAX_WORLD_SIZE`.
        ModuleNotFoundError: Ray is not installed; pip install "farandole[ray]".
    """

    def __init__(self, world_size: int) -> None:
        if not is_whole(world_size) or not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ArgumentError(f"world_size is {world_size!r}; it must be a whole number in 1..{MAX_WORLD_SIZE}")
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f'{error}; a Group needs Ray: pip install "farandole[ray]"') from error

        self.world_size = int(world_size)
        self._secret = secrets.token_bytes(32)
        self._board = ray.remote(num_cpus=0)(_Board).remote()

    def join(self, rank: int, *, timeout_s: float | None = None) -> Communicator:
        """The communicator of the group; called by every rank, once, in a process of its own.

        Best used as a context manager: an actor that fails then leaves at once, and the others learn of it, though its
        process lives on. If the process ends, they learn of it anyway. What fails before it joins, Ray raises where the
        driver waits for it; the others wait until the timeout, or the driver ends them.

        Args:
            rank: of this process, in 0..world_size - 1.
            timeout_s: seconds to wait for the other ranks here, and in every blocking call that does not say otherwise;
                None takes FARANDOLE_TIMEOUT_S from the environment, or 300. Ray itself may take long to start actors.

        Raises:
            RendezvousError: the ranks did not find one another, the message says which are missing; or another process
                is this rank, or the driver has ended.
            ArgumentError: there is no such rank, or the timeout is not a positive number.
        """
        if not is_whole(rank) or not 0 <= rank < self.world_size:
            raise ArgumentError(f"rank is {rank!r}; it must be a whole number in 0..{self.world_size - 1}")
        timeout_s = default_timeout_s() if timeout_s is None else require_timeout("timeout_s", timeout_s)
        place, address = _Place(self._board, timeout_s), _address_of_node()
        process, work = f"process {os.getpid()} on {address}", _name_of_work()
        own = f"{process}, {work}, {secrets.token_hex(8)}"
        standing = place.set(f"claimed/{rank}", own)
        if standing != own:
            before, work_before, _ = standing.split(", ")
            refusal = RendezvousError(
                f"rank {rank} of this group has been joined before, by {before}; give each its own rank, and make a "
                f"new Group for every meeting"
            )
            if work_before == work and before != process:  # Ray does it again, so that process has ended
                give_up_at(place, int(rank), self.world_size, refusal)
            raise refusal
        try:
            transport = _transport()
        except RendezvousError as error:
            give_up_at(place, int(rank), self.world_size, error)
            raise
        if self.world_size == 1:
            membership = join_alone()
        else:
            everyone = range(self.world_size)
            membership = join_at(
                place, int(rank), everyone, timeout_s, self._secret, transport=transport, toward=address
            )
        return Communicator(membership, timeout_s=timeout_s)


class _Place:
    """The `farandole.rendezvous.MeetingPlace` that all ranks have.

    Args:
        board: the actor.
        timeout_s: how long that may take to start: Ray may have to start a node for it.
    """

    def __init__(self, board: Any, timeout_s: float) -> None:
        self._board = board
        self._limit = time.monotonic() + timeout_s

    def set(self, key: str, value: str) -> str:
        """See `MeetingPlace`."""
        seconds = max(_ANSWERING_S, self._limit - time.monotonic())
        standing: str = _answer(self._board.set.remote(key, value), seconds)
        return standing

    def get_all(self, keys: Sequence[str], timeout_s: float, *, unless: Sequence[str] = ()) -> list[str | None]:
        """See `MeetingPlace`."""
        answer = self._board.get_all.remote(list(keys), timeout_s, list(unless))
        values: list[str | None] = _answer(answer, timeout_s + _ANSWERING_S)
        return values


class _Board:
    """The key-value store, an actor of Ray."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = asyncio.Condition()

    async def set(self, key: str, value: str) -> str:
        """See `MeetingPlace`."""
        async with self._changed:
            standing = self._values.setdefault(key, value)
            self._changed.notify_all()
        return standing

    async def get_all(self, keys: list[str], timeout_s: float, unless: list[str]) -> list[str | None]:
        """See `MeetingPlace`."""

        def is_settled() -> bool:
            return all(key in self._values for key in keys) or any(key in self._values for key in unless)

        async with self._changed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(is_settled), timeout_s)
            return [self._values.get(key) for key in keys]


def _answer(reference: Any, timeout_s: float) -> Any:
    import ray

    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise RendezvousError(
            f"the place where the ranks of this group meet, an actor of Ray, has not answered for {timeout_s:.3g} s; "
            f"has Ray started it (ray list actors), and is its node there?"
        ) from error
    except ray.exceptions.RayError as error:
        raise RendezvousError(
            f"the place where the ranks of this group meet does not answer ({type(error).__name__}: {error}); has its "
            f"driver ended, or let go of the Group?"
        ) from error


def _transport() -> Transport:
    if os.environ.get(TRANSPORT) == "mpi":
        raise RendezvousError(f"{TRANSPORT} is mpi, and MPI does not know what Ray has started; unset it")
    return transport_from(os.environ)


def _name_of_work() -> str:
    """Of the actor that this is, or of the task; the same in another process, if Ray starts it again."""
    import ray

    context = ray.get_runtime_context()
    return str(context.get_actor_id() or context.get_task_id())


def _address_of_node() -> str:
    import ray

    address: str = ray.util.get_node_ip_address()
    return address
