"""Fixtures for all tests, and the check that none leaves anything behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import farandole
from farandole.local_world import LocalWorld

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
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(("sem.", "pymp-"))}


@pytest.fixture(autouse=True)
def nothing_left_behind():
    children, shared = _children(), _shared_memory()
    yield
    assert _children() <= children, "a test left processes behind"
    assert _shared_memory() <= shared, "a test left shared memory behind"


@pytest.fixture(scope="session")
def worlds():
    """World size -> a local world that lives as long as the tests; for tests that do not break it."""
    made: dict[int, LocalWorld] = {}

    def get(world_size: int) -> LocalWorld:
        if world_size in made and made[world_size][0].aborted:
            made.pop(world_size).close()  # another test failed on it
        if world_size not in made:
            made[world_size] = farandole.local(world_size, timeout_s=60)
        return made[world_size]

    yield get
    for world in made.values():
        world.close()
