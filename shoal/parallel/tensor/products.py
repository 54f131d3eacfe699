"""What autograd functions of linears need beside their products: autocast's dtype, the bias, the weight's gradient."""

from __future__ import annotations

import torch


def add_bias(output: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In the dtype of ``output``, as ``F.linear`` does it under autocast."""
    return output if bias is None else output + bias.to(output.dtype)


def weight_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Of ``x @ weight.t()``. Shape: [..., M], [..., K] -> [M, K]."""
    return gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def cast_for_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """All in autocast's dtype where it is on: autograd functions are not cast."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors]
