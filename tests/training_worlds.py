"""Jobs in which the checks of a test module are run, each on groups of several sizes and on several backends.

Usage: as one of four ranks, python training_worlds.py MODULE [PART OF A NAME]. Rank 0 prints a JSON line per check and
group: its name, and "" or what failed on any rank. A check gets the `World` of its group; where a group broke, the next
check gets a new one.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import json
import random
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import jobs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NUM_RANKS = 4
MEMBERS = {1: [3], 2: [0, 2], 3: [1, 2, 3], 4: [0, 1, 2, 3]}
"""World size -> ranks of the job: not those of the group, so that none is taken for the other."""

BACKENDS = ("farandole", "gloo")
TIMEOUT = timedelta(seconds=30)  # what fails on one rank alone takes so long


@dataclasses.dataclass
class World:
    """What a check runs on.

    Attributes:
        size, rank: of the group.
    """

    backend: str
    size: int
    rank: int
    group: dist.ProcessGroup

    def all_of(self, value: object) -> list:
        """Of each rank."""
        found = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def require_same(self, tensors) -> None:
        """Bit for bit, on all ranks."""
        own = [bits(one) for one in tensors]
        for other in self.all_of(own):
            assert other == own


class Checks:
    """Those of a module, by name."""

    def __init__(self) -> None:
        self.made: dict[str, tuple[Callable[[World], None], Sequence[int], Sequence[str]]] = {}

    def __call__(self, *sizes: int, backends: Sequence[str] = BACKENDS):
        def add(function: Callable[[World], None]) -> Callable[[World], None]:
            self.made[function.__name__] = function, sizes, backends
            return function

        return add

    def each(self) -> Iterator[tuple[str, Callable[[World], None], int, str]]:
        for name, (function, sizes, backends) in self.made.items():
            for backend in backends:
                for size in sizes:
                    yield f"{name}-{backend}-{size}", function, size, backend

    def names(self) -> list[str]:
        return [name for name, *_ in self.each()]


def run(module: str) -> dict[str, str]:
    """What each check of it found."""
    command = [sys.executable, "-m", "farandole", "run", "-n", str(NUM_RANKS), __file__, module]
    environment = jobs.environment_with({"OMP_NUM_THREADS": "1"})
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environment)
    found = dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))
    assert result.returncode == 0, (result.stderr[-3000:], list(found)[-1:])
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    sys.modules["training_worlds"] = sys.modules["__main__"]
    module = importlib.import_module(sys.argv[1])
    dist.init_process_group("farandole")
    told = dist.new_group(backend="gloo", timeout=4 * TIMEOUT)
    groups: dict[tuple[str, int], dist.ProcessGroup | None] = {}
    for name, function, size, backend in module.check.each():
        if len(sys.argv) > 2 and sys.argv[2] not in name:
            continue
        if (backend, size) not in groups:
            groups[backend, size] = dist.new_group(MEMBERS[size], backend=backend, timeout=TIMEOUT)
        problem = ""
        if dist.get_rank() in MEMBERS[size]:
            group = groups[backend, size]
            torch.manual_seed(group.rank())
            random.seed(group.rank())
            try:
                function(World(backend, size, group.rank(), group))
            except Exception:
                problem = f"rank {group.rank()}: {traceback.format_exc()}"
        problems = [None] * NUM_RANKS
        dist.all_gather_object(problems, problem, group=told)
        if any(problems):
            del groups[backend, size]
        if dist.get_rank() == 0:
            print(json.dumps([name, "".join(problems)]), flush=True)
    dist.destroy_process_group()


# --- What checks use --------------------------------------------------------------------------------------------------


def bits(tensor: Tensor) -> list:
    """Equal if and only if the numbers are."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return (tensor.detach().double() + 0.0).tolist()


def refusal(call: Callable, kind: type[Exception]) -> str:
    """What it says; exactly of that kind."""
    try:
        call()
    except Exception as error:
        if type(error) is not kind:
            raise
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def batch(rank: int, step: int, rows: int = 4, columns: int = 10) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, columns, generator=generator)


