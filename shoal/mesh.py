"""The mesh: every rank has a coordinate on each of the named axes. Arithmetic only, no tensors and no communication.

    axis          the ranks along it
    pp            hold different layers
    dp_replicate  hold the same shards and see other samples
    dp_shard      hold different shards of parameters, gradients and optimizer state, and see other samples
    cp            see other parts of one sequence, and exchange keys and values (context parallel)
    sp            see other parts of one sequence, and exchange attention heads (Ulysses)
    tp            hold different parts of one layer's weights

Unless ``order`` says otherwise ``tp`` varies fastest and ``pp`` slowest, so the ranks that talk most are neighbours.
The derived axes are products or parts of these:

    axis          made of                         the ranks along it
    fsdp          dp_shard x cp x sp              shard one dense parameter
    dp, batch     dp_replicate x dp_shard         see other samples
    loss          dp_replicate x fsdp             average the loss: they hold the same part of the model
    sequence      cp x sp                         see other parts of the same samples
    pipeline_stage  all but pp                    hold the same layers
    model         pp x tp                         hold other parts of one copy of the model
    etp           runs of etp of tp               hold other parts of one expert: tp = tp_fold x etp
    tp_fold       every etp-th rank of tp         take other tokens to the experts
    ep            runs of ep of fsdp x tp_fold    hold different experts; or, outside in ``order``, every
                                                  expert_dp-th of them
    expert_dp     the rest of fsdp x tp_fold      shard one expert: fsdp x tp_fold = expert_dp x ep
    expert_model  ep x etp                        hold other parts of one copy of a layer's experts
    expert_data   dp_replicate x expert_dp        hold the same experts
    tied:0,3      stages 0 and 3 of pp            hold copies of one tied weight
    tp:2x4/1      runs of 4 neighbours of tp      a factor of tp (here the second: 2 x 4 ranks, the last varies fastest)
    world         all six                         all

With ``etp`` 1 experts are not split over ``tp``: its ranks take different tokens to them (Megatron-LM's parallel
folding). With ``etp = tp`` each rank of ``tp`` holds a part of each expert, and ``ep`` and ``expert_dp`` are made of
``fsdp`` alone. In between, each expert is split over ``etp`` neighbours, and each run of them takes different tokens.

A group's first rank is the first member of its axis; every group is that rank plus fixed offsets, in ascending order.

    >>> mesh = Mesh.of(8, pp=2, tp=2)
    >>> mesh
    Mesh(pp=2, dp_replicate=1, dp_shard=2, cp=1, sp=1, tp=2, ep=1)
    >>> mesh.coordinate(5)
    Coordinate(pp=1, dp_replicate=0, dp_shard=0, cp=0, sp=0, tp=1)
    >>> mesh.ranks_along("batch", 5)
    (5, 7)
    >>> mesh.groups("tp")
    ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> mesh = Mesh.of(8, ep=2)
    >>> mesh.groups("ep"), mesh.groups("expert_dp")
    (((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 2, 4, 6), (1, 3, 5, 7)))
    >>> mesh = Mesh.of(8, tp=2, ep=2, etp=2)
    >>> mesh.groups("ep"), mesh.groups("expert_dp")
    (((0, 2), (1, 3), (4, 6), (5, 7)), ((0, 4), (1, 5), (2, 6), (3, 7)))
    >>> mesh = Mesh.of(8, tp=4, ep=2, etp=2)
    >>> mesh.groups("etp"), mesh.groups("tp_fold")
    (((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 2), (1, 3), (4, 6), (5, 7)))
    >>> mesh.groups("ep"), mesh.groups("expert_dp")
    (((0, 2), (1, 3), (4, 6), (5, 7)), ((0, 4), (1, 5), (2, 6), (3, 7)))
    >>> mesh = Mesh.of(8, pp=2, tp=2, order=("dp_shard", "pp", "tp"))
    >>> mesh.groups("pp"), mesh.groups("dp_shard")
    (((0, 2), (1, 3), (4, 6), (5, 7)), ((0, 4), (1, 5), (2, 6), (3, 7)))
    >>> Mesh.of(8, tp=8).groups(factor_axis("tp", (2, 4), (0,)))
    ((0, 4), (1, 5), (2, 6), (3, 7))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd, prod
from typing import Literal, NamedTuple, get_args

from shoal.errors import ConfigError
from shoal.text import did_you_mean

Axis = Literal[
    "pp", "dp_replicate", "dp_shard", "cp", "sp", "tp", "ep",
    "fsdp", "dp", "batch", "loss", "sequence", "model", "pipeline_stage", "etp", "tp_fold", "expert_dp", "expert_data",
    "expert_model", "world",
]  # fmt: skip

ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
_PRODUCTS = {
    "fsdp": ("dp_shard", "cp", "sp"),
    "dp": ("dp_replicate", "dp_shard"),
    "batch": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp", "sp"),
    "sequence": ("cp", "sp"),
    "pipeline_stage": ORDER[1:],
    "model": ("pp", "tp"),
    "world": ORDER,
}
_TIED = "tied:"


class _Extent(NamedTuple):
    """Ranks ``0, stride, 2 * stride, ...``, ``degree`` of them, from the first rank of a group."""

    stride: int
    degree: int


def tied_axis(pipeline_stages: Sequence[int]) -> str:
    """The axis of the ranks that hold a weight tied over ``pipeline_stages``.

    >>> tied_axis([3, 0])
    'tied:0,3'
    """
    return _TIED + ",".join(str(stage) for stage in sorted(set(pipeline_stages)))


def factor_axis(axis: Axis, sizes: Sequence[int], factors: Sequence[int]) -> str:
    """The axis of the ranks that differ only in some factors of a basic axis, of ``fsdp``, ``loss`` or ``ep``.

    Args:
        sizes: the factors of the axis's degree, the slowest first.
        factors: which of them, the slowest first.

    >>> factor_axis("tp", (2, 2, 4), (1, 2))
    'tp:2x2x4/1,2'
    """
    return f"{axis}:{'x'.join(map(str, sizes))}/{','.join(map(str, factors))}"


class Coordinate(NamedTuple):
    """Where a rank is on each basic axis. :meth:`Mesh.index` gives the coordinate on a derived one."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    sp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """The degree of each axis; see the module.

    Args:
        etp: the ranks over which one expert is split. It divides ``tp``.
        order: the basic axes, the slowest first. Axes of degree 1 may be left out. ``ep`` before ``dp_shard``, ``cp``
            and ``sp`` is outside of ``expert_dp``.

    Raises: ConfigError: a degree below 1, an ``etp`` that does not divide ``tp``, an ``ep`` that does not divide
        ``dp_shard x cp x sp x tp / etp``, or an unknown, missing or doubled axis in ``order``.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = field(default=1, repr=False)
    order: tuple[str, ...] = field(default=ORDER, repr=False)

    def __post_init__(self) -> None:
        if problem := order_problem(self.order, vars(self)):
            raise ConfigError(f"the order of the axes is {problem[0]}", do=problem[1], code="mesh-order")
        order = tuple(axis for axis in self.order if axis != "ep" and self._degree(axis) > 1)
        shards = [self.order.index(axis) for axis in _PRODUCTS["fsdp"] if axis in order]
        if self.ep > 1 and "ep" in self.order[: min(shards, default=0)]:
            order = ("ep", *order)
        elif order == tuple(axis for axis in ORDER if axis in order):
            order = ORDER  # one form of what is the same
        object.__setattr__(self, "order", order)
        for axis in (*ORDER, "ep", "etp"):
            if self._degree(axis) < 1:
                raise ConfigError(
                    f"the mesh axis {axis!r} has degree {self._degree(axis)}",
                    where=repr(self),
                    do=f"give {axis!r} a degree of 1 or more.",
                    code="mesh-degree",
                )
        if self.tp % self.etp:
            raise ConfigError(
                f"one expert is split over {self.etp} ranks, which does not divide tp={self.tp}",
                where=repr(self),
                do=f"split experts over {divisors_text(self.tp)} ranks (expert_parallel.expert_tensor_parallel_size).",
                code="mesh-size",
            )
        if self.expert_ranks % self.ep:
            product = degrees = expert_ranks_text(self.tp, self.etp)
            for axis in ("dp_shard", "cp", "sp", "tp"):
                degrees = degrees.replace(axis, str(self._degree(axis)))
            raise ConfigError(
                f"ep={self.ep} does not divide {product} = {degrees} = {self.expert_ranks}",
                where=repr(self),
                do=f"use an ep of {_nearest_divisors(self.ep, self.expert_ranks)}.",
                code="mesh-size",
            )

    @classmethod
    def of(
        cls,
        world_size: int,
        *,
        pp: int = 1,
        dp_replicate: int = 1,
        dp_shard: int | None = None,
        cp: int = 1,
        sp: int = 1,
        tp: int = 1,
        ep: int = 1,
        etp: int = 1,
        order: Iterable[str] = ORDER,
    ) -> Mesh:
        """The mesh of ``world_size`` ranks. ``dp_shard`` takes the ranks that the other axes leave.

        Raises: ConfigError: the degrees do not multiply up to ``world_size``; it names the nearest sizes that do.
        """
        given = {"pp": pp, "dp_replicate": dp_replicate, "cp": cp, "sp": sp, "tp": tp}
        if dp_shard is not None:
            given["dp_shard"] = dp_shard
        if world_size < 1 or any(degree < 1 for degree in given.values()):
            raise ConfigError(
                f"a mesh of {world_size} ranks with {_product_text(given)} has a degree below 1",
                do="give every axis, and the world, a size of 1 or more.",
                code="mesh-degree",
            )
        product = prod(given.values())
        if world_size % product or (dp_shard is not None and world_size != product):
            lower = world_size // product * product
            sizes = (
                f"{product} ranks"
                if dp_shard is not None
                else f"{lower + product} ranks"
                if lower == 0
                else f"{lower} or {lower + product} ranks"
            )
            repair = f"start {sizes}"
            for axis, degree in given.items():
                rest = product // degree
                if degree > 1 and world_size % rest == 0:
                    fits = (
                        str(world_size // rest)
                        if dp_shard is not None
                        else _nearest_divisors(degree, world_size // rest)
                    )
                    repair += f", or set {axis} to {fits}"
            raise ConfigError(
                f"{world_size} ranks cannot be laid out as {_product_text(given)} = {product}"
                + ("" if dp_shard is not None else " times dp_shard"),
                do=repair + ".",
                code="mesh-size",
            )
        rest = world_size // product if dp_shard is None else dp_shard
        degrees = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": rest, "cp": cp, "sp": sp, "tp": tp, "ep": ep}
        return cls(**degrees, etp=etp, order=tuple(order))

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.fsdp * self.tp

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        return self.dp_shard * self.cp * self.sp

    @property
    def tp_fold(self) -> int:
        return self.tp // self.etp

    @property
    def expert_ranks(self) -> int:
        """The ranks that divide and shard a layer's experts, of each coordinate on ``etp``."""
        return self.fsdp * self.tp_fold

    def size(self, axis: Axis | str) -> int:
        """How many ranks lie along ``axis``. Of a tied axis: the ranks of the stages that it names."""
        return len(_offsets(self, axis))

    def coordinate(self, rank: int) -> Coordinate:
        """Where ``rank`` is."""
        self._check_rank(rank)
        return Coordinate(*(rank // self._stride(axis) % self._degree(axis) for axis in ORDER))

    def rank(self, coordinate: Coordinate | tuple[int, int, int, int, int, int]) -> int:
        """Which rank is at ``coordinate``: the inverse of :meth:`coordinate`."""
        rank = 0
        for axis, value in zip(ORDER, coordinate, strict=True):
            if not 0 <= value < self._degree(axis):
                raise ConfigError(
                    f"coordinate {axis}={value} is not on an axis of degree {self._degree(axis)}",
                    where=repr(self),
                    do=f"use {axis} from 0 to {self._degree(axis) - 1}.",
                    code="mesh-rank",
                )
            rank += value * self._stride(axis)
        return rank

    def index(self, axis: Axis | str, rank: int) -> int:
        """The coordinate of ``rank`` on ``axis``, derived axes included: its place in :meth:`ranks_along`."""
        self._check_rank(rank)
        if axis.startswith(_TIED):
            return self.ranks_along(axis, rank).index(rank)
        index = 0
        for stride, degree in self._extents(axis):
            index = index * degree + rank // stride % degree
        return index

    def ranks_along(self, axis: Axis | str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` only on ``axis``, itself among them, in the order of their coordinate.

        A rank whose pipeline stage is not among those of a tied axis is alone on it.
        """
        self._check_rank(rank)
        offsets = _offsets(self, axis)
        if axis.startswith(_TIED):
            offset = self.coordinate(rank).pp * self._stride("pp")
            if offset not in offsets:
                return (rank,)
            first = rank - offset
        else:
            first = rank - sum(rank // stride % degree * stride for stride, degree in self._extents(axis))
        return tuple(first + offset for offset in offsets)

    def groups(self, axis: Axis | str) -> tuple[tuple[int, ...], ...]:
        """All groups along ``axis``: each rank is in exactly one of them. Ordered by their first rank."""
        return _groups(self, axis)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"rank {rank} is not on a mesh of {self.world_size} ranks",
                where=repr(self),
                do=f"use a rank from 0 to {self.world_size - 1}.",
                code="mesh-rank",
            )

    def _degree(self, axis: str) -> int:
        degree: int | None = vars(self).get(axis)
        if degree is not None:
            return degree
        raise ConfigError(
            f"the mesh has no axis {axis!r}",
            do=f"use one of {', '.join(get_args(Axis))}, tied_axis(pipeline stages) or factor_axis(...).",
            code="mesh-axis",
        )

    def _stride(self, axis: str) -> int:
        inner = self.order[self.order.index(axis) + 1 :] if axis in self.order else ()  # of an axis of one rank: any
        return prod(self._degree(name) for name in inner if name != "ep")

    def _extents(self, axis: str) -> tuple[_Extent, ...]:
        """The axis as nested runs of ranks, the slowest first."""
        match axis:
            case "etp":
                return _nested([_Extent(self._stride("tp"), self.etp)])
            case "tp_fold":
                return _nested([_Extent(self._stride("tp") * self.etp, self.tp_fold)])
            case "expert_model":
                return _nested([*self._extents("ep"), *self._extents("etp")])
            case "expert_data":
                return _nested([*self._extents("dp_replicate"), *self._extents("expert_dp")])
            case "ep" | "expert_dp":
                holders = _nested([*self._extents("fsdp"), *self._extents("tp_fold")])
                is_outside = "ep" in self.order
                outer, inner = self._cut(holders, self.expert_ranks // self.ep if is_outside else self.ep)
                return outer if is_outside == (axis == "ep") else inner
        if "/" in axis:
            return self._factors(axis)
        names = _PRODUCTS.get(axis, (axis,))
        return _nested([_Extent(degree=self._degree(name), stride=self._stride(name)) for name in names])

    def _cut(self, extents: Sequence[_Extent], size: int) -> tuple[tuple[_Extent, ...], tuple[_Extent, ...]]:
        """Runs of ranks cut in two: the ``size`` fastest ones are the second part."""
        outer: list[_Extent] = []
        inner: list[_Extent] = []
        left = size
        for stride, degree in reversed(extents):
            here = gcd(degree, left)
            if here not in (degree, left):
                raise ConfigError(
                    f"{size} of the ranks {' x '.join(str(each.degree) for each in extents)} are no runs of ranks",
                    where=f"{self!r} in the order {', '.join(self.order)}",
                    do="list the data-parallel, sequence and tensor axes next to each other in parallel.order.",
                    code="mesh-order",
                )
            inner.append(_Extent(stride, here))
            outer.append(_Extent(stride * here, degree // here))
            left //= here
        return _nested(outer), _nested(inner)

    def _factors(self, axis: str) -> tuple[_Extent, ...]:
        match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)/(\d(?:,\d)*)", axis)
        base, sizes_text, kept_text = match.groups() if match else ("", "1", "0")
        sizes = [int(size) for size in sizes_text.split("x")]
        kept = [int(factor) for factor in kept_text.split(",")]
        degree = self.size(base) if base in (*ORDER, "fsdp", "loss", "ep") else 0
        if degree != prod(sizes) or max(kept) >= len(sizes) or kept != sorted(set(kept)):
            raise ConfigError(
                f"the axis {axis!r} is not made of factors of an axis of this mesh",
                where=repr(self),
                do="use factor_axis(axis, sizes, factors) with sizes whose product is the degree of the axis.",
                code="mesh-axis",
            )
        rest = self._extents(base)
        parts: list[tuple[_Extent, ...]] = []
        for size in reversed(sizes):
            rest, part = self._cut(rest, size)
            parts.insert(0, part)
        return _nested([extent for factor in kept for extent in parts[factor]])

    def _tied_stages(self, axis: str) -> list[int]:
        text = axis.removeprefix(_TIED)
        stages = [int(stage) for stage in text.split(",")] if text.replace(",", "").isdecimal() else []
        if not stages or max(stages) >= self.pp or stages != sorted(set(stages)):
            raise ConfigError(
                f"the tied axis {axis!r} does not fit a mesh of {self.pp} pipeline stages",
                where=repr(self),
                do=f"use tied_axis(stages) with stages from 0 to {self.pp - 1}.",
                code="mesh-axis",
            )
        return stages


@lru_cache(maxsize=256)
def _offsets(mesh: Mesh, axis: str) -> tuple[int, ...]:
    """The group of rank 0, as offsets from its first rank (of a tied axis: from stage 0)."""
    if axis.startswith(_TIED):
        return tuple(stage * mesh._stride("pp") for stage in mesh._tied_stages(axis))
    offsets = [0]
    for stride, degree in mesh._extents(axis):
        offsets = [offset + index * stride for offset in offsets for index in range(degree)]
    return tuple(offsets)


@lru_cache(maxsize=64)
def _groups(mesh: Mesh, axis: str) -> tuple[tuple[int, ...], ...]:
    offsets = _offsets(mesh, axis)
    if axis.startswith(_TIED):
        every = [(rank, rank // mesh._stride("pp") % mesh.pp * mesh._stride("pp")) for rank in range(mesh.world_size)]
        alone: list[tuple[int, ...]] = [(rank,) for rank, of_stage in every if of_stage not in offsets]
        tied = [tuple(rank + offset for offset in offsets) for rank, of_stage in every if not of_stage]
        return tuple(sorted([*alone, *tied]))
    # A rank is the first of its group if it is at coordinate 0 of every extent.
    extents = mesh._extents(axis)
    return tuple(
        tuple(first + offset for offset in offsets)
        for first in range(mesh.world_size)
        if all(first // stride % degree == 0 for stride, degree in extents)
    )


def _nested(extents: Iterable[_Extent]) -> tuple[_Extent, ...]:
    """Runs of ranks, the slowest first; those that follow each other without a gap are one."""
    made: list[_Extent] = []
    for stride, degree in sorted(extents, reverse=True):
        if degree > 1 and made and made[-1].stride == stride * degree:
            made[-1] = _Extent(stride, made[-1].degree * degree)
        elif degree > 1:
            made.append(_Extent(stride, degree))
    return tuple(made)


def order_problem(order: Sequence[str], degrees: Mapping[str, object]) -> tuple[str, str] | None:
    """What is wrong with an order of axes, and what to do; None: nothing.

    Args:
        degrees: by axis; those that are not named have degree 1.
    """
    known, names = (*ORDER, "ep"), ", ".join(order)
    for name in order:
        if name not in known:
            return f"{names}: {name!r} is no basic axis{did_you_mean(name, known) or '.'}", f"use {', '.join(known)}."
        if order.count(name) > 1:
            return f"{names}: {name!r} is there {order.count(name)} times.", "name each axis once."
    missing = [f"{name} = {degrees[name]}" for name in ORDER if name not in order and degrees.get(name, 1) != 1]
    if missing:
        return f"{names}: without {', '.join(missing)}.", "name every axis of more than one rank, the outermost first."
    return None


def expert_ranks_text(tp: int, etp: int) -> str:
    """What the ranks that divide a layer's experts are made of."""
    return "dp_shard x cp x sp" + (" x tp" if etp == 1 else "" if etp == tp else f" x tp / {etp}")


def divisors_text(number: int) -> str:
    """What divides a number, in words.

    >>> divisors_text(4), divisors_text(2), divisors_text(1)
    ('1, 2 or 4', '1 or 2', '1')
    """
    *first, last = [str(value) for value in range(1, number + 1) if number % value == 0]
    return f"{', '.join(first)} or {last}" if first else last


def _product_text(degrees: dict[str, int]) -> str:
    return " x ".join(f"{axis}={degree}" for axis, degree in degrees.items())


def _nearest_divisors(wanted: int, total: int) -> str:
    """The divisors of ``total`` on both sides of ``wanted``, in words."""
    lower = max(value for value in range(1, min(wanted, total) + 1) if total % value == 0)
    higher = next((value for value in range(wanted, total + 1) if total % value == 0), lower)
    return str(lower) if lower == higher else f"{lower} or {higher}"
