"""What the ranks' copies of a model have in common: the same tensors, and the same values in them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farandole.errors import ArgumentError
from farandole.training.errors import DifferentModelsError
from farandole.training.layout import into_buckets
from farandole.training.recorded import blocking

__all__ = ["broadcast", "description_of", "require_same", "require_same_model"]

_MAX_BYTES = 1 << 25
"""That are broadcast at once, copied into one tensor."""


def require_same_model(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Raises:
    DifferentModelsError: the ranks' parameters or buffers differ in name, shape, dtype or whether they are trained.
    """
    device = next((one.device for _, one in _tensors_of(module)), torch.device("cpu"))
    require_same(description_of(module), group, device)


def description_of(module: nn.Module) -> list[str]:
    """What the ranks' copies must have in common, in words."""
    return [f"{name} {_describe(one)}" for name, one in _tensors_of(module)]


def require_same(
    own: Sequence[str], group: dist.ProcessGroup, device: torch.device, problem: Exception | None = None
) -> None:
    """Go on if all ranks can, and do so alike. All ranks call this.

    Args:
        own: what this rank has, in words.
        group: of ranks.
        device: on which they communicate.
        problem: why this rank cannot go on.

    Raises:
        Exception: ``problem``.
        ArgumentError: another rank has one.
        DifferentModelsError: the ranks' words differ.
    """
    text = "\n".join(own) if problem is None else str(problem)
    digest = hashlib.sha256(f"{problem is None} {text}".encode()).digest()
    digests = torch.empty((group.size(), len(digest)), dtype=torch.uint8, device=device)
    dist.all_gather_single(digests.view(-1), torch.tensor(list(digest), dtype=torch.uint8, device=device), group=group)
    if not all(torch.equal(digests[0], one) for one in digests):
        said: list[tuple[list[str], str]] = [([], "")] * group.size()
        dist.all_gather_object(said, (list(own), "" if problem is None else str(problem)), group=group)
        if problem is None:
            for rank, (_, why) in enumerate(said):
                if why:
                    raise ArgumentError(f"rank {rank}: {why}")
            raise DifferentModelsError(_first_difference([words for words, _ in said]))
    if problem is not None:
        raise problem


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _describe(tensor: Tensor) -> str:
    """Shape, dtype, strides where they are no usual ones, and whether it is trained."""
    kind = "buffer" if not isinstance(tensor, nn.Parameter) else "trained" if tensor.requires_grad else "frozen"
    strides = "" if tensor.is_contiguous() else f" of strides {tensor.stride()}"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {kind}{strides}"


def _first_difference(said: Sequence[Sequence[str]]) -> str:
    for rank, other in enumerate(said):
        for mine, its in zip([*said[0], "nothing more"], [*other, "nothing more"], strict=False):
            if mine != its:
                return (
                    f"the ranks differ: rank 0 has {mine}, rank {rank} has {its}; build the same model on "
                    f"every rank, in the same order, and wrap it alike"
                )
    raise AssertionError("digests differ, texts do not")


def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup, src: int = 0) -> None:
    """Give all ranks of ``group`` the values that its rank ``src`` has, in place."""
    for some in _of_one_kind(tensors):
        with torch.no_grad():
            flat = torch.cat([one.detach().reshape(-1) for one in some])
            with blocking("broadcast", flat, group):
                dist.broadcast(flat, group=group, group_src=src)
            if group.rank() != src:
                for one, values in zip(some, flat.split([one.numel() for one in some]), strict=True):
                    one.copy_(values.view(one.shape))


def _of_one_kind(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    given = list(tensors)
    for some in into_buckets(given, _MAX_BYTES):
        yield [given[index] for index in some]
