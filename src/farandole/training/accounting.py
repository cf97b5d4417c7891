"""What training needs on a rank: counted while it runs, and by formula.

Memory is counted by its storages, at every gradient and after every step: what parameters, gradients and the
optimizer's state hold, and buffers, in which gradients are on their way between ranks. Activations are not: they are
the model's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from farandole.errors import ArgumentError
from farandole.training.bucket import Kind
from farandole.training.bucket_size import DEFAULT_BYTES
from farandole.training.data_parallel import DataParallel
from farandole.training.fully_sharded import FullyShardedParallel
from farandole.training.layout import Layout, into_buckets
from farandole.training.shards import MAX_ON_THE_WAY, master_dtype
from farandole.training.units import parameters_by_unit, units_of
from farandole.training.zero import ZeroOptimizer

__all__ = ["MemoryUse", "PeakMemory", "expected_memory", "memory_use"]

_KINDS: Sequence[Kind] = ("parameters", "gradients", "optimizer", "buffers")


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes on a rank.

    Attributes:
        parameters: of the model, its persistent buffers too, and what the optimizer has of them in 32 bits.
        gradients: and the flat memory that they lie in.
        optimizer: its state.
        buffers: for gradients on their way.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """Of all kinds."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def memory_use(model: DataParallel | FullyShardedParallel, optimizer: torch.optim.Optimizer) -> MemoryUse:
    """What this rank holds now."""
    found: dict[int, tuple[Kind, int]] = {}
    for kind, tensor in _held(model, optimizer):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            start = storage.data_ptr()  # registered memory: many tensors, each with a storage of its own
            found.setdefault(start, (kind, storage.nbytes()))
    return MemoryUse(**{kind: sum(size for one, size in found.values() if one == kind) for kind in _KINDS})


def expected_memory(
    module: nn.Module,
    stage: int,
    world_size: int,
    *,
    num_states: int = 2,
    bucket_bytes: int = DEFAULT_BYTES,
    units: type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
    param_dtype: torch.dtype | None = None,
) -> MemoryUse:
    """The most that a rank will hold of each kind, by formula; before anything is wrapped, and on any machine.

    With P bytes of parameters of 32 bits on N ranks, and k states of the optimizer for each element:

    ===== ========== ========= ====== =============================================
    stage parameters gradients states buffers
    ===== ========== ========= ====== =============================================
    0     P          P         k P    0
    1     P          P + P/N   k P/N  0
    2     P          P/N       k P/N  2 buckets, of the largest size
    3     P/N + G    P/N       k P/N  G: what is in no unit, and the 2 largest units
    ===== ========== ========= ====== =============================================

    A bucket is filled while another one is on its way. One more may wait for its last gradient, if the model uses
    parameters in another order than it names them.

    Parameters of 16 bits have parts of 32 bits besides, from stage 1 on, and so have their gradients and states. Frozen
    parameters have neither gradients nor states. Parameters and parts begin at multiples of 64 elements, so each may be
    up to 63 longer; at stage 0, where gradients alone are, that is not counted, nor are the buffers that
    ``reproducible`` and ``wire_dtype`` take. Where several backwards accumulate, stage 0 has a second copy of
    gradients besides, from then on; and for a moment when buckets are arranged anew, after the second backward. Within
    ``no_sync``, stages 1 to 3 have whole gradients besides.

    Args:
        module: to be trained; it may be on the meta device.
        stage: of ZeRO; 0 is `DataParallel`, 3 `FullyShardedParallel`.
        world_size: N.
        num_states: k: 2 for Adam, 1 for SGD with momentum, 0 for SGD.
        bucket_bytes: as given to `DataParallel`, for stage 2.
        units: as given to `FullyShardedParallel`.
        param_dtype: likewise.
    """
    if stage not in range(4) or type(world_size) is not int or world_size < 1:
        raise ArgumentError(f"stage={stage!r}, world_size={world_size!r}; the first is 0 to 3, the other at least 1")
    buffers = sum(one.nbytes for one in module.buffers())
    if stage == 3:
        return _expected_sharded(module, world_size, num_states, units, param_dtype, buffers)
    trained = [one for one in module.parameters() if one.requires_grad]
    whole = sum(one.nbytes for one in module.parameters()) + buffers
    size = sum(one.nbytes for one in trained)
    if stage == 0:
        return MemoryUse(whole, size, num_states * size, 0)
    reverse = trained[::-1]
    flats = [_Sizes.of([reverse[one] for one in some], world_size) for some in into_buckets(reverse, bucket_bytes)]
    parts = sum(one.part for one in flats)
    whole += sum(one.flat for one in flats) - size + sum(one.part for one in flats if one.has_master)
    if stage == 1:
        return MemoryUse(whole, parts + sum(one.flat for one in flats), num_states * parts, 0)
    return MemoryUse(
        whole, parts, num_states * parts, min(len(flats), MAX_ON_THE_WAY) * max((one.flat for one in flats), default=0)
    )


