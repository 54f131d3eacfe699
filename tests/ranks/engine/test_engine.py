"""The engine's API: what scripts call around forward, backward and step."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.helpers.models import SEQUENCE, VOCABULARY, Plain
from tests.helpers.training import (
    ROWS,
    STAGES,
    adamw,
    are_bit_equal,
    batch,
    config,
    finish,
    make,
    micro_step,
    run_steps,
    sgd,
    start,
)


def test_counters_count_micro_batches_steps_and_samples() -> None:
    def job() -> list[Any]:
        engine = start(Plain, config(2, gradient_accumulation_steps=3))
        seen: list[Any] = []
        for index in range(7):
            boundary = engine.is_gradient_accumulation_boundary()
            micro_step(engine, index)
            seen.append((boundary, engine.micro_steps, engine.global_steps, engine.global_samples))
        sizes = (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
            engine.zero_optimization_stage(),
            engine.gradient_clipping(),
        )
        engine.destroy()
        return [seen, sizes]

    for seen, sizes in run_ranks(2, job):
        assert seen == [
            (False, 1, 0, 4),
            (False, 2, 0, 8),
            (True, 3, 1, 12),
            (False, 4, 1, 16),
            (False, 5, 1, 20),
            (True, 6, 2, 24),
            (False, 7, 2, 28),
        ]
        assert sizes == (12, 2, 3, 2, 0.0)


def test_ranks_know_who_they_are() -> None:
    def job() -> tuple[Any, ...]:
        engine = start(Plain, config(1))
        found = (engine.local_rank, engine.global_rank, engine.world_size, engine.dp_world_size, str(engine.device))
        engine.destroy()
        return found

    assert run_ranks(3, job) == [(rank, rank, 3, 3, "cpu") for rank in range(3)]


def test_attributes_of_the_model_are_reached_through_the_engine() -> None:
    def job() -> None:
        engine = start(Plain, config(3))
        assert engine.module.blocks is engine.blocks
        assert engine.logits(torch.zeros(1, 2, dtype=torch.long)).shape == (1, 2, VOCABULARY)
        with pytest.raises(AttributeError, match="no_such_thing"):
            engine.no_such_thing  # noqa: B018
        assert engine.train() is engine
        assert engine.module.training
        engine.eval()
        assert not engine.module.training
        engine.destroy()

    run_ranks(1, job)


@pytest.mark.parametrize("how", ["dict", "path", "string path", "args", "config_params"])
def test_a_config_comes_from_wherever_scripts_put_it(tmp_path: Path, how: str) -> None:
    settings = config(2, optimizer={"type": "AdamW", "params": {"lr": 0.125}})
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(settings))

    def job() -> list[float]:
        model: Any = make(Plain)
        arguments: dict[str, Any] = {
            "dict": {"config": settings},
            "path": {"config": path},
            "string path": {"config": str(path)},
            "args": {"args": argparse.Namespace(deepspeed_config=str(path))},
            "config_params": {"config_params": settings},
        }[how]
        engine, optimizer, loader, schedule = shoal.initialize(model=model, **arguments)
        assert loader is None
        assert schedule is None
        assert optimizer is engine.optimizer
        rates = engine.get_lr()
        run_steps(engine, 1)
        engine.destroy()
        return rates

    assert run_ranks(2, job) == [[0.125]] * 2


def test_the_optimizer_may_be_a_callable_and_parameters_may_be_chosen() -> None:
    def job() -> tuple[bool, bool]:
        model = make(Plain)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine = shoal.initialize(
            model=model, optimizer=sgd, model_parameters=model.blocks.parameters(), config=config(2)
        )[0]
        run_steps(engine, 2)
        after = finish(engine, []).parameters
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        return all(name.startswith("blocks.") for name in moved), len(moved) > 10

    assert run_ranks(2, job) == [(True, True)] * 2


@pytest.mark.parametrize("how", ["of the config", "an object", "a callable"])
def test_a_schedule_sets_the_learning_rate_of_each_step(how: str) -> None:
    def job() -> list[float]:
        model = make(Plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        settings, schedule = config(1), None
        if how == "of the config":
            params = {"warmup_min_lr": 0.0, "warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}
            settings = config(1, scheduler={"type": "WarmupLR", "params": params})
        elif how == "an object":
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        else:
            schedule = lambda made: torch.optim.lr_scheduler.StepLR(made, step_size=2, gamma=0.5)  # noqa: E731
        engine, _, _, returned = shoal.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings
        )
        assert returned is engine.lr_scheduler
        rates = []
        for index in range(5):
            rates += engine.get_lr()
            micro_step(engine, index)
        engine.destroy()
        return rates

    # DeepSpeed's warm-up counts from before the first step.
    expected = [0.0, 0.0, 0.25, 0.5, 0.75] if how == "of the config" else [1.0, 1.0, 0.5, 0.5, 0.25]
    assert run_ranks(2, job) == [expected] * 2


def test_the_schedule_steps_once_a_step_and_not_for_skipped_ones() -> None:
    def job() -> list[float]:
        model = make(Plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        settings = config(1, gradient_accumulation_steps=2, precision={"nonfinite": "skip"})
        engine = shoal.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings)[0]
        rates = []
        for index in range(6):
            loss = engine(*batch(index, current_world().rank, 2))
            engine.backward(loss * float("nan") if index == 3 else loss)
            engine.step()
            rates += engine.get_lr()
        engine.destroy()
        return rates

    assert run_ranks(2, job) == [[1.0, 0.5, 0.5, 0.5, 0.5, 0.25]] * 2


@pytest.mark.parametrize("kind", ["torch", "config"])
def test_a_script_that_steps_the_engines_schedule_too_is_warned_once(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}

    def job(is_wrong: bool) -> None:
        model = make(Plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5) if kind == "torch" else None
        settings = config(1, **({} if kind == "torch" else {"scheduler": warmup}))
        engine, *_, found = shoal.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings)
        state = None
        for index in range(6):
            engine.backward(engine(*batch(index, current_world().rank, 2)))
            engine.step()
            state = state or found.state_dict()
            if is_wrong:
                found.step()
            elif index == 3:
                found.load_state_dict(state)  # once: what a loaded checkpoint does
        engine.destroy()

    with caplog.at_level(logging.WARNING, "shoal"):
        run_ranks(2, job, False)
        assert [record for record in caplog.records if "schedule" in record.getMessage()] == []
        run_ranks(2, job, True)
    told = [record.getMessage() for record in caplog.records if "it runs twice as fast" in record.getMessage()]
    assert len(told) == 1
    assert ("ExponentialLR" if kind == "torch" else "WarmupLR") in told[0]


def test_the_loader_deals_each_sample_to_one_rank() -> None:
    tokens = torch.arange(24).repeat_interleave(SEQUENCE).view(24, SEQUENCE) % VOCABULARY
    dataset = TensorDataset(torch.arange(24), tokens)

    def job() -> list[int]:
        model = make(Plain)
        engine, _, loader, _ = shoal.initialize(
            model=model, optimizer=sgd(model.parameters()), training_data=dataset, config=config(1)
        )
        assert len(loader) == 24 // ROWS // 3
        seen = []
        for indices, rows in loader:
            seen += indices.tolist()
            engine.backward(engine(rows, rows))
            engine.step()
        again = [int(index) for indices, _ in loader for index in indices]
        assert sorted(again) != again
        engine.destroy()
        return seen

    results = run_ranks(3, job)
    assert sorted(index for seen in results for index in seen) == list(range(24))


def test_optimizer_step_and_zero_grad_work_as_in_plain_pytorch() -> None:
    def plain() -> dict[str, torch.Tensor]:
        engine = start(Plain, config(2))
        run_steps(engine, 3)
        return finish(engine, []).parameters

    def through_the_optimizer() -> dict[str, torch.Tensor]:
        engine = start(Plain, config(2))
        for index in range(3):
            engine(*batch(90, 0, 1)).backward()
            engine.optimizer.zero_grad()  # drops it
            engine(*batch(index, current_world().rank, 2)).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        assert engine.global_steps == 3
        return finish(engine, []).parameters

    for ours, theirs in zip(run_ranks(2, plain), run_ranks(2, through_the_optimizer), strict=True):
        assert are_bit_equal(ours, theirs)


def test_a_scaled_loss_may_be_propagated_by_hand() -> None:
    def job(by_hand: bool, stage: int) -> dict[str, torch.Tensor]:
        section = {"enabled": True, "loss_scale": 64.0}
        engine = start(Plain, config(stage, gradient_accumulation_steps=2, fp16=section), adamw)
        for index in range(4):
            loss = engine(*batch(index, current_world().rank, 2))
            if by_hand:
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
            engine.step()
        return finish(engine, []).main_parameters

    for stage in STAGES:
        for ours, theirs in zip(run_ranks(2, job, True, stage), run_ranks(2, job, False, stage), strict=True):
            assert are_bit_equal(ours, theirs)


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_is_that_of_the_gradients_before_clipping(stage: int) -> None:
    def job(clip: float, scale: dict[str, Any]) -> float:
        engine = start(Plain, config(stage, gradient_clipping=clip, **scale))
        assert engine.get_global_grad_norm() is None
        run_steps(engine, 1)
        norm = engine.get_global_grad_norm()
        engine.destroy()
        assert norm is not None
        return norm

    unclipped = run_ranks(2, job, 0.0, {})
    assert unclipped == run_ranks(2, job, 0.01, {})
    # fp16 with a loss scale: the norm is of what the scale has been taken out of.
    scaled = run_ranks(2, job, 0.0, {"fp16": {"enabled": True, "loss_scale": 128.0}})
    assert abs(scaled[0] / unclipped[0] - 1) < 0.01


def test_callbacks_run_after_each_step() -> None:
    def job() -> list[int]:
        engine = start(Plain, config(0, gradient_accumulation_steps=2))
        seen: list[int] = []
        engine.on_step.append(lambda engine: seen.append(engine.global_steps))
        run_steps(engine, 3)
        engine.destroy()
        return seen

    assert run_ranks(1, job) == [[1, 2, 3]]


def test_the_table_and_the_ledger_are_printed_at_start_up(caplog: pytest.LogCaptureFixture) -> None:
    def job() -> None:
        start(Plain, config(3)).destroy()

    with caplog.at_level("DEBUG", logger="shoal"):
        run_ranks(2, job)
    text = "\n".join(record.message for record in caplog.records)
    assert text.count("parameter, stored") == 1  # rank 0 only
    assert "blocks.2 (4)" in text
    assert "bytes per parameter" in text


def test_another_batch_size_in_mid_run_begins_with_a_whole_step() -> None:
    """A step has as many micro-batches as its losses are divided by, whatever was counted before."""

    def run() -> list[int]:
        model = torch.nn.Linear(4, 2)
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "gradient_clipping": 0}
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        engine, *_ = shoal.initialize(model=model, config=config)
        counts, steps = [], 0
        for accumulation in (2, 3, 4):
            engine.set_train_batch_size(accumulation)
            micro = 0
            while engine.global_steps == steps:
                engine.backward(engine(torch.ones(1, 4)).sum())
                engine.step()
                micro += 1
            counts.append(micro)
            steps = engine.global_steps
        engine.destroy()
        return counts

    assert run() == [2, 3, 4]


def test_an_optimizer_that_outlives_its_engine_is_its_own_again() -> None:
    model = make(Plain)
    optimizer = adamw(model.parameters())
    engine, *_ = shoal.initialize(model=model, optimizer=optimizer, config=config(2))
    engine.backward(engine(*batch(0, 0, 1)))
    engine.step()
    alive = weakref.ref(engine)
    engine.destroy()
    del engine, _
    gc.collect()
    assert alive() is None
    assert "state_dict" not in vars(optimizer)
    assert "load_state_dict" not in vars(optimizer)


def test_an_unused_schedule_of_the_config_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}

    def notes(**given: Any) -> list[str]:
        model = make(Plain)
        if "lr_scheduler" in given:
            given["optimizer"] = sgd(list(model.parameters()))
        caplog.clear()
        engine = shoal.initialize(model=model, config=config(1, scheduler=schedule), **given)[0]
        engine.destroy()
        return [record.message for record in caplog.records if "scheduler" in record.message]

    with caplog.at_level("INFO", logger="shoal"):
        # A script's own lambda is what is tried.
        constant = lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer)  # noqa: E731
        assert notes(lr_scheduler=constant) == [
            "the client's lr_scheduler is used; the config's scheduler section is not."
        ]
        assert notes() == ["the config's scheduler section has no effect without an optimizer."]
