"""Which algorithm a collective uses when the caller names none: the one that the cost model says is fastest.

All algorithms of the collective are priced on the links that the ranks have between them (`farandole.calibration`);
those that know hosts only where there are several, and several ranks on one. 16-bit floats are reduced by those alone
that fold all contributions at once, and so round once; numbers that are rounded between hosts, by those that complete a
sum on one rank. Of those within `TOLERANCE` of the fastest, which the model
cannot tell apart, one that sends and adds up the fewest bytes is chosen, give or take as much; of several such one of
the fewest steps, and then the last in `farandole.algorithms.ALGORITHMS`.

So the choice is a function of collective, world size, bytes, dtype, calibration and topology, and all ranks of a
communicator choose the same: they have rank 0's calibration, and a hash of the schedule is in each message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from farandole import algorithms
from farandole.calibration import Calibration
from farandole.collectives import is_reducing
from farandole.cost_model import Link, price
from farandole.dtypes import dtype_named, encoded_bytes, require_wire_dtype
from farandole.errors import ArgumentError
from farandole.schedule import Schedule
from farandole.topology import Topology

__all__ = ["TOLERANCE", "Candidate", "Explanation", "choose", "explain", "named_schedule"]

_ROUNDED = ("float16", "bfloat16")

TOLERANCE = 0.05
"""Predictions that differ by no more than this part are as good as equal."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm, and what it would cost.

    Attributes:
        algorithm: its name.
        seconds: as predicted.
        rounds: steps in which something travels.
        max_bytes_sent: by the rank that sends most.
        max_bytes_reduced: by the rank that adds most.
    """

    algorithm: str
    seconds: float
    rounds: int
    max_bytes_sent: int
    max_bytes_reduced: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why an algorithm is chosen. As a text, a table of the candidates and the reason.

    Attributes:
        collective, world_size, nbytes: of the call; bytes of the whole buffer.
        chosen: name of the algorithm.
        reason: in a sentence.
        candidates: all algorithms of the collective, the fastest first.
        calibration: where the figures come from that the prediction is made with.
        num_hosts: that the ranks are on.
    """

    collective: str
    world_size: int
    nbytes: int
    chosen: str
    reason: str
    candidates: tuple[Candidate, ...]
    calibration: str
    num_hosts: int = 1

    @property
    def ranks(self) -> str:
        """How many, and on how many hosts if there are several, in words."""
        return f"{self.world_size} ranks" + (f" on {self.num_hosts} hosts" if self.num_hosts > 1 else "")

    def __str__(self) -> str:
        width = max(len(candidate.algorithm) for candidate in self.candidates)
        lines = [
            f"{self.collective} of {self.nbytes:,} bytes on {self.ranks}: {self.chosen}, {self.reason}",
            f"  {'algorithm'.ljust(max(width, 9))}  predicted us  steps  sent by the busiest rank (bytes)",
        ]
        for one in self.candidates:
            mark = ">" if one.algorithm == self.chosen else " "
            lines.append(
                f"{mark} {one.algorithm.ljust(max(width, 9))}  {one.seconds * 1e6:12.2f}  {one.rounds:5}  "
                f"{one.max_bytes_sent:,}"
            )
        return "\n".join([*lines, f"calibration: {self.calibration}"])


def choose(
    collective: str,
    world_size: int,
    nbytes: int,
    calibration: Calibration,
    dtype: str = "float32",
    topology: Topology | None = None,
    wire_dtype: str | None = None,
) -> str:
    """The name of the algorithm for ``nbytes`` bytes of the whole buffer.

    Raises:
        ArgumentError: there is no such collective.
    """
    return explain(collective, world_size, nbytes, calibration, dtype, topology, wire_dtype).chosen


