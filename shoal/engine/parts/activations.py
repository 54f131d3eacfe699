"""What the config asks for about activations between forward and backward: recomputation, and offload to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from shoal.comm.protocol import Communicator
from shoal.comm.world import World
from shoal.config import Config
from shoal.engine.log import say_on_rank_0
from shoal.engine.parts.part import Part
from shoal.parallel.activations import HostActivations
from shoal.parallel.recompute import (
    Recompute,
    RecomputedBlocks,
    RecomputeSettings,
    current_recompute,
    install,
    is_configured,
    recompute_blocks,
    uninstall,
)
from shoal.parallel.recompute_blocks import BudgetedRecompute, matches_a_module
from shoal.sharding.axes import Axes
from shoal.sharding.placement import Tier
from shoal.text import parse_bytes


class SavedActivations(Part):
    """Recomputation and offload of one engine's activations.

    ``shoal.checkpointing.configure()`` of the script takes precedence over a config that leaves the section out.

    Args:
        more: modules to recompute in addition to those of the section.
        blocks: of this pipeline stage, whose activations are offloaded; empty: those that the model shows.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        world: World,
        axes: Axes,
        more: Sequence[str] = (),
        blocks: Sequence[str] = (),
    ) -> None:
        pp = axes.get("pp")
        self._comm = axes.world
        self._has_stepped = False
        section = config.activation_checkpointing
        settings = RecomputeSettings.of(section)
        self._world = world
        self._is_installed_here = not (is_configured() and settings == RecomputeSettings())
        self.recompute = Recompute(settings) if self._is_installed_here else current_recompute()
        self.notes: list[str] = []  # for start-up
        if self._is_installed_here:
            install(self.recompute, world)
            self.notes = self.recompute.notes()
        self.blocks: RecomputedBlocks | None = None
        asked = [*(section.modules or ()), *more]
        self.budget: BudgetedRecompute | None = None
        if section.memory_budget is not None:
            given = section.memory_budget
            self.budget = BudgetedRecompute(
                self.recompute,
                parse_bytes(given) or 0 if isinstance(given, str) else given,
                section.offload_every,
            )
            self.blocks = self.budget.install(model, asked or None)
        elif asked:
            wanted = asked if pp is None else _of_this_stage(model, asked, pp)
            if wanted or pp is None:
                self.blocks = recompute_blocks(model, wanted, recompute=self.recompute)
        self.offloaded: HostActivations | None = None
        if config.offload_activation.device == "cpu":
            self.offloaded = HostActivations(model, blocks, max_nbytes=config.offload_activation.bytes)
        elif self.budget is not None and section.offload_every:
            self.offloaded = self.budget.offload = HostActivations(model, only=self.budget.blocks)

    @property
    def num_recomputed(self) -> int:
        """Modules that the config has recomputed."""
        return 0 if self.blocks is None else len(self.blocks)

    def at_step(self, was_applied: bool) -> None:
        """After the first step: log what it has shown. Communicates: with ``memory_budget``, what was measured."""
        if self._has_stepped:
            return
        self._has_stepped = True
        note = self.recompute.unused_note() if self.budget is None else self.budget.decide(self._comm)
        if note is not None:
            say_on_rank_0(self._comm.rank, note)

    def saved_nbytes(self) -> Counter[Tier]:
        nbytes = Counter(self.recompute.saved_bytes_by_tier())
        nbytes.update({} if self.offloaded is None else self.offloaded.saved_bytes_by_tier())
        return nbytes

    def before_destroy(self) -> None:
        """Restore the model's own forwards."""
        if self.offloaded is not None:
            self.offloaded.remove()
        if self.blocks is not None:
            self.blocks.remove()
        if self._is_installed_here:
            uninstall(self.recompute, self._world)


def _of_this_stage(model: nn.Module, wanted: Sequence[str], pp: Communicator) -> list[str]:
    """Those of the modules to be recomputed that this pipeline stage has, and those that none has.

    Communicates: the former.
    """
    here = [each for each in wanted if matches_a_module(model, each)]
    anywhere = {each for stage in pp.gather_objects(here, label="recomputed modules") for each in stage}
    return [each for each in wanted if each in here or each not in anywhere]
