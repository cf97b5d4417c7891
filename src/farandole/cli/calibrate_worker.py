"""One rank of ``farandole calibrate``: times a few calls; rank 0 prints their seconds as one JSON object.

Usage: python -m farandole.cli.calibrate_worker NAME..., as a rank of a job; each NAME is one of
`farandole.cli.calibrate.SAMPLES`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import farandole
from farandole.cli.calibrate import SAMPLES
from farandole.communicator import Communicator

__all__ = ["main"]

_BATCHES = 100
_BATCH_S = 0.001  # short, so that some are disturbed by nothing


def main() -> None:
    """Time the samples that the command line names."""
    with farandole.init() as communicator:
        seconds = {name: _time(communicator, _call(communicator, *SAMPLES[name])) for name in sys.argv[1:]}
        if communicator.rank == 0:
            print(json.dumps(seconds), flush=True)


def _call(communicator: Communicator, collective: str, algorithm: str, nbytes: int) -> Callable[[], Any]:
    whole = np.zeros(nbytes // 4, dtype=np.float32)
    if collective == "all_gather":
        part = np.zeros(len(whole) // communicator.world_size, dtype=np.float32)
        return lambda: communicator.all_gather(part, out=whole, algorithm=algorithm)
    method = getattr(communicator, collective)
    return lambda: method(whole, algorithm=algorithm)


def _time(communicator: Communicator, call: Callable[[], Any]) -> float:
    """Seconds per call, in the batch that was disturbed least."""
    times = np.empty(_BATCHES)
    num_calls = np.array([1])
    call()
    start = time.perf_counter()
    call()
    num_calls[0] = max(1, min(2000, int(_BATCH_S / (time.perf_counter() - start))))
    communicator.broadcast(num_calls)
    for batch in range(_BATCHES):
        communicator.barrier()
        start = time.perf_counter()
        for _ in range(num_calls[0]):
            call()
        times[batch] = (time.perf_counter() - start) / num_calls[0]
    communicator.all_reduce(times, "max")
    return float(times.min())


if __name__ == "__main__":
    main()
