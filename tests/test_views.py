"""The terminal view shows what the verifier knows, fits the terminal, and draws wrong schedules as far as they go."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from rich.console import Console, RenderableType
from topologies import build

from farandole.algorithms import ALGORITHMS, ROOTED, names
from farandole.errors import MalformedScheduleError
from farandole.schedule import Schedule, Transfer
from farandole.verifier import NOTHING, interpret
from farandole.views import terminal
from farandole.views.execution import execute
from farandole.views.terminal import HeldGrid, draw_step, draw_steps, heading

PAIRS = [(collective, name) for collective in ALGORITHMS for name in names(collective)]
every_algorithm = pytest.mark.parametrize(("collective", "name"), PAIRS, ids=[f"{c}-{n}" for c, n in PAIRS])


def schedules(collective: str, name: str) -> list[Schedule]:
    sizes = [1, 2, 3, 5, 8]
    return [build(collective, name, n, n // 2 if collective in ROOTED else 0) for n in sizes]


def rendered(*renderables: RenderableType, width: int = 80) -> list[str]:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable)
    return capture.get().splitlines()


def coloured(renderable: RenderableType) -> str:
    console = Console(width=80, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def rank_rows(lines: Iterable[str]) -> list[list[str]]:
    """The cells of a grid, without the names of the ranks."""
    return [line.split()[2:] for line in lines if line.startswith("rank ")]


def without_last(schedule: Schedule) -> Schedule:
    return Schedule(schedule.collective, schedule.world_size, schedule.num_chunks, schedule.rows[:-1], name="cut")


@every_algorithm
def test_states_are_those_of_the_verifier(collective, name):
    for schedule in schedules(collective, name):
        execution = execute(schedule)
        assert execution.error is None
        assert execution.num_steps == schedule.num_steps
        last = execution.states[-1]
        final = interpret(schedule).final
        held = {(rank, slot): last[rank, slot] for rank, slot in zip(*(last != NOTHING).nonzero(), strict=True)}
        assert held == final


@every_algorithm
@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_algorithm_fits_the_terminal(collective, name, width):
    for schedule in schedules(collective, name):
        lines = rendered(heading(schedule), *draw_steps(execute(schedule)), width=width)
        assert max(map(len, lines)) <= width
        text = "\n".join(lines)
        assert name in text
        assert all(f"step {step}" in text for step in range(schedule.num_steps))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_an_all_reduce_ends_with_all_contributions_everywhere(num_ranks):
    execution = execute(build("all_reduce", "ring", num_ranks))
    start = rank_rows(rendered(HeldGrid(execution, 0)))
    assert start == [[str(rank)] * num_ranks for rank in range(num_ranks)]
    end = rank_rows(rendered(HeldGrid(execution, execution.num_steps)))
    assert end == [["Σ"] * num_ranks] * num_ranks


def test_the_heading_says_what_steps_and_slots_are():
    text = " ".join(rendered(heading(build("all_reduce", "ring", 4)), width=1000))
    assert "transfers of a step may run at the same time; each reads what its slot held when the step began" in text
    assert "Each rank has a slot per chunk. " in text
    text = " ".join(rendered(heading(build("all_to_all", "bruck", 4)), width=1000))
    assert "Each rank has a slot per chunk, and behind them scratch slots, s0 and so on, for data in transit." in text


def test_what_is_drawn_per_cell_and_step_is_looked_up_and_not_computed(monkeypatch):
    """Of many steps with many slots: the sums over all ranks are made once, and written slots are found once."""
    execution = execute(build("all_reduce", "ring", 16))
    promised = execution.interpretation.promised
    assert execution.interpretation.promised is promised
    assert execution.written is execution.written
    assert promised == {(rank, chunk): (chunk, 0xFFFF) for rank in range(16) for chunk in range(16)}
    for position, places in enumerate(execution.written):
        assignments = execution.interpretation.assignments
        assert places == {(a.rank, a.slot) for a in assignments if a.step == position - 1}
    named = []
    forms = terminal._forms
    monkeypatch.setattr(terminal, "_forms", lambda *args: named.append(args) or forms(*args))
    rendered(HeldGrid(execution, 5), width=160)
    assert len(named) == 16 * 16, "each cell is named once"
    rendered(HeldGrid(execution, 5), width=30)
    assert len(named) == 16 * 16, "where there is no room for names none is made"


def test_cells_name_the_contributing_ranks():
    execution = execute(build("all_reduce", "ring", 4))
    assert rank_rows(rendered(HeldGrid(execution, 2))) == [
        ["0", "0,2,3", "0,3", "0"],
        ["1", "1", "0,1,3", "0,1"],
        ["1,2", "2", "2", "0-2"],
        ["1-3", "2,3", "3", "3"],
    ]


def test_empty_slots_are_dots_and_an_all_gather_names_the_owner():
    execution = execute(build("all_gather", "ring", 3))
    assert rank_rows(rendered(HeldGrid(execution, 0))) == [["0", "·", "·"], ["·", "1", "·"], ["·", "·", "2"]]
    assert rank_rows(rendered(HeldGrid(execution, execution.num_steps))) == [["0", "1", "2"]] * 3


def test_an_all_to_all_says_from_whom_and_for_whom_and_keeps_scratch_apart():
    execution = execute(build("all_to_all", "bruck", 3))
    lines = rendered(HeldGrid(execution, execution.num_steps))
    assert lines[0].split() == ["chunk", "0", "1", "2", "│", "s0"]
    for rank, row in enumerate(rank_rows(lines)):
        assert row[:4] == [f"0→{rank}", f"1→{rank}", f"2→{rank}", "│"]


def test_a_contribution_held_twice_is_seen():
    transfers = [Transfer(0, 1, 0, 0, 0, True), Transfer(1, 1, 0, 0, 0, True), Transfer(2, 0, 0, 1, 0)]
    execution = execute(Schedule("all_reduce", 2, 1, transfers))
    assert rank_rows(rendered(HeldGrid(execution, 3))) == [["Σ+1"], ["Σ+1"]]


def test_what_is_promised_is_green_when_it_is_there_and_red_when_it_never_comes():
    right = execute(build("all_reduce", "ring", 3))
    assert "\x1b[32m" not in coloured(HeldGrid(right, 0))
    end = coloured(HeldGrid(right, right.num_steps))
    assert "\x1b[32m" in end  # was there before the last step
    assert "\x1b[1;32m" in end  # came in the last step
    wrong = execute(without_last(build("all_reduce", "ring", 3)))
    assert coloured(HeldGrid(wrong, wrong.num_steps)).count("\x1b[31m") == 1


@pytest.mark.parametrize(
    ("collective", "name", "num_ranks", "step", "phrase"),
    [
        ("all_reduce", "ring", 4, 0, "rank 0  chunk 3 +→ rank 1"),
        ("all_reduce", "ring", 4, 3, "rank 0  chunk 0 → rank 1"),
        ("all_gather", "direct", 4, 0, "rank 1  chunk 1 → ranks 0,2,3"),
        ("reduce_scatter", "direct", 4, 0, "chunks 0,2,3 +→ ranks 0,2,3, one each"),
        ("reduce_scatter", "direct", 4, 0, "chunk 1 +→ chunk 1 (local)"),
        ("reduce_scatter", "halving_doubling", 4, 0, "rank 0  chunks 2,3 +→ rank 2"),
        ("all_to_all", "direct", 4, 0, "rank 0  chunks 1-3 → ranks 1-3 chunk 0, one each"),
        ("all_to_all", "bruck", 3, 0, "rank 0  chunk 1 → rank 1 scratch 0"),
        ("all_to_all", "bruck", 3, 2, "rank 0  scratch 0 → chunk 2 (local)"),
    ],
)
def test_transfers_in_words(collective, name, num_ranks, step, phrase):
    execution = execute(build(collective, name, num_ranks))
    assert phrase in "\n".join(rendered(draw_step(execution, step), width=120))


def test_many_ranks_are_cut_and_it_says_so():
    execution = execute(build("all_reduce", "ring", 64))
    lines = rendered(draw_step(execution, 70, max_ranks=4))
    text = "\n".join(lines)
    assert "not shown: what 60 more ranks send" in text
    assert "not shown: 60 more ranks" in text
    grid = [line for line in lines if line.startswith("rank ") and "→" not in line]
    assert len(grid) == 4
    assert all(len(line.split()[2]) == 64 and set(line.split()[2]) <= set("▁▂▃▄▅▆▇Σ") for line in grid)


def test_more_slots_than_columns_are_cut_and_it_says_so():
    execution = execute(build("all_gather", "ring", 100))
    assert "not shown: 84 more ranks and 28 more slots of each rank" in rendered(HeldGrid(execution, 3))


def test_where_names_do_not_fit_it_says_how_many():
    execution = execute(build("all_reduce", "halving_doubling", 16))
    lines = rendered(HeldGrid(execution, 3))
    assert any("\N{MULTIPLICATION SIGN}4" in line for line in lines)
    assert "\N{MULTIPLICATION SIGN}3: the contributions of three ranks" in lines


def test_a_wrong_schedule_is_drawn_up_to_the_step_that_makes_no_sense():
    transfers = [Transfer(0, 0, 0, 1, 0), Transfer(1, 1, 0, 0, 0), Transfer(1, 2, 0, 1, 0)]
    execution = execute(Schedule("broadcast", 3, 1, transfers))
    assert execution.error is not None
    assert execution.error.transfer == 2
    assert execution.num_steps == 1
    lines = rendered(*draw_steps(execution))
    assert "rank 1  chunk 0 → rank 0" in [line.rstrip() for line in lines]
    assert any("rank 2  chunk 0 → rank 1 (the first wrong one)" in line for line in lines)
    assert lines[-1] == "This step cannot be executed."


def test_a_collective_without_promise_cannot_be_drawn():
    with pytest.raises(MalformedScheduleError, match="collective is 'scan'"):
        execute(Schedule("scan", 2, 1, []))
