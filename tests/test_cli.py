"""The command line: what each verb prints, what it refuses, and how it exits."""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import farandole.cli
from farandole.algorithms import ALGORITHMS, HIERARCHICAL, build, names
from farandole.cli import app, main
from farandole.cli.algorithm_argument import load_algorithm, schedules_of
from farandole.cli.bench import counts_between, parse_size
from farandole.cli.bench_check import PERIOD, contribution, count_wrong, describe_bound, numpy_dtype, reduced
from farandole.cli.bench_settings import COLLECTIVES, Measurement, Row, Settings
from farandole.cli.bench_worker import Bench, Buffers
from farandole.cost_model import bus_factor
from farandole.dtypes import DTYPES, REDUCE_OPS, dtype_named, require_reducible
from farandole.errors import ArgumentError, FarandoleError, MalformedScheduleError
from farandole.launch import JobResult
from farandole.topology import Topology

bench_module = importlib.import_module("farandole.cli.bench")  # farandole.cli.bench is the function
run_module = importlib.import_module("farandole.cli.run")

VERBS = ("run", "status", "verify", "draw", "bench", "explain", "calibrate", "trace")

PLANS = '''
from farandole import Schedule, Transfer


def chain(world_size):
    """Right: up the chain, then down."""
    last = world_size - 1
    up = [Transfer(r, r, 0, r + 1, 0, True) for r in range(last)]
    down = [Transfer(last + r, last - r, 0, last - r - 1, 0) for r in range(last)]
    return Schedule("all_reduce", world_size, 1, up + down, name="chain")


def deaf(world_size):
    """Wrong: nobody hears of the result."""
    return Schedule("all_reduce", world_size, 1, list(chain(world_size))[:-1], name="deaf")


def star(world_size, root):
    others = [r for r in range(world_size) if r != root]
    return Schedule("broadcast", world_size, 1, [Transfer(0, root, 0, r, 0) for r in others], root=root, name="star")


def number(world_size):
    return 5


def other_size(world_size):
    return chain(world_size + 1)


def nameless(world_size):
    return Schedule("all_reduce", world_size, 1, list(chain(world_size)))


def divided(world_size):
    return half(world_size)


def half(world_size):
    return 1 / (world_size - world_size)


def in_numpy(world_size):
    import numpy
    return numpy.concatenate([world_size])


def alone():
    return chain(1)
'''


@pytest.fixture
def plans(tmp_path):
    path = tmp_path / "plans.py"
    path.write_text(PLANS)
    return path


def invoke(*arguments, columns=80):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": str(columns)})


def words(text: str) -> str:
    return " ".join(text.split())


def run_command(*arguments, columns=100):
    command = [sys.executable, "-m", "farandole", *map(str, arguments)]
    environment = {"PATH": "/usr/bin:/bin", "COLUMNS": str(columns)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


def exit_of_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["farandole", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_info:
        main()
    return exit_info.value.code


# --- The command as a whole -------------------------------------------------------------------------------------------


def test_version():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("farandole ")


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_examples(verb):
    result = invoke(verb, "--help")
    assert result.exit_code == 0
    examples = result.stdout.partition("Examples:")[2]
    assert 2 <= examples.count(f"farandole {verb} ") <= 4
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_errors_of_farandole_are_one_message_and_exit_2(monkeypatch, capsys):
    assert exit_of_main(monkeypatch, "verify", "rign") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("farandole: there is no algorithm named 'rign'; known are bruck, circulant, direct")
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "ring", "--ranks", 0),
        ("verify", "ring", "--ranks", 10**12),
        ("draw",),
        ("bench", "-b", "8X"),
        ("fly",),
    ],
)
def test_usage_errors_exit_2(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr


# --- The ALGORITHM argument -------------------------------------------------------------------------------------------


def test_a_name_means_every_collective_that_has_it():
    found = [schedule.collective for schedule in schedules_of("ring", 4)]
    assert found == ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"]
    assert [s.collective for s in schedules_of("ring", 4, collective="reduce")] == ["reduce"]


def test_no_name_means_all():
    everything = [(collective, name) for collective in ALGORITHMS for name in names(collective)]
    topology = Topology.parse("2+1")
    assert [(s.collective, s.name) for s in schedules_of(None, 3, topology=topology)] == everything
    flat = [(collective, name) for collective, name in everything if name not in HIERARCHICAL]
    assert [(s.collective, s.name) for s in schedules_of(None, 3)] == flat
    of_reduce = [name for collective, name in flat if collective == "reduce"]
    assert [s.name for s in schedules_of(None, 3, collective="reduce")] == of_reduce


def test_an_algorithm_that_knows_hosts_is_given_them():
    topology = Topology.parse("0,1,0")
    for schedule in schedules_of("hierarchical", 3, root=1, topology=topology):
        root = 1 if schedule.collective in ("broadcast", "reduce") else 0
        assert schedule == build(schedule.collective, "hierarchical", 3, root, topology)


def test_a_root_goes_to_the_collectives_that_have_one():
    roots = {schedule.collective: schedule.root for schedule in schedules_of("ring", 4, root=2)}
    assert roots == {"all_reduce": 0, "reduce_scatter": 0, "all_gather": 0, "broadcast": 2, "reduce": 2}


def test_a_function_in_a_file(plans):
    (schedule,) = schedules_of(f"{plans}:chain", 3)
    assert (schedule.name, schedule.world_size) == ("chain", 3)
    (schedule,) = schedules_of(f"{plans}:star", 3, root=2)
    assert schedule.root == 2


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("rign", {}, "there is no algorithm named 'rign'"),
        ("ring", {"collective": "scan"}, "collective is 'scan'; known are all_reduce"),
        ("ring", {"collective": "gather"}, "there is no gather named 'ring'; known are naive, tree, direct"),
        ("bruck", {"root": 1}, "root is 1, but bruck has a root in no collective"),
        ("direct", {"collective": "all_reduce", "root": 1}, "root is 1, but all_reduce has no root"),
        ("gone.py:f", {}, "there is no file 'gone.py'"),
        ("{plans}:gone", {}, "has no function 'gone'; it has chain, deaf, star, number, other_size"),
        ("{plans}:alone", {}, r"plans.py:alone: TypeError: alone\(\) takes 0 positional arguments but 1 was given"),
        ("{plans}", {}, "needs the name of a function behind it; it has chain"),
        ("{plans}:number", {}, "returned 5; it must return a farandole.Schedule"),
        ("{plans}:other_size", {}, "was asked for 4 ranks and returned a schedule of 5"),
        ("{plans}:chain", {"collective": "reduce"}, "returned a schedule for all_reduce, not for reduce"),
        ("{plans}:chain", {"root": 1}, "root is 1, but .* takes the world size alone"),
    ],
)
def test_what_is_no_algorithm_is_refused_clearly(plans, algorithm, options, message):
    with pytest.raises((ArgumentError, MalformedScheduleError), match=message):
        schedules_of(algorithm.format(plans=plans), 4, **options)


