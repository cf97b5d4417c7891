"""A job of one system: long-lived ranks, each at the end of a socket, that sleep until they are told to measure.

Starting a job takes a second and more, so each is started once. Nothing of it is left when `Job.close` returns: ranks
are told to quit, then asked, then killed, by the pids that their sockets say. Should the driver be
killed, the sockets close, and each rank ends itself.

What starts the ranks is given: `commands_here` makes the commands for this machine, `benchmarks.lab.commands` those for
several hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.environments import ROOT, MissingError, bin_of

__all__ = ["PEERS", "SYSTEMS", "WORKER", "Command", "Job", "commands_here"]

Command = tuple[list[str], dict[str, str]]
"""What starts ranks, up to the arguments of the worker, and variables to add to its environment."""

WORKER = "benchmarks.compare.worker"
_START_S = 90.0
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class _System:
    """How to start a system.

    Attributes:
        environment: the virtual environment to run in; None for the driver's own.
        launcher: the command before the worker's, for a number of ranks; None if the driver starts the ranks itself.
        variables: for its environment.
        crowded: more of them where there are more ranks than cores, for which these libraries must be told not to spin.
    """

    environment: str | None
    launcher: Callable[[int], list[str]] | None
    variables: tuple[tuple[str, str], ...] = ()
    crowded: tuple[tuple[str, str], ...] = ()


def _farandole(ranks: int) -> list[str]:
    return ["farandole", "run", "-n", str(ranks), "-m"]


def _openmpi(ranks: int) -> list[str]:
    options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    if ranks > len(os.sched_getaffinity(0)):
        options += ["--map-by", ":OVERSUBSCRIBE"]  # also has ranks yield the core while they wait
    return ["mpiexec", *options, "-n", str(ranks), "python", "-m"]


def _hydra(ranks: int) -> list[str]:
    return ["mpiexec", "-n", str(ranks), "python", "-m"]


SYSTEMS = {
    "farandole": _System("farandole", _farandole),
    "farandole-registered": _System("farandole", _farandole),
    "gloo": _System("gloo", None),
    "openmpi": _System("openmpi", _openmpi),
    "mpich": _System("mpich", _hydra),
    "intel-mpi": _System("intel-mpi", _hydra, crowded=(("I_MPI_THREAD_YIELD", "2"),)),
    "copy": _System(None, None),
}
"""What can be measured, in the order in which it takes turns."""

PEERS = ("gloo", "openmpi", "mpich", "intel-mpi")


def commands_here(name: str, num_ranks: int) -> list[Command]:
    """What starts the ranks of a system on this machine."""
    system = SYSTEMS[name]
    variables = dict(system.variables)
    if num_ranks > len(os.sched_getaffinity(0)):
        variables.update(system.crowded)
    python = sys.executable
    if system.environment is not None:
        bin_folder = bin_of(system.environment)
        variables["PATH"] = f"{bin_folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        python = str(bin_folder / "python")
    if system.launcher is not None:
        program, *options = system.launcher(num_ranks)
        return [([str(bin_of(system.environment or "") / program), *options, WORKER], variables)]
    own = [{"RANK": str(rank), "WORLD_SIZE": str(num_ranks)} for rank in range(num_ranks)]
    return [([python, "-m", WORKER], {**variables, **more}) for more in own]


class Job:
    """The ranks of one system.

    Attributes:
        name: one of `SYSTEMS`.
        version: of the library, as rank 0 says.
        idle_s, idle_cpu_s: how long it has been waiting for its turn, and the processor time that all its ranks took
            meanwhile.
    """

    def __init__(self, name: str, num_ranks: int, folder: Path, commands: Sequence[Command]) -> None:
        """Start the ranks and wait until all have joined.

        Args:
            name: one of `SYSTEMS`.
            num_ranks: that the commands start, all together.
            folder: for what the ranks need to meet, and what they say.
            commands: see `Command`.

        Raises:
            MissingError: they do not come up.
        """
        self.name, self.num_ranks, self.version = name, num_ranks, ""
        self.idle_s = self.idle_cpu_s = 0.0
        self._folder = folder / name
        self._folder.mkdir()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[socket.socket] = []
        self._pids: list[int] = []
        self._rested: tuple[float, float] | None = None
        try:
            with socket.socket(socket.AF_UNIX) as listener, (self._folder / "log").open("wb") as log:
                listener.bind(str(self._folder / "socket"))
                listener.listen(num_ranks)
                self._start(commands, log.fileno())
                self._join(listener)
        except BaseException:
            self.close()
            raise

    def _start(self, commands: Sequence[Command], log: int) -> None:
        variables = {**os.environ, "COMPARE_DIR": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
        # A user's own settings for a library, as I_MPI_FABRICS, go through; those of this driver's Python do not.
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            variables.pop(name, None)
        for command, more in commands:
            process = subprocess.Popen(
                [*command, self.name, str(self._folder / "socket")],
                cwd=ROOT,
                env={**variables, **more},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C at the terminal is for the driver alone
            )
            self._processes.append(process)

    def _join(self, listener: socket.socket) -> None:
        limit = time.monotonic() + _START_S
        hellos = {}
        listener.settimeout(0.1)
        while len(self._links) < self.num_ranks:
            with contextlib.suppress(TimeoutError):
                link, _ = listener.accept()
                link.settimeout(None)
                self._links.append(link)
                self._pids.append(_peer_of(link))
                continue
            if any(process.poll() is not None for process in self._processes):
                raise MissingError(f"does not start: {self._last_words()}")
            if time.monotonic() > limit:
                raise MissingError(f"did not start within {_START_S:.0f} s: {self._last_words()}")
        for answer in self._answers(_START_S):
            hellos[answer["rank"]] = answer
        if sorted(hellos) != list(range(self.num_ranks)):
            raise MissingError(f"started as ranks {sorted(hellos)}, not as {self.num_ranks} ranks of one job")
        self.version = hellos[0]["version"]
        self._rested = (time.monotonic(), self._cpu_s())

    def ask(self, timeout_s: float, **command: Any) -> list[dict[str, Any]]:
        """Have all ranks do something, and wait for what they answer.

        Raises:
            MissingError: a rank failed, or does not answer in time.
        """
        if self._rested is not None:
            self.idle_s += time.monotonic() - self._rested[0]
            self.idle_cpu_s += self._cpu_s() - self._rested[1]
        line = json.dumps(command).encode() + b"\n"
        try:
            for link in self._links:
                link.sendall(line)
        except OSError as error:
            raise MissingError(f"a rank is gone: {self._last_words()}") from error
        answers = self._answers(timeout_s)
        self._rested = (time.monotonic(), self._cpu_s())
        return answers

    def _answers(self, timeout_s: float) -> list[dict[str, Any]]:
        """One line from each rank, in the order in which they joined."""
        limit = time.monotonic() + timeout_s
        received = {link: bytearray() for link in self._links}
        with selectors.DefaultSelector() as selector:
            for link in self._links:
                selector.register(link, selectors.EVENT_READ, link)
            while selector.get_map():
                ready = selector.select(max(0.0, limit - time.monotonic()))
                if not ready:
                    raise MissingError(f"no answer within {timeout_s:.0f} s: {self._last_words()}")
                for key, _ in ready:
                    link = key.data
                    data = link.recv(1 << 16)
                    if not data:
                        raise MissingError(f"a rank ended: {self._last_words()}")
                    received[link] += data
                    if data.endswith(b"\n"):
                        selector.unregister(link)
        answers: list[dict[str, Any]] = [json.loads(line) for line in received.values()]
        for answer in answers:
            if "error" in answer:
                raise MissingError(answer["error"])
        return answers

    def _last_words(self) -> str:
        text = (self._folder / "log").read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip(" -=|*\t")]
        return " / ".join(lines[-3:])[:300] or "it says nothing"

    def _cpu_s(self) -> float:
        """Processor time that all ranks have taken."""
        return sum(_stat(pid)[1] for pid in self._pids)

    def close(self) -> None:
        """End all ranks; twice does no harm."""
        for link in self._links:
            with contextlib.suppress(OSError):
                link.sendall(b'{"do": "quit"}\n')
        self._wait(_GRACE_S if self._pids else 0.0)
        started = _descendants([process.pid for process in self._processes if process.poll() is None])
        started.update((pid, _stat(pid)[0]) for pid in self._pids)
        for link in self._links:
            link.close()
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        self._wait(_GRACE_S)
        for pid, began in started.items():
            if began and _stat(pid)[0] == began:  # still the same process
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._links, self._pids = [], []

    def _wait(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))


def _peer_of(link: socket.socket) -> int:
    """The pid of the process at the other end, as it is here: a rank may be in a pid namespace of its own."""
    pid, _, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def _stat(pid: int) -> tuple[int, float]:
    """When a process began, in ticks since boot, and the processor time it has taken, in s; zeros if it is no more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0.0
    if fields[0] == "Z":
        return 0, 0.0
    return int(fields[19]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _descendants(pids: list[int]) -> dict[int, int]:
    """All processes under these, with when they began."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, todo = {}, list(pids)
    while todo:
        pid = todo.pop()
        found[pid] = _stat(pid)[0]
        todo += children.get(pid, [])
    return found
