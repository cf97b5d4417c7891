"""Under srun of Slurm, where that is installed: a cluster of two nodes, both this machine, only for these tests.

Debian: apt-get install slurm-wlm munge. What is installed there need not be configured, nor run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import LIMIT_S, environment_with, run, write_script

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo", "squeue")
NODES = ("127.0.0.2", "127.0.0.3")
"""Their names, so that these are found at them without a change to /etc/hosts."""

CONFIGURATION = """
ClusterName=farandole
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=2
NodeName={nodes[0]} NodeHostname={host} NodeAddr={nodes[0]} Port={ports[1]} CPUs=16
NodeName={nodes[1]} NodeHostname={host} NodeAddr={nodes[1]} Port={ports[2]} CPUs=16
PartitionName=all Nodes=ALL Default=YES MaxTime=5 State=UP
"""

HEAD = """
import os, signal, sys
import numpy as np
import farandole

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

if "hosts" in sys.argv:
    os.environ["FARANDOLE_HOST_ID"] = os.environ["SLURMD_NODENAME"]
"""

SUM = """
for _ in range(2):
    with farandole.init(timeout_s=60) as comm:
        total = comm.all_reduce(np.full(1000, comm.rank + 1.0))
        comm.barrier()
say(comm.rank, "of", comm.world_size, total[-1])
"""

DEATH = """
comm = farandole.init(timeout_s=60)
try:
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        comm.all_reduce(np.ones(1000))
except farandole.PeerLostError as error:
    say(comm.rank, "lost", str(error).splitlines()[0])
