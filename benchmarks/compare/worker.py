"""One rank of one system: waits for the driver's word, and measures when told.

Usage: python -m benchmarks.compare.worker SYSTEM SOCKET, started by the driver as a rank of a job.

The driver sends a line of JSON to every rank of a system, and each answers with one:

    {"do": "prepare", "collective": ..., "count": ..., "dtype": ...}   allocate, run once on real data, check
    {"do": "run", "warmup": ..., "iterations": ...}                    answers when each call began and ended, in ns
    {"do": "quit"}

Between them a rank sleeps in a read of its socket, so that it takes nothing from the system that is being measured.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import sys
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.compare.systems import System, make

__all__ = ["main"]

_BLOCK = 1 << 18
_PERIOD = 1021
"""A prime: data do not repeat from chunk to chunk, and sums of them over 1000 ranks are exact in float32."""


def main() -> None:
    """Join a system and serve the driver until it says quit, or is gone."""
    name, path = sys.argv[1:]
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    threading.Thread(target=_end_with, args=(link,), daemon=True).start()
    try:
        system = make(name)
    except Exception as error:
        _send(link, {"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)
    _send(link, {"rank": system.rank, "num_ranks": system.num_ranks, "version": system.version})
    bench = _Bench(system)
    for line in link.makefile("r"):
        command = json.loads(line)
        what = command.pop("do")
        if what == "quit":
            break
        try:
            answer = bench.prepare(**command) if what == "prepare" else bench.run(**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        _send(link, answer)
    system.close()


def _end_with(link: socket.socket) -> None:
    """End this process when the driver's end of the socket closes, even if a call hangs."""
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    poll.poll()
    os._exit(1)


def _send(link: socket.socket, answer: dict[str, Any]) -> None:
    link.sendall(json.dumps(answer).encode() + b"\n")


class _Bench:
    def __init__(self, system: System) -> None:
        self.system = system
        self.call: Any = None
        self.buffers: tuple[Any, ...] = ()

    def prepare(self, collective: str, count: int, dtype: str) -> dict[str, Any]:
        """Set up a call on ``count`` elements, the whole buffer; check what it does; leave zeros to go on with."""
        system = self.system
        self.call, self.buffers = None, ()  # so that the old buffers are gone before there are new ones
        part = count // system.num_ranks
        source = system.empty(part if collective == "all_gather" else count, np.dtype(dtype))
        target = source
        if collective not in ("all_reduce", "broadcast"):
            target = system.empty(part if collective == "reduce_scatter" else count, np.dtype(dtype))
        self.buffers = (source, target)
        self.call = system.bind(collective, source, target)
        target.fill(0)
        offset = system.rank * len(source) if collective == "all_gather" else 0
        for begin in range(0, len(source), _BLOCK):
            block = source[begin : begin + _BLOCK]
            block[:] = _data(system.rank, offset + begin, len(block))
        system.barrier()
        self.call()
        wrong = sum(
            int(np.count_nonzero(target[begin : begin + _BLOCK] != _expected(system, collective, len(target), begin)))
            for begin in range(0, len(target), _BLOCK)
        )
        source.fill(0)
        target.fill(0)
        return {"wrong": wrong}

    def run(self, warmup: int, iterations: int) -> dict[str, Any]:
        """Time calls, each after a barrier."""
        call, barrier, clock = self.call, self.system.barrier, time.monotonic_ns
        starts, ends = [0] * iterations, [0] * iterations
        gc.collect()
        gc.disable()
        try:
            for _ in range(warmup):
                barrier()
                call()
            for index in range(iterations):
                barrier()
                starts[index] = clock()
                call()
                ends[index] = clock()
            barrier()  # nobody begins to write the answer while others still measure
        finally:
            gc.enable()
        return {"starts": starts, "ends": ends}


def _data(rank: int, begin: int, count: int) -> npt.NDArray[np.int64]:
    """What a rank puts in from element ``begin`` of the whole buffer on."""
    return (np.arange(begin, begin + count) * 31 + rank * 977) % _PERIOD


def _expected(system: System, collective: str, length: int, begin: int) -> npt.NDArray[np.int64]:
    """What must come out in the block that starts at element ``begin`` of the ``length`` of the output."""
    count, ranks = min(_BLOCK, length - begin), system.num_ranks
    if collective in ("broadcast", "copy"):
        return _data(system.rank if collective == "copy" else 0, begin, count)
    if collective == "all_gather":
        indices = np.arange(begin, begin + count)
        owners = indices // (length // ranks)
        return (indices * 31 + owners * 977) % _PERIOD
    offset = system.rank * length if collective == "reduce_scatter" else 0
    total: npt.NDArray[np.int64] = np.sum([_data(rank, offset + begin, count) for rank in range(ranks)], axis=0)
    return total


if __name__ == "__main__":
    main()
