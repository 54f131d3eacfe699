"""DeepSpeed's models of configuration sections, read and checked by Shoal, and the base for models of scripts."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from shoal.config import ConfigProblems, examine
from shoal.config.base import names_of
from shoal.config.schema import Bf16 as DeepSpeedBF16Config
from shoal.config.schema import Fp16
from shoal.config.zero import OffloadOptimizer, ZeroOptimization
from shoal.config.zero import OffloadParam as DeepSpeedZeroOffloadParamConfig
from shoal.engine.log import logger
from shoal.errors import ConfigError

FP16, BFLOAT16, BFLOAT16_OLD = "fp16", "bf16", "bfloat16"
ZERO_OPTIMIZATION = "zero_optimization"


class DeepSpeedConfigModel(BaseModel):
    """A pydantic model whose fields may be old names of others.

    The value of a field with ``json_schema_extra={"deprecated": True, "new_param": "other"}`` is assigned to ``other``,
    converted by ``new_param_fn`` where there is one. Values ``"auto"`` are left out, so that the defaults apply.

    Raises: pydantic.ValidationError: unknown fields, and values of another type. BothNamesError: a field by its old
    and by its new name.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True,
        extra="forbid",
        populate_by_name=True,
        protected_namespaces=(),
        use_enum_values=True,
        validate_assignment=True,
        validate_default=True,
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        if not strict:
            data = {name: value for name, value in data.items() if not _is_auto(value) or name == "replace_method"}
        super().__init__(**data)
        for name, field in type(self).model_fields.items():
            about = field.json_schema_extra
            if isinstance(about, dict) and about.get("deprecated") and name in self.model_fields_set:
                self._hand_over(name, about)

    def _hand_over(self, name: str, about: dict[str, Any]) -> None:
        new = str(about.get("new_param", ""))
        logger.warning("%s is deprecated%s. %s", name, f"; write {new}" if new else "", about.get("deprecated_msg", ""))
        if not new or not about.get("set_new_param", True):
            return
        *sections, last = new.split(".")
        home: BaseModel = self
        for section in sections:
            home = getattr(home, section)
        if last in home.model_fields_set:
            raise BothNamesError(f"{name!r} and {new!r} are both given.", do=f"leave {name!r} out: it is the old name.")
        convert = about.get("new_param_fn", lambda value: value)
        setattr(home, last, convert(getattr(self, name)))


class BothNamesError(ConfigError, AssertionError):
    """A key is given by its old and by its new name. Also an AssertionError, since DeepSpeed asserts against it."""

    code = "config-both-names"


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


class DeepSpeedFP16Config(Fp16):
    """The section ``fp16``, checked when it is made.

    Raises: pydantic.ValidationError: unknown keys, and values that cannot be.
    """

    @field_validator("loss_scale", "loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Text is read as a number, as in a file."""
        try:
            number = None if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = None
        if number is None:
            raise ValueError(f"fp16.{info.field_name} must be a number, got {value!r}")
        return int(number) if number.is_integer() and info.field_name == "loss_scale_window" else number

    @model_validator(mode="after")
    def _check_adaptive_scale(self) -> Self:
        """Keys of the adaptive scale count where it is used."""
        for name in ("loss_scale_window", "min_loss_scale"):
            if self.enabled and self.loss_scale == 0 and getattr(self, name) <= 0:
                raise ValueError(f"fp16.{name} must be > 0 when dynamic loss scaling is enabled (loss_scale 0)")
        return self

    def initial_dynamic_scale(self) -> float:
        """Where the adaptive scale starts."""
        power: float = 2**self.initial_scale_power
        return power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """The adaptive scale under the names of DeepSpeed's scaler."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The section ``bf16`` of a configuration, under either of its names.

    Raises: pydantic.ValidationError: unknown keys, and values that cannot be.
    """
    return DeepSpeedBF16Config(**(param_dict.get(BFLOAT16) or param_dict.get(BFLOAT16_OLD) or {}))


class DeepSpeedZeroOffloadOptimizerConfig(OffloadOptimizer):
    """The tier of optimizer state."""

    @property
    def pipeline(self) -> bool:
        """True if pipelined reading or writing is enabled."""
        return self.pipeline_read or self.pipeline_write


class OffloadDeviceEnum(str, Enum):  # noqa: UP042 - its text is the member's, as in DeepSpeed
    """The tier of state."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):  # noqa: UP042 - likewise
    """What ``engine.offload_states`` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(int, Enum):
    """ZeRO's stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796 - another name of the last, as in DeepSpeed


class DeepSpeedZeroConfig:
    """The section, read and checked by Shoal; its keys are attributes, by any of their names.

    As in DeepSpeed, ``overlap_comm`` is never None, and an offload section that was not given is.

    Raises: ConfigError: every problem at once.

    >>> DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=1000).prefetch_bucket_size
    1000
    """

    def __init__(self, **keys: Any) -> None:
        self.given = dict(keys)
        seen = examine({"train_micro_batch_size_per_gpu": 1, ZERO_OPTIMIZATION: keys}, check_supported=False)
        known = names_of(ZeroOptimization)
        # Keys and values are checked one by one here; contradictions between keys are found in the whole config.
        if seen.config is None or any(problem.path.split(".")[1] not in known for problem in seen.problems):
            raise ConfigProblems(seen.problems, seen.name)
        self.checked: ZeroOptimization = seen.config.zero_optimization

    @property
    def overlap_comm(self) -> bool:
        """True if DeepSpeed would reduce gradients during the backward pass."""
        return self.checked.stage == 3 if self.checked.overlap_comm is None else self.checked.overlap_comm

    @property
    def offload_param(self) -> DeepSpeedZeroOffloadParamConfig | None:
        """The tier of the sharded parameters; None where the section does not set it."""
        if self.given.get("offload_param") is None and not self.given.get("cpu_offload_param"):
            return None
        return DeepSpeedZeroOffloadParamConfig(**self.checked.offload_param.model_dump())

    @property
    def offload_optimizer(self) -> DeepSpeedZeroOffloadOptimizerConfig | None:
        """The tier of the optimizer state; None where the section does not set it."""
        if self.given.get("offload_optimizer") is None and not self.given.get("cpu_offload"):
            return None
        return DeepSpeedZeroOffloadOptimizerConfig(**self.checked.offload_optimizer.model_dump())

    def __getattr__(self, name: str) -> Any:
        key = names_of(ZeroOptimization).get(name)
        if key is None:
            raise AttributeError(f"zero_optimization has no key {name!r}")
        return getattr(self.checked, key.name)
