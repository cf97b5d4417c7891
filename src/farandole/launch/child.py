"""The first thing that runs in a rank's process: ties its life to the launcher's, then becomes the user's program.

Usage: python -m farandole.launch.child (script PATH | module NAME | exec PROGRAM) [ARGUMENT ...]
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TextIO

__all__: list[str] = []

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the program that the command line names."""
    _die_with(int(os.environ.pop("FARANDOLE_LAUNCHER")))
    kind, program, *arguments = sys.argv[1:]
    if kind == "exec":
        os.execvp(program, [program, *arguments])
    with os.fdopen(int(os.environ.pop("FARANDOLE_ERROR_FD")), "w") as errors:
        os.set_inheritable(errors.fileno(), False)
        sys.argv[:] = [program, *arguments]
        try:
            ended = _run(kind, program)
            if not _exit_code(ended):
                _close_communicators()
            if ended is not None:
                raise ended
        except KeyboardInterrupt:
            _flush()
            sys.exit(128 + signal.SIGINT)
        except SystemExit as end:
            if _exit_code(end):
                _report(errors, time.monotonic_ns(), _exit_code(end))
            raise
        except Exception as error:
            _report(errors, time.monotonic_ns(), 1, error)
            _flush()
            sys.exit(1)


def _run(kind: str, program: str) -> SystemExit | None:
    """Run the program to its end; returns the exit that it asked for, if it did."""
    try:
        if kind == "module":
            sys.path[0] = str(Path.cwd())
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(program).resolve().parent)
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        return end
    return None


def _exit_code(end: SystemExit | None) -> int:
    """What the process's exit code will be: the system keeps 8 bits of it."""
    if end is None or end.code is None:
        return 0
    return end.code & 0xFF if isinstance(end.code, int) else 1


def _close_communicators() -> None:
    """Close what the program left open while there is still somebody to tell of what closing brings to light."""
    runner = sys.modules.get("farandole.runner")
    if runner is not None:
        threading._shutdown()  # type: ignore[attr-defined]  # as Python does next: its threads may use communicators
        runner.close_all()


def _die_with(launcher: int) -> None:
    """Have the kernel end this process when the launcher ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before the kernel was told
        sys.exit(1)


def _report(errors: TextIO, time_ns: int, code: int, error: Exception | None = None) -> None:
    """Tell the launcher when this rank failed, and whether because of another. It shows the traceback of the rank that
    did so first, and only that one."""
    known = sys.modules.get("farandole.errors")
    with contextlib.suppress(OSError), errors:
        report = {
            "time_ns": time_ns,
            "code": code,
            "traceback": "" if error is None else _user_traceback(error),
            "follows": known is not None and isinstance(error, known.PeerLostError),
        }
        json.dump(report, errors)


def _user_traceback(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


if __name__ == "__main__":
    main()
