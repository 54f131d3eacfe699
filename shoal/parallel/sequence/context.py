"""The axes over which attention is spread: set by ``with sequence_parallel(context)`` or by the engine.

    sp    Ulysses: ranks hold neighbouring parts of the positions, and exchange them for heads
    cp    ring: ranks hold chunks from both ends of the sequence, and send keys and values around

With both, the sequence is cut along ``cp`` first, and what a coordinate of ``cp`` holds along ``sp``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.comm import autograd
from shoal.comm.formats import WireFormat
from shoal.comm.protocol import Communicator
from shoal.comm.world import has_scoped_world
from shoal.compiler import eager_operator, untraced
from shoal.device import is_fake, on_host
from shoal.errors import UsageError
from shoal.parallel.host_reads import read_once
from shoal.parallel.sequence.chunks import (
    ChunkOrder,
    Chunks,
    Documents,
    chunks_of,
    cuts,
    num_positions,
)
from shoal.parallel.sequence.ring import KeyExchange


class MaskWindows:
    """The windows of the masks that a model has made in its last forward, for attention that is not told its window."""

    def __init__(self) -> None:
        self._windows: set[int | None] = set()  # None: a mask without a window
        self._is_used = False

    def add(self, window: int | None) -> None:
        if self._is_used:
            self._windows.clear()
            self._is_used = False
        self._windows.add(window)

    def only(self) -> int | None:
        """Raises: UsageError: there are several."""
        self._is_used = True
        if len(self._windows) > 1:
            raise UsageError(
                f"the model makes masks with windows of {', '.join(map(str, self._windows))}, and its attention does"
                " not say which it uses",
                do="use one rank, or let the model pass sliding_window to its attention function.",
                code="sequence-mask",
            )
        return next(iter(self._windows), None)


@dataclass(frozen=True)
class SequenceContext:
    """How a sequence is spread over ranks.

    Args:
        sp: the ranks of Ulysses; None: one.
        cp: the ranks of ring attention; None: one.
        order: ``balanced`` gives ranks of ``cp`` equal work under a causal mask, within documents too if these are
            ``balanced``; ``contiguous`` gives them neighbouring positions.
        exchange: keys and values along ``cp`` by a ``ring`` of sends, or by one ``all_gather``.
        length: positions of the whole sequence, where ranks hold unequal parts; None: every rank holds as many.
        wire: the format in which heads are sent along ``sp``; None: as they are.
        is_alone: attention returns each position's own value, and nothing is exchanged: for a check of the rest.
    """

    sp: Communicator | None = None
    cp: Communicator | None = None
    order: ChunkOrder = "balanced"
    exchange: KeyExchange = "ring"
    length: int | None = None
    wire: WireFormat | None = None
    is_alone: bool = False
    masks: MaskWindows = field(default_factory=MaskWindows, init=False, repr=False, compare=False)
    # The tensors that describe the documents of the last batch, and the documents: one exchange serves all layers.
    _last: list[tuple[tuple[Tensor | None, ...], list[int | None], Documents | None]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    # What ``shard`` has returned, as long as it exists: cut from tensors of the whole sequence, with these documents.
    _cut: MutableMapping[Tensor, Documents | None] = field(
        default_factory=WeakTensorKeyDictionary, init=False, repr=False, compare=False
    )
    # The documents of the batches that ``shard`` has cut last, the same on all ranks: models may pass copies.
    _latest: deque[Documents | None] = field(
        default_factory=partial(deque, maxlen=64), init=False, repr=False, compare=False
    )

    @property
    def sp_size(self) -> int:
        return 1 if self.sp is None else self.sp.size

    @property
    def cp_size(self) -> int:
        return 1 if self.cp is None else self.cp.size

    @property
    def size(self) -> int:
        return self.sp_size * self.cp_size

    @property
    def comms(self) -> list[Communicator]:
        """Those that are set."""
        return [comm for comm in (self.sp, self.cp) if comm is not None]

    @property
    def multiple(self) -> int:
        """A sequence whose length is a multiple of this is cut into equal parts."""
        return self.size * (2 if self.cp_size > 1 and self.order == "balanced" else 1)

    def of_length(self, length: int) -> SequenceContext:
        """The same context for sequences of ``length`` positions, which need not divide evenly."""
        return replace(self, length=length)

    def chunks(self, length: int, documents: Documents | None = None) -> tuple[Chunks, ...]:
        """What each coordinate of ``cp`` holds of ``length`` positions, together with its ranks of ``sp``."""
        return chunks_of(length, self.cp_size, self.order, None if documents is None else documents.chunked_by)

    def sp_lengths(self, length: int) -> tuple[int, ...]:
        """How many positions each rank along ``sp`` holds."""
        together = num_positions(self.chunks(length)[0 if self.cp is None else self.cp.rank])
        return tuple(stop - start for start, stop in pairwise(cuts(together, self.sp_size)))

    def whole_length(self, local: int, what: str = "a tensor") -> int:
        """The positions of the whole sequence, of which this rank holds ``local``.

        Raises: UsageError: ``local`` is not this rank's part.
        """
        if self.length is None:
            length = local * self.size
            if length % self.multiple:
                raise UsageError(
                    f"{what} has {local} positions on each of {self.size} ranks, {length} together, which do not divide"
                    f" into {2 * self.cp_size} chunks for cp={self.cp_size}",
                    do=f"pad the sequence by {-length % self.multiple} positions to {length + -length % self.multiple},"
                    " or give the context its length.",
                    code="sequence-length",
                )
            return length
        expected = self.sp_lengths(self.length)[0 if self.sp is None else self.sp.rank]
        if local != expected:
            raise UsageError(
                f"{what} has {local} positions on this rank, whose part of {self.length} positions are {expected}",
                do="cut it by context.shard(tensor), or leave out the context's length where all parts are equal.",
                code="sequence-length",
            )
        return self.length

    def shard(self, tensor: Tensor, dim: int = 1, documents: Documents | None = None) -> Tensor:
        """This rank's positions of a tensor that has all of them along ``dim``; without a gradient's collective.

        Args:
            documents: of the rows; if they are ``balanced``, ranks of ``cp`` get equal work of them. Give attention the
                same ones, or, as position_ids of a model of Transformers, what is returned for the positions of them.

        Raises: UsageError: the positions do not divide, and the context has no length; documents of another length.
        """
        length = tensor.shape[dim]
        if documents is not None and documents.length != length:
            raise UsageError(
                f"a sequence of {length} positions, with documents of {documents.length} positions",
                do="give shard the documents of the whole rows, and the dim of their positions.",
                code="sequence-documents",
            )
        if self.length is None and length % self.multiple:
            missing = -length % self.multiple
            raise UsageError(
                f"a sequence of {length} positions does not divide into {self.multiple} parts for sp={self.sp_size},"
                f" cp={self.cp_size}",
                do=f"pad it by {missing} positions to {length + missing}, or use context.of_length({length}).",
                code="sequence-length",
            )
        if self.length is not None and length != self.length:
            raise UsageError(
                f"a sequence of {length} positions in a context for {self.length}",
                do=f"use context.of_length({length}).",
                code="sequence-length",
            )
        chunks = self.chunks(length, documents)[0 if self.cp is None else self.cp.rank]
        together = torch.cat([tensor.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)
        parts: tuple[Tensor, ...] = together.split(list(self.sp_lengths(length)), dim)
        part = parts[0 if self.sp is None else self.sp.rank].contiguous()
        for comm in self.comms:
            comm.backend.divides(tensor, part, dim, "context.shard")
        self._cut[part] = documents
        if not self._latest or self._latest[-1] != documents:
            self._latest.append(documents)
        return part

    def unshard(self, tensor: Tensor, dim: int = 1, documents: Documents | None = None) -> Tensor:
        """All positions of a tensor of which each rank has its part along ``dim``; the inverse of :meth:`shard`.

        Args:
            documents: as ``shard`` was given them; None: those with which it returned ``tensor``, if it did.

        Communicates: an all-gather over ``sp``, and one over ``cp``. Without a gradient.
        """
        return self._in_order(self._of_all_ranks(tensor, dim), dim, documents or self._cut.get(tensor))

    def _of_all_ranks(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """What all ranks hold, one after the other."""
        tensor = tensor.detach()
        length = self.whole_length(tensor.shape[dim])
        if self.sp is not None:
            tensor = _gathered(tensor, self.sp, self.sp_lengths(length), dim)
        if self.cp is None:
            return tensor
        return _gathered(tensor, self.cp, tuple(num_positions(each) for each in self.chunks(length)), dim)

    def _in_order(self, tensor: Tensor, dim: int, documents: Documents | None) -> Tensor:
        """What all ranks hold, one after the other, in the order of the sequence."""
        if self.cp is None:
            return tensor
        chunks = self.chunks(tensor.shape[dim], documents)
        parts = tensor.split([len(chunk) for each in chunks for chunk in each], dim)
        starts = [chunk.start for each in chunks for chunk in each]
        order = sorted(range(len(parts)), key=lambda index: starts[index])
        return torch.cat([parts[index] for index in order], dim)

    def largest(self, number: Tensor, label: str) -> Tensor:
        """The largest of all ranks' numbers. Communicates: an exchange over ``sp``, and one over ``cp``. Shape: [1]."""
        number = number.view(1)
        for comm in self.comms:
            number = comm.exchange(number, label=label).wait().max().view(1)
        return number

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """The positions that this rank holds of a sequence of ``length``. Shape: [L of this rank], int64."""
        return self.shard(torch.arange(length, device=device), dim=0)

    def documents(self, ids: Tensor) -> Documents:
        """The documents of the whole rows, from this rank's numbers of them, [B, L of this rank].

        The result is kept for the calls of other layers with the same tensor, until it is written to, and for a
        recomputation.

        Communicates: as :meth:`unshard`. Order: the host waits for the result.
        """
        return read_once(lambda: self._documents_by(ids))

    def _documents_by(self, ids: Tensor) -> Documents:
        cut = self._cut.get(ids)
        documents = self._kept((ids,), lambda: Documents.from_ids(self.unshard(ids)))
        assert documents is not None
        return documents if cut is None else replace(documents, chunked_by=cut.chunked_by)

    def check_documents(self, documents: Documents | None) -> None:
        """Raises: UsageError: ``shard`` has divided the last batch by its documents, which attention was not given."""
        latest = self._latest[-1] if self._latest else None
        if self.cp_size == 1 or self.order != "balanced" or latest is None or latest.chunked_by is None:
            return
        if documents is None or (documents.chunked_by is None and documents.begins == latest.begins):
            raise UsageError(
                f"the ranks of cp={self.cp_size} hold a batch that is divided by its documents, and attention was given"
                f" {'no documents' if documents is None else 'documents that are not balanced'}",
                do="give attention the documents that batch.shard(context) returns, or that shard was given; of rows of"
                " one document, Documents.of_lengths([[length]]).",
                code="sequence-documents",
            )

    def _kept(self, given: tuple[Tensor | None, ...], make: Callable[[], Documents | None]) -> Documents | None:
        """What was made last, if it was made of these tensors, and no kernel has written to them since."""
        # Inference tensors have no version: their documents are exchanged again.
        versions = [-1 if tensor is None else None if tensor.is_inference() else tensor._version for tensor in given]
        for before, versions_before, documents in self._last:
            is_same = versions == versions_before and None not in versions
            if is_same and all(one is other for one, other in zip(before, given, strict=True)):
                return documents
        documents = make()
        self._last[:] = [(given, versions, documents)]
        return documents

    @untraced
    def documents_of(self, positions: Tensor | None, padding: Tensor | None) -> Documents | None:
        """The documents of the whole rows, as models of transformers describe them; None: one document a row.

        The result is kept for further calls with the same tensors, until they are written to, and for a recomputation.

        Args:
            positions: ``position_ids`` of this rank, [B or 1, L of this rank]: a document begins where they do not go
                on. None on all ranks or on none.
            padding: ``attention_mask`` of this rank, [B, L of this rank]: 0 where a position is padding.

        Raises: UsageError: positions that every rank counts from 0; padding between tokens.
        Communicates: as :meth:`unshard`, for each of the two, and an exchange.
        Order: the host waits for the result, once.
        """
        return read_once(lambda: self._documents_at(positions, padding))

    def _documents_at(self, positions: Tensor | None, padding: Tensor | None) -> Documents | None:
        if positions is not None and padding is None and (known := self._cut.get(positions)) is not None:
            return known
        return self._kept((positions, padding), lambda: self._documents_of(positions, padding))

    def _documents_of(self, positions: Tensor | None, padding: Tensor | None) -> Documents | None:
        # The host reads the vector of all that it must know: it waits for the device once.
        known: list[Tensor] = []
        if positions is not None:
            known += [self._of_all_ranks(positions), self._are_of_whole_rows(positions)]
        if padding is not None:
            known.append(self._of_all_ranks(padding.to(torch.uint8)))
        documents = None
        if known:
            vector = on_host(torch.cat([each.reshape(-1).to(torch.int64) for each in known]))
            if is_fake(vector):
                return None  # a dry run has no values: each row is one document
            split = vector.split([each.numel() for each in known])
            parts = [part.view(each.shape) for part, each in zip(split, known, strict=True)]
        if positions is not None:
            self._check_whole_positions(positions.shape[-1], bool(parts[1]))
            cut = self._cut.get(positions)
            documents = cut or self._documents_in(parts[0], is_copy=positions not in self._cut)
        if padding is not None:
            of_padding = Documents.of_padding(self._in_order(parts[-1].bool(), 1, documents))
            documents = of_padding if documents is None else documents.and_of(of_padding)
        if documents is not None and documents.are_whole_rows:
            documents = None
        return documents

    def _documents_in(self, positions: Tensor, *, is_copy: bool) -> Documents:
        """The documents of the positions that all ranks hold, one after the other.

        Args:
            is_copy: ``shard`` has not returned them. A model may pass copies: of the orders in which batches were
                divided, theirs is the one in which they are the positions of its documents.

        Raises: UsageError: there is none, and in the order without documents one begins with another position than 0.
        """
        divided = [each for each in self._latest if is_copy and each is not None and each.chunked_by is not None]
        for documents in reversed(divided):
            if Documents.from_positions(self._in_order(positions, 1, documents)).begins == documents.begins:
                return documents
        whole = self._in_order(positions, 1, None)
        documents = Documents.from_positions(whole)
        firsts = (int(whole[row, at]) for row, begins in enumerate(documents.begins) for at in begins[:-1])
        if divided and self.order == "balanced" and any(firsts):
            raise UsageError(
                "position_ids are not those of a batch that ranks of cp have divided, by its documents or without",
                do="give the model the positions that batch.shard(context) returns, or copies of them, soon after it.",
                code="sequence-documents",
            )
        return documents

    def _are_of_whole_rows(self, positions: Tensor) -> Tensor:
        """1 if the positions of some rank are not counted from 0, or were cut from whole rows. Shape: [1]."""
        local = torch.arange(positions.shape[-1], device=positions.device)
        is_cut = positions in self._cut  # documents may be as long as a part
        are_others = torch.ones_like(local[:1]) if is_cut else (positions != local).any().to(local.dtype)
        return self.largest(are_others, "positions from 0")

    def _check_whole_positions(self, length: int, are_of_whole_rows: bool) -> None:
        if self.size > 1 and not are_of_whole_rows:
            raise UsageError(
                f"each of {self.size} ranks counts its position_ids from 0 to {length - 1}",
                do="give the model position_ids of the whole sequence, cut like input_ids: without them it takes each"
                " rank's part for a sequence of its own.",
                code="sequence-positions",
            )


