"""Validates the client's optimizer and schedule, or builds them from the config; the optimizer's step on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.build.build import group_index
from shoal.build.plan import sparse_names
from shoal.build.settings import WireSettings
from shoal.comm.formats import format_named
from shoal.config import Config
from shoal.config.optimizer import sums_format, sums_stage
from shoal.engine.settings import Plan, Properties, has_main_parameters, state_dtype_of
from shoal.errors import ConfigError, OptimizerError
from shoal.offload.cpu_optimizer import CpuOptimizer
from shoal.offload.zenflow import ZenFlow
from shoal.optim.build import build as build_optimizer
from shoal.optim.elementwise import PROBE_MORE_STEPS, PROBE_NUMEL, inner_optimizers, is_known, of_sparse_only
from shoal.optim.elementwise import check as check_elementwise
from shoal.optim.host_rules import kind_of
from shoal.optim.schedules import build_schedule
from shoal.optim.sums_values import SumsValues
from shoal.optim.variants import FP32States
from shoal.optim.whole import WholeTensorOptimizer
from shoal.processor import num_cores
from shoal.running.direct import DirectStep
from shoal.running.import_state import import_state
from shoal.running.runtime import ShardedModel
from shoal.running.step import ShardedStep
from shoal.running.summing_step import SummingStep
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.placement import Tier


def _check_given(
    optimizer: torch.optim.Optimizer, settings: Config, world_size: int, notes: list[str], *, has_parts: bool
) -> bool:
    """Validate the client's optimizer. Returns: True if it steps the model's own parameters."""
    zero = settings.zero_optimization
    is_offloaded = any(s is not None and s.device != "none" for s in (zero.offload_optimizer, zero.offload_param))
    has_own_format = settings.precision.stochastic_rounding or (
        settings.precision.state_dtype is not None and state_dtype_of(settings) is not None
    )
    says_no = settings.origin("zero_allow_untested_optimizer") == "user" and not settings.zero_allow_untested_optimizer
    kind = check_elementwise(
        optimizer,
        allow_untested=bool(settings.zero_allow_untested_optimizer),
        refuse_untested=says_no and zero.stage > 0,
        world_size=world_size,
        stage=zero.stage,
        has_whole=(zero.stage == 0 or world_size == 1) and not (has_parts or is_offloaded or has_own_format),
    )
    if kind == "elementwise" and not is_known(type(optimizer)):
        notes.append(
            f"{type(optimizer).__name__} is no optimizer that Shoal knows. It was elementwise in a trial of"
            f" {PROBE_MORE_STEPS} steps on tensors of up to {PROBE_NUMEL} elements; if it mixes elements later, or at"
            " other sizes, its updates of shards are wrong. At stage 0 it steps whole parameters."
        )
    return kind == "direct"


@dataclass(frozen=True)
class MadeOptimizer:
    """The optimizer that will train.

    Args:
        optimizer: None: there is none.
        groups: the parameters of each of its groups.
        is_direct: it steps the model's own parameters, not ranges of flat main parameters.
        notes: lines for start-up.
        dtypes: of each parameter, by ``id``, before the model is cast to the config's.
    """

    optimizer: torch.optim.Optimizer | None = None
    groups: list[list[nn.Parameter]] = field(default_factory=list)
    is_direct: bool = False
    notes: list[str] = field(default_factory=list)
    dtypes: dict[int, torch.dtype] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtypes", {id(p): p.dtype for group in self.groups for p in group})

    def sparse(self, model: nn.Module) -> set[int] | None:
        """The ``id`` of each parameter whose gradient the optimizer gets as a sparse tensor; None: it is not direct."""
        if self.optimizer is None or not self.is_direct:
            return None
        names, parameters = sparse_names(model, takes_all=False), dict(model.named_parameters())
        return {id(parameters[name]) for name in names} | of_sparse_only(self.optimizer)


def make_optimizer(
    model: nn.Module,
    given: Any,
    model_parameters: Iterable[Any] | None,
    settings: Config,
    world_size: int,
    *,
    is_part: bool = False,
    has_parts: bool = False,
) -> MadeOptimizer:
    """Validate the client's optimizer, or build one from the config.

    Args:
        has_parts: some parameters are parts of larger tensors.
        is_part: the model is one rank's pipeline stages. Groups without a parameter stay, so that all stages have the
            same ones.

    Raises: OptimizerError: it cannot be sharded, or its groups hold a parameter twice or none.
    """
    notes: list[str] = []
    is_direct = False
    parameters = list(model_parameters) if model_parameters is not None else None
    if isinstance(given, torch.optim.Optimizer):
        if settings.optimizer is not None and settings.optimizer.type:
            notes.append("the client optimizer is used; the config's optimizer section is not.")
        is_direct = _check_given(given, settings, world_size, notes, has_parts=has_parts)
        made: torch.optim.Optimizer = given
    elif callable(given):
        own = parameters if parameters is not None else [p for p in model.parameters() if p.requires_grad]
        try:
            made = given(own)
        except ValueError:  # torch refuses an empty list, and takes an empty group
            if own or not is_part:
                raise
            made = given([{"params": []}])
        is_direct = _check_given(made, settings, world_size, notes, has_parts=has_parts)
    elif given is not None:
        raise OptimizerError(
            f"optimizer must be a torch.optim.Optimizer or a callable, got {type(given).__name__}.",
            code="optimizer-type",
        )
    elif settings.optimizer is not None and settings.optimizer.type:
        groups = _groups(model, parameters, is_part=is_part)
        made, more = build_optimizer(
            settings.optimizer.type,
            settings.params_of("optimizer"),
            groups,
            names={id(parameter): name for name, parameter in model.named_parameters()},
            has_master=has_main_parameters(settings),
        )
        notes += more
    else:
        return MadeOptimizer(notes=notes)
    return MadeOptimizer(made, [list(group["params"]) for group in made.param_groups], is_direct, notes)


def _groups(model: nn.Module, parameters: list[Any] | None, *, is_part: bool) -> list[dict[str, Any]]:
    """Parameter groups for torch, of the parameters that require a gradient.

    Args:
        parameters: parameters, (name, parameter) pairs or groups; None: all of the model's.
    """
    if parameters is None:
        parameters = list(model.parameters())
    if parameters and isinstance(parameters[0], tuple):
        parameters = [entry[1] for entry in parameters]
    if not parameters or not isinstance(parameters[0], dict):
        parameters = [{"params": parameters}]
    groups = []
    for group in parameters:
        members = group["params"]
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        groups.append({**group, "params": [p for p in members if p.requires_grad]})
    group_index(model, [group["params"] for group in groups])
    trained = [group for group in groups if group["params"]]
    if is_part:
        return groups
    refuse_untrained(has_trained=bool(trained))
    return trained


def refuse_untrained(*, has_trained: bool) -> None:
    """Raises: OptimizerError: no parameter is trained."""
    if not has_trained:
        raise OptimizerError(
            "no parameter requires a gradient, so the optimizer would train nothing.",
            do="unfreeze some parameters, or leave the optimizer out to run the model only.",
            code="optimizer-empty",
        )


def make_step(
    made: MadeOptimizer,
    sharded: ShardedModel,
    properties: Properties,
    num_ranks_here: int,
    step_number: Callable[[], int],
) -> ShardedStep | None:
    """The optimizer on this rank's range; None without an optimizer.

    Args:
        num_ranks_here: ranks on this rank's host, which share its cores.
        step_number: counts the steps.
    """
    if made.optimizer is None:
        return None
    config, device, groups = properties.config, properties.device, sharded.trained_groups
    state_dtype = properties.plan.precision.state
    if made.is_direct or isinstance(made.optimizer, WholeTensorOptimizer):
        if config.precision.state_dtype is not None and state_dtype is not None:
            raise ConfigError(
                f'precision.state_dtype is "{config.precision.state_dtype}", but {type(made.optimizer).__name__} steps'
                " whole tensors, with state in the format of the main parameters.",
                do="leave precision.state_dtype out, or take an elementwise optimizer, such as AdamW.",
                code="optimizer-state-dtype",
            )
        if config.precision.stochastic_rounding:
            raise ConfigError(
                f"precision.stochastic_rounding is true, but {type(made.optimizer).__name__} steps whole tensors, in"
                " the format of the main parameters.",
                do="leave it out, or take an elementwise optimizer, such as AdamW.",
                code="optimizer-state-dtype",
            )
        state_dtype = None
    elif isinstance(made.optimizer, FP32States) and config.precision.state_dtype is None:
        narrow = torch.bfloat16 if config.precision.stochastic_rounding else None
        state_dtype = state_dtype if made.optimizer.fp32_optimizer_states else narrow  # as the client has said
    if isinstance(made.optimizer, FP32States):
        made.optimizer.may_cast = any(group.main.dtype != torch.float32 for group in groups)
    step: ShardedStep
    if made.is_direct:
        step = DirectStep(made.optimizer, groups)
    else:
        zero = config.zero_optimization
        section, flow, share = zero.offload_optimizer, zero.zenflow, zero.offload_optimizer.cpuadam_cores_perc
        make_cpu: Callable[..., CpuOptimizer] = CpuOptimizer
        if flow is not None:
            _check_zenflow(made.optimizer, groups)
            make_cpu = partial(ZenFlow, section=flow, step_number=step_number)
            share = 1 - flow.pt_reserved_cores_perc if flow.overlap_step else share
        kind = SummingStep if isinstance(made.optimizer, SumsValues) else ShardedStep
        step = kind(
            made.optimizer,
            groups,
            block_numel=device.step_block_numel,
            sub_group_numel=int(config.zero_optimization.sub_group_size) or None,
            device=device,
            is_ahead=section.super_offload,
            num_host_threads=_host_threads(share, num_ranks_here),
            pins_host=properties.plan.zero.pins_state,
            state_dtype=state_dtype,
            state_format=properties.plan.precision.state_format,
            step_number=step_number if config.precision.stochastic_rounding else None,
            make_cpu_optimizer=make_cpu,
        )
    import_state(step, made.dtypes)
    step.state_was_loaded()
    if sharded.disks.state is not None:
        sharded.disks.state.bind([group for group in groups if group.row.state.tier is Tier.DISK])
    return step


def _check_zenflow(optimizer: torch.optim.Optimizer, groups: Sequence[ParameterGroup]) -> None:
    """Raises: OptimizerError: its update cannot be divided into important columns and others."""
    what = ""
    if kind_of(optimizer) not in ("Adam", "AdamW") or any(group.get("amsgrad") for group in optimizer.param_groups):
        what = f"{type(optimizer).__name__} is another optimizer, or has amsgrad or tensors as hyperparameters"
    elif any(group.gradient.is_sparse for group in groups):
        what = "the gradient of an embedding is sparse"
    elif any(group.main.dtype != torch.float32 for group in groups):
        what = "main parameters are not fp32"
    if what:
        raise OptimizerError(
            f"zero_optimization.zenflow divides updates of Adam and AdamW of dense fp32 main parameters, and {what}.",
            do="use Adam or AdamW with fp32 main parameters and sparse=False, or leave zenflow out.",
            code="zenflow",
        )


def _host_threads(share: float, num_ranks_here: int) -> int:
    """This rank's part of the host's cores for updates.

    Not torch's own number: launchers set that to 1 where a process has a GPU.
    """
    return max(1, int(share * num_cores() / num_ranks_here))


def make_schedule(given: Any, settings: Config, optimizer: torch.optim.Optimizer | None) -> Any:
    """The client's schedule, or one built from the config, or None. Raises: OptimizerError: another optimizer's."""
    if hasattr(given, "get_last_lr") or (given is not None and not callable(given)):
        _check_schedule(given, optimizer)
        return given
    if optimizer is None:
        return None
    if callable(given):
        return given(optimizer)
    if settings.scheduler is not None and settings.scheduler.type:
        return build_schedule(settings.scheduler.type, settings.params_of("scheduler"), optimizer)
    return None


def schedule_notes(given: Any, settings: Config, optimizer: torch.optim.Optimizer | None) -> list[str]:
    """A line for start-up where the config's schedule has no effect."""
    if settings.scheduler is None or not settings.scheduler.type:
        return []
    if given is not None:
        return ["the client's lr_scheduler is used; the config's scheduler section is not."]
    return [] if optimizer is not None else ["the config's scheduler section has no effect without an optimizer."]


