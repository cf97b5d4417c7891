"""What a rank did when, while somebody wants to know: see `farandole.trace`.

A *record* holds spans: what was computed, what was communicated, and when a thread waited for communication. There is
one per process; or one per thread, where ranks are threads of one process. While there is none, all functions here
return at once.

Times are those of CLOCK_MONOTONIC, which is also the engine's clock, in nanoseconds.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from farandole.errors import ArgumentError

__all__ = [
    "KINDS",
    "Record",
    "Source",
    "Span",
    "add",
    "close_record",
    "current",
    "is_on",
    "mark_step",
    "moment",
    "now_ns",
    "open_record",
    "ranks_in_words",
    "span",
    "start",
]

KINDS = ("compute", "waiting", "communication")

_MOST_SPANS = 1 << 20
"""Of a record, and flights of a communicator: enough for an hour of steps, and some 200 MB."""

now_ns = time.monotonic_ns


class Span(NamedTuple):
    """Something that took a while.

    Attributes:
        kind: one of `KINDS`: "waiting" is when a thread of the rank could not go on before some communication was done.
        name: of what was done.
        began_ns, ended_ns: when.
        track: spans on one track are shown in one row.
        details: more about it; numbers and texts.
    """

    kind: str
    name: str
    began_ns: int
    ended_ns: int
    track: str = ""
    details: Mapping[str, Any] = {}  # never changed


class Source(Protocol):
    """What knows of spans by itself, as a communicator's engine does of its collectives."""

    def start(self, most: int) -> None:
        """Keep spans from now on, up to so many."""

    def stop(self, now_ns: int) -> tuple[list[Span], int]:
        """The spans, and how many more there were. What goes on at ``now_ns`` ends then."""


class Record:
    """What one rank does.

    Args:
        most: spans that are kept; so many, too, of each source.

    Attributes:
        spans: so far, in the order in which they ended.
        steps: when each step of training ended.
        num_missing: spans for which there was no room.
    """

    def __init__(self, most: int = _MOST_SPANS) -> None:
        self.spans: list[Span] = []
        self.steps: list[int] = []
        self.num_missing = 0
        self.began_ns = self.ended_ns = now_ns()
        self._most = most
        self._lock = threading.Lock()
        self._is_closed = False
        self._going_on: dict[int, Span] = {}
        self._num_begun = 0
        self._sources: list[Source] = []

    def add(self, span: Span) -> None:
        """Keep ``span``. From any thread."""
        with self._lock:
            self._add(span)

    def _add(self, span: Span) -> None:
        if self._is_closed:
            return
        if len(self.spans) < self._most:
            self.spans.append(span)
        else:
            self.num_missing += 1

    def begin(self, span: Span) -> Callable[[], None]:
        """Something goes on, with an end that is not known. Returns what to call when it ends, on any thread."""
        with self._lock:
            self._num_begun += 1
            number = self._num_begun
            self._going_on[number] = span

        def end() -> None:
            ended_ns = now_ns()
            with self._lock:
                if self._going_on.pop(number, None) is not None:
                    self._add(span._replace(ended_ns=ended_ns))

        return end

    def watch(self, source: Source) -> None:
        """Take the spans of ``source``, too."""
        with self._lock:
            source.start(self._most)
            self._sources.append(source)

    def close(self) -> None:
        """Take no more. What goes on ends here."""
        with self._lock:
            self.ended_ns = now_ns()
            for span in self._going_on.values():
                self._add(span._replace(ended_ns=self.ended_ns, details={**span.details, "unfinished": True}))
            self._going_on.clear()
            self._is_closed = True
            for source in self._sources:
                spans, num_missing = source.stop(self.ended_ns)
                self.spans += spans
                self.num_missing += num_missing
            self._sources.clear()
            # Where the ranks have come together after the record was opened, other threads have gone on before that.
            self.spans = [
                span._replace(began_ns=max(span.began_ns, self.began_ns))
                for span in self.spans
                if span.ended_ns >= self.began_ns
            ]
            self.steps = [ended_ns for ended_ns in self.steps if ended_ns >= self.began_ns]


_lock = threading.Lock()
_of_process: Record | None = None
_of_threads: dict[int, Record] = {}
_is_on = False


def is_on() -> bool:
    """Whether there is any record in this process."""
    return _is_on


def current() -> Record | None:
    """The record that this thread's doings belong to, if there is one."""
    return _of_threads.get(threading.get_ident(), _of_process) if _is_on else None


def open_record(record: Record, *, of_thread: bool) -> None:
    """Have this process, or this thread alone, recorded.

    Raises:
        ArgumentError: it is already.
    """
    global _of_process, _is_on
    with _lock:
        if of_thread and _of_process is None and threading.get_ident() not in _of_threads:
            _of_threads[threading.get_ident()] = record
        elif not of_thread and not _is_on:
            _of_process = record
        else:
            raise ArgumentError(
                "a trace is on already, and there can be one at a time: leave it first. Where ranks are threads of one "
                "process, each gives its own communicator: farandole.trace(path, communicator=comm)"
            )
        _is_on = True


def close_record(record: Record) -> None:
    """Record no more into ``record``; nothing if that was not done."""
    global _of_process, _is_on
    with _lock:
        if _of_process is record:
            _of_process = None
        for thread in [thread for thread, one in _of_threads.items() if one is record]:
            del _of_threads[thread]
        _is_on = _of_process is not None or bool(_of_threads)
    record.close()


def moment() -> int | None:
    """Now, in nanoseconds; None while nothing is recorded."""
    return now_ns() if _is_on else None


def add(kind: str, name: str, began_ns: int | None, **details: Any) -> None:
    """Record what was done from ``began_ns``, a `moment`, until now."""
    record = current()
    if record is not None and began_ns is not None:
        record.add(Span(kind, name, began_ns, now_ns(), details=details))


def start(kind: str, name: str, track: str = "", **details: Any) -> Callable[[], None]:
    """Record what begins now. Returns what to call when it ends, on any thread."""
    record = current()
    if record is None:
        return _do_nothing
    began_ns = now_ns()
    return record.begin(Span(kind, name, began_ns, began_ns, track, details))


def span(kind: str, name: str, **details: Any) -> contextlib.AbstractContextManager[None]:
    """A context whose time is recorded."""
    return _Context(kind, name, details) if _is_on else _NOTHING


def mark_step() -> None:
    """A step of training ends here."""
    record = current()
    if record is not None:
        record.steps.append(now_ns())


def ranks_in_words(ranks: Sequence[int]) -> str:
    """To name a track, as in "ranks 0-3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"


class _Context(contextlib.AbstractContextManager[None]):
    def __init__(self, kind: str, name: str, details: dict[str, Any]) -> None:
        self._what = kind, name, details

    def __enter__(self) -> None:
        self._began_ns = now_ns()

    def __exit__(self, *_: object) -> None:
        kind, name, details = self._what
        add(kind, name, self._began_ns, **details)


_NOTHING = contextlib.nullcontext()


def _do_nothing() -> None:
    pass


def _forget_in_child() -> None:
    global _lock, _of_process, _is_on
    _lock, _of_process, _is_on = threading.Lock(), None, False
    _of_threads.clear()


os.register_at_fork(after_in_child=_forget_in_child)
