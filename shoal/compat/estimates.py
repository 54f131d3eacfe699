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


def sizes_of(model: nn.Module) -> tuple[int, int]:
    """Elements of all parameters, and of the largest layer (a module's own parameters). Sharded ones count whole."""
    total = sum({id(p): p.numel() for p in model.parameters()}.values())
    largest = max((sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()), default=0)
    return total, largest


def stage_2_bytes(total: int, per_node: int, nodes: int, cpu_offload: bool, factor: float) -> tuple[int, int]:
    """Host bytes of a node, device bytes of a rank."""
    ranks = per_node * nodes
    loading = 4 * total * per_node
    if cpu_offload:
        return int(max(loading, 16 * total / nodes) * factor), int(2 * total + 4 * total / ranks)
    return int(loading * factor), int(2 * total + 16 * total / ranks)


def stage_3_bytes(
    total: int,
    largest: int,
    per_node: int,
    nodes: int,
    cpu_offload: bool,
    cpu_offload_params: bool,
    zero_init: bool,
    factor: float,
) -> tuple[int, int, int]:
    """Host bytes of a node, device bytes of a rank, bytes of the largest layer while it is in use."""
    ranks = per_node * nodes
    layer = 4 * largest
    loading = 4 * (largest if zero_init else total) * per_node
    if not cpu_offload:
        return int(loading * factor), layer + int(18 * total / ranks), layer
    if cpu_offload_params:
        return int(max(loading, 18 * total / nodes) * factor), layer, layer
    return int(max(loading, 16 * total / nodes) * factor), layer + int(2 * total / ranks), layer


def show(total: int, largest: int | None, per_node: int, nodes: int, rows: Sequence[Sequence[object]]) -> None:
    """Write a table of estimates to stdout."""
    layer = "" if largest is None else f", the largest layer {format_count(largest)}"
    sys.stdout.write(
        f"Model states of {format_count(total)} parameters{layer}, on {nodes} node(s) of {per_node} device(s):\n"
        + table(rows, ["host, a node", "device, a rank", "options"])
        + "\n"
    )


def row(host: int, device: int, options: str) -> list[str]:
    return [format_bytes(host), format_bytes(device), options]
