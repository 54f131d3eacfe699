"""Loops that people write around forward, backward and step, each against the same loop in plain PyTorch."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from shoal.mesh import Mesh
from tests.helpers.models import Plain
from tests.helpers.training import (
    STAGES,
    are_bit_equal,
    batch,
    config,
    finish,
    largest_difference,
    main_parameters,
    make,
    micro_step,
    run_steps,
    sgd,
    start,
    train_ranks,
)

Loop = Callable[[Any, int, int, int], torch.Tensor]  # model, step, rank, world -> loss


def against_plain(
    loss_of: Loop, *, world: int = 2, before_step: Callable[[nn.Module, int], None] | None = None
) -> None:
    """Three steps of ``loss_of`` at every stage and in both backward styles end where one process ends."""
    model = make(Plain)
    optimizer = sgd(model.parameters())
    for step in range(3):
        if before_step is not None:
            before_step(model, step)
        for rank in range(world):
            (loss_of(model, step, rank, world) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    alone = {name: p.detach() for name, p in model.named_parameters()}

    def job(stage: int, style: str) -> dict[str, torch.Tensor]:
        engine = start(Plain, config(stage))
        for step in range(3):
            if before_step is not None:
                before_step(engine.module, step)
            loss = loss_of(engine, step, current_world().rank, world)
            engine.backward(loss) if style == "engine" else loss.backward()
            engine.step()
        return finish(engine, []).parameters

    for stage in STAGES:
        for style in ("engine", "plain"):
            for found in run_ranks(world, job, stage, style):
                assert largest_difference(found, alone) <= 1e-5, (stage, style)


def test_one_backward_through_two_forward_passes() -> None:
    def loss_of(model: Any, step: int, rank: int, world: int) -> torch.Tensor:
        return model(*batch(2 * step, rank, world)) + model(*batch(2 * step + 1, rank, world)).square()

    against_plain(loss_of)


def test_an_evaluation_between_forward_and_backward() -> None:
    def loss_of(model: Any, step: int, rank: int, world: int) -> torch.Tensor:
        loss = model(*batch(step, rank, world))
        with torch.no_grad():
            model(*batch(70 + step, rank, world))
        return loss

    against_plain(loss_of)


def test_a_forward_whose_result_is_thrown_away() -> None:
    def loss_of(model: Any, step: int, rank: int, world: int) -> torch.Tensor:
        model(*batch(70 + step, rank, world))
        return model(*batch(step, rank, world))

    against_plain(loss_of)


def test_a_layer_that_is_frozen_and_thawed_between_steps() -> None:
    def before_step(model: nn.Module, step: int) -> None:
        model.blocks[1].requires_grad_(step != 1)

    def loss_of(model: Any, step: int, rank: int, world: int) -> torch.Tensor:
        return model(*batch(step, rank, world))

    against_plain(loss_of, before_step=before_step)


def test_a_teacher_that_is_frozen_and_sharded_beside_its_student() -> None:
    def job(stage: int) -> dict[str, torch.Tensor]:
        teacher = shoal.initialize(model=make(Plain, seed=5).requires_grad_(False), config=config(stage))[0]
        student = start(Plain, config(stage))
        for step in range(3):
            tokens, _ = batch(step, current_world().rank, 2)
            with torch.no_grad():
                wanted = teacher(tokens, tokens), teacher.logits(tokens)
            loss = student(tokens, tokens) + (wanted[0] - 1).abs() * 0
            student.backward(loss)
            student.step()
            assert wanted[1].isfinite().all() or stage == 3
        teacher.destroy()
        return finish(student, []).parameters

    first = run_ranks(2, job, 0)[0]
    for stage in (1, 2, 3):
        assert are_bit_equal(run_ranks(2, job, stage)[0], first)


@pytest.mark.parametrize("stage", STAGES)
def test_a_copy_of_the_model_is_on_its_own(stage: int) -> None:
    """A running mean of the weights (EMA): the copy is made whole, runs without a collective, and disturbs nothing."""

    def job() -> tuple[dict[str, torch.Tensor], list[str], bool]:
        engine = start(Plain, config(stage))
        run_steps(engine, 1)
        with shoal.zero.GatheredParameters(engine.module.parameters()):
            mean = copy.deepcopy(engine.module)
        with current_world().recorder.recording() as entries:
            loss = mean(*batch(3, 0, 1))
            loss.backward()
        is_whole = not any(p.isnan().any() for p in mean.parameters())
        run_steps(engine, 2, first=1)
        return finish(engine, []).parameters, [entry.op for entry in entries], is_whole

    expected = train_ranks(2, Plain, config(stage))[0].parameters
    for parameters, ops, is_whole in run_ranks(2, job):
        assert ops == []
        assert is_whole
        assert are_bit_equal(parameters, expected)


@pytest.mark.parametrize("part", ["", "blocks.1", "blocks.1.up"])
def test_copying_or_pickling_a_sharded_parameter_is_an_error_that_says_how(part: str) -> None:
    def job() -> str:
        engine = start(Plain, config(3))
        run_steps(engine, 1)
        module = engine.module.get_submodule(part)
        with pytest.raises(UsageError) as copied:
            copy.deepcopy(module)
        # The hooks of a unit's own module, which come first, are local to a function: nothing pickles them.
        with pytest.raises(UsageError if part == "blocks.1.up" else AttributeError):
            torch.save(module, io.BytesIO())
        assert "GatheredParameters" in copied.value.do
        run_steps(engine, 1, first=1)
        engine.destroy()
        copy.deepcopy(module)
        return copied.value.code

    assert run_ranks(2, job) == ["copy-at-rest"] * 2


def test_a_copy_of_a_copy_is_whole_too() -> None:
    def job() -> bool:
        engine = start(Plain, config(3))
        with shoal.zero.GatheredParameters(engine.module.parameters()):
            mean = copy.deepcopy(engine.module)
        values = copy.deepcopy(mean).state_dict()
        engine.destroy()
        return any(value.isnan().any() for value in values.values())

    assert run_ranks(2, job) == [False, False]


@pytest.mark.parametrize("part", ["", "blocks.1", "blocks.1.up"])
def test_the_state_dict_of_sharded_parameters_is_warned_of_once(part: str) -> None:
    # Warnings are the process's, not a thread's: only rank 0 asks.
    def job() -> tuple[list[str], bool, bool]:
        engine = start(Plain, config(3))
        run_steps(engine, 1)
        module = engine.module.get_submodule(part)
        current_world().communicator("dp", Mesh.of(2)).barrier(label="test")
        texts = []
        if current_world().rank == 0:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                is_nan = any(value.isnan().any() for value in module.state_dict().values())
                module.state_dict()
                engine.state_dict()
            texts = [str(found.message) for found in caught if "state_dict()" in str(found.message)]
        else:
            is_nan = True
        current_world().communicator("dp", Mesh.of(2)).barrier(label="test")
        with shoal.zero.GatheredParameters(engine.module.parameters()):
            is_whole = not any(value.isnan().any() for value in module.state_dict().values())
        engine.destroy()
        module.state_dict()
        return texts, is_nan, is_whole

    (texts, *first), (_, *second) = run_ranks(2, job)
    assert first == second == [True, True]
    assert len(texts) == 1
    assert "engine.module_state_dict()" in texts[0]
    assert "GatheredParameters" in texts[0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_a_state_dict_and_a_copy_are_whole_at_any_time(stage: int) -> None:
    def job() -> bool:
        engine = start(Plain, config(stage))
        run_steps(engine, 1)
        found = [*engine.module.state_dict().values(), *copy.deepcopy(engine.module).parameters()]
        engine.destroy()
        return any(value.isnan().any() for value in found)

    assert run_ranks(2, job) == [False, False]


@pytest.mark.parametrize("sections", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_state_dict_is_loaded_inside_gathered_parameters(stage: int, sections: dict[str, Any]) -> None:
    other = make(Plain, seed=3)

    def job() -> dict[str, torch.Tensor]:
        engine = start(Plain, config(stage, **sections))
        with shoal.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
            if current_world().rank == 0:
                engine.module.load_state_dict(other.state_dict())
        found = main_parameters(engine)
        micro_step(engine, 0)
        engine.destroy()
        return found

    for found in run_ranks(2, job):
        for name, parameter in other.named_parameters():
            # Where the 16-bit value is the old one, the old main parameter stays, bits below it included.
            dtype = torch.bfloat16 if sections else torch.float32
            assert torch.equal(found[name].to(dtype), parameter.detach().to(dtype))


def test_a_sharded_parameter_refuses_to_be_written_where_it_is_not_whole() -> None:
    def job() -> None:
        engine = start(Plain, config(3))
        with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
            engine.module.blocks[0].up.weight.add_(1.0)
        with pytest.raises(RuntimeError, match="single memory location"):
            engine.module.load_state_dict(make(Plain).state_dict())
        engine.destroy()

    run_ranks(2, job)


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_may_be_changed_in_place_right_after_a_step(stage: int) -> None:
    """Peers have read this rank's part of them by then: each value is halved once on every rank."""
    model = make(Plain)
    settings = config(stage, optimizer={"type": "SGD", "params": {"lr": 0.0}})

    def halve() -> list[torch.Tensor]:
        engine, *_ = shoal.initialize(model=copy.deepcopy(model), config=settings)
        for index in range(20):
            engine.backward(engine(*batch(index, current_world().rank, 3)))
            engine.step()
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.mul_(0.5)
        found = [parameter.detach().clone() for parameter in engine.module.parameters()]
        engine.destroy()
        return found

    for values in run_ranks(3, halve):
        for value, first in zip(values, model.parameters(), strict=True):
            assert torch.equal(value, first.detach() * 0.5**20)
