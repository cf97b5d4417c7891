"""Where parameters lie in flat memory, and which part of it is whose.

Several tensors of one dtype lie behind one another in a *flat* tensor, each at its place, its elements in their order.
The flat tensor is cut into one *part* per rank, all of one length. A part begins and ends anywhere within a tensor:
what a part holds of one tensor is a *piece*. Places and parts begin at multiples of `ALIGNMENT` elements; those between
are nobody's. For the bits of a product depend on where in a cache line its operands begin, and those of a step on which
elements are left over when a vector is full: both are then as in tensors that are not sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "Layout", "Piece", "Place", "boxes_of", "into_buckets"]


ALIGNMENT = 64
"""In elements: no less than a cache line, nor than what loops over vectors of any width take at a time."""


class Place(NamedTuple):
    """Of one tensor in flat memory.

    Attributes:
        shape: of the tensor.
        start: its first element.
        stop: behind its last one.
    """

    shape: torch.Size
    start: int
    stop: int

    def view(self, flat: Tensor) -> Tensor:
        """The tensor, in ``flat``."""
        return flat[self.start : self.stop].view(self.shape)


class Piece(NamedTuple):
    """What a part holds of one tensor.

    Attributes:
        tensor: its number.
        start: its first element that is here, counted in the tensor.
        stop: behind the last one.
        offset: of the first one in the part.
    """

    tensor: int
    start: int
    stop: int
    offset: int

    def view(self, part: Tensor) -> Tensor:
        """The elements, one dimension, in ``part``."""
        return part[self.offset : self.offset + self.stop - self.start]


class Layout:
    """Of tensors in a flat one, for so many ranks.

    Attributes:
        places: one for each tensor.
        numel: elements up to the end of the last tensor.
        part_numel: elements of a part; times ``world_size``, those of the flat tensor.
        world_size: number of parts.
    """

    def __init__(self, shapes: Iterable[torch.Size], world_size: int) -> None:
        self.places: list[Place] = []
        end = 0
        for shape in shapes:
            start = _aligned(end)
            end = start + shape.numel()
            self.places.append(Place(shape, start, end))
        self.numel = end
        self.world_size = world_size
        self.part_numel = _aligned(-(-end // world_size))

    @property
    def flat_numel(self) -> int:
        """Elements of the flat tensor."""
        return self.part_numel * self.world_size

    def part(self, flat: Tensor, rank: int) -> Tensor:
        """The part of a rank in ``flat``."""
        return flat[rank * self.part_numel : (rank + 1) * self.part_numel]

    def pieces(self, rank: int) -> list[Piece]:
        """What the part of a rank holds of each tensor, in their order; perhaps nothing."""
        begin, end = rank * self.part_numel, (rank + 1) * self.part_numel
        found = []
        for index, place in enumerate(self.places):
            start, stop = max(place.start, begin), min(place.stop, end)
            if start < stop:
                found.append(Piece(index, start - place.start, stop - place.start, start - begin))
            else:
                found.append(Piece(index, 0, 0, 0))
        return found


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def into_buckets(tensors: Sequence[Tensor], bucket_bytes: int, first_bytes: int | None = None) -> list[list[int]]:
    """Deal tensors out to buckets, in their order. A bucket takes tensors of one dtype and device until it holds
    ``bucket_bytes``; the first of all until it holds ``first_bytes``, if that is given. Returns indices, per bucket.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        bucket, num_bytes = open_buckets.pop(kind, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        num_bytes += tensor.nbytes
        limit = first_bytes if bucket is buckets[0] and first_bytes is not None else bucket_bytes
        if num_bytes < limit:
            open_buckets[kind] = bucket, num_bytes
    return buckets


def boxes_of(shape: torch.Size, start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Cut the elements ``start`` to ``stop`` of a contiguous tensor into boxes, in their order.

    Yields:
        Of each box its offsets and its sizes along the dimensions of the tensor, and its first element.
    """
    if start >= stop:
        return
    if not shape:
        yield (), (), start
        return
    row = shape[1:].numel()
    if len(shape) == 1:
        yield (start,), (stop - start,), start
        return
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # all within one row
        yield from _of_row(shape, last, start, stop)
        return
    yield from _of_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]), first * row
    yield from _of_row(shape, last, last * row, stop)


def _of_row(
    shape: torch.Size, row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    begin = row * shape[1:].numel()
    for offsets, sizes, first in boxes_of(shape[1:], start - begin, stop - begin):
        yield (row, *offsets), (1, *sizes), first + begin
