"""The engine of a pipeline under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

from shoal.compat.engine import DeepSpeedEngine
from shoal.engine.pipeline import PipelineEngine


class DeepSpeedPipelineEngine(PipelineEngine, DeepSpeedEngine):
    """``deepspeed.PipelineEngine``: ``train_batch`` and ``eval_batch`` beside the names of an engine."""

    pipeline_parallelism = True

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step."""
        return self.gradient_accumulation_steps()

    @property
    def num_stages(self) -> int:
        """Ranks along the pipeline."""
        return self._num_pipeline_ranks

    @property
    def stage_id(self) -> int:
        """This rank's coordinate along ``pp``."""
        return self._pipeline_rank

    @property
    def is_pipe_parallel(self) -> bool:
        """True if there are several pipeline stages."""
        return self._num_pipeline_ranks > 1

    @property
    def is_data_parallel(self) -> bool:
        """True if several ranks have different samples."""
        return self.axes.batch.size > 1

    @property
    def is_model_parallel(self) -> bool:
        """True if each layer is split over ranks."""
        return self.axes.tp is not None

    def reset_activation_shape(self) -> None:
        """Shapes of activations are sent anew with the next batch."""
        self._runner.forget()

    def get_additional_losses(self) -> Any:
        """None: a model has one loss."""
        return None

    def set_has_attention_mask(self, value: bool) -> None:
        """No effect: any tensors cross a boundary."""

    def get_pipeline_parallel_rank(self) -> int:
        """This rank's coordinate along ``pp``."""
        return self._pipeline_rank
