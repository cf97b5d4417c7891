"""ZeRO, stages 1 and 2: against data parallelism and one process, to the bit."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import training_worlds
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
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
    GradScaler,
    OutOfStepError,
    UnusedParametersError,
    ZeroOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from farandole.training.clipping import clip_grad_norm_

check = Checks()
ADAM = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STAGES = (0, 1, 2)


def optimizer_of(model: DataParallel, stage: int, make=ADAM) -> torch.optim.Optimizer:
    """Stage 0 is the optimizer itself."""
    if stage == 0:
        return make(model.parameters())
    return ZeroOptimizer(model, make.func, stage=stage, **make.keywords)


def wrap(world: World, module: nn.Module, **more) -> DataParallel:
    return DataParallel(module, group=world.group, **{"reproducible": True, "bucket_bytes": 300} | more)


# --- Identity ---------------------------------------------------------------------------------------------------------


@check(1, 2, 3, 4)
def all_stages_have_the_bits_of_one_process_after_50_steps(world: World) -> None:
    """Which adds up what the ranks have in their order. So they are those of all backends, too."""
    expected = Reference(network(), world.size, ADAM)
    models = [wrap(world, network(world.rank)) for _ in STAGES]
    for model in models:
        model.load_state_dict(network().state_dict())
    optimizers = [optimizer_of(model, stage) for model, stage in zip(models, STAGES, strict=True)]
    for step in range(50):
        for rank in range(world.size):
            expected.backward(rank, lambda model, r=rank, s=step: squares(model(batch(r, s))))
        expected.sum()
        expected.step()
        for model, optimizer in zip(models, optimizers, strict=True):
            squares(model(batch(world.rank, step))).backward()
            updates(optimizer)
    for model in models:
        identical(model.module, expected.module)


@check(1, 2, 3, 4)
def with_sum_the_bits_are_those_of_one_process_whatever_the_number_of_ranks(world: World) -> None:
    """Micro-batch k goes to rank k % world_size."""
    num_micro = 12
    for stage in (1, 2):
        alone = network()
        model = wrap(world, network(), reduction="sum")
        optimizers = optimizer_of(model, stage), ADAM(alone.parameters())
        for step in range(5):
            for index in range(num_micro):
                (squares(alone(batch(index, step))) / num_micro).backward()
                if index % world.size == world.rank:
                    (squares(model(batch(index, step))) / num_micro).backward()
            for one in optimizers:
                updates(one)
        identical(model.module, alone)


@check(2, 3, 4)
def random_modules_backwards_and_buckets(world: World) -> None:
    """To the bit where it is reproducible, else to rounding. Ranks go through branches in different orders, and do
    without some; backwards are summed or not, as chance has it; calls of torch.distributed are late here and there."""
    for seed in random_seeds(world):
        rng = random.Random(seed)
        reproducible, reduction, make = rng.random() < 0.7, rng.choice(["mean", "sum"]), rng.choice([ADAM, SGD])
        make = make if reduction == "mean" else ADAM
        expected = Reference(Mixed(seed), world.size, make, reduction)
        model = wrap(
            world,
            Mixed(seed),
            bucket_bytes=rng.choice([1, 300, 1000, 100_000]),
            reduction=reduction,
            unused="zeros",
            reproducible=reproducible,
        )
        optimizer = optimizer_of(model, rng.choice([1, 2]), make)
        with delays(world.rank) if rng.random() < 0.5 else contextlib.nullcontext():
            for step in range(3):
                random_backwards(world, rng, model, expected, step)
                expected.step()
                updates(optimizer)
        if reproducible:
            identical(model.module, expected.module)
        close(model.module, expected.module, 5e-5)
        world.require_same(model.parameters())


@check(2, 3)
def buckets_of_any_size_give_the_same_bits(world: World) -> None:
    """1 KB to five times the model, with calls that are late; backwards are as many as chance has it."""
    num_bytes = sum(one.nbytes for one in wide().parameters())
    expected = Reference(wide(), world.size, ADAM)
    sizes = (1 << 10, 5000, num_bytes, 5 * num_bytes)
    models = [wrap(world, wide(), bucket_bytes=size) for size in sizes for _ in (1, 2)]
    optimizers = [optimizer_of(model, 1 + index % 2) for index, model in enumerate(models)]
    for step in range(4):
        for number in range(1 + step % 3):
            for rank in range(world.size):
                expected.backward(rank, lambda model, r=rank, s=10 * step + number: squares(model(batch(r, s))))
            expected.sum()
            for model in models:
                with delays(world.rank):
                    squares(model(batch(world.rank, 10 * step + number))).backward()
        expected.step()
        for optimizer in optimizers:
            with delays(world.rank):
                updates(optimizer)
    for model in models:
        identical(model.module, expected.module)


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 61), nn.Tanh(), nn.Linear(61, 31), nn.Tanh(), nn.Linear(31, 7))


@check(2, 4)
def what_the_backend_sums_is_as_data_parallelism_sums_it(world: World) -> None:
    """To rounding, and on two ranks to the bit."""
    for dtype in (torch.float32, torch.float64):
        models = [wrap(world, network().to(dtype), reproducible=False) for _ in STAGES]
        optimizers = [optimizer_of(model, stage) for model, stage in zip(models, STAGES, strict=True)]
        for step in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                for number in range(1 + step % 2):
                    squares(model(batch(world.rank, 2 * step + number).to(dtype))).backward()
                updates(optimizer)
        for model in models[1:]:
            close(model.module, models[0].module)
            if world.size == 2:
                identical(model.module, models[0].module)
            world.require_same(model.parameters())


# --- Parameters of all kinds ------------------------------------------------------------------------------------------


class Empty(nn.Module):
    """Of 8, 0 and 24 elements, and of 0 at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(8.0) / 8)
        self.none = nn.Parameter(torch.zeros(0))
        self.b = nn.Parameter(torch.arange(24.0).view(4, 6) / 24)
        self.last = nn.Parameter(torch.zeros(3, 0))

    def forward(self, scale: float) -> Tensor:
        return scale * (self.a.sum() ** 2 + self.b.sin().sum() + self.none.sum() + self.last.sum())


