"""ZeRO, stage 3: each rank keeps its part of the parameters, of their gradients and of the optimizer's state.

Source: Rajbhandari, Rasley, Ruwase and He, ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.
The model is cut into units (see `farandole.training.units`). Before a unit computes, forward or backward, its
parameters are gathered, and those of the unit that came next the last time are on their way; after that they are let go
of. Its gradients are summed as in stage 2. So 3(N-1)/N of the parameters' bytes travel, where an all_reduce has
2(N-1)/N.

When a unit is let go of in backward, all of it must be through: not when its gradients are there, as other parameters
of it may be frozen, but when backward arrives at its inputs; or, if these have no gradients, at its end. Its gradients
start to be summed when backward comes to another unit: the same place among the collectives on all ranks, even where
one has gradients, of parameters or inputs, that another has not. A backward that is to be gone through once more
(``create_graph``) leaves everything gathered, up to the end of one that is not.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from farandole.errors import ArgumentError
from farandole.torch_eager import eager
from farandole.training.arguments import require_wire_dtype
from farandole.training.bucket import Kind
from farandole.training.errors import CheckpointError
from farandole.training.gradient_sync import GradientSync, is_in_backward, weakly
from farandole.training.outputs import is_computed, tensors_in
from farandole.training.replicas import broadcast
from farandole.training.shards import BufferPool, Holding, ScatterBucket
from farandole.training.unit_calls import UnitCall
from farandole.training.units import Flat, Owner, Unit, parameters_by_unit, units_of
from farandole.training.wrapper import Wrapper

__all__ = ["FullyShardedParallel"]


_EXTRA = "_extra_state"
"""How keys end of what modules save besides tensors."""


@eager
class FullyShardedParallel(Wrapper):
    """Trains a module of which each rank keeps a part.

    ``parameters()`` are this rank's pieces: tensors of one dimension, to be given to an optimizer that treats each
    element by itself, after this wrapper is made. Each has the ``whole_name`` and the ``whole_shape`` of its parameter,
    for groups. Weights are bit for bit those of `DataParallel`, if gradients are: with ``reproducible=True``, or on two
    ranks; and if a unit that uses an input several times is the only one that does: else its gradient adds up in
    another order.

    The parameters of a unit are whole while it computes; elsewhere, using one raises `NotGatheredError`; see
    `gathered`. What belongs to no unit is a unit of its own, and stays gathered from the forward to the end of
    backward; so do parameters that several units share. All ranks must use the units in the same order.

    Args:
        module: the same on each rank, on one device. Its parameters are emptied.
        units: classes of modules that are units. None: the items of every ``ModuleList`` and ``Sequential``.
        param_dtype: 16-bit floats in which parameters and inputs are computed with, and gradients travel; the optimizer
            works on the parameters as they were, and gradients are summed in 32 bits. Those of modules with running
            statistics, such as BatchNorm, stay as they are, as these do. None: all stay.
        group: of ranks; the world if None.
        reduction: see `DataParallel`, as for all that follow.
        unused: likewise.
        sparse: likewise.
        broadcast_buffers: likewise.
        wire_dtype: likewise, for gradients.
        reproducible: likewise.

    Raises:
        ArgumentError: an argument makes no sense, nothing is to be trained, or a layer would make sparse gradients and
            they are refused.
        DifferentModelsError: the ranks' modules differ.
        UnusedParametersError: from ``backward``, on every rank: a parameter had no gradient on some rank.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        units: type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
        param_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        unused: Literal["error", "zeros"] = "error",
        sparse: Literal["error", "dense"] = "error",
        broadcast_buffers: bool = True,
        wire_dtype: torch.dtype | None = None,
        reproducible: bool = False,
    ) -> None:

        def check() -> None:
            require_wire_dtype("param_dtype", param_dtype)
            units_of(module, units)

        super().__init__(
            module,
            group,
            reduction=reduction,
            unused=unused,
            sparse=sparse,
            broadcast_buffers=broadcast_buffers,
            wire_dtype=wire_dtype,
            reproducible=reproducible,
            own_options={"units": units, "param_dtype": param_dtype},
            check_own=check,
        )
        self._param_dtype = param_dtype
        modules = units_of(module, units)
        self.units = self._make_units(modules)
        self._rest = self.units[0]
        self._order: list[Unit] = []  # as units computed in the last forward
        self._next_order: list[Unit] = []
        self._place = 0  # in the order, where backward is
        self._summed_next: list[Unit] = []  # when backward comes to another one
        self.num_backwards = 0
        self._awaits_end = False
        self._makes_graph = False  # in this backward
        self._keeps_graph = False  # of one, to go through it once more: what it uses lies in the units' memory
        self._buckets: dict[str, list[ScatterBucket]] = {}
        self._flats = [flat for unit in self.units for flat in unit.flats]
        trained = [flat for flat in self._flats if flat.whole[0].requires_grad]
        self.gradient_sync = GradientSync(
            {name: one for flat in trained for name, one in zip(flat.names, flat.whole, strict=True)},
            self.group,
            unused=unused,
            sparse=sparse,
            reproducible=reproducible,
            starts_when_full=False,
        )
        self._are_trained = [(one.name, one.value, one.value.requires_grad) for one in self.holdings()]
        self.gradient_sync.on_round = weakly(self.after_round)
        self.gradient_sync.buckets = self._make_buckets()
        for unit in self.units[1:]:
            self._watch(modules[unit.name], unit)
        for one in self.holdings():  # so that a module of which this is a part has them, too
            self._parameters[one.name] = one.value

    # -- parts -------------------------------------------------------------------------------------------------------

    def _make_units(self, modules: Mapping[str, nn.Module]) -> list[Unit]:
        """That of what belongs to no module of ``modules`` comes first."""
        owners: dict[int, list[Owner]] = {}
        for one in self.module.modules():
            for attribute, parameter in one._parameters.items():
                owners.setdefault(id(parameter), []).append(Owner(one, attribute))
        kinds = parameters_by_unit(self.module, modules, self._param_dtype)
        return [
            Unit(unit, [self._make_flat(some, kind.computed, owners) for kind, some in of_unit.items()])
            for unit, of_unit in kinds.items()
        ]

    def _make_flat(
        self, some: list[tuple[str, nn.Parameter]], dtype: torch.dtype, owners: Mapping[int, list[Owner]]
    ) -> Flat:
        names, parameters = zip(*some, strict=True)
        return Flat(names, parameters, [owners[id(one)] for one in parameters], dtype, self.summing)

    def _make_buckets(self) -> list[ScatterBucket]:
        """In the order in which backward probably fills them."""
        pools: dict[torch.dtype, BufferPool] = {}
        at = 0
        for unit in self.units:
            buckets = self._buckets[unit.name] = []
            for flat in unit.flats:
                if flat.whole[0].requires_grad:
                    dtype = flat.whole[0].dtype
                    pool = pools.setdefault(dtype, BufferPool(dtype, self.device, self.group))
                    buckets.append(
                        ScatterBucket(range(at, at + len(flat.names)), flat.whole, flat.shard, pool, self.summing)
                    )
                    at += len(flat.names)
        return [bucket for buckets in self._buckets.values() for bucket in buckets][::-1]

    # -- forward -----------------------------------------------------------------------------------------------------

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See `Wrapper`."""
        args, kwargs = super().before_forward(args, kwargs)
        if self._param_dtype is not None:
            args, kwargs = pytree.tree_map(self._cast, (args, kwargs))
        if torch.is_grad_enabled() and self.training:
            self.require_unchanged(self._are_trained)
            self.share_buffers()
        if not is_in_backward():
            self._let_go()  # of what may have been stepped since
        self._next_order = []
        self._rest.gather()
        if self._order:
            self._order[0].start()
        return args, kwargs

    def forward_failed(self) -> None:
        """See `Wrapper`."""
        if not is_in_backward():
            self._let_go()
        super().forward_failed()

    def after_forward(self, outputs: object) -> None:
        """See `Wrapper`."""
        for_backward = torch.is_grad_enabled()
        if not is_in_backward():  # where a checkpointed part is computed once more, all of it is used in a moment
            self._order = self._next_order or self._order
            kept = (self._rest, self._order[-1] if self._order else None) if for_backward else ()
            for unit in self.units:
                if unit not in kept:
                    self._release(unit)
        if for_backward:
            await_end = weakly(self._await_end)  # the module may keep what it returns
            for tensor in tensors_in(outputs):
                if is_computed(tensor):
                    tensor.register_hook(lambda _: await_end())
        super().after_forward(outputs)

    def _cast(self, value: object) -> object:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self._param_dtype)
        return value

    def _watch(self, module: nn.Module, unit: Unit) -> None:
        """Gather the parameters of ``unit`` whenever ``module`` computes."""
        calls: list[UnitCall] = []
        modules = list(module.modules())
        reference = weakref.ref(self)

        @eager
        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if (self := reference()) is None:
                raise ArgumentError("the wrapper that gathers this module is gone; keep it as long as the module")
            call = UnitCall(self, unit, modules)
            calls.append(call)
            self._use(unit)
            return call.watch_inputs((args, kwargs)) if torch.is_grad_enabled() else (args, kwargs)

        @eager
        def after(_: nn.Module, __: Any, outputs: Any) -> None:
            if (self := reference()) is None or not calls:
                return
            calls.pop().watch_outputs(outputs, modules)
            unit.require_own_outputs(outputs)
            if not is_in_backward() and unit is not self._last_of_before:
                self._release(unit)

        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        module.register_forward_hook(after, always_call=True)  # also where a recomputation stops when it has enough

    @property
    def _last_of_before(self) -> Unit | None:
        """The unit that probably computes last: backward begins with it."""
        return self._order[-1] if self._order and torch.is_grad_enabled() else None

    def _use(self, unit: Unit) -> None:
        unit.gather()
        if is_in_backward():
            return
        self._next_order.append(unit)
        place = len(self._next_order)
        if place < len(self._order) and self._order[place - 1] is unit:
            self._order[place].start()

    # -- backward ----------------------------------------------------------------------------------------------------

    def _await_end(self) -> None:
        if not self._awaits_end:
            self._awaits_end = True
            self._place = len(self._order)
            # One that keeps a graph of gradients, of an earlier one, is to be gone through once more, too.
            keeps = self._keeps_graph and torch._C._autograd._get_current_graph_task_keep_graph()
            self._makes_graph = torch.is_grad_enabled() or keeps
            self._keeps_graph |= self._makes_graph
            self._rest.gather()  # it may have been let go of since the forward
            torch.autograd.Variable._execution_engine.queue_callback(self._at_end)

    def _at_end(self) -> None:
        self.num_backwards += 1
        for unit in self.units:
            unit.num_expected = max(1, unit.num_begun)
        self._keeps_graph = self._makes_graph
        if self._keeps_graph:
            self._begin_anew()
        else:
            self._let_go()

    def _begin_anew(self) -> None:
        self._awaits_end = False
        for unit in self.units:
            unit.num_entered = unit.num_begun = 0
        self._summed_next = []

    def _let_go(self) -> None:
        """Of all units; where a graph is kept, only to gather them anew into the same memory."""
        self._begin_anew()
        for unit in self.units:
            unit.release(keeps_memory=self._keeps_graph)

    def _release(self, unit: Unit) -> None:
        if not self._keeps_graph:
            unit.release()

    def use_in_backward(self, unit: Unit) -> None:
        """Gather a unit for its backward; the one before it is on its way then."""
        self._await_end()
        unit.num_begun += 1
        through = [one for one in self._summed_next if one is not unit]
        self.gradient_sync.may_start([bucket for one in through for bucket in self._buckets[one.name]])
        self._summed_next = [unit] if unit.num_begun >= unit.num_expected else []
        unit.gather()
        place = next((one for one in reversed(range(self._place)) if self._order[one] is unit), 0)
        if place > 0:
            self._place = place
            self._order[place - 1].start()

    def leave_in_backward(self, unit: Unit) -> None:
        """Backward is through with a forward of this unit, perhaps the last one."""
        unit.num_entered -= 1
        if unit.num_entered == 0:
            self._release(unit)

    def join(self, **_: Any) -> NoReturn:
        """There is none.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            "stage 3 has no join: ranks gather parameters from one another in every forward; give all ranks equally "
            "many batches, or train at another stage"
        )

    # -- whole parameters --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """A context in which the module has all its parameters, as the optimizer has them. What is written into them is
        kept by the rank whose part it is. All ranks enter and leave together; there is no forward in between."""
        self.gradient_sync.settle()
        self._let_go()
        with contextlib.ExitStack() as stack, torch.no_grad():
            for flat in self._flats:
                stack.enter_context(flat.shown_as_owned())
            yield

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's pieces, by the names of their parameters in the module that is wrapped."""
        for one in self.holdings():
            yield f"{prefix}{'.' if prefix else ''}{one.name}", one.value

    def held(self) -> Iterator[tuple[Kind, Tensor]]:
        """The memory that is held now, and what for; some of it perhaps more than once."""
        yield from super().held()
        for flat in self._flats:
            yield from flat.held()

    def sharded_shapes(self) -> dict[str, torch.Size]:
        """Of all parameters."""
        return {
            name: place.shape
            for flat in self._flats
            for name, place in zip(flat.names, flat.layout.places, strict=True)
        }

    def holdings(self) -> Iterator[Holding]:
        """What this rank has of each parameter."""
        for flat in self._flats:
            yield from flat.shard.holdings()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """That of the module, with whole parameters, on every rank. All ranks call this."""
        with self.gathered():
            state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any] | None, strict: bool = True, assign: bool = False) -> Any:
        """Take whole parameters. All ranks call this: with the same ones; or rank 0 with them and any others with None,
        which get their parts from rank 0, a unit at a time.

        Raises:
            ArgumentError: rank 0 has none, or ``assign`` is asked for.
            CheckpointError: where some have None: names or shapes do not fit; on every rank.
        """
        if assign:
            raise ArgumentError("assign=True; sharded parameters are copied into: leave it out")
        self.gradient_sync.settle()
        have = torch.tensor([state_dict is not None], dtype=torch.int32, device=self.device)
        dist.all_reduce(have, op=dist.ReduceOp.MIN, group=self.group)
        if have.item():
            with self.gathered():
                return self.module.load_state_dict(state_dict, strict)
        self._let_go()
        problem = [self._misfit(state_dict, strict) if self.group.rank() == 0 else ""]
        dist.broadcast_object_list(problem, group=self.group, group_src=0)
        if problem[0]:
            raise CheckpointError(problem[0])
        state = self._by_first_names(state_dict) if state_dict is not None and self.group.rank() == 0 else None
        with torch.no_grad():
            for flat in self._flats:
                flat.load(state)
            buffers = dict(self.module.named_buffers())
            for name, buffer in buffers.items():
                if state is not None and name in state:
                    buffer.copy_(state[name])
            broadcast(buffers.values(), self.group)
        others = [{} if state is None else {key: one for key, one in state.items() if key.endswith(_EXTRA)}]
        dist.broadcast_object_list(others, group=self.group, group_src=0)
        for key, value in others[0].items():
            self.module.get_submodule(key.removesuffix(_EXTRA).removesuffix(".")).set_extra_state(value)
        return None

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Called where this is a part of a module that loads its state: whole parameters are taken from it, and the
        rest goes on to the module that is wrapped."""
        found = {key: state_dict.pop(key) for key in [*state_dict] if key.startswith(prefix)}
        with self.gathered():
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                value = found.pop(prefix + name, None)
                if value is None:
                    missing_keys.append(prefix + name)
                elif value.shape != parameter.shape:
                    error_msgs.append(
                        f"{prefix + name!r} is of shape {tuple(value.shape)} there, {tuple(parameter.shape)} in the "
                        f"model"
                    )
                else:
                    parameter.copy_(value)
        state_dict.update({f"{prefix}module.{key.removeprefix(prefix)}": value for key, value in found.items()})

    def _by_first_names(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Where tied parameters are named once, it may be by any of their names."""
        return {self.aliases[key]: one for key, one in state.items() if key in self.aliases} | {
            key: one for key, one in state.items() if key not in self.aliases
        }

    def _misfit(self, state: Mapping[str, Any] | None, strict: bool) -> str:
        """What is wrong with what rank 0 has."""
        if state is None:
            return "rank 0 has no state_dict; it must have one where others have None"
        state = self._by_first_names(state)
        shapes = {**self.sharded_shapes(), **{name: one.shape for name, one in self.module.named_buffers()}}
        persistent = {*self.sharded_shapes(), *self.module.state_dict().keys()} - self.aliases.keys()
        missing = sorted(persistent - state.keys())
        unexpected = sorted(state.keys() - persistent)
        if strict and (missing or unexpected):
            return f"the state_dict lacks {missing}, and has {unexpected}, which the model has not"
        for name in sorted(persistent & state.keys() & shapes.keys()):
            if state[name].shape != shapes[name]:
                return f"{name!r} is of shape {tuple(state[name].shape)} there, {tuple(shapes[name])} in the model"
        return ""
