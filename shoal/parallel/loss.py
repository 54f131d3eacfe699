"""Cross-entropy: of logits of which ranks may have ranges of the vocabulary, and of a linear layer without its logits.

Of logits [T, V], of which no rank need have all (``token_losses``):

    each rank    the logsumexp of its logits, the target's logit if it is here    all-gathered: 2 numbers a token
    loss         the logsumexp of all - the target's logit                        [T]
    gradient     exp(logits - logsumexp of all) - one-hot                         [T, V of this rank]

With label smoothing 4 numbers a token: the sum of the logits and their count too.

Of a linear layer's output in chunks (``linear_cross_entropy``); the logits of all tokens never exist together.

    hidden [T, D]    weight [V, D]
    for each chunk of tokens:
        logits = hidden @ weight.T                       [chunk, V], freed with the chunk
        loss   = logsumexp(logits) - logits[target]      [chunk]
        probabilities - one-hot, in place of the logits  -> gradients of the chunk's hidden states and of the weight

The gradients are computed in the forward pass, up to the factor that arrives in the backward pass, so no logits are
computed twice: three matrix products a chunk, as without chunks. What cannot be known then is computed again in the
backward pass, from the hidden states: gradients of ``reduction="none"``, and those of a second backward pass through
the same graph.

Source: Megatron-LM, section 3 (arXiv:1909.08053); the combination of the ranks' logsumexps is online softmax (Milakov
and Gimelshein, arXiv:1805.02867); chunks: Liger (arXiv:2410.10989), section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm import autograd
from shoal.comm.autograd import once_differentiable
from shoal.comm.protocol import Communicator
from shoal.compiler import untraced
from shoal.device import is_fake
from shoal.errors import UsageError
from shoal.kernels.use import has_kernels, one_kernel
from shoal.parallel.needed_gradients import needed_gradients
from shoal.streams import is_accelerator

Reduction = Literal["mean", "sum", "none"]

IGNORED = -100
_CHUNK_NUMEL = 2**25  # elements of a chunk's logits
_CHUNK_NUMEL_ON_ACCELERATORS = 2**27  # about 1 GiB with what is computed from 16-bit logits
_CHUNK_NBYTES_OF_KERNEL = 2**30  # of a chunk's logits, where nothing else has their shape
_CHUNK_TOKENS_PARALLEL = 1024  # the same on every rank, whatever its part of the vocabulary


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


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = IGNORED,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
    comm: Communicator | None = None,
    vocabulary_start: int | None = None,
    label: str = "loss",
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)`` without the logits of all tokens.

    Args:
        hidden: [..., D].
        weight: [V, D]; a tied or a sharded one too. With ``comm``: this rank's rows of it.
        targets: [...], int64, as the dims of ``hidden`` before the last.
        bias: [V].
        ignore_index: targets that count nothing; "mean" divides by the number of the others, and is 0 without any.
        label_smoothing: the share of the target's probability that is spread over the vocabulary.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        z_loss: this times the square of each token's logsumexp is added to its loss.
        chunk_tokens: tokens of one chunk; None: as many as 128 MiB of logits in fp32 have (512 MiB on an accelerator, 1
            GiB in their dtype where one kernel computes loss and gradient), at least 256; with ``comm`` 1024. With
            ``comm`` the same on all ranks.
        comm: the ranks that have a range of the vocabulary each, in their order. All have the same ``hidden``.
        vocabulary_start: the first token of this rank's range; None: all ranges are of one size.

    Returns: the loss in fp32: [], or the targets' shape for "none".
    Raises: UsageError: shapes that do not fit, or targets outside of the vocabulary (on CPU, without ``comm``; else
        torch's own error, and NaN where one kernel computes the loss).
    Communicates: with ``comm``: per chunk an all_gather of 2 numbers a token (4 with label smoothing); in the backward
        pass an all_reduce of the gradient of ``hidden``.
    Memory: one chunk's logits, twice (in fp32), or once where one kernel puts their gradient in their place; until the
        backward pass ``hidden`` and the gradients, that of the weight in fp32.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    _check(flat, weight, targets, bias, comm, ignore_index)
    first = 0
    if comm is not None:
        first = comm.rank * weight.shape[0] if vocabulary_start is None else vocabulary_start
        flat = autograd.copy(flat, comm, label=f"{label} hidden")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        flat, weight = flat.to(dtype), weight.to(dtype)
        bias = bias.to(dtype) if bias is not None else None
    of_tokens = CrossEntropy(ignore_index, label_smoothing, z_loss, comm, first, label)
    # The gradient of a bias is summed from fp32 values, which the kernel does not write.
    is_plain = not (label_smoothing or z_loss or softcap is not None or bias is not None or comm is not None)
    is_in_one_kernel = is_plain and flat.dtype != torch.float64 and (is_fake(flat) or has_kernels(flat))
    has_backward = torch.is_grad_enabled()
    if chunk_tokens is None:
        most = _CHUNK_NUMEL_ON_ACCELERATORS if is_accelerator(hidden.device) else _CHUNK_NUMEL
        if is_in_one_kernel and has_backward and reduction != "none":
            most = _CHUNK_NBYTES_OF_KERNEL // flat.itemsize
        chunk_tokens = _CHUNK_TOKENS_PARALLEL if comm is not None else max(256, most // weight.shape[0] // 64 * 64)
    formula = _Formula(of_tokens, reduction, softcap, chunk_tokens, weight.dtype, is_in_one_kernel)
    losses: Tensor = _apply(flat, weight, bias, targets.reshape(-1), formula, has_backward)
    return losses.view(targets.shape) if reduction == "none" else losses


class LinearCrossEntropy(nn.Module):
    """A head: logits from hidden states, or the loss without the logits of all tokens.

    Args:
        tied_to: the weight, [V, D], that another module owns; None: one of its own.
        options: of ``linear_cross_entropy``.
    """

    weight: nn.Parameter  # [V, D]

    def __init__(
        self,
        hidden_size: int,
        vocabulary_size: int,
        *,
        has_bias: bool = False,
        tied_to: nn.Parameter | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.options = options
        self.is_tied = tied_to is not None
        self.weight = tied_to if tied_to is not None else nn.Parameter(torch.empty(vocabulary_size, hidden_size))
        self.bias = nn.Parameter(torch.empty(vocabulary_size)) if has_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weight, unless it is tied, as ``nn.Linear`` does; and the bias with zeros."""
        if not self.is_tied:
            nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """The loss when targets are given, else the logits."""
        if targets is None:
            return F.linear(hidden, self.weight, self.bias)
        return linear_cross_entropy(hidden, self.weight, targets, self.bias, **self.options)