"""


def free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("", 0))) for _ in range(n)]
        return [probe.getsockname()[1] for probe in probes]


def wait_for(what: str, is_so, limit_s: float = 30) -> None:
    limit = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < limit, f"{what} did not come about in {limit_s} s"
        time.sleep(0.1)


@contextlib.contextmanager
def daemon(folder: Path, *command) -> Iterator[subprocess.Popen]:
    """In the foreground, so that it is a child of this process."""
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            [*map(str, command)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment_with({})
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.configuration = folder / "slurm.conf"

    def run(self, *command, **more) -> subprocess.CompletedProcess:
        return run(*command, **({"SLURM_CONF": str(self.configuration)} | more))

    def start(self, *command) -> subprocess.Popen:
        environment = environment_with({"SLURM_CONF": str(self.configuration)})
        return subprocess.Popen(
            [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def srun(self, *arguments, **more) -> subprocess.CompletedProcess:
        return self.run("srun", "--overcommit", *arguments, **more)

    def is_ready(self) -> bool:
        return self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split() == ["idle"] * len(NODES)

    def end_jobs(self) -> None:
        """Those that a test has left, as srun ran out of time. A node is idle once nothing of any job is left on it."""
        self.run("scancel", "--signal=KILL", "--full", "--user=root")
        self.run("scancel", "--user=root")
        wait_for("the end of all jobs", self.is_ready)


@pytest.fixture(scope="module")
def slurm():
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        pytest.skip(f"no Slurm here: {', '.join(missing)} not found (Debian: apt-get install slurm-wlm munge)")
    if os.geteuid() != 0:
        pytest.skip("slurmd runs jobs only for root")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farandole-slurm-", dir="/tmp")))
        folder.chmod(0o755)  # or munged refuses to serve there
        for name in ("state", *NODES):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        cluster = Cluster(folder)
        host = socket.gethostname().partition(".")[0]
        cluster.configuration.write_text(
            CONFIGURATION.format(host=host, folder=folder, nodes=NODES, ports=free_ports(1 + len(NODES)))
        )
        own = {"key-file": key, "socket": folder / "munge.socket"}
        own |= {f"{name}-file": folder / f"munged.{name}" for name in ("pid", "log", "seed")}
        try:
            stack.enter_context(daemon(folder, "munged", "-F", *(f"--{name}={path}" for name, path in own.items())))
            wait_for("munge", (folder / "munge.socket").exists)
            stack.enter_context(daemon(folder, "slurmctld", "-D", "-c", "-f", cluster.configuration))
            for node in NODES:
                stack.enter_context(daemon(folder, "slurmd", "-D", "-f", cluster.configuration, "-N", node))
            wait_for("a cluster whose nodes are idle", cluster.is_ready)
        except AssertionError as error:
            pytest.fail(f"{error}:\n{(folder / 'log').read_text()[-3000:]}")
        stack.callback(cluster.end_jobs)
        yield cluster


def require_sum(done: subprocess.CompletedProcess, n: int) -> None:
    expected = [f"{rank} of {n} {n * (n + 1) / 2}" for rank in range(n)]
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert sorted(done.stdout.splitlines()) == expected, done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("n", [1, 4])
def test_tasks_on_one_node_sum(slurm, tmp_path, n):
    path = write_script(tmp_path, HEAD + SUM)
    require_sum(slurm.srun("--nodes=1", "--ntasks", n, sys.executable, path), n)


@pytest.mark.parametrize("where", ["together", "hosts"])
@pytest.mark.parametrize("distribution", ["block", "cyclic"])
def test_tasks_on_two_nodes_sum(slurm, tmp_path, where, distribution):
    path = write_script(tmp_path, HEAD + SUM)
    options = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2", f"--distribution={distribution}")
    require_sum(slurm.srun(*options, sys.executable, path, where, FARANDOLE_SECRET="long and random"), 4)


def test_with_the_variables_of_pmi_too(slurm, tmp_path):
    path = write_script(tmp_path, HEAD + SUM)
    require_sum(slurm.srun("--mpi=pmi2", "--nodes=1", "--ntasks=3", sys.executable, path), 3)


def test_steps_at_the_same_time_in_a_batch_script_that_is_a_world_of_one(slurm, tmp_path):
    path, output = write_script(tmp_path, HEAD + SUM), tmp_path / "output"
    step = f"srun --overcommit --overlap --ntasks=2 {sys.executable} {path}"
    script = tmp_path / "batch.sh"
    script.write_text(f"#!/bin/sh\n{sys.executable} {path}\n{step} &\n{step} &\nwait\n")
    done = slurm.run("sbatch", "--wait", "--nodes=1", "--ntasks=2", "--overcommit", f"--output={output}", script)
    assert done.returncode == 0, done.stderr
    wait_for("its output", lambda: output.exists() and len(output.read_text().splitlines()) >= 5)
    assert sorted(output.read_text().splitlines()) == ["0 of 1 1.0", *["0 of 2 3.0"] * 2, *["1 of 2 3.0"] * 2]


def test_steps_at_the_same_time_whose_numbers_give_the_same_port(slurm, tmp_path):
    """As happens to two in 10 000. What one sums, the other must not."""
    sum_, processes = write_script(tmp_path, HEAD + SUM), []
    try:
        for step in ("433", "440"):
            command = f"SLURM_JOB_ID={step} SLURM_STEP_ID=0 exec {sys.executable} {sum_}"
            processes.append(slurm.start("srun", "--overcommit", "--nodes=1", "--ntasks=3", "sh", "-c", command))
        for process in processes:
            output, errors = process.communicate(timeout=LIMIT_S)
            require_sum(subprocess.CompletedProcess(process.args, process.returncode, output, errors), 3)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_rank_0_on_another_node_than_the_first(slurm, tmp_path):
    path, hosts = write_script(tmp_path, HEAD + SUM.replace("60", "5")), tmp_path / "hosts"
    hosts.write_text("\n".join(NODES[::-1]) + "\n")
    # With kill-on-bad-exit, srun may drop what the task said last.
    options = ("--distribution=arbitrary", "--ntasks=2", "--kill-on-bad-exit=0", sys.executable, path)
    done = slurm.srun(*options, SLURM_HOSTFILE=str(hosts))
    assert done.returncode != 0
    assert "rank 0 is not on the first host of the step" in done.stderr, done.stdout + done.stderr
    path.write_text(path.read_text().replace("timeout_s=5", "timeout_s=60"))
    place = {"MASTER_ADDR": NODES[1], "MASTER_PORT": str(free_ports(1)[0])}
    require_sum(slurm.srun(*options, SLURM_HOSTFILE=str(hosts), FARANDOLE_SECRET="long and random", **place), 2)


@pytest.mark.parametrize(("where", "nodes"), [("together", 1), ("hosts", 2)])
def test_a_task_that_is_killed_is_lost_to_the_others(slurm, tmp_path, where, nodes):
    path = write_script(tmp_path, HEAD + DEATH)
    options = (f"--nodes={nodes}", "--ntasks=4", "--distribution=cyclic", "--kill-on-bad-exit=0", "--wait=30")
    start = time.monotonic()
    done = slurm.srun(*options, sys.executable, path, where, FARANDOLE_SECRET="long and random")
    assert time.monotonic() - start < LIMIT_S / 2
    assert done.returncode == 128 + 9, done.stdout + done.stderr[-3000:]
    told = [line[: len("0 lost rank 1")] for line in sorted(done.stdout.splitlines())]
    assert told == [f"{rank} lost rank 1" for rank in (0, 2, 3)], done.stdout + done.stderr[-3000:]
