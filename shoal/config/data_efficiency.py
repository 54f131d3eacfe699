"""``data_efficiency``: which samples a step takes (curriculum by measures, batches by tokens), and random-LTD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from shoal.config.base import Section, key, section
from shoal.config.problems import Problem
from shoal.config.schedule import ScheduleConfig, schedule_problems
from shoal.config.tables import with_unsupported


class CurriculumMetric(Section):
    """One measure of difficulty, and how difficult the samples of a step may be by it."""

    index_to_sample_path: str | None = key(
        None, "file without suffix, from `shoal data analyse`: the samples of each value; or of each percentile"
    )
    index_to_metric_path: str | None = key(None, "file without suffix: the values; for difficulty_type value")
    difficulty_type: Literal["value", "percentile"] = key("value", "what the schedule gives: a value, or a percentile")
    clustering_type: Literal["schedule_based", "single_cluster"] = key(
        "schedule_based", "single_cluster: all samples from the start; the script shortens them to the difficulty"
    )
    min_difficulty: int | None = key(None, "difficulty at the start")
    max_difficulty: int | None = key(None, "difficulty at the end")
    schedule_type: str | None = key(None, "fixed_linear, fixed_root, fixed_discrete or custom")
    schedule_config: ScheduleConfig = section(ScheduleConfig, "how difficulty grows")


@with_unsupported("data_efficiency.data_sampling.curriculum_learning")
class SampleCurriculum(Section):
    """Easy samples first, by measures that an analysis has written."""

    enabled: bool = key(False, "choose each step's samples by difficulty")
    curriculum_metrics: dict[str, CurriculumMetric] = key({}, "measures of difficulty, by name")


class DynamicBatching(Section):
    """Batches of as many samples as fit in a number of tokens."""

    enabled: bool = key(False, "batch by tokens")
    max_tokens: int | None = key(None, "most tokens of a micro-batch", ge=1)
    metrics_path: str | None = key(None, "folder of the analysis that has the samples' lengths (seqlen)")
    lr_scaling_method: Literal["linear", "sqrt", "none"] = key(
        "linear", "learning rate by the number of samples of a batch"
    )
    min_batch_size: int = key(1, "fewest samples of a micro-batch", ge=1)
    max_batch_size: int | None = key(None, "most samples of a micro-batch", ge=1)
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = key(
        "dataloader", "order of the samples before they are batched: as they are, at random, by length"
    )
    verbose: bool = key(False, "log each batch")


class DataSampling(Section):
    """Which samples a step takes."""

    enabled: bool = key(False, "choose the samples")
    num_epochs: int = key(1000, "passes over the data after which the loader ends", ge=1)
    num_workers: int = key(0, "processes that load", ge=0)
    pin_memory: bool = key(False, "put batches in page-locked memory")
    curriculum_learning: SampleCurriculum = section(SampleCurriculum, "easy samples first")
    dynamic_batching: DynamicBatching = section(DynamicBatching, "batches by tokens")


class KeptTokensConfig(Section):
    """How the number of kept tokens grows."""

    require_steps: int | None = key(None, "steps until max_value is reached", ge=1)
    seq_per_step: int | None = key(None, "the number is a multiple of this", ge=1)


class KeptTokens(Section):
    """How many tokens of a sequence a layer keeps."""

    min_value: int | None = key(None, "tokens at the start", ge=1)
    max_value: int | None = key(None, "tokens at the end: the sequence length", ge=1)
    schedule_type: Literal["fixed_linear"] = key("fixed_linear", "it grows by the same number each step")
    schedule_config: KeptTokensConfig = section(KeptTokensConfig, "how fast")


@with_unsupported("data_efficiency.data_routing.random_ltd")
class RandomLTD(Section):
    """Layers that run on a random part of the tokens (random layer-token drop)."""

    enabled: bool = key(False, "run layers on a part of the tokens")
    total_layer_num: int | None = key(None, "layers of the model; null: its blocks", ge=1)
    random_ltd_layer_num: int | None = key(None, "how many of them drop tokens, as a check; null: those listed", ge=0)
    random_ltd_layer_id: tuple[int, ...] | None = key(
        None, "which, counted from 0; null: all but the first and the last"
    )
    model_mask_name: str | None = key(None, "the layers' argument that is the attention mask; null: attention_mask")
    model_type: Literal["decoder", "encoder"] = key("decoder", "what the model is; kept tokens stay in order in both")
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] = key(
        "batch_seq_dim", "dimensions of the layers' input"
    )
    random_ltd_schedule: KeptTokens = section(KeptTokens, "how many tokens are kept")


class DataRouting(Section):
    """Which tokens pass which layers."""

    enabled: bool = key(False, "route tokens")
    random_ltd: RandomLTD = section(RandomLTD, "layers that run on a part of the tokens")


class DataEfficiency(Section):
    """Less data, or less work for it, for the same loss."""

    enabled: bool = key(False, "the whole section's switch")
    seed: int = key(1234, "seed of the samples and tokens that are chosen")
    data_sampling: DataSampling = section(DataSampling, "which samples a step takes")
    data_routing: DataRouting = section(DataRouting, "which tokens pass which layers")

    @property
    def curriculum(self) -> SampleCurriculum | None:
        """The curriculum by measures; None: it is off."""
        curriculum = self.data_sampling.curriculum_learning
        return curriculum if curriculum.enabled else None

    @property
    def random_ltd(self) -> RandomLTD | None:
        """None: it is off."""
        return self.data_routing.random_ltd if self.data_routing.random_ltd.enabled else None


def data_efficiency_problems(section: DataEfficiency) -> Iterator[Problem]:
    """What is wrong in the section by itself."""
    top, sampling, routing = "data_efficiency", section.data_sampling, section.data_routing
    batching = sampling.dynamic_batching
    for path, is_on, outer in (
        (f"{top}.data_sampling.curriculum_learning", section.curriculum is not None, sampling.enabled),
        (f"{top}.data_sampling.dynamic_batching", batching.enabled, sampling.enabled),
        (f"{top}.data_routing.random_ltd", section.random_ltd is not None, routing.enabled),
    ):
        if is_on and not (outer and section.enabled):
            switch = f"{top}.enabled" if outer else f"{path.rpartition('.')[0]}.enabled"
            yield Problem(f"{path}.enabled", f"true, and {switch} is false.", f"set {switch} to true.")
    if section.curriculum is not None:
        path = f"{top}.data_sampling.curriculum_learning.curriculum_metrics"
        if not section.curriculum.curriculum_metrics:
            yield Problem(path, "empty: there is nothing to choose samples by.", "name a measure.")
        for name, metric in section.curriculum.curriculum_metrics.items():
            yield from _metric_problems(f"{path}.{name}", metric)
    if section.curriculum is not None and batching.enabled:
        yield Problem(
            f"{top}.data_sampling.dynamic_batching.enabled",
            "true, and curriculum_learning too: both choose the samples of a batch.",
            "disable one of them.",
        )
    if batching.enabled and batching.max_tokens is None:
        yield Problem(f"{top}.data_sampling.dynamic_batching.max_tokens", "missing.", "write the most tokens.")
    if section.random_ltd is not None:
        yield from _random_ltd_problems(f"{top}.data_routing.random_ltd", section.random_ltd)


def _metric_problems(path: str, metric: CurriculumMetric) -> Iterator[Problem]:
    for name, what, do in schedule_problems(metric.model_dump()):
        yield Problem(f"{path}.{name}", what, do)
    if metric.clustering_type == "schedule_based":
        needed = ["index_to_sample_path", *(["index_to_metric_path"] if metric.difficulty_type == "value" else [])]
        for name in needed:
            if getattr(metric, name) is None:
                yield Problem(f"{path}.{name}", "missing.", "name the file that `shoal data analyse` has written.")
    if metric.difficulty_type == "percentile" and (metric.max_difficulty or 0) > 100:
        yield Problem(f"{path}.max_difficulty", f"{metric.max_difficulty}, of 100 percentiles.", "write at most 100.")


def _random_ltd_problems(path: str, ltd: RandomLTD) -> Iterator[Problem]:
    kept = ltd.random_ltd_schedule
    for name, value in (
        ("min_value", kept.min_value),
        ("max_value", kept.max_value),
        ("schedule_config.require_steps", kept.schedule_config.require_steps),
        ("schedule_config.seq_per_step", kept.schedule_config.seq_per_step),
    ):
        if value is None:
            yield Problem(f"{path}.random_ltd_schedule.{name}", "missing.", "write it.")
    if kept.min_value is not None and kept.max_value is not None and kept.min_value > kept.max_value:
        yield Problem(
            f"{path}.random_ltd_schedule.min_value",
            f"{kept.min_value}, which is more than max_value = {kept.max_value}.",
            "swap them.",
        )
    layers = ltd.random_ltd_layer_id
    if layers is not None and ltd.random_ltd_layer_num not in (None, len(layers)):
        yield Problem(
            f"{path}.random_ltd_layer_num",
            f"{ltd.random_ltd_layer_num}, and random_ltd_layer_id lists {len(layers)}.",
            "leave random_ltd_layer_num out.",
        )
    total = ltd.total_layer_num
    if total is not None and (wrong := [layer for layer in layers or () if not 0 <= layer < total]):
        yield Problem(f"{path}.random_ltd_layer_id", f"{wrong} of {total} layers.", "count from 0.")
