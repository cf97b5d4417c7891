"""A unit: a part of a model whose parameters are gathered and let go of together.

Outside of its use, a rank holds its part of the unit's flat tensors alone (see `farandole.training.layout`); the
modules then have an `Absent` in place of each parameter. To *gather* is to fill the flat tensors with the parts of all
ranks, and to give the modules parameters that are views into them. To *release* is to give that memory back. What
autograd has saved of the parameters lies in the same memory, so it is there again once the unit is gathered for
backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farandole.errors import ArgumentError
from farandole.training.bucket import Kind
from farandole.training.errors import NotGatheredError
from farandole.training.layout import Layout
from farandole.training.memory import zeros
from farandole.training.outputs import tensors_in
from farandole.training.recorded import blocking, started, wait_for
from farandole.training.shards import FlatShard, master_dtype
from farandole.training.stepping import refuse_whole, watch_steps
from farandole.training.summing import Summing

__all__ = ["Absent", "Flat", "FlatKind", "Owner", "Unit", "parameters_by_unit", "units_of"]


class Owner(NamedTuple):
    """Where a module has a parameter; a tied one has several."""

    module: nn.Module
    attribute: str


class Absent:
    """In place of a parameter that is not gathered: whatever is done with it is refused."""

    def __init__(self, name: str) -> None:
        self._name = name

    def refuse(self) -> NoReturn:
        """Raises:
        NotGatheredError: always.
        """
        raise NotGatheredError(
            f"{self._name!r} is sharded, and whole only while its module computes; use it in a forward that the "
            f"wrapped model calls, or within `with model.gathered():`"
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        for one in torch.utils._pytree.tree_leaves((args, kwargs or {})):
            if isinstance(one, cls):
                one.refuse()
        raise AssertionError("called for none of its own")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()


def _refuse(self: Absent, *_: object) -> NoReturn:
    self.refuse()


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "pow", "rpow", "neg"),
    *("getitem", "setitem", "len", "iter", "float", "array", "abs", "lt", "le", "gt", "ge", "bool"),
    *("eq", "ne", "floordiv", "rfloordiv", "mod", "rmod", "pos", "invert", "contains", "int"),
):
    setattr(Absent, f"__{_name}__", _refuse)


class Flat:
    """Parameters of a unit that are of one dtype, and all trained or all frozen, in one flat tensor.

    Args:
        names: of the parameters.
        parameters: with the values to begin with; they are emptied.
        owners: per parameter.
        dtype: in which they are gathered.
        summing: knows the ranks.

    Attributes:
        whole: per parameter what the modules compute with; its memory is there while gathered.
        shard: what this rank owns.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        owners: Sequence[Sequence[Owner]],
        dtype: torch.dtype,
        summing: Summing,
    ) -> None:
        self.names = names
        self.owners = owners
        self.group = summing.group
        self.layout = Layout([one.shape for one in parameters], summing.world_size)
        first = parameters[0]
        values = first.new_zeros(self.layout.flat_numel, dtype=master_dtype(first.dtype))
        for parameter, place in zip(parameters, self.layout.places, strict=True):
            place.view(values).copy_(parameter.detach())
        own = zeros(self.layout.part_numel, values.dtype, values.device, summing.group)
        own.copy_(self.layout.part(values, summing.rank))
        self.shard = FlatShard(names, parameters, own, self.layout, summing.rank)
        for one in self.shard.holdings():
            one.value.whole_name, one.value.whole_shape = one.name, one.shape
        self._memory = torch.empty(self.layout.flat_numel, dtype=dtype, device=values.device)
        self._num_bytes = self._memory.untyped_storage().nbytes()
        self._sent: Tensor | None = None  # while it is in use
        self.whole = [
            nn.Parameter(place.view(self._memory), requires_grad=one.requires_grad)
            for one, place in zip(parameters, self.layout.places, strict=True)
        ]
        self._absent = [Absent(name) for name in names]
        watch_steps(parameters, self)
        for parameter in parameters:
            parameter.data = parameter.new_empty(0)
        self.hide()
        self.free()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See `farandole.training.stepping.Watcher`: the parameters are empty."""
        refuse_whole(optimizer)

    def held(self) -> Iterator[tuple[Kind, Tensor]]:
        """The memory that is held now, and what for."""
        yield "parameters", self.shard.own
        yield "parameters", self._memory

    def start(self) -> dist.Work:
        """Start to gather."""
        self._memory.untyped_storage().resize_(self._num_bytes)
        self._sent = self.shard.own.to(self._memory.dtype)
        # A tensor that autograd saved has not changed when its memory is filled again: data has versions of its own.
        work = dist.all_gather_single(self._memory.data, self._sent, group=self.group, async_op=True)
        return started(work, "all_gather", self._memory, self.group)

    def finish(self, work: dist.Work) -> None:
        """Return when what was started is done."""
        wait_for(work)
        self._sent = None

    def show(self, tensors: Sequence[nn.Parameter] | None = None) -> None:
        """Give the modules their parameters: ``whole``, or others."""
        for parameter, owners in zip(self.whole if tensors is None else tensors, self.owners, strict=True):
            for module, attribute in owners:
                setattr(module, attribute, parameter)  # some modules, as nn.LSTM, keep a list beside

    def hide(self) -> None:
        """Give the modules an `Absent` for each parameter."""
        for absent, owners in zip(self._absent, self.owners, strict=True):
            for module, attribute in owners:
                module._parameters.pop(attribute, None)
                module.__dict__[attribute] = absent

    def free(self) -> None:
        """Give the memory back."""
        self._memory.untyped_storage().resize_(0)

    def _as_owned(self) -> Tensor:
        """All parts, in the dtype that the optimizer works in, in memory of their own."""
        values = torch.empty(self.layout.flat_numel, dtype=self.shard.own.dtype, device=self.shard.own.device)
        with blocking("all_gather", values, self.group):
            dist.all_gather_single(values, self.shard.own, group=self.group)
        return values

    def load(self, state: Mapping[str, Tensor] | None) -> None:
        """Take the values that rank 0 has; those it has not stay. The others give None."""
        values = self._as_owned()
        for name, place in zip(self.names, self.layout.places, strict=True):
            if state is not None and name in state:
                place.view(values).copy_(state[name])
        dist.broadcast(values, group=self.group, group_src=0)
        self.shard.own.copy_(self.layout.part(values, self.group.rank()))

    def lends(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in the memory that is given back."""
        storage = self._memory.untyped_storage()
        return bool(storage.nbytes()) and tensor.untyped_storage().data_ptr() == storage.data_ptr()

    @contextlib.contextmanager
    def shown_as_owned(self) -> Iterator[None]:
        """Give the modules parameters of the dtype that the optimizer works in; what is written into this rank's part
        stays."""
        values = self._as_owned()
        self.show(
            [
                nn.Parameter(place.view(values), requires_grad=one.requires_grad)
                for place, one in zip(self.layout.places, self.whole, strict=True)
            ]
        )
        try:
            yield
        finally:
            self.shard.own.copy_(self.layout.part(values, self.group.rank()))
            self.hide()


