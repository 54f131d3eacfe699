"""Linears whose communication runs during their matrix products (``tp_overlap_comm``).

    row, forward          the product in chunks of tokens; each chunk's sum is under way while the next one is computed
    row, backward         sequence parallel: each chunk's gradient is gathered while the one before it is multiplied
    columns, forward      sequence parallel: the input in chunks of tokens; each chunk is gathered while the one before
                          it is multiplied
    columns, backward     the sum of the input's gradient (sequence parallel: in chunks) is under way while the
                          gradients of the weights are computed

Over a ``SymmetricCommunicator`` the chunks of the last two forms are the parts of the ranks, each product is multiplied
part by part, and the weights' gradients are computed at once, after the gather or the scatter.

Columns that read one input (query, key and value; gate and up) are computed together: ``InputColumns``. Values are
those of the plain layers; a weight's gradient that is computed in chunks is a sum in another order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.autograd import TracedLabel
from shoal.comm.protocol import Communicator, Work
from shoal.comm.symmetric import SymmetricCommunicator
from shoal.compiler import untraced
from shoal.device import in_backward
from shoal.parallel.products import cast_for_autocast, weight_gradient
from shoal.parallel.saved_tensors import checkpoint_around
from shoal.parallel.tensor.region import SharedByCopies, TensorRegion
from shoal.sharding.storage import is_placeholder

NUM_CHUNKS = 4
LEAST_NBYTES = 8 * 2**20  # of a chunk by default: a shorter sum ends before the host has queued the next chunk


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

    Communicates: as one all_reduce (reduce_scatter), in up to NUM_CHUNKS calls.
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

    Communicates: with ``splits_sequence`` as one all_gather, backward as one reduce_scatter, in up to NUM_CHUNKS calls;
        else backward one all_reduce.
    """
    apply: Callable[..., tuple[torch.Tensor, ...]] = _Columns.apply
    x, *weights = cast_for_autocast(x, *weights)
    whole, *outputs = apply(x, comm, splits_sequence, label, *weights)
    return whole, outputs


class _EarlierCall:
    """A call of a module; its graph keeps it."""


class InputColumns(SharedByCopies):
    """The columns that read the input of one module: computed when it enters the region, from the second time on.

    Which columns they are is learned in each forward: those that get the very tensor that ``enter`` returned. What is
    computed at entry changes only when no backward pass of an earlier call is to come, which may recompute that call
    and has to do as it did. Under autocast, and of an input without a gradient, each column is computed by itself.

    Args:
        name: of the module.
    """

    def __init__(self, name: str, region: TensorRegion) -> None:
        self._prefix = f"{name}." if name else ""
        self._region = region
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
        if not weights or is_constant or torch.is_autocast_enabled(x.device.type):
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
        return gradient @ weight, _of_weight(ctx, gradient, x), None, None, None


