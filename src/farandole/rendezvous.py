"""How the ranks of a job find one another and come to share memory.

`join` meets the others at the job's store, where every rank says who it is, and returns a `Membership`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import secrets
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from farandole.addresses import is_loopback
from farandole.calibration import Calibration, calibration_in_use
from farandole.connections import Connector, Tcp, Transport, Way
from farandole.cost_model import Link
from farandole.door import Address
from farandole.errors import RendezvousError
from farandole.hosts import HostProof, topology_from
from farandole.membership import LONGEST_REASON, Membership, Network, create_arena, map_arena, words
from farandole.store import StoreClient, StoreServer
from farandole.topology import Topology
from farandole.wire_probe import measure, wire_from

__all__ = [
    "MAX_WORLD_SIZE",
    "Identity",
    "card_key",
    "MeetingPlace",
    "join",
    "join_at",
    "next_meeting",
    "tell_of_end",
]

MAX_WORLD_SIZE = 256
"""Ranks that one host is asked to run; more would exhaust it long before they met."""

_LONGEST_WAIT_S = 2e6
"""What the system calls take at most: 23 days."""

_RETRY_S = 0.05
_TELLING_S = 10.0
_HEARING_S = 2.0

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
        transport: what connects its hosts.
        addresses: where other hosts reach this one, if that is known.
    """

    rank: int
    world_size: int
    store: Address
    rank_0_serves: bool
    secret: bytes
    transport: Transport = field(default_factory=Tcp)
    addresses: Sequence[str] | None = None


def next_meeting() -> int:
    """The number of the meeting that this process comes to next, as it counts them."""
    return _num_joins


def join(
    identity: Identity, timeout_s: float, *, server: StoreServer | None = None, number: int | None = None
) -> Membership:
    """Meet the other ranks of the job.

    Args:
        identity: who this process is.
        timeout_s: how long to wait for them.
        server: on rank 0, if it serves the store: that, where it is served already; closed when the ranks have met.
        number: of the meeting, where rank 0 has told it; else all count alike.

    Raises:
        RendezvousError: some did not come, two have the same rank, the world sizes differ, or they share no memory;
            or one of the others gave up on this meeting.
    """
    global _num_joins
    timeout_s = min(timeout_s, _LONGEST_WAIT_S)
    limit = time.monotonic() + timeout_s
    number = _num_joins if number is None else number
    with contextlib.ExitStack() as stack:
        store: StoreServer | StoreClient
        if identity.rank_0_serves and identity.rank == 0:
            store = server or StoreServer(identity.store, identity.secret)
            stack.callback(store.close)
            _num_joins = number + 1  # first: nobody else counts this meeting before it is served
            store.set(_SERVED_MEETING, str(number))
        else:
            store = _connect(identity, number, limit, timeout_s)
            stack.callback(store.close)
            _num_joins = number + 1
        return _meet(_Meeting(store, identity, number, limit, timeout_s))


def join_at(
    store: MeetingPlace,
    rank: int,
    job_ranks: Sequence[int],
    timeout_s: float,
    secret: bytes,
    *,
    transport: Transport | None = None,
    toward: str = "",
    addresses: Sequence[str] | None = None,
) -> Membership:
    """Meet the other ranks of a group at a key-value store that all of them have, and that outlives the meeting.

    Args:
        store: with no keys in it yet, but those of this meeting.
        rank: of this process in the group.
        job_ranks: per rank of the group, its rank in the job.
        timeout_s: how long to wait for the others.
        secret: of the job; empty if there is none.
        transport: what connects hosts; None: TCP.
        toward: a host of the job, or the address of this one that others know, see `own_addresses`.
        addresses: where other hosts reach this one, if that is known.

    Raises:
        RendezvousError: as `join`.
    """
    identity = Identity(rank, len(job_ranks), (toward, 0), False, secret, transport or Tcp(), addresses)
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


def tell_of_end(store: StoreServer, rank: int, code: int = 0) -> None:
    """Let ranks that wait for ``rank``, or will, know that its process has ended with that exit code."""
    store.set(_ended_key(rank), str(code))


