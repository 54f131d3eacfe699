"""The loss of a model whose logits are split along the vocabulary (``shoal.parallel.cross_entropy``)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shoal.comm.protocol import Communicator
from shoal.parallel.cross_entropy import IGNORED, CrossEntropy, Reduction, token_losses
from shoal.parallel.tensor.parts import even_range


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    comm: Communicator,
    vocab_size: int,
    *,
    ignore_index: int = IGNORED,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """As ``torch.nn.functional.cross_entropy`` of all logits, computed in fp32.

    Args:
        logits: [..., V of this rank]: its ``even_range`` of the vocabulary.
        targets: [...], int64, the same on all ranks.
        vocab_size: V of all ranks.

    Returns: fp32: [] or, with ``reduction="none"``, the shape of ``targets``. The same on every rank.
    Communicates: one all-gather of 2 fp32 numbers per target and rank (4 with label smoothing).
    Memory: in forward and backward, one fp32 tensor of the shape of ``logits`` (forward of 16-bit logits: two).
    """
    flat = targets.reshape(-1)
    rows = logits.reshape(flat.numel(), logits.shape[-1])
    first, _ = even_range(vocab_size, comm.size, comm.rank)
    losses = token_losses(rows, flat, CrossEntropy(ignore_index, label_smoothing, comm=comm, first=first))
    if reduction == "none":
        return losses.view(targets.shape)
    total = losses.sum()
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
        ignore_index: int = IGNORED,
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
