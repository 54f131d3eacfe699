"""Mistakes that need several ranks, and what each rank says of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import ConfigError, ModelError

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def layers(num: int = 3, odd_width: int = 8) -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, odd_width if index == 1 else 8) for index in range(num)])


def engine_of(model: nn.Module, zero: dict[str, Any], **config: Any) -> Any:
    section = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, **SGD, **config}
    return shoal.initialize(model=model, config=section)[0]


def test_ranks_with_other_models_all_name_the_rank_and_the_parameters_that_differ() -> None:
    def job() -> str:
        model = layers(odd_width=9 if current_world().rank == 2 else 8)
        with pytest.raises(ModelError) as caught:
            engine_of(model, {"stage": 1})
        return f"{caught.value.code}: {caught.value.what}"

    assert set(run_ranks(3, job)) == {
        "ranks-differ-model: rank 2 has another model than the others: 1.weight is [9, 8] float32, not [8, 8] float32,"
        " 1.bias is [9] float32, not [8] float32."
    }


def test_of_two_ranks_with_other_configs_both_name_rank_1_and_the_key() -> None:
    def job() -> str:
        with pytest.raises(ConfigError) as caught:
            engine_of(layers(), {"stage": 1}, gradient_clipping=1.0 + current_world().rank)
        return caught.value.what

    assert set(run_ranks(2, job)) == {"rank 1 has another config than the others: gradient_clipping is 2.0, not 1.0."}


def test_a_value_set_on_a_sharded_parameter_is_an_error_that_names_it_and_gathered_parameters() -> None:
    def job() -> None:
        engine = engine_of(layers(), {"stage": 3, "stage3_param_persistence_threshold": 0})
        with shoal.zero.GatheredParameters([engine.module[0].weight], modifier_rank=0):
            nn.init.zeros_(engine.module[0].weight)
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        nn.init.zeros_(engine.module[2].weight)  # torch allows it on the placeholder
        with pytest.raises(ModelError, match=r"(?s)1 parameter .*: 2\.weight.*GatheredParameters") as caught:
            engine(torch.ones(2, 8))
        assert caught.value.code == "model-changed"
        engine.destroy()

    run_ranks(2, job)


@pytest.mark.parametrize(("threshold", "is_told"), [(100_000, True), (0, False)])
def test_offload_param_that_moves_nothing_says_so(
    threshold: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def job() -> None:
        zero = {"stage": 3, "stage3_param_persistence_threshold": threshold, "offload_param": {"device": "cpu"}}
        engine_of(layers(), zero).destroy()

    caplog.set_level("INFO", "shoal")
    run_ranks(2, job)
    assert any("offload_param moves nothing" in text for text in caplog.messages) is is_told


def test_the_hosts_of_all_ranks_are_exchanged_once_at_start_up() -> None:
    def job() -> list[str]:
        with current_world().recorder.recording() as entries:
            engine_of(layers(), {"stage": 1}).destroy()
        return [entry.label for entry in entries if "hosts" in entry.label]

    assert run_ranks(2, job) == [["hosts"]] * 2