def sequence_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, comm: Communicator, *, ignore_index: int = IGNORED, label: str = "loss"
) -> Tensor:
    """The loss of every token of the whole sequence, on each rank, from this rank's part of it.

    Args:
        logits: [L / ranks, ..., V]: this rank's part of the sequence, the whole vocabulary.
        targets: [L / ranks, ...].
        comm: the ranks among which the sequence is divided, in its order.

    Returns: [L, ...], fp32; each rank back-propagates through its own part only.
    Communicates: an all_gather of one number a token; nothing in the backward pass.
    Memory: as ``token_losses``.
    """
    losses = token_losses(logits.flatten(0, -2), targets.flatten(), CrossEntropy(ignore_index))
    return autograd.gather(losses.view(targets.shape), comm, label=label)


def count_tokens(targets: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """The targets that count, for ``engine.backward(loss, num_tokens=...)``. Shape: [], int64, on their device.

    Of labels that the model shifts, as causal models of Transformers do, the targets are ``labels[..., 1:]``.
    """
    return (targets != ignore_index).sum()


def _check(
    flat: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, comm: Communicator | None, ignore_index: int
) -> None:
    """Raises: UsageError."""
    do = "hidden is [..., D], weight [V, D], bias [V], and targets have the dims of hidden before the last."
    if targets.numel() != flat.shape[0] or weight.dim() != 2 or weight.shape[1] != flat.shape[1]:
        raise UsageError(
            f"hidden states of {flat.shape[0]} tokens and width {flat.shape[1]}, a weight of shape"
            f" {tuple(weight.shape)} and {targets.numel()} targets do not fit together.",
            where="linear_cross_entropy",
            do=do,
            code="loss-shape",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(
            f"a bias of shape {tuple(bias.shape)} does not fit a weight of shape {tuple(weight.shape)}.",
            where="linear_cross_entropy",
            do=do,
            code="loss-shape",
        )
    if targets.device.type == "cpu" and comm is None and targets.numel() and not is_fake(targets):
        counted = targets[targets != ignore_index]
        if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < weight.shape[0]:
            raise UsageError(
                f"targets go from {int(counted.min())} to {int(counted.max())}, and the weight has"
                f" {weight.shape[0]} rows.",
                where="linear_cross_entropy",
                do=f"use targets of the vocabulary, or {ignore_index} where there is none to learn from.",
                code="loss-target",
            )


@dataclass(frozen=True)
class _Formula:
    of_tokens: CrossEntropy
    reduction: Reduction
    softcap: float | None
    chunk_tokens: int
    dtype: torch.dtype  # of hidden and weight
    is_in_one_kernel: bool  # the losses of a chunk and their gradients


@dataclass
class _LossGradients:
    """Of the sum of the losses, each multiplied by its token's factor. None: not asked for."""

    hidden: Tensor | None  # [T, D]
    weight: Tensor | None  # [V, D], fp32 for 16-bit weights
    bias: Tensor | None  # [V]

    @classmethod
    def zeros(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]) -> _LossGradients:
        wide = torch.promote_types(weight.dtype, torch.float32)
        return cls(
            torch.empty_like(hidden) if needs[0] else None,
            torch.zeros_like(weight, dtype=wide) if needs[1] else None,
            torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None,
        )

    def add(self, chunk: slice, d_logits: Tensor, hidden: Tensor, weight: Tensor, factor: Tensor) -> None:
        """Add a chunk's.

        Args:
            d_logits: [chunk, V], fp32, or in the dtype of the weight where there is no bias.
            factor: [chunk, 1].
        """
        if self.bias is not None:
            self.bias += (d_logits.t() @ factor.to(d_logits.dtype)).view(-1)
        d_logits = d_logits.to(weight.dtype)
        if self.hidden is not None:
            torch.mm(d_logits, weight, out=self.hidden[chunk])
            self.hidden[chunk].mul_(factor)
        if self.weight is not None:
            counted = (hidden * factor).to(weight.dtype)
            if self.weight.dtype == weight.dtype:
                self.weight.addmm_(d_logits.t(), counted)
            else:
                self.weight += d_logits.t() @ counted

    def scaled(self, needs: Sequence[bool], scale: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """Multiply those that are needed, in place; in the inputs' dtype."""
        gradients = zip((self.hidden, self.weight, self.bias), needs, strict=False)
        return tuple(each.mul_(scale).to(dtype) if each is not None and need else None for each, need in gradients)


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    formula: _Formula,
    factor: Tensor,
    gradients: _LossGradients | None,
) -> Tensor:
    """The losses, [T]; 0 for ignored tokens. Adds to ``gradients``, with each token's factor, [T]."""
    losses = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, targets.numel(), formula.chunk_tokens):
            chunk = slice(start, start + formula.chunk_tokens)
            logits = F.linear(hidden[chunk], weight, bias)
            losses[chunk], d_logits = _one_chunk(logits, targets[chunk], formula, has_gradient=gradients is not None)
            if gradients is not None and d_logits is not None:
                gradients.add(chunk, d_logits, hidden[chunk], weight, factor[chunk, None])
            del logits, d_logits  # before the next chunk's are allocated
    return losses


