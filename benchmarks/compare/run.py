"""A run: the jobs of all systems are started, measured and ended."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.command import progress_on_stderr
from benchmarks.compare.environments import MissingError
from benchmarks.compare.jobs import Command, Job
from benchmarks.compare.sweep import Result, counts_of, measure

__all__ = ["run_all"]


def run_all(systems: Sequence[str], result: Result, commands: Callable[[str, Path], list[Command]]) -> None:
    """Measure systems and fill ``result``; one that cannot be started is missing there.

    Args:
        systems: in the order of turns.
        result: with the settings.
        commands: what starts the ranks of a system, which may put files into the folder.
    """
    settings = result.settings
    num_rows = sum(len(counts_of(collective, settings)) for collective in settings.collectives)
    progress = progress_on_stderr()
    jobs: dict[str, Job] = {}
    with tempfile.TemporaryDirectory(prefix="compare-") as folder, contextlib.ExitStack() as stack:
        stack.callback(_close, jobs)
        for name in systems:
            try:
                jobs[name] = Job(name, settings.ranks, Path(folder), commands(name, Path(folder)))
            except (MissingError, OSError) as error:
                result.missing[name] = str(error)
            else:
                result.versions[name] = jobs[name].version
        with progress:
            task = progress.add_task("measuring", total=num_rows * settings.repetitions * len(jobs))

            def advance(description: str) -> None:
                progress.update(task, advance=1, description=description)
                progress.refresh()

            measure(jobs, result, advance)


def _close(jobs: dict[str, Job]) -> None:
    for job in jobs.values():
        job.close()
