"""``nccl_ub``: buffers in memory that NCCL knows have the values of other buffers, and wait where they must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.nccl import NcclCommunicator
from shoal.comm.protocol import Call
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import CommError
from tests.helpers.compiling import CountsGraphs
from tests.helpers.composition import Combination, Run, settings_of
from tests.helpers.models import Plain
from tests.helpers.simulated_nccl import SimulatedGroup
from tests.helpers.stream_matrix import STREAM_AXES, CheckedTrainer, accelerator_of_thread, plain
from tests.helpers.training import adamw, config, run_steps, start


def trained(combination: Combination, folder: Path) -> list[Any]:
    """The losses and parameters of each rank, whose streams are checked."""
    settings, run = settings_of({**plain(), **combination}, STREAM_AXES)
    run = Run(**{**run.__dict__, "steps": 3, "blocks": 3})

    def rank() -> Any:
        with shoal.check_streams():
            return CheckedTrainer(settings, run, folder, CountsGraphs("aot_eager")).train()

    return run_ranks(run.world_size, rank, timeout=120)


@pytest.mark.parametrize(
    "combination",
    [
        {"stage": "2", "precision": "bf16"},
        {"stage": "3", "accumulation": "2", "recompute": "host"},
        {"stage": "3", "state": "ahead", "parameters": "host", "stream": "of the script"},
        {"stage": "3", "experts": "ep 2", "gathering": "late"},
        {"stage": "3", "hybrid": "hpz", "gathering": "kept"},
    ],
    ids=str,
)
def test_values_are_those_of_other_memory(combination: Combination, tmp_path: Path) -> None:
    pairs = zip(*(trained({**combination, "registered": value}, tmp_path) for value in ("no", "yes")), strict=True)
    for (losses, values), (losses_registered, values_registered) in pairs:
        assert torch.equal(losses, losses_registered)
        assert values.keys() == values_registered.keys()
        assert all(torch.equal(value, values_registered[name]) for name, value in values.items())


@pytest.mark.parametrize("setting", [True, "symmetric"])
def test_what_is_gathered_and_reduced_is_in_the_memory_that_the_group_knows(
    setting: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, bool]] = []
    groups: set[SimulatedGroup] = set()
    before, register = NcclCommunicator.issue, SimulatedGroup.register_mem_pool
    symmetric = []

    def issue(comm: NcclCommunicator, call: Call) -> Any:
        if call.verb in ("all_gather", "reduce_scatter"):
            group, full = comm._group, call.result if call.verb == "all_gather" else call.sent
            assert isinstance(group, SimulatedGroup)
            groups.add(group)
            accelerator: Any = accelerator_of_thread()
            found.append((call.verb, accelerator._storage_of(full).pool in group.pools))
        return before(comm, call)

    def registered(group: SimulatedGroup, pool: Any, **keys: bool) -> None:
        symmetric.append(keys.get("symm", False))
        register(group, pool, **keys)

    monkeypatch.setattr(NcclCommunicator, "issue", issue)
    monkeypatch.setattr(SimulatedGroup, "register_mem_pool", registered)

    def rank() -> None:
        with shoal.check_streams():
            engine = start(Plain, config(3, zero_optimization={"nccl_ub": setting}), adamw)
            run_steps(engine, 2)
            engine.destroy()
            current_world().close()

    run_ranks(2, rank)
    assert symmetric == [setting == "symmetric"] * 2  # one of each rank
    assert set(found) == {("all_gather", True), ("reduce_scatter", True)}
    assert not any(group.pools for group in groups)


def test_a_torch_that_registers_no_symmetric_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedGroup, "register_mem_pool", lambda group, pool: None)

    def rank() -> None:
        with shoal.check_streams():
            start(Plain, config(3, zero_optimization={"nccl_ub": "symmetric"}), adamw)

    with pytest.raises(CommError, match=r"cannot register memory with NCCL on axis 'dp'.*symm"):
        run_ranks(2, rank)
