"""A stop changes no bit: N steps, a save, a new engine and N steps are 2 N steps."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.helpers import models
from tests.helpers.gloo_pool import GlooPool
from tests.helpers.models import Plain
from tests.helpers.resuming import (
    Run,
    assert_goes_on,
    differences,
    engine_of,
    micro_steps,
    resume,
    state_of,
    stop,
    two_blocks,
)
from tests.helpers.training import adamw, batch, config, make

Row = tuple[int, int, dict[str, Any]]  # ranks, stage, zero's keys

ROWS: dict[str, Row] = {
    "stage 0": (2, 0, {}),
    "stage 1": (2, 1, {}),
    "stage 2": (2, 2, {}),
    "stage 3": (2, 3, {}),
    "mics, stage 1": (4, 1, {"mics_shard_size": 2}),
    "mics, stage 3": (4, 3, {"mics_shard_size": 2}),
    "hpz": (4, 3, {"zero_hpz_partition_size": 2}),
}
FEW_ROWS = ("stage 0", "stage 3", "mics, stage 1")
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2}},
    "bf16 without main parameters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 1e-2, "adam_w_mode": False},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adagrad": {"lr": 0.05},
    "Lion": {"lr": 1e-2},
    "Lamb": {"lr": 1e-2},
    "Muon": {"lr": 1e-2},
}
CLIENT_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "RMSprop": {"momentum": 0.5, "centered": True},
    "NAdam": {},
    "AdamW": {"amsgrad": True},
    "Rprop": {},
    "ASGD": {},
}


def run_of(row: str, **sections: Any) -> Run:
    world, stage, zero = ROWS[row]
    return Run(config(stage, zero_optimization=zero, **sections), world, two_blocks, adamw)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("row", ROWS)
def test_a_stop_changes_no_bit_at_any_stage_and_precision(row: str, precision: str, tmp_path: Path) -> None:
    states = assert_goes_on(run_of(row, **PRECISIONS[precision]), tmp_path, at=2, until=4)
    assert states[0].counters == [4, 4 * 2 * ROWS[row][0], 4, 0]
    if precision == "fp16":
        assert states[0].loss_scale == 2**11  # doubled once


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("row", FEW_ROWS)
def test_a_stop_changes_no_bit_with_any_optimizer_of_the_config(row: str, name: str, tmp_path: Path) -> None:
    section = {"type": name, "params": OPTIMIZERS[name]}
    assert_goes_on(replace(run_of(row, optimizer=section), optimizer=None), tmp_path, at=2, until=4, dirty=1)


@pytest.mark.parametrize("name", CLIENT_OPTIMIZERS)
def test_a_stop_changes_no_bit_with_a_client_optimizer(name: str, tmp_path: Path) -> None:
    def optimizer(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=1e-2, **CLIENT_OPTIMIZERS[name])
        return made

    for row in FEW_ROWS[:2]:
        run = replace(run_of(row, bf16={"enabled": True}), optimizer=optimizer)
        assert_goes_on(run, tmp_path / row, at=2, until=4)


class CountsTwice(torch.optim.Optimizer):
    """SGD that counts its steps in an int and in a tensor of one element, and slows down by both."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["number"] = state.get("number", 0) + 1
                state["count"] = state.get("count", torch.zeros(1)) + 1
                parameter.sub_(parameter.grad * (group["lr"] / (state["number"] + state["count"])))


@pytest.mark.parametrize("row", FEW_ROWS[:2])
def test_a_stop_changes_no_bit_where_state_is_a_number_or_a_tensor_of_one_element(row: str, tmp_path: Path) -> None:
    run = replace(run_of(row, zero_allow_untested_optimizer=True), optimizer=CountsTwice)
    assert_goes_on(run, tmp_path, at=2, until=4)


SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 5, "warmup_max_lr": 0.1},
    "WarmupDecayLR": {"warmup_num_steps": 2, "total_num_steps": 9, "warmup_max_lr": 0.1},
    "WarmupCosineLR": {"warmup_num_steps": 2, "total_num_steps": 9},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4},
    "LRRangeTest": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2},
}
CLIENT_SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        [2],
    ),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stop_changes_no_bit_under_a_schedule_of_the_config(name: str, tmp_path: Path) -> None:
    run = run_of("stage 2", scheduler={"type": name, "params": SCHEDULES[name]})
    states = assert_goes_on(run, tmp_path, at=3, until=6)
    assert states[0].rates != [1e-2]


