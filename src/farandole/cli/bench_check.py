"""The data that ``farandole bench`` moves, what must come out, and how wrong a float may be.

Every rank's data differ from every other's and from element to element. They repeat after `PERIOD` elements, a large
prime, so that no chunk looks like its neighbour; what must come out is computed for one period.

Floats are chosen so that no rounding hides a mistake, in any order of reduction. Contributions to a sum are whole
numbers so small that every partial sum is exact, and those to a product are powers of two. So all must come out
exactly, but for avg, whose division rounds once, or twice in 16 bits: that may be off by eps relative to the result. (A
bound for arbitrary data, N·eps·sum|x|, would let a missing contribution pass in bfloat16 from 11 ranks on.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from farandole.errors import ArgumentError

__all__ = ["PERIOD", "contribution", "count_wrong", "describe_bound", "neutral", "numpy_dtype", "reduced"]

PERIOD = 99_991
"""A prime."""

_BLOCK = 1 << 20

Array = npt.NDArray[Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of that name.

    Raises:
        ArgumentError: bfloat16, which numpy lacks, and ml_dtypes is not installed.
    """
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise ArgumentError(
            "bfloat16 on numpy arrays needs ml_dtypes; pip install ml-dtypes, or choose float16"
        ) from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def contribution(rank: int, num_ranks: int, count: int, dtype: np.dtype[Any], op: str | None, seed: int) -> Array:
    """What ``rank`` of ``num_ranks`` puts in: one period, or ``count`` elements if that is less.

    Args:
        rank: whose; ``num_ranks`` itself gives data that no rank has.
        num_ranks: N.
        count: elements of the whole buffer.
        dtype: of the elements.
        op: the reduction, or None if the data are only moved.
        seed: other data for each.
    """
    random = np.random.default_rng([seed, rank])
    length = min(count, PERIOD)
    if dtype == np.bool_:
        return np.asarray(random.integers(0, 2, length), bool)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.asarray(random.integers(limits.min, limits.max, length, dtype=dtype, endpoint=True))
    if dtype.kind == "c" and op == "prod":
        turns = np.array([1, 1j, -1, -1j])[random.integers(0, 4, length)]
        return np.asarray(turns * _powers_of_two(random, rank, length), dtype)
    values = _reals(random, rank, num_ranks, length, dtype, op)
    if dtype.kind == "c":
        return np.asarray(values + 1j * _reals(random, rank, num_ranks, length, dtype, op), dtype)
    return np.asarray(values, dtype)


def _reals(
    random: np.random.Generator, rank: int, num_ranks: int, length: int, dtype: np.dtype[Any], op: str | None
) -> npt.NDArray[np.float64]:
    signs = random.choice([-1.0, 1.0], length)
    if op == "prod":
        return signs * _powers_of_two(random, rank, length)
    if op in ("sum", "avg"):
        largest = max(1, round(2 / _eps(dtype)) // num_ranks)  # whole numbers up to 2 / eps are exact
        return signs * random.integers(1, largest, length, endpoint=True)
    return signs * random.uniform(0.5, 1.5, length)


def _powers_of_two(random: np.random.Generator, rank: int, length: int) -> npt.NDArray[np.float64]:
    """1, or 2 on even and 1/2 on odd ranks: no product of up to 30 of them leaves the range of float16."""
    return np.where(random.integers(0, 2, length) == 1, 2.0 if rank % 2 == 0 else 0.5, 1.0)


def neutral(dtype: np.dtype[Any], op: str | None) -> Any:
    """A value that stays what it is however often it is reduced, so that timing in place can go on for ever."""
    return dtype.type(1 if op == "prod" else 0)


def reduced(contributions: list[Array], op: str) -> tuple[Array, Array | None]:
    """The reduction of all ranks' data, and by how much each element may be off; None if it must be exact.

    Floats are reduced in float64 (complex in complex128), integers in their own dtype, where they wrap around.
    """
    dtype = contributions[0].dtype
    if dtype.kind in "iub":
        return _reduced_exactly(np.stack(contributions), op), None
    wide = np.stack(contributions).astype(np.complex128 if dtype.kind == "c" else np.float64)
    functions: dict[str, Callable[..., Array]] = {"prod": np.prod, "min": np.min, "max": np.max}
    if op in functions:
        return np.asarray(functions[op](wide, axis=0)), None
    total = wide.sum(axis=0)
    if op == "sum":
        return total, None
    average = total / len(contributions)
    return average, _eps(dtype) * np.abs(average)


def _reduced_exactly(stacked: Array, op: str) -> Array:
    dtype = stacked.dtype
    if op == "avg":
        total = np.add.reduce(stacked, axis=0, dtype=dtype)
        total = total if dtype.itemsize == 8 else total.astype(np.int64)
        whole, rest = np.divmod(total, total.dtype.type(len(stacked)))
        return np.asarray(whole + ((rest != 0) & (total < 0))).astype(dtype)  # towards 0, as C++ divides
    functions: dict[str, Callable[..., Array]] = {
        "sum": np.logical_or.reduce if dtype == np.bool_ else np.add.reduce,
        "prod": np.multiply.reduce,
        "min": np.minimum.reduce,
        "max": np.maximum.reduce,
        "band": np.bitwise_and.reduce,
        "bor": np.bitwise_or.reduce,
        "bxor": np.bitwise_xor.reduce,
    }
    return np.asarray(functions[op](stacked, axis=0, dtype=dtype), dtype)


def _eps(dtype: np.dtype[Any]) -> float:
    if dtype.kind in "fc":
        return float(np.finfo(dtype).eps)
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def describe_bound(dtype: np.dtype[Any], op: str | None) -> str:
    """In words, when an element counts as wrong."""
    if op != "avg" or dtype.kind in "iub":
        return "wrong: not exactly what it must be (the data are such that nothing rounds)"
    return f"wrong: off by more than eps = {_eps(dtype):.3g}, relative to the result in float64"


def count_wrong(actual: Array, expected: Array, bound: Array | None, start: int = 0) -> int:
    """How many elements of ``actual`` are wrong.

    Args:
        actual: what came out, shape (n,).
        expected: what must come out, one period of it; element i of ``actual`` is compared with element ``start + i``.
        bound: by how much each may be off, as long as ``expected``; None if it must be exact.
        start: where in the whole buffer ``actual`` begins.
    """
    wrong = 0
    for begin in range(0, len(actual), _BLOCK):
        block = actual[begin : begin + _BLOCK]
        index = (start + begin + np.arange(len(block))) % len(expected)
        wide = block.astype(expected.dtype)
        if bound is None:
            wrong += int((wide != expected[index]).sum())
        else:
            wrong += int((~(np.abs(wide - expected[index]) <= bound[index])).sum())  # a NaN is never within
    return wrong
