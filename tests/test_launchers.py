"""Who a process is, as what started it says: torchrun, mpirun, srun, farandole run, or plain variables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import LIMIT_S, environment_with, mpirun, run, write_script
from several_hosts import free_port

from farandole.errors import RendezvousError
from farandole.launch import environment as environments
from farandole.launch.environment import join_job, seat_from, secret_from

BIN = Path(sys.executable).parent

PROGRAM = """
import sys, numpy as np, farandole
for _ in range(3):  # a job may meet again
    with farandole.init(timeout_s=60) as comm:
        total = comm.all_reduce(np.arange(5.0) + comm.rank)
        n = comm.world_size
        assert (total == n * np.arange(5.0) + n * (n - 1) / 2).all(), total
        ranks = comm.all_gather(np.array([comm.rank])).tolist()
sys.stdout.write(f"{ranks.index(comm.rank)} of {n}\\n")
"""


def require_all(done: subprocess.CompletedProcess, n: int) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(re.findall(r"\d+ of \d+", done.stdout)) == [f"{rank} of {n}" for rank in range(n)]


# -- what the variables say --------------------------------------------------------------------------------------------

SEATS = {
    "nobody": ({}, None),
    "spaces": ({"RANK": " 1 ", "WORLD_SIZE": "3"}, (1, 3, "plain")),
    "plain": ({"RANK": "1", "WORLD_SIZE": "3"}, (1, 3, "plain")),
    "open mpi": ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, (2, 4, "mpi")),
    "hydra": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2, "hydra")),
    "srun": ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, (5, 8, "slurm")),
    "a batch script of slurm, which is no step": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
    "plain variables go first": (
        {"RANK": "1", "WORLD_SIZE": "2", "PMI_RANK": "0", "PMI_SIZE": "3"},
        (1, 2, "plain"),
    ),
    "srun that speaks the language of MPICH, too": (
        {"PMI_RANK": "1", "PMI_SIZE": "3", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"},
        (1, 3, "slurm"),
    ),
    "mpirun in slurm": (
        {"PMI_RANK": "1", "PMI_SIZE": "3", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        (1, 3, "hydra"),
    ),
}


@pytest.mark.parametrize("case", SEATS)
def test_who_a_process_is(case):
    variables, seat = SEATS[case]
    assert seat_from(variables) == seat


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, r"WORLD_SIZE is None; .* \(RANK and WORLD_SIZE are set together\)"),
        ({"WORLD_SIZE": "1"}, "RANK is None"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'; it must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK is 2 and WORLD_SIZE is 2; RANK must be in 0\.\.WORLD_SIZE - 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is -1"),
        ({"RANK": "--1", "WORLD_SIZE": "2"}, "RANK is '--1'; it must be a whole number"),
        ({"RANK": "²", "WORLD_SIZE": "2"}, "RANK is '²'; it must be a whole number"),
        ({"PMI_RANK": "7", "PMI_SIZE": "2"}, "PMI_RANK is 7 and PMI_SIZE is 2"),
        ({"OMPI_COMM_WORLD_RANK": "", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is ''"),
    ],
)
def test_a_rank_that_makes_no_sense_is_refused_by_its_name(variables, message):
    with pytest.raises(RendezvousError, match=message):
        seat_from(variables)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "MASTER_ADDR is not; start with farandole run, torchrun, mpirun or srun"),
        ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is ''; it must give a port"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "²"}, "MASTER_PORT is '²'"),
        ({"FARANDOLE_RENDEZVOUS": "localhost"}, "FARANDOLE_RENDEZVOUS is 'localhost'; it must give a port"),
        ({"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "5", "FARANDOLE_SECRET": "x"}, "nowhere.invalid"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused_by_its_name(variables, message):
    with pytest.raises(RendezvousError, match=message):
        join_job({"RANK": "1", "WORLD_SIZE": "2", **variables}, 0.2)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("alone", "alone"),
        ("a,b", "a"),
        ("node[01-04,07],login1", "node01"),
        ("node[3,5]", "node3"),
        ("rack[1-2]-ib", "rack1-ib"),
        ("x[007]", "x007"),
        ("rack[1-2]node[3-4],b", "rack1node3"),
    ],
)
def test_the_first_host_of_slurm(hosts, first):
    variables = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": hosts, "SLURM_STEP_NUM_NODES": "3"}
    host, port = environments._slurm_address(variables)
    assert host == first
    assert 20_000 <= port < 30_000
    assert environments._slurm_address({**variables, "SLURM_STEP_NUM_NODES": "1"}) == ("127.0.0.1", port)
    assert environments._slurm_address({**variables, "SLURM_STEP_ID": "1"}) != (host, port)
    with pytest.raises(RendezvousError, match="SLURM_STEP_NODELIST is ''; set MASTER_ADDR"):
        environments._slurm_address({**variables, "SLURM_STEP_NODELIST": ""})


# -- the secret --------------------------------------------------------------------------------------------------------


def test_a_secret_from_a_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text("long and random\n")
    path.chmod(0o600)
    variables = {"FARANDOLE_SECRET_FILE": str(path)}
    assert secret_from(variables) == b"long and random"
    assert secret_from({**variables, "FARANDOLE_SECRET": "other"}) == b"other"
    assert secret_from({**variables, "FARANDOLE_SECRET": ""}) == b"long and random"
    assert secret_from({}) == secret_from({"FARANDOLE_SECRET": "", "FARANDOLE_SECRET_FILE": ""}) == b""
    path.chmod(0o640)
    with pytest.raises(RendezvousError, match="which others may read; chmod 600"):
        secret_from(variables)
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(RendezvousError, match="which is empty"):
        secret_from(variables)
    with pytest.raises(RendezvousError, match=r"FARANDOLE_SECRET_FILE cannot be read: .*missing"):
        secret_from({"FARANDOLE_SECRET_FILE": str(tmp_path / "missing")})


# -- for real ----------------------------------------------------------------------------------------------------------


def start_ranks(path: Path, n: int, srun: bool) -> list[subprocess.Popen]:
    """By variables, those of srun or the plain ones."""
    if srun:
        job = {"SLURM_STEP_NUM_TASKS": str(n), "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_ID": "0"}
        job["SLURM_JOB_ID"] = str(os.getpid())
    else:
        job = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment_with(job | {"SLURM_PROCID" if srun else "RANK": str(rank)}),
        )
        for rank in range(n)
    ]


@pytest.mark.parametrize("srun", [False, True])
def test_variables_alone(tmp_path, srun):
    """Also those of srun, which is not here."""
    ranks = start_ranks(write_script(tmp_path, PROGRAM), 3, srun)
    texts = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], texts
    assert sorted(text for text, _ in texts) == [f"{rank} of 3\n" for rank in range(3)]


@pytest.mark.parametrize("launcher", ["plain", "slurm", "mpi", "hydra"])
def test_a_world_of_one_meets_nobody(launcher):
    """Whatever else of the place to meet is missing."""
    rank, size = environments._LAUNCHERS[launcher]
    join_job({rank: "0", size: "1"}, 1).leave()


@pytest.mark.parametrize("n", [1, 3])
def test_torchrun(tmp_path, n):
    done = run(BIN / "torchrun", "--nproc-per-node", n, write_script(tmp_path, PROGRAM), OMP_NUM_THREADS="1")
    require_all(done, n)


def test_torchrun_with_a_secret_that_differs(tmp_path):
    path = write_script(
        tmp_path,
        """
        import os, farandole
        os.environ["FARANDOLE_SECRET"] = "of rank " + os.environ["RANK"]
        try:
            farandole.init(timeout_s=20)
        except farandole.RendezvousError as error:
            print(error)
        """,
    )
    done = run(BIN / "torchrun", "--nproc-per-node", 2, path, OMP_NUM_THREADS="1")
    assert "was not set by a rank that knows FARANDOLE_SECRET" in done.stdout


def test_torchrun_starts_anew_after_a_failure(tmp_path):
    path = write_script(
        tmp_path,
        """
        import os, numpy as np, farandole
        with farandole.init(timeout_s=60) as comm:
            comm.barrier()
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and comm.rank == 1:
                os._exit(3)
            comm.barrier()
        os.write(1, b"through\\n")
        """,
    )
    done = run(BIN / "torchrun", "--nproc-per-node", 2, "--max-restarts", 1, path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("through") == 2


@pytest.mark.parametrize("n", [1, 3])
def test_mpirun(mpi, tmp_path, n):
    require_all(mpirun(mpi, n, mpi / "python", write_script(tmp_path, PROGRAM)), n)


def test_mpirun_with_a_place_to_meet(mpi, tmp_path):
    """Then mpi4py is not needed."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    require_all(
        mpirun(mpi, 2, mpi / "python", "-c", "import sys; sys.modules['mpi4py'] = None\n" + PROGRAM, **place), 2
    )


