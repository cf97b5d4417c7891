"""Starts, watches and ends the processes of one job."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from farandole.door import MAX_UNPROVED
from farandole.errors import ArgumentError
from farandole.rendezvous import MAX_WORLD_SIZE, tell_of_end
from farandole.store import StoreServer

__all__ = ["JobResult", "RankFailure", "run_processes"]

_GRACE_S = 2.0
_CAUSE_S = 2.0  # that the cause of what other ranks say may take to say so itself
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SPARE_DESCRIPTORS = 64


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank failed.

    Attributes:
        rank: which.
        exit_code: of its process; 128 + n if signal n ended it.
        reason: in words.
        traceback: of its exception; empty if it did not end by one.
    """

    rank: int
    exit_code: int
    reason: str
    traceback: str


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended.

    Attributes:
        failure: of the rank that failed, and with that ended the job; None if none did.
        interrupted_by: the number of the signal that ended the job, or None.
    """

    failure: RankFailure | None = None
    interrupted_by: int | None = None

    @property
    def exit_code(self) -> int:
        """For the launcher's own process."""
        if self.interrupted_by is not None:
            return 128 + self.interrupted_by
        return self.failure.exit_code if self.failure else 0


@dataclass
class _Rank:
    """One rank's process and what it says."""

    rank: int
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    error_report: bytearray = field(default_factory=bytearray)
    lines: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})


def run_processes(
    command: Sequence[str],
    world_size: int,
    *,
    module: bool = False,
    on_line: Callable[[int, str, bytes], None] | None = None,
    environment: Mapping[str, str] | None = None,
    max_lost: int = 0,
    on_lost: Callable[[RankFailure], None] | None = None,
) -> JobResult:
    """Run ``command`` as a job of ``world_size`` ranks and wait until all have ended.

    While it runs, a signal that asks this process to end (SIGINT, SIGTERM, SIGHUP, SIGQUIT) ends the job, unless it was
    ignored before, as under nohup. In a thread other than the main one, where Python allows no handlers, signals do
    what they did before.

    Args:
        command: a Python script (ending in .py) or any program, with its arguments; with ``module``, the name of a
            Python module.
        world_size: number of ranks, >= 1.
        module: run a module, as ``python -m`` does.
        on_line: called with (rank, "stdout" or "stderr", line) for each line a rank prints; None lets the ranks print
            for themselves.
        environment: of the ranks, to which the job's own variables are added; None takes this process's.
        max_lost: how many ranks may fail while the others go on; one more ends the job.
        on_lost: called for each rank that fails while the others go on.

    Returns:
        How the job ended. No rank is left, nor anything that a rank started and that stayed in its process group. (Of a
        launcher that SIGKILL ends, no rank is left either; but what the ranks started themselves may live on.)

    Raises:
        ArgumentError: there is nothing to run, no such script or program, world_size is not in 1..256, or this process
            may not open as many files as the job needs.
    """
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ArgumentError(f"the number of ranks is {world_size}; it must be in 1..{MAX_WORLD_SIZE}")
    if not command:
        raise ArgumentError("there is nothing to run; name a script, e.g. farandole run -n 2 train.py")
    child = _child_command(command, module)
    if not 0 <= max_lost < world_size:
        raise ArgumentError(f"max_lost is {max_lost}; of {world_size} ranks 0..{world_size - 1} may be lost")
    job = _Job(world_size, on_line, max_lost, on_lost)
    with job.signals(), _descriptors_for(world_size, on_line is not None), contextlib.ExitStack() as stack:
        secret = secrets.token_hex(32)
        server = StoreServer(("127.0.0.1", 0), secret.encode())
        stack.callback(server.close)
        stack.callback(job.end)
        base = dict(os.environ if environment is None else environment)
        base["FARANDOLE_RENDEZVOUS"] = f"{server.address[0]}:{server.address[1]}"
        base["FARANDOLE_SECRET"] = secret
        # For torch.distributed, whose own backends the ranks may use beside farandole.
        base.setdefault("MASTER_ADDR", "127.0.0.1")
        base.setdefault("MASTER_PORT", str(_free_port()))
        base.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // world_size)))
        for rank in range(world_size):
            if job.signal is not None:  # told to end before all had begun
                break
            job.start(rank, child, base)
        return job.watch(server)


