"""Gradients are summed while backward makes the others.

Parameters are dealt out to *buckets*. As backward goes on, autograd accumulates the gradient of one parameter after the
other; each is *taken* into its bucket, and a bucket that has all of its gradients is *started*, unless one before it in
the order of buckets, which is the same on all ranks, has not been. (Where other collectives are made in backward, it
is started at the same place among them on all ranks, with the gradients it has.) When backward is through, what is
missing is left out, the rest is started, and one small all_reduce tells all ranks which parameters had a gradient
where. Then the buckets are waited for, and deliver.

A parameter may accumulate more than once in a backward: one whose uses are checkpointed by themselves. It is taken when
it has accumulated as often as in the backward before. What accumulates after its bucket was started is *late*: if any
rank has such gradients, the bucket goes another round. That adds up in another order; where it matters, the first
backward takes everything at its end.

Where backward fails on some ranks, the others wait for sums. So a rank whose backward has failed is through with it
before its next forward: it starts what is left, tells that it has failed, and all ranks let go of all gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from farandole import timeline
from farandole.errors import ArgumentError
from farandole.torch_eager import eager
from farandole.training.bucket import Bucket
from farandole.training.errors import BackwardFailedError, SparseGradientError, UnusedParametersError
from farandole.training.outputs import is_computed, tensors_in
from farandole.training.recorded import started, wait_for

__all__ = ["GradientSync", "Round", "weakly"]

_NUM_AHEAD = 2
"""Buckets that are started before one is advanced: by then its first half is probably through."""

_MAX_NAMED = 20


_sync_of = WeakTensorKeyDictionary()
"""Who takes the gradients of a parameter: a weak reference."""


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """``method``, which does nothing once its object is gone, and does not keep it."""
    reference = weakref.WeakMethod(method)

    def call(*args: object) -> None:
        if (found := reference()) is not None:
            found(*args)

    return call


@dataclasses.dataclass
class Round:
    """What happened in a backward.

    Attributes:
        ready_s: per parameter when it was taken, in seconds since the first one; None if it was not.
        order: buckets, in the order in which they could be started.
        waited_s: how long backward waited for sums when it was through itself.
    """

    ready_s: list[float | None]
    order: list[int]
    waited_s: float = 0.0


@eager
class GradientSync:
    """Takes the gradients of parameters as backward makes them, and sums them.

    Args:
        parameters: by name; all require gradients.
        group: whose ranks sum.
        unused: "error" if every parameter must have a gradient on every rank, else "zeros".
        sparse: "error" if sparse gradients are refused, else "dense".
        reproducible: whether the order matters in which the gradients of one parameter add up.
        starts_when_full: whether a bucket is started when it has all of its gradients. That may be elsewhere on each
            rank, so there must be no other collectives in backward; else it is started by `may_start`.

    Attributes:
        enabled: whether backward sums; else it accumulates on this rank alone.
        on_open: called when a backward begins that is summed, with whether this rank takes part with gradients.
        on_round: called after each backward that has summed, when all is delivered.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        *,
        unused: str,
        sparse: str,
        reproducible: bool,
        starts_when_full: bool = True,
    ) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.buckets = ()
        self.enabled = True
        self.on_open: Callable[[bool], None] = lambda _: None
        self.on_round: Callable[[Round], None] = lambda _: None
        self._group = group
        self._unused = unused
        self._sparse = sparse
        self._starts_when_full = starts_when_full
        # How often each accumulates in a backward; so long as that is not known, 0 stands for "at the end".
        self._expected = [0 if reproducible else 1] * len(self.parameters)
        self._awaits_end = False
        self._is_open = False
        self._is_summed = False  # what is open
        self._nodes = []  # autograd itself holds them weakly
        self._handles = []
        self._is_replaced = False
        # Hooks that held this would be held by what it holds, out of sight of Python's garbage collector.
        accumulated, before_accumulation = weakly(self._accumulated), weakly(self._before_accumulation)
        for index, parameter in enumerate(self.parameters):
            if (earlier := _sync_of.get(parameter, lambda: None)()) is not None:
                earlier.let_be_replaced()
            _sync_of[parameter] = weakref.ref(self)
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            self._nodes.append(node)
            self._handles += [
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: accumulated(index)),
                node.register_prehook(lambda _: before_accumulation()),
            ]

    @property
    def buckets(self) -> Sequence[Bucket]:
        """In the order in which they are started, the same on all ranks; to be set before the first backward."""
        return self._buckets

    @buckets.setter
    def buckets(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._bucket_of = {
            index: (number, position)
            for number, bucket in enumerate(buckets)
            for position, index in enumerate(bucket.indices)
        }

    def let_be_replaced(self) -> None:
        """Take no more gradients: another one takes them."""
        self._is_replaced = True
        for handle in self._handles:
            handle.remove()

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", ()):
            handle.remove()

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Let backward accumulate on this rank alone."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def watch(self, outputs: object) -> None:
        """Know the backward of ``outputs`` from its start: its end is that of backward as a whole, where the backward
        of a checkpointed part ends earlier."""
        for tensor in tensors_in(outputs):
            if is_computed(tensor):
                tensor.register_hook(lambda _: self._await_end())

    def settle(self) -> None:
        """If the last backward has failed on this rank, be through with it; before the next collective of its step.

        Raises:
            ArgumentError: another one takes the gradients.
        """
        if self._is_replaced:
            raise ArgumentError(
                "the module was wrapped once more, or shares parameters with one that was; use the wrapper made last"
            )
        if torch._C._current_graph_task_id() != -1:
            return  # in a backward: it is not over
        if self._awaits_end and not self._is_open:
            self._open()
        self._end(has_failed=True)

    def shadow(self) -> None:
        """Take part in a backward of the other ranks, with no gradients."""
        self._open(is_active=False)
        self._is_open = False
        self._close(is_active=False)

    # -- in backward -----------------------------------------------------------------------------------------------

    def _await_end(self) -> None:
        if not self._awaits_end:
            self._awaits_end = True
            self._backward_began_ns = timeline.moment()
            torch.autograd.Variable._execution_engine.queue_callback(self._at_end)

    def _before_accumulation(self) -> None:
        if not self._is_open:
            self._await_end()
            with torch.no_grad():
                self._open()

    def _open(self, *, is_active: bool = True) -> None:
        self._is_open = True
        self._is_summed = self.enabled
        for bucket in self.buckets:
            bucket.begin()
        if self._is_summed:
            self.on_open(is_active)
        self._num_started = 0
        self._num_missing = [len(bucket.indices) for bucket in self.buckets]
        self._is_complete = [False] * len(self.buckets)
        self._num_accumulated = [0] * len(self.parameters)
        self._first_s = time.perf_counter()
        self._round = Round([None] * len(self.parameters), [])

    def _accumulated(self, index: int) -> None:
        if not self._is_summed:
            return
        self._num_accumulated[index] += 1
        if 0 < self._expected[index] <= self._num_accumulated[index]:
            with torch.no_grad():  # it is enabled where backward keeps a graph
                self._take(index)

    def _take(self, index: int) -> None:
        parameter = self.parameters[index]
        gradient = parameter.grad
        number, position = self._bucket_of[index]
        if gradient is None or number < self._num_started:
            return  # if there is one, it stays, and is late
        if gradient.is_sparse:
            gradient = self._densified(index, gradient)
        parameter.grad = None
        self.buckets[number].take(position, gradient)
        if self._round.ready_s[index] is None:
            self._round.ready_s[index] = time.perf_counter() - self._first_s
            self._num_missing[number] -= 1
            if self._num_missing[number] == 0 and self._starts_when_full:
                self._has_come(number)

    def may_start(self, buckets: Sequence[Bucket]) -> None:
        """In a backward: no more gradients are to come for these. All ranks call this at the same place among their
        collectives."""
        if self._is_open and self._is_summed and all(self._expected):
            with torch.no_grad():
                for number, bucket in enumerate(self.buckets):
                    if not self._is_complete[number] and any(bucket is one for one in buckets):
                        self._has_come(number)

    def _has_come(self, number: int) -> None:
        """The bucket of this number is started, when those before it are."""
        self._is_complete[number] = True
        self._round.order.append(number)
        self._start_while(lambda following: self._is_complete[following])

    def _densified(self, index: int, gradient: Tensor) -> Tensor:
        if self._sparse == "error":
            raise SparseGradientError(
                f"the gradient of {self.names[index]!r} is sparse; make it dense, with sparse=False where the layer is "
                f"made, or sum it as a dense one, with sparse='dense' here"
            )
        return gradient.to_dense()

    def _start_while(self, may_start: Callable[[int], bool]) -> None:
        while self._num_started < len(self.buckets) and may_start(self._num_started):
            if self._num_started >= _NUM_AHEAD:
                self.buckets[self._num_started - _NUM_AHEAD].advance()
            self.buckets[self._num_started].start()
            self._num_started += 1

    def _at_end(self) -> None:
        self._end(has_failed=False)
        timeline.add("compute", "backward", self._backward_began_ns)

    def _end(self, *, has_failed: bool) -> None:
        self._awaits_end = False
        if not self._is_open:
            return
        self._is_open = False
        with torch.no_grad():
            if self._is_summed:
                self._close(is_active=True, has_failed=has_failed)
            else:
                for bucket in self.buckets:
                    bucket.pause()

    def _close(self, *, is_active: bool, has_failed: bool = False) -> None:
        """Start what is left, wait for all, and deliver."""
        problem = None if has_failed else self._take_rest()
        has_failed |= problem is not None
        self._start_while(lambda _: True)
        has = [seconds is not None for seconds in self._round.ready_s]
        late = [any(self.parameters[index].grad is not None for index in bucket.indices) for bucket in self.buckets]
        lacks = [is_active and not one for one in has]
        failed = [has_failed and rank == self._group.rank() for rank in range(self._group.size())]
        told = torch.tensor([*late, *has, *lacks, *failed], dtype=torch.int32, device=self._device())
        work = dist.all_reduce(told, group=self._group, async_op=True)
        started(work, "all_reduce", told, self._group)
        begun_s = time.perf_counter()
        for bucket in self.buckets:
            bucket.advance()
        for bucket in self.buckets:
            bucket.wait()
        wait_for(work)
        self._round.waited_s = time.perf_counter() - begun_s
        num_late, num_having, num_lacking, have_failed = _split(
            told.tolist(), len(late), len(has), len(lacks), len(failed)
        )
        left = self._let_go_of_late()
        if any(have_failed):
            self._give_up([rank for rank, one in enumerate(have_failed) if one], is_told=not has_failed)
            if problem is not None:
                raise problem
            return
        self._deliver(self.buckets, num_having)
        again = [bucket for bucket, ranks in zip(self.buckets, num_late, strict=True) if ranks]
        for bucket in again:
            bucket.begin()
            for position, index in enumerate(bucket.indices):
                if index in left:
                    bucket.take(position, left[index])
            bucket.start()
        for bucket in again:
            bucket.wait()
        self._deliver(again, num_having)
        self._expected = [max(1, times) for times in self._num_accumulated]
        self.on_round(self._round)
        if self._unused == "error" and any(num_lacking):
            raise UnusedParametersError(self._without_gradient(num_lacking))

    def _take_rest(self) -> SparseGradientError | None:
        """What has not been taken, bucket by bucket, so that few need memory at a time; what is late stays, as dense
        gradients. Returns what this rank refuses: the others are to know of it before it is raised."""
        try:
            for number, bucket in enumerate(self.buckets):
                for index in bucket.indices:
                    if self._round.ready_s[index] is None:
                        self._take(index)
                self._start_while(number.__ge__)
            for index, one in enumerate(self.parameters):
                if one.grad is not None and one.grad.is_sparse:
                    one.grad = self._densified(index, one.grad)
        except SparseGradientError as error:
            return error
        return None

    def _give_up(self, ranks: Sequence[int], *, is_told: bool) -> None:
        for bucket in self.buckets:
            bucket.abandon()
        self.on_round(self._round)
        if is_told:
            raise BackwardFailedError(
                f"backward failed on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of the group, so "
                f"no rank has gradients; go on with the next step on all ranks, or see there what failed"
            )

    def _device(self) -> torch.device:
        return self.parameters[0].device

    def _let_go_of_late(self) -> dict[int, Tensor]:
        late = {index: one.grad for index, one in enumerate(self.parameters) if one.grad is not None}
        for index in late:
            self.parameters[index].grad = None
        return late

    def _deliver(self, buckets: Sequence[Bucket], num_having: Sequence[int]) -> None:
        for bucket in buckets:
            bucket.deliver([num_having[index] > 0 for index in bucket.indices])

    def _without_gradient(self, num_lacking: Sequence[int]) -> str:
        size = self._group.size()
        named = [
            f"{name!r} on {'all' if ranks == size else f'{ranks} of {size}'} ranks"
            for name, ranks in zip(self.names, num_lacking, strict=True)
            if ranks
        ]
        more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
        return (
            f"parameters without a gradient in this backward: {', '.join(named[:_MAX_NAMED])}{more}; if the loss is "
            f"not meant to depend on them, freeze them with requires_grad_(False) before they are wrapped, or let "
            f"them count as zero with unused='zeros'"
        )


def _split(values: Sequence[int], *lengths: int) -> Iterator[Sequence[int]]:
    at = 0
    for length in lengths:
        yield values[at : at + length]
        at += length