def _ended_key(rank: int) -> str:
    return f"ended/{rank}"


def card_key(rank: int, meeting: int = 0) -> str:
    """The key of what a rank says of itself, where it has come to a meeting."""
    return f"{meeting}/rank/{rank}"


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
        self._require_no_failure()
        if missing:
            raise RendezvousError(
                f"rank {self.identity.rank} waited {self.timeout_s:g} s; of {self.identity.world_size} ranks these "
                f"have not {did}: {', '.join(map(str, missing))}"
            )
        return [value for value in values if value is not None]

    def require_going(self) -> None:
        """Raise if this meeting has failed, or never can succeed.

        Raises:
            RendezvousError: it has.
        """
        if self.counted:
            self._require_all_alive()
        self._require_no_failure()

    def _require_no_failure(self) -> None:
        (verdict,) = self.store.get_all([self._verdict], 0)
        if verdict not in (None, _JOINED):
            raise RendezvousError(verdict)

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
        reason = f"rank {identity.rank} could not join: {words(error)}"[:LONGEST_REASON]
        try:
            with contextlib.ExitStack() as stack:
                if isinstance(store, StoreClient) and not isinstance(error, Exception):
                    # Ctrl-C may have cut off a request, and what answers that must not be taken for what answers this.
                    store = StoreClient(identity.store, identity.secret, _TELLING_S)
                    stack.callback(store.close)
                return store.set(self._verdict, reason)
        except RendezvousError:
            return None

    def part_in_failure(self) -> None:
        """Leave a meeting that has failed. Rank 0, if it serves the store, stays a moment, so that all who have come
        can hear of it: its process may be about to end."""
        with contextlib.suppress(RendezvousError):
            self.set("left")
            if self.identity.rank_0_serves and self.identity.rank == 0:
                everyone = range(self.identity.world_size)
                cards = self.store.get_all([card_key(rank, self.number) for rank in everyone], 0)
                present = [f"{self.number}/left/{rank}" for rank, card in enumerate(cards) if card is not None]
                self.store.get_all(present, _HEARING_S)

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
    membership = None
    is_stray = False
    with contextlib.ExitStack() as stack:
        try:
            arrival = stack.enter_context(contextlib.closing(_Arrival(meeting)))
            card = arrival.card()
            standing = meeting.set("rank", card)
            if standing != card:
                is_stray = True
                other = _read_card(identity.rank, standing).process
                raise RendezvousError(
                    f"two processes claim rank {identity.rank}: {os.getpid()} and {other}; give each its own RANK"
                )
            membership = arrival.join(job_ranks or range(identity.world_size))
            meeting.agree()
            meeting.part()
        except BaseException as error:
            if is_stray:
                if meeting.counted:
                    _num_joins = meeting.number  # it goes on without this process
                raise
            meeting.give_up(error)  # before the others no longer find what this rank shows them
            if isinstance(error, Exception):
                meeting.part_in_failure()
            if membership is not None:
                membership.leave()
            raise
    membership.arena.close_descriptor()
    return membership


