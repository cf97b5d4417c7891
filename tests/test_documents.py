"""The documents keep their word: examples run, outputs are real, links lead somewhere, and the table is complete.

In the documents, a comment ``<!-- file: NAME -->`` before a block of Python makes it a file that later commands and
blocks find; ``<!-- file: NEW, from OLD: A -> B -->`` makes one from another by replacing A. A block ``output`` is what
the block of Python before it prints. In a block ``console``, each line with ``$`` is a command, and what follows is its
output, where ``...`` stands for lines left out. Times are not compared.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest

from farandole.algorithms import ALGORITHMS, HIERARCHICAL, build
from farandole.topology import Topology

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"<!-- file: ([\w.]+)(?:, from ([\w.]+): (.+?) -> (.+?))? -->")
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| (.+?) \| (.+?) \|$", re.MULTILINE)
TIME = re.compile(r"\s*\d+(\.\d+)? m?s\b")

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


class Block(NamedTuple):
    """A fenced block: its language, its text, and the match of the FILE comment before it, if there is one."""

    language: str
    text: str
    file: re.Match[str] | None


def blocks_of(document: Path) -> list[Block]:
    text = document.read_text()
    found = []
    for fence in FENCE.finditer(text):
        comment = text[: fence.start()].rstrip().rpartition("\n")[2]
        found.append(Block(fence[1], fence[2], FILE.fullmatch(comment)))
    return found


def lines_of(text: str) -> list[str]:
    """Without times, blanks at the ends of lines, and blank lines at the ends."""
    return [TIME.sub(" TIME", line).rstrip() for line in text.strip("\n").splitlines()]


def same_but_for_gaps(shown: list[str], real: list[str]) -> bool:
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else re.escape(line + "\n") for line in shown)
    return re.fullmatch(pattern, "".join(line + "\n" for line in real)) is not None


def run_command(command: str, folder: Path) -> str:
    program, *arguments = command.split()
    assert program == "farandole", f"{command}: only farandole is run here"
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "farandole", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def commands_of(block: Block) -> list[tuple[str, str]]:
    """(command, output) for each command of a console block."""
    return [
        (command, output)
        for command, _, output in (part.partition("\n") for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE))
        if command
    ]


@every_document
def test_examples_run_and_print_what_is_shown(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "example"}
    printed = ""
    for block in blocks_of(document):
        if block.file and block.file[2]:
            name, source, old, new = block.file.groups()
            original = (tmp_path / source).read_text()
            assert old in original
            (tmp_path / name).write_text(original.replace(old, new))
        if block.language == "python" and block.file:
            (tmp_path / block.file[1]).write_text(block.text)
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block.text, f"{document.name}, a block", "exec"), namespace)
            printed = output.getvalue()
        elif block.language == "output":
            assert lines_of(printed) == lines_of(block.text)
        elif block.language == "console":
            for command, shown in commands_of(block):
                real = run_command(command, tmp_path)
                assert same_but_for_gaps(lines_of(shown), lines_of(real)), f"$ {command}\n{real}"
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


@every_document
def test_links_lead_to_files_and_headings(document: Path) -> None:
    text = FENCE.sub("", document.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, heading = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.is_file(), f"{document.name} links to {target}"
        if heading:
            assert heading in anchors_of(path), f"{document.name} links to {target}"


def anchors_of(document: Path) -> set[str]:
    """The headings of a document, as they are named in links."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_document
def test_scripts_and_sources_that_are_named_exist(document: Path) -> None:
    for name in re.findall(r"`((?:scripts|tests|src|native|docs|examples)/[\w./]+)", document.read_text()):
        assert (ROOT / name).exists(), f"{document.name} names {name}"


# --- The table of algorithms ------------------------------------------------------------------------------------------


def table() -> dict[tuple[str, str], tuple[str, str]]:
    """(collective, algorithm) -> (rounds, sent) as README.md has them."""
    rows = ROW.findall((ROOT / "README.md").read_text())
    found = {(collective, name): (rounds, sent) for collective, name, rounds, sent in rows}
    assert len(found) == len(rows), "a row is there twice"
    return found


def test_the_tables_name_every_algorithm_and_no_other() -> None:
    pairs = [(collective, name) for collective in ALGORITHMS for name in ALGORITHMS[collective]]
    assert list(table()) == sorted(pairs, key=lambda pair: pair[1] in HIERARCHICAL)


