"""What can go wrong in training.

::

    farandole.FarandoleError
    ├── BackwardFailedError      a step failed on another rank
    ├── OutOfStepError           ranks have left out steps, or taken them in another order
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
    "OutOfStepError",
    "SparseGradientError",
    "UnusedParametersError",
]


class BackwardFailedError(FarandoleError):
    """A forward or backward failed on another rank, and went on there, so that no rank has gradients; raised from
    ``backward`` on every rank where it did not fail."""


class OutOfStepError(FarandoleError):
    """A rank has left out a step, or sums several models in another order; raised on every rank, from then on."""


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
