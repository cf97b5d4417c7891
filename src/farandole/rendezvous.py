"""How the ranks of a job find one another and come to share memory.

`join` reads who this process is from the environment, meets the others at the job's store, and returns a `Membership`:
the shared arena and everyone's process. Rank 0 makes the arena as an anonymous file (a memfd), which has no name that
could be left behind; the others open it through rank 0's process, which only the same user may, and check a random
number in it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import farandole._native as _native
from farandole.calibration import Calibration, calibration_in_use
from farandole.errors import RendezvousError
from farandole.store import Address, StoreClient, StoreServer

__all__ = [
    "MAX_WORLD_SIZE",
    "Identity",
    "MeetingPlace",
    "Membership",
    "identity_from",
    "join",
    "join_alone",
    "join_at",
    "join_threads",
    "tell_of_end",
]

MAX_WORLD_SIZE = 256
"""Ranks that one host is asked to run; more would exhaust it long before they met."""

_LONGEST_WAIT_S = 2e6
"""What the system calls take at most: 23 days."""

_RETRY_S = 0.05
_TELLING_S = 10.0
_LONGEST_REASON = 1000

_SERVED_MEETING = "meeting"
"""The key that says which meeting a store is for, if rank 0 serves it."""

_JOINED = "joined"
"""The verdict on a meeting in which all ranks share memory; any other is the reason why it failed."""

_num_joins = 0
"""Meetings of this job that this process took part in. A meeting fails for all of its ranks or for none: so all count
alike, and the n-th that one rank comes to is the n-th of every other."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is in its job, and where the job meets.

    Attributes:
        rank, world_size: in the job.
        store: where the store is served.
        rank_0_serves: True if rank 0 serves the store, a new one for each meeting; else it is there as long as the job.
        secret: of the job.
    """

    rank: int
    world_size: int
    store: Address
    rank_0_serves: bool
    secret: bytes


def identity_from(environment: Mapping[str, str]) -> Identity | None:
    """Who the environment says this process is; None if it says nothing: then it is alone.

    ``farandole run`` sets RANK, WORLD_SIZE, FARANDOLE_RENDEZVOUS and FARANDOLE_SECRET. Without the latter two,
    MASTER_ADDR and MASTER_PORT tell where rank 0 serves the store.

    Raises:
        RendezvousError: a variable is missing or makes no sense, or torchrun set them.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise RendezvousError(f"RANK is {rank} and WORLD_SIZE is {world_size}; RANK must be in 0..WORLD_SIZE - 1")
    secret = environment.get("FARANDOLE_SECRET", "").encode()
    rank_0_serves = False
    if "TORCHELASTIC_RUN_ID" in environment and "FARANDOLE_RENDEZVOUS" not in environment:
        raise RendezvousError(
            "this process was started by torchrun, and farandole.init does not work under torchrun yet: its agent "
            "holds the port that rank 0 would serve on; use 'farandole run -n N' in place of 'torchrun "
            "--nproc-per-node N', or torch.distributed.init_process_group('farandole')"
        )
    if "FARANDOLE_RENDEZVOUS" in environment:
        host, _, text = environment["FARANDOLE_RENDEZVOUS"].rpartition(":")
        port = _port(text, "FARANDOLE_RENDEZVOUS")
    elif "MASTER_ADDR" in environment:
        host = environment["MASTER_ADDR"]
        port = _port(environment.get("MASTER_PORT", ""), "MASTER_PORT")
        rank_0_serves = True
    else:
        raise RendezvousError(
            "RANK and WORLD_SIZE are set, but MASTER_ADDR is not; start with 'farandole run' (in place of torchrun or "
            "mpirun), or set MASTER_ADDR and MASTER_PORT"
        )
    host = host.strip("[]")
    if not secret and not _is_loopback(host):
        raise RendezvousError(
            f"the ranks meet at {host}, which others can reach, and FARANDOLE_SECRET is not set; set it to the same "
            f"long random text on all ranks"
        )
    return Identity(rank, world_size, (host, port), rank_0_serves, secret)


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
                arena, nonce = _create_arena(len(ranks))
                offer = [os.getpid(), arena.descriptor, nonce]
            except Exception as error:
                problem = _words(error)
        offers = exchange(offer)
        if ranks and any(offers[ranks[0]]):  # else its first rank says why
            try:
                membership = Membership(
                    ranks.index(self.rank),
                    len(ranks),
                    arena or _map_arena(*offers[ranks[0]]),
                    tuple(self.processes[rank] for rank in ranks),
                    tuple(self.job_ranks[rank] for rank in ranks),
                    self.calibration,
                )
            except Exception as error:
                problem = _words(error)
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
    text = problem[:_LONGEST_REASON].encode()
    sizes = [size for (size,) in exchange([len(text)])]
    if any(sizes):
        rank = next(rank for rank, size in enumerate(sizes) if size)
        why = bytes(exchange(list(text.ljust(max(sizes))))[rank][: sizes[rank]]).decode()
        raise RendezvousError(f"rank {rank} could not join its new group: {why}")


