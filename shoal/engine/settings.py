"""The settings of an engine: translated from the config, in DeepSpeed's words, and fixed before the first step."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.build.settings import Precision, WireSettings, ZeroSettings
from shoal.comm.formats import WireFormat, format_named
from shoal.comm.world import World
from shoal.config import Config
from shoal.config.ranks import mesh_of
from shoal.device import Device
from shoal.errors import ConfigError
from shoal.mesh import Mesh
from shoal.optim.loss_scale import LossScale, LossScaleSettings
from shoal.sharding.axes import Axes
from shoal.sharding.encoded_state import STATE_FORMATS
from shoal.sharding.gradient import GradientPolicy
from shoal.sharding.partition import UnitRules
from shoal.sharding.placement import Tier

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class ActivationFormats:
    """In which formats activations and their gradients are sent; None: as they are."""

    experts: WireFormat | None = None  # rows of tokens, along ``ep``
    pipeline: WireFormat | None = None  # messages, along ``pp``
    tensor: WireFormat | None = None  # sums and gathers of split layers, along ``tp``
    sequence: WireFormat | None = None  # heads of attention, along ``sp``

    def by_axis(self) -> Iterator[tuple[str, str, WireFormat]]:
        """Those that are set: the key, the axis, the format."""
        for key, axis, sent in (
            ("experts", "ep", self.experts),
            ("pipeline", "pp", self.pipeline),
            ("tensor", "tp", self.tensor),
            ("sequence", "sp", self.sequence),
        ):
            if sent is not None:
                yield key, axis, sent


@dataclass(frozen=True)
class Plan:
    """What the config means for this number of ranks. Fixed before the first step."""

    zero: ZeroSettings
    precision: Precision
    clip_norm: float
    nonfinite: str | None  # "raise", "skip", "warn"; None: raise for a bad loss, skip for bad gradients of a good one
    max_bad_steps: int
    ignores_unused: bool
    autocast_dtype: torch.dtype | None
    input_dtype: torch.dtype | None  # floating-point inputs of forward are cast to it
    output_dtype: torch.dtype | None  # and what forward returns to this
    mesh: Mesh
    secondary_size: int | None  # hpZ
    activations: ActivationFormats = ActivationFormats()


@dataclass(frozen=True)
class Properties:
    """What is fixed about an engine from its start: its config, the plan made from it, its ranks, its device."""

    config: Config
    plan: Plan
    world: World
    axes: Axes
    device: Device

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.plan.zero.stage

    @property
    def rank(self) -> int:
        """This process's rank in the world."""
        return self.world.rank

    def where(self, step: int) -> str:
        """The place that an error names."""
        return f"rank {self.rank}, step {step}"


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype that a configuration names; None: it names none."""
    return None if name is None else DTYPES[name]


def plan_of(config: Config, num_ranks: int) -> Plan:
    """The plan that a config means for a number of ranks.

    Raises: ConfigError: precisions that exclude each other, or degrees that do not divide.
    """
    zero = config.zero_optimization
    fp16, bf16 = config.fp16, config.bf16
    if fp16.enabled and bf16.enabled:
        raise ConfigError(
            "fp16.enabled and bf16.enabled are both true.", do="enable one of them.", code="precision-conflict"
        )
    compute = torch.float16 if fp16.enabled else torch.bfloat16 if bf16.enabled else None
    autocast = dtype_of(config.torch_autocast.dtype) or torch.bfloat16
    has_main = has_main_parameters(config)
    gas = config.gradient_accumulation_steps
    accumulate = dtype_of(config.data_types.grad_accum_dtype)
    if accumulate is None and compute is not None and gas > 1 and has_main:
        accumulate = torch.float32
    wire = dtype_of(config.communication_data_type or config.precision.reduce_dtype)
    mesh = mesh_of(config, num_ranks)
    local = config.local_steps
    num_averaged = mesh.size("loss" if local.every is None else "fsdp")
    pre, post = _scales(config, num_averaged)
    stage = zero.stage
    hpz = int(zero.zero_hpz_partition_size or 1)
    secondary_size = hpz if 1 < hpz < num_averaged and stage == 3 else None
    threshold = int(zero.stage3_param_persistence_threshold) if stage == 3 and num_averaged > 1 else 0
    leaf = zero.leaf_module
    rules = UnitRules(
        classes=tuple(config.units.classes),
        names=tuple(config.units.names),
        leaf_classes=tuple(leaf.classes or ()),
        leaf_names=tuple(leaf.names or ()) + tuple(f"*{suffix}" for suffix in leaf.name_suffixes or ()),
        persistence_threshold=threshold,
        max_persistent_numel=int(zero.stage3_model_persistence_threshold),
    )
    parameter_tier = _tier(zero.offload_param if zero.stage == 3 else None)
    return Plan(
        zero=ZeroSettings(
            stage=stage,
            rules=rules,
            has_second=secondary_size is not None,
            max_bucket_numel=int(zero.reduce_bucket_size),
            prefetch_numel=int(zero.stage3_prefetch_bucket_size),
            max_live_numel=int(zero.stage3_max_live_parameters)
            if "stage3_max_live_parameters" in zero.model_fields_set
            else None,
            max_reuse_numel=int(zero.stage3_max_reuse_distance),
            has_overlap=zero.overlap_comm is not False,
            registers_memory=zero.nccl_ub,
            sparse_gradients=bool(config.sparse_gradients),
            parameter_tier=parameter_tier,
            gathers_if_used=parameter_tier is not Tier.DEVICE and bool(config.expert_parallel.gather_if_used),
            state_tier=_state_tier(config),
            is_updated_in_parts=zero.zenflow is not None,
            state_ratio=float(zero.offload_optimizer.ratio),
            max_host_numel=int(zero.offload_param.max_in_cpu),
            pins_parameters=bool(zero.offload_param.pin_memory),
            pins_state=bool(zero.offload_optimizer.pin_memory),
            wire=_wire(config),
            num_outer_states=0 if local.every is None else 2 + (local.error_feedback and local.wire is not None),
        ),
        precision=Precision(
            parameter=compute,
            main=torch.float32 if has_main else None,
            state=state_dtype_of(config),
            state_format=STATE_FORMATS.get(config.precision.state_dtype or ""),
            buffer=dtype_of(config.data_types.buffer_dtype),
            fp32_buffers=wide_buffers_of(config),
            gradient=GradientPolicy(accumulate, wire, pre, post),
        ),
        clip_norm=float(config.gradient_clipping),
        nonfinite=config.precision.nonfinite or ("warn" if bf16.enabled and not bf16.check_grad_overflow else None),
        ignores_unused=bool(zero.ignore_unused_parameters),
        max_bad_steps=1_000 if fp16.enabled else 10,
        autocast_dtype=autocast if config.torch_autocast.enabled else None,
        input_dtype=compute if config.precision.cast_forward_inputs or (fp16.enabled and fp16.auto_cast) else None,
        output_dtype=dtype_of(config.precision.output_dtype),
        mesh=mesh,
        secondary_size=secondary_size,
        activations=ActivationFormats(
            experts=_format(config, config.wire.experts),
            pipeline=_format(config, config.wire.pipeline),
            tensor=_format(config, config.wire.tensor),
            sequence=_format(config, config.wire.sequence),
        ),
    )


def _format(config: Config, name: str | None) -> WireFormat | None:
    return None if name in (None, "none") else format_named(name, config.wire.block)


def _wire(config: Config) -> WireSettings:
    """The formats of the section ``wire``, and of DeepSpeed's keys where the section names none."""
    wire, zero, of = config.wire, config.zero_optimization, partial(_format, config)
    gather = wire.gather or ("int8" if zero.zero_quantized_weights and zero.stage == 3 else None)
    frozen = wire.frozen or wire.gather or gather
    if zero.zero_quantized_nontrainable_weights and zero.stage == 3:
        frozen = wire.frozen or wire.gather or "int8"
    is_quantized, loco = zero.zero_quantized_gradients, zero.zeropp_loco_param
    reduce = wire.reduce or ("int8" if is_quantized else None)
    between = wire.between_nodes or ("int4" if is_quantized and wire.reduce is None else None)
    if is_quantized and loco is not None and not wire.error_feedback:
        has_error, decay = True, loco.err_beta
        reset: int | None = loco.reset_T
    else:
        has_error, decay, reset = wire.error_feedback, wire.error_decay, wire.error_reset
    units = {pattern: (of(unit.gather or gather), of(unit.reduce or reduce)) for pattern, unit in wire.units.items()}
    return WireSettings(
        gather=of(gather),
        frozen=of(frozen),
        reduce=of(reduce),
        between=of(between),
        units=units,
        is_difference=wire.difference,
        has_error=has_error,
        error_decay=decay,
        error_reset=reset,
        is_gather_split=wire.hierarchical_gather or zero.mics_hierarchical_params_gather,
        ranks_per_node=None if wire.ranks_per_node == "auto" else wire.ranks_per_node,
    )


