"""What starts the ranks of each system on the hosts of a laboratory."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from pathlib import Path

from benchmarks.compare.environments import ROOT, bin_of, install
from benchmarks.compare.jobs import WORKER, Command
from benchmarks.lab.laboratory import Laboratory

__all__ = ["ORDERS", "SYSTEMS", "commands_of"]

SYSTEMS = ("farandole", "gloo", "openmpi")
"""The first two in the Python that runs this, the last in an environment that benchmarks.compare makes."""

ORDERS = ("packed", "cyclic")
"""Ranks in a row on one host, or dealt to the hosts in turn."""

_PORT = "29500"  # the laboratory's network has nobody else in it


def commands_of(system: str, laboratory: Laboratory, ranks_per_host: int, order: str, folder: Path) -> list[Command]:
    """What starts all ranks of a system.

    Args:
        system: one of `SYSTEMS`.
        laboratory: whose hosts get as many ranks each.
        ranks_per_host: how many.
        order: one of `ORDERS`.
        folder: for a file that mpirun needs.

    Raises:
        MissingError: it cannot be installed.
    """
    if system == "openmpi":
        return [_mpirun(laboratory, ranks_per_host, order, folder)]
    num_hosts = laboratory.num_hosts
    num_ranks = num_hosts * ranks_per_host
    job = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": laboratory.address(0),
        "MASTER_PORT": _PORT,
        "FARANDOLE_SECRET": secrets.token_hex(16),
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    hosts = [rank // ranks_per_host if order == "packed" else rank % num_hosts for rank in range(num_ranks)]
    return [
        ([*laboratory.enter(host, ROOT), sys.executable, "-m", WORKER], {**job, "RANK": str(rank)})
        for rank, host in enumerate(hosts)
    ]


def _mpirun(laboratory: Laboratory, ranks_per_host: int, order: str, folder: Path) -> Command:
    """mpirun at the switch, so that every host is a remote one; in place of ssh it has a script that enters it."""
    install("openmpi")
    hosts = range(laboratory.num_hosts)
    entrances = "".join(f'host{host}) exec {shlex.join(laboratory.enter(host))} sh -c "$*";;\n' for host in hosts)
    agent = folder / "enter"
    agent.write_text(f'#!/bin/sh\nhost=$1\nshift\ncase "$host" in\n{entrances}esac\nexit 1\n')
    agent.chmod(0o700)
    bin_folder = bin_of("openmpi")
    map_by = "slot" if order == "packed" else "node"
    options = {
        "--host": ",".join(f"host{host}:{ranks_per_host}" for host in hosts),
        # The hosts share the machine's cores: nobody may have one for itself, and who waits must let others run.
        "--map-by": f"{map_by}:OVERSUBSCRIBE",
        "--bind-to": "none",
    }
    words = [word for option in options.items() for word in option]
    command = [*laboratory.enter_switch(), str(bin_folder / "mpirun"), "--allow-run-as-root", *words]
    num_ranks = laboratory.num_hosts * ranks_per_host
    return [*command, "-n", str(num_ranks), str(bin_folder / "python"), "-m", WORKER], {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PRTE_MCA_plm_ssh_agent": str(agent),
        "OMPI_MCA_btl_tcp_if_include": "eth0",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
