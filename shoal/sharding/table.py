"""ZeRO as a table: for each parameter group and each kind of state, where it is stored.

A stage is a way to fill in a row; the engine executes rows (``buffer.redistribute``) and knows no stage. Sources: ZeRO
(arXiv:1910.02054, sections 5 and 7), MiCS (arXiv:2205.00119), ZeRO++ hpZ (arXiv:2306.10209).

| stage | parameter | gradient between micro-batches | gradient at the step | optimizer state |
| ----- | --------- | ------------------------------ | -------------------- | --------------- |
| 0     | Replicate | Partial                        | Replicate            | Replicate       |
| 1     | Replicate | Partial                        | Shard                | Shard           |
| 2     | Replicate | Shard                          | Shard                | Shard           |
| 3     | Shard     | Shard                          | Shard                | Shard           |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.comm.formats import WireFormat
from shoal.sharding.placement import PARTIAL, REPLICATE, SHARD, Placement, Spread, Tier, moves

_STAGES: dict[int, tuple[Spread, Spread, Spread, Spread]] = {
    0: (REPLICATE, PARTIAL, REPLICATE, REPLICATE),
    1: (REPLICATE, PARTIAL, SHARD, SHARD),
    2: (REPLICATE, SHARD, SHARD, SHARD),
    3: (SHARD, SHARD, SHARD, SHARD),
}


@dataclass(frozen=True)
class Sent:
    """The formats in which a group is sent; None, and no entry: values are sent as they are.

    Args:
        gather: of parameters.
        is_difference: after a step, how they differ from those that every rank has.
        reduce: of gradients, by axis.
        between: of gradients between nodes, along an axis in two levels; None: the axis' own.
        has_error: what the first reduction of a gradient loses is added to the next one.
        error_decay: see ``Wire``.
        is_local: the ranks' parameters differ for some steps. Main parameters, which do not, have memory of their own.
    """

    gather: WireFormat | None = None
    is_difference: bool = False
    reduce: tuple[tuple[str, WireFormat], ...] = ()
    between: WireFormat | None = None
    has_error: bool = False
    error_decay: float = 0.0
    is_local: bool = False


@dataclass(frozen=True)
class Row:
    """Where the state of one parameter group is stored.

    Raises: PlacementError: no single collective per axis leads from one cell to the next.
    """

    unit: str
    parameter: Placement  # between uses; in use it is Replicate
    gradient: Placement  # as a backward pass gives it: Partial over every axis whose ranks saw other samples
    gradient_between: Placement  # between micro-batches
    gradient_at_step: Placement
    state: Placement  # main parameters and optimizer state
    has_second: bool = False  # a second sharding is kept from forward to backward
    sent: Sent = Sent()
    num_outer_states: int = 0  # fp32 states of this rank's range, of replicas that take steps of their own

    def __post_init__(self) -> None:
        moves(self.gradient, self.gradient_between)
        moves(self.gradient_between, self.gradient_at_step)
        moves(self.parameter, Placement())

    @property
    def after_step(self) -> str:
        """The collective that brings the parameters up to date once the optimizer has updated this rank's range."""
        return "all_gather" if self.state.is_sharded and not self.parameter.is_sharded else "nothing"

    @property
    def needs_main(self) -> bool:
        """True if main parameters need memory of their own: a gather overwrites the whole buffer by what it lost."""
        return self.sent.is_local or (self.sent.gather is not None and self.after_step == "all_gather")

    def on(self, parameter: Tier, state: Tier, *, is_gradient_offloaded: bool = False) -> Row:
        """The same row on other tiers. Parameters that are stored whole are stored on the device.

        Args:
            is_gradient_offloaded: the CPU optimizer updates: a sharded gradient moves to the host once it is reduced.
        """
        gradient = Tier.HOST if is_gradient_offloaded and self.is_gradient_sharded else Tier.DEVICE
        return replace(
            self,
            parameter=self.parameter.on(parameter if self.parameter.is_sharded else Tier.DEVICE),
            gradient_between=self.gradient_between.on(gradient),
            gradient_at_step=self.gradient_at_step.on(gradient),
            state=self.state.on(state),
        )

    @property
    def is_gradient_sharded(self) -> bool:
        """True if each rank keeps only its range of the gradient between micro-batches."""
        return self.gradient_between.is_sharded


def row_of_stage(
    stage: int,
    unit: str,
    *,
    shard: str = "dp_shard",
    replicate: Sequence[str] = (),
    has_second: bool = False,
    is_persistent: bool = False,
) -> Row:
    """The row that a ZeRO stage means for the parameter groups of one unit.

    Args:
        shard: the axis that shards (``expert_dp`` for experts).
        replicate: further axes over which the gradient is a sum (hybrid sharding: ``dp_replicate``; norm weights under
            sequence parallelism: ``tp``; tied weights: ``tied``). They are summed once a step.
        has_second: a second sharding is kept from forward to backward (ZeRO++ hpZ).
        is_persistent: the parameters are too small to be worth gathering and stay whole, as at stage 2.
    """
    if is_persistent and stage == 3:
        stage = 2
    parameter, between, at_step, state = _STAGES[stage]
    others = dict.fromkeys(replicate, PARTIAL)
    return Row(
        unit,
        Placement.of(**{shard: parameter}),
        Placement.of(**{shard: PARTIAL}, **others),
        Placement.of(**{shard: between}, **others),
        Placement.of(**{shard: at_step}),
        Placement.of(**{shard: state}),
        has_second=has_second and stage == 3,
    )
