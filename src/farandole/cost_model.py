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

With several hosts (`farandole.topology`) a link is the memory of one host, shared by its ranks alone, and what goes to
another host crosses a *wire*:

* **One wire per host.** All that leaves a host in a step shares the bandwidth of its wire, and so does, in the other
  direction, all that enters. Messages cost a rank their latency, as on any wire; but as it is a core that sends and
  receives them, no more ranks do so at a time than there are cores.
* **Wires like company that stays.** Where a host has several partners in a step, or others than in the step before,
  what travels takes `CONTENTION` longer: segments of one step wait for those of another, and flows for one another.
* **Nothing is put once for all.** What several ranks read is put there, or sent, once for each.
* **A host first moves and adds up, then speaks with others.** So a step takes it the sum of both; each of the two, if
  there is any of it, has its own ``step_s``.

The engine overlaps steps and pipelines within them, so for long vectors it can be faster than this.

Sizes are exact: the ``nbytes`` of the whole buffer, S, are cut into chunks as equal as possible, in whole bytes (or
elements), the first ones being the larger. S is the *whole* buffer for every collective: for all_gather the gathered
result, for all_to_all all that one rank sends, its own part included.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from farandole.errors import ArgumentError
from farandole.schedule import Schedule
from farandole.topology import Topology
from farandole.traffic import Booleans, Integers, Traffic, first_of_each

__all__ = ["BUS_FACTORS", "CONTENTION", "Bound", "Cost", "Link", "bus_factor", "chunk_bytes", "lower_bound", "price"]

CONTENTION = 0.15
"""Measured between 4 hosts at 200 Mbit/s, 1 to 16 MiB: rings reach 94 % of the wires' limit, others 83 to 91 %."""

Seconds = npt.NDArray[np.float64]


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


def price(
    schedule: Schedule,
    nbytes: int,
    link: Link,
    *,
    item_bytes: int = 1,
    topology: Topology | None = None,
    wire: Link | None = None,
) -> Cost:
    """What ``schedule`` costs on a buffer of ``nbytes`` bytes.

    Args:
        schedule: a schedule that `farandole.verifier.verify` accepts.
        nbytes: size of the whole buffer, S.
        link: between any two ranks of a host.
        item_bytes: size of an element; chunks are cut between elements.
        topology: which ranks share a host; None if all do.
        wire: between hosts, where there are several. Its bandwidth is that of a host, each way.

    Raises:
        ArgumentError: a size that `chunk_bytes` refuses, or a topology of other ranks or without a wire.
        MalformedScheduleError: the schedule reads a scratch slot that nothing was put into.
    """
    traffic = Traffic(schedule, chunk_bytes(schedule, nbytes, item_bytes=item_bytes))
    if topology is None or topology.is_one_host:
        seconds = _seconds_on_one_host(traffic, link)
    else:
        seconds = _seconds_on_hosts(traffic, link, *_matching(schedule, topology, wire))
    return Cost(
        rounds=traffic.num_rounds(traffic.travels),
        messages_sent=traffic.per_rank(traffic.messages(traffic.sender, traffic.travels)),
        bytes_sent=traffic.per_rank(traffic.bytes(traffic.sender, traffic.travels)),
        bytes_received=traffic.per_rank(traffic.bytes(traffic.receiver, traffic.travels)),
        bytes_reduced=traffic.per_rank(traffic.bytes(traffic.receiver, traffic.reduces)),
        seconds=seconds,
    )


def _matching(schedule: Schedule, topology: Topology, wire: Link | None) -> tuple[Topology, Link]:
    if topology.world_size != schedule.world_size:
        raise ArgumentError(
            f"the topology {topology} has {topology.world_size} ranks, the schedule {schedule.world_size}; give one of "
            f"as many"
        )
    if wire is None or wire.cores is not None:
        raise ArgumentError(f"wire is {wire}; between the {topology.num_hosts} hosts give a Link without cores")
    return topology, wire


