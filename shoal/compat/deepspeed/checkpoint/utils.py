"""``deepspeed.checkpoint.utils``: tensors that are saved without the storage they are a part of."""

from __future__ import annotations

from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """The same structure, each tensor with a storage of its own size on ``device``.

    Args:
        item: a tensor, or dicts, lists and tuples of them; anything else is given back as it is.
    """
    if isinstance(item, torch.Tensor):
        moved = item.detach().to(device)
        is_tight = moved.untyped_storage().nbytes() == moved.numel() * moved.element_size()
        return moved if is_tight and moved is not item else moved.clone()
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(clone_tensors_for_torch_save(value, device) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


__all__ = ["clone_tensors_for_torch_save"]
