"""Data parallelism: against one process, torch's own, and the plain one."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import pickle
import random
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import training_worlds
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training_worlds import (
    Checks,
    Mixed,
    Reference,
    World,
    batch,
    bits,
    close,
    delays,
    identical,
    network,
    random_backwards,
    random_seeds,
    refusal,
    squares,
    updates,
)

from farandole.errors import ArgumentError
from farandole.training import (
    BackwardFailedError,
    DataParallel,
    DifferentModelsError,
    FullyShardedParallel,
    NaiveDataParallel,
    SparseGradientError,
    UnusedParametersError,
)
from farandole.training.bucket_size import CANDIDATES_BYTES, FIRST_BYTES

check = Checks()
ADAM = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def all_batches(world: World, step: int, rows: int = 4) -> Tensor:
    return torch.cat([batch(rank, step, rows) for rank in range(world.size)])


def gradients(module: nn.Module) -> list[Tensor]:
    return [one.grad.clone() for one in module.parameters()]


# --- The right gradients ---------------------------------------------------------------------------------------------


@check(1, 2, 3, 4)
def gradients_are_those_of_one_process(world: World) -> None:
    for number, (reduction, bucket_bytes, reproducible) in enumerate(
        [
            ("mean", "auto", False),
            ("sum", 300, False),
            ("mean", 1, True),
            ("sum", 1 << 20, True),
        ]
    ):
        alone = network().double()
        wrapped = DataParallel(
            network(world.rank + number),  # rank 0's weights count
            bucket_bytes=bucket_bytes,
            group=world.group,
            reduction=reduction,
            reproducible=reproducible,
        )
        alone.load_state_dict(network(number).state_dict())
        optimizers = SGD(wrapped.parameters()), SGD(alone.parameters())
        share = 1 if reduction == "mean" else 1 / world.size
        for step in range(4):
            (squares(wrapped(batch(world.rank, step))) * share).backward()
            squares(alone(all_batches(world, step).double())).backward()
            for one in optimizers:
                updates(one)
        close(wrapped.module, alone)
        world.require_same(wrapped.parameters())


@check(2, 4)
def it_is_as_torchs_own_and_as_the_plain_one(world: World) -> None:
    wrapped = DataParallel(network(), group=world.group, bucket_bytes=400)
    theirs = DistributedDataParallel(network(), process_group=world.group)
    plain = NaiveDataParallel(network(world.rank), group=world.group)
    all_three = [(one, ADAM(one.parameters())) for one in (wrapped, theirs, plain)]
    for step in range(5):
        for model, optimizer in all_three:
            squares(model(batch(world.rank, step))).backward()
            if model is plain:
                plain.average_gradients()
            updates(optimizer)
    close(wrapped.module, theirs.module)
    close(wrapped.module, plain.module)


@check(1, 2, 3, 4)
def with_sum_the_bits_are_those_of_one_process_whatever_the_number_of_ranks(world: World) -> None:
    """Micro-batch k goes to rank k % world_size."""
    num_micro = 12
    for bucket_bytes in (1, 10_000):
        alone = network()
        wrapped = DataParallel(
            network(), group=world.group, reduction="sum", reproducible=True, bucket_bytes=bucket_bytes
        )
        optimizers = ADAM(wrapped.parameters()), ADAM(alone.parameters())
        for step in range(5):
            for index in range(num_micro):
                (squares(alone(batch(index, step))) / num_micro).backward()
                if index % world.size == world.rank:
                    (squares(wrapped(batch(index, step))) / num_micro).backward()
            for one in optimizers:
                updates(one)
        identical(wrapped.module, alone)


@check(2, 3, 4)
def random_modules_backwards_and_buckets(world: World) -> None:
    """To the bit where it is reproducible, else to rounding. Ranks go through branches in different orders, and do
    without some; backwards are summed or not, as chance has it."""
    for seed in random_seeds(world):
        rng = random.Random(seed)
        reproducible, reduction = rng.random() < 0.7, rng.choice(["mean", "sum"])
        expected = Reference(Mixed(seed), world.size, ADAM, reduction)
        wrapped = DataParallel(
            Mixed(seed),
            bucket_bytes=rng.choice([1, 300, 1000, 100_000]),
            group=world.group,
            reduction=reduction,
            unused="zeros",
            reproducible=reproducible,
        )
        optimizer = ADAM(wrapped.parameters())
        with delays(world.rank) if rng.random() < 0.5 else contextlib.nullcontext():
            for step in range(3):
                random_backwards(world, rng, wrapped, expected, step)
                for one, other in zip(wrapped.parameters(), expected.module.parameters(), strict=True):
                    assert (one.grad is None) == (other.grad is None)
                expected.step()
                updates(optimizer)
        if reproducible:
            identical(wrapped.module, expected.module)
        close(wrapped.module, expected.module, 2e-5)
        world.require_same(wrapped.parameters())


@check(2, 3)
def batches_of_different_sizes_and_accumulation(world: World) -> None:
    """The formula of the docstring: with the sum, each loss is divided by the size of the whole batch."""
    rows = [4, 12, 1][: world.size]
    for reduction in ("mean", "sum"):
        alone = network().double()
        wrapped = DataParallel(network(), group=world.group, reduction=reduction)
        total = 2 * sum(rows)
        for accumulated in range(2):
            for rank, count in enumerate(rows):
                (alone(batch(rank, accumulated, count).double()) ** 2).sum().div(total).backward()
            share = total if reduction == "sum" else total / world.size
            with wrapped.no_sync() if accumulated == 0 else contextlib.nullcontext():
                (wrapped(batch(world.rank, accumulated, rows[world.rank])) ** 2).sum().div(share).backward()
        for one, other in zip(wrapped.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad.float())


@check(2, 3)
def what_accumulates(world: World) -> None:
    """Summed backwards and those of this rank alone, in all orders, with gradients let go of in between."""
    for pattern in ("ss", "nns", "sns", "snns", "s0s", "n0s", "sn0s", "sz", "szs", "nzs", "snzs", "sn0ns"):
        expected = Reference(network(), world.size, SGD)
        wrapped = DataParallel(network(), group=world.group, bucket_bytes=300, reproducible=True)
        for number, letter in enumerate(pattern):
            if letter in "0z":
                wrapped.zero_grad(set_to_none=letter == "0")
                for one in [expected.module, *expected.ranks]:
                    one.zero_grad()
                continue
            for rank in range(world.size):
                expected.backward(rank, lambda model, r=rank, n=number: squares(model(batch(r, n))))
            with wrapped.no_sync() if letter == "n" else contextlib.nullcontext():
                squares(wrapped(batch(world.rank, number))).backward()
            if letter == "s":
                expected.sum()
        for one, other in zip(wrapped.parameters(), expected.module.parameters(), strict=True):
            wanted = torch.zeros_like(one) if other.grad is None else other.grad
            torch.testing.assert_close(one.grad, wanted, rtol=0, atol=0, msg=lambda said, p=pattern: p + said)


@check(2, 4)
def clipping_by_global_norm(world: World) -> None:
    alone, wrapped = network().double(), DataParallel(network(), group=world.group)
    squares(wrapped(batch(world.rank, 0))).backward()
    squares(alone(all_batches(world, 0).double())).backward()
    norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (wrapped, alone)]
    torch.testing.assert_close(norms[0].double(), norms[1], rtol=1e-5, atol=0)
    world.require_same(gradients(wrapped))


# --- Parameters of all kinds -----------------------------------------------------------------------------------------


class Kinds(nn.Module):
    """Dtypes, strides, and shapes with no elements."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        random_ = partial(torch.randn, generator=generator)
        self.empty_first = nn.Parameter(torch.zeros(0))
        self.convolution = nn.Conv2d(3, 5, 1).to(memory_format=torch.channels_last)
        self.wide_convolution = nn.Conv2d(5, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(random_(4, 6).t())
        self.with_gaps = nn.Parameter(random_(6, 8)[:, ::2])
        self.spectrum = nn.Parameter(torch.view_as_complex(random_(6, 2)))
        self.offset = nn.Parameter(random_(3, dtype=torch.float64))
        self.scalar = nn.Parameter(random_(()))
        self.empty_last = nn.Parameter(torch.zeros(3, 0))
        for one in self.parameters():
            with torch.no_grad():
                one.copy_(0.4 * random_(one.shape, dtype=one.dtype))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.wide_convolution(torch.relu(self.convolution(images))).mean((2, 3))
        hidden = hidden @ self.transposed.t() @ self.with_gaps
        hidden = torch.fft.ifft(torch.fft.fft(hidden @ self.transposed.t()) * self.spectrum).real * self.scalar
        return hidden + self.offset.sum() + self.empty_first.sum() + self.empty_last.sum()


@check(1, 2, 3)
def parameters_of_all_kinds(world: World) -> None:
    def images(rank: int, step: int) -> Tensor:
        return batch(rank, step, 2, 48).view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)

    for reproducible, bucket_bytes in ((True, 1), (False, 1), (True, 100), (False, "auto")):
        expected = Reference(Kinds(), world.size, SGD, copies=[Kinds() for _ in range(world.size)])
        wrapped = DataParallel(Kinds(), group=world.group, reproducible=reproducible, bucket_bytes=bucket_bytes)
        optimizer = SGD(wrapped.parameters())
        for step in range(4):
            for rank in range(world.size):
                expected.backward(rank, lambda model, r=rank, s=step: squares(model(images(r, s))))
            squares(wrapped(images(world.rank, step))).backward()
            expected.sum()
            assert wrapped.module.convolution.weight.grad.stride() == wrapped.module.convolution.weight.stride()
            assert wrapped.module.transposed.grad.stride() == wrapped.module.transposed.stride()
            expected.step()
            updates(optimizer)
        for (name, one), other in zip(wrapped.module.named_parameters(), expected.module.parameters(), strict=True):
            torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-4, atol=1e-5)
            assert not reproducible or torch.equal(one, other), name


