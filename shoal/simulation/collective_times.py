"""How long a collective takes: latency and bandwidth of the algorithm and protocol that NCCL would choose.

    algorithm   collectives         steps                            bytes on a rank's link, of a tensor of n
    ring        all                 ranks - 1, twice an all_reduce   n (ranks - 1) / ranks, twice an all_reduce
    tree        all_reduce          2 (ranks of a node - 1 + log2 nodes)                     2 n
    direct      all_to_all          1                                what leaves this rank
    direct      send, recv          1                                n
    direct      batch               1                                n, of the direction with more

    protocol    a step takes        of the link's bandwidth
    LL          least               a quarter, a third inside of a node (no all_reduce), and little on fast links
    LL128       little              120/128, 0.7 where a rank sends over the network alone
    Simple      most                all

Several nodes: each rank of a node carries its part through its own port, so that a ring is as fast as the ports of the
ranks that it has in one node, and never faster than the link inside of a node.

Source of the constants: src/graph/tuning.cc of NCCL 2.20.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

_MICRO, _GIGA = 1e-6, 1e9
RING, TREE = "ring", "tree"
LL, LL128, SIMPLE = "LL", "LL128", "Simple"
NVLINK, PCIE, NETWORK = "nvlink", "pcie", "network"

_START = {  # microseconds
    RING: {LL: 6.6, LL128: 14.0, SIMPLE: 8.4},
    TREE: {LL: 6.8, LL128: 14.0, SIMPLE: 0.0},
}
_STEP = {  # microseconds of one step
    NVLINK: {RING: {LL: 0.6, LL128: 1.9, SIMPLE: 3.4}, TREE: {LL: 0.6, LL128: 1.25, SIMPLE: 28.0}},
    PCIE: {RING: {LL: 1.0, LL128: 2.5, SIMPLE: 5.7}, TREE: {LL: 1.0, LL128: 1.9, SIMPLE: 28.0}},
    NETWORK: {RING: {LL: 2.7, LL128: 4.0, SIMPLE: 14.0}, TREE: {LL: 5.0, LL128: 8.5, SIMPLE: 28.0}},
}
_POST = {LL: 2.0, LL128: 2.0, SIMPLE: 6.0}  # microseconds that a step of a ring over several nodes takes at least
_MOST_LL = {"volta": (39.0, 39.0, 20.4), "ampere": (87.7, 22.5, 19.0), "hopper": (87.7, 22.5, 19.0)}  # 1, 2, more nodes


@dataclass(frozen=True)
class Links:
    """What connects GPUs.

    Args:
        local: bytes per second of a GPU to the others of its node, in one direction; ``kind``: nvlink or pcie.
        network: of a GPU's port to other nodes.
        network_latency: seconds that a step over the network takes in addition to what it takes over InfiniBand.
        latency_factor: of all other latencies; 1: NCCL's on NVIDIA's GPUs.
        generation: of the GPUs: volta, ampere or hopper.
        num_channels: that NCCL opens for collectives.
    """

    local: float
    network: float
    kind: str = NVLINK
    network_latency: float = 0.0
    latency_factor: float = 1.0
    generation: str = "hopper"
    num_channels: int = 24


@dataclass(frozen=True)
class _Ring:
    """The ranks of a collective, by node."""

    size: int
    num_nodes: int
    in_node: int  # ranks of the node that has the fewest of them

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, ranks: tuple[int, ...], gpus_per_node: int) -> _Ring:
        nodes: dict[int, int] = {}
        for rank in ranks:
            nodes[rank // gpus_per_node] = nodes.get(rank // gpus_per_node, 0) + 1
        return cls(len(ranks), len(nodes), min(nodes.values()))


def collective_seconds(op: str, nbytes: int, ranks: Sequence[int], gpus_per_node: int, links: Links) -> float:
    """Of one collective that all of ``ranks`` call at the same time, over links that nothing else uses.

    Args:
        op: as the recorder names it.
        nbytes: of the whole tensor: all ranks' parts of an all-gather, what each rank brings to the others.
    """
    ring = _Ring.of(tuple(ranks), gpus_per_node)
    if len(ranks) == 1:
        return 0.0
    if op in ("send", "recv", "batch", "all_to_all"):
        return _direct_seconds(op, nbytes, ring, links)
    algorithms = (RING, TREE) if op == "all_reduce" else (RING,)
    return min(
        _seconds(op, nbytes, ring, links, algorithm, protocol)
        for algorithm in algorithms
        for protocol in (LL, LL128, SIMPLE)
        if protocol != LL128 or links.kind == NVLINK
    )


def link_nbytes(op: str, nbytes: int, ranks: Sequence[int], gpus_per_node: int) -> tuple[float, float]:
    """Bytes that a rank receives over the links inside its node, and over the network.

    A ring enters each node once, and each of the node's ranks carries its part of that.

    Args: as of ``collective_seconds``.
    """
    ring = _Ring.of(tuple(ranks), gpus_per_node)
    if op in ("send", "recv", "batch"):
        received, remote = float(0 if op == "send" else nbytes), float(ring.num_nodes > 1)
    elif op == "broadcast":
        received, remote = float(nbytes), float(ring.num_nodes > 1) / ring.in_node
    else:
        received = (2 if op == "all_reduce" else 1) * nbytes * (ring.size - 1) / ring.size
        remote = (ring.num_nodes > 1) / ring.in_node
        if op == "all_to_all":
            remote = (ring.size - ring.in_node) / max(ring.size - 1, 1)
    return received * (1 - remote), received * remote


def _direct_seconds(op: str, nbytes: int, ring: _Ring, links: Links) -> float:
    is_local = ring.num_nodes == 1
    step = _STEP[links.kind if is_local else NETWORK][RING]
    if op == "all_to_all":
        leaving = nbytes * (ring.size - 1) / ring.size if is_local else nbytes * (ring.size - ring.in_node) / ring.size
    else:
        leaving = float(nbytes)
    latency = _START[RING][SIMPLE] + step[SIMPLE]
    rate = links.local if is_local else links.network
    return latency * links.latency_factor * _MICRO + (0.0 if is_local else links.network_latency) + leaving / rate


def _seconds(op: str, nbytes: int, ring: _Ring, links: Links, algorithm: str, protocol: str) -> float:
    factor = links.latency_factor
    start, local_step, network_step = (
        factor * each[algorithm][protocol] for each in (_START, _STEP[links.kind], _STEP[NETWORK])
    )
    network_step += links.network_latency / _MICRO
    bandwidth = _bandwidth(op, ring, links, algorithm, protocol)
    if algorithm == TREE:
        steps = 2 * ((ring.size // ring.num_nodes - 1) * local_step + math.log2(ring.num_nodes) * network_step)
        return (start + steps) * _MICRO + 2 * nbytes / bandwidth
    if op == "broadcast":  # chunks follow each other
        step = local_step if ring.num_nodes == 1 else network_step
        return (start + step) * _MICRO + nbytes / bandwidth
    passes, between = 1, ring.num_nodes - 1
    if op == "all_reduce":
        passes, between = 2, 2 * ring.num_nodes if ring.num_nodes > 1 else 0
    if ring.num_nodes > 1:
        local_step = max(local_step, factor * _POST[protocol])
    num_local = max(passes * (ring.size - 1) - between, 0)
    latency = start + num_local * local_step + between * network_step
    return latency * _MICRO + passes * nbytes * (ring.size - 1) / ring.size / bandwidth


def _bandwidth(op: str, ring: _Ring, links: Links, algorithm: str, protocol: str) -> float:
    """Bytes per second over each rank's link."""
    bandwidth = links.local
    if ring.num_nodes > 1:
        bandwidth = min(links.local, ring.in_node * links.network)
    most_ll = _MOST_LL[links.generation][min(ring.num_nodes, 3) - 1] * _GIGA
    if algorithm == TREE:
        bandwidth *= 0.92 * 0.85
        parts = {LL: 1 / 3.8, LL128: 7 / 9 if ring.num_nodes == 1 else 120 / 128, SIMPLE: 1.0}
    else:
        is_slow = ring.num_nodes > 1 or op == "all_reduce"
        parts = {LL: 1 / 4 if is_slow else 1 / 3, LL128: 0.7 if ring.size / ring.num_nodes < 2 else 0.92, SIMPLE: 1.0}
    bandwidth *= parts[protocol]
    return min(bandwidth, most_ll) if protocol == LL else bandwidth
