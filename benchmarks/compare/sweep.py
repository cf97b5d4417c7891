"""The sweep: for each collective and size, all systems take turns, again and again: A B C D A B C D ..."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.compare.environments import MissingError
from benchmarks.compare.jobs import PEERS, Job

__all__ = ["COLLECTIVES", "Result", "Row", "Settings", "Timing", "bus_factor", "counts_of", "measure"]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_MAX_ITERATIONS = 1000
_TIMEOUT_S = 60.0


def bus_factor(collective: str, ranks: int) -> float:
    """By what S / time is multiplied to give the bus bandwidth, as in nccl-tests and farandole bench."""
    return {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(collective, (ranks - 1) / ranks)


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure; the names are those of the command line."""

    collectives: tuple[str, ...]
    ranks: int
    sizes: tuple[int, ...]
    dtype: str
    repetitions: int
    block_s: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one system, collective and size.

    Attributes:
        iterations: timed calls, over all repetitions.
        median_s, p99_s: of what the slowest rank took, from the call in Python to its return.
        after_last_s: the same median, but from when the last rank called to when the last returned: what is left when
            ranks come late out of the barrier before the call.
        span_s: the same median, but from when the first rank called to when the last returned.
        period_s: how long a call and the barrier before it took together: the mean of a repetition, and of those the
            median. Where there are more ranks than cores, this is the one to trust: the clock of a rank that waits for
            a core has not started yet.
        medians_s, periods_s: of each repetition.
    """

    iterations: int
    median_s: float
    p99_s: float
    after_last_s: float
    span_s: float
    period_s: float
    medians_s: tuple[float, ...]
    periods_s: tuple[float, ...]

    def value(self, what: str) -> float:
        """The "median" or "period"."""
        return self.median_s if what == "median" else self.period_s

    def values(self, what: str) -> tuple[float, ...]:
        """The same, of each repetition."""
        return self.medians_s if what == "median" else self.periods_s


@dataclass(frozen=True, slots=True)
class Row:
    """One collective and size.

    Attributes:
        size: S in bytes.
        timings: by system.
    """

    collective: str
    size: int
    timings: dict[str, Timing]

    def best_peer(self, what: str) -> str | None:
        """The peer with the smallest "median" or "period"."""
        present = [name for name in PEERS if name in self.timings]
        return min(present, key=lambda name: self.timings[name].value(what), default=None)

    def ratio(self, system: str, what: str) -> tuple[float, float, float] | None:
        """How many times as long as ``system`` the best peer takes; and the least and the most of any repetition."""
        best = self.best_peer(what)
        if best is None or system not in self.timings:
            return None
        peer, own = self.timings[best], self.timings[system]
        each = [p / o for p, o in zip(peer.values(what), own.values(what), strict=True)]
        return peer.value(what) / own.value(what), min(each), max(each)


@dataclass
class Result:
    """Of a run.

    Attributes:
        missing: systems that were not measured, or not to the end, and why.
        versions: of the others.
        idle: of each, the share of one core that its waiting ranks took while others were measured.
        machine: what it ran on, and the load averages (1 min) before and after.
    """

    settings: Settings
    rows: list[Row] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Result:
        """The other way round."""
        rows = [
            Row(row["collective"], row["size"], {name: Timing(**timing) for name, timing in row["timings"].items()})
            for row in data["rows"]
        ]
        return Result(**{**data, "settings": Settings(**data["settings"]), "rows": rows})


def counts_of(collective: str, settings: Settings) -> list[int]:
    """Elements of the whole buffer for each size: at least one, and as many for each rank where each owns a part."""
    itemsize = np.dtype(settings.dtype).itemsize
    granule = settings.ranks if collective in ("all_gather", "reduce_scatter") else 1
    counts = [max(1, -(-size // (itemsize * granule))) * granule for size in settings.sizes]
    return list(dict.fromkeys(counts))


def measure(jobs: dict[str, Job], result: Result, advance: Callable[[str], None]) -> None:
    """Fill ``result``; a job that fails is closed, taken out of ``jobs`` and reported as missing.

    Args:
        jobs: by system, in the order of turns.
        result: with the settings.
        advance: called after each turn with what it was.
    """
    settings = result.settings
    result.machine = {
        "cores": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "began": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load_before": os.getloadavg()[0],
    }
    try:
        for collective in settings.collectives:
            for count in counts_of(collective, settings):
                row = _row(jobs, collective, count, result, advance)
                if row.timings:
                    result.rows.append(row)
    finally:
        result.machine["load_after"] = os.getloadavg()[0]
        result.idle = {name: job.idle_cpu_s / max(job.idle_s, 1e-9) for name, job in jobs.items()}


def _row(jobs: dict[str, Job], collective: str, count: int, result: Result, advance: Callable[[str], None]) -> Row:
    settings = result.settings
    size = count * np.dtype(settings.dtype).itemsize
    spans: dict[str, list[npt.NDArray[np.int64]]] = {}
    iterations: dict[str, int] = {}

    def attempt(name: str, step: Callable[[Job], None]) -> None:
        if name not in jobs:
            return
        try:
            step(jobs[name])
        except MissingError as error:
            result.missing[name] = f"failed in {collective} of {size} bytes: {error}"
            spans.pop(name, None)
            jobs.pop(name).close()

    def prepare(job: Job) -> None:
        what = "copy" if job.name == "copy" else collective
        answers = job.ask(_TIMEOUT_S, do="prepare", collective=what, count=count, dtype=settings.dtype)
        wrong = sum(answer["wrong"] for answer in answers)
        if wrong:
            raise MissingError(f"{wrong} elements are wrong")
        period_s = float(np.median(np.diff(_spans(job, 1, 3)[0]))) / 1e9
        if period_s < settings.block_s / 30:
            period_s = float(np.median(np.diff(_spans(job, 0, 20)[0]))) / 1e9
        fewest = 2 if period_s > 0.5 else 5
        iterations[job.name] = min(max(round(settings.block_s / max(period_s, 1e-9)), fewest), _MAX_ITERATIONS)
        spans[job.name] = []

    def turn(job: Job) -> None:
        number = iterations[job.name]
        spans[job.name].append(_spans(job, max(1, number // 10), number))

    for name in list(jobs):
        attempt(name, prepare)
    for _ in range(settings.repetitions):
        for name in list(jobs):
            attempt(name, turn)
            advance(f"{collective} {size} {name}")
    return Row(collective, size, {name: _timing(blocks) for name, blocks in spans.items() if blocks})


def _spans(job: Job, warmup: int, iterations: int) -> npt.NDArray[np.int64]:
    """When each call began and ended on each rank, in ns: shape (2, ranks, iterations)."""
    answers = job.ask(_TIMEOUT_S, do="run", warmup=warmup, iterations=iterations)
    return np.array([[answer[what] for answer in answers] for what in ("starts", "ends")], np.int64)


def _timing(blocks: list[npt.NDArray[np.int64]]) -> Timing:
    slowest = [(ends - starts).max(axis=0) / 1e9 for starts, ends in blocks]
    after_last = [(ends.max(axis=0) - starts.max(axis=0)) / 1e9 for starts, ends in blocks]
    span = [(ends.max(axis=0) - starts.min(axis=0)) / 1e9 for starts, ends in blocks]
    # From the end of the first call to that of the last: so many barriers and calls.
    periods = [float(np.diff(ends.max(axis=0)[[0, -1]])[0]) / 1e9 / (ends.shape[1] - 1) for _, ends in blocks]
    times = np.concatenate(slowest)
    return Timing(
        len(times),
        float(np.median(times)),
        float(np.percentile(times, 99, method="higher")),
        float(np.median(np.concatenate(after_last))),
        float(np.median(np.concatenate(span))),
        float(np.median(periods)),
        tuple(float(np.median(block)) for block in slowest),
        tuple(periods),
    )
