"""silu(gate) * up and its gradients, each in one pass over memory.

    forward     reads gate and up, writes the product               6 bytes an element of 16 bits
    backward    reads those and a gradient, writes two gradients    10

A program has a block of a row. Values are computed in fp32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def forward(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Fill ``out``, [rows, width], from ``gate_up``, [rows, 2 * width]; the elements of a row follow each other."""
    grid, block = _grid(out)
    _forward[grid](gate_up, out, out.shape[1], gate_up.stride(0), out.stride(0), BLOCK=block)


def backward(gradient: torch.Tensor, gate_up: torch.Tensor, of_gate_up: torch.Tensor) -> None:
    """Fill ``of_gate_up`` with the gradient of ``gate_up``, given that of the product."""
    grid, block = _grid(gradient)
    strides = gradient.stride(0), gate_up.stride(0), of_gate_up.stride(0)
    _backward[grid](gradient, gate_up, of_gate_up, gradient.shape[1], *strides, BLOCK=block)


def _grid(rows: torch.Tensor) -> tuple[tuple[int, int], int]:
    block = min(triton.next_power_of_2(rows.shape[1]), _BLOCK)
    return (len(rows), triton.cdiv(rows.shape[1], block)), block


@triton.jit
def _forward(gate_up, out, width, gate_stride, out_stride, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = gate_up + row * gate_stride + column
    gate = tl.load(at, mask=column < width, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=column < width, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + row * out_stride + column, product.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _backward(
    gradient, gate_up, of_gate_up, width, gradient_stride, gate_stride, of_gate_stride, BLOCK: tl.constexpr
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, to = gate_up + row * gate_stride + column, of_gate_up + row * of_gate_stride + column
    gate = tl.load(at, mask=column < width, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=column < width, other=0.0).to(tl.float32)
    of_out = tl.load(gradient + row * gradient_stride + column, mask=column < width, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate = of_out * up * share * (1.0 + gate * (1.0 - share))
    tl.store(to, of_gate.to(of_gate_up.dtype.element_ty), mask=column < width)
    tl.store(to + width, (of_out * gate * share).to(of_gate_up.dtype.element_ty), mask=column < width)
