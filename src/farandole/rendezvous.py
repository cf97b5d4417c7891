"""How the ranks of a job find one another and come to share memory.

`join` meets the others at the job's store, where every rank says who it is, and returns a `Membership`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Sequence

from farandole.arrival import Arrival, read_card
from farandole.connections import Tcp, Transport
from farandole.errors import RendezvousError
from farandole.meeting import Identity, Meeting, MeetingPlace, ended_key
from farandole.membership import Membership
from farandole.store import StoreClient, StoreServer

__all__ = ["MAX_WORLD_SIZE", "give_up_at", "join", "join_at", "next_meeting", "tell_of_end"]

MAX_WORLD_SIZE = 256
"""Ranks that one host is asked to run; more would exhaust it long before they met."""

_LONGEST_WAIT_S = 2e6
"""What the system calls take at most: 23 days."""

_RETRY_S = 0.05

_SERVED_MEETING = "meeting"
"""The key that says which meeting a store is for, and of which job, if rank 0 serves it."""

_num_joins = 0
"""Meetings of this job that this process took part in. A meeting fails for all of its ranks or for none: so all count
alike, and the n-th that one rank comes to is the n-th of every other."""


def next_meeting() -> int:
    """The number of the meeting that this process comes to next, as it counts them."""
    return _num_joins


def join(
    identity: Identity, timeout_s: float, *, server: StoreServer | None = None, number: int | None = None
) -> Membership:
    """Meet the other ranks of the job. If it has a name, its ranks wait while another job meets at their place.

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
            store = server or _serve(identity, limit)
            stack.callback(store.close)
            _num_joins = number + 1  # first: nobody else counts this meeting before it is served
            store.set(_SERVED_MEETING, f"{number} {identity.job}")
        else:
            store = _connect(identity, number, limit, timeout_s)
            stack.callback(store.close)
            _num_joins = number + 1
        return _meet(Meeting(store, identity, number, limit, timeout_s))


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
    meeting = Meeting(store, identity, 0, time.monotonic() + timeout_s, timeout_s, counted=False)
    return _meet(meeting, job_ranks)


def _serve(identity: Identity, limit: float) -> StoreServer:
    """The store of this meeting, once no other job meets at its place."""
    while True:
        try:
            return StoreServer(identity.store, identity.secret)
        except RendezvousError as error:
            is_taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            if not identity.job or not is_taken or time.monotonic() > limit:
                raise
        time.sleep(_RETRY_S)


def give_up_at(store: MeetingPlace, rank: int, world_size: int, error: BaseException) -> None:
    """Have the others that come to `join_at` there raise at once, as this rank cannot come."""
    identity = Identity(rank, world_size, ("", 0), False, b"")
    Meeting(store, identity, 0, time.monotonic(), 0.0, counted=False).give_up(error)


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
        served_number, _, job = (served or "").partition(" ")
        if served is not None and job == identity.job and int(served_number) == number:
            return client
        client.close()
        if served is not None and job == identity.job and int(served_number) > number:
            _num_joins = int(served_number)
            raise RendezvousError(
                "rank 0 has given up on this meeting, as this rank did not come in time; call farandole.init() again"
            )
        if time.monotonic() > limit:
            raise RendezvousError(f"rank {identity.rank} waited {timeout_s:g} s for rank 0 to serve the next meeting")
        time.sleep(_RETRY_S)


def tell_of_end(store: StoreServer, rank: int, code: int = 0) -> None:
    """Let ranks that wait for ``rank``, or will, know that its process has ended with that exit code."""
    store.set(ended_key(rank), str(code))


def _meet(meeting: Meeting, job_ranks: Sequence[int] | None = None) -> Membership:
    global _num_joins
    identity = meeting.identity
    membership = None
    is_stray = False
    with contextlib.ExitStack() as stack:
        try:
            arrival = stack.enter_context(contextlib.closing(Arrival(meeting)))
            card = arrival.card()
            standing = meeting.set("rank", card)
            if standing != card:
                is_stray = True
                other = read_card(identity.rank, standing).process
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
