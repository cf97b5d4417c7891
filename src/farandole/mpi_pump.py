"""Carries streams of bytes between processes of an MPI job.

What is written at one end of a *line* comes out at the other. The end that users have is a connected socket. One thread
per process, the *pump*, has the other ends of all of its sockets. What it reads there it sends as messages of MPI, and
what such messages bring it writes there:

=======  =======================  ==================================================================================
message  what follows the header  it says
=======  =======================  ==================================================================================
hello    nothing                  this end is open; nothing else is sent before the other end has said so, too
data     bytes                    these were written
credit   nothing                  what the header says
end      nothing                  nothing more will be written; the last message of this end
=======  =======================  ==================================================================================

Every header says which line it is for, and how many bytes this end has passed on since it said so before: the other
end has no more than `_WINDOW_BYTES` on the way. So a socket that nobody reads holds up no other line, and memory is
bounded.

As MPI has nothing to sleep on, the pump looks: at once again while something moves, a little later if nothing has for a
moment, and once a millisecond when it is idle. What its own process writes wakes it.

If MPI fails, the pump prints that, tells the other ends as far as MPI still lets it, and closes all lines.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

__all__ = ["Line", "LineName", "Pump", "PumpStopped"]

_HEADER = struct.Struct("<QIIII")
"""Token, sender, receiver, kind, bytes passed on."""

_CHUNK_BYTES = 256 * 1024
_WINDOW_BYTES = 1024 * 1024
_MESSAGES_AT_A_TIME = 16

_LOOKS = 200
_SHORT_PAUSE_S, _SHORT_PAUSES = 50e-6, 400
_LONG_PAUSE_S = 1e-3


class LineName(NamedTuple):
    """What tells a line from all others, at one of its ends.

    Attributes:
        token: of the meeting that it was made in; 64 bits.
        own, other: the ranks that it joins, in that meeting's group.
    """

    token: int
    own: int
    other: int


class PumpStopped(Exception):
    """A pump carries nothing any more. The message says why."""


class _Kind(IntEnum):
    HELLO, DATA, CREDIT, END = range(4)


class Line:
    """This process's end of a line.

    Attributes:
        name: of it.
        peer: the rank in MPI's communicator that has the other end.
        socket: for users; theirs to close.
        is_answered: whether the other end is open, too. The pump's to write.
    """

    def __init__(self, name: LineName, peer: int) -> None:
        self.name = name
        self.peer = peer
        self.is_answered = False
        stream, users = socket.socketpair()
        stream.setblocking(False)
        self.socket = users.detach()
        # What follows is the pump's.
        self._stream = stream
        self._is_abandoned = False
        self._watched = 0
        self._sending: deque[tuple[Any, bytes]] = deque()  # requests of MPI, with what they read
        self._in_flight = 0
        self._arrived: deque[memoryview] = deque()
        self._owed = 0
        self._has_sent_end = self._has_received_end = False

    @property
    def _takes(self) -> bool:
        """Whether more may be read. After the other end's end all may: there is no more credit, and the socket's users
        learn of the end soon."""
        has_room = self._has_received_end or self._in_flight + _CHUNK_BYTES <= _WINDOW_BYTES
        return has_room and self.is_answered and not self._has_sent_end

    @property
    def _is_over(self) -> bool:
        is_ended = self._has_sent_end and self._has_received_end and not self._arrived
        return (is_ended or self._is_abandoned) and not self._sending


class Pump:
    """The thread, which serves until `end`.

    Args:
        MPI: the module of mpi4py, initialised for many threads.
        world: a communicator that nobody else uses.
    """

    def __init__(self, MPI: Any, world: Any) -> None:
        self._MPI = MPI
        self._world = world
        self._status = MPI.Status()
        self._lines: dict[LineName, Line] = {}
        self._by_stream: dict[int, Line] = {}
        self._early: set[LineName] = set()  # answered before they are open
        self._arriving = memoryview(bytearray(_HEADER.size + _CHUNK_BYTES))
        self._departing = memoryview(bytearray(_CHUNK_BYTES))
        self._changed = threading.Condition()  # guards what follows
        self._opened: list[Line] = []
        self._abandoned: list[Line] = []
        self._limit: float | None = None
        self._why_stopped: str | None = None
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name="farandole-pump", daemon=True)
        self._thread.start()

    def open(self, name: LineName, peer: int) -> Line:
        """A new line, which begins to be answered.

        Raises:
            OSError: there is no descriptor left.
            PumpStopped: nothing is carried any more.
        """
        line = Line(name, peer)
        with self._changed:
            if self._why_stopped is not None:
                os.close(line.socket)
                line._stream.close()
                raise PumpStopped(self._why_stopped)
            self._opened.append(line)
        os.eventfd_write(self._bell, 1)
        return line

    def unanswered(self, lines: Mapping[int, Line], seconds: float) -> list[int]:
        """Of which ranks the lines are not answered, when all are or the time is over.

        Raises:
            PumpStopped: nothing is carried any more.
        """

        def missing() -> list[int]:
            return [rank for rank, line in lines.items() if not line.is_answered]

        with self._changed:
            self._changed.wait_for(lambda: not missing() or self._why_stopped is not None, seconds)
            if self._why_stopped is not None:
                raise PumpStopped(self._why_stopped)
            return missing()

    def abandon(self, line: Line) -> None:
        """Give up a line that the other end may never open. Its socket remains the caller's to close."""
        with self._changed:
            self._abandoned.append(line)
        os.eventfd_write(self._bell, 1)

    def end(self, grace_s: float) -> None:
        """Send what there is, and stop; may be called again. Lines that are not closed at both ends by then are cut
        off."""
        with self._changed:
            self._limit = time.monotonic() + grace_s
        os.eventfd_write(self._bell, 1)
        self._thread.join(2 * grace_s)

    def close(self) -> None:
        """Let go of what is open, as there is no such thread any more; in a forked child there is none."""
        for line in [*self._by_stream.values(), *self._opened]:
            line._stream.close()
        self._epoll.close()
        os.close(self._bell)

    def _serve(self) -> None:
        num_idle = 0
        try:
            while not self._is_through():
                moved = self._adopt()
                moved |= self._receive()
                moved |= self._look_at_streams(num_idle)
                self._settle()
                num_idle = 0 if moved else num_idle + 1
            self._stop("MPI has been finalised, or this process is about to end")
        except Exception as error:  # of MPI: it carries nothing more, and all who wait are to see that
            traceback.print_exc()
            with contextlib.suppress(Exception):
                for line in self._lines.values():
                    self._end(line)
            self._stop(f"MPI failed in this process: {type(error).__name__}: {error}")

    def _stop(self, why: str) -> None:
        with self._changed:
            self._why_stopped = why
            for line in [*self._by_stream.values(), *self._opened]:
                line._stream.close()
            self._changed.notify_all()

    def _is_through(self) -> bool:
        with self._changed:
            if self._limit is None:
                return False
            return time.monotonic() > self._limit or not (self._lines or self._opened or self._abandoned)

    def _adopt(self) -> bool:
        """Take over lines that were opened, and given up."""
        with self._changed:
            opened, abandoned = self._opened, self._abandoned
            self._opened, self._abandoned = [], []
            for line in opened:
                self._lines[line.name] = self._by_stream[line._stream.fileno()] = line
                line.is_answered = line.name in self._early
                self._early.discard(line.name)
            self._changed.notify_all()
        for line in opened:
            self._send(line, _Kind.HELLO)
            self._watch(line)
        for line in abandoned:
            self._end(line)
            line._is_abandoned = True
        return bool(opened or abandoned)

    # -- from MPI to sockets

    def _receive(self) -> bool:
        MPI, status = self._MPI, self._status
        for number in range(_MESSAGES_AT_A_TIME):
            message = self._world.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if message is None:
                return number > 0
            size = status.Get_count(MPI.BYTE)
            message.Recv([self._arriving, size, MPI.BYTE])
            token, sender, receiver, kind, taken = _HEADER.unpack_from(self._arriving)
            name = LineName(token, receiver, sender)
            line = self._lines.get(name)
            if line is not None:
                line._in_flight -= taken
                self._take(line, kind, self._arriving[_HEADER.size : size])
            elif kind == _Kind.HELLO:
                self._early.add(name)
            else:  # given up, at one end or the other
                self._early.discard(name)
        return True

    def _take(self, line: Line, kind: int, data: memoryview) -> None:
        if kind == _Kind.HELLO:
            with self._changed:
                line.is_answered = True
                self._changed.notify_all()
        elif kind == _Kind.DATA:
            if not line._arrived:
                data = data[self._pass_on(line, data) :]
            if data:
                line._arrived.append(memoryview(bytes(data)))
        elif kind == _Kind.END:
            line._has_received_end = True
        self._deliver(line)

    def _deliver(self, line: Line) -> None:
        """Write what has arrived, as far as the socket takes it."""
        while line._arrived:
            data = line._arrived[0]
            passed = self._pass_on(line, data)
            if passed < len(data):
                line._arrived[0] = data[passed:]
                break
            line._arrived.popleft()
        if not line._arrived and line._has_received_end:
            with contextlib.suppress(OSError):
                line._stream.shutdown(socket.SHUT_WR)
        if line._owed >= _WINDOW_BYTES // 2 and not line._has_sent_end:
            self._send(line, _Kind.CREDIT)
        self._watch(line)

    def _pass_on(self, line: Line, data: memoryview) -> int:
        """Write to the socket. Returns how much of ``data`` is dealt with."""
        try:
            passed = line._stream.send(data, socket.MSG_NOSIGNAL)  # a program may want SIGPIPE to end it
        except BlockingIOError:
            return 0
        except OSError:  # nobody reads it any more
            passed = len(data)
        line._owed += passed
        return passed

    # -- from sockets to MPI

    def _look_at_streams(self, num_idle: int) -> bool:
        """Serve the sockets that something can be done with, after a pause that befits the time that all was idle."""
        pause: float | None = 0.0
        if not self._lines:
            pause = None
        elif num_idle >= _LOOKS + _SHORT_PAUSES:
            pause = _LONG_PAUSE_S
        elif num_idle >= _LOOKS:
            time.sleep(_SHORT_PAUSE_S)
        elif num_idle:
            os.sched_yield()
        moved = False
        for descriptor, events in self._epoll.poll(pause):
            if descriptor == self._bell:
                os.eventfd_read(self._bell)
                continue
            line, moved = self._by_stream[descriptor], True
            if events & ~select.EPOLLOUT and line._takes:
                self._read(line)
            if line._arrived:
                self._deliver(line)
            self._watch(line)
        return moved

    def _read(self, line: Line) -> None:
        try:
            size = line._stream.recv_into(self._departing)
        except BlockingIOError:
            return
        except OSError:  # it was closed before all was read
            size = 0
        if size:
            self._send(line, _Kind.DATA, self._departing[:size])
            line._in_flight += size
        else:
            self._end(line)

    def _end(self, line: Line) -> None:
        if not line._has_sent_end:
            self._send(line, _Kind.END)
            line._has_sent_end = True

    def _send(self, line: Line, kind: _Kind, data: memoryview = memoryview(b"")) -> None:  # noqa: B008
        token, own, other = line.name
        message = _HEADER.pack(token, own, other, kind, line._owed) + data
        line._owed = 0
        line._sending.append((self._world.Isend([message, self._MPI.BYTE], line.peer), message))

    def _settle(self) -> None:
        """Let go of what is sent, and of lines that are over."""
        for line in list(self._lines.values()):
            while line._sending and line._sending[0][0].Test():
                line._sending.popleft()
            if line._is_over:
                if line._watched:
                    self._epoll.unregister(line._stream)
                del self._lines[line.name], self._by_stream[line._stream.fileno()]
                line._stream.close()

    def _watch(self, line: Line) -> None:
        """Have epoll report what can be done now, and nothing else."""
        wanted = (select.EPOLLIN if line._takes else 0) | (select.EPOLLOUT if line._arrived else 0)
        if wanted == line._watched:
            return
        if not wanted:
            self._epoll.unregister(line._stream)
        elif line._watched:
            self._epoll.modify(line._stream, wanted)
        else:
            self._epoll.register(line._stream, wanted)
        line._watched = wanted
