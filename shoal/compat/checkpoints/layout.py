"""Where DeepSpeed's flat tensors hold which part of which parameter, for any number of ranks.

``state`` has a picture of both layouts. Here they are made, there they are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

T = TypeVar("T")

# Stages 1 and 2: a rank's part of a group is a multiple of this many elements.
_ALIGNMENT = 2


@dataclass(frozen=True)
class FlatPiece:
    """Elements of a parameter that follow one another on a rank; of no parameter (None): zeros."""

    rank: int
    name: str | None
    start: int
    numel: int


@dataclass
class FlatLayout:
    """One flat tensor on each rank.

    Args:
        group: the optimizer's group.
        shapes: the parameters in it, in order.
        pieces: what it holds. Those of a parameter follow one another, and so do those of a rank.
        num_ranks: that have a part; of experts, those that have a part of the same ones.
        gaps: zeros after each parameter.
        paddings: by rank, zeros at the end that the file has in the optimizer's state only.
        local_names: of experts, the names that the ranks that have them use.
    """

    group: int
    shapes: Mapping[str, tuple[int, ...]]
    num_ranks: int
    gaps: list[int] = field(default_factory=list)
    paddings: list[int] = field(default_factory=list)
    pieces: list[FlatPiece] = field(default_factory=list)
    local_names: Mapping[str, str] = field(default_factory=dict)

    def first_shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters that rank 0 has a part of, or that its data-parallel ranks have."""
        return {name: shape for name, shape in self.shapes.items() if self.local_names.get(name, name) == name}

    def numel(self, rank: int) -> int:
        """Elements on a rank, without its padding."""
        return sum(piece.numel for piece in self.pieces if piece.rank == rank)

    def addresses(self, rank: int) -> dict[str, tuple[int, int]]:
        """Of each parameter that a rank has a part of, where it begins there and how many elements it has."""
        found = {}
        at = 0
        for piece in self.pieces:
            if piece.rank == rank:
                if piece.name is not None:
                    found[self.local_names.get(piece.name, piece.name)] = at, piece.numel
                at += piece.numel
        return found