def network(seed: int = 0) -> nn.Sequential:
    """Shapes that no number of ranks divides; the same for a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(10, 17), nn.ReLU(), nn.Linear(17, 7), nn.Tanh(), nn.Linear(7, 5))


def squares(outputs: Tensor) -> Tensor:
    return (outputs**2).mean()


def updates(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def close(actual: nn.Module, expected: nn.Module, tolerance: float = 1e-5) -> None:
    """All weights, to rounding of the narrower ones."""
    for (name, one), other in zip(actual.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            one.double(), other.double(), rtol=10 * tolerance, atol=tolerance, msg=lambda said, name=name: name + said
        )


def identical(actual: nn.Module, expected: nn.Module) -> None:
    for (name, one), other in zip(actual.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other), (name, (one - other).abs().max().item())


@contextlib.contextmanager
def delays(seed: int) -> Iterator[None]:
    """Calls of torch.distributed and what waits for them take longer here and there, on each rank elsewhere."""
    rng = random.Random(seed)
    names = ("all_reduce", "all_to_all_single", "all_gather_single", "reduce_scatter_single")
    kept = {name: getattr(dist, name) for name in names}

    def slow(function: Callable) -> Callable:
        def called(*args, **kwargs):
            if rng.random() < 0.2:
                time.sleep(rng.random() * 2e-3)
            return function(*args, **kwargs)

        return called

    for name, function in kept.items():
        setattr(dist, name, slow(function))
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def random_seeds(world: World) -> range:
    """Others for each backend and size; fewer where each rank computes for more."""
    first = 1000 * world.size + 100 * BACKENDS.index(world.backend)
    return range(first, first + {2: 8, 3: 5, 4: 3}[world.size])


class Mixed(nn.Module):
    """Branches of random shapes and kinds, whose outputs are added up. Some share weights, are frozen, are empty, are
    gone through twice, or checkpointed. Registered in another order than that of their use."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            kinds = [*rng.choices(["plain", "tied", "frozen", "twice"], k=5), "plain"]
            widths = [rng.randint(1, 13) for _ in kinds]
            self.branches = nn.ModuleList(
                nn.ModuleList([nn.Linear(10, width, bias=rng.random() < 0.7), nn.Linear(width, 10)]) for width in widths
            )
            self.shift = nn.Parameter(torch.randn(()))
            self.nothing = nn.Parameter(torch.zeros(0, 3))
            first = self.branches[-1][0]
            for kind, branch in zip(kinds, self.branches, strict=True):
                if kind == "tied":
                    branch[0] = nn.Linear(10, first.out_features)
                    branch[0].weight = first.weight
                    branch[1] = nn.Linear(first.out_features, 10)
                if kind == "frozen":
                    branch[0].weight.requires_grad_(False)
        self.kinds = kinds
        # What is tied accumulates once in a backward, if only the others are recomputed by themselves.
        self.checkpointed = [None if kind == "tied" else rng.choice([None, True, False]) for kind in kinds]
        self.checkpointed[-1] = None

    def forward(self, inputs: Tensor, order: Sequence[int]) -> Tensor:
        total = self.shift + self.nothing.sum()
        for index in order:
            total = total + self._branch(index, inputs)
        return total

    def _branch(self, index: int, inputs: Tensor) -> Tensor:
        down, up = self.branches[index]
        is_reentrant = self.checkpointed[index]

        def through(values: Tensor) -> Tensor:
            return up(torch.tanh(down(values)))

        def go(values: Tensor) -> Tensor:
            if is_reentrant is None:
                return through(values)
            return checkpoint(through, values.detach().requires_grad_(), use_reentrant=is_reentrant)

        return go(go(inputs)) if self.kinds[index] == "twice" and is_reentrant is None else go(inputs)


class Reference:
    """Ranks one after the other, in one process: what `reproducible=True` promises, to the bit."""

    def __init__(
        self, module: nn.Module, size: int, make_optimizer: Callable, reduction: str = "mean", copies=None
    ) -> None:
        self.module = module
        self.ranks = copies or [
            copy.deepcopy(module) for _ in range(size)
        ]  # these have other strides, if some have gaps
        self.divisor = size if reduction == "mean" else 1
        self.optimizer = make_optimizer([one for one in module.parameters() if one.requires_grad])

    def backward(self, rank: int, loss_of: Callable[[nn.Module], Tensor]) -> None:
        """Of one rank alone."""
        loss_of(self.ranks[rank]).backward()

    def sum(self) -> None:
        """What all ranks have accumulated."""
        for parameter, *copies in zip(self.module.parameters(), *(one.parameters() for one in self.ranks), strict=True):
            if not parameter.requires_grad or all(one.grad is None for one in copies):
                continue
            given = [torch.zeros_like(one) if one.grad is None else one.grad for one in copies]
            total = given[0] if parameter.grad is None else parameter.grad * self.divisor + given[0]
            for other in given[1:]:
                total = total + other
            parameter.grad = total / self.divisor
            for one in copies:
                one.grad = None

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        for one in self.ranks:
            for mine, new in zip(one.parameters(), self.module.parameters(), strict=True):
                mine.data.copy_(new.data)


def random_backwards(world: World, rng: random.Random, model, expected: Reference, step: int) -> None:
    """Those of a step, of a `Mixed`: some summed, the last one always. Ranks take branches in orders of their own."""
    num_backwards = rng.randint(1, 3)
    for number in range(num_backwards):
        is_summed = number == num_backwards - 1 or rng.random() < 0.5
        for rank in range(world.size):
            order = rng.sample(range(6), rng.randint(1, 6))
            inputs = batch(rank, 10 * step + number, rng.randint(1, 5))
            expected.backward(rank, lambda one, i=inputs, o=order: (one(i, o) ** 2).mean())
            if rank == world.rank:
                with contextlib.nullcontext() if is_summed else model.no_sync():
                    (model(inputs, order) ** 2).mean().backward()
        if is_summed:
            expected.sum()


if __name__ == "__main__":
    main()
