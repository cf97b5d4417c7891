"""A rank's place in its group: the arena that it shares with the ranks of its host, their processes, and connections to
the ranks of other hosts.

The first rank of each host makes its arena as an anonymous file (a memfd), which has no name that could be left behind;
the others there open it through that rank's process, which only the same user may, and check a random number in it.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import farandole._native as _native
from farandole.calibration import Calibration, calibration_in_use
from farandole.connections import Connector, Tcp, Transport, Way
from farandole.errors import RendezvousError
from farandole.hosts import open_memory_of
from farandole.topology import Topology

__all__ = ["LONGEST_REASON", "Membership", "create_arena", "join_alone", "join_threads", "map_arena", "words"]

LONGEST_REASON = 1000
"""Characters of what one rank tells the others of its failure."""


@dataclass(frozen=True, slots=True)
class Membership:
    """A rank's place in a group.

    Attributes:
        rank, world_size: in the group.
        arena: what the ranks of this host share.
        processes: per rank, its process id, on its host.
        job_ranks: per rank, its rank in the job.
        calibration: what communication costs here; the same on all ranks.
        network: of a group on several hosts; None where all are on one.

    Raises:
        RendezvousError: this process may not open as many files as it needs to watch the others.
    """

    rank: int
    world_size: int
    arena: _native.Arena
    processes: tuple[int, ...]
    job_ranks: tuple[int, ...]
    calibration: Calibration
    network: Network | None = None
    _descriptors: list[int] = field(init=False, repr=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        try:
            for rank, process in enumerate(self.processes):
                is_watched = process != os.getpid() and self.is_on_this_host(rank)
                self._descriptors.append(_open_process(process) if is_watched else -1)
        except OSError as error:
            raise RendezvousError(
                f"cannot watch the processes of {self.world_size} ranks: {error}; raise the limit with ulimit -n"
            ) from error

    def is_on_this_host(self, rank: int) -> bool:
        """Whether ``rank`` shares memory with this rank."""
        return self.network is None or self.network.topology.share_a_host(rank, self.rank)

    @property
    def topology(self) -> Topology:
        """Which ranks share a host."""
        return Topology.one_host(self.world_size) if self.network is None else self.network.topology

    def among(self, ranks: Sequence[int], arena: _native.Arena, network: Network | None = None) -> Membership:
        """This rank's place in a new group of ``ranks`` of this one, in that order."""
        return Membership(
            ranks.index(self.rank),
            len(ranks),
            arena,
            tuple(self.processes[rank] for rank in ranks),
            tuple(self.job_ranks[rank] for rank in ranks),
            self.calibration,
            network,
        )

    def make_engine(self, **tuning: int) -> _native.Engine:
        """This rank's engine; once, as it takes over what this holds open."""
        connections = [] if self.network is None else self.network.hand_over_connections()
        processes = self.open_process_descriptors()
        try:
            return _native.Engine(self.arena, self.rank, processes, connections=connections, **tuning)
        except RuntimeError as error:
            raise RendezvousError(f"cannot serve the other hosts: {error}; raise the limit with ulimit -n") from error

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
        self.make_engine().close()

    def split(
        self,
        ranks: Sequence[int],
        exchange: Callable[[Sequence[int]], list[list[int]]],
        timeout_s: float,
        require_going: Callable[[], None],
    ) -> Membership | None:
        """A new membership for the ranks of this group that are in ``ranks``; None for the others. Called by all ranks.

        Args:
            ranks: in their new order, or none; the new group of this rank.
            exchange: gathers equally many integers from every rank of this group.
            timeout_s: how long the ranks of different hosts may take to connect.
            require_going: raises once this group has failed.

        Raises:
            RendezvousError: on every rank, if any of them could not join its new group.
        """
        founding = _Founding(self, ranks)
        membership = None
        problem = ""
        offer = [0] * _Founding.OFFER_SIZE
        try:
            try:
                offer = founding.offer()
            except Exception as error:
                problem = words(error)
            offers = exchange(offer)
            if ranks and all(any(offers[rank]) for rank in ranks):  # else one of them says why
                try:
                    membership = founding.join(offers, timeout_s, require_going)
                except Exception as error:
                    problem = words(error)
            _require_no_problem(problem, exchange)
        except BaseException:
            if membership is not None:
                membership.leave()
            raise
        finally:
            founding.close()
        if membership is not None:
            membership.arena.close_descriptor()
        return membership


@dataclass(frozen=True, slots=True)
class Network:
    """What a group on several hosts has besides.

    Attributes:
        topology: which ranks share a host.
        host_names: per rank.
        addresses: per rank, where its host can be reached.
        secret: of the job.
        transport: what connects hosts.
        token: tells this group from any other; the same on all hosts.
        connections: per rank a connected socket, of this process; -1 for ranks of this host.
    """

    topology: Topology
    host_names: tuple[str, ...]
    addresses: tuple[tuple[str, ...], ...]
    secret: bytes = field(repr=False)
    transport: Transport
    token: str
    connections: list[int] = field(repr=False, compare=False)

    def __del__(self) -> None:
        for connection in self.connections:  # of a group that was not made after all
            os.close(connection)

    def hand_over_connections(self) -> list[int]:
        """The connections, which from now on are the caller's to close."""
        handed = self.connections.copy()
        self.connections.clear()
        return handed


