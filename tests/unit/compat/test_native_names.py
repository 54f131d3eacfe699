"""Names of DeepSpeed's on an engine and an optimizer of Shoal's own: each is an error that says what has it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.compat import finder
from shoal.compat.engine import DeepSpeedEngine, DeepSpeedPipelineEngine
from shoal.compat.engine_names import NOT_HERE
from shoal.compat.native_names import _ENGINE, _OPTIMIZER
from shoal.compat.optimizer import DeepSpeedShardedOptimizer
from shoal.engine.engine import Engine
from shoal.engine.pipeline import PipelineEngine
from shoal.errors import NotBuiltError
from shoal.pipeline.module import PipelineModule
from shoal.running.optimizer import ShardedOptimizer


def public_names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


MOVED = sorted(public_names(DeepSpeedEngine) - public_names(Engine))
MOVED_OF_PIPELINES = sorted(public_names(DeepSpeedPipelineEngine) - public_names(PipelineEngine))
MOVED_OF_OPTIMIZERS = sorted(public_names(DeepSpeedShardedOptimizer) - public_names(ShardedOptimizer))
SERVES = {name: serves for serves, names in (_ENGINE | _OPTIMIZER).items() for name in names.split()}


def initialized(model: nn.Module) -> Any:
    return shoal.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config={"train_batch_size": 1}
    )[:2]


@pytest.fixture(scope="module")
def native() -> Iterator[tuple[Any, Any]]:
    engine, optimizer = initialized(nn.Linear(2, 2))
    yield engine, optimizer
    engine.destroy()


@pytest.fixture(scope="module")
def stages() -> Iterator[Any]:
    engine, _ = initialized(PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=nn.MSELoss()))
    yield engine
    engine.destroy()


def check(thing: Any, owner: str, name: str) -> None:
    assert not hasattr(thing, name)
    with pytest.raises(AttributeError) as caught:
        getattr(thing, name)
    text = str(caught.value)
    assert "[engine-absent]" in text and f"{owner}.{name} is a name of DeepSpeed's" in text
    if name in NOT_HERE:
        assert NOT_HERE[name] in text
        return
    assert "import deepspeed" in text
    if name in SERVES:
        assert f"use {SERVES[name]}; or" in text


def test_a_native_engine_has_fewer_than_seventy_names() -> None:
    assert 50 <= len(public_names(Engine) - public_names(nn.Module)) <= 70
    assert len(MOVED) > 150


@pytest.mark.parametrize("name", [*MOVED, *sorted(NOT_HERE)])
def test_a_name_of_deepspeeds_engine_says_what_has_it(name: str, native: tuple[Any, Any]) -> None:
    assert type(native[0]) is Engine is shoal.Engine
    check(native[0], "engine", name)


@pytest.mark.parametrize("name", MOVED_OF_PIPELINES)
def test_a_name_of_deepspeeds_pipeline_engine_says_what_has_it(name: str, stages: Any) -> None:
    assert type(stages) is PipelineEngine
    if name in {"get_additional_losses", "mpu", "num_stages", "stage_id"}:
        assert getattr(stages, name) == getattr(stages.module, name)
    else:
        check(stages, "engine", name)


@pytest.mark.parametrize("name", MOVED_OF_OPTIMIZERS)
def test_a_name_of_deepspeeds_optimizer_says_what_has_it(name: str, native: tuple[Any, Any]) -> None:
    assert type(native[1]) is ShardedOptimizer
    check(native[1], "optimizer", name)


def test_every_name_that_has_a_replacement_is_one_of_deepspeeds() -> None:
    assert SERVES.keys() <= {*MOVED, *MOVED_OF_PIPELINES, *MOVED_OF_OPTIMIZERS}


@pytest.mark.parametrize("name", ["num_experts", "losses", "mem_status", "train_batch"])
def test_an_attribute_of_the_model_with_such_a_name_is_the_models(name: str) -> None:
    model = nn.Linear(2, 2)
    model.__dict__[name] = "the model's own"
    engine, _ = initialized(model)
    assert getattr(engine, name) == "the model's own"
    engine.destroy()


def test_other_missing_names_are_plain_attribute_errors(native: tuple[Any, Any]) -> None:
    for thing in native:
        with pytest.raises(AttributeError, match="no attribute 'nothing_like_it'") as caught:
            _ = thing.nothing_like_it
        assert not isinstance(caught.value, NotBuiltError)


ATTRIBUTES_THAT_SERVE = [
    text for text in (*_ENGINE, *_OPTIMIZER) if re.fullmatch(r"(engine|optimizer)(\.\w+(\(\))?)+", text)
]


@pytest.mark.parametrize("text", ATTRIBUTES_THAT_SERVE)
def test_an_attribute_that_serves_is_there(text: str, native: tuple[Any, Any]) -> None:
    assert len(ATTRIBUTES_THAT_SERVE) > 12
    eval(text, dict(zip(("engine", "optimizer"), native, strict=True)))  # noqa: S307 - the texts are Shoal's own


def test_after_import_deepspeed_every_engine_has_the_names_until_uninstall() -> None:
    finder.install(children=False)
    import deepspeed

    for initialize in (shoal.initialize, deepspeed.initialize):
        engine, optimizer, *_ = initialize(
            model=nn.Linear(2, 2),
            model_parameters=None,
            config={"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1}},
            dist_init_required=False,
        )
        assert type(engine) is deepspeed.DeepSpeedEngine and type(optimizer) is DeepSpeedShardedOptimizer
        assert engine.fp16_enabled() is False and optimizer.cur_scale == 1.0
        assert engine.follows_deepspeed is (initialize is deepspeed.initialize)
        engine.destroy()
    finder.uninstall()
    engine, optimizer = initialized(nn.Linear(2, 2))
    assert type(engine) is Engine and type(optimizer) is ShardedOptimizer
    engine.destroy()


def test_deepspeeds_initialize_makes_its_engine_without_the_alias_too() -> None:
    from shoal.compat.deepspeed import initialize

    engine, *_ = initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1}, dist_init_required=False)
    assert type(engine) is DeepSpeedEngine
    engine.destroy()