@check(1, 2, 3, 4)
def parameters_without_elements(world: World) -> None:
    for stage, bucket_bytes in ((0, 1), (1, 1000), (1, 1), (2, 1), (2, 1000)):
        for reproducible in (True, False):
            expected = Reference(Empty(), world.size, ADAM)
            model = wrap(world, Empty(), bucket_bytes=bucket_bytes, reproducible=reproducible)
            optimizer = optimizer_of(model, stage)
            for step in range(3):
                for rank in range(world.size):
                    expected.backward(rank, lambda one, r=rank, s=step: one(0.1 * r + s))
                expected.sum()
                expected.step()
                model(0.1 * world.rank + step).backward()
                updates(optimizer)
            close(model.module, expected.module)
            assert not reproducible or bits(model.module.b) == bits(expected.module.b)
            assert list(model.state_dict()) == ["a", "none", "b", "last"]
            if stage:
                assert all(state["exp_avg"].numel() for state in optimizer.state.values())


@check(4)
def fewer_elements_than_ranks(world: World) -> None:
    """Some ranks have nothing to step."""
    for stage in (1, 2):
        torch.manual_seed(0)
        one = nn.Linear(1, 1)
        expected = Reference(copy.deepcopy(one), world.size, ADAM)
        model = wrap(world, one)
        optimizer = optimizer_of(model, stage)
        for step in range(3):
            for rank in range(world.size):
                expected.backward(rank, lambda model, r=rank, s=step: squares(model(batch(r, s, 2, 1))))
            squares(model(batch(world.rank, step, 2, 1))).backward()
            expected.sum()
            expected.step()
            updates(optimizer)
        identical(model.module, expected.module)
        assert world.all_of(sum(one.value.numel() for one in optimizer.holdings())) == [1, 1, 0, 0]


