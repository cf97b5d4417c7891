"""The public API: a communicator, the collectives on it, and messages.

Every collective is called by all ranks of the communicator, in the same order, with arguments that agree. Arrays are
numpy arrays, torch CPU tensors, or anything with DLPack or the buffer protocol. What is returned is the array that was
given for it, else a new numpy array or, where a tensor went in, a tensor. Of torch tensors the data are taken:
parameters may be given, what was computed under autograd only where it is not overwritten.

Where a collective gives each rank a part, the parts lie along the first dimension.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from farandole.buffers import Buffer, empty_like, read_buffer, write_buffer
from farandole.call_records import CALLS
from farandole.calls import Algorithm, CollectiveStats, Signature
from farandole.collectives import is_reducing
from farandole.dtypes import DTYPES, require_reducible, require_wire_dtype
from farandole.errors import ArgumentError, CommunicationError
from farandole.flight_record import FlightEntry
from farandole.membership import Membership
from farandole.plans import split_evenly
from farandole.runner import Runner
from farandole.selector import Explanation, explain
from farandole.status import serve_status
from farandole.timeline import Record
from farandole.work import Work, require_timeout

__all__ = ["DEFAULT_TIMEOUT_S", "Communicator", "is_whole"]

_ALL_REDUCE, _REDUCE_SCATTER, _ALL_GATHER, _BROADCAST, _REDUCE, _GATHER, _SCATTER, _ALL_TO_ALL, _BARRIER = range(9)

DEFAULT_TIMEOUT_S = 300.0
"""Seconds that a blocking call waits for other ranks, where neither the call nor the communicator says otherwise."""

_MOST_ROWS = 2**48  # what an address space can hold


class Communicator:
    """A group of ranks that communicate; made by `farandole.init`, `farandole.local` or `split`.

    A communicator may be used from several threads; its collectives then run one after the other, and it is up to the
    threads that all ranks make them in the same order. Messages run beside them. It is a context manager that closes
    itself.

    Attributes:
        rank: of this process, in 0..world_size - 1.
        world_size: number of ranks.
        timeout_s: seconds that a blocking call waits where the call does not say otherwise.
    """

    def __init__(self, membership: Membership, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.rank = membership.rank
        self.world_size = membership.world_size
        self.timeout_s = require_timeout("timeout_s", timeout_s)
        self._membership = membership
        self._runner = Runner(membership)
        serve_status()
        self._repeat = self._runner.repeats.run
        self._in_flight = self._runner.in_flight
        self._refusals = {name: _Refusals(self._runner, name) for name in (*CALLS, "send", "recv")}

    # -- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: Any,
        op: str = "sum",
        *,
        out: Any = None,
        algorithm: Algorithm | None = None,
        wire_dtype: str | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Every rank ends with the reduction of all ranks' ``tensor``, the same bits on all.

        With ``wire_dtype``, float32 is rounded where it goes to another host, so that fewer bytes travel, and each
        result once where it is complete; everything is added up in float32. Each time a number changes by at most

        - 1/256 of itself as "bfloat16", which takes half the bytes;
        - 1/127 of the largest magnitude in its block as "int8", which takes 257/1024 of them: 256 numbers share a
          scale, a power of two. A block with a NaN or an infinity becomes NaN, all of it.

        How far sums can be off in all, and what becomes of very large and small numbers, is in docs/numbers.md. Where
        all ranks share one host, nothing is rounded.

        Args:
            tensor: any shape, the same number of elements on all ranks; overwritten unless ``out`` is given.
            op: "sum", "avg", "prod", "min", "max", "band", "bor" or "bxor".
            out: where the result goes; same number of elements and dtype as ``tensor``.
            algorithm: a name (see ``farandole.algorithms.names("all_reduce")``), a `Schedule`, or a function from the
                world size to one; None lets farandole choose. With ``wire_dtype``, between hosts, one that completes
                each sum on one rank.
            wire_dtype: what float32 is rounded to between hosts, "bfloat16" or "int8"; the same on all ranks. None:
                numbers travel as they are.
            timeout: seconds; None takes the communicator's.
            async_op: return a `Work` at once and run in the background.

        Returns:
            ``out`` if given, else ``tensor``; with ``async_op``, a `Work` whose wait returns that.

        Raises:
            ArgumentError: the arguments can never work.
            CollectiveMismatchError, CollectiveTimeoutError, PeerLostError, CommunicatorClosedError: see
            `farandole.errors`.
        """
        timeout_s = self.timeout_s if timeout is None else timeout
        result = tensor if out is None else out
        repeats = wire_dtype is None
        at_once = repeats and not async_op and not self._in_flight
        if at_once and self._repeat(_ALL_REDUCE, tensor, result, op, 0, algorithm, timeout_s):
            return result
        with self._refusals["all_reduce"]:
            source, target = self._in_and_out(tensor, out)
            _require_same_count("out", target, source.count)
            require_wire_dtype(wire_dtype, source.dtype)
            signature = self._signature(
                "all_reduce", source, op=op, counts=(source.count,), algorithm=algorithm, wire_dtype=wire_dtype
            )
            repeat = (_ALL_REDUCE, tensor, result, op, 0, algorithm) if repeats else None
            return self._runner.run(signature, source, target, timeout_s, async_op, repeat=repeat)

    def reduce_scatter(
        self,
        tensor: Any,
        op: str = "sum",
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Every rank ends with its part of the reduction of all ranks' ``tensor``.

        Args:
            tensor: shape (n, ...); part r is the r-th run of rows. Left unchanged unless ``out`` lies in it.
            op: as in `all_reduce`.
            out: shape (rows of this rank, ...); made if None.
            counts: rows of each rank's part, the same on all ranks; None needs n to be a multiple of the world size.
            algorithm, timeout, async_op: as in `all_reduce`.

        Returns:
            This rank's part, ``out`` if given; with ``async_op``, a `Work` whose wait returns that.

        Raises:
            ArgumentError and CommunicationError as in `all_reduce`.
        """
        timeout_s = self.timeout_s if timeout is None else timeout
        repeats = counts is None and out is not None
        at_once = repeats and not async_op and not self._in_flight
        if at_once and self._repeat(_REDUCE_SCATTER, tensor, out, op, 0, algorithm, timeout_s):
            return out
        with self._refusals["reduce_scatter"]:
            repeat = (_REDUCE_SCATTER, tensor, out, op, 0, algorithm) if repeats else None
            source = read_buffer(tensor)
            parts, rows = self._parts(source, counts, "tensor")
            if out is None:
                out = empty_like(tensor, (rows[self.rank], *source.shape[1:]))
            target = self._output(out, source)
            _require_same_count("out", target, parts[self.rank])
            signature = self._signature("reduce_scatter", source, op=op, counts=parts, algorithm=algorithm)
            start = sum(parts[: self.rank])
            return self._runner.run(signature, source, target, timeout_s, async_op, output_start=start, repeat=repeat)

    def all_gather(
        self,
        tensor: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Every rank ends with all ranks' ``tensor``, one after the other along the first dimension.

        Args:
            tensor: shape (n, ...), or a single element.
            out: shape (sum of all n, ...); made if None. ``tensor`` may be this rank's part of it.
            counts: rows of each rank's part, the same on all ranks; None means that all have as many as this one.
            algorithm, timeout, async_op: as in `all_reduce`.

        Returns:
            All parts, ``out`` if given; with ``async_op``, a `Work` whose wait returns that.

        Raises:
            ArgumentError and CommunicationError as in `all_reduce`.
        """
        timeout_s = self.timeout_s if timeout is None else timeout
        repeats = counts is None and out is not None
        at_once = repeats and not async_op and not self._in_flight
        if at_once and self._repeat(_ALL_GATHER, tensor, out, None, 0, algorithm, timeout_s):
            return out
        with self._refusals["all_gather"]:
            repeat = (_ALL_GATHER, tensor, out, None, 0, algorithm) if repeats else None
            source = read_buffer(tensor)
            parts, rows = self._parts_from_own(source, counts)
            if out is None:
                out = empty_like(tensor, (sum(rows), *source.shape[1:]))
            target = self._output(out, source)
            _require_same_count("out", target, sum(parts))
            signature = self._signature("all_gather", source, counts=parts, algorithm=algorithm)
            start = sum(parts[: self.rank])
            return self._runner.run(signature, source, target, timeout_s, async_op, input_start=start, repeat=repeat)

    def broadcast(
        self,
        tensor: Any,
        src: int = 0,
        *,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Every rank ends with what ``tensor`` holds on rank ``src``.

        Args:
            tensor: any shape, the same number of elements on all ranks; overwritten on all ranks but ``src``.
            src: a rank of this communicator.
            algorithm, timeout, async_op: as in `all_reduce`.

        Returns:
            ``tensor``; with ``async_op``, a `Work` whose wait returns that.

        Raises:
            ArgumentError and CommunicationError as in `all_reduce`.
        """
        timeout_s = self.timeout_s if timeout is None else timeout
        at_once = not async_op and not self._in_flight
        if at_once and self._repeat(_BROADCAST, tensor, tensor, None, src, algorithm, timeout_s):
            return tensor
        with self._refusals["broadcast"]:
            self._require_rank("src", src)
            buffer = write_buffer(tensor) if self.rank != src else read_buffer(tensor)
            signature = self._signature("broadcast", buffer, counts=(buffer.count,), algorithm=algorithm, root=int(src))
            return self._runner.run(
                signature,
                buffer,
                buffer,
                timeout_s,
                async_op,
                repeat=(_BROADCAST, tensor, tensor, None, src, algorithm),
            )

    def reduce(
        self,
        tensor: Any,
        dst: int = 0,
        op: str = "sum",
        *,
        out: Any = None,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Rank ``dst`` ends with the reduction of all ranks' ``tensor``.

        Args:
            tensor: any shape, the same number of elements on all ranks; overwritten on ``dst`` unless ``out`` is given,
                left unchanged everywhere else.
            dst: a rank of this communicator.
            op: as in `all_reduce`.
            out: where the result goes; of use on ``dst`` alone.
            algorithm, timeout, async_op: as in `all_reduce`.

        Returns:
            On ``dst``, ``out`` if given, else ``tensor``; elsewhere ``tensor``, unchanged. With ``async_op``, a `Work`
            whose wait returns that.

        Raises:
            ArgumentError and CommunicationError as in `all_reduce`.
        """
        timeout_s = self.timeout_s if timeout is None else timeout
        result = out if out is not None and type(dst) is int and self.rank == dst else tensor
        at_once = not async_op and not self._in_flight
        if at_once and self._repeat(_REDUCE, tensor, result, op, dst, algorithm, timeout_s):
            return result
        with self._refusals["reduce"]:
            self._require_rank("dst", dst)
            if self.rank == dst:
                source, target = self._in_and_out(tensor, out)
                _require_same_count("out", target, source.count)
            else:
                source = target = read_buffer(tensor)
            signature = self._signature(
                "reduce", source, op=op, counts=(source.count,), algorithm=algorithm, root=int(dst)
            )
            return self._runner.run(
                signature, source, target, timeout_s, async_op, repeat=(_REDUCE, tensor, result, op, dst, algorithm)
            )

    def gather(
        self,
        tensor: Any,
        dst: int = 0,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Rank ``dst`` ends with all ranks' ``tensor``, one after the other along the first dimension.

        Args:
            tensor, counts, algorithm, timeout, async_op: as in `all_gather`.
            dst: a rank of this communicator.
            out: on ``dst``, shape (sum of all n, ...), made if None; of no use elsewhere.

        Returns:
            On ``dst``, all parts, ``out`` if given; elsewhere None. With ``async_op``, a `Work` whose wait returns
            that.

        Raises:
            ArgumentError and CommunicationError as in `all_reduce`.
        """
        timeout_s = self.timeout_s if timeout is None else timeout
        result = out if type(dst) is int and self.rank == dst else None
        repeats = counts is None and type(dst) is int and (out is not None or self.rank != dst)
        at_once = repeats and not async_op and not self._in_flight
        if at_once and self._repeat(_GATHER, tensor, result, None, dst, algorithm, timeout_s):
            return result
        with self._refusals["gather"]:
            repeat = (_GATHER, tensor, result, None, dst, algorithm) if repeats else None
            self._require_rank("dst", dst)
            source = read_buffer(tensor)
            parts, rows = self._parts_from_own(source, counts)
            start = sum(parts[: self.rank])
            signature = self._signature("gather", source, counts=parts, algorithm=algorithm, root=int(dst))
            if self.rank != dst:
                return self._runner.run(signature, source, None, timeout_s, async_op, input_start=start, repeat=repeat)
            if out is None:
                out = empty_like(tensor, (sum(rows), *source.shape[1:]))
            target = self._output(out, source)
            _require_same_count("out", target, sum(parts))
            return self._runner.run(signature, source, target, timeout_s, async_op, input_start=start, repeat=repeat)

    def scatter(
        self,
        tensor: Any = None,
        src: int = 0,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Every rank ends with its part of what ``tensor`` holds on rank ``src``.

        Args:
            tensor: on ``src``, shape (n, ...), left unchanged; of no use elsewhere.
            src: a rank of this communicator.
            out: shape (rows of this rank, ...); needed on all ranks but ``src``, where it is made if None.
            counts: rows of each rank's part, the same on all ranks; None means that all have equally many.
            algorithm, timeout, async_op: as in `all_reduce`.

        Returns:
            ``out``; with ``async_op``, a `Work` whose wait returns that.

        Raises:
            ArgumentError and CommunicationError as in `all_reduce`.
        """
        timeout_s = self.timeout_s if timeout is None else timeout
        whole = tensor if self.rank == src else None
        repeats = counts is None and type(src) is int and out is not None
        at_once = repeats and not async_op and not self._in_flight
        if at_once and self._repeat(_SCATTER, whole, out, None, src, algorithm, timeout_s):
            return out
        with self._refusals["scatter"]:
            repeat = (_SCATTER, whole, out, None, src, algorithm) if repeats else None
            self._require_rank("src", src)
            if self.rank != src:
                if out is None:
                    raise ArgumentError(
                        f"out is None on rank {self.rank}; scatter needs it on every rank but src={src}"
                    )
                target = write_buffer(out)
                parts, _ = self._parts_from_own(target, counts)
                signature = self._signature("scatter", target, counts=parts, algorithm=algorithm, root=int(src))
                start = sum(parts[: self.rank])
                return self._runner.run(signature, None, target, timeout_s, async_op, output_start=start, repeat=repeat)
            if tensor is None:
                raise ArgumentError(f"tensor is None on rank {src}, the src of this scatter")
            source = read_buffer(tensor)
            parts, rows = self._parts(source, counts, "tensor")
            if out is None:
                out = empty_like(tensor, (rows[self.rank], *source.shape[1:]))
            target = self._output(out, source)
            _require_same_count("out", target, parts[self.rank])
            signature = self._signature("scatter", source, counts=parts, algorithm=algorithm, root=int(src))
            start = sum(parts[: self.rank])
            return self._runner.run(signature, source, target, timeout_s, async_op, output_start=start, repeat=repeat)

    def all_to_all(
        self,
        tensor: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        output_counts: Sequence[int] | None = None,
        algorithm: Algorithm | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Rank j ends with part j of every rank's ``tensor``, in order of the ranks they came from.

        Args:
            tensor: shape (n, ...); part r goes to rank r.
            out: shape (sum of ``output_counts``, ...); made if None. It may be ``tensor`` itself if all counts are
                equal.
            counts: rows that this rank sends to each; None needs n to be a multiple of the world size.
            output_counts: rows that this rank receives from each; None means ``counts`` if those are all equal.
            algorithm, timeout, async_op: as in `all_reduce`.

        Returns:
            What arrived, ``out`` if given; with ``async_op``, a `Work` whose wait returns that.

        Raises:
            ArgumentError and CommunicationError as in `all_reduce`; CollectiveMismatchError if a rank sends another
            number of rows than its peer expects.
        """
        timeout_s = self.timeout_s if timeout is None else timeout
        repeats = counts is None and output_counts is None and out is not None
        at_once = repeats and not async_op and not self._in_flight
        if at_once and self._repeat(_ALL_TO_ALL, tensor, out, None, 0, algorithm, timeout_s):
            return out
        with self._refusals["all_to_all"]:
            repeat = (_ALL_TO_ALL, tensor, out, None, 0, algorithm) if repeats else None
            source = read_buffer(tensor)
            parts, rows = self._parts(source, counts, "tensor")
            if output_counts is None:
                if len(set(rows)) > 1:
                    raise ArgumentError(
                        f"counts {rows} differ, so output_counts is needed: the rows received from each rank"
                    )
                output_counts = rows
            width = _row_width(source.shape)
            output_rows = self._checked_counts(output_counts, "output_counts")
            if output_rows[self.rank] != rows[self.rank]:
                raise ArgumentError(
                    f"rank {self.rank} sends itself {rows[self.rank]} rows by counts, but expects "
                    f"{output_rows[self.rank]} by output_counts; these two must be equal"
                )
            arriving = tuple(count * width for count in output_rows)
            if out is None:
                out = empty_like(tensor, (sum(output_rows), *source.shape[1:]))
            target = self._output(out, source)
            _require_same_count("out", target, sum(arriving))
            if source.overlaps(target) and (source.address != target.address or len({*parts, *arriving}) > 1):
                raise ArgumentError("out overlaps tensor; all_to_all can only work in place if all counts are equal")
            signature = self._signature("all_to_all", source, counts=parts, output_counts=arriving, algorithm=algorithm)
            return self._runner.run(signature, source, target, timeout_s, async_op, repeat=repeat)

    def barrier(
        self, *, algorithm: Algorithm | None = None, timeout: float | None = None, async_op: bool = False
    ) -> Work | None:
        """Return once every rank has called it.

        Args:
            algorithm, timeout, async_op: as in `all_reduce`.

        Returns:
            None; with ``async_op``, a `Work`.

        Raises:
            CommunicationError as in `all_reduce`.
        """
        timeout_s = self.timeout_s if timeout is None else timeout
        at_once = not async_op and not self._in_flight
        if at_once and self._repeat(_BARRIER, None, None, None, 0, algorithm, timeout_s):
            return None
        with self._refusals["barrier"]:
            signature = Signature("barrier", DTYPES["uint8"], op="max", algorithm=algorithm)
            result: Work | None = self._runner.run(
                signature, None, None, timeout_s, async_op, repeat=(_BARRIER, None, None, None, 0, algorithm)
            )
            return result

    # -- messages ------------------------------------------------------------------------------------------------

    def send(
        self, tensor: Any, dst: int, *, tag: int = 0, timeout: float | None = None, async_op: bool = False
    ) -> Work | None:
        """Send ``tensor`` to rank ``dst``, which must `recv` it.

        Messages are no collectives: only the two ranks take part, in any order with the messages to and from others,
        and with collectives. Of those from one rank to another with one tag, the first that is sent is the first that
        is received. Large messages, and more than a few small ones, are on their way until the peer receives them or
        itself waits for a `send`.

        Args:
            tensor: any shape; when the send is done it may be changed, even if nobody has received it yet.
            dst: another rank of this communicator.
            tag: any integer of 64 bits; a `recv` takes messages with its own tag alone.
            timeout, async_op: as in `all_reduce`.

        Returns:
            None; with ``async_op``, a `Work`.

        Raises:
            ArgumentError: the arguments can never work.
            CollectiveMismatchError: the `recv` is for another number of elements or another dtype; on both ranks, here
                perhaps in a later call.
            CollectiveTimeoutError, PeerLostError, CommunicatorClosedError: see `farandole.errors`.
        """
        with self._refusals["send"]:
            self._require_peer("dst", dst)
            self._require_tag(tag)
            timeout_s = self.timeout_s if timeout is None else timeout
            return self._runner.send(read_buffer(tensor), int(dst), int(tag), timeout_s, async_op)

    def recv(
        self,
        tensor: Any,
        src: int | None = None,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Receive into ``tensor`` what rank ``src`` sends. Of several that wait for a message, the one that was called
        first gets it.

        Args:
            tensor: as many elements of the same dtype as are sent; overwritten.
            src: another rank of this communicator; None takes a message of any rank. Which one it was, the `source` of
                the `Work` tells, with ``async_op``.
            tag: of the `send`. Messages with other tags may come before; those are kept until they are received.
            timeout, async_op: as in `all_reduce`.

        Returns:
            ``tensor``; with ``async_op``, a `Work` whose wait returns that.

        Raises:
            As `send`; PeerLostError with ``src`` None if no other rank is left.
        """
        with self._refusals["recv"]:
            if src is not None:
                self._require_peer("src", src)
                src = int(src)
            elif self.world_size == 1:
                raise ArgumentError("src is None, but there is no other rank to receive from")
            self._require_tag(tag)
            timeout_s = self.timeout_s if timeout is None else timeout
            return self._runner.receive(write_buffer(tensor), src, int(tag), timeout_s, async_op)

    # -- memory --------------------------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """A new array in *registered memory*, which the other ranks of this communicator read where it lies: calls on
        it need no copies in between. Not a collective; ranks may have more or fewer of them, and mix them with others.

        Args:
            shape: of the array.
            dtype: a numpy dtype or its name, or a torch dtype.

        Returns:
            A numpy array, or a torch tensor for a torch dtype, of zeros. Its memory goes back when it and all views of
            it are gone; it may outlive the communicator.

        Raises:
            ArgumentError: no such shape or dtype, or there is no memory for it.
        """
        return self._runner.empty(shape, dtype)

    # -- groups and life -----------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0, *, timeout_s: float | None = None) -> Communicator | None:
        """Make a communicator for each ``color``, of the ranks that named it. Called by all ranks.

        Args:
            color: ranks with the same one end in the same communicator; None joins none. Any integer >= 0.
            key: ranks of a color are ordered by key, then by their rank here.
            timeout_s: of the new communicator; None takes this one's.

        Returns:
            The new communicator, or None where color is None.

        Raises:
            ArgumentError: color is negative.
            CommunicationError as in `all_reduce`.
        """
        with self._refusals["split"]:
            if color is not None and not is_whole(color, 0):
                raise ArgumentError(f"color is {color!r}; it must be a whole number >= 0, or None to join no group")
            if timeout_s is not None:
                require_timeout("timeout_s", timeout_s)
            if not is_whole(key):
                raise ArgumentError(f"key is {key!r}; it must be a whole number")
        wishes = self._exchange("split", [-1 if color is None else color, key])
        members = sorted((wish_key, rank) for rank, (wish, wish_key) in enumerate(wishes) if wish == color)
        ranks = [rank for _, rank in members]

        def exchange(numbers: Sequence[int]) -> list[list[int]]:
            return self._exchange("split", numbers)

        membership = self._membership.split(ranks, exchange, self.timeout_s, self._runner.require_going)
        if membership is None:
            return None
        return Communicator(membership, timeout_s=self.timeout_s if timeout_s is None else timeout_s)

    def shrink(self, *, timeout: float | None = None) -> Communicator:
        """After a failure, the communicator of the ranks that are left. Each of them calls it, once; this one is closed
        then, also if that fails.

        Ranks whose process has ended, or that have closed this communicator, are left behind at once; those that do not
        come within the timeout, then. Where a network is cut in two, each part goes on by itself. Ranks keep their
        order. If another rank is lost while they agree, they go on without it, or it is lost in the new communicator.

        Args:
            timeout: seconds; None takes the communicator's.

        Returns:
            The new communicator, with the same timeout.

        Raises:
            ArgumentError: nothing has failed; or another thread has called it before.
            CommunicatorClosedError: the others have gone on without this rank, as it came too late.
            CollectiveTimeoutError: the rank that decides does not.
            RendezvousError: a rank could not join; on all.
        """
        timeout_s = self.timeout_s if timeout is None else timeout
        return Communicator(self._runner.shrink(self._membership, timeout_s), timeout_s=self.timeout_s)

    def _exchange(self, caller: str, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's whole numbers, equally many, within the method that is named ``caller``."""
        width = len(numbers)
        signature = Signature("all_gather", DTYPES["int64"], counts=(width,) * self.world_size, caller=caller)
        mine = np.array(numbers, dtype=np.int64)
        everyones = np.empty((self.world_size, width), dtype=np.int64)
        source, target = read_buffer(mine), write_buffer(everyones)
        self._runner.run(signature, source, target, self.timeout_s, False, input_start=width * self.rank)
        rows: list[list[int]] = everyones.tolist()
        return rows

    def explain(
        self, collective: str, nbytes: int, dtype: str = "float32", wire_dtype: str | None = None
    ) -> Explanation:
        """Which algorithm a call without ``algorithm`` uses, what each would cost, and why. Not a collective.

        Args:
            collective: its name, as of the method.
            nbytes: bytes of the whole buffer, S; for all_gather, of the gathered result.
            dtype: of the elements, by name; 16-bit floats are reduced by those algorithms alone that round sums once.
            wire_dtype: as in `all_reduce`, which alone has one.

        Returns:
            An `Explanation`; printed, a table.

        Raises:
            ArgumentError: there is no such collective, size, dtype or wire_dtype.
        """
        calibration, topology = self._membership.calibration, self._membership.topology
        return explain(collective, self.world_size, nbytes, calibration, dtype, topology, wire_dtype)

    def stats(self) -> list[CollectiveStats]:
        """What this rank did so far, per collective and algorithm."""
        return self._runner.stats()

    def wire_bytes(self) -> tuple[int, int]:
        """Bytes of data that this rank has sent to ranks of other hosts, and received from them, in collectives and
        messages, in the form in which they travel (see ``wire_dtype`` of `all_reduce`); what is around them (80 bytes
        for each segment, TCP and IP) is not counted."""
        return self._runner.wire_bytes()

    def flight_record(self) -> list[FlightEntry]:
        """The last collectives that this rank made, at most a thousand, the oldest first. Also after a failure: a
        rank whose call finds it writes it to a file, if FARANDOLE_FLIGHT_RECORDS names a folder."""
        return self._runner.flight_record()

    def log_into(self, record: Record) -> None:
        """Have all collectives from now on in ``record``; see `farandole.trace`, which does that."""
        self._runner.log_into(record)

    def leave_out_of_traces(self) -> None:
        """Have no collective in any trace that begins from now on."""
        self._runner.is_left_out = True

    @property
    def is_among_threads(self) -> bool:
        """Whether other ranks are threads of this process, as in `farandole.local`."""
        return self._runner.is_among_threads

    def refuse(self, call: str, error: Exception) -> None:
        """Tell the other ranks that this one does not make a call that they may be in: their errors then say so. The
        collectives do that by themselves; this is for what checks arguments before it comes to them.

        Args:
            call: its name.
            error: why. If it is a CommunicationError, the call was begun, and there is nothing to tell.
        """
        self._runner.refuse(call, error)

    def abort(self) -> None:
        """End all calls of all ranks of this communicator at once; callable from any thread. They raise
        CommunicatorClosedError."""
        self._runner.abort()

    def close(self) -> None:
        """Leave the communicator. Never needs other ranks; safe to call twice.

        Calls still going on in the background get a second to end; after that the communicator is aborted with a
        RuntimeWarning.

        Raises:
            CollectiveMismatchError: this rank's last call was not that of another rank, so its results are worthless,
                and neither had to wait for the other there. On some of the ranks; the others may have left before.
        """
        self._runner.close()

    @property
    def closed(self) -> bool:
        """Whether this rank has closed the communicator."""
        return self._runner.closed

    @property
    def poisons(self) -> bool:
        """Whether outputs of asynchronous calls are spoiled until they are done: FARANDOLE_POISON."""
        return self._runner.poisons

    def is_lost(self, rank: int) -> bool:
        """Whether the process of a rank has ended, or has closed this communicator."""
        self._require_rank("rank", rank)
        return self._runner.is_lost(rank)

    def is_in_use(self, address: int, nbytes: int) -> bool:
        """Whether a call that goes on in the background uses any of so many bytes from ``address`` on."""
        return self._runner.is_in_use(address, nbytes)

    @property
    def aborted(self) -> bool:
        """Whether any rank has stopped the communicator: by `abort`, or by a failure."""
        return self._runner.aborted

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(*([] if error is None else [CommunicationError])):  # the body's own error comes first
            self.close()

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.world_size}{', closed' if self.closed else ''}>"

    # -- checks --------------------------------------------------------------------------------------------------

    def _in_and_out(self, tensor: Any, out: Any) -> tuple[Buffer, Buffer]:
        if out is None:
            buffer = write_buffer(tensor)
            return buffer, buffer
        source = read_buffer(tensor)
        return source, self._output(out, source)

    def _output(self, out: Any, source: Buffer) -> Buffer:
        target = write_buffer(out)
        if target.dtype != source.dtype:
            raise ArgumentError(
                f"out has dtype {target.dtype.name}, but tensor has {source.dtype.name}; they must be equal"
            )
        return target

    def _signature(self, collective: str, buffer: Buffer, *, op: str | None = None, **more: Any) -> Signature:
        if is_reducing(collective):
            require_reducible(buffer.dtype, op)
        return Signature(collective, buffer.dtype, op, **more)

    def _parts(self, whole: Buffer, counts: Sequence[int] | None, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Elements and rows of each rank's part of ``whole``."""
        num_rows = whole.shape[0] if whole.shape else 1
        if counts is None:
            if num_rows % self.world_size:
                raise ArgumentError(
                    f"{name} has {num_rows} rows, which {self.world_size} ranks cannot share equally; give counts, "
                    f"e.g. counts={split_evenly(num_rows, self.world_size)}"
                )
            counts = [num_rows // self.world_size] * self.world_size
        rows = self._checked_counts(counts, "counts")
        if sum(rows) != num_rows:
            raise ArgumentError(f"counts {rows} add up to {sum(rows)}, but {name} has {num_rows} rows")
        width = _row_width(whole.shape)
        return tuple(count * width for count in rows), rows

    def _parts_from_own(self, part: Buffer, counts: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Elements and rows of each rank's part, where ``part`` is this rank's."""
        num_rows = part.shape[0] if part.shape else 1
        rows = self._checked_counts([num_rows] * self.world_size if counts is None else counts, "counts")
        if rows[self.rank] != num_rows:
            raise ArgumentError(f"counts says {rows[self.rank]} rows for rank {self.rank}, whose array has {num_rows}")
        width = _row_width(part.shape)
        return tuple(count * width for count in rows), rows

    def _checked_counts(self, counts: Sequence[int], name: str) -> tuple[int, ...]:
        try:
            rows = tuple(operator.index(count) for count in counts)
        except TypeError:
            rows = ()
        if len(rows) != self.world_size or min(rows) < 0:
            raise ArgumentError(
                f"{name} is {counts!r}; it must hold {self.world_size} whole numbers >= 0, one per rank"
            )
        if sum(rows) > _MOST_ROWS:
            raise ArgumentError(f"{name} is {counts!r}; that is more than memory can hold")
        return rows

    def _require_rank(self, name: str, rank: int) -> None:
        if not is_whole(rank, 0) or rank >= self.world_size:
            raise ArgumentError(f"{name} is {rank!r}; the ranks of this communicator are 0..{self.world_size - 1}")

    def _require_tag(self, tag: int) -> None:
        if not is_whole(tag):
            raise ArgumentError(f"tag is {tag!r}; it must be a whole number")

    def _require_peer(self, name: str, rank: int) -> None:
        self._require_rank(name, rank)
        if rank == self.rank:
            raise ArgumentError(f"{name} is {rank}, which is this rank itself; copy the array instead")


class _Refusals:
    """Tells the other ranks if a call ends before it begins, as what was asked for can never work here: they may wait
    for it."""

    __slots__ = ("_name", "_runner")

    def __init__(self, runner: Runner, name: str) -> None:
        self._runner = runner
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._runner.refuse(self._name, error)


def is_whole(value: Any, minimum: int = -(2**63)) -> bool:
    """Whether ``value`` is a whole number that fits 64 bits, and no less than ``minimum``."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and minimum <= int(value) < 2**63


def _row_width(shape: tuple[int, ...]) -> int:
    return math.prod(shape[1:])


def _require_same_count(name: str, buffer: Buffer, count: int) -> None:
    if buffer.count != count:
        raise ArgumentError(f"{name} has {buffer.count} elements (shape {buffer.shape}); it must have {count}")