class _ScatteredRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, comm: Communicator, label: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm, ctx.label = comm, f"{label} backward"
        if (symmetric := _symmetric(comm)) is not None:
            return symmetric.matmul_reduce_scatter(x, weight.t(), label=label)
        by_rank = _by_rank(x, comm.size)  # [ranks, B, L of a rank, K]
        works, outs = [], []
        for chunk in by_rank.chunk(_num_chunks(by_rank, 2), 2):
            partial = comm.empty(chunk[..., :1].numel() * weight.shape[0], x.dtype, x.device)
            _multiply(chunk, weight.t(), partial)
            outs.append(torch.empty((*chunk.shape[1:-1], weight.shape[0]), dtype=x.dtype, device=x.device))
            works.append(comm.reduce_scatter(partial, outs[-1].view(-1), label=label))
        _drain(works)
        whole = torch.cat(outs, 1)  # [B, L of a rank, M]
        return whole.resize_(*x.shape[:-2], *whole.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        comm: Communicator = ctx.comm
        if (symmetric := _symmetric(comm)) is not None:
            entered, products = symmetric.all_gather_matmul(gradient, [weight], label=ctx.label)
            return products[0], _of_weight(ctx, entered, x), None, None
        by_rank = _by_rank(x, comm.size)
        num_chunks = _num_chunks(by_rank, 2)
        own = gradient.reshape(by_rank.shape[1], -1, weight.shape[0]).chunk(num_chunks, 1)
        works, gathered = _start_gathers(own, comm, ctx.label)
        of_input = torch.empty_like(by_rank)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for work, whole, chunk, target in zip(
            works, gathered, by_rank.chunk(num_chunks, 2), of_input.chunk(num_chunks, 2), strict=True
        ):
            work.wait()
            target.copy_(whole @ weight)
            if of_weight is not None:
                of_weight += weight_gradient(whole, chunk)
        _drain(works)
        return of_input.transpose(0, 1).reshape(x.shape), of_weight, None, None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, splits_sequence: bool, label: str, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.comm, ctx.splits_sequence, ctx.label = comm, splits_sequence, f"{label} backward"
        if splits_sequence:
            whole, *outputs = _gather_and_multiply(x, comm, label, weights)
        else:
            whole, outputs = x.view_as(x), [F.linear(x, weight) for weight in weights]
        ctx.save_for_backward(whole, *weights)
        return whole, *outputs

    @staticmethod
    def backward(ctx: Any, of_whole: torch.Tensor | None, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        whole, *weights = ctx.saved_tensors
        pairs = [(own, weight) for own, weight in zip(gradients, weights, strict=True) if own is not None]
        finish: Callable[[], torch.Tensor] | None = None
        if ctx.needs_input_grad[0]:
            start = _start_scatter if ctx.splits_sequence else _start_sum
            finish = start(ctx.comm, ctx.label, whole, of_whole, pairs)
        of_weights = [
            None if own is None or not ctx.needs_input_grad[4 + index] else weight_gradient(own, whole)
            for index, own in enumerate(gradients)
        ]
        return None if finish is None else finish(), None, None, None, *of_weights


def _symmetric(comm: Communicator) -> SymmetricCommunicator | None:
    """Whose products gather and scatter; None: they do so in chunks, or nothing is computed but shapes."""
    return comm if isinstance(comm, SymmetricCommunicator) and not comm.is_for_shapes else None


def _start_gathers(
    parts: Sequence[torch.Tensor], comm: Communicator, label: str
) -> tuple[list[Work], list[torch.Tensor]]:
    """Start to gather each part of all ranks. Shape: [...] -> [ranks, ...] each."""
    works, gathered = [], []
    for part in parts:
        gathered.append(torch.empty((comm.size, *part.shape), dtype=part.dtype, device=part.device))
        works.append(comm.all_gather(gathered[-1].view(-1), part.contiguous().view(-1), label=label))
    return works, gathered


def _gather_and_multiply(
    x: torch.Tensor, comm: Communicator, label: str, weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The whole input and its products. Shape: [..., L of a rank, K] -> [..., L, K], [..., L, M] each."""
    if (symmetric := _symmetric(comm)) is not None:
        entered, outputs = symmetric.all_gather_matmul(x, [weight.t() for weight in weights], label=label)
        return [entered, *outputs]
    local = x.reshape(-1, *x.shape[-2:])  # [B, L of a rank, K]
    works, gathered = _start_gathers(local.chunk(_num_chunks(local, 1), 1), comm, label)
    sizes = [x.shape[-1], *(weight.shape[0] for weight in weights)]
    targets = [x.new_empty(local.shape[0], comm.size, local.shape[1], size) for size in sizes]
    stop = 0
    for work, chunk in zip(works, gathered, strict=True):
        work.wait()
        start, stop = stop, stop + chunk.shape[2]
        for target, product in zip(targets, (chunk, *(F.linear(chunk, weight) for weight in weights)), strict=True):
            target[:, :, start:stop] = product.transpose(0, 1)
    _drain(works)
    return [target.view(*x.shape[:-2], -1, target.shape[-1]) for target in targets]


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # the gradient of an output, and its weight


def _start_sum(
    comm: Communicator, label: str, whole: torch.Tensor, of_whole: torch.Tensor | None, pairs: Pairs
) -> Callable[[], torch.Tensor]:
    of_input = comm.empty(whole.numel(), whole.dtype, whole.device)
    _sum_products(of_input.view(whole.shape), of_whole, pairs)
    work = comm.all_reduce(of_input, label=label)

    def finish() -> torch.Tensor:
        work.drain()
        return of_input.resize_(whole.shape)

    return finish


def _start_scatter(
    comm: Communicator, label: str, whole: torch.Tensor, of_whole: torch.Tensor | None, pairs: Pairs
) -> Callable[[], torch.Tensor]:
    symmetric = _symmetric(comm)
    if symmetric is not None and of_whole is None and pairs:
        gradient, weight = (torch.cat(each, dim) for each, dim in zip(zip(*pairs, strict=True), (-1, 0), strict=True))
        scattered = symmetric.matmul_reduce_scatter(gradient, weight, label=label)
        return lambda: scattered
    by_rank = _by_rank(whole, comm.size)  # [ranks, B, L of a rank, K]
    num_chunks = _num_chunks(by_rank, 2)
    others = None if of_whole is None else _by_rank(of_whole, comm.size).chunk(num_chunks, 2)
    chunks = [(_by_rank(own, comm.size).chunk(num_chunks, 2), weight) for own, weight in pairs]
    works, outs = [], []
    for index, chunk in enumerate(by_rank.chunk(num_chunks, 2)):
        of_input = comm.empty(chunk.numel(), whole.dtype, whole.device)
        own = [(each[index], weight) for each, weight in chunks]
        _sum_products(of_input.view(chunk.shape), None if others is None else others[index], own)
        outs.append(torch.empty(chunk.shape[1:], dtype=whole.dtype, device=whole.device))
        works.append(comm.reduce_scatter(of_input, outs[-1].view(-1), label=label))

    def finish() -> torch.Tensor:
        _drain(works)
        return torch.cat(outs, 1).view(*whole.shape[:-2], -1, whole.shape[-1])

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


def _of_weight(ctx: Any, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    if not ctx.needs_input_grad[1]:  # a frozen weight
        return None
    return weight_gradient(gradient, x)


def _by_rank(x: torch.Tensor, size: int) -> torch.Tensor:
    """[..., L, K] as [ranks, B, L of a rank, K]."""
    return x.reshape(-1, size, x.shape[-2] // size, x.shape[-1]).transpose(0, 1)


def _num_chunks(tensor: torch.Tensor, dim: int) -> int:
    return min(NUM_CHUNKS, tensor.shape[dim])