def join_alone() -> Membership:
    """A world of one."""
    arena, _ = _create_arena(1)
    arena.close_descriptor()
    return Membership(0, 1, arena, (os.getpid(),), (0,), calibration_in_use())


def join_threads(world_size: int) -> list[Membership]:
    """A membership per rank, all of them in this process."""
    arena, _ = _create_arena(world_size)
    arena.close_descriptor()
    everyone = tuple(range(world_size))
    processes, calibration = (os.getpid(),) * world_size, calibration_in_use()
    return [Membership(rank, world_size, arena, processes, everyone, calibration) for rank in everyone]


def join(identity: Identity, timeout_s: float) -> Membership:
    """Meet the other ranks of the job.

    Args:
        identity: who this process is.
        timeout_s: how long to wait for them.

    Raises:
        RendezvousError: some did not come, two have the same rank, the world sizes differ, or they share no memory;
            or one of the others gave up on this meeting.
    """
    global _num_joins
    timeout_s = min(timeout_s, _LONGEST_WAIT_S)
    limit = time.monotonic() + timeout_s
    number = _num_joins
    with contextlib.ExitStack() as stack:
        store: StoreServer | StoreClient
        if identity.rank_0_serves and identity.rank == 0:
            store = StoreServer(identity.store, identity.secret)
            stack.callback(store.close)
            _num_joins = number + 1  # first: nobody else counts this meeting before it is served
            store.set(_SERVED_MEETING, str(number))
        else:
            store = _connect(identity, number, limit, timeout_s)
            stack.callback(store.close)
            _num_joins = number + 1
        return _meet(_Meeting(store, identity, number, limit, timeout_s))


def join_at(store: MeetingPlace, rank: int, job_ranks: Sequence[int], timeout_s: float) -> Membership:
    """Meet the other ranks of a group at a key-value store that all of them have, and that outlives the meeting.

    Args:
        store: with no keys in it yet, but those of this meeting.
        rank: of this process in the group.
        job_ranks: per rank of the group, its rank in the job.
        timeout_s: how long to wait for the others.

    Raises:
        RendezvousError: as `join`.
    """
    identity = Identity(rank, len(job_ranks), ("", 0), rank_0_serves=False, secret=b"")
    timeout_s = min(timeout_s, _LONGEST_WAIT_S)
    meeting = _Meeting(store, identity, 0, time.monotonic() + timeout_s, timeout_s, counted=False)
    return _meet(meeting, job_ranks)


def _connect(identity: Identity, number: int, limit: float, timeout_s: float) -> StoreClient:
    """A connection to the store of this meeting. That of the one before may still be served at the same address, until
    all ranks have left it."""
    global _num_joins
    while True:
        client = StoreClient(identity.store, identity.secret, timeout_s, limit=limit)
        if not identity.rank_0_serves:
            return client
        try:
            served = client.get(_SERVED_MEETING, max(0.0, limit - time.monotonic()))
        except RendezvousError:  # it has just closed
            served = None
        if served == str(number):
            return client
        client.close()
        if served is not None and int(served) > number:
            _num_joins = int(served)
            raise RendezvousError(
                "rank 0 has given up on this meeting, as this rank did not come in time; call farandole.init() again"
            )
        if time.monotonic() > limit:
            raise RendezvousError(f"rank {identity.rank} waited {timeout_s:g} s for rank 0 to serve the next meeting")
        time.sleep(_RETRY_S)