def evaluated(formula: str, world_size: int) -> tuple[Fraction, bool]:
    """A formula of the table in units of S, and whether it is only an upper bound."""
    power = 1 << (world_size.bit_length() - 1)
    first, has_cases, other = formula.partition(", else ")
    if has_cases:
        first, _, condition = first.partition(" if ")
        formula = first if {"N = P": world_size == power, "N > 2": world_size > 2}[condition] else other
    bound = formula.removeprefix("≤ ")
    floor, ceil = world_size.bit_length() - 1, (world_size - 1).bit_length()
    height = ceil if world_size % 2 == 0 else 1 + (world_size - 2).bit_length()
    for name, meaning in (("⌈log2 N⌉", ceil), ("⌊log2 N⌋", floor), ("log2 N", floor)):
        bound = bound.replace(name, str(meaning))
    bound = re.sub(r"(?<=[\d)])\(", "*(", bound.replace("·", "*"))
    names = {
        "N": Fraction(world_size),
        "P": Fraction(power),
        "S": Fraction(1),
        "h": height,
        "B": sum(number.bit_count() for number in range(world_size)),
    }
    return Fraction(eval(bound, {"__builtins__": {}}, names)), bound != formula and formula.startswith("≤")


def sent_by_the_busiest(topology: Topology, collective: str, name: str) -> tuple[int, Fraction]:
    """Rounds, and what the host that sends most sends to others, in units of S."""
    schedule = build(collective, name, topology.world_size, topology=topology)
    ends = [(topology.host_of[transfer.src], topology.host_of[transfer.dst]) for transfer in schedule]
    sources = [src for src, dst in ends if src != dst]
    most = max(sources.count(host) for host in range(topology.num_hosts))
    rounds = len({transfer.step for transfer in schedule if transfer.src != transfer.dst})
    return rounds, Fraction(most, schedule.num_chunks)


@pytest.mark.parametrize("pair", [pair for pair in table() if pair[1] in HIERARCHICAL], ids="-".join)
def test_the_formulas_of_the_table_of_hosts_are_those_of_the_schedules(pair: tuple[str, str]) -> None:
    for hosts in [2, 3, 4, 5, 6, 7, 8, 9]:
        for ranks in (2, 3, 5):
            rounds, sent = (text.replace("⌈log2 R⌉", str((ranks - 1).bit_length())) for text in table()[pair])
            real = sent_by_the_busiest(Topology.of_hosts(r % hosts for r in range(hosts * ranks)), *pair)
            shown = [evaluated(formula.replace("H", "N"), hosts)[0] for formula in (rounds, sent)]
            assert shown == list(real), (hosts, ranks)


@pytest.mark.parametrize("pair", [pair for pair in table() if pair[1] not in HIERARCHICAL], ids="-".join)
def test_the_formulas_of_the_table_are_those_of_the_schedules(pair: tuple[str, str]) -> None:
    rounds, sent = table()[pair]
    for world_size in [2, 3, 4, 5, 6, 7, 8, 9, 16]:
        real_rounds, real_sent = sent_by_the_busiest(Topology.of_hosts(range(world_size)), *pair)
        assert evaluated(rounds, world_size) == (real_rounds, False)
        if sent == "no data":
            assert pair[0] == "barrier"
            continue
        shown, is_bound = evaluated(sent, world_size)
        assert real_sent <= shown if is_bound else real_sent == shown, world_size


# --- The messages -----------------------------------------------------------------------------------------------------

GOES_WRONG = """
import os, time
import numpy as np
import farandole

def wait_until(condition):
    while not condition():
        time.sleep(0.001)

def are_in(ranks, collective_number):
    return all(comm._runner._engine.calls()[rank][0] == collective_number for rank in ranks)

def show(error):
    if comm.rank == 0:
        print(f"{type(error).__module__}.{type(error).__name__}: {error}\\n")

eight, seven = np.ones(8, "float32"), np.ones(7, "float32")
with farandole.init() as comm:
    comm.all_reduce(eight)
    try:
        if comm.rank == 1:
            wait_until(lambda: are_in([0, 2], 2))
        comm.all_reduce(seven if comm.rank == 1 else eight)
    except farandole.CollectiveMismatchError as error:
        show(error)
with farandole.init() as comm:
    comm.all_reduce(eight)
    try:
        if comm.rank == 0:
            wait_until(lambda: are_in([1], 2))
        if comm.rank == 2:
            wait_until(lambda: comm.aborted)
        comm.all_reduce(eight, timeout=1 if comm.rank == 0 else 60)
    except farandole.CollectiveTimeoutError as error:
        show(error)
with farandole.init() as comm:
    comm.all_reduce(eight)
    if comm.rank == 1:
        wait_until(lambda: are_in([0, 2], 2))
        os._exit(0)  # not killed: then the launcher would end the others before they can tell
    try:
        comm.all_reduce(eight)
    except farandole.PeerLostError as error:
        show(error)
"""


def test_the_errors_that_the_readme_quotes_are_those_that_ranks_raise(tmp_path: Path) -> None:
    quoted = [block.text for block in blocks_of(ROOT / "README.md") if block.text.startswith("farandole.errors.")]
    (tmp_path / "goes_wrong.py").write_text(GOES_WRONG)
    raised = run_command("farandole run -n 3 goes_wrong.py", tmp_path)
    first_found = re.compile(r"rank \d's was")  # whoever looks first
    assert first_found.sub("", raised).split("\n\n")[:-1] == [first_found.sub("", text).strip() for text in quoted]
