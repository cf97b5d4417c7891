"""What the reports of the benchmarks share: where, when and how they were made."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from farandole.calibration import processor, usable_cores

__all__ = ["console", "machine", "print_machine", "save"]

_FILE_WIDTH = 120


def console() -> Console:
    """Of the report: as wide as the terminal, or as a line of a file."""
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if is_sized else _FILE_WIDTH)


def machine() -> dict[str, Any]:
    """Where a run begins; what is known only at its end is still to be added."""
    main = sys.modules["__main__"].__spec__
    return {
        "cpu": processor(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "load_before": os.getloadavg()[0],
        "began": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "command": shlex.join(["python", "-m", main.name.removesuffix(".__main__") if main else "?", *sys.argv[1:]]),
    }


def print_machine(to: Console, machine: dict[str, Any]) -> None:
    """Where, when and how a run was made."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    to.print(f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; {versions}", soft_wrap=True)
    to.print(
        f"load average (1 min) {machine['load_before']:.2f} before, {machine['load_after']:.2f} after, the benchmark's "
        f"own included; began {machine['began']}",
        soft_wrap=True,
    )
    to.print(machine["command"], markup=False, soft_wrap=True)


def save(result: dict[str, Any], path: Path | None) -> None:
    """Write all results as JSON, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
