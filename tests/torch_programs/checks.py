"""What is built on torch.distributed, on the backend that the command line names; each check against one process.

Usage: as a rank of a job, python checks.py BACKEND [NUM_HOSTS]. Rank 0 prints a JSON line per check: its name, and ""
or what failed on any rank. With NUM_HOSTS, ranks are dealt out to so many hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

CHECKS: dict[str, Callable[[], None]] = {}
STEPS = 4


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Add to the checks."""
    CHECKS[function.__name__] = function
    return function


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Shapes that no number of ranks divides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 17), nn.ReLU(), nn.Linear(17, 7), nn.Tanh(), nn.Linear(7, 5)).to(dtype)


def batch(of: int, step: int) -> torch.Tensor:
    """The data of a rank in a step."""
    generator = torch.Generator().manual_seed(1000 * step + of)
    return torch.randn(4, 10, generator=generator)


def reference(make_optimizer: Callable, *, clip: float | None = None, steps: int = STEPS) -> nn.Module:
    """Trained by one process on the data of all ranks."""
    alone = model()
    optimizer = make_optimizer(alone.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        (alone(torch.cat([batch(of, step) for of in range(size())])) ** 2).mean().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(alone.parameters(), clip)
        optimizer.step()
    return alone


def train(wrapped: nn.Module, optimizer, *, clip: float | None = None, steps: int = STEPS) -> None:
    """Each rank on its own data."""
    for step in range(steps):
        optimizer.zero_grad()
        (wrapped(batch(rank(), step)) ** 2).mean().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), clip)
        optimizer.step()


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def same_state(actual: dict[str, torch.Tensor], expected: nn.Module, tolerance: float = 1e-5) -> None:
    """Equal to float tolerance."""
    wanted = expected.state_dict()
    assert actual.keys() == wanted.keys(), (actual.keys(), wanted.keys())
    for name, value in wanted.items():
        torch.testing.assert_close(actual[name], value, rtol=tolerance * 10, atol=tolerance)


# --- DistributedDataParallel ------------------------------------------------------------------------------------------


def ddp(module: nn.Module, **more) -> nn.parallel.DistributedDataParallel:
    return nn.parallel.DistributedDataParallel(module, **more)


@check
def data_parallel_in_many_buckets() -> None:
    wrapped = ddp(model(), bucket_cap_mb=0.0001, gradient_as_bucket_view=True)
    train(wrapped, adam(wrapped.parameters()))
    same_state(wrapped.module.state_dict(), reference(adam))


@check
def data_parallel_with_a_static_graph() -> None:
    wrapped = ddp(model(), static_graph=True)
    train(wrapped, adam(wrapped.parameters()))
    same_state(wrapped.module.state_dict(), reference(adam))


@check
def data_parallel_with_unused_parameters() -> None:
    class WithSpare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = model()
            self.spare = nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x)

    wrapped = ddp(WithSpare(), find_unused_parameters=True)
    train(wrapped, adam(wrapped.parameters()))
    same_state(wrapped.module.used.state_dict(), reference(adam))


