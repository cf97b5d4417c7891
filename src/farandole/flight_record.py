"""The last collectives that a rank made: to look at, and to find out afterwards what led to a failure.

Where FARANDOLE_FLIGHT_RECORDS names a folder, a rank writes its record there when a call of it finds that its
communicator has failed, as a file of its own. Ranks that differ can be seen by comparing them number by number.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import farandole._native as _native
from farandole.call_records import describe_call
from farandole.timeline import Span, ranks_in_words

__all__ = ["FlightEntry", "LoggedFlights", "flight_entries", "write_flight_record"]


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """A collective that a rank made.

    Attributes:
        number: of the collective on its communicator, from 1.
        call: as the user would write it.
        nbytes: of the whole buffer.
        began: when, in seconds as time.time() counts.
        seconds: how long it took; None if it has not ended well.
    """

    number: int
    call: str
    nbytes: int
    began: float
    seconds: float | None


def flight_entries(engine: _native.Engine) -> list[FlightEntry]:
    """The last thousand collectives of a rank at most, the oldest first."""
    since_boot = time.time_ns() - time.monotonic_ns()
    return [
        FlightEntry(
            number,
            describe_call(what, count),
            nbytes,
            (began_ns + since_boot) * 1e-9,
            (ended_ns - began_ns) * 1e-9 if ended_ns else None,
        )
        for number, what, count, nbytes, began_ns, ended_ns in engine.flights()
    ]


def write_flight_record(
    folder: Path, engine: _native.Engine, rank: int, job_ranks: Sequence[int], error: Exception
) -> Path:
    """Write what led to ``error`` into a new file in ``folder``, which is made if need be.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "rank": rank,
        "job_ranks": list(job_ranks),
        "written": time.time(),
        "error": f"{type(error).__name__}: {error}",
        "collectives": [asdict(entry) for entry in flight_entries(engine)],
    }
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-rank{job_ranks[rank]}-{os.getpid()}-{time.monotonic_ns()}.json"
    path.write_text(json.dumps(record, indent=1))
    return path


class LoggedFlights:
    """All collectives of a rank while a timeline is recorded; a `farandole.timeline.Source`.

    Args:
        engine: of the rank.
        algorithms: see `farandole.calls.CallTable.algorithms`.
        members: the ranks of the communicator, in the job.
    """

    def __init__(
        self, engine: _native.Engine, algorithms: Callable[[], Mapping[tuple[int, int], str]], members: Sequence[int]
    ) -> None:
        self._engine = engine
        self._algorithms = algorithms
        self._members = members

    def start(self, most: int) -> None:
        """Have the engine log from now on."""
        self._begun_before = max((number for number, *_ in self._engine.flights()), default=0)
        self._engine.log_flights(most)

    def stop(self, now_ns: int) -> tuple[list[Span], int]:
        """What has ended since, with a span for each time that a caller waited; and what has not ended, until now."""
        logged, num_missing = self._engine.logged_flights()
        algorithms = self._algorithms()
        track = f"communication of {ranks_in_words(self._members)}"
        spans = []

        def add(number: int, what: int, count: int, nbytes: int, began_ns: int, ended_ns: int, **more: object) -> None:
            call = describe_call(what, count)
            details = {"call": call, "number": number, "bytes": nbytes, "ranks": len(self._members), **more}
            if (what, count) in algorithms:
                details["algorithm"] = algorithms[what, count]
            spans.append(Span("communication", call.partition("(")[0], began_ns, ended_ns, track, details))

        seen = set()
        for number, what, count, nbytes, called_ns, began_ns, ended_ns, is_done in logged:
            seen.add(number)
            more = {} if is_done else {"failed": True}
            add(number, what, count, nbytes, began_ns, ended_ns, blocking=called_ns != 0, **more)
            if called_ns:
                name = describe_call(what, count).partition("(")[0]
                spans.append(Span("waiting", f"in {name}", called_ns, ended_ns, details={"number": number}))
        for number, what, count, nbytes, began_ns, ended_ns in self._engine.flights():
            if number not in seen and not ended_ns and number > self._begun_before:
                add(number, what, count, nbytes, began_ns, max(began_ns, now_ns), unfinished=True)
        return spans, num_missing
