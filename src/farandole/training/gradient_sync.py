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

Where a forward or a backward fails on some ranks, the others wait for sums. So a rank that has failed is through with
it before its next collective: it starts what is left, tells that it has failed, and all ranks let go of all gradients.
What fails between the two is not seen on its rank, whose next backward meets one of the others that is a step behind:
that is seen by what ranks tell (see `farandole.training.agreement`), and nothing is summed after that.
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
from farandole.training.agreement import Agreed, Starts, told
from farandole.training.bucket import Bucket
from farandole.training.errors import (
    BackwardFailedError,
    OutOfStepError,
    SparseGradientError,
    UnusedParametersError,
)
from farandole.training.outputs import is_computed, tensors_in
from farandole.training.recorded import started, wait_for
from farandole.training.stepping import refuse_whole, watch_steps

__all__ = ["GradientSync", "Round", "is_in_backward", "settle_group", "weakly"]

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


def is_in_backward() -> bool:
    """Whether autograd computes gradients now, in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


@dataclasses.dataclass
class Round:
    """What happened in a backward.

    Attributes:
        ready_s: per parameter when it was taken, in seconds since the first one; None if it was not.
        order: buckets, in the order in which they could be started.
        waited_s: how long backward waited for sums when it was through itself.
        is_delivered: whether gradients were summed, and not given up.
        active_rank: the first one that took part with gradients.
    """

    ready_s: list[float | None]
    order: list[int]
    waited_s: float = 0.0
    is_delivered: bool = False
    active_rank: int = 0


@dataclasses.dataclass
class _Forward:
    """One whose backward is to come.

    Attributes:
        round_number: that of the next sum.
        is_reached: whether a backward was there.
    """

    round_number: int
    is_reached: bool = False


def settle_group(group: dist.ProcessGroup) -> None:
    """Be through with each forward and backward that has failed on this rank, of any model, as the others wait for it;
    in the order in which the models were wrapped, the same on all ranks."""
    starts = Starts.of(group)
    if not starts.problem and not is_in_backward():
        for sync in sorted(starts.syncs, key=lambda one: one._number):
            sync._end(has_failed=True)


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
        leaves_gradients: whether sums become gradients of the parameters.
        on_open: called when a backward begins that is summed, with whether this rank takes part with gradients.
        on_round: called after each backward that was to be summed, when all is delivered or given up.
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
        self.leaves_gradients = True
        self.on_open: Callable[[bool], None] = lambda _: None
        self.on_round: Callable[[Round], None] = lambda _: None
        self._group = group
        self._starts = Starts.of(group)
        self._number = self._starts.num_models
        self._starts.num_models += 1
        self._starts.syncs.add(self)
        self._starts.problem, self._starts.digest = "", 0  # all ranks have come here
        self._unused = unused
        self._sparse = sparse
        self._is_reproducible = reproducible
        self._starts_when_full = starts_when_full
        # How often each accumulates in a backward; so long as that is not known, 0 stands for "at the end".
        self._expected = [0 if reproducible else 1] * len(self.parameters)
        self._round_number = 0
        self._num_reached = self._num_unreached = 0  # forwards, since the last sum
        self._awaits_end = False
        self._is_due = False  # a sum: the other ranks make one
        self._is_incomplete = False  # what is left of a backward of this rank alone, which has failed
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
        watch_steps(self.parameters, self)

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
        self._starts.syncs.discard(self)
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

    def watch(self, outputs: object, *, is_of_all: bool) -> None:
        """Know the backward of ``outputs`` from its start: its end is that of backward as a whole, where the backward
        of a checkpointed part ends earlier.

        Args:
            outputs: of a forward.
            is_of_all: whether all ranks make it, and a backward after it.
        """
        forward = _Forward(self._round_number, is_reached=not (is_of_all and self.enabled))
        self._num_unreached += not forward.is_reached
        for tensor in tensors_in(outputs):
            if is_computed(tensor):
                tensor.register_hook(lambda _: self._reach(forward))

    def forward_failed(self) -> None:
        """One that all ranks make, and a backward after it."""
        self._is_due = self.enabled

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See `farandole.training.stepping.Watcher`: a step is after a backward, which may have failed.

        Raises:
            ArgumentError: the gradients are elsewhere.
        """
        if not self.leaves_gradients:
            refuse_whole(optimizer)
        settle_group(self._group)

    def _require_in_step(self) -> None:
        if self._starts.problem:
            raise OutOfStepError(self._starts.problem)

    def settle(self) -> None:
        """If the last forward or backward of any model in the group has failed on this rank, be through with it; before
        the next collective.

        Raises:
            ArgumentError: another one takes the gradients.
            OutOfStepError: the ranks were found to be out of step.
        """
        self._require_in_step()
        if self._is_replaced:
            raise ArgumentError(
                "the module was wrapped once more, or shares parameters with one that was; use the wrapper made last"
            )
        settle_group(self._group)

    def shadow(self) -> None:
        """Take part in a backward of the other ranks, with no gradients."""
        self._open(is_active=False)
        self._is_open = False
        self._close(is_active=False)

    # -- in backward -----------------------------------------------------------------------------------------------

    def _reach(self, forward: _Forward) -> None:
        if not forward.is_reached:
            forward.is_reached = True
            if forward.round_number == self._round_number:
                self._num_unreached -= 1
                self._num_reached += 1
        if not self._awaits_end:
            self._is_due = self.enabled and self._accumulates(torch._C._current_autograd_node())
            self._await_end()

    def _accumulates(self, node: torch.autograd.graph.Node) -> bool:
        """Whether the backward that is at ``node`` is to be summed: it makes gradients of parameters, or might have on
        another rank. Where autograd makes those of other tensors alone, it does not."""
        if any(map(_is_executed, self._nodes)):
            return True
        own, seen, waiting = {*self._nodes}, {node}, [node]
        is_executed = False
        while waiting:
            node = waiting.pop()
            if node in own:
                return False
            following = {one for one, _ in node.next_functions if one is not None} - seen
            is_executed |= not following and _is_executed(node)
            seen |= following
            waiting += following
        return is_executed

    def _await_end(self) -> None:
        if not self._awaits_end:
            self._awaits_end = True
            self._backward_began_ns = timeline.moment()
            torch.autograd.Variable._execution_engine.queue_callback(self._at_end)

    def _before_accumulation(self) -> None:
        if not self._is_open:
            self._await_end()
            self._open()

    def _open(self, *, is_active: bool = True) -> None:
        self._require_in_step()
        self._is_open = True
        self._is_summed = self.enabled or self._is_due
        with torch.no_grad():  # it is enabled where backward keeps a graph
            for bucket in self.buckets:
                bucket.begin()
            self._is_incomplete = self._is_incomplete and any(
                one.grad is not None and bool(one.grad.any()) for one in self.parameters
            )
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
            with torch.no_grad():
                self._take(index)

    def _take(self, index: int) -> None:
        parameter = self.parameters[index]
        gradient = parameter.grad
        number, position = self._bucket_of[index]
        is_taken = self._round.ready_s[index] is not None
        # What is not taken stays, and is late. So it is if the order matters: buckets must not.
        if gradient is None or number < self._num_started or (is_taken and self._is_reproducible):
            return
        if gradient.is_sparse:
            gradient = self._densified(index, gradient)
        parameter.grad = None
        self.buckets[number].take(position, gradient)
        if not is_taken:
            self._round.ready_s[index] = time.perf_counter() - self._first_s
            self._num_missing[number] -= 1
            if self._num_missing[number] == 0 and self._starts_when_full:
                self._has_come(number)

    def may_start(self, buckets: Sequence[Bucket]) -> None:
        """In a backward: no more gradients are to come for these. All ranks call this at the same place among their
        collectives, also one that has no gradients yet."""
        if self._is_due and not self._is_open:
            self._open()
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
            self._starts.add(self._number, self._num_started)
            self._num_started += 1

    def _at_end(self) -> None:
        self._end(has_failed=False)
        timeline.add("compute", "backward", self._backward_began_ns)

    def _end(self, *, has_failed: bool) -> None:
        if self._is_due and not self._is_open:
            self._open()
        self._awaits_end = self._is_due = False
        if not self._is_open:
            return
        self._is_open = False
        with torch.no_grad():
            if self._is_summed:
                self._close(is_active=True, has_failed=has_failed)
            else:
                self._is_incomplete |= has_failed
                for bucket in self.buckets:
                    bucket.pause()

    def _close(self, *, is_active: bool, has_failed: bool = False) -> None:
        """Start what is left, wait for all, and deliver."""
        problem = None if has_failed else self._what_is_lost() or self._take_rest()
        has_failed |= problem is not None
        self._start_while(lambda _: True)
        has = [
            seconds is not None or one.grad is not None
            for seconds, one in zip(self._round.ready_s, self.parameters, strict=True)
        ]
        late = [any(self.parameters[index].grad is not None for index in bucket.indices) for bucket in self.buckets]
        own = told(
            self._group,
            late=late,
            has=has,
            num_reached=self._num_reached,
            num_unreached=self._num_unreached,
            digest=self._starts.digest,
            is_active=is_active,
            has_failed=has_failed,
        )
        self._num_reached = self._num_unreached = self._starts.digest = 0
        self._round_number += 1
        total = torch.tensor(own, dtype=torch.int32, device=self._device())
        work = dist.all_reduce(total, group=self._group, async_op=True)
        started(work, "all_reduce", total, self._group)
        begun_s = time.perf_counter()
        for bucket in self.buckets:
            bucket.advance()
        for bucket in self.buckets:
            bucket.wait()
        wait_for(work)
        self._round.waited_s = time.perf_counter() - begun_s
        agreed = Agreed.of(total.tolist(), len(late), len(has), self._group.size())
        left = self._let_go_of_late()
        if failure := agreed.what_failed():
            self._give_up()
            if problem is not None:
                raise problem
            if not has_failed:
                raise BackwardFailedError(failure)
            return
        self._starts.problem = agreed.why_out_of_step()
        if self._starts.problem:
            self._give_up()
            self._require_in_step()
        self._deliver(self.buckets, agreed.num_having)
        again = [bucket for bucket, ranks in zip(self.buckets, agreed.num_late, strict=True) if ranks]
        for bucket in again:
            bucket.begin()
            for position, index in enumerate(bucket.indices):
                if index in left:
                    bucket.take(position, left[index])
            bucket.start()
        for bucket in again:
            bucket.wait()
        self._deliver(again, agreed.num_having)
        self._expected = [max(1, times) for times in self._num_accumulated]
        self._round.is_delivered = True
        self._round.active_rank = agreed.active_rank
        self.on_round(self._round)
        if self._unused == "error" and any(agreed.num_lacking):
            lacking = [index for index, one in enumerate(has) if is_active and not one]
            raise UnusedParametersError(self._without_gradient(lacking))

    def _what_is_lost(self) -> BackwardFailedError | None:
        if not self._is_incomplete:
            return None
        return BackwardFailedError(
            "a backward within no_sync() failed on this rank, and left gradients of some layers alone, so no rank of "
            "the group has gradients; let go of them with zero_grad() where it failed, and accumulate anew"
        )

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

    def _give_up(self) -> None:
        self._is_incomplete = False
        for bucket in self.buckets:
            bucket.abandon()
        self.on_round(self._round)

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

    def _without_gradient(self, lacking: Sequence[int]) -> str:
        """What is wrong, on all ranks; all call this, each with the parameters that it has no gradient of."""
        told: list[Sequence[int]] = [()] * self._group.size()
        dist.all_gather_object(told, lacking, group=self._group)
        ranks_of: dict[int, list[int]] = {}
        for rank, indices in enumerate(told):
            for index in indices:
                ranks_of.setdefault(index, []).append(rank)
        named = [
            f"{self.names[index]!r} on "
            f"{'all ranks' if len(ranks) == self._group.size() else timeline.ranks_in_words(ranks)}"
            for index, ranks in sorted(ranks_of.items())
        ]
        more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
        return (
            f"parameters without a gradient in this backward: {', '.join(named[:_MAX_NAMED])}{more}; if the loss is "
            f"not meant to depend on them, freeze them with requires_grad_(False) before they are wrapped, or let "
            f"them count as zero with unused='zeros'"
        )


def _is_executed(node: torch.autograd.graph.Node) -> bool:
    """Whether this backward comes to ``node``, to go on from there."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # its gradient is handed to the caller of autograd.grad()
        return False