@untraced
def _gathered(tensor: Tensor, comm: Communicator, lengths: tuple[int, ...], dim: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = max(lengths)
    own = tensor.new_zeros(shape)
    own.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    full = comm.gathered(own, label="gather of a sequence")
    return torch.cat([part.narrow(dim, 0, length) for part, length in zip(full.unbind(0), lengths, strict=True)], dim)


def sum_over_sequence(numbers: Tensor, label: str) -> Tensor:
    """The sum over the ranks of the context that is set, which hold other tokens of the same sequences.

    Each rank may compute a loss of its own from it.

    Communicates: an all-reduce over ``sp``, and one over ``cp``; in backward too, if ``numbers`` have a gradient.
    """
    if torch.compiler.is_dynamo_compiling():
        traced: Tensor = torch.ops.shoal.sum_over_sequence(numbers, label, False) if may_be_spread() else numbers
        return traced
    context = current_sequence_context()
    for comm in [] if context is None or context.is_alone else context.comms:
        numbers = autograd.all_reduce(autograd.copy(numbers, comm, label=label), comm, label=label)
    return numbers


@eager_operator("shoal::sum_over_sequence")
def _sum_operator(numbers: Tensor, label: str, is_backward: bool) -> Tensor:
    context = current_sequence_context()
    comms = () if context is None or context.is_alone else context.comms
    total = numbers.clone()
    for comm in reversed(comms) if is_backward else comms:
        total = autograd.all_reduce(total, comm, label=label)
    return total


@_sum_operator.register_fake
def _(numbers: Tensor, label: str, is_backward: bool) -> Tensor:
    return torch.empty_like(numbers)


def _keep_label(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.label = inputs[1]


def _sum_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.shoal.sum_over_sequence(gradient, f"{ctx.label} backward", True), None, None


_sum_operator.register_autograd(_sum_gradients, setup_context=_keep_label)


@dataclass
class _Setting:
    """The context that is set, for this process or for one thread of it."""

    default: SequenceContext | None = None  # outside of any ``with sequence_parallel``
    is_taken: bool = True  # by an engine, or there is nothing to take
    blocks: list[SequenceContext | None] = field(default_factory=list)  # of the ``with`` blocks that are open


# Of ranks that are threads. A process has one context, which autograd's threads see: recomputation runs there on CUDA.
_of_thread: ContextVar[_Setting | None] = ContextVar("sequence_context", default=None)
_of_process = _Setting()


class _Known:
    """What compiled code reads of all contexts, which it cannot tell apart."""

    has_been_set = False  # in this process, once


def may_be_spread() -> bool:
    """False as long as no context was set in this process: what a compiler may build on."""
    return _Known.has_been_set


def _note(context: SequenceContext | None) -> SequenceContext | None:
    _Known.has_been_set |= context is not None
    return context


def _setting_here() -> _Setting:
    """What this thread may set: of ranks that are threads its own. A process has one, in whatever thread it trains."""
    if threading.current_thread() is threading.main_thread() or not has_scoped_world():
        return _of_process
    setting = _of_thread.get()
    if setting is None:
        setting = _Setting(_of_process.default, _of_process.is_taken)
        _of_thread.set(setting)
    return setting


def current_sequence_context() -> SequenceContext | None:
    """The context that is set; None: attention is not spread over ranks."""
    if not may_be_spread():  # a compiler reads no further, which would divide its graph
        return None
    setting = _of_thread.get() or _of_process
    return setting.blocks[-1] if setting.blocks else setting.default


def set_sequence_context(context: SequenceContext | None) -> SequenceContext | None:
    """Set the context until it is set again, or until the engine that is made next is destroyed.

    Scripts use :func:`sequence_parallel`.

    Returns: the one before.
    """
    setting = _setting_here()
    before, setting.default = setting.default, _note(context)
    setting.is_taken = context is None
    return before


def take_sequence_context() -> SequenceContext | None:
    """The context that was set for an engine to be made; None: there is none, or an engine took it."""
    setting = _setting_here()
    context = None if setting.is_taken else setting.default
    setting.is_taken = True
    return context


def use_sequence_context(context: SequenceContext | None) -> None:
    """Set the context of the engine that computes now."""
    setting = _setting_here()
    if setting.default is not context:
        setting.default, setting.is_taken = _note(context), True


def drop_sequence_context(context: SequenceContext | None) -> None:
    """Set no context, if ``context`` is the one of an engine that was set last."""
    setting = _setting_here()
    if setting.default is context:
        setting.default, setting.is_taken = None, True


@contextmanager
def sequence_parallel(context: SequenceContext | None) -> Iterator[None]:
    """Compute attention over the ranks of ``context`` inside the block, in engines too.

    With activation checkpointing, call backward inside the block too.
    """
    blocks = _setting_here().blocks
    blocks.append(_note(context))
    try:
        yield
    finally:
        blocks.pop()
