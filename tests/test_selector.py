"""Choosing an algorithm: the same on all ranks, by what the cost model predicts with figures of this machine."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from topologies import build, random_topologies
from typer.testing import CliRunner

import farandole
from farandole import algorithms, membership
from farandole.calibration import (
    SHIPPED,
    WIRE,
    Calibration,
    calibration_file,
    calibration_in_use,
    load_calibration,
    usable_cores,
)
from farandole.cli import app
from farandole.cli.calibrate import SAMPLES
from farandole.cost_model import Link, price
from farandole.errors import ArgumentError
from farandole.launch import run_processes
from farandole.schedule import Schedule
from farandole.selector import TOLERANCE, choose, explain
from farandole.topology import Topology

calibrate_module = importlib.import_module("farandole.cli.calibrate")  # farandole.cli.calibrate is the function
IN_MEMORY = Link(latency_s=3.0, bandwidth_bytes_per_s=2.0, reduce_bytes_per_s=4.0, step_s=100.0, cores=8)
MODERN = replace(SHIPPED, cores=64)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, as other tests have none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


# --- The price in shared memory ---------------------------------------------------------------------------------------


def test_a_rank_that_sends_and_receives_in_memory_does_one_after_the_other():
    schedule = Schedule("all_gather", 2, 2, [(0, 0, 0, 1, 0, 0), (0, 1, 1, 0, 1, 0)])
    assert price(schedule, 20, IN_MEMORY).seconds == 100 + (3 + 10 / 2) + (3 + 10 / 2)


def test_what_all_others_read_is_put_there_once():
    to_all = [(0, 0, 0, rank, 0, 0) for rank in (1, 2, 3)]
    assert price(Schedule("broadcast", 4, 1, to_all), 8, IN_MEMORY).seconds == 100 + max(3 + 8 / 2, 3 + 8 / 2)
    assert price(Schedule("broadcast", 4, 1, to_all[:2]), 8, IN_MEMORY).seconds == 100 + 2 * (3 + 8 / 2)


def test_what_is_added_up_is_read_as_it_is_added():
    schedule = Schedule("reduce", 2, 1, [(0, 1, 0, 0, 0, 1)])
    assert price(schedule, 8, IN_MEMORY).seconds == 100 + max(3 + 8 / 2, 3 + 8 / 4)


def test_no_more_ranks_work_at_a_time_than_there_are_cores():
    schedule = algorithms.build("all_gather", "direct", 4)
    busy = (3 + 1) + 3 * (3 + 1)
    assert price(schedule, 8, IN_MEMORY).seconds == 100 + busy
    assert price(schedule, 8, replace(IN_MEMORY, cores=1)).seconds == 100 + 4 * busy


def test_a_link_without_cores_is_refused():
    with pytest.raises(ArgumentError, match="cores is 0"):
        replace(IN_MEMORY, cores=0)


def flat_names(collective: str) -> set[str]:
    return set(algorithms.names(collective)) - algorithms.HIERARCHICAL


# --- The choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", algorithms.ALGORITHMS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("calibration", [SHIPPED, MODERN])
def test_the_choice_is_as_fast_as_predicted_for_any(collective, world_size, calibration):
    for nbytes in (0, 1, 8, 4096, 100_003, 1 << 20, 1 << 28):
        explanation = explain(collective, world_size, nbytes, calibration)
        assert {one.algorithm for one in explanation.candidates} == flat_names(collective)
        seconds = {one.algorithm: one.seconds for one in explanation.candidates}
        assert seconds[explanation.chosen] <= (1 + TOLERANCE) * min(seconds.values())
        assert explanation.nbytes == nbytes
        unit = 1 << max(0, nbytes.bit_length() - 3)  # sizes are rounded up to three binary digits
        priced = -(-nbytes // unit) * unit
        assert priced <= 1.25 * nbytes
        link = calibration.link(world_size, priced)
        for name, predicted in seconds.items():
            assert predicted == price(algorithms.build(collective, name, world_size), priced, link).seconds


def test_small_messages_go_in_one_step_and_large_ones_in_parts():
    for world_size in (2, 4, 8):
        chosen = [choose("all_reduce", world_size, 1 << power, SHIPPED) for power in range(3, 28)]
        assert (chosen[0], chosen[-1]) == ("one_shot", "direct")
        assert chosen == sorted(chosen, reverse=True)  # one threshold


def test_a_machine_where_steps_cost_nothing_never_sends_more_than_it_must():
    calibration = replace(SHIPPED, latency_s=1e-12, step_s=1e-12, turn_s=1e-12)
    assert choose("all_reduce", 8, 1 << 16, calibration) != "one_shot"
    patient = replace(SHIPPED, step_s=1.0, turn_s=1.0)
    assert choose("all_reduce", 8, 1 << 16, patient) == "one_shot"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduc", 2, 8), "no collective 'all_reduc'"),
        (("gather", 0, 8), "world_size is 0"),
        (("gather", 2, -1), "-1"),
        (("gather", 2, 2**70), "must be whole numbers"),
        (("gather", 2, "8"), "must be whole numbers"),
        (("gather", 2, 8.5), "must be whole numbers"),
        (("reduce", 2, 8, SHIPPED, "float8"), "dtype float8 cannot be communicated"),
        (("broadcast", 2, 8, SHIPPED, "float8"), "dtype float8 cannot be communicated"),
    ],
)
def test_what_cannot_be_explained_is_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        explain(*(*arguments, SHIPPED)[:4], *arguments[4:])


def num_roundings(schedule: Schedule) -> int:
    """How often a contribution is rounded at most, if a rank adds up at once what a step brings to a slot."""
    done: dict[tuple[int, int], int] = {}  # per rank and slot
    most = 0
    for _, step in itertools.groupby(schedule, key=lambda transfer: transfer.step):
        after = {}
        for transfer in step:
            source = done.get((transfer.src, transfer.src_slot), 0)
            target = (transfer.dst, transfer.dst_slot)
            if transfer.reduce:
                after[target] = max(after.get(target, 0), done.get(target, 0) + 1, source + 1)
                most = max(most, after[target])
            else:
                after[target] = source
        done.update(after)
    return most


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "reduce"])
def test_algorithms_that_are_said_to_round_once_do(collective):
    """And each of the others rounds more often, for some number of ranks."""
    for name in algorithms.names(collective):
        most = max(num_roundings(build(collective, name, n)) for n in range(2, 10))
        assert (most == 1) == (name in algorithms.ROUND_ONCE), name


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "reduce"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_are_summed_by_what_rounds_once(collective, dtype):
    for world_size in (2, 3, 4, 8, 64):
        for nbytes in (2, 4096, 1 << 20, 1 << 28):
            explanation = explain(collective, world_size, nbytes, SHIPPED, dtype)
            assert explanation.chosen in algorithms.ROUND_ONCE
            assert "round" in explanation.reason


def test_what_is_only_moved_is_chosen_whatever_the_dtype():
    for collective in ("broadcast", "all_gather", "all_to_all", "barrier"):
        assert explain(collective, 8, 1 << 20, SHIPPED, "float16") == explain(collective, 8, 1 << 20, SHIPPED)


# --- The choice on several hosts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", algorithms.ALGORITHMS)
def test_on_several_hosts_it_is_as_fast_as_predicted_for_any_that_knows_them_or_not(collective):
    for topology in random_topologies(seed=1, number=12):
        knows_hosts = 1 < topology.num_hosts < topology.world_size
        for nbytes in (0, 8, 4096, 1 << 20):
            explanation = explain(collective, topology.world_size, nbytes, MODERN, topology=topology)
            seconds = {one.algorithm: one.seconds for one in explanation.candidates}
            assert set(seconds) == (set(algorithms.names(collective)) if knows_hosts else flat_names(collective))
            assert seconds[explanation.chosen] <= (1 + TOLERANCE) * min(seconds.values())
            assert explanation.num_hosts == topology.num_hosts
            link = MODERN.link(topology.most_ranks_on_a_host, nbytes)
            for name, predicted in seconds.items():
                schedule = algorithms.build(collective, name, topology.world_size, topology=topology)
                assert predicted == price(schedule, nbytes, link, topology=topology, wire=MODERN.wire).seconds


def test_one_host_is_what_no_topology_means():
    one_host = Topology.one_host(4)
    for collective in algorithms.ALGORITHMS:
        assert explain(collective, 4, 64, MODERN) == explain(collective, 4, 64, MODERN, topology=one_host)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"])
@pytest.mark.parametrize("text", ["2x4", "4x4", "0,1,2,3,0,1,2,3,0,1,2,3", "0,1,2,0,1,2,1,1,0,1"])
def test_with_several_ranks_on_each_of_several_hosts_those_that_know_them_are_chosen(collective, text):
    topology = Topology.parse(text)
    for nbytes in (1 << 16, 1 << 20, 1 << 26):
        chosen = choose(collective, topology.world_size, nbytes, MODERN, topology=topology)
        assert chosen in algorithms.HIERARCHICAL


def test_short_vectors_are_exchanged_at_once_and_long_ones_in_parts():
    topology = Topology.parse("8x4")
    chosen = [choose("all_reduce", 32, 1 << power, SHIPPED, topology=topology) for power in range(3, 28)]
    assert (chosen[0], chosen[-1]) == ("hierarchical_one_shot", "hierarchical")


def test_many_hosts_take_turns_in_few_rounds():
    topology = Topology.parse("32x2")
    assert choose("all_reduce", 64, 1 << 20, SHIPPED, topology=topology) == "hierarchical_circulant"


def test_a_slower_wire_makes_it_matter_more_what_crosses():
    topology = Topology.parse("2x4")
    ahead = []
    for bandwidth_bytes_per_s in (1e8, 1e10):
        calibration = replace(MODERN, wire=replace(WIRE, bandwidth_bytes_per_s=bandwidth_bytes_per_s))
        candidates = explain("all_reduce", 8, 1 << 24, calibration, topology=topology).candidates
        seconds = {one.algorithm: one.seconds for one in candidates}
        ahead.append(seconds["direct"] / seconds["hierarchical"])
    assert ahead[0] > ahead[1] > 1


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "reduce"])
def test_16_bit_floats_are_summed_by_what_rounds_once_on_several_hosts_too(collective):
    explanation = explain(collective, 8, 1 << 20, SHIPPED, "bfloat16", Topology.parse("2x4"))
    assert {one.algorithm for one in explanation.candidates} <= algorithms.ROUND_ONCE


def test_a_topology_of_other_ranks_cannot_be_explained():
    with pytest.raises(ArgumentError, match="the topology 2x4 has 8 ranks, but world_size is 6"):
        explain("all_reduce", 6, 8, SHIPPED, topology=Topology.parse("2x4"))


# --- What communicators do --------------------------------------------------------------------------------------------


def test_a_communicator_explains_what_it_does(monkeypatch):
    monkeypatch.setattr(membership, "calibration_in_use", lambda: MODERN)
    with farandole.local(3) as world:
        for count in (2, 100_000):
            arrays = [np.arange(count, dtype=np.float32) + rank for rank in range(3)]
            world.run(lambda comm, arrays=arrays: comm.all_reduce(arrays[comm.rank]))
            explanation = world[1].explain("all_reduce", 4 * count)
            assert explanation == explain("all_reduce", 3, 4 * count, MODERN)
            ran = {stats.algorithm for stats in world[1].stats() if stats.payload_bytes == 4 * count}
            assert ran == {explanation.chosen}
            table = str(explanation)
            assert f"> {explanation.chosen}" in table
            assert explanation.reason in table


def test_all_ranks_and_groups_have_the_calibration_of_rank_0(own_cache, tmp_path):
    """A rank that is on a machine calibrated in another way still chooses what rank 0 does."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, json, dataclasses\n"
        "import farandole, farandole.arrival as arrival, farandole.calibration as calibration\n"
        "rank = int(os.environ['RANK'])\n"
        "own = dataclasses.replace(calibration.SHIPPED, step_s=1.0 + rank, source=f'rank {rank}')\n"
        "arrival.calibration_in_use = lambda: own\n"
        "with farandole.init() as comm, comm.split(0, key=-comm.rank) as group:\n"
        "    print(comm.explain('all_reduce', 8).calibration, group.explain('all_reduce', 8).calibration)\n"
    )
    result = CliRunner().invoke(app, ["run", "-n", "3", "--prefix", str(script)])
    assert result.exit_code == 0, result.output
    assert sorted(result.stdout.split("\n")) == ["", *(f"[{rank}] rank 0 rank 0" for rank in range(3))]


