"""The entry point by which torch finds farandole. Nothing of farandole is loaded until a group is made."""

from __future__ import annotations

from typing import Any

__all__ = ["register"]


def register() -> None:
    """Register the backend "farandole" with `torch.distributed`, once; do nothing where torch lacks that."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "FARANDOLE"):
        dist.Backend.register_backend("farandole", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    from farandole.torch_backend.group import create

    return create(options, backend_options)