class Tied(nn.Module):
    """An embedding that is also the head; 11 words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 5)
        self.inner = nn.Linear(5, 5)
        self.head = nn.Linear(5, 11)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(torch.tanh(self.inner(self.embedding(words)))), (words + 1) % 11)


@check(2, 3, 4)
def an_embedding_that_is_also_the_head(world: World) -> None:
    """Each parameter is sharded once; the last rows, too."""
    expected = Reference(Tied(), world.size, ADAM)
    models = [wrap(world, Tied()) for _ in STAGES]
    optimizers = [optimizer_of(model, stage) for model, stage in zip(models, STAGES, strict=True)]
    for step in range(10):
        for rank in range(world.size):
            words = torch.arange(step + rank, step + rank + 6) % 11
            expected.backward(rank, lambda model, words=words: model(words))
            if rank == world.rank:
                for model in models:
                    model(words).backward()
        expected.sum()
        expected.step()
        for optimizer in optimizers:
            updates(optimizer)
    for model, optimizer in zip(models, optimizers, strict=True):
        identical(model.module, expected.module)
        assert model.module.head.weight is model.module.embedding.weight
        if isinstance(optimizer, ZeroOptimizer):
            held = sum(one.value.numel() for one in optimizer.holdings())
            assert sum(world.all_of(held)) == sum(one.numel() for one in model.parameters())


@check(2, 3)
def frozen_parameters_stay_as_they_are(world: World) -> None:
    for stage in STAGES:
        module = network()
        for name, one in module.named_parameters():
            one.requires_grad_("bias" in name)
        expected = Reference(copy.deepcopy(module), world.size, SGD)
        model = wrap(world, module)
        optimizer = optimizer_of(model, stage, SGD)
        before = {name: one.clone() for name, one in module.named_parameters()}
        for step in range(3):
            for rank in range(world.size):
                expected.backward(rank, lambda model, r=rank, s=step: squares(model(batch(r, s))))
            squares(model(batch(world.rank, step))).backward()
            expected.sum()
            expected.step()
            updates(optimizer)
        identical(module, expected.module)
        for name, one in module.named_parameters():
            assert one.requires_grad == ("bias" in name)
            assert torch.equal(one, before[name]) == ("weight" in name)
        if stage:
            assert all("bias" in one.name for one in optimizer.holdings())


@check(1, 2, 3)
def sixteen_bit_parameters_have_32_bit_masters(world: World) -> None:
    """Steps that are too small for 16 bits add up."""
    make = partial(torch.optim.SGD, lr=2e-4)
    for dtype, stage in ((torch.bfloat16, 1), (torch.float16, 2), (torch.bfloat16, 2)):
        for reproducible in (True, False):
            torch.manual_seed(0)
            module = nn.Linear(7, 3).to(dtype)
            with torch.no_grad():
                module.weight.fill_(1.0)
            masters = [one.detach().float() for one in module.parameters()]
            model = wrap(world, module, reproducible=reproducible)
            optimizer = optimizer_of(model, stage, make)
            for _ in range(12):
                for number in range(2):
                    (model(torch.full((1, 7), 1.0 + world.rank + number, dtype=dtype)).sum()).backward()
                updates(optimizer)
                slope = world.size + 2.0  # mean over ranks of what the two backwards add up to: exact in 16 bits
                masters[0] -= 2e-4 * slope
                masters[1] -= 2e-4 * 2
            for one, master in zip(module.parameters(), masters, strict=True):
                assert one.dtype == dtype
                torch.testing.assert_close(one.float(), master.to(dtype).float(), rtol=2e-3, atol=0)
            assert not bool((module.weight == 1).any())
            assert all(one.value.dtype == torch.float32 for one in optimizer.holdings())


@check(2, 3)
def dtypes_and_strides_beside_one_another(world: World) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.convolution = nn.Conv2d(3, 5, 1).to(memory_format=torch.channels_last)
            self.transposed = nn.Parameter(torch.randn(4, 5).t())
            self.with_gaps = nn.Parameter(torch.randn(4, 6)[:, ::2])
            self.offset = nn.Parameter(torch.randn(3, dtype=torch.float64))
            self.spectrum = nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, images: Tensor) -> Tensor:
            hidden = self.convolution(images).mean((2, 3)) @ self.transposed @ self.with_gaps
            return squares((hidden * self.spectrum).real + self.offset) + self.spectrum.abs().sum()

    def images(rank: int, step: int) -> Tensor:
        return batch(rank, step, 2, 48).view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)

    for stage in (1, 2):
        expected = Reference(Several(), world.size, ADAM)
        model = wrap(world, Several(), bucket_bytes=50)
        before = [one.clone() for one in model.parameters()]
        optimizer = optimizer_of(model, stage)
        assert all(torch.equal(one, was) for one, was in zip(model.parameters(), before, strict=True))
        for step in range(4):
            for rank in range(world.size):
                expected.backward(rank, lambda model, r=rank, s=step: model(images(r, s)))
            model(images(world.rank, step)).backward()
            expected.sum()
            expected.step()
            updates(optimizer)
        for one, other in zip(model.parameters(), expected.module.parameters(), strict=True):
            torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-4, atol=1e-5)


# --- Accumulation -----------------------------------------------------------------------------------------------------


@check(2, 3)
def what_accumulates(world: World) -> None:
    """Summed backwards and those of this rank alone, in all orders, with gradients let go of in between; a step is
    what ends it, not a number of backwards."""
    for stage in (1, 2):
        expected = Reference(network(), world.size, ADAM)
        model = wrap(world, network())
        optimizer = optimizer_of(model, stage)
        number = 0
        for pattern in ("s", "ss", "nns", "sns", "snns", "s0s", "n0s", "sn0s", "sz", "szs", "nzs", "snzs", "sn0ns"):
            for letter in pattern:
                number += 1
                if letter in "0z":
                    optimizer.zero_grad(set_to_none=letter == "0")
                    for one in [expected.module, *expected.ranks]:
                        one.zero_grad(set_to_none=letter == "0")
                    continue
                for rank in range(world.size):
                    expected.backward(rank, lambda one, r=rank, n=number: squares(one(batch(r, n))))
                with model.no_sync() if letter == "n" else contextlib.nullcontext():
                    squares(model(batch(world.rank, number))).backward()
                if letter == "s":
                    expected.sum()
            expected.step()
            optimizer.step()
            optimizer.zero_grad()
            identical(model.module, expected.module)


@check(2, 3)
def four_small_batches_are_one_large_one(world: World) -> None:
    for stage in STAGES:
        alone = network().double()
        model = wrap(world, network(), reproducible=False)
        optimizers = optimizer_of(model, stage, SGD), SGD(alone.parameters())
        for step, num in enumerate((4, 1, 3, 4)):
            whole = torch.cat([batch(rank, 10 * step + n) for rank in range(world.size) for n in range(num)])
            squares(alone(whole.double())).backward()
            for number in range(num):
                with model.no_sync() if number % 2 and number < num - 1 else contextlib.nullcontext():
                    (squares(model(batch(world.rank, 10 * step + number))) / num).backward()
            for one in optimizers:
                updates(one)
        close(model.module, alone)


@check(2)
def a_step_with_gradients_of_this_rank_alone_is_refused(world: World) -> None:
    for stage in (1, 2):
        model = wrap(world, network())
        optimizer = optimizer_of(model, stage)
        with model.no_sync():
            squares(model(batch(world.rank, 0))).backward()
        said = refusal(optimizer.step, ArgumentError)
        assert "' has a gradient of this rank alone" in said
        assert "outside no_sync()" in said
        optimizer.zero_grad()
        updates(optimizer)
        identical(model.module, network())


@check(2)
def what_was_summed_before_is_let_go_of(world: World) -> None:
    for stage in (1, 2):
        expected = Reference(network(), world.size, SGD)
        model = wrap(world, network())
        squares(model(batch(world.rank, 77))).backward()
        optimizer = optimizer_of(model, stage, SGD)
        assert all(one.grad is None for one in model.parameters())
        for rank in range(world.size):
            expected.backward(rank, lambda model, r=rank: squares(model(batch(r, 0))))
        squares(model(batch(world.rank, 0))).backward()
        expected.sum()
        expected.step()
        updates(optimizer)
        identical(model.module, expected.module)


@check(2, 3)
def memory_for_gradients_on_their_way_is_used_again(world: World) -> None:
    """At stage 2, a few buckets' of it; and the gradients that are kept are this rank's."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(20, 20) for _ in range(12)])
    model = wrap(world, layers, bucket_bytes=1000, reproducible=False)
    optimizer = optimizer_of(model, 2)
    made = []
    from farandole.training import shards

    zeros = shards.zeros
    shards.zeros = lambda *args: made.append(args[0]) or zeros(*args)
    try:
        for step in range(3):
            squares(model(batch(world.rank, step, 4, 20))).backward()
            assert all(one.grad is None for one in model.parameters())
            updates(optimizer)
    finally:
        shards.zeros = zeros
    num_buckets = len(model.gradient_sync.buckets)
    assert num_buckets == 12
    assert len(made) <= 4


