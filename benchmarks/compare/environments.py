"""A virtual environment for each peer, made when it is first needed, with the versions that requirements/ pins."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["ROOT", "MissingError", "bin_of", "install"]

_HERE = Path(__file__).resolve().parent
ROOT = _HERE.parents[1]
"""The repository."""


class MissingError(Exception):
    """A system cannot be installed or started; the text says why."""


def bin_of(name: str) -> Path:
    """The folder of the programs of an environment; "farandole" is the repository's own .venv."""
    return (ROOT / ".venv" if name == "farandole" else _HERE / ".environments" / name) / "bin"


def install(name: str) -> None:
    """Make or update an environment; does nothing when nothing changed.

    Raises:
        MissingError: it cannot be made.
    """
    if name == "farandole":
        if not (bin_of(name) / "farandole").is_file():
            raise MissingError("farandole is not installed in .venv; run scripts/compare, which installs it")
        return
    requirements = _HERE / "requirements" / f"{name}.txt"
    folder = bin_of(name).parent
    stamp = folder / "installed"
    state = hashlib.sha256(f"{sys.version} {folder} {requirements.read_text()}".encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == state:
        return
    print(f"Installing {' '.join(requirements.read_text().split())}", file=sys.stderr, flush=True)
    # Wheels only: nobody wants to wait for an MPI to be compiled, or to measure one that was compiled by chance.
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    python = str(bin_of(name) / "python")
    for command in ([sys.executable, "-m", "venv", "--clear", str(folder)], [python, *pip, "-r", str(requirements)]):
        result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PIP_USER": "0"})
        if result.returncode:
            lines = (result.stderr or result.stdout).strip().splitlines()
            errors = [line for line in lines if line.startswith("ERROR")]
            raise MissingError(f"cannot be installed: {(errors or lines or ['no word why'])[-1]}")
    stamp.write_text(state)
