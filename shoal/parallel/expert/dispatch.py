"""Tokens sent to the ranks that hold their experts, and the experts' outputs back, weighted and summed.

    hidden [tokens, width] -> rows sorted by expert -> all-to-all -> rows of this rank's experts -> ``compute``
    -> all-to-all back -> rows of this rank's tokens -> sum over the k experts of each token

A collective is issued by one autograd function and waited for by another, forward and backward alike:

    function   forward                          backward
    _Send      gather rows, issue               wait, sum the gradients of a token's rows
    _Arrive    wait, sort by expert             sort by source, issue
    _Return    sort by source, issue            wait, sort by expert
    _Combine   wait, weigh and sum              gather gradients times weights, issue

Whatever runs between an issue and its wait overlaps the communication. Rows move outside autograd, in
``_Moving``; a tensor without elements joins the functions, so that every rank's backward issues all collectives, also
where no row arrived or ``hidden`` needs no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.comm import autograd
from shoal.comm.autograd import once_differentiable
from shoal.comm.protocol import Communicator, Work
from shoal.comm.wire import RowBytes
from shoal.compiler import eager_operator, untraced
from shoal.parallel import kept_graph
from shoal.parallel.expert.grouped import gather_rows, sum_rows, with_zeros
from shoal.parallel.expert.held import ExpertsHeld, traced_experts
from shoal.parallel.expert.losses import tokens_per_expert
from shoal.parallel.expert.route import Route, compare_tables, route, table_digest
from shoal.parallel.host_reads import keeping_reads
from shoal.streams import is_accelerator

Compute = Callable[[Tensor, Sequence[int]], Tensor]
Counts = Sequence[Sequence[int]]  # rows by source and target


def run_experts(
    hidden: Tensor,
    expert_index: Tensor,
    weights: Tensor,
    compute: Compute,
    held: ExpertsHeld,
    *,
    score_before: bool = False,
    overlap: int = 1,
    meanwhile: Callable[[], None] | None = None,
    may_drop: bool = True,
    capacity: int | None = None,
    label: str = "experts",
) -> Tensor:
    """The weighted sum of the outputs of each token's experts, in the order of ``expert_index``.

    In compiled code it is one operator of the graph where an engine has the model, ``compute`` is the module that the
    layer's ``Stack`` names, and nothing runs ``meanwhile``; outputs are then as wide as ``hidden``. Else it breaks the
    graph.

    Args:
        hidden: [tokens, width]. Every rank has tokens of its own, in any number.
        expert_index: [tokens, k], int64; -1: no expert, which adds zero.
        weights: [tokens, k].
        compute: ``compute(rows [rows, width], counts)`` runs this rank's experts on rows sorted by them, of which
            ``counts`` has the number for each expert, and returns [rows, out width].
        score_before: multiply the rows by their weights before the experts, not the outputs after them.
        overlap: parts of the tokens; the rows of one are sent while the experts run on another.
        meanwhile: called once while rows are sent: a shared expert. It keeps its result itself.
        may_drop: False: no index is -1. One rank then need not wait for the device.
        capacity: the most tokens that one expert has in ``expert_index``, where no token has the same expert twice;
            None: it is not known. On an accelerator every expert then gets so many rows from each rank, which are zeros
            where there is no token: the host need not wait for the device. (Not where experts are gathered only if they
            are used, which the host must know.)

    Returns: [tokens, out width], of the dtype of ``hidden``. Sums over k are computed in fp32 at least.
    Communicates: along ``held.comm``: one exchange of the counts, or of the capacities between hosts; for each part of
        the tokens 2 all-to-alls, which move a row for each pair whose expert is on another rank, or ``capacity`` rows
        for each expert there; 2 in backward. With one rank nothing. Experts of which
        every rank has a copy: see ``ExpertCopies.gather``.
        Along ``held.tensor.same``, ranks that have the same tokens and other experts: an all-gather of the outputs; in
        backward one of the gradients of ``hidden``, and one of ``weights``.
        Along ``held.tensor.gathers_tokens``, ranks that have other tokens and a part of each expert: an all-gather of
        ``hidden``, of ``expert_index`` and of ``weights``; in backward one of the outputs' gradients.
        Along ``held.tensor.etp``, ranks that have the same tokens, and with ``capacity`` on an accelerator along
        ``held.tensor.same``, in the first call: an exchange of 8 bytes.
    Memory: until backward the rows of the experts' outputs (``score_before``: ``hidden``), if ``weights`` needs
        a gradient. With ``capacity``, where no kernel gathers, a copy of ``hidden`` meanwhile.
    """
    options = (score_before, overlap, may_drop, capacity, label)
    traced = held.traced if torch.compiler.is_dynamo_compiling() and meanwhile is None else None
    if traced is None or traced.compute is not compute:
        return _run_experts(hidden, expert_index, weights, compute, held, meanwhile, *options)
    tensors = [hidden, weights, *traced.parameters]
    keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    reads = torch.ops.shoal.reads_ticket(expert_index, traced.number)
    out: Tensor = torch.ops.shoal.experts(tensors, expert_index, traced.number, reads, *options, dtype, keeps)[0]
    return out


@eager_operator("shoal::experts")
def _experts_operator(
    tensors: list[Tensor],
    expert_index: Tensor,
    number: Tensor,
    reads: Tensor,
    score_before: bool,
    overlap: int,
    may_drop: bool,
    capacity: int | None,
    label: str,
    autocast: torch.dtype | None,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    """
    Args:
        tensors: ``hidden``, ``weights`` and the parameters that are trained.
        number: of the ``TracedExperts``.
        reads: the ticket of what the host reads.
        autocast: its dtype; None: it is off. A compiler turns it off around its operators.
    """
    traced = traced_experts(number)

    def compute(hidden: Tensor, weights: Tensor) -> Tensor:
        given = (hidden, expert_index, weights, traced.compute, traced.held, None)
        is_on = autocast is not None
        with keeping_reads(reads), torch.autocast(hidden.device.type, autocast, is_on, cache_enabled=False):
            return _run_experts(*given, score_before, overlap, may_drop, capacity, label)

    hidden, weights, *_ = tensors
    expert_index = expert_index.clone()  # as kept_graph copies the others; what is read may keep it too
    out = hidden.new_empty(hidden.shape)
    return kept_graph.run(compute, [hidden, weights], traced.parameters, out=out, keeps=keeps)


@_experts_operator.register_fake
def _(tensors: list[Tensor], *_others: Any) -> tuple[Tensor, Tensor]:
    return tensors[0].new_empty(tensors[0].shape), torch.empty(1, dtype=torch.int64, device="cpu")


_experts_operator.register_autograd(kept_graph.backward, setup_context=kept_graph.setup_context)


@untraced
def _run_experts(
    hidden: Tensor,
    expert_index: Tensor,
    weights: Tensor,
    compute: Compute,
    held: ExpertsHeld,
    meanwhile: Callable[[], None] | None,
    score_before: bool,
    overlap: int,
    may_drop: bool,
    capacity: int | None,
    label: str,
) -> Tensor:
    """``run_experts``, uncompiled."""
    held.router_check.note(weights)
    is_first = not held.router_check.has_checked
    held.router_check.check_index(expert_index, held.num_experts, label)
    if held.usage is not None or not is_accelerator(hidden.device):
        capacity = None
    num_tokens, same, others, digest = len(hidden), held.tensor.same, held.tensor.gathers_tokens, None
    if others is not None:
        hidden, expert_index, weights = _gather_tokens(hidden, expert_index, weights, others, label)
        capacity = None if capacity is None else capacity * others.size
    elif held.tensor.etp is not None and is_first:
        compare_tables(expert_index, held.tensor.etp, label)
    if same is not None:
        if capacity is None:
            digest = table_digest(expert_index)
        elif is_first:
            compare_tables(expert_index, same, label)
        hidden, expert_index, weights = _take_own_tokens(hidden, expert_index, weights, same, label)
        may_drop = True  # the tokens that make the parts equal have no expert
    run = partial(_run_divided, compute=compute, score_before=score_before, label=label)
    capacity = None if capacity is None else min(capacity, len(hidden))
    divided = partial(run, held=held, overlap=overlap, digest=digest, capacity=capacity)
    copies = held.copies
    if copies is None or not copies.experts or held.comm is None:
        out = divided(hidden, expert_index, weights, meanwhile=meanwhile, may_drop=may_drop)
    else:
        tensors = copies.gather(held.ids, held.owners, held.comm, label)
        place = copies.place_of(expert_index, held.num_experts)
        if held.load is not None:
            held.load.add(tokens_per_expert(expert_index.masked_fill(place < 0, -1), held.num_experts))
        parts: list[Tensor] = []

        def run_copies() -> None:
            if meanwhile is not None:
                meanwhile()
            with copies.used(tensors):
                parts.append(
                    run(
                        hidden,
                        place,
                        weights,
                        held=ExpertsHeld(len(copies.experts), products=held.products),
                        overlap=1,
                        meanwhile=None,
                        capacity=capacity,
                    )
                )

        elsewhere = expert_index.masked_fill(place >= 0, -1)
        out = divided(hidden, elsewhere, weights, meanwhile=run_copies) + parts[0]
    if others is not None:
        return autograd.split(out, others, label=f"{label} outputs")
    return out if same is None else autograd.gather(out, same, label=f"{label} outputs")[:num_tokens]


def _run_divided(
    hidden: Tensor,
    expert_index: Tensor,
    weights: Tensor,
    *,
    compute: Compute,
    held: ExpertsHeld,
    score_before: bool,
    overlap: int,
    meanwhile: Callable[[], None] | None,
    label: str,
    may_drop: bool = True,
    digest: Tensor | None = None,
    capacity: int | None = None,
) -> Tensor:
    """As ``run_experts``, where each expert is on one rank only."""
    routes = route(expert_index, held, overlap, may_drop=may_drop, digest=digest, capacity=capacity)
    chunks = _chunks(routes, held, label)
    anchor = hidden.new_empty(0, requires_grad=torch.is_grad_enabled())
    sent: tuple[Tensor, ...] = _Send.apply(chunks, hidden, weights if score_before else None, anchor)
    if meanwhile is not None:
        meanwhile()
    returned = []
    with held.using([chunk.route.counts for chunk in chunks]):
        for chunk, ticket in zip(chunks, sent, strict=True):
            rows, arrived = _Arrive.apply(chunk, ticket)
            returned.append(_Return.apply(chunk, arrived, compute(rows, chunk.route.counts)))
    result: Tensor = _Combine.apply(chunks, hidden.dtype, None if score_before else weights, *returned)
    return result


def _take_own_tokens(
    hidden: Tensor, expert_index: Tensor, weights: Tensor, comm: Communicator, label: str
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of tokens that all ranks of ``comm`` hold.

    Returns: hidden, expert_index and weights of the part. Parts are equal: tokens without an expert fill the last ones.
    Communicates: in backward, an all-gather of the gradients of ``hidden``, and one of ``weights``.
    """
    missing = -len(hidden) % comm.size
    if missing:
        hidden, weights = pad(hidden, (0, 0, 0, missing)), pad(weights, (0, 0, 0, missing))
        expert_index = pad(expert_index, (0, 0, 0, missing), value=-1)
    own = autograd.split(hidden, comm, label=f"{label} tokens")
    index = expert_index.chunk(comm.size)[comm.rank]
    return own, index, autograd.split(weights, comm, label=f"{label} weights")


