"""Checks of several keys together: keys that exclude or need each other, and degrees that must divide the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any

from shoal.config.autotuning import autotuning_problems
from shoal.config.batch import MICRO, STEPS, TRAIN
from shoal.config.data_efficiency import data_efficiency_problems
from shoal.config.elastic import elastic_problems
from shoal.config.normalise import Normalised
from shoal.config.parallel import expert_problems, pipeline_problems
from shoal.config.problems import Problem, shown
from shoal.config.schedule import schedule_problems
from shoal.config.schema import Fp8, Schema
from shoal.text import parse_bytes

MAX_SCALE_POWER = 127


def check_together(config: Schema, reading: Normalised) -> Iterator[Problem]:
    """Problems between keys."""
    zero, fp16, bf16 = config.zero_optimization, config.fp16, config.bf16
    if fp16.enabled and bf16.enabled:
        yield Problem("bf16.enabled", "true, and so is fp16.enabled.", "enable one of them.", code="precision-conflict")
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        yield Problem(
            "bf16.bf16_optimizer_states",
            "true, but bf16.bf16_master_weights_and_grads is false.",
            'set both, or neither; precision.state_dtype = "bf16" keeps main parameters in fp32.',
        )
    mode = "fp16" if fp16.enabled else "bf16" if bf16.enabled else "fp32"
    wanted = config.data_types.param_dtype
    if wanted is not None and wanted != mode:
        yield Problem(
            "data_types.param_dtype",
            f'"{wanted}", but fp16 and bf16 make the parameters {mode}.',
            f'write "{mode}", or enable {wanted}.' if wanted != "fp32" else f"disable {mode}.",
        )
    precision = config.precision
    has_no_main = (fp16.enabled and fp16.fp16_master_weights_and_grads) or (
        bf16.enabled and bf16.bf16_master_weights_and_grads
    )
    if precision.master_dtype not in (None, mode, *(() if has_no_main else ("fp32",))):
        yield Problem(
            "precision.master_dtype",
            f'"{precision.master_dtype}", but fp16 and bf16 make the parameters {mode}'
            + (f", and {mode}_master_weights_and_grads their main parameters." if has_no_main else "."),
            f'write "{mode}"' + ("" if has_no_main or mode == "fp32" else ' or "fp32"') + ", or leave it out.",
        )
    if precision.cast_forward_inputs and mode == "fp32":
        what = "true, but neither fp16 nor bf16 is enabled, so there is no dtype to cast inputs to."
        yield Problem("precision.cast_forward_inputs", what, "enable one of them, or leave it out.")
    if precision.cast_forward_inputs is False and fp16.enabled and fp16.auto_cast:
        yield Problem("precision.cast_forward_inputs", "false, but fp16.auto_cast is true.", "leave one of them out.")
    if precision.stochastic_rounding and not (bf16.enabled and (has_no_main or precision.master_dtype == "bf16")):
        yield Problem(
            "precision.stochastic_rounding",
            "true, but main parameters are not bf16, so that nothing is rounded to it after a step.",
            'set bf16.enabled and precision.master_dtype = "bf16", or leave it out.',
        )
    if precision.state_dtype == "fp16":
        what = '"fp16", in which squares of small gradients are 0.'
        yield Problem("precision.state_dtype", what, 'write "bf16", "fp8" or "int8".')
    if precision.state_dtype not in (None, "bf16") and bf16.bf16_optimizer_states:
        what = f'"{precision.state_dtype}", but bf16.bf16_optimizer_states is true.'
        yield Problem("precision.state_dtype", what, "leave one out.")
    yield from _wire_problems(config)
    yield from _local_problems(config)
    yield from _fp8_problems(config)
    budget = config.activation_checkpointing.memory_budget
    where = "activation_checkpointing.memory_budget"
    if isinstance(budget, str) and parse_bytes(budget) is None:
        yield Problem(where, f"{shown(budget)} is not a size with a unit.", 'write it as "4GiB", or as a number.')
    if config.activation_checkpointing.offload_every and (budget is None or config.offload_activation.device == "cpu"):
        what = f"{config.activation_checkpointing.offload_every}, " + (
            "without a memory_budget."
            if budget is None
            else "and offload_activation offloads the activations of blocks."
        )
        do = "set a memory_budget." if budget is None else "leave one of them out."
        yield Problem("activation_checkpointing.offload_every", what, do)
    if budget is not None and config.compile.enabled:
        yield Problem(
            where, "given with compile.enabled: what compiled blocks save is not counted.", "leave one of them out."
        )
    if budget is not None and config.parallel.pp not in ("auto", 1):
        do = "name blocks in activation_checkpointing.modules."
        yield Problem(where, "given with pipeline stages, whose ranks hold several micro-batches.", do)
    is_auto = config.offload == "auto"
    if is_auto and zero.stage == 0:
        yield Problem(
            "offload",
            '"auto" at zero_optimization.stage 0: every rank holds all state, so nothing can be offloaded.',
            "set zero_optimization.stage to 1, 2 or 3.",
        )
    for name, section in (("offload_param", zero.offload_param), ("offload_optimizer", zero.offload_optimizer)):
        if is_auto and section.device != "none":
            what = f'"auto" decides what zero_optimization.{name}.device = "{section.device}" decides too.'
            yield Problem("offload", what, "leave one of them out.")
        if section.device == "nvme" and not section.nvme_path:
            yield Problem(f"zero_optimization.{name}.nvme_path", "missing, but the device is nvme.", "name a folder.")
    yield from autotuning_problems(config.autotuning)
    yield from pipeline_problems(config.pipeline)
    yield from expert_problems(config.expert_parallel)
    if config.curriculum_learning.enabled:
        for name, what, do in schedule_problems(config.curriculum_learning.model_dump()):
            yield Problem(f"curriculum_learning.{name}", what, do)
    yield from data_efficiency_problems(config.data_efficiency)
    sampling = config.data_efficiency.data_sampling
    if config.fault_tolerance.quorum and (sampling.curriculum_learning.enabled or sampling.dynamic_batching.enabled):
        yield Problem(
            "data_efficiency.data_sampling.enabled",
            "true with fault_tolerance, whose replicas divide the samples of each step anew.",
            "disable one of them.",
        )
    if config.elasticity.enabled:
        prefix = "elasticity."
        there = [path.removeprefix(prefix) for path in reading.given if path.startswith(prefix)]
        for name, what, do in elastic_problems(config.elasticity, there):
            yield Problem(f"elasticity.{name}", what, do)
        sizes = [path for path in (TRAIN, MICRO, STEPS) if reading.origins.get(path) in ("user", "deprecated alias")]
        if sizes and not config.elasticity.ignore_non_elastic_batch_info:
            yield Problem(
                "elasticity.enabled",
                f"true, and {', '.join(sizes)} given too: elasticity decides the batch sizes.",
                "leave them out, or set elasticity.ignore_non_elastic_batch_info.",
            )
        return
    given = [config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps]
    if None not in given and given[0] % (given[1] * given[2]):
        yield Problem(
            "train_batch_size",
            f"{given[0]} does not divide by micro-batch {given[1]} x accumulation {given[2]} = {given[1] * given[2]}, "
            "so it fits no number of ranks.",
            "change one of the three, or leave one out.",
        )


def _wire_problems(config: Schema) -> Iterator[Problem]:
    """Problems of the formats in which parameters and gradients are sent."""
    wire, zero = config.wire, config.zero_optimization
    if wire.block is not None and wire.block % 32:
        yield Problem("wire.block", f"{wire.block}, which is no multiple of 32.", "write 256, or another multiple.")
    if wire.difference and zero.stage == 3:
        what = "true at stage 3, where no rank has the whole parameters of the step before."
        yield Problem("wire.difference", what, "use stage 1 or 2, or leave it out.", code="wire-difference")
    elif wire.difference and not (wire.gather or any(unit.gather for unit in wire.units.values())):
        yield Problem("wire.difference", "true, but wire.gather names no format.", 'write wire.gather, such as "int4".')
    if config.communication_data_type and (wire.reduce or zero.zero_quantized_gradients):
        key = "wire.reduce" if wire.reduce else "zero_optimization.zero_quantized_gradients"
        what = f'"{config.communication_data_type}", and {key} is a format of the same gradients.'
        yield Problem("communication_data_type", what, "leave one out.")


def _local_problems(config: Schema) -> Iterator[Problem]:
    """Problems of replicas that take steps of their own."""
    local = config.local_steps
    if local.every is None:
        return
    if local.fragments > local.every:
        what = f"{local.fragments} in a round of {local.every} steps, each of which synchronises at most one."
        yield Problem("local_steps.fragments", what, f"write at most {local.every}.", code="local-steps")
    if local.block is not None and local.block % 32:
        what = f"{local.block}, which is no multiple of 32."
        yield Problem("local_steps.block", what, "write 256, or another multiple.", code="local-steps")
    if config.expert_parallel.rebalance_every:
        what = f"{config.expert_parallel.rebalance_every}, and local_steps.every is {local.every}: each replica would"
        what += " move other experts."
        do = "leave one of them out."
        yield Problem("expert_parallel.rebalance_every", what, do, code="local-steps")


def _fp8_problems(config: Schema) -> Iterator[Problem]:
    """Problems of the layers that compute in few bits."""
    fp8 = config.fp8
    if fp8.recipe is None and fp8 != Fp8():
        do = 'write one, such as "rowwise", or leave the section out.'
        yield Problem("fp8.recipe", "missing, so that the other keys of fp8 have no effect.", do)
    if fp8.until_step is not None and fp8.until_step <= fp8.from_step:
        what = f"{fp8.until_step}, which is not after fp8.from_step = {fp8.from_step}."
        yield Problem("fp8.until_step", what, "write a later step, or leave it out.")


def engine_problems(config: Schema) -> Iterator[Problem]:
    """Values that the keys allow and the engine does not."""
    zero, fp16 = config.zero_optimization, config.fp16
    for name, what, do in loss_scale_problems(fp16) if fp16.enabled else ():
        yield Problem(f"fp16.{name}", what, do, code="loss-scale")
    if zero.offload_optimizer.device != "none" and zero.stage == 0:
        what = f"{shown(zero.offload_optimizer.device)} at stage 0, where every rank stores all optimizer state."
        do = "set zero_optimization.stage to 1, 2 or 3, or leave offload_optimizer out."
        yield Problem("zero_optimization.offload_optimizer.device", what, do, code="offload-stage")
    yield from _zenflow_problems(config)


def _zenflow_problems(config: Schema) -> Iterator[Problem]:
    """Problems of ZenFlow, whose state lies in several places and whose parameters are updated at several times."""
    zero, where = config.zero_optimization, "zero_optimization.zenflow"
    flow, state = zero.zenflow, zero.offload_optimizer
    if flow is None:
        return
    if state.device != "cpu":
        what = f"given, and zero_optimization.offload_optimizer.device is {shown(state.device)}."
        yield Problem(where, what, 'set it to "cpu", at stage 1, 2 or 3, or leave zenflow out.', code="zenflow")
    if state.device != "cpu" or zero.stage == 0:
        return
    others = {
        "zero_optimization.offload_param": zero.offload_param.device != "none",
        "zero_optimization.offload_optimizer.super_offload": state.super_offload,
        "zero_optimization.offload_optimizer.ratio": state.ratio < 1,
        "precision.state_dtype": config.precision.state_dtype is not None,
        "precision.stochastic_rounding": config.precision.stochastic_rounding,
        "bf16.bf16_master_weights_and_grads": config.bf16.bf16_master_weights_and_grads,
        "wire.difference": config.wire.difference,
        "local_steps.every": config.local_steps.every is not None,
        "fault_tolerance.quorum": bool(config.fault_tolerance.quorum),
        "expert_parallel.rebalance_every": bool(config.expert_parallel.rebalance_every),
    }
    for name, is_given in others.items():
        if is_given:
            yield Problem(name, f"given with {where}.", "leave one of them out.", code="zenflow")
    is_auto = flow.select_interval == "auto"
    if (flow.select_strategy == "auto") is not is_auto:
        what = f"{shown(flow.select_interval)} with select_strategy {shown(flow.select_strategy)}."
        do = 'leave both "auto" (once an epoch), or name a strategy, step or epoch, and a number.'
        yield Problem(f"{where}.select_interval", what, do, code="zenflow")
    between = flow.steps_between_choices(flow.steps_per_epoch)
    if between is not None and isinstance(flow.update_interval, int) and between < flow.update_interval:
        what = f"{flow.update_interval}, but the columns are chosen every {between} steps (select_interval)."
        yield Problem(f"{where}.update_interval", what, f"write at most {between}.", code="zenflow")


def loss_scale_problems(scale: Any) -> Iterator[tuple[str, str, str]]:
    """The key, what is wrong with its value and what to do.

    Args:
        scale: has the keys of ``fp16`` as attributes. Where its ``loss_scale`` is fixed, the other ones have no effect.
    """
    if scale.loss_scale:
        return
    if not 0 <= scale.initial_scale_power <= MAX_SCALE_POWER:
        what = f"{scale.initial_scale_power}, but the loss scale is an fp32 number, below 2 to the power of 128."
        yield "initial_scale_power", what, f"write 0 to {MAX_SCALE_POWER}."
    if scale.hysteresis < 1:
        yield "hysteresis", f"{scale.hysteresis}, but the overflow that halves the scale is counted from 1.", "write 1."
    if scale.loss_scale_window < 1:
        yield "loss_scale_window", f"{scale.loss_scale_window}, which is no number of steps.", "write at least 1."
    if not (isfinite(scale.min_loss_scale) and scale.min_loss_scale > 0):
        yield "min_loss_scale", f"{scale.min_loss_scale:g}, but a loss scale is a finite number above 0.", "write 1."
