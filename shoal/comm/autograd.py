"""Collectives that autograd differentiates: the pairs that tensor, sequence and expert parallel layers are made of.

    function        forward                          backward             Megatron's name
    copy            the tensor itself                all_reduce           copy_to_tensor_model_parallel_region
    all_reduce      sum over ranks                   the gradient itself  reduce_from_tensor_model_parallel_region
    split           this rank's part along dim       gather               scatter_to_tensor_model_parallel_region
    gather          all parts, concatenated          split                gather_from_tensor_model_parallel_region
    all_gather      all parts, concatenated          reduce_scatter       gather_from_sequence_parallel_region
    reduce_scatter  this rank's part of the sum      all_gather           reduce_scatter_to_sequence_parallel_region
    all_to_all      parts along one dim for another  all_to_all back      all_to_all (Ulysses; dispatch of tokens)

Which of two functions with the same forward is right depends on what the ranks compute from the result. After
``gather`` all ranks compute the same: each has the whole gradient, and its own part of it is enough. After
``all_gather`` each rank computes something of its own: the gradient of a part is the sum over the ranks.

Every function takes a tensor of any shape, returns a new tensor (``copy``, and a gather on one rank: the same memory)
and waits for its result. Ranks call them in the same order.
The backward's collectives have the label ``"<label> backward"``.

    y = all_reduce(linear(copy(x, tp, label="mlp in")), tp, label="mlp out")

With a ``TracedLabel`` a function is traced by ``torch.compile``: its collective is an operator of the graph. With a
text it breaks the graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable as _torchs

from shoal.comm.protocol import Communicator, Work
from shoal.compiler import eager_operator, untraced
from shoal.errors import UsageError


class TracedLabel:
    """The label of a layer's collectives and their communicator, for compiled code.

    A compiled graph takes ``number`` as an input and looks the label up when it runs: one graph serves equal blocks,
    whose labels differ, and ranks that are threads.

    Attributes:
        is_traced: False: the graph is broken, as by a text.
    """

    def __init__(self, comm: Communicator, text: str) -> None:
        self.comm, self.text, self.is_traced = comm, text, True
        number = next(_numbers)
        self.number = torch.tensor(number, dtype=torch.int64, device="cpu")
        _labels[number] = self

    def __str__(self) -> str:
        return self.text


_numbers = itertools.count()
_labels: weakref.WeakValueDictionary[int, TracedLabel] = weakref.WeakValueDictionary()
Label = str | TracedLabel


def copy(tensor: torch.Tensor, comm: Communicator, *, label: Label) -> torch.Tensor:
    """``tensor``; its gradient is summed over the ranks, which compute different parts from it."""
    return _apply(tensor, comm, label, TensorMove("alias"), TensorMove("sum"))


def all_reduce(tensor: torch.Tensor, comm: Communicator, *, label: Label) -> torch.Tensor:
    """The sum over the ranks; every rank computes the same from it, so that its gradient is taken as it is."""
    return _apply(tensor, comm, label, TensorMove("sum"), TensorMove("keep"))


def split(tensor: torch.Tensor, comm: Communicator, *, dim: int = 0, label: Label) -> torch.Tensor:
    """This rank's part of ``tensor``, which all ranks have, along ``dim``."""
    return _apply(tensor, comm, label, TensorMove("own_part", (dim,)), TensorMove("gather", (dim,)))


def gather(tensor: torch.Tensor, comm: Communicator, *, dim: int = 0, label: Label) -> torch.Tensor:
    """The ranks' tensors concatenated along ``dim``; every rank computes the same from them."""
    return _apply(tensor, comm, label, TensorMove("gather", (dim,)), TensorMove("own_part", (dim,)))


def all_gather(tensor: torch.Tensor, comm: Communicator, *, dim: int = 0, label: Label) -> torch.Tensor:
    """The ranks' tensors concatenated along ``dim``; each rank computes something of its own from them."""
    return _apply(tensor, comm, label, TensorMove("gather", (dim,)), TensorMove("sum_part", (dim,)))


def reduce_scatter(tensor: torch.Tensor, comm: Communicator, *, dim: int = 0, label: Label) -> torch.Tensor:
    """This rank's part, along ``dim``, of the sum over the ranks."""
    return _apply(tensor, comm, label, TensorMove("sum_part", (dim,)), TensorMove("gather", (dim,)))


