"""The loss of a model whose logits are split along the vocabulary (``shoal.parallel.cross_entropy``)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shoal.comm.protocol import Communicator
from shoal.compiler import untraced
from shoal.device import is_fake
from shoal.parallel.cross_entropy import IGNORED, CrossEntropy, Reduction, token_losses
from shoal.parallel.tensor.parts import even_range


@untraced
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


def shifts_labels(function: Any, vocab_size: int, *, is_transformers: bool) -> bool | None:
    """Call a model's ``loss_function`` on logits of 8 positions, and compare with the mean cross-entropy.

    Args:
        is_transformers: it takes the arguments of Transformers' functions, ``num_items_in_batch`` included.

    Returns: whether a label is the token that follows its own position; None: it computes another loss.
    """
    logits = torch.arange(8.0 * vocab_size, device="cpu").mul(0.7).sin().view(2, 4, vocab_size) * 3
    labels = (torch.arange(8, device="cpu") * 5 % vocab_size).view(2, 4)
    labels[1, 1] = IGNORED
    if is_fake(logits):
        return is_transformers
    given: list[dict[str, Any]] = [{}]
    if is_transformers:
        given = [{"vocab_size": vocab_size}, {"vocab_size": vocab_size, "num_items_in_batch": 3}]
    try:
        found = torch.stack([function(logits, labels, **each) for each in given]).float()
    except Exception:  # it takes other arguments
        return None
    for shifts in (True, False):
        targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:] if shifts else labels
        mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        expected = torch.stack([mean, mean * (targets != IGNORED).sum() / 3][: len(given)])
        if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4):
            return shifts
    return None


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
        self.shifts_labels = shifts

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
        if self.shifts_labels and shift_labels is None:
            targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = vocab_parallel_cross_entropy(
            logits, targets, self._comm, self._vocab_size, ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )  # fmt: skip
        return loss if num_items_in_batch is None else loss / num_items_in_batch
