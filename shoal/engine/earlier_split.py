"""What an earlier engine has made of a model: layers that are split over tensor-parallel ranks, pipeline stages.

``destroy()`` leaves each rank its parts. The next engine of the model takes them over, in the same layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shoal.comm.formats import WireFormat
from shoal.comm.world import World, current_world
from shoal.config import Config
from shoal.config.parallel import Parallel, TensorParallel
from shoal.errors import ModelError
from shoal.mesh import Mesh
from shoal.pipeline.cut import CUT_MODELS
from shoal.sharding.axes import Axes
from shoal.sharding.layout import ParameterSpec
from shoal.text import listed


@dataclass(frozen=True)
class HowSplit:
    """What decides how a model is split."""

    world: World
    mesh: Mesh
    parallel: Parallel
    tensor_parallel: TensorParallel
    wire: WireFormat | None


@dataclass(frozen=True)
class Split:
    """What a rank holds of a split model: the parts by name, the names of what it has a summand of the gradient of."""

    how: HowSplit
    parts: Mapping[str, ParameterSpec]
    partial: frozenset[str]


SPLIT: WeakKeyDictionary[nn.Module, Split] = WeakKeyDictionary()


def is_declared(parameter: torch.Tensor) -> bool:
    """True if the script says that this is a rank's part of a tensor, as Megatron-LM's layers do."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def remember_split(
    model: nn.Module,
    axes: Axes,
    config: Config,
    wire: WireFormat | None,
    parts: Mapping[str, ParameterSpec],
    partial: frozenset[str],
) -> None:
    """An engine has split the model, if any of its layers is split."""
    if any(map(_is_split, model.modules())):
        SPLIT[model] = Split(_how_split(axes, config, wire), dict(parts), partial)


def keep_split(model: nn.Module, stages: nn.Module) -> None:
    """The pipeline stages of a model are split as it is."""
    if (split := SPLIT.get(model)) is not None:
        names = {name for name, _ in stages.named_parameters(remove_duplicate=False)}
        SPLIT[stages] = replace(split, parts={name: part for name, part in split.parts.items() if name in names})


def check_split(model: nn.Module, axes: Axes, config: Config, wire: WireFormat | None) -> None:
    """Raises: ModelError: an engine that had the model before has split it in another way, or cut it into stages."""
    if model in CUT_MODELS:
        raise ModelError(
            f"an earlier engine has cut this {type(model).__name__} into pipeline stages: it has those of this rank.",
            do="give initialize() the module of that engine (engine.module), or build the model again.",
            code="model-split",
        )
    before = SPLIT.get(model)
    is_same = before is not None and before.how == _how_split(axes, config, wire)
    if is_same or any(map(is_declared, model.parameters())):
        return
    split = [name for name, module in model.named_modules() if _is_split(module)]
    if split:
        raise ModelError(
            f"{len(split)} layers of {type(model).__name__} are split over tensor-parallel ranks already:"
            f" {listed(split, 4)}. An earlier engine of this model has split them in another way than this one would.",
            do="build the model again and load its checkpoint, which any layout loads; or leave the sections parallel,"
            " tensor_parallel and wire.tensor, and the ranks, as they were.",
            code="model-split",
        )


def _is_split(module: nn.Module) -> bool:
    return hasattr(module, "tensor_split")


def _how_split(axes: Axes, config: Config, wire: WireFormat | None) -> HowSplit:
    return HowSplit(current_world(), axes.mesh, config.parallel, config.tensor_parallel, wire)