# --- Optimizers -------------------------------------------------------------------------------------------------------


@check(2, 3)
def optimizers_groups_and_schedules(world: World) -> None:
    """Those that treat each element by itself."""
    optimizers = torch.optim
    for number, make in enumerate(
        [
            partial(optimizers.Adam, lr=0.01, amsgrad=True),
            partial(optimizers.SGD, lr=0.1, momentum=0.9, nesterov=True),
            partial(optimizers.RMSprop, lr=0.01),
            partial(optimizers.Adagrad, lr=0.1),
            partial(optimizers.AdamW, lr=0.01, fused=True),
            partial(optimizers.AdamW, lr=0.01, foreach=True),
            partial(optimizers.Adamax, lr=0.01),
            partial(optimizers.NAdam, lr=0.01),
            partial(optimizers.Rprop, lr=0.01),
        ]
    ):

        def groups(module: nn.Module) -> list[dict]:
            named = dict(module.named_parameters())
            slow = {"params": [one for name, one in named.items() if "bias" in name], "lr": 0.003}
            return [slow, {"params": [one for name, one in named.items() if "weight" in name]}]

        module = network()
        expected = Reference(module, world.size, lambda _, m=module, f=make: f(groups(m)))
        model = wrap(world, network())
        optimizer = ZeroOptimizer(model, make.func, groups(model.module), stage=1 + number % 2, **make.keywords)
        schedules = [
            optimizers.lr_scheduler.SequentialLR(
                one,
                [
                    optimizers.lr_scheduler.LinearLR(one, 0.1, total_iters=3),
                    optimizers.lr_scheduler.CosineAnnealingLR(one, 10),
                ],
                [3],
            )
            for one in (optimizer, expected.optimizer)
        ]
        for step in range(6):
            for rank in range(world.size):
                expected.backward(rank, lambda model, r=rank, s=step: squares(model(batch(r, s))))
            squares(model(batch(world.rank, step))).backward()
            expected.sum()
            expected.step()
            updates(optimizer)
            for one in schedules:
                one.step()
            assert [group["lr"] for group in optimizer.param_groups] == [
                group["lr"] for group in expected.optimizer.param_groups
            ]
        identical(model.module, expected.module)


@check(2)
def parameters_may_be_given_in_several_ways(world: World) -> None:
    for give in (
        lambda model: None,
        lambda model: model.parameters(),
        lambda model: list(model.module.parameters()),
        lambda model: model.named_parameters(),
        lambda model: iter([{"params": model.parameters(), "lr": 0.1}]),
        lambda model: [{"params": one} for one in model.parameters()],
        lambda model: [{"params": model.named_parameters()}],
    ):
        model, other = wrap(world, network()), wrap(world, network())
        optimizer = ZeroOptimizer(model, torch.optim.SGD, give(model), lr=0.1)
        plain = torch.optim.SGD(other.parameters(), lr=0.1)
        for step in range(2):
            for one, with_which in ((model, optimizer), (other, plain)):
                squares(one(batch(world.rank, step))).backward()
                updates(with_which)
        identical(model.module, other.module)


@check(2, 3)
def a_closure(world: World) -> None:
    expected = Reference(network(), world.size, SGD)
    model = wrap(world, network())
    optimizer = optimizer_of(model, 2, SGD)
    for step in range(3):
        for rank in range(world.size):
            expected.backward(rank, lambda model, r=rank, s=step: squares(model(batch(r, s))))
        expected.sum()
        expected.step()

        def closure(step=step) -> Tensor:
            optimizer.zero_grad()
            loss = squares(model(batch(world.rank, step)))
            loss.backward()
            return loss

        with torch.no_grad():
            assert optimizer.step(closure).item() > 0
    identical(model.module, expected.module)


@check(1, 2, 3)
def a_step_between_a_forward_and_its_backward_is_refused(world: World) -> None:
    for stage in STAGES:
        model = wrap(world, network())
        optimizer = optimizer_of(model, stage)
        expected = Reference(network(), world.size, ADAM)
        for step in range(3):
            squares(model(batch(world.rank, step))).backward()
            early = squares(model(batch(world.rank, step)))
            updates(optimizer)
            assert "modified by an inplace operation" in refusal(early.backward, RuntimeError)
            optimizer.zero_grad()
            for rank in range(world.size):
                expected.backward(rank, lambda one, r=rank, s=step: squares(one(batch(r, s))))
            expected.sum()
            expected.step()
        close(model.module, expected.module)


@check(2, 3)
def state_that_was_saved_is_gone_on_with(world: World) -> None:
    """By the same rank of as many."""
    for stage in (1, 2):
        model = wrap(world, network())
        optimizer = optimizer_of(model, stage)
        for step in range(3):
            squares(model(batch(world.rank, step))).backward()
            updates(optimizer)
        saved = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))
        other = wrap(world, network(7))
        other.load_state_dict(saved[0])
        another = ZeroOptimizer(other, torch.optim.AdamW, stage=stage, lr=5.0)
        another.load_state_dict(saved[1])
        schedule = torch.optim.lr_scheduler.ExponentialLR(another, 0.5)
        same = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3, 6):
            for one, with_which, change in ((model, optimizer, same), (other, another, schedule)):
                squares(one(batch(world.rank, step))).backward()
                updates(with_which)
                change.step()
        identical(other.module, model.module)


