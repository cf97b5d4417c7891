"""Which ranks share a host.

Ranks on one host move data through memory that they share; what goes to another host crosses a wire. That is all that
algorithms, cost model and selector have to know of a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

from farandole.errors import ArgumentError

__all__ = ["Topology"]

_FORMS = "'2x4' (2 hosts of 4 ranks), '3+1' (hosts of 3 and of 1) or '0,1,0,1' (the host of each rank)"
_MAX_RANKS = 1 << 20
"""More would fill memory before anything asks for so many."""


@dataclass(frozen=True)
class Topology:
    """The host of each rank.

    Attributes:
        host_of: per rank, its host: 0, 1, ... in the order of their first ranks.

    Raises:
        ArgumentError: there is no rank, or the hosts are numbered otherwise.
    """

    host_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.host_of:
            raise ArgumentError("host_of is (); a topology has at least one rank")
        if self.host_of != _numbered(self.host_of):
            raise ArgumentError(
                f"host_of is {self.host_of}; hosts are numbered 0, 1, ... in the order of their first ranks, which "
                f"Topology.of_hosts does by itself"
            )

    @classmethod
    def one_host(cls, world_size: int) -> Topology:
        """All ranks on one host."""
        return cls((0,) * world_size)

    @classmethod
    def of_hosts(cls, hosts: Iterable[Hashable]) -> Topology:
        """From what names the host of each rank: a number, a hostname, anything."""
        return cls(_numbered(hosts))

    @classmethod
    def parse(cls, text: str) -> Topology:
        """From the text of a command line: ``2x4``, ``3+1`` or ``0,1,0,1``.

        Raises:
            ArgumentError: it is none of these.
        """
        if re.fullmatch(r"\d+(,\d+)+", text):
            return cls.of_hosts(int(host) for host in text.split(","))
        sizes: list[int] = []
        if match := re.fullmatch(r"(\d{1,7})x(\d{1,7})", text):
            num_hosts, num_ranks = map(int, match.groups())
            sizes = [num_ranks] * min(num_hosts, _MAX_RANKS + 1)
        elif re.fullmatch(r"\d{1,7}(\+\d{1,7})*", text):
            sizes = [int(size) for size in text.split("+")]
        if not sizes or 0 in sizes:
            raise ArgumentError(f"hosts is {text!r}; give {_FORMS}")
        if sum(sizes) > _MAX_RANKS:
            raise ArgumentError(f"hosts is {text!r}, which is {sum(sizes)} ranks; at most {_MAX_RANKS} are allowed")
        return cls(tuple(host for host, size in enumerate(sizes) for _ in range(size)))

    @property
    def world_size(self) -> int:
        """Number of ranks, N."""
        return len(self.host_of)

    @property
    def num_hosts(self) -> int:
        """Number of hosts, H."""
        return len(self._ranks)

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks share one host."""
        return self.num_hosts == 1

    @property
    def most_ranks_on_a_host(self) -> int:
        """Ranks on the largest host, R."""
        return max(map(len, self._ranks))

    def share_a_host(self, rank: int, other: int) -> bool:
        """Whether two ranks do."""
        return self.host_of[rank] == self.host_of[other]

    def ranks_on(self, host: int) -> tuple[int, ...]:
        """The ranks on ``host``, in order; local rank i is the i-th."""
        return self._ranks[host]

    def __str__(self) -> str:
        sizes = [len(ranks) for ranks in self._ranks]
        if self != Topology(tuple(host for host, size in enumerate(sizes) for _ in range(size))):
            return ",".join(map(str, self.host_of))
        return f"{len(sizes)}x{sizes[0]}" if len(set(sizes)) == 1 else "+".join(map(str, sizes))

    @cached_property
    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        ranks: list[list[int]] = [[] for _ in range(1 + max(self.host_of))]
        for rank, host in enumerate(self.host_of):
            ranks[host].append(rank)
        return tuple(map(tuple, ranks))


def _numbered(hosts: Iterable[Hashable]) -> tuple[int, ...]:
    """Each host's number, counted in the order of first ranks."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)