def explain(
    collective: str,
    world_size: int,
    nbytes: int,
    calibration: Calibration,
    dtype: str = "float32",
    topology: Topology | None = None,
    wire_dtype: str | None = None,
) -> Explanation:
    """The candidates with what they would cost, the choice, and why.

    Sizes are rounded up to three binary digits (by a fifth at most), so that there are few of them to price.

    Args:
        collective: one of `farandole.collectives.COLLECTIVES`.
        world_size: number of ranks, N >= 1.
        nbytes: bytes of the whole buffer, S >= 0.
        calibration: what communication costs here.
        dtype: of the elements. 16-bit floats are reduced by the algorithms alone that round sums once.
        topology: which ranks share a host; None if all do.
        wire_dtype: see `farandole.Communicator.all_reduce`.

    Raises:
        ArgumentError: no such collective or dtype or wire_dtype, a number out of range, or a topology of other ranks.
    """
    if collective not in algorithms.ALGORITHMS:
        raise ArgumentError(f"there is no collective {collective!r}; known are {', '.join(algorithms.ALGORITHMS)}")
    if not (isinstance(nbytes, (int, np.integer)) and 0 <= nbytes < 2**63 and world_size >= 1):
        raise ArgumentError(
            f"world_size is {world_size} and nbytes is {nbytes!r}; they must be whole numbers >= 1 and >= 0"
        )
    topology = topology or Topology.one_host(world_size)
    if topology.world_size != world_size:
        raise ArgumentError(f"the topology {topology} has {topology.world_size} ranks, but world_size is {world_size}")
    require_wire_dtype(wire_dtype, dtype_named(dtype))
    if wire_dtype is not None and collective != "all_reduce":
        raise ArgumentError(f"wire_dtype is {wire_dtype!r}, which is for all_reduce alone, and not for {collective}")
    nbytes = int(nbytes)
    rounds_once = dtype_named(dtype).name in _ROUNDED and is_reducing(collective) and collective != "barrier"
    unit = 1 << max(0, nbytes.bit_length() - 3)
    nbytes_about = -(-nbytes // unit) * unit
    wire_dtype = None if topology.is_one_host else wire_dtype
    explanation = _explain(collective, topology, nbytes_about, calibration, rounds_once, wire_dtype)
    return replace(explanation, nbytes=nbytes)


@lru_cache(maxsize=4096)
def _explain(
    collective: str,
    topology: Topology,
    nbytes: int,
    calibration: Calibration,
    rounds_once: bool,
    wire_dtype: str | None,
) -> Explanation:
    world_size = topology.world_size
    wire = _as_if_wider(calibration.wire, wire_dtype)
    link = calibration.link(topology.most_ranks_on_a_host, nbytes)
    candidates = []
    names = [name for name in _names(collective, topology) if not rounds_once or name in algorithms.ROUND_ONCE]
    if wire_dtype is not None:
        names = [name for name in names if name not in algorithms.COMPLETES_ON_SEVERAL]
    for name in names:
        schedule = named_schedule(collective, name, world_size, topology=topology)
        cost = price(schedule, nbytes, link, topology=topology, wire=wire)
        candidates.append(Candidate(name, cost.seconds, cost.rounds, cost.max_bytes_sent, cost.max_bytes_reduced))
    candidates.sort(key=lambda candidate: candidate.seconds)
    fastest = candidates[0]
    close = [one for one in candidates if one.seconds <= fastest.seconds * (1 + TOLERANCE)]
    order = {name: index for index, name in enumerate(names)}
    least_work = min(_work(one) for one in close)
    chosen = min(
        (one for one in close if _work(one) <= least_work * (1 + TOLERANCE)),
        key=lambda one: (one.rounds, -order[one.algorithm]),
    )
    if len(candidates) == 1:
        reason = "the only one"
    elif len(close) == 1:
        ahead = candidates[1].seconds / fastest.seconds
        reason = f"predicted to be the fastest, {ahead:.2f} times as fast as {candidates[1].algorithm}"
    else:
        others = " and ".join(one.algorithm for one in close if one is not chosen)
        reason = f"predicted within {TOLERANCE:.0%} of {others}, and none of these does {TOLERANCE:.0%} less"
    if rounds_once:
        reason += ", of those that round sums of 16-bit floats once"
    if wire_dtype is not None:
        reason += ", of those that complete a sum on one rank"
    return Explanation(
        collective,
        world_size,
        nbytes,
        chosen.algorithm,
        reason,
        tuple(candidates),
        calibration.source,
        topology.num_hosts,
    )


def _names(collective: str, topology: Topology) -> list[str]:
    """The algorithms that there is a choice of: those that know hosts add nothing where a host is all, or a rank."""
    knows_hosts = 1 < topology.num_hosts < topology.world_size
    return [name for name in algorithms.names(collective) if knows_hosts or name not in algorithms.HIERARCHICAL]


def _as_if_wider(wire: Link, wire_dtype: str | None) -> Link:
    """The wire as it is for float32 that travels as ``wire_dtype``: in less time, as there are fewer bytes."""
    share = encoded_bytes(wire_dtype, 4096) / 4096
    return replace(wire, bandwidth_bytes_per_s=wire.bandwidth_bytes_per_s / share)


def _work(candidate: Candidate) -> int:
    return candidate.max_bytes_sent + candidate.max_bytes_reduced


def named_schedule(
    collective: str, name: str, world_size: int, root: int = 0, topology: Topology | None = None
) -> Schedule:
    """As `farandole.algorithms.build`; kept."""
    return _kept_schedule(collective, name, world_size, root, topology if name in algorithms.HIERARCHICAL else None)


@lru_cache(maxsize=512)
def _kept_schedule(collective: str, name: str, world_size: int, root: int, topology: Topology | None) -> Schedule:
    return algorithms.build(collective, name, world_size, root, topology)
