"""Where DeepSpeed's flat tensors hold which part of which parameter, for any number of ranks; and what of a
configuration decides it.

``state`` has a picture of both layouts. Here they are made, there they are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from shoal.checkpoint.formats.torch_file_writing import ClassInstance
from shoal.checkpoint.portable import About
from shoal.errors import CheckpointError

_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_PRECISIONS = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class DeepSpeedSettings:
    """Of the run that will load the checkpoint.

    Args:
        dtype: that the model computes in.
        param_alignment: elements, of a parameter in a flat tensor of stages 1 and 2.
        clip_grad: None: the run's own. DeepSpeed takes the checkpoint's instead of its configuration's.
        fp16: the section.
        is_data_first: ranks that have the same experts are neighbours (``use_data_before_expert_parallelism``).
    """

    stage: int
    num_ranks: int
    dtype: torch.dtype
    sub_group_size: int
    is_round_robin: bool
    param_alignment: int
    clip_grad: float | None
    fp16: Mapping[str, Any]
    is_data_first: bool = False

    @property
    def is_dynamic(self) -> bool:
        return self.dtype == torch.float16 and not _value(self.fp16, "loss_scale", 0)

    def loss_scaler(self, state: Mapping[str, Any] | None) -> ClassInstance:
        """DeepSpeed's object, with its rules, of ``LossScale.state_dict()``; None: as at the beginning."""
        if not self.is_dynamic:
            scale = float(_value(self.fp16, "loss_scale", 0) or 1) if self.dtype == torch.float16 else 1.0
            return ClassInstance(_SCALERS, "LossScaler", {"cur_scale": scale, "dynamic": False})
        hysteresis = int(_value(self.fp16, "hysteresis", 2))
        first = {
            "scale": 2.0 ** int(_value(self.fp16, "initial_scale_power", 16)),
            "iteration": 0,
            "last_overflow_iteration": -1,
            "hysteresis": hysteresis,
        }
        values = {**first, **(state or {})}
        attributes = {
            "cur_scale": values["scale"],
            "dynamic": True,
            "cur_iter": values["iteration"],
            "last_overflow_iter": values["last_overflow_iteration"],
            "scale_factor": 2.0,
            "scale_window": int(_value(self.fp16, "loss_scale_window", 1000)),
            "min_scale": _value(self.fp16, "min_loss_scale", 1),
            "delayed_shift": hysteresis,
            "cur_hysteresis": values["hysteresis"],
            "consecutive_hysteresis": bool(_value(self.fp16, "consecutive_hysteresis", False)),
            "raise_error_at_min_scale": True,
            "dtype": torch.float16,
        }
        return ClassInstance(_SCALERS, "DynamicLossScaler", attributes)


def settings_of(config: Mapping[str, Any], stage: int | None, num_ranks: int, about: About) -> DeepSpeedSettings:
    """Args:
        config: the run's, as JSON has it. What it leaves out has DeepSpeed's default.
        stage: None: the configuration's.
        about: the source. The dtype is that of its trained parameters where the configuration does not name one.

    Raises: CheckpointError: a value that such a checkpoint cannot have.
    """
    zero = config.get("zero_optimization") or {}
    stage_of_run = stage if stage is not None else _value(zero, "stage", 0)
    if stage_of_run not in (1, 2, 3):
        raise _wrong(
            f"the ZeRO stage is {stage_of_run!r}, and DeepSpeed's files are written for stages 1, 2 and 3.", "--stage"
        )
    if num_ranks < 1:
        raise _wrong(f"{num_ranks} ranks cannot load it.", "--ranks")
    trained = {about.parameters[name].dtype for name in about.group_of if name in about.parameters}
    dtype = _precision(config, trained)
    clip = _value(config, "gradient_clipping", None)
    alignment = 16 // math.gcd(16, dtype.itemsize) if _value(zero, "parameter_alignment", False) else 1
    return DeepSpeedSettings(
        stage=int(stage_of_run),
        num_ranks=num_ranks,
        dtype=dtype,
        sub_group_size=int(_value(zero, "sub_group_size", 10**9)),
        is_round_robin=bool(_value(zero, "round_robin_gradients", False)),
        param_alignment=alignment,
        clip_grad=None if clip is None else float(clip),
        fp16=config.get("fp16") or {},
        is_data_first=bool(_value(config, "use_data_before_expert_parallelism", False)),
    )


def parallel_keys(config: Mapping[str, Any]) -> list[str]:
    """The keys of a configuration that ask for tensor- or pipeline-parallel ranks."""
    result = []
    for path in ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size", "parallel.tp", "parallel.pp"):
        value: Any = config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, int) and value > 1:
            result.append(path)
    return result


def _precision(config: Mapping[str, Any], trained: set[torch.dtype]) -> torch.dtype:
    enabled = {key: (config.get(key) or {}).get("enabled", False) for key in _PRECISIONS}
    for key, dtype in _PRECISIONS.items():
        if enabled[key] is True:
            return dtype
    if config and "auto" not in enabled.values():
        return torch.float32
    return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in trained), torch.float32)


def _value(section: Mapping[str, Any], key: str, default: Any) -> Any:
    """Clients replace "auto" before DeepSpeed reads it; here it means the default."""
    value = section.get(key)
    return default if value is None or value == "auto" else value


def _wrong(what: str, option: str) -> CheckpointError:
    do = f"name another with {option}, or the configuration of the run that loads it with --config."
    return CheckpointError(what, do=do, code="checkpoint-format")


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
        addresses = {}
        at = 0
        for piece in self.pieces:
            if piece.rank == rank:
                if piece.name is not None:
                    addresses[self.local_names.get(piece.name, piece.name)] = at, piece.numel
                at += piece.numel
        return addresses


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
    for rank, members in enumerate(shapes):
        part = partitioned(group, members, count, param_alignment=param_alignment, is_round_robin=is_round_robin)
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
    result: dict[str, int] = {}
    for group in dict.fromkeys(group_of.values()):
        names = [name for name, at in group_of.items() if at == group]
        places = _dealt(range(len(names)), num_ranks)
        result |= {name: group for _, name in sorted(zip(places, names, strict=True))}
    return result


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
            numel = math.prod(shapes[name])
            part = -(-numel // num_ranks)
            for rank in range(num_ranks):
                length = max(0, min(part, numel - rank * part))
                if length:
                    layout.pieces.append(FlatPiece(rank, name, rank * part, length))
                if length < part:
                    layout.pieces.append(FlatPiece(rank, None, 0, part - length))
        layouts.append(layout)
    return layouts


def _sub_groups(shapes: Mapping[str, tuple[int, ...]], num_ranks: int, size: int) -> Sequence[list[str]]:
    groups: list[list[str]] = [[]]
    numel = 0
    for name, shape in shapes.items():
        if numel >= size:
            groups.append([])
            numel = 0
        groups[-1].append(name)
        numel += -(-math.prod(shape) // num_ranks)
    return groups