def test_a_file_that_is_no_python_file_is_refused(tmp_path):
    (tmp_path / "plan.txt").write_text("")
    with pytest.raises(ArgumentError, match=r"its name must end in \.py"):
        schedules_of(f"{tmp_path}/plan.txt:f", 2)


def test_a_schedule_without_a_name_gets_that_of_its_function(plans):
    assert [s.name for s in schedules_of(f"{plans}:nameless", 3)] == ["nameless"]
    assert invoke("verify", f"{plans}:nameless", "-n", 3).stdout.splitlines()[3].startswith("nameless    proved")
    result = run_command("bench", "-e", "8", "-i", 1, "-w", 0, "-a", f"{plans}:nameless", "--json")
    assert [row["algorithm"] for row in json.loads(result.stdout)["rows"]] == ["nameless"]


def test_a_schedule_is_named_in_a_copy():
    function = load_algorithm(f"{__file__}:the_same_each_time", None)
    assert function(2).name == "the_same_each_time"
    assert THE_SAME.name == "custom"


THE_SAME = farandole.Schedule("all_reduce", 2, 1, [(0, 0, 0, 1, 0, 1), (0, 1, 0, 0, 0, 1)])


def the_same_each_time(world_size):
    return THE_SAME


def test_an_exception_in_the_users_file_is_shown_with_the_users_frames_alone(plans, monkeypatch, capsys):
    lines = plans.read_text().splitlines()
    outer, inner = (
        lines.index("    return half(world_size)") + 1,
        lines.index("    return 1 / (world_size - world_size)") + 1,
    )
    for verb in ("verify", "draw"):
        assert exit_of_main(monkeypatch, verb, f"{plans}:divided") == 2
        first, *frames = capsys.readouterr().err.splitlines()
        assert first == f"farandole: {plans}:{inner}: ZeroDivisionError: division by zero"
        places = [line.strip() for line in frames if line.lstrip().startswith("File ")]
        assert places == [f'File "{plans}", line {outer}, in divided', f'File "{plans}", line {inner}, in half']
    with pytest.raises(ArgumentError) as caught:
        schedules_of(f"{plans}:in_numpy", 3)
    assert str(caught.value).count("File ") == 1
    assert caught.value.__suppress_context__


