"""Newton-Schulz: replace a matrix's singular values by numbers near one, with matrix products only.

    X = G / |G|,   then five times   X = a X + (b A + c A A) X,   A = X X^T      ("standard")

The coefficients raise small singular values fast and leave the others in about [0.7, 1.2]; they do not converge to one,
which Muon does not need. "gram" runs the same iteration on the small square matrix R = X X^T and multiplies X once at
the end and once half way (the half way restart keeps 16-bit arithmetic stable): fewer operations where a matrix is far
from square.

Source: Jordan et al., Muon: an optimizer for hidden layers (kellerjordan.github.io/posts/muon); for "gram" Dao et al.,
Gram Newton-Schulz (tridao.me/blog/2026/gram-newton-schulz).
"""

from __future__ import annotations

from typing import Literal

import torch

Method = Literal["gram", "standard"]
METHODS: tuple[Method, ...] = ("gram", "standard")

A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7
GRAM_RESTART = 2  # after this many iterations X is formed anew


def compute_dtype(method: Method, device: torch.device) -> torch.dtype:
    """The dtype of the iteration, and of its result: 16 bits on GPUs (fp16's longer mantissa for "gram"), fp32 on
    CPU.
    """
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if method == "gram" else torch.bfloat16


def orthogonalize(matrix: torch.Tensor, method: Method = "gram", num_steps: int = 5) -> torch.Tensor:
    """The matrix with its singular values near one. Shape: [..., rows, columns] -> the same, in ``compute_dtype``.

    Memory: about four times the matrix in the compute dtype. Zero stays zero.
    """
    x = matrix / (torch.linalg.matrix_norm(matrix, keepdim=True) + EPS)  # before the cast: fp16 ends at 65504
    x = x.to(compute_dtype(method, matrix.device))
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:
        x = x.mT
    x = _gram(x, num_steps) if method == "gram" and x.size(-2) < x.size(-1) else _standard(x, num_steps)
    return x.mT if is_tall else x


def _standard(x: torch.Tensor, num_steps: int) -> torch.Tensor:
    for _ in range(num_steps):
        gram = x @ x.mT
        x = A * x + (B * gram + C * (gram @ gram)) @ x
    return x


def _gram(x: torch.Tensor, num_steps: int) -> torch.Tensor:
    """One iteration is X <- P X with P = a I + b R + c R R; so R <- P R P. The product of the P is accumulated
    separately from X.
    """
    for begin, end in ((0, min(GRAM_RESTART, num_steps)), (GRAM_RESTART, num_steps)):
        gram, product = x @ x.mT, None
        for step in range(begin, end):
            factor = B * gram + C * (gram @ gram)
            factor.diagonal(dim1=-2, dim2=-1).add_(A)
            product = factor if product is None else factor @ product
            if step + 1 < end:
                gram = factor @ gram @ factor
        if product is not None:
            x = product @ x
    return x


def num_operations(rows: int, columns: int, num_steps: int = 5) -> int:
    """Multiply-adds of the standard iteration, by which matrices are assigned to ranks."""
    small, large = min(rows, columns), max(rows, columns)
    return num_steps * (2 * small * small * large + small**3)
