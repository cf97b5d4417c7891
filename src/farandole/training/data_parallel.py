"""Data parallelism: each rank has all parameters, and sees another part of the batch.

The gradients of all ranks are summed in buckets while backward goes on (see `farandole.training.gradient_sync`), and
each parameter's ``grad`` is then a view into its bucket.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from farandole.errors import ArgumentError
from farandole.torch_eager import eager
from farandole.training.arguments import require_size
from farandole.training.bucket import Bucket
from farandole.training.bucket_size import DEFAULT_BYTES, FIRST_BYTES, best_bucket_bytes, measure_link
from farandole.training.gradient_sync import GradientSync, Round, weakly
from farandole.training.layout import into_buckets
from farandole.training.recorded import blocking
from farandole.training.replicas import broadcast
from farandole.training.summed_bucket import SummedBucket
from farandole.training.wrapper import Wrapper

__all__ = ["DataParallel"]


@eager
class DataParallel(Wrapper, Joinable):
    """Trains copies of a module, one per rank, with the gradients of all.

    When ``backward`` returns, every parameter's ``grad`` is the same on all ranks: the mean over ranks of what each has
    accumulated since gradients were last set to None, so any optimizer goes on as on one process. Ranks whose batches
    are of different sizes get what one process would compute on all of them if each scales its loss to its share, as
    with ``reduction="sum"`` and the loss divided by the size of the whole batch.

    Parameters and buffers of rank 0 are copied to all ranks here, and buffers again before the first forward in
    training after each step; so what batch statistics the last one has left differ in `eval`. All ranks call
    ``forward`` and ``backward`` equally often; see `join` if they cannot.

    Args:
        module: the same on each rank, on one device. Frozen parameters stay as they are; freeze and unfreeze before.
        bucket_bytes: of gradients that travel together; "auto" starts with 25 MiB and settles, after the second
            backward, on what would have left least to wait for there. In registered memory, if the backend has it.
        group: of ranks; the world if None.
        reduction: "mean" over ranks, or "sum".
        unused: "error" if all parameters must have a gradient on all ranks; "zeros" counts zero where there is none,
            and leaves ``grad`` None if no rank has any.
        sparse: "error" refuses sparse gradients, "dense" sums them as dense ones.
        broadcast_buffers: whether all ranks use rank 0's buffers.
        wire_dtype: 16-bit floats that travel in place of 32-bit gradients; the sum is of 32 bits, and rounded once.
        reproducible: sum in the order of the ranks: the same bits for any bucket, backend and algorithm, and in
            `ZeroOptimizer` and `FullyShardedParallel`. With ``reduction="sum"`` also for any number of ranks, if
            micro-batch k of a step goes to rank k % world_size, each backward is summed (no `no_sync`), and the
            loss of each is divided by the same number. Takes a buffer more per bucket.

    Raises:
        ArgumentError: an argument makes no sense, nothing is to be trained, or a layer would make sparse gradients and
            they are refused.
        BackwardFailedError: from ``backward``: forward (in training mode) or backward has failed on another rank, which
            has gone on since: no rank has gradients then, and all can go on.
        DifferentModelsError: the ranks' modules differ.
        OutOfStepError: from ``backward``: a rank has left out a step, or sums several models in another order.
        SparseGradientError: from ``backward``: a gradient is sparse, and that is refused.
        UnusedParametersError: from ``backward``, on every rank: a parameter had no gradient on some rank.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_bytes: int | Literal["auto"] = "auto",
        group: dist.ProcessGroup | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        unused: Literal["error", "zeros"] = "error",
        sparse: Literal["error", "dense"] = "error",
        broadcast_buffers: bool = True,
        wire_dtype: torch.dtype | None = None,
        reproducible: bool = False,
    ) -> None:
        def check() -> None:
            if bucket_bytes != "auto":
                require_size("bucket_bytes", bucket_bytes)

        super().__init__(
            module,
            group,
            reduction=reduction,
            unused=unused,
            sparse=sparse,
            broadcast_buffers=broadcast_buffers,
            wire_dtype=wire_dtype,
            reproducible=reproducible,
            own_options={"bucket_bytes": bucket_bytes},
            check_own=check,
        )
        Joinable.__init__(self)
        self._are_trained = [(name, one, one.requires_grad) for name, one in module.named_parameters()]
        trained = {name: one for name, one, is_trained in self._are_trained if is_trained}
        self.gradient_sync = GradientSync(trained, self.group, unused=unused, sparse=sparse, reproducible=reproducible)
        self.gradient_sync.on_open = weakly(self._agree_on_carried)
        self.gradient_sync.on_round = weakly(self.after_round)
        self.bucket_bytes = DEFAULT_BYTES if bucket_bytes == "auto" else bucket_bytes
        self._is_auto = bucket_bytes == "auto"
        self._sharded_by: weakref.ref[torch.optim.Optimizer] | None = None
        self.active_rank = 0
        self._divides_by_active = False
        self._register_state_dict_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)
        # The first that is registered is used first, so its gradient comes last.
        self._fill_buckets(list(reversed(range(len(trained)))))

    def forward_failed(self) -> None:
        """See `Wrapper`; the others are in their sums, or come there."""
        super().forward_failed()
        if self.is_step:
            self.gradient_sync.settle()

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See `Wrapper`."""
        args, kwargs = super().before_forward(args, kwargs)
        if torch.is_grad_enabled() and (self.training or self._join_config.enable):
            self.require_unchanged(self._are_trained)
            Join.notify_join_context(self)
            if self._join_config.enable:
                self._require_stepped()
                self._agree_in_join(is_active=True)
            self.share_buffers(self.active_rank)
        return args, kwargs

    # -- buckets -----------------------------------------------------------------------------------------------------

    def _fill_buckets(self, order: Sequence[int]) -> None:
        parameters = self.gradient_sync.parameters
        first_bytes = min(self.bucket_bytes, FIRST_BYTES)
        dealt = into_buckets([parameters[index] for index in order], self.bucket_bytes, first_bytes)
        self.gradient_sync.buckets = [
            SummedBucket([order[one] for one in some], parameters, self.summing) for some in dealt
        ]

    def rearrange(self, done: Round, src: int) -> None:
        """Fill buckets anew, in the order of the gradients of rank ``src``."""
        if not self.is_sharded:
            order, self.bucket_bytes = self._agree_on_buckets(done, src)
            self._fill_buckets(order)
        else:
            super().rearrange(done, src)

    def replace_buckets(self, buckets: Sequence[Bucket], optimizer: torch.optim.Optimizer) -> None:
        """Have gradients summed in these, which hold all parameters that are trained, from now on; what was delivered
        is let go of. For ``optimizer``, a `ZeroOptimizer`."""
        for parameter in self.gradient_sync.parameters:
            parameter.grad = None
        self.gradient_sync.buckets = buckets
        self.gradient_sync.leaves_gradients = False
        self.num_rounds_stepped = self.num_rounds
        self._sharded_by = weakref.ref(optimizer)

    @property
    def is_sharded(self) -> bool:
        """Whether there was a `ZeroOptimizer`."""
        return self._sharded_by is not None

    @property
    def sharded_by(self) -> torch.optim.Optimizer | None:
        """The `ZeroOptimizer`, if there is one."""
        return None if self._sharded_by is None else self._sharded_by()

    def _agree_on_buckets(self, done: Round, src: int) -> tuple[list[int], int]:
        """The order in which the gradients of rank ``src`` came, and the size of buckets that is best for its times."""
        parameters = self.gradient_sync.parameters
        last_s = max((seconds for seconds in done.ready_s if seconds is not None), default=0.0)
        ready_s = [last_s if seconds is None else seconds for seconds in done.ready_s]
        order = sorted(range(len(parameters)), key=ready_s.__getitem__)
        size = self.bucket_bytes
        if self._is_auto:
            link = measure_link(self.group, self.device)
            size = best_bucket_bytes([parameters[one].nbytes for one in order], [ready_s[one] for one in order], link)
        settled = torch.tensor([size, *order], device=self.device)
        dist.broadcast(settled, group=self.group, group_src=src)
        size, *order = settled.tolist()
        return order, size

    # -- uneven inputs -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def join(
        self,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        divide_by_initial_world_size: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """A context for a loop that is longer on some ranks: those that are through go on with what the others need of
        them, and count as zero. A `ZeroOptimizer` of the model joins, too: after each forward come a backward that is
        summed, a step and `zero_grad`.

        Args:
            optimizer: one of torch that steps the model: ranks that were through get its state, and the options of its
                groups, from one that was active to the end; to be given if training goes on. Learning rate schedulers
                are the caller's.
            divide_by_initial_world_size: with "mean", divide by all ranks to the end; else by those still active.
            throw_on_early_termination: raise on every rank when the first one is through.
        """
        sharding = self.sharded_by
        joining = [self, sharding] if isinstance(sharding, Joinable) else [self]
        try:
            with Join(
                joining,
                throw_on_early_termination=throw_on_early_termination,
                divide_by_initial_world_size=divide_by_initial_world_size,
                optimizer=optimizer if sharding is None else None,
            ):
                yield
        finally:
            for one in joining:
                one.leave_join()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """See `torch.distributed.algorithms.Joinable`."""
        self.num_rounds_stepped = self.num_rounds
        self._divides_by_active = self.summing.is_mean and not kwargs.get("divide_by_initial_world_size", True)
        return _Shadow(self, kwargs.get("optimizer"))

    @property
    def join_device(self) -> torch.device:
        """See `torch.distributed.algorithms.Joinable`."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """See `torch.distributed.algorithms.Joinable`."""
        return self.group

    def _agree_in_join(self, *, is_active: bool) -> bool:
        """Whether the backward to come is summed. Settled are its divisor, too, and a rank that is active."""
        told = torch.zeros(1 + self.group.size(), dtype=torch.int32, device=self.device)
        told[0] = is_active and self.gradient_sync.enabled
        told[1 + self.group.rank()] = is_active
        with blocking("all_reduce", told, self.group):
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.group)
        is_summed, *are_active = told.tolist()
        if self._divides_by_active:
            self.summing.divisor = sum(are_active)
        self.active_rank = are_active.index(1)
        return bool(is_summed)

    def _agree_on_carried(self, is_active: bool) -> None:
        """A rank that is through does not see whether the others have let go of gradients since the last backward."""
        buckets = [bucket for bucket in self.gradient_sync.buckets if isinstance(bucket, SummedBucket)]
        if not self._join_config.enable or not buckets:
            return
        own = [is_active and one for bucket in buckets for one in bucket.is_carried]
        told = torch.tensor(own, dtype=torch.int32, device=self.device)
        with blocking("all_reduce", told, self.group):
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.group)
        are_carried = iter(told.tolist())
        for bucket in buckets:
            bucket.keep([bool(next(are_carried)) for _ in bucket.indices])

    def _require_stepped(self) -> None:
        """Raises:
        ArgumentError: ranks that are through have stepped after the last backward, and this one has not.
        """
        if self.is_sharded and not (self.num_rounds_stepped == self.num_rounds and self.gradient_sync.enabled):
            raise ArgumentError(
                "within join(), a ZeroOptimizer steps after each backward, and each is summed: accumulate nothing "
                "there, or train at stage 0"
            )

    def leave_join(self) -> None:
        """Each forward is of this rank alone again."""
        Joinable.__init__(self)
        self.active_rank = 0
        self._divides_by_active = False
        self.summing.divisor = self.summing.world_size if self.summing.is_mean else 1


@eager
class _Shadow(JoinHook):
    """What a rank does for the others when it is through."""

    def __init__(self, model: DataParallel, optimizer: torch.optim.Optimizer | None) -> None:
        self._model = model
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Each time that another goes on."""
        if self._model.sharded_by is not None:
            self._model.sharded_by.zero_grad()  # after each step: the others have
        is_summed = self._model._agree_in_join(is_active=False)
        self._model.share_buffers(self._model.active_rank)
        if is_summed:
            self._model.gradient_sync.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take what one has that was active to the end: parameters, gradients, buffers, its optimizer's state."""
        group, module = self._model.group, self._model.module
        told = torch.tensor(group.rank() if is_last_joiner else -1, device=self._model.join_device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        src = int(told.item())
        self._model.leave_join()
        self._model.active_rank = src  # for an optimizer that joins, too
        parameters = self._model.gradient_sync.parameters
        have = torch.tensor([one.grad is not None for one in parameters], dtype=torch.int32, device=told.device)
        dist.broadcast(have, group=group, group_src=src)
        for parameter, has_gradient in zip(parameters, have.tolist(), strict=True):
            if not has_gradient:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [one.grad for one in parameters if one.grad is not None]
        broadcast([*module.parameters(), *gradients, *module.buffers()], group, src)
        if self._optimizer is not None:
            state = [self._optimizer.state_dict() if group.rank() == src else None]
            dist.broadcast_object_list(state, group=group, group_src=src)
            if group.rank() != src:
                self._optimizer.load_state_dict(state[0])


def _without_prefix(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
    """Name what is saved as the module does that is wrapped."""
    inner = f"{prefix}module."
    for key in [key for key in state if key.startswith(inner)]:
        state[prefix + key.removeprefix(inner)] = state.pop(key)
    versions = getattr(state, "_metadata", {})  # of modules; those who load ask by the names they have themselves
    for key in [key for key in versions if f"{key}.".startswith(inner)]:
        versions[f"{prefix}{f'{key}.'.removeprefix(inner)}".removesuffix(".")] = versions[key]


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    found = {key: state.pop(key) for key in [*state] if key.startswith(prefix)}  # a child may be called "module", too
    state.update({f"{prefix}module.{key.removeprefix(prefix)}": value for key, value in found.items()})
    versions = getattr(state, "_metadata", {})  # where a module of which this is a part loads, there is none
    for key in [key for key in versions if f"{key}.".startswith(prefix)]:
        versions.setdefault(f"{prefix}module.{key.removeprefix(prefix)}".removesuffix("."), versions[key])
