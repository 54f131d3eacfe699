"""How a model is sharded: the formats of each kind of state, what the configuration asks for, and the axes of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from shoal.comm.protocol import Communicator
from shoal.mesh import Mesh
from shoal.sharding.gradient import GradientPolicy
from shoal.sharding.memory_model import UnitMemory
from shoal.sharding.partition import UnitRules
from shoal.sharding.placement import Tier
from shoal.streams import is_accelerator
from shoal.zero.offload_policy import Tiers, from_config

ExpertAxis = Literal["ep", "etp", "expert_model"]


@dataclass(frozen=True)
class Precision:
    """Which dtype each kind of state has.

    Args:
        parameter: floating-point parameters are cast to it; None: kept.
        main: dtype of the main parameters of 16-bit parameters; None: the optimizer updates the parameters themselves.
        state: dtype of optimizer state; None: that of the main parameters.
        buffer: floating-point buffers of the model are cast to it; None: kept, as ``buffer_formats`` has it.
        fp32_buffers: names of buffers that stay in fp32; None: those that the model names.
        reduce_dtypes: by name, parameters whose gradients are sent in this dtype, not in ``gradient.reduce_dtype``.
    """

    parameter: torch.dtype | None = None
    main: torch.dtype | None = torch.float32
    state: torch.dtype | None = None
    buffer: torch.dtype | None = None
    fp32_buffers: tuple[str, ...] | None = None
    gradient: GradientPolicy = field(default_factory=GradientPolicy)
    reduce_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def policy_of(self, name: str) -> GradientPolicy:
        """How the gradient of a parameter is summed."""
        sent = self.reduce_dtypes.get(name)
        return self.gradient if sent is None else replace(self.gradient, reduce_dtype=sent)

    def has_wider_main(self, dtype: torch.dtype) -> bool:
        """True if main parameters have more digits than parameters of ``dtype``."""
        return dtype in (torch.float16, torch.bfloat16) and self.main not in (None, dtype)

    def main_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the main parameters of parameters of ``dtype``."""
        return self.main if self.main is not None and self.has_wider_main(dtype) else dtype

    def of(self, parameter: torch.nn.Parameter) -> torch.dtype:
        """The dtype that a parameter gets."""
        is_cast = self.parameter is not None and parameter.is_floating_point()
        return self.parameter if is_cast and self.parameter is not None else parameter.dtype


@dataclass(frozen=True)
class ZeroSettings:
    """What the JSON file says about sharding, in Shoal's words. All ``numel`` are elements."""

    stage: int = 0
    rules: UnitRules = field(default_factory=UnitRules)
    has_hpz: bool = False
    max_bucket_numel: int | None = None
    prefetch_numel: int = 50_000_000
    max_live_numel: int = 1_000_000_000
    max_reuse_numel: int = 0
    has_overlap: bool = True
    sparse_gradients: bool = False  # of every embedding; else of those that were made with sparse=True
    parameter_tier: Tier = Tier.DEVICE  # of shards between uses
    gathers_if_used: bool = False  # of experts in lists, those that some token uses; at stage 3
    state_tier: Tier = Tier.DEVICE  # of main parameters and optimizer state
    state_ratio: float = 1.0  # share of the trained elements whose state is there; the rest is on the device
    max_host_numel: int = 0  # of this rank's parameters, kept in host memory though their tier is the disk
    pins_parameters: bool = True
    pins_state: bool = True
    is_host_separate: bool | None = None  # is host memory other memory than the device's? None: unless that is a CPU

    def is_offloaded(self, tier: Tier, device: torch.device) -> bool:
        """True if bytes of ``tier`` in host memory must be copied before ``device`` can compute with them."""
        return tier is not Tier.DEVICE and self.has_separate_host(device)

    def has_separate_host(self, device: torch.device) -> bool:
        """True if host memory is other memory than the device's."""
        return is_accelerator(device) if self.is_host_separate is None else self.is_host_separate

    def tiers(self, units: Sequence[UnitMemory]) -> Sequence[Tiers]:
        """The tiers that the file names."""
        return from_config(
            units,
            self.parameter_tier,
            self.state_tier,
            ratio=self.state_ratio,
            max_host_numel=self.max_host_numel,
        )