class _Founding:
    """How this rank founds a new group with others of its group."""

    OFFER_SIZE = 5

    def __init__(self, old: Membership, ranks: Sequence[int]) -> None:
        self._old = old
        self._ranks = ranks
        self._mates = [rank for rank in ranks if old.is_on_this_host(rank)]
        self._arena: _native.Arena | None = None
        self._door: Connector | None = None

    def offer(self) -> list[int]:
        """What the others must know: OFFER_SIZE integers, not all of them 0."""
        arena = [0, 0, 0]
        port = 0
        if self._mates and self._mates[0] == self._old.rank:
            self._arena, nonce = create_arena(len(self._ranks), is_one_host=len(self._mates) == len(self._ranks))
            arena = [os.getpid(), self._arena.descriptor, nonce]
        network = self._old.network
        if network is not None and len(self._mates) < len(self._ranks):
            own = self._old.rank
            new = self._ranks.index(own)
            self._door = network.transport.open(new, network.secret, addresses=network.addresses[own])
            port = self._door.way.port
        return [1, *arena, port]

    def join(self, offers: list[list[int]], timeout_s: float, require_going: Callable[[], None]) -> Membership:
        """Take what the others offer."""
        old, ranks = self._old, self._ranks
        arena = self._arena or map_arena(*offers[self._mates[0]][1:4])
        network = None
        if old.network is not None and self._door is not None:
            whole = old.network
            ways = [
                None if old.is_on_this_host(rank) else Way(whole.addresses[rank], offers[rank][4]) for rank in ranks
            ]
            token = f"{offers[ranks[0]][3]:x}"
            network = Network(
                Topology.of_hosts(whole.topology.host_of[rank] for rank in ranks),
                tuple(whole.host_names[rank] for rank in ranks),
                tuple(whole.addresses[rank] for rank in ranks),
                whole.secret,
                whole.transport,
                token,
                self._door.connect(token, ways, time.monotonic() + timeout_s, require_going),
            )
        return old.among(ranks, arena, network)

    def close(self) -> None:
        """Nobody comes any more."""
        if self._door is not None:
            self._door.close()


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


def join_threads(topology: Topology) -> list[Membership]:
    """A membership per rank, all of them in this process; those on different hosts share no memory."""
    everyone = range(topology.world_size)
    arenas = []
    for _ in range(topology.num_hosts):
        arena, _ = create_arena(topology.world_size, is_one_host=topology.is_one_host)
        arena.close_descriptor()
        arenas.append(arena)
    networks: list[Network | None] = [None for _ in everyone]
    if not topology.is_one_host:
        secret, addresses = secrets.token_bytes(32), (("127.0.0.1",),) * topology.world_size
        names = tuple(f"host{host}" for host in topology.host_of)
        sockets = _connected_threads(topology)
        token = secrets.token_hex(8)
        networks = [Network(topology, names, addresses, secret, Tcp(), token, sockets[rank]) for rank in everyone]
    processes, calibration = (os.getpid(),) * topology.world_size, calibration_in_use()
    return [
        Membership(
            rank,
            topology.world_size,
            arenas[topology.host_of[rank]],
            processes,
            tuple(everyone),
            calibration,
            networks[rank],
        )
        for rank in everyone
    ]


def _connected_threads(topology: Topology) -> list[list[int]]:
    """Per rank, per rank on another host, a socket that is connected to the one of the other."""
    everyone = range(topology.world_size)
    sockets = [[-1 for _ in everyone] for _ in everyone]
    for rank in everyone:
        for other in range(rank):
            if topology.host_of[rank] != topology.host_of[other]:
                pair = socket.socketpair()
                sockets[rank][other], sockets[other][rank] = (end.detach() for end in pair)
    return sockets


def create_arena(world_size: int, *, is_one_host: bool = True) -> tuple[_native.Arena, int]:
    """An arena for the ranks of one host of so many, and the number that tells it from others.

    Raises:
        RendezvousError: there is no room for it.
    """
    nonce = secrets.randbits(63)
    num_slots, slot_bytes = _geometry(world_size, is_one_host)
    try:
        arena = _native.Arena.create(world_size=world_size, num_slots=num_slots, slot_bytes=slot_bytes, nonce=nonce)
    except (RuntimeError, MemoryError) as error:
        raise RendezvousError(
            f"{error}; the memory that {world_size} ranks share takes an open file (see ulimit -n) and as much address "
            f"space (see ulimit -v)"
        ) from error
    return arena, nonce


def _geometry(world_size: int, is_one_host: bool) -> tuple[int, int]:
    """Slots per channel and bytes per slot. There are N x N channels for collectives, and nearly as many for messages,
    so slots shrink as worlds grow. Between hosts smaller ones lie closer together on the wire, and more of them are
    needed to fill it."""
    num_channels = world_size * world_size
    num_slots, slot_bytes = (4, 256 * 1024) if is_one_host else (8, 64 * 1024)
    while slot_bytes > 8 * 1024 and num_channels * num_slots * slot_bytes > 64 * 1024 * 1024:
        slot_bytes //= 2
    return num_slots, slot_bytes


def map_arena(process: int, descriptor: int, nonce: int) -> _native.Arena:
    """The arena that ``process`` offers, if it is one, is this user's, and has no name that others could open."""
    try:
        own = open_memory_of(process, descriptor)
    except (OSError, RuntimeError) as error:
        raise RendezvousError(f"cannot open the shared memory of process {process}: {error}") from error
    try:
        arena = _native.Arena.map(own)
    except RuntimeError as error:
        os.close(own)
        raise RendezvousError(str(error)) from error
    if arena.nonce != nonce:
        raise RendezvousError(
            f"process {process} on this host is not the rank it should be: it has the memory of another group"
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
