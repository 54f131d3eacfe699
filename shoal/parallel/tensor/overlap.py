"""Linears whose communication runs during their matrix products (``tp_overlap_comm``).

    row, forward         the product in chunks of tokens; each chunk's sum is under way while the next one is computed
    columns, backward    the sum of the input's gradient is under way while the gradients of the weights are computed

Sequence parallel, over a ``PartsCommunicator``:

    row, forward         each rank's part of the product is sent while the next one is computed
    row, backward        each rank's part of the gradient is received while the one before it is multiplied
    columns, forward     each rank's part of the input is received while the one before it is multiplied
    columns, backward    as row, forward; meanwhile the input is gathered again, for the gradients of the weights

Over another communicator each of these is one call; only that of columns in backward overlaps products.
Columns that read one input (query, key and value; gate and up) are computed together: ``InputColumns``. Values are
those of the plain layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.autograd import TracedLabel, begin_gather
from shoal.comm.parts import PartsCommunicator
from shoal.comm.protocol import Communicator, Work
from shoal.compiler import untraced
from shoal.device import in_backward
from shoal.parallel.needed_gradients import needed_gradients
from shoal.parallel.products import cast_for_autocast, weight_gradient
from shoal.parallel.saved_tensors import checkpoint_around
from shoal.parallel.tensor.region import SharedByCopies, TensorRegion
from shoal.sharding.storage import is_placeholder

NUM_CHUNKS = 4
LEAST_NBYTES = 8 * 2**20  # of a chunk by default: a shorter sum ends before the host has queued the next chunk
FLOPS_PER_BYTE = 2400  # that a GPU multiplies while it receives a byte: of products that take as long as such a chunk


@untraced
def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    comm: Communicator,
    *,
    splits_sequence: bool,
    label: str,
    chunk_nbytes: int = 0,
) -> torch.Tensor:
    """``x @ weight.t()`` summed over the ranks; with ``splits_sequence`` this rank's part of the sum.

    Args:
        x: [..., L, K].
        weight: [M, K].
        chunk_nbytes: the least that a chunk's sum has; not with ``splits_sequence``.

    Communicates: one all_reduce, in up to NUM_CHUNKS calls; or one reduce_scatter, or as much in messages.
    """
    x, weight = cast_for_autocast(x, weight)
    if splits_sequence:
        scattered: torch.Tensor = _ScatteredRow.apply(x, weight, comm, label)
        return scattered
    nbytes = x.numel() // x.shape[-1] * weight.shape[0] * x.element_size()
    num_chunks = max(min(NUM_CHUNKS, nbytes // max(chunk_nbytes, 1)), 1)
    summed: torch.Tensor = _SummedRow.apply(x, weight, comm, label, num_chunks)
    return summed


@untraced
def column_linears(
    x: torch.Tensor, weights: Sequence[torch.Tensor], comm: Communicator, *, splits_sequence: bool, label: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The input whole, and ``whole @ weight.t()`` for each weight. The whole input may be read elsewhere too.

    Args:
        x: [..., L, K], which every rank has; with ``splits_sequence`` this rank's part of the sequence.
        weights: [M, K] each.

    Communicates: with ``splits_sequence`` one all_gather, or as much in messages; backward one reduce_scatter, or as
        much, and an all_gather; else backward one all_reduce.
    """
    apply: Callable[..., tuple[torch.Tensor, ...]] = _Columns.apply
    x, *weights = cast_for_autocast(x, *weights)
    whole, *outputs = apply(x, comm, splits_sequence, label, *weights)
    return whole, outputs


def overlaps(
    region: TensorRegion, numel_per_rank: int, weights: Iterable[torch.Tensor], chunk_nbytes: int | None
) -> bool:
    """True if what enters or leaves the region does so during products; without a split sequence, of any size.

    Args:
        numel_per_rank: of the factor, for the part of the sequence of one rank.
        weights: [M, K] each.
        chunk_nbytes: as ``LayerSplit``'s.
    """
    if chunk_nbytes is None or not region.splits_sequence:
        return chunk_nbytes is not None
    return 2 * numel_per_rank * sum(weight.shape[0] for weight in weights) >= chunk_nbytes * FLOPS_PER_BYTE


class _EarlierCall:
    """A call of a module; its graph keeps it."""


