"""Programs under launchers, in virtual environments that are kept in build/."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sysconfig
import textwrap
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT_S = 200  # for what takes seconds; only a failure takes so long
MADE = re.compile("RANK|WORLD|MASTER|FARANDOLE|OMPI|PMI|SLURM|TORCHELASTIC")
"""What launchers set."""


def environment_with(variables: dict[str, str]) -> dict[str, str]:
    """This process's, with nothing of a launcher but these."""
    return {name: value for name, value in os.environ.items() if not MADE.search(name)} | variables


def run(*command, **more) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=environment_with(more),
    )


def write_script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    return path


def versions() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def environment_of(name: str, *others: str) -> Path:
    """The bin folder of a virtual environment with that package, those others, and what this one has."""
    pinned = versions()
    path = ROOT / "build" / f"{name}-{pinned[name]}-{sysconfig.get_python_version()}"
    path.parent.mkdir(exist_ok=True)
    with (path.parent / f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run side by side
        if not (path / "ready").exists():
            shutil.rmtree(path, ignore_errors=True)
            venv.create(path, with_pip=True, symlinks=True)
            packages = [f"{one}=={pinned[one]}" for one in (*others, name)]
            subprocess.run([path / "bin" / "python", "-m", "pip", "install", "--quiet", *packages], check=True)
            (path / "ready").touch()
    own = Path(sysconfig.get_path("purelib"))
    site = path / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "own.pth").write_text(f"import site; site.addsitedir({str(own)!r})\n")
    return path / "bin"


def in_use(names: set[str]) -> set[str]:
    """Those that a living process has mapped: other software on this machine may come and go as it likes."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        with contextlib.suppress(OSError):
            text = maps.read_text()
            mapped |= {name for name in names if f"/dev/shm/{name}" in text}
    return mapped


def left_by_mpi() -> set[Path]:
    """Of this user, and mapped by nobody."""
    found = [path for pattern in ("sm_segment.*", "mpich_shm_*") for path in Path("/dev/shm").glob(pattern)]
    names = {path.name for path in found if path.stat().st_uid == os.geteuid()}
    return {Path("/dev/shm") / name for name in names - in_use(names)}


def mpirun(mpi: Path, n: int, *command, **more) -> subprocess.CompletedProcess:
    """Run it on ``n`` ranks; `mpi` is what the fixture of that name gives."""
    options = ["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"] if "openmpi" in str(mpi) else []
    if os.geteuid() != 0 and options:
        options.remove("--allow-run-as-root")
    environment = {"PATH": f"{mpi}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"} | more
    return run(mpi / "mpirun", *options, "-n", n, *command, **environment)
