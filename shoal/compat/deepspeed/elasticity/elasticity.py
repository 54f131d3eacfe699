"""``deepspeed.elasticity.elasticity``: the functions."""

from __future__ import annotations

from shoal.compat.elastic import compute_elastic_config, elasticity_enabled, ensure_immutable_elastic_config

__all__ = ["compute_elastic_config", "elasticity_enabled", "ensure_immutable_elastic_config"]