def _check_schedule(schedule: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """Raises: OptimizerError: it was made for another optimizer, so that it would change nothing here."""
    other = getattr(schedule, "optimizer", None)
    if optimizer is None or other is None or other is optimizer:
        return
    groups = {id(group) for group in getattr(other, "param_groups", [])}
    trained = (optimizer, *inner_optimizers(optimizer))
    if not groups.intersection(id(group) for one in trained for group in one.param_groups):
        raise OptimizerError(
            f"lr_scheduler is a {type(schedule).__name__} of another optimizer ({type(other).__name__}) than the one"
            f" that trains ({type(optimizer).__name__}): it would change no learning rate.",
            do="make it from the optimizer that initialize() is given, or pass a callable that takes the optimizer.",
            code="schedule-of-another",
        )


def keep_parameters(
    optimizer: Any, model_parameters: Iterable[Any] | None, is_kept: Callable[[torch.Tensor], bool]
) -> tuple[Any, Any]:
    """The client's optimizer and parameters without those that other ranks have (stages of a pipeline, experts)."""

    def kept(members: Any) -> list[Any]:
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        return [member for member in members if is_kept(member[1] if isinstance(member, tuple) else member)]

    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = kept(group["params"])
        for parameter in [p for p in optimizer.state if not is_kept(p)]:
            del optimizer.state[parameter]
    if model_parameters is not None:
        entries = list(model_parameters)
        if entries and isinstance(entries[0], dict):
            model_parameters = [{**group, "params": kept(group["params"])} for group in entries]
        else:
            model_parameters = kept(entries)
    return optimizer, model_parameters


def with_own_sums(plan: Plan, optimizer: Any, settings: Config) -> tuple[Plan, list[str]]:
    """The plan, with the formats of such an optimizer, and notes for start-up; of another one as it is.

    Raises: ConfigError, OptimizerError: a stage that shards, another format of gradients, or narrow optimizer state.
    """
    if not isinstance(optimizer, SumsValues) or not isinstance(optimizer, torch.optim.Optimizer):
        return plan, []
    name, zero, wire = type(optimizer).__name__, plan.zero, plan.zero.wire
    if zero.stage:
        what, do = sums_stage(name, zero.stage)
        raise ConfigError(f"zero_optimization.stage is {what}", do=do, code="optimizer-sums")
    if wire.reduce is not None or wire.between is not None or any(each for _, each in wire.units.values()):
        what, do = sums_format(name, "the section wire names formats of gradients")
        raise ConfigError(what, do=do, code="optimizer-sums")
    if plan.precision.state is not None:
        raise OptimizerError(
            f"{name} keeps its state in the format of fp32 main parameters, and the config asks for another.",
            do="leave precision.state_dtype and 16-bit main parameters out.",
            code="optimizer-sums",
        )
    own = WireSettings(
        reduce=format_named("1bit", settings.wire.block),
        has_error=True,
        is_by_optimizer=True,
        is_local=optimizer.has_local_steps,
    )
    masked = [index for index, group in enumerate(optimizer.param_groups) if "exp_avg_mask" in group]
    notes = [
        f"exp_avg_mask of optimizer group {index} has no effect: a momentum stays 0 where the variance is 0."
        for index in masked
    ]
    return replace(plan, zero=replace(zero, wire=own)), notes
