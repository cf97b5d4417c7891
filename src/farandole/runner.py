"""Runs the settled calls of one communicator's rank on the engine, now or in the background, and its messages.

Owns what lives as long as the communicator: the engine, the postbox, the settled calls, the background calls and
messages that have not ended, and the failure that stopped it, if one has.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import farandole._native as _native
from farandole import timeline
from farandole.buffers import Buffer, registered_array
from farandole.call_records import CallRecord, MessageRecord
from farandole.calls import Call, CallTable, CollectiveStats, Signature
from farandole.errors import ArgumentError, CommunicationError, CommunicatorClosedError, PeerLostError
from farandole.failures import Abort, explain_failure
from farandole.flight_record import FlightEntry, LoggedFlights, flight_entries, write_flight_record
from farandole.membership import Membership
from farandole.shrinking import shrink
from farandole.shrinking_hosts import shrink_across_hosts
from farandole.work import Receipt, Work, require_timeout

__all__ = ["Runner", "open_runners", "close_all", "close_at_exit", "tell_at_exit"]

_CLOSE_GRACE_S = 1.0
_HEARING_S = 0.5
_PAUSE_S = 0.002
_SPINS = 2000
_SMALLEST_MAPPED_BYTES = 256 * 1024
_SPINS_WHEN_CROWDED = 20
_YIELDS = 1000
_YIELDS_FOR_HOSTS = 20
"""What a wire takes is long; the core is better left to the thread that serves it."""
_POISON = "FARANDOLE_POISON"
_FLIGHT_RECORDS = "FARANDOLE_FLIGHT_RECORDS"

Repeat = tuple[int, Any, Any, Any, int, Any]
"""Which collective, the objects of source and target, op, root, algorithm: what `_native.Repeats` knows a call by."""

_open: weakref.WeakSet[Runner] = weakref.WeakSet()
_busy: set[Runner] = set()  # with calls in the background: these go on, even if nobody holds the communicator any more
_untold: list[CommunicationError] = []  # of communicators that are gone


def close_at_exit() -> None:
    """`close_all`, at the end of the process, which fails if a communicator shows that the ranks differed."""
    try:
        close_all()
    except CommunicationError:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # too late for any other way to say that the results are worthless


def tell_at_exit(error: CommunicationError) -> None:
    """Have the process fail with ``error`` at its end, as where it came up it could not be raised."""
    _untold.append(error)


def close_all() -> None:
    """Close every communicator of this process that is still open, as the process is through with them all.

    Raises:
        CommunicationError: see `Runner.close`; also of a communicator that was dropped without closing it. Not that a
            rank has left: all are leaving, each in its own time.
    """
    errors = list(_untold)
    _untold.clear()
    for runner in open_runners():
        try:
            runner.close()
        except PeerLostError:
            continue
        except CommunicationError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def open_runners() -> list[Runner]:
    """Of all communicators that this process has made and not closed."""
    while True:
        try:
            return [runner for runner in _open if runner._process == os.getpid()]
        except RuntimeError:  # another thread has just made one
            continue


class Runner:
    """The engine of one rank, with its calls.

    Args:
        membership: the rank's place in its group.

    Attributes:
        repeats: runs calls that were made before without coming by here.
        in_flight: the background collectives whose results are not delivered yet.
        poisons: whether outputs of background calls are spoiled until they are done.
        is_left_out: of timelines.
    """

    def __init__(self, membership: Membership) -> None:
        num_cores, is_one_host = membership.calibration.cores, membership.network is None
        spins, background_spins = (
            _SPINS if is_one_host and threads * membership.world_size <= num_cores else _SPINS_WHEN_CROWDED
            for threads in (1, 2)
        )
        self._rank = membership.rank
        self._job_ranks = membership.job_ranks
        self._processes = membership.processes
        self._host_names = () if membership.network is None else membership.network.host_names
        self._identity = f"{membership.arena.nonce:x}" if membership.network is None else membership.network.token
        self._is_on_this_host = membership.is_on_this_host
        self._engine = membership.make_engine(
            spins=spins,
            background_spins=background_spins,
            yields=_YIELDS if is_one_host else _YIELDS_FOR_HOSTS,
            smallest_mapped_bytes=_SMALLEST_MAPPED_BYTES,
            most_unexpected_bytes=_memory_bytes() // (2 * membership.world_size),
        )
        self._postbox = _native.Postbox(self._engine)
        self._calls = CallTable(
            membership.rank,
            membership.world_size,
            membership.arena.slot_bytes,
            membership.calibration,
            membership.topology,
        )
        self.repeats = _native.Repeats(self._engine)
        self._lock = threading.RLock()  # guards what follows; a signal handler may come in between
        self.in_flight: deque[Work] = deque()
        self._messages: OrderedDict[Work, None] = OrderedDict()  # in flight
        self._orphans: list[Work] = []
        self._failure: CommunicationError | None = None
        self._is_shrinking = False
        self.is_left_out = False
        self._is_told = False  # whether the failure was raised where the user is
        self._process = os.getpid()
        self.poisons = os.environ.get(_POISON, "") not in ("", "0")
        _open.add(self)
        record = timeline.current()
        if record is not None:
            self.log_into(record)

    def log_into(self, record: timeline.Record) -> None:
        """Have all collectives recorded from now on, until the record is closed."""
        if not self.is_left_out:
            record.watch(LoggedFlights(self._engine, self._calls.algorithms, self._job_ranks))

    @property
    def is_among_threads(self) -> bool:
        """Whether other ranks of the communicator are threads of this process."""
        return list(self._processes).count(os.getpid()) > 1

    def run(
        self,
        signature: Signature,
        source: Buffer | None,
        target: Buffer | None,
        timeout_s: float,
        async_op: bool,
        *,
        input_start: int = 0,
        output_start: int = 0,
        repeat: Repeat | None = None,
    ) -> Any:
        """Run the call that ``signature`` names on these buffers.

        Args:
            signature: the call.
            source, target: its input and output, where it has them; they may be one.
            timeout_s: how long it may wait for other ranks.
            async_op: return a `Work` at once.
            repeat: what to find this call by when it is made again, see `repeats`. Kept only if the
                algorithm, where there is one, is a name: others may change what they are.
            input_start, output_start: where, in elements of the whole buffer, an input or output begins that holds this
                rank's part alone. If the two overlap in memory, they must be views of one whole buffer.

        Returns:
            What the user gave for ``target``, or None; with ``async_op``, a `Work` whose wait returns that.
        """
        self._require_usable()
        _require_apart_or_in_place(source, target, input_start, output_start)
        timeout_s = require_timeout("timeout", timeout_s)
        call = self._calls.settle(signature)
        arguments = (
            call.native,
            0 if source is None else source.address,
            0 if target is None else target.address,
            timeout_s,
        )

        def finish(receipt: Receipt) -> Any:
            status, subject = receipt
            if status != Abort.NONE:
                raise self._error_of(status, subject, call)
            if target is None:
                return None
            if target.deliver is not None:
                target.deliver()
            return target.user

        if not async_op:
            receipt = self._engine.run(*arguments)
            self._is_told |= receipt[0] != Abort.NONE
            result = finish(receipt)
            self._settle_finished_work()
            if repeat is not None and (signature.algorithm is None or type(signature.algorithm) is str):
                itemsize = signature.dtype.itemsize
                self.repeats.remember(*repeat, call.native, input_start * itemsize, output_start * itemsize)
            return result
        if self.poisons and target is not None and not self._reads(source, target, signature):
            target.poison()
        buffers = tuple(buffer for buffer in (source, target) if buffer is not None)
        work = Work(finish, f"{signature.collective} on rank {self._rank}", self._tell, buffers)
        try:
            with self._lock:
                self.in_flight.append(work)
                _busy.add(self)
            work.attach(self._engine.submit(*arguments))
        except Exception:
            with self._lock:  # the engine has not taken the call
                self.in_flight.remove(work)
                self._rest_if_idle()
            raise
        except BaseException:  # Ctrl-C, perhaps after the engine took it: keep the buffers for as long as the engine
            with self._lock:
                self.in_flight.remove(work)
                self._orphans.append(work)
            raise
        self._settle_finished_work()
        return work

    def send(self, buffer: Buffer, dst: int, tag: int, timeout_s: float, async_op: bool) -> Work | None:
        """Send a message; see `Communicator.send`."""
        work: Work | None = self._move(True, buffer, dst, tag, timeout_s, async_op)
        return work

    def receive(self, buffer: Buffer, src: int | None, tag: int, timeout_s: float, async_op: bool) -> Any:
        """Receive a message; see `Communicator.recv`."""
        return self._move(False, buffer, src, tag, timeout_s, async_op)

    def _move(self, sends: bool, buffer: Buffer, peer: int | None, tag: int, timeout_s: float, async_op: bool) -> Any:
        self._require_usable()
        timeout_s = require_timeout("timeout", timeout_s)
        arguments = (sends, buffer.address, buffer.nbytes, peer, tag, buffer.dtype.code, timeout_s)
        kind = "send" if sends else "recv"
        if not async_op:
            began_ns = timeline.moment()
            status, subject = self._postbox.post(*arguments, waits=True).receipt()
            if began_ns is not None:
                timeline.add("communication", kind, began_ns, bytes=buffer.nbytes, peer=peer)
                timeline.add("waiting", f"in {kind}", began_ns)
            self._is_told |= status != Abort.NONE
            if self._messages:
                self._settle_some_messages()
            return self._delivered(sends, buffer, status, subject)

        def finish(receipt: Receipt) -> Any:
            """Deliver. As it holds the buffer, that lives for as long as the message needs it."""
            with self._lock:
                self._messages.pop(work, None)
                self._rest_if_idle()
            return self._delivered(sends, buffer, *receipt)

        if self.poisons and not sends and not self.is_in_use(buffer.address, buffer.nbytes):
            buffer.poison()
        work = Work(finish, f"{kind} on rank {self._rank}", self._tell, (buffer,))
        try:
            with self._lock:
                self._messages[work] = None
                _busy.add(self)
            work.attach(self._postbox.post(*arguments, waits=False))
        except BaseException as error:
            with self._lock:
                self._messages.pop(work, None)
                self._rest_if_idle()
                if not isinstance(error, Exception):  # Ctrl-C, perhaps after the postbox took it: keep the buffer
                    self._orphans.append(work)
            raise
        self._settle_some_messages()
        return work

    def _delivered(self, sends: bool, buffer: Buffer, status: int, subject: int) -> Any:
        if status != Abort.NONE:
            raise self._error_of(status, subject, None)
        if sends:
            return None
        if buffer.deliver is not None:
            buffer.deliver()
        return buffer.user

    def _reads(self, source: Buffer | None, target: Buffer, signature: Signature) -> bool:
        """Whether what ``target`` holds is an input of this rank, or of a call before this one."""
        if self.is_in_use(target.address, target.nbytes):
            return True
        if signature.collective == "broadcast":
            return self._rank == signature.root
        return source is not None and source.overlaps(target)

    def snapshot(self) -> dict[str, Any]:
        """What this communicator's ranks are doing now, as each of them says; see `farandole.status`."""
        records = [CallRecord(*record) for record in self._engine.calls()]
        messages = [MessageRecord(*record) for record in self._engine.messages()]
        reason, subject = self._engine.aborted()
        now = time.monotonic()
        furthest = max(record.sequence for record in records)
        ranks = []
        for rank, (record, message) in enumerate(zip(records, messages, strict=True)):
            is_within = record.sequence > record.finished
            ranks.append(
                {
                    "rank": rank,
                    "job_rank": self._job_ranks[rank],
                    "process": self._processes[rank],
                    "host": self._host_names[rank] if self._host_names else None,
                    "is_here": self._is_on_this_host(rank),
                    "collectives": record.sequence,
                    "call": record.describe() if record.what else None,
                    "is_in_it": is_within,
                    "seconds": now - record.began_s if is_within else None,
                    "is_behind": record.sequence < furthest,
                    "bytes": record.payload_bytes,
                    "last_message": message.describe() if message.what else None,
                    "refused": record.refused if record.refusal else None,
                    "has_closed": record.closed,
                    "is_gone": self.is_lost(rank),
                    "is_stopped": self._is_stopped(rank),
                }
            )
        stopped = None if reason == Abort.NONE else f"{Abort(reason).name.lower().replace('_', ' ')}, rank {subject}"
        return {"identity": self._identity, "world_size": len(ranks), "stopped": stopped, "ranks": ranks}

    def is_lost(self, rank: int) -> bool:
        """See `Communicator.is_lost`."""
        return rank != self._rank and self._engine.is_gone(rank)

    def is_in_use(self, address: int, nbytes: int) -> bool:
        """See `Communicator.is_in_use`."""
        with self._lock:
            works = [*self.in_flight, *self._messages]
        return any(
            buffer.address < address + nbytes and address < buffer.address + buffer.nbytes
            for work in works
            for buffer in work.buffers
        )

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Any:
        """See `Communicator.empty`."""
        self._require_usable()
        return registered_array(self._engine.allocate, shape, dtype)

    def stats(self) -> list[CollectiveStats]:
        """What was done so far, per collective and algorithm."""
        self._settle_finished_work()
        messages = [("send", self._postbox.sends), ("recv", self._postbox.receives)]
        counted = [CollectiveStats(name, "direct", *tally.read()) for name, tally in messages]
        return [*self._calls.stats(), *[entry for entry in counted if entry.calls]]

    def wire_bytes(self) -> tuple[int, int]:
        """See `Communicator.wire_bytes`."""
        sent, received = self._engine.wire_bytes()
        return sent, received

    def abort(self) -> None:
        """End all calls of all ranks at once."""
        self._require_own_process()
        self._engine.abort(int(Abort.REQUESTED), self._rank)

    def shrink(self, membership: Membership, timeout_s: float) -> Membership:
        """See `Communicator.shrink`; ``membership`` is of the communicator that has failed."""
        self._require_own_process()
        if self.closed:
            raise CommunicatorClosedError("this communicator was closed on this rank, which takes no part any more")
        self._abort_if_any_is_lost()
        if not self.aborted:
            raise ArgumentError(
                "nothing has failed, so there is nobody to leave behind; use split() for a smaller group"
            )
        timeout_s = require_timeout("timeout", timeout_s)
        with self._lock:
            if self._is_shrinking:
                raise ArgumentError("shrink() is called once on a communicator, by one thread")
            self._is_shrinking = True
        try:
            if membership.network is None:
                return shrink(self._engine, membership, timeout_s)
            return shrink_across_hosts(self._engine, membership, membership.network, timeout_s)
        finally:  # whatever comes of it, this rank is not to be waited for here any more
            self._tell()
            with contextlib.suppress(CommunicationError):  # the failure, which is why it was called
                self.close()

    def require_going(self) -> None:
        """Raise if the communicator has failed, or a rank is lost so that it is about to."""
        self._abort_if_any_is_lost()
        if self.aborted:
            raise self._error_of(*self._engine.aborted(), None)

    def _abort_if_any_is_lost(self) -> None:
        for rank in range(len(self._processes)):
            if self.is_lost(rank):
                self._engine.abort(int(Abort.PEER_LOST), rank)

    def refuse(self, name: str, error: Exception) -> None:
        """See `Communicator.refuse`."""
        if isinstance(error, CommunicationError):
            return  # the call was begun
        if self._process != os.getpid() or self.aborted:
            return  # after an abort, what ranks say of themselves stays as it is
        lines = str(error).splitlines() or [type(error).__name__]
        waiting = sum(not work.has_ended() for work in list(self.in_flight))
        self._engine.refuse(f"{name}: {lines[0]}".encode(errors="replace").decode(), waiting)

    @property
    def aborted(self) -> bool:
        """Whether any rank has stopped the communicator."""
        return self._engine.aborted()[0] != Abort.NONE

    @property
    def closed(self) -> bool:
        """Whether this rank has left."""
        return self not in _open

    def close(self) -> None:
        """Leave; background calls get a moment to end.

        Raises:
            CommunicationError: what a background call failed with that nobody waited for, unless somebody ended it.
            CollectiveMismatchError: the ranks' last calls differed, without having met.
        """
        if self.closed:
            return
        _open.discard(self)
        try:
            if self._process == os.getpid():
                self._wait_for_in_flight()
        finally:
            failure = self._failure
            if failure is None:  # for a call of another thread, which this ends
                self._failure = CommunicatorClosedError("this communicator was closed on this rank")
            self._postbox.close()
            self._engine.close()
            _busy.discard(self)
        if failure is None:
            self._fail_if_ranks_differed()
        elif not self._is_told and not isinstance(failure, CommunicatorClosedError):
            self._tell()
            raise _copy_of(failure)

    def _fail_if_ranks_differed(self) -> None:
        reason, subject = self._engine.aborted()
        if reason in (Abort.MISMATCH, Abort.MESSAGE_MISMATCH):
            self._failure = None
            self._tell()
            raise self._error_of(reason, subject, None)

    def _tell(self) -> None:
        self._is_told = True

    def __del__(self) -> None:
        # The threads of both must have let go of the buffers before they are freed with this object.
        postbox = getattr(self, "_postbox", None)
        if postbox is None:
            return
        postbox.close()
        self._engine.close()
        if self._failure is None:
            try:
                self._fail_if_ranks_differed()
            except CommunicationError as error:  # told at the end of the process, which then fails
                _untold.append(error)

    def _error_of(self, status: int, subject: int, call: Call | None) -> CommunicationError:
        with self._lock:
            if self._failure is None:
                silent = self._hear_the_others()
                records = [CallRecord(*record) for record in self._engine.calls()]
                messages = [MessageRecord(*record) for record in self._engine.messages()]
                self._failure = explain_failure(
                    Abort(status),
                    subject,
                    rank=self._rank,
                    records=records,
                    messages=messages,
                    call=call,
                    job_ranks=self._job_ranks,
                    stopped=[rank for rank in range(len(records)) if self._is_stopped(rank)],
                    silent=silent,
                    host_names=self._host_names,
                )
                self._write_flight_record(self._failure)
            return _copy_of(self._failure)

    def _is_stopped(self, rank: int) -> bool:
        """Whether somebody has stopped its process; of other hosts this is not known."""
        return self._is_on_this_host(rank) and _is_stopped(self._processes[rank])

    def _hear_the_others(self) -> list[int]:
        """Let ranks on other hosts say what they were in when all ended. Returns those that do not."""
        limit = time.monotonic() + _HEARING_S
        while (silent := self._engine.silent()) and time.monotonic() < limit:
            time.sleep(_PAUSE_S)
        return silent

    def flight_record(self) -> list[FlightEntry]:
        """See `Communicator.flight_record`."""
        return flight_entries(self._engine)

    def _write_flight_record(self, error: CommunicationError) -> None:
        folder = os.environ.get(_FLIGHT_RECORDS)
        if folder:
            try:
                write_flight_record(Path(folder), self._engine, self._rank, self._job_ranks, error)
            except OSError as problem:
                print(f"farandole: {_FLIGHT_RECORDS} is {folder}: {problem}", file=sys.stderr)

    def _require_usable(self) -> None:
        self._require_own_process()
        if self._failure is not None:
            self._tell()
            raise _copy_of(self._failure)

    def _require_own_process(self) -> None:
        if self._process != os.getpid():
            raise CommunicatorClosedError(
                f"this communicator belongs to process {self._process}, and this is process {os.getpid()}, forked "
                f"from it; call farandole.init() in the new process"
            )

    def _settle_finished_work(self) -> None:
        """Deliver and count background calls that have ended, so that nobody need wait for them; forget them."""
        while self.in_flight:
            with self._lock:
                if not self.in_flight or not self.in_flight[0].has_ended():
                    return
                work = self.in_flight.popleft()
                self._rest_if_idle()
            work.settle()

    def _settle_some_messages(self) -> None:
        """Let go of messages that have ended and that nobody waits for. Looks at two, in turn: so the others are never
        many, and a message that takes long is in nobody's way."""
        for _ in range(2):
            with self._lock:
                work = next(iter(self._messages), None)
                if work is None:
                    return
                with contextlib.suppress(KeyError):  # a signal handler has waited for it just now
                    self._messages.move_to_end(work)
            if work.has_ended():
                work.settle()

    def _rest_if_idle(self) -> None:
        if not self.in_flight and not self._messages:
            _busy.discard(self)

    def _wait_for_in_flight(self) -> None:
        limit = time.monotonic() + _CLOSE_GRACE_S
        unfinished = 0
        works = [*self.in_flight, *self._messages]
        for work in works:
            unfinished += not work.ends_within(max(0.0, limit - time.monotonic()))
        self._settle_finished_work()
        for work in works:
            if work.has_ended():
                work.settle()
        if unfinished:
            warnings.warn(
                f"rank {self._rank} closes its communicator while {unfinished} background calls still wait for other "
                f"ranks; they are aborted on all ranks. Call wait() on each Work first.",
                RuntimeWarning,
                stacklevel=4,
            )


def _copy_of(error: CommunicationError) -> CommunicationError:
    """To be raised: one and the same would gather the traceback of every time."""
    return type(error)(*error.args)


def _is_stopped(process: int) -> bool:
    """Whether somebody has stopped the process, so that it waits to be continued."""
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()  # the name in it may be anything
    except OSError:  # it has ended
        return False
    return status.rpartition(b")")[2].split()[0] in (b"T", b"t")


@lru_cache(maxsize=1)
def _memory_bytes() -> int:
    """That this process may use: of the machine or, if that is less, of its control group."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # there is none
            return min(machine, int(Path(limit).read_text()))
    return machine


def _require_apart_or_in_place(
    source: Buffer | None, target: Buffer | None, input_start: int, output_start: int
) -> None:
    if source is None or target is None or source is target or not source.overlaps(target):
        return
    itemsize = source.dtype.itemsize
    if source.address - input_start * itemsize != target.address - output_start * itemsize:
        raise ArgumentError(
            "out partly overlaps tensor; give an out with memory of its own, or the place in one buffer where the "
            "result belongs"
        )
