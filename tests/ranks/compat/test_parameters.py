"""Attributes that DeepSpeed's clients read on parameters, while ``import deepspeed`` is Shoal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat.deepspeed import initialize
from shoal.compat.deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
from shoal.compat.deepspeed.runtime.zero.utils import is_zero_param
from shoal.compat.parameters import add_attributes, remove_attributes
from shoal.errors import UsageError
from tests.helpers.models import Plain
from tests.helpers.training import config, make, sgd, start

AVAILABLE, AWAY = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE


@pytest.fixture(autouse=True)
def deepspeed_alias() -> Iterator[None]:
    add_attributes()
    yield
    remove_attributes()
    assert not hasattr(nn.Parameter, "ds_id")
    assert not hasattr(nn.Module, "ds_external_parameters")
    assert "item" not in vars(nn.Parameter)


def test_an_ordinary_parameter_has_none_of_the_names() -> None:
    parameter = nn.Parameter(torch.ones(1))
    for name in ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor", "ds_persist", "all_gather_coalesced"):
        assert not hasattr(parameter, name)
    assert parameter.item() == 1.0
    assert not is_zero_param(parameter)
    assert not is_zero_param(torch.ones(1))
    assert list(nn.Linear(1, 1).ds_external_parameters()) == []


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_neither_has_one_of_another_stage(stage: int) -> None:
    engine = start(Plain, config(stage), sgd)
    assert not any(hasattr(parameter, "ds_id") for parameter in engine.module.parameters())
    engine.destroy()


def test_a_parameter_of_zero_init_shows_its_true_shape_and_this_ranks_part() -> None:
    def look() -> tuple[int, ...]:
        with Init(config_dict_or_path={"train_batch_size": 2}):
            model = nn.Linear(3, 5)
            scalar = nn.Module()
            scalar.value = nn.Parameter(torch.tensor(2.5))
        Init(module=scalar)
        weight = model.weight
        assert is_zero_param(weight)
        assert weight.shape == weight.ds_shape == torch.Size([5, 3])
        assert weight.ds_numel == weight.numel() == 15
        assert weight.ds_status is AWAY
        assert weight.ds_tensor.shape == (8,)
        assert weight.partition_numel() == 8
        assert weight.ds_persist is False
        weight.ds_active_sub_modules.clear()
        assert scalar.value.item() == 2.5
        weight.all_gather_coalesced([weight]).wait()
        assert weight.ds_status is AVAILABLE
        with torch.no_grad():
            weight.fill_(float(current_world().rank + 1))
        weight.partition(has_been_updated=True)
        assert weight.ds_status is AWAY
        assert bool(weight.isnan().all())
        with shoal.zero.GatheredParameters(weight):
            assert weight.ds_status is AVAILABLE
            assert torch.equal(weight.detach(), torch.ones(5, 3))
        return weight.ds_id, model.bias.ds_id

    for first, second in run_ranks(2, look):
        assert first != second


def test_a_parameter_of_a_stage_3_engine_shows_the_same() -> None:
    total = sum(p.numel() for p in make(Plain).parameters())

    def look() -> tuple[list[int], int]:
        engine, *_ = initialize(model=make(Plain), optimizer=sgd, config=config(3), dist_init_required=False)
        parameters = list(engine.module.parameters())
        ids = [p.ds_id for p in parameters]
        assert all(p.ds_shape == p.shape and p.ds_numel == p.numel() for p in parameters)
        assert {p.ds_status for p in parameters} == {AWAY}
        held = sum(p.ds_tensor.numel() for p in parameters)
        first = parameters[0]
        first.all_gather(parameters[:2])
        assert first.ds_status is AVAILABLE
        assert not bool(first.isnan().any())
        first.partition(parameters[:2])
        assert first.ds_status is AWAY
        engine.destroy()
        assert not hasattr(first, "ds_id")
        return ids, held

    found = run_ranks(2, look)
    assert found[0][0] == found[1][0]
    assert len(set(found[0][0])) == len(found[0][0])
    assert sum(held for _, held in found) == total


def test_without_an_optimizer_stage_3_returns_what_gathers_and_releases() -> None:
    engine, offload, loader, schedule = initialize(model=make(Plain), config=config(3), dist_init_required=False)
    assert offload is engine.optimizer is engine.parameter_offload
    assert (loader, schedule) == (None, None)
    for parameter in offload.module.parameters():
        parameter.ds_active_sub_modules.clear()
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload._register_deepspeed_module(offload.module)
    engine.destroy()


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.low.T @ self.high.T


def test_parameters_made_after_zero_init_are_sharded_like_those_made_in_it_each_in_its_own_format() -> None:
    def look() -> tuple[list[float], torch.dtype, int]:
        rank = current_world().rank
        with Init(config_dict_or_path={"train_batch_size": 2, "bf16": {"enabled": True}}):
            model = Adapted()
        model.low, model.high = nn.Parameter(torch.full((2, 3), rank + 1.0)), nn.Parameter(torch.ones(5, 2))
        assert not hasattr(model.low, "convert_to_zero_parameters")
        model.base.weight.convert_to_zero_parameters([model.low, model.high])
        assert model.low.ds_status is AWAY
        assert model.low.ds_tensor.numel() == 3
        with shoal.zero.GatheredParameters([model.low]):
            values = model.low.flatten().tolist()
        dtype = model.low.dtype
        engine, *_ = initialize(model=model, config=config(3, units={"names": []}), dist_init_required=False)
        with pytest.raises(UsageError, match="the model already has an engine"):
            model.base.weight.convert_to_zero_parameters([nn.Parameter(torch.ones(2))])
        engine.destroy()
        return values, dtype, rank

    assert run_ranks(2, look) == [([1.0] * 6, torch.float32, rank) for rank in range(2)]
