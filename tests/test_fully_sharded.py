"""Fully sharded training: against one process, against the other stages, and against torch's own."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from functools import partial

import pytest
import torch
import training_worlds
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from training_worlds import Checks, Mixed, Reference, World, batch, bits, network, refusal

from farandole.errors import ArgumentError
from farandole.training import (
    CheckpointError,
    DataParallel,
    DifferentModelsError,
    FullyShardedParallel,
    GradScaler,
    NotGatheredError,
    UnusedParametersError,
    ZeroOptimizer,
    clip_grad_norm_,
)
from farandole.training.layout import Layout

check = Checks()
ADAM = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def squares(outputs: Tensor) -> Tensor:
    return (outputs.float() ** 2).mean()


def same_bits(model: FullyShardedParallel, expected: nn.Module) -> None:
    state, wanted = model.state_dict(), expected.state_dict()
    assert list(state) == list(wanted)
    for name, one in wanted.items():
        assert bits(state[name]) == bits(one), name


def require_released(model: FullyShardedParallel) -> None:
    """No rank has more than its part."""
    for unit in model.units:
        for flat in unit.flats:
            assert all(one.untyped_storage().nbytes() == 0 for one in flat.whole), unit.name
            assert flat._sent is None


def at_stage(world: World, stage: int, module: nn.Module, make=SGD, **options):
    if stage == 3:
        model = FullyShardedParallel(module, group=world.group, **options)
        return model, make(model.parameters())
    model = DataParallel(module, group=world.group, bucket_bytes=200, **options)
    return model, ZeroOptimizer(model, make, stage=stage) if stage else make(model.parameters())


# --- The right weights -----------------------------------------------------------------------------------------------


@check(1, 2, 3, 4)
def random_modules_are_trained_as_by_one_process(world: World) -> None:
    for seed in range(8):
        rng = random.Random(seed)
        module = Mixed(seed)
        reference = Reference(copy.deepcopy(module), world.size, ADAM)
        model = FullyShardedParallel(module, group=world.group, unused="zeros", reproducible=True)
        optimizer = ADAM(model.parameters())
        for step in range(4):
            for turn in range(rng.randint(1, 2)):
                order = rng.sample(range(6), 6)[: rng.randint(1, 6)]
                only_here = rng.random() < 0.3
                for rank in range(world.size):
                    inputs = batch(rank, 10 * step + turn)
                    reference.backward(rank, lambda one, inputs=inputs, order=order: squares(one(inputs, order)))
                inputs = batch(world.rank, 10 * step + turn)
                if only_here:
                    with model.no_sync():
                        squares(model(inputs, order)).backward()
                squares(model(inputs, order)).backward()
                if only_here:
                    for rank in range(world.size):
                        inputs = batch(rank, 10 * step + turn)
                        reference.backward(rank, lambda one, inputs=inputs, order=order: squares(one(inputs, order)))
                reference.sum()
                require_released(model)
            optimizer.step()
            optimizer.zero_grad()
            reference.step()
        same_bits(model, reference.module)


@check(2, 3, 4)
def all_stages_give_the_same_bits(world: World) -> None:
    states = []
    for stage in range(4):
        model, optimizer = at_stage(world, stage, network(), ADAM, reproducible=True)
        for step in range(50):
            optimizer.zero_grad()
            squares(model(batch(world.rank, step))).backward()
            optimizer.step()
        states.append({name: bits(one) for name, one in model.state_dict().items()})
    assert states[0] == states[1] == states[2] == states[3]


@check(1, 2, 3)
def autocast_gives_what_it_gives_in_one_process(world: World) -> None:
    for stage in range(4):
        reference = Reference(network(), world.size, ADAM)
        model, optimizer = at_stage(world, stage, network(), ADAM, reproducible=True)
        for step in range(5):
            with torch.autocast("cpu", torch.bfloat16):
                loss = squares(model(batch(world.rank, step)))
            loss.backward()
            for rank in range(world.size):
                with torch.autocast("cpu", torch.bfloat16):
                    reference.backward(rank, lambda one, rank=rank, step=step: squares(one(batch(rank, step))))
            reference.sum()
            for one in (optimizer, reference):
                one.step()
            optimizer.zero_grad()
        same_bits(model, reference.module)


def compiled(function):
    return torch.compile(function, backend="aot_eager")


@check(2)
def what_is_compiled_is_trained_as_what_is_not(world: World) -> None:
    def trained(stage: int, what: str) -> dict[str, Tensor]:
        torch._dynamo.reset()
        module = nn.Sequential(network(), nn.BatchNorm1d(5))
        if what == "layers":
            for layer in module[0]:
                layer.compile(backend="aot_eager")
        model, optimizer = at_stage(world, stage, compiled(module) if what == "module" else module)
        call = compiled(model) if what == "wrapper" else model

        def step(first: Tensor, second: Tensor) -> None:
            with model.no_sync():
                squares(call(first)).backward()
            squares(call(second)).backward()
            clip_grad_norm_(optimizer if stage in (1, 2) else model, 0.5)
            optimizer.step()
            optimizer.zero_grad()

        if what == "step":
            step = compiled(step)
        for number in range(0, 6, 2):
            step(batch(world.rank, number), batch(world.rank, number + 1))
        return {name.replace("_orig_mod.", ""): one.clone() for name, one in model.state_dict().items()}

    for stage in range(4):
        expected = trained(stage, "nothing")
        for what in ("layers", "module", "wrapper", "step"):
            actual = trained(stage, what)
            world.require_same(one for name, one in actual.items() if "running" not in name)
            for name, one in expected.items():
                torch.testing.assert_close(actual[name], one, msg=lambda said, at=(stage, what, name): f"{at}: {said}")


@check(2, 4)
def it_is_as_torchs_own(world: World) -> None:
    ours, theirs = network(), network()
    model = FullyShardedParallel(ours, group=world.group)
    mesh = DeviceMesh.from_group(world.group, "cpu")
    for layer in (theirs[0], theirs[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    optimizers = ADAM(model.parameters()), ADAM(theirs.parameters())
    for step in range(20):
        for one, optimizer in zip((model, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            squares(one(batch(world.rank, step))).backward()
            optimizer.step()
    with model.gathered():
        for name, one in theirs.named_parameters():
            torch.testing.assert_close(ours.get_parameter(name), one.full_tensor(), rtol=1e-5, atol=1e-6)


class LowRank(nn.Module):
    """A frozen layer, and a small one that is trained beside it; the weights of the frozen one are needed after all
    gradients of the small one are there."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.base(inputs)) + self.up(self.down(inputs))


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module], is_reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.layers = nn.ModuleList(layers)
        self.is_reentrant = is_reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.first(inputs)
        for layer in self.layers:
            if self.is_reentrant is None:
                values = layer(values)
            else:
                values = checkpoint(layer, values, use_reentrant=self.is_reentrant)
        return values