def has_main_parameters(config: Config) -> bool:
    """True if 16-bit parameters have main parameters in fp32."""
    fp16, bf16 = config.fp16, config.bf16
    is_narrow = config.precision.master_dtype in ("fp16", "bf16")
    return not (
        (fp16.enabled and (is_narrow or fp16.fp16_master_weights_and_grads))
        or (bf16.enabled and (is_narrow or bf16.bf16_master_weights_and_grads))
    )


def state_dtype_of(config: Config) -> torch.dtype | None:
    """Dtype of optimizer state, fp32 where it is encoded; None: that of the main parameters."""
    main = "fp32" if has_main_parameters(config) else "fp16" if config.fp16.enabled else "bf16"
    wanted = config.precision.state_dtype
    if wanted in STATE_FORMATS:
        return torch.float32
    if wanted is None:  # as in DeepSpeed, whose CPU optimizers have fp32 moments with 16-bit main parameters
        wanted = "bf16" if config.bf16.bf16_optimizer_states else "fp32"
    return None if wanted == main and not config.precision.stochastic_rounding else dtype_of(wanted)


def wide_buffers_of(config: Config) -> tuple[str, ...] | None:
    """Names of buffers that stay in fp32; None: those that the model lists."""
    names = config.data_types.keep_in_fp32_modules
    return None if isinstance(names, str) else tuple(names)


