"""Overflow, values that are not finite, accessors, batch sizes, timers and the end of an engine in a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.errors import ConfigError, NonFiniteError, NotBuiltError, UsageError
from shoal.zero import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from tests.helpers.pipeline_cases import engine_of_layers, mean_square
from tests.helpers.pipeline_layers import WIDTH, batches
from tests.helpers.pipeline_layers import settings as pipeline_settings
from tests.helpers.training import make, sgd

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "auto_cast": True}}


def linears() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(4)]


def spoiled(number: float) -> Iterator[Any]:
    """The third of four micro-batches has labels that make the loss ``number``."""
    for micro, (inputs, labels) in enumerate(batches(0, 0, 4)):
        yield inputs, torch.full_like(labels, number) if micro == 2 else labels


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(("stage", "schedule"), [(1, "1f1b"), (3, "zb_h1")])
def test_an_overflow_in_one_stage_skips_the_step_and_halves_the_scale_on_all(
    failing: int, stage: int, schedule: str
) -> None:
    def job() -> Any:
        engine = engine_of_layers(linears, 2, stage, schedule, **FP16)
        engine.train_batch(batches(0, 0, 4))
        before = engine.module_state_dict()
        handles = []
        if engine.is_last_stage() == bool(failing):
            layer = engine.module._modules[str(2 * failing)]
            handles = [layer.weight.register_hook(lambda gradient: gradient * float("inf"))]
        engine.train_batch(batches(0, 1, 4))
        for handle in handles:
            handle.remove()
        skipped = engine.module_state_dict()
        assert all(torch.equal(before[name], skipped[name]) for name in before)
        found = engine.loss_scale, engine.skipped_steps, engine.was_step_applied()
        engine.train_batch(batches(0, 2, 4))
        return found, engine.was_step_applied(), engine.loss_scale

    assert run_ranks(2, job) == [((128.0, 1, False), True, 128.0)] * 2


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_an_error_on_all_ranks(number: float) -> None:
    def job() -> Any:
        engine = engine_of_layers(linears, 2, 2)
        before = engine.module_state_dict()
        with pytest.raises(NonFiniteError, match="the loss of rank 1 is not finite"):
            engine.train_batch(spoiled(number))
        after = engine.module_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        return float(engine.train_batch(batches(0, 0, 4)))

    first, second = run_ranks(2, job)
    assert first == second


def test_steps_with_a_loss_that_is_not_finite_are_skipped_where_the_config_says_so() -> None:
    def job() -> Any:
        engine = engine_of_layers(linears, 2, 1, precision={"nonfinite": "skip"})
        loss = engine.train_batch(spoiled(float("nan")))
        return bool(loss.isnan()), engine.was_step_applied(), engine.skipped_steps

    assert run_ranks(2, job) == [(True, False, 1)] * 2


@pytest.mark.parametrize("stage", [1, 3])
def test_safe_accessors_read_the_parameters_of_this_ranks_stages(stage: int) -> None:
    def job() -> Any:
        engine = engine_of_layers(linears, 2, stage, optimizer=torch.optim.Adam)
        engine.train_batch(batches(engine.axes.batch.rank, 0, 4))
        whole = engine.module_state_dict()
        names = []
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(safe_get_full_fp32_param(parameter), whole[name])
            assert safe_get_full_optimizer_state(parameter, "exp_avg").abs().sum() > 0
            assert safe_get_full_grad(parameter) is None
            names.append(name)
        return names

    first, _, second, _ = run_ranks(4, job)
    assert [name.split(".")[0] for name in first + second] == list("00112233")


def test_calls_between_micro_batches_are_refused_by_name() -> None:
    def job() -> None:
        engine = engine_of_layers(linears, 2, 1)
        engine.train_batch(batches(0, 0, 4))
        for call in (
            lambda: engine.clip_grad_norm_(1.0),
            lambda: engine.scale(torch.zeros(())),
            lambda: engine.set_gradient_accumulation_boundary(True),
            lambda: engine.no_sync().__enter__(),
        ):
            with pytest.raises(UsageError) as caught:
                call()
            assert caught.value.code == "pipeline-call"

    run_ranks(2, job)


def test_an_engine_ends_and_another_one_goes_on() -> None:
    def job() -> Any:
        engine = engine_of_layers(linears, 2, 3)
        engine.train_batch(batches(0, 0, 4))
        values = engine.module_state_dict()
        module = engine.module
        engine.destroy()
        with pytest.raises(UsageError, match="destroyed"):
            engine.train_batch(batches(0, 0, 4))
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.detach(), values[name])
        config = engine.properties.config.model_dump(exclude_unset=True)
        again = shoal.initialize(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), config=config)[0]
        return float(again.train_batch(batches(0, 1, 4)))

    first, second = run_ranks(2, job)
    assert first == second


def test_the_number_of_micro_batches_follows_the_batch_size() -> None:
    def job() -> Any:
        engine = engine_of_layers(linears, 2, 2)
        engine.train_batch(batches(0, 0, 4))
        engine.set_train_batch_size(12)
        with pytest.raises(ConfigError, match="does not divide"):
            engine.set_train_batch_size(13)
        engine.train_batch(batches(0, 1, 6))
        return engine.gradient_accumulation_steps(), engine.global_samples, engine.micro_steps

    assert run_ranks(2, job) == [(6, 20, 10)] * 2


def test_timers_and_the_flops_profiler_work_beside_a_pipeline() -> None:
    def job(**more: Any) -> float:
        engine = engine_of_layers(linears, 2, 1, **more)
        for step in range(3):
            loss = engine.train_batch(batches(0, step, 4))
        return float(loss)

    expected = run_ranks(2, job)
    profiler = {"enabled": True, "profile_step": 2, "top_modules": 1}
    assert run_ranks(2, lambda: job(wall_clock_breakdown=True, steps_per_print=1)) == expected
    assert run_ranks(2, lambda: job(flops_profiler=profiler)) == expected


LENGTHS = [2, 4, 6]
SECTION = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 2, "max_difficulty": 6,
           "schedule_type": "fixed_discrete",
           "schedule_config": {"difficulty": LENGTHS, "max_step": [1, 2]}}  # fmt: skip


class Shortened(nn.Module):
    """Truncates sequences to the length that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*linears())

    def forward(self, x: torch.Tensor, labels: torch.Tensor, *, curriculum_seqlen: int | None = None) -> torch.Tensor:
        return mean_square(self.blocks(x[:, :curriculum_seqlen]), labels[:, :curriculum_seqlen])


