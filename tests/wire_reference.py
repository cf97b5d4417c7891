"""What all_reduce with a wire_dtype computes, by the plainest means: a schedule run step by step on numpy arrays, and
on names of values, with all that crosses to another host rounded on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import numpy as np

from farandole.plans import chunk_counts
from farandole.schedule import Schedule
from farandole.topology import Topology
from farandole.verifier import verify

Round = Callable[[Any], Any]
STEPS = {"bfloat16": 1 / 256, "int8": 1 / 127}
"""By which part of itself, or of the largest in its block, rounding changes a number at most."""


def round_bfloat16(values: np.ndarray) -> np.ndarray:
    """To nearest, ties to even; no NaNs."""
    bits = values.astype("f4").view("u4").astype("u8")
    halves = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return halves.astype("u4").view("f4")


def round_int8(values: np.ndarray) -> np.ndarray:
    """In blocks of 256; finite numbers."""
    rounded = values.astype("f8")
    for start in range(0, len(values), 256):
        block = rounded[start : start + 256]
        largest = np.abs(block).max()
        k = next((k for k in range(-133, 121) if largest <= 127 * 2.0**k), 121)
        block[:] = np.clip(np.rint(block * 2.0**-k), -127, 127) * 2.0**k
    return (rounded + 0.0).astype("f4")


def rounding(wire_dtype: str, slot_bytes: int) -> Round:
    """Of a whole chunk, in segments as the engine cuts it."""

    def round_chunk(chunk: np.ndarray) -> np.ndarray:
        if wire_dtype == "bfloat16":
            return round_bfloat16(chunk)
        segment = min(slot_bytes, max((chunk.nbytes // 4 + 63) // 64 * 64, 16384)) // 4
        parts = [round_int8(chunk[start : start + segment]) for start in range(0, len(chunk), segment)]
        return np.concatenate(parts) if parts else chunk

    return round_chunk


def execute(
    schedule: Schedule, topology: Topology, state: dict, fold: Callable[[list, bool], Any], on_wire: Round
) -> dict:
    """What every slot holds in the end.

    Args:
        schedule, topology: of an all_reduce, and the hosts of its ranks.
        state: what slots hold in the beginning.
        fold: makes a sum of its operands, and knows whether that is complete.
        on_wire: what becomes of what crosses to another host.
    """
    rows = schedule.rows.tolist()
    for _, step in groupby(verify(schedule).assignments, key=lambda assignment: assignment.step):
        after = dict(state)
        for a in step:
            operands = [state[a.rank, a.slot]] if a.keeps_old else []
            for index in a.transfers:
                _, src, slot, dst, _, _ = rows[index]
                crosses = topology.host_of[src] != topology.host_of[dst]
                operands.append(on_wire(state[src, slot]) if crosses else state[src, slot])
            after[a.rank, a.slot] = fold(operands, a.completes) if len(operands) > 1 else operands[0]
        state = after
    return state


def promised(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Every rank and slot of the output of an all_reduce."""
    return ((rank, slot) for rank in range(schedule.world_size) for slot in range(schedule.num_chunks))


def final_values(schedule: Schedule, topology: Topology) -> dict:
    """Per rank and slot, what it is computed from and how; equal if its bits must be."""
    names: dict[Any, int] = {}

    def name(key: Any) -> tuple[int, bool, int]:
        number = names.setdefault(key, len(names))
        return number, key[0] == "rounded", key[-1]

    def on_wire(value: tuple[int, bool, int]) -> tuple[int, bool, int]:
        number, is_rounded, times = value
        return value if is_rounded else name(("rounded", number, times + 1))

    def fold(operands: list, completes: bool) -> tuple[int, bool, int]:
        first_two = sorted(number for number, _, _ in operands[:2])
        others = [number for number, _, _ in operands[2:]]
        value = name(("sum", *first_two, *others, max(times for _, _, times in operands)))
        return on_wire(value) if completes else value

    start = {(rank, slot): name(("own", rank, slot, 0)) for rank, slot in promised(schedule)}
    return execute(schedule, topology, start, fold, on_wire)


def most_roundings(schedule: Schedule, topology: Topology) -> int:
    """How often a contribution is rounded, at most."""
    final = final_values(schedule, topology)
    return max((final[place][2] for place in promised(schedule)), default=0)


def all_reduce(
    schedule: Schedule, topology: Topology, inputs: list[np.ndarray], op: str, round_chunk: Round
) -> list[np.ndarray]:
    """What each rank ends with, to the bit but for the signs of zeros."""
    combine = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    ends = np.cumsum(chunk_counts(schedule, [len(inputs[0])]))[:-1]

    def fold(operands: list, completes: bool) -> np.ndarray:
        result = operands[0]
        for operand in operands[1:]:
            result = combine(result, operand)
        if completes and op == "avg":
            result = result / np.float32(schedule.world_size)
        return round_chunk(result) if completes else result

    start = {(rank, slot): part for rank, row in enumerate(inputs) for slot, part in enumerate(np.split(row, ends))}
    final = execute(schedule, topology, start, fold, round_chunk)
    chunks = range(schedule.num_chunks)
    return [np.concatenate([final[rank, slot] for slot in chunks]) for rank in range(schedule.world_size)]