def all_to_all(
    tensor: torch.Tensor, comm: Communicator, *, split_dim: int = 0, concat_dim: int = 0, label: Label
) -> torch.Tensor:
    """Send part ``r`` of ``tensor`` along ``split_dim`` to rank ``r``; concatenate the received parts."""
    there, back = (split_dim, concat_dim), (concat_dim, split_dim)
    return _apply(tensor, comm, label, TensorMove("exchange_parts", there), TensorMove("exchange_parts", back))


def is_gather(node: Any, comm: Communicator) -> bool:
    """True if a node of autograd's graph is a :func:`gather` over ``comm``."""
    is_pair = getattr(type(node), "_forward_cls", None) is _Pair
    return is_pair and getattr(node.back, "verb", None) == "own_part" and node.comm is comm


@dataclass(frozen=True)
class TensorMove:
    """What happens to a tensor in one direction: a function of this file, and the dims of the tensor."""

    verb: str
    dims: tuple[int, ...] = ()

    def __call__(self, tensor: torch.Tensor, comm: Communicator, label: str) -> torch.Tensor:
        return _MOVES[self.verb](tensor, comm, label, *self.dims)

    def shape(self, shape: Sequence[int], size: int) -> list[int]:
        """Of the result on each of ``size`` ranks."""
        result = list(shape)
        if self.verb in ("own_part", "sum_part", "exchange_parts"):
            result[self.dims[0]] //= size
        if self.verb in ("gather", "exchange_parts"):
            result[self.dims[-1]] *= size
        return result


Moved = Callable[[torch.Tensor, Communicator, str], torch.Tensor]


def _apply(tensor: torch.Tensor, comm: Communicator, label: Label, there: TensorMove, back: TensorMove) -> torch.Tensor:
    if isinstance(label, TracedLabel) and label.is_traced and torch.compiler.is_dynamo_compiling():
        traced: torch.Tensor = _TracedPair.apply(tensor, label.number, comm.size, there, back)
        return traced
    return _apply_untraced(tensor, comm, label, there, back)


# A compiler calls it as it is: it would trace the waiting for other ranks.
@untraced
def _apply_untraced(tensor: torch.Tensor, comm: Communicator, label: Label, there: Moved, back: Moved) -> torch.Tensor:
    result: torch.Tensor = _Pair.apply(tensor, comm, str(label), there, back)
    return result


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator, which has no types in some versions of torch."""
    decorated: Callable[..., Any] = _torchs(backward)  # type: ignore[no-untyped-call,unused-ignore]
    return decorated


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, comm: Communicator, label: str, there: Moved, back: Moved
    ) -> torch.Tensor:
        ctx.comm, ctx.label, ctx.back = comm, label, back
        return there(tensor, comm, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.back(gradient, ctx.comm, f"{ctx.label} backward"), None, None, None, None


@eager_operator("shoal::move")
def move_in_graph(
    tensor: torch.Tensor, label: torch.Tensor, verb: str, dims: list[int], after: str, shape: list[int]
) -> torch.Tensor:
    """A move as an operator of a compiled graph. The host reads the label when the operator runs.

    Args:
        label: the number of a ``TracedLabel``.
        after: what follows it.
        shape: of the result.
    """
    at = _labels[int(label)]
    result = TensorMove(verb, tuple(dims))(tensor, at.comm, f"{at.text}{after}")
    return result.clone() if result.data_ptr() == tensor.data_ptr() else result  # an operator's result is its own


@move_in_graph.register_fake
def _(
    tensor: torch.Tensor, label: torch.Tensor, verb: str, dims: list[int], after: str, shape: list[int]
) -> torch.Tensor:
    return tensor.new_empty(shape)


class _TracedPair(torch.autograd.Function):
    """As ``_Pair``, for a compiler to trace."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, number: torch.Tensor, size: int, there: TensorMove, back: TensorMove
    ) -> torch.Tensor:
        ctx.save_for_backward(number)
        ctx.size, ctx.back = size, back
        return traced_move(tensor, number, size, there, "")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (number,) = ctx.saved_tensors
        return traced_move(gradient, number, ctx.size, ctx.back, " backward"), None, None, None, None


def traced_move(tensor: torch.Tensor, number: torch.Tensor, size: int, move: TensorMove, after: str) -> torch.Tensor:
    """``move`` among ``size`` ranks under a label's number, for a compiler to trace."""
    if move.verb in ("alias", "keep"):
        return tensor.view_as(tensor) if move.verb == "alias" else tensor
    shape = move.shape(tensor.shape, size)
    result: torch.Tensor = torch.ops.shoal.move(tensor, number, move.verb, list(move.dims), after, shape)
    return result


