"""One rank of ``farandole bench``: measures, and on rank 0 prints a JSON object per row for the command to lay out.

Usage: python -m farandole.cli.bench_worker SETTINGS, as a rank of a job; SETTINGS is a `Settings` as JSON.

How a row comes about: for each of out-of-place and in-place, buffers are filled; the collective is called once on real
data, and checked; then ``warmup`` times; then ``iterations`` times, with the clock read before and after each call, and
a barrier before that, outside the timed part, to keep the ranks together. With ``cold``, every rank overwrites a block
that is larger than the caches before that. The times are gathered afterwards; an iteration took as long as it took the
slowest rank.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

import farandole
from farandole.algorithms import ROOTED
from farandole.calibration import last_level_cache_bytes
from farandole.calls import Algorithm, CollectiveStats
from farandole.cli.algorithm_argument import is_file, load_algorithm
from farandole.cli.bench_check import contribution, count_wrong, neutral, numpy_dtype, reduced
from farandole.cli.bench_settings import Measurement, Row, Settings
from farandole.collectives import is_parted, is_reducing
from farandole.communicator import Communicator

__all__ = ["Bench", "Buffers", "main"]

Array = npt.NDArray[Any]


_IN_PLACE_ONLY = {"broadcast"}
_PART_GOES_IN = {"all_gather", "gather"}
_PART_COMES_OUT = {"reduce_scatter", "scatter"}


def main() -> None:
    """Measure what the command line asks for."""
    settings = Settings(**json.loads(sys.argv[1]))
    with farandole.init() as communicator:
        bench = Bench(communicator, settings)
        for count in settings.counts:
            row = bench.measure(count)
            if communicator.rank == 0:
                print(json.dumps(asdict(row)), flush=True)


class Bench:
    """The measurements of one rank."""

    def __init__(self, communicator: Communicator, settings: Settings) -> None:
        self.communicator = communicator
        self.settings = settings
        self.dtype = numpy_dtype(settings.dtype)
        self.evicting = np.empty(2 * last_level_cache_bytes(), dtype=np.uint8) if settings.cold else None
        self.algorithm: Algorithm | None = settings.algorithm
        if settings.algorithm is not None and is_file(settings.algorithm):
            root = settings.root if settings.collective in ROOTED else None
            self.algorithm = load_algorithm(settings.algorithm, root)

    def measure(self, count: int) -> Row:
        """One row. Called by all ranks."""
        collective = self.settings.collective
        forms = {
            "out_of_place": collective not in _IN_PLACE_ONLY,
            "in_place": collective != "barrier",
        }
        measured: dict[str, Measurement | None] = dict.fromkeys(forms)
        algorithm = transport = ""
        for form, exists in forms.items():
            if exists:
                algorithm, transport, measured[form] = self._measure(count, in_place=form == "in_place")
        return Row(count, algorithm, transport, measured["out_of_place"], measured["in_place"])

    def _measure(self, count: int, *, in_place: bool) -> tuple[str, str, Measurement]:
        """The algorithm that ran, how data travelled, and the times."""
        buffers = Buffers(self, count, in_place=in_place)
        buffers.fill_with_data()
        before = self._stats()
        buffers.call()
        none = CollectiveStats(self.settings.collective, "")
        ((algorithm, sent, mapped),) = (
            (
                name,
                now.bytes_sent - before.get(name, none).bytes_sent,
                now.bytes_mapped - before.get(name, none).bytes_mapped,
            )
            for name, now in self._stats().items()
            if now.calls > before.get(name, none).calls
        )
        transport = self._transport(self._total(sent), self._total(mapped))
        checked = self.settings.check and self.settings.collective != "barrier"
        num_wrong = self._total(buffers.count_wrong()) if checked else None
        buffers.fill_with_neutral()
        times = self._time(buffers.call)
        p99_s = float(np.percentile(times, 99, method="higher"))
        return algorithm, transport, Measurement(float(np.median(times)), p99_s, num_wrong)

    def _stats(self) -> dict[str, CollectiveStats]:
        entries = self.communicator.stats()
        return {entry.algorithm: entry for entry in entries if entry.collective == self.settings.collective}

    def _transport(self, sent: int, mapped: int) -> str:
        if self.communicator.world_size == 1:
            return "local"
        if mapped == 0:
            return "staged"
        return "mapped" if mapped == sent else "both"

    def _time(self, call: Callable[[], object]) -> npt.NDArray[np.float64]:
        """Seconds of each iteration, on the slowest rank."""
        communicator, iterations = self.communicator, self.settings.iterations
        times = np.empty(iterations)
        clock = time.perf_counter
        for _ in range(self.settings.warmup):
            call()
        gc.collect()
        gc.disable()
        try:
            for index in range(iterations):
                if self.evicting is not None:
                    self.evicting.fill(index)
                if self.settings.collective != "barrier":
                    communicator.barrier()
                start = clock()
                call()
                times[index] = clock() - start
        finally:
            gc.enable()
        per_rank = communicator.all_gather(times).reshape(communicator.world_size, iterations)
        slowest: npt.NDArray[np.float64] = per_rank.max(axis=0)
        return slowest

    def _total(self, number: int) -> int:
        return int(self.communicator.all_gather(np.array([number])).sum())


class Buffers:
    """What one rank puts in and gets out, for one size."""

    def __init__(self, bench: Bench, count: int, *, in_place: bool) -> None:
        settings, communicator = bench.settings, bench.communicator
        self.bench = bench
        self.count = count
        self.in_place = in_place
        self.is_root = communicator.rank == settings.root
        collective = settings.collective
        part_count = count // communicator.world_size if is_parted(collective) else count
        self.part = slice(communicator.rank * part_count, (communicator.rank + 1) * part_count)
        empty = communicator.empty if settings.registered else np.empty
        whole = empty(count, bench.dtype)
        other = whole if in_place else empty(count, bench.dtype)
        self.input = whole[self.part] if collective in _PART_GOES_IN else whole
        self.output = other[self.part] if collective in _PART_COMES_OUT else other

    def call(self) -> object:
        """The collective, once."""
        settings, communicator = self.bench.settings, self.bench.communicator
        more: dict[str, Any] = {"algorithm": self.bench.algorithm}
        source, target, op, root = self.input, self.output, settings.op, settings.root
        if settings.collective == "barrier":
            return communicator.barrier(**more)
        if settings.collective == "broadcast":
            return communicator.broadcast(target, root, **more)
        if settings.collective == "scatter":
            return communicator.scatter(source if self.is_root else None, root, out=target, **more)
        if settings.collective == "gather":
            return communicator.gather(source, root, out=target if self.is_root else None, **more)
        if settings.collective == "reduce":
            out = target if self.is_root and not self.in_place else None
            return communicator.reduce(source, root, op, out=out, **more)
        if settings.collective in ("all_reduce", "reduce_scatter"):
            out = None if self.input is self.output else target
            return getattr(communicator, settings.collective)(source, op, out=out, **more)
        return getattr(communicator, settings.collective)(source, out=target, **more)

    def fill_with_data(self) -> None:
        """Put this rank's data in; all else holds the wrong thing."""
        wrong = self._period(self.bench.communicator.world_size)  # of a rank that does not exist
        self.output[:] = np.resize(wrong, len(self.output))
        if self.bench.settings.collective != "broadcast" or self.is_root:
            self.input[:] = _repeated(self._period(self.bench.communicator.rank), self._input_start, len(self.input))

    def fill_with_neutral(self) -> None:
        """Put in what a reduction in place, however often repeated, leaves as it is."""
        op = self.bench.settings.op if is_reducing(self.bench.settings.collective) else None
        self.input[:] = self.output[:] = neutral(self.bench.dtype, op)

    def count_wrong(self) -> int:
        """Elements of this rank's output that are not what the collective promises."""
        settings, communicator = self.bench.settings, self.bench.communicator
        collective, num_ranks = settings.collective, communicator.world_size
        if collective in ("reduce", "gather") and not self.is_root:
            return 0
        if is_reducing(collective):
            expected, bound = reduced([self._period(rank) for rank in range(num_ranks)], settings.op)
            return count_wrong(self.output, expected, bound, self.part.start if collective == "reduce_scatter" else 0)
        if collective == "broadcast":
            return count_wrong(self.output, self._period(settings.root), None)
        if collective == "scatter":
            return count_wrong(self.output, self._period(settings.root), None, self.part.start)
        # What is left comes part by part from each rank; in all_to_all, from the place there that is for this rank.
        wrong = 0
        for rank, part in enumerate(np.split(self.output, num_ranks)):
            start = self.part.start if collective == "all_to_all" else rank * len(part)
            wrong += count_wrong(part, self._period(rank), None, start)
        return wrong

    @property
    def _input_start(self) -> int:
        return self.part.start if self.bench.settings.collective in _PART_GOES_IN else 0

    def _period(self, rank: int) -> Array:
        settings = self.bench.settings
        op = settings.op if is_reducing(settings.collective) else None
        num_ranks = self.bench.communicator.world_size
        return contribution(rank, num_ranks, self.count, self.bench.dtype, op, seed=self.count)


def _repeated(period: Array, start: int, count: int) -> Array:
    return np.resize(np.roll(period, -start), count)


if __name__ == "__main__":
    main()
