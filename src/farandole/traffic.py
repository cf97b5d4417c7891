"""What a schedule moves, counted by rank and step: the sums that the cost model is made of.

A *cell* is one rank in one step, in which it may both send and receive. Sums are per cell, over such transfers as the
caller picks: those that travel, that cross to another host, that are added to something.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from farandole.errors import MalformedScheduleError
from farandole.schedule import Schedule

__all__ = ["Booleans", "Integers", "Traffic", "first_of_each"]

Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]


class Traffic:
    """The transfers of a schedule on chunks of certain sizes. All arrays have an entry per transfer, but for ``cells``.

    Args:
        schedule: a schedule that `farandole.verifier.verify` accepts.
        chunk_sizes: bytes of each chunk.

    Attributes:
        sizes: bytes.
        travels: whether it goes to another rank.
        reduces: whether it is added to something.
        step: counted without gaps.
        sender, receiver: the cells, as indices of ``cells``.
        cells: step, counted without gaps, times the number of ranks, plus rank; in order.

    Raises:
        MalformedScheduleError: the schedule reads a scratch slot that nothing was put into.
    """

    def __init__(self, schedule: Schedule, chunk_sizes: Integers) -> None:
        self.num_ranks = schedule.world_size
        self.sizes = chunk_sizes[_chunk_of_each_transfer(schedule)]
        self.src, src_slot, self.dst = (schedule.column(name).astype(np.int64) for name in ("src", "src_slot", "dst"))
        self.travels = self.src != self.dst
        self.reduces = schedule.column("reduce") == 1
        self.step = _numbered(schedule.column("step"))
        sending = self.step * self.num_ranks + self.src
        receiving = self.step * self.num_ranks + self.dst
        self.cells, index = np.unique(np.concatenate([sending, receiving]), return_inverse=True)
        self.sender, self.receiver = np.split(index, 2)
        self._message = sending * self.num_ranks + self.dst
        self._published = sending * schedule.num_slots + src_slot

    def bytes(self, end: Integers, where: Booleans) -> Integers:
        """Per cell, the bytes of the transfers ``where`` whose ``end`` it is: `sender` or `receiver`."""
        return self._per_cell(end[where], self.sizes[where])

    def chunks(self, end: Integers, where: Booleans) -> Integers:
        """Per cell, how many such transfers there are."""
        return self._per_cell(end[where], np.ones(int(where.sum()), dtype=np.int64))

    def messages(self, end: Integers, where: Booleans) -> Integers:
        """Per cell, how many messages they make: all that goes from one rank to another in a step is one."""
        first = np.zeros(len(where), dtype=bool)
        first[np.flatnonzero(where)[first_of_each(self._message[where])]] = True
        return self.chunks(end, first)

    def put(self, where: Booleans, *, shared: bool) -> Booleans:
        """Which of the transfers ``where`` have to be put into memory; ``shared`` if what all read is put once."""
        put: Booleans = where.copy()
        if shared:
            put[where] = _is_put(self._published[where], self.num_ranks - 1)
        return put

    def num_rounds(self, where: Booleans) -> int:
        """Steps in which there is such a transfer."""
        return len(np.unique(self.step[where]))

    def per_rank(self, amounts: Integers) -> tuple[int, ...]:
        """The sums over all steps."""
        total = np.zeros(self.num_ranks, dtype=np.int64)
        np.add.at(total, self.cells % self.num_ranks, amounts)
        return tuple(total.tolist())

    def _per_cell(self, where: Integers, amounts: Integers) -> Integers:
        total = np.zeros(len(self.cells), dtype=np.int64)
        np.add.at(total, where, amounts)
        return total


def _is_put(published: Integers, num_others: int) -> Booleans:
    """Of transfers that each read a certain (step, rank, slot): whether it has to be put there, as it is not yet.

    What all others read is put once, anything else once for each reader.
    """
    _, first, of_transfer, readers = np.unique(published, return_index=True, return_inverse=True, return_counts=True)
    is_put: Booleans = readers[of_transfer] != num_others
    is_put[first] = True
    return is_put


def _chunk_of_each_transfer(schedule: Schedule) -> Integers:
    """Per transfer, which chunk it carries: what is in a slot need not be the chunk that the slot is named after.

    In all_to_all this is the slot that the data had on the rank that it comes from.
    """
    rows = schedule.rows
    carried = np.empty(len(rows), dtype=np.int64)
    if (rows[:, 2] == rows[:, 4]).all() and not schedule.num_scratch:
        carried[:] = rows[:, 2]  # nothing ever leaves the slot that it is named after
        return carried
    held = np.full((schedule.world_size, schedule.num_slots), -1, dtype=np.int64)
    held[:, : schedule.num_chunks] = np.arange(schedule.num_chunks)
    bounds = np.append(first_of_each(rows[:, 0]), len(rows))
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        _, src, src_slot, dst, dst_slot, _ = rows[start:end].T
        carried[start:end] = held[src, src_slot]
        held[dst, dst_slot] = carried[start:end]
        if (carried[start:end] < 0).any():
            index = start + int(np.argmin(carried[start:end]))
            raise MalformedScheduleError(f"transfer {index} ({schedule.transfer(index)}) reads an empty scratch slot")
    return carried


def first_of_each(ordered: npt.NDArray[np.integer]) -> Integers:
    """The index of the first of each run of equal values.

    Values that are not in runs are sorted first, so that the index is that of each value's first occurrence.
    """
    if len(ordered) and (np.diff(ordered) < 0).any():
        first: Integers = np.unique(ordered, return_index=True)[1]
        return first
    is_first = np.ones(len(ordered), dtype=bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return np.flatnonzero(is_first)


def _numbered(ordered: npt.NDArray[np.int32]) -> Integers:
    """The values of an ordered column, renamed to 0, 1, 2, ..."""
    is_new = np.zeros(len(ordered), dtype=np.int64)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return np.cumsum(is_new)
