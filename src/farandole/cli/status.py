"""``farandole status``: what the ranks of running jobs are doing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from farandole.status import ask, processes_that_answer

__all__ = ["status"]

_AT_ONCE = 64
_WIDTH = 200
"""Characters in a line where there is no terminal that says."""


def status(
    process: Annotated[
        int | None,
        typer.Argument(metavar="[PID]", help="A process of the job; all jobs of this host if there is none."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds to wait for the answer of each process.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what each rank of a running job is in: which collective, since when, whom it waits for, at which line.

    The job goes on undisturbed. It must belong to the same user. A rank that does not answer is busy in code that holds
    Python's lock, or is stopped; what it last said to the others is shown nevertheless.

    Examples:

        farandole status
        farandole status 12345
        farandole status --json
    """
    answers = _ask_all([process] if process is not None else processes_that_answer(), timeout, process)
    if process is not None and answers[process] is None:  # others may tell of it
        answers = _ask_all([process, *processes_that_answer()], timeout, process)
    groups = _merged(answer for answer in answers.values() if answer is not None)
    for group in groups:
        for rank in group["ranks"]:
            answer = answers.get(rank["process"]) if rank["is_here"] else None
            rank["answers"] = answer is not None
            rank["lines"] = _lines(answer)
    if process is not None:
        groups = [group for group in groups if process in (rank["process"] for rank in group["ranks"])]
    silent = [one for one, answer in answers.items() if answer is None and process in (None, one)]
    if as_json:
        print(json.dumps({"communicators": groups, "silent_processes": silent}, indent=2))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    if silent and not groups:
        console.print(f"{_these(silent)} not answer: stopped, or busy in code that holds Python's lock")
    elif not groups:
        whose = "no process of this user on this host" if process is None else f"process {process}"
        console.print(f"{whose} has {'an' if process is None else 'no'} open communicator of farandole")
    for group in groups:
        console.print(_table(group))
        console.print()
    for one, answer in answers.items():
        if answer is not None and "problem" in answer:
            console.print(f"process {one} could not say what it is doing: {answer['problem']}")


def _ask_all(processes: Iterable[int], timeout_s: float, wanted: int | None) -> dict[int, dict[str, Any] | None]:
    """What these processes say, and all others of their communicators. None for those that do not answer.

    Raises:
        ArgumentError: ``wanted`` has no communicator.
    """
    answers: dict[int, dict[str, Any] | None] = {}

    def ask_one(process: int) -> dict[str, Any] | None:
        try:
            return ask(process, timeout_s)
        except ValueError:
            if process == wanted:
                raise
            return {"communicators": [], "threads": []}  # it has just ended, or is not ours

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        waiting = set(processes)
        while waiting:
            wave = sorted(waiting)
            answers |= zip(wave, threads.map(ask_one, wave), strict=True)
            told = [answer for answer in answers.values() if answer is not None]
            ranks = [rank for answer in told for group in answer["communicators"] for rank in group["ranks"]]
            waiting = {rank["process"] for rank in ranks if rank["is_here"] and not rank["is_gone"]} - answers.keys()
    return answers


def _these(processes: list[int]) -> str:
    if len(processes) == 1:
        return f"process {processes[0]} does"
    return f"processes {', '.join(map(str, processes))} do"


def _merged(answers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each communicator once: its ranks all tell of it."""
    groups: dict[str, dict[str, Any]] = {}
    for answer in answers:
        for communicator in answer["communicators"]:
            group = groups.setdefault(communicator["identity"], communicator)
            for rank, seen in zip(group["ranks"], communicator["ranks"], strict=True):
                rank["is_here"] |= seen["is_here"]
    return sorted(groups.values(), key=lambda group: (-group["world_size"], group["identity"]))


def _lines(answer: dict[str, Any] | None) -> list[str]:
    """Where the threads of a process are; those within farandole, if there are any."""
    threads = [] if answer is None else answer["threads"]
    within = [thread for thread in threads if thread["is_in_farandole"]]
    return [thread["line"] for thread in within or threads]


def _table(group: dict[str, Any]) -> Table:
    members = [rank["job_rank"] for rank in group["ranks"]]
    title = "1 rank" if group["world_size"] == 1 else f"{group['world_size']} ranks"
    if members != list(range(len(members))):
        title += f", in the job {', '.join(map(str, members))}"
    if group["stopped"]:
        title += f"; stopped: {group['stopped']}"
    table = Table(title=Text(title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    hosts = ["host"] if any(rank["host"] for rank in group["ranks"]) else []
    for name in ("rank", *hosts, "process", "collectives", "doing", "for s", "at"):
        table.add_column(name, justify="right" if name in ("rank", "process", "collectives", "for s") else "left")
    for rank in group["ranks"]:
        seconds = "" if rank["seconds"] is None else f"{rank['seconds']:.1f}"
        silence = "(does not answer)" if rank["is_here"] else "(ask on its host)"
        place = "\n".join(rank["lines"]) if rank["answers"] else silence
        cells = [str(rank[name]) for name in ("rank", *hosts, "process", "collectives")]
        table.add_row(*cells, Text(_doing(rank, group["ranks"])), seconds, Text(place))
    return table


def _doing(rank: dict[str, Any], ranks: list[dict[str, Any]]) -> str:
    """In words, with the ranks that it waits for."""
    if rank["has_closed"]:
        return "has closed it"
    if rank["is_gone"]:
        return f"has ended, after {rank['call'] or rank['last_message'] or 'no call'}"
    if rank["is_in_it"]:
        text = rank["call"]
        late = [str(one["rank"]) for one in ranks if one["collectives"] < rank["collectives"]]
        if late:
            text += f", waits for {'rank' if len(late) == 1 else 'ranks'} {', '.join(late)}"
    else:
        text = f"no collective; the last was {rank['call']}" if rank["call"] else "no collective yet"
    if rank["last_message"]:
        text += f"; last message: {rank['last_message']}"
    if rank["refused"]:
        text += f"; refused {rank['refused']}"
    return f"stopped, in {text}" if rank["is_stopped"] else text