# --- Calibration ------------------------------------------------------------------------------------------------------


def test_without_a_file_the_shipped_figures_are_used(own_cache):
    assert load_calibration() == replace(SHIPPED, cores=usable_cores())


def test_a_calibration_is_kept_and_read_again(own_cache):
    calibration_file().parent.mkdir()
    calibration_file().write_text(json.dumps(asdict(MODERN)))
    assert load_calibration() == MODERN
    assert own_cache in calibration_file().parents


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\xff",
        "[" * 100_000,
        "[]",
        "{}",
        json.dumps(asdict(SHIPPED) | {"step_s": -1.0}),
        json.dumps(asdict(SHIPPED) | {"step_s": math.nan}),
        json.dumps(asdict(SHIPPED) | {"cores": 0.5}),
        json.dumps(asdict(SHIPPED) | {"more": 1}),
        json.dumps(asdict(SHIPPED) | {"wire": 1.25e9}),
        json.dumps(asdict(SHIPPED) | {"wire": {"latency_s": 1e-5}}),
        json.dumps(asdict(SHIPPED) | {"wire": asdict(WIRE) | {"latency_s": "none"}}),
        json.dumps(asdict(SHIPPED) | {"wire": asdict(WIRE) | {"latency_s": math.nan}}),
        json.dumps(asdict(SHIPPED) | {"wire": asdict(WIRE) | {"latency_s": math.inf}}),
        json.dumps(asdict(SHIPPED) | {"wire": asdict(WIRE) | {"cores": 4}}),
        json.dumps(asdict(SHIPPED) | {"wire": None}),
    ],
)
def test_a_file_that_is_no_calibration_is_named(own_cache, text):
    calibration_file().parent.mkdir()
    calibration_file().write_text(text, encoding="latin-1")
    with pytest.raises(ArgumentError, match=r"is no calibration .*delete it, or run farandole calibrate"):
        load_calibration()