@check
def data_parallel_accumulates_without_synchronising() -> None:
    wrapped, alone = ddp(model()), model()
    with wrapped.no_sync():
        (wrapped(batch(rank(), 0)) ** 2).mean().backward()
    (wrapped(batch(rank(), 1)) ** 2).mean().backward()
    for step in range(2):
        (alone(torch.cat([batch(of, step) for of in range(size())])) ** 2).mean().backward()
    for one, other in zip(wrapped.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@check
def data_parallel_with_uneven_inputs() -> None:
    wrapped = ddp(model())
    optimizer = sgd(wrapped.parameters())
    with wrapped.join(divide_by_initial_world_size=False):
        for step in range(2 + rank()):
            optimizer.zero_grad()
            (wrapped(batch(rank(), step)) ** 2).mean().backward()
            optimizer.step()
    gathered = [None] * size()
    dist.all_gather_object(gathered, {name: value.clone() for name, value in wrapped.module.state_dict().items()})
    for other in gathered[1:]:
        for name, value in gathered[0].items():
            torch.testing.assert_close(other[name], value)


@check
def data_parallel_with_power_sgd() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    wrapped = ddp(model())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    first = (wrapped(batch(rank(), 0)) ** 2).mean().item()
    optimizer = sgd(wrapped.parameters())
    for _ in range(12):
        optimizer.zero_grad()
        loss = (wrapped(batch(rank(), 0)) ** 2).mean()
        loss.backward()
        optimizer.step()
    assert loss.item() < first
    weights = torch.cat([parameter.detach().flatten() for parameter in wrapped.parameters()])
    everyones = [torch.empty_like(weights) for _ in range(size())]
    dist.all_gather(everyones, weights)
    for other in everyones:
        torch.testing.assert_close(other, weights, rtol=0, atol=0)


@check
def data_parallel_with_python_hooks() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    for hook, tolerance in ((default_hooks.allreduce_hook, 1e-5), (default_hooks.fp16_compress_hook, 5e-3)):
        wrapped = ddp(model())
        wrapped.register_comm_hook(None, hook)
        train(wrapped, sgd(wrapped.parameters()))
        same_state(wrapped.module.state_dict(), reference(sgd), tolerance)


@check
def data_parallel_with_buffers() -> None:
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(10, 3)
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(self.layer(x))

    wrapped = ddp(Counting())
    for step in range(3):
        (wrapped(batch(rank(), step)) + wrapped(batch(rank(), step + 9))).sum().backward()
    wrapped(batch(rank(), 5))
    everyones = [torch.empty(3) for _ in range(size())]
    dist.all_gather(everyones, wrapped.module.norm.running_mean)
    assert size() == 1 or not torch.equal(everyones[0], everyones[1])  # each has gone on by its own data
    wrapped._sync_buffers()
    dist.all_gather(everyones, wrapped.module.norm.running_mean)
    for other in everyones:
        torch.testing.assert_close(other, everyones[0], rtol=0, atol=0)


# --- Sharded ----------------------------------------------------------------------------------------------------------


@check
def fully_sharded_of_old() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    wrapped = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = adam(wrapped.parameters())
    train(wrapped, optimizer)
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT):
        same_state(wrapped.state_dict(), reference(adam))


def full_state(wrapped: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in wrapped.state_dict().items()
    }


@check
def fully_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    for clip in (None, 0.05):
        wrapped = model()
        for layer in wrapped:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(wrapped)
        train(wrapped, adam(wrapped.parameters()), clip=clip)
        same_state(full_state(wrapped), reference(adam, clip=clip))


@check
def fully_sharded_in_memory_of_the_backend() -> None:
    from torch.distributed.fsdp import fully_shard

    group = dist.group.WORLD
    if not group._get_backend(torch.device("cpu")).supports_tensor_alloc(torch.device("cpu")):
        return  # gloo
    torch.manual_seed(0)
    wrapped = fully_shard(nn.Linear(1024, 1025))
    wrapped.set_allocate_memory_from_process_group_for_comm(True)
    data = torch.full((2, 1024), 0.001 * (rank() + 1))
    (wrapped(data) ** 2).mean().backward()
    torch.manual_seed(0)
    alone = nn.Linear(1024, 1025)
    for of in range(size()):
        ((alone(torch.full((2, 1024), 0.001 * (of + 1))) ** 2).mean() / size()).backward()
    torch.testing.assert_close(wrapped.weight.grad.full_tensor(), alone.weight.grad, rtol=1e-4, atol=1e-6)
    assert any(entry.bytes_mapped for entry in group.communicator.stats())