def partitioned(
    group: int,
    shapes: Mapping[str, tuple[int, ...]],
    num_ranks: int,
    *,
    param_alignment: int = 1,
    is_round_robin: bool = False,
) -> FlatLayout:
    """Stages 1 and 2: a group's parameters one behind the other, and each rank has an equal part of the whole.

    Args:
        param_alignment: elements; each parameter but the first begins at a multiple (``parameter_alignment``).
        is_round_robin: parameters are dealt to the ranks in turn (``round_robin_gradients``).

    >>> layout = partitioned(0, {"a": (3,), "b": (2, 2)}, 2)
    >>> [(piece.rank, piece.name, piece.start, piece.numel) for piece in layout.pieces], layout.paddings
    ([(0, 'a', 0, 3), (0, 'b', 0, 1), (1, 'b', 1, 3)], [0, 1])
    """
    names = _dealt(list(shapes), num_ranks) if is_round_robin else list(shapes)
    layout = FlatLayout(group, {name: shapes[name] for name in names}, num_ranks)
    ends = []
    at = 0
    for index, name in enumerate(names):
        end = at + math.prod(shapes[name])
        gap = -end % param_alignment if index + 1 < len(names) else 0
        layout.gaps.append(gap)
        ends.append((name, at, end, end + gap))
        at = end + gap
    part = -(-at // (_ALIGNMENT * num_ranks)) * _ALIGNMENT
    for name, begin, end, following in ends:
        for of, first, last in ((name, begin, end), (None, end, following)):
            while first < last:
                rank = first // part
                numel = min(last, (rank + 1) * part) - first
                layout.pieces.append(FlatPiece(rank, of, first - begin, numel))
                first += numel
    layout.paddings = [min(part, max(0, (rank + 1) * part - at)) for rank in range(num_ranks)]
    return layout


def divided(
    group: int,
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    local_names: Mapping[str, str],
    num_ranks: int,
    *,
    is_data_first: bool,
    param_alignment: int = 1,
    is_round_robin: bool = False,
) -> FlatLayout:
    """Stages 1 and 2, of a group of experts: each expert-parallel rank's own, over the ranks that have the same.

    Args:
        shapes: of each expert-parallel rank, its experts' parameters.
        local_names: of all of them.
        is_data_first: ranks that have the same experts are neighbours (``use_data_before_expert_parallelism``).

    >>> layout = divided(0, [{"0.x": (3,)}, {"1.x": (3,)}], {"0.x": "0.x", "1.x": "0.x"}, 2, is_data_first=False)
    >>> [(piece.rank, piece.name, piece.numel) for piece in layout.pieces], layout.addresses(1), layout.paddings
    ([(0, '0.x', 3), (1, '1.x', 3)], {'0.x': (0, 3)}, [1, 1])
    """
    ep_size = len(shapes)
    count = num_ranks // ep_size
    whole: dict[str, tuple[int, ...]] = {}
    layout = FlatLayout(group, whole, count, paddings=[0] * num_ranks, local_names=local_names)
    for rank, own in enumerate(shapes):
        part = partitioned(group, own, count, param_alignment=param_alignment, is_round_robin=is_round_robin)
        ranks = range(rank * count, (rank + 1) * count) if is_data_first else range(rank, num_ranks, ep_size)
        whole |= part.shapes
        layout.gaps = part.gaps
        layout.pieces += [replace(piece, rank=ranks[piece.rank]) for piece in part.pieces]
        for holder, padding in zip(ranks, part.paddings, strict=True):
            layout.paddings[holder] = padding
    return layout


def in_given_order(group_of: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """The names of each group as they were before ``round_robin_gradients`` dealt them to the ranks.

    >>> list(in_given_order({"a": 0, "c": 0, "b": 0}, 2))
    ['a', 'b', 'c']
    """
    found: dict[str, int] = {}
    for group in dict.fromkeys(group_of.values()):
        names = [name for name, at in group_of.items() if at == group]
        places = _dealt(range(len(names)), num_ranks)
        found |= {name: group for _, name in sorted(zip(places, names, strict=True))}
    return found


def _dealt(names: Sequence[T], num_ranks: int) -> list[T]:
    return [name for rank in range(num_ranks) for name in names[rank::num_ranks]]


def spread(group: int, shapes: Mapping[str, tuple[int, ...]], num_ranks: int, sub_group_size: int) -> list[FlatLayout]:
    """Stage 3: each parameter is cut into equal parts, the last ones padded. A group is one flat tensor, or several:
    each ends with the parameter that brings a rank's part to ``sub_group_size`` elements.

    >>> (layout,) = spread(0, {"a": (3,)}, 2, 10)
    >>> [(piece.rank, piece.name, piece.start, piece.numel) for piece in layout.pieces]
    [(0, 'a', 0, 2), (1, 'a', 2, 1), (1, None, 0, 1)]
    """
    layouts = []
    for members in _sub_groups(shapes, num_ranks, sub_group_size):
        layout = FlatLayout(group, {name: shapes[name] for name in members}, num_ranks, [0] * len(members))
        layout.paddings = [0] * num_ranks
        for name in members:
            layout.pieces += spread_one(name, math.prod(shapes[name]), num_ranks)
        layouts.append(layout)
    return layouts


def spread_one(name: str, numel: int, num_ranks: int) -> list[FlatPiece]:
    """Stage 3: one parameter's parts."""
    part = -(-numel // num_ranks)
    pieces = []
    for rank in range(num_ranks):
        held = max(0, min(part, numel - rank * part))
        if held:
            pieces.append(FlatPiece(rank, name, rank * part, held))
        if held < part:
            pieces.append(FlatPiece(rank, None, 0, part - held))
    return pieces


def _sub_groups(shapes: Mapping[str, tuple[int, ...]], num_ranks: int, size: int) -> Sequence[list[str]]:
    found: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        if held >= size:
            found.append([])
            held = 0
        found[-1].append(name)
        held += -(-math.prod(shape) // num_ranks)
    return found
