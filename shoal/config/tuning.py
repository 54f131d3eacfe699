"""``autotuning`` and ``elasticity``: settings found by measurement, and batch sizes that many world sizes share."""

from __future__ import annotations

from shoal.config.base import Section, key


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
    model_parallel_size: int = key(1, "model-parallel ranks of one model", ge=1)
