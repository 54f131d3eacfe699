"""What an earlier engine has made of a model: layers that are split over tensor-parallel ranks, pipeline stages.

``destroy()`` leaves each rank its parts. The next engine of the model takes them over, in the same layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from shoal.comm.formats import WireFormat
from shoal.comm.world import World, current_world
from shoal.config import Config
from shoal.config.parallel import Parallel, TensorParallel
from shoal.mesh import Mesh
from shoal.sharding.axes import Axes
from shoal.sharding.layout import ParameterSpec


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
    """What a rank holds of a split model: the parts by name, the names of what it has a summand of the gradient of.

    Of a pipeline they may be of other stages, too.
    """

    how: HowSplit
    parts: Mapping[str, ParameterSpec]
    partial: frozenset[str]


SPLIT: WeakKeyDictionary[nn.Module, Split] = WeakKeyDictionary()


def how_split(axes: Axes, config: Config, wire: WireFormat | None) -> HowSplit:
    return HowSplit(current_world(), axes.mesh, config.parallel, config.tensor_parallel, wire)