@check(2, 3)
def weights_that_are_loaded_are_stepped_on(world: World) -> None:
    """Also where the optimizer has copies of its own."""
    for dtype in (torch.float32, torch.bfloat16):
        model = wrap(world, network().to(dtype))
        optimizer = optimizer_of(model, 1, partial(torch.optim.SGD, lr=0.1))
        squares(model(batch(world.rank, 0).to(dtype))).backward()
        updates(optimizer)
        model.load_state_dict(network(5).to(dtype).state_dict())
        updates(optimizer)  # no gradients: nothing changes
        identical(model.module, network(5).to(dtype))


@check(2, 3)
def ranks_with_different_numbers_of_batches(world: World) -> None:
    num_batches = [3, 5, 4][: world.size]
    for by_all in (True, False):
        for stage in (1, 2):
            alone = network()
            expected = SGD(alone.parameters())
            model = wrap(world, network(), reproducible=stage == 1)
            optimizer = optimizer_of(model, stage, SGD)
            with Join([model, optimizer], divide_by_initial_world_size=by_all):
                for step in range(num_batches[world.rank]):
                    squares(model(batch(world.rank, step))).backward()
                    updates(optimizer)
            for step in range(max(num_batches)):
                active = [rank for rank, number in enumerate(num_batches) if number > step]
                for rank in active:
                    (squares(alone(batch(rank, step))) / (world.size if by_all else len(active))).backward()
                updates(expected)
            close(model.module, alone)
            # After that, all count again.
            for rank in range(world.size):
                (squares(alone(batch(rank, 9))) / world.size).backward()
            squares(model(batch(world.rank, 9))).backward()
            updates(expected)
            updates(optimizer)
            close(model.module, alone)
            world.require_same(model.parameters())


@check(2, 3)
def clipping_by_global_norm(world: World) -> None:
    """What is tied counts once."""
    for stage in STAGES:
        expected = Reference(Tied(), world.size, SGD)
        model = wrap(world, Tied())
        optimizer = optimizer_of(model, stage, SGD)
        for step in range(2):
            for rank in range(world.size):
                words = torch.arange(step + rank, step + rank + 6) % 11
                expected.backward(rank, lambda model, words=words: model(words))
                if rank == world.rank:
                    model(words).backward()
            expected.sum()
            wanted = torch.nn.utils.clip_grad_norm_(expected.module.parameters(), 0.1)
            found = clip_grad_norm_(optimizer if stage else model, 0.1)
            torch.testing.assert_close(found, wanted.double(), rtol=1e-5, atol=0)
            world.require_same([found])
            expected.step()
            updates(optimizer)
        close(model.module, expected.module)


# --- What travels -----------------------------------------------------------------------------------------------------


@check(2, 4, backends=["farandole"])
def as_many_bytes_travel_as_in_an_all_reduce(world: World) -> None:
    """A reduce_scatter in backward, an all_gather after the step: (N-1)/N of the flat tensors each."""
    for stage in (1, 2):
        model = wrap(world, network(), reproducible=False, broadcast_buffers=False)
        optimizer = optimizer_of(model, stage)
        communicator = world.group._get_backend(torch.device("cpu")).communicator

        def travelled(name: str, communicator=communicator) -> int:
            return sum(entry.bytes_sent for entry in communicator.stats() if entry.collective == name)

        part = sum(one.shard.layout.part_numel for one in model.gradient_sync.buckets)
        names = ("reduce_scatter", "all_gather")
        for step in range(3):
            before = [travelled(name) for name in names]
            squares(model(batch(world.rank, step))).backward()
            updates(optimizer)
            sent = [travelled(name) - was for name, was in zip(names, before, strict=True)]
            assert sent == [4 * part * (world.size - 1)] * 2


@check(2, 3)
def sixteen_bits_travel_and_32_are_summed(world: World) -> None:
    for stage in (1, 2):
        models = [wrap(world, network(), wire_dtype=torch.bfloat16) for _ in range(2)]
        optimizers = optimizer_of(models[0], stage, SGD), SGD(models[1].parameters())
        for step in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                squares(model(batch(world.rank, step))).backward()
                updates(optimizer)
        close(models[0].module, models[1].module, 2e-3)  # there the sum is rounded once more
        world.require_same(models[0].parameters())


# --- Wrong calls ------------------------------------------------------------------------------------------------------


@check(1, 2)
def wrong_arguments(world: World) -> None:
    model = wrap(world, network())
    some = list(model.parameters())
    make = partial(ZeroOptimizer, lr=0.1)
    for call, *parts in (
        (lambda: make(network(), torch.optim.SGD), "the model is a Sequential", "DataParallel(model)"),
        (lambda: make(model, torch.optim.SGD, stage=3), "stage=3", "1 or 2", "FullyShardedParallel"),
        (lambda: make(model, torch.optim.SGD, stage="2"), "stage='2'", "1 or 2"),
        (lambda: make(model, torch.optim.SGD, some[1:]), "'0.weight'", "no group of params", "requires_grad_(False)"),
        (lambda: make(model, torch.optim.SGD, []), "'0.weight'", "no group of params"),
        (
            lambda: make(model, torch.optim.SGD, [*some, nn.Parameter(torch.ones(2, 9))]),
            "shape (2, 9)",
            "model.parameters()",
        ),
        (
            lambda: make(model, torch.optim.SGD, [{"params": some}, {"params": some[-1:]}]),
            "'4.bias' is in params twice",
            "take it out",
        ),
    ):
        said = refusal(call, ArgumentError)
        assert all(part in said for part in parts), said
    refusal(lambda: ZeroOptimizer(model, torch.optim.SGD, lr=-1.0), ValueError)
    optimizer = make(model, torch.optim.SGD)
    said = refusal(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), ArgumentError)
    assert "new ZeroOptimizer" in said
    for call in (lambda: copy.deepcopy(optimizer), lambda: pickle.dumps(optimizer)):
        said = refusal(call, ArgumentError)
        assert "ZeroOptimizer" in said
        assert "state_dict()" in said
    squares(model(batch(world.rank, 0))).backward()  # and it works as before
    updates(optimizer)
    world.require_same(model.parameters())


