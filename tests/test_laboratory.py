"""The laboratory of the benchmarks: its hosts are apart, its links are limited, and nothing of it is left."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.lab import laboratory as module
from benchmarks.lab.laboratory import Laboratory, UnavailableError
from benchmarks.lab.probe import probe

ROOT = Path(__file__).parent.parent
LIMIT_S = 60  # for what takes less than a second
NAMESPACES = ("net", "uts", "ipc", "mnt", "pid")
RATE = 50e6


def seen_here() -> set[str]:
    """What a laboratory could leave behind: namespaces that a process is in, network devices and mounts."""
    found = {path.name for path in Path("/sys/class/net").iterdir()}
    found |= set(Path("/proc/self/mounts").read_text().splitlines())
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found |= {str((process / "ns" / name).readlink()) for name in NAMESPACES}
    return found


@pytest.fixture(scope="module")
def hosts():
    """A laboratory of two hosts, and afterwards the proof that it is gone."""
    before = seen_here()
    try:
        with Laboratory(2, RATE) as made:
            inside = seen_here() - before
            assert len(inside) >= len(NAMESPACES) * 2 + 1
            yield made
    except UnavailableError as error:
        pytest.skip(str(error))
    assert not inside & seen_here(), "the laboratory left something behind"


def output(hosts: Laboratory, host: int, script: str) -> str:
    process = hosts.start(host, ["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return process.communicate(timeout=LIMIT_S)[0].decode()


def test_each_host_has_a_name_and_an_address(hosts):
    assert [output(hosts, host, "uname -n") for host in range(2)] == ["host0\n", "host1\n"]
    assert hosts.address(1) in output(hosts, 0, "getent hosts host1")


def test_hosts_share_no_memory(hosts):
    output(hosts, 0, "echo 0 >/dev/shm/of_host0")
    assert output(hosts, 0, "cd /dev/shm; echo *") == "of_host0\n"
    assert output(hosts, 1, "cd /dev/shm; echo *") == "*\n"
    assert not Path("/dev/shm/of_host0").exists()


def test_a_host_sees_its_own_processes_alone(hosts):
    """Whoever cannot see a process cannot open what it has open."""
    script = "exec 9</etc/passwd; echo ready; exec sleep 100"
    sleeper = hosts.start(0, ["sh", "-c", script], stdout=subprocess.PIPE)
    try:
        assert sleeper.stdout.readline() == b"ready\n"
        look = 'for fd in /proc/[0-9]*/fd/9; do readlink "$fd"; done; exit 0'
        assert output(hosts, 0, look) == "/etc/passwd\n"
        assert output(hosts, 1, look) == ""
    finally:
        sleeper.kill()
        sleeper.communicate(timeout=LIMIT_S)
    assert output(hosts, 0, look) == "", "the command goes on without the process that waits for it"


def test_a_command_ends_as_what_waits_for_it(hosts):
    for script, code in (("exit 3", 3), ("kill -KILL $$", -signal.SIGKILL)):
        assert hosts.start(1, ["sh", "-c", script]).wait(LIMIT_S) == code


def test_links_are_limited(hosts):
    """By much more than clocks and a burst could make of it, and not to nothing."""
    for rate in probe(hosts):
        assert RATE / 50 < rate < 1.02 * RATE


def test_a_link_can_be_cut_and_mended(hosts):
    code = (
        "import socket; server = socket.create_server(('', 5002)); print('ready', flush=True)\n"
        "link, _ = server.accept(); print(link.recv(9), flush=True); print(link.recv(9), flush=True)"
    )
    server = hosts.start(1, [sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert server.stdout.readline() == b"ready\n"
    code = (
        f"import socket, sys; link = socket.create_connection(({hosts.address(1)!r}, 5002)); link.sendall(b'one')\n"
        "print('ready', flush=True); sys.stdin.readline(); link.sendall(b'two')"
    )
    client = subprocess.Popen(
        [*hosts.enter(0), sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdout.readline() == b"ready\n"
    assert server.stdout.readline() == b"b'one'\n"
    hosts.cut(1)
    client.communicate(b"go on\n", timeout=LIMIT_S)
    time.sleep(0.5)
    assert server.poll() is None, "it got a message through a link that was cut"
    hosts.mend(1)
    assert server.communicate(timeout=LIMIT_S)[0] == b"b'two'\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_one_that_is_killed(hosts, number):
    before = seen_here()
    code = (
        "import time; from benchmarks.lab.laboratory import Laboratory\n"
        "with Laboratory(2) as hosts:\n"
        "    hosts.start(0, ['sleep', '1000']); hosts.start(1, ['sh', '-c', 'sleep 1000 & sleep 1000'])\n"
        "    print('ready', flush=True); time.sleep(1000)"
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=pipe, stderr=subprocess.DEVNULL)
    assert process.stdout.readline() == b"ready\n"
    inside = seen_here() - before
    assert inside
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    limit = time.monotonic() + LIMIT_S
    while inside & seen_here():
        assert time.monotonic() < limit, "a laboratory that was killed left something behind"
        time.sleep(0.01)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda command: None if command in ("tc", "unshare") else command)
    with (
        pytest.raises(UnavailableError, match="needs tc, unshare; on Debian: apt-get install iproute2 util-linux"),
        Laboratory(2),
    ):
        pass
    monkeypatch.undo()
    monkeypatch.setattr(module.shutil, "which", lambda command: command)
    monkeypatch.setattr(module.os, "geteuid", lambda: 1000)
    with pytest.raises(UnavailableError, match="a laboratory needs root"), Laboratory(2):
        pass


def test_rights_that_are_missing_are_named(hosts):
    """As in a container whose root may not do all."""
    code = "from benchmarks.lab.laboratory import Laboratory\nwith Laboratory(2): pass"
    command = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert "UnavailableError: unshare: unshare failed: Operation not permitted; a laboratory needs the" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "num_hosts is 0; it must be in 1"), ((2, 5.0), "rate_bits_per_s is 5; it must be in")],
)
def test_a_laboratory_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Laboratory(*arguments)
