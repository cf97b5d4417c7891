"""What a rank says it is doing: packed into a few numbers that every rank of its communicator can read, and unpacked
again for errors. One record tells of its collectives, one of its messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from farandole import algorithms
from farandole.collectives import COLLECTIVES
from farandole.dtypes import DTYPES, REDUCE_OPS, WIRE_FORMS, DType
from farandole.schedule import Schedule

__all__ = ["CALLS", "CallRecord", "MessageRecord", "describe_call", "pack_call"]

CALLS = (*COLLECTIVES, "split")
"""What a user can call: the collectives, and what else runs as one of them."""

_ANY_SOURCE = 2**32 - 1

_DTYPES_BY_CODE = {dtype.code: name for name, dtype in DTYPES.items()}
_OPS_BY_CODE = {code: name for name, code in REDUCE_OPS.items()}
_WIRE_DTYPES_BY_CODE = {code: name for name, code in WIRE_FORMS.items()}
_NO_OP = 255
_CUSTOM = 255
_RANK_ARGUMENTS = {
    "broadcast": "src",
    "scatter": "src",
    "reduce": "dst",
    "gather": "dst",
}


@dataclass(frozen=True, slots=True)
class CallRecord:
    """The last collective that a rank began.

    Attributes:
        sequence: collectives begun.
        finished: of those, ended.
        what: the call, see `pack_call`.
        count: elements of the array that the rank gave.
        payload_bytes: of the whole buffer.
        timeout_s: how long the rank waits in it; infinite if for ever.
        began_s: when, as time.monotonic() counts on this host.
        closed: whether the rank closed its communicator.
        misfit_rank: the rank whose part did not fit, plus 1; 0 if none.
        misfit_bytes, expected_bytes: of that part, and what was expected.
        refusal: in words, a call that the rank has refused since, as it could never work; empty if none.
    """

    sequence: int
    finished: int
    what: int
    count: int
    payload_bytes: int
    timeout_s: float
    began_s: float
    closed: bool
    misfit_rank: int
    misfit_bytes: int
    expected_bytes: int
    refusal: bytes

    def __str__(self) -> str:
        """As in "rank 3: ..."."""
        text = "no call yet"
        if self.what:
            finished = ", which it has finished" if self.finished == self.sequence else ""
            text = f"{self.describe()}, collective number {self.sequence}{finished}"
        return text

    @property
    def refused(self) -> str:
        """The call that the rank refused, and why."""
        return self.refusal.decode(errors="ignore")

    def describe_misfit(self, rank: int) -> str:
        """The part that did not fit on ``rank``, whose record this is."""
        sent, expected = self.misfit_bytes // self.itemsize, self.expected_bytes // self.itemsize
        return f"rank {self.misfit_rank - 1} sends rank {rank} {sent} elements, and rank {rank} expects {expected}"

    @property
    def name(self) -> str:
        """What was called: one of `CALLS`."""
        return _name(self.what)

    def describe(self) -> str:
        """The call alone, as the user would write it."""
        return describe_call(self.what, self.count)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _dtype(self.what).itemsize


@dataclass(frozen=True, slots=True)
class MessageRecord:
    """The last message that a rank began or, where the communicator stopped for one of its messages, that one.

    Attributes:
        what: lowest first: 8 bits for "send" (1) or "recv" (2), 8 for the dtype, and from 32 on the peer.
        nbytes: of the array that the rank gave.
        tag: of the message.
        timeout_s: how long it may take; infinite if for ever.
        arrived_what, arrived_nbytes: the message that a recv did not fit, or that was too much to keep; its peer is
            the rank that sent it.
    """

    what: int
    nbytes: int
    tag: int
    timeout_s: float
    arrived_what: int
    arrived_nbytes: int

    @property
    def peer(self) -> int | None:
        """The other rank; None if any."""
        peer = self.what >> 32
        return None if peer == _ANY_SOURCE else peer

    @property
    def is_send(self) -> bool:
        """Whether it is a send; else it is a recv."""
        return self.what & 0xFF == 1

    @property
    def arrived_from(self) -> int:
        """The rank whose message that was."""
        return self.arrived_what >> 32

    def describe(self) -> str:
        """The call, as the user would write it."""
        name, role = ("send", "dst") if self.is_send else ("recv", "src")
        return self._text(name, self.what, self.nbytes, f"{role}={self.peer}")

    def describe_arrived(self, dst: int) -> str:
        """The send to rank ``dst`` of that message, as the user would write it."""
        return self._text("send", self.arrived_what, self.arrived_nbytes, f"dst={dst}")

    def _text(self, name: str, what: int, nbytes: int, peer: str) -> str:
        dtype = _dtype(what).name
        tag = f", tag={self.tag}" if self.tag else ""
        return f"{name}({nbytes // DTYPES[dtype].itemsize} x {dtype}, {peer}{tag})"


def pack_call(
    call: str,
    dtype: DType,
    op_code: int,
    algorithm: str | Schedule | Callable[[int], Schedule] | None,
    rank: int,
    wire_dtype: str | None,
) -> int:
    """A call in 64 bits, lowest first: 8 for its place in `CALLS`, counted from 1, 8 for the dtype, 8 for the op, 8 for
    the algorithm if one was named, 8 for the root, and 8 for the wire_dtype."""
    op = _NO_OP if op_code < 0 else op_code
    named = algorithms.names(call).index(algorithm) + 1 if isinstance(algorithm, str) else _CUSTOM
    code = CALLS.index(call) + 1 | dtype.code << 8 | op << 16 | (named if algorithm else 0) << 24
    return code | rank << 32 | WIRE_FORMS[wire_dtype] << 40


def describe_call(what: int, count: int) -> str:
    """A call as the user would write it, from what and count of a `CallRecord`."""
    try:
        return _described(what, count)
    except LookupError:  # what another host says may be anything
        return f"unknown call {what:#x}"


def _described(what: int, count: int) -> str:
    name = _name(what)
    if name in ("barrier", "split"):
        return f"{name}()"
    op, algorithm, rank, wire_form = (what >> shift & 0xFF for shift in (16, 24, 32, 40))
    arguments = [f"{count} x {_dtype(what).name}"]
    if op != _NO_OP:
        arguments.append(_OPS_BY_CODE[op])
    if name in _RANK_ARGUMENTS:
        arguments.append(f"{_RANK_ARGUMENTS[name]}={rank}")
    if algorithm == _CUSTOM:
        arguments.append("algorithm=a schedule of the caller's own")
    elif algorithm:
        arguments.append(f"algorithm={algorithms.names(name)[algorithm - 1]!r}")
    if wire_form:
        arguments.append(f"wire_dtype={_WIRE_DTYPES_BY_CODE[wire_form]!r}")
    return f"{name}({', '.join(arguments)})"


def _name(what: int) -> str:
    number = (what & 0xFF) - 1
    return CALLS[number] if number in range(len(CALLS)) else "unknown call"  # what another host says may be anything


def _dtype(what: int) -> DType:
    return DTYPES[_DTYPES_BY_CODE.get(what >> 8 & 0xFF, "uint8")]
