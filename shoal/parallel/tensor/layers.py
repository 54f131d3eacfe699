"""The split layers: column and row parallel linear, vocabulary parallel embedding and loss.

    column   y = x W^T + b       W [out, in] and b [out] split along out: each rank computes its part of y
    row      y = sum x W^T + b   W [out, in] split along in: each rank has its part of x
    vocab    y = sum W[tokens]   W [V, D] split along V: a rank looks up its own tokens, zeros elsewhere
    loss     cross entropy of logits that are split along V (``shoal.parallel.loss``)

A module stays the object that it is: its class becomes a subclass of its own (``split_class``), so that names, hooks,
state dict keys and ``isinstance`` keep their meaning. A linear is any module that multiplies by ``weight`` and adds
``bias``.

Source: Megatron-LM, section 3 (arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm import autograd
from shoal.comm.protocol import Communicator
from shoal.compiler import untraced
from shoal.device import is_fake
from shoal.parallel.loss import IGNORED, CrossEntropy, Reduction, token_losses
from shoal.parallel.products import AS_THEY_ARE, LayerProducts, add_bias
from shoal.parallel.tensor.overlap import InputColumns, column_linears, overlaps, row_linear
from shoal.parallel.tensor.parts import Range, SharedRows, even_range
from shoal.parallel.tensor.region import SharedByCopies, TensorRegion
from shoal.sharding.parts import take


@dataclass(frozen=True, eq=False)
class LayerSplit(SharedByCopies):
    """How one linear or embedding is split, which its class of this file reads.

    Args:
        is_transposed: the weight is [in, out] (GPT-2's Conv1D).
        communicates: True if a column itself enters the region; else its input enters with a module around it.
        shared: the heads of a projection that other ranks need too; None: there are none.
        widths: the output elements of every rank, which are gathered; None: the output stays split.
        own_input: the input elements of this rank, taken from an input that all ranks have whole.
        own_tokens: the rows of a vocabulary parallel embedding on this rank.
        forks: True if the random states differ until this layer is left.
        chunk_nbytes: the least bytes of a chunk of which communication runs during the layer's products; of a split
            sequence, a product of a rank's part takes as long as to receive them; None: of none.
        keeps_logits: True for the head of a model whose loss is computed from split logits.
        columns: what computes a column whose input entered with a module around it; None: it computes itself.
        products: how a column or a row multiplies. While they are on, its communication does not overlap them.
    """

    name: str
    region: TensorRegion
    is_transposed: bool = False
    communicates: bool = True
    shared: SharedRows | None = None
    widths: tuple[int, ...] | None = None
    own_input: tuple[Range, ...] | None = None
    own_tokens: Range = (0, 0)
    forks: bool = False
    chunk_nbytes: int | None = None
    keeps_logits: bool = False
    columns: InputColumns | None = None
    products: LayerProducts = AS_THEY_ARE
    enters: autograd.TracedLabel = field(init=False)
    leaves: autograd.TracedLabel = field(init=False)
    shares: autograd.TracedLabel = field(init=False)

    def __post_init__(self) -> None:
        labels = {
            "enters": self.region.label(self.region.activations, f"{self.name} in"),
            "leaves": self.region.label(self.region.activations, f"{self.name} out"),
            "shares": self.region.label(self.region.comm, f"{self.name} shared heads"),
        }
        for name, label in labels.items():
            object.__setattr__(self, name, label)


class ColumnParallelLinear(nn.Module):
    """A linear whose output elements are split over the ranks."""

    tensor_split: LayerSplit
    weight: nn.Parameter

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        split, region = self.tensor_split, self.tensor_split.region
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = getattr(self, "bias", None)
        weight = weight.t() if split.is_transposed else weight
        output = None
        is_plain = not split.products.is_on
        if split.communicates and is_plain and overlaps(region, input.numel(), [weight], split.chunk_nbytes):
            region.check_split(split.enters)
            splits, label = region.splits_sequence, split.enters.text
            output = column_linears(input, [weight], region.activations, splits_sequence=splits, label=label)[1][0]
        elif split.columns is not None and is_plain:
            output = split.columns.take(split.name, input)
        if output is None:
            whole = region.enter(input, split.enters) if split.communicates else input
            output = region.linear(whole, weight, bias, split.products)
            if split.communicates:
                region.forget()
        else:
            output = add_bias(output, bias)
        if split.shared is not None:
            output = split.shared.complete(output, region.comm, split.shares)
        return output if split.widths is None else gather_last(output, region.comm, split.widths, split.name)


class RowParallelLinear(nn.Module):
    """A linear whose input elements are split over the ranks; the bias is added once, after the sum."""

    tensor_split: LayerSplit
    weight: nn.Parameter

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        split, region = self.tensor_split, self.tensor_split.region
        own = input
        if split.own_input is not None:
            own = take(region.copy(input, split.enters), -1, split.own_input)
        if split.forks:
            region.fork.end()
        weight = self.weight.t() if split.is_transposed else self.weight
        per_rank = own.numel() // region.comm.size
        if not split.products.is_on and overlaps(region, per_rank, [weight], split.chunk_nbytes):
            splits, label, least = region.splits_sequence, split.leaves.text, split.chunk_nbytes or 0
            comm = region.activations
            output = row_linear(own, weight, comm, splits_sequence=splits, label=label, chunk_nbytes=least)
        else:
            output = region.leave(split.products.linear(own, weight), split.leaves)
        return add_bias(output, getattr(self, "bias", None))


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are split over the ranks: a range of the vocabulary each."""

    tensor_split: LayerSplit

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        split = self.tensor_split
        start, stop = split.own_tokens
        # What is out of the vocabulary is looked up by the first or the last rank, where torch's own error is raised.
        own = input < stop if split.region.comm.rank < split.region.comm.size - 1 else input >= start
        if 0 < split.region.comm.rank < split.region.comm.size - 1:
            own = own & (input >= start)
        looked_up: torch.Tensor = super().forward(torch.where(own, input - start, 0))
        partial = looked_up.masked_fill(~own.unsqueeze(-1), 0.0)
        return autograd.all_reduce(partial, split.region.comm, label=f"{split.name} out")


def _split_class(base: type[nn.Module], behaviour: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``base`` whose ``forward`` is that of ``behaviour``; one for all calls."""
    return type(f"{behaviour.__name__.partition('Parallel')[0]}Parallel{base.__name__}", (behaviour, base), {})


split_class = cast(Callable[[type[nn.Module], type[nn.Module]], type[nn.Module]], cache(_split_class))


@untraced
def gather_last(tensor: torch.Tensor, comm: Communicator, widths: Sequence[int], label: str) -> torch.Tensor:
    """The ranks' tensors, of different widths, concatenated along the last dim; every rank computes the same from them.

    Communicates: one all-gather of the widest rank's tensor per rank.
    """
    apply: Callable[..., torch.Tensor] = _GatherLast.apply
    return apply(tensor, comm, tuple(widths), label)


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, comm: Communicator, widths: tuple[int, ...], label: str
    ) -> torch.Tensor:
        ctx.own = sum(widths[: comm.rank]), widths[comm.rank]
        padding = max(widths) - tensor.shape[-1]
        padded = F.pad(tensor, (0, padding)) if padding else tensor
        gathered = comm.gathered(padded, label=f"{label} gather")
        return torch.cat([part[..., :width] for part, width in zip(gathered, widths, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        start, width = ctx.own
        return gradient.narrow(-1, start, width), None, None, None


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


def is_shifted_cross_entropy(function: Any, vocab_size: int, *, is_transformers: bool) -> bool | None:
    """Call a model's ``loss_function`` on logits of 8 positions, and compare with the mean cross-entropy.

    Args:
        is_transformers: it takes the arguments of Transformers' functions, ``num_items_in_batch`` included.

    Returns: True if a label is the token that follows its own position; None: it computes another loss.
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
        results = torch.stack([function(logits, labels, **each) for each in given]).float()
    except Exception:  # it takes other arguments
        return None
    for shifts in (True, False):
        targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:] if shifts else labels
        mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        expected = torch.stack([mean, mean * (targets != IGNORED).sum() / 3][: len(given)])
        if results.shape == expected.shape and torch.allclose(results, expected, rtol=1e-4):
            return shifts
    return None


class VocabParallelLoss(SharedByCopies):
    """The ``loss_function`` of a model whose head returns this rank's logits.

    The arguments are those that Transformers passes: labels are shifted by one unless ``shift_labels`` are given, and
    ``num_items_in_batch`` replaces the number of targets as the divisor.

    Args:
        shifts: True if a label is the token that follows its own position.
    """

    def __init__(self, comm: Communicator, vocab_size: int, *, shifts: bool) -> None:
        self._comm = comm
        self._vocab_size = vocab_size
        self.shifts_labels = shifts

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