def _state_tier(config: Config) -> Tier:
    """Raises: ConfigError: offload at stage 0, where optimizer state is replicated on every rank."""
    zero = config.zero_optimization
    tier = _tier(zero.offload_optimizer)
    if tier is not Tier.DEVICE and zero.stage == 0:
        raise ConfigError(
            "zero_optimization.offload_optimizer is set with stage 0, where every rank holds all optimizer state.",
            do="use stage 1 or more, or leave offload_optimizer out.",
            code="offload-stage",
        )
    return tier


def _tier(section: Any) -> Tier:
    return _TIERS[section.device] if section is not None else Tier.DEVICE


_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


def _scales(config: Config, num_ranks: int) -> tuple[float, float]:
    """Factors before and after the sum over ranks: a mean, unless the config asks for a sum."""
    divisor = 1.0 if config.gradient_allreduce_op == "sum" else float(num_ranks)
    if config.prescale_gradients:
        return 1.0 / divisor, 1.0
    factor = float(config.gradient_predivide_factor)
    return 1.0 / factor, factor / divisor


def loss_scale_of(config: Config) -> LossScale | None:
    """The loss scale of fp16; None in other precisions."""
    fp16 = config.fp16
    if not fp16.enabled:
        return None
    return LossScale(
        LossScaleSettings(
            loss_scale=float(fp16.loss_scale),
            initial_scale_power=int(fp16.initial_scale_power),
            loss_scale_window=int(fp16.loss_scale_window),
            hysteresis=int(fp16.hysteresis),
            consecutive_hysteresis=bool(fp16.consecutive_hysteresis),
            min_loss_scale=float(fp16.min_loss_scale),
        )
    )


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings as one, by dotted path."""
    if isinstance(value, Mapping):
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{path}.{key}" if path else key).items()}
    return {path: value}


def lower_precision_parameters(model: nn.Module, config: Config, plan: Plan) -> dict[str, torch.dtype]:
    """The dtype in which a parameter is sent, by name, where it is that of ``torch.autocast``, not the parameter's.

    Under autocast a linear or convolutional module computes its weights' gradients in low precision and casts them to
    fp32 at the end. Reducing them in low precision loses little and halves the bytes. Sums are rounded: over several
    micro-batches before they are reduced, and at stage 0 over the ranks. So the config has to ask for it. Such a module
    reads its weights in low precision, so at stage 3 they are gathered so, which changes nothing.

    Parameters of these very classes, not of those derived from them, as in DeepSpeed. A shared parameter counts where
    all modules that hold it are of these classes.

    Raises: ConfigError: classes of the config that do not exist; all of them are named.
    """
    given = config.torch_autocast.lower_precision_safe_modules
    if plan.autocast_dtype is None or plan.precision.gradient.reduce_dtype is not None or not given:
        return {}
    classes = _classes_at(given)
    low: set[int] = set()
    other: set[int] = set()
    for module in model.modules():
        group = low if type(module) in classes else other
        group.update(id(parameter) for parameter in module.parameters(recurse=False))
    return {
        name: plan.autocast_dtype
        for name, parameter in model.named_parameters()
        if id(parameter) in low - other and parameter.dtype == torch.float32
    }


def _classes_at(paths: Sequence[str]) -> tuple[type[nn.Module], ...]:
    classes, wrong = [], []
    for path in paths:
        module, _, name = path.rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            wrong.append(f"{path!r} ({error})")
            continue
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            classes.append(kind)
        else:
            wrong.append(f"{path!r} (not a class of modules)")
    if wrong:
        raise ConfigError(
            f"torch_autocast.lower_precision_safe_modules names what is not there: {'; '.join(wrong)}.",
            do='give whole paths of classes, such as "torch.nn.Linear".',
            code="autocast-modules",
        )
    return tuple(classes)
