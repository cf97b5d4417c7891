"""Takes what users hold (numpy arrays, torch tensors, anything with DLPack or the buffer protocol) as plain memory.

A `Buffer` is a run of elements at an address. It keeps its owner alive. Inputs that are not contiguous are
copied; outputs that are not contiguous get a contiguous stand-in, which `Buffer.deliver` copies back when the call is
done.
"""

from __future__ import annotations

import ctypes
import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from farandole.dtypes import DType, dtype_named
from farandole.errors import ArgumentError

__all__ = ["Buffer", "empty_like", "read_buffer", "registered_array", "require_no_self_overlap", "write_buffer"]


@dataclass(slots=True)
class Buffer:
    """Contiguous elements in memory.

    Attributes:
        address: of the first element.
        shape: of the user's array.
        dtype: of each element.
        user: what the user gave, and gets back.
        owner: what the memory belongs to; keeps it alive.
        deliver: copies the stand-in back to ``user``; None where there is none.
    """

    address: int
    shape: tuple[int, ...]
    dtype: DType
    user: Any
    owner: Any
    deliver: Callable[[], None] | None = None

    @property
    def count(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * self.dtype.itemsize

    def poison(self) -> None:
        """Fill what the user sees with what nobody takes for a result: NaN, -1, the largest of unsigned numbers."""
        ctypes.memset(self.address, 1 if self.dtype.name == "bool" else 0xFF, self.nbytes)
        if self.deliver is not None:
            self.deliver()

    def overlaps(self, other: Buffer) -> bool:
        """Whether the two share memory."""
        return self.address < other.address + other.nbytes and other.address < self.address + self.nbytes


def read_buffer(value: Any) -> Buffer:
    """``value`` as memory to read from; a strided one is copied.

    Raises:
        ArgumentError: ``value`` is no array, not on the CPU, or of a dtype that cannot be communicated.
    """
    if _is_torch(value):
        tensor = _plain_tensor(value).contiguous()
        return Buffer(tensor.data_ptr(), tuple(tensor.shape), _torch_dtype(tensor), value, tensor)
    given = _as_array(value)
    array = np.ascontiguousarray(given).reshape(given.shape)
    return Buffer(array.__array_interface__["data"][0], array.shape, _numpy_dtype(array), value, array)


def write_buffer(value: Any) -> Buffer:
    """``value`` as memory to write to (and read from: its contents are in the buffer).

    Raises:
        ArgumentError: as `read_buffer`; or ``value`` is read-only or overlaps itself.
    """
    if _is_torch(value):
        return _writable_tensor(value)
    if isinstance(value, np.generic):
        raise ArgumentError(
            f"the output is a numpy scalar ({value!r}), which nobody can write to; give an array of one element, "
            f"np.array({value})"
        )
    array = _as_array(value)
    if not array.flags.writeable:
        raise ArgumentError("the output array is read-only; give one that can be written, or a copy of it")
    stand_in = array
    deliver = None
    if not array.flags.c_contiguous:
        require_no_self_overlap(array.shape, array.strides)
        stand_in = np.ascontiguousarray(array)

        def deliver() -> None:
            array[...] = stand_in

    address = stand_in.__array_interface__["data"][0]
    return Buffer(address, array.shape, _numpy_dtype(array), value, stand_in, deliver)


def empty_like(value: Any, shape: tuple[int, ...]) -> Any:
    """A new array or tensor of ``shape``, of the kind and dtype of ``value``, with undefined contents."""
    if _is_torch(value):
        return value.detach().new_empty(shape)
    return np.empty(shape, dtype=_as_array(value).dtype)


def registered_array(allocate: Callable[[int], Any], shape: int | Sequence[int], dtype: Any) -> Any:
    """An array or tensor in memory that ``allocate`` gives, as so many bytes of a numpy array.

    Raises:
        ArgumentError: no such shape or dtype, or there is no memory for it.
    """
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(dtype, torch.dtype)
    try:
        numpy_dtype = None if is_torch else np.dtype(dtype)
        name = str(dtype).removeprefix("torch.") if numpy_dtype is None else numpy_dtype.name
        lengths = (
            (operator.index(shape),) if isinstance(shape, (int, np.integer)) else tuple(map(operator.index, shape))
        )
    except TypeError as error:
        raise ArgumentError(f"shape is {shape!r} and dtype {dtype!r}: {error}") from None
    itemsize = dtype_named(name).itemsize
    if any(length < 0 for length in lengths):
        raise ArgumentError(f"shape is {shape!r}; its lengths must be >= 0")
    nbytes = math.prod(lengths) * itemsize
    try:
        memory = allocate(nbytes) if nbytes else np.empty(0, dtype=np.uint8)
    except (MemoryError, RuntimeError, TypeError) as error:
        raise ArgumentError(f"there is no registered memory for shape {lengths} of {name}, {nbytes} bytes") from error
    if torch is not None and is_torch:
        return torch.from_numpy(memory).view(dtype).reshape(lengths)
    return memory.view(numpy_dtype).reshape(lengths)


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    tensor_type = getattr(torch, "Tensor", None)  # absent while another thread is importing torch
    return tensor_type is not None and isinstance(value, tensor_type)


def _plain_tensor(tensor: Any) -> Any:
    if tensor.device.type != "cpu":
        raise ArgumentError(f"the tensor is on {tensor.device}; farandole moves CPU memory, so call .cpu() first")
    if tensor.is_sparse or str(tensor.layout) != "torch.strided":
        raise ArgumentError(f"the tensor has layout {tensor.layout}; call .to_dense() first")
    return tensor.detach().resolve_conj().resolve_neg()


def _writable_tensor(value: Any) -> Buffer:
    if value.grad_fn is not None:
        raise ArgumentError(
            "the output tensor was computed under autograd, which would not notice that it is overwritten; give "
            "tensor.detach().clone(), or compute it under torch.no_grad()"
        )
    tensor = _plain_tensor(value)
    if tensor.data_ptr() != value.data_ptr():
        raise ArgumentError(
            "the output tensor is a lazy conjugate or negation; call .resolve_conj().resolve_neg() first"
        )
    dtype = _torch_dtype(tensor)
    if tensor.is_contiguous():
        return Buffer(tensor.data_ptr(), tuple(tensor.shape), dtype, value, tensor)
    require_no_self_overlap(tuple(tensor.shape), tensor.stride())
    stand_in = tensor.contiguous()

    def deliver() -> None:
        tensor.copy_(stand_in)

    return Buffer(stand_in.data_ptr(), tuple(tensor.shape), dtype, value, stand_in, deliver)


def require_no_self_overlap(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Refuse an output in which one place in memory is several elements.

    Raises:
        ArgumentError: it overlaps itself.
    """
    reach = 0
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True)):
        if length <= 1:
            continue
        if stride <= reach:
            raise ArgumentError(
                f"the output overlaps itself (shape {shape}, strides {strides}); give one with its own memory, e.g. "
                f"a contiguous copy"
            )
        reach += stride * (length - 1)


def _torch_dtype(tensor: Any) -> DType:
    return dtype_named(str(tensor.dtype).removeprefix("torch."))


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:
            raise ArgumentError(f"cannot read this {type(value).__name__} through DLPack: {error}") from error
    try:
        return np.asarray(memoryview(value))
    except TypeError:
        raise ArgumentError(
            f"a {type(value).__name__} is no array; give a numpy array, a torch tensor, or anything with DLPack or "
            f"the buffer protocol"
        ) from None


def _numpy_dtype(array: np.ndarray[Any, Any]) -> DType:
    return _dtype_of(array.dtype)


@lru_cache(maxsize=64)  # dtype.name takes numpy longer than all else that is done with an array
def _dtype_of(dtype: np.dtype[Any]) -> DType:
    if not dtype.isnative:
        raise ArgumentError(f"the array's byte order is not this machine's ({dtype}); use array.astype({dtype.name!r})")
    return dtype_named(dtype.name)