class Unit:
    """Parameters that are gathered together.

    Args:
        name: of the module, "" for the rest of the model.
        flats: of its parameters.

    Attributes:
        num_entered: forwards whose backward is under way.
        num_begun: forwards to which this backward has come.
        num_expected: how many these were in the last backward; one, if there was none.
    """

    def __init__(self, name: str, flats: Sequence[Flat]) -> None:
        self.name = name
        self.flats = flats
        self.num_entered = 0
        self.num_begun = 0
        self.num_expected = 1
        self._works: list[dist.Work] | None = None
        self._is_shown = False

    def start(self) -> None:
        """Start to gather, unless that was done."""
        if self._works is None:
            self._works = [flat.start() for flat in self.flats]

    def gather(self) -> None:
        """Return when the modules have their parameters."""
        self.start()
        if not self._is_shown:
            self._wait()
            for flat in self.flats:
                flat.show()
            self._is_shown = True

    def _wait(self) -> None:
        for flat, work in zip(self.flats, self._works or (), strict=True):
            flat.finish(work)

    def release(self, *, keeps_memory: bool = False) -> None:
        """Let go of what is gathered; but for its memory, perhaps, with the values in it."""
        if self._works is not None:
            if not self._is_shown:
                self._wait()
            for flat in self.flats:
                flat.hide()
            self._works, self._is_shown = None, False
        if not keeps_memory:
            for flat in self.flats:
                flat.free()

    def require_own_outputs(self, outputs: object) -> None:
        """Raises:
        NotGatheredError: one of ``outputs`` is a parameter, or a view of one.
        """
        for tensor in tensors_in(outputs):
            if tensor.layout is torch.strided and any(flat.lends(tensor) for flat in self.flats):
                raise NotGatheredError(
                    f"{self.name!r} is sharded, and returns a parameter, or a view of one, of shape "
                    f"{tuple(tensor.shape)}: its memory is let go of now; return a clone()"
                )


