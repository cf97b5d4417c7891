"""What the ranks of a running job are doing, told to whoever of the same user asks: `farandole status`.

A process with a communicator answers at a socket named after its number, from a thread of its own. The answer has what
each rank of each communicator says of itself in the memory that they share, and where this process's threads are in
Python. Of a process that cannot answer, as its code holds Python's lock or it is stopped, any other rank tells the
former.

The socket is in Linux's abstract namespace: it has no file, and is gone with the process. Only processes of the same
user, or root's, get an answer; nothing that they send is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from farandole.errors import ArgumentError
from farandole.runner import open_runners

__all__ = ["ask", "processes_that_answer", "serve_status"]

_NAME = "farandole-status-2-"
"""With the number of the form of the answers: processes of other versions of farandole are not asked."""
_CREDENTIALS = struct.Struct("3i")
_OWN_CODE = f"{Path(__file__).parent}{os.sep}"
_LIBRARY = {Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("stdlib")) / "concurrent" / "futures"}
_LONGEST_SEND_S = 5.0
_PAUSE_S = 0.01

_lock = threading.Lock()
_server: socket.socket | None = None


def serve_status() -> None:
    """Answer from now on, unless this process does so already, or cannot."""
    global _server
    with _lock:
        if _server is not None:
            return
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.bind(f"\0{_NAME}{os.getpid()}")
            server.listen()
            threading.Thread(target=_serve, args=(server,), name="farandole status", daemon=True).start()
        except (OSError, RuntimeError):  # a stranger has the name, or there is no thread left: the job goes on without
            server.close()
            return
        _server = server


def processes_that_answer() -> list[int]:
    """The processes of this host that have communicators, by their numbers."""
    names = re.findall(rf"@{_NAME}(\d+)$", Path("/proc/net/unix").read_text(errors="replace"), re.MULTILINE)
    return sorted(set(map(int, names)))


def ask(process: int, timeout_s: float) -> dict[str, Any] | None:
    """What that process says; None if it does not answer in time.

    Raises:
        ArgumentError: it has no communicator, or is another user's.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(timeout_s)
        try:
            _connect(client, f"\0{_NAME}{process}", timeout_s)
            if not _is_ours(client):
                raise ArgumentError(f"process {process} belongs to another user")
            with client.makefile("rb") as stream:
                text = stream.read()
        except TimeoutError:
            return None
        except OSError as error:
            raise ArgumentError(
                f"process {process} has no communicator of farandole, or has ended ({error.strerror})"
            ) from error
    answer: dict[str, Any] | None = json.loads(text) if text else None
    return answer


def _connect(client: socket.socket, name: str, timeout_s: float) -> None:
    limit = time.monotonic() + timeout_s
    while True:
        try:
            client.connect(name)
            return
        except BlockingIOError:  # many ask at once; a socket of this kind does not wait for its turn
            if time.monotonic() > limit:
                raise TimeoutError from None
            time.sleep(_PAUSE_S)


def _is_ours(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user in (0, os.geteuid()) or os.geteuid() == 0


def _serve(server: socket.socket) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:  # closed in a child, or there is no descriptor left
            if server.fileno() < 0:
                return
            time.sleep(1.0)
            continue
        with client, contextlib.suppress(OSError):
            client.settimeout(_LONGEST_SEND_S)
            if _is_ours(client):
                client.sendall(_answer_text().encode())


def _answer_text() -> str:
    try:
        return json.dumps(_answer())
    except Exception as error:  # others may still be answered, and this one knows why it is not
        return json.dumps({"process": os.getpid(), "problem": repr(error), "communicators": [], "threads": []})


def _answer() -> dict[str, Any]:
    communicators = [runner.snapshot() for runner in open_runners()]
    return {"process": os.getpid(), "communicators": communicators, "threads": _threads()}


def _threads() -> list[dict[str, Any]]:
    """Where the threads are that run more than farandole's own: the innermost line of the user's code."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for identity, frame in sys._current_frames().items():
        own, line = _outside(frame)
        if line is not None and names.get(identity) != threading.current_thread().name:
            found.append({"name": names.get(identity, str(identity)), "line": line, "is_in_farandole": own})
    return found


def _outside(frame: FrameType | None) -> tuple[bool, str | None]:
    """Whether a thread is within farandole, and the innermost line outside of that and of Python's own library."""
    is_within = False
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_OWN_CODE):
            is_within = True
        elif Path(code.co_filename).parent not in _LIBRARY and not code.co_filename.startswith("<frozen"):
            return is_within, f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return is_within, None


def _leave_to_parent() -> None:
    global _server, _lock
    _lock = threading.Lock()
    if _server is not None:
        _server.close()
        _server = None


os.register_at_fork(after_in_child=_leave_to_parent)