class InputColumns(SharedByCopies):
    """The columns that read the input of one module: computed when it enters the region, from the second time on.

    Which columns they are is learned in each forward: those that get the very tensor that ``enter`` returned. What is
    computed at entry changes only when no backward pass of an earlier call is to come, which may recompute that call
    and has to do as it did. Under autocast, of a small input and of one without a gradient, each column is computed by
    itself.

    Args:
        name: of the module.
        chunk_nbytes: as ``LayerSplit``'s.
    """

    def __init__(self, name: str, region: TensorRegion, chunk_nbytes: int) -> None:
        self._prefix = f"{name}." if name else ""
        self._region, self._chunk_nbytes = region, chunk_nbytes
        self._readers: list[str] = []
        self._computed: list[str] = []  # those of the readers that are computed at entry now
        self._waiting = weakref.WeakSet[_EarlierCall]()  # for their backward pass
        self._checkpoint: object | None = None  # in which the module's input entered
        self._input: torch.Tensor | None = None
        self._outputs: dict[str, torch.Tensor] = {}

    def enter(self, module: nn.Module, x: torch.Tensor, label: TracedLabel) -> torch.Tensor:
        """The input whole."""
        self._checkpoint = checkpoint_around()
        region, weights = self._region, self._weights(module, self._computed)
        if not self._waiting:
            weights = self._weights(module, self._readers)
            self._computed = list(self._readers) if weights else []
        is_constant = torch.is_grad_enabled() and not x.requires_grad
        is_small = not overlaps(region, x.numel(), weights, self._chunk_nbytes)
        if not weights or is_constant or is_small or torch.is_autocast_enabled(x.device.type):
            self._input = region.enter(x, label)
        else:
            region.check_split(label)
            self._input, outputs = column_linears(
                x, weights, region.activations, splits_sequence=region.splits_sequence, label=label.text
            )
            self._outputs = dict(zip(self._computed, outputs, strict=True))
        if self._input.grad_fn is not None and not in_backward():
            call = _EarlierCall()
            self._waiting.add(call)
            self._input.grad_fn.register_hook(lambda *_: self._waiting.discard(call))
        return self._input

    @untraced
    def take(self, name: str, input: torch.Tensor) -> torch.Tensor | None:
        """The output of a column, without its bias; None: it was not computed."""
        if input is not self._input or checkpoint_around() is not self._checkpoint:
            return None
        if name not in self._readers:
            self._readers.append(name)
        return self._outputs.pop(name, None)

    def end(self) -> None:
        """The module has run. What no column took is not computed the next time."""
        self._readers = [name for name in self._readers if name not in self._outputs]
        self._input, self._outputs, self._checkpoint = None, {}, None

    def _weights(self, module: nn.Module, names: Sequence[str]) -> list[torch.Tensor]:
        """[M, K] each; none where ZeRO gathers some of them later than the module's input."""
        weights = []
        for name in names:
            column = module.get_submodule(name.removeprefix(self._prefix))
            weight: torch.Tensor = column.weight  # type: ignore[assignment]  # nn.Module's attributes are unions
            if is_placeholder(weight.data):
                return []
            weights.append(weight.t() if column.tensor_split.is_transposed else weight)  # type: ignore[union-attr]
        return weights