@check(2, 4)
def sixteen_bit_gradients_are_summed_in_32(world: World) -> None:
    """No sum that is too large on the way, and none that vanishes."""
    for dtype, values in (
        (torch.float16, [40000.0, 1e-7, 1.0]),
        (torch.bfloat16, [1.0, 1e-3, 5e37]),
    ):
        one = nn.Linear(3, 1, bias=False).to(dtype)
        wrapped = DataParallel(one, group=world.group, reproducible=True)
        given = torch.tensor([values], dtype=dtype)
        wrapped(given).sum().backward()
        assert torch.equal(one.weight.grad, given)


@check(2, 3)
def tied_weights_and_a_layer_that_is_used_again(world: World) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(11, 6)
            self.inner = nn.Linear(6, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, words: Tensor, times: int) -> Tensor:
            hidden = self.embedding(words)
            for _ in range(times):
                hidden = torch.tanh(self.inner(hidden))
            return self.head(hidden)

    expected = Reference(Tied(), world.size, ADAM)
    wrapped = DataParallel(Tied(), group=world.group, reproducible=True, bucket_bytes=200)
    assert len(list(wrapped.parameters())) == 3
    optimizer = ADAM(wrapped.parameters())
    for step in range(4):
        for rank in range(world.size):
            words, times = torch.arange(rank, rank + 5) % 11, 1 + (rank + step) % 3

            def loss_of(model, words=words, times=times):
                return F.cross_entropy(model(words, times), (words + 1) % 11)

            expected.backward(rank, loss_of)
            if rank == world.rank:
                loss_of(wrapped).backward()
        expected.sum()
        expected.step()
        updates(optimizer)
    identical(wrapped.module, expected.module)


@check(2, 3)
def checkpoints_and_layers_called_again(world: World) -> None:
    """Each use of a layer may be recomputed by itself, and then accumulates by itself: how often differs between
    backwards, and between ranks."""

    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.block, self.last = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 3)

        def forward(self, inputs: Tensor, uses: list[bool | None]) -> dict[str, Tensor]:
            hidden = self.first(inputs)
            for is_reentrant in uses:
                if is_reentrant is None:
                    hidden = torch.tanh(self.block(hidden))
                else:
                    hidden = checkpoint(lambda h: torch.tanh(self.block(h)), hidden, use_reentrant=is_reentrant)
            return {"outputs": self.last(hidden)}

    all_uses = [
        [None],
        [True, True],
        [True],
        [True, True, True],
        [False, False],
        [True, None, False, True],
        [None, None],
    ]
    expected = Reference(Repeats(), world.size, SGD)
    wrapped = DataParallel(Repeats(), group=world.group, reproducible=True, bucket_bytes=1)
    optimizer = SGD(wrapped.parameters())
    for step in range(12):
        for rank in range(world.size):
            uses = all_uses[step % 7] if step < 7 else all_uses[(step + rank) % 7]

            def loss_of(model, rank=rank, step=step, uses=uses):
                return squares(model(batch(rank, step), uses)["outputs"])

            expected.backward(rank, loss_of)
            if rank == world.rank:
                loss_of(wrapped).backward()
        expected.sum()
        for one, other in zip(wrapped.parameters(), expected.module.parameters(), strict=True):
            # Late gradients are added after those of other ranks that were not late.
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
        expected.step()
        updates(optimizer)
    close(wrapped.module, expected.module)
    world.require_same(wrapped.parameters())


