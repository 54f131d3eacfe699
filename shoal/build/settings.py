"""How a model is sharded: the formats of each kind of state, and what the configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch

from shoal.comm.formats import WireFormat
from shoal.offload.policy import Tiers, from_config
from shoal.sharding.encoded_state import StateFormat
from shoal.sharding.gradient import GradientPolicy
from shoal.sharding.memory_model import UnitMemory
from shoal.sharding.partition import UnitRules
from shoal.sharding.placement import Tier
from shoal.streams import is_accelerator


@dataclass(frozen=True)
class Precision:
    """Which dtype each kind of state has.

    Args:
        parameter: floating-point parameters are cast to it; None: kept.
        main: dtype of the main parameters of 16-bit parameters; None: the optimizer updates the parameters themselves.
        state: dtype of optimizer state; None: that of the main parameters. ``state_format``: how it is stored, of fp32;
            None: as it is.
        buffer: floating-point buffers of the model are cast to it; None: kept, as ``buffer_formats`` has it.
        fp32_buffers: names of buffers that stay in fp32; None: those that the model names.
        sent_dtypes: by name, parameters that are sent in this dtype: their gradients, not in ``gradient.reduce_dtype``;
            and at stage 3 their values, where they have no wire format.
    """

    parameter: torch.dtype | None = None
    main: torch.dtype | None = torch.float32
    state: torch.dtype | None = None
    state_format: StateFormat | None = None
    buffer: torch.dtype | None = None
    fp32_buffers: tuple[str, ...] | None = None
    gradient: GradientPolicy = field(default_factory=GradientPolicy)
    sent_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def policy_of(self, name: str) -> GradientPolicy:
        """How the gradient of a parameter is summed."""
        sent = self.sent_dtypes.get(name)
        return self.gradient if sent is None else replace(self.gradient, reduce_dtype=sent)

    def has_wider_main(self, dtype: torch.dtype) -> bool:
        """True if main parameters have more digits than parameters of ``dtype``."""
        return dtype in (torch.float16, torch.bfloat16) and self.main not in (None, dtype)

    def main_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the main parameters of parameters of ``dtype``."""
        return self.main if self.main is not None and self.has_wider_main(dtype) else dtype

    def of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that parameters get which come as ``dtype``."""
        return self.parameter if self.parameter is not None and dtype.is_floating_point else dtype


@dataclass(frozen=True)
class WireSettings:
    """In which formats parameters and gradients are sent; None: as they are.

    Args:
        gather: of trained parameters. ``frozen``: of frozen ones.
        reduce: of gradients, over data-parallel ranks; ``between``: between nodes, in two levels; None: in one.
        units: by a pattern of unit names: other formats than ``gather`` and ``reduce``.
        is_difference: gathers after the step send differences.
        has_error: what a reduction loses is added to the next one. ``error_decay``: see ``Wire``; ``error_reset``:
            steps between two resets.
        is_by_optimizer: the optimizer sums what it makes of gradients, in its own units; ``is_local``: see ``Sent``.
        is_gather_split: gathers are made in two levels.
        ranks_per_node: None: by host name.
    """

    gather: WireFormat | None = None
    frozen: WireFormat | None = None
    reduce: WireFormat | None = None
    between: WireFormat | None = None
    units: Mapping[str, tuple[WireFormat | None, WireFormat | None]] = field(default_factory=dict)
    is_difference: bool = False
    has_error: bool = False
    error_decay: float = 0.0
    error_reset: int | None = None
    is_by_optimizer: bool = False
    is_local: bool = False
    is_gather_split: bool = False
    ranks_per_node: int | None = None

    def of_unit(self, name: str, *, is_trained: bool) -> tuple[WireFormat | None, WireFormat | None]:
        """The formats of a unit's gathers and reductions."""
        gather, reduce = self.gather if is_trained else self.frozen, self.reduce
        for pattern, formats in self.units.items():
            if fnmatchcase(name, pattern):
                gather, reduce = formats
        return gather, reduce


@dataclass(frozen=True)
class ZeroSettings:
    """What the JSON file says about sharding, in Shoal's words. All ``numel`` are elements."""

    stage: int = 0
    rules: UnitRules = field(default_factory=UnitRules)
    has_second: bool = False
    max_bucket_numel: int | None = None
    prefetch_numel: int = 50_000_000
    max_live_numel: int | None = None  # None: 1e9, or the largest unit
    max_reuse_numel: int = 0
    has_overlap: bool = True
    registers_memory: bool | Literal["symmetric"] = False  # with NCCL: that of buffers that are gathered and reduced
    sparse_gradients: bool = False  # of every embedding; else of those that were made with sparse=True
    parameter_tier: Tier = Tier.DEVICE  # of shards between uses
    gathers_if_used: bool = False  # of experts in lists, those that some token uses; at stage 3
    state_tier: Tier = Tier.DEVICE  # of main parameters and optimizer state
    state_ratio: float = 1.0  # share of the trained elements whose state is there; the rest is on the device
    max_host_numel: int = 0  # of this rank's parameters, kept in host memory though their tier is the disk
    pins_parameters: bool = True
    pins_state: bool = True
    wire: WireSettings = field(default_factory=WireSettings)
    num_outer_states: int = 0  # that replicas keep which take steps of their own; 0: they do not
    is_updated_in_parts: bool = False  # the host updates some elements later than others, from copies of its own
    is_host_separate: bool | None = None  # is host memory other memory than the device's? None: unless that is a CPU

    def is_offloaded(self, tier: Tier, device: torch.device) -> bool:
        """True if bytes of ``tier`` in host memory must be copied before ``device`` can compute with them."""
        return tier is not Tier.DEVICE and self.has_separate_host(device)

    def has_separate_host(self, device: torch.device) -> bool:
        """True if host memory is other memory than the device's."""
        if self.is_host_separate is None:
            return is_accelerator(device) or self.is_updated_in_parts
        return self.is_host_separate

    def tiers(self, units: Sequence[UnitMemory]) -> Sequence[Tiers]:
        """The tiers that the file names."""
        return from_config(
            units,
            self.parameter_tier,
            self.state_tier,
            ratio=self.state_ratio,
            max_host_numel=self.max_host_numel,
        )
