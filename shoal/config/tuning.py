"""``autotuning`` and ``elasticity``: settings that are found, and batch sizes that many world sizes share."""

from __future__ import annotations

from shoal.config.base import Section, key, section


class ModelInfo(Section):
    """Facts about the model for the tuner."""

    profile: bool = key(False, "find them by a run")
    num_params: int | None = key(None, "number of parameters")
    hidden_size: int | None = key(None, "width")
    num_layers: int | None = key(None, "depth")


class Autotuning(Section):
    """The tuner."""

    enabled: bool = key(False, "search for good settings")
    fast: bool = key(True, "search the stage and the micro-batch only")
    results_dir: str = key("autotuning_results", "folder for results")
    exps_dir: str = key("autotuning_exps", "folder for the experiments' files")
    overwrite: bool = key(True, "run experiments again that have finished")
    start_profile_step: int = key(3, "first step that is measured", ge=0)
    end_profile_step: int = key(5, "last step that is measured", ge=0)
    metric: str = key("throughput", "what counts: latency, throughput or flops")
    metric_path: str | None = key(None, "file that the job writes its measure to")
    tuner_type: str = key("gridsearch", "order of the search: gridsearch, random or model_based")
    tuner_early_stopping: int = key(5, "experiments without gain after which the search ends", ge=1)
    tuner_num_trials: int = key(50, "most experiments", ge=1)
    arg_mappings: dict[str, str] | None = key(None, "which argument of the script sets which key")
    max_train_batch_size: int | None = key(None, "largest global batch")
    min_train_batch_size: int = key(1, "smallest global batch", ge=1)
    max_train_micro_batch_size_per_gpu: int = key(1024, "largest micro-batch", ge=1)
    min_train_micro_batch_size_per_gpu: int = key(1, "smallest micro-batch", ge=1)
    num_tuning_micro_batch_sizes: int = key(3, "micro-batches tried", ge=1)
    mp_size: int = key(1, "model-parallel ranks", ge=1)
    model_info: ModelInfo = section(ModelInfo, "facts about the model")
    model_info_path: str | None = key(None, "file with them")


class Elasticity(Section):
    """A batch size that stays the same while the number of ranks changes."""

    enabled: bool = key(False, "choose such a batch size")
    max_train_batch_size: int = key(2000, "largest global batch; must be written", ge=1)
    micro_batch_sizes: tuple[int, ...] = key((2, 4, 6), "micro-batches to choose from; must be written")
    min_gpus: int = key(1, "fewest ranks", ge=1)
    max_gpus: int = key(10000, "most ranks", ge=1)
    min_time: int = key(0, "minutes between two changes", ge=0)
    prefer_larger_batch: bool = key(True, "of equal choices, the larger batch", alias=("prefer_large_batch",))
    ignore_non_elastic_batch_info: bool = key(False, "ignore the batch sizes given elsewhere")
    version: float = key(
        0.2, "0.1 counts ranks; 0.2 whole nodes, and gives other numbers of ranks a batch of their own"
    )
    num_gpus_per_node: int = key(1, "ranks of a node", ge=1)
    model_parallel_size: int = key(1, "ranks that hold one model", ge=1)
