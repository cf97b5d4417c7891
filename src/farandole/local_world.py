"""A world in one process: ranks as threads, on the same engine. For notebooks and tests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from farandole.communicator import DEFAULT_TIMEOUT_S, Communicator, is_whole
from farandole.errors import ArgumentError, CommunicationError, CommunicatorClosedError
from farandole.membership import join_threads
from farandole.rendezvous import MAX_WORLD_SIZE
from farandole.topology import Topology

__all__ = ["LocalWorld", "local"]

T = TypeVar("T")


class LocalWorld(Sequence[Communicator]):
    """The communicators of all ranks of a world in this process, in order of rank; made by `local`."""

    def __init__(self, topology: Topology, timeout_s: float) -> None:
        self._communicators = [Communicator(m, timeout_s=timeout_s) for m in join_threads(topology)]

    def run(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """Call ``function(communicator, *arguments)`` once per rank, each in a thread of its own.

        Returns:
            What each rank returned, in order of rank.

        Raises:
            Exception: the first that a rank raised. The communicators are then aborted, so that no other rank waits
            for it.
        """
        results: list[Any] = [None] * len(self)
        failures: list[tuple[int, BaseException]] = []
        lock = threading.Lock()

        def call(rank: int) -> None:
            try:
                results[rank] = function(self[rank], *arguments)
            except BaseException as error:
                with lock:
                    failures.append((rank, error))
                self[rank].abort()

        threads = [threading.Thread(target=call, args=(rank,), name=f"rank {rank}") for rank in range(len(self))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self[0].abort()  # Ctrl-C in a notebook: let the ranks go
            raise
        if failures:
            # What others raised because a rank had failed before is a consequence, not the cause.
            causes = [f for f in failures if not isinstance(f[1], CommunicatorClosedError)] or failures
            rank, error = causes[0]
            if hasattr(error, "add_note"):
                error.add_note(f"raised on rank {rank} of {len(self)}")
            raise error
        return results

    def close(self) -> None:
        """Close all communicators."""
        with contextlib.ExitStack() as stack:  # also if one of them raises
            for communicator in self._communicators:
                stack.callback(communicator.close)

    def __getitem__(self, rank: Any) -> Any:
        return self._communicators[rank]

    def __len__(self) -> int:
        return len(self._communicators)

    def __iter__(self) -> Iterator[Communicator]:
        return iter(self._communicators)

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(*([] if error is None else [CommunicationError])):  # the body's own error comes first
            self.close()

    def __repr__(self) -> str:
        return f"<LocalWorld of {len(self)} ranks>"


def local(world_size: int, *, timeout_s: float = DEFAULT_TIMEOUT_S, hosts: str | Topology | None = None) -> LocalWorld:
    """A world of ``world_size`` ranks that are threads of this process.

    ::

        with farandole.local(4) as world:
            sums = world.run(lambda comm: comm.all_reduce(np.full(3, comm.rank, dtype="f4")))

    Args:
        world_size: number of ranks, >= 1.
        timeout_s: seconds that a blocking call waits where the call does not say otherwise.
        hosts: which ranks are to be as if on one host, as a `Topology` or in words ("2x2", "3+1", "0,1,0,1"); between
            hosts data travel through sockets. None: all of them.

    Raises:
        ArgumentError: world_size is not a whole number from 1 to `MAX_WORLD_SIZE`, or hosts are of other ranks.
    """
    if not is_whole(world_size, 1) or world_size > MAX_WORLD_SIZE:
        raise ArgumentError(f"world_size is {world_size!r}; it must be a whole number in 1..{MAX_WORLD_SIZE}")
    if not isinstance(hosts, (str, Topology, type(None))):
        raise ArgumentError(f"hosts is {hosts!r}; it must be a Topology, or text such as '2x2'")
    topology = Topology.parse(hosts) if isinstance(hosts, str) else hosts or Topology.one_host(int(world_size))
    if topology.world_size != world_size:
        raise ArgumentError(f"world_size is {world_size}, but hosts is {hosts}, which has {topology.world_size} ranks")
    return LocalWorld(topology, timeout_s)
