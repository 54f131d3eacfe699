"""``loss_reduction: "token"``: every token of a step counts the same, whichever rank and micro-batch has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import ConfigError, UsageError
from shoal.parallel.loss import count_tokens
from tests.helpers.models import Plain
from tests.helpers.training import (
    BF16,
    STAGES,
    Batch,
    Trained,
    assert_ranks_agree,
    batch,
    config,
    finish,
    largest_difference,
    make,
    sgd,
    start,
)

TOKEN = {"loss_reduction": "token"}
MICRO = 3
CLIP = 0.5


def ragged(index: int, rank: int, world: int) -> Batch:
    """A micro-batch of which some targets do not count, fewer or more; of one in eight none counts."""
    tokens, targets = batch(index, rank, world)
    targets = targets.clone()
    ignored = (3 * index + 5 * rank) % 8
    targets.view(-1)[:ignored] = -100
    if (index + rank) % 8 == 7:
        targets.fill_(-100)
    return tokens, targets


def mean_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over the micro-batch's tokens, 0 where it has none; and their number."""
    count = count_tokens(targets)
    total = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    return total / count.clamp(min=1), count


class Logits(Plain):
    def forward(self, tokens: torch.Tensor) -> Any:  # type: ignore[override]
        return self.logits(tokens)


def alone(world: int, steps: int, micro: int = MICRO) -> Trained:
    """One process that sees all tokens."""
    model = make(Logits)
    optimizer = sgd(model.parameters())
    result = Trained()
    for step in range(steps):
        indices = range(step * micro, (step + 1) * micro)
        parts = [ragged(index, rank, world) for index in indices for rank in range(world)]
        tokens, targets = (torch.cat(each) for each in zip(*parts, strict=True))
        loss = mean_loss(model, tokens, targets)[0]
        loss.backward()
        result.losses.append(float(loss.detach()))
        result.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    result.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result


def train_by_tokens(settings: dict[str, Any], steps: int, style: str = "engine") -> Trained:
    engine = start(Logits, settings)
    world = current_world()
    norms = []
    for index in range(steps * engine.gradient_accumulation_steps()):
        loss, count = mean_loss(engine, *ragged(index, world.rank, world.size))
        if style == "engine":
            engine.backward(loss, num_tokens=count)
        else:
            engine.scale(loss, num_tokens=int(count)).backward()
        is_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if is_boundary:
            norms.append(engine.get_global_grad_norm() or 0.0)
    assert engine.skipped_steps == 0
    trained = finish(engine, [])
    trained.norms = norms
    return trained


