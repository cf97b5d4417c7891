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
    errors = os.fdopen(int(os.environ.pop("FARANDOLE_ERROR_FD")), "w")
    os.set_inheritable(errors.fileno(), False)
    sys.argv[:] = [program, *arguments]
    try:
        if kind == "module":
            sys.path[0] = str(Path.cwd())
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(program).resolve().parent)
            runpy.run_path(program, run_name="__main__")
    except KeyboardInterrupt:
        _flush()
        sys.exit(128 + signal.SIGINT)
    except SystemExit as end:
        if end.code not in (None, 0):
            _report(errors, end.code & 0xFF if isinstance(end.code, int) else 1, "")
        raise
    except Exception as error:
        _report(errors, 1, _user_traceback(error))
        _flush()
        sys.exit(1)


def _die_with(launcher: int) -> None:
    """Have the kernel end this process when the launcher ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before the kernel was told
        sys.exit(1)


def _report(errors: TextIO, code: int, trace: str) -> None:
    """Tell the launcher when this rank failed. It shows the traceback of the rank that did so first, and only that
    one."""
    with contextlib.suppress(OSError), errors:
        json.dump({"time_ns": time.monotonic_ns(), "code": code, "traceback": trace}, errors)


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
