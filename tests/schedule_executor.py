"""Runs a schedule on plain numpy arrays: the second opinion on what the verifier and the algorithms claim.

It is written from the definitions alone: it uses neither `farandole.collectives` nor `farandole.verifier`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from farandole.schedule import Schedule

Array = npt.NDArray[Any]
Slot = tuple[int, int]
Combine = Callable[[Any, Any], Any]

SUMMING = {"all_reduce", "reduce_scatter", "reduce", "barrier"}


class CannotRunError(Exception):
    """The schedule has no meaning: it reads an empty slot, or replaces one slot twice in one step."""


def execute(schedule: Schedule, inputs: dict[Slot, Any], combine: Combine = np.add) -> dict[Slot, Any]:
    """What every slot holds in the end; a step is one parallel assignment."""
    state = dict(inputs)
    for step in sorted({transfer.step for transfer in schedule}):
        arrivals: dict[Slot, list[tuple[Any, bool]]] = {}
        for transfer in schedule:
            if transfer.step == step:
                source = (transfer.src, transfer.src_slot)
                if source not in state:
                    raise CannotRunError(f"{transfer}: the source is empty")
                arrivals.setdefault((transfer.dst, transfer.dst_slot), []).append((state[source], transfer.reduce))
        after = dict(state)
        for slot, values in arrivals.items():
            after[slot] = _arrive(state.get(slot), values)(combine)
        state = after
    return state


def _arrive(old: Any, values: list[tuple[Any, bool]]) -> Callable[[Combine], Any]:
    operands = [value for value, _ in values]
    if values[0][1]:
        if old is None:
            raise CannotRunError("adds to an empty slot")
        operands.insert(0, old)
    if not all(reduces for _, reduces in values[1:]):
        raise CannotRunError("two replace the same slot in one step")

    def fold(combine: Combine) -> Any:
        result = operands[0]
        for operand in operands[1:]:
            result = combine(result, operand)
        return result

    return fold


def part_of(schedule: Schedule, chunk: int) -> int:
    """The rank that owns a chunk, where every rank owns a part."""
    return chunk * schedule.world_size // schedule.num_chunks


def senders_of(schedule: Schedule, chunk: int) -> list[int]:
    """The ranks that have something in slot ``chunk`` before the collective."""
    if schedule.collective in SUMMING or schedule.collective == "all_to_all":
        return list(range(schedule.world_size))
    if schedule.collective in ("all_gather", "gather"):
        return [part_of(schedule, chunk)]
    return [schedule.root]  # broadcast, scatter


def receivers_of(schedule: Schedule, chunk: int) -> list[int]:
    """The ranks that are promised something in slot ``chunk`` after the collective."""
    if schedule.collective in ("all_reduce", "all_gather", "broadcast", "all_to_all", "barrier"):
        return list(range(schedule.world_size))
    if schedule.collective in ("reduce_scatter", "scatter"):
        return [part_of(schedule, chunk)]
    return [schedule.root]  # reduce, gather


def cut(schedule: Schedule, data: Array) -> dict[Slot, Array]:
    """The inputs: row r of ``data`` is the whole buffer of rank r, of which it may own only some chunks."""
    chunks = [np.array_split(row, schedule.num_chunks) for row in data]
    return {
        (rank, chunk): chunks[rank][chunk]
        for chunk in range(schedule.num_chunks)
        for rank in senders_of(schedule, chunk)
    }


def expected(schedule: Schedule, data: Array) -> dict[Slot, Array]:
    """What the collective promises, by the plainest means: sums over rows and picks of rows."""
    chunks = [np.array_split(row, schedule.num_chunks) for row in data]
    total = np.array_split(data.sum(axis=0), schedule.num_chunks)
    per_part = schedule.num_chunks // schedule.world_size
    result = {}
    for chunk in range(schedule.num_chunks):
        for rank in receivers_of(schedule, chunk):
            if schedule.collective in SUMMING:
                result[rank, chunk] = total[chunk]
            elif schedule.collective == "all_to_all":
                result[rank, chunk] = chunks[part_of(schedule, chunk)][rank * per_part + chunk % per_part]
            else:
                result[rank, chunk] = chunks[senders_of(schedule, chunk)[0]][chunk]
    return result


def keeps_promise(schedule: Schedule, seed: int) -> bool:
    """Whether the schedule computes its collective, to the last bit alike wherever it shall be alike.

    Whole numbers show that each contribution is there once; float32, which does not add up alike in another order, that
    all ranks add in the same order. In a barrier, contributions may come twice, so there they are sets.
    """
    random = np.random.default_rng(seed)
    shape = (schedule.world_size, 64 * schedule.num_chunks)
    try:
        if schedule.collective == "barrier":
            return _everyone_heard_of_everyone(schedule)
        whole = random.integers(-(2**40), 2**40, shape)
        final = execute(schedule, cut(schedule, whole))
        wanted = expected(schedule, whole)
        if not all(slot in final and np.array_equal(final[slot], wanted[slot]) for slot in wanted):
            return False
        single = execute(schedule, cut(schedule, random.standard_normal(shape).astype(np.float32)))
    except CannotRunError:
        return False
    return schedule.collective == "all_to_all" or all(
        np.array_equal(single[rank, chunk], single[receivers_of(schedule, chunk)[0], chunk]) for rank, chunk in wanted
    )


def _everyone_heard_of_everyone(schedule: Schedule) -> bool:
    ranks = range(schedule.world_size)
    heard_of = execute(
        schedule, {(r, c): frozenset({r}) for r in ranks for c in range(schedule.num_chunks)}, frozenset.union
    )
    return all(heard_of[r, c] == frozenset(ranks) for r in ranks for c in range(schedule.num_chunks))
