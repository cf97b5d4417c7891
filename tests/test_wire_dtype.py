"""all_reduce of float32 that travels between hosts in fewer bytes: what comes out, the same bits everywhere, and how
many bytes it takes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import wire_reference
from conftest import TIGHT
from several_hosts import LIMIT_S, on_all
from topologies import NAMED, random_topologies

import farandole
from farandole import ArgumentError, CollectiveMismatchError, Schedule, algorithms, selector
from farandole.calibration import SHIPPED
from farandole.dtypes import encoded_bytes
from farandole.topology import Topology
from farandole.verifier import verify

WIRE_DTYPES = ["bfloat16", "int8"]
SOUND = [name for name in algorithms.names("all_reduce") if name not in algorithms.COMPLETES_ON_SEVERAL]
WORLDS = ["2x1", "2x2", "0,1,0,1", "2+1+1", "0,1,2,0,1"]
SEVERAL_HOSTS = [topology for topology in (*NAMED, *random_topologies(3, 60)) if not topology.is_one_host]


def numbers(rank: int, count: int, seed: int = 0, magnitude: float = 1.0) -> np.ndarray:
    """Of one magnitude in some places, and of others in others."""
    random_numbers = np.random.default_rng((seed, rank))
    spread = np.exp2(random_numbers.integers(-6, 7, count))
    return (random_numbers.standard_normal(count) * spread * magnitude).astype("f4")


def same_bits(arrays) -> bool:
    return len({array.tobytes() for array in arrays}) == 1


# -- which algorithms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", algorithms.names("all_reduce"))
def test_where_each_sum_is_completed_once_all_ranks_hold_the_same_and_elsewhere_they_do_not(name):
    """`completes_once` is what allows an algorithm; here its execution, with all roundings, is the judge."""
    for topology in SEVERAL_HOSTS:
        schedule = algorithms.build("all_reduce", name, topology.world_size, topology=topology)
        final = wire_reference.final_values(schedule, topology)
        held = {place: final[place] for place in wire_reference.promised(schedule)}
        agree = all(value == held[0, slot] for (_, slot), value in held.items())
        assert agree == verify(schedule).completes_once == (name in SOUND), topology
        if agree:
            roundings = wire_reference.most_roundings(schedule, topology)
            assert roundings <= topology.world_size
            assert roundings == {"direct": 2, "hierarchical": topology.num_hosts}.get(name, roundings)


def random_all_reduce(choice: random.Random) -> Schedule:
    """Partial sums of random ranks are added up, in the end on one rank or, for some, on two, and handed on."""
    n, rows, step = choice.randrange(2, 7), [], 0
    num_chunks = choice.randrange(1, 3)
    for chunk in range(num_chunks):
        apart, have = [*range(n)], []
        while len(apart) > 1:
            src, dst = choice.sample(apart, 2)
            apart.remove(src)
            rows.append((step, src, chunk, dst, chunk, 1))
            if len(apart) == 1 and choice.random() < 0.2:
                rows.append((step, dst, chunk, src, chunk, 1))
                have.append(src)
            step += 1
        have += apart
        for rank in choice.sample(range(n), n):
            if rank not in have:
                rows.append((step, choice.choice(have), chunk, rank, chunk, 0))
                have.append(rank)
                step += 1
    return Schedule("all_reduce", n, num_chunks, rows)


def test_whatever_schedule_completes_each_sum_once_gives_all_ranks_the_same():
    choice = random.Random(1)
    num_refused = 0
    for _ in range(300):
        schedule = random_all_reduce(choice)
        topology = Topology.of_hosts(choice.randrange(3) for _ in range(schedule.world_size))
        final = wire_reference.final_values(schedule, topology)
        agree = all(final[rank, slot] == final[0, slot] for rank, slot in wire_reference.promised(schedule))
        assert agree or not verify(schedule).completes_once
        num_refused += not agree
    assert 20 < num_refused < 200


@pytest.mark.parametrize("name", sorted(algorithms.COMPLETES_ON_SEVERAL))
def test_other_algorithms_are_refused_between_hosts_alone(name):
    def body(comm):
        return comm.all_reduce(numbers(comm.rank, 10), algorithm=name, wire_dtype="int8")

    world = farandole.local(4, timeout_s=LIMIT_S, hosts="2x2")
    for error in on_all(world, body):
        assert isinstance(error, ArgumentError)
        assert f"wire_dtype is 'int8', and with algorithm '{name}' several ranks complete one sum" in str(error)
        assert "use one of naive, ring, tree" in str(error)
    world.close()
    with farandole.local(4, timeout_s=LIMIT_S) as world:
        assert same_bits(world.run(body))


@pytest.mark.parametrize("topology", SEVERAL_HOSTS[::6], ids=str)
def test_one_of_those_is_chosen_as_if_the_wire_were_wider(topology):
    for nbytes in (0, 4, 4096, 1 << 20, 1 << 28):
        plain = selector.explain("all_reduce", topology.world_size, nbytes, SHIPPED, topology=topology)
        for wire_dtype in WIRE_DTYPES:
            found = selector.explain(
                "all_reduce", topology.world_size, nbytes, SHIPPED, "float32", topology, wire_dtype
            )
            assert {one.algorithm for one in found.candidates} == {one.algorithm for one in plain.candidates} & {*SOUND}
            assert found.reason.endswith(", of those that complete a sum on one rank")
            seconds = {one.algorithm: one.seconds for one in plain.candidates}
            assert all(one.seconds <= seconds[one.algorithm] for one in found.candidates)
    ring = {
        wire_dtype: next(
            one.seconds
            for one in selector.explain("all_reduce", 2, 1 << 30, SHIPPED, "float32", pair, wire_dtype).candidates
            if one.algorithm == "ring"
        )
        for pair in [Topology.parse("2x1")]
        for wire_dtype in (None, *WIRE_DTYPES)
    }
    assert ring["int8"] < ring["bfloat16"] < ring[None]


def test_what_a_call_uses_is_what_explain_says():
    with farandole.local(4, timeout_s=LIMIT_S, hosts="2x2") as world:
        for count in (1, 50_000):
            world.run(lambda comm, count=count: comm.all_reduce(numbers(comm.rank, count), wire_dtype="int8"))
            chosen = world[0].explain("all_reduce", 4 * count, wire_dtype="int8").chosen
            assert any(entry.algorithm == chosen for entry in world[0].stats())


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("text", [*WORLDS, *map(str, random_topologies(11, 3))])
def test_every_algorithm_at_every_size(text, wire_dtype):
    """The bits are those of the reference, and so the same on all ranks; and what they are off by is within bounds."""
    topology = Topology.of_hosts(map(int, text.split(","))) if "," in text else Topology.parse(text)
    n, counts = topology.world_size, (0, 1, 2, 257, 1001, 20_011)
    if topology.is_one_host:
        topology = Topology.of_hosts(range(n))
    with farandole.local(n, timeout_s=LIMIT_S, hosts=topology) as world:
        round_chunk = wire_reference.rounding(wire_dtype, world[0]._membership.arena.slot_bytes)
        for index, name in enumerate(SOUND):
            schedule = algorithms.build("all_reduce", name, n, topology=topology)
            roundings = wire_reference.most_roundings(schedule, topology)
            for count in counts:
                op = ("sum", "avg", "max", "min", "prod")[(index + count) % 5]
                inputs = [numbers(rank, count, index, 1000.0 ** (rank - 1)) for rank in range(n)]
                if op == "prod":  # that is neither too large nor too small
                    inputs = [np.copysign(np.clip(np.abs(one), 1 / 64, 64), one) for one in inputs]
                outputs = world.run(
                    lambda comm, inputs=inputs, op=op, name=name: comm.all_reduce(
                        inputs[comm.rank].copy(), op, algorithm=name, wire_dtype=wire_dtype
                    )
                )
                assert same_bits(outputs), (name, count)
                expected = wire_reference.all_reduce(schedule, topology, inputs, op, round_chunk)
                assert np.array_equal(outputs[0], expected[0]), (name, count)
                check_bound(outputs[0], inputs, op, wire_dtype, roundings)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_in_channels_of_two_tiny_slots(wire_dtype, monkeypatch):
    monkeypatch.setattr(*TIGHT)
    topology, count = Topology.parse("2x2"), 1003
    inputs = [numbers(rank, count) for rank in range(4)]
    with farandole.local(4, timeout_s=LIMIT_S, hosts=topology) as world:
        round_chunk = wire_reference.rounding(wire_dtype, 64)
        for name in SOUND:
            outputs = world.run(
                lambda comm, name=name: comm.all_reduce(inputs[comm.rank].copy(), algorithm=name, wire_dtype=wire_dtype)
            )
            assert same_bits(outputs)
            schedule = algorithms.build("all_reduce", name, 4, topology=topology)
            assert np.array_equal(
                outputs[0], wire_reference.all_reduce(schedule, topology, inputs, "sum", round_chunk)[0]
            )


def check_bound(output, inputs, op: str, wire_dtype: str, roundings: int) -> None:
    """As docs/numbers.md says, with what float32 itself rounds."""
    exact = np.array(inputs, dtype="f8")
    combine = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min, "prod": np.prod}[op]
    roundings = len(inputs) if op == "prod" else roundings
    magnitudes = np.abs(exact)
    if wire_dtype == "int8" and output.size:
        magnitudes = np.broadcast_to(magnitudes.max(axis=1, keepdims=True), magnitudes.shape)
    share = (1 + wire_reference.STEPS[wire_dtype]) ** roundings * (1 + 2.0**-23) ** len(inputs) - 1
    whole = magnitudes.prod(axis=0) if op == "prod" else magnitudes.sum(axis=0)
    limit = share * whole / (len(inputs) if op == "avg" else 1)
    assert (np.abs(output - combine(exact, axis=0)) <= limit + 2.0**-130).all()


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_large_ones_in_many_segments(wire_dtype):
    topology, count = Topology.parse("0,1,0"), 3_000_017
    inputs = [numbers(rank, count) for rank in range(3)]
    with farandole.local(3, timeout_s=LIMIT_S, hosts=topology) as world:
        round_chunk = wire_reference.rounding("bfloat16", world[0]._membership.arena.slot_bytes)
        outputs = world.run(lambda comm: comm.all_reduce(inputs[comm.rank].copy(), wire_dtype=wire_dtype))
        assert same_bits(outputs)
        name = world[0].stats()[0].algorithm
    schedule = algorithms.build("all_reduce", name, 3, topology=topology)
    check_bound(outputs[0], inputs, "sum", wire_dtype, wire_reference.most_roundings(schedule, topology))
    if wire_dtype == "bfloat16":
        assert np.array_equal(outputs[0], wire_reference.all_reduce(schedule, topology, inputs, "sum", round_chunk)[0])


def test_what_is_no_finite_number():
    def body(comm):
        numbers = np.ones(600, dtype="f4")
        numbers[300] = [np.inf, 1, np.nan, 1][comm.rank]
        numbers[10] = 3e38  # the sum is beyond float32, or not
        return comm.all_reduce(numbers, "max", algorithm="ring", wire_dtype=wire_dtype)

    for wire_dtype in WIRE_DTYPES:
        with farandole.local(4, timeout_s=LIMIT_S, hosts="0,1,0,1") as world:
            outputs = world.run(body)
        assert same_bits(outputs)
        is_nan = np.isnan(outputs[0])
        assert is_nan[300]
        assert np.isfinite(outputs[0][10])
        chunk = 150  # a ring of four: in int8 each is one block
        assert set(np.flatnonzero(is_nan)) == {300} if wire_dtype == "bfloat16" else set(range(2 * chunk, 3 * chunk))


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("relays_flush", [False, True])
def test_all_hold_the_same_bits_though_some_take_subnormal_numbers_for_zeros(wire_dtype, relays_flush):
    """As a library may tell the processor to when it is loaded; threads have that from the one that starts them."""
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(relays_flush):
        pytest.skip("this processor cannot")
    words = np.random.default_rng(5).integers(0, 1 << 25, (4, 1000), dtype="u4")
    contributions = words.view("f4") * np.float32([1, -1, 1, -1])[:, None]

    def body(comm):
        torch.set_flush_denormal(comm.rank % 2 == 0)
        results = []
        for name in SOUND:
            work = comm.all_reduce(
                contributions[comm.rank].copy(), algorithm=name, wire_dtype=wire_dtype, async_op=True
            )
            results.append(comm.all_reduce(contributions[comm.rank].copy(), algorithm=name, wire_dtype=wire_dtype))
            results.append(work.wait())
        return results

    try:
        with farandole.local(4, timeout_s=LIMIT_S, hosts="2x2") as world:
            for outputs in zip(*world.run(body), strict=True):
                assert same_bits(outputs)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_on_one_host_nothing_is_rounded(wire_dtype):
    def body(comm):
        rounded = comm.all_reduce(numbers(comm.rank, 1000), "avg", wire_dtype=wire_dtype)
        return rounded, comm.all_reduce(numbers(comm.rank, 1000), "avg")

    for n in (1, 3):
        with farandole.local(n, timeout_s=LIMIT_S) as world:
            for rounded, plain in world.run(body):
                assert np.array_equal(rounded, plain)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_in_every_way_to_call(wire_dtype):
    """In the background, with out, from registered memory, strided, again and again, between plain calls, in groups."""

    def body(comm):
        def call(tensor, **more):
            return comm.all_reduce(tensor, algorithm="hierarchical", wire_dtype=wire_dtype, **more)

        results = []
        for count in (5, 200_003):
            own = numbers(comm.rank, count)
            first = call(own.copy())
            out = np.empty_like(own)
            assert call(own, out=out) is out
            registered = comm.empty(count)
            registered[:] = own
            work = call(registered, async_op=True)
            strided = np.zeros((count, 2), dtype="f4")[:, 0]
            strided[:] = own
            call(strided)
            work.wait()
            for other in (out, registered, strided):
                assert np.array_equal(other, first)
            again = own.copy()
            plain = comm.all_reduce(own.copy(), algorithm="hierarchical")
            for _ in range(3):
                again[:] = own
                assert np.array_equal(call(again), first)
                again[:] = own
                assert np.array_equal(comm.all_reduce(again, algorithm="hierarchical"), plain)
            assert count == 5 or not np.array_equal(first, plain)
            results.append(first)
        with comm.split(0, key=-comm.rank) as group:
            results.append(group.all_reduce(numbers(comm.rank, 1000), wire_dtype=wire_dtype))
        return results

    with farandole.local(4, timeout_s=LIMIT_S, hosts="2x2") as world:
        for outputs in zip(*world.run(body), strict=True):
            assert same_bits(outputs)


def test_a_schedule_of_the_callers_own():
    rows = [(0, 1, 0, 0, 0, 1), (1, 0, 0, 1, 0, 0)]
    mine = Schedule("all_reduce", 2, 1, rows, name="mine")
    both_add = Schedule("all_reduce", 2, 1, [(0, 1, 0, 0, 0, 1), (0, 0, 0, 1, 0, 1)], name="both_add")
    with farandole.local(2, timeout_s=LIMIT_S, hosts="2x1") as world:
        outputs = world.run(
            lambda comm: comm.all_reduce(numbers(comm.rank, 100), algorithm=mine, wire_dtype="bfloat16")
        )
        assert same_bits(outputs)
    world = farandole.local(2, timeout_s=LIMIT_S, hosts="2x1")
    for error in on_all(
        world, lambda comm: comm.all_reduce(numbers(comm.rank, 9), algorithm=lambda n: both_add, wire_dtype="int8")
    ):
        assert "with algorithm 'both_add' several ranks complete one sum" in str(error)
    world.close()


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["2x1", "2x2", "2+1+1"])
def test_a_half_and_a_quarter_of_the_bytes_travel(text):
    """Of chunks and segments that are whole blocks: exactly 1/2, and 1/4 + 1/1024."""
    n, per_rank = Topology.parse(text).world_size, {}
    for wire_dtype in (None, *WIRE_DTYPES):
        with farandole.local(n, timeout_s=LIMIT_S, hosts=text) as world:
            world.run(
                lambda comm, w=wire_dtype: comm.all_reduce(
                    np.ones(4 * 3 * 1024 * 8, dtype="f4"), algorithm="ring", wire_dtype=w
                )
            )
            world.run(lambda comm: comm.barrier())  # has all bytes counted
            per_rank[wire_dtype] = [comm.wire_bytes() for comm in world]
            for comm in world:
                entry = next(one for one in comm.stats() if one.collective == "all_reduce")
                assert entry.bytes_sent == entry.scheduled_bytes_sent  # as in memory
    assert sum(sent for sent, _ in per_rank[None]) > 0
    for plain, half, quarter in zip(per_rank[None], per_rank["bfloat16"], per_rank["int8"], strict=True):
        for way in range(2):
            barrier = 0 if plain[way] % 4096 == 0 else plain[way] % 4096
            assert half[way] - barrier == (plain[way] - barrier) // 2
            assert quarter[way] - barrier == (plain[way] - barrier) // 4 * 1028 // 1024


@pytest.mark.parametrize("count", [0, 1, 3, 255, 256, 257, 515, 4096])
def test_each_block_that_is_not_whole_has_its_own_scale(count):
    for wire_dtype in (None, *WIRE_DTYPES):
        with farandole.local(2, timeout_s=LIMIT_S, hosts="2x1") as world:
            world.run(
                lambda comm, w=wire_dtype: comm.all_reduce(numbers(comm.rank, count), algorithm="naive", wire_dtype=w)
            )
            world.close()
            bytes_there = encoded_bytes(wire_dtype, 4 * count)
            assert [comm.wire_bytes() for comm in world] == [(bytes_there, bytes_there)] * 2
    assert encoded_bytes("int8", 4 * 1024) == 1028


# -- when ranks differ -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [None, "0,1,0,1"])
@pytest.mark.parametrize("count", [1, 1_000_000])
@pytest.mark.parametrize(("one", "other"), [(None, "int8"), ("bfloat16", None), ("bfloat16", "int8")])
def test_ranks_that_name_different_ones_are_told(one, other, count, hosts):
    world = farandole.local(4, timeout_s=LIMIT_S, hosts=hosts)
    errors = on_all(
        world,
        lambda comm: comm.all_reduce(
            numbers(comm.rank, count), algorithm="ring", wire_dtype=other if comm.rank == 3 else one
        ),
    )
    texts = {name: "" if name is None else f", wire_dtype={name!r}" for name in (one, other)}
    for error in errors:
        assert isinstance(error, CollectiveMismatchError)
        assert f"all_reduce({count} x float32, sum, algorithm='ring'{texts[one]})" in str(error)
        assert f"all_reduce({count} x float32, sum, algorithm='ring'{texts[other]})" in str(error)
    for comm in world:
        comm.close()


def test_the_flight_record_says_it():
    with farandole.local(2, timeout_s=LIMIT_S, hosts="2x1") as world:
        world.run(lambda comm: comm.all_reduce(np.ones(3, dtype="f4"), wire_dtype="bfloat16"))
        assert [entry.call for entry in world[1].flight_record()] == [
            "all_reduce(3 x float32, sum, wire_dtype='bfloat16')"
        ]


@pytest.mark.parametrize("hosts", [None, "2x1"])
def test_what_can_never_work_is_refused(hosts):
    with farandole.local(2, timeout_s=LIMIT_S, hosts=hosts) as world:
        for wrong in ("float8", 8, ["int8"], ""):
            with pytest.raises(ArgumentError, match=r"wire_dtype is .*; known are bfloat16 and int8, and None"):
                world[0].all_reduce(np.ones(3, dtype="f4"), wire_dtype=wrong)
        for dtype in ("f8", "f2", "i4"):
            with pytest.raises(ArgumentError, match=r"'int8', but tensor has dtype .*; only float32 is rounded"):
                world[0].all_reduce(np.ones(3, dtype=dtype), wire_dtype="int8")
        with pytest.raises(ArgumentError, match="which is for all_reduce alone, and not for broadcast"):
            world[0].explain("broadcast", 8, wire_dtype="int8")
        with pytest.raises(ArgumentError, match="only float32"):
            world[0].explain("all_reduce", 8, "float64", wire_dtype="int8")
