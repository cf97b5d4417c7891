"""What the wrappers of this package do alike: check what they are given, make copies equal, share buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farandole import timeline
from farandole.errors import ArgumentError
from farandole.torch_eager import eager
from farandole.training.arguments import (
    device_of,
    group_or_world,
    require_choice,
    require_dense,
    require_own_elements,
    require_wire_dtype,
)
from farandole.training.bucket import Kind
from farandole.training.gradient_sync import GradientSync, Round, is_in_backward, settle_group
from farandole.training.replicas import broadcast, description_of, require_same
from farandole.training.shards import ScatterBucket
from farandole.training.summing import Summing

__all__ = ["Wrapper"]

_MEASURED_ROUND = 2
"""The backward by which buckets are arranged anew: the first one also warms up."""


class Wrapper(nn.Module):
    """A module whose gradients are summed over the ranks of a group.

    Args:
        module: see `farandole.training.DataParallel`, as for all that follow, but for these.
        group: likewise.
        reduction: likewise.
        unused: likewise.
        sparse: likewise.
        broadcast_buffers: likewise.
        wire_dtype: likewise.
        reproducible: likewise.
        own_options: of the subclass, by name: what all ranks must give alike.
        check_own: raises an ArgumentError if these make no sense.

    Attributes:
        module: what is wrapped.
        group: of ranks.
        device: of the module.
        aliases: the other names of tied parameters, and what they are called first.
        summing: how gradients are summed.
        gradient_sync: what takes them; the subclass sets it.
        num_rounds: backwards that were summed.
        waited_s: seconds that ``backward`` has waited for sums when it was through itself, all in all.
    """

    gradient_sync: GradientSync

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        *,
        reduction: Literal["mean", "sum"],
        unused: Literal["error", "zeros"],
        sparse: Literal["error", "dense"],
        broadcast_buffers: bool,
        wire_dtype: torch.dtype | None,
        reproducible: bool,
        own_options: Mapping[str, object],
        check_own: Callable[[], None],
    ) -> None:
        super().__init__()
        self.group = group_or_world(group)
        settle_group(self.group)
        options = {
            "reduction": reduction,
            "unused": unused,
            "sparse": sparse,
            "broadcast_buffers": broadcast_buffers,
            "wire_dtype": wire_dtype,
            "reproducible": reproducible,
            **own_options,
        }
        device, description, problem = torch.device("cpu"), [], None
        try:
            require_choice("reduction", reduction, ("mean", "sum"))
            require_choice("unused", unused, ("error", "zeros"))
            require_choice("sparse", sparse, ("error", "dense"))
            require_wire_dtype("wire_dtype", wire_dtype)
            device = _device_to_wrap(module, sparse)
            check_own()
            description = description_of(module)
        except ArgumentError as error:  # the others are to know of it
            problem = error
        said = [type(self).__name__, *(f"{name}={value!r}" for name, value in options.items()), *description]
        require_same(said, self.group, device, problem)
        self.device = device
        self.module = module
        self.aliases = _aliases(module)
        broadcast([*module.parameters(), *module.buffers()], self.group)
        self.summing = Summing(self.group, mean=reduction == "mean", reproducible=reproducible, wire_dtype=wire_dtype)
        self._broadcast_buffers = broadcast_buffers
        self._buffers_are_due = False  # those of all ranks are alike now
        self.num_rounds = 0
        self.waited_s = 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the module."""
        args, kwargs = self.before_forward(args, kwargs)
        try:
            outputs = self.module(*args, **kwargs)
        except Exception:
            self.forward_failed()
            raise
        self.after_forward(outputs)
        return outputs

    @eager
    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What is to be done before the module computes. Returns its arguments."""
        self.gradient_sync.settle()
        self._forward_began_ns = timeline.moment()
        return args, kwargs

    @property
    def is_step(self) -> bool:
        """Whether a forward now is one that all ranks make, and a backward after it."""
        return torch.is_grad_enabled() and self.training and not is_in_backward()

    @eager
    def forward_failed(self) -> None:
        """The module has raised; or was stopped, where a checkpointed part is computed once more in backward."""
        if self.is_step:
            self.gradient_sync.forward_failed()

    @eager
    def after_forward(self, outputs: object) -> None:
        """What is to be done with what the module has returned."""
        timeline.add("compute", "forward", self._forward_began_ns)
        if torch.is_grad_enabled():
            self.gradient_sync.watch(outputs, is_of_all=self.is_step)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Wrapper:
        """What `to`, `half`, `cuda` and the like do."""
        for tensor in [*self.parameters(), *self.buffers()]:
            with torch.no_grad():
                new = fn(tensor)
            if new is not tensor:
                raise ArgumentError(
                    f"the module is wrapped, with its {tensor.dtype} on {tensor.device} as they are, and not to be "
                    f"{new.dtype} on {new.device}, or laid out anew; convert or move it before it is wrapped"
                )
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ArgumentError(
            f"a {type(self).__name__} belongs to its process group, and is not copied or pickled; take its .module, or "
            f"its state_dict()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of all gradients, also where only a part of them is here, or they are of this rank alone."""
        super().zero_grad(set_to_none)
        values = [
            one
            for bucket in self.gradient_sync.buckets
            if isinstance(bucket, ScatterBucket)
            for one in bucket.shard.values
        ]
        for value in values:
            if set_to_none:
                value.grad = None
            elif value.grad is not None:
                value.grad.zero_()
        if values:
            for parameter in self.gradient_sync.parameters:
                parameter.grad = None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context in which ``backward`` accumulates on this rank alone; the next one outside sums it all."""
        return self.gradient_sync.off()

    def after_round(self, done: Round) -> None:
        """Called when a backward is through on all ranks."""
        self.num_rounds += done.is_delivered
        self.waited_s += done.waited_s
        self._buffers_are_due = True
        if done.is_delivered and self.num_rounds == _MEASURED_ROUND:
            self.rearrange(done, done.active_rank)

    def rearrange(self, done: Round, src: int) -> None:
        """Have buckets started in the order in which those of rank ``src`` were full."""
        buckets = self.gradient_sync.buckets
        order = torch.tensor([*done.order, *sorted({*range(len(buckets))} - {*done.order})], device=self.device)
        dist.broadcast(order, group=self.group, group_src=src)
        self.gradient_sync.buckets = [buckets[number] for number in order.tolist()]

    def held(self) -> Iterator[tuple[Kind, Tensor]]:
        """The memory that is held now, and what for; some of it perhaps more than once."""
        yield from (("parameters", one) for one in self.module.parameters())
        yield from (("parameters", one) for one in self.module.buffers())
        yield from (("gradients", one.grad) for one in self.gradient_sync.parameters if one.grad is not None)
        for bucket in self.gradient_sync.buckets:
            yield from bucket.held()

    def require_unchanged(self, are_trained: Iterable[tuple[str, nn.Parameter, bool]]) -> None:
        """Raises:
        ArgumentError: a parameter was frozen or unfrozen after wrapping.
        """
        for name, parameter, is_trained in are_trained:
            if parameter.requires_grad != is_trained:
                raise ArgumentError(
                    f"{name!r} was {'frozen' if is_trained else 'unfrozen'} after it was wrapped; freeze and unfreeze "
                    f"first, and wrap then"
                )

    def share_buffers(self, src: int = 0) -> None:
        """Once in a step: between two forwards whose backward is still to come, what the first has saved must stay."""
        if self._buffers_are_due and self._broadcast_buffers:
            broadcast([buffer for _, buffer in self.module.named_buffers()], self.group, src)
        self._buffers_are_due = False


def _device_to_wrap(module: object, sparse: str) -> torch.device:
    """Where the tensors of ``module`` are.

    Raises:
        ArgumentError: it cannot be wrapped.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"the module is a {type(module).__name__}; it must be a torch.nn.Module")
    if any(isinstance(one, Wrapper) for one in module.modules()):
        raise ArgumentError("the module is wrapped already, or a part of it is; wrap a plain one, once")
    device = device_of(module)
    if sparse == "error":
        require_dense(module)
    require_own_elements(module)
    if not any(one.requires_grad for one in module.parameters()):
        raise ArgumentError("no parameter of the module requires a gradient; there is nothing to train")
    return device


def _aliases(module: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            found[name] = first[id(parameter)]
    return found