@check
def fully_sharded_in_mixed_precision() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    wrapped = fully_shard(model(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    train(wrapped, sgd(wrapped.parameters()))
    same_state(full_state(wrapped), reference(sgd), 2e-2)


@check
def hybrid_sharded_on_a_mesh_of_two_dimensions() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if size() % 2:
        return
    mesh = init_device_mesh("cpu", (2, size() // 2), mesh_dim_names=("replicate", "shard"))
    wrapped = fully_shard(model(), mesh=mesh)
    train(wrapped, adam(wrapped.parameters()))
    same_state(full_state(wrapped), reference(adam))


@check
def optimizer_state_is_sharded() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = ddp(model())
    train(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01))
    same_state(wrapped.module.state_dict(), reference(adam))


@check
def checkpoints_of_sharded_models() -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.fsdp import fully_shard

    folder = [tempfile.mkdtemp() if rank() == 0 else None]
    dist.broadcast_object_list(folder)
    wrapped = fully_shard(model())
    train(wrapped, sgd(wrapped.parameters()))
    checkpoint.save({"model": wrapped.state_dict()}, checkpoint_id=folder[0])
    again = fully_shard(model())
    state = {"model": again.state_dict()}
    checkpoint.load(state, checkpoint_id=folder[0])
    again.load_state_dict(state["model"])
    same_state(full_state(again), reference(sgd))
    dist.barrier()
    if rank() == 0:
        shutil.rmtree(folder[0])


# --- DTensor, tensor and sequence parallel, pipelines, compile --------------------------------------------------------


@check
def distributed_tensors_are_redistributed_unevenly() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size(),))
    whole = torch.arange(35.0).view(7, 5)
    for before in (Shard(0), Shard(1), Replicate()):
        for after in (Shard(0), Shard(1), Replicate()):
            tensor = distribute_tensor(whole, mesh, [before]).redistribute(mesh, [after])
            torch.testing.assert_close(tensor.full_tensor(), whole)
    product = distribute_tensor(whole, mesh, [Shard(1)]) @ distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    assert product.placements == (Partial(),)
    torch.testing.assert_close(product.redistribute(mesh, [Shard(0)]).full_tensor(), whole @ whole.t())


@check
def tensor_and_sequence_parallel_layers() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (size(),))
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4 * size()), nn.ReLU(), nn.Linear(4 * size(), 8))
    data = torch.randn(3, 4 * size(), 8)
    expected = block(data)
    expected.sum().backward()
    gradient = block[1].weight.grad.clone()
    block.zero_grad()
    parallel = parallelize_module(
        block,
        mesh,
        {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(output_layouts=Shard(1)),
            "": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Shard(1), use_local_output=False),
        },
    )
    output = parallel(data.chunk(size(), dim=1)[rank()]).full_tensor()
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    torch.testing.assert_close(parallel[1].weight.grad.full_tensor(), gradient)


@check
def pipelines() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    layers = [nn.Linear(6, 6) for _ in range(size())]
    for index, layer in enumerate(layers):
        nn.init.constant_(layer.weight, 0.1 * (index + 1))
        nn.init.constant_(layer.bias, 0.01 * index)
    data = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    target = torch.zeros(8, 6)
    expected = nn.Sequential(*layers)(data)
    for kind in (ScheduleGPipe, Schedule1F1B):
        stage = PipelineStage(layers[rank()], rank(), size(), torch.device("cpu"))
        schedule = kind(stage, n_microbatches=4, loss_fn=nn.MSELoss())
        if rank() == 0:
            schedule.step(data)
        elif rank() == size() - 1:
            torch.testing.assert_close(schedule.step(target=target), expected, rtol=1e-4, atol=1e-5)
        else:
            schedule.step()


@check
def functional_collectives_alone_and_compiled() -> None:
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD

    def all_of_them(x):
        total = functional.all_reduce(x * 2, "sum", group)
        gathered = functional.all_gather_tensor(x, 0, group)
        scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
        moved = functional.all_to_all_single(gathered, None, None, group)
        return total + 1, gathered, scattered, moved

    mine = torch.arange(4.0) + rank()
    everyones = [torch.arange(4.0) + other for other in range(size())]
    gathered = torch.cat(everyones)
    for function in (all_of_them, torch.compile(all_of_them, backend="eager")):
        results = function(mine)
        expected = (
            sum(everyones) * 2 + 1,
            gathered,
            everyones[rank()] * size(),
            torch.cat([everyones[rank()]] * size()),
        )
        for actual, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(actual + 0, wanted)


