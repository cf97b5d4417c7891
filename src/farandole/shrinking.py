"""How the ranks of a communicator that has failed go on without those that are lost.

They agree by the memory that they still share. Every rank that goes on says that it is *present*. When each of the
others is present or gone, or the time is over, one of the present ranks becomes the *leader*: an atomic exchange
decides which. The leader decides who the *members* are, all who are present by then, and offers them a new arena.
Members map it and say so; when all have that are not gone by then, the leader gives the *verdict*, and all members go
on. Who dies after that is a lost rank of the new group, as of any.

If a leader is gone before its verdict, nobody has gone on, and another present rank takes its place. A rank leads at
most once, so what a leader says is said once, and all see the same, whenever they look. A rank that comes too late for
the decision finds that it is no member.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import farandole._native as _native
from farandole.errors import CollectiveTimeoutError, CommunicatorClosedError, RendezvousError
from farandole.membership import Membership, create_arena, map_arena

__all__ = ["ranks_in_words", "shrink", "words_of_ranks"]

_VERDICT, _DECIDED, _PRESENT, _MAPPED, _PROCESS, _DESCRIPTOR, _NONCE, _MEMBERS = range(8)
"""The words of a rank's board, the last four of them for the members' bits."""

_YES, _NO = 1, 2
_UNABLE = 1 << 32
_BITS = 64
_PAUSE_S = 0.001
_ENDING_S = 1.0
_MAPPING_S = 10.0
"""How long a leader waits for members to map: they are present, so only one that is stopped takes long."""


def shrink(engine: _native.Engine, membership: Membership, timeout_s: float) -> Membership:
    """The new group of the ranks that are left.

    Args:
        engine: of this rank in the group that has failed.
        membership: of that group.
        timeout_s: how long to wait for others that are not gone; then they are left behind.

    Raises:
        CollectiveTimeoutError: the leader did not come to its verdict.
        CommunicatorClosedError: the others have gone on without this rank, as it came too late.
        RendezvousError: a rank could not join; on all.
    """
    return _Shrinking(engine, membership, timeout_s).run()


def words_of_ranks(ranks: Sequence[int], world_size: int) -> list[int]:
    """Some ranks of a world as bits, in words of a board."""
    mask = sum(1 << rank for rank in ranks)
    return [mask >> shift & (1 << _BITS) - 1 for shift in range(0, world_size, _BITS)]


def ranks_in_words(words: Sequence[int]) -> list[int]:
    """What `words_of_ranks` made words of."""
    mask = sum(word << _BITS * index for index, word in enumerate(words))
    return [rank for rank in range(len(words) * _BITS) if mask >> rank & 1]


class _Shrinking:
    """One rank's part in it; see above."""

    def __init__(self, engine: _native.Engine, membership: Membership, timeout_s: float) -> None:
        self._engine = engine
        self._old = membership
        self._own = membership.rank
        self._others = [rank for rank in range(membership.world_size) if rank != membership.rank]
        self._timeout_s = timeout_s
        self._limit = time.monotonic() + timeout_s
        self._mapped: dict[int, Membership] = {}  # per leader, its offer

    def run(self) -> Membership:
        """Follow or lead until there is a verdict."""
        self._engine.write_board(_PRESENT, _YES)
        try:
            while True:
                leader = self._engine.leader() - 1
                if leader == self._own:
                    return self._lead()
                if leader < 0:
                    is_vacant = True
                else:
                    is_gone = self._engine.is_gone(leader)
                    board = self._engine.board(leader)  # after that: who is gone writes no more
                    if board[_VERDICT]:
                        return self._follow(leader, board)
                    is_vacant = is_gone
                    if board[_DECIDED] and not is_gone:
                        self._accept(leader, board)
                if is_vacant and self._is_to_lead():
                    self._engine.claim_lead(leader + 1)
                    continue
                if time.monotonic() > self._limit + 2 * _MAPPING_S:
                    raise CollectiveTimeoutError(
                        f"shrink() is not done after {self._timeout_s:g} s: rank {leader} leads, and does not decide"
                    )
                time.sleep(_PAUSE_S)
        finally:
            for unused in self._mapped.values():
                unused.leave()

    def _is_to_lead(self) -> bool:
        """Whether all others are settled, and none below this rank is there to lead; or the time is over."""
        if time.monotonic() > self._limit:
            return True
        left = [rank for rank in self._others if not self._engine.is_gone(rank)]
        return all(rank > self._own and self._engine.board(rank)[_PRESENT] for rank in left)

    def _lead(self) -> Membership:
        engine = self._engine
        try:
            present = [rank for rank in self._others if engine.board(rank)[_PRESENT] and not engine.is_gone(rank)]
            members = sorted([self._own, *present])
            arena, nonce = create_arena(len(members))
            group = self._old.among(members, arena)
            parts = words_of_ranks(members, self._old.world_size)
            for word, value in enumerate([os.getpid(), arena.descriptor, nonce, *parts], _PROCESS):
                engine.write_board(word, value)
            engine.write_board(_DECIDED, _YES)
            answered, unable = self._wait_for_mappings(present)
            if unable:
                group.leave()
                raise RendezvousError(
                    f"rank {unable[0]} of the communicator that has failed could not join the new one"
                )
        except BaseException:
            engine.write_board(_VERDICT, _NO)
            raise
        for rank in set(present) - answered:  # it may live, but it does not take part: the others must not wait for it
            _native.Engine(arena, members.index(rank), []).close()
        engine.write_board(_VERDICT, _YES)
        arena.close_descriptor()
        return group

    def _wait_for_mappings(self, members: list[int]) -> tuple[set[int], list[int]]:
        """Wait until the members have mapped the arena, are gone, or seem to be stopped. Returns those that have, or
        have said that they cannot, and the latter."""
        limit = time.monotonic() + _MAPPING_S
        answers: dict[int, int] = {}
        while len(answers) < len(members) and time.monotonic() < limit:
            for rank in members:
                if self._engine.is_gone(rank):
                    answers.setdefault(rank, 0)
                answer = self._engine.board(rank)[_MAPPED]
                if answer & ~_UNABLE == self._own + 1:
                    answers[rank] = answer
            time.sleep(_PAUSE_S)
        unable = [rank for rank, answer in answers.items() if answer & _UNABLE]
        return {rank for rank, answer in answers.items() if answer}, unable

    def _accept(self, leader: int, board: list[int]) -> None:
        """Map what the leader offers, and say so, once."""
        said = self._engine.board(self._own)[_MAPPED] & ~_UNABLE
        members = ranks_in_words(board[_MEMBERS:])
        if said == leader + 1 or self._own not in members:
            return
        try:
            arena = map_arena(board[_PROCESS], board[_DESCRIPTOR], board[_NONCE])
            self._mapped[leader] = self._old.among(members, arena)
        except RendezvousError:
            limit = time.monotonic() + _ENDING_S  # a process that ends closes its files before it is seen to have ended
            while time.monotonic() < limit:
                if self._engine.is_gone(leader):
                    return
                time.sleep(_PAUSE_S)
            self._engine.write_board(_MAPPED, leader + 1 | _UNABLE)
            raise
        self._engine.write_board(_MAPPED, leader + 1)

    def _follow(self, leader: int, board: list[int]) -> Membership:
        """The group that the leader's verdict is about."""
        if board[_VERDICT] == _NO:
            raise RendezvousError(f"rank {leader} could not make the new communicator, and says why")
        group = self._mapped.get(leader)
        if group is None or group.arena.has_closed(group.rank):
            raise CommunicatorClosedError(
                f"the others have gone on without rank {self._own}, which called shrink() too late; rank {leader} led "
                f"them"
            )
        del self._mapped[leader]
        group.arena.close_descriptor()
        return group
