"""The ALGORITHM argument of the commands: the name of an algorithm, or a function in a Python file.

``ring`` is every collective that has an algorithm of that name. ``plans/mine.py:all_reduce`` is the function
``all_reduce`` of that file; it is called with the world size, and with the root if it takes one as its second argument,
and returns a `Schedule`. What goes wrong in that file is shown as the user's own, without the frames of farandole.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import farandole
from farandole.algorithms import ALGORITHMS, HIERARCHICAL, ROOTED, build, names
from farandole.errors import ArgumentError, FarandoleError
from farandole.schedule import UNNAMED, Schedule
from farandole.topology import Topology

__all__ = [
    "MAX_RANKS",
    "CollectiveOption",
    "HostsOption",
    "RanksOption",
    "RootOption",
    "is_file",
    "load_algorithm",
    "schedules_of",
    "topology_of",
]

MAX_RANKS = 1024
"""More take so many transfers that making and proving them would fill memory."""

_NUM_FRAMES = 5

RanksOption = Annotated[int, typer.Option("-n", "--ranks", min=1, max=MAX_RANKS, metavar="N", help="Number of ranks.")]
HostsOption = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="HOSTS",
        help="Where the ranks are, and how many: 2x4, 3+1, or 0,1,0,1.",
        show_default="all on one",
    ),
]
CollectiveOption = Annotated[
    str | None,
    typer.Option("-c", "--collective", metavar="NAME", help=f"Only this collective: {', '.join(ALGORITHMS)}."),
]
RootOption = Annotated[
    int | None,
    typer.Option(
        "--root",
        min=0,
        metavar="R",
        help=f"Root of {', '.join(sorted(ROOTED))} (src or dst in Python).",
        show_default="0",
    ),
]


def topology_of(context: typer.Context, ranks: int, hosts: str | None) -> Topology:
    """What --ranks and --hosts say together.

    Raises:
        ArgumentError: they do not agree, or there are too many ranks.
    """
    if hosts is None:
        return Topology.one_host(ranks)
    topology = Topology.parse(hosts)
    source = context.get_parameter_source("ranks")
    if source is not None and source.name != "DEFAULT" and ranks != topology.world_size:
        raise ArgumentError(
            f"--ranks is {ranks}, but --hosts {hosts} has {topology.world_size} ranks; give one of the two"
        )
    if topology.world_size > MAX_RANKS:
        raise ArgumentError(f"--hosts {hosts} has {topology.world_size} ranks; at most {MAX_RANKS} are allowed")
    return topology


def schedules_of(
    algorithm: str | None,
    world_size: int,
    *,
    collective: str | None = None,
    root: int | None = None,
    topology: Topology | None = None,
) -> list[Schedule]:
    """The schedules that an ALGORITHM argument means, in the order of `ALGORITHMS`.

    Args:
        algorithm: a name, PATH.py:FUNCTION, or None for every algorithm there is; with one host without those that know
            hosts, as there they are no others.
        world_size: number of ranks.
        collective: only this one; None takes all that have the algorithm.
        root: for the collectives that have one; None is rank 0.
        topology: for the algorithms that know hosts; None if all ranks share one.

    Raises:
        ArgumentError: no such algorithm, file or function; or what the function returns is not the schedule asked for.
        MalformedScheduleError: there is no such collective, or it has no algorithm of that name.
    """
    if algorithm is not None and is_file(algorithm):
        schedule = load_algorithm(algorithm, root)(world_size)
        if collective is not None and schedule.collective != collective:
            raise ArgumentError(f"{algorithm} returned a schedule for {schedule.collective}, not for {collective}")
        return [schedule]
    is_one_host = topology is None or topology.is_one_host
    left_out = HIERARCHICAL if algorithm is None and is_one_host else frozenset()
    if collective is not None:
        chosen = [
            (collective, name) for name in ([algorithm] if algorithm else names(collective)) if name not in left_out
        ]
    else:
        chosen = [(c, n) for c in ALGORITHMS for n in names(c) if algorithm in (None, n) and n not in left_out]
        if not chosen:
            known = sorted({name for by_name in ALGORITHMS.values() for name in by_name})
            raise ArgumentError(
                f"there is no algorithm named {algorithm!r}; known are {', '.join(known)}, or give PATH.py:FUNCTION"
            )
        if root and not any(c in ROOTED for c, _ in chosen):
            raise ArgumentError(f"root is {root}, but {algorithm} has a root in no collective")
    is_list = collective is None
    return [build(c, name, world_size, 0 if is_list and c not in ROOTED else root or 0, topology) for c, name in chosen]


def is_file(algorithm: str) -> bool:
    """Whether the argument names a function in a file, not an algorithm of `ALGORITHMS`."""
    return ":" in algorithm or algorithm.endswith(".py")


def load_algorithm(algorithm: str, root: int | None) -> Callable[[int], Schedule]:
    """The function that PATH.py:FUNCTION names, as a function of the world size alone.

    The file is executed, with its folder on sys.path as for a script. A schedule that has no name of its own gets that
    of the function.

    Args:
        algorithm: PATH.py:FUNCTION.
        root: for a function that takes one; None is rank 0.

    Raises:
        ArgumentError: the file or the function does not exist, or the file cannot be executed; or, from the function
            returned: it raises an exception, or returns anything but a schedule for this world size.
    """
    function = _load_function(algorithm)
    takes_root = _takes_root(function)
    if root and not takes_root:
        raise ArgumentError(
            f"root is {root}, but {algorithm} takes the world size alone; give it a second argument, root"
        )

    def build_schedule(world_size: int) -> Schedule:
        with _errors_shown_as_the_users_own(algorithm):
            schedule = function(world_size, root or 0) if takes_root else function(world_size)
        if not isinstance(schedule, Schedule):
            raise ArgumentError(f"{algorithm} returned {schedule!r:.60}; it must return a farandole.Schedule")
        if schedule.world_size != world_size:
            raise ArgumentError(
                f"{algorithm} was asked for {world_size} ranks and returned a schedule of {schedule.world_size}"
            )
        if schedule.name == UNNAMED:
            schedule = schedule.renamed(algorithm.rpartition(":")[2])
        return schedule

    return build_schedule


@contextlib.contextmanager
def _errors_shown_as_the_users_own(algorithm: str) -> Iterator[None]:
    try:
        yield
    except FarandoleError:
        raise
    except Exception as error:
        raise ArgumentError(_in_the_users_file(error, algorithm)) from None


def _in_the_users_file(error: Exception, algorithm: str) -> str:
    """The exception with its place, and the frames that are the user's own."""
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        what = f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
        return f"{what}\n    {error.text.strip()}" if error.text else what
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_the_users(frame.filename)]
    if not frames:
        return f"{algorithm}: {what}"
    shown = "".join(traceback.format_list(frames[-_NUM_FRAMES:])).rstrip()
    return f"{frames[-1].filename}:{frames[-1].lineno}: {what}\n{shown}"