@check
def calls_within_what_is_compiled() -> None:
    def in_the_background(x):
        total = x * 2
        dist.all_reduce(total, async_op=True).wait()
        return total + 1

    def at_a_barrier(x):
        doubled = x * 2
        dist.barrier()
        return doubled + 1

    def around_the_ring(x):
        doubled = x * 2
        received = torch.empty_like(x)
        before, after = (rank() - 1) % size(), (rank() + 1) % size()
        messages = [dist.P2POp(dist.isend, doubled, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return received + 1

    def through_a_new_group(x):
        doubled = x * 2
        dist.all_reduce(doubled, group=dist.new_group(list(range(size()))))
        return doubled + 1

    def through_a_future(x):
        doubled = x * 2
        work = dist.all_reduce(doubled, async_op=True)
        (total,) = work.get_future().wait()
        assert work.is_completed()
        return total + 1

    mine = torch.arange(4.0) + rank()
    for function in (in_the_background, at_a_barrier, around_the_ring, through_a_new_group, through_a_future):
        torch.testing.assert_close(torch.compile(function, backend="eager")(mine), function(mine))


# --- The plain API ----------------------------------------------------------------------------------------------------


@check
def objects_of_every_kind_of_collective() -> None:
    gathered = [None] * size()
    dist.all_gather_object(gathered, {"rank": rank(), "text": "x" * 1000 * rank()})
    assert gathered == [{"rank": other, "text": "x" * 1000 * other} for other in range(size())]
    told = [{"from": 0}, 2] if rank() == 0 else [None, None]
    dist.broadcast_object_list(told)
    assert told == [{"from": 0}, 2]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {other}" for other in range(size())] if rank() == 0 else None)
    assert mine == [f"for {rank()}"]
    collected = [None] * size() if rank() == 0 else None
    dist.gather_object(rank() * 10, collected)
    assert rank() != 0 or collected == [10 * other for other in range(size())]


@check
def groups_that_overlap() -> None:
    groups = {}
    for first in range(size()):
        members = sorted({first, (first + 1) % size()})
        groups[first] = (members, dist.new_group(members))
    for first, (members, group) in groups.items():
        tensor = torch.full((3,), float(rank() + first))
        dist.all_reduce(tensor, group=group)
        in_it = rank() in members
        expected = sum(member + first for member in members) if in_it else rank() + first
        torch.testing.assert_close(tensor, torch.full((3,), float(expected)))
        if in_it:
            source = torch.full((2,), float(rank()))
            dist.broadcast(source, members[-1], group=group)
            torch.testing.assert_close(source, torch.full((2,), float(members[-1])))


@check
def coalesced_calls() -> None:
    tensors = [torch.full((3 + index,), float(rank() + index)) for index in range(4)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for index, tensor in enumerate(tensors):
        expected = float(sum(other + index for other in range(size())))
        torch.testing.assert_close(tensor, torch.full((3 + index,), expected))
    outputs = [torch.zeros(2 * size()) for _ in range(2)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for index, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, torch.full((2,), float(10 * index + rank())))
    manager.wait()
    for index, output in enumerate(outputs):
        wanted = torch.repeat_interleave(torch.arange(float(size())) + 10 * index, 2)
        torch.testing.assert_close(output, wanted)


@check
def messages_in_both_directions_at_once() -> None:
    right, left = (rank() + 1) % size(), (rank() - 1) % size()
    for count in (1, 1 << 20):
        sent, got = torch.full((count,), float(rank())), torch.empty(count)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, got, left)])
        for work in works:
            work.wait()
        torch.testing.assert_close(got, torch.full((count,), float(left)))


@check
def messages_with_tags_and_from_anyone() -> None:
    if rank() == 0:
        first, second = torch.zeros(2), torch.zeros(2)
        senders = []
        for _ in range(size() - 1):
            other = torch.zeros(1)
            senders.append(dist.recv(other, tag=5))
            assert other.item() == senders[-1]
        assert sorted(senders) == list(range(1, size()))
        dist.recv(second, 1, tag=2)
        dist.recv(first, 1, tag=1)
        assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [2.0, 2.0])
    else:
        works = [dist.isend(torch.full((1,), float(rank())), 0, tag=5)]
        if rank() == 1:
            works += [dist.isend(torch.full((2,), float(tag)), 0, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()


@check
def data_parallel_over_a_model_of_complex_numbers() -> None:
    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(6, dtype=torch.complex64))
            self.layer = nn.Linear(10, 3)

        def forward(self, x):
            return self.layer(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=10))

    wrapped, alone = ddp(Filter()), Filter()
    (wrapped(batch(rank(), 0)) ** 2).mean().backward()
    (alone(torch.cat([batch(of, 0) for of in range(size())])) ** 2).mean().backward()
    for one, other in zip(wrapped.parameters(), alone.parameters(), strict=True):
        assert other.grad.abs().max() > 0
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def odd_group() -> tuple[list[int], dist.ProcessGroup]:
    """Of the last rank and one before it, named in this order; torch sorts them."""
    members = [size() - 1, size() - 3] if size() > 2 else [1, 0]
    return sorted(members), dist.new_group(members)


