"""``deepspeed.elasticity``: one global batch for many numbers of ranks."""

from __future__ import annotations

from shoal.compat.deepspeed.elasticity import config
from shoal.compat.deepspeed.elasticity.config import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from shoal.compat.deepspeed.elasticity.elastic_agent import DSElasticAgent
from shoal.compat.elastic import compute_elastic_config, elasticity_enabled, ensure_immutable_elastic_config

__all__ = [
    "DSElasticAgent",
    "ElasticityConfig",
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "config",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
]