@contextlib.contextmanager
def _descriptors_for(world_size: int, has_pipes: bool) -> Iterator[None]:
    """Allow this process to open as many files as the job needs, and no longer than it needs them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    per_rank = 5 if has_pipes else 3  # its output, its errors, its end, and its connection to the store
    needed = sum(1 for _ in Path("/proc/self/fd").iterdir()) + per_rank * world_size + _SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ArgumentError(
            f"a job of {world_size} ranks needs {needed} open files, and this process may have {hard}; raise the limit "
            f"with ulimit -n {needed}, or start fewer ranks"
        )
    wanted = needed + MAX_UNPROVED  # strangers at the store must not take what the ranks need
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _child_command(command: Sequence[str], module: bool) -> list[str]:
    kind = "module" if module else "script" if command[0].endswith(".py") else "exec"
    if kind == "script" and not Path(command[0]).is_file():
        raise ArgumentError(f"there is no script {command[0]!r} here ({Path.cwd()})")
    if kind == "exec" and shutil.which(command[0]) is None:
        raise ArgumentError(
            f"there is no program {command[0]!r}; a Python script ends in .py, a Python module is run with -m"
        )
    return [sys.executable, "-m", "farandole.launch.child", kind, *command]


class _Job:
    """The processes of a job, from the first start to the last end."""

    def __init__(
        self,
        world_size: int,
        on_line: Callable[[int, str, bytes], None] | None,
        max_lost: int,
        on_lost: Callable[[RankFailure], None] | None,
    ) -> None:
        self.world_size = world_size
        self.on_line = on_line
        self.max_lost = max_lost
        self.on_lost = on_lost
        self.lost: set[int] = set()
        self.ranks: list[_Rank] = []
        self.selector = selectors.DefaultSelector()
        self.signal: int | None = None
        self.num_signals = 0
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_write, False)
        self.selector.register(self.wake_read, selectors.EVENT_READ, None)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Turn signals to the launcher into an orderly end of the job."""

        def remember(number: int, _frame: FrameType | None) -> None:
            self.signal = self.signal or number
            self.num_signals += 1
            with contextlib.suppress(BlockingIOError):
                os.write(self.wake_write, b"!")

        before: dict[signal.Signals, Any] = {}
        try:
            if threading.current_thread() is threading.main_thread():
                for number in _SIGNALS:
                    # What is ignored stays so; a handler that is not Python's (None) could not be put back.
                    if signal.getsignal(number) not in (signal.SIG_IGN, None):
                        before[number] = signal.signal(number, remember)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.selector.close()
            os.close(self.wake_read)
            os.close(self.wake_write)

    def start(self, rank: int, command: list[str], base: Mapping[str, str]) -> None:
        errors_read, errors_write = os.pipe()
        errors = os.fdopen(errors_read, "rb", buffering=0)
        environment = {
            **base,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "FARANDOLE_LAUNCHER": str(os.getpid()),
            "FARANDOLE_ERROR_FD": str(errors_write),
        }
        output = None if self.on_line is None else subprocess.PIPE
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(errors_write,),
                start_new_session=True,  # so that all it starts can be ended with it
            )
        except BaseException:
            errors.close()
            raise
        finally:
            os.close(errors_write)
        entry = _Rank(rank, process, errors)
        self.ranks.append(entry)
        self.selector.register(entry.errors, selectors.EVENT_READ, (entry, "errors"))
        self.selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, (entry, "end"))
        for name in ("stdout", "stderr"):
            stream = getattr(process, name)
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                self.selector.register(stream, selectors.EVENT_READ, (entry, name))

    def watch(self, store: StoreServer) -> JobResult:
        """Wait until all ranks have ended, or one has failed, or a signal came. Ranks that wait at the store for one
        that has ended are told there."""
        running = {entry.rank for entry in self.ranks}
        while running and self.signal is None:
            for key, _ in self.selector.select():
                if key.data is None or key.fileobj not in self.selector.get_map():  # a rank before was drained
                    continue
                entry, name = key.data
                if name != "end":
                    self._read(entry, name, key)
                    continue
                self._forget(key)
                os.close(key.fd)
                running.discard(entry.rank)
                code = _exit_code(entry.process) or 0
                if code and len(self.lost) == self.max_lost:
                    return JobResult(failure=self._first_failure())
                tell_of_end(store, entry.rank, code)
                if code:
                    self._lose(entry)
        if self.signal is not None:
            return JobResult(interrupted_by=self.signal)
        for entry in self.ranks:
            self._drain(entry)
        return JobResult()

    def _lose(self, entry: _Rank) -> None:
        """Let the others go on without that rank, which has failed."""
        self.lost.add(entry.rank)
        _signal_group(entry.process.pid, signal.SIGKILL)  # what it has started
        self._drain(entry)
        if self.on_lost is not None:
            self.on_lost(_failure_of(entry, _exit_code(entry.process))[1])

    def _first_failure(self) -> RankFailure:
        """Of all ranks that have failed by now and were not lost before, the one that did so first: the others may have
        failed because of it. Where all that are known have, the cause may be about to say so."""
        ends_s = time.monotonic() + _CAUSE_S
        while True:
            failures: list[tuple[tuple[bool, int], RankFailure]] = []
            are_running = False
            for entry in self.ranks:
                if entry.rank in self.lost:
                    continue
                self._drain(entry)
                code = _exit_code(entry.process)
                has_said = entry.error_report.endswith(b"}")  # all of it, and is on its way out
                if code or (code is None and has_said):
                    failures.append(_failure_of(entry, code))
                else:
                    are_running |= code is None
            (follows, _), first = min(failures, key=lambda failure: failure[0])
            if not (follows and are_running) or time.monotonic() > ends_s:
                return first
            time.sleep(0.01)

    def end(self) -> None:
        """End whatever of the job still lives: first politely, then for certain."""
        polite = signal.SIGINT if self.signal == signal.SIGINT else signal.SIGTERM
        alive = [entry.process for entry in self.ranks if _exit_code(entry.process) is None]
        for process in alive:
            _signal_group(process.pid, polite)
        limit = time.monotonic() + _GRACE_S
        signals_before = self.num_signals
        while alive and time.monotonic() < limit and self.num_signals == signals_before:
            time.sleep(0.01)
            alive = [process for process in alive if _exit_code(process) is None]
        for entry in self.ranks:
            _signal_group(entry.process.pid, signal.SIGKILL)  # also what a rank itself started
            entry.process.wait()
            for stream in (entry.errors, entry.process.stdout, entry.process.stderr):
                if stream is not None:
                    stream.close()
        for key in list(self.selector.get_map().values()):
            if key.data is not None and key.data[1] == "end":
                os.close(key.fd)

    def _read(self, entry: _Rank, name: str, key: selectors.SelectorKey) -> bool:
        """Take what there is to read. False at the end of the stream, or if there is nothing now."""
        try:
            data = os.read(key.fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._forget(key)
            if name != "errors":
                self._print(entry, name, b"\n" if entry.lines[name] else b"")
            return False
        if name == "errors":
            entry.error_report += data
        else:
            self._print(entry, name, data)
        return True

    def _print(self, entry: _Rank, name: str, data: bytes) -> None:
        assert self.on_line is not None
        pending = entry.lines[name]
        pending += data
        *lines, rest = bytes(pending).split(b"\n")
        entry.lines[name] = bytearray(rest)
        for line in lines:
            self.on_line(entry.rank, name, line)

    def _drain(self, entry: _Rank) -> None:
        """Read what a rank that has ended had written before."""
        for key in list(self.selector.get_map().values()):
            if key.data is None or key.data[0] is not entry or key.data[1] == "end":
                continue
            os.set_blocking(key.fd, False)
            while self._read(entry, key.data[1], key):
                pass

    def _forget(self, key: selectors.SelectorKey) -> None:
        self.selector.unregister(key.fileobj)


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """How the process ended: its exit code, or minus a signal; None while it runs.

    It is not reaped: until it is, its process group's number cannot become another's.
    """
    status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _signal_group(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, number)


def _failure_of(entry: _Rank, code: int | None) -> tuple[tuple[bool, int], RankFailure]:
    """Whether a rank failed because it lost another, when, and how. Where it could not say when, no other rank was the
    cause: that comes before all else."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return (False, 0), RankFailure(entry.rank, 128 - code, f"was ended by {name}", "")
    try:
        report = json.loads(entry.error_report)
    except json.JSONDecodeError:  # nothing, or cut off
        code = 1 if code is None else code
        return (False, 0), RankFailure(entry.rank, code, f"exited with code {code}", "")
    code, trace = report["code"] if code is None else code, report["traceback"]
    reason = "raised an exception" if trace else f"exited with code {code}"
    return (report["follows"], report["time_ns"]), RankFailure(entry.rank, code, reason, trace)