def _one_chunk(
    logits: Tensor, targets: Tensor, formula: _Formula, *, has_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The losses of a chunk and their gradients with respect to ``logits``; of ignored tokens, any numbers.

    Args:
        logits: [chunk, V]; overwritten.
    """
    if has_gradient and formula.is_in_one_kernel:
        return _in_one_kernel(logits, targets, formula.of_tokens)
    derivative = None  # of the capped logits
    if formula.softcap is not None:
        logits = logits.float().div_(formula.softcap).tanh_()
        derivative = logits.square().neg_().add_(1) if has_gradient else None
        logits = logits.mul_(formula.softcap)
    values, log_p, log_sum, vocab_size = formula.of_tokens.losses(logits, targets, at_once=has_gradient)
    if not has_gradient:
        return values, None
    gradient = formula.of_tokens.gradient(log_p, log_sum, vocab_size, targets)
    return values, gradient if derivative is None else gradient.mul_(derivative)


def _in_one_kernel(logits: Tensor, targets: Tensor, of_tokens: CrossEntropy) -> tuple[Tensor, Tensor]:
    """As ``_one_chunk``; the gradients are in the place of the logits. In a dry run operators stand for the kernel."""
    if has_kernels(logits):
        from shoal.kernels.cross_entropy import cross_entropy

        losses = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        cross_entropy(logits, targets, losses, of_tokens.ignore_index)
        return losses, logits
    with one_kernel():
        log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
        losses = F.nll_loss(log_p, targets, ignore_index=of_tokens.ignore_index, reduction="none")
        index = targets.clamp(min=0)[:, None]
        logits.copy_(log_p.exp_().scatter_add_(1, index, torch.full_like(index, -1, dtype=torch.float32)))
        del log_p, index  # inside: a kernel writes what outlives it
    return losses, logits


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        formula: _Formula,
        has_backward: bool,
    ) -> Tensor:
        is_counted = targets != formula.of_tokens.ignore_index
        is_eager = has_backward and formula.reduction != "none" and any(ctx.needs_input_grad)
        ctx.gradients = _LossGradients.zeros(hidden, weight, bias, ctx.needs_input_grad) if is_eager else None
        losses = _run(hidden, weight, bias, targets, formula, is_counted, ctx.gradients)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.formula = formula
        ctx.count = is_counted.sum().clamp(min=1) if formula.reduction == "mean" else 1
        return losses if formula.reduction == "none" else losses.sum() / ctx.count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """
        Args:
            gradient: of the loss: [] or, for "none", [T].
        """
        gradients, ctx.gradients = ctx.gradients, None
        needs, scale = needed_gradients(ctx), gradient / ctx.count
        if gradients is None:  # "none", or a second pass through this graph, such as the one for weights alone
            hidden, weight, bias, targets = ctx.saved_tensors
            gradients = _LossGradients.zeros(hidden, weight, bias, needs)
            factor = scale.expand(targets.shape) * (targets != ctx.formula.of_tokens.ignore_index)
            _run(hidden, weight, bias, targets, ctx.formula, factor, gradients)
            scale = scale.new_ones(())
        return (*gradients.scaled(needs, scale, ctx.formula.dtype), None, None, None)


# A compiler calls it as it is: the chunks' loop, unrolled, would be a large graph.
_apply: Callable[..., Tensor] = untraced(_LinearCrossEntropy.apply)