class _Sizes(NamedTuple):
    """Bytes of parameters that lie in one flat tensor: of that, and of a part as an optimizer has it."""

    flat: int
    part: int
    has_master: bool

    @staticmethod
    def of(parameters: Sequence[Tensor], world_size: int, computed: torch.dtype | None = None) -> _Sizes:
        layout = Layout([one.shape for one in parameters], world_size)
        used, master = computed or parameters[0].dtype, master_dtype(parameters[0].dtype)
        return _Sizes(layout.flat_numel * used.itemsize, layout.part_numel * master.itemsize, master != used)


def _expected_sharded(
    module: nn.Module,
    world_size: int,
    num_states: int,
    units: type[nn.Module] | tuple[type[nn.Module], ...] | None,
    param_dtype: torch.dtype | None,
    buffers: int,
) -> MemoryUse:
    by_unit = [
        [
            (_Sizes.of([one for _, one in some], world_size, kind.computed), kind.is_trained)
            for kind, some in by_kind.items()
        ]
        for by_kind in parameters_by_unit(module, units_of(module, units), param_dtype).values()
    ]
    trained = [[one for one, is_trained in unit if is_trained] for unit in by_unit]
    parts = sum(one.part for unit in trained for one in unit)
    owned = sum(one.part for unit in by_unit for one, _ in unit)
    gathered = _rest_and_two_largest([[one for one, _ in unit] for unit in by_unit])
    return MemoryUse(owned + gathered + buffers, parts, num_states * parts, _rest_and_two_largest(trained))


def _rest_and_two_largest(units: Sequence[Sequence[_Sizes]]) -> int:
    rest, *others = [sum(one.flat for one in unit) for unit in units]
    return rest + sum(sorted(others)[-MAX_ON_THE_WAY:])


def _held(
    model: DataParallel | FullyShardedParallel, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Kind, Tensor]]:
    yield from model.held()
    if isinstance(optimizer, ZeroOptimizer):
        yield from optimizer.held()
    for state in optimizer.state.values():
        yield from (("optimizer", one) for one in state.values() if isinstance(one, Tensor))


class PeakMemory:
    """Counts what a rank holds at each gradient and after each step, within a ``with``.

    Args:
        model: as it is wrapped.
        optimizer: its own.

    Attributes:
        most: of each kind the most that was held; these may be of different moments.
        most_total: the most that was held at once.
    """

    def __init__(self, model: DataParallel | FullyShardedParallel, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._handles: list[Any] = []
        self.most = MemoryUse()
        self.most_total = 0

    def look(self) -> None:
        """Count now."""
        now = memory_use(self._model, self._optimizer)
        most = {kind: max(getattr(now, kind), getattr(self.most, kind)) for kind in _KINDS}
        self.most = MemoryUse(**most)
        self.most_total = max(self.most_total, now.total)

    def __enter__(self) -> PeakMemory:
        parameters: list[nn.Parameter] = self._model.gradient_sync.parameters
        self._handles = [one.register_post_accumulate_grad_hook(lambda _: self.look()) for one in parameters]
        self._handles.append(self._optimizer.register_step_post_hook(lambda *_: self.look()))
        return self

    def __exit__(self, *_: object) -> None:
        self.look()
        for handle in self._handles:
            handle.remove()
