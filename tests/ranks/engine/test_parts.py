"""Parts of a script's own: they see each forward, backward and step, and their state is in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.engine.parts.part import Part, PartCalls
from shoal.errors import UsageError

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


class Observer(shoal.Part):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.engine: Any = None
        self.num_steps = 0

    def prepare(self, engine: Any) -> None:
        self.engine = engine
        self.calls.append("prepare")

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append("before_forward")

    def after_forward(self, output: Any) -> None:
        self.calls.append("after_forward")

    def explain(self, error: Exception) -> None:
        error.add_note("explained by the part")

    def before_backward(self, loss: torch.Tensor) -> None:
        assert loss.requires_grad and loss.numel() == 1
        self.calls.append("before_backward")

    def before_step(self) -> None:
        weight = next(self.engine.module.parameters())
        assert shoal.zero.safe_get_full_grad(weight).abs().sum() > 0
        self.calls.append("before_step")

    def at_step(self, was_applied: bool) -> None:
        assert was_applied
        self.num_steps += 1
        self.calls.append(f"at_step {self.engine.global_steps}")

    def after_step(self) -> None:
        self.calls.append(f"after_step {self.engine.global_samples}")

    def state(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "tensor": torch.arange(3.0)}

    def load_state(self, saved: Any) -> None:
        assert torch.equal(saved["tensor"], torch.arange(3.0))
        self.num_steps = saved["num_steps"]
        self.calls.append(f"load_state at {self.engine.global_steps}")

    def before_destroy(self) -> None:
        self.calls.append("before_destroy")
        self.engine.module_state_dict()  # the parameters are still sharded

    def after_destroy(self) -> None:
        self.calls.append("after_destroy")
        assert next(self.engine.module.parameters()).shape == (1, 4)


class Doubling(shoal.Part):
    """Gives the model twice its inputs."""

    name = "doubles"

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(2 * value for value in args), kwargs


def engine_with(parts: Any, stage: int = 2) -> shoal.Engine:
    torch.manual_seed(0)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    return shoal.initialize(model=nn.Linear(4, 1), config=config, parts=parts)[0]


def step(engine: shoal.Engine) -> None:
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()


FORWARD = ["before_forward", "after_forward"]
STEP = [*FORWARD, "before_backward"] * 2


@pytest.mark.parametrize("stage", [2, 3])
def test_a_part_sees_each_forward_backward_and_step(stage: int) -> None:
    def job() -> list[str]:
        part = Observer()
        engine = engine_with([part], stage)
        step(engine)
        with torch.no_grad():
            engine(torch.ones(2, 4))
        step(engine)
        assert engine.part(Observer) is part and engine.parts[-1] is part and engine.part(Doubling) is None
        engine.destroy()
        return part.calls

    expected = [
        "prepare",
        *STEP,
        *("before_step", "at_step 1", "after_step 8"),
        *FORWARD,
        *STEP,
        *("before_step", "at_step 2", "after_step 16"),
        *("before_destroy", "after_destroy"),
    ]
    assert run_ranks(2, job) == [expected] * 2


def test_its_state_is_in_the_checkpoint_and_comes_back(tmp_path: Path) -> None:
    def save() -> None:
        engine = engine_with([Doubling(), Observer()])
        step(engine)
        step(engine)
        engine.save_checkpoint(tmp_path)
        engine.destroy()

    def load() -> tuple[int, list[str]]:
        part = Observer()
        engine = engine_with([part, Doubling()], 3)
        engine.load_checkpoint(tmp_path)
        engine.destroy()
        return part.num_steps, part.calls[1:2]

    run_ranks(2, save)
    assert run_ranks(4, load) == [(2, ["load_state at 2"])] * 4


def test_a_state_that_the_run_or_the_checkpoint_has_not_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_part, without = engine_with([Observer()]), engine_with([])
    with_part.save_checkpoint(tmp_path / "with")
    without.save_checkpoint(tmp_path / "without")
    with caplog.at_level("INFO", "shoal"):
        without.load_checkpoint(tmp_path / "with")
    assert "the checkpoint has the state of parts that this run has not: Observer." in caplog.text
    part = with_part.part(Observer)
    with_part.load_checkpoint(tmp_path / "without")
    assert part is not None and not any(call.startswith("load_state") for call in part.calls)
    with_part.destroy()
    without.destroy()


def test_a_part_changes_the_inputs_and_explains_an_error() -> None:
    engine = engine_with([Doubling(), Observer()])
    plain = engine.module(torch.full((1, 4), 2.0))
    assert torch.equal(engine(torch.ones(1, 4)), plain)
    with pytest.raises(RuntimeError) as caught:
        engine(torch.ones(1, 3))
    assert caught.value.__notes__ == ["explained by the part"]
    engine.destroy()


def test_methods_that_no_part_overrides_are_not_called() -> None:
    calls = PartCalls([Part(), Doubling()])
    assert len(calls.before_forward) == 1
    assert not any(value for name, value in vars(calls).items() if name != "before_forward")


def test_what_is_no_part_and_two_states_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match=r"parts has .*, which is no object of a class derived from shoal\.Part") as it:
        engine_with([Observer])
    assert it.value.code == "part-type"
    with pytest.raises(UsageError, match="two parts with a state have the name 'Observer'") as it:
        engine_with([Observer(), Doubling(), Doubling(), Observer()])
    assert it.value.code == "part-name"


def test_a_part_of_a_pipeline_sees_each_stage_and_micro_batch() -> None:
    def job() -> list[str]:
        torch.manual_seed(0)
        model = shoal.PipelineModule([nn.Linear(4, 4), nn.Linear(4, 1)], loss_fn=nn.functional.mse_loss)
        part = Stages()
        engine: Any = shoal.initialize(model=model, config={**CONFIG, "parallel": {"pp": 2}}, parts=[part])[0]
        batch = torch.ones(2, 4), torch.ones(2, 1)
        engine.train_batch(iter([batch, batch]))
        engine.destroy()
        return part.calls

    class Stages(shoal.Part):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.calls.append(f"forward of stage {args[0]}")

        def before_backward(self, loss: torch.Tensor) -> None:
            self.calls.append("loss")

        def at_step(self, was_applied: bool) -> None:
            self.calls.append("step")

    first, last = run_ranks(2, job)
    assert first == ["forward of stage 0", "forward of stage 0", "step"]
    assert last == ["forward of stage 1", "loss", "forward of stage 1", "loss", "step"]
