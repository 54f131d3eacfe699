"""Figures of this machine, measured by ranks: a file that dry runs read, and what a dry run makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from shoal.planner.calibrate import measure
from shoal.simulation.collective_times import collective_seconds
from shoal.simulation.machines import GpuNode, machine_of


@pytest.fixture(scope="module")
def figures() -> Any:
    return run_ranks(2, lambda: measure(current_world(), 0.02, 1 << 18))[0]


@pytest.fixture
def node(figures: Any, tmp_path: Path) -> GpuNode:
    path = tmp_path / "here.yaml"
    path.write_text(yaml.safe_dump(figures))
    return machine_of(path)


def test_the_file_is_a_machine_of_cpu_ranks(node: GpuNode) -> None:
    assert node.is_cpu and node.gpus_per_node == 2
    assert {torch.float32, torch.bfloat16, torch.float64} <= set(node.matrix_flops)
    assert 1e8 < node.flops(torch.float32) < 1e13
    assert 1e7 < node.memory_bandwidth < 1e12
    assert 1e-7 < node.launch_seconds < 1e-2
    assert node.context_nbytes > 0 and node.overlap == 1
    assert node.operator_bandwidths["gelu"] < 1e12


def test_the_link_has_the_time_of_a_small_message(figures: Any, node: GpuNode) -> None:
    """An all-reduce of threads takes microseconds to milliseconds; NCCL's constants give another figure."""
    small = collective_seconds("all_reduce", 1 << 10, (0, 1), 2, node.links)
    assert small == pytest.approx(
        figures["node"]["link"]["latency_factor"]
        * collective_seconds("all_reduce", 1 << 10, (0, 1), 2, replace(node.links, local=1e18, latency_factor=1.0)),
        rel=0.2,
    )


def test_the_host_waits_for_each_operation_of_a_cpu(node: GpuNode) -> None:
    """Ten products take their floating-point operations; nothing overlaps with them."""
    with shoal.dry_run(1, machine=replace(node, launch_seconds=0.0, memory_bandwidth=1e15)) as run:
        left = torch.zeros(256, 256)
        with run.step():
            for _ in range(10):
                left @ left
    assert run.steps[0].seconds == pytest.approx(10 * 2 * 256**3 / node.flops(torch.float32), rel=0.1)
    with shoal.dry_run(1, machine=replace(node, launch_seconds=1.0, memory_bandwidth=1e15)) as run:
        left = torch.zeros(256, 256)
        with run.step():
            for _ in range(10):
                left @ left
    assert run.steps[0].seconds >= 10 * (1 + 2 * 256**3 / node.flops(torch.float32)) * 0.99


def test_a_figure_that_is_missing_is_named(figures: Any, tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text(yaml.safe_dump({**figures, "node": {**figures["node"], "launch": -1.0}}))
    with pytest.raises(UsageError, match=r"node\.launch"):
        machine_of(path)
