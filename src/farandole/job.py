"""Joins the job that this process was started for."""

from __future__ import annotations

import atexit
import os

from farandole.communicator import DEFAULT_TIMEOUT_S, Communicator
from farandole.errors import ArgumentError
from farandole.membership import join_alone
from farandole.rendezvous import identity_from, join
from farandole.runner import close_at_exit
from farandole.work import require_timeout

__all__ = ["init"]


def init(*, timeout_s: float | None = None) -> Communicator:
    """The communicator of all ranks of this job.

    Who this process is comes from the environment: `farandole run` sets it; else RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT do. Where neither RANK nor WORLD_SIZE is set, the process is alone, and the world has one rank. Every
    rank must call it; it may be called again after the communicator was closed, or for a second one.

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
    if timeout_s is None:
        text = os.environ.get("FARANDOLE_TIMEOUT_S", str(DEFAULT_TIMEOUT_S))
        try:
            timeout_s = float(text)
        except ValueError:
            raise ArgumentError(f"FARANDOLE_TIMEOUT_S is {text!r}; it must be a number of seconds") from None
    timeout_s = require_timeout("timeout_s", timeout_s)
    identity = identity_from(os.environ)
    membership = join_alone() if identity is None else join(identity, timeout_s)
    return Communicator(membership, timeout_s=timeout_s)


atexit.register(close_at_exit)