@check(2, 3)
def a_backward_that_failed_on_one_rank_ends_that_of_all(world: World) -> None:
    def fail(_: Tensor) -> None:
        raise Bad

    for stage in (1, 2):
        expected = Reference(network(), world.size, SGD)
        model = wrap(world, network())
        optimizer = optimizer_of(model, stage, SGD)
        for step in range(6):
            if step == 3:  # what was accumulated before is gone, too
                squares(model(batch(world.rank, 90))).backward()
            loss = squares(model(batch(world.rank, step)))
            if step in (1, 3):
                if world.rank == 0:
                    handle = model.module[2].bias.register_hook(fail)
                refusal(loss.backward, Bad if world.rank == 0 else BackwardFailedError)
                if world.rank == 0:
                    handle.remove()
                continue
            loss.backward()
            for rank in range(world.size):
                expected.backward(rank, lambda model, r=rank, s=step: squares(model(batch(r, s))))
            expected.sum()
            expected.step()
            updates(optimizer)
        identical(model.module, expected.module)


class FailsLater(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(context, gradient: Tensor) -> Tensor:
        raise Bad


class Bad(RuntimeError):
    pass


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.raises = False
        self.wraps = torch.clone

    def forward(self, inputs: Tensor) -> Tensor:
        if self.raises:
            raise Bad
        return self.wraps(self.inner(inputs))


@check(2, 3)
def a_step_left_out_by_one_rank_is_told_to_all_and_none_is_out_of_step(world: World) -> None:
    """Wherever it fails on that rank: each gradient that any rank gets is of all ranks' batches of one step. What fails
    in forward or in its backward ends one step; what fails between ends all, until all ranks come together."""
    for stage in STAGES:
        for where in ("in forward", "in backward", "between", "in the backward of the loss"):
            module = Raises()
            model = wrap(world, module)
            optimizer = optimizer_of(model, stage, SGD)
            expected = Reference(network(), world.size, SGD)
            said = []
            for step in range(8):
                if step == 5:
                    state = model.state_dict()
                    module = Raises()
                    model = wrap(world, module)
                    model.load_state_dict(state)
                    optimizer = optimizer_of(model, stage, SGD)
                    expected.optimizer = SGD(expected.module.parameters())
                fails = world.rank == 0 and step == 2
                module.raises = fails and where == "in forward"
                module.wraps = FailsLater.apply if fails and where == "in backward" else torch.clone
                try:
                    outputs = model(batch(world.rank, step))
                    if fails and where == "between":
                        raise Bad
                    after = FailsLater.apply if fails and where.endswith("loss") else torch.clone
                    squares(after(outputs)).backward()
                except (Bad, BackwardFailedError, OutOfStepError) as error:
                    said.append(type(error).__name__)
                    continue
                said.append("")
                for rank in range(world.size):
                    expected.backward(rank, lambda one, r=rank, s=step: squares(one(batch(r, s))))
                expected.sum()
                expected.step()
                updates(optimizer)
                identical(module.inner, expected.module)
            if where in ("in forward", "in backward"):
                assert said == ["", "", "Bad" if world.rank == 0 else "BackwardFailedError", *[""] * 5]
            else:
                ends = ["Bad", "OutOfStepError"] if world.rank == 0 else ["OutOfStepError"] * 2
                assert said == ["", "", *ends, "OutOfStepError", "", "", ""]


@check(2, 3)
def who_is_ahead_is_named_and_what_a_rank_does_alone_is_not_counted(world: World) -> None:
    model = wrap(world, network())
    if world.rank == 0:
        model(batch(0, 0))  # and no backward
    said = refusal(squares(model(batch(world.rank, 1))).backward, OutOfStepError)
    assert "1 of the forwards before this backward had none on rank 0, 0 on rank" in said
    assert "go on from a checkpoint" in said
    assert all(one.grad is None for one in model.parameters())
    assert refusal(lambda: model(batch(0, 0)), OutOfStepError) == said
    model = wrap(world, network())
    for step in range(4):
        if world.rank == step % world.size:
            with torch.no_grad():
                model(batch(0, 0))
            model.eval()
            model(batch(0, 0))
            model.train()
            model.module(batch(0, 0))
        with model.no_sync():
            for number in range(world.rank):
                squares(model(batch(world.rank, number))).backward()
        two = model(batch(world.rank, step)), model(batch(world.rank, step + 1))
        num_used = 1 + step % 2 if step < 2 else 1 + (step + world.rank) % 2
        sum(map(squares, two[:num_used])).backward()  # one is left out now and then, perhaps on some ranks only
    world.require_same(one.grad for one in model.parameters())


@check(2, 3)
def a_rank_that_failed_goes_on_with_something_else_than_a_forward(world: World) -> None:
    for stage in STAGES:
        for what in ("step", "clip", "save", "load"):
            if stage == 0 and what == "step":
                continue  # of an optimizer that knows of no other rank
            model = wrap(world, Raises())
            optimizer = optimizer_of(model, stage, SGD)
            path = Path(tempfile.gettempdir()) / f"farandole-{world.all_of(os.getpid())[0]}"
            save_checkpoint(path, model, optimizer)
            before = [bits(one) for one in model.parameters()]
            if world.rank == 0:
                handle = model.module.inner[0].weight.register_hook(lambda _: FailsLater.backward(None, _))
            refusal(squares(model(batch(world.rank, 0))).backward, Bad if world.rank == 0 else BackwardFailedError)
            if world.rank == 0:
                handle.remove()
            if what == "step":
                optimizer.step()
            elif what == "clip":
                assert clip_grad_norm_(optimizer if stage else model, 1.0) == 0
            elif what == "save":
                save_checkpoint(path, model, optimizer)
            else:
                load_checkpoint(path, model, optimizer)
            if world.rank == 0:
                shutil.rmtree(path)
            assert [bits(one) for one in model.parameters()] == before
            squares(model(batch(world.rank, 1))).backward()


@check(2, 3)
def a_loop_that_steps_whatever_failed_has_the_same_weights_on_all_ranks(world: World) -> None:
    for stage in STAGES:
        for where in ("in forward", "in backward", "within no_sync"):
            for set_to_none in (True, False):
                module = Raises()
                model = wrap(world, module)
                optimizer = optimizer_of(model, stage)
                expected = Reference(network(), world.size, ADAM)
                said = []
                for step in range(6):
                    fails = world.rank == 0 and step in (0, 3)
                    optimizer.zero_grad(set_to_none)
                    for number in range(2):
                        is_last = number == 1
                        fails_now = fails and is_last == (where != "within no_sync")
                        module.raises = fails_now and where == "in forward"
                        module.wraps = FailsHalfway(module) if fails_now and where != "in forward" else torch.clone
                        try:
                            with contextlib.nullcontext() if is_last else model.no_sync():
                                squares(model(batch(world.rank, 2 * step + number))).backward()
                        except (Bad, BackwardFailedError) as error:
                            said.append(type(error).__name__)
                    with contextlib.suppress(ArgumentError):  # of what no_sync has left where the last one failed
                        optimizer.step()
                    if step not in (0, 3):
                        for number in range(2):
                            for rank in range(world.size):
                                expected.backward(
                                    rank, lambda one, r=rank, n=2 * step + number: squares(one(batch(r, n)))
                                )
                        expected.sum()
                        expected.step()
                    world.require_same(model.parameters())
                close(module.inner, expected.module)
                if where == "within no_sync" and world.rank == 0:
                    assert said == ["Bad", "BackwardFailedError"] * 2
                else:
                    assert said == ["Bad" if world.rank == 0 else "BackwardFailedError"] * 2


class FailsHalfway:
    """Makes the backward fail when the last layer has its gradients."""

    def __init__(self, module: Raises) -> None:
        self._layer = module.inner[2]

    def __call__(self, outputs: Tensor) -> Tensor:
        def fail(_: Tensor) -> None:
            handle.remove()
            raise Bad

        handle = self._layer.weight.register_hook(fail)
        return outputs.clone()


@check(2, 3)
def what_comes_after_a_failure_may_be_of_another_model(world: World) -> None:
    for stage in STAGES:
        for what in ("another", "anew", "scaler"):
            module = Raises()
            model, other = wrap(world, module), wrap(world, network())
            optimizer = optimizer_of(model, stage, SGD)
            module.wraps = FailsHalfway(module) if world.rank == 0 else torch.clone
            scaler = GradScaler(model)
            loss = scaler.scale(squares(model(batch(world.rank, 0))))
            refusal(loss.backward, Bad if world.rank == 0 else BackwardFailedError)
            module.wraps = torch.clone
            if what == "another":
                squares(other(batch(world.rank, 1))).backward()
            elif what == "anew":
                model = wrap(world, module)
                optimizer = optimizer_of(model, stage, SGD)
            else:
                scaler.unscale_(optimizer)
            squares(model(batch(world.rank, 1))).backward()
            optimizer.step()
            world.require_same(model.parameters())


@check(2, 3)
def a_rank_whose_backward_reaches_no_parameter_takes_part(world: World) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(10))

        def forward(self, inputs: Tensor, skips: bool) -> Tensor:
            return inputs * 2 if skips else inputs * self.weight

    for stage in STAGES:
        for kind in ("zeros", "error"):
            model = wrap(world, Skips(), unused=kind)
            optimizer = optimizer_of(model, stage, partial(torch.optim.SGD, lr=1.0))
            for step in range(4):
                skips = step % 2 and world.rank == 0
                inputs = torch.full((10,), float(10**step), requires_grad=True)
                outputs = model(inputs, skips)
                # What asks for gradients of inputs alone is of this rank alone.
                torch.autograd.grad(outputs.sum(), inputs, retain_graph=True)
                if not skips:
                    outputs.sum().backward(inputs=[inputs], retain_graph=True)
                with torch.no_grad():
                    before = model.module.weight.clone()
                if step % 2 and kind == "error":
                    assert "'weight' on rank 0;" in refusal(outputs.sum().backward, UnusedParametersError)
                    optimizer.zero_grad()
                    continue
                outputs.sum().backward()
                updates(optimizer)
                share = (world.size - step % 2) / world.size
                torch.testing.assert_close(before - model.module.weight, torch.full((10,), share * 10**step))