class _Arrival:
    """What a rank shows, sees and opens on its way into the group.

    Raises:
        RendezvousError: this process may open no more files.
    """

    def __init__(self, meeting: _Meeting) -> None:
        self._meeting = meeting
        self._identity = meeting.identity
        self._door: Connector | None = None
        try:
            self._proof = HostProof.offer()
        except OSError as error:
            raise RendezvousError(f"cannot make a file in memory: {error}; raise the limit with ulimit -n") from error

    def close(self) -> None:
        """Nobody needs to look any more, nor to come."""
        self._proof.withdraw()
        if self._door is not None:
            self._door.close()

    def card(self) -> str:
        """What this rank says of itself."""
        is_first = self._identity.rank == 0
        card = _Card(
            _version(),
            os.getpid(),
            self._identity.world_size,
            [*self._proof],
            sorted(os.sched_getaffinity(0)),
            asdict(calibration_in_use()) if is_first else None,
            secrets.token_hex(32) if is_first and not self._identity.secret else "",
        )
        return json.dumps(card._asdict())

    def join(self, job_ranks: Sequence[int]) -> Membership:
        """All that this rank needs to join, once all have come."""
        meeting, identity = self._meeting, self._identity
        cards = [_read_card(rank, text) for rank, text in enumerate(meeting.get_all("rank", "joined"))]
        _require_alike("the ranks disagree on WORLD_SIZE", [card.world_size for card in cards])
        _require_alike("the ranks run different versions of farandole", [card.version for card in cards])
        proofs = [HostProof(*card.proof) for card in cards]
        mates = [rank for rank, proof in enumerate(proofs) if self._proof.is_shared_with(proof)]
        meeting.require_going()  # a rank that has given up shows nothing any more
        arena = None
        offer: list[int] = []
        if mates[0] == identity.rank:
            arena, nonce = create_arena(identity.world_size, is_one_host=len(mates) == identity.world_size)
            offer = [os.getpid(), arena.descriptor, nonce]
        secret = identity.secret or cards[0].secret.encode()
        if len(mates) < identity.world_size:
            toward = identity.store[0] or os.environ.get("MASTER_ADDR", "")
            self._door = identity.transport.open(identity.rank, secret, addresses=identity.addresses, toward=toward)
        way = Way((), 0) if self._door is None else self._door.way
        meeting.set(
            "host", json.dumps(_HostCard(mates, offer, [*way.addresses], way.port, identity.transport.name)._asdict())
        )
        others = [_read_host_card(rank, text) for rank, text in enumerate(meeting.get_all("host", "found its host"))]
        _require_one_transport([card.transport for card in others])
        topology = topology_from([card.mates for card in others], proofs)
        arena = arena or map_arena(*others[mates[0]].arena)
        network = None
        calibration = Calibration.from_fields(cards[0].calibration)
        if self._door is not None:
            ways = [
                None if rank in mates else Way(tuple(card.addresses), card.port) for rank, card in enumerate(others)
            ]
            token = f"{others[0].arena[2]:x}"
            network = Network(
                topology,
                tuple(proof.host_name for proof in proofs),
                tuple(tuple(card.addresses) for card in others),
                secret,
                identity.transport,
                token,
                self._door.connect(token, ways, meeting.limit, meeting.require_going),
            )
            calibration = replace(calibration, wire=self._measured_wire(network))
        if identity.rank == 0 and not identity.secret:
            _warn_without_secret(identity.store[0], topology)
        cores = min(_cores_of(topology.ranks_on(host), cards) for host in range(topology.num_hosts))
        return Membership(
            identity.rank,
            identity.world_size,
            arena,
            tuple(card.process for card in cards),
            tuple(job_ranks),
            replace(calibration, cores=cores),
            network,
        )

    def _measured_wire(self, network: Network) -> Link:
        """What the first ranks of all hosts find, each with those of the next host and the one before; for all ranks
        the same."""
        topology, own = network.topology, self._identity.rank
        self._meeting.set("connected")
        self._meeting.get_all("connected", "connected with the others")
        firsts = [topology.ranks_on(host)[0] for host in range(topology.num_hosts)]
        figures: list[float] = []
        if own in firsts:
            place = firsts.index(own)
            following, preceding = (firsts[(place + step) % len(firsts)] for step in (1, -1))
            figures = measure(network.connections[following], network.connections[preceding], self._meeting.limit)
        self._meeting.set("wire", json.dumps(figures))
        texts = self._meeting.get_all("wire", "measured the wire")
        return wire_from([_read_figures(rank, text) for rank, text in enumerate(texts)])


def _version() -> str:
    try:
        return importlib.metadata.version("farandole")
    except importlib.metadata.PackageNotFoundError:
        return "that is not installed"


def _require_alike(problem: str, values: Sequence[Any]) -> None:
    if len(set(values)) > 1:
        raise RendezvousError(f"{problem}: {dict(enumerate(values))}")


def _cores_of(ranks: Sequence[int], cards: Sequence[_Card]) -> int:
    return len(set().union(*(cards[rank].cores for rank in ranks)))


