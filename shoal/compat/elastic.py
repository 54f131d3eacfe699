"""DeepSpeed's elasticity functions, for schedulers of jobs and for scripts: dicts in, numbers out.

The arithmetic is ``shoal.config.elastic``'s; this module adds DeepSpeed's signatures and environment variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.compat.environment import launched_ranks
from shoal.config import examine
from shoal.config.elastic import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    shared_batch,
)
from shoal.config.schema import Elasticity
from shoal.text import version_numbers

MINIMUM_DEEPSPEED_VERSION = "0.3.8"


def section_of(given: Mapping[str, Any]) -> Elasticity:
    """The section, checked. Raises: ElasticityConfigError: all problems of the section."""
    seen = examine({"elasticity": dict(given)}, check_supported=False)
    if seen.problems or seen.config is None:
        raise ElasticityConfigError("; ".join(str(problem) for problem in seen.problems), do="fix the section.")
    return seen.config.elasticity


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """True if the config enables elasticity."""
    return bool((ds_config.get("elasticity") or {}).get("enabled", False))


def compute_elastic_config(
    ds_config: dict[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int | None]:
    """The global batch of an elastic job, and the numbers of data-parallel ranks that share it.

    Args:
        world_size: the job's ranks, those of one model counted as well; 0: any (version 0.1), or ``WORLD_SIZE``.
        return_microbatch: give the micro-batch too; of ``WORLD_SIZE`` ranks where ``world_size`` is 0.

    Returns: global batch, numbers of ranks; with ``world_size`` or ``return_microbatch`` the micro-batch as well.
    Raises: ElasticityConfigError: the section is missing, off or wrong. ElasticityIncompatibleWorldSize: that number of
        ranks does not share the batch. ElasticityError: the version is too old.
    """
    if not isinstance(ds_config, dict):
        raise ValueError(f"ds_config is a {type(ds_config).__name__}, not a dict: {ds_config!r}")
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError(
            'the configuration has no section "elasticity", or it is not enabled.',
            do='write "elasticity": {"enabled": true, "max_train_batch_size": ..., "micro_batch_sizes": [...]}.',
        )
    section = section_of(ds_config["elasticity"])
    if version_numbers(target_deepspeed_version) < version_numbers(MINIMUM_DEEPSPEED_VERSION):
        raise ElasticityError(
            f"target_deepspeed_version {target_deepspeed_version} is older than {MINIMUM_DEEPSPEED_VERSION}, which"
            " elasticity needs."
        )
    ranks = world_size
    if not ranks and (return_microbatch or section.version == 0.2):
        ranks = launched_ranks()
        if not ranks:
            raise ElasticityConfigError(
                "the number of ranks is not known.", do="pass world_size, or set WORLD_SIZE in the environment."
            )
    if ranks % section.model_parallel_size:
        raise ElasticityIncompatibleWorldSize(
            f"{ranks} ranks do not divide by model_parallel_size {section.model_parallel_size}."
        )
    batch = shared_batch(section, ranks // section.model_parallel_size or None)
    if world_size or return_microbatch:
        return batch.total, list(batch.ranks), batch.micro
    return batch.total, list(batch.ranks)
