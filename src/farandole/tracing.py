"""`farandole.trace`: when all ranks computed and communicated, in one file."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from farandole import timeline
from farandole.clocks import clock_identity, clock_offset
from farandole.communicator import Communicator
from farandole.errors import ArgumentError
from farandole.optimizer_steps import recorded_steps
from farandole.runner import open_runners
from farandole.timeline import Record
from farandole.trace_file import Part, RankExposure, write_trace
from farandole.trace_ranks import Ranks, ranks_of

__all__ = ["Trace", "trace"]

_AFTER_A_FAILURE_S = 3.0
"""That a rank whose body failed waits for the others: they may be waiting for it elsewhere."""


class Trace:
    """A trace that is on, or has ended; made by `trace`.

    Attributes:
        path: of the file of all ranks.
    """

    def __init__(self, path: Path, record: Record) -> None:
        self.path = path
        self._record = record
        self._exposed: list[RankExposure] | None = None

    @property
    def exposed(self) -> list[RankExposure]:
        """By rank, how long it communicated, and how much of that was hidden behind what it computed. Of all ranks, on
        each of them; where a rank was lost, of this one alone.

        Raises:
            ArgumentError: the trace has not ended.
        """
        if self._exposed is None:
            raise ArgumentError("what was exposed is known when the trace has ended: ask after the with statement")
        return self._exposed

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A context in which the program computes, to be shown by this name. What `farandole.training` and torch's
        optimizers do is recorded without."""
        with timeline.span("compute", name):
            yield

    def end_step(self) -> None:
        """A step of training ends here. With torch's optimizers, each step of one is the end of one without this."""
        timeline.mark_step()


@contextlib.contextmanager
def trace(path: str | os.PathLike[str], *, communicator: Communicator | None = None) -> Iterator[Trace]:
    """Record what all ranks compute and communicate, and write it into one file at the end.

    ::

        with farandole.trace("steps.json") as trace:
            for batch in batches:
                train_step(batch)
        print(trace.exposed[0].total)

    The file opens in https://ui.perfetto.dev, and in chrome://tracing; ``farandole trace steps.json`` prints how much
    communication was exposed. Recorded are all collectives on farandole's communicators, those of torch's backend
    "farandole" included; blocking `send` and `recv`; forward, backward and communication of `farandole.training`, on
    any backend; steps of torch's optimizers, if torch was imported before; and what `Trace.span` is put around. What
    runs on GPUs is not timed. Where ranks are on several hosts, their clocks are aligned.

    All ranks enter and leave it together. If the body fails on a rank, what can be had is written all the same: by all
    into one file if they come within some seconds, else by each rank into a file of its own, as in steps.rank3.json.

    Args:
        path: of the file, on the host of rank 0; one that is there is replaced.
        communicator: whose ranks take part, and give their numbers. None: all of torch.distributed, if that is
            initialised; else of `farandole.init`, if it was called; else this process alone. Where ranks are threads,
            as in `farandole.local`, each gives its own; of its thread are recorded the communicator, and what it makes.

    Returns:
        A `Trace`, whose `exposed` is known after the end.

    Raises:
        ArgumentError: on every rank: the file cannot be written, or a trace is on already; on this one: it is one of
            several ranks, and does not know the others yet.
        OSError: at the end: the file could not be written after all.
    """
    path = Path(path)
    ranks = ranks_of(communicator)
    record = Record()
    recorder = contextlib.ExitStack()
    try:
        _begin(path, ranks, record, recorder, communicator)
    except BaseException:
        timeline.close_record(record)
        recorder.close()
        ranks.close()
        raise
    own = Trace(path, record)
    failed = True
    try:
        yield own
        failed = False
    finally:
        timeline.close_record(record)
        recorder.close()
        try:
            _end(own, record, ranks, failed)
        finally:
            ranks.close()


def _begin(
    path: Path, ranks: Ranks, record: Record, recorder: contextlib.ExitStack, communicator: Communicator | None
) -> None:
    among_threads = communicator is not None and communicator.is_among_threads
    problem = ""
    try:
        if ranks.rank == 0:
            _require_writable(path)
        timeline.open_record(record, of_thread=among_threads)
    except (OSError, ArgumentError) as error:
        problem = f"{path} cannot be written: {error.strerror}" if isinstance(error, OSError) else str(error)
    problems = [one.decode() for one in ranks.all_gather(problem.encode())]
    if problem:
        raise ArgumentError(problem)
    for rank, its in enumerate(problems):
        if its:
            raise ArgumentError(f"on rank {rank}: {its}")
    record.began_ns = timeline.now_ns()
    recorder.enter_context(recorded_steps(record))
    if among_threads and communicator is not None:
        communicator.log_into(record)
    elif not among_threads:
        for runner in open_runners():
            runner.log_into(record)


def _require_writable(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    with tempfile.TemporaryFile(dir=path.parent):  # not the file itself: others may be about to write it, too
        pass


def _end(own: Trace, record: Record, ranks: Ranks, failed: bool) -> None:
    part = Part(
        ranks.rank,
        socket.gethostname(),
        os.getpid(),
        record.began_ns,
        record.ended_ns,
        record.spans,
        sorted(record.steps),
        record.num_missing,
    )
    own._exposed = [part.exposure()]
    try:
        if failed:
            ranks.hurry(_AFTER_A_FAILURE_S)
        problem, num_missing = _merge(own, part, ranks)
    except Exception as error:  # of communication, farandole's or torch's: what this rank has is not to be lost
        _write_own(own.path, part, error)
        return
    if problem and not failed:
        raise OSError(f"{own.path} could not be written: {problem}")
    if num_missing:
        whose = ", ".join(f"{number} spans of rank {rank}" for rank, number in num_missing.items())
        warnings.warn(f"{own.path} is not complete: there was no room for {whose}", RuntimeWarning, stacklevel=4)


def _merge(own: Trace, part: Part, ranks: Ranks) -> tuple[str, dict[int, int]]:
    """Write one file of all parts. Returns what went wrong with it, the same on all ranks; and on rank 0 how many spans
    of which ranks there was no room for."""
    offset_ns, uncertainty_ns = clock_offset(ranks, clock_identity())
    part = replace(part, offset_ns=offset_ns, uncertainty_ns=uncertainty_ns)
    packed = ranks.gather(part.pack())
    problem, exposed, parts = "", [], list[Part]()
    if ranks.rank == 0:
        parts = [Part.unpack(one) for one in packed]
        exposed = [one.exposure() for one in parts]
        try:
            write_trace(own.path, parts)
        except OSError as error:
            problem = error.strerror or str(error)
    told = ranks.all_gather(RankExposure.pack(exposed, problem) if ranks.rank == 0 else b"")[0]
    own._exposed, problem = RankExposure.unpack(told)
    return problem, {one.rank: one.num_missing for one in parts if one.num_missing}


def _write_own(path: Path, part: Part, error: Exception) -> None:
    path = path.with_name(f"{path.stem}.rank{part.rank}{path.suffix}")
    text = f"the ranks could not put their traces together ({error}); that of rank {part.rank} alone "
    try:
        write_trace(path, [replace(part, uncertainty_ns=None)])
    except OSError as problem:
        text += f"could not be written to {path}, either: {problem.strerror or problem}"
    else:
        text += f"is in {path}"
    warnings.warn(text, RuntimeWarning, stacklevel=5)