def test_a_file_that_cannot_be_executed_is_shown_with_its_line(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("x = 1\nif x\n    pass\n")
    with pytest.raises(ArgumentError, match=rf"^{path}:2: SyntaxError: expected ':'\n    if x$"):
        schedules_of(f"{path}:f", 2)
    path.write_text("x = 1\ny = z\n")
    with pytest.raises(
        ArgumentError, match=rf"^{path}:2: NameError: name 'z' is not defined\n  File .*, line 2, in <mod"
    ):
        schedules_of(f"{path}:f", 2)


# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify_prints_costs_next_to_bounds():
    result = invoke("verify", "ring", "-n", 4, "-c", "all_reduce", columns=150)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    row = words(next(line for line in lines if line.startswith("ring")))
    assert row.startswith("ring proved 6 6 24 3/2 S = 1.5 S 3/2 S = 1.5 S")
    assert "2(N-1) rounds; 2(N-1)/N·S sent per rank" in result.stdout
    assert words(next(line for line in lines if line.startswith("lower bound"))) == "lower bound 2 3/2 S = 1.5 S"
    assert lines[-1].startswith("1 proved")


@pytest.mark.parametrize("columns", [80, 120, 150])
@pytest.mark.parametrize("ranks", [1, 6, 24])
def test_verify_of_everything_fits_the_terminal(ranks, columns):
    result = invoke("verify", "-n", ranks, columns=columns)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert all(f"{collective} on {ranks} rank" in result.stdout for collective in ALGORITHMS)
    assert "…" not in result.stdout


@pytest.mark.parametrize("columns", [80, 150])
def test_verify_on_several_hosts_proves_those_that_know_them_too(columns):
    result = invoke("verify", "--hosts", "3+2", columns=columns)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert "59 proved" in result.stdout
    assert "2H rounds, two of them" in words(result.stdout)
    assert "…" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "ring", "--hosts", "2x"), "hosts is '2x'; give '2x4' (2 hosts of 4 ranks), '3+1'"),
        (
            ("draw", "ring", "--hosts", "2x4", "-n", "6"),
            "--ranks is 6, but --hosts 2x4 has 8 ranks; give one of the two",
        ),
        (("explain", "gather", "8", "--hosts", "64x64"), "--hosts 64x64 has 4096 ranks; at most 1024 are allowed"),
    ],
)
def test_hosts_that_cannot_be_are_refused(monkeypatch, capsys, arguments, message):
    assert exit_of_main(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err


def test_ranks_and_hosts_may_say_the_same():
    assert invoke("verify", "tree", "--hosts", "2x4", "-n", 8).exit_code == 0


def test_draw_on_several_hosts():
    result = invoke("draw", "hierarchical", "--hosts", "2x2", "-c", "all_gather")
    assert result.exit_code == 0
    assert "all_gather hierarchical on 4 ranks: 4 chunks, 2 steps" in words(result.stdout)
    assert "Proved: this is an all_gather." in result.stdout


def test_verify_as_json():
    result = invoke("verify", "--ranks", 2, "--json")
    assert result.exit_code == 0
    outcomes = json.loads(result.stdout)
    flat = [(c, n) for c in ALGORITHMS for n in names(c) if n not in HIERARCHICAL]
    assert [(o["collective"], o["algorithm"]) for o in outcomes] == flat
    assert all(o["proved"] and o["counterexample"] is None and o["closed_form"] for o in outcomes)
    assert set(outcomes[0]) == {
        "collective",
        "algorithm",
        "world_size",
        "root",
        "proved",
        "counterexample",
        "num_steps",
        "num_rounds",
        "num_transfers",
        "num_chunks",
        "sent_share_of_S",
        "received_share_of_S",
        "bound_num_rounds",
        "bound_share_of_S",
        "closed_form",
        "proof_s",
        "hash",
    }


def test_verify_as_json_is_exact():
    (outcome,) = json.loads(invoke("verify", "ring", "-n", 7, "-c", "all_reduce", "--json").stdout)
    assert outcome["sent_share_of_S"] == outcome["received_share_of_S"] == outcome["bound_share_of_S"] == "12/7"
    assert (outcome["num_rounds"], outcome["bound_num_rounds"]) == (12, 3)
    assert outcome["root"] is None, "an all_reduce has none"
    (barrier,) = json.loads(invoke("verify", "dissemination", "-n", 5, "--json").stdout)
    assert barrier["sent_share_of_S"] is None


def test_verify_bounds_a_gather_by_what_the_root_receives():
    (outcome,) = json.loads(invoke("verify", "direct", "-n", 4, "-c", "gather", "--root", 3, "--json").stdout)
    assert (outcome["sent_share_of_S"], outcome["received_share_of_S"]) == ("1/4", "3/4")
    assert outcome["bound_share_of_S"] == "3/4"
    assert outcome["root"] == 3


def test_verify_refuses_a_wrong_schedule_with_its_counterexample(plans):
    result = invoke("verify", f"{plans}:deaf", "-n", 3)
    assert result.exit_code == 1
    text = words(result.stdout)
    assert "0 proved, 1 refused" in text
    assert "at the end, rank 0 chunk 0 lacks the contribution of ranks 1, 2" in text
    assert "is, at the end, on" in text

    result = invoke("verify", f"{plans}:deaf", "-n", 3, "--json")
    assert result.exit_code == 1
    (outcome,) = json.loads(result.stdout)
    assert not outcome["proved"]
    assert outcome["closed_form"] is None
    assert (outcome["counterexample"]["rank"], outcome["counterexample"]["chunk"]) == (0, 0)
    assert outcome["counterexample"]["path"]


def test_verify_proves_a_schedule_from_a_file(plans):
    result = invoke("verify", f"{plans}:chain", "-n", 5)
    assert result.exit_code == 0
    assert "chain" in result.stdout


# --- draw -------------------------------------------------------------------------------------------------------------


def test_draw_shows_every_step_and_the_proof():
    result = invoke("draw", "ring", "--ranks", 3)
    assert result.exit_code == 0
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0] == "all_reduce ring on 3 ranks: 3 chunks, 4 steps, 12 transfers"
    assert [line for line in lines if line.startswith("step ")] == [f"step {step}" for step in range(4)]
    assert "rank 0  chunk 2 +→ rank 1" in lines
    assert "Proved: this is an all_reduce." in lines
    assert max(map(len, lines)) <= 80


