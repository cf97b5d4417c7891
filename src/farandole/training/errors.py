"""What can go wrong in training.

::

    farandole.FarandoleError
    ├── BackwardFailedError      a step failed on another rank
    ├── UnusedParametersError    parameters had no gradient on some rank
    ├── SparseGradientError      a gradient is sparse
    ├── DifferentModelsError     the ranks' models differ
    ├── NotGatheredError         a sharded parameter is used where it is not whole
    └── CheckpointError          a checkpoint and a model do not fit together
"""

from __future__ import annotations

from farandole.errors import FarandoleError

__all__ = [
    "BackwardFailedError",
    "CheckpointError",
    "DifferentModelsError",
    "NotGatheredError",
    "SparseGradientError",
    "UnusedParametersError",
]


class BackwardFailedError(FarandoleError):
    """A forward or backward failed on another rank, or a step was left out there, so that no rank has gradients; raised
    from ``backward`` on every rank where it did not fail."""


class UnusedParametersError(FarandoleError):
    """Parameters had no gradient on some rank; raised on every rank."""


class SparseGradientError(FarandoleError):
    """A gradient is sparse."""


class DifferentModelsError(FarandoleError):
    """The ranks' models differ in what they have to have in common; raised on every rank."""


class NotGatheredError(FarandoleError):
    """A sharded parameter is used where it is not whole."""


class CheckpointError(FarandoleError):
    """A checkpoint and a model do not fit together; raised on every rank."""