def _gather_tokens(
    hidden: Tensor, expert_index: Tensor, weights: Tensor, comm: Communicator, label: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of all ranks of ``comm``, one rank's after the other's, as each of them needs: hidden, index, weights.

    Communicates: three all-gathers.
    """
    index = autograd.gather(expert_index, comm, label=f"{label} experts of tokens")
    tokens = autograd.gather(hidden, comm, label=f"{label} tokens")
    return tokens, index, autograd.gather(weights, comm, label=f"{label} weights")


class TwoStepRows:
    """The rows from every rank for this one, by two all-to-alls: along ``local``, issued at construction, and ``node``.

        rank = node * (ranks of a node) + local; 2 nodes of 2 ranks; "ab": the rows from rank a to rank b

        rank 0 has             00 01 02 03
        sorted by local        00 02 | 01 03        along ``local`` the first to rank 0, the others to rank 1
        has then               00 02 10 12          all rows from node 0 to ranks 0 and 2, whose coordinate is 0
        sorted by node         00 10 | 02 12        along ``node`` the first to rank 0, the others to rank 2
        has then               00 10 20 30          what one all-to-all among all ranks gives, to the bit

    Each rank exchanges one message with each other node, not one with each rank of it. Rows for other nodes move twice.

    Args:
        rows: [rows, width], by target.
        counts: the rows from each rank to each.
        local: the ranks of this node.
        node: the ranks of this coordinate, one of each node.
    """

    def __init__(self, rows: Tensor, counts: Counts, local: Communicator, node: Communicator, label: str) -> None:
        self._local, self._node, self._label = local, node, label
        this = node.rank * local.size + local.rank
        ranks = [[at * local.size + peer for peer in range(local.size)] for at in range(node.size)]  # by node
        column = [ranks[at][local.rank] for at in range(node.size)]  # those of this coordinate
        row = ranks[node.rank]  # those of this node
        by_local = [[counts[this][ranks[at][peer]] for at in range(node.size)] for peer in range(local.size)]
        self._passed_on = [[counts[peer][target] for target in column] for peer in row]
        self._received = [sum(counts[peer][this] for peer in of_node) for of_node in ranks]
        in_order = _transposed(rows, counts[this], node.size, local)
        self._width = rows.shape[1]
        self._out = rows.new_empty(sum(map(sum, self._passed_on)), self._width)
        self._work = self._issue(local, self._out, in_order, map(sum, self._passed_on), map(sum, by_local))
        self._source = in_order

    def wait(self) -> Tensor:
        """The rows for this rank, by source. Shape: [rows, width]."""
        self._work.drain()
        lengths = [count for of_source in self._passed_on for count in of_source]
        source = _transposed(self._out, lengths, self._local.size, self._node)
        out = source.new_empty(sum(self._received), self._width)
        sent = map(sum, zip(*self._passed_on, strict=True))
        self._issue(self._node, out, source, self._received, sent).drain()
        return out

    def _issue(self, comm: Communicator, out: Tensor, rows: Tensor, received: Any, sent: Any) -> Any:
        return comm.all_to_all(
            out.view(-1),
            rows.view(-1),
            out_splits=[count * self._width for count in received],
            source_splits=[count * self._width for count in sent],
            label=f"{self._label} along {comm.axis}",
        )


def _transposed(rows: Tensor, lengths: Sequence[int], outer: int, comm: Communicator) -> Tensor:
    """Segments that are sorted by an outer and an inner index, sorted by the inner one first, in memory of ``comm``.

    Args:
        outer: the number of outer indices.
    """
    segments = rows.split(list(lengths))
    inner = len(segments) // outer
    in_order = [segments[first * inner + second] for second in range(inner) for first in range(outer)]
    return torch.cat(in_order, out=comm.empty(rows.numel(), rows.dtype, rows.device).view(rows.shape))


class _Moving:
    """Rows on their way to other ranks.

    Args:
        counts: rows from each rank to each.
        padding: rows of zeros after those that are received in place.

    With ``held.wire`` each row is encoded by itself, also one that stays on this rank: a token's values do not depend
    on what is sent with it, nor on where its experts are.
    """

    def __init__(self, held: ExpertsHeld, rows: Tensor, counts: Counts, label: str, padding: int) -> None:
        comm = held.comm
        self._steps: TwoStepRows | None = None
        self._work: Work | None = None
        self._decoded: Callable[[Tensor], Tensor] | None = None
        self._sent = rows = rows.detach().contiguous()
        if comm is None:
            self._received = rows
            return
        if held.wire is not None:
            coded = RowBytes(held.wire, rows.shape[1], rows.dtype, rows.device)
            self._decoded = partial(_decoded, coded, rows.new_empty(0, rows.shape[1]), padding)
            self._sent = rows = coded.encode(rows, comm.empty)
            padding = 0
        if held.hierarchy is not None:
            self._steps = TwoStepRows(rows, counts, *held.hierarchy, label)
            return
        width = rows.shape[1]
        received = [of_rank[comm.rank] for of_rank in counts]
        num_received = sum(received)
        self._received = rows.new_empty(num_received + padding, width)
        self._received[num_received:] = 0
        self._work = comm.all_to_all(
            self._received[:num_received].view(-1),
            rows.view(-1),
            out_splits=[count * width for count in received],
            source_splits=[count * width for count in counts[comm.rank]],
            label=label,
        )

    def wait(self) -> Tensor:
        """The received rows. Shape: [received, width]."""
        if self._steps is not None:
            self._received = self._steps.wait()
        if self._work is not None:
            self._work.drain()
        return self._received if self._decoded is None else self._decoded(self._received)


def _decoded(coded: RowBytes, like: Tensor, padding: int, received: Tensor) -> Tensor:
    """The rows that were received as bytes, and ``padding`` rows of zeros, of the width and dtype of ``like``."""
    out = like.new_empty(len(received) + padding, like.shape[1])
    out[len(received) :] = 0
    coded.decode(received, out[: len(received)])
    return out


class _Chunk:
    """Some of the tokens, on their way to the experts and back.

    Args:
        tokens: which of all.
    """

    def __init__(self, route: Route, tokens: slice, held: ExpertsHeld, label: str) -> None:
        self.route = route
        self.tokens = tokens
        self.held = held
        self.label = label
        self._moving: _Moving | None = None

    def buffer(self, num_rows: int, width: int, like: Tensor) -> Tensor:
        """Memory to send from. Shape: [num_rows, width]."""
        comm = self.held.comm
        if comm is None or self.held.hierarchy is not None:
            return like.new_empty(num_rows, width)
        return comm.empty(num_rows * width, like.dtype, like.device).view(num_rows, width)

    def may_miss(self, rows: Tensor, order: Tensor) -> bool:
        """True if a pair may have no row, and no row of zeros that was received stands for it."""
        return self.route.may_drop and len(rows) == len(order)

    @property
    def indices(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.route.order, self.route.token_of, self.route.row_of

    def release_indices(self) -> None:
        """Leave the indices to the saved tensors, which recomputation frees."""
        none = self.route.order.new_empty(0)
        self.route = replace(self.route, order=none, token_of=none, row_of=none)

    def send_to_experts(self, rows: Tensor, label: str) -> None:
        self._moving = _Moving(self.held, rows, self.route.between, f"{self.label} {label}", 0)

    def send_to_tokens(self, rows: Tensor, label: str) -> None:
        back = list(zip(*self.route.between, strict=True))
        padding = 1 if self.route.may_drop else 0
        self._moving = _Moving(self.held, rows, back, f"{self.label} {label}", padding)

    def wait(self) -> Tensor:
        assert self._moving is not None
        moving, self._moving = self._moving, None
        return moving.wait()

    def sorted_by_expert(self, rows: Tensor) -> Tensor:
        segments = rows.split(list(self.route.segments)) if self.route.segments else ()
        return torch.cat([segments[at] for at in self.route.by_expert]) if segments else rows

    def sorted_by_source(self, rows: Tensor) -> Tensor:
        segments, by_expert = self.route.segments, self.route.by_expert
        if not segments:
            return rows
        parts = rows.split([segments[at] for at in by_expert])
        in_order = [part for _, part in sorted(zip(by_expert, parts, strict=True), key=lambda pair: pair[0])]
        return torch.cat(in_order, out=self.buffer(len(rows), rows.shape[1], rows))


def _chunks(routes: Sequence[Route], held: ExpertsHeld, label: str) -> list[_Chunk]:
    ends = list(accumulate(len(one.row_of) for one in routes))
    return [_Chunk(one, slice(end - len(one.row_of), end), held, label) for one, end in zip(routes, ends, strict=True)]


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chunks: list[_Chunk], hidden: Tensor, weights: Tensor | None, anchor: Tensor
    ) -> tuple[Tensor, ...]:
        keeps_hidden = weights is not None and ctx.needs_input_grad[2]
        ctx.chunks, ctx.shape, ctx.dtype = chunks, hidden.shape, hidden.dtype
        ctx.save_for_backward(weights, hidden if keeps_hidden else None, *_indices(chunks))
        for chunk in chunks:
            order, token_of, _ = chunk.indices
            rows = chunk.buffer(len(order), hidden.shape[1], hidden)
            scale = _of_rows(weights, order, chunk)
            gather_rows(hidden[chunk.tokens], token_of, scale, rows, may_miss=chunk.route.is_padded)
            chunk.send_to_experts(rows, "dispatch")
        return tuple(anchor.new_empty(0) for _ in chunks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        weights, hidden, *indices = ctx.saved_tensors
        of_hidden = weights_gradient = None
        for chunk, (order, token_of, row_of) in zip(ctx.chunks, _by_chunk(indices), strict=True):
            gradients = chunk.wait()
            if ctx.needs_input_grad[1]:
                of_hidden = gradients.new_empty(ctx.shape, dtype=ctx.dtype) if of_hidden is None else of_hidden
                scale = None if weights is None else weights[chunk.tokens]
                sum_rows(gradients, row_of, scale, of_hidden[chunk.tokens], may_miss=chunk.may_miss(gradients, order))
            if hidden is not None:
                weights_gradient = torch.empty_like(weights) if weights_gradient is None else weights_gradient
                rows = torch.empty_like(gradients[: len(order)])
                tokens = hidden[chunk.tokens]
                dots = gather_rows(tokens, token_of, None, rows, gradients, may_miss=chunk.route.is_padded)
                weights_gradient[chunk.tokens] = _of_pairs(dots, row_of)
        return None, of_hidden, weights_gradient, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunk: _Chunk, ticket: Tensor) -> tuple[Tensor, Tensor]:
        ctx.chunk = chunk
        return chunk.sorted_by_expert(chunk.wait()), ticket.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: Tensor, of_ticket: Tensor) -> tuple[Tensor | None, ...]:
        ctx.chunk.send_to_tokens(ctx.chunk.sorted_by_source(of_rows), "dispatch backward")
        return None, of_ticket


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunk: _Chunk, ticket: Tensor, outputs: Tensor) -> Tensor:
        ctx.chunk = chunk
        chunk.send_to_tokens(chunk.sorted_by_source(outputs), "combine")
        return ticket.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_ticket: Tensor) -> tuple[Tensor | None, ...]:
        return None, of_ticket, ctx.chunk.sorted_by_expert(ctx.chunk.wait())


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunks: list[_Chunk], dtype: torch.dtype, weights: Tensor | None, *_: Tensor) -> Tensor:
        keeps_rows = weights is not None and ctx.needs_input_grad[2]
        out, kept = None, []
        for chunk in chunks:
            rows = chunk.wait()
            if out is None:
                out = rows.new_empty(chunks[-1].tokens.stop, rows.shape[1], dtype=dtype)
            scale = None if weights is None else weights[chunk.tokens]
            may_miss = chunk.may_miss(rows, chunk.route.order)
            sum_rows(rows, chunk.route.row_of, scale, out[chunk.tokens], may_miss=may_miss)
            kept.append(rows if keeps_rows else None)
        assert out is not None
        ctx.chunks, ctx.row_dtype = chunks, rows.dtype
        # Indices are saved on every rank: recomputation then runs to this function, which ends the last collective.
        ctx.save_for_backward(weights, *kept, *_indices(chunks))
        for chunk in chunks:
            chunk.release_indices()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        chunks: list[_Chunk] = ctx.chunks
        weights, *saved = ctx.saved_tensors
        kept, indices = saved[: len(chunks)], _by_chunk(saved[len(chunks) :])
        of_weights = torch.empty_like(weights) if ctx.needs_input_grad[2] else None
        # Backward runs the experts of the last chunk first.
        for chunk, rows, (order, token_of, row_of) in reversed(list(zip(chunks, kept, indices, strict=True))):
            of_rows = chunk.buffer(len(order), gradient.shape[1], gradient.new_empty(0, dtype=ctx.row_dtype))
            scale = _of_rows(weights, order, chunk)
            tokens = gradient[chunk.tokens]
            dots = gather_rows(tokens, token_of, scale, of_rows, rows, may_miss=chunk.route.is_padded)
            chunk.send_to_experts(of_rows, "combine backward")
            if of_weights is not None:
                of_weights[chunk.tokens] = _of_pairs(dots, row_of)
        return None, None, of_weights, *(gradient.new_empty(0) for _ in chunks)


def _indices(chunks: Sequence[_Chunk]) -> list[Tensor]:
    return [tensor for chunk in chunks for tensor in chunk.indices]


def _by_chunk(indices: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    return [indices[at : at + 3] for at in range(0, len(indices), 3)]


def _of_rows(weights: Tensor | None, order: Tensor, chunk: _Chunk) -> Tensor | None:
    """The weight of each row of a chunk. Shape: [all tokens, k] -> [rows]."""
    if weights is None:
        return None
    of_pairs = weights[chunk.tokens].reshape(-1)
    return (with_zeros(of_pairs) if chunk.route.is_padded else of_pairs)[order]


def _of_pairs(of_rows: Tensor | None, row_of: Tensor) -> Tensor:
    """A number of each row as one of each pair, 0 where a pair has no row. Shape: [rows] -> [tokens, k]."""
    assert of_rows is not None
    return with_zeros(of_rows)[row_of]
