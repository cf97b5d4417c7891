"""Traces of what is written on torch: on farandole's backend, on gloo, and without any."""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path

import pytest
import torch
from tests import jobs
from tests.test_timeline import assert_one_clock_was_measured
from typer.testing import CliRunner

import farandole
from farandole.cli import app
from farandole.trace_file import Part, read_trace

FARANDOLE = Path(sys.executable).parent / "farandole"

PROGRAM = """
import os, sys, torch, warnings
import torch.distributed as dist
from torch import nn

import farandole
from farandole.training import DataParallel, FullyShardedParallel, NaiveDataParallel, ZeroOptimizer

torch.set_num_threads(1)
warnings.simplefilter("error", RuntimeWarning)
folder = sys.argv[1]

def net():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])

def train(name, model, optimizer, after_backward=lambda: None):
    with farandole.trace(f"{folder}/{backend}-{name}.json") as trace:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            after_backward()
            optimizer.step()
    assert [one.rank for one in trace.exposed] == [0, 1]
    assert [len(one.steps) for one in trace.exposed] == [3, 3]

def start(backend, times):
    store = dist.FileStore(f"{folder}/{backend}{times}", 2)
    dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=2)

for backend in ("farandole", "gloo"):
    start(backend, 1)
    model = DataParallel(net(), bucket_bytes=1)
    train("replicated", model, torch.optim.SGD(model.parameters(), lr=0.1))
    model = DataParallel(net(), bucket_bytes=1)
    train("zero", model, ZeroOptimizer(model, torch.optim.AdamW, stage=2))
    model = FullyShardedParallel(net())
    train("sharded", model, torch.optim.AdamW(model.parameters()))
    model = NaiveDataParallel(net())
    train("naive", model, torch.optim.SGD(model.parameters(), lr=0.1), model.average_gradients)
    model = nn.parallel.DistributedDataParallel(net(), bucket_cap_mb=0.01)
    farandole.tracing.clock_identity = lambda: str(dist.get_rank())
    train("torchs", model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        with farandole.trace(f"{folder}/{backend}-left.json"):
            dist.destroy_process_group()
    except RuntimeWarning as warning:
        print(warning)
    start(backend, 2)
    try:
        with farandole.trace(f"{folder}/{backend}-failed.json"):
            assert dist.get_rank() == 0
            dist.barrier()
    except (AssertionError, RuntimeError, RuntimeWarning):
        pass
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    done = jobs.run(FARANDOLE, "run", "-n", 2, program, folder, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def counted(part: Part, kind: str) -> dict[str, int]:
    return dict(collections.Counter(span.name for span in part.spans if span.kind == kind))


STEPS = {
    "replicated": {"forward": 3, "backward": 3, "SGD.step": 3},
    "zero": {"forward": 3, "backward": 3, "AdamW.step": 3, "ZeroOptimizer.step": 3},
    "sharded": {"forward": 3, "backward": 3, "AdamW.step": 3},
    "naive": {"SGD.step": 3},
}
MOVED = {
    "replicated": {"all_reduce": 3 * 9},  # a bucket for each parameter, and which parameters had gradients
    "zero": {"all_reduce": 3, "reduce_scatter": 3 * 8, "all_gather": 3 * 8},
    "sharded": {"all_reduce": 3, "reduce_scatter": 3 * 4},
    "naive": {"all_reduce": 3 * 8},
}


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
@pytest.mark.parametrize("name", STEPS)
def test_training_is_recorded_on_any_backend_and_nothing_twice(folder, backend, name):
    for part in read_trace(folder / f"{backend}-{name}.json"):
        assert counted(part, "compute") == STEPS[name]
        moved = counted(part, "communication")
        assert {key: moved.get(key) for key in MOVED[name]} == MOVED[name]
        assert not any(span.details.get("unfinished") for span in part.spans)
        one = part.exposure()
        assert 0 < one.total.exposed <= one.total.communicating
        assert one.total.computing > 0
        assert all(step.seconds > 0 and step.communicating > 0 for step in one.steps)
        sizes = [span.details["bytes"] for span in part.spans if span.kind == "communication"]
        assert max(sizes) >= 64 * 64 * 4


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_gradients_are_summed_within_backward(folder, backend):
    for part in read_trace(folder / f"{backend}-replicated.json"):
        backwards = [span for span in part.spans if span.name == "backward"]
        for call in part.spans:
            if call.name == "all_reduce":
                assert any(one.began_ns <= call.began_ns <= one.ended_ns for one in backwards)


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_where_a_rank_fails_what_there_is_is_written(folder, backend):
    whole = folder / f"{backend}-failed.json"
    alone = [folder / f"{backend}-failed.rank{rank}.json" for rank in (0, 1)]
    assert ranks_in(whole, *alone) == [0, 1]


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_a_program_may_leave_torch_distributed_before_the_trace(folder, backend):
    alone = [folder / f"{backend}-left.rank{rank}.json" for rank in (0, 1)]
    assert ranks_in(folder / f"{backend}-left.json", *alone) == [0, 1]


def ranks_in(*paths: Path) -> list[int]:
    return sorted(part.rank for path in paths if path.exists() for part in read_trace(path))


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_clocks_are_measured_over_any_backend(folder, backend):
    assert_one_clock_was_measured(folder / f"{backend}-torchs.json")


def test_the_waits_of_torchs_own_wrapper_are_seen_over_farandole(folder):
    for part in read_trace(folder / "farandole-torchs.json"):
        assert counted(part, "communication")["all_reduce"] >= 3 * 2
        waits = sorted(span.ended_ns for span in part.spans if span.name == "at the end of backward")
        assert len(waits) == 3
        # A step ends after its wait, and the next wait comes after it.
        assert all(wait < step for wait, step in zip(waits, part.steps, strict=True))
        assert all(step < wait for step, wait in zip(part.steps, waits[1:], strict=False))
        assert part.exposure().total.exposed > 0


# --- The command ------------------------------------------------------------------------------------------------------


def show(*arguments) -> str:
    result = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_prints_what_was_exposed(folder):
    path = folder / "gloo-zero.json"
    title, head, *rows = show(path).splitlines()
    assert title.startswith("2 ranks on ")
    assert head.split() == [
        *("rank", "steps", "seconds", "computing", "waiting", "communicating", "exposed", "hidden", "%", "exposed")
    ]
    parts = read_trace(path)
    for row, part in zip(rows, parts, strict=True):
        total = part.exposure().total
        assert row.split()[:2] == [str(part.rank), "3"]
        assert float(row.split()[6]) == pytest.approx(total.exposed, abs=1e-4)
    told = json.loads(show(path, "--json"))["ranks"]
    assert [one["rank"] for one in told] == [0, 1]
    assert [len(one["steps"]) for one in told] == [3, 3]
    assert told[0]["total"]["hidden"] == parts[0].exposure().total.hidden
    rows = [row.split()[:2] for row in show(path, "--steps").splitlines()[2:]]
    assert rows == [[rank, step] for rank in "01" for step in ("1", "2", "3", "all")]


def test_the_command_refuses_a_rank_that_is_there_twice(folder):
    path = folder / "gloo-zero.json"
    result = CliRunner().invoke(app, ["trace", str(path), str(path)])
    assert "rank 0 is in several of these files" in str(result.exception)


def test_the_command_says_what_is_missing(folder, tmp_path):
    path = tmp_path / "trace.json"
    content = json.loads((folder / "gloo-zero.json").read_text())
    content["farandole"]["ranks"][1]["missing"] = 12345
    path.write_text(json.dumps(content))
    assert "no room for 12,345 spans of rank 1" in show(path)


def test_steps_of_threads_and_after_one_that_failed_are_counted_once(tmp_path):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ZeroDivisionError

    def run(comm):
        weight = torch.nn.Parameter(torch.ones(2))
        failing, optimizer = Failing([weight], lr=0.1), torch.optim.SGD([weight], lr=0.1)
        with farandole.trace(tmp_path / "trace.json", communicator=comm) as trace:
            with pytest.raises(ZeroDivisionError):
                failing.step()
            for _ in range(2 + comm.rank):
                weight.sum().backward()
                optimizer.step()
        return len(trace.exposed[comm.rank].steps)

    with farandole.local(3) as world:
        assert world.run(run) == [2, 3, 4]
    for rank, part in enumerate(read_trace(tmp_path / "trace.json")):
        assert [span.name for span in part.spans] == ["SGD.step"] * (2 + rank)
