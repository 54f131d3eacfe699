"""``deepspeed.runtime.data_pipeline.curriculum_scheduler``: how difficulty grows."""

from __future__ import annotations

from shoal.data.curriculum import CurriculumScheduler

__all__ = ["CurriculumScheduler"]
