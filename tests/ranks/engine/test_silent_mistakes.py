"""Mistakes that would train nothing, or on other numbers, without an error: each is reported when it happens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.errors import OptimizerError, ShoalError, UsageError
from tests.helpers.training import make

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def engine_of(model: nn.Module, stage: int = 3, **config: Any) -> Any:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    given = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "optimizer": SGD, **config}
    optimizer = given.pop("client", None)
    if optimizer is not None or given["optimizer"] is None:
        del given["optimizer"]
    return shoal.initialize(model=model, optimizer=optimizer, config=given)[0]


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()


def code_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ShoalError) as caught:
        call()
    return caught.value.code


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_that_is_assigned_after_backward_is_an_error(stage: int) -> None:
    def job() -> None:
        engine = engine_of(layers(), stage)
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.module[2].weight.grad = torch.ones(4, 4)
        with pytest.raises(UsageError, match=r"1 parameter was assigned.*: 2\.weight.") as caught:
            engine.step()
        assert caught.value.code == "grad-assigned"
        step(engine)
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        for parameter in engine.module.parameters():
            parameter.grad = None  # as zero_grad() of plain PyTorch does
        engine.step()
        engine.destroy()

    run_ranks(2, job)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_optimizer_beside_an_engine_without_one_is_an_error_on_several_ranks(stage: int) -> None:
    def job() -> str:
        model = layers()
        engine = engine_of(model, stage, optimizer=None)
        beside = torch.optim.SGD(model.parameters(), lr=0.1)
        engine(torch.ones(2, 4)).square().mean().backward()
        code = code_of(beside.step)
        engine.destroy()
        return code

    assert run_ranks(2, job) == ["optimizer-outside"] * 2


def test_a_group_added_to_the_clients_optimizer_is_an_error_until_the_engine_is_destroyed() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    engine = engine_of(model, client=optimizer)
    with pytest.raises(OptimizerError, match="cannot be added after initialize"):
        optimizer.add_param_group({"params": model[2].parameters()})
    engine.destroy()
    optimizer.add_param_group({"params": model[2].parameters()})


def test_a_step_without_any_gradient_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    engine, other = engine_of(layers()), nn.Linear(4, 4)
    for _ in range(2):
        engine(torch.ones(2, 4))
        engine.backward(other(torch.ones(2, 4)).mean())
        engine.step()
    step(engine)
    assert sum("depends on no parameter of this engine" in text for text in caplog.messages) == 1
    engine.destroy()


def test_a_layer_that_was_frozen_at_initialize_and_is_thawed_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = layers()
    model[0].requires_grad_(False)
    engine = engine_of(model)
    step(engine)
    assert not any("frozen" in text for text in caplog.messages)
    model[0].requires_grad_(True)
    step(engine)
    step(engine)
    (warning,) = [text for text in caplog.messages if "frozen" in text]
    assert warning.startswith("2 parameters were frozen at initialize()")
    assert "0.weight, 0.bias" in warning
    engine.destroy()


@pytest.mark.parametrize("axis", ["sp", "cp"])
def test_a_model_without_attention_over_sp_or_cp_is_warned_of(axis: str, caplog: pytest.LogCaptureFixture) -> None:
    class Attention(nn.Module):
        def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
            super().__init__()
            self.inner, self.attend = nn.Linear(4, 4), attend

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            heads = self.inner(rows).unflatten(-1, (2, 2)).transpose(1, 2)
            return self.attend(heads, heads, heads, is_causal=True)

    def job(attend: Callable[..., torch.Tensor]) -> None:
        engine = engine_of(Attention(attend), 1, parallel={axis: 2})
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4, 4)).mean())
            engine.step()
        engine.destroy()

    run_ranks(2, job, shoal.attention)
    assert not any("no attention over" in text for text in caplog.messages)
    run_ranks(2, job, nn.functional.scaled_dot_product_attention)
    assert sum(f"each rank of {axis} holds a part" in text for text in caplog.messages) == 1


def test_a_batch_norm_over_parts_of_sequences_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            heads = self.norm(self.inner(rows).mT).mT.unflatten(-1, (2, 2)).transpose(1, 2)
            return shoal.attention(heads, heads, heads, is_causal=True)

    def job() -> None:
        engine = engine_of(Normed(), 1, parallel={"sp": 2})
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4, 4)).mean())
            engine.step()
        engine.destroy()

    run_ranks(2, job)
    assert sum("batch norms take the mean over this rank's part" in text for text in caplog.messages) == 1


def test_a_state_that_the_optimizer_does_not_have_is_an_error_that_lists_its_own() -> None:
    engine = engine_of(layers(), optimizer={"type": "AdamW", "params": {"lr": 0.1}})
    step(engine)
    weight = engine.module[0].weight
    with pytest.raises(UsageError, match="no state 'momentum'; it has 'step', 'exp_avg', 'exp_avg_sq'") as caught:
        shoal.zero.safe_set_full_optimizer_state(weight, torch.zeros(4, 4), "momentum")
    assert caught.value.code == "access-state"
    engine.destroy()


def test_a_schedule_of_torchs_that_is_made_after_initialize_does_not_warn_and_one_by_a_metric_gets_it() -> None:
    model = layers()
    engine = engine_of(model)
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    step(engine)
    schedule.step()  # a warning would be an error here
    assert engine.get_lr() == [0.05]
    engine.destroy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    config = {"train_micro_batch_size_per_gpu": 2}
    engine = shoal.initialize(model=model, optimizer=optimizer, lr_scheduler=plateau, config=config)[0]
    assert code_of(lambda: step(engine)) == "schedule-metric"
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step(lr_kwargs={"metrics": 1.0})
    assert engine.get_lr() == [0.05]
    engine.destroy()


ONE_AT_A_TIME = threading.Lock()
AVERAGES: dict[str, Callable[[list[torch.Tensor], list[nn.Parameter]], Any]] = {
    "lerp": lambda kept, read: [mean.lerp_(p, 0.5) for mean, p in zip(kept, read, strict=True)],
    "data": lambda kept, read: [mean.mul_(0.5).add_(p.data, alpha=0.5) for mean, p in zip(kept, read, strict=True)],
    "detach": lambda kept, read: [
        mean.copy_(mean + 0.5 * (p.detach() - mean)) for mean, p in zip(kept, read, strict=True)
    ],
    "foreach": lambda kept, read: torch._foreach_lerp_(kept, read, 0.5),
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_average_over_sharded_parameters_is_warned_of_and_over_pending_ones_is_right(
    stage: int, average: str
) -> None:
    def job() -> list[torch.Tensor]:
        model = make(layers)
        kept = [p.detach().clone() for p in model.parameters()]
        engine = engine_of(model, 0 if stage == 0 else stage)
        if stage == 2:
            engine.destroy()
            zero = {"stage": 2, "overlap_param_gather": True}
            engine = engine_of(model, 2, zero_optimization=zero)
        for number in range(2):
            step(engine)
            assert all(
                p.shape == mean.shape and p.grad is None for p, mean in zip(model.parameters(), kept, strict=True)
            )
            [torch.zeros_like(p) for p in model.parameters()]
            catching = pytest.warns(UserWarning, match=r"the sharded parameter '0.weight'.*GatheredParameters")
            # Warnings are the process's, not a thread's. At stage 2 ranks wait for each other.
            turn = ONE_AT_A_TIME if stage == 3 else nullcontext()
            with turn, torch.no_grad(), catching if stage == 3 and number == 0 else nullcontext():
                AVERAGES[average](kept, list(model.parameters()))
        assert not torch.overrides._len_torch_function_stack() or stage == 2
        engine.destroy()
        assert not torch.overrides._len_torch_function_stack()
        return kept

    model = make(layers)
    expected = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for mean, parameter in zip(expected, model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.5)
    for found in run_ranks(2, job):
        for ours, theirs in zip(found, expected, strict=True):
            if stage == 3:
                assert ours.isnan().all()
            else:
                torch.testing.assert_close(ours, theirs)


def test_an_average_in_gathered_parameters_is_right_and_the_watch_ends_inside_other_modes() -> None:
    def job() -> None:
        model = make(layers)
        engine = engine_of(model, 3)
        for _ in range(2):
            step(engine)
            with torch.device("cpu"), shoal.zero.GatheredParameters(list(model.parameters())), torch.no_grad():
                means = [torch.zeros(p.shape).lerp_(p, 1.0) for p in model.parameters()]
                assert all(torch.equal(mean, p) for mean, p in zip(means, model.parameters(), strict=True))
        with torch.device("cpu"):
            engine(torch.ones(2, 4))
            assert len(torch.overrides._get_current_function_mode_stack()) == 1  # the device
        assert not torch.overrides._get_current_function_mode_stack()
        with torch.device("cpu"):
            step(engine)
        assert not torch.overrides._get_current_function_mode_stack()
        engine.destroy()

    run_ranks(2, job)