def test_draw_one_step():
    result = invoke("draw", "ring", "-n", 3, "--step", 2)
    assert [line for line in result.stdout.splitlines() if line.startswith("step ")] == ["step 2"]
    for step in (-1, 4):
        assert "the steps are 0..3" in str(invoke("draw", "ring", "-n", 3, "--step", step).exception)


def test_draw_takes_a_root():
    result = invoke("draw", "tree", "-n", 5, "--root", 3)
    assert result.stdout.startswith("broadcast tree on 5 ranks, root 3")


def test_draw_a_wrong_schedule(plans):
    result = invoke("draw", f"{plans}:deaf", "-n", 3)
    assert result.exit_code == 1
    assert "step 2" in result.stdout
    assert "refused: deaf all_reduce on 3 ranks: at the end, rank 0 chunk 0 lacks" in words(result.stdout)


# --- run --------------------------------------------------------------------------------------------------------------


def test_run_passes_options_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\n")
    result = run_command("run", "--prefix", "-n", 2, script, "--own-option", "-n", "7", "--help")
    assert result.returncode == 0, result.stderr
    options = "['--own-option', '-n', '7', '--help']"
    assert sorted(result.stdout.splitlines()) == [f"[0] 0 {options}", f"[1] 1 {options}"]


@pytest.mark.parametrize(
    ("before", "after", "hint"),
    [
        ([], ["-n", "3"], "-n 3"),
        ([], ["--ranks=3", "x"], "--ranks=3"),
        (["--prefix"], ["-n3"], "-n3"),
        ([], ["--prefix", "x"], "--prefix"),
        ([], ["-m"], "-m"),
        (["-n", "1"], ["-n", "3"], None),
        ([], ["--epochs", "-n", "3"], None),
        ([], ["-nice"], None),
        ([], [], None),
    ],
)
def test_run_hints_at_its_own_options_behind_the_program(monkeypatch, before, after, hint):
    started = []

    def run_processes(command, world_size, **_):
        started.append((command, world_size))
        return JobResult()

    monkeypatch.setattr(run_module, "run_processes", run_processes)
    result = invoke("run", *before, "train.py", *after)
    assert started == [(["train.py", *after], 1 if "1" in before else 2)]
    note = (
        f"farandole: note: {hint} goes to train.py, and 2 ranks are started; options of farandole run come before "
        f"the program: farandole run {hint} train.py\n"
    )
    assert result.stderr == ("" if hint is None else note)
    assert result.exit_code == 0


def test_help_says_when_lines_mix_and_what_a_root_is_called_in_python():
    text = words(invoke("run", "--help").stdout)
    assert "Without --prefix, ranks write to the terminal themselves, as progress bars and colours need it" in text
    assert "lines of several ranks may then mix" in text
    for verb in ("verify", "draw", "bench"):
        assert "(src or dst in Python)" in words(invoke(verb, "--help").stdout.replace("│", " "))


def test_run_shows_the_traceback_of_the_rank_that_failed_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import farandole\n"
        "communicator = farandole.init()\n"
        "if communicator.rank == 1:\n"
        "    raise ValueError('the dog ate it')\n"
        "communicator.barrier()\n"
    )
    result = run_command("run", "-n", 2, script)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.count("ValueError: the dog ate it") == 1
    assert "rank 1 of 2 raised an exception" in result.stderr


