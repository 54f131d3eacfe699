"""The gated activation of Llama and of most experts, silu(gate) * up.

torch's operators    10 bytes an element of 16 bits, and 26 in backward; keep silu(gate) until then
one kernel            6, and 10 (``shoal.kernels.swiglu``)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.comm.autograd import once_differentiable
from shoal.device import is_fake
from shoal.kernels.use import has_kernels, one_kernel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def swiglu(gate_up: Tensor) -> Tensor:
    """The product of the activated first half of each row and its second half.

    Args:
        gate_up: [..., 2 * width].

    Returns: [..., width]. Where no kernel runs it has the bits of ``silu(gate) * up``.
    """
    if gate_up.dtype not in _DTYPES or not gate_up.numel() or not (is_fake(gate_up) or has_kernels(gate_up)):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    out: Tensor = _SwiGLU.apply(gate_up.reshape(-1, gate_up.shape[-1]))
    return out.view(*gate_up.shape[:-1], -1)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        if has_kernels(gate_up):
            from shoal.kernels import swiglu as kernels

            out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
            kernels.forward(gate_up, out)
            return out
        with one_kernel():
            gate, up = gate_up.clone().chunk(2, dim=-1)  # a copy inside of a kernel: it reads both halves
            return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        if has_kernels(gradient, gate_up):
            from shoal.kernels import swiglu as kernels

            of_gate_up = torch.empty_like(gate_up)
            kernels.backward(gradient if gradient.stride(1) == 1 else gradient.contiguous(), gate_up, of_gate_up)
            return of_gate_up
        with one_kernel():
            gate, up = gate_up.clone().chunk(2, dim=-1)
            of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
            return torch.cat((of_gate, gradient * F.silu(gate)), 1)
