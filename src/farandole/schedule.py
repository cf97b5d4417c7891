"""A collective algorithm as data: a list of chunk transfers.

A buffer is cut into ``num_chunks`` chunks. Each rank has one *slot* per chunk and, behind those,
``num_scratch`` scratch slots. A transfer moves what is in one slot of ``src`` to one slot of ``dst``, where it
replaces what was there or, with ``reduce``, is added to it.

Transfers are grouped in *steps*. A step is one parallel assignment, as in a textbook: every transfer of a step reads
what its source slot held when the step began. What arrives in one slot within one step is folded in the order
of the list: the first may replace, the others must reduce. A transfer from a rank to itself is local: it costs no
communication, and is the way to say where a rank's own contribution stands in that order.

Nothing here knows what a collective promises (``collectives``), whether the promise is kept
(``verifier``), or how a slot becomes memory (``lowering``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from farandole.errors import MalformedScheduleError

__all__ = ["COLUMNS", "UNNAMED", "Schedule", "Transfer"]

COLUMNS = ("step", "src", "src_slot", "dst", "dst_slot", "reduce")
"""The columns of a schedule, in the order of the fields of `Transfer`."""

UNNAMED = "custom"
"""The name of a schedule that was given none."""

_MAX_INT32 = 2**31 - 1
_FIELDS = f"{len(COLUMNS)} integers: {', '.join(COLUMNS)}"


class Transfer(NamedTuple):
    """One chunk on its way: during ``step``, slot ``src_slot`` of ``src`` goes to slot ``dst_slot`` of ``dst``."""

    step: int
    src: int
    src_slot: int
    dst: int
    dst_slot: int
    reduce: bool = False

    def __str__(self) -> str:
        verb = "is added to" if self.reduce else "replaces"
        return f"step {self.step}: rank {self.src} slot {self.src_slot} {verb} rank {self.dst} slot {self.dst_slot}"


class Schedule:
    """An immutable list of transfers for one collective on one world size.

    Two schedules are equal, and hash alike on every machine, if they are for the same collective and move the same
    slots in the same order; their names do not matter.

    Args:
        collective: what the schedule claims to do, one of `farandole.collectives.COLLECTIVES`.
        world_size: number of ranks, N >= 1.
        num_chunks: chunks that the whole buffer is cut into, >= 1. Where every rank owns a part of the buffer
            (all_gather, reduce_scatter, ...) this is a multiple of N and part r is the r-th run of num_chunks / N
            chunks.
        transfers: rows of (step, src, src_slot, dst, dst_slot, reduce) in any order of steps; within a step the
            order is kept. An (M, 6) integer array is taken as it is.
        num_scratch: scratch slots per rank, numbered from num_chunks on.
        root: the rank that broadcast, reduce, gather and scatter start or end at; 0 for all others.
        name: for people, e.g. "ring".

    Raises:
        MalformedScheduleError: a number out of its range; the message names the transfer.
    """

    def __init__(
        self,
        collective: str,
        world_size: int,
        num_chunks: int,
        transfers: Iterable[Transfer | tuple[int, ...]] | npt.NDArray[np.integer],
        *,
        num_scratch: int = 0,
        root: int = 0,
        name: str = UNNAMED,
    ) -> None:
        self.collective = collective
        self.world_size = world_size
        self.num_chunks = num_chunks
        self.num_scratch = num_scratch
        self.root = root
        self.name = name
        self._require_sane_header()
        rows = _as_rows(transfers)
        self._require_in_range(rows)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        rows.setflags(write=False)
        self._rows = rows

    def __setattr__(self, name: str, value: object) -> None:
        if "_rows" in self.__dict__:  # the last thing that __init__ sets
            raise AttributeError(
                f"a Schedule cannot be changed, as it may have been proved; make a new one with {name}"
            )
        super().__setattr__(name, value)

    def renamed(self, name: str) -> Schedule:
        """The same schedule under another name."""
        return Schedule(
            self.collective,
            self.world_size,
            self.num_chunks,
            self.rows,
            num_scratch=self.num_scratch,
            root=self.root,
            name=name,
        )

    @property
    def num_slots(self) -> int:
        """Slots per rank: chunks of the buffer, then scratch."""
        return self.num_chunks + self.num_scratch

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        """The transfers as a read-only (M, 6) array, one column per name in `COLUMNS`, ordered by step."""
        return self._rows

    def column(self, name: str) -> npt.NDArray[np.int32]:
        """One column of `rows`, by its name in `COLUMNS`; read-only, shape (M,)."""
        return self._rows[:, COLUMNS.index(name)]

    @property
    def num_steps(self) -> int:
        """Steps up to the last one that has a transfer."""
        return int(self._rows[-1, 0]) + 1 if len(self._rows) else 0

    @cached_property
    def hash(self) -> str:
        """SHA-256 of what the schedule does, in hex; the same on every machine and Python."""
        header = [self.collective, self.world_size, self.num_chunks, self.num_scratch, self.root]
        digest = hashlib.sha256(json.dumps(header).encode())
        digest.update(self._rows.astype("<i4").tobytes())
        return digest.hexdigest()

    def transfer(self, index: int) -> Transfer:
        """The transfer in row ``index`` of `rows`."""
        step, src, src_slot, dst, dst_slot, reduce = self._rows[index].tolist()
        return Transfer(step, src, src_slot, dst, dst_slot, bool(reduce))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Transfer]:
        for step, src, src_slot, dst, dst_slot, reduce in self._rows.tolist():
            yield Transfer(step, src, src_slot, dst, dst_slot, bool(reduce))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name} {self.collective}: {self.world_size} ranks, {self.num_chunks} chunks, "
            f"{self.num_steps} steps, {len(self)} transfers, {self.hash[:12]}>"
        )

    def _require_sane_header(self) -> None:
        if not isinstance(self.collective, str):
            raise MalformedScheduleError(f"collective is {self.collective!r}; it must be a name, e.g. 'all_reduce'")
        for field, minimum in (("world_size", 1), ("num_chunks", 1), ("num_scratch", 0), ("root", 0)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < minimum:
                raise MalformedScheduleError(f"{field} is {value!r}; it must be an integer >= {minimum}")
            if value > _MAX_INT32:
                raise MalformedScheduleError(f"{field} is {value!r}; it must be at most {_MAX_INT32}")
            setattr(self, field, int(value))
        if self.root >= self.world_size:
            raise MalformedScheduleError(f"root is {self.root}, but the ranks are 0..{self.world_size - 1}")

    def _require_in_range(self, rows: npt.NDArray[np.int32]) -> None:
        limits = (None, self.world_size, self.num_slots, self.world_size, self.num_slots, 2)
        for field, limit, column in zip(COLUMNS, limits, rows.T, strict=True):
            wrong = column < 0 if limit is None else (column < 0) | (column >= limit)
            if wrong.any():
                index = int(np.flatnonzero(wrong)[0])
                allowed = ">= 0" if limit is None else f"in 0..{limit - 1}"
                raise MalformedScheduleError(
                    f"transfer {index} of {len(rows)}: {field} is {column[index]}; it must be {allowed}"
                )


def _as_rows(transfers: Iterable[Transfer | tuple[int, ...]] | npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    if isinstance(transfers, np.ndarray):
        wide = transfers
    else:
        if not isinstance(transfers, Iterable):
            raise MalformedScheduleError(f"transfers is {transfers!r}; give a list of Transfer, which may be empty")
        rows = list(transfers)
        try:
            wide = np.asarray(rows)
        except (ValueError, OverflowError):  # rows of several lengths
            raise _wrong_row(rows) from None
        if wide.dtype == object:
            raise _wrong_row(rows)
    if wide.size == 0:
        return np.empty((0, len(COLUMNS)), dtype=np.int32)
    if wide.ndim != 2 or wide.shape[1] != len(COLUMNS) or wide.dtype.kind not in "iu":
        raise MalformedScheduleError(
            f"transfers have shape {wide.shape} and dtype {wide.dtype}; each must be {_FIELDS}"
        )
    if wide.max() > _MAX_INT32 or wide.min() < -_MAX_INT32:
        index = int(np.flatnonzero(((wide > _MAX_INT32) | (wide < -_MAX_INT32)).any(axis=1))[0])
        raise MalformedScheduleError(
            f"transfer {index} of {len(wide)} is {tuple(wide[index].tolist())}; it holds a number that does not fit 32 "
            f"bits"
        )
    return wide.astype(np.int32)


def _wrong_row(rows: list[Any]) -> MalformedScheduleError:
    """The first row that numpy could not make a row of six integers of."""
    for index, row in enumerate(rows):
        is_row = isinstance(row, Iterable) and len(numbers := list(row)) == len(COLUMNS)
        if not is_row or not all(isinstance(number, (int, np.integer)) for number in numbers):
            return MalformedScheduleError(f"transfer {index} of {len(rows)} is {row!r:.80}; it must be {_FIELDS}")
        if any(abs(number) > _MAX_INT32 for number in numbers):
            return MalformedScheduleError(
                f"transfer {index} of {len(rows)} is {row!r:.80}; it holds a number that does not fit 32 bits"
            )
    return MalformedScheduleError(f"transfers must be rows of {_FIELDS}")
