"""The element types and reductions of the engine, under the names that numpy and torch use for them.

What each pair means is stated in docs/numbers.md and at the top of native/src/kernels.hpp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import farandole._native as _native
from farandole.errors import ArgumentError, UnsupportedReductionError

__all__ = [
    "DTYPES",
    "REDUCE_OPS",
    "WIRE_FORMS",
    "DType",
    "dtype_named",
    "encoded_bytes",
    "require_reducible",
    "require_wire_dtype",
]


class DType(NamedTuple):
    """An element type: its name, its number in the engine, and its size in bytes."""

    name: str
    code: int
    itemsize: int


_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}

DTYPES = {name: DType(name, code, itemsize) for code, (name, itemsize) in enumerate(_SIZES.items())}
"""name -> DType; codes are those of native/src/numbers.hpp."""

REDUCE_OPS = {name: code for code, name in enumerate(("sum", "avg", "prod", "min", "max", "band", "bor", "bxor"))}
"""name -> number in the engine."""


WIRE_FORMS = {None: 0, "bfloat16": 1, "int8": 2}
"""wire_dtype -> number in the engine of the form in which float32 travels between hosts, see
native/src/wire_forms.hpp."""

_WIRE_BLOCK = 256


def dtype_named(name: str) -> DType:
    """The DType called ``name``.

    Raises:
        ArgumentError: farandole has no such element type.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ArgumentError(f"dtype {name} cannot be communicated; known are {', '.join(DTYPES)}")
    return dtype


def require_reducible(dtype: DType, op: str | None) -> int:
    """The number of ``op``, once it is certain that ``dtype`` can be reduced with it.

    Raises:
        ArgumentError: there is no such op.
        UnsupportedReductionError: the op has no meaning for this dtype.
    """
    code = REDUCE_OPS.get(op) if isinstance(op, str) else None
    if code is None:
        raise ArgumentError(f"op is {op!r}; known are {', '.join(REDUCE_OPS)}")
    if not _native.is_supported(dtype.code, code):
        possible = [name for name, number in REDUCE_OPS.items() if _native.is_supported(dtype.code, number)]
        raise UnsupportedReductionError(
            f"{op} has no meaning for {dtype.name}; {dtype.name} can be reduced with {', '.join(possible)}"
        )
    return code


def require_wire_dtype(wire_dtype: Any, dtype: DType) -> None:
    """See to it that ``dtype`` can travel as ``wire_dtype``.

    Raises:
        ArgumentError: there is no such wire_dtype, or it is not for this dtype.
    """
    if wire_dtype is None:
        return
    known = " and ".join(name for name in WIRE_FORMS if name)
    if not isinstance(wire_dtype, str) or wire_dtype not in WIRE_FORMS:
        raise ArgumentError(f"wire_dtype is {wire_dtype!r}; known are {known}, and None to send numbers as they are")
    if dtype.name != "float32":
        raise ArgumentError(
            f"wire_dtype is {wire_dtype!r}, but tensor has dtype {dtype.name}; only float32 is rounded for the wire: "
            f"give float32, or no wire_dtype"
        )


def encoded_bytes(wire_dtype: str | None, nbytes: int) -> int:
    """Bytes on the wire of ``nbytes`` bytes of float32 that travel as ``wire_dtype``, in whole blocks."""
    if wire_dtype is None:
        return nbytes
    count = nbytes // 4
    return 2 * count if wire_dtype == "bfloat16" else count + -(-count // _WIRE_BLOCK)
