"""A checkpoint of another model, optimizer, schedule or version is refused on every rank, with every difference."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from typer.testing import CliRunner

import shoal
from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.native import ShoalSource
from shoal.cli.app import app
from shoal.comm.threads import run_ranks
from shoal.errors import CheckpointError, UsageError
from tests.helpers.models import Block, Plain
from tests.helpers.resuming import (
    Numbers,
    State,
    differences,
    engine_of,
    micro_steps,
    on_ranks,
    refusals,
    resume,
    run_at_stage,
    state_of,
    stop,
)
from tests.helpers.training import batch, config, make, sgd


class Renamed(Plain):
    """``norm`` has another name, a block has one more parameter, the second block is wider, one buffer is new."""

    def __init__(self) -> None:
        super().__init__(2)
        self.last_norm = self.norm
        del self.norm
        self.blocks[0].gate = nn.Parameter(torch.ones(3))
        self.blocks[1].up = nn.Linear(12, 25)
        self.blocks[1].down = nn.Linear(25, 12)
        self.register_buffer("table", torch.zeros(4))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.last_norm(self.body(self.embedding(tokens)))) * self.blocks[0].gate.mean()


def test_a_checkpoint_of_another_model_is_refused_with_every_difference_on_every_rank(tmp_path: Path) -> None:
    stop(run_at_stage(), tmp_path, at=1)
    for stage in (1, 3):
        for error in refusals(replace(run_at_stage(stage), factory=Renamed), tmp_path):
            assert error.code == "checkpoint-mismatch"
            for words in (
                "the checkpoint does not have 4: ",
                "blocks.0.gate",
                "last_norm.weight",
                "last_norm.bias",
                "table",
                "the model does not have 2: norm.weight, norm.bias",
                "blocks.1.up.weight [24, 12] in the checkpoint, [25, 12] in the model",
                "blocks.1.up.bias [24] in the checkpoint, [25] in the model",
                "blocks.1.down.weight [12, 24] in the checkpoint, [12, 25] in the model",
            ):
                assert words in error.what, words


class Longer(Plain):
    """One block more, without its norm at the end."""

    def __init__(self) -> None:
        super().__init__(3)
        self.norm = nn.Identity()


def test_not_strict_takes_what_fits_and_names_the_rest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = stop(run_at_stage(), tmp_path, at=1)[0]
    longer = replace(run_at_stage(2), factory=Longer)

    def use(engine: shoal.Engine) -> tuple[State, State]:
        before = state_of(engine)
        engine.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)
        return before, state_of(engine, micro_steps(engine, longer, 0, 0))

    found = on_ranks(longer, use)
    assert "the checkpoint does not have 6: blocks.2.norm.weight" in caplog.text
    assert "the model does not have 2: norm.weight, norm.bias" in caplog.text
    for before, after in found:
        for name, value in after.main_parameters.items():
            assert torch.equal(value, (before if name.startswith("blocks.2") else saved).main_parameters[name]), name
    for error in refusals(longer, tmp_path):
        assert "the checkpoint does not have 6" in error.what


def test_another_shape_is_refused_even_where_it_is_not_strict(tmp_path: Path) -> None:
    stop(run_at_stage(), tmp_path, at=1)
    wider = replace(run_at_stage(), factory=lambda: Plain(2, 14))
    for error in refusals(wider, tmp_path, load_module_strict=False, load_optimizer_states=False):
        assert "embedding.weight [13, 12] in the checkpoint, [13, 14] in the model" in error.what


def test_another_optimizer_and_other_groups_are_refused(tmp_path: Path) -> None:
    stop(run_at_stage(), tmp_path, at=1)

    def reversed_groups(parameters: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        return torch.optim.AdamW([{"params": every[:3]}, {"params": every[3:]}])

    def fewer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.shape != (3, 3)])

    for optimizer, words in (
        (sgd, "its optimizer is AdamW, this one is SGD"),
        (reversed_groups, "its optimizer has 1 parameter groups, this one 2"),
        (fewer, "group 0: unused.weight only in the checkpoint's, none only in this optimizer's"),
    ):
        run = replace(run_at_stage(1), optimizer=optimizer)
        for error in refusals(run, tmp_path):
            assert error.code == "checkpoint-mismatch"
            assert words in error.what
        on_ranks(run, lambda engine: engine.load_checkpoint(tmp_path, load_optimizer_states=False))


def test_main_parameters_are_not_rounded_silently(tmp_path: Path) -> None:
    stop(run_at_stage(), tmp_path, at=1)
    narrow = run_at_stage(bf16={"enabled": True, "bf16_master_weights_and_grads": True})
    for error in refusals(narrow, tmp_path):
        assert "its main parameters have more precision than this run's" in error.what


def test_a_newer_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    stop(run_at_stage(), tmp_path, at=1)
    path = tmp_path / "global_step1" / "manifest.json"
    rest = path.read_bytes().partition(b"\n")[2]
    body = json.loads(b"{" + rest)
    body["format"], body["versions"]["shoal"] = 3, "9.5.0"
    rest = json.dumps(body)[1:].encode()
    path.write_bytes(f'{{"checksum":"xxh3:{manifests.checksum(rest)}",\n'.encode() + rest)
    for error in refusals(run_at_stage(), tmp_path, tag="global_step1"):
        assert error.code == "checkpoint-version"
        assert "has format 3 and was written by Shoal 9.5.0; this one reads up to 2" in error.what


def test_changed_settings_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    section = {"type": "AdamW", "params": {"lr": 0.01}}
    run = replace(run_at_stage(2, optimizer=section), optimizer=None)
    stop(run, tmp_path, at=1)
    changed = {"type": "AdamW", "params": {"lr": 0.5}}
    other = replace(run_at_stage(2, optimizer=changed, gradient_clipping=0.25), optimizer=None)
    rates = on_ranks(other, lambda engine: (engine.load_checkpoint(tmp_path), engine.get_lr())[1])
    assert "gradient_clipping: 0.0 when saved, 0.25 now" in caplog.text
    assert "optimizer.params.lr: 0.01 when saved, which is used, 0.5 in this config" in caplog.text
    assert rates == [[0.01]] * 2  # a checkpoint's hyperparameters win
    assert caplog.text.count("settings differ") == 1
    caplog.clear()
    rates = on_ranks(other, lambda engine: (engine.load_checkpoint(tmp_path, None, True, False), engine.get_lr())[1])
    assert "optimizer.params.lr: 0.01 when saved, 0.5 now" in caplog.text
    assert rates == [[0.5]] * 2


def test_data_of_another_size_is_refused_before_anything_changes(tmp_path: Path) -> None:
    run = run_at_stage(2)

    def save() -> None:
        engine = engine_of(run, training_data=Numbers(53))
        micro_steps(engine, run, 0, 1)
        engine.save_checkpoint(tmp_path)
        engine.destroy()

    def load() -> list[str]:
        engine = engine_of(replace(run, seed=1), training_data=Numbers(40))
        before = state_of(engine)
        with pytest.raises((CheckpointError, UsageError), match="53 samples"):
            engine.load_checkpoint(tmp_path)
        after = state_of(engine)
        engine.destroy()
        return differences([before], [after])

    run_ranks(2, save)
    assert run_ranks(2, load) == [[], []]


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "SequentialLR"])
def test_another_schedule_is_refused_before_anything_changes(name: str, tmp_path: Path) -> None:
    def sequential(optimizer: Any) -> Any:
        parts = [lr_scheduler.ExponentialLR(optimizer, 0.5) for _ in range(2)]
        return lr_scheduler.SequentialLR(optimizer, parts, [2])

    stop(replace(run_at_stage(1), schedule=lambda o: lr_scheduler.ExponentialLR(o, 0.5)), tmp_path, at=1)
    # A value that is handed over, as the other schedules are.
    cosine: Callable[[Any], Any] = lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9)  # noqa: E731
    other = replace(run_at_stage(1), schedule=sequential if name == "SequentialLR" else cosine)
    for error in refusals(other, tmp_path):
        assert "ExponentialLR" in error.what and name in error.what


class WithState(Plain):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize("stage", [1, 3])
def test_what_conversions_do_not_keep_of_a_run_is_noted(stage: int, tmp_path: Path) -> None:
    def job() -> None:
        settings = config(stage, gradient_accumulation_steps=3)
        engine = shoal.initialize(model=make(lambda: WithState(2)), optimizer=sgd, config=settings)[0]
        for index in range(5):
            engine.backward(engine(*batch(index, 0, 1)))
            engine.step()
            if index in (2, 4):
                engine.save_checkpoint(tmp_path / str(index))
        engine.destroy()

    run_ranks(2, job)
    state = "what get_extra_state() of the model gave is not converted; left out."
    assert ShoalSource(tmp_path / "2").about.notes == [state]
    first, second = ShoalSource(tmp_path / "4").about.notes
    assert first == state
    assert second.startswith("gradients of the 2 micro-batches since step 1, whose step was not complete:")
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "4"), str(tmp_path / "dcp"), "--to", "dcp"])
    assert done.exit_code == 0 and f"note: {state}" in done.output and "note: gradients of the 2 micro" in done.output


def test_the_own_state_of_a_module_that_is_gone_is_left_out_where_it_is_not_strict(tmp_path: Path) -> None:
    stop(replace(run_at_stage(), factory=lambda: WithState(2)), tmp_path, at=1)
    on_ranks(run_at_stage(), lambda engine: engine.load_checkpoint(tmp_path, load_module_strict=False))


def test_blocks_that_were_saved_under_another_class_do_not_matter(tmp_path: Path) -> None:
    """Names and shapes count, not classes."""

    class Other(Block):
        pass

    class Model(Plain):
        block = Other

    saved = stop(run_at_stage(), tmp_path, at=1)
    loaded = resume(replace(run_at_stage(), factory=lambda: Model(2)), tmp_path, at=1)
    assert differences(saved, loaded) == []
