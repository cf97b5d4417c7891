"""From the engine's word for what went wrong to the error that a user reads.

The engine says why a communicator stopped and which rank it is about. What each rank was doing stands in the shared
records, so every rank can tell the whole story, and all tell the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from farandole.calls import Call, CallRecord
from farandole.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    CommunicatorClosedError,
    PeerLostError,
)

__all__ = ["Abort", "explain_failure"]


class Abort(IntEnum):
    """Why a communicator stopped; the numbers are those of native/src/arena.hpp."""

    NONE = 0
    MISMATCH = 1
    TIMEOUT = 2
    PEER_LOST = 3
    REQUESTED = 4
    INTERRUPTED = 5
    OUT_OF_MEMORY = 6


def explain_failure(
    reason: Abort, subject: int, *, rank: int, records: Sequence[CallRecord], call: Call | None, timeout_s: float
) -> CommunicationError:
    """The error for a communicator that stopped.

    Args:
        reason: why.
        subject: the rank it is about: whose message did not fit, who waited in vain, who is gone, who stopped it.
        rank: this rank.
        records: what every rank last said it was doing.
        call: what this rank was in, if anything.
        timeout_s: of that call.
    """
    if reason == Abort.MISMATCH:
        text = f"the ranks made different calls (rank {subject}'s was the first that did not fit):\n"
        text += _who_is_where(records)
        late = None if call is None else CallRecord(0, 0, call.what, call.count, False)
        if late and (late.what, late.count) != (records[rank].what, records[rank].count):
            text += f"\n    rank {rank} came too late with {late.describe()}"
        elif len(set(map(str, records))) == 1:
            text += "\n    These look alike, so the ranks differ in what is not shown: "
            text += "the algorithm, the parts, the tag, or a call before."
        return CollectiveMismatchError(text)
    if reason == Abort.TIMEOUT:
        return CollectiveTimeoutError(_timeout_text(subject, rank, records, call, timeout_s))
    if reason == Abort.PEER_LOST:
        record = records[subject]
        how = "closed its communicator" if record.closed else "ended"
        return PeerLostError(
            f"rank {subject} {how} while others needed it; its last call was {record}\n{_who_is_where(records)}"
        )
    if reason == Abort.OUT_OF_MEMORY:
        return CommunicatorClosedError(f"rank {subject} ran out of memory in {records[subject]}")
    if reason == Abort.INTERRUPTED:
        return CommunicatorClosedError(
            f"rank {subject} was interrupted in the middle of a call; its last call was {records[subject]}"
        )
    return CommunicatorClosedError(f"rank {subject} aborted the communicator")


def _timeout_text(subject: int, rank: int, records: Sequence[CallRecord], call: Call | None, timeout_s: float) -> str:
    furthest = records[subject].sequence
    late = [r for r, record in enumerate(records) if record.sequence < furthest]
    whose = f"{timeout_s:g} s" if subject == rank else f"rank {subject}'s timeout"
    if call is not None and call.signature.pair is not None and subject == rank:
        src, dst = call.signature.pair
        peer, verb = (dst, "received") if rank == src else (src, "sent")
        return f"timeout after {whose}: rank {peer} has not {verb}; its last call is {records[peer]}"
    if late:
        missing = ", ".join(map(str, late))
        who = f"rank {missing} has" if len(late) == 1 else f"ranks {missing} have"
        where = _who_is_where(records)
        return f"timeout after {whose}: {who} not arrived at collective number {furthest}\n{where}"
    return (
        f"timeout after {whose}: all ranks arrived, but the data did not come through in time\n{_who_is_where(records)}"
    )


def _who_is_where(records: Sequence[CallRecord]) -> str:
    return "\n".join(f"    rank {rank}: {record}" for rank, record in enumerate(records))
