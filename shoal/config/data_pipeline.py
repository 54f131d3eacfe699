"""``data_efficiency``, ``curriculum_learning``, ``progressive_layer_drop``, ``eigenvalue``: what is trained on when."""

from __future__ import annotations

from shoal.config.base import Section, key, section


class ScheduleConfig(Section):
    """How difficulty grows."""

    total_curriculum_step: int | None = key(None, "steps until full difficulty")
    difficulty_step: int | None = key(None, "difficulty is a multiple of this")
    root_degree: int | None = key(None, "degree of the root, for fixed_root")
    difficulty: tuple[int, ...] | None = key(None, "difficulties, for fixed_discrete")
    max_step: tuple[int, ...] | None = key(None, "the step until which each of them holds")


class CurriculumMetric(Section):
    """One measure of difficulty."""

    index_to_sample_path: str | None = key(None, "file: samples by measure")
    index_to_metric_path: str | None = key(None, "file: measures by sample")
    difficulty_type: str | None = key(None, "value or percentile")
    clustering_type: str | None = key(None, "schedule_based or single_cluster")
    min_difficulty: int | None = key(None, "difficulty at the start")
    max_difficulty: int | None = key(None, "difficulty at the end")
    schedule_type: str | None = key(None, "fixed_linear, fixed_root, fixed_discrete or custom")
    schedule_config: ScheduleConfig = section(ScheduleConfig, "how difficulty grows")


class SamplingCurriculum(Section):
    """Easy samples first."""

    enabled: bool = key(False, "sample by difficulty")
    data_cluster_path: str | None = key(None, "folder for the index")
    curriculum_metrics: dict[str, CurriculumMetric] = key({}, "measures of difficulty, by name")


class DynamicBatching(Section):
    """Batches of so many tokens, not of so many samples."""

    enabled: bool = key(False, "batch by tokens")
    max_tokens: int | None = key(None, "tokens of a batch")
    metrics_path: str | None = key(None, "file with the samples' lengths")
    lr_scaling_method: str = key("linear", "learning rate by batch size: linear, sqrt or none")
    min_batch_size: int = key(1, "fewest samples", ge=1)
    max_batch_size: int | None = key(None, "most samples")
    sequence_picking_order: str = key("dataloader", "random, seqlen or dataloader")
    verbose: bool = key(False, "print each batch")


class DataSampling(Section):
    """Which samples."""

    enabled: bool = key(False, "choose the samples")
    num_epochs: int = key(1000, "most passes over the data", ge=1)
    num_workers: int = key(0, "processes that load", ge=0)
    pin_memory: bool = key(False, "page-lock batches")
    curriculum_learning: SamplingCurriculum = section(SamplingCurriculum, "easy samples first")
    dynamic_batching: DynamicBatching = section(DynamicBatching, "batches of so many tokens")


class LtdScheduleConfig(Section):
    """How the number of kept tokens grows."""

    require_steps: int | None = key(None, "steps until all tokens are kept")
    seq_per_step: int | None = key(None, "tokens added at a time")


class LtdSchedule(Section):
    """How many tokens a layer keeps."""

    min_value: int | None = key(None, "tokens kept at the start")
    max_value: int | None = key(None, "tokens kept at the end")
    schedule_type: str | None = key(None, "fixed_linear")
    schedule_config: LtdScheduleConfig = section(LtdScheduleConfig, "how that number grows")


class LayerTokenLr(Section):
    """Learning rate by tokens that the layers have seen."""

    enabled: bool = key(False, "schedule by tokens")
    total_layer_tokens: int | None = key(None, "tokens of the whole run")
    warmup_type: str | None = key(None, "linear")
    warmup_layer_tokens: int | None = key(None, "tokens of warm-up")


class RandomLtd(Section):
    """Layers that skip random tokens."""

    enabled: bool = key(False, "drop random tokens in layers")
    total_layer_num: int | None = key(None, "layers of the model")
    random_ltd_layer_num: int | None = key(None, "layers that drop tokens")
    random_ltd_layer_id: tuple[int, ...] | None = key(None, "which layers")
    model_mask_name: str | None = key(None, "the model's argument for the attention mask")
    model_type: str | None = key(None, "decoder or encoder")
    hidden_state_order: str | None = key(None, "order of dimensions: batch_seq_dim or seq_batch_dim")
    random_ltd_schedule: LtdSchedule = section(LtdSchedule, "how many tokens a layer keeps")
    layer_token_lr_schedule: LayerTokenLr = section(LayerTokenLr, "learning rate by tokens")


class DataRouting(Section):
    """Which tokens pass which layers."""

    enabled: bool = key(False, "route tokens")
    random_ltd: RandomLtd = section(RandomLtd, "layers that skip random tokens")


class DataEfficiency(Section):
    """Less data for the same loss."""

    enabled: bool = key(False, "the whole section's switch")
    seed: int = key(1234, "seed of the sampling")
    data_sampling: DataSampling = section(DataSampling, "which samples")
    data_routing: DataRouting = section(DataRouting, "which tokens pass which layers")


class CurriculumLearning(Section):
    """Short sequences first (the older form)."""

    enabled: bool = key(False, "begin with short sequences")
    curriculum_type: str = key("seqlen", "what grows")
    min_difficulty: int | None = key(None, "length at the start")
    max_difficulty: int | None = key(None, "length at the end")
    schedule_type: str | None = key(None, "fixed_linear, fixed_root, fixed_discrete or custom")
    schedule_config: ScheduleConfig = section(ScheduleConfig, "how the length grows")


class ProgressiveLayerDrop(Section):
    """Layers that are skipped at random, more of them as training goes on."""

    enabled: bool = key(False, "skip layers at random")
    theta: float = key(1.0, "share of layers kept at the end", ge=0, le=1)
    gamma: float = key(0.001, "how fast that share is reached", ge=0)


class Eigenvalue(Section):
    """Largest eigenvalue of each layer's Hessian, for quantization."""

    enabled: bool = key(False, "compute eigenvalues")
    verbose: bool = key(False, "print them")
    max_iter: int = key(100, "iterations", ge=1)
    tol: float = key(1e-2, "relative change at which iterating ends")
    stability: float = key(1e-6, "added to the denominator")
    gas_boundary_resolution: int = key(1, "steps between two computations", ge=1)
    layer_name: str = key("bert.encoder.layer", "name of the list of layers")
    layer_num: int = key(0, "number of layers; 0: find it", ge=0)
