"""Fixtures for all tests, and the check that none leaves anything behind."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from unittest import mock

import jobs
import pytest

import farandole
from farandole import membership, runner
from farandole.local_world import LocalWorld
from farandole.topology import Topology

TIGHT = (membership, "_geometry", lambda *_: (2, 64))
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="farandole-tests-")  # no calibration of this user
WORLD_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16)


def _children() -> set[int]:
    """Processes started by this one, the helpers of multiprocessing apart."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and b"resource_tracker" not in command and b"forkserver" not in command:
            found.add(int(status.parent.name))
    return found


def _shared_memory() -> set[str]:
    # Those of multiprocessing, and of MPIs, which leave them if ranks fail.
    others = ("sem.", "pymp-", "sm_segment.", "mpich_shm_", "ucx_shm_")
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(others)}


@pytest.fixture(autouse=True)
def nothing_left_behind():
    children, shared = _children(), _shared_memory()
    yield
    assert _children() <= children, "a test left processes behind"
    left = _shared_memory() - shared
    left = (left - jobs.in_use(left)) & _shared_memory()
    assert not left, "a test left shared memory behind"


class KeptWorlds:
    """World size -> a local world that is kept for the next test; for tests that do not break it."""

    def __init__(self, *patches, make_topology=None) -> None:
        self.made: dict[int, LocalWorld] = {}
        self.patches = patches
        self.make_topology = make_topology

    def __call__(self, world_size: int) -> LocalWorld:
        if world_size in self.made and self.made[world_size][0].aborted:
            self.made.pop(world_size).close()  # another test failed on it
        if world_size not in self.made:
            with contextlib.ExitStack() as stack:
                for target, name, value in self.patches:
                    stack.enter_context(mock.patch.object(target, name, value))
                hosts = None if self.make_topology is None else self.make_topology(world_size)
                self.made[world_size] = farandole.local(world_size, timeout_s=60, hosts=hosts)
        return self.made[world_size]

    def close(self) -> None:
        for world in self.made.values():
            world.close()


@pytest.fixture(scope="session")
def worlds():
    with contextlib.closing(KeptWorlds()) as kept:
        yield kept


@pytest.fixture(scope="session")
def tight_worlds():
    """As `worlds`, with channels of two slots of a cache line: whatever is not tiny fills them many times over."""
    with contextlib.closing(KeptWorlds(TIGHT)) as kept:
        yield kept


def scattered(world_size: int) -> Topology:
    """Ranks dealt out to two hosts."""
    return Topology.of_hosts(rank % 2 for rank in range(world_size))


@pytest.fixture(scope="session")
def wired_worlds():
    """As `mapped_worlds`, on two hosts."""
    patches = (TIGHT, (runner, "_SMALLEST_MAPPED_BYTES", 0))
    with contextlib.closing(KeptWorlds(*patches, make_topology=scattered)) as kept:
        yield kept


@pytest.fixture(scope="session")
def mapped_worlds():
    """As `tight_worlds`; whatever lies in registered memory travels mapped, however small it is."""
    with contextlib.closing(KeptWorlds(TIGHT, (runner, "_SMALLEST_MAPPED_BYTES", 0))) as kept:
        yield kept


@pytest.fixture(scope="module", params=["openmpi", "mpich"])
def mpi(request):
    """The bin folder of a virtual environment with that MPI and mpi4py."""
    before = jobs.left_by_mpi()
    yield jobs.environment_of(request.param, "mpi4py")
    for left in jobs.left_by_mpi() - before:  # where ranks ended without MPI's knowing
        left.unlink()


def pytest_addoption(parser):
    parser.addoption("--whole-matrix", action="store_true", help="every cell of the fault matrix with every collective")