@pytest.mark.parametrize(
    ("world", "stage", "style", "more"),
    [
        *((2, stage, "engine", {}) for stage in STAGES),
        (4, 1, "engine", {}),
        (4, 3, "scale", {}),
        (1, 0, "engine", {}),
        (2, 2, "engine", {"prescale_gradients": True}),
        (2, 2, "engine", {"gradient_allreduce_op": "sum"}),
        (2, 1, "engine", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
        (4, 3, "engine", {"parallel": {"dp_replicate": 2}}),
    ],
)
def test_ragged_micro_batches_train_as_one_process_that_sees_all_tokens(
    world: int, stage: int, style: str, more: dict[str, Any]
) -> None:
    expected = alone(world, steps=2)
    assert min(expected.norms) > CLIP
    settings = config(stage, gradient_accumulation_steps=MICRO, gradient_clipping=CLIP, **TOKEN, **more)
    results = run_ranks(world, lambda: train_by_tokens(settings, 2, style))
    assert_ranks_agree(results)
    assert results[0].norms == pytest.approx(expected.norms, rel=1e-6)
    assert largest_difference(results[0].parameters, expected.parameters) <= 1e-6


def test_the_mean_of_means_is_another_gradient() -> None:
    # Else the test above could not fail.
    settings = config(0, gradient_accumulation_steps=MICRO, gradient_clipping=CLIP)

    def job() -> Trained:
        engine, world = start(Logits, settings), current_world()
        for index in range(MICRO):
            engine.backward(mean_loss(engine, *ragged(index, world.rank, world.size))[0])
            engine.step()
        return finish(engine, [])

    assert largest_difference(run_ranks(2, job)[0].parameters, alone(2, steps=1).parameters) > 1e-4


def test_the_tokens_are_exchanged_with_the_norm() -> None:
    def exchanges(**more: Any) -> list[tuple[str, int]]:
        engine, world = start(Logits, config(2, **more)), current_world()
        for index in range(2):
            loss, count = mean_loss(engine, *ragged(index, world.rank, world.size))
            engine.backward(loss, num_tokens=count if more else None)
            with world.recorder.recording() as found:
                engine.step()
        engine.destroy()
        return [(entry.label, entry.nbytes) for entry in found if entry.op == "exchange" and entry.label == "step"]

    assert run_ranks(2, exchanges)[0] == [("step", 4 * 8)]
    assert run_ranks(2, lambda: exchanges(**TOKEN))[0] == [("step", 5 * 8)]


@pytest.mark.parametrize(
    "precision", [BF16, {"fp16": {"enabled": True, "initial_scale_power": 8}}], ids=["bf16", "fp16"]
)
def test_16_bit_gradients_keep_the_range_of_means(precision: dict[str, Any]) -> None:
    def job() -> tuple[int, float, int]:
        engine, world = (
            start(Logits, config(2, gradient_accumulation_steps=MICRO, **TOKEN, **precision)),
            current_world(),
        )
        for index in range(2 * MICRO):
            loss, count = mean_loss(engine, *ragged(index, world.rank, world.size))
            engine.backward(loss, num_tokens=count)
            engine.step()
        found = engine.skipped_steps, engine.accumulation._token_unit, engine.accumulation.counters.global_tokens
        engine.destroy()
        return found

    tokens = [int(count_tokens(ragged(index, rank, 2)[1])) for index in range(2 * MICRO) for rank in range(2)]
    expected = 0, 2.0 ** round(torch.tensor(sum(tokens[: 2 * MICRO]) / (2 * MICRO)).log2().item()), sum(tokens)
    assert run_ranks(2, job) == [expected] * 2


def test_tokens_count_once_where_the_norm_is_asked_for_before_the_step() -> None:
    def job(num_calls: int) -> tuple[list[int], float]:
        engine, world = start(Logits, config(2, gradient_clipping=CLIP, **TOKEN)), current_world()
        counted = []
        for index in range(3):
            loss, count = mean_loss(engine, *ragged(index, world.rank, world.size))
            engine.backward(loss, num_tokens=count)
            for _ in range(num_calls):
                engine.clip_grad_norm_(CLIP)
            engine.step()
            counted.append(engine.accumulation.counters.global_tokens)
        unit = engine.accumulation._token_unit
        engine.destroy()
        return counted, unit

    tokens = [sum(int(count_tokens(ragged(index, rank, 2)[1])) for rank in range(2)) for index in range(3)]
    counted = [sum(tokens[: index + 1]) for index in range(3)]
    assert [found for found, _ in run_ranks(2, job, 0)] == [counted] * 2
    assert run_ranks(2, job, 2) == run_ranks(2, job, 0)


def test_tokens_of_a_step_that_is_given_up_after_its_norm_is_known_do_not_count() -> None:
    def job() -> tuple[int, int]:
        engine, world = start(Logits, config(2, **TOKEN)), current_world()
        loss, count = mean_loss(engine, *ragged(0, world.rank, world.size))
        engine.backward(loss, num_tokens=count)
        engine.clip_grad_norm_(CLIP)
        known = engine.accumulation.counters.global_tokens
        engine.zero_grad()
        left = engine.accumulation.counters.global_tokens
        engine.destroy()
        return known, left

    assert run_ranks(2, job) == [(sum(int(count_tokens(ragged(0, rank, 2)[1])) for rank in range(2)), 0)] * 2


def test_before_the_step_gradients_are_those_of_the_sum_over_tokens() -> None:
    def job() -> torch.Tensor:
        engine, world = start(Logits, config(2, **TOKEN)), current_world()
        loss, count = mean_loss(engine, *ragged(0, world.rank, world.size))
        engine.backward(loss, num_tokens=count)
        gradient = engine.access.full_gradient(engine.module.norm.weight)
        engine.step()
        engine.destroy()
        assert gradient is not None
        return gradient

    model = make(Logits)
    for rank in range(2):
        loss, count = mean_loss(model, *ragged(0, rank, 2))
        (loss * count).backward()
    for gradient in run_ranks(2, job):
        torch.testing.assert_close(gradient, model.norm.weight.grad)


def test_a_loss_that_the_script_has_divided_by_the_tokens_is_taken_as_it_is() -> None:
    # As Transformers' Trainer does: sum / tokens of all ranks' step, times the number of ranks, scale_wrt_gas=False.
    def job() -> Trained:
        engine, world = (
            start(Logits, config(1, gradient_accumulation_steps=MICRO, gradient_clipping=CLIP, **TOKEN)),
            current_world(),
        )
        num_items = sum(count_tokens(ragged(i, r, world.size)[1]) for i in range(MICRO) for r in range(world.size))
        for index in range(MICRO):
            loss, count = mean_loss(engine, *ragged(index, world.rank, world.size))
            engine.backward(loss * count / num_items * world.size, scale_wrt_gas=False)
            engine.step()
        return finish(engine, [])

    assert largest_difference(run_ranks(2, job)[0].parameters, alone(2, steps=1).parameters) <= 1e-6


def test_wrong_uses_are_refused() -> None:
    def losses(settings: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        engine = start(Logits, settings)
        return engine, mean_loss(engine, *ragged(0, 0, 1))[0]

    def job() -> None:
        engine, loss = losses(config(0))
        with pytest.raises(UsageError, match='loss_reduction is "mean"'):
            engine.backward(loss, num_tokens=3)
        engine.destroy()
        engine, loss = losses(config(0, gradient_accumulation_steps=2, **TOKEN))
        with pytest.raises(UsageError, match="came without its number of tokens"):
            engine.backward(loss)
        engine.backward(mean_loss(engine, *ragged(0, 0, 1))[0], num_tokens=3)
        with pytest.raises(UsageError, match="with and without num_tokens"):
            engine.backward(mean_loss(engine, *ragged(0, 0, 1))[0], scale_wrt_gas=False)
        engine.destroy()
        engine, loss = losses(config(0, **TOKEN))
        loss.backward()
        with pytest.raises(UsageError, match="does not pass the number of tokens"):
            engine.step()
        engine.destroy()
        with pytest.raises(ConfigError, match="loss_reduction"):
            start(Logits, config(0, loss_reduction="tokens"))

    run_ranks(1, job)