@check(2, 3)
def several_models_in_one_backward_have_one_order_on_all_ranks(world: World) -> None:
    for stage in STAGES:
        models = [wrap(world, network(seed)) for seed in range(2)]
        for model in models:
            optimizer_of(model, stage)
        inputs = batch(world.rank, 0)
        for is_same in (True, True, False):
            order = (
                models if is_same or world.rank else models[::-1]
            )  # backward is in the order of computation, reversed
            loss = sum(squares(model(inputs)) for model in order)
            if is_same:
                loss.backward()
                continue
            said = refusal(loss.backward, OutOfStepError)
            assert "in another order than rank 0" in said
            for model in models:
                assert refusal(lambda model=model, inputs=inputs: model(inputs), OutOfStepError) == said
            break


@check(2, 3)
def what_is_sharded_is_not_stepped_in_vain(world: World) -> None:
    model = wrap(world, network())
    early = SGD(model.parameters())
    first = optimizer_of(model, 1, SGD)
    second = optimizer_of(model, 2, SGD)
    squares(model(batch(world.rank, 0))).backward()
    assert "another ZeroOptimizer since this one" in refusal(first.step, ArgumentError)
    assert "the SGD has parameters that are sharded, and get no gradients" in refusal(early.step, ArgumentError)
    second.step()
    again = wrap(world, model.module)  # whole once more
    for optimizer in (early, SGD(again.parameters())):
        squares(again(batch(world.rank, 1))).backward()
        optimizer.step()
    whole = optimizer_of(wrap(world, network()), 1, partial(torch.optim.Adafactor, lr=0.1))
    squares(whole.model(batch(world.rank, 0))).backward()
    assert "Adafactor needs whole parameters, and these are pieces" in refusal(whole.step, ArgumentError)


