"""The names of all values that Shoal logs: one table, the same for every writer. Scripts may log any other name.

Under ``Train/Samples`` are DeepSpeed's names; the engine writes them against the number of samples that all ranks have
seen. The others are of ``shoal train``, against the step.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

# By name, its unit and what it is. "*" stands for a layer's name or an expert's number.
METRICS: dict[str, tuple[str, str]] = {
    "Train/Samples/lr": ("", "learning rate of the first group of parameters"),
    "Train/Samples/train_loss": ("", "mean of rank 0's micro-batches"),
    "Train/Samples/loss_scale": ("", "unless it is 1"),
    "Train/Samples/elapsed_time_ms_forward": ("milliseconds", "of a step, with wall_clock_breakdown"),
    "Train/Samples/elapsed_time_ms_backward": ("milliseconds", "with the reductions"),
    "Train/Samples/elapsed_time_ms_backward_inner": ("milliseconds", "backward without the reductions"),
    "Train/Samples/elapsed_time_ms_backward_allreduce": ("milliseconds", "the reductions"),
    "Train/Samples/elapsed_time_ms_step": ("milliseconds", "clipping and the optimizer"),
    "train/loss": ("nats per token", "mean of all ranks' tokens since the last value"),
    "train/tokens_per_second": ("tokens a second", "of all ranks, without validation and checkpoints"),
    "train/learning_rate": ("", "of the first group of parameters"),
    "train/gradient_norm": ("", "before clipping"),
    "validation/loss": ("nats per token", "mean of the validation sequences"),
    "memory/allocated_bytes": ("bytes", "of rank 0: by the allocator; on CPU those of the process"),
    "memory/peak_bytes": ("bytes", "of rank 0, the most until now"),
    "experts/*/imbalance": ("", "tokens of the most loaded expert of the layer over the mean of its experts"),
    "experts/*/load/*": ("", "an expert's tokens over that mean"),
}


def metric(name: str) -> tuple[str, str] | None:
    """Unit and meaning; None: the name is a script's own."""
    return next((found for pattern, found in METRICS.items() if fnmatchcase(name, pattern)), None)
