"""The barrier at torch's store that names who has not come, and leaves the group as it is."""

from __future__ import annotations

from farandole.errors import CollectiveTimeoutError
from farandole.torch_store import StoreMeetingPlace

__all__ = ["monitored_barrier"]

_VERDICT_S = 5.0
"""How much longer than rank 0 the others wait: it has the last word."""

_ALL_CAME = "all came"


def monitored_barrier(
    place: StoreMeetingPlace, number: int, rank: int, world_size: int, timeout_s: float, wait_all_ranks: bool
) -> None:
    """The barrier of that number at a meeting place; see `ProcessGroup.monitored_barrier`."""
    key = f"monitored_barrier/{number}"
    if rank != 0:
        place.set(f"{key}/{rank}", "here")
        (verdict,) = place.get_all([f"{key}/verdict"], timeout_s + _VERDICT_S)
        place.set(f"{key}/{rank}/told", "yes")
        if verdict != _ALL_CAME:
            raise CollectiveTimeoutError(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                f"from rank 0: {verdict or 'it has not come in time'}"
            )
        return
    others = range(1, world_size)
    came = place.get_all([f"{key}/{other}" for other in others], timeout_s)
    missing = [str(other) for other, word in zip(others, came, strict=True) if word is None]
    if missing and timeout_s <= 0:
        problem = "Rank 0 timed out in monitoredBarrier, as its timeout is 0"
    elif missing and wait_all_ranks and len(missing) > 1:
        problem = f"Ranks {', '.join(missing)} failed to pass monitoredBarrier in {timeout_s * 1000:g} ms"
    elif missing:
        problem = f"Rank {missing[0]} failed to pass monitoredBarrier in {timeout_s * 1000:g} ms"
    else:
        problem = _ALL_CAME
    place.set(f"{key}/verdict", problem)
    # The store may end with this process: not before they know.
    present = [other for other, word in zip(others, came, strict=True) if word is not None]
    place.get_all([f"{key}/{other}/told" for other in present], _VERDICT_S)
    if problem != _ALL_CAME:
        raise CollectiveTimeoutError(problem)
