"""``deepspeed.elasticity.config``: the section, and its errors."""

from __future__ import annotations

from shoal.compat.elastic import ElasticityConfig
from shoal.config.elastic import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize

__all__ = ["ElasticityConfig", "ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize"]
