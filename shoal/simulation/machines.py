"""What GPUs, host memory, buses and networks reach: the figures that the times of a dry run are computed from.

Peaks are the manufacturers' (NVIDIA H100 and H200 Tensor Core GPU data sheets, DGX H100 and H200 data sheets), without
sparsity. What is reached of them differs with sizes and power; the fractions are one for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shoal.errors import UsageError

_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6


@dataclass(frozen=True)
class GpuNode:
    """A node with GPUs. Rates are what is reached, per second and per GPU; bytes in one direction.

    Attributes: ``host_bandwidth``: of all host memory of the node. ``launch_seconds``: that the host needs to queue one
    kernel, copy or collective. ``kernel_seconds``: that the shortest kernel takes. ``latency``, ``network_latency``: of
    a collective inside a node, and over several.
    """

    name: str
    matrix_flops: Mapping[torch.dtype, float]
    memory_bandwidth: float
    vector_flops: float = 0.7 * 67 * _TERA
    attention_fraction: float = 0.6  # of what plain matrix products reach; FlashAttention-3, arXiv:2407.08608, fig. 5
    nvlink_bandwidth: float = 0.8 * 450 * _GIGA  # nccl-tests' bus bandwidth over NVLink 4 is 340 to 370 GB/s
    network_bandwidth: float = 0.9 * 50 * _GIGA  # one 400 Gb/s port for each GPU
    bus_bandwidth: float = 0.86 * 64 * _GIGA  # PCIe 5.0 x16, page-locked memory
    pageable_bandwidth: float = 10 * _GIGA  # copies of ordinary host memory
    host_bandwidth: float = 0.75 * 614 * _GIGA  # two sockets of eight DDR5-4800 channels
    disk_bandwidth: float = 25 * _GIGA  # eight PCIe 4.0 drives, each 3.2 GB/s written
    host_nbytes: int = 2 * 1024**4  # of a node
    gpus_per_node: int = 8
    launch_seconds: float = 5 * _MICRO
    kernel_seconds: float = 2 * _MICRO
    latency: float = 15 * _MICRO
    network_latency: float = 30 * _MICRO

    def flops(self, dtype: torch.dtype) -> float:
        """Floating-point operations of matrix products per second."""
        return self.matrix_flops.get(dtype, self.vector_flops)

    def collective_seconds(self, op: str, nbytes: int, ranks: tuple[int, ...]) -> float:
        """How long a collective takes that all of ``ranks`` call at the same time.

        Args:
            nbytes: of the whole tensor: all ranks' parts of an all-gather, what each rank brings to the others.

        Source: the ring algorithms' traffic per rank, (p - 1) / p of the tensor, twice for an all-reduce. Over several
        nodes each rank of a node carries its part through its own port.
        """
        size = len(ranks)
        nodes: dict[int, int] = {}
        for rank in ranks:
            nodes[rank // self.gpus_per_node] = nodes.get(rank // self.gpus_per_node, 0) + 1
        traffic = nbytes * (size - 1) / size * {"all_reduce": 2.0}.get(op, 1.0)
        if op in ("send", "recv", "broadcast"):
            traffic = float(nbytes)
        if len(nodes) == 1:
            return self.latency + traffic / self.nvlink_bandwidth
        per_node = min(nodes.values())
        if op == "all_to_all":  # what leaves the node goes through this rank's own port
            return self.network_latency + nbytes * (size - per_node) / size / self.network_bandwidth
        return self.network_latency + traffic / min(self.nvlink_bandwidth, per_node * self.network_bandwidth)


def _hopper(name: str, memory_bandwidth: float) -> GpuNode:
    matrix = {
        torch.bfloat16: 0.7 * 989 * _TERA,
        torch.float16: 0.7 * 989 * _TERA,
        torch.float8_e4m3fn: 0.6 * 1979 * _TERA,
        torch.float8_e5m2: 0.6 * 1979 * _TERA,
        torch.float32: 0.7 * 67 * _TERA,  # PyTorch's default: no TF32
        torch.float64: 0.7 * 67 * _TERA,
    }
    return GpuNode(name, matrix, 0.85 * memory_bandwidth)


MACHINES = {"h100": _hopper("h100", 3.35 * _TERA), "h200": _hopper("h200", 4.8 * _TERA)}


def machine_of(name: str | GpuNode) -> GpuNode:
    """A machine by its name, or itself. Raises: UsageError: an unknown name."""
    if isinstance(name, GpuNode):
        return name
    if name not in MACHINES:
        raise UsageError(
            f"there are no figures of a machine {name!r}.",
            do=f"use one of {', '.join(map(repr, MACHINES))}, or give a shoal.simulation.machines.GpuNode.",
            code="dry-run-machine",
        )
    return MACHINES[name]
