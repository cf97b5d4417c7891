"""A group of `torch.distributed` whose collectives run on a farandole `Communicator`.

torch calls a backend in two ways: its Python code looks methods up by name, its C++ code (DistributedDataParallel,
functional collectives) through a table of its own. Both end in the methods below, under the names of torch 2.13 and, as
aliases, those of before.

A call that torch wants to be synchronous runs on the caller's thread and is over when the method returns; what goes
wrong raises farandole's own errors. Any other returns a `Handle`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from farandole.buffers import require_no_self_overlap
from farandole.communicator import Communicator
from farandole.errors import ArgumentError, CollectiveMismatchError, CommunicationError, PeerLostError
from farandole.launch.environment import secret_from, transport_from
from farandole.membership import join_alone
from farandole.rendezvous import join_at
from farandole.runner import tell_at_exit
from farandole.torch_backend.entry import entry, message_entry
from farandole.torch_backend.monitored_barrier import monitored_barrier
from farandole.torch_backend.parts import Part
from farandole.torch_backend.reductions import Reducing, name_of_op, wide
from farandole.torch_backend.tensors import (
    OWN_DTYPES,
    Delivery,
    joined_input,
    joined_output,
    movable_input,
    movable_output,
    num_units,
    only,
    plain_input,
    plain_output,
    require_elements,
    require_equal_dtypes,
)
from farandole.torch_backend.works import Completer, FinishedHandle, Handle, Handles, seconds_of
from farandole.torch_eager import eager
from farandole.torch_store import StoreMeetingPlace, meeting_name
from farandole.work import Work

__all__ = ["ProcessGroup", "create"]

Tensor: TypeAlias = torch.Tensor
Tensors: TypeAlias = Sequence[Tensor]


@eager
def create(options: Any, _backend_options: Any = None) -> ProcessGroup:
    """The group that torch asks for.

    Args:
        options: torch's ``_DistributedBackendOptions``: store, group_rank, group_size, timeout, group_id and
            global_ranks_in_group.

    Raises:
        RendezvousError: the ranks did not find one another at torch's store, or share no memory.
    """
    size = options.group_size
    timeout_s = seconds_of(options.timeout) or dist.default_pg_timeout.total_seconds()
    secret = secret_from(os.environ)
    if secret:  # of this group, so that nothing that is set for another passes for its own
        secret = hmac.new(secret, options.group_id.encode(), hashlib.sha256).digest()
    name = meeting_name(options.store, options.global_ranks_in_group, options.group_rank)
    place = StoreMeetingPlace(options.store, name, secret, partial(_require_alive, options.global_ranks_in_group))
    if size == 1:
        membership = join_alone()
    else:
        members, transport = options.global_ranks_in_group or range(size), transport_from(os.environ)
        membership = join_at(place, options.group_rank, members, timeout_s, secret, transport=transport)
    return ProcessGroup(Communicator(membership, timeout_s=timeout_s), options.store, place, options.group_id)


def _require_alive(job_ranks: Sequence[int]) -> None:
    """See that the ranks of a group that is being made are there, if the world is farandole's: that watches them."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if isinstance(world, ProcessGroup):
        for rank in job_ranks:
            if world.communicator.is_lost(rank):
                raise PeerLostError(f"rank {rank} ended while it was waited for to make a group of ranks {job_ranks}")


_MOST_SPARSE_DIMENSIONS = 32