# The moves themselves. Each drains its work: the caller may overwrite source and result at once.


def _keep(gradient: torch.Tensor, comm: Communicator, label: str) -> torch.Tensor:
    return gradient


def _own_part(tensor: torch.Tensor, comm: Communicator, label: str, dim: int) -> torch.Tensor:
    part = _parts(tensor, comm.size, dim, label)[comm.rank].contiguous()
    comm.backend.divides(tensor, part, dim, label)
    return part


def _sum(tensor: torch.Tensor, comm: Communicator, label: str) -> torch.Tensor:
    # resize_(): a view could not be changed in place by the caller
    full = comm.empty(tensor.numel(), tensor.dtype, tensor.device).resize_(tensor.shape).copy_(tensor)
    comm.all_reduce(full.view(-1), label=label).drain()
    return full


def _sum_part(tensor: torch.Tensor, comm: Communicator, label: str, dim: int) -> torch.Tensor:
    """Memory: a copy of ``tensor`` in which each rank's part is contiguous, and the result."""
    if comm.size == 1:
        return _copied(tensor)
    parts = _parts(tensor, comm.size, dim, label)
    full = _as_one(parts, comm)
    out = torch.empty(parts[0].shape, dtype=tensor.dtype, device=tensor.device)
    comm.reduce_scatter(full, out.view(-1), label=label).drain()
    return out


def _gather(tensor: torch.Tensor, comm: Communicator, label: str, dim: int) -> torch.Tensor:
    return _copied(tensor) if comm.size == 1 else begin_gather(tensor, comm, dim, label).wait()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """What one rank gets: as of several ranks, a tensor of its own, which may be changed in place."""
    return tensor.clone(memory_format=torch.contiguous_format)


class Gathering:
    """An all-gather under way; see :func:`begin_gather`."""

    def __init__(self, full: torch.Tensor, dim: int, work: Work) -> None:
        self._full, self._dim, self._work = full, dim, work
        self._whole: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """The ranks' tensors, concatenated. Idempotent."""
        if self._whole is None:
            self._work.drain()
            self._whole = _concatenated(self._full, self._dim)
            del self._full
        return self._whole


def begin_gather(tensor: torch.Tensor, comm: Communicator, dim: int, label: str) -> Gathering:
    """Start to gather the ranks' tensors along ``dim``, outside autograd."""
    full = torch.empty((comm.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    return Gathering(full, dim, comm.all_gather(full.view(-1), tensor.contiguous().view(-1), label=label))


def _exchange_parts(
    tensor: torch.Tensor, comm: Communicator, label: str, split_dim: int, concat_dim: int
) -> torch.Tensor:
    parts = _parts(tensor, comm.size, split_dim, label)
    received = torch.empty((comm.size, *parts[0].shape), dtype=tensor.dtype, device=tensor.device)
    comm.all_to_all(received.view(-1), _as_one(parts, comm), label=label).drain()
    return _concatenated(received, concat_dim)


def _parts(tensor: torch.Tensor, size: int, dim: int, label: str) -> tuple[torch.Tensor, ...]:
    if tensor.shape[dim] % size:
        raise UsageError(
            f"{label!r}: dim {dim} of a tensor of shape {tuple(tensor.shape)} does not divide by {size} ranks",
            do="pad the dim to a multiple of the ranks.",
        )
    return tensor.chunk(size, dim)


def _as_one(parts: Sequence[torch.Tensor], comm: Communicator) -> torch.Tensor:
    """The parts one after the other, in memory that ``comm`` sends from without a copy. Shape: [numel]."""
    shape = len(parts), *parts[0].shape
    full = comm.empty(len(parts) * parts[0].numel(), parts[0].dtype, parts[0].device)
    torch.stack(list(parts), out=full.view(shape))
    return full


def _concatenated(stacked: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensors along dim 0 of ``stacked``, concatenated along ``dim`` of theirs."""
    if dim % (stacked.dim() - 1) == 0:
        return stacked.resize_(stacked.shape[0] * stacked.shape[1], *stacked.shape[2:])
    return torch.cat(stacked.unbind(0), dim)


_MOVES: dict[str, Callable[..., torch.Tensor]] = {
    "alias": lambda tensor, comm, label: tensor.view_as(tensor),
    "keep": _keep,
    "own_part": _own_part,
    "sum": _sum,
    "sum_part": _sum_part,
    "gather": _gather,
    "exchange_parts": _exchange_parts,
}
