"""From the engine's word for what went wrong to the error that a user reads.

The engine says why a communicator stopped and which rank it is about. What each rank was doing stands in the shared
records, so every rank can tell the whole story, and all tell the same one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum

from farandole.call_records import CallRecord
from farandole.calls import Call
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
    UNMAPPED = 7


def explain_failure(
    reason: Abort,
    subject: int,
    *,
    rank: int,
    records: Sequence[CallRecord],
    call: Call | None,
    job_ranks: Sequence[int],
) -> CommunicationError:
    """The error for a communicator that stopped.

    Args:
        reason: why.
        subject: the rank it is about: whose message did not fit, who waited in vain, who is gone, who stopped it.
        rank: this rank.
        records: what every rank last said it was doing.
        call: what this rank was in, if anything.
        job_ranks: per rank, its rank in the job.
    """
    where = _who_is_where(records, job_ranks)
    record = records[subject]
    if reason == Abort.MISMATCH:
        return CollectiveMismatchError(_mismatch_text(rank, records, call, where))
    if reason == Abort.TIMEOUT:
        return CollectiveTimeoutError(_timeout_text(subject, rank, records, call, where))
    if reason == Abort.PEER_LOST:
        doing = f"its last call was {record}" if record.what else "it had made no call"
        if record.closed:
            text = f"rank {subject} closed its communicator while others needed it; {doing}. Did it make fewer calls?"
        else:
            text = f"rank {subject} ended while others needed it; {doing}"
        return PeerLostError(f"{text}\n{where}")
    if reason == Abort.OUT_OF_MEMORY:
        return CommunicatorClosedError(f"rank {subject} ran out of memory in {record}")
    if reason == Abort.UNMAPPED:
        return CommunicatorClosedError(
            f"rank {subject} could not map the registered memory of another rank in {record}; ranks that share memory "
            f"must be allowed to open one another's files in /proc"
        )
    if reason == Abort.INTERRUPTED:
        return CommunicatorClosedError(
            f"rank {subject} was interrupted in the middle of a call; its last call was {record}"
        )
    return CommunicatorClosedError(f"rank {subject} aborted the communicator")


def _mismatch_text(rank: int, records: Sequence[CallRecord], call: Call | None, where: str) -> str:
    text = f"the ranks made different calls{_odd_ones(records)}:\n{where}"
    mine = records[rank]
    if call is not None and call.record != (mine.what, mine.count, mine.tag):
        late = CallRecord(0, 0, *call.record, math.inf, False)
        text += f"\n    rank {rank} came too late with {late.describe()}"
    elif len(set(map(str, records))) == 1:
        text += "\n    These look alike, so the ranks differ in what is not shown: the parts (counts), a schedule of "
        text += "the caller's own, or a call before."
    elif len({(record.sequence, record.what) for record in records}) == 1 and mine.name in ("all_gather", "gather"):
        counts = [record.count for record in records]
        text += (
            f"\n    Arrays of different sizes need counts=, the rows of all ranks, on every rank; elements: {counts}"
        )
    return text


def _odd_ones(records: Sequence[CallRecord]) -> str:
    """Which ranks differ from what more than half of all do."""
    furthest = max(record.sequence for record in records)
    calls = {rank: record.describe() for rank, record in enumerate(records) if record.sequence == furthest > 0}
    if {record.name for record in records if record.what} & {"all_gather", "gather", "scatter"}:
        return ""  # where each rank shows the size of its own part, they may well differ
    (usual, number), *others = Counter(calls.values()).most_common() or [("", 0)]
    if not others or 2 * number <= len(records):
        return ""
    odd = [str(rank) for rank, call in calls.items() if call != usual]
    return f" ({'rank' if len(odd) == 1 else 'ranks'} {', '.join(odd)} not as the others)"


def _timeout_text(subject: int, rank: int, records: Sequence[CallRecord], call: Call | None, where: str) -> str:
    record = records[subject]
    whose = "" if subject == rank else f" on rank {subject}"
    text = f"the timeout of {record.timeout_s:g} s is over{whose}"
    if call is not None and call.signature.pair is not None and subject == rank:
        src, dst = call.signature.pair
        peer, verb = (dst, "received") if rank == src else (src, "sent")
        return f"{text}: rank {peer} has not {verb}; its last call: {records[peer]}"
    late = [str(r) for r, other in enumerate(records) if other.sequence < record.sequence]
    if late and record.name not in ("send", "recv"):
        who = f"rank {late[0]} has" if len(late) == 1 else f"ranks {', '.join(late)} have"
        return f"{text}: {who} not arrived at collective number {record.sequence}\n{where}"
    if record.name in ("send", "recv"):
        return f"{text}, in {record}\n{where}"
    return f"{text}: all ranks arrived, but the data did not come through in time\n{where}"


def _who_is_where(records: Sequence[CallRecord], job_ranks: Sequence[int]) -> str:
    lines = [f"    rank {rank}: {record}" for rank, record in enumerate(records)]
    if list(job_ranks) != list(range(len(records))):
        lines.append(f"    These are ranks of a group; in the job they are {', '.join(map(str, job_ranks))}.")
    return "\n".join(lines)
