"""Every exception farandole raises on purpose.

::

    FarandoleError
    ├── ScheduleError                 a schedule or program that may not run
    │   ├── MalformedScheduleError    a rank, slot or step outside its range (also a ValueError)
    │   └── VerificationError         the proof failed; carries the counterexample
    ├── ArgumentError                 a call that can never work (also a ValueError)
    │   └── UnsupportedReductionError a dtype and op that have no meaning together (also a TypeError)
    └── CommunicationError            the call was right, the run was not (also a RuntimeError)
        ├── RendezvousError           the ranks did not find or did not trust one another
        ├── CollectiveMismatchError   ranks made different calls
        ├── CollectiveTimeoutError    ranks did not arrive in time (also a TimeoutError)
        ├── PeerLostError             a rank's process ended
        └── CommunicatorClosedError   the communicator was closed or aborted

An aborted communicator raises the error that aborted it again, on every later call.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommunicationError",
    "CommunicatorClosedError",
    "FarandoleError",
    "MalformedScheduleError",
    "PeerLostError",
    "RendezvousError",
    "ScheduleError",
    "UnsupportedReductionError",
    "VerificationError",
]


class FarandoleError(Exception):
    """The root of every error that farandole raises on purpose."""


class ScheduleError(FarandoleError):
    """A schedule, or the program lowered from it, may not run."""


class MalformedScheduleError(ScheduleError, ValueError):
    """A transfer names a rank, slot or step that does not exist, or two that contradict."""


class VerificationError(ScheduleError):
    """The proof of a schedule failed.

    Attributes:
        rank: the first rank that ends wrong, or that waits for ever; None where no single one does.
        chunk: the first chunk that is wrong at that rank, where there is one.
        transfer: index of the transfer (in the schedule's order) to look at first, where there is one.
        path: one line per transfer that led to the wrong contents, oldest first.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        chunk: int | None = None,
        transfer: int | None = None,
        path: tuple[str, ...] = (),
    ) -> None:
        lines = [message, *(f"    {line}" for line in path)]
        super().__init__("\n".join(lines))
        self.rank = rank
        self.chunk = chunk
        self.transfer = transfer
        self.path = path


class ArgumentError(FarandoleError, ValueError):
    """The arguments of a call can never work; the message names the value and the remedy."""


class UnsupportedReductionError(ArgumentError, TypeError):
    """This reduction has no meaning for this dtype."""


class CommunicationError(FarandoleError, RuntimeError):
    """The call was right and the run of it failed."""


class RendezvousError(CommunicationError):
    """The ranks of a job did not find, or did not trust, one another."""


class CollectiveMismatchError(CommunicationError):
    """Ranks of one group made different calls."""


class CollectiveTimeoutError(CommunicationError, TimeoutError):
    """Ranks did not arrive in time; the message says which, and where they are."""


class PeerLostError(CommunicationError):
    """The process of a rank ended while others needed it."""


class CommunicatorClosedError(CommunicationError):
    """The communicator was closed, or aborted, before or during this call."""