@eager
class ProcessGroup(dist.ProcessGroup):
    """The ranks of a `torch.distributed` group.

    Methods take and return what torch's own groups do: lists of one tensor, options, and a handle to wait for.

    Args:
        communicator: of these ranks.
        store: torch's, of this group.
        place: where this group met, for its monitored barriers.
        name: of the group.

    Attributes:
        communicator: that, for its `stats`, `explain` and `empty`. Collectives that are called on it count as the
            group's: all ranks must make them, in the same order.
    """

    def __init__(self, communicator: Communicator, store: Any, place: StoreMeetingPlace, name: str) -> None:
        super().__init__(communicator.rank, communicator.world_size)
        self.communicator = communicator
        self._store = store
        self._place = place
        self._name = name
        self._description = "undefined"
        self._completer = Completer()
        self._handles = Handles()
        self._done = FinishedHandle([])
        self._num_monitored_barriers = 0

    # -- what the group is ---------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """The name that the backend is registered by."""
        return "farandole"

    name = getBackendName

    def getRank(self) -> int:
        """Of this process in the group."""
        return self.communicator.rank

    rank = getRank

    def getSize(self) -> int:
        """Number of ranks."""
        return self.communicator.world_size

    size = getSize

    def getGroupName(self) -> str:
        """As torch calls the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Call the group so."""
        self._name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:
        """What the group is for, as the user said."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Say what the group is for."""
        self._description = description

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, _device: torch.device) -> ProcessGroup:
        return self

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def get_group_store(self) -> Any:
        """torch's store, of this group."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: every call carries its number from the start."""

    def _get_sequence_number_for_group(self) -> int:
        return sum(entry.calls for entry in self.communicator.stats() if entry.collective not in ("send", "recv"))

    def empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """A tensor in registered memory; see `farandole.torch_backend.empty`."""
        tensor: Tensor = self.communicator.empty(shape, dtype)
        return tensor

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether `allocate_tensor` gives memory for that device: asked by fully_shard."""
        return bool(device.type == "cpu")

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of ``size`` elements in registered memory, for the buffers of fully_shard."""
        if not self.supports_tensor_alloc(device):
            raise ArgumentError(f"device is {device}; registered memory is of the CPU")
        return self.empty((size,), dtype)

    # -- its life ------------------------------------------------------------------------------------------------

    def setTimeout(self, timeout: timedelta) -> None:
        """Let calls that do not say otherwise wait so long."""
        self.communicator.timeout_s = seconds_of(timeout) or self.communicator.timeout_s

    set_timeout = _set_default_timeout = setTimeout

    def shutdown(self) -> None:
        """Leave the group; never needs the others. That the ranks' last calls differed fails the process at its end:
        torch would not go on if it were raised here."""
        try:
            self.communicator.close()
        except CommunicationError as error:
            tell_at_exit(error)
        self._completer.join()

    def abort(self) -> None:
        """End all calls of all ranks at once."""
        self.communicator.abort()

    # -- running calls -------------------------------------------------------------------------------------------

    def _run(self, opts: Any, *parts: Part) -> dist.Work:
        """Make the calls of all ``parts``, and deliver what comes out of each."""
        timeout_s = seconds_of(opts.timeout)
        if not opts.asyncOp:
            for part in parts:
                part.call(timeout=timeout_s)
                if part.deliver is not None:
                    part.deliver()
            return self._done
        if self.communicator.poisons:
            for part in parts:
                part.poison(self.communicator.is_in_use)
        works: list[Work] = [part.call(timeout=timeout_s, async_op=True) for part in parts]
        deliveries = [part.deliver for part in parts if part.deliver is not None]
        tensors = [tensor for part in parts for tensor in part.tensors]
        return self._handles.keep(Handle(works, deliveries, tensors, self._completer))

    def _require_one_per_rank(self, tensors: Tensors, name: str) -> None:
        if len(tensors) != self.size():
            raise ArgumentError(f"{name} has {len(tensors)} tensors; it must have {self.size()}, one per rank")

    # -- reductions ----------------------------------------------------------------------------------------------

    @entry("all_reduce", c10d.AllreduceOptions, 1, "op", "timeout", takes_lists=True)
    def allreduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Every rank ends with the reduction of all ranks' tensor."""
        tensor = only(tensors, "the tensors to all_reduce")
        if tensor.is_sparse:
            return self._sparse_allreduce(tensor, opts)
        op = name_of_op(opts.reduceOp.op)
        is_plain = tensor.grad_fn is None and tensor.dtype in OWN_DTYPES
        if op is not None and is_plain and not opts.asyncOp:  # the fast way
            self.communicator.all_reduce(tensor, op, timeout=seconds_of(opts.timeout))
            return self._done
        return self._run(opts, self._allreduce(tensor, opts))

    @entry("all_reduce", c10d.AllreduceCoalescedOptions, 1)
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> dist.Work:
        """`allreduce` of several tensors."""
        return self._run(opts, *[self._allreduce(tensor, opts) for tensor in tensors])

    def _allreduce(self, tensor: Tensor, opts: Any) -> Part:
        reducing = Reducing(tensor, opts.reduceOp)
        require_no_self_overlap(tuple(tensor.shape), tensor.stride())
        call = partial(self.communicator.all_reduce, reducing.operand, reducing.op)
        return Part(call, [tensor], reducing.deliver_to(tensor))

    def _sparse_allreduce(self, tensor: Tensor, opts: Any) -> dist.Work:
        """Everybody gets all indices and values, as the sum is sparse, too. Waits for the others."""
        communicator, timeout_s = self.communicator, seconds_of(opts.timeout)
        own = tensor.detach().to(wide(tensor.dtype)).coalesce()
        reducing = Reducing(own.values(), opts.reduceOp)
        if reducing.op not in ("sum", "avg"):
            raise ArgumentError(f"op is {reducing.op}; of sparse tensors there are the sum and the average alone")
        indices = own.indices().t().contiguous()
        counts = self._sparse_counts(own, timeout_s)
        all_indices = communicator.all_gather(indices, counts=counts, timeout=timeout_s)
        all_values = communicator.all_gather(reducing.operand.contiguous(), counts=counts, timeout=timeout_s)
        total = torch.sparse_coo_tensor(
            all_indices.t(), all_values, own.shape, device=own.device, check_invariants=False
        ).coalesce()
        if reducing.op == "avg":
            total = total / communicator.world_size
        with torch.no_grad():
            tensor.copy_(total)
        return FinishedHandle([tensor])

    def _sparse_counts(self, own: Tensor, timeout_s: float | None) -> list[int]:
        """How many entries each rank's tensor has, once it is certain that all are of one shape."""
        if own.dim() > _MOST_SPARSE_DIMENSIONS:
            raise ArgumentError(f"the sparse tensor has {own.dim()} dimensions; {_MOST_SPARSE_DIMENSIONS} at most")
        shape = [*own.shape, *[-1] * (_MOST_SPARSE_DIMENSIONS - own.dim())]
        mine = torch.tensor([own._nnz(), own.sparse_dim(), *shape], device="cpu")
        everyones = self.communicator.all_gather(mine, timeout=timeout_s).view(self.size(), -1).tolist()
        if len({tuple(layout) for _, *layout in everyones}) > 1:
            lines = [
                f"    rank {rank}: {tuple(length for length in lengths if length >= 0)}, {sparse_dim} of them sparse"
                for rank, (_, sparse_dim, *lengths) in enumerate(everyones)
            ]
            problem = "the ranks all_reduce sparse tensors of different shapes:"
            raise CollectiveMismatchError("\n".join([problem, *lines]))
        return [count for count, *_ in everyones]

    @entry("reduce", c10d.ReduceOptions, 1, "root", "op", "timeout", takes_lists=True)
    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """The root ends with the reduction; the others keep what they have."""
        tensor, root = only(tensors, "the tensors to reduce"), opts.rootRank
        reducing = Reducing(tensor, opts.reduceOp)
        call = partial(self.communicator.reduce, reducing.operand, root, reducing.op)
        return self._run(opts, Part(call, [tensor], reducing.deliver_to(tensor) if self.rank() == root else None))

    @entry("reduce_scatter", c10d.ReduceScatterOptions, 2, "op", "timeout", takes_lists=True)
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        """Every rank ends with its tensor of the reduction of all ranks' lists."""
        parts = only(inputs, "the inputs of reduce_scatter")
        self._require_one_per_rank(parts, "input_list")
        counts = [part.numel() for part in parts]
        output = only(outputs, "the outputs of reduce_scatter")
        require_equal_dtypes(output, *parts)
        rank = self.rank()
        require_elements("the output", output, counts[rank], f"as input_list[{rank}], which comes to it")
        return self._run(opts, self._reduce_scatter(output, joined_input(parts), counts, opts))

    @entry("reduce_scatter", c10d.ReduceScatterOptions, 2)
    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any) -> dist.Work:
        """Every rank ends with its part of the reduction of all ranks' input."""
        return self._run(opts, self._reduce_scatter_into(output, source, opts))

    @entry("reduce_scatter", c10d.ReduceScatterOptions, 2)
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        """`reduce_scatter_single` of several pairs."""
        pairs = zip(outputs, inputs, strict=True)
        return self._run(opts, *[self._reduce_scatter_into(output, source, opts) for output, source in pairs])

    def _reduce_scatter_into(self, output: Tensor, source: Tensor, opts: Any) -> Part:
        count = output.numel()
        require_elements("the input", source, count * self.size(), f"the output's {count} for each rank")
        return self._reduce_scatter(output, plain_input(source), [count] * self.size(), opts)

    def _reduce_scatter(self, output: Tensor, row: Tensor, counts: Sequence[int], opts: Any) -> Part:
        require_equal_dtypes(output, row)
        reducing = Reducing(row, opts.reduceOp)
        if reducing.is_scaled:
            out = reducing.operand.new_empty(output.numel())
            deliver: Delivery = lambda: output.detach().copy_(out.view(output.shape))  # noqa: E731
        else:
            out, deliver = plain_output(output)
        call = partial(
            self.communicator.reduce_scatter, reducing.operand, reducing.op, out=out, counts=_unless_equal(counts)
        )
        return Part(call, [output], deliver)

    # -- moving data ---------------------------------------------------------------------------------------------

    @entry("broadcast", c10d.BroadcastOptions, 1, "root", "timeout", takes_lists=True)
    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Every rank ends with what the root has."""
        tensor = only(tensors, "the tensors to broadcast")
        root = opts.rootRank
        out, deliver = (movable_input(tensor), None) if self.rank() == root else movable_output(tensor)
        return self._run(opts, Part(partial(self.communicator.broadcast, out, root), [tensor], deliver))

    @entry("all_gather", c10d.AllgatherOptions, 2, "timeout", takes_lists=True)
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        """Every rank ends with all ranks' tensors, which may differ in size."""
        return self._run(opts, *[self._all_gather(*pair) for pair in zip(outputs, inputs, strict=True)])

    @entry("all_gather", c10d.AllgatherOptions, 2)
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        """`allgather` of several tensors; ``outputs`` has a list per rank, with one tensor for each."""
        self._require_one_per_rank(outputs, "output_lists")
        per_input = list(zip(*outputs, strict=True))
        return self._run(opts, *[self._all_gather(*pair) for pair in zip(per_input, inputs, strict=True)])

    @entry("all_gather", c10d.AllgatherOptions, 2)
    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any) -> dist.Work:
        """Every rank ends with all ranks' input in one tensor."""
        return self._run(opts, self._all_gather_into(output, source))

    @entry("all_gather", c10d.AllgatherOptions, 2)
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        """`all_gather_single` of several pairs."""
        return self._run(opts, *[self._all_gather_into(*pair) for pair in zip(outputs, inputs, strict=True)])

    def _all_gather_into(self, output: Tensor, own: Tensor) -> Part:
        require_equal_dtypes(output, own)
        require_elements("the output", output, own.numel() * self.size(), f"the input's {own.numel()} of each rank")
        out, deliver = movable_output(output)
        return Part(partial(self.communicator.all_gather, movable_input(own), out=out), [output], deliver)

    def _all_gather(self, outputs: Tensors, own: Tensor) -> Part:
        self._require_one_per_rank(outputs, "tensor_list")
        require_equal_dtypes(own, *outputs)
        rank = self.rank()
        require_elements("the input", own, outputs[rank].numel(), f"as tensor_list[{rank}], which it goes to")
        out, counts, deliver = joined_output(outputs)
        call = partial(self.communicator.all_gather, movable_input(own), out=out, counts=_unless_equal(counts))
        return Part(call, outputs, deliver)

    @entry("gather", c10d.GatherOptions, 2, "root", "timeout", takes_lists=True)
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        """The root ends with all ranks' tensors."""
        own, root = only(inputs, "the tensors to gather"), opts.rootRank
        call = partial(self.communicator.gather, movable_input(own), root)
        if self.rank() != root:
            return self._run(opts, Part(call, [own], None))
        targets = only(outputs, "the outputs of gather")
        self._require_one_per_rank(targets, "gather_list")
        require_equal_dtypes(own, *targets)
        for rank, target in enumerate(targets):
            require_elements(f"gather_list[{rank}]", target, own.numel(), "as the input; gather knows no other sizes")
        out, _, deliver = joined_output(targets)
        return self._run(opts, Part(partial(call, out=out), targets, deliver))

    @entry("scatter", c10d.ScatterOptions, 2, "root", "timeout", takes_lists=True)
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        """Every rank ends with its tensor of the root's list."""
        output, root = only(outputs, "the outputs of scatter"), opts.rootRank
        out, deliver = movable_output(output)
        row = None
        if self.rank() == root:
            sources = only(inputs, "the inputs of scatter")
            self._require_one_per_rank(sources, "scatter_list")
            require_equal_dtypes(output, *sources)
            for rank, source in enumerate(sources):
                name = f"scatter_list[{rank}]"
                require_elements(name, source, output.numel(), "as the output; scatter knows no other sizes")
            row = movable_input(joined_input(sources))
        call = partial(self.communicator.scatter, row, root, out=out)
        return self._run(opts, Part(call, [output], deliver))

    @entry("all_to_all", c10d.AllToAllOptions, 2)
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        """Rank j ends with tensor j of every rank's list."""
        self._require_one_per_rank(outputs, "output_tensor_list")
        self._require_one_per_rank(inputs, "input_tensor_list")
        require_equal_dtypes(*outputs, *inputs)
        rank = self.rank()
        name = f"input_tensor_list[{rank}]"
        require_elements(name, inputs[rank], outputs[rank].numel(), f"as output_tensor_list[{rank}], which it goes to")
        out, arriving, deliver = joined_output(outputs)
        row, leaving = movable_input(joined_input(inputs)), [num_units(source) for source in inputs]
        return self._run(opts, self._all_to_all(row, leaving, out, arriving, outputs, deliver))

    @entry("all_to_all", c10d.AllToAllOptions, 4, "timeout")
    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any,
    ) -> dist.Work:
        """Rank j ends with run j of rows of every rank's input."""
        require_equal_dtypes(output, source)
        out, deliver = movable_output(output)
        leaving = self._split_counts(source, input_splits, "input")
        arriving = self._split_counts(output, output_splits, "output")
        rank = self.rank()
        if leaving[rank] != arriving[rank]:
            raise ArgumentError(
                f"by input_split_sizes rank {rank} sends itself {leaving[rank]} elements, by output_split_sizes it "
                f"expects {arriving[rank]} (input of shape {tuple(source.shape)}, output of {tuple(output.shape)})"
            )
        return self._run(opts, self._all_to_all(movable_input(source), leaving, out, arriving, [output], deliver))

    def _all_to_all(
        self,
        row: Tensor,
        leaving: Sequence[int],
        out: Tensor,
        arriving: Sequence[int],
        outputs: Tensors,
        deliver: Delivery,
    ) -> Part:
        are_equal = len({*leaving, *arriving}) == 1  # the fast way
        call = partial(
            self.communicator.all_to_all,
            row,
            out=out,
            counts=None if are_equal else leaving,
            output_counts=None if are_equal else arriving,
        )
        return Part(call, outputs, deliver)

    def _split_counts(self, tensor: Tensor, splits: Sequence[int], name: str) -> list[int]:
        """Elements per rank, of a tensor that is split along its first dimension."""
        num_rows = tensor.shape[0] if tensor.dim() else 1
        if splits:
            if len(splits) != self.size() or sum(splits) != num_rows:
                raise ArgumentError(
                    f"{name}_split_sizes is {list(splits)}; it must have {self.size()} numbers that add up to the "
                    f"{num_rows} rows of the {name}"
                )
        elif num_rows % self.size():
            raise ArgumentError(
                f"the {name} has {num_rows} rows, which {self.size()} ranks cannot share equally; give "
                f"{name}_split_sizes"
            )
        else:
            splits = [num_rows // self.size()] * self.size()
        width = num_units(tensor) // max(num_rows, 1)
        return [split * width for split in splits]

    # -- barriers ------------------------------------------------------------------------------------------------

    @entry("barrier", c10d.BarrierOptions, 0, "timeout")
    def barrier(self, opts: Any) -> dist.Work:
        """Every rank goes on once all have come."""
        return self._run(opts, Part(partial(self.communicator.barrier), [], None))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier at torch's store: where ranks do not come, the error names them, and the group can go on.

        Raises:
            CollectiveTimeoutError: on rank 0, that these ranks have not come in time; with ``wait_all_ranks`` all of
                them are named, without it the first. On the others, that it failed on rank 0.
        """
        timeout_s = self.communicator.timeout_s if timeout is None else timeout.total_seconds()
        self._num_monitored_barriers += 1
        number = self._num_monitored_barriers
        monitored_barrier(self._place, number, self.rank(), self.size(), timeout_s, wait_all_ranks)

    # -- messages ------------------------------------------------------------------------------------------------

    @message_entry("send")
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        """Send to one rank."""
        tensor = only(tensors, "the tensors to send")
        return self._message(Part(partial(self.communicator.send, movable_input(tensor), dst), [tensor], None), tag)

    @message_entry("recv")
    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> dist.Work:
        """Receive from one rank; from whichever sends if it is None."""
        tensor = only(tensors, "the tensors to receive")
        out, deliver = movable_output(tensor)
        part = Part(partial(self.communicator.recv, out, src), [tensor], deliver)
        if self.communicator.poisons:
            part.poison(self.communicator.is_in_use)
        return self._message(part, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Receive from whichever rank sends; the handle's `source_rank` tells which."""
        return self.recv(tensors, None, tag)

    def _message(self, part: Part, tag: int) -> dist.Work:
        work: Work = part.call(tag=tag, async_op=True)
        # Messages end in any order, so each has a completer of its own.
        deliveries = [] if part.deliver is None else [part.deliver]
        return self._handles.keep(Handle([work], deliveries, part.tensors, Completer(idle_s=0.0)))

    # -- the names of before 2.13 --------------------------------------------------------------------------------

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _unless_equal(counts: Sequence[int]) -> Sequence[int] | None:
    """The parts' sizes; None where all are equal, which is the fast way."""
    return None if len(set(counts)) == 1 else counts
