"""The mesh: every rank has a coordinate on each of the named axes. Arithmetic only, no tensors and no communication.

    axis          the ranks along it
    pp            hold different layers
    dp_replicate  hold the same shards and see other samples
    dp_shard      hold different shards of parameters, gradients and optimizer state, and see other samples
    cp            see other parts of one sequence, and exchange keys and values (context parallel)
    sp            see other parts of one sequence, and exchange attention heads (Ulysses)
    tp            hold different parts of one layer's weights

``tp`` varies fastest and ``pp`` slowest, so the ranks that talk most are neighbours. The derived axes are products or
parts of these:

    axis          made of                         the ranks along it
    fsdp          dp_shard x cp x sp              shard one dense parameter
    dp, batch     dp_replicate x dp_shard         see other samples
    loss          dp_replicate x fsdp             average the loss: they hold the same part of the model
    sequence      cp x sp                         see other parts of the same samples
    pipeline_stage  all but pp                    hold the same layers
    model         pp x tp                         hold other parts of one copy of the model
    etp           runs of etp of tp               hold other parts of one expert: tp = tp_fold x etp
    tp_fold       every etp-th rank of tp         take other tokens to the experts
    ep            runs of ep of fsdp x tp_fold    hold different experts
    expert_dp     every ep-th of fsdp x tp_fold   shard one expert: fsdp x tp_fold = expert_dp x ep
    expert_model  ep x etp                        hold other parts of one copy of a layer's experts
    expert_data   dp_replicate x expert_dp        hold the same experts
    tied:0,3      stages 0 and 3 of pp            hold copies of one tied weight
    tp:2x4/1      runs of 4 neighbours of tp      a factor of tp (here the second: 2 x 4 ranks, the last varies fastest)
    world         all six                         all

With ``etp`` 1 experts are not split over ``tp``: its ranks take different tokens to them (Megatron-LM's parallel
folding). With ``etp = tp`` each rank of ``tp`` holds a part of each expert, and ``ep`` and ``expert_dp`` are made of
``fsdp`` alone. In between, each expert is split over ``etp`` neighbours, and each run of them takes different tokens.

A group's first rank is the first member of its axis; every group is that rank plus fixed offsets.

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
    >>> Mesh.of(8, tp=8).groups(factor_axis("tp", (2, 4), (0,)))
    ((0, 4), (1, 5), (2, 6), (3, 7))
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple, get_args

from shoal.errors import ConfigError

Axis = Literal[
    "pp", "dp_replicate", "dp_shard", "cp", "sp", "tp", "ep",
    "fsdp", "dp", "batch", "loss", "sequence", "model", "pipeline_stage", "etp", "tp_fold", "expert_dp", "expert_data",
    "expert_model", "world",
]  # fmt: skip

_SLOWEST_FIRST = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
_PRODUCTS = {
    "fsdp": ("dp_shard", "cp", "sp"),
    "dp": ("dp_replicate", "dp_shard"),
    "batch": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp", "sp"),
    "sequence": ("cp", "sp"),
    "pipeline_stage": _SLOWEST_FIRST[1:],
    "model": ("pp", "tp"),
    "world": _SLOWEST_FIRST,
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
    """The axis of the ranks that differ only in some factors of a basic axis, of ``fsdp`` or of ``ep``.

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

    Raises: ConfigError: a degree below 1, an ``etp`` that does not divide ``tp``, or an ``ep`` that does not divide
        ``dp_shard x cp x sp x tp / etp``.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = field(default=1, repr=False)

    def __post_init__(self) -> None:
        for axis in (*_SLOWEST_FIRST, "ep", "etp"):
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
        return cls(pp=pp, dp_replicate=dp_replicate, dp_shard=rest, cp=cp, sp=sp, tp=tp, ep=ep, etp=etp)

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
        values = []
        for axis in reversed(_SLOWEST_FIRST):
            rank, value = divmod(rank, self._degree(axis))
            values.append(value)
        return Coordinate(*reversed(values))

    def rank(self, coordinate: Coordinate | tuple[int, int, int, int, int, int]) -> int:
        """Which rank is at ``coordinate``: the inverse of :meth:`coordinate`."""
        rank = 0
        for axis, value in zip(_SLOWEST_FIRST, coordinate, strict=True):
            if not 0 <= value < self._degree(axis):
                raise ConfigError(
                    f"coordinate {axis}={value} is not on an axis of degree {self._degree(axis)}",
                    where=repr(self),
                    do=f"use {axis} from 0 to {self._degree(axis) - 1}.",
                    code="mesh-rank",
                )
            rank = rank * self._degree(axis) + value
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
            first = rank % self._stride("pp")
            if rank - first not in offsets:
                return (rank,)
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
        return prod(self._degree(name) for name in _SLOWEST_FIRST[_SLOWEST_FIRST.index(axis) + 1 :])

    def _extents(self, axis: str) -> tuple[_Extent, ...]:
        """The axis as nested runs of ranks, the slowest first. ``dp_shard``, ``cp`` and ``sp`` are neighbours."""
        match axis:
            case "etp":
                return (_Extent(1, self.etp),)
            case "tp_fold":
                return (_Extent(self.etp, self.tp_fold),)
            case "ep":
                return (_Extent(self.etp, self.ep),)
            case "expert_model":
                return (_Extent(1, self.ep * self.etp),)
        if axis in ("expert_dp", "expert_data"):
            shard = _Extent(self.ep * self.etp, self.expert_ranks // self.ep)
            return (shard,) if axis == "expert_dp" else (*self._extents("dp_replicate"), shard)
        if "/" in axis:
            return self._factors(axis)
        names = _PRODUCTS.get(axis, (axis,))
        return tuple(_Extent(degree=self._degree(name), stride=self._stride(name)) for name in names)

    def _factors(self, axis: str) -> tuple[_Extent, ...]:
        match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)/(\d(?:,\d)*)", axis)
        base, sizes_text, kept_text = match.groups() if match else ("", "1", "0")
        sizes = [int(size) for size in sizes_text.split("x")]
        kept = [int(factor) for factor in kept_text.split(",")]
        degree = self.size(base) if base in (*_SLOWEST_FIRST, "fsdp", "ep") else 0
        if degree != prod(sizes) or max(kept) >= len(sizes) or kept != sorted(set(kept)):
            raise ConfigError(
                f"the axis {axis!r} is not made of factors of an axis of this mesh",
                where=repr(self),
                do="use factor_axis(axis, sizes, factors) with sizes whose product is the degree of the axis.",
                code="mesh-axis",
            )
        # Of fsdp: that of the last of the neighbours that make it up.
        stride = self.etp if base == "ep" else self._stride("sp" if base == "fsdp" else base)
        return tuple(_Extent(stride * prod(sizes[factor + 1 :]), sizes[factor]) for factor in kept)

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
        stride = mesh._stride("pp")
        alone: list[tuple[int, ...]] = [
            (rank,) for rank in range(mesh.world_size) if rank // stride * stride not in offsets
        ]
        tied = [tuple(first + offset for offset in offsets) for first in range(stride)]
        return tuple(sorted([*alone, *tied]))
    # A rank is the first of its group if it is at coordinate 0 of every extent.
    extents = mesh._extents(axis)
    return tuple(
        tuple(first + offset for offset in offsets)
        for first in range(mesh.world_size)
        if all(first // stride % degree == 0 for stride, degree in extents)
    )


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
