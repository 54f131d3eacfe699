"""How the tensor-parallel ranks' parts of a parameter make the whole, by what DeepSpeed's model files say of it.

    entry of ``universal_checkpoint_info``      the whole
    affine_map (AutoTP, 0.19)                   blocks of it, each with its place in a rank's part
    tp_replicated_parameter_patterns            rank 0's
    parameter_to_average_patterns               the mean
    parameter_with_2_sub_params_cat_dim_0       halves of the parts along dim 0: the first halves, then the second
    parameter_with_sub_params                   the same with any sizes, along the dim that is named
    parameter_with_row_parallelism_patterns     the parts, joined along dim 1
    no pattern that fits                        the parts, joined along dim 0

and of a vocabulary (``vocabulary_parameter_patterns``) the first ``original_vocab_size`` rows. The optimizer's state is
joined as its parameter is. Megatron-DeepSpeed writes patterns, AutoTP a pattern for each name and, since 0.19, the map.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from shoal.checkpoint.portable import SlicePlace, StridedPlace, TensorInfo, join, view_of
from shoal.checkpoint.rectangles import Rectangle, whole
from shoal.compat.checkpoints.files import PickledRecord, not_built
from shoal.compat.checkpoints.state import damaged
from shoal.errors import CheckpointError

_AFFINE_VERSION = 1
# A pattern of a file is run only if it cannot take long: text, and numbers between it.
_PATTERN = re.compile(r"\^?(?:\\d\+|\\\W|[\w.\-/ ])*\$?")
_MAX_NUMBERS = 4
_SUB_PARAMS = "parameter_with_sub_params"
_PATTERNS = (
    "tp_replicated_parameter_patterns",
    "parameter_to_average_patterns",
    "parameter_with_2_sub_params_cat_dim_0",
    "parameter_with_row_parallelism_patterns",
)


@dataclass(frozen=True)
class PartBlock:
    """Elements of one rank's part, and where they lie in the whole."""

    rank: int
    in_whole: SlicePlace
    in_part: SlicePlace


