"""What the host reads in a function that is recomputed: the recomputation has the same values, and does not wait.

    forward          values = read_once(read)      reads, and keeps the result
    recomputation    values = read_once(read)      returns the result of the same call in the forward

The results live as long as what ``torch.utils.checkpoint`` keeps of the function. In compiled code an operator runs
again, not a function: its results live as long as a *ticket*, a tensor that the forward makes and the compiler keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from shoal.compiler import eager_operator
from shoal.parallel import kept_graph
from shoal.parallel.saved_tensors import recomputed_calls
from shoal.parallel.selective import Contexts, unseen_by_policies

T = TypeVar("T")

Reads = list[Any] | Iterator[Any]  # of a forward, to be continued; what a recomputation has not taken

_of_call: WeakKeyDictionary[object, list[Any]] = WeakKeyDictionary()
_left: WeakKeyDictionary[object, tuple[object, Iterator[Any]]] = WeakKeyDictionary()  # which recomputation, and what
_of_operator: ContextVar[Reads | None] = ContextVar("host_reads_of_operator", default=None)


def read_once(read: Callable[[], T]) -> T:
    """``read()``, which may block the host; in a recomputation, what it has returned in the forward.

    The calls are in the same order in both. ``read`` saves no tensor for backward, and no recompute policy saves the
    outputs of its operations.
    """
    with unseen_by_policies():
        return _kept(_around(), read)


def _kept(around: Iterator[Reads], read: Callable[[], T]) -> T:
    for reads in around:
        for result in reads if isinstance(reads, Iterator) else ():
            return result  # type: ignore[no-any-return]
        if isinstance(reads, list):
            reads.append(_kept(around, read))
            return reads[-1]  # type: ignore[no-any-return]
    return read()


def _around() -> Iterator[Reads]:
    if (of_operator := _of_operator.get()) is not None:
        yield of_operator
    for call, recomputation in recomputed_calls():
        reads = _of_call.setdefault(call, [])
        if recomputation is None:
            yield reads
            continue
        if _left.get(call, (None,))[0] != recomputation:
            _left[call] = recomputation, iter(tuple(reads))
        yield _left[call][1]


class Tickets:
    """Whether compiled code of this process may have operators that read."""

    are_used = False


@eager_operator("shoal::reads_ticket")
def reads_ticket(source: Tensor, number: Tensor) -> Tensor:
    """A ticket for what one operator reads. Its arguments tell apart the operators of a graph. Shape: [1], int64."""
    return kept_graph.ticket_of([])


@reads_ticket.register_fake
def _(source: Tensor, number: Tensor) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@contextmanager
def keeping_reads(ticket: Tensor) -> Iterator[None]:
    """Inside the block, which is an operator's, results are kept with the ticket, or are those that were."""
    reads: list[Any] = kept_graph.behind(ticket)
    token = _of_operator.set(iter(tuple(reads)) if reads else reads)
    try:
        yield
    finally:
        _of_operator.reset(token)


def contexts_keeping_tickets() -> Contexts:
    """For torch's checkpoint in compiled code: tickets are saved, and nothing else."""
    contexts: Contexts = create_selective_checkpoint_contexts([torch.ops.shoal.reads_ticket.default])
    return contexts


contexts_keeping_tickets.cache_hash = "shoal: tickets are saved"  # type: ignore[attr-defined]
