"""ZeRO, stages 1 and 2: each rank keeps the optimizer's state for its part of the parameters alone.

Source: Rajbhandari, Rasley, Ruwase and He, ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.
Data parallelism sums gradients by an all_reduce, which is a reduce_scatter and an all_gather. Here the first half is
done in backward, so that each rank has the gradients of its part; it steps; and then the second half is done, with the
new parameters in place of the gradients. So the same bytes travel, and no rank needs more of the optimizer's state than
its part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook

from farandole.errors import ArgumentError
from farandole.torch_eager import eager
from farandole.training.bucket import Kind
from farandole.training.data_parallel import DataParallel
from farandole.training.layout import Layout, into_buckets
from farandole.training.memory import zeros
from farandole.training.recorded import started, wait_for
from farandole.training.replicas import require_same
from farandole.training.shards import BufferPool, FlatShard, Holding, ScatterBucket, master_dtype

__all__ = ["ZeroOptimizer"]


@eager
class ZeroOptimizer(torch.optim.Optimizer, Joinable):
    """Runs an optimizer on this rank's part of the parameters, and gathers what it made of them.

    Works for optimizers that treat each element by itself, as SGD, Adam and AdamW do; not for those that need a norm of
    a whole parameter, its shape, or neighbours. Parts are cut anywhere, and hold pieces of parameters as tensors of one
    dimension. The weights are bit for bit those of the same optimizer on `DataParallel`, if gradients are (with
    ``reproducible=True`` there, or on two ranks) and parameters are of 32 bits or more.

    From then on, ``backward`` leaves no gradients in the parameters: each rank has the sums for its part, which
    ``step`` uses up to `zero_grad`; several backwards add up, each travelling, unless within `DataParallel.no_sync`.
    Parameters become views into flat memory, and 16-bit ones get 32-bit copies of this rank's part, on which the
    optimizer works.

    Args:
        model: wraps the module; on the group whose ranks share the state.
        optimizer_class: such as ``torch.optim.AdamW``.
        params: parameters or groups of them, as `torch.optim.Optimizer` takes them; every trained one must be there.
            None: all, in one group.
        stage: 1 shards the optimizer's state, and has flat memory for all gradients; 2 has it for this rank's part,
            and for a few buckets on their way.
        defaults: for the optimizer, such as ``lr=1e-3``.

    Attributes:
        model: whose parameters these are.

    Raises:
        ArgumentError: the model is none of `DataParallel`, a parameter is missing or not the model's, or the stage is
            neither 1 nor 2.
    """

    def __init__(
        self,
        model: DataParallel,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        *,
        stage: Literal[1, 2] = 1,
        **defaults: Any,
    ) -> None:
        if not isinstance(model, DataParallel):
            raise ArgumentError(
                f"the model is a {type(model).__name__}; wrap it first: model = farandole.training.DataParallel(model)"
            )
        Joinable.__init__(self)
        self.model = model
        self._parameters = model.gradient_sync.parameters
        names = {id(one): name for name, one in zip(model.gradient_sync.names, self._parameters, strict=True)}
        groups: list[dict[str, Any]] = []
        said = [f"stage={stage}", getattr(optimizer_class, "__name__", "")]
        problem: Exception | None = None
        try:
            if stage not in (1, 2):
                raise ArgumentError(
                    f"stage={stage!r}; it must be 1 or 2 (stage 0 is DataParallel, 3 FullyShardedParallel)"
                )
            groups = _as_groups(self._parameters if params is None else params)
            _require_all(groups, model)
            of_class = optimizer_class(
                [{**group, "params": [nn.Parameter(torch.zeros(1))]} for group in groups], **defaults
            )
            said += [f"{key}={one!r}" for group in of_class.param_groups for key, one in _plain_options(group)]
        except Exception as error:  # the class's own, too: the others are to know of it
            problem = error
        self._given = [[names.get(id(one)) for one in group["params"]] for group in groups]  # None: a frozen one
        require_same([*said, *map(str, self._given)], model.group, model.device, problem)
        self._shards = _Shards(model, stage)
        model.replace_buckets(self._shards.buckets, self)
        values = {one.name: one.value for one in self.holdings()}
        sharded = [
            {**group, "params": [values[name] for name in some if name is not None]}
            for group, some in zip(groups, self._given, strict=True)
        ]
        self._inner = optimizer_class(sharded, **defaults)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer on this rank's part; then every rank has all new parameters. All ranks call this.

        Args:
            closure: computes the loss once more, with gradients, before the step.

        Raises:
            ArgumentError: gradients of this rank alone are left, from `DataParallel.no_sync`; or there is another
                ZeroOptimizer of the model since.
        """
        return self._step(closure, is_active=True)

    def _step(self, closure: Callable[[], Any] | None, *, is_active: bool) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.model.gradient_sync.settle()
        if self.model.sharded_by is not self:
            raise ArgumentError("the model has another ZeroOptimizer since this one; step the one made last")
        if self.is_joining:
            self._agree_on_options(is_active=is_active)
        self.model.num_rounds_stepped = self.model.num_rounds
        self.take_over()
        self._inner.step()
        self.gather()
        return loss

    def _agree_on_options(self, *, is_active: bool) -> None:
        """A rank that is through does not see what a scheduler makes of them."""
        options = [[{key: one for key, one in group.items() if key != "params"} for group in self.param_groups]]
        dist.broadcast_object_list(options, group=self.model.group, group_src=self.model.active_rank)
        if not is_active:
            for group, one in zip(self.param_groups, options[0], strict=True):
                group.update(one)

    def take_over(self) -> None:
        """Where 16-bit parameters have 32-bit copies, give these what was written into the parameters since they were
        gathered."""
        self._shards.take_over()

    def holdings(self) -> Iterator[Holding]:
        """What this rank's optimizer works on."""
        return self._shards.holdings()

    def sharded_shapes(self) -> dict[str, torch.Size]:
        """Of the parameters that are trained."""
        return {name: one.shape for name, one in zip(self.model.gradient_sync.names, self._parameters, strict=True)}

    def held(self) -> Iterator[tuple[Kind, Tensor]]:
        """The memory of parameters that is held now, what the model itself has included."""
        return self._shards.held()

    def gather(self) -> None:
        """Give every rank the parameters as their owners have them. All ranks call this."""
        self._shards.gather()
        # Not seen by autograd, which has to refuse the backward of a forward with other parameters.
        torch.autograd.graph.increment_version(self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """Of this rank's pieces; ``part`` says which these are. `save_checkpoint` saves the state of all ranks."""
        return {**self._inner.state_dict(), "part": self._part()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the state of this rank, of as many, on buckets of the same sizes; or with that of an optimizer of
        the whole parameters, in the same groups. `load_checkpoint` takes that of any number of ranks.

        Raises:
            ArgumentError: it is the state of other pieces, or of parameters of other shapes or in other groups.
        """
        given = dict(state_dict)
        part = given.pop("part", None)
        if part is None:
            given = self._cut(given)
        elif part != self._part():
            raise ArgumentError(
                f"this is the state of the pieces of rank {part['rank']} of {part['world_size']}, which are not those "
                f"of rank {self._part()['rank']} of {self._part()['world_size']} here; use save_checkpoint and "
                f"load_checkpoint, which any stage and number of ranks can load"
            )
        self._inner.load_state_dict(given)
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state

    def _part(self) -> dict[str, Any]:
        pieces = {one.name: (one.start, one.stop) for one in self.holdings()}
        return {"rank": self.model.group.rank(), "world_size": self.model.group.size(), "pieces": pieces}

    def _cut(self, whole: dict[str, Any]) -> dict[str, Any]:
        """From the state of whole parameters, that of this rank's pieces."""
        holdings = {one.name: one for one in self.holdings()}
        sizes = [len(group["params"]) for group in whole["param_groups"]]
        if sizes not in ([len(some) for some in self._given], [len(group["params"]) for group in self.param_groups]):
            raise ArgumentError(
                f"this is the state of an optimizer with groups of {sizes} parameters; those here have "
                f"{[len(some) for some in self._given]}, frozen ones included"
            )
        state, groups = {}, []
        for group, given in zip(whole["param_groups"], self._given, strict=True):
            names = given if len(given) == len(group["params"]) else [name for name in given if name is not None]
            numbers = {name: one for name, one in zip(names, group["params"], strict=True) if name is not None}
            groups.append({**group, "params": list(numbers.values())})
            for name, number in numbers.items():
                entries = whole["state"].get(number, {})
                state[number] = {key: _piece_of(entry, key, holdings[name]) for key, entry in entries.items()}
        return {**whole, "state": state, "param_groups": groups}

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ArgumentError(
            "a ZeroOptimizer has a part of the state, and is not copied or pickled; take its state_dict(), or "
            "save_checkpoint()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of all gradients. With ``set_to_none=False`` they are zero after that."""
        self._inner.zero_grad(set_to_none)
        for parameter in self._parameters:
            parameter.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused, once all is dealt out.

        Raises:
            ArgumentError: always, but while the optimizer is made.
        """
        if hasattr(self, "_shards") and self.param_groups is self._inner.param_groups:
            raise ArgumentError("parameters are dealt out to ranks already; make a new ZeroOptimizer with all groups")
        super().add_param_group(param_group)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """See `torch.distributed.algorithms.Joinable`; `DataParallel.join` is for both. After each forward come a
        backward that is summed, a step and `zero_grad`."""
        return _Shadow(self)

    @property
    def is_joining(self) -> bool:
        """Whether some ranks may be through, and step their parts for the others."""
        return bool(self._join_config.enable)

    def leave_join(self) -> None:
        """Each step is of all ranks again."""
        Joinable.__init__(self)

    @property
    def join_device(self) -> torch.device:
        """See `torch.distributed.algorithms.Joinable`."""
        return self.model.join_device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """See `torch.distributed.algorithms.Joinable`."""
        return self.model.group


def _piece_of(entry: object, key: str, holding: Holding) -> object:
    if not isinstance(entry, Tensor):
        return entry
    if entry.shape == holding.shape and not (key == "step" and entry.dim() == 0):
        return entry.reshape(-1)[holding.start : holding.stop].clone()
    if entry.dim() == 0:
        return entry.clone()
    raise ArgumentError(
        f"the state has a {key!r} of shape {tuple(entry.shape)} for {holding.name!r}, which is of shape "
        f"{tuple(holding.shape)}; it must be of an optimizer of the same parameters that treats each element by itself"
    )


class _Shadow(JoinHook):
    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """This rank's part is stepped for the others, too."""
        self._optimizer._step(None, is_active=False)
        self._optimizer.zero_grad()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Each step is of all ranks again, and schedulers have gone on since the last one."""
        model = self._optimizer.model
        self._optimizer._agree_on_options(is_active=model.group.rank() == model.active_rank)
        self._optimizer.leave_join()


class _Shards:
    """All trained parameters, bucket by bucket in flat memory."""

    def __init__(self, model: DataParallel, stage: int) -> None:
        self._summing = summing = model.summing
        parameters = model.gradient_sync.parameters
        order = list(reversed(range(len(parameters))))  # the last ones' gradients come first
        dealt = [
            [order[one] for one in some]
            for some in into_buckets([parameters[one] for one in order], model.bucket_bytes)
        ]
        self._flats: list[Tensor] = []
        self._shards: list[FlatShard] = []
        for some in dealt:
            self._flatten([model.gradient_sync.names[index] for index in some], [parameters[index] for index in some])
        self.buckets: list[ScatterBucket] = []
        pools: dict[torch.dtype, BufferPool] = {}
        for indices, flat, shard in zip(dealt, self._flats, self._shards, strict=True):
            kind = flat.dtype, flat.device, summing.group
            if stage == 1:
                memory: BufferPool | Tensor = zeros(flat.numel(), *kind)
            else:
                memory = pools.setdefault(flat.dtype, BufferPool(*kind))
            whole = [parameters[index] for index in indices]
            self.buckets.append(ScatterBucket(indices, whole, shard, memory, summing))

    def _flatten(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        layout = Layout([one.shape for one in parameters], self._summing.world_size)
        first = parameters[0]
        flat = zeros(layout.flat_numel, first.dtype, first.device, self._summing.group)
        for parameter, place in zip(parameters, layout.places, strict=True):
            view = place.view(flat)
            view.copy_(parameter.detach())
            parameter.data = view
        own = layout.part(flat, self._summing.rank).to(master_dtype(flat.dtype))
        self._flats.append(flat)
        self._shards.append(FlatShard(names, parameters, own, layout, self._summing.rank))

    def holdings(self) -> Iterator[Holding]:
        """What this rank's optimizer works on."""
        for shard in self._shards:
            yield from shard.holdings()

    def held(self) -> Iterator[tuple[Kind, Tensor]]:
        for flat, shard in zip(self._flats, self._shards, strict=True):
            yield "parameters", flat
            yield "parameters", shard.own

    def take_over(self) -> None:
        """Where an optimizer works on copies, give these what was written into the parameters since they were
        gathered."""
        for flat, shard in zip(self._flats, self._shards, strict=True):
            part = shard.layout.part(flat, self._summing.rank)
            if part.dtype != shard.own.dtype:
                was_written = part != shard.own.to(part.dtype)
                shard.own.copy_(torch.where(was_written, part, shard.own))

    def gather(self) -> None:
        """Give every rank all parts."""
        works = []
        for flat, shard in zip(self._flats, self._shards, strict=True):
            own = shard.layout.part(flat, self._summing.rank)
            if own.data_ptr() != shard.own.data_ptr():
                own.copy_(shard.own)
            work = dist.all_gather_single(flat, own, group=self._summing.group, async_op=True)
            works.append(started(work, "all_gather", flat, self._summing.group))
        for work in works:
            wait_for(work)


def _as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    given = list(params)
    if given and isinstance(given[0], dict):
        return [{**group, "params": _as_list(group["params"])} for group in given]
    return [{"params": _as_list(given)}]


def _plain_options(group: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Those that are alike where they are printed alike."""
    for key, value in group.items():
        if isinstance(value, (bool, int, float, str, tuple, Tensor)):
            yield key, value


def _as_list(params: Any) -> list[nn.Parameter]:
    """Parameters alone, or with names."""
    some = [params] if isinstance(params, Tensor) else list(params)
    return [one[1] if isinstance(one, tuple) else one for one in some]


def _require_all(groups: Sequence[dict[str, Any]], model: DataParallel) -> None:
    names = {id(one): name for name, one in zip(model.gradient_sync.names, model.gradient_sync.parameters, strict=True)}
    given = [one for group in groups for one in group["params"]]
    strange = [tuple(one.shape) for one in given if id(one) not in names and one.requires_grad]
    if strange:
        raise ArgumentError(f"a parameter of shape {strange[0]} is none that the model trains; take model.parameters()")
    twice = [names[key] for key, number in Counter(map(id, given)).items() if number > 1 and key in names]
    if twice:
        raise ArgumentError(f"{twice[0]!r} is in params twice; take it out of all groups but one")
    missing = [name for key, name in names.items() if key not in {id(one) for one in given}]
    if missing:
        raise ArgumentError(
            f"the model trains {missing[0]!r}, which is in no group of params; add it, or freeze it with "
            f"requires_grad_(False) before DataParallel"
        )
