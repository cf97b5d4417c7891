"""Collective communication for distributed training.

An algorithm is a schedule: a list of chunk transfers. The same object is proved, priced, drawn and run.

>>> import farandole, numpy as np
>>> with farandole.local(4) as world:
...     results = world.run(lambda comm: comm.all_reduce(np.arange(3.0) + comm.rank))
>>> results[0]
array([ 6., 10., 14.])
"""

from farandole.calls import CollectiveStats
from farandole.communicator import Communicator
from farandole.errors import (
    ArgumentError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    CommunicatorClosedError,
    FarandoleError,
    MalformedScheduleError,
    PeerLostError,
    RendezvousError,
    ScheduleError,
    UnsupportedReductionError,
    VerificationError,
)
from farandole.job import init
from farandole.local_world import LocalWorld, local
from farandole.schedule import Schedule, Transfer
from farandole.tracing import Trace, trace
from farandole.verifier import verify
from farandole.work import Work

__all__ = [
    "ArgumentError",
    "CollectiveMismatchError",
    "CollectiveStats",
    "CollectiveTimeoutError",
    "CommunicationError",
    "Communicator",
    "CommunicatorClosedError",
    "FarandoleError",
    "LocalWorld",
    "MalformedScheduleError",
    "PeerLostError",
    "RendezvousError",
    "Schedule",
    "ScheduleError",
    "Trace",
    "Transfer",
    "UnsupportedReductionError",
    "VerificationError",
    "Work",
    "init",
    "local",
    "trace",
    "verify",
]
