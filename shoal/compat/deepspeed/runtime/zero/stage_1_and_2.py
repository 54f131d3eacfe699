"""``deepspeed.runtime.zero.stage_1_and_2``: memory estimates, and the class of the optimizers."""

from __future__ import annotations

from torch import nn

from shoal.compat.by_stage import DeepSpeedZeroOptimizer
from shoal.compat.estimates import row, show, sizes_of, stage_2_bytes


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Host bytes of a node, device bytes of a rank; see ``shoal.compat.estimates``."""
    return stage_2_bytes(total_params, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Write the estimates for a model to stdout, with offload and without."""
    total, _ = sizes_of(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Write the estimates for a number of parameters to stdout, with offload and without."""
    rows = []
    for offload in (True, False):
        host, device = stage_2_bytes(total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor)
        rows.append(row(host, device, f"offload_optimizer={'cpu' if offload else 'none'}"))
    show(total_params, None, num_gpus_per_node, num_nodes, rows)


__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]