@check(1, 2, 3)
def the_state_of_an_optimizer_that_had_frozen_parameters_too(world: World) -> None:
    def make() -> nn.Sequential:
        module = network()
        module[0].requires_grad_(False)
        return module

    alone = make()
    one, two = list(alone[:3].parameters()), list(alone[3:].parameters())
    expected = ADAM([{"params": one}, {"params": two, "lr": 0.1}])
    squares(alone(batch(0, 0))).backward()
    updates(expected)
    model = wrap(world, copy.deepcopy(alone))
    halves = list(model.module[:3].parameters()), list(model.module[3:].parameters())
    groups = [{"params": some, "lr": 9.0} for some in halves]
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, groups, weight_decay=0.1)
    optimizer.load_state_dict(expected.state_dict())
    for each in (alone, model):
        squares(each(batch(0, 1))).backward()
    updates(expected)
    updates(optimizer)
    close(model.module, alone, 1e-6)
    other = ADAM(nn.Linear(3, 4).parameters())
    said = refusal(lambda: optimizer.load_state_dict(other.state_dict()), ArgumentError)
    assert "groups of [2] parameters; those here have [4, 2], frozen ones included" in said
    wrong = expected.state_dict()
    wrong["state"][5]["exp_avg"] = torch.zeros(3, 4)
    said = refusal(lambda: optimizer.load_state_dict(wrong), ArgumentError)
    assert "the state has a 'exp_avg' of shape (3, 4) for '4.bias', which is of shape (5,)" in said


@check(2, 3)
def gradients_are_let_go_of_before_or_after_while_some_ranks_are_through(world: World) -> None:
    for stage in STAGES:
        found = []
        for is_first in (True, False):
            model = wrap(world, network())
            optimizer = optimizer_of(model, stage, SGD)
            with model.join():
                for step in range(1 + 2 * world.rank):
                    if is_first:
                        optimizer.zero_grad()
                    squares(model(batch(world.rank, step))).backward()
                    optimizer.step()
                    if not is_first:
                        optimizer.zero_grad()
            found.append([bits(one) for one in model.parameters()])
        assert found[0] == found[1]
    model = wrap(world, network())
    optimizer = optimizer_of(model, 1)
    scaler = GradScaler(model)
    for call in (lambda: clip_grad_norm_(optimizer, 1.0), lambda: scaler.unscale_(optimizer)):

        def loop(call=call) -> None:
            with model.join():
                scaler.scale(squares(model(batch(world.rank, 0)))).backward()
                call()

        assert "within join(), ranks that are through cannot" in refusal(loop, ArgumentError)
    for context in (contextlib.nullcontext, model.no_sync):

        def accumulate(context=context) -> None:
            with model.join():
                for number in range(2):
                    with context():
                        squares(model(batch(world.rank, number))).backward()

        assert "within join(), a ZeroOptimizer steps after each backward" in refusal(accumulate, ArgumentError)
        model.zero_grad()


@check(2, 3)
def learning_rates_change_while_some_ranks_are_through(world: World) -> None:
    num_batches = [1, 4, 2][: world.size]
    for stage in STAGES:
        alone = network()
        model = wrap(world, network())
        optimizers = optimizer_of(model, stage, SGD), SGD(alone.parameters())
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in optimizers]

        def step_of(which: int, optimizers=optimizers, schedulers=schedulers) -> None:
            updates(optimizers[which])
            schedulers[which].step()

        with model.join(optimizer=None if stage else optimizers[0]):
            for step in range(num_batches[world.rank]):
                squares(model(batch(world.rank, step))).backward()
                step_of(0)
        for step in range(max(num_batches)):
            for rank in range(world.size):
                if num_batches[rank] > step:
                    (squares(alone(batch(rank, step))) / world.size).backward()
            step_of(1)
        for step in range(9, 12):  # states, too, are those of ranks that went on
            assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
            squares(model(batch(world.rank, step))).backward()
            for rank in range(world.size):
                (squares(alone(batch(rank, step))) / world.size).backward()
            updates(optimizers[0])
            updates(optimizers[1])
        close(model.module, alone)
        world.require_same(model.parameters())


@pytest.fixture(scope="module")
def outcomes():
    return training_worlds.run(__name__)


@pytest.mark.parametrize("name", check.names())
def test_on_ranks(outcomes, name):
    assert outcomes[name] == ""
