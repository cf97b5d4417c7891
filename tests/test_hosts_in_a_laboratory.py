"""Jobs on hosts that are apart: namespaces of their own, joined by real links (see benchmarks/lab)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from benchmarks.lab.laboratory import Laboratory, UnavailableError

LIMIT_S = 60  # for what takes seconds; only a failure takes so long


@pytest.fixture(scope="module")
def hosts():
    try:
        with Laboratory(2, 200e6) as made:
            yield made
    except UnavailableError as error:
        pytest.skip(str(error))


def start(hosts: Laboratory, places: list[int], script: str, **environment: str) -> list[subprocess.Popen]:
    """A rank at each of ``places``."""
    job = {
        "WORLD_SIZE": str(len(places)),
        "MASTER_ADDR": hosts.address(places[0]),
        "MASTER_PORT": "29401",
        "FARANDOLE_SECRET": "of this test",
    }
    return [
        hosts.start(
            host,
            [sys.executable, "-u", "-c", script],
            env={**os.environ, **job, "RANK": str(rank), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, host in enumerate(places)
    ]


MEETS = """
import numpy as np, farandole
with farandole.init(timeout_s=60) as comm:
    place = comm._membership.network
    total = comm.all_reduce(np.arange(1000) + comm.rank)
    print(place.topology, *place.host_names, *sorted(set(place.addresses)), total[1])
"""


@pytest.mark.parametrize("places", [[0, 1], [0, 1, 0, 1], [1, 1, 0]])
def test_who_shares_a_host_is_found_though_nobody_says_it(hosts, places):
    """Process numbers are alike on both; each says by which address it can be reached."""
    for rank in start(hosts, places, MEETS):
        out, err = rank.communicate(timeout=LIMIT_S)
        topology, *rest, total = out.decode().split()
        assert topology == {2: "2x1", 4: "0,1,0,1", 3: "2+1"}[len(places)], err
        assert rest[: len(places)] == [f"host{host}" for host in places]
        assert " ".join(rest[len(places) :]) == " ".join(f"('{hosts.address(host)}',)" for host in (0, 1))
        assert int(total) == len(places) + sum(range(len(places)))


IS_CUT_OFF = """
import os, time, numpy as np, farandole
comm = farandole.init(timeout_s=60)
comm.barrier()
print("met", flush=True)
while not os.path.exists(os.environ["GO_ON"]):
    time.sleep(0.01)
try:
    comm.all_reduce(np.ones(300_000), timeout=1)
except farandole.CollectiveTimeoutError as error:
    print(error, flush=True)
"""


def test_hosts_that_are_cut_off_are_named_at_the_timeout(hosts, tmp_path):
    go_on = tmp_path / "go on"
    ranks = start(hosts, [0, 1], IS_CUT_OFF, GO_ON=str(go_on))
    for rank in ranks:
        assert rank.stdout.readline() == b"met\n"
    hosts.cut(1)
    try:
        go_on.touch()
        for number, rank in enumerate(ranks):
            line = rank.stdout.readline().decode()
            assert line.startswith("the timeout of 1 s is over; ")
            assert f"; rank {1 - number} does not answer, as if stopped or cut off: " in line
            assert f"rank {1 - number} has not arrived at collective number 2" in line
    finally:
        hosts.mend(1)
    for rank in ranks:
        rank.communicate(timeout=LIMIT_S)
        assert rank.returncode == 0


LOSES_A_HOST = """
import numpy as np, farandole
comm = farandole.init(timeout_s=60)
comm.barrier()
print("met", flush=True)
try:
    while True:
        comm.all_reduce(np.ones(100_000))
except farandole.PeerLostError as error:
    print(str(error).splitlines()[0], flush=True)
    comm = comm.shrink(timeout=10)
print(comm.world_size, comm.all_reduce(np.ones(3))[0], comm._membership.network, flush=True)
"""


def test_the_ranks_of_a_host_go_on_without_the_other(hosts):
    ranks = start(hosts, [0, 1, 0, 1], LOSES_A_HOST)
    for rank in ranks:
        assert rank.stdout.readline() == b"met\n"
    for rank in (1, 3):
        ranks[rank].kill()
    for rank in (0, 2):
        out, err = ranks[rank].communicate(timeout=LIMIT_S)
        assert b"(on host host1) ended while others needed it" in out, err
        assert out.endswith(b"2 2.0 None\n"), err
    for rank in ranks:
        rank.communicate()


VANISHES = """
import os, time, numpy as np, farandole
from farandole import connections
connections._IDLE_S, connections._PROBE_S, connections._NUM_PROBES = 1, 1, 2  # in place of a minute
comm = farandole.init(timeout_s=60)
comm.barrier()
print("met", flush=True)
while not os.path.exists(os.environ["GO_ON"]):
    time.sleep(0.01)
try:
    while True:
        comm.all_reduce(np.ones(100_000))
except farandole.PeerLostError as error:
    print(str(error).splitlines()[0], flush=True)
"""


@pytest.mark.parametrize("in_traffic", [False, True])
def test_a_host_that_vanishes_without_a_word_is_lost_before_the_timeout(hosts, in_traffic, tmp_path):
    go_on = tmp_path / "go on"
    if in_traffic:
        go_on.touch()
    ranks = start(hosts, [0, 1], VANISHES, GO_ON=str(go_on))
    for rank in ranks:
        assert rank.stdout.readline() == b"met\n"
    hosts.cut(1)
    try:
        go_on.touch()
        for number, rank in enumerate(ranks):
            out, err = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 0, err
            assert f"rank {1 - number} (on host host{1 - number})" in out.decode(), err
    finally:
        hosts.mend(1)


def test_an_interface_is_chosen_by_name(hosts):
    for rank in start(hosts, [0, 1], MEETS, FARANDOLE_INTERFACE="eth0"):
        out, err = rank.communicate(timeout=LIMIT_S)
        assert rank.returncode == 0, err
        assert hosts.address(0).encode() in out