def _require_one_transport(names: Sequence[str]) -> None:
    if len(set(names)) > 1:
        raise RendezvousError(
            f"the ranks disagree on FARANDOLE_TRANSPORT: {dict(enumerate(names))}; set it alike on all (Open MPI hands "
            f"it to other hosts with mpirun -x FARANDOLE_TRANSPORT)"
        )


def _warn_without_secret(store_host: str, topology: Topology) -> None:
    if topology.is_one_host and (not store_host or is_loopback(store_host)):
        return
    where = f"and meets at {store_host}, which others can reach," if topology.is_one_host else "on several hosts"
    warnings.warn(
        f"this job runs {where} without a secret: whoever can reach the place where its ranks meet can take part in "
        f"it. Give all ranks the same long random text in FARANDOLE_SECRET, or in a file (chmod 600) that "
        f"FARANDOLE_SECRET_FILE names.",
        RuntimeWarning,
        stacklevel=2,
    )


class _Card(NamedTuple):
    """What a rank says of itself where the ranks meet.

    Attributes:
        version: of farandole.
        process: its number.
        world_size: as the rank was told.
        proof: see `HostProof`.
        cores: that its process may use.
        calibration: of rank 0.
        secret: of rank 0, where the job has none yet: whoever can read this is trusted.
    """

    version: str
    process: int
    world_size: int
    proof: list[Any]
    cores: list[int]
    calibration: Any
    secret: str


class _HostCard(NamedTuple):
    """What a rank says of its host.

    Attributes:
        mates: the ranks that it shares memory with, itself included.
        arena: of the first of them: process, descriptor and nonce of the arena; empty for others.
        addresses, port: where ranks of other hosts find its door; none and 0 if there are no other hosts.
        transport: the name of that between hosts.
    """

    mates: list[int]
    arena: list[int]
    addresses: list[str]
    port: int
    transport: str


def _read_card(rank: int, text: str) -> _Card:
    """What rank ``rank`` says; nothing but numbers where there must be some."""
    try:
        card = _Card(**json.loads(text))
        is_sound = _are_numbers([card.process, card.world_size, *card.cores], 2**63)
        is_sound &= _are_numbers([*card.proof[:2], card.process - 1], 2**31 - 1)
        is_sound &= len(card.proof) == len(HostProof._fields) and all(type(one) is str for one in card.proof[2:])
        is_sound &= type(card.secret) is str and type(card.version) is str
    except (TypeError, ValueError, RecursionError):
        is_sound = False
    if not is_sound:
        raise RendezvousError(
            f"what stands for rank {rank} where the ranks meet is not what a rank says: {text[:99]!r}"
        )
    return card


def _read_host_card(rank: int, text: str) -> _HostCard:
    try:
        card = _HostCard(**json.loads(text))
        is_first = card.mates[0] == rank
        is_sound = _are_numbers([*card.mates, *card.arena], 2**63) and _are_numbers(card.arena[:2], 2**31)
        is_sound &= len(card.arena) == (3 if is_first else 0) and rank in card.mates
        is_sound &= all(type(one) is str for one in [card.transport, *card.addresses]) and _are_numbers(
            [card.port], 2**16
        )
    except (TypeError, ValueError, LookupError, RecursionError):
        is_sound = False
    if not is_sound:
        raise RendezvousError(
            f"what stands for the host of rank {rank} where the ranks meet is not what a rank says: {text[:99]!r}"
        )
    return card


def _read_figures(rank: int, text: str) -> list[float]:
    try:
        figures = json.loads(text)
        is_sound = len(figures) in (0, 2) and all(type(one) is float and 0 < one < 1e15 for one in figures)
    except (TypeError, ValueError, RecursionError):
        is_sound = False
    if not is_sound:
        raise RendezvousError(
            f"what stands for the wire of rank {rank} where the ranks meet is no measure: {text[:99]!r}"
        )
    return [*figures]


def _are_numbers(values: Sequence[Any], limit: int) -> bool:
    return all(type(value) is int and 0 <= value < limit for value in values)