def test_a_calibration_without_a_wire_gets_the_usual_one(own_cache):
    fields = asdict(MODERN)
    del fields["wire"]
    assert Calibration.from_fields(fields) == MODERN
    faster = replace(WIRE, bandwidth_bytes_per_s=1.25e10)
    assert Calibration.from_fields(json.loads(json.dumps(asdict(replace(MODERN, wire=faster))))).wire == faster


@pytest.mark.parametrize("wire", [None, 1.25e9, IN_MEMORY, replace(WIRE, step_s=math.inf)])
def test_a_wire_that_is_none_is_refused(wire):
    with pytest.raises(
        ArgumentError, match=r"calibration: wire is .*; it must be a Link of finite figures, without cores"
    ):
        replace(SHIPPED, wire=wire)


def test_bytes_that_do_not_fit_the_cache_cost_more():
    fits, exceeds = SHIPPED.link(2, SHIPPED.cache_bytes // 4), SHIPPED.link(2, SHIPPED.cache_bytes // 4 + 1)
    assert fits.bandwidth_bytes_per_s == SHIPPED.cached_bytes_per_s
    assert exceeds.bandwidth_bytes_per_s == SHIPPED.memory_bytes_per_s
    assert exceeds.reduce_bytes_per_s <= exceeds.bandwidth_bytes_per_s


def test_a_file_that_is_no_calibration_ends_no_job(own_cache):
    calibration_file().parent.mkdir()
    calibration_file().write_text("{}")
    with pytest.warns(RuntimeWarning, match="delete it, or run farandole calibrate again; until then"):
        assert calibration_in_use() == replace(SHIPPED, cores=usable_cores())


@pytest.mark.parametrize("seed", range(20))
def test_an_uneven_all_to_all_works_whatever_the_calibration(monkeypatch, seed):
    """Its ranks see different sizes, so a choice by size could differ between them."""
    random = np.random.default_rng(seed)
    figures = {field: float(10 ** random.uniform(-9, -3)) for field in ("latency_s", "step_s", "turn_s")}
    mine = replace(SHIPPED, **figures)
    monkeypatch.setattr(membership, "calibration_in_use", lambda: mine)
    counts = random.integers(0, 2000, (3, 3))
    with farandole.local(3) as world:
        arrived = world.run(
            lambda comm: comm.all_to_all(
                np.repeat(np.arange(3.0) + 10 * comm.rank, counts[comm.rank]),
                counts=counts[comm.rank],
                output_counts=counts[:, comm.rank],
            )
        )
    for rank in range(3):
        assert np.array_equal(arrived[rank], np.repeat(10 * np.arange(3.0) + rank, counts[:, rank]))


# --- The commands -----------------------------------------------------------------------------------------------------


def test_explain_prints_the_candidates_and_the_choice(own_cache):
    result = CliRunner().invoke(app, ["explain", "all_reduce", "64M", "-n", "4", "--json"])
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["chosen"] == explain("all_reduce", 4, 64 << 20, load_calibration()).chosen
    table = CliRunner().invoke(app, ["explain", "all_reduce", "64M", "-n", "4"]).stdout
    assert document["reason"] in table
    assert all(one["algorithm"] in table for one in document["candidates"])
    assert CliRunner().invoke(app, ["explain", "barrier", "0"]).exit_code == 0


def test_explain_on_several_hosts(own_cache):
    result = CliRunner().invoke(app, ["explain", "all_reduce", "1M", "--hosts", "2x4", "--json"])
    document = json.loads(result.stdout)
    chosen = explain("all_reduce", 8, 1 << 20, load_calibration(), topology=Topology.parse("2x4")).chosen
    assert (document["chosen"], document["num_hosts"]) == (chosen, 2)
    table = CliRunner().invoke(app, ["explain", "all_reduce", "1M", "--hosts", "2x4"], env={"COLUMNS": "80"}).stdout
    assert table.startswith("all_reduce, 1,048,576 bytes, 8 ranks on 2 hosts: hierarchical")
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= 80


def calibrate(monkeypatch, *measurements: dict[str, float]):
    """``farandole calibrate`` where the jobs measure these seconds."""
    jobs = iter(measurements)
    monkeypatch.setattr(calibrate_module, "_run", lambda *_: next(jobs))
    return CliRunner().invoke(app, ["calibrate"])


def seconds_of(calibration: Calibration) -> tuple[dict[str, float], dict[str, float]]:
    """What the samples take on a machine like that, by the model; of 2 ranks, and of more than there are cores."""

    def seconds(world_size: int, name: str) -> float:
        collective, algorithm, nbytes = SAMPLES[name]
        link = replace(calibration, cores=64 if world_size == 2 else usable_cores()).link(world_size, nbytes)
        return price(algorithms.build(collective, algorithm, world_size), nbytes, link).seconds

    crowded = min(2 * usable_cores(), 32)
    return {name: seconds(2, name) for name in SAMPLES}, {"tiny in one step": seconds(crowded, "tiny in one step")}


def test_calibrate_finds_the_figures_that_the_samples_were_made_with(own_cache, monkeypatch):
    true = replace(SHIPPED, cores=usable_cores(), latency_s=1e-9)
    alone, crowded = seconds_of(true)
    # The engine takes several messages of one peer without a step for each, which the model does not know.
    alone["eight messages"] = alone["one message"] + 7 * true.latency_s
    result = calibrate(monkeypatch, alone, crowded, alone, crowded)
    assert result.exit_code == 0, result.output
    found = load_calibration()
    for field in ("latency_s", "step_s", "cached_bytes_per_s", "memory_bytes_per_s", "reduce_bytes_per_s"):
        assert getattr(found, field) == pytest.approx(getattr(true, field), rel=0.02), field
    assert found.turn_s == pytest.approx(true.turn_s, rel=0.1)
    assert found.source.startswith("measured on ")
    assert json.loads(CliRunner().invoke(app, ["calibrate", "--show", "--json"]).stdout) == asdict(found)


def test_calibrate_measures_nothing_that_it_could_not_keep(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "cannot keep the result" in str(calibrate(monkeypatch).exception)


def test_calibrate_keeps_nothing_if_the_machine_is_busy(own_cache, monkeypatch):
    alone, crowded = seconds_of(SHIPPED)
    disturbed = {**alone, "one message": 40 * alone["one message"]}
    result = calibrate(monkeypatch, alone, crowded, disturbed, crowded)
    assert "one message: " in str(result.exception)
    assert "nothing was kept" in str(result.exception)
    assert not calibration_file().exists()


def test_the_samples_are_calls_that_work(own_cache):
    lines = []
    result = run_processes(
        ["farandole.cli.calibrate_worker", "tiny in two steps", "gather, 64 KiB", "eight messages"],
        2,
        module=True,
        on_line=lambda rank, stream, line: lines.append((rank, stream, line)),
    )
    assert result.exit_code == 0
    ((rank, stream, line),) = lines
    assert (rank, stream) == (0, "stdout")
    assert all(0 < seconds < 10 for seconds in json.loads(line).values())
