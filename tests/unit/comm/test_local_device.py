"""Which device a rank takes, on a machine that is made up."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shoal.comm.world as world_module
from shoal.comm.local_device import device_of, local_rank_by_host, publish_host, register_device
from shoal.comm.world import current_world
from shoal.errors import ConfigError

Machine = Callable[..., list[int]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """``machine(devices=8, current=0)``: pretend to have GPUs. Returns: the devices that are set, as they are set."""

    def pretend(devices: int = 8, current: int = 0) -> list[int]:
        chosen: list[int] = []
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: chosen[-1] if chosen else current)
        monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
        return chosen

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return pretend


def cuda(index: int) -> torch.device:
    return torch.device("cuda", index)


def test_the_local_rank_is_the_device_unless_something_else_was_chosen(machine: Machine) -> None:
    machine()
    assert device_of(3, None) == cuda(3)
    assert device_of(None, None) == cuda(0)
    assert device_of(3, "nccl", bound=cuda(6)) == cuda(6)
    assert device_of(3, "gloo") == torch.device("cpu")
    machine(current=5)
    assert device_of(3, None) == cuda(5)


def test_too_many_ranks_on_a_machine_are_an_error_and_no_shared_device(machine: Machine) -> None:
    machine(devices=4)
    with pytest.raises(ConfigError, match="local rank 5 has no device of its own: this machine shows 4"):
        device_of(5, None)
    machine(devices=1)
    assert device_of(5, None) == cuda(0)  # each rank is shown its own


def test_two_ranks_on_one_device_are_an_error_that_names_both() -> None:
    store = dist.HashStore()
    register_device(store, 0, "GPU-1")
    register_device(store, 1, "GPU-2")
    with pytest.raises(ConfigError, match="ranks 1 and 3 use the same device GPU-2"):
        register_device(store, 3, "GPU-2")


def test_without_a_launchers_local_rank_ranks_of_one_host_are_counted() -> None:
    store = dist.HashStore()
    hosts = ["a", "b", "a", "b", "b"]
    for rank, host in enumerate(hosts):
        publish_host(store, rank, host)
    assert [local_rank_by_host(store, rank, host) for rank, host in enumerate(hosts)] == [0, 0, 1, 1, 2]


def test_a_lone_rank_uses_the_device_that_the_script_has_set(machine: Machine) -> None:
    machine(current=2)
    world = current_world()
    assert world.device == cuda(2)
    assert current_world() is world
    machine(current=3)
    assert current_world().device == cuda(3)
    assert not world.is_closed


def test_an_existing_group_sets_the_current_device(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of a group that the script made, without LOCAL_RANK: the second one takes device 1."""
    chosen = machine()
    store = dist.HashStore()
    publish_host(store, 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_rank", lambda: 1)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        # The other rank is made up: its guard would be waited for.
        monkeypatch.setattr(world_module, "HangGuard", lambda *args: SimpleNamespace(stop=lambda: None))
        monkeypatch.setattr(world_module, "identity_of", lambda device: f"GPU-{device.index}")
        world = current_world()
        assert (world.local_rank, world.device, chosen) == (1, cuda(1), [1])
        world.close()
        register_device(dist.PrefixStore("shoal/2", store), 0, "GPU-1")  # rank 0 was given the same one
        chosen.clear()
        with pytest.raises(ConfigError, match="ranks 0 and 1 use the same device GPU-1"):
            current_world()
        monkeypatch.setitem(os.environ, "RANK", "1")
        monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
        monkeypatch.setitem(os.environ, "LOCAL_RANK", "7")
        world = current_world()
        assert (world.local_rank, world.device) == (7, cuda(1))  # set before, so it stays
        world.close()
    finally:
        dist.destroy_process_group()
        world_module._process.close()


def test_the_device_of_a_group_of_one_rank_is_the_current_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = machine()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        monkeypatch.setattr(dist.group.WORLD, "bound_device_id", cuda(3))
        world = current_world()
        assert (world.device, chosen) == (cuda(3), [3])
        world.close()
    finally:
        dist.destroy_process_group()
        world_module._process.close()


def test_a_missing_local_rank_is_not_zero(machine: Machine) -> None:
    from shoal.comm.environment import read_launch

    launch: Any = read_launch({"RANK": "3", "WORLD_SIZE": "4"})
    assert launch.local_rank is None