@pytest.mark.parametrize("name", CLIENT_SCHEDULES)
def test_a_stop_changes_no_bit_under_a_torch_schedule(name: str, tmp_path: Path) -> None:
    run = replace(run_of("stage 1"), schedule=CLIENT_SCHEDULES[name])
    if name == "ReduceLROnPlateau":
        run = replace(run, step=lambda engine: engine.step({"metrics": 1.0}))
    states = assert_goes_on(run, tmp_path, at=3, until=6)
    assert states[0].rates != [1e-2]


@pytest.mark.parametrize(("at", "precision"), [(1, "fp32"), (2, "fp16"), (3, "bf16"), (4, "bf16")])
@pytest.mark.parametrize("row", ["stage 0", "stage 1", "stage 2", "stage 3", "mics, stage 3"])
def test_a_stop_in_the_middle_of_an_accumulation_changes_no_bit(
    row: str, at: int, precision: str, tmp_path: Path
) -> None:
    run = run_of(row, gradient_accumulation_steps=3, gradient_clipping=0.1, **PRECISIONS[precision])
    states = assert_goes_on(run, tmp_path, at=at, until=6, dirty=1)
    assert states[0].counters[0] == 2


@pytest.mark.parametrize(("world", "stage"), [(1, 1), (3, 3), (5, 2), (8, 3)])
@pytest.mark.parametrize("model", ["OddParameters", "TiedBetweenBlocks", "Normalised"])
def test_odd_sizes_and_more_ranks_than_elements_stop_and_go_on(
    model: str, world: int, stage: int, tmp_path: Path
) -> None:
    factory = getattr(models, model)
    run = Run(config(stage, units={"names": ["blocks.*", "embedding"]}), world, factory, adamw)
    assert_goes_on(run, tmp_path, at=2, until=3)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_step_that_was_skipped_counts_after_a_stop(stage: int, tmp_path: Path) -> None:
    """The loss scale starts so high that the first steps overflow."""
    section = {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}
    run = Run(config(stage, fp16=section), 2, optimizer=adamw)
    states = assert_goes_on(run, tmp_path, at=3, until=6)
    assert states[0].counters == [6, 24, 6, 6]
    assert states[0].loss_scale == 2**26


def test_a_save_changes_nothing_of_the_run_that_saves(tmp_path: Path) -> None:
    for row in ("stage 0", "stage 2", "mics, stage 3"):
        run = run_of(row, gradient_accumulation_steps=2, **PRECISIONS["bf16"])

        def train(run: Run, folder: Path | None) -> list[Any]:
            def rank() -> Any:
                engine = engine_of(run)
                losses = []
                for index in range(6):
                    losses += micro_steps(engine, run, index, 1)
                    if folder is not None:
                        engine.save_checkpoint(folder / f"{index % 2}")
                state = state_of(engine, losses)
                engine.destroy()
                return state

            return run_ranks(run.world, rank)

        without, with_saves = train(run, None), train(run, tmp_path / row)
        assert [state.losses for state in with_saves] == [state.losses for state in without]
        assert differences(without, with_saves) == []


