"""How large buckets should be: what a backward would have had to wait for, by the time that its gradients were there.

A sum of b bytes takes latency + b / bandwidth seconds, one after the other (the alpha-beta model of
`farandole.cost_model`). Large buckets start late, and the last one cannot be hidden; each small one costs the latency.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

__all__ = ["CANDIDATES_BYTES", "DEFAULT_BYTES", "FIRST_BYTES", "Link", "best_bucket_bytes", "measure_link"]

DEFAULT_BYTES = 25 << 20
FIRST_BYTES = 1 << 20
"""The first bucket is no larger, so that something travels soon."""

CANDIDATES_BYTES = tuple(1 << exponent for exponent in range(18, 29))

_SMALL, _LARGE = 1 << 12, 1 << 22
_REPETITIONS = 5


class Link(NamedTuple):
    """What an all_reduce costs.

    Attributes:
        latency_s: of any.
        bytes_per_s: of the tensor.
    """

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: int) -> float:
        """Of one all_reduce."""
        return self.latency_s + num_bytes / self.bytes_per_s


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Time a small and a larger all_reduce; all ranks call this. The slowest rank counts."""
    seconds = torch.tensor([_median_s(size, group, device) for size in (_SMALL, _LARGE)], device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    small_s, large_s = seconds.tolist()
    return Link(small_s, (_LARGE - _SMALL) / max(large_s - small_s, 1e-9))


def _median_s(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> float:
    tensor = torch.zeros(num_bytes // 4, device=device)
    taken = []
    for _ in range(_REPETITIONS + 1):
        begun = time.perf_counter()
        dist.all_reduce(tensor, group=group, async_op=True).wait()  # as in backward, by a thread that must wake up
        tensor[0].item()  # a device would go on without waiting
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])


def exposed_s(sizes_bytes: Sequence[int], ready_s: Sequence[float], bucket_bytes: int, link: Link) -> float:
    """How long after the last gradient the last sum is there. Both sequences are per parameter, in order."""
    end, filled, limit = 0.0, 0, min(bucket_bytes, FIRST_BYTES)
    for size, ready in zip(sizes_bytes, ready_s, strict=True):
        filled += size
        if filled >= limit:
            end = max(end, ready) + link.seconds(filled)
            filled, limit = 0, bucket_bytes
    last = max(ready_s, default=0.0)
    if filled:
        end = max(end, last) + link.seconds(filled)
    return end - last


def best_bucket_bytes(sizes_bytes: Sequence[int], ready_s: Sequence[float], link: Link) -> int:
    """The candidate that leaves least to wait for; of equally good ones, to 1 %, the largest."""
    exposed = {size: exposed_s(sizes_bytes, ready_s, size, link) for size in CANDIDATES_BYTES}
    least = min(exposed.values())
    return max(size for size, seconds in exposed.items() if seconds <= 1.01 * least)