def _is_the_users(filename: str) -> bool:
    others = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    others.append(Path(farandole.__file__).parent)
    path = Path(filename)
    return path.is_file() and not any(path.is_relative_to(other) for other in others)  # frozen modules have no file


def _load_function(algorithm: str) -> Callable[..., Any]:
    path_text, _, function_name = algorithm.rpartition(":") if ":" in algorithm else (algorithm, "", "")
    path = Path(path_text)
    if not path.is_file():
        raise ArgumentError(f"there is no file {path_text!r}; ALGORITHM is a name, or PATH.py:FUNCTION")
    module_name = f"farandole_algorithm_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"{path_text} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with _errors_shown_as_the_users_own(algorithm):
        spec.loader.exec_module(module)
    function = getattr(module, function_name, None) if function_name else None
    if not callable(function):
        own = [name for name, value in vars(module).items() if _is_own_function(value, module_name)]
        problem = f"has no function {function_name!r}" if function_name else "needs the name of a function behind it"
        there = f"; it has {', '.join(own)}" if own else "; it has none at all"
        raise ArgumentError(f"{path_text} {problem}{there}. Write {path_text}:{own[0] if own else 'FUNCTION'}")
    loaded: Callable[..., Any] = function
    return loaded


def _is_own_function(value: object, module_name: str) -> bool:
    return inspect.isfunction(value) and value.__module__ == module_name and not value.__name__.startswith("_")


def _takes_root(function: Callable[..., Any]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind in positional]
    # A second argument with a default and another name (num_chunks, say) is the function's own business.
    return len(parameters) > 1 and (parameters[1].name == "root" or parameters[1].default is inspect.Parameter.empty)
