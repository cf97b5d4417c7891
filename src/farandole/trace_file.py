"""Traces as files: Chrome's trace format in JSON, which ui.perfetto.dev opens.

A rank is a process there, a track a thread. Beside the events, the key "farandole" says what the format has no place
for; by it a trace of this kind is known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from farandole.errors import ArgumentError
from farandole.exposure import Exposure, exposure_of, exposures_of_steps
from farandole.timeline import KINDS, Span

__all__ = ["Part", "RankExposure", "read_trace", "write_trace"]

_VERSION = 1
_TRACKS = {"compute": "compute", "waiting": "waiting for communication", "communication": "communication"}
"""Of spans that name none."""


@dataclass(frozen=True, slots=True)
class RankExposure:
    """Of one rank.

    Attributes:
        rank, host: which one.
        total: from the begin of the trace to its end.
        steps: of each step of training, from the end of the one before.
        num_missing: spans that were too many to keep: the numbers are without them.
    """

    rank: int
    host: str
    total: Exposure
    steps: list[Exposure]
    num_missing: int

    @staticmethod
    def pack(exposures: Sequence[RankExposure], problem: str) -> bytes:
        """To be sent, with a text."""
        return json.dumps([[asdict(one) for one in exposures], problem]).encode()

    @staticmethod
    def unpack(packed: bytes) -> tuple[list[RankExposure], str]:
        """What was packed."""
        exposures, problem = json.loads(packed)
        return [
            RankExposure(
                **{**one, "total": Exposure(**one["total"]), "steps": [Exposure(**step) for step in one["steps"]]}
            )
            for one in exposures
        ], problem


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has recorded.

    Attributes:
        rank, host, process: which one.
        began_ns, ended_ns, steps, spans, num_missing: of its record.
        offset_ns: to be added to its times to have those of rank 0.
        uncertainty_ns: by which that may be off; None if it could not be measured.
    """

    rank: int
    host: str
    process: int
    began_ns: int
    ended_ns: int
    spans: list[Span]
    steps: list[int] = field(default_factory=list)
    num_missing: int = 0
    offset_ns: int = 0
    uncertainty_ns: int | None = 0

    def aligned(self) -> Part:
        """The same in times of rank 0."""
        shift = self.offset_ns
        return replace(
            self,
            began_ns=self.began_ns + shift,
            ended_ns=self.ended_ns + shift,
            spans=[one._replace(began_ns=one.began_ns + shift, ended_ns=one.ended_ns + shift) for one in self.spans],
            steps=[step + shift for step in self.steps],
        )

    def exposure(self) -> RankExposure:
        """How much of its communication was hidden."""
        total = exposure_of(self.spans, self.began_ns, self.ended_ns)
        steps = exposures_of_steps(self.spans, self.steps, self.began_ns, self.ended_ns)[:-1]
        return RankExposure(self.rank, self.host, total, steps, self.num_missing)

    def pack(self) -> bytes:
        """To be sent."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(values, default=str).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> Part:
        """What was packed."""
        values = json.loads(packed)
        return cls(**{**values, "spans": [Span(*one) for one in values["spans"]]})


def write_trace(path: Path, parts: Sequence[Part]) -> None:
    """Write a trace of all ``parts``, in place of what is there.

    Raises:
        OSError: it cannot be written; what was there is left as it was.
    """
    aligned = [part.aligned() for part in parts]
    origin_ns = min(part.began_ns for part in aligned)
    head = {
        "displayTimeUnit": "ms",
        "farandole": {
            "version": _VERSION,
            "ranks": [
                {
                    "rank": part.rank,
                    "host": part.host,
                    "process": part.process,
                    "began_us": _microseconds(part.began_ns - origin_ns),
                    "ended_us": _microseconds(part.ended_ns - origin_ns),
                    "missing": part.num_missing,
                    "clock_offset_ns": part.offset_ns,
                    "clock_uncertainty_ns": part.uncertainty_ns,
                }
                for part in aligned
            ],
        },
    }
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("w") as file:
            file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
            separator = ""
            for part in aligned:
                for event in _events_of(part, origin_ns):
                    file.write(separator + json.dumps(event, default=str))
                    separator = ",\n"
            file.write("\n]}\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _microseconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1000, 3)  # which takes nothing away for a week


def _events_of(part: Part, origin_ns: int) -> Iterator[dict[str, Any]]:
    pid = part.rank
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"rank {part.rank} on {part.host}"}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": part.rank}}
    for tid, (name, spans) in enumerate(_rows_of(part.spans), 1):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
        for span in spans:
            yield {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "cat": span.kind,
                "name": span.name,
                "ts": _microseconds(span.began_ns - origin_ns),
                "dur": _microseconds(span.ended_ns - span.began_ns),
                "args": span.details,
            }
    for number, step in enumerate(part.steps, 1):
        name = f"end of step {number}"
        yield {"ph": "i", "s": "p", "pid": pid, "tid": 1, "name": name, "ts": _microseconds(step - origin_ns)}


def _rows_of(spans: Sequence[Span]) -> Iterator[tuple[str, list[Span]]]:
    """What is shown in a row each: of a track, spans that lie apart or one within the other; where they overlap
    otherwise, the track has several rows."""
    tracks: dict[tuple[int, str], list[Span]] = {}
    for span in spans:
        tracks.setdefault((KINDS.index(span.kind), span.track or _TRACKS[span.kind]), []).append(span)
    for (_, name), some in sorted(tracks.items()):
        rows: list[tuple[list[Span], list[int]]] = []  # with the ends of what goes on there
        for span in sorted(some, key=lambda one: (one.began_ns, -one.ended_ns)):
            for row, ends in rows:
                while ends and ends[-1] <= span.began_ns:
                    ends.pop()
                if not ends or span.ended_ns <= ends[-1]:
                    row.append(span)
                    ends.append(span.ended_ns)
                    break
            else:
                rows.append(([span], [span.ended_ns]))
        for number, (row, _) in enumerate(rows, 1):
            yield name if number == 1 else f"{name} ({number})", row


def read_trace(path: Path) -> list[Part]:
    """The parts of a trace that `write_trace` wrote; their times begin with the trace.

    Raises:
        ArgumentError: there is none, or the file is something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ArgumentError(f"{path} is no trace: it is no JSON ({error})") from error
    about = content.get("farandole") if isinstance(content, dict) else None
    if not isinstance(about, dict):
        raise ArgumentError(f"{path} is no trace that farandole.trace wrote: it does not say so under 'farandole'")
    if about.get("version") != _VERSION:
        raise ArgumentError(
            f"{path} is a trace of form {about.get('version')}, and this version of farandole reads form {_VERSION}; "
            f"use the version that wrote it"
        )
    try:
        return _parts_of(about["ranks"], content["traceEvents"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"{path} is a damaged trace: {type(error).__name__}: {error}") from error


def _parts_of(ranks: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[Part]:
    parts = {
        about["rank"]: Part(
            about["rank"],
            about["host"],
            about["process"],
            _nanoseconds(about["began_us"]),
            _nanoseconds(about["ended_us"]),
            [],
            num_missing=about["missing"],
            offset_ns=0,
            uncertainty_ns=about["clock_uncertainty_ns"],
        )
        for about in ranks
    }
    for event in events:
        if event["ph"] == "X" and event["cat"] in KINDS:
            began_ns = _nanoseconds(event["ts"])
            ended_ns = began_ns + _nanoseconds(event["dur"])
            span = Span(event["cat"], event["name"], began_ns, ended_ns, details=event.get("args", {}))
            parts[event["pid"]].spans.append(span)
        elif event["ph"] == "i":
            parts[event["pid"]].steps.append(_nanoseconds(event["ts"]))
    return list(parts.values())


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)
