"""``"stage": "auto"`` of ``zero_optimization`` and ``"parallel": "auto"``: a plan for this machine.

    1  rank 0   searches for its model, GPUs and number of ranks, and runs the best dry
    2  all      take rank 0's configuration, and its reasons
    3  all      compare digests of it, as ``initialize`` does of every configuration

The script decides what a rank gets: the micro-batch and the accumulation steps stay, and axes that the script has to
know of (``pp``, ``sp``, ``cp``) are not chosen.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoal.comm.world import World
from shoal.config import load
from shoal.config.config import PLANNED
from shoal.config.ranks import mesh_of
from shoal.device import Device
from shoal.errors import ConfigError, ShoalError
from shoal.memory.host import host_available_nbytes
from shoal.mesh import Mesh
from shoal.planner.model_of import longest_sequence
from shoal.planner.search import plan
from shoal.planner.space import order_name
from shoal.simulation.collective_times import Links
from shoal.simulation.machines import GpuNode, machine_of, nearest_machine
from shoal.text import format_bytes

logger = logging.getLogger("shoal")

_NUM_TRIALS = 3
_CLOSE = 1.02
_CPU_LINK = 4e9  # bytes per second of a rank over shared memory
STAGE, PARALLEL = PLANNED


def planned_config(values: Mapping[str, Any], keys: tuple[str, ...], model: nn.Module, world: World) -> dict[str, Any]:
    """The configuration with what ``keys`` ("zero_optimization.stage", "parallel") ask to be planned.

    Raises: ConfigError: no plan can be made for the model, or none fits; on every rank alike.
    Communicates: rank 0's configuration and its reasons.
    """
    result: tuple[dict[str, Any], str] | str = ""
    if world.rank == 0:
        try:
            result = _plan(values, keys, model, world)
        except ShoalError as error:
            result = str(error)
    comm = world.communicator("world", Mesh.of(world.size), max_ctas=0)
    result = comm.gather_objects(result, label="the plan of rank 0")[0]
    if isinstance(result, str):
        raise ConfigError(
            f'{keys[0]} = "auto", and no plan can be made: {result}',
            do='write a stage and degrees yourself, such as {"stage": 3}.',
            code="plan-auto",
        )
    config, why = result
    if world.rank == 0:
        logger.info(why)
    return config


def _plan(
    values: Mapping[str, Any], keys: tuple[str, ...], model: nn.Module, world: World
) -> tuple[dict[str, Any], str]:
    fixed = {key: value for key, value in values.items() if key != PARALLEL or PARALLEL not in keys}
    zero = dict(fixed.get("zero_optimization", {}))
    if STAGE in keys:
        del zero["stage"]
    fixed["zero_optimization"] = zero
    settings = load(fixed, world_size=world.size, warns=False)
    if not (settings.bf16.enabled or settings.fp16.enabled):
        fixed["bf16"] = {"enabled": False}
    longest = longest_sequence(model)
    if longest is None:
        raise ConfigError(f"{type(model).__name__} has no config.vocab_size, so its micro-batches are not known.")
    micro = int(settings.train_micro_batch_size_per_gpu)
    mesh, stage = mesh_of(settings, world.size), settings.zero_optimization.stage
    if mesh.pp > 1:
        raise ConfigError("the model is in pipeline stages, which a plan at start does not cover.")
    space: dict[str, tuple[Any, ...]] = {axis: (getattr(mesh, axis),) for axis in ("pp", "tp", "sp", "cp", "ep")}
    space |= {"micro": (micro,), "recompute": ("none",), "offload": ("none",), "virtual": (1,), "stage": (stage,)}
    space |= {"schedule": ("1f1b",), "order": (order_name(mesh),)}
    space |= {"shards": ("all",) if mesh.dp_replicate == 1 else ("node",)}
    if PARALLEL not in keys:
        said = {"tp_sequence_parallel": False, "tp_loss_parallel": False, **fixed.get("parallel", {})}
        fixed["parallel"] = said
    if STAGE in keys:
        space |= {"stage": (1, 2, 3), "offload": ("none", "optimizer", "all")}
    if PARALLEL in keys:
        space |= {"tp": (1, 2, 4, 8), "shards": ("all", "node")}
    node = _machine(world)
    made = plan(
        _like(model),
        world.size,
        machine=node,
        sequence=min(longest, 4096),
        global_batch=int(settings.train_batch_size),
        config=fixed,
        space=space,
        num_trials=_NUM_TRIALS,
    )
    best = made.best
    if best is not None:  # of those that are as fast, the one that shards least
        close = [trial for trial in made.trials if trial.fits(made.request) and trial.seconds <= _CLOSE * best.seconds]
        best = min(close, key=lambda trial: trial.candidate.stage)
    if best is None:
        assert made.tightest is not None
        raise ConfigError(f"nothing fits: {made.tightest[1]} needs {format_bytes(made.tightest[0].nbytes)}.")
    config = {**values, "zero_optimization": best.config["zero_optimization"]}
    if PARALLEL in keys:
        config.pop("train_batch_size", None)
        config["gradient_accumulation_steps"] = best.candidate.num_micro(made.request)
        config["parallel"] = best.config.get("parallel", {})
    others = [f"{trial.candidate}: {trial.seconds:.3g} s" for trial in made.trials if trial is not best]
    why = (
        f'"auto" for {world.size} ranks ({node.name}): {best.candidate}, {best.seconds:.3g} s a step and'
        f" {format_bytes(best.nbytes)} in a dry run"
        + (f"; slower or larger: {', '.join(others)}" if others else "")
        + f"; {sum(made.rejected.values())} of {len(made.ranked) + sum(made.rejected.values())} do not fit or divide."
    )
    return config, why


def _machine(world: World) -> GpuNode:
    """The simulated machine that is most like this one."""
    device = Device(world.device)
    if world.device.type == "cpu":
        ranks = world.size
        links = Links(_CPU_LINK, _CPU_LINK, kind="pcie")
        return replace(
            machine_of("l40s"),
            name="CPU ranks",
            gpu_nbytes=host_available_nbytes() // ranks,
            gpus_per_node=ranks,
            links=links,
        )
    free = device.free_nbytes()
    return replace(machine_of(nearest_machine(device.name, free) or "a100-80g"), gpu_nbytes=free)


def _like(model: nn.Module) -> Callable[[], nn.Module]:
    """A function that builds the model again, without its values; it is called in a simulation."""

    def build() -> nn.Module:
        tensors = [*model.parameters(), *model.buffers()]
        memo: dict[int, Any] = {}
        for tensor in tensors:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return copy.deepcopy(model, memo)

    return build
