"""A schedule executed for the eye: what every slot holds after each step, and where a wrong one gets stuck."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from farandole.errors import VerificationError
from farandole.schedule import Schedule
from farandole.verifier import NOTHING, Interpretation, interpret

__all__ = ["Execution", "State", "execute"]

State = npt.NDArray[np.int32]
"""Shape (world_size, num_slots): id of the value that each slot holds, `NOTHING` where there is none."""


@dataclass(frozen=True)
class Execution:
    """A schedule, executed as far as it can be.

    Attributes:
        schedule: all of it.
        interpretation: of the steps before the one that cannot be executed, or of all.
        states: what is held before the first step, then after each step that could be executed.
        error: why it could not go on, or None.
    """

    schedule: Schedule
    interpretation: Interpretation
    states: list[State]
    error: VerificationError | None

    @property
    def num_steps(self) -> int:
        """Steps that could be executed."""
        return len(self.states) - 1

    @cached_property
    def written(self) -> list[set[tuple[int, int]]]:
        """Per state, the (rank, slot) that the step before it wrote."""
        written: list[set[tuple[int, int]]] = [set() for _ in self.states]
        for assignment in self.interpretation.assignments:
            written[assignment.step + 1].add((assignment.rank, assignment.slot))
        return written


def execute(schedule: Schedule) -> Execution:
    """Execute ``schedule`` on values, up to the first step that makes no sense.

    Raises:
        MalformedScheduleError: its collective is unknown, or its chunks do not divide among the ranks.
    """
    error = None
    num_steps = schedule.num_steps
    try:
        interpretation = interpret(schedule)
    except VerificationError as refusal:
        error = refusal
        # interpret always names the transfer that it cannot execute.
        num_steps = schedule.transfer(refusal.transfer or 0).step
        interpretation = interpret(_first_steps(schedule, num_steps))
    values, promise = interpretation.values, interpretation.promise
    start = np.full((schedule.world_size, schedule.num_slots), NOTHING, dtype=np.int32)
    for place, chunk in promise.before.items():
        start[place] = values.leaf(chunk, place[0])
    states = [start]
    assignments = iter(interpretation.assignments)
    pending = next(assignments, None)
    for step in range(num_steps):
        state = states[-1].copy()
        while pending is not None and pending.step == step:
            state[pending.rank, pending.slot] = pending.value
            pending = next(assignments, None)
        states.append(state)
    return Execution(schedule, interpretation, states, error)


def _first_steps(schedule: Schedule, num_steps: int) -> Schedule:
    return Schedule(
        schedule.collective,
        schedule.world_size,
        schedule.num_chunks,
        schedule.rows[schedule.column("step") < num_steps],
        num_scratch=schedule.num_scratch,
        root=schedule.root,
        name=schedule.name,
    )