@check(1, 2, 3)
def frozen_layers_under_checkpoints(world: World) -> None:
    for is_reentrant in (None, False, True):
        torch.manual_seed(0)
        module = Stack([LowRank(10) for _ in range(3)], is_reentrant)
        reference = Reference(copy.deepcopy(module), world.size, ADAM)
        flags = {name: one.requires_grad for name, one in module.named_parameters()}
        model = FullyShardedParallel(module, group=world.group, reproducible=True)
        for name, one in model.named_parameters():
            assert one.requires_grad == flags[name], name
        optimizer = ADAM(model.parameters())
        for step in range(5):
            for rank in range(world.size):
                reference.backward(rank, lambda one, rank=rank, step=step: squares(one(batch(rank, step))))
            reference.sum()
            reference.step()
            squares(model(batch(world.rank, step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        same_bits(model, reference.module)


class Recurrent(nn.Module):
    """nn.LSTM keeps a list of its parameters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(10, 10, batch_first=True) for _ in range(2)])

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs, _ = layer(inputs)
        return inputs


@check(2)
def modules_that_keep_parameters_elsewhere_too(world: World) -> None:
    torch.manual_seed(0)
    module = Recurrent()
    reference = Reference(copy.deepcopy(module), world.size, SGD)
    model = FullyShardedParallel(module, group=world.group)
    optimizer = SGD(model.parameters())
    for step in range(3):
        for rank in range(world.size):
            reference.backward(rank, lambda one, rank=rank, step=step: squares(one(batch(rank, step)[None])))
        reference.sum()
        reference.step()
        squares(model(batch(world.rank, step)[None])).backward()
        optimizer.step()
        optimizer.zero_grad()
    same_bits(model, reference.module)


@check(2, 3)
def units_in_containers_used_twice_and_forwards_in_advance(world: World) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10)])

        def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            first, second = self.layers
            return {"a": first(torch.tanh(second(first(inputs["x"])))), "b": second(inputs["x"])}

    torch.manual_seed(0)
    module = Twice()
    reference = Reference(copy.deepcopy(module), world.size, SGD)
    model = FullyShardedParallel(module, group=world.group, reproducible=True)
    optimizer = SGD(model.parameters())

    def loss_of(one: nn.Module, rank: int, step: int) -> Tensor:
        before, after = one({"x": batch(rank, step)}), one({"x": batch(rank, step + 100)})
        return squares(before["a"]) + squares(after["b"]) + squares(after["a"])

    for step in range(4):
        for rank in range(world.size):
            reference.backward(rank, lambda one, rank=rank, step=step: loss_of(one, rank, step))
        reference.sum()
        reference.step()
        loss_of(model, world.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # the new weights are used
            outputs = model({"x": batch(0, step)})["a"]
            assert bits(outputs) == bits(reference.module({"x": batch(0, step)})["a"])
        require_released(model)
    same_bits(model, reference.module)


@check(2, 4)
def sixteen_bits_are_gathered_and_32_are_kept(world: World) -> None:
    model = FullyShardedParallel(network(), group=world.group, param_dtype=torch.bfloat16)
    alone = network()
    optimizers = SGD(model.parameters(), lr=0.01), SGD(alone.parameters(), lr=0.01)
    seen = []
    model.module[0].register_forward_pre_hook(lambda layer, *_: seen.append(layer.weight.dtype))
    for step in range(10):
        squares(model(batch(world.rank, step))).backward()
        squares(alone(torch.cat([batch(rank, step) for rank in range(world.size)]))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert set(seen) == {torch.bfloat16}
    state = model.state_dict()
    for name, one in alone.state_dict().items():
        assert state[name].dtype == torch.float32
        torch.testing.assert_close(state[name], one, rtol=0.02, atol=0.02)
    assert any(bits(one.bfloat16()) != bits(one) for one in state.values())  # finer than what travels


def sent(world: World) -> int:
    return sum(one.bytes_sent for one in world.group.communicator.stats())


@check(2, 3, 4, backends=["farandole"])
def three_quarters_of_two_all_reduces_travel(world: World) -> None:
    for param_dtype, size in ((None, 4), (torch.bfloat16, 2)):
        layers = [nn.Linear(10, 10) for _ in range(5)]
        model = FullyShardedParallel(Stack(layers), group=world.group, param_dtype=param_dtype)
        optimizer = SGD(model.parameters())
        for step in range(3):
            before = sent(world)
            squares(model(batch(world.rank, step))).backward()
            now = sent(world) - before
            optimizer.step()
        part = Layout([torch.Size((10, 10)), torch.Size((10,))], world.size).part_numel * size
        # Of six layers, one is in no unit, and one is the last: these are gathered once.
        gathered = (2 * 6 - 2) * part * (world.size - 1)
        scattered = 6 * part * (world.size - 1)
        told = now - gathered - scattered
        assert 0 < told < 200 * (world.size - 1), (now, gathered, scattered)


@check(1, 2, 3)
def a_backward_long_after_its_forward_or_twice(world: World) -> None:
    """What the forward has let go of, or others since, is there again."""

    def before_backward(model, kind: str) -> None:
        with torch.no_grad() if kind == "no_grad" else torch.inference_mode(kind == "inference_mode"):
            model(batch(0, 1))
        if kind == "state_dict":
            model.state_dict()

    for kind in ("no_grad", "inference_mode", "another forward", "state_dict"):
        module = Stack([nn.Linear(10, 10) for _ in range(3)])
        reference = Reference(copy.deepcopy(module), world.size, SGD)
        model = FullyShardedParallel(module, group=world.group, reproducible=True)
        reference.module.load_state_dict(model.state_dict())
        reference.step()
        optimizer = SGD(model.parameters())
        for step in range(3):
            for rank in range(world.size):
                for _ in range(2):
                    reference.backward(rank, lambda one, rank=rank, step=step: squares(one(batch(rank, step))))
            reference.sum()
            reference.step()
            with model.no_sync():
                loss = squares(model(batch(world.rank, step)))
                before_backward(model, kind)
                loss.backward(retain_graph=True)
                require_released(model)
            loss.backward()
            require_released(model)
            optimizer.step()
            optimizer.zero_grad()
        same_bits(model, reference.module)


@check(1, 2)
def gradients_of_gradients(world: World) -> None:
    """As a penalty on them asks for; with another forward in between, or none."""
    for forward_between in (False, True):
        module = Stack([nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(3)])
        alone = copy.deepcopy(module)
        model = FullyShardedParallel(module, group=world.group)
        alone.load_state_dict(model.state_dict())

        def loss_of(one: nn.Module, step: int, forward_between: bool) -> Tensor:
            inputs = batch(0, step).requires_grad_()
            (slope,) = torch.autograd.grad(one(inputs).sum(), inputs, create_graph=True)
            return squares(slope) + (squares(one(batch(0, step + 50))) if forward_between else 0)

        for step in range(4):
            loss, expected = loss_of(model, step, forward_between), loss_of(alone, step, forward_between)
            for _ in range(step % 2):  # more than one backward
                loss.backward(retain_graph=True)
                expected.backward(retain_graph=True)
            loss.backward()
            require_released(model)
            expected.backward()
        wanted = dict(alone.named_parameters())
        for one in model.holdings():
            if one.value.numel() and wanted[one.name].grad is not None:
                gradient = wanted[one.name].grad.flatten()[one.start : one.stop]
                torch.testing.assert_close(one.value.grad, gradient, rtol=1e-4, atol=1e-6)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, inputs: Tensor, leaves_out: bool) -> Tensor:
        values = self.first(inputs)
        return torch.tanh(values if leaves_out else values + self.second(inputs))


@check(2, 3)
def ranks_that_use_other_parameters_of_a_unit(world: World) -> None:
    """A unit's gradients are then not all there on each rank, and yet all ranks sum at the same place among the
    gathers."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Linear(10, 10)
            self.layers = nn.ModuleList(Both() for _ in range(4))

        def forward(self, inputs: Tensor, leaves_out: int) -> Tensor:
            values = self.start(inputs)
            for number, layer in enumerate(self.layers):
                values = layer(values, number == leaves_out)
            return values

    module = Layers()
    reference = Reference(copy.deepcopy(module), world.size, SGD)
    model = FullyShardedParallel(module, group=world.group, reproducible=True, unused="zeros")
    reference.module.load_state_dict(model.state_dict())
    reference.step()
    optimizer = SGD(model.parameters())
    for step in range(8):
        for rank in range(world.size):
            reference.backward(
                rank, lambda one, rank=rank, step=step: squares(one(batch(rank, step), (step + rank) % 5))
            )
        reference.sum()
        reference.step()
        squares(model(batch(world.rank, step), (step + world.rank) % 5)).backward()
        optimizer.step()
        optimizer.zero_grad()
    same_bits(model, reference.module)
    strict = FullyShardedParallel(Layers(), group=world.group)
    for _ in range(3):
        text = refusal(
            lambda: squares(strict(batch(0, 0), 2 if world.rank == 0 else -1)).backward(), UnusedParametersError
        )
        assert "'layers.2.second.weight' on rank 0" in text


@check(2)
def sums_start_while_backward_goes_on(world: World) -> None:
    model = FullyShardedParallel(Stack([nn.Linear(10, 10) for _ in range(4)]), group=world.group)
    seen = []
    for step in range(3):
        outputs = model(batch(world.rank, step))
        model.module.first.register_full_backward_hook(
            lambda *_: seen.append(sum(one._pending is not None for one in model.gradient_sync.buckets))
        )
        seen.clear()
        squares(outputs).backward()
    assert seen[-1] >= 1


@check(2, 3)
def few_gradients_are_on_their_way_at_a_time(world: World) -> None:
    """From the first backward on: what is in no unit, and two units."""
    for reproducible in (False, True):
        module = Stack([nn.Linear(10, 10) for _ in range(6)])
        model = FullyShardedParallel(module, group=world.group, reproducible=reproducible)
        for step in range(4):
            squares(model(batch(world.rank, step))).backward()
            buffers = {one.data_ptr() for kind, one in model.held() if kind == "buffers"}
            assert len(buffers) <= 3, (reproducible, step, len(buffers))


@check(2)
def units_in_which_inputs_are_written_or_outputs_are_unusual(world: World) -> None:
    class Odd(dict):
        pass

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.attention = nn.Linear(10, 10), nn.MultiheadAttention(10, 2)

        def forward(self, inputs: Tensor) -> Odd:
            inputs.mul_(0.9).relu_()
            inputs = self.layer(inputs)
            return Odd(found=inputs + self.attention(inputs, inputs, inputs)[0], of=[{1}, "text"])

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(10, 10)
            self.layers = nn.ModuleList(Writes() for _ in range(3))

        def forward(self, inputs: Tensor) -> Odd:
            values = self.first(inputs)
            for layer in self.layers:
                values = layer(values)["found"]
            return Odd(found=values)

    for kind in (Writes, nn.MultiheadAttention):
        module = Chain()
        alone = copy.deepcopy(module)
        model = FullyShardedParallel(module, units=kind, group=world.group)
        alone.load_state_dict(model.state_dict())
        for step in range(2):
            squares(model(batch(0, step))["found"]).backward()
            squares(alone(batch(0, step))["found"]).backward()
        wanted = dict(alone.named_parameters())
        for one in model.holdings():
            if one.value.numel():
                gradient = wanted[one.name].grad.flatten()[one.start : one.stop]
                if kind is Writes:
                    assert bits(one.value.grad) == bits(gradient), one.name
                else:  # what a unit computes from its inputs several times is added up before what others do
                    torch.testing.assert_close(one.value.grad, gradient)


@check(2)
def a_unit_that_returns_its_own_parameter_is_refused(world: World) -> None:
    class Query(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = nn.Parameter(torch.randn(10, 10))

        def forward(self, inputs: Tensor) -> dict[str, Tensor]:
            return {"rows": self.values[: len(inputs)]}

    model = FullyShardedParallel(nn.Sequential(Query()), group=world.group)
    assert refusal(lambda: model(batch(0, 0)), NotGatheredError) == (
        "'0' is sharded, and returns a parameter, or a view of one, of shape (4, 10): its memory is let go of now; "
        "return a clone()"
    )


@check(2)
def what_is_returned_does_not_collect_hooks(world: World) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(10, 10), nn.Parameter(torch.ones(()))

        def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
            return self.layer(inputs) * self.scale, self.scale, inputs

    for wrapper in (DataParallel, FullyShardedParallel):
        model = wrapper(Returns(), group=world.group)
        inputs = batch(0, 0).requires_grad_()
        for _ in range(3):
            outputs, *others = model(inputs)
            squares(outputs).backward()
        assert [one._backward_hooks for one in others] == [None, None]


# --- Whole parameters ------------------------------------------------------------------------------------------------


@check(1, 2, 3)
def a_parameter_that_is_not_gathered_is_refused_in_every_use(world: World) -> None:
    model = FullyShardedParallel(nn.Sequential(nn.Linear(50, 17)), group=world.group)
    layer = model.module[0]
    for use in (
        lambda one: one + 1,
        lambda one: 2 * one,
        lambda one: torch.ones(3) * one,
        lambda one: one.sum(),
        lambda one: one[0],
        lambda one: torch.nn.functional.linear(torch.zeros(50), one),
        lambda one: one @ one,
        lambda one: len(one),
        lambda one: one == 0,
        lambda one: one != 0,
        lambda one: one // 2,
        lambda one: one.shape,
    ):
        text = refusal(lambda use=use: use(layer.weight), NotGatheredError)
        assert text == (
            "'0.weight' is sharded, and whole only while its module computes; use it in a forward that the wrapped "
            "model calls, or within `with model.gathered():`"
        )
    with model.gathered():
        assert layer.weight.shape == (17, 50)
        layer.weight.fill_(world.rank)  # each rank keeps its own part
    values = model.state_dict()["0.weight"].flatten().tolist()
    assert values == sorted(values)
    assert set(values) == set(range(world.size))


@check(1, 2, 3)
def states_are_whole_on_every_rank(world: World) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(7, 3)
            self.head = nn.Linear(3, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.nothing = nn.Parameter(torch.zeros(0, 2))
            self.register_buffer("kept", torch.arange(3.0))
            self.register_buffer("not_kept", torch.ones(2), persistent=False)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens)) + self.nothing.sum()

    module = Tied()
    wanted = {name: one.clone() for name, one in module.state_dict().items()}
    model = FullyShardedParallel(module, group=world.group)
    state = model.state_dict()
    assert state.keys() == wanted.keys()
    world.require_same(state.values())
    other = FullyShardedParallel(Tied(), group=world.group)
    assert not torch.equal(other.state_dict()["head.weight"], state["head.weight"])
    other.load_state_dict(state)
    assert {name: bits(one) for name, one in other.state_dict().items()} == {
        name: bits(one) for name, one in state.items()
    }
    third = FullyShardedParallel(Tied(), group=world.group)
    whole = {name: one.clone() for name, one in state.items()} if world.rank == 0 else None
    third.load_state_dict(whole)
    assert {name: bits(one) for name, one in third.state_dict().items()} == {
        name: bits(one) for name, one in state.items()
    }
    if world.size > 1:
        for change, said in (
            ({"more": torch.ones(1)}, "the state_dict lacks [], and has ['more'], which the model has not"),
            ({"kept": torch.ones(4)}, "'kept' is of shape (4,) there, (3,) in the model"),
        ):
            wrong = None if whole is None else {**whole, **change}
            assert refusal(lambda wrong=wrong: third.load_state_dict(wrong), CheckpointError) == said
        only_last = state if world.rank == world.size - 1 else None
        text = refusal(lambda: third.load_state_dict(only_last), CheckpointError)
        assert text == "rank 0 has no state_dict; it must have one where others have None"
    text = refusal(lambda: other.load_state_dict({**state, "more": state["kept"]}), RuntimeError)
    assert "more" in text
    text = refusal(lambda: other.load_state_dict(state, assign=True), ArgumentError)
    assert text == "assign=True; sharded parameters are copied into: leave it out"


# --- Wrong calls, and what goes wrong --------------------------------------------------------------------------------


@check(2, 3)
def unused_parameters_are_named_on_every_rank(world: World) -> None:
    model = FullyShardedParallel(Stack([nn.Linear(10, 10), nn.Linear(10, 10)]), group=world.group)
    model.module.layers = model.module.layers[:1]
    text = refusal(lambda: squares(model(batch(0, 0))).backward(), UnusedParametersError)
    assert "'layers.1.weight' on all ranks, 'layers.1.bias' on all ranks" in text
    require_released(model)


@check(2)
def what_makes_no_sense_is_refused(world: World) -> None:
    wrap = partial(FullyShardedParallel, group=world.group)
    assert refusal(lambda: wrap(network(), units=nn.LSTM), ArgumentError) == "the module has none of units=LSTM"
    assert refusal(lambda: wrap(network(), param_dtype=torch.int8), ArgumentError) == (
        "param_dtype=torch.int8; it must be torch.bfloat16, torch.float16 or None"
    )
    for units, said in (("x", "units='x'"), ([nn.Linear(1, 1)], "units=[Linear")):
        text = refusal(lambda units=units: wrap(network(), units=units), ArgumentError)
        assert text.startswith(said)
        assert text.endswith("it must be a class of modules, such as nn.Linear, or several")
    assert refusal(lambda: wrap(None), ArgumentError) == "the module is a NoneType; it must be a torch.nn.Module"
    for inner in (DataParallel, FullyShardedParallel):
        for outer in (DataParallel, FullyShardedParallel):
            wrapped = nn.Sequential(inner(network(), group=world.group))
            text = refusal(lambda outer=outer, wrapped=wrapped: outer(wrapped, group=world.group), ArgumentError)
            assert text == "the module is wrapped already, or a part of it is; wrap a plain one, once"
    model = wrap(network())
    assert refusal(lambda: clip_grad_norm_(model, -1), ArgumentError) == (
        "max_norm=-1, norm_type=2.0; they must be at least 0 and above 0"
    )
    with pytest.raises(ValueError, match="empty parameter"):
        SGD(model.module.parameters())  # these are with the wrapper


@check(2, 3)
def a_step_after_one_that_failed(world: World) -> None:
    class Fails(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            if self.fails:
                raise ZeroDivisionError("on purpose")
            return values

    fails = Fails()
    fails.fails = False
    module = Stack([nn.Linear(10, 10), nn.Sequential(nn.Linear(10, 10), fails)])
    model = FullyShardedParallel(module, units=(nn.Linear, nn.Sequential), group=world.group)
    reference = copy.deepcopy(model.state_dict())
    squares(model(batch(0, 0))).backward()
    fails.fails = True
    refusal(lambda: model(batch(0, 0)), ZeroDivisionError)
    fails.fails = False
    require_released(model)
    for one in model.parameters():
        one.grad = None
    squares(model(batch(0, 0))).backward()
    world.require_same(list(reference.values()))


@check(1, 2, 3)
def gradients_of_which_some_are_let_go_of_or_replaced(world: World) -> None:
    """As by one of two optimizers, and by whoever scales gradients. The others add up."""
    for stage in (1, 2, 3):
        module, alone = network(), network()
        if stage == 3:
            holder = model = FullyShardedParallel(module, group=world.group)
        else:
            model = DataParallel(module, group=world.group, bucket_bytes=500)
            holder = ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
        for step in range(4):
            squares(model(batch(0, step))).backward()
            squares(alone(batch(0, step))).backward()
            for one in holder.holdings():
                gradient = alone.get_parameter(one.name).grad.flatten()[one.start : one.stop]
                if one.value.numel():
                    torch.testing.assert_close(one.value.grad, gradient, msg=lambda said, one=one: one.name + said)
            values = [(one.name, one.value) for one in holder.holdings()] + list(alone.named_parameters())
            for name, value in values:
                if value.grad is not None and name.startswith("0."):
                    value.grad = None
                elif value.grad is not None and name.startswith("2."):
                    value.grad = value.grad * 3


@check(2, 3)
def an_overflow_in_the_part_of_one_rank_skips_the_step_of_all(world: World) -> None:
    for stage in range(4):
        model, optimizer = at_stage(world, stage, nn.Sequential(nn.Linear(50, 17, bias=False)))
        scaler = GradScaler(model, init_scale=8.0)
        before = model.state_dict()["0.weight"].clone()
        for overflows in (True, False):
            optimizer.zero_grad()
            inputs = torch.zeros(1, 50)
            inputs[0, 0] = float("inf") if overflows else 1.0  # of the first column: in some parts alone
            scaler.scale(model(inputs)[0, 0]).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            after = model.state_dict()["0.weight"]
            assert torch.equal(after, before) == overflows, (stage, overflows)
            world.require_same([after])
            assert set(world.all_of(scaler.get_scale())) == {4.0}


@check(1, 2, 3)
def the_model_lets_go_of_all_gradients(world: World) -> None:
    for stage in range(4):
        for set_to_none in (True, False):
            reference = Reference(network(), world.size, SGD)
            model, optimizer = at_stage(world, stage, network(), reproducible=True)
            for step in range(3):
                with model.no_sync():
                    squares(model(batch(world.rank, 7))).backward()
                model.zero_grad(set_to_none)
                squares(model(batch(world.rank, 8))).backward()
                model.zero_grad(set_to_none)
                squares(model(batch(world.rank, step))).backward()
                for rank in range(world.size):
                    reference.backward(rank, lambda one, r=rank, s=step: squares(one(batch(r, s))))
                reference.sum()
                optimizer.step()
                reference.step()
                model.zero_grad(set_to_none)
            same_bits(model, reference.module)


@check(2, 3)
def rank_0_gives_what_it_has_by_any_name_and_what_is_no_tensor(world: World) -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> dict:
            return {"count": self.count}

        def set_extra_state(self, state: dict) -> None:
            self.count = state["count"]

    layers = nn.Sequential(Counting(4, 4), nn.Linear(4, 4))
    layers[1].weight = layers[0].weight
    model = FullyShardedParallel(layers, units=nn.Linear, group=world.group)
    values = torch.arange(16.0).reshape(4, 4)
    given = {"1.weight": values, "0._extra_state": {"count": 5}} if world.rank == 0 else None
    model.load_state_dict(given, strict=False)
    assert torch.equal(model.state_dict()["0.weight"], values)
    assert layers[0].count == 5


@check(2)
def what_is_frozen_or_unfrozen_after_wrapping_is_named(world: World) -> None:
    for stage in range(4):
        module = network()
        module[4].bias.requires_grad_(False)
        model, _ = at_stage(world, stage, module)
        parameters = dict(model.named_parameters() if stage == 3 else module.named_parameters())
        for name, is_trained in (("0.weight", True), ("4.bias", False)):
            parameters[name].requires_grad_(not is_trained)
            text = refusal(lambda model=model: model(batch(0, 0)), ArgumentError)
            assert text == (
                f"{name!r} was {'frozen' if is_trained else 'unfrozen'} after it was wrapped; freeze and unfreeze "
                f"first, and wrap then"
            )
            parameters[name].requires_grad_(is_trained)


@check(1, 2, 4)
def clipping_by_global_norm(world: World) -> None:
    for norm_type in (1.0, 2.0, float("inf")):
        model = FullyShardedParallel(network(), group=world.group)
        alone = network()
        squares(model(batch(0, 0))).backward()
        squares(alone(batch(0, 0))).backward()
        norm = clip_grad_norm_(model, 0.1, norm_type)
        wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.1, norm_type)
        torch.testing.assert_close(norm.float(), wanted)
        pieces = {one.name: one for one in model.holdings()}
        for name, one in alone.named_parameters():
            piece = pieces[name]
            if piece.value.numel():
                torch.testing.assert_close(piece.value.grad, one.grad.flatten()[piece.start : piece.stop])


@check(1, 2, 3)
def norms_of_large_powers_and_of_few_bits(world: World) -> None:
    for stage in range(4):
        for norm_type in (8.0, 100.0, 1000.0):
            model, optimizer = at_stage(world, stage, nn.Linear(2, 1, bias=False), partial(torch.optim.SGD, lr=1.0))
            before = model.state_dict()["weight"].clone()
            model(torch.tensor([[3e4, 1e4]])).sum().backward()
            norm = clip_grad_norm_(optimizer if stage in (1, 2) else model, 1.0, norm_type)
            torch.testing.assert_close(norm.item(), 3e4 * (1 + 3**-norm_type) ** (1 / norm_type))
            optimizer.step()
            change = before - model.state_dict()["weight"]
            torch.testing.assert_close(change, torch.tensor([[3e4, 1e4]]) / norm.item(), rtol=1e-4, atol=0)
    module = nn.Linear(3, 1)
    module.nothing = nn.Parameter(torch.zeros(0))
    model = DataParallel(module, group=world.group)
    (module.nothing.sum() + model(torch.ones(1, 3)).sum()).backward()
    assert clip_grad_norm_(model, 0.5, float("inf")) == 1
    model = DataParallel(nn.Linear(64, 64, bias=False).bfloat16(), group=world.group)
    for factor in torch.linspace(1, 2, 50):
        model.zero_grad()
        (squares(model(batch(0, 0, 40, 64).bfloat16())) * 1000 * factor).backward()
        norm = model.module.weight.grad.double().norm()
        clip_grad_norm_(model, norm.item() / 3)
        # Each element is rounded, and not all of them by a factor that is.
        torch.testing.assert_close(model.module.weight.grad.double().norm(), norm / 3, rtol=2e-4, atol=0)


class Repeats(nn.Module):
    """Goes through its layers in any order, any of them several times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Measured() for _ in range(4))
        self.last = nn.Linear(10, 3)

    def forward(self, inputs: Tensor, order: list[int], optional_from: int = 9) -> Tensor:
        values = beside = inputs
        for place, number in enumerate(order):
            values = self.layers[number](values, beside if place < optional_from else None)
            if place == 0:
                beside = values
        return self.last(values)


class Measured(nn.Module):
    """Keeps a loss of its own, computed after what it returns; takes an input that may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)
        self.losses: dict[str, Tensor] = {}
        self.words = dict.fromkeys(range(100_000))
        self.words["all"] = [self.words]
        self.router = nn.Module()

    def forward(self, inputs: Tensor, beside: Tensor | None) -> Tensor:
        outputs = torch.tanh(self.first(inputs))
        if beside is not None:
            outputs = outputs + 0.1 * beside
        self.losses["all"] = torch.sigmoid(self.second(outputs)).square().sum()
        self.router.loss = torch.zeros(())
        self.router.loss += self.second(outputs * 2).square().mean()
        self.inputs = inputs, beside
        return outputs


def loss_with_those_kept(model: nn.Module, layers, order: list[int], *args) -> Tensor:
    outputs = model(*args)
    kept = [one for number in {*order} for one in (layers[number].router.loss, layers[number].losses["all"])]
    return squares(outputs) + sum(kept)


@check(1, 2, 3)
def units_used_in_changing_numbers_with_losses_of_their_own(world: World) -> None:
    orders = [[0, 1, 2, 1], [0, 1, 2, 3], [3, 1, 1, 1, 0], [2], [0, 1, 2, 3, 0, 1, 2, 3], [1, 0, 1], [0, 1, 2, 3]]
    for reproducible in (True, False):
        for unused in ("zeros", "error"):
            module = Repeats()
            reference = Reference(copy.deepcopy(module), world.size, SGD)
            model = FullyShardedParallel(
                module, units=Measured, group=world.group, reproducible=reproducible, unused=unused
            )
            optimizer = SGD(model.parameters())
            for step, order in enumerate(orders if unused == "zeros" else [[0, 1, 2, 3, *one] for one in orders]):
                for rank in range(world.size):
                    reference.backward(
                        rank,
                        lambda one, r=rank, s=step, o=order: loss_with_those_kept(one, one.layers, o, batch(r, s), o),
                    )
                reference.sum()
                loss_with_those_kept(model, module.layers, order, batch(world.rank, step), order).backward()
                require_released(model)
                reference.step()
                optimizer.step()
                optimizer.zero_grad()
            if reproducible and world.size < 3:  # a unit that uses an input twice adds up in another order
                close_states(model, reference.module, 1e-6)
            close_states(model, reference.module, 1e-4)


def close_states(model: FullyShardedParallel, expected: nn.Module, tolerance: float) -> None:
    state = model.state_dict()
    for name, one in expected.state_dict().items():
        torch.testing.assert_close(state[name], one, rtol=tolerance, atol=tolerance)


@check(2)
def a_unit_that_keeps_what_it_gets_and_makes_is_released_and_let_go_of(world: World) -> None:
    module = Repeats()
    model = FullyShardedParallel(module, units=Measured, group=world.group)
    order = [0, 1, 2, 3]
    most = []

    def count(_: Tensor, flats=model._flats[1:]) -> None:
        most.append(sum(any(one.untyped_storage().nbytes() for one in flat.whole) for flat in flats))

    for step in range(3):
        inputs = batch(world.rank, step).requires_grad_()
        loss = loss_with_those_kept(model, module.layers, order, inputs, order)
        for number in order:
            module.layers[number].inputs[0].register_hook(count)
        loss.backward()
    assert max(most) <= 2
    gone = weakref.ref(model), weakref.ref(module), weakref.ref(module.layers[0])
    del model, module, loss, count, inputs
    gc.collect()
    assert [one() for one in gone] == [None] * 3


@check(2)
def an_optimizer_made_before_wrapping_is_refused(world: World) -> None:
    module = network()
    early = SGD(module.parameters())
    model = FullyShardedParallel(module, group=world.group)
    squares(model(batch(world.rank, 0))).backward()
    assert "the SGD has parameters that are sharded, and get no gradients" in refusal(early.step, ArgumentError)
    SGD(model.parameters()).step()
    assert "stage 3 has no join" in refusal(model.join, ArgumentError)


@check(2, 3, 4)
def inputs_and_last_units_that_some_ranks_do_not_use(world: World) -> None:
    """All ranks sum at the same places among their gathers."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(10, 10)

        def forward(self, inputs: Tensor, skips: bool) -> Tensor:
            return inputs * 2 if skips else self.layer(inputs)

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([*(Measured() for _ in range(3)), Skips(), Skips()])

        def forward(self, inputs: Tensor, chance: random.Random) -> Tensor:
            beside = values = self.layers[0](inputs, None)
            for layer in self.layers[1:3]:
                values = layer(values, beside if chance.random() < 0.5 else None)
            for layer in self.layers[3:]:
                values = layer(values, chance.random() < 0.5)
            return values

    module = Layers()
    reference = Reference(copy.deepcopy(module), world.size, SGD)
    model = FullyShardedParallel(module, group=world.group, unused="zeros")
    optimizer = SGD(model.parameters())
    for step in range(12):
        for rank in range(world.size):
            reference.backward(rank, lambda one, r=rank, s=step: squares(one(batch(r, s), random.Random(100 * r + s))))
        reference.sum()
        squares(model(batch(world.rank, step), random.Random(100 * world.rank + step))).backward()
        reference.step()
        optimizer.step()
        optimizer.zero_grad()
    close_states(model, reference.module, 1e-4)


class Nested(nn.Module):
    """Its layers are checkpointed by kinds: not at all, re-entrant, or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.first, self.last = nn.Linear(10, 10), nn.Linear(10, 3)

    def forward(self, inputs: Tensor, kinds: tuple) -> Tensor:
        values = self.first(inputs) * self.scale
        for layer, kind in zip(self.layers, kinds, strict=True):
            values = torch.tanh(layer(values) if kind is None else checkpoint(layer, values, use_reentrant=kind))
        return self.last(values)


@check(1, 2, 3)
def the_whole_model_under_a_checkpoint(world: World) -> None:
    """And parts of it, once more."""
    for is_reentrant in (True, False):
        for stage in range(4):
            reference = Reference(Nested(), world.size, SGD)
            model, optimizer = at_stage(world, stage, Nested(), reproducible=True)
            for step, kinds in enumerate(
                [(None, None, None), (True, True, None), (True, True, True), (False, True, None), (False, False, False)]
            ):
                inputs = batch(world.rank, step).requires_grad_()
                squares(checkpoint(model, inputs, kinds, use_reentrant=is_reentrant)).backward()
                for rank in range(world.size):
                    reference.backward(rank, lambda one, r=rank, s=step: squares(one(batch(r, s), (None, None, None))))
                reference.sum()
                reference.step()
                optimizer.step()
                optimizer.zero_grad()
            same_bits(model, reference.module)


@check(1, 2, 3, 4)
def the_optimizer_lets_go_of_all_gradients(world: World) -> None:
    """Those of a rank alone, too; and none is stepped as long as these are left."""
    for stage in range(4):
        for set_to_none in (True, False):
            reference = Reference(network(), world.size, SGD)
            model, optimizer = at_stage(world, stage, network(), reproducible=True)
            for step in range(4):
                with model.no_sync():
                    for number in range(1 + step % 2):
                        squares(model(batch(world.rank, 7 + number))).backward()
                if stage:
                    assert "has a gradient of this rank alone" in refusal(optimizer.step, ArgumentError)
                optimizer.zero_grad(set_to_none)
                squares(model(batch(world.rank, step))).backward()
                with model.no_sync():
                    squares(model(batch(world.rank, step + 1))).backward()
                squares(model(batch(world.rank, step + 2))).backward()
                for rank in range(world.size):
                    reference.backward(rank, lambda one, r=rank, s=step: squares(one(batch(r, s))))
                reference.sum()
                for rank in range(world.size):
                    for following in (1, 2):
                        reference.backward(rank, lambda one, r=rank, s=step + following: squares(one(batch(r, s))))
                reference.sum()
                optimizer.step()
                reference.step()
                optimizer.zero_grad(set_to_none)
            same_bits(model, reference.module)


@check(2, 3)
def a_part_of_a_module_that_loads_its_state(world: World) -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.before, self.inner = nn.Linear(2, 10), inner

    for wrap in (FullyShardedParallel, DataParallel):
        alone = Outer(nn.Sequential(network(), nn.BatchNorm1d(5)))
        outer = Outer(wrap(nn.Sequential(network(1), nn.BatchNorm1d(5)), group=world.group))
        state = {name: one + 1 for name, one in alone.state_dict().items()}
        assert not any(outer.load_state_dict(state))
        found = outer.state_dict()
        assert {*found} == {*state}
        for name, one in state.items():
            assert bits(found[name]) == bits(one), name
        assert not any(outer.load_state_dict(found))
        said = refusal(
            lambda state=state, outer=outer: outer.load_state_dict(
                {name: one for name, one in state.items() if name != "inner.0.0.bias"}
            ),
            RuntimeError,
        )
        assert "inner." in said
        assert "0.0.bias" in said
        wrong = {**state, "inner.0.0.bias": torch.zeros(3)}
        assert "0.0.bias" in refusal(lambda wrong=wrong, outer=outer: outer.load_state_dict(wrong), RuntimeError)


@check(1, 2)
def running_statistics_beside_sixteen_bits(world: World) -> None:
    module = nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3))
    model = FullyShardedParallel(module, group=world.group, param_dtype=torch.bfloat16)
    optimizer = SGD(model.parameters())
    losses = []
    for _ in range(20):
        loss = squares(model(torch.randn(8, 2, 5, generator=torch.Generator().manual_seed(world.rank))) - 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    (norm,) = [one for one in model.units if one.name == "1"]
    assert [one.dtype for flat in norm.flats for one in flat.whole] == [torch.float32] * 2
    assert module[1].running_mean.abs().sum() > 0


@check(2)
def options_that_differ_are_named_on_every_rank(world: World) -> None:
    """And so is what makes no sense on one of them alone."""
    last = world.rank == world.size - 1
    for wrap, name, usual, other in (
        (DataParallel, "reduction", "mean", "sum"),
        (DataParallel, "unused", "error", "zeros"),
        (DataParallel, "sparse", "error", "dense"),
        (DataParallel, "broadcast_buffers", True, False),
        (DataParallel, "wire_dtype", None, torch.bfloat16),
        (DataParallel, "reproducible", False, True),
        (DataParallel, "bucket_bytes", "auto", 100),
        (FullyShardedParallel, "units", None, nn.Linear),
        (FullyShardedParallel, "param_dtype", None, torch.float16),
    ):
        given = {name: other if last else usual}
        said = refusal(lambda w=wrap, g=given: w(network(), group=world.group, **g), DifferentModelsError)
        assert f"rank 0 has {name}={usual!r}, rank 1 has {name}={other!r}" in said
        given = {name: 7.5 if last else usual}
        if name not in ("broadcast_buffers", "reproducible"):
            said = refusal(lambda w=wrap, g=given: w(network(), group=world.group, **g), ArgumentError)
            assert said.startswith("" if last else f"rank {world.size - 1}: ")
            assert f"{name}=7.5" in said
    kinds = DataParallel, FullyShardedParallel
    said = refusal(lambda: kinds[last](network(), group=world.group), DifferentModelsError)
    assert "rank 0 has DataParallel, rank 1 has FullyShardedParallel" in said
    model = DataParallel(network(), group=world.group)
    said = refusal(lambda: ZeroOptimizer(model, torch.optim.SGD, stage=1 + last, lr=1.0), DifferentModelsError)
    assert "rank 0 has stage=1, rank 1 has stage=2" in said
    for given, kind, text in (({"lr": -1.0}, ValueError, "Invalid learning rate"), ({"rate": 1}, TypeError, "rate")):
        given = given if last else {"lr": 1.0}
        make = partial(ZeroOptimizer, model, torch.optim.SGD, **given)
        assert text in refusal(make, kind if last else ArgumentError)
    said = refusal(lambda: ZeroOptimizer(model, torch.optim.SGD, stage=5 if last else 1, lr=1.0), ArgumentError)
    assert "stage=5; it must be 1 or 2" in said
    said = refusal(lambda: ZeroOptimizer(model, torch.optim.SGD, lr=0.5 + last), DifferentModelsError)
    assert "rank 0 has lr=0.5, rank 1 has lr=1.5" in said
    some = list(model.parameters())[last:]
    said = refusal(lambda: ZeroOptimizer(model, torch.optim.SGD, some, lr=1.0), ArgumentError)
    assert "'0.weight'" in said


# --- Running them -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return training_worlds.run("test_fully_sharded")


@pytest.mark.parametrize("name", check.names())
def test_fully_sharded(found: dict[str, str], name: str) -> None:
    assert found[name] == ""