def tell_of_end(store: StoreServer, rank: int) -> None:
    """Let ranks that wait for ``rank``, or will, know that its process has ended with exit code 0."""
    store.set(_ended_key(rank), "0")


def _ended_key(rank: int) -> str:
    return f"ended/{rank}"


class MeetingPlace(Protocol):
    """A key-value store, as a meeting needs it."""

    def set(self, key: str, value: str) -> str:
        """Give ``key`` a value, unless it has one. Returns the value that stands."""

    def get_all(self, keys: Sequence[str], timeout_s: float, *, unless: Sequence[str] = ()) -> list[str | None]:
        """The values of all keys, once all have one; what there is when the time is over, or once one of ``unless``
        has a value."""


@dataclass(frozen=True, slots=True)
class _Meeting:
    """One meeting at the store, as one rank sees it. A job may have several: each has its own keys.

    Attributes:
        store: where the ranks meet; what rank 0 serves, it speaks to without a connection.
        identity: of this rank.
        number: of the meeting.
        limit: what time.monotonic() says when this rank has waited for ``timeout_s``.
        counted: whether it is one of those of `join`, which are counted, and where a launcher may say which ranks have
            ended.
    """

    store: MeetingPlace
    identity: Identity
    number: int
    limit: float
    timeout_s: float
    counted: bool = True

    def set(self, phase: str, value: str = "yes") -> str:
        """Say that this rank is through ``phase``. Returns the value that stands."""
        return self.store.set(f"{self.number}/{phase}/{self.identity.rank}", value)

    def get_all(self, phase: str, did: str) -> list[str]:
        """What every rank has set for ``phase``, once all have.

        Raises:
            RendezvousError: not all have in time, or some never will.
        """
        ended = [_ended_key(rank) for rank in range(self.identity.world_size) if self.counted]
        values = self._wait(phase, unless=[self._verdict, *ended])
        missing = [rank for rank, value in enumerate(values) if value is None]
        if missing and self.counted:
            self._require_all_alive()
        (verdict,) = self.store.get_all([self._verdict], 0)
        if verdict not in (None, _JOINED):
            raise RendezvousError(verdict)
        if missing:
            raise RendezvousError(
                f"rank {self.identity.rank} waited {self.timeout_s:g} s; of {self.identity.world_size} ranks these "
                f"have not {did}: {', '.join(map(str, missing))}"
            )
        return [value for value in values if value is not None]

    def agree(self) -> None:
        """Join if all do: the first to see that all can, or to give up, decides for everyone.

        Raises:
            RendezvousError: the meeting has failed.
        """
        self.set("mapped")
        try:
            self.get_all("mapped", "mapped the shared memory")
        except RendezvousError as error:
            if self.give_up(error) == _JOINED:  # all had mapped it after all
                return
            raise
        verdict = self.store.set(self._verdict, _JOINED)
        if verdict != _JOINED:
            raise RendezvousError(verdict)

    def give_up(self, error: BaseException) -> str | None:
        """Say why this rank cannot join, so that the others need not wait for it. Returns the verdict that stands;
        None where nobody can be told."""
        store, identity = self.store, self.identity
        reason = f"rank {identity.rank} could not join: {_words(error)}"[:_LONGEST_REASON]
        try:
            with contextlib.ExitStack() as stack:
                if isinstance(store, StoreClient) and not isinstance(error, Exception):
                    # Ctrl-C may have cut off a request, and what answers that must not be taken for what answers this.
                    store = StoreClient(identity.store, identity.secret, _TELLING_S)
                    stack.callback(store.close)
                return store.set(self._verdict, reason)
        except RendezvousError:
            return None

    def part(self) -> None:
        """Leave a meeting that has succeeded. Rank 0, if it serves the store, or may do so, stays until all have: they
        must learn of it. If one takes too long, it has joined nevertheless."""
        if self.identity.rank_0_serves or not self.counted:
            with contextlib.suppress(RendezvousError):  # rank 0 has gone before
                self.set("left")
                if self.identity.rank == 0:
                    self._wait("left")

    @property
    def _verdict(self) -> str:
        return f"{self.number}/verdict"

    def _wait(self, phase: str, unless: Sequence[str] = ()) -> list[str | None]:
        keys = [f"{self.number}/{phase}/{rank}" for rank in range(self.identity.world_size)]
        return self.store.get_all(keys, max(0.0, self.limit - time.monotonic()), unless=unless)

    def _require_all_alive(self) -> None:
        codes = self.store.get_all([_ended_key(rank) for rank in range(self.identity.world_size)], 0)
        for rank, code in enumerate(codes):
            if code is not None:
                again, equally_often = (" again", " equally often") if self.number else ("", "")
                raise RendezvousError(
                    f"rank {rank} ended without joining{again} (exit code {code}); every rank must call "
                    f"farandole.init(){equally_often}"
                )