def test_run_names_the_cause_where_another_rank_has_said_first_that_it_lost_that(tmp_path):
    """Rank 1 closes its communicator on its way out, and has yet to come to its end when rank 0 has ended."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, select, numpy, farandole\n"
        "with farandole.init() as communicator:\n"
        "    others = communicator.all_gather(numpy.array([os.getpid()]))\n"
        "    try:\n"
        "        if communicator.rank == 1:\n"
        "            raise ValueError('the dog ate it')\n"
        "        communicator.barrier()\n"
        "    finally:\n"
        "        if communicator.rank == 1:\n"
        "            waiting = os.pidfd_open(int(others[0]))\n"
        "            communicator.close()\n"
        "            select.select([waiting], [], [], 60)\n"
    )
    result = run_command("run", "-n", 2, script)
    assert result.returncode == 1
    assert "rank 1 of 2 raised an exception" in result.stderr
    assert "ValueError: the dog ate it" in result.stderr
    assert "PeerLostError" not in result.stderr


def test_run_hands_out_the_exit_code_of_the_rank_that_failed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(7)\n")
    result = run_command("run", "-n", 1, script)
    assert result.returncode == 7
    assert "rank 0 of 1 exited with code 7" in result.stderr


ENDS_WELL = """
import atexit, os, pathlib, select, sys, time
ended = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    ended.with_suffix(".part").write_text(str(os.getpid()))
    ended.with_suffix(".part").rename(ended)
    {end}
while not ended.exists():
    time.sleep(0.01)
try:
    select.select([os.pidfd_open(int(ended.read_text()))], [], [])
except ProcessLookupError:
    pass
