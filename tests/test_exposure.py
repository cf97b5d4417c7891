"""Sets of moments, what of a timeline is exposed, and traces as files."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole import ArgumentError, intervals
from farandole.exposure import Exposure, exposure_of, exposures_of_steps
from farandole.timeline import KINDS, Span
from farandole.trace_file import Part, read_trace, write_trace

# --- Sets of moments --------------------------------------------------------------------------------------------------

some_intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)
some_cuts = st.lists(st.integers(-2, 42), max_size=5).map(sorted)


def moments_of(some) -> set[int]:
    """As plainly as can be: every single moment."""
    return {moment for begin, end in some for moment in range(begin, end)}


def assert_in_order(some) -> None:
    assert all(begin < end for begin, end in some)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(some))


@given(some_intervals, some_intervals)
def test_sets_of_moments_are_what_they_are_moment_by_moment(first, second):
    one, other = intervals.union(first), intervals.union(second)
    assert_in_order(one)
    assert moments_of(one) == moments_of(first)
    assert intervals.length(one) == len(moments_of(first))
    for made, wanted in (
        (intervals.intersection(one, other), moments_of(first) & moments_of(second)),
        (intervals.without(one, other), moments_of(first) - moments_of(second)),
    ):
        assert_in_order(made)
        assert moments_of(made) == wanted


@given(some_intervals, some_cuts)
def test_a_set_is_cut_where_it_is_told(some, at):
    pieces = intervals.cut(intervals.union(some), at)
    edges = [-100, *at, 100]
    assert [moments_of(piece) for piece in pieces] == [
        {moment for moment in moments_of(some) if begin <= moment < end} for begin, end in itertools.pairwise(edges)
    ]


# --- What is exposed --------------------------------------------------------------------------------------------------

SECOND = 10**9


def spans_of(kind, *some) -> list[Span]:
    return [Span(kind, "x", begin * SECOND, end * SECOND) for begin, end in some]


def test_a_timeline_with_known_answers():
    spans = [
        *spans_of("compute", (0, 4), (2, 6), (8, 12)),  # 10 in all, of which it waits 3
        *spans_of("communication", (1, 3), (2, 5), (9, 11), (14, 16)),  # 8 in all
        *spans_of("waiting", (4, 5), (10, 13), (15, 17), (16, 17)),  # 6 in all; 1 + 1 + 1 of communication
    ]
    assert exposure_of(spans, 0, 20 * SECOND) == Exposure(20, 7, 6, 8, 3, 5)
    assert exposures_of_steps(spans, [5 * SECOND, 11 * SECOND], 0, 20 * SECOND) == [
        Exposure(5, 4, 1, 4, 1, 3),
        Exposure(6, 3, 1, 2, 1, 1),
        Exposure(9, 0, 4, 2, 1, 1),
    ]


def test_nothing_at_all_is_no_time():
    assert exposure_of([], 5, 5) == Exposure(0, 0, 0, 0, 0, 0)
    assert exposures_of_steps([], [3, 4], 2, 2) == [Exposure(0, 0, 0, 0, 0, 0)] * 3


@given(st.fixed_dictionaries(dict.fromkeys(KINDS, some_intervals)), some_cuts, st.integers(0, 20), st.integers(20, 40))
def test_exposure_is_counted_moment_by_moment(by_kind, steps, began, ended):
    spans = [
        Span(kind, "x", begin * SECOND, max(begin, end) * SECOND)
        for kind, some in by_kind.items()
        for begin, end in some
    ]
    found = exposures_of_steps(spans, [step * SECOND for step in steps], began * SECOND, ended * SECOND)
    edges = [-100, *steps, 100]
    for exposure, (begin, end) in zip(found, itertools.pairwise(edges), strict=True):
        window = {moment for moment in range(begin, end) if began <= moment < ended}
        computing, waiting, communicating = (moments_of(by_kind[kind]) & window for kind in KINDS)
        exposed, hidden = communicating & waiting, communicating - waiting
        assert exposure == Exposure(*map(len, (window, computing - waiting, waiting, communicating, exposed, hidden)))


# --- Files ------------------------------------------------------------------------------------------------------------

any_spans = st.lists(
    st.builds(
        lambda kind, begin, length, track: Span(kind, "x", begin, begin + length, track, {"bytes": 5}),
        st.sampled_from(KINDS),
        st.integers(0, 10**15),
        st.integers(0, 50),
        st.sampled_from(["", "a", "b"]),
    ),
    max_size=20,
)


@given(any_spans, st.lists(st.integers(0, 10**15), max_size=3).map(sorted), st.integers(-(10**15), 10**15))
def test_a_file_says_what_was_recorded(tmp_path_factory, spans, steps, offset):
    path = tmp_path_factory.mktemp("traces") / "trace.json"
    parts = [
        Part(0, "here", 11, 10**14, 10**15, spans, steps),
        Part(1, "there", 12, 10**14, 10**15, spans, steps, num_missing=7, offset_ns=offset, uncertainty_ns=30),
    ]
    write_trace(path, [Part.unpack(part.pack()) for part in parts])
    read = read_trace(path)
    for part, again in zip(parts, read, strict=True):
        assert (again.rank, again.host, again.process, again.num_missing) == (
            part.rank,
            part.host,
            part.process,
            part.num_missing,
        )
        assert again.uncertainty_ns == part.uncertainty_ns
        shift = again.began_ns - part.began_ns
        assert again.ended_ns - part.ended_ns == shift
        assert again.steps == [step + shift for step in part.steps]
        assert sorted((one.kind, one.began_ns, one.ended_ns) for one in again.spans) == sorted(
            (one.kind, one.began_ns + shift, one.ended_ns + shift) for one in part.spans
        )
        assert again.exposure() == part.exposure()
    assert read[1].began_ns - read[0].began_ns == offset
    assert_rows_are_stacks(path)


def assert_rows_are_stacks(path) -> None:
    """Viewers want the spans of a thread to lie apart, or one within the other."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            rows.setdefault((event["pid"], event["tid"]), []).append((begin, begin + round(event["dur"] * 1000)))
    for row in rows.values():
        for (begin, end), (later, its_end) in itertools.combinations(sorted(row, key=lambda one: (one[0], -one[1])), 2):
            assert later >= end or its_end <= end, (begin, end, later, its_end)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("", "it is no JSON"),
        ("[]", "no trace that farandole.trace wrote"),
        ('{"traceEvents": []}', "no trace that farandole.trace wrote"),
        ('{"farandole": {"version": 99}}', "a trace of form 99"),
        ('{"farandole": {"version": 1, "ranks": [{}]}, "traceEvents": []}', "damaged"),
        ('{"farandole": {"version": 1, "ranks": []}, "traceEvents": [{"ph": "i", "pid": 3, "ts": 0}]}', "damaged"),
    ],
)
def test_files_that_are_no_traces_are_refused(tmp_path, content, says):
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ArgumentError, match=says):
        read_trace(path)
