"""What the ranks of a group tell one another at the end of a backward, in one small all_reduce.

Which parameters had a gradient where, and what came too late for its bucket. And what tells that ranks are not in one
step: a forward or backward that has failed; how many forwards this backward has reached, and how many none has: a rank
that has left a step out has more of these, and as many of those. And in which order buckets were started, which may be
those of several models.
"""

from __future__ import annotations

import dataclasses
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch.distributed as dist

from farandole import timeline

__all__ = ["Agreed", "Starts", "told"]

_FAILED = -1
"""What a rank tells of itself whose forward or backward has failed."""

_IS_THROUGH = 0
"""What one tells that has no inputs left; the others tell how many forwards no backward has reached, and one more."""

_NUM_OF_RANK = 3
"""Numbers that each rank tells of itself."""


class Starts:
    """The buckets that are started on this rank, of all models in a group; see `of`.

    Attributes:
        num_models: whose gradients are summed in the group.
        syncs: those of them that are there.
        digest: of what was started since it was last told, in its order.
        problem: why nothing can be summed any more: the ranks are out of step.
    """

    _of_group: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, Starts]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.num_models = 0
        self.syncs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.digest = 0
        self.problem = ""

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Starts:
        """That of ``group``."""
        return cls._of_group.setdefault(group, cls())

    def add(self, model: int, bucket: int) -> None:
        """A bucket of a model, each by its number, is started."""
        self.digest = zlib.crc32(f"{model} {bucket}".encode(), self.digest) & 0x7FFFFFFF


def told(
    group: dist.ProcessGroup,
    *,
    late: Sequence[bool],
    has: Sequence[bool],
    num_reached: int,
    num_unreached: int,
    digest: int,
    is_active: bool,
    has_failed: bool,
) -> list[int]:
    """What this rank tells, to be added up over the ranks.

    Args:
        group: of ranks.
        late: per bucket, whether gradients have come too late for it.
        has: per parameter, whether it has a gradient.
        num_reached: forwards since the last sum that a backward has reached.
        num_unreached: those that none has.
        digest: of the order in which buckets were started.
        is_active: whether this rank has inputs left.
        has_failed: whether its forward or backward has.
    """
    state = _FAILED if has_failed else 1 + num_unreached if is_active else _IS_THROUGH
    of_ranks = [0] * (_NUM_OF_RANK * group.size())
    of_ranks[group.rank() :: group.size()] = [state, num_reached, digest]
    return [*map(int, late), *map(int, has), *(int(is_active and not one) for one in has), *of_ranks]


@dataclasses.dataclass
class Agreed:
    """What all ranks have told.

    Attributes:
        num_late: per bucket, ranks with gradients that came too late.
        num_having: per parameter, ranks that have a gradient.
        num_lacking: per parameter, active ranks that have none.
        states: of each rank.
        num_reached: likewise, as the next.
        digests: of what was started.
    """

    num_late: Sequence[int]
    num_having: Sequence[int]
    num_lacking: Sequence[int]
    states: Sequence[int]
    num_reached: Sequence[int]
    digests: Sequence[int]

    @classmethod
    def of(cls, total: Sequence[int], num_buckets: int, num_parameters: int, num_ranks: int) -> Agreed:
        """From the sum of what they told."""
        return cls(*_split(total, num_buckets, num_parameters, num_parameters, *[num_ranks] * _NUM_OF_RANK))

    @property
    def active_rank(self) -> int:
        """The first rank that has inputs left."""
        return next(rank for rank, state in enumerate(self.states) if state != _IS_THROUGH)

    def what_failed(self) -> str:
        """Why there is no sum this time; nothing if there is one."""
        if _FAILED not in self.states:
            return ""
        return (
            f"forward or backward failed on {_ranks_in_words(self.states, _FAILED)}, so no rank of the group has "
            f"gradients; go on with the next step on all ranks, or see there what failed"
        )

    def why_out_of_step(self) -> str:
        """Why there can be no sums any more; nothing if there can."""
        for reached in {*self.num_reached}:
            states = [
                state if number == reached else _IS_THROUGH
                for state, number in zip(self.states, self.num_reached, strict=True)
            ]
            active = [one for one in states if one != _IS_THROUGH]
            if len({*active}) > 1:
                most, least = max(active), min(active)
                return (
                    f"the ranks are out of step: {most - 1} of the forwards before this backward had none on "
                    f"{_ranks_in_words(states, most)}, {least - 1} on {_ranks_in_words(states, least)}. If something "
                    f"failed there between forward and backward, wrap the model anew on all ranks, and go on from a "
                    f"checkpoint; what fails in forward, where the loss can be computed, too, ends one step alone. If "
                    f"a rank makes forwards for itself, let it do so within torch.no_grad(), or with the module that "
                    f"is wrapped"
                )
        if len({*self.digests}) > 1:
            other = next(one for one in self.digests if one != self.digests[0])
            return (
                f"{_ranks_in_words(self.digests, other)} summed the gradients of several models in another order than "
                f"rank 0: run a backward for each model, in one order on all ranks, or wrap each for a process group "
                f"of its own"
            )
        return ""


def _ranks_in_words(values: Sequence[int], value: int) -> str:
    return timeline.ranks_in_words([rank for rank, one in enumerate(values) if one == value])


def _split(values: Sequence[int], *lengths: int) -> Iterator[Sequence[int]]:
    at = 0
    for length in lengths:
        yield values[at : at + length]
        at += length