raise ValueError("the dog ate it")
"""


@pytest.mark.parametrize("end", ["sys.exit(256)", "atexit.register(os._exit, 0); sys.exit(3)"])
def test_only_the_exit_code_of_a_process_says_that_it_failed(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(ENDS_WELL.format(end=end))
    result = run_command("run", "-n", 2, script, tmp_path / "ended")
    assert result.returncode == 1
    assert "rank 1 of 2 raised an exception" in result.stderr
    assert "ValueError: the dog ate it" in result.stderr


@pytest.mark.parametrize(("end", "told"), [(256, None), (257, 1), (-1, 255), ("a text", 1), (None, None), (True, 1)])
def test_a_rank_reports_what_its_process_will_exit_with(tmp_path, end, told):
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.exit({end!r})\n")
    report = tmp_path / "report"
    with report.open("w") as file:
        environment = {"FARANDOLE_LAUNCHER": str(os.getpid()), "FARANDOLE_ERROR_FD": str(file.fileno())}
        command = [sys.executable, "-m", "farandole.launch.child", "script", str(script)]
        done = subprocess.run(
            command, env=environment, pass_fds=[file.fileno()], capture_output=True, timeout=60, check=False
        )
    assert done.returncode == (told or 0)
    assert (json.loads(report.read_text())["code"] if told else report.read_text() or None) == told


DIFFERS = """
import pathlib, sys, time
import numpy as np
import farandole
communicator = farandole.init()
communicator.broadcast(np.full(8, communicator.rank), src=communicator.rank)
has_called = pathlib.Path(sys.argv[1])
(has_called / str(communicator.rank)).write_text("")
while not all((has_called / str(rank)).exists() for rank in range(2)):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("end", ["", "del communicator", "sys.exit()", "sys.exit(256)"])
def test_a_mismatch_that_shows_at_the_end_of_the_program_is_a_failure(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(DIFFERS + end)
    result = run_command("run", "-n", 2, script, tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("Traceback") == 1
    assert "CollectiveMismatchError: " in result.stderr
    assert " of 2 raised an exception" in result.stderr


LEAVES_FIRST = """
import pathlib, sys, time
import numpy as np
import farandole
communicator = farandole.init()
has_left = pathlib.Path(sys.argv[1])
if communicator.rank == 1:
    communicator.close()
    has_left.write_text("")
else:
    while not has_left.exists():
        time.sleep(0.01)
    work = communicator.all_reduce(np.ones(2), async_op=True)
    while not work.is_done():
        time.sleep(0.01)
"""


def test_a_call_that_nobody_waits_for_may_be_left_alone_at_the_end(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LEAVES_FIRST)
    result = run_command("run", "-n", 2, script, tmp_path / "has left")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_threads_that_outlive_the_program_may_use_its_communicator(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import threading, farandole\n"
        "communicator = farandole.init()\n"
        "def work():\n"
        "    threading.main_thread().join()\n"
        "    communicator.barrier()\n"
        "    print('worked')\n"
        "threading.Thread(target=work).start()\n"
    )
    result = run_command("run", "--prefix", "-n", 2, script)
    assert result.returncode == 0
    assert result.stderr == ""
    assert sorted(result.stdout.splitlines()) == ["[0] worked", "[1] worked"]


# --- bench: what it asks for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("64K", 65536), ("1m", 1 << 20), ("2 G", 2 << 30), ("3KiB", 3072), (8, 8)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


def test_sizes_are_rounded_up_to_whole_counts():
    assert counts_between("all_reduce", 3, 4, 1, 64, 4) == (1, 4, 16)
    assert counts_between("all_gather", 3, 4, 1, 64, 4) == (3, 6, 18)
    assert counts_between("all_gather", 3, 8, 0, 8, 2) == (3,)
    assert counts_between("barrier", 3, 4, 8, 64, 2) == (0,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-c", "send"], "collective is 'send'; it must be one of all_reduce"),
        (["--root", "2"], "root is 2, but the ranks are 0..1"),
        (["-b", "1K", "-e", "8"], "the sizes go from 1024 to 8 bytes"),
        (["--dtype", "float8"], "dtype float8 cannot be communicated"),
        (["--op", "band"], "band has no meaning for float32"),
        (["--algorithm", "bruck"], "there is no all_reduce named 'bruck'"),
        (["--algorithm", "{plans}:deaf"], "lacks the contribution"),
        (["-b", "900000G", "-e", "900000G"], "the largest size is 966,367,641,600,000 bytes; 2 ranks need at least"),
    ],
)
def test_bench_refuses_what_cannot_work_before_it_starts(plans, monkeypatch, options, message):
    monkeypatch.setattr(bench_module, "run_processes", lambda *_, **__: pytest.fail("a job was started"))
    result = invoke("bench", *(option.format(plans=plans) for option in options))
    assert isinstance(result.exception, FarandoleError)
    assert message in str(result.exception)


def test_busbw_factors_are_those_of_nccl_tests():
    factors = {collective: bus_factor(collective, 4) for collective in COLLECTIVES}
    assert factors.pop("all_reduce") == 1.5
    assert factors.pop("barrier") == 1
    halves = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")
    assert [factors.pop(collective) for collective in halves] == [0.75] * 5
    assert factors == {"broadcast": 1, "reduce": 1}
    text = words(invoke("bench", "--help").stdout)
    assert "2(N-1)/N for all_reduce" in text
    assert "busbw is a normalised figure" in text


# --- bench: what it prints --------------------------------------------------------------------------------------------


def with_rows(monkeypatch, *rows: Row, result: JobResult | None = None, noise: bytes = b"") -> None:
    """Have the job's rank 0 report these rows."""

    def run_processes(command, world_size, *, module, on_line):
        if noise:
            on_line(1, "stdout", noise)
        for row in rows:
            on_line(0, "stdout", json.dumps(asdict(row)).encode())
        return result or JobResult()

    monkeypatch.setattr(bench_module, "run_processes", run_processes)
    monkeypatch.setattr(bench_module, "_available_bytes", lambda: 1 << 50)  # nothing is allocated


RIGHT = Row(2, "one_shot", "staged", Measurement(1e-6, 2e-6, 0), Measurement(2e-6, 3e-6, 0))
WRONG = Row(2, "one_shot", "staged", Measurement(1e-6, 2e-6, 0), Measurement(2e-6, 3e-6, 3))


def test_bench_exits_0_if_all_is_right(monkeypatch):
    with_rows(monkeypatch, RIGHT, noise=b"a warning")
    result = invoke("bench", "-e", "8", columns=150)
    assert result.exit_code == 0
    row = words(result.stdout.splitlines()[-2])
    assert row == "8 2 float32 sum - one_shot staged 1.000 2.000 0.01 0.01 0 2.000 3.000 0.00 0.00 0"
    assert "# no wrong elements" in result.stdout
    assert result.stderr == "[1] a warning\n"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_bench_exits_1_if_an_element_is_wrong(monkeypatch, options):
    with_rows(monkeypatch, WRONG)
    result = invoke("bench", "-e", "8", *options)
    assert result.exit_code == 1
    assert ('"num_wrong": 3' if options else "# 3 wrong elements") in result.stdout


def test_bench_prints_csv_with_a_line_per_size_and_place(monkeypatch):
    with_rows(monkeypatch, RIGHT, Row(4, "direct", "mapped", None, Measurement(1e-6, 2e-6, None)))
    result = invoke("bench", "-b", "8", "-e", "16", "--csv")
    assert result.exit_code == 0
    lines = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [(line["size_bytes"], line["place"], line["transport"]) for line in lines] == [
        ("8", "out_of_place", "staged"),
        ("8", "in_place", "staged"),
        ("16", "in_place", "mapped"),
    ]
    first = lines[0]
    assert (first["collective"], first["op"], first["root"], first["num_wrong"]) == ("all_reduce", "sum", "", "0")
    assert float(first["busbw_bytes_per_s"]) == pytest.approx(8 / 1e-6)
    assert lines[2]["num_wrong"] == ""


def test_bench_prints_one_form_alone():
    result = invoke("bench", "--csv", "--json")
    assert "--json and --csv exclude each other" in str(result.exception)


@pytest.mark.parametrize(
    ("options", "transports"),
    [([], {"staged"}), (["--registered"], {"mapped"}), (["-g", "1"], {"local"}), (["--cold"], {"staged"})],
)
def test_bench_says_how_data_travelled(options, transports):
    result = run_command("bench", *options, "-b", "2M", "-e", "2M", "-i", 2, "-w", 0, "-a", "direct", "--json")
    assert result.returncode == 0, result.stderr
    assert {row["transport"] for row in json.loads(result.stdout)["rows"]} == transports


@pytest.mark.parametrize("columns", [80, 100, 120, 160])
@pytest.mark.parametrize("options", [[], ["-c", "broadcast", "--dtype", "complex128"], ["-a", "recursive_doubling"]])
def test_bench_fits_the_terminal(monkeypatch, columns, options):
    with_rows(monkeypatch, Row(1 << 30, "recursive_doubling", "mapped", None, Measurement(100, 200, 0)))
    result = invoke("bench", "-b", "4G", "-e", "4G", *options, columns=columns)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= columns


def test_bench_says_loudly_that_one_rank_measures_nothing(monkeypatch):
    with_rows(monkeypatch, RIGHT)
    assert "NOTE: N = 1. Nothing travels between ranks" in words(invoke("bench", "-n", 1, "-e", "8").stdout)


def test_bench_shows_machine_versions_command_and_bound(monkeypatch):
    with_rows(monkeypatch, RIGHT)
    monkeypatch.setattr(sys, "argv", ["farandole", "bench", "-e", "8", "-a", "a b.py:f"])
    text = invoke("bench", "-e", "8", columns=140).stdout
    assert "cores usable" in text
    assert f"numpy {np.__version__}" in text
    assert "# farandole bench -e 8 -a 'a b.py:f'" in text
    assert "wrong: not exactly what it must be" in text


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_bench_measures_every_collective_on_two_ranks(collective):
    options = ("-n", 2, "-e", "4K", "-f", 512, "--iterations", 2, "--warmup", 1)
    result = run_command("bench", "--collective", collective, "--json", *options)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert document["world_size"] == 2
    sizes = [row["size_bytes"] for row in document["rows"]]
    assert sizes == ([0] if collective == "barrier" else [8, 4096])
    for row in document["rows"]:
        assert row["algorithm"] in names(collective)
        assert (row["out_of_place"] is None) == (collective == "broadcast")
        assert (row["in_place"] is None) == (collective == "barrier")
        for form in (row["out_of_place"], row["in_place"]):
            if form is not None:
                assert form["num_wrong"] == (None if collective == "barrier" else 0)
                assert 0 < form["median_s"] <= form["p99_s"]
                assert form["busbw_bytes_per_s"] == form["algbw_bytes_per_s"] * document["busbw_factor"]


def test_bench_runs_an_algorithm_from_a_file(plans):
    result = run_command("bench", "-e", "1K", "-f", 16, "-i", 1, "-w", 0, "-a", f"{plans}:chain")
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line and not line.startswith("#")]
    assert [row[2] for row in rows[1:] if row[0].isdigit()] == ["chain"] * 2
    assert "# no wrong elements" in result.stdout


