"""The meeting of ranks that torchrun has started, at the store that its agent serves on MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

from datetime import timedelta

from farandole.connections import Transport
from farandole.door import Address
from farandole.errors import RendezvousError
from farandole.membership import Membership
from farandole.rendezvous import join_at
from farandole.torch_store import StoreMeetingPlace, meeting_name

__all__ = ["join_at_agent"]

_LONGEST_CONNECT_S = 86_400.0


def join_at_agent(
    address: Address, rank: int, world_size: int, secret: bytes, timeout_s: float, transport: Transport
) -> Membership:
    """Meet the others there. torch is loaded for that.

    Args:
        address: of the agent's store.
        rank, world_size: of this process.
        secret: of the job; empty if there is none.
        timeout_s: how long to wait for the others.
        transport: what connects hosts.

    Raises:
        RendezvousError: the store does not answer; or as `farandole.rendezvous.join`.
    """
    import torch.distributed as dist

    try:
        limit = timedelta(seconds=min(timeout_s, _LONGEST_CONNECT_S))
        agent = dist.TCPStore(*address, world_size, is_master=False, timeout=limit, wait_for_workers=False)
        store = dist.PrefixStore("farandole", agent)
        name = meeting_name(store, range(world_size), rank)
    except RuntimeError as error:
        raise RendezvousError(f"the store of torchrun's agent at {address[0]}:{address[1]} fails: {error}") from error
    place = StoreMeetingPlace(store, name, secret)
    return join_at(place, rank, range(world_size), timeout_s, secret, transport=transport)