def units_of(module: nn.Module, kinds: object) -> dict[str, nn.Module]:
    """Modules that are units of their own, by name; the outermost ones.

    Args:
        module: the whole.
        kinds: those of this class, or of these; None takes the items of every ``ModuleList`` and ``Sequential``.

    Raises:
        ArgumentError: these are no classes of modules, or there is none of them in the whole.
    """
    classes = tuple(kinds) if isinstance(kinds, (tuple, list)) else (kinds,)
    for kind in classes:
        if kinds is not None and not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise ArgumentError(f"units={kinds!r}; it must be a class of modules, such as nn.Linear, or several")
    found: dict[str, nn.Module] = {}

    def look(parent: nn.Module, prefix: str) -> None:
        for name, child in parent.named_children():
            if kinds is None:
                is_unit = isinstance(parent, (nn.ModuleList, nn.Sequential)) and not isinstance(
                    child, (nn.ModuleList, nn.Sequential)
                )
            else:
                is_unit = isinstance(child, classes)
            if is_unit and any(True for _ in child.parameters()):
                if not any(child is one for one in found.values()):
                    found[prefix + name] = child
            else:
                look(child, f"{prefix}{name}.")

    look(module, "")
    if kinds is not None and not found:
        raise ArgumentError(f"the module has none of units={', '.join(kind.__name__ for kind in classes)}")
    return found


class FlatKind(NamedTuple):
    """What the parameters of a flat tensor have in common.

    Attributes:
        dtype: of the parameters.
        computed: the dtype in which they are gathered.
        is_trained: whether they require gradients.
    """

    dtype: torch.dtype
    computed: torch.dtype
    is_trained: bool


def parameters_by_unit(
    module: nn.Module, modules: Mapping[str, nn.Module], param_dtype: torch.dtype | None
) -> dict[str, dict[FlatKind, list[tuple[str, nn.Parameter]]]]:
    """Names and parameters of each unit, by what those of a flat tensor have in common. First, as "", comes what is in
    none of ``modules``, or in several."""
    unit_of = {id(child): name for name, one in modules.items() for child in one.modules()}
    units: dict[int, str] = {}
    beside_statistics = set()
    for one in module.modules():
        for parameter in one._parameters.values():
            if isinstance(one, nn.modules.batchnorm._NormBase):
                beside_statistics.add(id(parameter))
            name = unit_of.get(id(one), "")
            units[id(parameter)] = name if units.get(id(parameter), name) == name else ""
    found: dict[str, dict[FlatKind, list[tuple[str, nn.Parameter]]]] = {"": {}}
    for name, parameter in module.named_parameters():
        of_unit = found.setdefault(units[id(parameter)], {})
        computed = parameter.dtype
        if param_dtype is not None and computed.is_floating_point and id(parameter) not in beside_statistics:
            computed = param_dtype
        kind = FlatKind(parameter.dtype, computed, parameter.requires_grad)
        of_unit.setdefault(kind, []).append((name, parameter))
    return found
