"""A sum over a parameter's elements whose bits do not depend on how ranks share the parameter.

Floating point addition depends on its order, so the order is fixed by the parameter alone: neighbours are added, then
neighbours of those, in a binary tree over the flattened parameter (zeros beyond its end). A rank adds up the subtrees
that lie wholly in its part; the few nodes at the part's edges, at most two a level, are exchanged, and every rank
finishes the same tree.

    elements   0 1 2 3 4 5 6 7        rank 0 owns [0, 5), rank 1 owns [5, 8)
    level 1    0-1 2-3  *  6-7        * spans both ranks
    level 2    0---3    *             rank 0 sends (2, 0) and (0, 4); rank 1 sends (0, 5) and (1, 3)
    level 3        0---7

>>> node_keys(0, 5, 8), node_keys(5, 8, 8)
([(0, 4), (2, 0)], [(0, 5), (1, 3)])
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from shoal.device import numbers_on

Key = tuple[int, int]  # (level, index): the elements [index << level, (index + 1) << level)
Span = tuple[int, int, bool]  # the first index and the one after the last; whether there is nothing beyond


def height(numel: int) -> int:
    """The level of the root of a tree over ``numel`` elements."""
    return (numel - 1).bit_length()


def node_keys(low: int, high: int, numel: int) -> list[Key]:
    """The largest subtrees within ``[low, high)`` of a tree over ``numel`` elements, by level."""
    if low >= high:
        return []
    keys, top, is_end = [], height(numel), high == numel
    for level in range(top):
        if low % 2:
            keys.append((level, low))
            low += 1
        if high % 2:
            if not is_end:
                keys.append((level, high - 1))
                high -= 1
            elif low < high:
                high += 1
        if low >= high:
            return keys
        low, high = low // 2, high // 2
    return [*keys, (top, 0)]


class _TreeLevels:
    """Values of several spans of indices, and the sums of ``levels`` levels above them, in one row of memory.

    Level 0 has the spans one after the other, each from the beginning of its first block of ``1 << levels`` indices to
    the end of its last one; each next level has half as many values. What a span does not have counts as zero; a node
    that lies partly outside of its span is no sum.
    """

    def __init__(self, spans: Sequence[Span], levels: int) -> None:
        self.levels = levels
        self.numel = 0  # of level 0
        self._shifts: list[int] = []  # from an index to its place in level 0
        for low, high, _ in spans:
            first = low >> levels << levels
            self._shifts.append(self.numel - first)
            if low < high:
                self.numel += -(-high >> levels << levels) - first
        self.num_values = self._begin(levels + 1)

    def _begin(self, level: int) -> int:
        return 2 * self.numel - (2 * self.numel >> level)

    def place(self, span: int, level: int, index: int) -> int:
        """Where a node of a span is."""
        return self._begin(level) + (self._shifts[span] >> level) + index

    def add_up(self, values: torch.Tensor) -> None:
        """Fill all levels from level 0. Shape: [k, num_values]."""
        for level in range(self.levels):
            here, sums = (values[:, self._begin(each) : self._begin(each + 1)] for each in (level, level + 1))
            torch.add(here[:, 0::2], here[:, 1::2], out=sums)


class _TreeLayers:
    """Levels above levels: the highest sums of a layer are the values of the next one.

    Args:
        spans: of indices of the lowest level.
    """

    def __init__(self, spans: Sequence[Span], levels: int, num_layers: int, device: torch.device) -> None:
        self._levels = levels
        self._layers = [_TreeLevels(spans, levels)]
        self._moves: list[tuple[torch.Tensor, torch.Tensor]] = []  # places of a subtree in a layer and in the next one
        self.num_values = self._layers[0].num_values
        self._begins = [0]
        for _ in range(1, num_layers):
            below, begin, spans = self._layers[-1], self._begins[-1], [above(span, levels) for span in spans]
            layer = _TreeLevels(spans, levels)
            every = [(number, index) for number, (low, high, _) in enumerate(spans) for index in range(low, high)]
            source = [begin + below.place(number, levels, index) for number, index in every]
            target = [self.num_values + layer.place(number, 0, index) for number, index in every]
            self._moves.append((numbers_on(device, source), numbers_on(device, target)))
            self._layers.append(layer)
            self._begins.append(self.num_values)
            self.num_values += layer.num_values

    def place(self, span: int, level: int, index: int) -> int:
        """Where a node is."""
        layer = min(level // self._levels, len(self._layers) - 1)
        return self._begins[layer] + self._layers[layer].place(span, level - layer * self._levels, index)

    @property
    def numel(self) -> int:
        """Values of the lowest level, which come first."""
        return self._layers[0].numel

    def empty(self, count: int, device: torch.device) -> torch.Tensor:
        """Memory of zeros for values and sums. Shape: [count, num_values]."""
        memory = torch.empty(count, self.num_values, dtype=torch.float32, device=device)
        for begin, layer in zip(self._begins, self._layers, strict=True):
            memory[:, begin : begin + layer.numel].zero_()
        return memory

    def add_up(self, memory: torch.Tensor) -> None:
        for number, (begin, layer) in enumerate(zip(self._begins, self._layers, strict=True)):
            if number:
                source, target = self._moves[number - 1]
                memory.index_copy_(1, target, memory.index_select(1, source))
            layer.add_up(memory[:, begin : begin + layer.num_values])


def above(span: Span, levels: int) -> Span:
    """The nodes ``levels`` levels higher that lie wholly in a span."""
    low, high, is_end = span
    low, high = -(-low >> levels), -(-high >> levels) if is_end else high >> levels
    return low, max(low, high), is_end


@dataclass(frozen=True)
class PieceBatch:
    """Elements of some parts that are added up together.

    Attributes: ``pieces``: part, and its elements from ``begin`` to ``end``, numbered as in the parameter. ``places``:
    where each one's values go.
    """

    pieces: tuple[tuple[int, int, int], ...]
    places: tuple[int, ...]
    layers: _TreeLayers
    found: torch.Tensor

    def sums_of(self, memory: torch.Tensor) -> torch.Tensor:
        """The sums that others need. ``memory``: of ``layers``, with the values. Shape: [k, found]."""
        self.layers.add_up(memory)
        return memory.index_select(1, self.found)


class PartialSums:
    """The sums of the nodes that lie wholly in this rank's parts of parameters, of all parts together.

    Args:
        parts: the first element, the one after the last, and the number of elements of the parameter.
        kinds: by part; parts of a batch are of one kind.
        most: elements of a batch.
        width: sums are followed by zeros up to this number.
        levels: a batch has whole subtrees of twice as many levels, and what is left at the edges of a part.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, int, int]],
        kinds: Sequence[Hashable],
        most: int,
        device: torch.device,
        *,
        width: int = 0,
        levels: int = 10,
    ) -> None:
        self._parts, self._levels, self._device = parts, levels, device
        self._places: dict[tuple[int, int, int], int] = {}  # of part, level and index, among all that was found
        self._num_found = 0
        self.batches = [self._batch(pieces) for pieces in self._pieces(kinds, most)]
        top = 2 * levels
        high = [
            above((low, high, high == numel), top) if height(numel) >= top else (0, 0, False)
            for low, high, numel in parts
        ]
        inputs = [(number, index) for number, (low, end, _) in enumerate(high) for index in range(low, end)]
        self._high: _TreeLayers | None = None
        if inputs:
            most_levels = max(height(numel) for _, _, numel in parts) - top
            self._high = _TreeLayers(high, levels, max(1, -(-most_levels // levels)), device)
            self._source = numbers_on(device, [self._places[number, top, index] for number, index in inputs])
            self._target = numbers_on(device, [self._high.place(number, 0, index) for number, index in inputs])
        num_high = 0 if self._high is None else self._high.num_values
        order = []
        for number, part in enumerate(parts):
            for level, index in node_keys(*part):
                if level < top:
                    order.append(self._places[number, level, index])
                else:
                    assert self._high is not None
                    order.append(self._num_found + self._high.place(number, level - top, index))
        order += [self._num_found + num_high] * (width - len(order))
        self._order = numbers_on(device, order)

    def _pieces(self, kinds: Sequence[Hashable], most: int) -> list[list[tuple[int, int, int]]]:
        """By batch, pieces that end where a subtree ends, or the part."""
        batches: list[list[tuple[int, int, int]]] = []
        numel, kind, size = most, None, 1 << 2 * self._levels
        for number, (begin, high, _) in enumerate(self._parts):
            while begin < high:
                end = min((begin // size + 1) * size, high)
                if numel + end - begin > most or kind != kinds[number]:
                    batches.append([])
                    numel, kind = 0, kinds[number]
                batches[-1].append((number, begin, end))
                numel += end - begin
                begin = end
        return batches

    def _batch(self, pieces: Sequence[tuple[int, int, int]]) -> PieceBatch:
        spans = [(begin, end, end == self._parts[number][2]) for number, begin, end in pieces]
        layers = _TreeLayers(spans, self._levels, 2, self._device)
        top = 2 * self._levels
        places: list[int] = []
        for piece, ((number, begin, end), span) in enumerate(zip(pieces, spans, strict=True)):
            low, high, numel = self._parts[number]
            keys = [(level, index) for level, index in node_keys(low, high, numel) if level < top]
            keys = [(level, index) for level, index in keys if begin <= index << level < end]
            first, last, _ = above(span, top)
            for level, index in keys if height(numel) < top else [*keys, *((top, each) for each in range(first, last))]:
                self._places[number, level, index] = self._num_found + len(places)
                places.append(layers.place(piece, level, index))
        self._num_found += len(places)
        starts = tuple(layers.place(piece, 0, begin) for piece, (_, begin, _) in enumerate(pieces))
        return PieceBatch(tuple(pieces), starts, layers, numbers_on(self._device, places))

    def finish(self, found: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        """The sums of ``node_keys`` of each part, in order. Shape: [nodes or width, count].

        Args:
            found: what ``sums_of`` returned, by batch. Shape: [count, found] each.
        """
        zeros = torch.zeros(count, 1, dtype=torch.float32, device=self._device)
        rows = [*found]
        if self._high is not None:
            memory = self._high.empty(count, self._device)
            memory.index_copy_(1, self._target, torch.cat(rows, 1).index_select(1, self._source))
            self._high.add_up(memory)
            rows.append(memory)
        return torch.cat([*rows, zeros], 1).index_select(1, self._order).t().contiguous()


@dataclass(frozen=True)
class SumTree:
    """The additions that make one sum per parameter of the nodes that all ranks sent.

    A rank's vector has ``width`` values. ``pairs`` are rounds of additions: the sums of a round are appended to the
    values.
    """

    width: int
    pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # indices into the values
    roots: torch.Tensor  # [parameters]: where each parameter's sum is

    def finish(self, vectors: torch.Tensor) -> torch.Tensor:
        """Sums from the ranks' vectors. Shape: [size, width, k] -> [parameters, k]."""
        values = vectors.reshape(-1, vectors.shape[-1])
        values = torch.cat([values, values.new_zeros(1, values.shape[1])])
        for left, right in self.pairs:
            values = torch.cat([values, values[left] + values[right]])
        return values[self.roots]


def plan_sums(parts: Sequence[Sequence[tuple[int, int]]], numels: Sequence[int], device: torch.device) -> SumTree:
    """Plan the additions for parameters of which each rank owns ``parts[rank][parameter]``.

    A rank's vector has, parameter by parameter, the nodes of its part. A parameter that no rank owns
    has the sum zero.

    Raises: ValueError: the parts of a parameter have a gap.
    """
    keys = [[node_keys(*part, numel) for part, numel in zip(row, numels, strict=True)] for row in parts]
    width = max(1, max(sum(map(len, row)) for row in keys))
    num_values = len(parts) * width
    nodes: list[dict[Key, int]] = [{} for _ in numels]
    for rank, row in enumerate(keys):
        place = rank * width
        for parameter, sent in enumerate(row):
            for key in sent:
                nodes[parameter][key] = place
                place += 1
    zero, num_values = num_values, num_values + 1
    rounds = []
    for level in range(max((height(n) for n in numels if n), default=0)):
        left, right = [], []
        for values, numel in zip(nodes, numels, strict=True):
            if not values or level >= height(numel):
                continue
            for index in sorted(index for at, index in values if at == level):
                if index % 2 and (level, index - 1) not in values:
                    raise ValueError(f"no rank owns elements {(index - 1) << level} to {index << level} of a parameter")
                if index % 2:
                    continue
                value = values[level, index]
                if (level, index + 1) in values:
                    left.append(value)
                    right.append(values[level, index + 1])
                    value, num_values = num_values, num_values + 1
                elif (index + 1) << level < numel:
                    raise ValueError(f"no rank owns elements from {(index + 1) << level} on of a parameter of {numel}")
                values[level + 1, index // 2] = value
        if left:
            rounds.append(
                (
                    torch.tensor(left, dtype=torch.int64, device=device),
                    torch.tensor(right, dtype=torch.int64, device=device),
                )
            )
    roots = [
        values.get((height(numel), 0), zero) if numel else zero for values, numel in zip(nodes, numels, strict=True)
    ]
    return SumTree(width, tuple(rounds), torch.tensor(roots, dtype=torch.int64, device=device))
