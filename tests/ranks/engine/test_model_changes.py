"""What a script does to the parameters after ``initialize``: it counts, or it is an error; it is never lost unseen."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import ModelError
from tests.helpers.models import Plain
from tests.helpers.training import batch, config, main_parameters, make, micro_step, run_steps, start, start_with
from tests.ranks.offload.test_offload import make_apart


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _set_data(model: nn.Module) -> None:
    model.blocks[1].up.weight.data = torch.zeros(24, 12)


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "data": (_set_data, r"1 parameter given other memory, so no longer trained: blocks\.1\.up\.weight"),
    "half": (nn.Module.half, r"\d+ parameters given other memory as float16, so no longer trained: (\S+, ){9}\S+ and"),
    "double": (nn.Module.double, r"\d+ parameters given other memory as float64, "),
}


@pytest.mark.filterwarnings("ignore:.* reads the sharded parameter")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_are_given_other_memory_are_an_error_that_names_them(stage: int, change: str) -> None:
    def job() -> str:
        engine = start(Plain, config(stage))
        run_steps(engine, 5)
        CHANGES[change][0](engine.module)
        with pytest.raises(ModelError) as caught:
            engine(*batch(5, 0, 1))
        engine.destroy()
        return f"{caught.value.code}: {caught.value}"

    for message in run_ranks(2, job):
        assert message.startswith("model-changed: ")
        assert re.search(CHANGES[change][1], message)


@pytest.mark.parametrize("stage", [2, 3])
def test_of_many_parameters_each_is_looked_at_within_a_few_forwards(stage: int) -> None:
    def job() -> int:
        engine = start(partial(Plain, 40), config(stage))  # 6 parameters a block
        run_steps(engine, 2)
        engine.module.norm.bias.data = torch.zeros(12)
        for index in range(2, 20):
            try:
                micro_step(engine, index)
            except ModelError:
                return index
        return 0

    assert run_ranks(1, job)[0] in range(2, 7)  # 244 of them, 64 a forward


def test_what_changes_no_memory_is_no_error() -> None:
    def job(stage: int) -> None:
        engine = start(Plain, config(stage))
        for index in range(4):
            engine.module.float().to("cpu").train()
            with shoal.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
                engine.module.float()
            micro_step(engine, index)
        engine.destroy()

    for stage in range(4):
        run_ranks(2, job, stage)


def _other_weights() -> dict[str, torch.Tensor]:
    return make(Plain, seed=9).state_dict()


SECTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 16}},
    "host": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "ahead": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
}


@pytest.mark.parametrize(
    ("stage", "kind"),
    [(0, "bf16"), (1, "bf16"), (2, "bf16"), (2, "fp16"), (1, "host"), (2, "host"), (2, "ahead"), (3, "whole")],
)
@pytest.mark.parametrize("when", ["between steps", "before step", "between micro-batches"])
def test_weights_set_in_place_are_what_training_goes_on_from(
    stage: int, kind: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Main parameters follow: the next step does not undo a ``load_state_dict`` of the module."""
    make_apart(monkeypatch)
    section = {"bf16": {"enabled": True}} if kind == "whole" else SECTIONS[kind]
    settings = config(stage, gradient_accumulation_steps=2, **section)
    if kind == "whole":
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 1_000_000

    def job(is_late: bool) -> dict[str, torch.Tensor]:
        """Zero learning rate until the weights are set, so that only what was set decides."""
        model = make(Plain, seed=0)
        if not is_late:
            model.load_state_dict(_other_weights())
        engine = start_with(model, settings, plain_sgd)
        weights = {name: value.to(next(model.parameters()).dtype) for name, value in _other_weights().items()}
        group = engine.optimizer.param_groups[0]
        group["lr"] = 0.0
        run_steps(engine, 2)
        group["lr"] = 0.1 if when == "between steps" else 0.0

        def put() -> None:
            if is_late:
                engine.module.load_state_dict(weights)

        if when == "between steps":
            put()
            run_steps(engine, 2, first=4)
        else:
            micro_step(engine, 4)
            if when == "between micro-batches":
                put()
            loss = engine(*batch(5, current_world().rank, current_world().size))
            engine.backward(loss)
            if when == "before step":
                put()
            engine.step()
            group["lr"] = 0.1
            run_steps(engine, 2, first=6)
        found = main_parameters(engine)
        engine.destroy()
        return found

    for early, late in zip(run_ranks(2, job, False), run_ranks(2, job, True), strict=True):
        for name, value in early.items():
            # Set as 16-bit numbers, they are the first main parameters.
            tolerance = 0.0 if kind in ("host", "ahead") else 0.03
            assert torch.allclose(value, late[name], rtol=tolerance, atol=tolerance / 4), name


@pytest.mark.parametrize("calls_forward", [True, False])
@pytest.mark.parametrize("stage", [0, 2])
def test_main_parameters_that_were_not_changed_keep_their_digits(stage: int, calls_forward: bool) -> None:
    def job() -> None:
        engine = start(Plain, config(stage, bf16={"enabled": True}))
        run_steps(engine, 2)
        before = main_parameters(engine)
        with torch.no_grad():
            engine.module.norm.weight[3] = 5.0
            engine.module.blocks[0].up.weight.mul_(1.0)
        if calls_forward:
            engine(*batch(2, 0, 1))
        after = main_parameters(engine)
        assert after["norm.weight"][3] == 5.0
        before["norm.weight"][3] = 5.0
        assert all(torch.equal(before[name], after[name]) for name in before)
        engine.destroy()

    run_ranks(2, job)


def test_a_checkpoint_contains_what_was_set_right_before_it(tmp_path: Any) -> None:
    settings = config(1, bf16={"enabled": True})

    def save() -> None:
        engine = start(Plain, settings)
        run_steps(engine, 1)
        with torch.no_grad():
            engine.module.norm.weight.fill_(7.0)
        engine.save_checkpoint(tmp_path)
        engine.destroy()

    def load() -> torch.Tensor:
        engine = start(Plain, settings)
        engine.load_checkpoint(tmp_path)
        found = main_parameters(engine)["norm.weight"]
        engine.destroy()
        return found

    run_ranks(2, save)
    for found in run_ranks(2, load):
        assert torch.equal(found, torch.full((12,), 7.0))


class Renormed(Plain):
    """Its forward changes the embedding's rows that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.max_norm = 0.1


@pytest.mark.parametrize(("stage", "fate"), [(1, "differs between ranks until the step"), (3, "is lost")])
def test_a_forward_that_changes_parameters_is_reported_once(
    stage: int, fate: str, caplog: pytest.LogCaptureFixture
) -> None:
    def job() -> None:
        engine = start(Renormed, config(stage))
        run_steps(engine, 3)
        engine.destroy()

    with caplog.at_level(logging.WARNING, "shoal"):
        run_ranks(2, job)
        run_ranks(1, job)  # where nobody disagrees
    told = [record.getMessage() for record in caplog.records if "changes parameters in place" in record.getMessage()]
    assert sorted(message.split(":")[0] for message in told) == ["rank 0", "rank 1"]
    assert all("embedding.weight" in message and fate in message for message in told)