@check(2)
def the_wrapper_itself_may_be_checkpointed(world: World) -> None:
    for is_reentrant in (True, False):
        expected = Reference(network(), world.size, SGD)
        wrapped = DataParallel(network(), group=world.group, reproducible=True, bucket_bytes=1)
        for step in range(3):
            for rank in range(world.size):
                expected.backward(rank, lambda model, r=rank, s=step: squares(model(batch(r, s))))
            inputs = batch(world.rank, step).requires_grad_()
            squares(checkpoint(wrapped, inputs, use_reentrant=is_reentrant)).backward()
        expected.sum()
        for one, other in zip(wrapped.parameters(), expected.module.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


@check(2, 3)
def sparse_gradients(world: World) -> None:
    class Words(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words = nn.Embedding(7, 4, sparse=sparse, padding_idx=0)
            self.unused = nn.Embedding(5, 4, sparse=sparse)
            self.last = nn.Linear(4, 2)

        def forward(self, words: Tensor) -> Tensor:
            return self.last(self.words(words)) if len(words) else self.last(torch.ones(1, 4))

    said = refusal(lambda: DataParallel(Words(True), group=world.group), ArgumentError)
    assert "'words'" in said
    assert "sparse='dense'" in said
    expected = Reference(Words(False), world.size, SGD)
    wrapped = DataParallel(Words(True), group=world.group, sparse="dense", unused="zeros", reproducible=True)
    optimizer = SGD(wrapped.parameters())
    # Rows that several ranks have, padding alone on one rank, none on another, and on all.
    for step, words in enumerate([[[1, 1, 2], [1, 6], [3]], [[0, 0], [5], []], [[], [], []], [[2], [2], [2]]]):
        for rank in range(world.size):
            some = torch.tensor(words[rank], dtype=torch.int64)
            expected.backward(rank, lambda model, some=some: squares(model(some)))
            if rank == world.rank:
                with wrapped.no_sync() if step == 0 else contextlib.nullcontext():
                    squares(wrapped(some)).backward()
        if step == 0:
            continue
        expected.sum()
        assert wrapped.module.unused.weight.grad is None
        assert (wrapped.module.words.weight.grad is None) == (step == 2)
        expected.step()
        updates(optimizer)
    identical(wrapped.module, expected.module)


@check(2)
def a_sparse_gradient_of_no_layer_is_refused_in_backward(world: World) -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(5, 3))

        def forward(self, words: Tensor) -> Tensor:
            return F.embedding(words, self.table, sparse=True)

    wrapped = DataParallel(Hidden(), group=world.group)
    said = refusal(lambda: wrapped(torch.tensor([1, 2])).sum().backward(), SparseGradientError)
    assert "'table'" in said
    assert "sparse='dense'" in said


@check(2, 3)
def a_sparse_gradient_on_one_rank_alone_is_told_to_all(world: World) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(5, 3))

        def forward(self, word: int, *, sparse: bool) -> Tensor:
            return F.embedding(torch.tensor([word]), self.table, sparse=sparse).sum() * (word + 1)

    for reproducible in (False, True):
        wrapped = DataParallel(Table(), group=world.group, reproducible=reproducible)
        for _ in range(2):
            loss = wrapped(0, sparse=world.rank == 0)
            if world.rank == 0:
                assert "'table'" in refusal(loss.backward, SparseGradientError)
            else:
                assert "failed on rank 0" in refusal(loss.backward, BackwardFailedError)
            wrapped(world.rank, sparse=False).backward()
            expected = torch.zeros(5, 3)
            for rank in range(world.size):
                expected[rank] = (rank + 1) / world.size
            torch.testing.assert_close(wrapped.module.table.grad, expected)
            wrapped.zero_grad()


