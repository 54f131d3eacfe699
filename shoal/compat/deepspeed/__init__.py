"""Shoal under DeepSpeed's names: what ``import deepspeed`` is after ``install()``.

    import shoal.compat.deepspeed
    shoal.compat.deepspeed.install()        # first of all
    import deepspeed

The modules below give Shoal's own objects the names that DeepSpeed's users and clients know. Those without a file are
made when they are imported; see ``shoal.compat.names``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shoal.compat.absent import absent_class, absent_function
from shoal.compat.absent_modules import KERNELS as _KERNELS
from shoal.compat.absent_modules import SERVING as _SERVING
from shoal.compat.accelerator import get_accelerator
from shoal.compat.deepspeed import comm, utils
from shoal.compat.deepspeed import comm as dist
from shoal.compat.deepspeed.runtime import zero
from shoal.compat.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from shoal.compat.deepspeed.runtime.dataloader import DeepSpeedDataLoader
from shoal.compat.deepspeed.runtime.entry import (
    DeepSpeedOptimizerCallable,
    DeepSpeedSchedulerCallable,
    default_inference_config,
    init_inference,
    initialize,
    set_autotp_mode,
    tp_model_init,
)
from shoal.compat.deepspeed.runtime.lr_schedules import add_tuning_arguments
from shoal.compat.deepspeed.utils import OnDevice, log_dist, logger
from shoal.compat.distribution import alias_version
from shoal.compat.engine import DeepSpeedEngine
from shoal.compat.finder import install, is_installed, uninstall
from shoal.compat.optimizer import DeepSpeedOptimizer
from shoal.compat.small_functions import is_compile_supported
from shoal.compat.table_finder import register, submodules_of
from shoal.config import add_config_arguments

register()

init_distributed = comm.init_distributed

__version__ = version = alias_version()
__version_major__, __version_minor__, __version_patch__ = (
    int(part) for part in __version__.partition("+")[0].split(".")
)
__git_hash__ = git_hash = __git_branch__ = git_branch = "shoal"

DeepSpeedTransformerLayer = absent_class("deepspeed.DeepSpeedTransformerLayer", _KERNELS)
DeepSpeedTransformerConfig = absent_class("deepspeed.DeepSpeedTransformerConfig", _KERNELS)
replace_transformer_layer = absent_function("deepspeed.replace_transformer_layer", _KERNELS)
revert_transformer_layer = absent_function("deepspeed.revert_transformer_layer", _KERNELS)
InferenceEngine = absent_class("deepspeed.InferenceEngine", _SERVING)
DeepSpeedInferenceConfig = absent_class("deepspeed.DeepSpeedInferenceConfig", _SERVING)

# Names of modules that are made from the tables, imported when they are asked for.
_LATER = {
    "DeepSpeedHybridEngine": "runtime.hybrid_engine",
    "PipelineEngine": "runtime.pipe.engine",
    "PipelineModule": "runtime.pipe.module",
    "checkpointing": "runtime.activation_checkpointing",
}
_submodule = submodules_of(__name__)

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedHybridEngine",
    "DeepSpeedInferenceConfig",
    "DeepSpeedOptimizer",
    "DeepSpeedOptimizerCallable",
    "DeepSpeedSchedulerCallable",
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "InferenceEngine",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "__version__",
    "add_config_arguments",
    "add_tuning_arguments",
    "checkpointing",
    "comm",
    "default_inference_config",
    "dist",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "install",
    "is_compile_supported",
    "is_installed",
    "log_dist",
    "logger",
    "ops",
    "replace_transformer_layer",
    "revert_transformer_layer",
    "set_autotp_mode",
    "tp_model_init",
    "uninstall",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    """Import a submodule, or a name of one, when it is asked for (PEP 562)."""
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    return _submodule(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