@dataclass(frozen=True)
class PartJoin:
    """How the parts of one parameter make the whole.

    Args:
        shape: of the whole, padding included.
        rows: how many of its rows are no padding; None: all.
        is_mean: the whole is the mean of the parts, and ``blocks`` is empty.
    """

    shape: tuple[int, ...]
    num_parts: int
    blocks: tuple[PartBlock, ...] = ()
    rows: int | None = None
    is_mean: bool = False

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.shape if self.rows is None else (self.rows, *self.shape[1:])

    def join(self, read: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The whole.

        Args:
            read: a rank's part.

        Memory: the whole and one part.
        """
        if self.is_mean:
            total = read(0)
            for rank in range(1, self.num_parts):
                total += read(rank)
            return total / self.num_parts
        part = lru_cache(maxsize=1)(lambda rank: read(rank).contiguous())
        blocks = sorted(self.blocks, key=lambda block: block.rank)

        def slices() -> Iterator[tuple[SlicePlace, torch.Tensor]]:
            if any(isinstance(block.in_whole, StridedPlace) for block in blocks):
                # Such blocks can overlap, and leave gaps.
                yield whole(self.shape), torch.zeros((), dtype=torch.float32, device="cpu")
            for block in blocks:
                yield block.in_whole, view_of(part(block.rank), block.in_part)

        joined = join(TensorInfo(part(blocks[0].rank).dtype, self.shape), slices())
        return joined if self.rows is None else joined[: self.rows].clone()


class TensorParallelLayout:
    """What a model file says of how its tensors were split.

    Args:
        information: its entry ``universal_checkpoint_info``.
        file: its name, for errors.

    Raises: CheckpointError: there is no such entry.
    """

    def __init__(self, information: Any, num_parts: int, file: str) -> None:
        if not isinstance(information, Mapping):
            what = f"{num_parts} tensor-parallel ranks saved it, and it does not say how tensors were split"
            raise undescribed(f"{what} (no 'universal_checkpoint_info')", file)
        self._information, self._num_parts, self._file = information, num_parts, file
        affine = information.get("affine_map") or {}
        if affine and int(affine.get("version", 1)) > _AFFINE_VERSION:
            raise not_built(f"an affine map of version {affine['version']}", file)
        self._maps: Mapping[str, Any] = affine.get("params") or {}
        self._patterns: dict[str, re.Pattern[str]] = {}

    def join_of(self, name: str, shapes: Sequence[tuple[int, ...]]) -> PartJoin:
        """How ``name`` is joined.

        Args:
            shapes: of each rank's part.

        Raises:
            CheckpointError: the parts do not make a whole.
            NotBuiltError: DeepSpeed itself cannot join them.
        """
        mapped = self._maps.get(f"^{re.escape(name)}$")
        if mapped is not None:
            return self._by_map(name, mapped, shapes)
        unsupported = self._information.get("autotp_unsupported_parameter_patterns") or {}
        if self._fits(unsupported, name):
            raise not_built(f"tensor parallelism of {name}, whose layout DeepSpeed does not write down", self._file)
        if not shapes[0] or self._has(name, "tp_replicated_parameter_patterns"):
            return self.replicated(name, shapes)
        if self._has(name, "parameter_to_average_patterns"):
            return replace(self.replicated(name, shapes), blocks=(), is_mean=True)
        sub = self._sub_sizes(name, shapes)
        dim, widths = sub or (int(self._has(name, "parameter_with_row_parallelism_patterns")), None)
        join = self._along(name, dim, shapes, widths)
        rows = self._information.get("original_vocab_size")
        if self._has(name, "vocabulary_parameter_patterns") and isinstance(rows, int) and 0 < rows < join.shape[0]:
            return replace(join, rows=rows)
        return join

    def replicated(self, name: str, shapes: Sequence[tuple[int, ...]]) -> PartJoin:
        """All ranks have it whole. Raises: CheckpointError: they do not."""
        if len(set(shapes)) > 1:
            raise damaged(f"{name} should be whole on every rank, and is {_listed(shapes)}", self._file)
        return self.whole_on(0, shapes[0])

    def whole_on(self, rank: int, shape: tuple[int, ...]) -> PartJoin:
        """The part of ``rank`` is the whole."""
        return PartJoin(shape, self._num_parts, (PartBlock(rank, whole(shape), whole(shape)),))

    def describes(self, name: str) -> bool:
        """True if a pattern or the map of the file names this parameter. The parts of others are joined along dim 0."""
        subs = (_values(entry).get("patterns") or () for entry in self._information.get(_SUB_PARAMS) or ())
        is_in_map = f"^{re.escape(name)}$" in self._maps
        return (
            is_in_map or any(self._has(name, key) for key in _PATTERNS) or any(self._fits(each, name) for each in subs)
        )

    def _along(
        self, name: str, dim: int, shapes: Sequence[tuple[int, ...]], widths: Sequence[Sequence[int]] | None
    ) -> PartJoin:
        """The parts joined along ``dim``; of parts that hold several parameters, one after the other.

        Args:
            widths: of each such parameter, the size on each rank.
        """
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if len(rest) > 1 or dim >= len(shapes[0]):
            raise damaged(f"the parts of {name} cannot be joined along dim {dim}: {_listed(shapes)}", self._file)
        widths = widths or [[shape[dim] for shape in shapes]]
        if [sum(of_rank) for of_rank in zip(*widths, strict=True)] != [shape[dim] for shape in shapes]:
            raise damaged(f"{name} holds parameters of sizes {widths}, and its parts are {_listed(shapes)}", self._file)
        before, after = shapes[0][:dim], shapes[0][dim + 1 :]
        blocks, to, starts = [], 0, [0] * self._num_parts
        for of_ranks in widths:
            for rank, width in enumerate(of_ranks):
                in_whole, in_part = (
                    Rectangle((*(0 for _ in before), at, *(0 for _ in after)), (*before, width, *after))
                    for at in (to, starts[rank])
                )
                blocks.append(PartBlock(rank, in_whole, in_part))
                to, starts[rank] = to + width, starts[rank] + width
        return PartJoin((*before, to, *after), self._num_parts, tuple(blocks))

    def _sub_sizes(self, name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, list[list[int]]] | None:
        """Of a weight that holds several parameters, the dim, and the size of each parameter on each rank."""
        if self._has(name, "parameter_with_2_sub_params_cat_dim_0"):
            return 0, [[shape[0] - shape[0] // 2 for shape in shapes], [shape[0] // 2 for shape in shapes]]
        for entry in self._information.get(_SUB_PARAMS) or ():
            values = _values(entry)
            pattern = self._fits(values.get("patterns") or (), name)
            if pattern is None:
                continue
            dim, shape = int(values["partition_dim"]), values["shape"]
            if len(shape) != len(shapes[0]) or dim >= len(shape):
                raise not_built(
                    f"tensor parallelism of {name}, which is split as a tensor of {list(shape)}", self._file
                )
            widths = (self._information.get("sub_param_shard_widths") or {}).get(pattern)
            if widths is not None:
                return dim, [[int(width) for width in of_ranks] for of_ranks in widths]
            sizes, total = shape[dim], sum(part[dim] for part in shapes)
            if isinstance(sizes, int):
                sizes = [total // max(1, sizes)] * sizes
            if any(size % self._num_parts for size in sizes):
                raise damaged(f"{name} holds parameters of sizes {list(sizes)}, without their parts", self._file)
            return dim, [[size // self._num_parts] * self._num_parts for size in sizes]
        return None

    def _by_map(self, name: str, mapped: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> PartJoin:
        shape = tuple(int(size) for size in mapped["logical_shape"])
        blocks, num_stored = [], 0
        for rank, part in enumerate(shapes):
            of_rank = mapped["ranks"].get(rank, mapped["ranks"].get(str(rank), {}))
            if math.prod(of_rank.get("shard_shape", ())) != math.prod(part):
                raise damaged(f"{name} is {list(part)} on rank {rank}, not {of_rank.get('shard_shape')}", self._file)
            is_inside, numel = True, 0
            for piece in of_rank["pieces"]:
                if float(piece.get("scale", 1.0)) != 1.0:
                    raise not_built(f"tensor parallelism of {name}, of which a rank holds a multiple", self._file)
                if rank == min(piece["locations"]):
                    size = tuple(piece["shape"])
                    in_whole, in_part = (
                        StridedPlace(int(offset), size, tuple(strides))
                        for offset, strides in (piece["source"], piece["dest"])
                    )
                    is_inside &= _lies_inside(in_whole, math.prod(shape)) and _lies_inside(in_part, math.prod(part))
                    numel += math.prod(size)
                    blocks.append(PartBlock(rank, in_whole, in_part))
            if not is_inside or numel > math.prod(part):
                raise damaged(f"the blocks of {name} on rank {rank} lie outside of its part", self._file)
            num_stored += numel
        if num_stored != math.prod(shape):
            raise damaged(f"{num_stored} of the {math.prod(shape)} elements of {name} are in the files", self._file)
        return PartJoin(shape, self._num_parts, tuple(blocks))

    def _has(self, name: str, key: str) -> bool:
        return self._fits(self._information.get(key) or (), name) is not None

    def _fits(self, patterns: Iterable[str], name: str) -> str | None:
        """The first pattern that fits the beginning of ``name``."""
        exact = f"^{re.escape(name)}$"
        return next((each for each in patterns if each == exact or self._compiled(each).match(name)), None)

    def _compiled(self, pattern: str) -> re.Pattern[str]:
        """Raises: CheckpointError: the pattern could run for long."""
        if pattern not in self._patterns:
            if not _PATTERN.fullmatch(pattern) or pattern.count("+") > _MAX_NUMBERS:
                raise damaged(f"{pattern[:200]!r} is no pattern of parameter names that is run", self._file)
            self._patterns[pattern] = re.compile(pattern)
        return self._patterns[pattern]


def undescribed(what: str, file: str) -> CheckpointError:
    """A model file does not say how a tensor was split."""
    return CheckpointError(
        f"{what}.",
        where=file,
        do="save it again with a model that describes its tensors (universal_checkpoint_info, which AutoTP and"
        " Megatron-DeepSpeed set it), or convert it with DeepSpeed's ds_to_universal.",
        code="checkpoint-split",
    )


def _values(entry: Any) -> Mapping[str, Any]:
    values: Mapping[str, Any] = entry.values if isinstance(entry, PickledRecord) else entry
    return values


def _lies_inside(place: StridedPlace, numel: int) -> bool:
    """True if it lies in a tensor of this many elements."""
    last = place.offset + sum((size - 1) * stride for size, stride in zip(place.shape, place.strides, strict=True))
    return min((place.offset, *place.strides, *place.shape)) >= 0 and (0 in place.shape or last < numel)


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes[:8])
