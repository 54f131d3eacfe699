"""The axes of ranks: of one model, and of one parameter group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shoal.comm.protocol import Communicator
from shoal.mesh import Mesh

ExpertAxis = Literal["ep", "etp", "expert_model"]


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