class Noisy(Plain):
    """Drops activations, and disturbs its input by numpy's and Python's generators."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (1 + 0.1 * float(np.random.rand())) + 0.1 * random.random()
        return super().body(nn.functional.dropout(x, 0.5))


def noisy_settings(stage: int) -> dict[str, Any]:
    return config(stage, bf16={"enabled": True}, gradient_accumulation_steps=2)


def train_noisy(rank: int, size: int, stage: int, folder: str, is_resumed: bool) -> dict[str, Any]:
    run = Run(noisy_settings(stage), size, Noisy, adamw, seed=int(is_resumed))
    engine = engine_of(run)
    for seeded in (torch.manual_seed, np.random.seed, random.seed):
        seeded(100 + rank + 50 * is_resumed)
    if is_resumed:
        engine.load_checkpoint(folder)
    else:
        micro_steps(engine, run, 0, 3)
        engine.save_checkpoint(folder)
    losses = micro_steps(engine, run, 3, 3)
    state = state_of(engine)
    engine.destroy()
    return {"losses": losses, "main_parameters": state.main_parameters, "pid": os.getpid()}


@pytest.mark.gloo
@pytest.mark.timeout(120)  # it starts four processes
def test_new_processes_draw_the_dropout_that_the_old_ones_would_have(gloo: Callable[..., Any], tmp_path: Path) -> None:
    """In the middle of an accumulation; the generators of torch, numpy and Python go on, each rank's its own."""
    straight = {stage: gloo(2, train_noisy, stage, str(tmp_path / str(stage)), False) for stage in (0, 3)}
    pool = GlooPool(2)
    try:
        for stage, expected in straight.items():
            resumed = pool.call(train_noisy, stage, str(tmp_path / str(stage)), True)
            for ours, theirs in zip(resumed, expected, strict=True):
                assert ours["pid"] != theirs["pid"]
                assert ours["losses"] == theirs["losses"]
                assert all(
                    torch.equal(value, theirs["main_parameters"][name])
                    for name, value in ours["main_parameters"].items()
                )
            assert expected[0]["losses"] != expected[1]["losses"]
    finally:
        pool.close()


def resume_here(rank: int, size: int, folder: str, stage: int) -> dict[str, Any]:
    run = Run(config(stage, bf16={"enabled": True}), size, optimizer=adamw, seed=1)
    engine = engine_of(run)
    engine.load_checkpoint(folder)
    losses = micro_steps(engine, run, 2, 2)
    state = state_of(engine)
    engine.destroy()
    return {"losses": losses, "main_parameters": state.main_parameters}


@pytest.mark.gloo
def test_processes_go_on_where_threads_stopped(gloo: Callable[..., Any], tmp_path: Path) -> None:
    for stage in (1, 3):
        folder = str(tmp_path / str(stage))
        run = Run(config(stage, bf16={"enabled": True}), 2, optimizer=adamw)
        straight = stop(run, folder, at=2, until=4)
        for ours, theirs in zip(gloo(2, resume_here, folder, stage), straight, strict=True):
            assert ours["losses"] == theirs.losses
            assert all(
                torch.equal(value, theirs.main_parameters[name]) for name, value in ours["main_parameters"].items()
            )


# the place in the data

NUM_SAMPLES = 53