@check
def roots_by_their_rank_in_the_job_and_in_the_group() -> None:
    members, group = odd_group()
    if rank() not in members:
        return
    mine = members.index(rank())

    def each_way(name: str) -> list[dict[str, int]]:
        return [
            {f"group_{name}" if by_group else name: place if by_group else members[place]}
            for place in range(2)
            for by_group in (False, True)
        ]

    def place_of(way: dict[str, int]) -> int:
        ((name, number),) = way.items()
        return number if name.startswith("group_") else members.index(number)

    for way in each_way("src"):
        place = place_of(way)
        tensor = torch.arange(3.0) + 10 * rank()
        dist.broadcast(tensor, group=group, **way)
        torch.testing.assert_close(tensor, torch.arange(3.0) + 10 * members[place])
        parts = [torch.arange(3.0) + 10 * rank() + 100 * other for other in range(2)] if mine == place else None
        dist.scatter(tensor, parts, group=group, **way)
        torch.testing.assert_close(tensor, torch.arange(3.0) + 10 * members[place] + 100 * mine)
        objects = [f"of {rank()}"]
        dist.broadcast_object_list(objects, group=group, **way)
        assert objects == [f"of {members[place]}"]
        dist.scatter_object_list(objects, [f"{rank()} for {other}" for other in range(2)], group=group, **way)
        assert objects == [f"{members[place]} for {mine}"]
    for way in each_way("dst"):
        place = place_of(way)
        tensor = torch.arange(3.0) + 10 * rank()
        dist.reduce(tensor, group=group, **way)
        expected = 2 * torch.arange(3.0) + 10 * sum(members) if mine == place else torch.arange(3.0) + 10 * rank()
        torch.testing.assert_close(tensor, expected)
        tensor = torch.arange(3.0) + 10 * rank()
        outputs = [torch.zeros(3) for _ in members] if mine == place else None
        dist.gather(tensor, outputs, group=group, **way)
        for output, member in zip(outputs or (), members, strict=False):
            torch.testing.assert_close(output, torch.arange(3.0) + 10 * member)
        objects = [None, None] if mine == place else None
        dist.gather_object(rank(), objects, group=group, **way)
        assert objects is None or objects == members
    peer = 1 - mine
    for by_group in (False, True):
        to = {"group_dst": peer} if by_group else {"dst": members[peer]}
        of = {"group_src": peer} if by_group else {"src": members[peer]}
        got = torch.zeros(2)
        sent = dist.isend(torch.full((2,), float(rank())), group=group, tag=7, **to)
        assert dist.recv(got, group=group, tag=7, **of) == members[peer]
        sent.wait()
        torch.testing.assert_close(got, torch.full((2,), float(members[peer])))