def test_bench_runs_an_algorithm_with_a_root_from_a_file(plans):
    options = ("-n", 3, "-e", "8", "-i", 1, "-w", 0, "--json")
    result = run_command("bench", "-c", "broadcast", "--root", 2, "-a", f"{plans}:star", *options)
    assert result.returncode == 0, result.stderr
    assert [row["algorithm"] for row in json.loads(result.stdout)["rows"]] == ["star"]


def test_bench_compares_with_the_memory_that_is_available(monkeypatch):
    with_rows(monkeypatch, RIGHT)
    monkeypatch.setattr(bench_module, "_available_bytes", lambda: 4096)
    assert invoke("bench", "-e", "1K").exit_code == 0
    monkeypatch.setattr(bench_module, "_available_bytes", lambda: 4095)
    message = (
        "1,024 bytes; 2 ranks need at least 2 x 2 times that, 4,096 bytes, and 4,095 bytes of memory are available"
    )
    assert message in str(invoke("bench", "-e", "1K").exception)


def test_bench_of_a_rank_that_fails_says_which_and_why(plans):
    with plans.open("a") as file:
        file.write("import os\nif os.environ.get('RANK') == '1':\n    raise RuntimeError('no plan today')\n")
    result = run_command("bench", "-n", 2, "-e", "8", "-a", f"{plans}:chain")
    assert result.returncode == 1
    assert "rank 1 of 2 raised an exception" in result.stderr
    assert result.stderr.count("RuntimeError: no plan today") == 1
    assert "wrong elements" not in result.stdout


# --- bench: its check -------------------------------------------------------------------------------------------------

REDUCTIONS = [
    (dtype, op)
    for dtype in DTYPES
    for op in REDUCE_OPS
    if not (dtype == "bool" and op == "avg")
    and not (dtype.startswith(("float", "bfloat", "complex")) and op in ("band", "bor", "bxor"))
    and not (dtype.startswith("complex") and op in ("min", "max"))
]


