"""What ``farandole bench`` shows: machine and call, then a row per size as it is measured; or JSON, or CSV."""

from __future__ import annotations

import csv
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from farandole.algorithms import ROOTED
from farandole.calibration import processor, usable_cores
from farandole.cli.bench_check import describe_bound, numpy_dtype
from farandole.cli.bench_settings import Measurement, Row, Settings
from farandole.collectives import is_reducing
from farandole.cost_model import bus_factor
from farandole.dtypes import dtype_named

__all__ = ["Report"]

_FILE_WIDTH = 160
"""Columns where the output is no terminal."""


@dataclass
class Report:
    """What the user sees of a run, line by line.

    Attributes:
        settings, ranks: of the run.
        form: "table", "json" or "csv".
        rows: measured so far.
    """

    settings: Settings
    ranks: int
    form: str
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
        self.console = Console(highlight=False, width=None if is_sized else _FILE_WIDTH)
        self.table = _Layout(self.settings, self.ranks, self.console.width)
        self.csv = csv.DictWriter(sys.stdout, _CSV_COLUMNS, lineterminator="\n")
        errors = Console(stderr=True)
        # Redrawn only between rows: a spinner would take a core from the ranks ten times a second.
        self.progress = Progress(
            TextColumn("measuring {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=errors,
            transient=True,
            auto_refresh=False,
            disable=not errors.is_terminal,
        )
        self.task = self.progress.add_task("", total=len(self.settings.counts))

    @property
    def num_wrong(self) -> int:
        """Wrong elements in all rows."""
        forms = [form for row in self.rows for form in (row.out_of_place, row.in_place)]
        return sum(form.num_wrong or 0 for form in forms if form)

    @property
    def _is_checked(self) -> bool:
        return self.settings.check and self.settings.collective != "barrier"

    def __enter__(self) -> Report:
        if self.form == "csv":
            self.csv.writeheader()
        if self.form == "table":
            for line in _header(self.settings, self.ranks):
                self.console.print(line)
            self.console.print(self.table.header())
        self._show_progress()
        return self

    def take_line(self, rank: int, stream: str, line: bytes) -> None:
        """Take a line that a rank printed: a row from rank 0, or something that is passed on."""
        if rank != 0 or stream != "stdout" or not line.startswith(b"{"):
            print(f"[{rank}] {line.decode(errors='replace')}", file=sys.stderr)
            return
        row = _row_from(json.loads(line))
        self.rows.append(row)
        self.progress.stop()
        if self.form == "table":
            self.console.print(self.table.rows(row))
        if self.form == "csv":
            self.csv.writerows(_records(self.settings, self.ranks, row))
            sys.stdout.flush()
        if len(self.rows) < len(self.settings.counts):
            self._show_progress()

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        if self.form == "json":
            print(json.dumps(_document(self.settings, self.ranks, self.rows), indent=2))
        elif self.form == "table" and len(self.rows) == len(self.settings.counts) and self._is_checked:
            style = "bold red" if self.num_wrong else "green"
            self.console.print(Text(f"# {self.num_wrong or 'no'} wrong elements", style=style))

    def _show_progress(self) -> None:
        size = self.settings.counts[len(self.rows)] * dtype_named(self.settings.dtype).itemsize
        self.progress.update(self.task, description=f"{size:,} bytes", completed=len(self.rows))
        self.progress.start()
        self.progress.refresh()


def _row_from(fields: dict[str, Any]) -> Row:
    forms = {name: Measurement(**fields[name]) if fields[name] else None for name in ("out_of_place", "in_place")}
    return Row(fields["count"], fields["algorithm"], fields["transport"], **forms)


def _header(settings: Settings, ranks: int) -> Iterator[Text]:
    machine = _machine()
    versions = ", ".join(f"{name} {number}" for name, number in _versions().items())
    yield Text(f"# {machine['cpu']}, {machine['cores']} cores usable; {machine['system']}")
    yield Text(f"# {versions}")
    yield Text(f"# {_command()}")
    what = f"{settings.collective}, {ranks} ranks"
    if settings.collective != "barrier":
        what += f", {settings.dtype}"
    if _redop(settings) != "-":
        what += f", {settings.op}"
    if _root(settings) != "-":
        what += f", root {settings.root}"
    yield Text(
        f"# {what}; {settings.iterations} iterations after {settings.warmup} of warmup"
        f"{', caches filled with other data before each' if settings.cold else ''}"
    )
    yield Text("# time, p99: us; algbw, busbw: GB/s; busbw is a normalised figure, see --help")
    if settings.collective != "barrier":
        op = settings.op if is_reducing(settings.collective) else None
        bound = describe_bound(numpy_dtype(settings.dtype), op)
        yield Text(f"# {bound}" if settings.check else "# results are not checked")
    if ranks == 1:
        yield Text(
            "# NOTE: N = 1. Nothing travels between ranks: these are the times of local copies, and say nothing of "
            "communication.",
            style="bold yellow",
        )
    elif ranks > machine["cores"]:
        yield Text(
            f"# NOTE: {ranks} ranks share {machine['cores']} cores, so the times include waiting for a core.",
            style="bold yellow",
        )


def _machine() -> dict[str, Any]:
    return {
        "cpu": processor(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _versions() -> dict[str, str]:
    return {"farandole": version("farandole"), "python": platform.python_version(), "numpy": version("numpy")}


def _command() -> str:
    return shlex.join(["farandole", *sys.argv[1:]])


def _redop(settings: Settings) -> str:
    return settings.op if is_reducing(settings.collective) and settings.collective != "barrier" else "-"


def _root(settings: Settings) -> str:
    return str(settings.root) if settings.collective in ROOTED else "-"


def _bandwidths(settings: Settings, ranks: int, count: int, seconds: float) -> tuple[float, float]:
    """algbw and busbw, in GB/s."""
    algbw = count * dtype_named(settings.dtype).itemsize / seconds / 1e9
    return algbw, algbw * bus_factor(settings.collective, ranks)


def _document(settings: Settings, ranks: int, rows: list[Row]) -> dict[str, Any]:
    itemsize = dtype_named(settings.dtype).itemsize

    def form(row: Row, measured: Measurement | None) -> dict[str, Any] | None:
        if measured is None:
            return None
        algbw, busbw = _bandwidths(settings, ranks, row.count, measured.median_s)
        return asdict(measured) | {"algbw_bytes_per_s": algbw * 1e9, "busbw_bytes_per_s": busbw * 1e9}

    asked = asdict(settings)
    asked.pop("counts")
    return {
        "machine": _machine(),
        "versions": _versions(),
        "command": _command(),
        "world_size": ranks,
        "settings": asked,
        "busbw_factor": bus_factor(settings.collective, ranks),
        "rows": [
            {
                "size_bytes": row.count * itemsize,
                "count": row.count,
                "algorithm": row.algorithm,
                "transport": row.transport,
                "out_of_place": form(row, row.out_of_place),
                "in_place": form(row, row.in_place),
            }
            for row in rows
        ],
    }


_CSV_COLUMNS = (
    "collective",
    "ranks",
    "size_bytes",
    "count",
    "dtype",
    "op",
    "root",
    "algorithm",
    "transport",
    "place",
    "median_s",
    "p99_s",
    "algbw_bytes_per_s",
    "busbw_bytes_per_s",
    "num_wrong",
)


def _records(settings: Settings, ranks: int, row: Row) -> Iterator[dict[str, Any]]:
    """The lines of a row in CSV; an empty field is one that does not apply."""
    for place, measured in (("out_of_place", row.out_of_place), ("in_place", row.in_place)):
        if measured is None:
            continue
        algbw, busbw = _bandwidths(settings, ranks, row.count, measured.median_s)
        yield {
            "collective": settings.collective,
            "ranks": ranks,
            "size_bytes": row.count * dtype_named(settings.dtype).itemsize,
            "count": row.count,
            "dtype": settings.dtype,
            "op": _redop(settings).strip("-"),
            "root": _root(settings).strip("-"),
            "algorithm": row.algorithm,
            "transport": row.transport,
            "place": place,
            "algbw_bytes_per_s": algbw * 1e9,
            "busbw_bytes_per_s": busbw * 1e9,
            **asdict(measured),
        }


class _Layout:
    """Rows of a table that is printed while it is measured, so every column has a fixed width.

    Where the terminal is wide, out-of-place and in-place stand side by side as in nccl-tests; where it is not, below
    one another, and what is the same in all rows is left to the header.
    """

    _FORM = (("time", 9), ("p99", 9), ("algbw", 7), ("busbw", 7), ("#wrong", 6))

    def __init__(self, settings: Settings, ranks: int, width: int) -> None:
        self.settings = settings
        self.ranks = ranks
        algorithm = 13 if settings.algorithm is None else max(9, len(settings.algorithm.rpartition(":")[2]))
        size = max(7, len(str(max(settings.counts) * dtype_named(settings.dtype).itemsize)))
        count = max(5, len(str(max(settings.counts))))
        type_width = max(4, len(settings.dtype))
        fixed = [
            ("size(B)", size),
            ("count", count),
            ("type", type_width),
            ("redop", 5),
            ("root", 4),
            ("algorithm", algorithm),
            ("transport", 9),
        ]
        self.wide = sum(w + 1 for _, w in (*fixed, *self._FORM, *self._FORM)) + 4 <= width
        if self.wide:
            self.columns = [*fixed, ("", 1), *self._FORM, ("", 1), *self._FORM]
        else:
            room = width - sum(w + 1 for _, w in (("", size), ("", 5), *self._FORM)) - 1
            algorithm = min(algorithm, room)
            left = [("size(B)", size), ("count", count)] if count + 1 + algorithm <= room else [("size(B)", size)]
            self.columns = [*left, ("algorithm", algorithm), ("place", 5), *self._FORM]

    def header(self) -> RenderableType:
        """The names of the columns."""
        names = self._table()
        names.add_row(*[name for name, _ in self.columns], style="bold")
        if not self.wide:
            return names
        form_width = sum(width + 1 for _, width in self._FORM)
        indent = sum(width + 1 for _, width in self.columns) - 2 * form_width - 2
        titles = " " * indent + "out-of-place".center(form_width) + "  " + "in-place".center(form_width)
        return Group(Text(titles.rstrip(), style="bold"), names)

    def rows(self, row: Row) -> Table:
        """One size."""
        table = self._table()
        size = str(row.count * dtype_named(self.settings.dtype).itemsize)
        if self.wide:
            fixed = [
                size,
                str(row.count),
                self.settings.dtype,
                _redop(self.settings),
                _root(self.settings),
                row.algorithm,
                row.transport,
            ]
            table.add_row(*fixed, "", *self._form(row, row.out_of_place), "", *self._form(row, row.in_place))
            return table
        start = [size, str(row.count)] if "count" in dict(self.columns) else [size]
        for place, measured in (("out", row.out_of_place), ("in", row.in_place)):
            if measured is not None:
                table.add_row(*start, row.algorithm, place, *self._form(row, measured))
                start = [""] * len(start)
        return table

    def _form(self, row: Row, measured: Measurement | None) -> list[str | Text]:
        if measured is None:
            return ["-"] * len(self._FORM)
        bandwidths = _bandwidths(self.settings, self.ranks, row.count, measured.median_s)
        cells: list[str | Text] = [_digits(measured.median_s * 1e6), _digits(measured.p99_s * 1e6)]
        cells += ["-", "-"] if self.settings.collective == "barrier" else [f"{value:.2f}" for value in bandwidths]
        wrong = measured.num_wrong
        return [*cells, "-" if wrong is None else Text(str(wrong), style="bold red" if wrong else "")]

    def _table(self) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
        for name, width in self.columns:
            left = name in ("algorithm", "transport", "type", "place")
            table.add_column(justify="left" if left else "right", width=width, no_wrap=True, overflow="ellipsis")
        return table


def _digits(number: float) -> str:
    """Four digits or more: 3.271, 32.71, 327.1, 32712."""
    return f"{number:.{max(0, 3 - len(str(int(number))) + 1)}f}" if number < 1000 else f"{number:.0f}"
