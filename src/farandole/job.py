"""Joins the job that this process was started for."""

from __future__ import annotations

import atexit
import os
import weakref

from farandole.communicator import DEFAULT_TIMEOUT_S, Communicator
from farandole.errors import ArgumentError
from farandole.launch.environment import join_job
from farandole.runner import close_at_exit
from farandole.work import require_timeout

__all__ = ["current_job", "default_timeout_s", "init"]

_last: weakref.ref[Communicator] | None = None


def init(*, timeout_s: float | None = None) -> Communicator:
    """The communicator of all ranks of this job.

    Who this process is comes from the environment, as `farandole run`, torchrun, mpirun, srun or RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT set it (see `farandole.launch.environment`). Where none of them does, the process is
    alone, and the world has one rank. Every rank must call it; it may be called again after the communicator was
    closed, or for a second one.

    Args:
        timeout_s: seconds to wait for the other ranks here, and in every blocking call that does not say otherwise;
            None takes FARANDOLE_TIMEOUT_S from the environment, or 300.

    Returns:
        The communicator; close it, or use it as a context manager. What is still open when the process ends is closed
        then.

    Raises:
        RendezvousError: the ranks did not find one another; the message says which are missing and why.
        ArgumentError: the timeout is not a positive number.
    """
    global _last
    timeout_s = default_timeout_s() if timeout_s is None else require_timeout("timeout_s", timeout_s)
    communicator = Communicator(join_job(os.environ, timeout_s), timeout_s=timeout_s)
    _last = weakref.ref(communicator)
    return communicator


def current_job() -> Communicator | None:
    """What `init` made last, if it is there and not closed."""
    communicator = None if _last is None else _last()
    return None if communicator is None or communicator.closed else communicator


def default_timeout_s() -> float:
    """What FARANDOLE_TIMEOUT_S says; else 300.

    Raises:
        ArgumentError: it says no positive number.
    """
    text = os.environ.get("FARANDOLE_TIMEOUT_S", str(DEFAULT_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        raise ArgumentError(f"FARANDOLE_TIMEOUT_S is {text!r}; it must be a number of seconds") from None
    return require_timeout("timeout_s", seconds)


atexit.register(close_at_exit)