def computed(contributions: list[np.ndarray], op: str) -> np.ndarray:
    """As an engine might: one rank after the other, rounded to the dtype each time."""
    functions = {
        "sum": np.add,
        "avg": np.add,
        "prod": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }
    dtype = contributions[0].dtype
    total = contributions[0]
    with np.errstate(over="ignore"):
        for more in contributions[1:]:
            total = functions[op](total, more).astype(dtype)
    if op == "avg" and dtype.kind in "iu":
        quotients = [int(abs(int(t)) // len(contributions)) * (1 if t >= 0 else -1) for t in total]
        return np.array(quotients, dtype)
    return (total / dtype.type(len(contributions))).astype(dtype) if op == "avg" else total


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS, ids=[f"{d}-{o}" for d, o in REDUCTIONS])
def test_one_wrong_element_is_found_and_rounding_is_not(dtype, op):
    require_reducible(dtype_named(dtype), op)
    for num_ranks in (1, 2, 5, 16):
        inputs = [contribution(rank, num_ranks, 1000, numpy_dtype(dtype), op, seed=3) for rank in range(num_ranks)]
        expected, bound = reduced(inputs, op)
        output = computed(inputs, op)
        assert count_wrong(output, expected, bound) == 0
        for index in (0, 517, 999):
            broken = output.copy()
            broken[index] = broken[index] ^ 1 if output.dtype.kind in "iub" else broken[index] * 2
            assert count_wrong(broken, expected, bound) == 1


@pytest.mark.parametrize(
    ("collective", "in_place"),
    [
        (c, in_place)
        for c in COLLECTIVES
        if c != "barrier"
        for in_place in (False, True)
        if in_place or c != "broadcast"
    ],
)
def test_one_wrong_element_on_one_rank_is_found_in_every_collective(worlds, collective, in_place):
    root, count = 1, 3 * 1000
    settings = Settings(
        collective,
        (count,),
        "float32",
        "sum",
        root,
        None,
        iterations=1,
        warmup=0,
        check=True,
        registered=False,
        cold=False,
    )

    def numbers_of_wrong(communicator):
        buffers = Buffers(Bench(communicator, settings), count, in_place=in_place)
        buffers.fill_with_data()
        before = buffers.count_wrong()
        buffers.call()
        right = buffers.count_wrong()
        if communicator.rank == root:
            buffers.output[len(buffers.output) // 2] += 1
        return before, right, buffers.count_wrong()

    before, right, broken = zip(*worlds(3).run(numbers_of_wrong), strict=True)
    assert sum(before) > count // 3
    assert right == (0, 0, 0)
    assert broken == (0, 1, 0)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "complex64"])
@pytest.mark.parametrize("num_ranks", [2, 16, 64])
def test_a_missing_or_doubled_contribution_is_wrong_everywhere(dtype, num_ranks):
    inputs = [contribution(rank, num_ranks, 1000, numpy_dtype(dtype), "sum", seed=1) for rank in range(num_ranks)]
    expected, bound = reduced(inputs, "sum")
    assert count_wrong(computed(inputs[:-1], "sum"), expected, bound) == 1000
    assert count_wrong(computed([*inputs, inputs[0]], "sum"), expected, bound) == 1000


def test_nan_is_wrong():
    expected, bound = reduced([np.ones(4, "f4")] * 2, "avg")
    assert count_wrong(np.full(4, np.nan, "f4"), expected, bound) == 4
    assert count_wrong(np.full(4, np.nan, "f4"), expected, None) == 4


def test_data_differ_per_rank_per_element_and_per_size():
    first, *others = (
        contribution(rank, 4, 10**6, np.dtype("f4"), "sum", seed) for rank, seed in ((0, 1), (1, 1), (0, 2))
    )
    assert len(first) == PERIOD
    assert len(np.unique(first)) > 0.9 * PERIOD
    assert all((first != other).mean() > 0.99 for other in others)


def test_what_comes_out_is_compared_with_the_right_place_of_the_period():
    expected = np.arange(PERIOD, dtype="i4")
    start = 3 * PERIOD - 5
    output = (start + np.arange(2 * PERIOD, dtype="i4")) % PERIOD
    assert count_wrong(output, expected, None, start) == 0
    assert count_wrong(output, expected, None, start + 1) == len(output)
    output[PERIOD] += 1
    assert count_wrong(output, expected, None, start) == 1


def test_the_bound_is_stated():
    bound = "wrong: off by more than eps = 1.19e-07, relative to the result in float64"
    assert describe_bound(np.dtype("f4"), "avg") == bound
    for dtype, op in (("i4", "avg"), ("f4", "sum"), ("f4", None)):
        assert describe_bound(np.dtype(dtype), op).startswith("wrong: not exactly what it must be")


def test_the_command_line_is_the_console_script():
    text = (Path(farandole.cli.__file__).parents[3] / "pyproject.toml").read_text()
    assert 'farandole = "farandole.cli:main"' in text
