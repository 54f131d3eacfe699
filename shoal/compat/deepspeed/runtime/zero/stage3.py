"""``deepspeed.runtime.zero.stage3``: memory estimates, the class of the optimizers, and gathering for generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shoal.compat.by_stage import DeepSpeedZeroOptimizer_Stage3
from shoal.compat.estimates import row, show, sizes_of, stage_3_bytes
from shoal.engine.engine import Engine
from shoal.zero import GatheredParameters


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The engine's model, with every parameter gathered and all hooks inactive until the block ends.

    Communicates: an all_gather per unit, once.
    Memory: all parameters, on every rank.
    """
    if not isinstance(model, Engine):
        with GatheredParameters(model.parameters()):
            yield model
        return
    offload = model.parameter_offload
    with GatheredParameters(model.module.parameters()):
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        offload.param_coordinator._invalidate_trace()
        try:
            yield model.module
        finally:
            offload._register_deepspeed_module(offload.module)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Host bytes of a node, device bytes of a rank, bytes of the largest layer; see ``shoal.compat.estimates``."""
    return stage_3_bytes(
        total_params,
        largest_layer_params,
        num_gpus_per_node,
        num_nodes,
        cpu_offload,
        cpu_offload_params,
        zero_init,
        additional_buffer_factor,
    )


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Write the estimates for a model to stdout, with each kind of offload."""
    total, largest = sizes_of(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Write the estimates for a number of parameters to stdout, with each kind of offload."""
    rows = []
    for parameters, optimizer in ((True, True), (False, True), (False, False)):
        for zero_init in (True, False):
            host, device, _ = stage_3_bytes(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                parameters,
                zero_init,
                additional_buffer_factor,
            )
            tiers = ("cpu" if parameters else "none", "cpu" if optimizer else "none")
            options = f"offload_param={tiers[0]}, offload_optimizer={tiers[1]}, zero_init={int(zero_init)}"
            rows.append(row(host, device, options))
    show(total_params, largest_layer_params, num_gpus_per_node, num_nodes, rows)


__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "unwrap_model_for_generation",
]
