"""What one rank will hold, in bytes, before a model has memory: the ledger's formula for what ``build`` plans.

The model may be on the meta device or made of fake tensors: only shapes, dtypes and names are read.

    parameters, gradients,        ``GroupMemory``: what the ledger compares with the bytes that an engine holds
    main parameters, state
    gathered                      the two largest units, as ``fit_to_memory`` reckons with them
    buffers                       staging buffers; on the host, what is on its way to and from an update there
    activations                   what autograd saves for backward in a forward pass on fake tensors
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.build.plan import BuildPlan, GroupPlan
from shoal.comm.fake import FakeTransport
from shoal.comm.world import World
from shoal.config import load
from shoal.engine.model_parts import axes_of
from shoal.engine.settings import plan_of
from shoal.errors import UsageError
from shoal.parallel.saved_tensors import counting_saved
from shoal.sharding.memory_model import ADAM_STATES
from shoal.sharding.offloaded_gradient import MAX_SHARDS
from shoal.sharding.placement import Tier
from shoal.sharding.staging import MAX_BUFFERS_ON_ACCELERATOR

KINDS = ("parameter", "gradient", "master", "optimizer state", "gathered", "buffers")
_ONE_STATE = ("adagrad", "lion")  # per element; others keep Adam's two, SGD its momentum


@dataclass(frozen=True)
class Estimate:
    """The bytes of one rank, by kind and tier. Padding is counted."""

    stage: int
    state_tier: Tier
    parameter_tier: Tier
    nbytes: Mapping[tuple[str, Tier], int]

    def on(self, tier: Tier, *kinds: str) -> int:
        """Bytes of these kinds (of all without one) on a tier."""
        return sum(nbytes for (kind, at), nbytes in self.nbytes.items() if at is tier and (not kinds or kind in kinds))


def estimate(model: nn.Module, config: Mapping[str, Any], num_ranks: int) -> Estimate:
    """The memory of one of ``num_ranks`` data-parallel ranks on an accelerator, whose host memory is separate.

    Args:
        config: as ``initialize`` takes it.

    Raises: UsageError: the config divides the model over other axes, or leaves the tiers to the free memory.
        ConfigError, ModelError: as ``initialize`` does.
    """
    settings = load(dict(config), world_size=num_ranks)
    plan = plan_of(settings, num_ranks)
    if plan.mesh.dp != num_ranks or plan.mesh.ep > 1:
        raise UsageError(
            "the config divides the model over tensor-, sequence-, pipeline- or expert-parallel ranks; the estimate"
            " covers data-parallel ranks only.",
            do='leave "parallel" out of the file, and give --ranks the number of data-parallel ranks.',
        )
    zero = replace(plan.zero, is_host_separate=True)
    world = World(0, num_ranks, 0, torch.device("cpu"), "fake", FakeTransport(0))
    is_apart = zero.num_outer_states > 0
    axes = axes_of(plan.mesh, partial(world.communicator, mesh=plan.mesh), are_replicas_apart=is_apart)
    group_of = {id(parameter): 0 for parameter in model.parameters() if parameter.requires_grad}
    build_plan = BuildPlan.of(model, group_of, zero, plan.precision, axes, {})
    units = build_plan.units(model)
    sizes = [unit.memory for unit in units]
    num_states = _num_states(config.get("optimizer", {}))
    nbytes: Counter[tuple[str, Tier]] = Counter()
    groups: list[GroupPlan] = []
    for unit, on in zip(units, zero.tiers(sizes), strict=True):
        groups += unit.on(on, is_gradient_offloaded=on.state is not Tier.DEVICE).groups
        if on.state is not Tier.DEVICE:
            nbytes["buffers", Tier.HOST] += unit.memory.transfer_nbytes
    for group in groups:
        nbytes.update(_of_group(build_plan, group, num_states))
    counted_twice = nbytes["gradient", Tier.HOST] + nbytes["outer state", Tier.HOST]  # in the transfers, too
    nbytes["buffers", Tier.HOST] -= counted_twice
    if num_ranks > 1 or zero.parameter_tier is not Tier.DEVICE:
        largest = sorted((size.gathered_nbytes for size in sizes), reverse=True)
        nbytes["gathered", Tier.DEVICE] += sum(largest[:2])
        nbytes["buffers", Tier.DEVICE] += _staging_nbytes(build_plan, groups, num_ranks)
    return Estimate(zero.stage, zero.state_tier, zero.parameter_tier, nbytes)


def _staging_nbytes(plan: BuildPlan, groups: Sequence[GroupPlan], num_ranks: int) -> int:
    """The buffers that gradients are reduced in, and from which they are copied to the host, on an accelerator."""
    alike: dict[object, list[int]] = {}
    shards: dict[object, int] = {}
    for group in groups:
        if group.is_trained and group.row.is_gradient_sharded:
            memory = group.memory(plan.precision)
            alike.setdefault((group.layout.signature, group.dtype), []).append(memory.whole)
            if group.row.state.tier is not Tier.DEVICE:
                shards[memory.gradient, memory.gradient_dtype] = memory.gradient
    staged = sum(sum(sizes[:MAX_BUFFERS_ON_ACCELERATOR]) for sizes in alike.values())
    return staged + (MAX_SHARDS + (num_ranks > 1)) * sum(shards.values())


def _num_states(section: Mapping[str, Any]) -> int:
    """Optimizer states of one element per element."""
    kind = str(section.get("type", "AdamW")).lower()
    if kind == "sgd":
        return int(bool(section.get("params", {}).get("momentum")))
    return 1 if kind in _ONE_STATE else ADAM_STATES


def _of_group(plan: BuildPlan, group: GroupPlan, num_states: int) -> dict[tuple[str, Tier], int]:
    """What ``build`` gives one group memory for."""
    row, memory = group.row, group.memory(plan.precision)
    nbytes = {("parameter", row.parameter.tier): memory.parameter}
    if not group.is_trained:
        return nbytes
    is_shard_offloaded, is_state_offloaded = (kept.tier is not Tier.DEVICE for kept in (row.parameter, row.state))
    has_own_main = row.parameter.tier is Tier.DISK or is_state_offloaded != is_shard_offloaded
    memory = replace(memory, has_own_main=memory.has_own_main or has_own_main)
    nbytes["gradient", row.gradient_between.tier] = memory.gradient
    nbytes["master", row.state.tier] = memory.main
    nbytes["optimizer state", row.state.tier] = memory.state(num_states)
    if memory.outer:
        nbytes["outer state", Tier.HOST if is_state_offloaded else Tier.DEVICE] = memory.outer
    return nbytes


def activation_nbytes(model: nn.Module, dtype: torch.dtype, run: Callable[[nn.Module], torch.Tensor]) -> int:
    """Bytes that autograd saves in one forward pass, each storage once, parameters left out.

    Args:
        model: of fake tensors, whose parameters this casts to ``dtype``.
        run: gives its loss, inside of their ``FakeTensorMode``.
    """
    cast: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                own = cast.setdefault(id(parameter), nn.Parameter(parameter.to(dtype), parameter.requires_grad))
                module._parameters[name] = own
    with counting_saved(model.parameters()) as num_saved:
        run(model)
    return num_saved()


def variants(config: Mapping[str, Any], stages: Sequence[int], *, with_disk: bool) -> Iterator[dict[str, Any]]:
    """The config at each stage with each offload that the stage has, from none to all."""
    for stage in stages:
        for state, parameter in (("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "nvme")):
            if (stage == 0 and state != "none") or (stage < 3 and parameter != "none"):
                continue
            if state == "nvme" and not with_disk:
                continue
            zero = {**config.get("zero_optimization", {}), "stage": stage}
            for key, device in (("offload_optimizer", state), ("offload_param", parameter)):
                zero.pop(key, None)
                if device != "none":
                    zero[key] = {"device": device, **({"nvme_path": "."} if device == "nvme" else {})}
            yield {**config, "zero_optimization": zero}
