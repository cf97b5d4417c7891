"""Sets of moments: unions of intervals, as sorted lists of (begin, end) that neither overlap nor touch.

All numbers are whole; (begin, end) are the moments from begin up to, and without, end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Intervals", "cut", "intersection", "length", "union", "without"]

Intervals = list[tuple[int, int]]


def union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """All moments of any of these, which may overlap and come in any order. Cost: that of sorting."""
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def length(moments: Intervals) -> int:
    """How many moments there are."""
    return sum(end - begin for begin, end in moments)


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """The moments of both. Cost: one pass."""
    common: Intervals = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def without(first: Intervals, second: Intervals) -> Intervals:
    """The moments of ``first`` that are not in ``second``. Cost: one pass."""
    left: Intervals = []
    j = 0
    for begin, end in first:
        while j < len(second) and second[j][1] <= begin:
            j += 1
        at = j
        while at < len(second) and second[at][0] < end:
            if begin < second[at][0]:
                left.append((begin, second[at][0]))
            begin = second[at][1]
            at += 1
        if begin < end:
            left.append((begin, end))
    return left


def cut(moments: Intervals, at: Sequence[int]) -> list[Intervals]:
    """The moments before the first of ``at``, which is sorted, those from there to the second, and so on: one set more
    than there are cuts. Cost: one pass."""
    pieces: list[Intervals] = [[]]
    for begin, end in moments:
        while len(pieces) <= len(at) and at[len(pieces) - 1] < end:
            edge = at[len(pieces) - 1]
            if begin < edge:
                pieces[-1].append((begin, edge))
                begin = edge
            pieces.append([])
        if begin < end:
            pieces[-1].append((begin, end))
    pieces.extend([] for _ in range(len(at) + 1 - len(pieces)))
    return pieces