class Numbered(torch.utils.data.Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        tokens, targets = batch(index, 0, 1)
        return index, tokens[0], targets[0]


def read_on(engine: shoal.Engine, loader: Any, num_batches: int) -> list[list[int]]:
    """Train on ``num_batches`` micro-batches, across the ends of epochs. Returns: the samples of each."""
    seen: list[list[int]] = []
    while len(seen) < num_batches:
        for numbers, tokens, targets in loader:
            engine.backward(engine(tokens, targets))
            engine.step()
            seen.append(numbers.tolist())
            if len(seen) == num_batches:
                break
    return seen


def read_data(
    folder: Path, world: int, micro_batch: int, num_batches: int, *, saves: int | None = None, loads: bool = False
) -> list[list[int]]:
    """Samples by rank and micro-batch, put together in the order in which the ranks' loaders deal them out."""

    def rank() -> list[list[int]]:
        settings = config(2, train_micro_batch_size_per_gpu=micro_batch, gradient_accumulation_steps=2)
        model = make(Plain)
        engine, _, loader, _ = shoal.initialize(
            model=model, optimizer=adamw(model.parameters()), config=settings, training_data=Numbered()
        )
        if loads:
            engine.load_checkpoint(folder)
        seen = read_on(engine, loader, num_batches if saves is None else saves)
        if saves is not None:
            engine.save_checkpoint(folder)
            seen += read_on(engine, loader, num_batches - saves)
        assert current_world().size == world
        engine.destroy()
        return seen

    by_rank = run_ranks(world, rank)
    return [[number for samples in at for number in samples] for at in zip(*by_rank, strict=True)]


def test_a_stop_in_the_middle_of_an_epoch_reads_on(tmp_path: Path) -> None:
    straight = read_data(tmp_path, 2, 2, 18, saves=6)  # 13 and a quarter batches are an epoch
    resumed = read_data(tmp_path, 2, 2, 12, loads=True)
    assert straight[6:] == resumed
    flat = [number for samples in straight for number in samples]
    assert sorted(flat[:NUM_SAMPLES]) == list(range(NUM_SAMPLES))
    assert flat[:10] != list(range(10))  # shuffled


@pytest.mark.parametrize(("before", "after"), [((4, 1), (3, 2)), ((2, 2), (1, 3)), ((1, 4), (4, 2)), ((3, 1), (2, 1))])
def test_a_change_of_the_world_in_the_middle_of_an_epoch_neither_repeats_nor_skips_a_sample(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    """Each is (ranks, micro-batch)."""
    flat = [number for samples in read_data(tmp_path, *before, 4, saves=4) for number in samples]
    assert len(flat) == 4 * before[0] * before[1]
    per_batch, left = after[0] * after[1], NUM_SAMPLES - len(flat)
    num_batches = -(-left // per_batch) - (-NUM_SAMPLES // per_batch)
    flat += [number for samples in read_data(tmp_path, *after, num_batches, loads=True) for number in samples]
    repeated = -(left % per_batch) % after[0]  # in a short last batch, so that all ranks have as many samples
    first, second = flat[:NUM_SAMPLES], flat[NUM_SAMPLES + repeated :][:NUM_SAMPLES]
    assert sorted(first) == list(range(NUM_SAMPLES))
    assert sorted(second) == list(range(NUM_SAMPLES))
    assert first != second


@pytest.mark.parametrize("change", ["ranks", "stage", "accumulation steps", "weights alone"])
def test_a_stop_in_the_middle_of_a_step_begins_the_step_again_in_another_layout(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = replace(run_of("stage 1", gradient_accumulation_steps=2), rows=12)
    other, load = {
        "ranks": (replace(run, world=3), {}),
        "stage": (replace(run_of("stage 2", gradient_accumulation_steps=2), rows=12), {}),
        "accumulation steps": (replace(run_of("stage 1", gradient_accumulation_steps=3), rows=12), {}),
        "weights alone": (replace(run, world=3), {"load_module_only": True}),
    }[change]
    stop(run, tmp_path / "at the end", at=2)
    assert "in the middle of an accumulation" not in caplog.text
    stop(run, tmp_path / "in the middle", at=3)
    assert "saved in the middle of an accumulation, after 1 of 2 micro-batches" in caplog.text
    caplog.clear()
    again = resume(other, tmp_path / "in the middle", at=2, until=8, dirty=1, **load)
    if not load:
        assert caplog.text.count("micro-batches from number 2 (counted from 0) are repeated") == 1
        assert "from sample 8 on" in caplog.text
    expected = resume(other, tmp_path / "at the end", at=2, until=8, dirty=1, **load)
    assert [state.losses for state in again] == [state.losses for state in expected]
    assert [state.counters for state in again] == [state.counters for state in expected]
    assert differences(again, expected) == []


@pytest.mark.parametrize("saves", [1, 9])
def test_the_loader_repeats_the_samples_of_a_step_that_begins_again(saves: int, tmp_path: Path) -> None:
    straight = read_data(tmp_path, 2, 2, saves + 1, saves=saves)  # two of them are a step
    resumed = read_data(tmp_path, 1, 4, 2, loads=True)
    assert resumed == straight[-2:]


def test_a_script_that_sets_the_boundary_itself_is_told_how_many_micro_batches_a_save_leaves_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Accelerate does: ``step()`` is called at the boundary alone."""

    def rank() -> None:
        engine = engine_of(run_of("stage 1", gradient_accumulation_steps=4))
        engine.set_gradient_accumulation_boundary(False)
        for index in range(3):
            engine.backward(engine(*batch(index, engine.global_rank, 2)))
        engine.save_checkpoint(tmp_path)
        engine.destroy()

    run_ranks(2, rank)
    assert "after 3 of 4 micro-batches" in caplog.text
    caplog.clear()
    resume(run_of("stage 2", gradient_accumulation_steps=4), tmp_path, at=0, until=4)
    assert "after 3 micro-batches of step 1, in another layout" in caplog.text
