"""What the ranks of a group tell one another at the end of a backward, in one small all_reduce.

Which parameters had a gradient where, and what came too late for its bucket. And what tells that ranks are not in one
step: a forward or backward that has failed; how many forwards no backward has reached, which is another number on a
rank that has left a step out; and in which order buckets were started, which may be those of several models.
"""

from __future__ import annotations

import dataclasses
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch.distributed as dist

__all__ = ["Agreed", "Starts", "told"]

_FAILED = -1
"""What a rank tells of itself whose forward or backward has failed."""

_IS_THROUGH = 0
"""What one tells that has no inputs left; the others tell how many forwards no backward has reached, and one more."""


class Starts:
    """The buckets that are started on this rank, of all models in a group; see `of`.

    Attributes:
        num_models: whose gradients are summed in the group.
        digest: of what was started since it was last told, in its order.
    """

    _of_group: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, Starts]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.num_models = 0
        self.digest = 0

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
        num_unreached: forwards that no backward has reached.
        digest: of the order in which buckets were started.
        is_active: whether this rank has inputs left.
        has_failed: whether its forward or backward has.
    """
    of_ranks = [0, 0] * group.size()
    of_ranks[group.rank()] = _FAILED if has_failed else 1 + num_unreached if is_active else _IS_THROUGH
    of_ranks[group.size() + group.rank()] = digest
    return [*map(int, late), *map(int, has), *(int(is_active and not one) for one in has), *of_ranks]


@dataclasses.dataclass
class Agreed:
    """What all ranks have told.

    Attributes:
        num_late: per bucket, ranks with gradients that came too late.
        num_having: per parameter, ranks that have a gradient.
        num_lacking: per parameter, active ranks that have none.
        states: of each rank.
        digests: likewise.
    """

    num_late: Sequence[int]
    num_having: Sequence[int]
    num_lacking: Sequence[int]
    states: Sequence[int]
    digests: Sequence[int]

    @classmethod
    def of(cls, total: Sequence[int], num_buckets: int, num_parameters: int, num_ranks: int) -> Agreed:
        """From the sum of what they told."""
        return cls(*_split(total, num_buckets, num_parameters, num_parameters, num_ranks, num_ranks))

    @property
    def active_rank(self) -> int:
        """The first rank that has inputs left."""
        return next(rank for rank, state in enumerate(self.states) if state != _IS_THROUGH)

    @property
    def _active(self) -> list[int]:
        return [one for one in self.states if one != _IS_THROUGH]

    def steps_ahead(self, rank: int) -> int:
        """Of an active rank that has not failed: steps that it has left out, and others have not."""
        return 0 if _FAILED in self.states else self.states[rank] - min(self._active)

    def why_given_up(self) -> str:
        """Why there is no sum; nothing if there is one."""
        if _FAILED in self.states:
            return (
                f"forward or backward failed on {_ranks_in_words(self.states, _FAILED)}: go on with the next step on "
                f"all ranks, or see there what failed"
            )
        most, least = max(self._active), min(self._active)
        if most != least:
            return (
                f"no backward has reached {most - 1} of the forwards before this one on "
                f"{_ranks_in_words(self.states, most)}, {least - 1} on {_ranks_in_words(self.states, least)}: if "
                f"something failed there between the two, go on on all ranks: those that are ahead leave out the next "
                f"step, too; if a forward is of one rank alone, make it within torch.no_grad(), or call the module "
                f"that is wrapped"
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
    ranks = [str(rank) for rank, one in enumerate(values) if one == value]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


def _split(values: Sequence[int], *lengths: int) -> Iterator[Sequence[int]]:
    at = 0
    for length in lengths:
        yield values[at : at + length]
        at += length
