"""``deepspeed.runtime.zero.leaf_module_config``: the section ``zero_optimization.leaf_module``."""

from __future__ import annotations

from shoal.config.zero import LeafModule as DeepSpeedZeroLeafModuleConfig

__all__ = ["DeepSpeedZeroLeafModuleConfig"]
