"""What the engine executes: one list of operations per rank.

A schedule says what moves where; a program says what one rank does. It has two operations and no others:

* ``Publish``: make the contents of a place available to one reader, or to all other ranks at once.
* ``Combine``: wait for the next publication of each remote operand, fold all operands in order, and store the result.
  With one operand it is a plain copy.

Publications travel through *channels*: one per ordered pair of ranks, and one per rank that everyone else reads (a
*shared* channel). A channel is a queue with room for a few segments; a publication waits for room, a combination waits
for data.

Operations are listed in program order, but only two things order them: each channel carries its publications in that
order, and an operation waits for those in its ``after``: segment by segment if both are of one size, else for the
whole. Everything else may overlap.

A publication *travels* staged, copied into the channel, or mapped: its readers read the place itself, where it lies in
memory that they can read. Then the place must stay as it is until they are through, and whatever runs after the
publication waits for that. A publication for which that could end in a circle is never mapped.

A *place* is a slot in one of three regions: the caller's input, the caller's output, or work memory. Input and output
may be the same memory; then slot s of both is the same place.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

__all__ = ["Combine", "Local", "Operation", "Place", "Program", "Publish", "Region", "Remote"]


class Region(IntEnum):
    """The memory that a place lies in."""

    INPUT = 0
    OUTPUT = 1
    WORK = 2


class Place(NamedTuple):
    """Slot ``slot`` of a region; slots of WORK are numbered from 0."""

    region: Region
    slot: int


class Remote(NamedTuple):
    """An operand: the next publication of ``peer``, on its shared channel or on the one to this rank."""

    peer: int
    shared: bool


class Local(NamedTuple):
    """An operand: what a place of this rank holds."""

    place: Place


class Publish(NamedTuple):
    """Publish what ``place`` holds.

    Attributes:
        place: what is read.
        size: index into the table of sizes that is given when the program runs.
        reader: the one rank that reads it, or -1: every other rank does.
        after: indices of the operations that this one waits for.
        mapped: whether it may travel mapped.
    """

    place: Place
    size: int
    reader: int
    after: tuple[int, ...]
    mapped: bool = False


class Combine(NamedTuple):
    """Fold ``operands`` in order and store the result in ``place``.

    Attributes:
        place: what is written; it may also be one of the operands.
        size: index into the table of sizes that is given when the program runs.
        operands: at least one.
        after: indices of the operations that this one waits for.
        completes: True if the result is the whole sum just here, so that an average is divided here.
    """

    place: Place
    size: int
    operands: tuple[Remote | Local, ...]
    after: tuple[int, ...]
    completes: bool


Operation = Publish | Combine


class Program(NamedTuple):
    """What ``rank`` does.

    Attributes:
        rank: the rank, in the schedule's numbering.
        world_size: number of ranks of the schedule.
        operations: in program order.
        num_work_slots: slots of work memory that it uses.
        size_classes: per index of the table of sizes, its class. Sizes of one class are equal whenever two operations
            on one place have them. In all_to_all, chunks at the same position of their parts are of one class: input
            and output share memory only if all parts are equal, and data is passed on only then.
    """

    rank: int
    world_size: int
    operations: tuple[Operation, ...]
    num_work_slots: int
    size_classes: tuple[int, ...]
