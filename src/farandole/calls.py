"""Everything about a call that can be settled before its buffers are seen, settled once and kept.

A call is settled by its `Signature`: which collective, on which sizes, with which algorithm. Settling it proves the
schedule, lowers it, proves the programs, and binds this rank's program to the sizes. All ranks do the same from the
same signature; the fingerprint in every message tells when they did not.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import farandole._native as _native
from farandole import algorithms, selector
from farandole.calibration import Calibration
from farandole.call_records import pack_call
from farandole.dtypes import REDUCE_OPS, WIRE_FORMS, DType
from farandole.errors import ArgumentError
from farandole.lowering import lower
from farandole.plans import bind, sent_elements
from farandole.program import Local, Place, Program, Region
from farandole.program_verifier import verify_programs
from farandole.schedule import Schedule
from farandole.topology import Topology
from farandole.verifier import Interpretation, verify

__all__ = ["Algorithm", "Call", "CallTable", "CollectiveStats", "Signature", "prove"]

Algorithm = str | Schedule | Callable[[int], Schedule]
"""A name in `farandole.algorithms`, a schedule, or a function from the world size to one."""

_KEPT_CALLS = 1024


class Signature(NamedTuple):
    """What distinguishes one settled call from another.

    Attributes:
        collective: one of `COLLECTIVES`.
        dtype: of the elements.
        op: name of the reduction, or None.
        counts: see `farandole.plans`.
        output_counts: in all_to_all, the elements received per rank; None elsewhere.
        algorithm: None to let `farandole.selector` choose.
        root: source or destination rank, where there is one.
        caller: what the user called, where it is not the collective's own name.
        wire_dtype: what is rounded to between hosts; None if nothing is.
    """

    collective: str
    dtype: DType
    op: str | None = None
    counts: tuple[int, ...] = (0,)
    output_counts: tuple[int, ...] | None = None
    algorithm: Algorithm | None = None
    root: int = 0
    caller: str = ""
    wire_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class CollectiveStats:
    """What one communicator did so far with one algorithm of one collective.

    Attributes:
        collective, algorithm: which.
        calls: finished calls.
        bytes_sent, bytes_received: by this rank, counted by the engine as they moved.
        bytes_mapped: of those sent, what the others read where it lay, in registered memory.
        scheduled_bytes_sent: by this rank, as the schedules say.
        payload_bytes: S summed over the calls: bytes of the whole buffer.
        seconds: spent in the engine.
    """

    collective: str
    algorithm: str
    calls: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_mapped: int = 0
    scheduled_bytes_sent: int = 0
    payload_bytes: int = 0
    seconds: float = 0.0


class Call(NamedTuple):
    """A settled call: all that the engine needs but the buffers.

    Attributes:
        signature: what was asked for.
        native: the call as the engine knows it.
        record: what and count of the `CallRecord` that other ranks can read.
        algorithm: that was named or chosen, by its name.
    """

    signature: Signature
    native: _native.SettledCall
    record: tuple[int, int]
    algorithm: str


class Proof(NamedTuple):
    """A schedule that may run, with the programs that may run for it."""

    interpretation: Interpretation
    programs: tuple[Program, ...]


@lru_cache(maxsize=256)
def prove(schedule: Schedule, *, shared: bool = True) -> Proof:
    """Prove ``schedule`` and the programs it is lowered to.

    Args:
        schedule: what is to be run.
        shared: whether there are shared channels, which all ranks of one host can read.

    Raises:
        VerificationError: with the first counterexample.
    """
    interpretation = verify(schedule)
    programs = lower(interpretation, shared=shared)
    verify_programs(programs, interpretation)
    return Proof(interpretation, programs)


@dataclass
class CallTable:
    """The settled calls of one communicator's rank; those not used for longest are forgotten."""

    rank: int
    world_size: int
    max_segment_bytes: int
    calibration: Calibration
    topology: Topology
    tallies: dict[tuple[str, str], _native.Tally] = field(default_factory=dict)
    _calls: OrderedDict[Signature, Call] = field(default_factory=OrderedDict)

    def settle(self, signature: Signature) -> Call:
        """The call for ``signature``, proved and bound.

        Raises:
            ArgumentError: the algorithm is not for this call.
            ScheduleError: the algorithm's schedule is malformed, or its proof failed.
        """
        algorithm = signature.algorithm
        if not (algorithm is None or isinstance(algorithm, (str, Schedule)) or _is_hashable_function(algorithm)):
            raise ArgumentError(f"algorithm is {algorithm!r}; give a name, a Schedule, or a function that makes one")
        call = self._calls.get(signature)
        if call is not None:
            self._calls.move_to_end(signature)
            return call
        call = self._calls[signature] = self._settle(signature)
        if len(self._calls) > _KEPT_CALLS:
            self._calls.popitem(last=False)
        return call

    def _settle(self, signature: Signature) -> Call:
        payload_bytes = sum(signature.counts) * signature.dtype.itemsize
        schedule = self._schedule(signature, payload_bytes)
        proof = prove(schedule, shared=self.topology.is_one_host)
        program = proof.programs[self.rank]
        rounds = signature.wire_dtype is not None and not self.topology.is_one_host
        if rounds and not proof.interpretation.completes_once:
            raise _completes_twice(signature, schedule)
        if signature.collective == "all_to_all":
            _require_even_if_passed_on(proof.programs, 2 * schedule.num_chunks, signature)
        plan = bind(
            proof.interpretation,
            program,
            signature.counts,
            signature.output_counts,
            itemsize=signature.dtype.itemsize,
            max_segment_bytes=self.max_segment_bytes,
        )
        op_code = -1 if signature.op is None else REDUCE_OPS[signature.op]
        sent = sent_elements(proof.interpretation, program.rank, signature.counts, signature.output_counts)
        record = self._record(signature, op_code)
        what, count = record
        native = _native.SettledCall(
            plan=plan,
            dtype=signature.dtype.code,
            op=op_code,
            divisor=self.world_size if signature.op == "avg" else 1,
            fingerprint=_fingerprint(signature, schedule),
            what=what,
            count=count,
            scheduled_bytes_sent=sent * signature.dtype.itemsize,
            payload_bytes=payload_bytes,
            tally=self.tallies.setdefault((signature.collective, schedule.name), _native.Tally()),
            wire_form=WIRE_FORMS[signature.wire_dtype] if rounds else 0,
        )
        return Call(signature, native, record, schedule.name)

    def stats(self) -> list[CollectiveStats]:
        """What finished calls did, per collective and algorithm."""
        entries = [
            CollectiveStats(name, algorithm, *tally.read()) for (name, algorithm), tally in list(self.tallies.items())
        ]
        return [entry for entry in entries if entry.calls]

    def algorithms(self) -> dict[tuple[int, int], str]:
        """By what and count of their records, the algorithms of the calls that are not forgotten."""
        return {call.record: call.algorithm for call in list(self._calls.values())}

    def _record(self, signature: Signature, op_code: int) -> tuple[int, int]:
        call = signature.caller or signature.collective
        own_part = signature.collective in ("all_gather", "gather", "scatter")
        count = signature.counts[self.rank] if own_part else sum(signature.counts)
        what = pack_call(call, signature.dtype, op_code, signature.algorithm, signature.root, signature.wire_dtype)
        return what, count

    def _schedule(self, signature: Signature, payload_bytes: int) -> Schedule:
        algorithm, collective, world_size = signature.algorithm, signature.collective, self.world_size
        arriving = signature.output_counts
        if algorithm is None and arriving is not None and len({*signature.counts, *arriving}) > 1:
            algorithm = "direct"  # which takes any counts; each rank sees other sizes, and might choose another
        if algorithm is None:
            algorithm = selector.choose(
                collective,
                world_size,
                payload_bytes,
                self.calibration,
                signature.dtype.name,
                self.topology,
                signature.wire_dtype,
            )
        if isinstance(algorithm, str):
            _require_known(collective, algorithm)
            return selector.named_schedule(collective, algorithm, world_size, signature.root, self.topology)
        schedule = algorithm if isinstance(algorithm, Schedule) else algorithm(world_size)
        if not isinstance(schedule, Schedule):
            raise ArgumentError(f"algorithm returned a {type(schedule).__name__}; it must return a Schedule")
        wanted = (collective, world_size, signature.root)
        if (schedule.collective, schedule.world_size, schedule.root) != wanted:
            raise ArgumentError(
                f"the schedule is {_in_words(schedule.collective, schedule.world_size, schedule.root)}; this call "
                f"needs {_in_words(collective, world_size, signature.root)}"
            )
        return schedule


