"""What a rank shows, sees and opens on its way into a group: its card, its host, connections to the others."""

from __future__ import annotations

import importlib.metadata
import json
import os
import secrets
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from farandole.addresses import is_loopback
from farandole.calibration import Calibration, calibration_in_use
from farandole.connections import Connector, Way
from farandole.cost_model import Link
from farandole.errors import RendezvousError
from farandole.hosts import HostProof, topology_from
from farandole.meeting import Meeting
from farandole.membership import Membership, Network, create_arena, map_arena
from farandole.topology import Topology
from farandole.wire_probe import measure, wire_from

__all__ = ["Arrival", "Card", "HostCard", "read_card", "version"]


class Arrival:
    """What a rank shows, sees and opens on its way into the group.

    Raises:
        RendezvousError: this process may open no more files.
    """

    def __init__(self, meeting: Meeting) -> None:
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
        card = Card(
            version(),
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
        cards = [read_card(rank, text) for rank, text in enumerate(meeting.get_all("rank", "joined"))]
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
            "host", json.dumps(HostCard(mates, offer, [*way.addresses], way.port, identity.transport.name)._asdict())
        )
        others = [_read_host_card(rank, text) for rank, text in enumerate(meeting.get_all("host", "found its host"))]
        _require_alike(
            "the ranks disagree on FARANDOLE_TRANSPORT",
            [card.transport for card in others],
            "; set it alike on all (Open MPI hands it to other hosts with mpirun -x FARANDOLE_TRANSPORT)",
        )
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


def version() -> str:
    """Of farandole, as it is installed."""
    try:
        return importlib.metadata.version("farandole")
    except importlib.metadata.PackageNotFoundError:
        return "that is not installed"


def _require_alike(problem: str, values: Sequence[Any], remedy: str = "") -> None:
    if len(set(values)) > 1:
        raise RendezvousError(f"{problem}: {dict(enumerate(values))}{remedy}")


def _cores_of(ranks: Sequence[int], cards: Sequence[Card]) -> int:
    return len(set().union(*(cards[rank].cores for rank in ranks)))


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


class Card(NamedTuple):
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


class HostCard(NamedTuple):
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


def read_card(rank: int, text: str) -> Card:
    """What rank ``rank`` says; nothing but numbers where there must be some."""
    try:
        card = Card(**json.loads(text))
        is_sound = _are_numbers([card.process, card.world_size, *card.cores], 2**63)
        is_sound &= _are_numbers([*card.proof[:2], card.process - 1], 2**31 - 1)
        is_sound &= len(card.proof) == len(HostProof._fields) and all(type(one) is str for one in card.proof[2:])
        is_sound &= type(card.secret) is str and type(card.version) is str
    except (TypeError, ValueError, RecursionError):
        is_sound = False
    _require_sound(is_sound, f"for rank {rank}", "not what a rank says", text)
    return card


def _read_host_card(rank: int, text: str) -> HostCard:
    try:
        card = HostCard(**json.loads(text))
        is_first = card.mates[0] == rank
        is_sound = _are_numbers([*card.mates, *card.arena], 2**63) and _are_numbers(card.arena[:2], 2**31)
        is_sound &= len(card.arena) == (3 if is_first else 0) and rank in card.mates
        is_sound &= all(type(one) is str for one in [card.transport, *card.addresses]) and _are_numbers(
            [card.port], 2**16
        )
    except (TypeError, ValueError, LookupError, RecursionError):
        is_sound = False
    _require_sound(is_sound, f"for the host of rank {rank}", "not what a rank says", text)
    return card


def _read_figures(rank: int, text: str) -> list[float]:
    try:
        figures = json.loads(text)
        is_sound = len(figures) in (0, 2) and all(type(one) is float and 0 < one < 1e15 for one in figures)
    except (TypeError, ValueError, RecursionError):
        is_sound = False
    _require_sound(is_sound, f"for the wire of rank {rank}", "no measure", text)
    return [*figures]


def _require_sound(is_sound: bool, whose: str, what: str, text: str) -> None:
    if not is_sound:
        raise RendezvousError(f"what stands {whose} where the ranks meet is {what}: {text[:99]!r}")


def _are_numbers(values: Sequence[Any], limit: int) -> bool:
    return all(type(value) is int and 0 <= value < limit for value in values)
