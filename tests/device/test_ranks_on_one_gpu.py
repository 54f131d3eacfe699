"""Ranks that are threads share one GPU: parameters, gradients and states are sharded there, and every axis is divided.

NCCL does not run here (it refuses two ranks on one device): collectives are kernels that read the other ranks' memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.mesh import Mesh
from tests.helpers import models
from tests.helpers.composition import Combination, all_pairs, named, settings_of
from tests.helpers.composition_runs import check_run
from tests.helpers.training import STAGES, adamw, batch, config, largest_difference, make, start

pytestmark = pytest.mark.device

STEPS = 3
PAIRS = all_pairs()
EXACT, ROUNDED = 20.0, 4.0  # the bounds are those of the CPU's kernels, in last bits


def gpu() -> torch.device:
    return torch.device("cuda", torch.accelerator.current_device_index())


def alone(size: int) -> dict[str, torch.Tensor]:
    model = make(models.Plain).to(gpu())
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        for rank in range(size):
            (model(*(tensor.to(gpu()) for tensor in batch(step, rank, size))) / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().cpu() for name, value in model.named_parameters()}


def train(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    world = current_world()
    engine = start(models.Plain, settings, adamw)
    assert engine.device == world.device == gpu()
    for step in range(STEPS):
        inputs = (tensor.to(world.device) for tensor in batch(step, world.rank, world.size))
        engine.backward(engine(*inputs))
        torch.cuda._sleep(1_000_000)
        engine.step()
    model = engine.module
    engine.destroy()
    return {name: value.detach().cpu() for name, value in model.named_parameters()}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("stage", "places"),
    [*((stage, ()) for stage in STAGES), (1, ("optimizer",)), (2, ("optimizer",)), (3, ("optimizer",)),
     (3, ("param",)), (3, ("param", "optimizer"))],
)  # fmt: skip
def test_sharded_ranks_on_one_gpu_train_as_one_process_does(stage: int, places: tuple[str, ...], size: int) -> None:
    zero = {f"offload_{place}": {"device": "cpu"} for place in places}
    found = run_ranks(size, train, config(stage, zero_optimization=zero), device=gpu())
    expected = alone(size)
    for values in found:
        assert largest_difference(values, expected) <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_collectives_of_ranks_on_one_gpu_have_the_bits_of_ranks_on_the_cpu(dtype: torch.dtype) -> None:
    def collect() -> list[torch.Tensor]:
        world = current_world()
        comm = world.communicator("dp", Mesh.of(world.size))
        generator = torch.Generator().manual_seed(world.rank)
        full = torch.randn(12 * world.size, generator=generator).to(dtype).to(world.device)
        shard = torch.empty(12, dtype=dtype, device=world.device)
        whole, parts = torch.empty_like(full), torch.empty_like(full)
        comm.reduce_scatter(full.clone(), shard, scale=1 / world.size, label="x").drain()
        comm.all_gather(whole, shard, label="x").drain()
        comm.all_to_all(parts, full, label="x").drain()
        reduced = comm.all_reduce(full.clone(), scale=0.5, label="x").wait()
        comm.broadcast(full, 1, label="x").drain()
        return [tensor.cpu() for tensor in (shard, whole, parts, reduced, full)]

    for ours, theirs in zip(run_ranks(3, collect, device=gpu()), run_ranks(3, collect), strict=True):
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("combination", PAIRS, ids=map(named, PAIRS))
def test_any_two_settings_together_end_where_one_process_on_the_gpu_ends(combination: Combination) -> None:
    settings, run = settings_of(combination)
    # torch.compile is one for the process: ranks that are threads would wait for each other's compilation.
    run = dataclasses.replace(run, compiled="no")
    check_run(settings, run, gpu(), EXACT if run.dtype == "float32" and not run.autocast else ROUNDED)
