"""Binds a program to sizes: which slot lies where in a call's buffers.

Where a collective gives every rank a part of the buffer, ``counts`` holds the elements of each part; each part is cut
into its chunks. Elsewhere it holds the elements of the whole buffer, cut into all chunks. Chunks are as equal as
possible: the first ones hold one element more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt

import farandole._native as _native
from farandole.collectives import chunks_of_part, is_parted
from farandole.lowering import size_index
from farandole.program import Combine, Local, Program
from farandole.schedule import Schedule
from farandole.verifier import Interpretation

__all__ = ["bind", "chunk_counts", "sent_elements", "split_evenly"]

Ints = npt.NDArray[np.int64]


def split_evenly(count: int, num_parts: int) -> list[int]:
    """``count`` as ``num_parts`` whole numbers that differ by one at most, the larger ones first."""
    base, extra = divmod(count, num_parts)
    return [base + 1] * extra + [base] * (num_parts - extra)


def chunk_counts(schedule: Schedule, counts: Sequence[int]) -> list[int]:
    """Elements of each chunk.

    Args:
        schedule: what is run.
        counts: elements per part, one per rank; or the elements of the buffer as the only number, see above.
    """
    per_part = schedule.num_chunks // (schedule.world_size if is_parted(schedule.collective) else 1)
    return list(chain.from_iterable(split_evenly(count, per_part) for count in counts))


def sent_elements(
    interpretation: Interpretation, rank: int, counts: Sequence[int], output_counts: Sequence[int] | None
) -> int:
    """Elements that the schedule, as it was proved, says ``rank`` sends to others."""
    schedule = interpretation.schedule
    sizes = _sizes(schedule, counts, output_counts)
    values = interpretation.values
    return sum(
        sizes[size_index(schedule, values.chunk[interpretation.sent[index]], rank)]
        for index, (_, src, _, dst, _, _) in enumerate(schedule.rows.tolist())
        if src == rank != dst
    )


def bind(
    interpretation: Interpretation,
    program: Program,
    counts: Sequence[int],
    output_counts: Sequence[int] | None,
    *,
    itemsize: int,
    max_segment_bytes: int,
) -> _native.Plan:
    """The plan that the engine runs for ``program`` on buffers of these sizes.

    Args:
        interpretation: the proof of the schedule that ``program`` was lowered from.
        program: of the rank that will run it.
        counts: see `chunk_counts`; in all_to_all, of what this rank sends.
        output_counts: in all_to_all, of what this rank receives; None elsewhere.
        itemsize: bytes per element.
        max_segment_bytes: room in one slot of the channels.
    """
    sizes, inputs, outputs = _layout(interpretation, program.rank, counts, output_counts)
    operations, operands, operand_ends, after, after_ends = _columns(program)
    return _native.Plan(
        operations=operations,
        operands=operands,
        operand_ends=operand_ends,
        after=after,
        after_ends=after_ends,
        size_bytes=sizes * itemsize,
        input_slots=inputs * itemsize,
        output_slots=outputs * itemsize,
        num_work_slots=program.num_work_slots,
        size_classes=np.array(program.size_classes, dtype=np.int32),
        rank=program.rank,
        world_size=interpretation.schedule.world_size,
        max_segment_bytes=max_segment_bytes,
        element_bytes=itemsize,
    )


def _layout(
    interpretation: Interpretation, rank: int, counts: Sequence[int], output_counts: Sequence[int] | None
) -> tuple[Ints, Ints, Ints]:
    """Elements per size index; and per slot of the input and of the output, its first element and its length."""
    schedule, promise = interpretation.schedule, interpretation.promise
    sizes = _sizes(schedule, counts, output_counts)
    reads, writes = sizes[: schedule.num_chunks], sizes[: schedule.num_chunks]
    if schedule.collective == "all_to_all":
        writes = sizes[schedule.num_chunks : 2 * schedule.num_chunks]
    has_input = [(rank, slot) in promise.before for slot in range(schedule.num_chunks)]
    has_output = [(rank, slot) in promise.after and rank not in promise.read_only for slot in range(len(has_input))]
    own = chunks_of_part(schedule, rank) if is_parted(schedule.collective) else range(0)
    first = sum(reads[: own.start])
    return (
        np.array(sizes, dtype=np.int64),
        _slots(reads, has_input, first if schedule.collective in ("all_gather", "gather") else 0),
        _slots(writes, has_output, first if schedule.collective in ("reduce_scatter", "scatter") else 0),
    )


def _slots(sizes: Sequence[int], is_there: Sequence[bool], origin: int) -> Ints:
    """Per slot, where it begins, counted from ``origin``, and its length; nothing where it is not there."""
    starts = [start - origin for start in accumulate(sizes, initial=0)]
    rows = [(start, size) if there else (0, 0) for start, size, there in zip(starts, sizes, is_there, strict=False)]
    return np.array(rows, dtype=np.int64)


def _sizes(schedule: Schedule, counts: Sequence[int], output_counts: Sequence[int] | None) -> list[int]:
    """Elements per size index; see `farandole.lowering.size_index`."""
    sizes = chunk_counts(schedule, counts)
    if output_counts is None:
        return sizes
    arriving = chunk_counts(schedule, output_counts)
    per_part = schedule.num_chunks // schedule.world_size
    passed_on = [max((sizes + arriving)[position::per_part]) for position in range(per_part)]
    return [*sizes, *arriving, *passed_on]


def _columns(program: Program) -> tuple[npt.NDArray[np.int32], ...]:
    """The program as the flat columns that native/src/plan.hpp describes."""
    combines, is_local = -2, -1
    operations: list[tuple[int, int, int, int, int, int]] = []
    operands: list[tuple[int, int, int, int]] = []
    operand_ends: list[int] = []
    after: list[int] = []
    after_ends: list[int] = []
    for operation in program.operations:
        region, slot = operation.place
        if isinstance(operation, Combine):
            operations.append((region, slot, operation.size, combines, int(operation.completes), 0))
            for operand in operation.operands:
                if isinstance(operand, Local):
                    operands.append((is_local, 0, *operand.place))
                else:
                    operands.append((operand.peer, int(operand.shared), 0, 0))
        else:
            operations.append((region, slot, operation.size, operation.reader, 0, int(operation.mapped)))
        operand_ends.append(len(operands))
        after.extend(operation.after)
        after_ends.append(len(after))
    return (
        np.array(operations, dtype=np.int32).reshape(-1, 6),
        np.array(operands, dtype=np.int32).reshape(-1, 4),
        np.array(operand_ends, dtype=np.int32),
        np.array(after, dtype=np.int32),
        np.array(after_ends, dtype=np.int32),
    )
