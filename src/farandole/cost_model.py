"""What a schedule costs, by the alpha-beta-gamma model.

The model knows what one kind of `Link` costs: alpha (`latency_s`), the time to get one message going; beta, the time
per byte (``1 / bandwidth_bytes_per_s``); gamma, the time per byte that is added up (``1 / reduce_bytes_per_s``); and
`step_s`, the time until a rank hears of what others did, once per step. It assumes:

* **One port.** A rank sends one message at a time and receives one at a time. On a wire it does both at once. In
  shared memory, where it is a core of the host that copies, it does one after the other, and no more ranks at a time
  than there are cores; there a chunk that goes to all others in one step is put where they find it once, and what is
  added up is not copied before.
* **One message per peer and step.** All that a rank sends to one peer in a step travels together and pays alpha
  once. In shared memory alpha is paid for each chunk that a rank puts there, and again by each that takes it.
* **Steps wait.** A step starts when the last rank is through with the one before. It takes a rank its sending and its
  receiving, and then the adding up.
* **Local moves are free.** A local transfer costs nothing but the adding up, if it adds; in shared memory not even
  that, as it is added up in one pass with what arrives.
* **No contention.** Every pair of ranks has a link of its own; the simulator knows better.

The engine overlaps steps and pipelines within them, so for long vectors it can be faster than this.

Sizes are exact: the ``nbytes`` of the whole buffer, S, are cut into chunks as equal as possible, in whole bytes (or
elements), the first ones being the larger. S is the *whole* buffer for every collective: for all_gather the gathered
result, for all_to_all all that one rank sends, its own part included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from farandole.errors import ArgumentError, MalformedScheduleError
from farandole.schedule import Schedule

__all__ = ["BUS_FACTORS", "Bound", "Cost", "Link", "bus_factor", "chunk_bytes", "lower_bound", "price"]

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Link:
    """What one kind of link costs, the same for every pair of ranks.

    Attributes:
        latency_s: alpha, seconds per message.
        bandwidth_bytes_per_s: 1 / beta, of what a rank sends or receives.
        reduce_bytes_per_s: 1 / gamma, bytes of contributions that a rank adds up per second.
        step_s: seconds per step, besides.
        cores: of the host, where the ranks copy through memory that they share; None for a wire.

    Raises:
        ArgumentError: a negative time, a rate that is not positive, or no cores.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    reduce_bytes_per_s: float
    step_s: float = 0.0
    cores: int | None = None

    def __post_init__(self) -> None:
        for field in ("bandwidth_bytes_per_s", "reduce_bytes_per_s", "cores"):
            if getattr(self, field) is not None and not getattr(self, field) > 0:
                raise ArgumentError(f"{field} is {getattr(self, field)}; it must be > 0")
        for field in ("latency_s", "step_s"):
            if not getattr(self, field) >= 0:
                raise ArgumentError(f"{field} is {getattr(self, field)}; it must be >= 0")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a schedule costs; tuples have an entry per rank.

    Attributes:
        rounds: steps in which something travels between ranks.
        messages_sent: peers that each rank sends to, summed over the steps.
        bytes_sent, bytes_received: what each rank moves to and from others.
        bytes_reduced: what each rank adds to something, counted in bytes of the contribution that is added.
        seconds: the time of all steps, by the model above.
    """

    rounds: int
    messages_sent: tuple[int, ...]
    bytes_sent: tuple[int, ...]
    bytes_received: tuple[int, ...]
    bytes_reduced: tuple[int, ...]
    seconds: float

    @property
    def max_messages_sent(self) -> int:
        """Messages sent by the rank that sends most."""
        return max(self.messages_sent)

    @property
    def max_bytes_sent(self) -> int:
        """Bytes sent by the rank that sends most."""
        return max(self.bytes_sent)

    @property
    def max_bytes_received(self) -> int:
        """Bytes received by the rank that receives most."""
        return max(self.bytes_received)

    @property
    def max_bytes_reduced(self) -> int:
        """Bytes added up by the rank that adds most."""
        return max(self.bytes_reduced)


class Bound(NamedTuple):
    """What no algorithm can beat.

    Attributes:
        rounds: rounds in which every rank sends at most one message and receives at most one. An algorithm that talks
            to several peers at once may have fewer steps, but not fewer messages one after the other.
        bytes_per_rank: what the busiest rank must send or, in reduce and gather, receive.
    """

    rounds: int
    bytes_per_rank: float


def chunk_bytes(schedule: Schedule, nbytes: int, *, item_bytes: int = 1) -> Integers:
    """The size of each chunk, if the whole buffer has ``nbytes`` bytes.

    Args:
        schedule: says how many chunks there are.
        nbytes: size of the whole buffer, S, >= 0.
        item_bytes: size of an element; chunks are cut between elements.

    Returns:
        ``num_chunks`` sizes that add up to ``nbytes``, as equal as possible, the larger ones first.

    Raises:
        ArgumentError: a negative size, or one that is not a whole number of elements.
    """
    if nbytes < 0 or item_bytes < 1 or nbytes % item_bytes:
        raise ArgumentError(f"nbytes is {nbytes}; it must be a multiple, >= 0, of item_bytes, which is {item_bytes}")
    each, larger = divmod(nbytes // item_bytes, schedule.num_chunks)
    sizes = np.full(schedule.num_chunks, each, dtype=np.int64)
    sizes[:larger] += 1
    return sizes * item_bytes


def price(schedule: Schedule, nbytes: int, link: Link, *, item_bytes: int = 1) -> Cost:
    """What ``schedule`` costs on a buffer of ``nbytes`` bytes.

    Args:
        schedule: a schedule that `farandole.verifier.verify` accepts.
        nbytes: size of the whole buffer, S.
        link: between any two ranks.
        item_bytes: size of an element; chunks are cut between elements.

    Raises:
        ArgumentError: a size that `chunk_bytes` refuses.
        MalformedScheduleError: the schedule reads a scratch slot that nothing was put into.
    """
    sizes = chunk_bytes(schedule, nbytes, item_bytes=item_bytes)[_chunk_of_each_transfer(schedule)]
    num_ranks = schedule.world_size
    src, src_slot, dst = (schedule.column(name).astype(np.int64) for name in ("src", "src_slot", "dst"))
    reduces = schedule.column("reduce") == 1
    travels = src != dst
    step = _numbered(schedule.column("step"))

    # A cell is one rank in one step. A rank that both sends and receives in a step does so in one and the same cell.
    cells, index = np.unique(np.concatenate([step * num_ranks + src, step * num_ranks + dst]), return_inverse=True)
    sender, receiver = np.split(index, 2)
    first_of_message = _first_of_each(((step * num_ranks + src) * num_ranks + dst)[travels])

    def per_cell(where: Integers, amounts: Integers) -> Integers:
        total = np.zeros(len(cells), dtype=np.int64)
        np.add.at(total, where, amounts)
        return total

    ones = np.ones(len(first_of_message), dtype=np.int64)
    messages_sent = per_cell(sender[travels][first_of_message], ones)
    messages_received = per_cell(receiver[travels][first_of_message], ones)
    sent = per_cell(sender[travels], sizes[travels])
    received = per_cell(receiver[travels], sizes[travels])
    reduced = per_cell(receiver[reduces], sizes[reduces])
    if link.cores is not None:
        put = travels.copy()
        put[travels] = _is_put(((step * num_ranks + src) * schedule.num_slots + src_slot)[travels], num_ranks - 1)
        each = np.ones(len(put), dtype=np.int64)
        putting_s = per_cell(sender[put], each[put]) * link.latency_s
        putting_s += per_cell(sender[put], sizes[put]) / link.bandwidth_bytes_per_s
        taken = travels & ~reduces
        taking_s = per_cell(receiver[travels], each[travels]) * link.latency_s
        taking_s += per_cell(receiver[taken], sizes[taken]) / link.bandwidth_bytes_per_s
        moving_s = putting_s + taking_s
    else:
        sending_s = messages_sent * link.latency_s + sent / link.bandwidth_bytes_per_s
        receiving_s = messages_received * link.latency_s + received / link.bandwidth_bytes_per_s
        moving_s = np.maximum(sending_s, receiving_s)
    starts = _first_of_each(cells // num_ranks)
    rounds = len(np.unique(step[travels]))
    added = reduced if link.cores is None else per_cell(receiver[reduces & travels], sizes[reduces & travels])
    busy_s = moving_s + added / link.reduce_bytes_per_s

    def per_rank(amounts: Integers) -> tuple[int, ...]:
        total = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(total, cells % num_ranks, amounts)
        return tuple(total.tolist())

    seconds = rounds * link.step_s
    if len(cells):
        longest_s = np.maximum.reduceat(busy_s, starts)
        if link.cores is not None:
            longest_s = np.maximum(longest_s, np.add.reduceat(busy_s, starts) / link.cores)
        seconds += float(longest_s.sum())
    return Cost(
        rounds=rounds,
        messages_sent=per_rank(messages_sent),
        bytes_sent=per_rank(sent),
        bytes_received=per_rank(received),
        bytes_reduced=per_rank(reduced),
        seconds=seconds,
    )


def _is_put(published: Integers, num_others: int) -> npt.NDArray[np.bool_]:
    """Of transfers that each read a certain (step, rank, slot): whether it has to be put there, as it is not yet.

    What all others read is put once, anything else once for each reader.
    """
    _, first, of_transfer, readers = np.unique(published, return_index=True, return_inverse=True, return_counts=True)
    is_put: npt.NDArray[np.bool_] = readers[of_transfer] != num_others
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
    bounds = np.append(_first_of_each(rows[:, 0]), len(rows))
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        _, src, src_slot, dst, dst_slot, _ = rows[start:end].T
        carried[start:end] = held[src, src_slot]
        held[dst, dst_slot] = carried[start:end]
        if (carried[start:end] < 0).any():
            index = start + int(np.argmin(carried[start:end]))
            raise MalformedScheduleError(f"transfer {index} ({schedule.transfer(index)}) reads an empty scratch slot")
    return carried


def _first_of_each(ordered: npt.NDArray[np.integer]) -> Integers:
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


def lower_bound(collective: str, world_size: int, nbytes: int) -> Bound:
    """What no algorithm for ``collective`` can beat, on ranks with one full-duplex port each.

    Why: in one round the ranks that know of, or are known to, a given rank can at most double, hence ceil(log2 N)
    rounds. Whoever must end with bytes that it lacks must receive them; to reduce and then share a sum needs (N-1)/N·S
    of each twice.

    Args:
        collective: one of `farandole.collectives.COLLECTIVES`.
        world_size: number of ranks, N.
        nbytes: size of the whole buffer, S.

    Raises:
        ArgumentError: an unknown collective, or a size out of range.

    Source: Chan, Heimlich, Purkayastha & van de Geijn 2007, "Collective communication: theory, practice, and
        experience"; for all_to_all Bruck et al. 1997.
    """
    if collective not in _SHARES:
        raise ArgumentError(f"collective is {collective!r}; known are {', '.join(_SHARES)}")
    if world_size < 1 or nbytes < 0:
        raise ArgumentError(f"world_size is {world_size} and nbytes is {nbytes}; they must be >= 1 and >= 0")
    if world_size == 1:
        return Bound(0, 0.0)
    others, whole = _SHARES[collective]
    return Bound((world_size - 1).bit_length(), (others * (world_size - 1) / world_size + whole) * nbytes)


_SHARES: dict[str, tuple[int, int]] = {
    "all_reduce": (2, 0),
    "reduce_scatter": (1, 0),
    "all_gather": (1, 0),
    "broadcast": (0, 1),
    "reduce": (0, 1),
    "gather": (1, 0),
    "scatter": (1, 0),
    "all_to_all": (1, 0),
    "barrier": (0, 0),
}
"""collective -> (a, b): the busiest rank must move a·(N-1)/N·S + b·S bytes."""


BUS_FACTORS: dict[str, tuple[int, int]] = {
    "all_reduce": (2, 1),
    "reduce_scatter": (1, 1),
    "all_gather": (1, 1),
    "all_to_all": (1, 1),
    "broadcast": (1, 0),
    "reduce": (1, 0),
    "gather": (1, 1),
    "scatter": (1, 1),
    "barrier": (1, 0),
}
"""collective -> (a, b) such that busbw = algbw * a (N - b) / N; the factors of nccl-tests."""


def bus_factor(collective: str, world_size: int) -> float:
    """busbw / algbw: what makes the bandwidths of all world sizes comparable with that of a link.

    Args:
        collective: a key of `BUS_FACTORS`.
        world_size: N.
    """
    times, less = BUS_FACTORS[collective]
    return times * (world_size - less) / world_size