def refusal(call: Callable[[], object]) -> str:
    """What the call is refused with; empty if it is not."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@check
def roots_that_are_not_in_the_group_are_named() -> None:
    members, group = odd_group()
    if rank() not in members:
        return
    tensor = torch.ones(3)
    calls = {
        "src": [
            lambda way: dist.broadcast(tensor, group=group, **way),
            lambda way: dist.scatter(tensor, None, group=group, **way),
            lambda way: dist.broadcast_object_list([1], group=group, **way),
            lambda way: dist.recv(tensor, group=group, **way),
        ],
        "dst": [
            lambda way: dist.reduce(tensor, group=group, **way),
            lambda way: dist.gather(tensor, None, group=group, **way),
            lambda way: dist.gather_object(1, None, group=group, **way),
            lambda way: dist.send(tensor, group=group, **way),
        ],
    }
    for name, them in calls.items():
        for call in them:
            for way in ({name: 9}, {f"group_{name}": 5}):
                ((_, number),) = way.items()
                assert str(number) in refusal(lambda call=call, way=way: call(way)), way
    dist.barrier(group=group)


@check
def every_operation_keeps_the_order_of_the_ranks_of_a_group() -> None:
    members, group = odd_group()
    if rank() not in members:
        return
    assert dist.get_process_group_ranks(group) == members
    mine = members.index(rank())
    assert dist.get_rank(group) == mine
    outputs = [torch.zeros(1) for _ in members]
    dist.all_gather(outputs, torch.tensor([float(rank())]), group=group)
    assert [output.item() for output in outputs] == members
    whole = torch.zeros(2)
    dist.all_gather_single(whole, torch.tensor([float(rank())]), group=group)
    assert whole.tolist() == members
    part = torch.zeros(1)
    dist.reduce_scatter_single(part, torch.tensor([float(rank()), 100.0 + rank()]), group=group)
    assert part.item() == sum(members) + 200 * mine
    dist.reduce_scatter(part, [torch.tensor([float(rank())]), torch.tensor([100.0 + rank()])], group=group)
    assert part.item() == sum(members) + 200 * mine
    dist.all_to_all_single(whole, torch.tensor([float(rank()), 100.0 + rank()]), group=group)
    assert whole.tolist() == [member + 100 * mine for member in members]
    dist.all_to_all(outputs, [torch.tensor([float(rank())]), torch.tensor([100.0 + rank()])], group=group)
    assert [output.item() for output in outputs] == [member + 100 * mine for member in members]


@check
def averages_over_a_group_are_divided_by_its_size() -> None:
    members, group = odd_group()
    if rank() not in members:
        return
    rows = [torch.arange(10.0).view(2, 5) ** 2 + 3 * member for member in members]
    expected, mine = (rows[0] + rows[1]) / 2, members.index(rank())
    own, average = rows[mine], dist.ReduceOp.AVG
    for in_place in (False, True):
        tensor = own.clone()
        dist.all_reduce(tensor, average, group=group)
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
        tensor = own.clone()
        dist.reduce(tensor, op=average, group=group, group_dst=1)
        torch.testing.assert_close(tensor, expected if mine else own, rtol=0, atol=0)
        tensor = own.clone()
        output = tensor[mine] if in_place else torch.zeros(5)
        dist.reduce_scatter_single(output, tensor.view(-1), average, group=group)
        torch.testing.assert_close(output, expected[mine], rtol=0, atol=0)
        tensor = own.clone()
        output = tensor[mine] if in_place else torch.zeros(5)
        dist.reduce_scatter(output, list(tensor), average, group=group)
        torch.testing.assert_close(output, expected[mine], rtol=0, atol=0)


@check
def the_monitored_barrier_that_torch_keeps_for_another_backend_says_so() -> None:
    if dist.get_backend() != "gloo":
        assert "only implemented for GLOO" in refusal(lambda: dist.monitored_barrier(wait_all_ranks=True))
    dist.group.WORLD.monitored_barrier(wait_all_ranks=True)


# --- Running them -----------------------------------------------------------------------------------------------------


def main() -> None:
    warnings.simplefilter("ignore")
    if len(sys.argv) > 2:
        os.environ["FARANDOLE_HOST_ID"] = str(int(os.environ["RANK"]) % int(sys.argv[2]))
    dist.init_process_group(sys.argv[1])
    for name, function in CHECKS.items():
        problem = ""
        try:
            function()
        except Exception:
            problem = f"rank {rank()}: {traceback.format_exc()}"
        problems = [None] * size()
        with contextlib.suppress(RuntimeError):  # the group is broken: then the problem says so
            dist.all_gather_object(problems, problem)
        if rank() == 0 or (problem and None in problems):
            print(
                json.dumps([name, "".join(filter(None, [*problems, problem if None in problems else ""]))]), flush=True
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
