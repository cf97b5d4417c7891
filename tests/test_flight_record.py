"""The last collectives of a rank, kept and written down."""

from __future__ import annotations

import itertools
import json
import os
import time

import numpy as np
import pytest

import farandole
from farandole import CollectiveTimeoutError


def test_the_last_thousand_are_kept_in_order():
    started = time.time()
    with farandole.local(2, timeout_s=60) as world:

        def body(comm):
            for index in range(1500):
                if index % 3 == 0:
                    comm.barrier()
                elif index % 3 == 1:
                    comm.broadcast(np.ones(1 + index % 5, dtype="f4"), src=1)
                else:
                    comm.all_reduce(np.ones(7), "max", async_op=True).wait()
            return comm.flight_record()

        for record in world.run(body):
            assert [entry.number for entry in record] == list(range(501, 1501))
            for entry in record:
                index = entry.number - 1
                calls = [
                    ("barrier()", 0),
                    (f"broadcast({1 + index % 5} x float32, src=1)", 4 * (1 + index % 5)),
                    ("all_reduce(7 x float64, max)", 56),
                ]
                assert (entry.call, entry.nbytes) == calls[index % 3]
                assert 0 <= entry.seconds < 60
                assert started - 1 < entry.began < time.time() + 1
            assert all(one.began <= two.began for one, two in itertools.pairwise(record))


def test_a_new_communicator_has_none():
    with farandole.local(1) as world:
        assert world[0].flight_record() == []


def test_what_has_not_ended_has_no_time():
    world = farandole.local(2, timeout_s=60)
    world.run(lambda comm: comm.barrier())
    with pytest.raises(CollectiveTimeoutError):
        world[0].all_gather(np.ones(3), timeout=0.05)
    (first, second) = world[0].flight_record()
    assert first.seconds is not None
    assert (second.call, second.nbytes, second.seconds) == ("all_gather(3 x float64)", 48, None)
    assert [entry.call for entry in world[1].flight_record()] == ["barrier()"]
    world.close()


def test_every_rank_writes_its_own_when_it_fails(tmp_path, monkeypatch):
    folder = tmp_path / "to be made" / "records"
    monkeypatch.setenv("FARANDOLE_FLIGHT_RECORDS", str(folder))
    world = farandole.local(3, timeout_s=60)
    group = [comm for comm in world.run(lambda comm: comm.split(None if comm.rank == 0 else 0)) if comm is not None]
    with pytest.raises(CollectiveTimeoutError):
        group[0].all_gather(np.ones(3), timeout=0.05)
    for _ in range(2):  # once each
        with pytest.raises(CollectiveTimeoutError):
            group[1].barrier()
    records = [
        json.loads(path.read_text()) for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    ]
    assert [record["rank"] for record in records] == [0, 1]
    assert [record["job_ranks"] for record in records] == [[1, 2], [1, 2]]
    assert all("rank 1 has not arrived at collective number 1" in record["error"] for record in records)
    assert [entry["call"] for entry in records[0]["collectives"]] == ["all_gather(3 x float64)"]
    assert records[1]["collectives"] == []
    assert records[0]["process"] == os.getpid()
    world.close()
    assert len(list(folder.iterdir())) == 2


def test_a_folder_that_cannot_be_written_to_is_only_said(tmp_path, monkeypatch, capsys):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("FARANDOLE_FLIGHT_RECORDS", str(file))
    world = farandole.local(2, timeout_s=60)
    with pytest.raises(CollectiveTimeoutError):
        world[0].barrier(timeout=0.05)
    assert f"farandole: FARANDOLE_FLIGHT_RECORDS is {file}: " in capsys.readouterr().err
    world.close()
