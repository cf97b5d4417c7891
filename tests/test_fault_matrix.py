"""Ranks that die: every phase x kind of death x transport, in some collective; in each of them with --whole-matrix.

Survivors say who it was and, where it has made a call, what it was last in; nobody hangs, and nothing is left behind.
Prints what was found, and how long after the death at most.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest

import farandole
from farandole.store import StoreServer

PHASES = ("before init", "after init", "in small calls", "in large calls", "in background calls", "in close")
DEATHS = ("SIGKILL", "SIGSEGV", "os._exit", "exception", "SIGSTOP")
TRANSPORTS = {"shared memory": "aaa", "wire": "abc", "both": "aba"}
CALLS = {
    "all_reduce": lambda comm, x, **more: comm.all_reduce(x, **more),
    "reduce_scatter": lambda comm, x, **more: comm.reduce_scatter(x, **more),
    "all_gather": lambda comm, x, **more: comm.all_gather(x, **more),
    "broadcast": lambda comm, x, **more: comm.broadcast(x, 1, **more),
    "reduce": lambda comm, x, **more: comm.reduce(x, 1, **more),
    "gather": lambda comm, x, **more: comm.gather(x, 1, **more),
    "scatter": lambda comm, x, **more: comm.scatter(
        x if comm.rank == 1 else None, 1, out=x[: len(x) // 3].copy(), **more
    ),
    "all_to_all": lambda comm, x, **more: comm.all_to_all(x, **more),
    "barrier": lambda comm, x, **more: comm.barrier(**more),
    "messages": lambda comm, x, **more: pass_on(comm, x, **more),
}
NUM_RANKS = 3
LARGE, SMALL = 1_500_000, 300
JOIN_S = 60  # for a process that is about to end; only a failure takes so long
STOPPED_S = 0.5
MEETING_S = 2.0  # for those that come, too

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["farandole", "numpy"])


def pass_on(comm: farandole.Communicator, x: np.ndarray, **more):
    """Around a ring."""
    sent = comm.send(x, (comm.rank + 1) % comm.world_size, async_op=True)
    received = comm.recv(np.empty_like(x), (comm.rank - 1) % comm.world_size, **more)
    sent.wait()
    return received


def die(death: str, pipe) -> None:
    pipe.send(("death", time.monotonic()))
    if death == "exception":
        sys.stderr = io.StringIO()  # of this process, which ends here
        raise ZeroDivisionError
    if death == "os._exit":
        os._exit(7)
    os.kill(os.getpid(), getattr(signal, death))
    time.sleep(JOIN_S)  # a signal may come a moment later


def rank_main(
    rank: int, victim: int, case: tuple[str, str, str, str], seed: int, address: tuple[str, int], pipe
) -> None:
    """Work until a peer dies; tell the parent how that looked from here."""
    phase, death, transport, call = case
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "FARANDOLE_RENDEZVOUS": f"{address[0]}:{address[1]}",
        "FARANDOLE_SECRET": "of this test",
        "FARANDOLE_HOST_ID": TRANSPORTS[transport][rank],
    }
    delay_s = random.Random(seed).uniform(0, 0.03)
    dies = rank == victim
    try:
        if dies and phase == "before init":
            die(death, pipe)
        comm = farandole.init(timeout_s=MEETING_S if phase == "before init" else JOIN_S / 2)
        comm.barrier()
        if phase == "in close":
            if dies:
                die_from_aside(death, delay_s / 10, pipe)
            comm.close()
            pipe.send(("closed", time.monotonic()))
            return
        if dies and phase == "after init":
            die(death, pipe)
        if dies and death != "exception":
            die_from_aside(death, delay_s, pipe)
        timeout = STOPPED_S if death == "SIGSTOP" else JOIN_S / 2
        start = time.monotonic()
        x = np.ones(LARGE if phase == "in large calls" else SMALL, dtype=np.float32)
        for number in itertools.count():
            if dies and death == "exception" and time.monotonic() > start + delay_s and number:
                die(death, pipe)
            if phase == "in background calls":
                works = [CALLS[call](comm, x.copy(), async_op=True, timeout=timeout) for _ in range(3)]
                for work in works:
                    work.wait()
            else:
                CALLS[call](comm, x, timeout=timeout)
    except farandole.CommunicationError as error:
        pipe.send((type(error).__name__, str(error), time.monotonic()))


def die_from_aside(death: str, delay_s: float, pipe) -> None:
    """From another thread, whatever the first is in then."""
    threading.Timer(delay_s, die, ("os._exit" if death == "exception" else death, pipe)).start()


def run_case(case: tuple[str, str, str, str], seed: int) -> float:
    """How many seconds after the death the last survivor told of it."""
    phase, death, transport, call = case
    victim = random.Random(seed).randrange(NUM_RANKS)
    what = f"{phase}, {death} of rank {victim}, {transport}, {call}, seed {seed}"
    server = StoreServer(("127.0.0.1", 0), b"of this test")
    pipes = [context.Pipe(duplex=False) for _ in range(NUM_RANKS)]
    ranks = [
        context.Process(target=rank_main, args=(r, victim, case, seed, server.address, pipes[r][1]))
        for r in range(NUM_RANKS)
    ]
    for process in ranks:
        process.start()
    for _, sender in pipes:
        sender.close()
    try:
        survivors = [rank for rank in range(NUM_RANKS) if rank != victim]
        for rank in survivors:
            ranks[rank].join(JOIN_S)
            assert ranks[rank].exitcode == 0, f"{what}: rank {rank} {'hangs' if ranks[rank].is_alive() else 'fails'}"
        reports = {rank: drained(pipes[rank][0]) for rank in range(NUM_RANKS)}
        died = next((moment for name, moment in reports[victim] if name == "death"), None)
        for rank in survivors:
            (report,) = reports[rank]
            if phase == "in close" and report[0] == "closed":
                continue
            # in close, too: a rank may be out of the barrier before it, and die, when others are still in it
            check_report(report, phase, death, victim, f"{what}: rank {rank} says {report}")
        return max(reports[rank][0][-1] for rank in survivors) - (died or time.monotonic())
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()  # stopped, or hanging
            process.join()
        server.close()
        for receiver, _ in pipes:
            receiver.close()


def drained(pipe) -> list:
    reports = []
    with contextlib.suppress(EOFError):
        while pipe.poll():
            reports.append(pipe.recv())
    return reports


def check_report(report: tuple, phase: str, death: str, victim: int, what: str) -> None:
    kind, text, _ = report
    if phase == "before init":
        assert kind == "RendezvousError", what
        missing = text.partition("have not joined: ")[2].split(", ")
        assert str(victim) in missing, what  # on a busy machine another may be late, too
    elif death == "SIGSTOP":
        assert kind == "CollectiveTimeoutError", what
        assert f"rank {victim}" in text, what
    elif kind == "RendezvousError":  # it died while others were still on their way out of the rendezvous
        assert f"rank {victim} " in text, what
    else:
        assert kind == "PeerLostError", what
        how = "(ended|closed its communicator)" if death == "exception" else "ended"  # it may be in time to close
        last = "(its last call was |no call of it is known)" if "host" in text else "its last call was "
        assert re.match(f"rank {victim} (.on host .*. )?{how} while others needed it; {last}", text), what


def cases(whole: bool) -> list[tuple[str, str, str, str]]:
    cells = list(itertools.product(PHASES, DEATHS, TRANSPORTS))
    if whole:
        return [(*cell, call) for cell in cells for call in CALLS]
    return [(*cell, call) for cell, call in zip(cells, itertools.cycle(CALLS), strict=False)]


@pytest.mark.parametrize("phase", PHASES)
def test_whoever_dies_is_named_by_all_and_nobody_hangs(phase, pytestconfig, capsys):
    mine = [case for case in cases(pytestconfig.getoption("--whole-matrix")) if case[0] == phase]
    latencies_s = [run_case(case, seed) for seed, case in enumerate(mine)]
    with capsys.disabled():
        told = [latency for latency, case in zip(latencies_s, mine, strict=True) if case[1] != "SIGSTOP"]
        print(
            f"\n{phase}: {len(mine)} deaths, all told and named, none hung; at most {max(told):.2f} s after the death "
            f"(stopped ones: at the timeout)"
        )
