"""Recursive halving and recursive doubling: log2 N exchanges between partners.

Let P be a power of two, and every rank v responsible for its own *share* of the chunks.

Recursive halving (reduce_scatter). First, v exchanges with the partner P/2 away: each sends the half of the buffer
that the other's side is responsible for, and adds what it receives to the half it keeps. Then the same within each
half, with the partner P/4 away, and so on: the block that a rank works on halves each round, until it is its own
share.

Recursive doubling (all_gather) is the same backwards: partners 1, 2, 4, ... away exchange all that they have collected.

All-reduce on long vectors is the one after the other (Rabenseifner's algorithm). On short vectors only rounds count:
there, partners 1, 2, 4, ... away simply exchange their whole sums, and both add (`all_reduce_whole`, known as
recursive doubling). Both add the lower rank's sum first, so both hold the same bits.

Any N. Let P be the largest power of two in N. Then N - P ranks are too many: the first 2(N-P) ranks form *teams* of two
neighbours. Before, the second of each team hands what it has to the first, the *leader*; after, it gets back what it is
due. In between, the P leaders work alone. That costs two more rounds, and the volumes given below.
"""

from __future__ import annotations

from collections.abc import Sequence

from farandole.schedule import Schedule, Transfer

__all__ = ["all_gather", "all_reduce", "all_reduce_whole", "reduce_scatter"]

Team = tuple[int, ...]


def _teams(world_size: int) -> list[Team]:
    """P teams of one or two neighbouring ranks, in order of rank; the first rank of each leads it."""
    power = 1
    while 2 * power <= world_size:
        power *= 2
    num_pairs = world_size - power
    pairs: list[Team] = [(2 * i, 2 * i + 1) for i in range(num_pairs)]
    return pairs + [(rank,) for rank in range(2 * num_pairs, world_size)]


def reduce_scatter(world_size: int) -> Schedule:
    """Fold in, halve, hand each follower its chunk.

    Cost: log2 N rounds, (N-1)/N·S sent per rank if N is a power of two; otherwise floor(log2 N)+2 rounds, (N-1)/N·S
        sent per leader, S per follower.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
    """
    teams = _teams(world_size)
    transfers = _fold_in(teams, range(world_size))
    transfers += _halve(_next_step(transfers), teams, shares=teams)
    step = _next_step(transfers)
    transfers += [Transfer(step, team[0], team[1], team[1], team[1]) for team in teams if len(team) == 2]
    return Schedule("reduce_scatter", world_size, world_size, transfers, name="halving_doubling")


def all_gather(world_size: int) -> Schedule:
    """Each follower hands over its chunk, the leaders double, each follower gets all the others.

    Cost: log2 N rounds, (N-1)/N·S sent per rank if N is a power of two; otherwise floor(log2 N)+2 rounds, less than 3·S
        sent per leader, S/N per follower.
    Source: Thakur, Rabenseifner & Gropp 2005.
    """
    teams = _teams(world_size)
    transfers = [Transfer(0, team[1], team[1], team[0], team[1]) for team in teams if len(team) == 2]
    transfers += _double(_next_step(transfers), teams, shares=teams)
    step = _next_step(transfers)
    for team in teams:
        if len(team) == 2:
            transfers += [Transfer(step, team[0], c, team[1], c) for c in range(world_size) if c != team[1]]
    return Schedule("all_gather", world_size, world_size, transfers, name="halving_doubling")


def all_reduce(world_size: int) -> Schedule:
    """Fold in, halve, double, fold out; P chunks, one per leader.

    For a power of two this is exactly reduce_scatter composed with all_gather. Otherwise it saves their middle:
    followers need not get a chunk that they would hand back at once.

    Cost: 2·log2 N rounds, 2(N-1)/N·S sent per rank if N is a power of two; otherwise 2·floor(log2 N)+2 rounds,
        2(P-1)/P·S + S sent per leader of two, 2(P-1)/P·S per other leader, S per follower.
    Source: Thakur, Rabenseifner & Gropp 2005 (Rabenseifner's algorithm).
    """
    teams = _teams(world_size)
    chunks = range(len(teams))
    shares = [(chunk,) for chunk in chunks]
    transfers = _fold_in(teams, chunks)
    transfers += _halve(_next_step(transfers), teams, shares)
    transfers += _double(_next_step(transfers), teams, shares)
    transfers += _fold_out(_next_step(transfers), teams, chunks)
    return Schedule("all_reduce", world_size, len(teams), transfers, name="halving_doubling")


def all_reduce_whole(world_size: int) -> Schedule:
    """Partners 1, 2, 4, ... away exchange all they have and both add it up, the lower rank's sum first.

    Cost: log2 N rounds, log2 N·S sent per rank if N is a power of two; otherwise floor(log2 N)+2 rounds,
        floor(log2 N)·S + S sent per leader of two, floor(log2 N)·S per other leader, S per follower.
    Source: Thakur, Rabenseifner & Gropp 2005 (recursive doubling).
    """
    teams = _teams(world_size)
    transfers = _fold_in(teams, range(1))
    step = _next_step(transfers)
    distance = 1
    while distance < len(teams):
        for index, team in enumerate(teams):
            rank, partner = team[0], teams[index ^ distance][0]
            if rank < partner:
                transfers.append(Transfer(step, partner, 0, rank, 0, True))
            else:
                transfers.append(Transfer(step, partner, 0, rank, 0))
                transfers.append(Transfer(step, rank, 0, rank, 0, True))
        step, distance = step + 1, 2 * distance
    transfers += _fold_out(step, teams, range(1))
    return Schedule("all_reduce", world_size, 1, transfers, name="recursive_doubling")


def _fold_in(teams: list[Team], chunks: range) -> list[Transfer]:
    """Step 0: leaders add what their followers have."""
    return [Transfer(0, team[1], c, team[0], c, True) for team in teams if len(team) == 2 for c in chunks]


def _fold_out(step: int, teams: list[Team], chunks: range) -> list[Transfer]:
    """Leaders hand their followers the result."""
    return [Transfer(step, team[0], c, team[1], c) for team in teams if len(team) == 2 for c in chunks]


def _halve(step: int, teams: list[Team], shares: Sequence[Sequence[int]]) -> list[Transfer]:
    """Leaders send away the half of their block that their partner keeps, until they have their own share."""
    transfers = []
    distance = len(teams) // 2
    while distance:
        for index, team in enumerate(teams):
            partner = index ^ distance
            transfers += [
                Transfer(step, team[0], chunk, teams[partner][0], chunk, True)
                for chunk in _block(shares, partner, distance)
            ]
        step, distance = step + 1, distance // 2
    return transfers


def _double(step: int, teams: list[Team], shares: Sequence[Sequence[int]]) -> list[Transfer]:
    """Leaders exchange the block that they have collected, until they have all."""
    transfers = []
    distance = 1
    while distance < len(teams):
        for index, team in enumerate(teams):
            partner = index ^ distance
            transfers += [
                Transfer(step, team[0], chunk, teams[partner][0], chunk) for chunk in _block(shares, index, distance)
            ]
        step, distance = step + 1, 2 * distance
    return transfers


def _block(shares: Sequence[Sequence[int]], index: int, size: int) -> list[int]:
    """The chunks of the aligned block of ``size`` shares that share ``index`` lies in."""
    start = index - index % size
    return [chunk for share in shares[start : start + size] for chunk in share]


def _next_step(transfers: list[Transfer]) -> int:
    return transfers[-1].step + 1 if transfers else 0