def _meet(meeting: _Meeting, job_ranks: Sequence[int] | None = None) -> Membership:
    global _num_joins
    identity = meeting.identity
    arena = membership = None
    offer: list[int] = []
    calibration = None
    is_stray = False
    try:
        if identity.rank == 0:
            arena, nonce = _create_arena(identity.world_size)
            offer = [os.getpid(), arena.descriptor, nonce]
            calibration = asdict(calibration_in_use())
        cores = sorted(os.sched_getaffinity(0))
        card = json.dumps(_Card(os.getpid(), identity.world_size, offer, cores, calibration)._asdict())
        standing = meeting.set("rank", card)
        if standing != card:
            is_stray = True
            other = _read_card(identity.rank, standing).process
            raise RendezvousError(
                f"two processes claim rank {identity.rank}: {os.getpid()} and {other}; give each its own RANK"
            )
        membership = _share_memory(meeting, arena, job_ranks or range(identity.world_size))
        meeting.agree()
        meeting.part()
    except BaseException as error:
        if is_stray:
            if meeting.counted:
                _num_joins = meeting.number  # it goes on without this process
            raise
        meeting.give_up(error)
        if membership is not None:
            membership.leave()
        raise
    membership.arena.close_descriptor()
    return membership


def _share_memory(meeting: _Meeting, arena: _native.Arena | None, job_ranks: Sequence[int]) -> Membership:
    """All that this rank needs to join, once all have come; ``arena`` is that of rank 0, on rank 0."""
    identity = meeting.identity
    cards = [_read_card(rank, text) for rank, text in enumerate(meeting.get_all("rank", "joined"))]
    sizes = {rank: card.world_size for rank, card in enumerate(cards)}
    if len(set(sizes.values())) > 1:
        raise RendezvousError(f"the ranks disagree on WORLD_SIZE: {sizes}")
    return Membership(
        identity.rank,
        identity.world_size,
        arena or _map_arena(*cards[0].arena),
        tuple(card.process for card in cards),
        tuple(job_ranks),
        replace(Calibration.from_fields(cards[0].calibration), cores=len(set().union(*(card.cores for card in cards)))),
    )


class _Card(NamedTuple):
    """What a rank says of itself where the ranks meet.

    Attributes:
        process: its number.
        world_size: as the rank was told.
        arena: of rank 0: process, descriptor and nonce of the arena; empty for others.
        cores: that its process may use.
        calibration: of rank 0.
    """

    process: int
    world_size: int
    arena: list[int]
    cores: list[int]
    calibration: Any


def _read_card(rank: int, text: str) -> _Card:
    """What rank ``rank`` says; nothing but numbers where there must be some."""
    try:
        card = _Card(**json.loads(text))
        numbers = [card.process, card.world_size, *card.arena, *card.cores]
        is_sound = all(type(number) is int for number in numbers) and len(card.arena) == (0 if rank else 3)
    except (TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise RendezvousError(
            f"what stands for rank {rank} where the ranks meet is not what a rank says: {text[:99]!r}"
        )
    return card


def _words(error: BaseException) -> str:
    if not isinstance(error, Exception):
        return f"it was interrupted ({type(error).__name__})"
    return str(error) or type(error).__name__


def _create_arena(world_size: int) -> tuple[_native.Arena, int]:
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


def _map_arena(process: int, descriptor: int, nonce: int) -> _native.Arena:
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


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None or not text.strip().lstrip("-").isdigit():
        raise RendezvousError(f"{name} is {text!r}; it must be a whole number (RANK and WORLD_SIZE are set together)")
    return int(text)


def _port(text: str, name: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise RendezvousError(f"{name} is {text!r}; it must give a port in 1..65535")
    return int(text)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
