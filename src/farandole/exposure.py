"""How much of a rank's communication is hidden behind what it computes.

Communication is *exposed* at a moment when something travels and a thread of the rank waits for communication: in a
blocking collective, or for one that goes on in the background. The rest of it is *hidden*. Moments count once, however
much goes on in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from farandole.intervals import Intervals, cut, intersection, length, union, without
from farandole.timeline import Span

__all__ = ["Exposure", "exposure_of", "exposures_of_steps"]


@dataclass(frozen=True, slots=True)
class Exposure:
    """What a rank did in some time; all in seconds.

    Attributes:
        seconds: of the time as a whole.
        computing: within what is known as computation (forward, backward, the optimizer's step), without waiting.
        waiting: for communication, a rank that has not come to it yet included.
        communicating: between the begin and the end of some communication, on this rank.
        exposed: of that, while the rank waited.
        hidden: of that, the rest.
    """

    seconds: float
    computing: float
    waiting: float
    communicating: float
    exposed: float
    hidden: float


def exposure_of(spans: Iterable[Span], began_ns: int, ended_ns: int) -> Exposure:
    """From began_ns to ended_ns. Cost: that of sorting the spans."""
    return exposures_of_steps(spans, (), began_ns, ended_ns)[0]


def exposures_of_steps(spans: Iterable[Span], steps: Sequence[int], began_ns: int, ended_ns: int) -> list[Exposure]:
    """Of each step, and of what comes after the last one.

    Args:
        spans: of one rank, in any order; those of a kind may overlap.
        steps: when each step ended, sorted.
        began_ns, ended_ns: of the whole time.

    Returns:
        One more than there are steps.
    """
    whole = [(began_ns, ended_ns)] if began_ns < ended_ns else []
    moments: dict[str, list[tuple[int, int]]] = {"compute": [], "waiting": [], "communication": []}
    for span in spans:
        moments[span.kind].append((span.began_ns, span.ended_ns))
    by_kind = {kind: cut(intersection(union(some), whole), steps) for kind, some in moments.items()}
    pieces = cut(whole, steps)
    return [
        _exposure(length(piece), computing, waiting, communicating)
        for piece, computing, waiting, communicating in zip(
            pieces, by_kind["compute"], by_kind["waiting"], by_kind["communication"], strict=True
        )
    ]


def _exposure(nanoseconds: int, computing: Intervals, waiting: Intervals, communicating: Intervals) -> Exposure:
    exposed = length(intersection(communicating, waiting))
    numbers = (
        nanoseconds,
        length(without(computing, waiting)),
        length(waiting),
        length(communicating),
        exposed,
        length(communicating) - exposed,
    )
    return Exposure(*(number / 1e9 for number in numbers))
