"""``autotuning``: the search of ``--autotuning tune`` and ``run``, and in its experiments what each has to measure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from shoal.config.base import Section, key
from shoal.config.problems import Problem
from shoal.config.tables import with_unsupported


@with_unsupported("autotuning")
class Autotuning(Section):
    """A search for the fastest stage and micro-batch: the script runs for some steps with each configuration."""

    enabled: bool = key(False, "the run is an experiment: it ends after end_profile_step, and writes what it measured")
    fast: bool = key(True, "search the stage and the micro-batch only; false: then also keys of zero_optimization")
    results_dir: str = key("autotuning_results", "folder for results", min_length=1)
    exps_dir: str = key("autotuning_exps", "folder for the experiments' files", min_length=1)
    overwrite: bool = key(
        True, "run experiments again that have finished; false: take their results, such as after an interruption"
    )
    start_profile_step: int = key(3, "steps that are done before those that are measured", ge=0)
    end_profile_step: int = key(5, "last step that is measured, counted from 0", ge=0)
    metric: Literal["throughput", "latency", "flops"] = key(
        "throughput", "what counts: samples per second, milliseconds of a step, or operations per second of a rank"
    )
    metric_path: str | None = key(
        None, "file to which an experiment writes its metrics; null: autotuning_metric.json in the current folder"
    )
    tuner_type: Literal["gridsearch", "random", "model_based"] = key(
        "gridsearch",
        "order in which keys of zero_optimization are tried: as they are listed, at random, or by a model of the"
        " measured ones",
    )
    tuner_early_stopping: int = key(5, "experiments of a stage without gain after which its search ends", ge=1)
    tuner_num_trials: int = key(50, "most experiments of a stage", ge=1)
    arg_mappings: dict[str, str] | None = key(
        None, 'by key, the argument of the script that is to have its value ("--per_device_train_batch_size")'
    )
    max_train_batch_size: int | None = key(None, "largest global batch; null: there is no limit", ge=1)
    min_train_batch_size: int = key(1, "smallest global batch", ge=1)
    max_train_micro_batch_size_per_gpu: int = key(1024, "largest micro-batch", ge=1)
    min_train_micro_batch_size_per_gpu: int = key(1, "smallest micro-batch", ge=1)
    num_tuning_micro_batch_sizes: int = key(3, "micro-batches tried around the best power of two", ge=1)
    mp_size: int = key(1, "ranks that get the same samples (tensor-parallel and pipeline ranks)", ge=1)


def autotuning_problems(section: Autotuning) -> Iterator[Problem]:
    """Bounds that exclude each other."""
    low, high = section.min_train_micro_batch_size_per_gpu, section.max_train_micro_batch_size_per_gpu
    least, most = section.min_train_batch_size, section.max_train_batch_size
    for name, is_wrong, other in (
        ("end_profile_step", section.end_profile_step < section.start_profile_step, "start_profile_step"),
        ("max_train_micro_batch_size_per_gpu", high < low, "min_train_micro_batch_size_per_gpu"),
        ("max_train_batch_size", most is not None and most < least, "min_train_batch_size"),
    ):
        if is_wrong:
            what = f"{getattr(section, name)} is less than {other} = {getattr(section, other)}."
            yield Problem(f"autotuning.{name}", what, "swap them.")
    if section.metric == "flops" and section.start_profile_step == 0:
        what = "0 with metric flops: the operations of the first step are counted, which takes time."
        yield Problem("autotuning.start_profile_step", what, "write 1 or more.")
