"""Jobs whose ranks are taken to be on several hosts, by FARANDOLE_HOST_ID, and so connect over TCP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 100  # for what takes seconds; only a failure takes so long


@dataclass
class Job:
    """Processes of a job, one per rank."""

    ranks: list[subprocess.Popen[str]]

    def wait(self) -> list[tuple[int, str, str]]:
        """Per rank its exit code, and what it wrote to both streams."""
        try:
            texts = [rank.communicate(timeout=LIMIT_S) for rank in self.ranks]
            return [(rank.returncode, *text) for rank, text in zip(self.ranks, texts, strict=True)]
        finally:
            self.end()

    def end(self) -> None:
        """Leave none of them behind."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
            for stream in (rank.stdin, rank.stdout, rank.stderr):
                stream.close()


def free_port() -> int:
    """That nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(hosts: Sequence[str], script: str, *arguments: str, **environment: str) -> Job:
    """Start ``script`` on a rank for each of ``hosts``, which name the host that it is on."""
    port = free_port()
    ranks = []
    for rank, host in enumerate(hosts):
        own = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "FARANDOLE_SECRET": "of this test",
            "FARANDOLE_HOST_ID": host,
            **environment,
        }
        command = [sys.executable, "-u", "-c", script, *arguments]
        ranks.append(
            subprocess.Popen(
                command,
                env=own,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=Path.cwd(),
            )
        )
    return Job(ranks)


def run(hosts: Sequence[str], script: str, *arguments: str, **environment: str) -> list[tuple[int, str, str]]:
    """As `start`, and wait for the end."""
    return start(hosts, script, *arguments, **environment).wait()


def on_all(world, body) -> list:
    """What ``body(comm)`` returns on each rank, or the error that it raises."""

    def call(comm):
        try:
            return body(comm)
        except Exception as error:
            return error

    return world.run(call)