@dataclass(frozen=True)
class GroupAxes:
    """The axes of one parameter group.

    Args:
        shard: the name of the axis that shards it, in the row.
        data: the ranks that hold the same part of the parameters: their gradients are averaged.
        comms: by name in the row, the ranks along ``shard``, and along each further axis on which its gradient is
            Partial. Of an axis with one rank, nothing.
        replicas: where state is sharded, the axes along which ranks hold the same range of it: the global norm counts
            the range at coordinate 0 of each, and a checkpoint divides it among them.
        parts: the ranks that hold the other parts of each of its tensors; None: tensors are whole.
    """

    shard: str
    data: Communicator
    comms: Mapping[str, Communicator]
    replicas: tuple[Communicator, ...]
    parts: Communicator | None = None

    @property
    def partial(self) -> tuple[str, ...]:
        """The axes over which the gradient is summed beside ``shard``."""
        return tuple(name for name in self.comms if name != self.shard)


@dataclass(frozen=True)
class Axes:
    """The communicators of one model, by what they are asked for.

    Args:
        mesh: of all ranks.
        world: every rank that takes the step together: its status, start-up checks, errors.
        data: the ranks that hold the same part of the model: gradients are averaged over them.
        batch: the ranks that see other samples: batch sizes, the loader.
        shard: the ranks that hold different shards.
        replicate: the ranks that hold the same shard and saw other samples; None: there is one.
        hpz: the ranks of hpZ's second sharding.
        pp: the ranks that hold other layers; None: there is one.
        pipeline_stage: the ranks that hold the same layers: they issue the same collectives of parameters.
        tp: the ranks that hold different parts of the layers; None: there is one.
        sp, cp: the ranks that see other parts of a sequence; None: there is one.
        ep: the ranks that hold different experts; None: there is one.
        expert_dp: the ranks that hold different shards of the same experts. With ``expert_data``, where ``ep`` is.
        expert_data: the ranks that hold the same experts.
        etp: the ranks over which each expert is split; None: experts are whole.
        tp_fold: the tensor-parallel ranks that hold the same parts of experts, or of other experts; None: there is one.
        expert_model: the ranks that hold other parts of one copy of a layer's experts, where each expert is split.
        names: the ranks that hold parameters of other names; None: all hold the same.
    """

    mesh: Mesh
    world: Communicator
    data: Communicator
    batch: Communicator
    shard: Communicator
    replicate: Communicator | None = None
    hpz: Communicator | None = None
    tp: Communicator | None = None
    sp: Communicator | None = None
    cp: Communicator | None = None
    pp: Communicator | None = None
    ep: Communicator | None = None
    expert_dp: Communicator | None = None
    expert_data: Communicator | None = None
    etp: Communicator | None = None
    tp_fold: Communicator | None = None
    expert_model: Communicator | None = None
    names: Communicator | None = None
    _pipeline_stage: Communicator | None = None  # None: the world

    @property
    def pipeline_stage(self) -> Communicator:
        return self._pipeline_stage or self.world

    @classmethod
    def of(cls, mesh: Mesh, open_axis: Callable[[str], Communicator], *, hpz: Communicator | None = None) -> Axes:
        """The communicators of a mesh.

        Args:
            open_axis: the communicator along an axis.
        """

        def beside(axis: str) -> Communicator | None:
            return open_axis(axis) if mesh.size(axis) > 1 else None

        # Where two axes are the same ranks, one communicator serves both, so that its calls have one order.
        batch = open_axis("dp")
        data = batch if mesh.size("loss") == mesh.dp else open_axis("loss")
        world = data if mesh.world_size == data.size else open_axis("world")
        is_data_only = mesh.world_size == data.size * mesh.pp
        expert_dp = open_axis("expert_dp") if mesh.ep > 1 else None
        pp, tp = beside("pp"), beside("tp")
        return cls(
            mesh,
            world,
            data,
            batch,
            data if mesh.fsdp == data.size else open_axis("dp_shard" if mesh.fsdp == mesh.dp_shard else "fsdp"),
            beside("dp_replicate"),
            hpz,
            tp,
            beside("sp"),
            beside("cp"),
            pp,
            beside("ep"),
            expert_dp,
            expert_dp if mesh.dp_replicate == 1 or expert_dp is None else open_axis("expert_data"),
            tp if mesh.etp == mesh.tp else beside("etp"),
            tp if mesh.etp == 1 else beside("tp_fold"),
            open_axis("expert_model") if mesh.ep > 1 and mesh.etp > 1 else None,
            pp,
            None if mesh.pp == 1 else data if is_data_only else open_axis("pipeline_stage"),
        )

    def of_group(
        self,
        *,
        is_split: bool,
        is_partial: bool,
        is_state_sharded: bool,
        tied: Communicator | None = None,
        expert: ExpertAxis | None = None,
        is_folded: bool = False,
    ) -> GroupAxes:
        """The axes of a group of parameters.

        Args:
            expert: each expert-parallel rank holds other experts; along this axis, the parts of each tensor.
            is_split: each tensor-parallel rank holds another part of them.
            is_partial: the tensor-parallel ranks hold the same, and each has a summand of the gradient.
            is_folded: of experts that are not divided: ``etp`` stands for ``tp`` in ``is_split``, and ``tp_fold`` in
                ``is_partial``.
            tied: the pipeline stages that hold copies of them, each with a summand of the gradient; None: one does.
        """
        shard = "dp_shard" if self.mesh.fsdp == self.mesh.dp_shard else "fsdp"
        data, parts, comms = self.data, self.tp if is_split else None, {shard: self.shard}
        same, summed = None if is_split else self.tp, self.tp if is_partial and not is_split else None
        if is_folded:
            parts, same = (self.etp, self.tp_fold) if is_split else (None, self.tp)
            summed = self.tp_fold if is_partial else None
        if expert is not None and self.expert_dp is not None and self.expert_data is not None:
            parts = {"ep": self.ep, "etp": self.etp, "expert_model": self.expert_model}[expert]
            same, summed = self.etp if expert == "ep" else None, None
            shard, data, comms = "expert_dp", self.expert_data, {"expert_dp": self.expert_dp}
        if not is_state_sharded:
            comms = {shard: data}
        replicas = []
        if is_state_sharded and self.replicate is not None:
            comms["dp_replicate"] = self.replicate
            replicas.append(self.replicate)
        if same is not None:
            replicas.append(same)
        if summed is not None:
            comms[summed.axis] = summed
        if tied is not None:
            replicas.append(tied)
            comms[tied.axis] = tied
        return GroupAxes(shard, data, comms, tuple(replicas), parts)

    def same_in(self, replicas: Sequence[Communicator]) -> Communicator | None:
        """The tensor-parallel ranks among the replicas of a group: they hold the same; None: there are none."""
        return next((comm for comm in replicas if comm in (self.tp, self.etp, self.tp_fold)), None)

    def distinct(self) -> list[Communicator]:
        """Each communicator of parameters, gradients and status once."""
        found = [self.world, self.data, self.shard, self.replicate, self.hpz, self.tp, self._pipeline_stage]
        found += [self.ep, self.expert_dp, self.expert_data, self.etp, self.tp_fold, self.expert_model]
        return list({id(comm): comm for comm in found if comm is not None}.values())

    def map(self, change: Callable[[Communicator], Communicator]) -> Axes:
        """The same axes with each communicator changed, once."""
        made: dict[int, Communicator] = {}
        found: dict[str, Any] = {}
        for name, comm in vars(self).items():
            if isinstance(comm, Communicator):
                found[name] = made[id(comm)] = made.get(id(comm)) or change(comm)
        return replace(self, **found)

    def drain(self) -> None:
        """Wait until no peer reads parameters or gradients of this rank."""
        for comm in self.distinct():
            comm.drain()
