"""What collectives should give: data that differ per rank and element, and results computed the obvious way in
float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
COMPLEX = ("complex64", "complex128")
DTYPES = (*FLOATS, *INTEGERS, "bool", *COMPLEX)
ORDERED_OPS = ("sum", "avg", "prod", "min", "max")
BIT_OPS = ("band", "bor", "bxor")

PAIRS = (
    *((dtype, op) for dtype in FLOATS for op in ORDERED_OPS),
    *((dtype, op) for dtype in INTEGERS for op in (*ORDERED_OPS, *BIT_OPS)),
    *(("bool", op) for op in ("sum", "prod", "min", "max", *BIT_OPS)),
    *((dtype, op) for dtype in COMPLEX for op in ("sum", "avg", "prod")),
)
"""Every (dtype, op) that has a meaning."""


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def data(rank: int, count: int, dtype: str, op: str = "sum", salt: int = 0) -> np.ndarray:
    """``count`` elements that differ per rank, element and salt.

    Floats are such that no rounding can hide a mistake: whole numbers whose sums are exact in the dtype for 16 ranks,
    and for prod powers of two that cannot overflow. Other bounds would be too wide: in bfloat16, the usual
    N * eps * sum|x| lets a missing contribution pass.
    """
    mixed = (np.arange(count, dtype=np.uint64) * 2654435761 + rank * 40503 + salt * 977 + 12345) % 65521
    if dtype == "bool":
        return mixed % 3 == 0
    if dtype in INTEGERS:
        return (mixed * 0x9E3779B97F4A7C15).view(np.int64).astype(numpy_dtype(dtype))
    if op == "prod":
        values = np.array([1, 2, -1, -2])[mixed % 4] if rank % 2 else np.array([1, 0.5, -1, -0.5])[mixed % 4]
        imaginary = np.where(mixed % 5 == 0, values, 0)
    else:
        span = {"bfloat16": 17, "float16": 129}.get(dtype, 65521)
        values = (mixed % span).astype(np.float64) - span // 2
        imaginary = np.roll(values, 1)
    if dtype in COMPLEX:
        # for prod, a power of two times a power of i
        return (
            np.where(imaginary == values, 0, values) + 1j * imaginary if op == "prod" else values + 1j * imaginary
        ).astype(dtype)
    return values.astype(numpy_dtype(dtype))


def reduced(parts: list[np.ndarray], dtype: str, op: str) -> tuple[np.ndarray, np.ndarray]:
    """The reduction of ``parts`` (of `data`) and how far from it a right result may be, element by element."""
    if dtype in INTEGERS or dtype == "bool":
        return _reduced_exactly(parts, op), np.zeros(len(parts[0]))
    wide = np.stack([part.astype(np.complex128 if dtype in COMPLEX else np.float64) for part in parts])
    exact = np.zeros(wide.shape[1])
    if op == "avg":
        mean = wide.mean(axis=0)
        return mean, np.abs(mean) * float(ml_dtypes.finfo(numpy_dtype(dtype)).eps)  # the division rounds, nothing else
    if op in ("min", "max"):
        return (wide.min(axis=0) if op == "min" else wide.max(axis=0)), exact
    return (wide.prod(axis=0) if op == "prod" else wide.sum(axis=0)), exact


def _reduced_exactly(parts: list[np.ndarray], op: str) -> np.ndarray:
    stacked = np.stack(parts)
    dtype = stacked.dtype
    if dtype.kind == "b":
        return (
            stacked.any(axis=0)
            if op in ("sum", "max", "bor")
            else (np.logical_xor.reduce(stacked, axis=0) if op == "bxor" else stacked.all(axis=0))
        )
    if op == "avg":
        total = stacked.sum(axis=0, dtype=dtype)  # wraps, as the engine's sum does
        as_python = [abs(int(t)) // len(parts) * (-1 if t < 0 else 1) for t in total]
        return np.array(as_python, dtype=dtype)
    ufunc = {
        "sum": np.add,
        "prod": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }[op]
    return ufunc.reduce(stacked, axis=0, dtype=dtype)


def assert_close(actual: np.ndarray, expected: np.ndarray, bound: np.ndarray, what: str) -> None:
    """Every element of ``actual`` within ``bound`` of ``expected``; exact where the bound is 0."""
    if actual.dtype.kind in "iub":
        wrong = actual != expected
    else:
        wide = actual.astype(expected.dtype)
        wrong = ~(np.abs(wide - expected) <= bound)
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {len(actual)} elements wrong, first at {first}: "
            f"{actual[first]!r} in place of {expected[first]!r}"
        )
