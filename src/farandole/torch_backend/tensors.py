"""torch's tensors as the rows of elements that a communicator takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from farandole.buffers import require_no_self_overlap
from farandole.dtypes import DTYPES
from farandole.errors import ArgumentError

__all__ = [
    "Delivery",
    "OWN_DTYPES",
    "joined_input",
    "joined_output",
    "movable_input",
    "movable_output",
    "num_units",
    "only",
    "plain_input",
    "plain_output",
    "require_elements",
    "require_equal_dtypes",
]

Delivery = Callable[[], None] | None
"""Puts what came out where it belongs; None if it is there."""

OWN_DTYPES = {getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
"""Those that farandole computes with; others are moved as bytes."""


def only(tensors: Sequence[torch.Tensor], what: str) -> torch.Tensor:
    """The one tensor (or list) that there must be.

    Raises:
        ArgumentError: there are none, or several.
    """
    if len(tensors) != 1:
        raise ArgumentError(f"{what} are {len(tensors)}; there must be one, as a rank has one device")
    return tensors[0]


def plain_input(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of ``tensor`` in a row; a copy if it is strided."""
    _require_dense(tensor)
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def plain_output(tensor: torch.Tensor) -> tuple[torch.Tensor, Delivery]:
    """A row for what comes out in ``tensor``, and how it gets there."""
    _require_dense(tensor)
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1), None
    require_no_self_overlap(tuple(tensor.shape), tensor.stride())
    row = tensor.contiguous().view(-1)

    def deliver() -> None:
        tensor.copy_(row.view(tensor.shape))

    return row, deliver


def num_units(tensor: torch.Tensor) -> int:
    """What ``tensor`` counts as where data are moved: elements, or bytes if its dtype is none of farandole's."""
    return int(tensor.numel() if tensor.dtype in OWN_DTYPES else tensor.nbytes)


def movable_input(tensor: torch.Tensor) -> torch.Tensor:
    """The units of ``tensor`` in a row."""
    return _in_units(plain_input(tensor))


def movable_output(tensor: torch.Tensor) -> tuple[torch.Tensor, Delivery]:
    """A row of units for what comes out in ``tensor``, and how it gets there."""
    row, deliver = plain_output(tensor)
    return _in_units(row), deliver


def joined_input(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of all ``tensors`` in one row; no copy if they lie in one."""
    return _row_of(tensors) if _lie_in_a_row(tensors) else torch.cat([plain_input(tensor) for tensor in tensors])


def joined_output(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int], Delivery]:
    """A row of units for what comes out in all ``tensors``, how many are of each, and how they get there."""
    lie_in_a_row = _lie_in_a_row(tensors)
    counts = [num_units(tensor) for tensor in tensors]
    if lie_in_a_row:
        return _in_units(_row_of(tensors)), counts, None
    targets = [tensor.detach() for tensor in tensors]
    for target in targets:
        require_no_self_overlap(tuple(target.shape), target.stride())
    lengths = [target.numel() for target in targets]
    row = targets[0].new_empty(sum(lengths))

    def deliver() -> None:
        for target, part in zip(targets, row.split(lengths), strict=True):
            target.copy_(part.view(target.shape))

    return _in_units(row), counts, deliver


def _in_units(row: torch.Tensor) -> torch.Tensor:
    if row.dtype in OWN_DTYPES:
        return row
    if row.numel() <= 1:  # then its stride may be any
        row = row.as_strided(row.shape, (1,))
    return row.view(torch.uint8)


def _require_dense(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ArgumentError(
            f"the tensor is {kind}; all_reduce alone takes sparse tensors, and no collective nested ones: give a dense "
            f"one, e.g. .to_dense() or .to_padded_tensor(0)"
        )


def _lie_in_a_row(tensors: Sequence[torch.Tensor]) -> bool:
    for tensor in tensors:
        _require_dense(tensor)
    storage, end = tensors[0].untyped_storage().data_ptr(), tensors[0].data_ptr()
    for tensor in tensors:
        lies_next = tensor.untyped_storage().data_ptr() == storage and tensor.data_ptr() == end
        if not (lies_next and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
            return False
        end += tensor.nbytes
    return True


def _row_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0].detach().as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def require_elements(name: str, tensor: torch.Tensor, count: int, why: str) -> None:
    """See that ``tensor`` has ``count`` elements."""
    if tensor.numel() != count:
        shape = tuple(tensor.shape)
        raise ArgumentError(f"{name} has {tensor.numel()} elements (shape {shape}); it must have {count}, {why}")


def require_equal_dtypes(*tensors: torch.Tensor) -> None:
    """See that all have one dtype."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ArgumentError(f"the tensors have dtypes {', '.join(sorted(map(str, dtypes)))}; they must be equal")
