"""How far the clocks of ranks are apart.

Ranks on one machine read one clock. Of any other rank, messages go to rank 0 and back: what rank 0 reads in between was
the time half way of the round trip, give or take half of it. So the shortest of several round trips tells it best.
Source: Cristian, Probabilistic Clock Synchronization, Distributed Computing 3, 1989.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

from farandole.timeline import now_ns
from farandole.trace_ranks import Ranks

__all__ = ["clock_identity", "clock_offset"]

_ROUND_TRIPS = 20


def clock_identity() -> str:
    """Processes that say the same have one clock: those of one boot, whose namespaces do not shift it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a sandbox hides it: like no other, so that the clock is measured
        return uuid.uuid4().hex
    try:
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:  # a kernel before 5.6 has no such namespaces
        return boot


def clock_offset(ranks: Ranks, identity: str, read: Callable[[], int] = now_ns) -> tuple[int, int]:
    """Called by all ranks.

    Args:
        ranks: that take part.
        identity: of this rank's clock; see `clock_identity`.
        read: this rank's clock, in nanoseconds.

    Returns:
        What to add to this rank's times to have rank 0's, and by how much that may be off, in nanoseconds.
    """
    identities = ranks.all_gather(identity.encode())
    strange = [rank for rank in range(ranks.size) if identities[rank] != identities[0]]
    if ranks.rank == 0:
        for rank in strange:
            for _ in range(_ROUND_TRIPS):
                ranks.receive(rank)
                ranks.send(read(), rank)
    if ranks.rank not in strange:
        return 0, 0
    trips = []
    for _ in range(_ROUND_TRIPS):
        left_ns = read()
        ranks.send(left_ns, 0)
        its_ns = ranks.receive(0)
        back_ns = read()
        trips.append((back_ns - left_ns, its_ns - (left_ns + back_ns) // 2))
    round_trip_ns, offset_ns = min(trips)
    return offset_ns, -(-round_trip_ns // 2)