@pytest.mark.parametrize("given", ["tuple", "dict", "layers"])
def test_lengths_of_a_curriculum_change_what_stages_send(given: str) -> None:
    """A model gets the length as an argument; layers get what the function of ``set_batch_fn`` has truncated."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(2, 6, WIDTH, generator=generator), torch.randn(2, 6, WIDTH, generator=generator))] * 2

    def alone() -> list[float]:
        model, losses = make(Shortened), []
        optimizer = sgd(model.parameters())
        for length in LENGTHS:
            loss = model(*data[0], curriculum_seqlen=length)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return [*losses, model(*data[0]).item()]

    def job() -> list[float]:
        if given == "layers":
            engine = engine_of_layers(linears, 2, 1, num_micro=2, curriculum_learning=SECTION)
            place = engine.curriculum_scheduler_legacy.get_current_difficulty
            engine.set_batch_fn(lambda batch: tuple(t[:, : place()] if engine.module.training else t for t in batch))
        else:
            model = make(Shortened)
            own = pipeline_settings(1, 2, 2, "1f1b", 1, curriculum_learning=SECTION)
            engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=own)[0]
        batches = [dict(zip(("x", "labels"), batch, strict=True)) if given == "dict" else batch for batch in data]
        losses = [float(engine.train_batch(iter(batches))) for _ in LENGTHS]
        return [*losses, float(engine.eval_batch(iter(batches)))]

    assert run_ranks(2, job) == [pytest.approx(alone(), rel=1e-6)] * 2


def test_layers_to_skip_are_refused_because_a_stage_calls_all_its_blocks() -> None:
    def job() -> None:
        with pytest.raises(NotBuiltError, match="progressive_layer_drop"):
            engine_of_layers(linears, 2, 1, progressive_layer_drop={"enabled": True})

    run_ranks(2, job)


def test_the_loss_of_a_step_is_over_the_replicas_that_a_part_has_added_to_its_status() -> None:
    def with_another(status: Any) -> Any:
        others = tuple(loss + 1 for loss in status.losses)
        return replace(status, losses=status.losses + others, tokens=2 * status.tokens)

    def job(is_added: bool) -> float:
        engine = engine_of_layers(linears, 2, 1)
        if is_added:
            engine._calls.at_reduction = [with_another]
        loss = float(engine.train_batch(batches(0, 0, 4)))
        engine.destroy()
        return loss

    for alone, both in zip(run_ranks(2, job, False), run_ranks(2, job, True), strict=True):
        assert both == pytest.approx(alone + 0.5, rel=1e-6)
