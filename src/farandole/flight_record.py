"""The last collectives that a rank made: to look at, and to find out afterwards what led to a failure.

Where FARANDOLE_FLIGHT_RECORDS names a folder, a rank writes its record there when a call of it finds that its
communicator has failed, as a file of its own. Ranks that differ can be seen by comparing them number by number.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import farandole._native as _native
from farandole.call_records import describe_call

__all__ = ["FlightEntry", "flight_entries", "write_flight_record"]


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
