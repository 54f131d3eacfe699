"""``data_efficiency``, ``curriculum_learning``, ``progressive_layer_drop``, ``eigenvalue``: what is trained on when."""

from __future__ import annotations

from shoal.config.base import Section, key, section


class ScheduleConfig(Section):
    """How difficulty grows."""

    total_curriculum_step: int | None = key(None, "steps until full difficulty")
    difficulty_step: int | None = key(None, "difficulty is a multiple of this")
    root_degree: int | None = key(None, "degree of the root, for fixed_root")
    difficulty: tuple[int, ...] | None = key(None, "difficulties, for fixed_discrete")
    max_step: tuple[int, ...] | None = key(None, "the last step of each of them")


class CurriculumLearning(Section):
    """Short sequences first (the older form)."""

    enabled: bool = key(False, "begin with short sequences")
    curriculum_type: str = key("seqlen", "what grows")
    min_difficulty: int | None = key(None, "length at the start")
    max_difficulty: int | None = key(None, "length at the end")
    schedule_type: str | None = key(None, "fixed_linear, fixed_root, fixed_discrete or custom")
    schedule_config: ScheduleConfig = section(ScheduleConfig, "how the length grows")


class ProgressiveLayerDropSection(Section):
    """Layers that are skipped at random, more of them as training goes on."""

    enabled: bool = key(False, "skip layers at random")
    theta: float = key(1.0, "share of layers that run at the end", ge=0, le=1)
    gamma: float = key(0.001, "how fast that share is reached", ge=0)
