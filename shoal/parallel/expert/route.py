"""Which row goes where: pairs of a token and one of its experts, sorted by the expert, and how many each rank gets.

    2 ranks, 4 experts; k = 2; three tokens of rank 0

    expert_index   [[2, 0], [0, 3], [2, -1]]     pairs 0 1 | 2 3 | 4 5; pair 5 is dropped
    order          1 2 | 0 4 3                   pairs sorted by expert: 0 0 | 2 2 3; rows 0 1 go to rank 0, 2 3 4 to 1
    token_of       0 1 | 0 2 1                   the token of each row
    row_of         [[2, 0], [1, 4], [3, 5]]      the row of each pair; 5 = rows: there is none

With a capacity of 2, every expert gets 2 rows of each rank, some of which are padding: pair 6 and token 3 are none. The
host then knows the numbers of rows, and does not read them from the device:

    order          1 2 | 6 6 | 0 4 | 3 6         rows 0 to 3 go to rank 0, 4 to 7 to 1
    token_of       0 1 | 3 3 | 0 2 | 1 3
    row_of         [[4, 0], [1, 6], [5, 8]]

A row is sent once for each expert of its token. Rows that a rank receives are sorted by source, then by expert; experts
run on rows sorted by expert, then by source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, overload

import torch
from torch import Tensor

from shoal.comm.protocol import Communicator
from shoal.device import is_fake, numbers_on, read_vector
from shoal.errors import UsageError
from shoal.parallel.expert.held import ExpertsHeld
from shoal.parallel.host_reads import read_once
from shoal.parallel.products import AS_THEY_ARE
from shoal.parallel.selective import unseen_by_policies

Counts = list[list[list[int]]]  # rows by chunk, source and slot

_OTHER_TOKENS = (
    "recomputed experts got other tokens than in the forward: give the recomputation the random states of the forward"
    " (preserve_rng_state), and deterministic operations before the router"
)


class RowCounts(Sequence[int]):
    """Rows of each expert. The host reads them from the device when it first needs them.

    Args:
        starts: the first row of each expert and the end of the last one, on the device; shape [experts + 1].

    Attributes:
        products: how the experts' matrices are multiplied.
    """

    def __init__(self, on_host: Sequence[int] | None = None, starts: Tensor | None = None) -> None:
        assert on_host is not None or starts is not None
        self._on_host = on_host
        self._starts = starts
        self.products = AS_THEY_ARE

    @property
    def on_host(self) -> Sequence[int]:
        if self._on_host is None:
            assert self._starts is not None
            counts = self._starts.diff()
            self._on_host = read_once(lambda: [int(count) for count in read_vector(counts, when_fake=0.0)])
        return self._on_host

    def ends(self, device: torch.device) -> Tensor:
        """The row after the last one of each expert: the offsets that ``grouped_mm`` takes. Shape: [experts], int32."""
        if self._starts is not None:
            return self._starts[1:].to(torch.int32)
        return numbers_on(device, list(accumulate(self.on_host)), torch.int32)

    def __len__(self) -> int:
        return len(self._on_host) if self._on_host is not None else len(self._starts) - 1  # type: ignore[arg-type]

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self.on_host[index]


@dataclass
class Route:
    """Where the rows of some tokens go; see the module.

    Args:
        order, token_of: shape [rows]; of padding the number of pairs, and of tokens.
        row_of: shape [tokens, k]; a dropped pair has the number of rows.
        may_drop: False: every pair has a row.
        is_padded: rows may be padding.
        counts: rows of each local expert, from all ranks.
        between: rows from each rank to each rank.
        segments: rows from each rank for each local expert: the lengths, in the order in which they are received.
        by_expert: the segments in the order in which experts run.
    """

    order: Tensor
    token_of: Tensor
    row_of: Tensor
    may_drop: bool
    is_padded: bool
    counts: RowCounts
    between: Sequence[Sequence[int]]
    segments: Sequence[int] = ()
    by_expert: Sequence[int] = ()


@dataclass(frozen=True)
class _Slots:
    """Experts in the order in which rows are sorted.

    Args:
        slot_of: by expert; None: the expert itself.
        owned: by rank, the slots of its experts.
        local: for each local expert, in the order of the parameters, its place among this rank's slots.
    """

    slot_of: tuple[int, ...] | None
    owned: tuple[range, ...]
    local: tuple[int, ...]


class _SortedPairs(NamedTuple):
    """The pairs of some tokens.

    Args:
        keys: the slot of each pair; the number of slots: it has no expert. Shape: [pairs].
        order: the pairs sorted by slot. Shape: [pairs].
        place: of each pair, in that order. Shape: [pairs].
        starts: of each slot, and of the pairs without an expert, in that order. Shape: [slots + 1].
    """

    keys: Tensor
    order: Tensor
    place: Tensor
    starts: Tensor


def route(
    index: Tensor,
    held: ExpertsHeld,
    num_chunks: int = 1,
    *,
    may_drop: bool = True,
    digest: Tensor | None = None,
    capacity: int | None = None,
) -> list[Route]:
    """The routes of ``num_chunks`` nearly equal parts of the tokens.

    Args:
        index: the experts of each token; -1: none. Shape: [tokens, k].
        may_drop: False: no index is -1.
        digest: of the routing table of which ``index`` is this rank's part; None: no other rank has the same tokens.
        capacity: rows of each expert in each part, some of which are padding; pairs beyond them are dropped. None: as
            many as there are pairs. Each rank may have another one.

    Raises: UsageError: ranks with the same tokens have other routing tables; an index is not of the layer's experts,
        as far as the host reads the counts, and where none may be -1.
    Communicates: with several ranks one exchange of 8 bytes an expert and chunk, and 8 of the digest; with a capacity
        one of 8 bytes between hosts. A recomputation has what the forward got.
    Order: the host reads the counts, which blocks it: not on one rank where nothing is dropped, nor with a capacity,
        nor in a recomputation.
    """
    comm = held.comm
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    if size != held.ep_size:
        raise UsageError(
            f"{held.num_experts} experts are divided among {held.ep_size} ranks, and {size} are set.",
            do="run the layer in an engine, or call experts_held.set_ranks() with the expert-parallel ranks.",
            code="experts-without-ranks",
        )
    slots = _slots(held.owners, held.ids, held.num_experts, size, rank)
    sorted_chunks = [_sort(chunk, slots, held.num_experts) for chunk in index.tensor_split(num_chunks)]
    mine = torch.stack([chunk.starts.diff() for chunk in sorted_chunks])
    if held.load is not None and not index.is_meta:
        held.load.add(_by_expert(mine.sum(0), slots))
    counts: Counts | None
    if capacity is None:
        counts, counted = read_once(lambda: (_exchanged(index, mine, held, may_drop, digest), mine))
        if counted is not mine:
            with unseen_by_policies():
                torch._assert_async((mine == counted).all(), _OTHER_TOKENS)
    else:
        capacities = [[capacity]] * size
        if comm is not None and size > 1 and not index.is_meta:
            every = read_once(lambda: comm.exchange_on_host([capacity], label="experts' capacity"))
            capacities = [[int(rows)] for (rows,) in every]
        counts = [[of_rank * held.num_experts for of_rank in capacities]] * num_chunks
    routes = [
        _route(chunk, None if counts is None else counts[at], slots, rank, index.shape[1], capacity)
        for at, chunk in enumerate(sorted_chunks)
    ]
    for each in routes:
        each.counts.products = held.products
    return routes


def _exchanged(index: Tensor, mine: Tensor, held: ExpertsHeld, may_drop: bool, digest: Tensor | None) -> Counts | None:
    """The numbers of rows of all ranks, whose device the host waits for; None: it need not know them.

    Args:
        mine: this rank's. Shape: [chunks, slots].
    """
    comm, num_experts = held.comm, held.num_experts
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    every = vector = mine.flatten() if digest is None else torch.cat((digest, mine.flatten()))
    if comm is not None and size > 1 and not index.is_meta:
        every = comm.exchange(vector, label="experts' rows").wait()
    is_read = size > 1 or may_drop
    if index.is_meta or is_fake(index):
        if is_read and is_fake(index):
            read_vector(every.flatten(), when_fake=0.0)  # the simulated host waits
        return [[_even(chunk.numel(), num_experts)] * size for chunk in index.tensor_split(len(mine))]
    if not is_read:
        return None
    numbers = read_vector(every, when_fake=0.0) if comm is None else comm.read(every, when_fake=0.0)
    values = [int(number) for number in numbers]
    if digest is not None and comm is not None and held.tensor.same is not None:
        _check_tables(values[:: len(vector)], held.tensor.tokens)
        del values[:: len(vector)]
    rows = [values[at : at + num_experts] for at in range(0, len(values), num_experts)]
    counts = [rows[chunk :: len(mine)] for chunk in range(len(mine))]
    if not may_drop and (missing := index.numel() - sum(sum(of_chunk[rank]) for of_chunk in counts)):
        raise UsageError(
            f"{missing} of {index.numel()} choices of a router are none of the layer's experts 0 to {num_experts - 1}.",
            do="give the router as many outputs as the layer has experts.",
            code="expert-index",
        )
    return counts


def _by_expert(of_slots: Tensor, slots: _Slots) -> Tensor:
    """One number for each slot, in the order of the experts."""
    if slots.slot_of is None:
        return of_slots
    return of_slots[numbers_on(of_slots.device, slots.slot_of)]


def _even(rows: int, parts: int) -> list[int]:
    return [(rows * (part + 1)) // parts - (rows * part) // parts for part in range(parts)]


@lru_cache(maxsize=256)
def _slots(owners: tuple[int, ...], ids: tuple[int, ...], num_experts: int, size: int, rank: int) -> _Slots:
    if size == 1:
        order = list(ids or range(num_experts))
    else:
        order = sorted(range(num_experts), key=lambda expert: (owners[expert], expert))
    slot_of = [0] * num_experts
    for slot, expert in enumerate(order):
        slot_of[expert] = slot
    counts = [num_experts] if size == 1 else [owners.count(owner) for owner in range(size)]
    ends = list(accumulate(counts))
    owned = tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))
    local = tuple(slot_of[expert] - owned[rank].start for expert in ids or range(num_experts))
    is_in_order = order == list(range(num_experts))
    return _Slots(None if is_in_order else tuple(slot_of), owned, local)


def _sort(index: Tensor, slots: _Slots, num_experts: int) -> _SortedPairs:
    flat = index.reshape(-1)
    if slots.slot_of is None:
        keys = torch.where(flat < 0, num_experts, flat)
    else:  # the last entry is that of -1
        keys = numbers_on(flat.device, [*slots.slot_of, num_experts])[flat]
    in_order, order = torch.sort(keys, stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    starts = torch.searchsorted(in_order, torch.arange(num_experts + 1, device=order.device))
    return _SortedPairs(keys, order, place, starts)


def _padded(pairs: _SortedPairs, num_rows: int, capacity: int) -> tuple[Tensor, Tensor]:
    """The pair of each row, for padding the number of pairs; the row of each pair, for a dropped one that of rows.

    Args:
        num_rows: ``capacity`` for each slot.
    """
    within = pairs.place - pairs.starts[pairs.keys]
    row_of = (pairs.keys * capacity + within).masked_fill_(within >= capacity, num_rows).clamp_(max=num_rows)
    order = row_of.new_full((num_rows + 1,), len(row_of))  # the last one is that of dropped pairs
    return order.scatter_(0, row_of, torch.arange(len(row_of), device=row_of.device))[:-1], row_of


def _route(
    pairs: _SortedPairs, counts: list[list[int]] | None, slots: _Slots, rank: int, k: int, capacity: int | None
) -> Route:
    order, place = pairs.order, pairs.place
    if counts is None:  # one rank, and nothing is dropped
        of_slots = RowCounts(starts=pairs.starts)
        return Route(order, order // k, place.view(-1, k), False, False, of_slots, [[len(order)]])
    size = len(counts)
    between = [[sum(of_source[slot] for slot in owned) for owned in slots.owned] for of_source in counts]
    num_rows = sum(between[rank])
    may_drop = capacity is not None or num_rows < len(order)
    if capacity is not None:
        order, place = _padded(pairs, num_rows, capacity)
    elif may_drop:
        order, place = order[:num_rows], place.clamp(max=num_rows)
    num_local, own = len(slots.local), slots.owned[rank]
    segments = [counts[source][slot] for source in range(size) for slot in own]
    by_expert = [source * num_local + local for local in slots.local for source in range(size)]
    per_expert = [sum(segments[local::num_local]) for local in slots.local]
    is_sorted = by_expert == list(range(len(by_expert)))
    return Route(
        order,
        order // k,
        place.view(-1, k),
        may_drop,
        capacity is not None,
        RowCounts(per_expert),
        between,
        () if is_sorted else segments,
        () if is_sorted else by_expert,
    )


def table_digest(expert_index: Tensor) -> Tensor:
    """A number that is different for different routing tables, except by a chance of 2^-53. Shape: [1], int64."""
    places = torch.arange(1, expert_index.numel() + 1, device=expert_index.device) * 0x1E3779B97F4A7C15
    factors = (places ^ (places >> 31)) * 0x3F58476D1CE4E5B9
    return ((expert_index.reshape(-1) + 2) * factors).sum().view(1)


@unseen_by_policies()  # a recomputation does not repeat it
def compare_tables(expert_index: Tensor, comm: Communicator, label: str) -> None:
    """Compare the routing tables of ranks that hold the same tokens and a part of each expert.

    Raises: UsageError: on every rank, if two tables differ.
    Communicates: an exchange of 8 bytes. Order: blocks the host.
    """
    if expert_index.is_meta or is_fake(expert_index):
        return
    every = comm.exchange(table_digest(expert_index), label=f"{label} tables").wait()
    digests = comm.read(every, when_fake=0.0)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise _other_tables(f"ranks 0 and {other} along {comm.axis!r}", label)


def _check_tables(digests: Sequence[int], tokens: Sequence[int]) -> None:
    """Compare the routing tables of ranks that hold the same tokens.

    Args:
        digests: of each expert-parallel rank. ``tokens``: as of ``TensorRanks``.

    Raises: UsageError: on every expert-parallel rank, if two tables differ.
    """
    for rank, digest in enumerate(digests):
        first = tokens.index(tokens[rank])
        if digest != digests[first]:
            raise _other_tables(f"expert-parallel ranks {first} and {rank}")


def _other_tables(ranks: str, label: str = "") -> UsageError:
    return UsageError(
        f"{ranks} are tensor-parallel ranks of the same tokens, and their routers chose different experts for them.",
        where=label,
        do="give tensor-parallel ranks the same seed, so that gates with noise or random choices draw the same"
        " numbers, and the same router and input.",
        code="expert-routing",
    )