def test_mpirun_without_mpi4py_says_what_to_do(mpi):
    code = "import sys; sys.modules['mpi4py'] = None; import farandole; farandole.init()"
    done = mpirun(mpi, 2, mpi / "python", "-c", code)
    assert done.returncode != 0
    assert "install it, or set MASTER_ADDR and MASTER_PORT" in done.stderr


def test_mpirun_of_another_mpi_says_so(mpi, tmp_path):
    """As the mpi4py here finds no mpirun of its own, it is alone."""
    variables = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    done = run(mpi / "python", "-c", "import farandole; farandole.init()", **variables)
    assert "says that it is rank 1 of 2, and mpi4py that it is rank 0 of 1: it uses another MPI" in done.stderr


def test_ranks_that_missed_one_another_under_mpirun_meet_when_both_come_again(mpi, tmp_path):
    """What was told of meetings that failed is told to nobody."""
    path = write_script(
        tmp_path,
        """
        import os, farandole
        from mpi4py import MPI
        rank = MPI.COMM_WORLD.rank

        def misses():
            try:
                farandole.init(timeout_s=0.2)
            except farandole.RendezvousError:
                return
            raise AssertionError

        for late in (0, 1, 0, 1):
            if rank != late:
                misses()
            MPI.COMM_WORLD.Barrier()
        with farandole.init(timeout_s=60) as comm:
            comm.barrier()
        os.write(1, b"through\\n")
        """,
    )
    done = mpirun(mpi, 2, mpi / "python", path)
    assert done.stdout.count("through") == 2, done.stderr[-2000:]


def test_the_rank_that_does_not_come_is_named_under_mpirun(mpi, tmp_path):
    path = write_script(
        tmp_path,
        """
        import os, farandole
        from mpi4py import MPI
        rank = MPI.COMM_WORLD.rank
        if rank != 2:
            try:
                farandole.init(timeout_s=2)
            except farandole.RendezvousError as error:
                os.write(1, f"{error}\\n".encode())
        MPI.COMM_WORLD.Barrier()
        os._exit(0)
        """,
    )
    done = mpirun(mpi, 3, mpi / "python", path)
    assert "of 3 ranks these have not joined: 2" in done.stdout