@check(2, 3)
def sparse_gradients_that_come_late(world: World) -> None:
    """A parameter that accumulates more often on one rank than on the others."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(4, 2, sparse=True)

        def once(self, word: Tensor, values: Tensor) -> Tensor:
            return self.words(word) * values

        def forward(self, values: Tensor, times: int) -> Tensor:
            for _ in range(times):
                values = checkpoint(self.once, torch.tensor([1]), values, use_reentrant=True)
            return values.sum()

    for reproducible in (False, True):
        wrapped = DataParallel(Repeated(), group=world.group, sparse="dense", reproducible=reproducible)
        word = wrapped.module.words.weight[1].detach()
        expected = (2 * word + (world.size - 1)) / world.size
        for _ in range(3):
            wrapped.zero_grad()
            wrapped(torch.ones(1, 2, requires_grad=True), 2 if world.rank == 0 else 1).backward()
            torch.testing.assert_close(wrapped.module.words.weight.grad[1], expected)


# --- Parameters that are not used ------------------------------------------------------------------------------------


class Heads(nn.Module):
    """Each head is used where its name is given."""

    def __init__(self, num_heads: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(10, 6)
        self.heads = nn.ModuleDict({f"h{index}": nn.Linear(6, 2) for index in range(num_heads)})

    def forward(self, inputs: Tensor, *names: str) -> Tensor:
        return sum(self.heads[name](self.body(inputs)) for name in names)


@check(1, 2, 3)
def unused_parameters_are_named_on_every_rank(world: World) -> None:
    wrapped = DataParallel(Heads(), group=world.group, bucket_bytes=1)
    loss = squares(wrapped(batch(world.rank, 0), "h0", *(["h1"] if world.rank == 0 else [])))
    said = refusal(loss.backward, UnusedParametersError)
    for name in ("heads.h2.weight", "heads.h2.bias"):
        assert f"'{name}' on all ranks" in said
    assert "h0" not in said
    assert "body" not in said
    assert ("heads.h1.weight" in said) == (world.size > 1)
    if world.size > 1:
        assert f"'heads.h1.bias' on {'rank 1' if world.size == 2 else 'ranks 1-2'}" in said
    assert "requires_grad_(False)" in said
    assert "unused='zeros'" in said
    wrapped.zero_grad()
    squares(wrapped(batch(world.rank, 0), "h0", "h1", "h2")).backward()  # goes on
    world.require_same(gradients(wrapped))
    wrapped = DataParallel(Heads(30), group=world.group)
    assert "and 38 more" in refusal(squares(wrapped(batch(0, 0), "h0")).backward, UnusedParametersError)


@check(1, 2, 3)
def unused_parameters_count_as_zero(world: World) -> None:
    for reproducible in (False, True):
        alone = Heads().double()
        wrapped = DataParallel(Heads(), group=world.group, bucket_bytes=1, unused="zeros", reproducible=reproducible)
        for step in range(4):
            used = [["h0", "h1"] if (rank + step) % 2 else ["h0"] for rank in range(world.size)]
            for rank, names in enumerate(used):
                (squares(alone(batch(rank, step).double(), *names)) / world.size).backward()
            squares(wrapped(batch(world.rank, step), *used[world.rank])).backward()
            for (name, one), other in zip(wrapped.module.named_parameters(), alone.parameters(), strict=True):
                assert (one.grad is None) == (other.grad is None), name
                if one.grad is not None:
                    torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-5, atol=1e-6)
            wrapped.zero_grad()
            alone.zero_grad()


@check(2)
def outputs_in_containers_of_all_kinds(world: World) -> None:
    """The end of backward is known though parts of it are recomputed in backwards of their own."""

    @dataclasses.dataclass
    class Answer:
        value: object

    class Plain:
        def __init__(self, value: object) -> None:
            self.value = value

    class Slotted:
        __slots__ = ("value",)

        def __init__(self, value: object) -> None:
            self.value = value

    for wrap in (
        lambda one: {"a": [one]},
        Answer,
        Plain,
        Slotted,
        lambda one: SimpleNamespace(value=one),
        lambda one: [Answer({"deep": Plain(one)})],
        lambda one: (None, "text", one),
    ):

        class Contained(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.block, self.last = nn.Linear(10, 10), nn.Linear(10, 10)

            def forward(self, inputs: Tensor, wrap=wrap) -> object:
                for _ in range(2):
                    inputs = checkpoint(self.block, self.last(inputs), use_reentrant=True)
                self.kept = inputs
                return wrap(inputs)

        expected = Reference(Contained(), world.size, SGD)
        wrapped = DataParallel(Contained(), group=world.group, reproducible=True, bucket_bytes=1)
        for step in range(2):
            for rank in range(world.size):

                def loss_of(model, rank=rank, step=step):
                    model(batch(rank, step))
                    return squares(getattr(model, "module", model).kept)

                expected.backward(rank, loss_of)
                if rank == world.rank:
                    loss_of(wrapped).backward()
            expected.sum()
        for one, other in zip(wrapped.parameters(), expected.module.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)


# --- Buffers ---------------------------------------------------------------------------------------------------------


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))

    def forward(self, values: Tensor) -> Tensor:
        self.seen = self.seen + values  # another tensor each time
        self.number += 1
        return self.weight * values


@check(2, 3)
def buffers_that_are_bound_anew_are_found_by_name(world: World) -> None:
    for is_broadcast in (True, False):
        wrapped = DataParallel(Counts(), group=world.group, broadcast_buffers=is_broadcast)
        for _ in range(3):
            wrapped(torch.full((3,), 1.0 + world.rank)).sum().backward()
        before_last, own = 2.0 if is_broadcast else 2.0 * (1 + world.rank), 1.0 + world.rank
        assert wrapped.module.seen.tolist() == [before_last + own] * 3
        assert wrapped.module.number == 3


@check(2)
def two_forwards_before_a_backward_with_batch_norm(world: World) -> None:
    """What the first has saved for backward stays as it is."""

    class Judge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
            self.register_buffer("scale", torch.ones(6))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layers(inputs) * self.scale.mean().exp() * (self.scale * self.layers[0].bias).sum()

    expected = Reference(Judge(), world.size, SGD)
    wrapped = DataParallel(Judge(), group=world.group, reproducible=True)
    optimizer = SGD(wrapped.parameters())
    for step in range(3):
        for rank in range(world.size):

            def loss_of(model, rank=rank, step=step):
                return squares(model(batch(rank, step))) - model(batch(rank, step + 50)).mean()

            expected.backward(rank, loss_of)
            if rank == world.rank:
                loss_of(wrapped).backward()
        expected.sum()
        expected.step()
        updates(optimizer)
    identical(wrapped.module, expected.module)


# --- Uneven inputs ---------------------------------------------------------------------------------------------------


@check(2, 3)
def ranks_with_different_numbers_of_batches(world: World) -> None:
    num_batches = [3, 5, 4][: world.size]
    for by_all in (True, False):
        for reproducible in (True, False):
            alone = network()
            wrapped = DataParallel(network(), group=world.group, reproducible=reproducible, bucket_bytes=300)
            optimizers = SGD(wrapped.parameters()), SGD(alone.parameters())
            with wrapped.join(divide_by_initial_world_size=by_all):
                for step in range(num_batches[world.rank]):
                    squares(wrapped(batch(world.rank, step))).backward()
                    updates(optimizers[0])
            for step in range(max(num_batches)):
                active = [rank for rank, number in enumerate(num_batches) if number > step]
                for rank in active:
                    (squares(alone(batch(rank, step))) / (world.size if by_all else len(active))).backward()
                updates(optimizers[1])
            close(wrapped.module, alone)
            world.require_same(wrapped.parameters())
            # After that, all count again.
            wrapped.zero_grad()
            squares(wrapped(batch(world.rank, 9))).backward()
            for rank in range(world.size):
                (squares(alone(batch(rank, 9))) / world.size).backward()
            for one, other in zip(wrapped.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@check(2, 3)
def batches_run_out_while_gradients_accumulate(world: World) -> None:
    """Batch norm's buffers are those of a rank that goes on."""
    num_batches = [2, 6, 4][: world.size]
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    wrapped = DataParallel(copy.deepcopy(layers), group=world.group, reproducible=True)
    with wrapped.join():
        for step in range(num_batches[world.rank]):
            with wrapped.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                squares(wrapped(batch(world.rank, step))).backward()
    expected = Reference(layers, world.size, SGD)
    for rank, number in enumerate(num_batches):
        for step in range(number):
            expected.backward(rank, lambda model, r=rank, s=step: squares(model(batch(r, s))))
    expected.sum()
    if world.rank == 1:  # the others let go of nothing, and went on with it
        for one, other in zip(wrapped.parameters(), expected.module.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    world.require_same(wrapped.buffers())


@check(2, 3)
def different_numbers_of_batches_with_frozen_statistics(world: World) -> None:
    layers = nn.Sequential(network(), nn.BatchNorm1d(5)).eval()
    alone = copy.deepcopy(layers)
    wrapped = DataParallel(layers, group=world.group).eval()
    optimizers = SGD(wrapped.parameters()), SGD(alone.parameters())
    with wrapped.join():
        for step in range(1 + world.rank):
            squares(wrapped(batch(world.rank, step))).backward()
            updates(optimizers[0])
    for step in range(world.size):
        for rank in range(step, world.size):
            (squares(alone(batch(rank, step))) / world.size).backward()
        updates(optimizers[1])
    close(wrapped.module, alone)


@check(2)
def what_a_rank_lays_out_otherwise_is_refused(world: World) -> None:
    layer = nn.Conv2d(2, 2, 2)
    if world.rank == 1:
        layer = layer.to(memory_format=torch.channels_last)
    said = refusal(lambda: DataParallel(layer, group=world.group), DifferentModelsError)
    assert "rank 1 has weight" in said.replace("'", "")
    assert "of strides (8, 1, 4, 2)" in said
    expanded = nn.Linear(2, 2)
    expanded.register_buffer("mask", torch.ones(1).expand(4))
    assert "'mask' was made by expand()" in refusal(lambda: DataParallel(expanded, group=world.group), ArgumentError)


@check(1, 2)
def a_child_that_is_called_module(world: World) -> None:
    outer = nn.Module()
    outer.weight = nn.Parameter(torch.full((2,), 1.0))
    outer.module = nn.Module()
    outer.module.weight = nn.Parameter(torch.full((2,), 2.0))
    wrapped = DataParallel(outer, group=world.group)
    state = {name: one + 10 for name, one in wrapped.state_dict().items()}
    wrapped.load_state_dict(state)
    assert outer.weight.tolist() == [11, 11]
    assert outer.module.weight.tolist() == [12, 12]


@check(2, 3)
def sixteen_bit_gradients_that_are_carried_do_not_overflow(world: World) -> None:
    layer = nn.Linear(1, 1, bias=False).half()
    wrapped = DataParallel(layer, group=world.group, reproducible=True)
    for factor in (40000.0, 1000.0):
        wrapped(torch.full((1, 1), factor, dtype=torch.float16)).sum().backward()
    assert abs(layer.weight.grad.item() - 41000) <= 16


@check(2, 3)
def the_first_rank_that_is_through_ends_the_loop_of_all(world: World) -> None:
    wrapped = DataParallel(network(), group=world.group)

    def loop() -> None:
        with wrapped.join(throw_on_early_termination=True):
            for step in range(3 if world.rank == 0 else 5):
                squares(wrapped(batch(world.rank, step))).backward()

    assert "exhausted" in refusal(loop, RuntimeError)
    wrapped.zero_grad()  # and after that no rank asks whether others go on
    expected = Reference(network(), world.size, SGD)
    expected.module.load_state_dict(wrapped.state_dict())
    for one in expected.ranks:
        one.load_state_dict(wrapped.state_dict())
    for rank in range(world.size):
        expected.backward(rank, lambda model, r=rank: squares(model(batch(r, 9))))
    expected.sum()
    squares(wrapped(batch(world.rank, 9))).backward()
    for one, other in zip(wrapped.parameters(), expected.module.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@check(2, 3)
def buckets_are_in_the_order_of_a_rank_that_has_gradients(world: World) -> None:
    """Whoever is through by then; and of a backward that all have made."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(10, 10, bias=False) for _ in range(4))
            self.fails = False

        def forward(self, inputs: Tensor) -> Tensor:
            for layer in self.layers[::-1]:
                inputs = layer(inputs)
            return Fails.apply(inputs, self.fails)

    for num_first in (1, 4):
        wrapped = DataParallel(Backwards(), group=world.group, bucket_bytes=1)
        with wrapped.join():
            for step in range(num_first if world.rank == 0 else 4):
                squares(wrapped(batch(world.rank, step))).backward()
        assert [list(one.indices) for one in wrapped.gradient_sync.buckets] == [[0], [1], [2], [3]]
    wrapped = DataParallel(Backwards(), group=world.group, bucket_bytes=1)
    for step in range(4):
        wrapped.module.fails = step == 1
        loss = squares(wrapped(batch(world.rank, step)))
        if step == 1:
            refusal(loss.backward, ZeroDivisionError)
        else:
            loss.backward()
    assert [list(one.indices) for one in wrapped.gradient_sync.buckets] == [[0], [1], [2], [3]]


@check(2, 3)
def bits_do_not_depend_on_buckets_where_parameters_accumulate_in_changing_numbers(world: World) -> None:
    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.again, self.last = nn.Linear(10, 33), nn.Linear(33, 33), nn.Linear(33, 5)

        def forward(self, inputs: Tensor, times: int) -> Tensor:
            values = self.first(inputs)
            for _ in range(times):
                values = checkpoint(lambda given: torch.tanh(self.again(given)), values, use_reentrant=True)
            return self.last(values)

    found = []
    for bucket_bytes in (1, 1000, 3000, 1 << 30):
        wrapped = DataParallel(Repeats(), group=world.group, reproducible=True, bucket_bytes=bucket_bytes)
        for step, times in enumerate((1, 1, 3, 1, 2, 2, 4, 1)):
            wrapped.zero_grad()
            squares(wrapped(batch(world.rank, step), times + (world.rank == step % 2))).backward()
            found.append([bits(one.grad) for one in wrapped.parameters()])
    for step in range(8):
        assert found[step] == found[8 + step] == found[16 + step] == found[24 + step]


@check(1, 2)
def versions_of_modules_are_kept(world: World) -> None:
    class Versioned(nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state: dict, prefix: str, metadata: dict, *more: object) -> None:
            seen.append(metadata.get("version"))
            super()._load_from_state_dict(state, prefix, metadata, *more)

    def make() -> nn.Sequential:
        return nn.Sequential(Versioned(2, 2), nn.Sequential(Versioned(2, 2)))

    wrapped = DataParallel(make(), group=world.group)
    for saved in (wrapped.state_dict(), make().state_dict()):
        for loading in (wrapped, make()):
            seen: list[int] = []
            loading.load_state_dict(saved)
            assert seen == [7, 7]


# --- What travels, when -----------------------------------------------------------------------------------------------


def travelled(world: World) -> dict[str, tuple[int, int]]:
    """Collective -> calls and bytes that this rank has sent."""
    found: dict[str, tuple[int, int]] = {}
    for entry in world.group._get_backend(torch.device("cpu")).communicator.stats():
        calls, sent = found.get(entry.collective, (0, 0))
        found[entry.collective] = calls + entry.calls, sent + entry.bytes_sent
    return found


@check(2, 4, backends=["farandole"])
def sixteen_bits_are_what_travels(world: World) -> None:
    """(N-1)/N of the flat tensor twice, in 2 bytes an element."""
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(10, 60), nn.Linear(60, 8))
        wrapped = DataParallel(module, group=world.group, wire_dtype=dtype, bucket_bytes=1000, broadcast_buffers=False)
        for step in range(4):  # the buckets are filled anew after the second
            before = travelled(world)
            squares(wrapped(batch(world.rank, step))).backward()
            after = travelled(world)
            num = sum(part_numel(module_sizes(wrapped, one), world.size) for one in wrapped.gradient_sync.buckets)
            buckets = len(wrapped.gradient_sync.buckets)
            if step == 1:
                continue  # its buckets are gone
            for name in ("all_to_all", "all_gather"):
                calls, sent = (now - then for now, then in zip(after[name], before.get(name, (0, 0)), strict=True))
                assert (calls, sent) == (buckets, 2 * num * (world.size - 1)), (name, step, calls, sent)


def module_sizes(wrapped: DataParallel, bucket) -> list[int]:
    return [wrapped.gradient_sync.parameters[index].numel() for index in bucket.indices]


def part_numel(sizes: list[int], world_size: int) -> int:
    """Everything begins at a multiple of 64 elements."""
    end = 0
    for size in sizes:
        end = -(-end // 64) * 64 + size
    return -(-end // (64 * world_size)) * 64


@check(2, 3)
def sixteen_bits_travel_and_32_are_summed(world: World) -> None:
    """Each rank's gradients are rounded once, and their mean once."""
    for dtype in (torch.bfloat16, torch.float16):
        wrapped = DataParallel(network(), group=world.group, wire_dtype=dtype, bucket_bytes=300)
        copies = [network() for _ in range(world.size)]
        for step in range(3):
            squares(wrapped(batch(world.rank, step))).backward()
            for rank, one in enumerate(copies):
                squares(one(batch(rank, step))).backward()
            for one, *others in zip(wrapped.parameters(), *(model.parameters() for model in copies), strict=True):
                total = torch.zeros_like(one)
                for other in others:
                    total = total + other.grad.to(dtype).float()
                assert torch.equal(one.grad, (total / world.size).to(dtype).float())
            for one in (wrapped, *copies):
                one.zero_grad()


@check(2, 3)
def buckets_start_while_backward_goes_on(world: World) -> None:
    """The first one before the first layer has its gradient, and it is small."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(300, 300) for _ in range(4)], nn.Linear(300, 900))
    wrapped = DataParallel(layers, group=world.group, bucket_bytes=4 << 20)
    sizes = [4 * sum(module_sizes(wrapped, one)) for one in wrapped.gradient_sync.buckets]
    assert len(sizes) == 2
    assert FIRST_BYTES <= sizes[0] < 2 * FIRST_BYTES
    events = []
    first = wrapped.gradient_sync.buckets[0]
    start = first.start
    first.start = lambda: (events.append("start"), start())
    layers[0].weight.register_hook(lambda _: events.append("first layer"))
    wrapped(batch(world.rank, 0, 2, 300)).sum().backward()
    assert events == ["start", "first layer"]


@check(2, 3)
def the_order_of_buckets_is_that_of_rank_0_on_all(world: World) -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(10, 10, bias=False) for _ in range(6))

        def forward(self, inputs: Tensor, order: list[int]) -> Tensor:
            for index in order:
                inputs = torch.tanh(self.layers[index](inputs))
            return inputs

    wrapped = DataParallel(Shuffled(), group=world.group, bucket_bytes=1, reproducible=True)
    expected = Reference(Shuffled(), world.size, SGD)
    orders = [[2, 0, 5, 1, 4, 3], [0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 2, 0]]
    optimizer = SGD(wrapped.parameters())
    for step in range(5):
        for rank in range(world.size):
            expected.backward(rank, lambda model, r=rank, s=step: squares(model(batch(r, s), orders[r])))
        squares(wrapped(batch(world.rank, step), orders[world.rank])).backward()
        expected.sum()
        if step == 1:
            assert [list(one.indices) for one in wrapped.gradient_sync.buckets] == [[i] for i in orders[0][::-1]]
        expected.step()
        updates(optimizer)
    identical(wrapped.module, expected.module)


@check(2, 3)
def buckets_are_filled_anew_while_gradients_accumulate(world: World) -> None:
    """After the second backward: what is there is kept, of each parameter, though it lies elsewhere."""
    for bucket_bytes in (200, "auto"):
        expected = Reference(network(), world.size, SGD)
        wrapped = DataParallel(network(), group=world.group, reproducible=True, bucket_bytes=bucket_bytes)
        for step in range(5):
            for rank in range(world.size):
                expected.backward(rank, lambda model, r=rank, s=step: squares(model(batch(r, s))))
            squares(wrapped(batch(world.rank, step))).backward()
            expected.sum()
        if bucket_bytes == "auto":
            assert wrapped.bucket_bytes in CANDIDATES_BYTES
            assert len(set(world.all_of(wrapped.bucket_bytes))) == 1
        for one, other in zip(wrapped.parameters(), expected.module.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


@check(2, 3)
def other_collectives_of_the_group_in_between(world: World) -> None:
    """Also a rank that is late with its backward."""
    wrapped = DataParallel(Heads(), group=world.group, unused="zeros")
    for step in range(4):
        loss = squares(wrapped(batch(world.rank, step), f"h{(world.rank + step) % 3}"))
        received = torch.empty(world.size)
        work = dist.all_to_all_single(
            received, torch.full((world.size,), float(world.rank)), group=world.group, async_op=True
        )
        loss.backward()
        work.wait()
        assert received.tolist() == list(range(world.size))
    world.require_same([one.grad for one in wrapped.parameters() if one.grad is not None])


# --- Uses of autograd -------------------------------------------------------------------------------------------------


@check(2, 3)
def gradients_asked_for_in_other_ways(world: World) -> None:
    expected = Reference(network(), world.size, SGD)
    wrapped = DataParallel(network(), group=world.group, reproducible=True, bucket_bytes=300)
    optimizer = SGD(wrapped.parameters())

    def with_penalty(model: nn.Module, inputs: Tensor) -> Tensor:
        inputs = inputs.requires_grad_()
        outputs = model(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return squares(outputs) + squares(slope)

    for step in range(4):
        for rank in range(world.size):
            expected.backward(rank, lambda model, r=rank, s=step: with_penalty(model, batch(r, s)))
        with_penalty(wrapped, batch(world.rank, step)).backward()
        expected.sum()
        before = gradients(wrapped)
        # On this rank alone, and another number of times on each: nothing is summed.
        for _ in range(world.rank):
            loss = squares(wrapped.module(batch(world.rank, step)))
            found = torch.autograd.grad(loss, list(wrapped.parameters()), retain_graph=True)
            assert len(found) == len(before)
        torch.autograd.grad(squares(wrapped(batch(world.rank, step))), list(wrapped.parameters()))
        assert all(torch.equal(one, other) for one, other in zip(gradients(wrapped), before, strict=True))
        expected.step()
        updates(optimizer)
    identical(wrapped.module, expected.module)


@check(2)
def a_backward_that_keeps_its_graph(world: World) -> None:
    """What is summed has no graph; it is summed by the ranks, once."""
    wrapped = DataParallel(network(), group=world.group, reproducible=True, bucket_bytes=300)
    expected = Reference(network(), world.size, SGD)
    for step in range(4):
        for rank in range(world.size):
            expected.backward(rank, lambda model, r=rank, s=step: squares(model(batch(r, s))))
        loss = squares(wrapped(batch(world.rank, step)))
        loss.backward(create_graph=step % 2 == 0, retain_graph=True)
        expected.sum()
    for one, other in zip(wrapped.parameters(), expected.module.parameters(), strict=True):
        assert not one.grad.requires_grad
        assert torch.equal(one.grad, other.grad)


class Fails(torch.autograd.Function):
    """Where it is told to, in backward."""

    @staticmethod
    def forward(ctx, inputs: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ZeroDivisionError("in the middle of backward")
        return gradient, None


class MayFail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, inputs: Tensor, fails: bool) -> Tensor:
        return self.last(Fails.apply(self.first(inputs), fails))


@check(2, 3)
def a_backward_that_failed_on_all_ranks_is_over(world: World) -> None:
    for bucket_bytes in (1, 10_000):
        expected = Reference(MayFail(), world.size, SGD)
        wrapped = DataParallel(MayFail(), group=world.group, reproducible=True, bucket_bytes=bucket_bytes)
        optimizer = SGD(wrapped.parameters())
        for step in range(6):
            fails = step in (0, 2, 3)
            loss = squares(wrapped(batch(world.rank, step), fails))
            if fails:
                assert "middle" in refusal(loss.backward, ZeroDivisionError)
                wrapped.zero_grad()
                continue
            loss.backward()
            for rank in range(world.size):
                expected.backward(rank, lambda model, r=rank, s=step: squares(model(batch(r, s), False)))
            expected.sum()
            expected.step()
            updates(optimizer)
        identical(wrapped.module, expected.module)


@check(2, 3)
def a_backward_that_failed_on_one_rank_ends_that_of_all(world: World) -> None:
    """Wherever it is by then; and what was accumulated before is gone, too."""
    last = world.size - 1
    for bucket_bytes in (1, 10_000):
        expected = Reference(MayFail(), world.size, SGD)
        wrapped = DataParallel(MayFail(), group=world.group, reproducible=True, bucket_bytes=bucket_bytes)
        optimizer = SGD(wrapped.parameters())
        for step in range(7):
            if step in (0, 2, 5):
                loss = squares(wrapped(batch(world.rank, step), world.rank == last))
                if world.rank == last:
                    assert "middle" in refusal(loss.backward, ZeroDivisionError)
                else:
                    said = refusal(loss.backward, BackwardFailedError)
                    assert f"backward failed on rank {last}, so no rank" in said
                    assert "next step" in said
                continue
            squares(wrapped(batch(world.rank, step), False)).backward()
            for rank in range(world.size):
                expected.backward(rank, lambda model, r=rank, s=step: squares(model(batch(r, s), False)))
            expected.sum()
            if step != 4:
                expected.step()
                updates(optimizer)
            else:  # the next one fails
                expected.module.zero_grad()
        identical(wrapped.module, expected.module)


# --- Copies, evaluation, saved state ----------------------------------------------------------------------------------


@check(2)
def evaluation(world: World) -> None:
    """Asks nothing of the other ranks."""
    wrapped = DataParallel(network(), group=world.group)
    squares(wrapped(batch(world.rank, 0))).backward()
    wrapped.eval()
    if world.rank == 0:
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert not wrapped(batch(0, 0)).requires_grad
    wrapped.train()
    if world.rank == 1:
        with torch.no_grad():
            wrapped(batch(0, 0))
    squares(wrapped(batch(world.rank, 1))).backward()
    world.require_same(gradients(wrapped))


@check(2)
def copies(world: World) -> None:
    """The wrapper is refused; the module that is wrapped is copied as any."""
    wrapped = DataParallel(network(), group=world.group)
    squares(wrapped(batch(world.rank, 0))).backward()
    for call in (lambda: copy.deepcopy(wrapped), lambda: pickle.dumps(wrapped), lambda: copy.copy(wrapped)):
        said = refusal(call, ArgumentError)
        assert "DataParallel" in said
        assert ".module" in said
    before = gradients(wrapped)
    for other in (copy.deepcopy(wrapped.module), pickle.loads(pickle.dumps(wrapped.module))):
        identical(other, wrapped.module)
        if world.rank == 0:
            squares(other(batch(world.rank, 3))).backward()
    assert all(torch.equal(one, two) for one, two in zip(gradients(wrapped), before, strict=True))


@check(2)
def state_is_saved_under_the_names_of_the_module(world: World) -> None:
    layers = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4))
    wrapped = DataParallel(layers, group=world.group)
    wrapped(batch(world.rank, 0)).sum().backward()
    saved = copy.deepcopy(wrapped.state_dict())
    assert list(saved) == list(layers.state_dict())
    other = DataParallel(nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4)), group=world.group)
    other.load_state_dict(saved)
    assert list(saved) == list(layers.state_dict())
    nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4)).load_state_dict(saved)
    identical(other, wrapped)
    assert "0.bias" in refusal(lambda: other.load_state_dict({"0.weight": saved["0.weight"]}), RuntimeError)
    outer = nn.ModuleDict({"inner": wrapped})
    assert list(outer.state_dict()) == [f"inner.{name}" for name in saved]
    outer.load_state_dict(outer.state_dict())


@check(1, 2)
def several_in_one_backward(world: World) -> None:
    """A generator and a judge, as two wrappers."""
    makers = [lambda: nn.Linear(10, 10), lambda: nn.Sequential(nn.Linear(10, 3), nn.Linear(3, 1))]
    torch.manual_seed(0)
    plain = [make().double() for make in makers]
    wrapped = [
        DataParallel(copy.deepcopy(one).float(), group=world.group, bucket_bytes=bucket_bytes)
        for one, bucket_bytes in zip(plain, (1, "auto"), strict=True)
    ]
    for one, other in zip(plain, wrapped, strict=True):
        one.load_state_dict(other.state_dict())
    for step in range(4):
        wrapped[1](wrapped[0](batch(world.rank, step))).mean().backward()
        plain[1](plain[0](all_batches(world, step).double())).mean().backward()
        for one, other in zip(wrapped, plain, strict=True):
            for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


@check(2)
def a_wrapper_that_is_gone_leaves_nothing_behind(world: World) -> None:
    for wrapper in (DataParallel, FullyShardedParallel):
        module = network()
        model = wrapper(module, group=world.group)
        for step in range(3):
            squares(model(batch(world.rank, step))).backward()
        kept = [weakref.ref(one) for one in (model, model.gradient_sync, model.gradient_sync.parameters[0])]
        if wrapper is DataParallel:
            kept.pop()  # it is the module's
        del model
        gc.collect()
        if wrapper is DataParallel:
            if world.rank == 0:  # alone: nothing is summed any more
                module.zero_grad()
                alone = copy.deepcopy(module)
                for one in (module, alone):
                    squares(one(batch(0, 0))).backward()
                for mine, other in zip(module.parameters(), alone.parameters(), strict=True):
                    assert torch.equal(mine.grad, other.grad)
        else:
            text = refusal(lambda module=module: module(batch(0, 0)), ArgumentError)
            assert text == "the wrapper that gathers this module is gone; keep it as long as the module"
            del module
            gc.collect()
        assert [one() for one in kept] == [None] * len(kept), wrapper


@check(2)
def of_two_wrappers_the_last_one_sums(world: World) -> None:
    module = network()
    first = DataParallel(module, group=world.group)
    squares(first(batch(world.rank, 0))).backward()
    module.zero_grad()
    last = DataParallel(module, group=world.group)
    alone = network()
    for step in range(3):
        squares(last(batch(world.rank, step))).backward()
        squares(alone(all_batches(world, step))).backward()
    for mine, other in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert refusal(lambda: first(batch(0, 0)), ArgumentError) == (
        "the module was wrapped once more, or shares parameters with one that was; use the wrapper made last"
    )


@check(2)
def what_is_wrapped_is_not_converted(world: World) -> None:
    for wrapper in (DataParallel, FullyShardedParallel):
        model = wrapper(network(), group=world.group)
        assert model.to("cpu").float() is model
        for convert in (model.double, lambda model=model: model.to("meta")):
            text = refusal(convert, ArgumentError)
            assert text.startswith(
                "the module is wrapped, with its torch.float32 on cpu as they are, and not to be torch"
            )
            assert text.endswith("convert or move it before it is wrapped")

        class Holds(nn.Module):
            def __init__(self, part: nn.Module) -> None:
                super().__init__()
                self.part = part

        assert list(map(id, Holds(model).parameters())) == list(map(id, model.parameters()))


# --- Wrong calls ------------------------------------------------------------------------------------------------------


@check(1, 2, 3)
def wrong_arguments(world: World) -> None:
    wrap = partial(DataParallel, group=world.group)
    frozen = network().requires_grad_(False)
    for call, *parts in (
        (lambda: wrap(network(), reduction="max"), "reduction='max'", "'mean' or 'sum'"),
        (lambda: wrap(network(), unused="skip"), "unused='skip'", "'error' or 'zeros'"),
        (lambda: wrap(network(), sparse=True), "sparse=True", "'error' or 'dense'"),
        (lambda: wrap(network(), bucket_bytes=0), "bucket_bytes=0", "at least 1"),
        (lambda: wrap(network(), bucket_bytes=2.5), "bucket_bytes=2.5", "whole number"),
        (lambda: wrap(network(), bucket_bytes="large"), "bucket_bytes='large'", "whole number"),
        (lambda: wrap(network(), bucket_bytes=True), "bucket_bytes=True", "whole number"),
        (lambda: wrap(network(), wire_dtype=torch.int8), "wire_dtype=torch.int8", "torch.bfloat16"),
        (lambda: wrap(frozen), "nothing to train"),
        (lambda: wrap(nn.ReLU()), "nothing to train"),
        (lambda: wrap(network().to("meta")), "'0.weight'", "meta", "to_empty()"),
        (lambda: wrap(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).to("meta"))), "'1.weight' is on meta", "move"),
        (lambda: DataParallel(network(), group="all"), "group is 'all'"),
        (lambda: NaiveDataParallel(network(), group="all"), "group is 'all'"),
        (lambda: DataParallel(network(), group=dist.GroupMember.NON_GROUP_MEMBER), "this rank belongs to"),
    ):
        said = refusal(call, ArgumentError)
        assert all(part in said for part in parts), said


@check(2, 3)
def models_that_differ(world: World) -> None:
    def bare(name: str, tensor: Tensor, *, is_buffer: bool = False) -> nn.Module:
        module = nn.Module()
        module.common = nn.Parameter(torch.zeros(2))
        (module.register_buffer if is_buffer else module.register_parameter)(name, tensor)
        return module

    last = world.rank == world.size - 1
    for usual, other, *parts in (
        (bare("a", nn.Parameter(torch.zeros(3))), bare("b", nn.Parameter(torch.zeros(3))), "a (3,)", "b (3,)"),
        (bare("a", nn.Parameter(torch.zeros(3))), bare("a", nn.Parameter(torch.zeros(4))), "(3,)", "(4,)"),
        (
            bare("a", nn.Parameter(torch.zeros(3))),
            bare("a", nn.Parameter(torch.zeros(3).bfloat16())),
            "float32",
            "bfloat16",
        ),
        (
            bare("a", nn.Parameter(torch.zeros(3))),
            bare("a", nn.Parameter(torch.zeros(3), requires_grad=False)),
            "trained",
            "frozen",
        ),
        (bare("a", torch.zeros(3), is_buffer=True), bare("c", torch.zeros(3), is_buffer=True), "a (3,)", "buffer"),
        (bare("a", torch.zeros(3), is_buffer=True), bare("a", None, is_buffer=True), "nothing more"),
    ):
        for wrap in (DataParallel, NaiveDataParallel):
            said = refusal(
                lambda w=wrap, u=usual, o=other: w(o if last else u, group=world.group), DifferentModelsError
            )
            assert f"rank {world.size - 1} has" in said
            assert "build the same model on every rank" in said
            assert all(part in said for part in parts), said
            assert len(set(world.all_of(said))) == 1


def test_without_a_group_it_is_said_how_to_make_one():
    for wrap in (DataParallel, NaiveDataParallel):
        with pytest.raises(ArgumentError, match="init_process_group"):
            wrap(network())


@pytest.fixture(scope="module")
def outcomes():
    return training_worlds.run(__name__)


@pytest.mark.parametrize("name", check.names())
def test_on_ranks(outcomes, name):
    assert outcomes[name] == ""
