"""What scripts ask an engine for and a part has: calls of the parts that techniques join its steps with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.data.curriculum import CurriculumScheduler
from shoal.data.curriculum_loader import CurriculumLoader
from shoal.data.random_ltd import RandomLTDScheduler
from shoal.engine.parts.experts import ExpertBalance
from shoal.engine.parts.random_ltd import RandomLayerTokenDrop
from shoal.engine.parts.sequence import SequenceRanks
from shoal.engine.state import EngineState
from shoal.errors import UsageError
from shoal.parallel.sequence.context import SequenceContext


class PartShortcuts(EngineState):
    """The calls of parts that every script may make, whether the engine has the part or not."""

    @property
    def sequence_context(self) -> SequenceContext | None:
        """How sequences are spread over ``sp`` and ``cp`` ranks; None without them."""
        ranks = self.part(SequenceRanks)
        return None if ranks is None else ranks.context

    def expert_load(self) -> dict[str, list[int]]:
        """The tokens that each expert got in the last step, by layer: of all micro-batches and ranks. Every rank calls.

        Communicates: one all-reduce of a number for each expert. Order: blocks the host.
        """
        balance = self.part(ExpertBalance)
        return {} if balance is None else balance.load()

    def get_pld_theta(self) -> float | None:
        """The share of layers that the next training forward keeps; None without ``progressive_layer_drop``."""
        drop = self.run_state.curriculum.layer_drop
        return None if drop is None else drop.get_theta()

    @property
    def random_ltd_scheduler(self) -> RandomLTDScheduler | None:
        """How many tokens the layers of random-LTD keep; None without it."""
        dropping = self.part(RandomLayerTokenDrop)
        return None if dropping is None else dropping.scheduler

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """A function of each batch of a curriculum by measures, such as one that shortens it to the difficulty.

        Args:
            post_process_func: gets the batch and ``{"current_difficulties", "curriculum_step", "consumed_samples"}``.

        Raises: UsageError: the engine has no loader with such a curriculum.
        """
        loader = self.training_dataloader
        if not isinstance(loader, CurriculumLoader):
            raise UsageError(
                "a function of the curriculum's batches was given, and there is no loader with a curriculum by"
                " measures.",
                do="pass training_data to initialize(), with data_efficiency.data_sampling.curriculum_learning.",
                code="curriculum-post-process",
            )
        loader.post_process = post_process_func

    @property
    def curriculum_scheduler_legacy(self) -> CurriculumScheduler | None:
        """The schedule of ``curriculum_learning`` in the config; None without it."""
        return self.run_state.curriculum.scheduler

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Mapping[str, Callable[[int], int]] | Callable[[int], int]
    ) -> None:
        """The function of a curriculum whose ``schedule_type`` is ``custom``; before the first forward.

        Args:
            schedule_func_dict: by ``curriculum_type``, or by measure; or the function alone: from a step, counted from
                1, to a difficulty.

        Raises: UsageError: the config has no such curriculum, or its function is not among them.
        """
        if isinstance(loader := self.training_dataloader, CurriculumLoader):
            loader.set_custom_schedule(schedule_func_dict)
            return
        self.run_state.curriculum.set_custom_schedule(schedule_func_dict)
