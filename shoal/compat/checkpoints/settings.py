"""What of a DeepSpeed configuration decides how the files of a checkpoint are laid out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shoal.checkpoint.formats.torch_writing import ClassInstance
from shoal.errors import CheckpointError

_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_PRECISIONS = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class DeepSpeedSettings:
    """Of the run that will load the checkpoint.

    Args:
        dtype: that the model computes in.
        param_alignment: elements, of a parameter in a flat tensor of stages 1 and 2.
        clip_grad: None: the run's own. DeepSpeed takes the checkpoint's instead of its configuration's.
        fp16: the section.
        is_data_first: ranks that have the same experts are neighbours (``use_data_before_expert_parallelism``).
    """

    stage: int
    num_ranks: int
    dtype: torch.dtype
    sub_group_size: int
    is_round_robin: bool
    param_alignment: int
    clip_grad: float | None
    fp16: Mapping[str, Any]
    is_data_first: bool = False

    @property
    def is_dynamic(self) -> bool:
        return self.dtype == torch.float16 and not _value(self.fp16, "loss_scale", 0)

    def loss_scaler(self, state: Mapping[str, Any] | None) -> ClassInstance:
        """DeepSpeed's object, with its rules, of ``LossScale.state_dict()``; None: as at the beginning."""
        if not self.is_dynamic:
            scale = float(_value(self.fp16, "loss_scale", 0) or 1) if self.dtype == torch.float16 else 1.0
            return ClassInstance(_SCALERS, "LossScaler", {"cur_scale": scale, "dynamic": False})
        hysteresis = int(_value(self.fp16, "hysteresis", 2))
        first = {
            "scale": 2.0 ** int(_value(self.fp16, "initial_scale_power", 16)),
            "iteration": 0,
            "last_overflow_iteration": -1,
            "hysteresis": hysteresis,
        }
        held = {**first, **(state or {})}
        attributes = {
            "cur_scale": held["scale"],
            "dynamic": True,
            "cur_iter": held["iteration"],
            "last_overflow_iter": held["last_overflow_iteration"],
            "scale_factor": 2.0,
            "scale_window": int(_value(self.fp16, "loss_scale_window", 1000)),
            "min_scale": _value(self.fp16, "min_loss_scale", 1),
            "delayed_shift": hysteresis,
            "cur_hysteresis": held["hysteresis"],
            "consecutive_hysteresis": bool(_value(self.fp16, "consecutive_hysteresis", False)),
            "raise_error_at_min_scale": True,
            "dtype": torch.float16,
        }
        return ClassInstance(_SCALERS, "DynamicLossScaler", attributes)


def settings_of(
    config: Mapping[str, Any], stage: int | None, num_ranks: int, trained: Iterable[torch.dtype]
) -> DeepSpeedSettings:
    """Args:
        config: the run's, as JSON has it. What it leaves out has DeepSpeed's default.
        stage: None: the configuration's.
        trained: the dtypes of the trained parameters, for a configuration that does not name one.

    Raises: CheckpointError: a value that such a checkpoint cannot have.
    """
    zero = config.get("zero_optimization") or {}
    found = stage if stage is not None else _value(zero, "stage", 0)
    if found not in (1, 2, 3):
        raise _wrong(
            f"the ZeRO stage is {found!r}, and DeepSpeed's files are written for stages 1, 2 and 3.", "--stage"
        )
    if num_ranks < 1:
        raise _wrong(f"{num_ranks} ranks cannot load it.", "--ranks")
    dtype = _precision(config, set(trained))
    clip = _value(config, "gradient_clipping", None)
    alignment = 16 // math.gcd(16, dtype.itemsize) if _value(zero, "parameter_alignment", False) else 1
    return DeepSpeedSettings(
        stage=int(found),
        num_ranks=num_ranks,
        dtype=dtype,
        sub_group_size=int(_value(zero, "sub_group_size", 10**9)),
        is_round_robin=bool(_value(zero, "round_robin_gradients", False)),
        param_alignment=alignment,
        clip_grad=None if clip is None else float(clip),
        fp16=config.get("fp16") or {},
        is_data_first=bool(_value(config, "use_data_before_expert_parallelism", False)),
    )


def parallel_keys(config: Mapping[str, Any]) -> list[str]:
    """The keys of a configuration that ask for tensor- or pipeline-parallel ranks."""
    found = []
    for path in ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size", "parallel.tp", "parallel.pp"):
        value: Any = config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, int) and value > 1:
            found.append(path)
    return found


def _precision(config: Mapping[str, Any], trained: set[torch.dtype]) -> torch.dtype:
    enabled = {key: (config.get(key) or {}).get("enabled", False) for key in _PRECISIONS}
    for key, dtype in _PRECISIONS.items():
        if enabled[key] is True:
            return dtype
    if config and "auto" not in enabled.values():
        return torch.float32
    return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in trained), torch.float32)


def _value(section: Mapping[str, Any], key: str, default: Any) -> Any:
    """Clients replace "auto" before DeepSpeed reads it; here it means the default."""
    value = section.get(key)
    return default if value is None or value == "auto" else value


def _wrong(what: str, option: str) -> CheckpointError:
    do = f"name another with {option}, or the configuration of the run that loads it with --config."
    return CheckpointError(what, do=do, code="checkpoint-format")
