"""Cross entropy of logits [T, V], of which every rank may have a range of the vocabulary: none holds all of them.

    each rank    the logsumexp of its logits, the target's logit if it is here    all-gathered: 2 numbers a token
    loss         the logsumexp of all - the target's logit                        [T]
    gradient     exp(logits - logsumexp of all) - one-hot                         [T, V of this rank]

With label smoothing 4 numbers a token: the sum of the logits and their count too.

Source: Megatron-LM, section 3 (arXiv:1909.08053); the combination of the ranks' logsumexps is online softmax (Milakov
and Gimelshein, arXiv:1805.02867).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shoal.comm.autograd import once_differentiable
from shoal.comm.protocol import Communicator

Reduction = Literal["mean", "sum", "none"]

IGNORED = -100


class TokenLosses(NamedTuple):
    """The losses of tokens, and what their gradient is computed from."""

    values: Tensor  # [T], fp32; 0 of ignored tokens
    log_p: Tensor  # [T, V of this rank], fp32: logarithms of probabilities
    log_sum: Tensor | None  # [T]: the logsumexp of all logits of a token
    vocab_size: Tensor  # of all ranks: [1], or [T] where it was exchanged


@dataclass(frozen=True)
class CrossEntropy:
    """How the losses of tokens are computed from logits.

    Args:
        z_loss: this times the square of a token's logsumexp is added to its loss.
        comm: the ranks that have a range of the vocabulary each, in their order; None: this rank has all of it.
        first: the first token of this rank's range.
    """

    ignore_index: int = IGNORED
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    comm: Communicator | None = None
    first: int = 0
    label: str = "cross entropy"

    def losses(self, logits: Tensor, targets: Tensor, *, at_once: bool) -> TokenLosses:
        """
        Args:
            logits: [T, V of this rank].
            targets: [T], int64.
            at_once: the gradient is computed from ``log_p``; else later, from the logits and ``log_sum``.

        Communicates: one all-gather of 2 fp32 numbers per token and rank (4 with label smoothing).
        """
        is_here, index = self._find(targets, logits.shape[-1])
        log_p = torch.log_softmax(logits, -1, dtype=torch.float32)  # of this rank's range
        at_target = log_p.gather(1, index)[:, 0]
        total = log_p.sum(-1) if self.label_smoothing else None
        vocab_size = torch.full((1,), logits.shape[-1], dtype=torch.float32, device=logits.device)
        log_sum: Tensor | None = None
        if self.comm is not None or self.z_loss or not at_once:
            log_sum = logits.amax(-1).float() - log_p.amax(-1)
        if self.comm is not None and log_sum is not None:
            own, mine = log_sum, [log_sum, torch.where(is_here, at_target + log_sum, 0.0)]
            if total is not None:
                mine += [total + vocab_size * log_sum, vocab_size.expand_as(log_sum)]
            every = self.comm.gathered(torch.stack(mine), label=self.label)  # [ranks, numbers, T]
            log_sum = every[:, 0].logsumexp(0)
            at_target = every[:, 1].sum(0) - log_sum
            if total is not None:
                vocab_size = every[:, 3].sum(0)
                total = every[:, 2].sum(0) - vocab_size * log_sum
            if at_once:
                log_p += (own - log_sum)[:, None]
        values = -at_target
        if total is not None:
            values = (1 - self.label_smoothing) * values - self.label_smoothing * total / vocab_size
        if self.z_loss and log_sum is not None:
            values = values + self.z_loss * log_sum.square()
        return TokenLosses(values.masked_fill_(targets == self.ignore_index, 0.0), log_p, log_sum, vocab_size)

    def gradient(self, log_p: Tensor, log_sum: Tensor | None, vocab_size: Tensor, targets: Tensor) -> Tensor:
        """Of each token's loss with respect to its logits, in place of ``log_p``; of ignored tokens, any numbers."""
        is_here, index = self._find(targets, log_p.shape[-1])
        gradient = log_p.exp_()
        if self.z_loss and log_sum is not None:
            gradient *= (1 + 2 * self.z_loss * log_sum)[:, None]
        if self.label_smoothing:
            gradient -= (self.label_smoothing / vocab_size)[:, None]
        return gradient.scatter_add_(1, index, is_here[:, None].to(gradient.dtype) * (self.label_smoothing - 1))

    def _find(self, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """A mask of the targets in this rank's range, [T]; the column of each there, else 0, [T, 1].

        What is out of the vocabulary is given to the first or the last rank, where gather() raises torch's own error.
        """
        is_here = targets != self.ignore_index
        if self.comm is not None and self.comm.rank > 0:
            is_here &= targets >= self.first
        if self.comm is not None and self.comm.rank < self.comm.size - 1:
            is_here &= targets < self.first + width
        return is_here, torch.where(is_here, targets - self.first, 0)[:, None]


def token_losses(logits: Tensor, targets: Tensor, formula: CrossEntropy) -> Tensor:
    """The loss of each token, differentiable. Shape: [T], fp32.

    Memory: in forward and backward, one fp32 tensor of the shape of ``logits`` (forward of 16-bit logits: two).
    """
    apply: Callable[..., Tensor] = _CrossEntropyFunction.apply
    return apply(logits, targets, formula)


class _CrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, formula: CrossEntropy) -> Tensor:
        values, _, *terms = formula.losses(logits, targets, at_once=False)
        ctx.save_for_backward(logits, targets, *terms)
        ctx.formula = formula
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, log_sum, vocab_size = ctx.saved_tensors
        of_logits: Tensor = ctx.formula.gradient(logits - log_sum[:, None], log_sum, vocab_size, targets)  # fp32
        of_logits *= gradient.masked_fill(targets == ctx.formula.ignore_index, 0.0)[:, None]
        return of_logits.to(logits.dtype), None, None
