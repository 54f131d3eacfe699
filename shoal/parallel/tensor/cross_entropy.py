"""Cross entropy of logits that are split along the vocabulary: no rank ever holds all logits.

Each rank reduces its part of a row to four numbers (maximum, sum of exponentials, the target's logit if it is here,
sum); one all-gather of these gives every rank the loss, and the gradient of its own part needs nothing more.

Source: Megatron-LM, section 3 (arXiv:1909.08053); the combination of maxima and sums is online softmax
(Milakov and Gimelshein, arXiv:1805.02867).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.nn import functional as F

from shoal.comm.protocol import Communicator
from shoal.parallel.tensor.parts import even_range

Reduction = Literal["mean", "sum", "none"]


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    comm: Communicator,
    vocab_size: int,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """As ``torch.nn.functional.cross_entropy`` of all logits, computed in fp32.

    Args:
        logits: [..., V of this rank]: its ``even_range`` of the vocabulary.
        targets: [...], int64, the same on all ranks.
        vocab_size: V of all ranks.

    Returns: fp32: [] or, with ``reduction="none"``, the shape of ``targets``. The same on every rank.
    Communicates: one all-gather of four fp32 numbers per target and rank.
    Memory: in forward and backward, one fp32 tensor of the shape of ``logits``.
    """
    flat = targets.reshape(-1)
    rows = logits.reshape(flat.numel(), logits.shape[-1])
    apply: Callable[..., torch.Tensor] = _PerRow.apply
    per_row = apply(rows, flat, comm, vocab_size, ignore_index, label_smoothing)
    if reduction == "none":
        return per_row.view(targets.shape)
    total = per_row.sum()
    return total if reduction == "sum" else total / (flat != ignore_index).sum()


class VocabParallelLoss:
    """The ``loss_function`` of a model whose head returns this rank's logits.

    The arguments are those that Transformers passes: labels are shifted by one unless ``shift_labels`` are given, and
    ``num_items_in_batch`` replaces the number of targets as the divisor.

    Args:
        shifts: whether a label is the token that follows its own position.
    """

    def __init__(self, comm: Communicator, vocab_size: int, *, shifts: bool) -> None:
        self._comm = comm
        self._vocab_size = vocab_size
        self._shifts = shifts

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabParallelLoss:
        return self

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        targets = labels if shift_labels is None else shift_labels
        if self._shifts and shift_labels is None:
            targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = vocab_parallel_cross_entropy(
            logits, targets, self._comm, self._vocab_size, ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )  # fmt: skip
        return loss if num_items_in_batch is None else loss / num_items_in_batch


class _PerRow(torch.autograd.Function):
    """The loss of each row: logits [N, V of this rank], targets [N] -> [N]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        comm: Communicator,
        vocab_size: int,
        ignore_index: int,
        label_smoothing: float,
    ) -> torch.Tensor:
        start, stop = even_range(vocab_size, comm.size, comm.rank)
        ctx.ignored = targets == ignore_index
        # What is out of the vocabulary is taken by the first or the last rank, where gather() raises torch's own error.
        ctx.is_here = ~ctx.ignored
        if comm.rank > 0:
            ctx.is_here &= targets >= start
        if comm.rank < comm.size - 1:
            ctx.is_here &= targets < stop
        ctx.local_targets = torch.where(ctx.is_here, targets - start, 0).unsqueeze(1)  # [N, 1]
        exponentials = logits.float()  # [N, V]
        maximum = exponentials.amax(1)
        at_target = exponentials.gather(1, ctx.local_targets).squeeze(1).masked_fill_(~ctx.is_here, 0.0)
        logit_sum = exponentials.sum(1) if label_smoothing else torch.zeros_like(maximum)
        exponentials = (exponentials - maximum.unsqueeze(1)).exp_()
        own = torch.stack([maximum, exponentials.sum(1), at_target, logit_sum])  # [4, N]
        every = torch.empty((comm.size, *own.shape), device=own.device)
        comm.all_gather(every.view(-1), own.view(-1), label="cross entropy").drain()

        maxima, sums, at_targets, logit_sums = every.unbind(1)  # [ranks, N] each
        maximum = maxima.amax(0)
        log_sum = (sums * (maxima - maximum).exp_()).sum(0).log_().add_(maximum)
        ctx.save_for_backward(logits, log_sum)
        ctx.vocab_size, ctx.smoothing = vocab_size, label_smoothing
        loss = log_sum - (1.0 - label_smoothing) * at_targets.sum(0)
        if label_smoothing:
            loss -= logit_sums.sum(0) * (label_smoothing / vocab_size)
        return loss.masked_fill_(ctx.ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, log_sum = ctx.saved_tensors
        of_logits = (logits.float() - log_sum.unsqueeze(1)).exp_()
        if ctx.smoothing:
            of_logits -= ctx.smoothing / ctx.vocab_size
        of_logits.scatter_add_(1, ctx.local_targets, (ctx.is_here * (ctx.smoothing - 1.0)).unsqueeze(1))
        of_logits *= gradient.masked_fill(ctx.ignored, 0.0).unsqueeze(1)
        return of_logits.to(logits.dtype), None, None, None, None, None
