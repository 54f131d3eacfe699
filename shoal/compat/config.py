"""``deepspeed.runtime.config``: the configuration, checked by Shoal, and functions that read one value of a dict.

    name                      where the value is             without it
    get_gradient_clipping     gradient_clipping              Shoal's default of that key
    get_optimizer_params      optimizer.params, with a type  None
    get_float16_config        fp16, a section                the section's defaults

Those of one value check nothing: that is ``DeepSpeedConfig``'s. Those that build a section check its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal.comm.world import current_world
from shoal.compat.assertions import be_assertion
from shoal.compat.config_models import DeepSpeedFP16Config, DeepSpeedZeroConfig, get_bfloat16_config
from shoal.compat.monitors import DeepSpeedMonitorConfig, get_monitor_config
from shoal.config import Config, load
from shoal.config.batch import MICRO, STEPS, TRAIN, Batch, BatchMismatch, solve
from shoal.config.schema import Schema
from shoal.engine.settings import DTYPES
from shoal.errors import ConfigError

ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adagrad", "adam", "adamw"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
DEEPSPEED_OPTIMIZERS = ["adagrad", "adam", "adamw", "lamb", "lion", "muon"]


class BatchSizeError(ConfigError, AssertionError):
    """Batch sizes that contradict each other. Also an AssertionError, since DeepSpeed asserts it."""

    code = "config-batch"


class DeepSpeedConfig:
    """A checked configuration: its keys are attributes.

    Args:
        config: a path, a dict, JSON text or base64.
        mpu: says how many data-parallel ranks share the batch; None: all ranks.

    Raises: ConfigError: every problem at once; an AssertionError too, since DeepSpeed asserts some.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self.world_size: int = mpu.get_data_parallel_world_size() if mpu is not None else current_world().size
        try:
            self.checked: Config = load(
                config,
                world_size=self.world_size,
                replaced=("optimizer", "scheduler"),  # a client may pass its own to initialize()
            )
        except ConfigError as error:
            be_assertion(error)
            raise

    def _configure_train_batch_size(self) -> None:
        """Compute those of the three batch sizes that are None, after they were set as attributes.

        Raises: BatchSizeError: they do not fit, or neither the global batch nor the micro-batch is given.
        """
        given = Batch(*(getattr(self, name) for name in (TRAIN, MICRO, STEPS)))
        try:
            if given.train is None and given.micro is None:
                raise BatchMismatch(f"neither {TRAIN} nor {MICRO} is given.", "give one of them.")
            if any(size is not None and size < 1 for size in (given.train, given.micro, given.accumulation)):
                raise BatchMismatch(f"{given} is not of positive sizes.", "give sizes of at least 1.")
            solved = solve(given, self.world_size)
        except BatchMismatch as problem:
            raise BatchSizeError(str(problem), do=problem.do) from None
        for name, size in zip((TRAIN, MICRO, STEPS), (solved.train, solved.micro, solved.accumulation), strict=True):
            setattr(self, name, size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "checked":
            raise AttributeError(name)
        checked = self.checked
        if name == "_param_dict":
            return checked.raw
        if name == "monitor_config":
            return DeepSpeedMonitorConfig(checked.tensorboard, checked.wandb, checked.csv_monitor, checked.comet)
        if name == "zero_config":
            return checked.zero_optimization
        if name in type(checked).model_fields or hasattr(type(checked), name):
            return getattr(checked, name)
        raise AttributeError(f"the configuration has no key {name!r}")


# functions that read one value

# Keys at the top level: ``get_`` and the key is the name of the function.
KEYS = (
    "dataloader_drop_last dump_state gradient_accumulation_steps gradient_clipping gradient_predivide_factor log_level"
    " managed_gradient_accumulation memory_breakdown prescale_gradients steps_per_print train_batch_size"
    " train_micro_batch_size_per_gpu wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
)
# function -> path of the value, the value without it
PATHS: dict[str, tuple[str, Any]] = {
    "get_checkpoint_parallel_write_pipeline": ("parallel_write.pipeline_stage", False),
    "get_data_efficiency_enabled": ("data_efficiency.enabled", False),
    "get_disable_allgather": ("disable_allgather", False),
    "get_disable_python_gc": ("disable_python_gc", False),
    "get_expert_data_topo_config": ("use_data_before_expert_parallelism", False),
    "get_lower_precision_safe_modules": ("torch_autocast.lower_precision_safe_modules", None),
    "get_optimizer_legacy_fusion": ("optimizer.legacy_fusion", False),
    "get_optimizer_name": ("optimizer.type", None),
    "get_scheduler_name": ("scheduler.type", None),
    "get_torch_autocast_enabled": ("torch_autocast.enabled", False),
}
# function -> a section, whose copy it returns
SECTIONS = {"get_checkpoint_params": "checkpoint", "get_data_types_params": "data_types"}
# function -> path of a section that it builds
BUILT = {
    "get_expert_parallel_config": "expert_parallel",
    "get_hybrid_engine_config": "hybrid_engine",
    "get_tensor_parallel_config": "tensor_parallel",
    "get_timers_config": "timers.throughput",
}
# function -> path of a value that counts only with a type
TYPED = {
    "get_optimizer_params": "optimizer.params",
    "get_optimizer_gradient_clipping": "optimizer.params.max_grad_norm",
    "get_scheduler_params": "scheduler.params",
}
PIPELINE = {
    "stages": "auto",
    "partition": "best",
    "seed_layers": False,
    "activation_checkpoint_interval": 0,
    "pipe_partitioned": True,
    "grad_partitioned": True,
}
OPERATIONS = ("mean", "sum")
VALIDATION_MODES = ("Warn", "Ignore", "Fail")

Reader = Callable[[Mapping[str, Any]], Any]


def _at(given: Mapping[str, Any], path: str, default: Any = None) -> Any:
    value: Any = given
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def _reader(name: str, read: Reader, doc: str) -> Reader:
    def get(param_dict: Mapping[str, Any]) -> Any:
        return read(param_dict)

    get.__name__ = get.__qualname__ = name
    get.__module__ = "deepspeed.runtime.config"
    get.__doc__ = doc
    return get


def _of_path(name: str, path: str, default: Any) -> Reader:
    return _reader(name, lambda given: _at(given, path, default), f"``{path}``; {default!r} without it.")


def _of_section(name: str, section: str) -> Reader:
    return _reader(name, lambda given: dict(_at(given, section, {})), f"A copy of the section ``{section}``.")


def _typed(name: str, path: str) -> Reader:
    kind = f"{path.partition('.')[0]}.type"
    read: Reader = lambda given: _at(given, path) if _at(given, kind) is not None else None  # noqa: E731
    return _reader(name, read, f"``{path}``; None without it, or without ``{kind}``.")


def _built(given: Mapping[str, Any], path: str) -> Any:
    model: Any = Schema
    for name in path.split("."):
        model = model.model_fields[name].annotation
    return model(**_at(given, path, {}))


def _building(name: str, path: str) -> Reader:
    return _reader(name, lambda given: _built(given, path), f"The section ``{path}``, checked.")


def get_aio_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``aio`` as a dict, with its defaults. Keys that DeepSpeed does not know are left out."""
    defaults, given = _built({}, "aio").model_dump(), _at(param_dict, "aio", {})
    return {name: given.get(name, value) for name, value in defaults.items()}


def get_data_efficiency_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``data_efficiency`` as a dict, with its defaults."""
    values: dict[str, Any] = _built(param_dict, "data_efficiency").model_dump()
    return values


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """The section ``fp16``. Raises: pydantic.ValidationError: unknown keys, and values that cannot be."""
    return DeepSpeedFP16Config(**_at(param_dict, "fp16", {}))


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """The section ``zero_optimization``; true is stage 1. Raises: ConfigError: every problem at once."""
    given = _at(param_dict, "zero_optimization", {})
    return DeepSpeedZeroConfig(**({"stage": int(given)} if isinstance(given, bool) else given))


def get_checkpoint_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``checkpoint`` as DeepSpeed's engine reads it. Raises: ConfigError: no such ``tag_validation``."""
    section = _at(param_dict, "checkpoint", {})
    serialization, writer = section.get("checkpoint_serialization", True), section.get("writer")
    mode = get_checkpoint_tag_validation_mode(section)
    return {"tag_validation": mode, "checkpoint_serialization": serialization, "writer": writer}


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """A value of a dict, or its default."""
    return param_dict.get(param_name, param_default_value)


def refuse_duplicates(ordered_pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An ``object_pairs_hook`` for ``json.load``. Raises: ConfigError: a key is there twice."""
    values = dict(ordered_pairs)
    if len(values) < len(ordered_pairs):
        names = [name for name, _ in ordered_pairs]
        twice = [name for name in values if names.count(name) > 1]
        raise ConfigError(
            f"Duplicate keys in DeepSpeed config: {twice}", do="keep one of each.", code="config-duplicate-key"
        )
    return values


def _invalid(key: str, supported: tuple[str, ...], value: Any) -> ConfigError:
    return ConfigError(f"Invalid {key}: {value!r}.", where=key, do=f"use one of: {', '.join(supported)}.")


def get_gradient_allreduce_op(param_dict: Mapping[str, Any]) -> str:
    """How the ranks' gradients are combined. Raises: ConfigError: not by mean or sum."""
    value = _at(param_dict, "gradient_allreduce_op", OPERATIONS[0])
    if not isinstance(value, str) or value.lower() not in OPERATIONS:
        raise _invalid("gradient_allreduce_op", OPERATIONS, value)
    return value.lower()


def _dtype(key: str, value: Any, default: torch.dtype | None) -> torch.dtype | None:
    if value is None:
        return default
    name = str(value).lower().removeprefix("torch.")
    if name not in DTYPES:
        raise _invalid(key, ("fp32", "fp16", "bf16"), value)
    return DTYPES[name]


def get_communication_data_type(
    param_dict: Mapping[str, Any],
    comm_type: str = "communication_data_type",
    comm_data_type_default: torch.dtype | None = None,
) -> torch.dtype | None:
    """The dtype that gradients are reduced in. Raises: ConfigError: it is not one of fp32, fp16 and bf16."""
    return _dtype(comm_type, _at(param_dict, comm_type), comm_data_type_default)


def get_torch_autocast_dtype(param_dict: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of torch.autocast. Raises: ConfigError: it is not a name of a floating-point format."""
    return _dtype("torch_autocast.dtype", _at(param_dict, "torch_autocast.dtype"), None)


def get_checkpoint_tag_validation_mode(checkpoint_params: Mapping[str, Any]) -> str:
    """What is done where ranks save under different tags, in capitals. Raises: ConfigError: there is no such mode."""
    mode = str(_at(checkpoint_params, "tag_validation", VALIDATION_MODES[0])).upper()
    if mode not in map(str.upper, VALIDATION_MODES):
        raise _invalid("checkpoint.tag_validation", VALIDATION_MODES, mode)
    return mode


def get_pipeline_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``pipeline`` with DeepSpeed's defaults."""
    return {**PIPELINE, **_at(param_dict, "pipeline", {})}


READERS: dict[str, Reader] = {
    **{f"get_{key}": _of_path(f"get_{key}", key, Schema.model_fields[key].default) for key in KEYS.split()},
    **{name: _of_path(name, path, default) for name, (path, default) in PATHS.items()},
    **{name: _of_section(name, section) for name, section in SECTIONS.items()},
    **{name: _typed(name, path) for name, path in TYPED.items()},
    **{name: _building(name, path) for name, path in BUILT.items()},
}
globals().update(READERS)

__all__ = [
    *READERS,
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "DEEPSPEED_OPTIMIZERS",
    "DeepSpeedConfig",
    "LAMB_OPTIMIZER",
    "LION_OPTIMIZER",
    "MUON_OPTIMIZER",
    "get_aio_config",
    "get_bfloat16_config",
    "get_checkpoint_config",
    "get_checkpoint_tag_validation_mode",
    "get_communication_data_type",
    "get_data_efficiency_config",
    "get_float16_config",
    "get_gradient_allreduce_op",
    "get_monitor_config",
    "get_pipeline_config",
    "get_scalar_param",
    "get_torch_autocast_dtype",
    "get_zero_config",
]
