"""How a model is sharded: the formats of each kind of state, what the configuration asks for, and the axes of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from shoal.comm.protocol import Communicator
from shoal.memory.placement import Tier
from shoal.zero.gradient import GradientPolicy
from shoal.zero.partition import UnitRules
from shoal.zero.tiers import Tiers, UnitSize, as_asked


@dataclass(frozen=True)
class Precision:
    """Which dtype each kind of state has.

    Args:
        parameter: floating-point parameters are cast to it; None: kept.
        master: dtype of the optimizer's copy of 16-bit parameters; None: the optimizer updates the parameters
            themselves.
        buffer: floating-point buffers of the model are cast to it; None: kept, as ``buffer_formats`` has it.
        wide_buffers: names of buffers that stay in fp32; None: those that the model names.
        wires: by name, parameters whose gradients are sent in this dtype, not in ``gradient.wire_dtype``.
    """

    parameter: torch.dtype | None = None
    master: torch.dtype | None = torch.float32
    buffer: torch.dtype | None = None
    wide_buffers: tuple[str, ...] | None = None
    gradient: GradientPolicy = field(default_factory=GradientPolicy)
    wires: Mapping[str, torch.dtype] = field(default_factory=dict)

    def policy_of(self, name: str) -> GradientPolicy:
        """How the gradient of a parameter is summed."""
        wire = self.wires.get(name)
        return self.gradient if wire is None else replace(self.gradient, wire_dtype=wire)


@dataclass(frozen=True)
class ZeroSettings:
    """What the JSON file says about sharding, in Shoal's words. All ``numel`` are elements."""

    stage: int = 0
    rules: UnitRules = field(default_factory=UnitRules)
    has_secondary: bool = False
    max_bucket_numel: int | None = None
    prefetch_numel: int = 50_000_000
    max_live_numel: int = 1_000_000_000
    max_reuse_numel: int = 0
    has_overlap: bool = True
    can_be_native: bool = True  # on one rank, leave gradients where autograd puts them
    sends_rows: bool = False  # of every embedding's gradient; else where it was made with sparse=True
    parameter_tier: Tier = Tier.DEVICE  # of shards between uses
    state_tier: Tier = Tier.DEVICE  # of master weights and optimizer state
    state_ratio: float = 1.0  # share of the trained elements whose state is there; the rest is on the device
    max_host_numel: int = 0  # of this rank's parameters, kept in host memory though their tier is the disk
    pins_parameters: bool = True
    pins_state: bool = True
    is_host_apart: bool | None = None  # is the host's memory another than the device's? None: unless that is a CPU

    def is_apart(self, tier: Tier, device: torch.device) -> bool:
        """Must bytes of ``tier`` in host memory be copied before ``device`` can compute with them?"""
        return tier is not Tier.DEVICE and self.has_host_apart(device)

    def has_host_apart(self, device: torch.device) -> bool:
        """Is the host's memory another than the device's?"""
        return device.type != "cpu" if self.is_host_apart is None else self.is_host_apart

    def as_asked(self, sizes: Sequence[UnitSize]) -> Sequence[Tiers]:
        """The tiers that the file names."""
        return as_asked(
            sizes,
            self.parameter_tier,
            self.state_tier,
            ratio=self.state_ratio,
            max_host_numel=self.max_host_numel,
        )


@dataclass(frozen=True)
class Axes:
    """The communicators of the data-parallel axes.

    ``inner`` shards, ``outer`` replicates the shards, ``all`` is both flattened. Pure data parallel training:
    ``inner`` is ``all``.
    ``secondary``: the inner axis that hpZ's second sharding uses.
    """

    all: Communicator
    inner: Communicator
    outer: Communicator | None = None
    secondary: Communicator | None = None
