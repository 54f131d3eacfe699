"""What model states need, in bytes, under mixed precision with Adam, before anything is run.

    bytes an element       device                          host, with offload
    parameter, 16 bit      2, at stage 3 divided by N      2 / nodes, where parameters are offloaded too
    gradient, fp32 sum     4 / N                           4 / nodes
    main parameter, fp32   4 / N                           4 / nodes
    two moments, fp32      8 / N                           8 / nodes

N: all ranks. In addition, one layer is gathered while it is used (2) and has its gradient (2). On the host, a model
that is constructed without ``zero.Init`` exists once for each local rank in fp32 (4). Activations are not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

from shoal.text import format_bytes, format_count, table


def _sizes_of(model: nn.Module) -> tuple[int, int]:
    """Elements of all parameters, and of the largest layer (a module's own parameters). Sharded ones count whole."""
    total = sum({id(p): p.numel() for p in model.parameters()}.values())
    largest = max((sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()), default=0)
    return total, largest


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Host bytes of a node, device bytes of a rank."""
    ranks = num_gpus_per_node * num_nodes
    loading = 4 * total_params * num_gpus_per_node
    if cpu_offload:
        host = max(loading, 16 * total_params / num_nodes)
        return int(host * additional_buffer_factor), int(2 * total_params + 4 * total_params / ranks)
    return int(loading * additional_buffer_factor), int(2 * total_params + 16 * total_params / ranks)


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
    """Host bytes of a node, device bytes of a rank, bytes of the largest layer while it is in use."""
    ranks = num_gpus_per_node * num_nodes
    layer = 4 * largest_layer_params
    host: float = 4 * (largest_layer_params if zero_init else total_params) * num_gpus_per_node
    device = layer
    if not cpu_offload:
        device += int(18 * total_params / ranks)
    elif cpu_offload_params:
        host = max(host, 18 * total_params / num_nodes)
    else:
        host = max(host, 16 * total_params / num_nodes)
        device += int(2 * total_params / ranks)
    return int(host * additional_buffer_factor), device, layer


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Write the estimates for a model to stdout, with offload and without."""
    total, _ = _sizes_of(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Write the estimates for a number of parameters to stdout, with offload and without."""
    rows = []
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        rows.append(_row(host, device, f"offload_optimizer={'cpu' if offload else 'none'}"))
    _show(total_params, None, num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Write the estimates for a model to stdout, with each kind of offload."""
    total, largest = _sizes_of(model)
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
            host, device, _ = estimate_zero3_model_states_mem_needs(
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
            rows.append(_row(host, device, options))
    _show(total_params, largest_layer_params, num_gpus_per_node, num_nodes, rows)


def _show(total: int, largest: int | None, per_node: int, nodes: int, rows: Sequence[Sequence[object]]) -> None:
    """Write a table of estimates to stdout."""
    layer = "" if largest is None else f", the largest layer {format_count(largest)}"
    sys.stdout.write(
        f"Model states of {format_count(total)} parameters{layer}, on {nodes} node(s) of {per_node} device(s):\n"
        + table(rows, ["host, a node", "device, a rank", "options"])
        + "\n"
    )


def _row(host: int, device: int, options: str) -> list[str]:
    return [format_bytes(host), format_bytes(device), options]