def _seconds_on_one_host(traffic: Traffic, link: Link) -> float:
    added = traffic.reduces if link.cores is None else traffic.reduces & traffic.travels
    busy_s = _moving_s(traffic, link, traffic.travels, shared=True)
    busy_s = busy_s + traffic.bytes(traffic.receiver, added) / link.reduce_bytes_per_s
    seconds = traffic.num_rounds(traffic.travels) * link.step_s
    if len(traffic.cells):
        starts = first_of_each(traffic.cells // traffic.num_ranks)
        longest_s = np.maximum.reduceat(busy_s, starts)
        if link.cores is not None:
            longest_s = np.maximum(longest_s, np.add.reduceat(busy_s, starts) / link.cores)
        seconds += float(longest_s.sum())
    return seconds


def _seconds_on_hosts(traffic: Traffic, link: Link, topology: Topology, wire: Link) -> float:
    host_of = np.array(topology.host_of)
    crosses = host_of[traffic.src] != host_of[traffic.dst]
    stays = traffic.travels & ~crosses
    added = traffic.reduces & ~crosses if link.cores is None else traffic.reduces & stays
    busy_s = _moving_s(traffic, link, stays, shared=False)
    busy_s = busy_s + traffic.bytes(traffic.receiver, added) / link.reduce_bytes_per_s
    busy_s += traffic.bytes(traffic.receiver, traffic.reduces & crosses) / wire.reduce_bytes_per_s

    steps, ranks = np.divmod(traffic.cells, traffic.num_ranks)
    hosts, of_cell = np.unique(steps * topology.num_hosts + host_of[ranks], return_inverse=True)  # in each step

    def per_host(combine: np.ufunc, amounts: Seconds | Integers) -> Seconds:
        total = np.zeros(len(hosts))
        combine.at(total, of_cell, amounts)
        return total

    def by_cores(amounts_s: Seconds) -> Seconds:
        longest_s = per_host(np.maximum, amounts_s)
        return longest_s if link.cores is None else np.maximum(longest_s, per_host(np.add, amounts_s) / link.cores)

    inside_s = by_cores(busy_s)
    slower = 1 + CONTENTION * _is_crowded(traffic, crosses, host_of)[hosts // topology.num_hosts]
    ways_s = [
        by_cores(wire.latency_s * traffic.messages(end, crosses).astype(np.float64))
        + per_host(np.add, traffic.bytes(end, crosses)) * slower / wire.bandwidth_bytes_per_s
        for end in (traffic.sender, traffic.receiver)
    ]
    longest_s = np.zeros(int(steps[-1]) + 1 if len(steps) else 0)
    np.maximum.at(longest_s, hosts // topology.num_hosts, inside_s + np.maximum(*ways_s))
    waits_s = traffic.num_rounds(stays) * link.step_s + traffic.num_rounds(crosses) * wire.step_s
    return waits_s + float(longest_s.sum())


def _is_crowded(traffic: Traffic, crosses: Booleans, host_of: Integers) -> Integers:
    """Per step, 1 if a host has several partners, or others than in the last step in which anything crossed."""
    num_hosts = int(host_of.max()) + 1
    crowded = np.zeros(int(traffic.step[-1]) + 1 if len(traffic.step) else 0, dtype=np.int64)
    pairs = host_of[traffic.src[crosses]] * num_hosts + host_of[traffic.dst[crosses]]
    before: Integers | None = None
    steps = traffic.step[crosses]
    bounds = np.append(first_of_each(steps), len(steps)).tolist()
    for start, end in itertools.pairwise(bounds):
        partners = np.unique(pairs[start:end])
        senders, receivers = partners // num_hosts, partners % num_hosts
        is_one_to_one = len(np.unique(senders)) == len(np.unique(receivers)) == len(partners)
        crowded[steps[start]] = not is_one_to_one or (before is not None and not np.array_equal(before, partners))
        before = partners
    return crowded


def _moving_s(traffic: Traffic, link: Link, where: Booleans, *, shared: bool) -> Seconds:
    """Per cell, what it takes to move the transfers ``where`` over ``link``."""
    ends = (traffic.sender, traffic.receiver)
    if link.cores is None:
        sending_s, receiving_s = (
            traffic.messages(end, where) * link.latency_s + traffic.bytes(end, where) / link.bandwidth_bytes_per_s
            for end in ends
        )
        return np.maximum(sending_s, receiving_s)
    put, taken = traffic.put(where, shared=shared), where & ~traffic.reduces
    putting_s = traffic.chunks(traffic.sender, put) * link.latency_s
    putting_s = putting_s + traffic.bytes(traffic.sender, put) / link.bandwidth_bytes_per_s
    taking_s = traffic.chunks(traffic.receiver, where) * link.latency_s
    taking_s = taking_s + traffic.bytes(traffic.receiver, taken) / link.bandwidth_bytes_per_s
    return putting_s + taking_s


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