class _SummedRow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, comm: Communicator, label: str, num_chunks: int
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        tokens = x.reshape(-1, x.shape[-1])
        out = comm.empty(tokens.shape[0] * weight.shape[0], x.dtype, x.device)
        works, stop = [], 0
        for chunk in tokens.chunk(num_chunks):
            start, stop = stop, stop + chunk.shape[0] * weight.shape[0]
            _multiply(chunk, weight.t(), out[start:stop])
            works.append(comm.all_reduce(out[start:stop], label=label))
        _drain(works)
        return out.resize_(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, *_ = needed_gradients(ctx)
        of_x = gradient @ weight if for_x else None
        return of_x, weight_gradient(gradient, x) if for_weight else None, None, None, None


class _ScatteredRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, comm: Communicator, label: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm, ctx.label = comm, f"{label} backward"
        out = x.new_empty(*x.shape[:-2], x.shape[-2] // comm.size, weight.shape[0])
        return _start_scatter(comm, label, out, None, [(x, weight.t())])()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, *_ = needed_gradients(ctx)
        whole, *of_x = _gather_and_multiply(gradient, ctx.comm, ctx.label, [weight] if for_x else [])
        of_weight = weight_gradient(whole, x) if for_weight else None
        return of_x[0] if for_x else None, of_weight, None, None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, splits_sequence: bool, label: str, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.comm, ctx.splits_sequence, ctx.label = comm, splits_sequence, f"{label} backward"
        if splits_sequence:
            whole, *outputs = _gather_and_multiply(x, comm, label, [weight.t() for weight in weights])
        else:
            whole, outputs = x.view_as(x), [F.linear(x, weight) for weight in weights]
        ctx.save_for_backward(x, *weights)
        return whole, *outputs

    @staticmethod
    def backward(ctx: Any, of_whole: torch.Tensor | None, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        pairs = [(own, weight) for own, weight in zip(gradients, weights, strict=True) if own is not None]
        for_x, _, _, _, *for_weights = needed_gradients(ctx)
        needs = [own is not None and need for own, need in zip(gradients, for_weights, strict=True)]
        again = None
        if ctx.splits_sequence and any(needs):
            again = begin_gather(x, ctx.comm, x.dim() - 2, ctx.label.replace(" backward", " again backward"))
        finish: Callable[[], torch.Tensor] | None = None
        if for_x and not ctx.splits_sequence:
            finish = _start_sum(ctx.comm, ctx.label, x, of_whole, pairs)
        elif for_x:
            finish = _start_scatter(ctx.comm, ctx.label, x.new_empty(x.shape), of_whole, pairs)
        whole = x if again is None else again.wait()
        of_weights = [
            weight_gradient(own, whole) if own is not None and need else None
            for own, need in zip(gradients, needs, strict=True)
        ]
        return None if finish is None else finish(), None, None, None, *of_weights


def _by_parts(comm: Communicator) -> PartsCommunicator | None:
    """Whose products gather and scatter; None: they do so in one call, or nothing is computed but shapes."""
    return comm if isinstance(comm, PartsCommunicator) and not comm.is_for_shapes else None


def _gather_and_multiply(
    x: torch.Tensor, comm: Communicator, label: str, weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The whole input and its products. Shape: [..., L of a rank, K], [K, M] each -> [..., L, K], [..., L, M] each."""
    if weights and (by_parts := _by_parts(comm)) is not None:
        whole, products = by_parts.all_gather_matmul(x, weights, label=label)
        return [whole, *products]
    whole = begin_gather(x, comm, x.dim() - 2, label).wait()
    return [whole, *(whole @ weight for weight in weights)]


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # factors: the gradient of an output, and its weight


def _start_sum(
    comm: Communicator, label: str, x: torch.Tensor, of_whole: torch.Tensor | None, pairs: Pairs
) -> Callable[[], torch.Tensor]:
    of_input = comm.empty(x.numel(), x.dtype, x.device)
    _sum_products(of_input.view(x.shape), of_whole, pairs)
    work = comm.all_reduce(of_input, label=label)

    def finish() -> torch.Tensor:
        work.drain()
        return of_input.resize_(x.shape)

    return finish


def _start_scatter(
    comm: Communicator, label: str, out: torch.Tensor, of_whole: torch.Tensor | None, pairs: Pairs
) -> Callable[[], torch.Tensor]:
    """As ``_start_sum``, for this rank's part of the sequence, which is written to ``out``: [..., L of a rank, K]."""
    by_parts = _by_parts(comm)
    if by_parts is not None and of_whole is None and pairs:
        factor, weight = pairs[0]
        if len(pairs) > 1:
            factor, weight = torch.cat([each for each, _ in pairs], -1), torch.cat([each for _, each in pairs])
        scattered = by_parts.matmul_reduce_scatter(factor, weight, label=label)
        return lambda: scattered
    summand = comm.empty(comm.size * out.numel(), out.dtype, out.device)
    others = None if of_whole is None else _by_rank(of_whole, comm.size)
    by_rank = summand.view(comm.size, -1, *out.shape[-2:])  # [ranks, B, L of a rank, K]
    _sum_products(by_rank, others, [(_by_rank(each, comm.size), weight) for each, weight in pairs])
    work = comm.reduce_scatter(summand, out.view(-1), label=label)

    def finish() -> torch.Tensor:
        _drain([work])
        return out

    return finish


def _drain(works: Iterable[Work]) -> None:
    for work in works:
        work.drain()


def _sum_products(target: torch.Tensor, of_whole: torch.Tensor | None, pairs: Pairs) -> None:
    """The gradient of an input: of its own, and of its products."""
    if of_whole is not None:
        target.copy_(of_whole)
    elif pairs:
        (own, weight), *pairs = pairs
        _multiply(own, weight, target)
    else:
        target.zero_()
    for own, weight in pairs:
        target += own @ weight


def _multiply(left: torch.Tensor, right: torch.Tensor, target: torch.Tensor) -> None:
    """Write ``left @ right`` to ``target``. Shape: [..., K], [K, M], contiguous."""
    torch.mm(left.reshape(-1, left.shape[-1]), right, out=target.view(-1, right.shape[-1]))


def _by_rank(x: torch.Tensor, size: int) -> torch.Tensor:
    """[..., L, K] as [ranks, B, L of a rank, K]."""
    return x.reshape(-1, size, x.shape[-2] // size, x.shape[-1]).transpose(0, 1)
