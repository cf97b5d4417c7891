"""Several "hosts" on one machine, joined by links of a limited rate.

A host is a set of namespaces: its own network, name, processes, mounts and System V memory. So its ranks share
/dev/shm and /proc with one another and with no rank of another host. Files are those of the machine.

A switch, one more network namespace, holds a bridge and one end of each host's link. Each end sends at the rate of the
link and no faster, so that the link is limited in both directions. Nothing of it is seen in the machine's own network.

Every namespace is held by one process that reads from a pipe of ours and, in a host, is process 1. Once the pipe
closes, it ends, whether we closed it or were killed; the kernel then ends all others of that host, and takes the
namespaces with all that is in them away. So nothing has a name outside, and nothing can be left behind.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

__all__ = ["Laboratory", "UnavailableError"]

_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
"""The commands, and the packages of Debian that have them."""

_MAX_HOSTS = 250
_LIMIT_S = 20.0
"""For what takes milliseconds."""

_LEAST_BURST_BYTES = 16 << 10
_BURST_S = 0.0005
"""What a link may send at once after it was idle: little, as it comes on top of the rate."""

_QUEUE_S = 0.2
"""How much a link keeps to send it later before it drops any: a burst of several senders to one host fits."""

_HOST = """
mount -t tmpfs tmpfs /dev/shm
echo "$1" >/proc/sys/kernel/hostname
echo "$2" >/dev/shm/hosts && mount --bind /dev/shm/hosts /etc/hosts && rm /dev/shm/hosts
ip link set lo up
echo ready
exec cat
"""
_SWITCH = """
ip link add bridge type bridge
ip address add "$1/24" dev bridge
ip link set bridge up
echo ready
exec cat
"""


class UnavailableError(Exception):
    """There can be no laboratory here; the text says why, and what to do."""


class Laboratory:
    """A context manager: the hosts are there inside of it, and whatever runs on them is killed at its end.

    Attributes:
        num_hosts, rate_bits_per_s: as given.
    """

    def __init__(self, num_hosts: int, rate_bits_per_s: float = 200e6) -> None:
        """Makes nothing yet.

        Args:
            num_hosts: called host0, host1, ...; they know one another by these names.
            rate_bits_per_s: of each host's link, in each direction; what counts is Ethernet frames.

        Raises:
            ValueError: there are too few or too many hosts, or the rate makes no sense.
        """
        if not 1 <= num_hosts <= _MAX_HOSTS:
            raise ValueError(f"num_hosts is {num_hosts}; it must be in 1..{_MAX_HOSTS}")
        if not 1e5 <= rate_bits_per_s <= 1e11:
            raise ValueError(f"rate_bits_per_s is {rate_bits_per_s:g}; it must be in 1e5..1e11")
        self.num_hosts, self.rate_bits_per_s = num_hosts, rate_bits_per_s
        self._holders: list[subprocess.Popen[bytes]] = []
        """The switch's, then one per host."""
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Laboratory:
        """Make the hosts and the links.

        Raises:
            UnavailableError: rights or commands are missing.
        """
        _require_rights()
        try:
            self._hold("unshare", "--net", "--kill-child", "sh", "-ec", _SWITCH, "switch", self.switch_address)
            names = "\n".join(["127.0.0.1 localhost", *(f"{self.address(h)} host{h}" for h in range(self.num_hosts))])
            own = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
            for host in range(self.num_hosts):
                self._hold("unshare", *own, "sh", "-ec", _HOST, "host", f"host{host}", names)
                self._link(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- for those who use it ------------------------------------------------------------------------------------------

    def address(self, host: int) -> str:
        """The IPv4 address of a host on its link, eth0."""
        return f"10.213.0.{host + 1}"

    @property
    def switch_address(self) -> str:
        """Where the hosts reach what runs at the switch."""
        return "10.213.0.254"

    def enter(self, host: int, cwd: Path | None = None) -> list[str]:
        """What to put before a command to have it run on a host, in the folder ``cwd`` or in this process's."""
        pid = self._holders[1 + host].pid
        # The pid namespace is that of the holder's child; when nsenter, the parent, dies, so does the command.
        spaces = ["--target", str(pid), "--net", "--uts", "--ipc", "--mount", f"--pid=/proc/{pid}/ns/pid_for_children"]
        return ["nsenter", *spaces, "setpriv", "--pdeathsig", "KILL", "env", "-C", str(cwd or Path.cwd())]

    def enter_switch(self) -> list[str]:
        """The same for the switch, which has a network of its own and shares all else with the machine."""
        return ["nsenter", "--target", str(self._holders[0].pid), "--net"]

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host.

        Args:
            host: in 0..num_hosts - 1.
            command: program and arguments.
            cwd, env, stdout, stderr: as of `subprocess.Popen`.

        Returns:
            The process that waits for the command: it ends as the command does, and if it is killed, so is the command.
        """
        process = subprocess.Popen(
            [*self.enter(host, cwd), *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C at the terminal is for this process alone
        )
        self._started.append(process)
        return process

    def cut(self, host: int) -> None:
        """Cut a host's link, as if its cable were pulled: nothing comes through, and nobody is told."""
        self._at_switch("ip", f"link set port{host} down")

    def mend(self, host: int) -> None:
        """Join a link that was cut again."""
        self._at_switch("ip", f"link set port{host} up")

    def close(self) -> None:
        """End all that runs on the hosts, and the hosts; twice does no harm."""
        for holder in self._holders:
            for pipe in (holder.stdin, holder.stdout):
                assert pipe is not None
                pipe.close()
        limit = time.monotonic() + _LIMIT_S
        for process in [*self._started, *self._holders]:
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_LIMIT_S)
        self._started, self._holders = [], []

    # -- how it is made ------------------------------------------------------------------------------------------------

    def _hold(self, *command: str) -> None:
        """Make namespaces that are there as long as this process is."""
        pipe = subprocess.PIPE
        holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True)
        self._holders.append(holder)
        assert holder.stdout is not None
        is_ready, _, _ = select.select([holder.stdout], [], [], _LIMIT_S)
        line = holder.stdout.readline().decode(errors="replace").strip() if is_ready else "it does not answer"
        if line != "ready":
            _refuse(line)

    def _link(self, host: int) -> None:
        rate = round(self.rate_bits_per_s)
        burst_bytes = max(_LEAST_BURST_BYTES, round(rate / 8 * _BURST_S))
        limit_bytes = burst_bytes + round(rate / 8 * _QUEUE_S)
        shape = f"root tbf rate {rate}bit burst {burst_bytes}b limit {limit_bytes}b"
        port, pid = f"port{host}", self._holders[1 + host].pid
        self._at_switch("ip", f"link add {port} type veth peer name eth0 netns {pid}")
        self._at_switch("tc", f"qdisc add dev {port} {shape}")
        self._at_switch("ip", f"link set {port} master bridge up")
        _run([*self.enter(host), "tc", "-batch", "-"], f"qdisc add dev eth0 {shape}")
        address = f"address add {self.address(host)}/24 dev eth0"
        _run([*self.enter(host), "ip", "-batch", "-"], f"{address}\nlink set eth0 up")

    def _at_switch(self, program: str, lines: str) -> None:
        _run([*self.enter_switch(), program, "-batch", "-"], lines)


def _require_rights() -> None:
    missing = [command for command in _PACKAGES if shutil.which(command) is None]
    if missing:
        packages = " ".join(sorted({_PACKAGES[command] for command in missing}))
        raise UnavailableError(f"a laboratory needs {', '.join(missing)}; on Debian: apt-get install {packages}")
    if os.geteuid() != 0:
        raise UnavailableError("a laboratory needs root, as it makes networks; use sudo, or a virtual machine")


def _run(command: Sequence[str], lines: str) -> None:
    done = subprocess.run(command, input=lines.encode(), capture_output=True, timeout=_LIMIT_S)
    if done.returncode:
        _refuse(f"{lines}: {done.stderr.decode(errors='replace').strip()}")


def _refuse(reason: str) -> NoReturn:
    raise UnavailableError(
        f"{reason or 'unshare failed'}; a laboratory needs the rights to make namespaces and networks "
        f"(CAP_SYS_ADMIN and CAP_NET_ADMIN), which many containers lack"
    )
