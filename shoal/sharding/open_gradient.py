"""A gradient of an unfinished step as plain values: for a checkpoint, and for ``offload_states`` in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shoal.sharding.gradient import Gradient, GradientState
from shoal.sharding.sparse_gradient import SparseGradient
from shoal.sharding.sparse_sum import coalesced


def export(gradient: Gradient) -> dict[str, Any] | None:
    """What is open between two passes, as nested values with tensors; None: nothing is."""
    if gradient.moved is not None:
        return gradient.moved
    gradient.take_back()
    values = gradient.rows() if isinstance(gradient, SparseGradient) else _values(gradient)
    gradient.show_sum()
    if values is None:
        return None
    return {
        "is_wide": gradient.dtype == gradient.sum_dtype,
        "state": gradient.state.value,
        "touched": list(gradient.has_grad),
        **values,
    }


def _values(gradient: Gradient) -> dict[str, Any] | None:
    has_sum, unsynced = gradient.state is not GradientState.NONE, gradient.unsynced
    gradients = {str(i): _dense(p.grad) for i, p in enumerate(gradient.parameters) if p.grad is not None}
    if not has_sum and not unsynced.has_memory and not gradients:
        return None
    return {
        "accumulator": gradient.memory() if has_sum else None,
        "held": unsynced.full if unsynced.has_memory else None,
        "gradients": gradients,
    }


@torch.no_grad()
def restore(gradient: Gradient, saved: Mapping[str, Any]) -> None:
    """Set what ``export`` gave on the same rank of the same layout."""
    gradient.reset()
    if saved["is_wide"]:
        gradient.widen()
    if isinstance(gradient, SparseGradient):
        gradient.set_rows(saved)
    else:
        _set_values(gradient, saved)
    gradient.state = GradientState(saved["state"])
    gradient.has_grad = bytearray(saved["touched"])
    gradient.show_sum()


def _set_values(gradient: Gradient, saved: Mapping[str, Any]) -> None:
    if saved["accumulator"] is not None:
        gradient.memory().copy_(saved["accumulator"])
    if saved["held"] is not None:
        gradient.allocate_unsynced().full.copy_(saved["held"])
    for index, parameter in enumerate(gradient.parameters):
        value = saved["gradients"].get(str(index))
        parameter.grad = None if value is None else value.to(parameter.device, parameter.dtype)


def move_to_host(gradient: Gradient, to_host: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Free the device's memory, which no peer reads. ``to_host`` copies what is open, and what reductions have lost."""
    saved = export(gradient)
    copied = None if saved is None else _copied(saved, to_host)
    gradient.free()
    gradient.moved = copied
    gradient.sent.move(to_host)


def move_to_device(gradient: Gradient, to_device: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Undo ``move_to_host``."""
    gradient.sent.move(to_device)
    if gradient.moved is not None:
        restore(gradient, gradient.moved)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of what ``export`` gives."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value.values() for tensor in tensors_in(item)] if isinstance(value, dict) else []


def _copied(value: Any, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return copy(value)
    return {key: _copied(item, copy) for key, item in value.items()} if isinstance(value, dict) else value


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return coalesced(gradient, gradient.dtype).to_dense() if gradient.is_sparse else gradient
