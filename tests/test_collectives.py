"""Every collective × algorithm × world size × dtype × op against the reference, on the engine, with ranks as
threads."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import WORLD_SIZES
from reference import DTYPES, PAIRS, assert_close, data, numpy_dtype, reduced
from topologies import build

from farandole import algorithms
from farandole.schedule import Schedule

ACROSS_SEGMENTS = 9001  # elements that fill several segments, the last one partly


def counts_for(world_size: int) -> tuple[int, ...]:
    n = world_size
    return tuple(dict.fromkeys((0, 1, 13, max(0, n - 1), n, n + 1, ACROSS_SEGMENTS)))


def split(count: int, n: int) -> list[int]:
    return [count // n + (part < count % n) for part in range(n)]


def uneven(count: int, n: int) -> list[int]:
    """Parts of any sizes, some of them empty."""
    weights = [(part * 7 + 3) % 5 for part in range(n)]
    parts = [count * weight // max(1, sum(weights)) for weight in weights]
    parts[-1] += count - sum(parts)
    return parts


def starts(parts: list[int]) -> list[int]:
    return [sum(parts[:r]) for r in range(len(parts))]


def on_hosts(collective: str, name: str, world_size: int, root: int = 0) -> str | Schedule:
    """The name; of an algorithm that knows hosts, its schedule for several."""
    return build(collective, name, world_size, root) if name in algorithms.HIERARCHICAL else name


def each_case(world_size: int):
    """Every (dtype, op), with the counts going round, and every count for float32 sums."""
    counts = counts_for(world_size)
    yield from ((dtype, op, counts[i % len(counts)]) for i, (dtype, op) in enumerate(PAIRS))
    yield from (("float32", "sum", count) for count in counts)


@pytest.mark.parametrize("algorithm", algorithms.names("all_reduce"))
def test_all_reduce_equals_the_reference_with_the_same_bits_on_all_ranks(worlds, algorithm):
    for n in WORLD_SIZES:
        cases = list(each_case(n))
        chosen = on_hosts("all_reduce", algorithm, n)

        def body(comm, cases=cases, algorithm=chosen):
            results = []
            for i, (dtype, op, count) in enumerate(cases):
                mine = data(comm.rank, count, dtype, op)
                if i % 2:
                    results.append(comm.all_reduce(mine, op, algorithm=algorithm))
                else:
                    before = mine.copy()
                    results.append(comm.all_reduce(mine, op, out=np.empty_like(mine), algorithm=algorithm))
                    assert mine.tobytes() == before.tobytes(), "the input was changed"
            return results

        per_rank = worlds(n).run(body)
        for i, (dtype, op, count) in enumerate(cases):
            what = f"all_reduce {algorithm} N={n} {dtype} {op} count={count}"
            expected, bound = reduced([data(r, count, dtype, op) for r in range(n)], dtype, op)
            assert_close(per_rank[0][i], expected, bound, what)
            assert len({results[i].tobytes() for results in per_rank}) == 1, what


@pytest.mark.parametrize("algorithm", algorithms.names("reduce_scatter"))
def test_reduce_scatter_equals_the_reference_for_even_and_uneven_parts(worlds, algorithm):
    for n in WORLD_SIZES:
        cases = [(*case, (split, uneven)[i % 2](case[2], n)) for i, case in enumerate(each_case(n))]
        chosen = on_hosts("reduce_scatter", algorithm, n)

        def body(comm, cases=cases, algorithm=chosen):
            results = []
            for dtype, op, count, parts in cases:
                mine = data(comm.rank, count, dtype, op)
                before = mine.copy()
                results.append(comm.reduce_scatter(mine, op, counts=parts, algorithm=algorithm))
                assert mine.tobytes() == before.tobytes(), "the input was changed"
            return results

        per_rank = worlds(n).run(body)
        for i, (dtype, op, count, parts) in enumerate(cases):
            expected, bound = reduced([data(r, count, dtype, op) for r in range(n)], dtype, op)
            whole = np.concatenate([results[i] for results in per_rank])
            assert [len(results[i]) for results in per_rank] == parts
            assert_close(whole, expected, bound, f"reduce_scatter {algorithm} N={n} {dtype} {op} parts={parts}")


@pytest.mark.parametrize("algorithm", algorithms.names("reduce"))
def test_reduce_equals_the_reference_at_every_root_and_changes_nothing_elsewhere(worlds, algorithm):
    for n in WORLD_SIZES:
        cases = [(*case, i % n) for i, case in enumerate(each_case(n))]

        def body(comm, cases=cases, algorithm=algorithm):
            results = []
            for dtype, op, count, root in cases:
                mine = data(comm.rank, count, dtype, op)
                before = mine.copy()
                result = comm.reduce(mine, root, op, algorithm=on_hosts("reduce", algorithm, comm.world_size, root))
                assert result is mine
                if comm.rank == root:
                    results.append(result)
                else:
                    results.append(None)
                    assert mine.tobytes() == before.tobytes(), "a rank that is not dst was changed"
            return results

        per_rank = worlds(n).run(body)
        for i, (dtype, op, count, root) in enumerate(cases):
            expected, bound = reduced([data(r, count, dtype, op) for r in range(n)], dtype, op)
            assert_close(
                per_rank[root][i], expected, bound, f"reduce {algorithm} N={n} root={root} {dtype} {op} {count}"
            )


@pytest.mark.parametrize("algorithm", algorithms.names("all_gather"))
def test_all_gather_gives_every_part_bit_by_bit(worlds, algorithm):
    for n in WORLD_SIZES:
        cases = [(d, (split, uneven)[i % 2](c, n)) for i, d in enumerate(DTYPES) for c in counts_for(n)]
        chosen = on_hosts("all_gather", algorithm, n)

        def body(comm, cases=cases, algorithm=chosen):
            results = []
            for i, (dtype, parts) in enumerate(cases):
                mine = data(comm.rank, parts[comm.rank], dtype)
                if i % 2:
                    results.append(comm.all_gather(mine, counts=parts, algorithm=algorithm))
                else:  # in place: the input is this rank's part of the output
                    out = np.zeros(sum(parts), dtype=mine.dtype)
                    start = sum(parts[: comm.rank])
                    own = out[start : start + len(mine)]
                    own[...] = mine
                    results.append(comm.all_gather(own, out=out, counts=parts, algorithm=algorithm))
            return results

        per_rank = worlds(n).run(body)
        for i, (dtype, parts) in enumerate(cases):
            expected = np.concatenate([data(r, parts[r], dtype) for r in range(n)]).tobytes()
            for results in per_rank:
                assert results[i].tobytes() == expected, f"all_gather {algorithm} N={n} {dtype} {parts}"


@pytest.mark.parametrize("algorithm", algorithms.names("broadcast"))
def test_broadcast_gives_what_the_source_holds_bit_by_bit(worlds, algorithm):
    for n in WORLD_SIZES:
        cases = [(d, c, (i + j) % n) for i, d in enumerate(DTYPES) for j, c in enumerate(counts_for(n))]

        def body(comm, cases=cases, algorithm=algorithm):
            return [
                comm.broadcast(
                    data(comm.rank, count, dtype),
                    src=root,
                    algorithm=on_hosts("broadcast", algorithm, comm.world_size, root),
                )
                for dtype, count, root in cases
            ]

        per_rank = worlds(n).run(body)
        for i, (dtype, count, root) in enumerate(cases):
            expected = data(root, count, dtype).tobytes()
            for results in per_rank:
                assert results[i].tobytes() == expected, f"broadcast {algorithm} N={n} root={root} {dtype} {count}"


@pytest.mark.parametrize("algorithm", algorithms.names("gather"))
def test_gather_gives_every_part_at_the_root_alone(worlds, algorithm):
    for n in WORLD_SIZES:
        cases = [(d, (split, uneven)[i % 2](c, n), i % n) for i, d in enumerate(DTYPES) for c in counts_for(n)]

        def body(comm, cases=cases, algorithm=algorithm):
            return [
                comm.gather(data(comm.rank, parts[comm.rank], dtype), dst=root, counts=parts, algorithm=algorithm)
                for dtype, parts, root in cases
            ]

        per_rank = worlds(n).run(body)
        for i, (dtype, parts, root) in enumerate(cases):
            expected = np.concatenate([data(r, parts[r], dtype) for r in range(n)]).tobytes()
            for rank, results in enumerate(per_rank):
                if rank == root:
                    assert results[i].tobytes() == expected, f"gather {algorithm} N={n} root={root} {dtype} {parts}"
                else:
                    assert results[i] is None


@pytest.mark.parametrize("algorithm", algorithms.names("scatter"))
def test_scatter_gives_each_rank_its_part(worlds, algorithm):
    for n in WORLD_SIZES:
        cases = [(d, (split, uneven)[i % 2](c, n), i % n) for i, d in enumerate(DTYPES) for c in counts_for(n)]

        def body(comm, cases=cases, algorithm=algorithm):
            results = []
            for dtype, parts, root in cases:
                out = np.zeros(parts[comm.rank], dtype=numpy_dtype(dtype))
                whole = data(root, sum(parts), dtype) if comm.rank == root else None
                results.append(comm.scatter(whole, src=root, out=out, counts=parts, algorithm=algorithm))
            return results

        per_rank = worlds(n).run(body)
        for i, (dtype, parts, root) in enumerate(cases):
            whole = data(root, sum(parts), dtype)
            for rank, results in enumerate(per_rank):
                start = sum(parts[:rank])
                expected = whole[start : start + parts[rank]]
                assert results[i].tobytes() == expected.tobytes(), f"scatter {algorithm} N={n} root={root} {parts}"


def exchanged(src: int, dst: int, count: int, dtype: str) -> np.ndarray:
    return data(src, count, dtype, salt=dst + 1)


@pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize("algorithm", algorithms.names("all_to_all"))
def test_all_to_all_exchanges_equal_parts(worlds, algorithm, in_place):
    for n in WORLD_SIZES:
        cases = [(d, c) for d in DTYPES for c in (0, 1, 13, ACROSS_SEGMENTS // n)]

        def body(comm, cases=cases, algorithm=algorithm):
            results = []
            for dtype, part in cases:
                mine = np.concatenate([exchanged(comm.rank, peer, part, dtype) for peer in range(comm.world_size)])
                out = mine if in_place else None
                results.append(comm.all_to_all(mine, out=out, algorithm=algorithm))
            return results

        per_rank = worlds(n).run(body)
        for i, (dtype, part) in enumerate(cases):
            for rank, results in enumerate(per_rank):
                expected = np.concatenate([exchanged(peer, rank, part, dtype) for peer in range(n)])
                assert results[i].tobytes() == expected.tobytes(), f"all_to_all {algorithm} N={n} {dtype} {part}"


@pytest.mark.parametrize("algorithm", ["direct", "pairwise"])
def test_all_to_all_exchanges_parts_of_any_sizes(worlds, algorithm):
    def part(src: int, dst: int) -> int:
        return (src * 5 + dst * 3) % 7 * 811 if (src + dst) % 4 else 0

    for n in WORLD_SIZES:

        def body(comm, n=n, algorithm=algorithm):
            sends = [part(comm.rank, peer) for peer in range(n)]
            receives = [part(peer, comm.rank) for peer in range(n)]
            mine = np.concatenate([exchanged(comm.rank, peer, sends[peer], "int32") for peer in range(n)])
            return comm.all_to_all(mine, counts=sends, output_counts=receives, algorithm=algorithm)

        for rank, result in enumerate(worlds(n).run(body)):
            expected = np.concatenate([exchanged(peer, rank, part(peer, rank), "int32") for peer in range(n)])
            assert np.array_equal(result, expected), f"all_to_all {algorithm} N={n} rank={rank}"


@pytest.mark.parametrize("algorithm", algorithms.names("barrier"))
def test_no_rank_leaves_a_barrier_before_all_have_come(worlds, algorithm):
    for n in WORLD_SIZES:
        arrived = [0] * n

        def body(comm, arrived=arrived, algorithm=algorithm):
            seen = []
            for round_number in range(1, 20):
                arrived[comm.rank] = round_number
                comm.barrier(algorithm=algorithm)
                seen.append(min(arrived) >= round_number)
            return seen

        for seen in worlds(n).run(body):
            assert all(seen)


def test_the_mean_of_sixteen_bit_floats_neither_overflows_nor_is_rounded_twice(worlds):
    def body(comm):
        large = comm.all_reduce(np.full(3, 40000, dtype="f2"), "avg", algorithm="one_shot")
        ones = np.full(5, 256 if comm.rank == 0 else 1, dtype=numpy_dtype("bfloat16"))
        return large, comm.all_reduce(ones, "sum", algorithm="one_shot")

    for large, ones in worlds(8).run(body):
        assert (large == 40000).all()
        assert (ones.astype(float) == 264).all()  # 263 exactly, rounded once to bfloat16


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("algorithm", algorithms.names("all_reduce"))
def test_a_nan_on_any_one_rank_is_nan_on_all(worlds, op, algorithm):
    for n in (2, 3, 5):
        chosen = on_hosts("all_reduce", algorithm, n)

        def body(comm, n=n, algorithm=chosen):
            results = []
            for dtype in ("float64", "float32", "float16", "bfloat16"):
                for place in range(n):
                    mine = data(comm.rank, 50, dtype)
                    if comm.rank == place:
                        mine[place :: n + 1] = np.nan
                    results.append((place, comm.all_reduce(mine, op, algorithm=algorithm)))
            return results

        for results in worlds(n).run(body):
            for place, result in results:
                is_nan = np.isnan(result.astype(float))
                assert is_nan[place :: n + 1].all()
                assert is_nan.sum() == len(is_nan[place :: n + 1])


@pytest.mark.parametrize("memory", ["private", "registered"])
def test_calls_too_large_for_the_cache(worlds, memory):
    """Copies then go past it. The arrays start between cache lines, and end there."""
    count = (36 << 20) // 4 + 5

    def body(comm):
        def array(length):
            whole = (comm.empty if memory == "registered" else np.empty)(length + 3, "float32")
            return whole[3:]

        mine = array(count)
        mine[:] = np.arange(count) % 1009 + comm.rank
        total = comm.all_reduce(mine, out=array(count))
        comm.all_reduce(mine)
        same = np.array_equal(total, mine)
        mine[:] = np.arange(count) % 1013 + comm.rank
        gathered = comm.all_gather(mine, out=array(2 * count))
        comm.broadcast(mine, src=1)
        wanted = [np.arange(count) % 1013 + rank for rank in range(2)]
        return (
            same,
            np.array_equal(total, 2 * (np.arange(count) % 1009) + 1),
            np.array_equal(gathered, np.concatenate(wanted)),
            np.array_equal(mine, wanted[1]),
        )

    assert worlds(2).run(body) == [(True,) * 4] * 2
