"""From the engine's word for what went wrong to the error that a user reads.

The engine says why a communicator stopped and which rank it is about. What each rank was doing stands in the shared
records, so every rank can tell the whole story, and all tell the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum

from farandole.call_records import CallRecord, MessageRecord
from farandole.calls import Call
from farandole.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    CommunicatorClosedError,
    PeerLostError,
)

__all__ = ["Abort", "explain_failure"]

_PARTED = ("all_gather", "gather", "scatter", "reduce_scatter")


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
    MESSAGE_MISMATCH = 8
    MESSAGE_TIMEOUT = 9
    TOO_MANY_UNEXPECTED = 10


def explain_failure(
    reason: Abort,
    subject: int,
    *,
    rank: int,
    records: Sequence[CallRecord],
    messages: Sequence[MessageRecord],
    call: Call | None,
    job_ranks: Sequence[int],
    stopped: Sequence[int],
    silent: Sequence[int],
    host_names: Sequence[str],
) -> CommunicationError:
    """The error for a communicator that stopped.

    Args:
        reason: why.
        subject: the rank it is about: whose message did not fit, who waited in vain, who is gone, who stopped it.
        rank: this rank.
        records: what collective every rank last said it was in.
        messages: what message every rank last said it sent or received.
        call: the collective that this rank was in, if any.
        job_ranks: per rank, its rank in the job.
        stopped: the ranks whose process is stopped, as by SIGSTOP or a debugger.
        silent: the ranks of other hosts that do not answer.
        host_names: per rank; empty if all are on one host.
    """
    where = _who_is_where(records, messages, job_ranks, host_names)
    why = _stopped_text(stopped) + _silence_text(silent)
    record, message = records[subject], messages[subject]
    if reason == Abort.MESSAGE_MISMATCH:
        return CollectiveMismatchError(_message_mismatch_text(subject, message, job_ranks))
    if reason == Abort.MESSAGE_TIMEOUT:
        return CollectiveTimeoutError(_message_timeout_text(subject, rank, message, why, where))
    if reason == Abort.TOO_MANY_UNEXPECTED:
        return CommunicationError(
            f"rank {message.arrived_from} has sent rank {subject} more than it can keep until it receives it, in front "
            f"of what it waits for; receive messages in about the order in which they are sent\n{where}"
        )
    if reason == Abort.MISMATCH:
        return CollectiveMismatchError(_mismatch_text(rank, records, call, where))
    if reason == Abort.TIMEOUT:
        return CollectiveTimeoutError(_timeout_text(subject, rank, records, why, where))
    if reason == Abort.PEER_LOST:
        host = f" (on host {host_names[subject]})" if host_names else ""
        loss = _loss_text(f"rank {subject}{host}", record, message, is_near=not host_names)
        return PeerLostError(f"{loss}\n{where}")
    return CommunicatorClosedError("\n".join([_stop_text(reason, subject, record, message), *_group_line(job_ranks)]))


def _loss_text(who: str, record: CallRecord, message: MessageRecord, *, is_near: bool) -> str:
    text = f"{who} {'closed its communicator' if record.closed else 'ended'} while others needed it; "
    if record.refusal:
        return f"{text}it had refused a call"
    if not record.what and not message.what:
        text += "it had made no call" if is_near else "no call of it is known"
    else:
        text += f"its last call was {_doing(record, message)}"
    return f"{text}. Did it make fewer calls?" if record.closed else text


def _stop_text(reason: Abort, subject: int, record: CallRecord, message: MessageRecord) -> str:
    if reason == Abort.OUT_OF_MEMORY:
        return f"rank {subject} ran out of memory in {_doing(record, message)}"
    if reason == Abort.UNMAPPED:
        return (
            f"rank {subject} could not map the registered memory of another rank in {record}; ranks that share memory "
            f"must be allowed to open one another's files in /proc"
        )
    if reason == Abort.INTERRUPTED:
        return f"rank {subject} was interrupted in the middle of a call; its last call was {_doing(record, message)}"
    return f"rank {subject} aborted the communicator"


def _mismatch_text(rank: int, records: Sequence[CallRecord], call: Call | None, where: str) -> str:
    text = f"the ranks made different calls{_odd_ones(records)}:\n{where}"
    mine = records[rank]
    misfits = [record.describe_misfit(other) for other, record in enumerate(records) if record.misfit_rank]
    if misfits:
        return f"{text}\n    {misfits[0]}"
    if call is not None and call.record != (mine.what, mine.count):
        what, count = call.record
        payload_bytes = sum(call.signature.counts) * call.signature.dtype.itemsize
        late = replace(mine, what=what, count=count, payload_bytes=payload_bytes)
        text += f"\n    rank {rank} came too late with {late.describe()}"
        records = [*records[:rank], late, *records[rank + 1 :]]
    return text + _hint(records)


def _hint(records: Sequence[CallRecord]) -> str:
    """What the calls differ in, if their texts do not say it clearly."""
    if len({record.what for record in records}) > 1 or not records[0].what:
        return ""
    name, counts = records[0].name, [record.count for record in records]
    wholes = [record.payload_bytes // records[0].itemsize for record in records]
    if name in ("all_gather", "gather") and len(set(counts)) > 1 and len(set(wholes)) > 1:
        return f"\n    Arrays of different sizes need counts=, the rows of all ranks, on every rank; elements: {counts}"
    if name in _PARTED and len(set(wholes)) > 1:
        return f"\n    All parts together have, as the ranks see it, {', '.join(map(str, wholes))} elements."
    if len({record.describe() for record in records}) == 1:
        return (
            "\n    These look alike, so the ranks differ in what is not shown: the parts (counts), a schedule of the "
            "caller's own, or a call before."
        )
    return ""


def _odd_ones(records: Sequence[CallRecord]) -> str:
    """Which ranks differ from what more than half of all do."""
    furthest = max(record.sequence for record in records)
    calls = {rank: record.describe() for rank, record in enumerate(records) if record.sequence == furthest > 0}
    if {record.name for record in records if record.what} & {"all_gather", "gather", "scatter"}:
        return ""  # where each rank shows the size of its own part, they may well differ
    (usual, number), *others = Counter(calls.values()).most_common() or [("", 0)]
    if not others or 2 * number <= len(records):
        return ""
    odd = [rank for rank, call in calls.items() if call != usual]
    return f" ({_ranks(odd)} not as the others)"


def _timeout_text(subject: int, rank: int, records: Sequence[CallRecord], why: str, where: str) -> str:
    record = records[subject]
    whose = "" if subject == rank else f" on rank {subject}"
    text = f"the timeout of {record.timeout_s:g} s is over{whose}{why}"
    late = [r for r, other in enumerate(records) if other.sequence < record.sequence]
    if late:
        has = "has" if len(late) == 1 else "have"
        return f"{text}: {_ranks(late)} {has} not arrived at collective number {record.sequence}\n{where}"
    return f"{text}: all ranks arrived, but the data did not come through in time\n{where}"


def _stopped_text(stopped: Sequence[int]) -> str:
    if not stopped:
        return ""
    is_ = "is" if len(stopped) == 1 else "are"
    return f"; the process of {_ranks(stopped)} {is_} stopped (by SIGSTOP or a debugger)"


def _silence_text(silent: Sequence[int]) -> str:
    if not silent:
        return ""
    does = "does" if len(silent) == 1 else "do"
    return f"; {_ranks(silent)} {does} not answer, as if stopped or cut off"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _message_mismatch_text(dst: int, message: MessageRecord, job_ranks: Sequence[int]) -> str:
    src = message.arrived_from
    lines = [
        f"the ranks made different calls: what rank {src} sent is not what rank {dst} receives:",
        f"    rank {src}: {message.describe_arrived(dst)}",
        f"    rank {dst}: {message.describe()}",
    ]
    return "\n".join([*lines, *_group_line(job_ranks)])


def _message_timeout_text(subject: int, rank: int, message: MessageRecord, why: str, where: str) -> str:
    whose = "" if subject == rank else f" on rank {subject}"
    who = "no rank" if message.peer is None else f"rank {message.peer}"
    missing = f"{who} has {'' if message.peer is None else 'not '}{'received' if message.is_send else 'sent'}"
    text = f"the timeout of {message.timeout_s:g} s is over{whose}{why}"
    return f"{text}: {missing}, in {message.describe()}\n{where}"


def _doing(record: CallRecord, message: MessageRecord) -> str:
    """As in "its last call was ..."."""
    if not message.what:
        text = str(record)
    else:
        text = f"{record}; its last message: {message.describe()}" if record.what else message.describe()
    return f"{text}; then it refused {record.refused}" if record.refusal else text


def _who_is_where(
    records: Sequence[CallRecord],
    messages: Sequence[MessageRecord],
    job_ranks: Sequence[int],
    host_names: Sequence[str],
) -> str:
    hosts = [f" on host {name}" for name in host_names] or [""] * len(records)
    doing = map(_doing, records, messages)
    lines = (f"    rank {rank}{host}: {what}" for rank, (host, what) in enumerate(zip(hosts, doing, strict=True)))
    return "\n".join([*lines, *_group_line(job_ranks)])


def _group_line(job_ranks: Sequence[int]) -> list[str]:
    if list(job_ranks) == list(range(len(job_ranks))):
        return []
    return [f"    These are ranks of a group; in the job they are {', '.join(map(str, job_ranks))}."]