def _in_words(collective: str, world_size: int, root: int) -> str:
    article = "an" if collective.startswith("all") else "a"
    rooted = f" with root {root}" if collective in algorithms.ROOTED else ""
    return f"{article} {collective} of {world_size} ranks{rooted}"


def _is_hashable_function(value: object) -> bool:
    return callable(value) and isinstance(value, Hashable)


def _require_known(collective: str, name: str) -> None:
    known = algorithms.names(collective)
    if name not in known:
        is_path = ".py" in name
        remedy = "import that function and pass it itself" if is_path else f"known are {', '.join(known)}"
        raise ArgumentError(f"algorithm is {name!r}, which is no algorithm for {collective}; {remedy}")


def _completes_twice(signature: Signature, schedule: Schedule) -> ArgumentError:
    possible = [n for n in algorithms.names(signature.collective) if n not in algorithms.COMPLETES_ON_SEVERAL]
    return ArgumentError(
        f"wire_dtype is {signature.wire_dtype!r}, and with algorithm {schedule.name!r} several ranks complete one sum, "
        f"each from other numbers than the rest, as some were rounded on their way; use one of {', '.join(possible)}, "
        f"or name none"
    )


def _require_even_if_passed_on(programs: Sequence[Program], first_size: int, signature: Signature) -> None:
    if len({*signature.counts, *(signature.output_counts or ())}) == 1:
        return
    passes_on = any(operation.size >= first_size for program in programs for operation in program.operations)
    if passes_on or any(_uses_scratch_again(program) for program in programs):
        why = "passes data on for other ranks" if passes_on else "keeps one chunk after the other in a scratch slot"
        raise ArgumentError(
            f"this all_to_all algorithm {why}, so all counts must be equal; use 'direct' or 'pairwise' for "
            f"{signature.counts} elements sent and {signature.output_counts} received"
        )


def _uses_scratch_again(program: Program) -> bool:
    """Whether a place in work memory holds chunks one after the other whose sizes a rank may give differently."""
    sizes: dict[Place, int] = {}
    for operation in program.operations:
        local = [operand.place for operand in getattr(operation, "operands", ()) if isinstance(operand, Local)]
        for place in (operation.place, *local):
            if place.region == Region.WORK and sizes.setdefault(place, operation.size) != operation.size:
                return True
    return False


def _fingerprint(signature: Signature, schedule: Schedule) -> int:
    """64 bits of all that the ranks must agree on. What each sends in all_to_all is checked per message."""
    counts = () if signature.output_counts is not None else signature.counts
    agreed = [
        signature.collective,
        schedule.hash,
        signature.dtype.name,
        signature.op,
        counts,
        signature.caller,
        signature.wire_dtype,
    ]
    return int.from_bytes(hashlib.blake2b(json.dumps(agreed).encode(), digest_size=8).digest(), "little")
