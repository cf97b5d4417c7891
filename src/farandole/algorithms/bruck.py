"""Bruck's algorithms: all-gather and all-to-all in ceil(log2 N) rounds, for any N.

All-gather. Rank r collects the blocks r, r+1, r+2, ... In the round with distance d = 1, 2, 4, ... it holds the first
d of them, and gets the next d from the rank d further on, for which they are the first. The last round moves only what
is missing.

All-to-all. Call i the distance that a block has to travel: what rank r has for rank r+i. Write i in binary: the block
hops 2^k ranks on for every bit k that is set in i, lowest first. In round k every rank therefore sends on, in one
message to the rank 2^k further on, all the blocks in its hands whose distance has bit k. There is always exactly one
block of each distance i in a rank's hands: first its own, then the one it was given.

Where a block is in between: it starts in the slot named after its destination, waits in scratch slot i, and must end
in the slot named after its source. On the receiver that slot may still hold a block that has yet to start (the one
that goes the other way, distance N-i); then it waits in scratch, and a local move at the end brings it home. For
powers of two this never happens.
"""

from __future__ import annotations

from farandole.schedule import Schedule, Transfer

__all__ = ["all_gather", "all_to_all"]


def all_gather(world_size: int) -> Schedule:
    """Double the run of blocks held by getting the next run from as far along.

    Cost: ceil(log2 N) rounds; (N-1)/N·S sent per rank, for every N.
    Source: Bruck, Ho, Kipnis, Upfal & Weathersby 1997 ("concatenation").
    """
    transfers = []
    step, distance = 0, 1
    while distance < world_size:
        for rank in range(world_size):
            peer = (rank + distance) % world_size
            for block in range(min(distance, world_size - distance)):
                chunk = (peer + block) % world_size
                transfers.append(Transfer(step, peer, chunk, rank, chunk))
        step, distance = step + 1, 2 * distance
    return Schedule("all_gather", world_size, world_size, transfers, name="bruck")


def all_to_all(world_size: int) -> Schedule:
    """Every block hops along the binary digits of the distance that it has to travel.

    Cost: ceil(log2 N) rounds; B/N·S sent per rank, where B is the number of ones in the binary numbers 1..N-1
        (N/2·log2 N if N is a power of two); at most S of scratch.
    Source: Bruck, Ho, Kipnis, Upfal & Weathersby 1997 ("index", radix 2).
    """
    transfers = []
    waiting = set()
    step, hop = 0, 1
    while hop < world_size:
        for distance in range(1, world_size):
            if not distance & hop:
                continue
            starts = _first_hop(distance) == hop
            arrives = distance < 2 * hop
            home_is_free = _first_hop(world_size - distance) < hop
            if arrives and not home_is_free:
                waiting.add(distance)
            for rank in range(world_size):
                peer = (rank + hop) % world_size
                home = (peer - distance) % world_size
                src_slot = (rank + distance) % world_size if starts else _scratch(world_size, distance)
                dst_slot = home if arrives and home_is_free else _scratch(world_size, distance)
                transfers.append(Transfer(step, rank, src_slot, peer, dst_slot))
        step, hop = step + 1, 2 * hop
    for distance in sorted(waiting):
        for rank in range(world_size):
            home = (rank - distance) % world_size
            transfers.append(Transfer(step, rank, _scratch(world_size, distance), rank, home))
    return Schedule("all_to_all", world_size, world_size, transfers, num_scratch=world_size - 1, name="bruck")


def _first_hop(distance: int) -> int:
    """The lowest set bit."""
    return distance & -distance


def _scratch(world_size: int, distance: int) -> int:
    return world_size + distance - 1
