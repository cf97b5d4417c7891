"""What is built on torch.distributed, and programs that name the backend, as jobs of several processes."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

CHECKS = Path(__file__).parent / "torch_programs" / "checks.py"
NAMES = [
    node.name
    for node in ast.parse(CHECKS.read_text()).body
    if isinstance(node, ast.FunctionDef) and any(ast.unparse(mark) == "check" for mark in node.decorator_list)
]
FARANDOLE = Path(sys.executable).parent / "farandole"
TORCHRUN = Path(sys.executable).parent / "torchrun"


def run(*command, timeout_s: float = 200, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


@pytest.fixture(scope="module", params=[(2, 1), (4, 1), (4, 2)], ids=["2 ranks", "4 ranks", "4 ranks on 2 hosts"])
def outcomes(request) -> dict[str, str]:
    """What each check found, on so many ranks and hosts."""
    num_ranks, num_hosts = request.param
    result = run(FARANDOLE, "run", "-n", num_ranks, CHECKS, "farandole", num_hosts)
    assert result.returncode == 0, result.stderr[-3000:]
    return dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_built_on_torch_distributed(outcomes, name):
    assert outcomes[name] == ""


@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
@pytest.mark.parametrize(("launcher", "size"), [([FARANDOLE, "run", "-n"], 4), ([TORCHRUN, "--nproc-per-node"], 2)])
def test_frameworks_train_over_farandole(framework, size, launcher):
    result = run(*launcher, size, CHECKS.parent / f"with_{framework}.py", size)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count(f"of {size} is through") == size


def test_what_is_built_on_torch_distributed_under_its_own_checks():
    """Which torch makes of every call where it is told to look closely."""
    result = run(FARANDOLE, "run", "-n", 2, CHECKS, "farandole", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert result.returncode == 0, result.stderr[-3000:]
    found = dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))
    assert found == dict.fromkeys(NAMES, "")


def script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text("import os, sys, torch\nimport torch.distributed as dist\n" + textwrap.dedent(body))
    return path


@pytest.mark.parametrize("launcher", [[TORCHRUN, "--nproc-per-node", 2], [FARANDOLE, "run", "-n", 2]])
@pytest.mark.parametrize("name", ["farandole", "cpu:farandole"])
def test_naming_the_backend_is_enough_and_loads_nothing_before(tmp_path, name, launcher):
    """Nothing of farandole is imported with torch.

    One process group per program: torch's own store on MASTER_PORT may still be closing when a second one is made.
    """
    path = script(
        tmp_path,
        f"""
        assert "TORCHELASTIC_RUN_ID" not in os.environ or "farandole" not in sys.modules
        assert "farandole.torch_backend" not in sys.modules
        dist.init_process_group({name!r})
        assert dist.get_backend().endswith("farandole")
        tensor = torch.ones(3) * (dist.get_rank() + 1)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 3
        dist.destroy_process_group()
        """,
    )
    result = run(*launcher, path)
    assert result.returncode == 0, result.stderr[-2000:]


def test_torchrun_starts_anew_after_a_failure(tmp_path):
    path = script(
        tmp_path,
        """
        dist.init_process_group("farandole")
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
            os._exit(3)
        dist.all_reduce(tensor)
        os.write(1, f"through {tensor.item()}\\n".encode())
        dist.destroy_process_group()
        """,
    )
    result = run(TORCHRUN, "--nproc-per-node", 2, "--max-restarts", 1, path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("through 4.0") == 2


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(3)", "os.kill(os.getpid(), 9)"])
@pytest.mark.parametrize("wrap", ["DistributedDataParallel", "fully_shard"])
def test_a_peer_that_dies_in_training_is_named_on_every_other_rank(tmp_path, wrap, end):
    path = script(
        tmp_path,
        f"""
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel
        from farandole import PeerLostError
        dist.init_process_group("farandole")
        model = {wrap}(torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 9)))
        try:
            for step in range(5):
                if step == 2 and dist.get_rank() == 1:
                    {end}
                model(torch.ones(2, 9)).sum().backward()
        except RuntimeError as error:
            print(f"rank {{dist.get_rank()}}: {{error}}".replace(chr(10), " "), flush=True)
            os._exit(0)
        """,
    )
    port = 29000 + os.getpid() % 1000 * 2
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        )
        for rank in range(3)
    ]
    try:
        texts = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for survivor in (0, 2):
        assert re.search(rf"rank {survivor}: .*\brank 1 (ended|closed)", texts[survivor][0]), texts[survivor]


@pytest.mark.parametrize("last", ["dist.broadcast(torch.ones(3), 0)", "dist.group.WORLD.monitored_barrier()"])
def test_rank_0_takes_the_store_with_it_only_when_nobody_needs_it(tmp_path, last):
    path = script(
        tmp_path,
        f"""
        dist.init_process_group("farandole")
        {last}
        dist.destroy_process_group()
        """,
    )
    for _ in range(6):
        result = run(FARANDOLE, "run", "-n", 3, path)
        assert (result.returncode, result.stderr) == (0, "")


def test_a_callback_that_still_runs_at_the_end_does_not_spoil_it(tmp_path):
    path = script(
        tmp_path,
        """
        import time
        dist.init_process_group("farandole")
        for index in range(3):
            work = dist.all_reduce(torch.ones(3), async_op=True)
            work.get_future().then(lambda future: time.sleep(0.3))
        dist.barrier()
        if sys.argv[1] == "destroy":
            dist.destroy_process_group()
        """,
    )
    for how in ("destroy", "leave", "destroy", "leave"):
        result = run(FARANDOLE, "run", "-n", 2, path, how)
        assert (result.returncode, result.stderr) == (0, "")


def test_a_forked_child_ends_though_a_thread_of_its_parent_held_a_lock(tmp_path):
    path = script(
        tmp_path,
        """
        import signal
        dist.init_process_group("farandole")
        for _ in range(12):
            group = dist.new_group()
            dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future().wait()
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # ends it if it hangs
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
        dist.barrier()
        dist.destroy_process_group()
        """,
    )
    result = run(FARANDOLE, "run", "-n", 2, path)
    assert result.returncode == 0, result.stderr[-2000:]


def test_a_rank_that_ends_while_others_make_a_group_is_named(tmp_path):
    path = script(
        tmp_path,
        """
        from farandole import CommunicationError
        dist.init_process_group("farandole")
        dist.barrier()
        if dist.get_rank() == 1:
            os._exit(0)
        try:
            dist.new_group()
        except CommunicationError as error:  # of its own, or that another rank has given up for it
            os.write(1, f"{error}\\n".encode())
        """,
    )
    result = run(FARANDOLE, "run", "-n", 3, path)
    assert result.stdout.count("rank 1 ended while it was waited for to make a group of ranks [0, 1, 2]") == 2, result


def test_destroying_a_group_whose_ranks_differed_does_so_and_fails_the_process(tmp_path):
    path = script(
        tmp_path,
        """
        dist.init_process_group("farandole")
        dist.broadcast(torch.ones(2), dist.get_rank())  # each only sends
        dist.destroy_process_group()
        print(dist.is_initialized())
        """,
    )
    result = run(FARANDOLE, "run", "-n", 2, path)
    assert "True" not in result.stdout
    assert "the ranks made different calls" in result.stderr
    assert result.returncode == 1


def test_ctrl_c_ends_a_call_that_waits(tmp_path):
    path = script(
        tmp_path,
        """
        dist.init_process_group("farandole")
        if dist.get_rank() == 0:
            print("waits", flush=True)
            dist.all_reduce(torch.ones(1))
        else:
            sys.stdin.read()
        """,
    )
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(31000 + os.getpid() % 1000),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].stdout.readline() == "waits\n"
        ranks[0].send_signal(signal.SIGINT)
        _, text = ranks[0].communicate(timeout=60)
        assert "KeyboardInterrupt" in text
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_rank_that_does_not_start_is_named(tmp_path):
    path = script(
        tmp_path,
        """
        from datetime import timedelta
        store = dist.FileStore(sys.argv[1], 2)
        dist.init_process_group("farandole", store=store, rank=0, world_size=2, timeout=timedelta(seconds=1))
        """,
    )
    result = run(sys.executable, path, tmp_path / "store")
    assert result.returncode == 1
    assert "of 2 ranks these have not joined: 1" in result.stderr
