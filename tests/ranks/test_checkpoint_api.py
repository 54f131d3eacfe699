"""What a caller of save and load meets: refusals that list everything, parts that are left out, tags, client state,
asynchronous saves, object stores, and what the files hold."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.optim import lr_scheduler

import shoal
from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.blocks import Snapshot
from shoal.checkpoint.storage import LocalStorage
from shoal.comm.threads import run_ranks
from shoal.data import RepeatingLoader
from shoal.errors import CheckpointError, UsageError
from tests.ranks import models
from tests.ranks.models import Block, Plain
from tests.ranks.resuming import Run, State, differences, engine_of, micro_steps, resume, state_of, stop
from tests.ranks.training import adamw, config, make, sgd


@pytest.fixture(autouse=True)
def _all_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever level another test has set."""
    with caplog.at_level("INFO", logger="shoal"):
        yield


def run_of(stage: int = 3, world: int = 2, **sections: Any) -> Run:
    return Run(config(stage, **sections), world, two_blocks, adamw)


def two_blocks() -> Plain:
    return Plain(2)


def on_ranks(run: Run, use: Callable[[shoal.Engine], Any]) -> list[Any]:
    """``use(engine)`` on each rank, with a new engine of other values."""

    def rank() -> Any:
        engine = engine_of(replace(run, seed=1))
        try:
            return use(engine)
        finally:
            engine.destroy()

    return run_ranks(run.world, rank)


def refusals(run: Run, folder: Path, **load: Any) -> list[CheckpointError]:
    """Every rank's error; each finds its own state as it was, and trains on."""

    def use(engine: shoal.Engine) -> CheckpointError:
        micro_steps(engine, run, 0, 1)
        before = state_of(engine)
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(folder, **load)
        assert differences([before], [state_of(engine)]) == []
        micro_steps(engine, run, 1, 1)
        return caught.value

    return on_ranks(run, use)


# another model, another optimizer, another version


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
    stop(run_of(), tmp_path, at=1)
    for stage in (1, 3):
        for error in refusals(replace(run_of(stage), factory=Renamed), tmp_path):
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
    saved = stop(run_of(), tmp_path, at=1)[0]
    longer = replace(run_of(2), factory=Longer)

    def use(engine: shoal.Engine) -> tuple[State, State]:
        before = state_of(engine)
        engine.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)
        return before, state_of(engine, micro_steps(engine, longer, 0, 0))

    found = on_ranks(longer, use)
    assert "the checkpoint does not have 6: blocks.2.norm.weight" in caplog.text
    assert "the model does not have 2: norm.weight, norm.bias" in caplog.text
    for before, after in found:
        for name, value in after.masters.items():
            assert torch.equal(value, (before if name.startswith("blocks.2") else saved).masters[name]), name
    for error in refusals(longer, tmp_path):
        assert "the checkpoint does not have 6" in error.what


def test_another_shape_is_refused_even_where_it_is_not_strict(tmp_path: Path) -> None:
    stop(run_of(), tmp_path, at=1)
    wider = replace(run_of(), factory=lambda: Plain(2, 14))
    for error in refusals(wider, tmp_path, load_module_strict=False, load_optimizer_states=False):
        assert "embedding.weight [13, 12] in the checkpoint, [13, 14] in the model" in error.what


def test_another_optimizer_and_other_groups_are_refused(tmp_path: Path) -> None:
    stop(run_of(), tmp_path, at=1)

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
        run = replace(run_of(1), optimizer=optimizer)
        for error in refusals(run, tmp_path):
            assert error.code == "checkpoint-mismatch"
            assert words in error.what
        on_ranks(run, lambda engine: engine.load_checkpoint(tmp_path, load_optimizer_states=False))


def test_master_weights_are_not_narrowed_without_a_word(tmp_path: Path) -> None:
    stop(run_of(), tmp_path, at=1)
    narrow = run_of(bf16={"enabled": True, "bf16_master_weights_and_grads": True})
    for error in refusals(narrow, tmp_path):
        assert "its master weights are wider than this run's" in error.what


def test_a_newer_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    stop(run_of(), tmp_path, at=1)
    path = tmp_path / "global_step1" / "manifest.json"
    rest = path.read_bytes().partition(b"\n")[2]
    body = json.loads(b"{" + rest)
    body["format"], body["versions"]["shoal"] = 2, "9.5.0"
    rest = json.dumps(body)[1:].encode()
    path.write_bytes(f'{{"checksum":"xxh3:{manifests.checksum(rest)}",\n'.encode() + rest)
    for error in refusals(run_of(), tmp_path, tag="global_step1"):
        assert error.code == "checkpoint-version"
        assert "has format 2 and was written by Shoal 9.5.0; this one reads up to 1" in error.what


def test_changed_settings_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    section = {"type": "AdamW", "params": {"lr": 0.01}}
    run = replace(run_of(2, optimizer=section), optimizer=None)
    stop(run, tmp_path, at=1)
    changed = {"type": "AdamW", "params": {"lr": 0.5}}
    other = replace(run_of(2, optimizer=changed, gradient_clipping=0.25), optimizer=None)
    rates = on_ranks(other, lambda engine: (engine.load_checkpoint(tmp_path), engine.get_lr())[1])
    assert "gradient_clipping: 0.0 when saved, 0.25 now" in caplog.text
    assert "optimizer.params.lr: 0.01 when saved, 0.5 now" in caplog.text
    assert rates == [[0.01]] * 2  # a checkpoint's hyperparameters win
    assert caplog.text.count("settings differ") == 1


class Shorter(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def test_data_of_another_size_is_refused_before_anything_changes(tmp_path: Path) -> None:
    run = run_of(2)

    def save() -> None:
        engine = engine_of(run, training_data=Shorter(53))
        micro_steps(engine, run, 0, 1)
        engine.save_checkpoint(tmp_path)
        engine.destroy()

    def load() -> list[str]:
        engine = engine_of(replace(run, seed=1), training_data=Shorter(40))
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

    stop(replace(run_of(1), schedule=lambda o: lr_scheduler.ExponentialLR(o, 0.5)), tmp_path, at=1)
    cosine: Callable[[Any], Any] = lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9)  # noqa: E731
    other = replace(run_of(1), schedule=sequential if name == "SequentialLR" else cosine)
    for error in refusals(other, tmp_path):
        assert "ExponentialLR" in error.what and name in error.what


def test_the_own_state_of_a_module_that_is_gone_is_left_out_where_it_is_not_strict(tmp_path: Path) -> None:
    class WithState(Plain):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

        def set_extra_state(self, state: dict[str, int]) -> None:
            pass

    stop(replace(run_of(), factory=lambda: WithState(2)), tmp_path, at=1)
    on_ranks(run_of(), lambda engine: engine.load_checkpoint(tmp_path, load_module_strict=False))


def test_a_load_in_the_middle_of_a_loop_moves_the_loop(tmp_path: Path) -> None:
    """A run that goes back to its last checkpoint reads again what came after it."""

    def rank() -> list[list[int]]:
        engine = engine_of(run_of(1), training_data=Shorter(53))
        batches = iter(RepeatingLoader(engine.training_dataloader))
        next(batches)
        engine.save_checkpoint(tmp_path)
        first = next(batches).tolist()
        engine.load_checkpoint(tmp_path)
        again = next(batches).tolist()
        engine.destroy()
        return [first, again]

    for first, again in run_ranks(2, rank):
        assert first == again


# parts


def test_the_module_alone_leaves_counters_optimizer_and_schedule(tmp_path: Path) -> None:
    run = replace(run_of(), schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    saved = stop(run, tmp_path, at=3, client_state={"a": 1})[0]

    def use(engine: shoal.Engine) -> tuple[State, State]:
        micro_steps(engine, run, 0, 1)
        before = state_of(engine)
        _, client_state = engine.load_checkpoint(tmp_path, load_module_only=True)
        assert client_state == {"a": 1}
        return before, state_of(engine)

    for before, after in on_ranks(run, use):
        assert all(torch.equal(after.masters[name], value) for name, value in saved.masters.items())
        assert all(torch.equal(after.parameters[name], value) for name, value in saved.parameters.items())
        assert after.counters == before.counters == [1, 4, 1, 0]
        assert after.rates == before.rates == [0.5e-2]
        for key, values in before.optimizer.items():
            assert all(torch.equal(after.optimizer[key][name], value) for name, value in values.items())


def test_optimizer_state_and_schedule_can_be_left_out(tmp_path: Path) -> None:
    run = replace(run_of(2), schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    saved = stop(run, tmp_path, at=2)[0]

    def use(engine: shoal.Engine) -> State:
        engine.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
        return state_of(engine)

    for after in on_ranks(run, use):
        assert all(torch.equal(after.masters[name], value) for name, value in saved.masters.items())
        assert after.optimizer == {}
        assert after.rates == [1e-2]
        assert after.counters == saved.counters


def test_a_custom_function_loads_the_values(tmp_path: Path) -> None:
    saved = stop(run_of(bf16={"enabled": True}), tmp_path, at=1)[0]
    for stage in (0, 2, 3):
        run = run_of(stage, bf16={"enabled": True})

        def use(engine: shoal.Engine) -> State:
            seen = []

            def load(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
                seen.append(sorted(src))
                for name, parameter in dst.named_parameters():
                    parameter.data.copy_(src[name] * 2)

            engine.load_checkpoint(tmp_path, custom_load_fn=load, load_optimizer_states=False)
            assert len(seen) == 1 and "blocks.0.up.weight" in seen[0]
            return state_of(engine)

        for after in on_ranks(run, use):
            for name, value in saved.masters.items():
                assert torch.equal(after.parameters[name], (value * 2).bfloat16()), name
                assert torch.equal(after.masters[name].bfloat16(), after.parameters[name]), name


def test_frozen_parameters_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = replace(run_of(), factory=models.Adapted)
    saved = stop(run, tmp_path, at=2, exclude_frozen_parameters=True)[0]
    found = manifests.parse((tmp_path / "global_step2" / "manifest.json").read_bytes(), "here")
    names = {tensor.name for tensor in found.tensors if tensor.kind == "model"}
    assert "blocks.0.low.weight" in names and "blocks.0.frozen.weight" not in names and "embedding.weight" not in names

    def use(engine: shoal.Engine) -> tuple[dict[str, torch.Tensor], State]:
        before = engine.module_state_dict()
        engine.load_checkpoint(tmp_path)
        return before, state_of(engine)

    for before, after in on_ranks(replace(run, settings=config(2)), use):
        for name, value in after.parameters.items():
            assert torch.equal(value, (saved.parameters if name in names else before)[name]), name
    assert "frozen parameters were left out" in caplog.text


def test_an_engine_without_an_optimizer_loads_the_weights(tmp_path: Path) -> None:
    saved = stop(run_of(2, bf16={"enabled": True}), tmp_path, at=2)[0]

    def rank() -> dict[str, torch.Tensor]:
        engine = shoal.initialize(model=make(two_blocks, 1), config=config(3, bf16={"enabled": True}))[0]
        engine.load_checkpoint(tmp_path)
        values = engine.module_state_dict()
        engine.destroy()
        return values

    for values in run_ranks(3, rank):
        assert all(torch.equal(value, saved.parameters[name]) for name, value in values.items())


# client state


def test_client_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "epoch": 3,
        "best": (1.5, "model", None),
        "not a number": math.nan,
        "bounds": [math.inf, -math.inf],
        "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 2),
        "flags": torch.tensor([True, False]),
        "array": np.arange(3, dtype=np.int32),
        "by number": {1: "one", (2, 3): "pair"},
        "set": {1, 2},
        "nested": {"deep": [{"er": (torch.ones(2), [])}]},
        "dtype": torch.float16,
        "__is__": "a name of ours",
        "": 0,
    }
    stop(run_of(), tmp_path, at=1, client_state=state)
    for loaded in (found.client_state for found in resume(run_of(1, 3), tmp_path, at=1)):
        assert list(loaded) == list(state)
        assert math.isnan(loaded["not a number"])
        for key in ("tensor", "scalar", "empty", "flags"):
            assert loaded[key].dtype == state[key].dtype and torch.equal(loaded[key], state[key]), key
        assert loaded["array"].dtype == np.int32 and loaded["array"].tolist() == [0, 1, 2]
        deep = loaded["nested"]["deep"][0]["er"]
        assert isinstance(deep, tuple) and torch.equal(deep[0], torch.ones(2)) and deep[1] == []
        for key in ("epoch", "best", "bounds", "by number", "set", "dtype", "__is__", ""):
            assert loaded[key] == state[key], key


def test_client_state_that_cannot_be_kept_is_named_on_every_rank(tmp_path: Path) -> None:
    def use(engine: shoal.Engine) -> CheckpointError:
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(tmp_path, client_state={"a": [1, {"model": object()}]})
        engine.save_checkpoint(tmp_path, tag="after")
        return caught.value

    errors = on_ranks(run_of(), use)
    for error in errors:
        assert error.code == "checkpoint-state"
        assert "client_state holds a builtins.object" in error.what
    assert "client_state/a/1/model" in str(errors[0])
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["after"]


# tags


def test_tags_name_folders_and_the_newest_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_of(1)

    def save(engine: shoal.Engine) -> None:
        micro_steps(engine, run, 0, 1)
        engine.save_checkpoint(tmp_path)
        micro_steps(engine, run, 1, 1)
        engine.save_checkpoint(tmp_path, tag="best-1.5+a=b")
        micro_steps(engine, run, 2, 1)
        engine.save_checkpoint(tmp_path, tag="aside", save_latest=False)
        for bad in ("../up", "a/b", "", ".hidden", "a b", "x" * 200):
            with pytest.raises(CheckpointError, match="cannot be the name of a folder"):
                engine.save_checkpoint(tmp_path, tag=bad)

    def load(tag: str | None) -> list[Any]:
        def use(engine: shoal.Engine) -> tuple[str, int]:
            path, _ = engine.load_checkpoint(tmp_path, tag=tag)
            return path, engine.global_steps

        return on_ranks(run, use)

    on_ranks(run, save)
    assert (tmp_path / "latest").read_text() == "best-1.5+a=b"
    assert load(None) == [(f"{tmp_path}/best-1.5+a=b", 2)] * 2
    assert load("aside") == [(f"{tmp_path}/aside", 3)] * 2
    assert load("global_step1") == [(f"{tmp_path}/global_step1", 1)] * 2
    (tmp_path / "latest").write_text("global_step1")
    assert load(None) == [(f"{tmp_path}/best-1.5+a=b", 2)] * 2
    assert "latest names 'global_step1', but best-1.5+a=b is newer and whole" in caplog.text
    (tmp_path / "latest").unlink()
    assert load(None) == [(f"{tmp_path}/best-1.5+a=b", 2)] * 2
    for error in refusals(run, tmp_path, tag="global_step2"):
        assert error.code == "checkpoint-missing"
        assert "global_step1" in str(error) and "best-1.5+a=b" in str(error)
    for error in refusals(run, tmp_path / "nowhere"):
        assert error.code == "checkpoint-missing"
    for error in refusals(run, tmp_path / "aside"):
        assert error.code == "checkpoint-missing"
        assert "load from the folder around it, with its name as the tag" in str(error)


def test_a_tag_that_is_there_is_replaced_as_a_whole(tmp_path: Path) -> None:
    run = run_of(1)
    stop(run, tmp_path, at=1, tag="same")
    saved = stop(replace(run, world=1), tmp_path, at=2, tag="same")
    assert sorted(path.name for path in (tmp_path / "same").iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "same"]
    loaded = resume(run, tmp_path, at=2)
    assert differences(saved, loaded) == []


def test_a_tag_may_be_a_number(tmp_path: Path) -> None:
    saved = stop(run_of(1), tmp_path, at=1, tag=5)
    assert differences(saved, resume(run_of(1), tmp_path, at=1, tag=5)) == []


def test_sums_need_not_be_checked(tmp_path: Path) -> None:
    saved = stop(run_of(1), tmp_path, at=1)
    unchecked = run_of(3, 3, checkpoint={"verify": False})
    assert differences(saved, resume(unchecked, tmp_path, at=1)) == []


def test_client_state_that_is_too_large_for_a_manifest_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    def use(engine: shoal.Engine) -> str:
        with pytest.raises(CheckpointError, match="what is saved beside the tensors is too large") as caught:
            engine.save_checkpoint(tmp_path, client_state={"history": list(range(10**6))})
        engine.save_checkpoint(tmp_path, client_state={"history": torch.arange(10**6)})
        return caught.value.code

    assert on_ranks(run_of(1), use) == ["checkpoint-state"] * 2
    loaded = resume(run_of(1), tmp_path, at=0)
    assert loaded[0].client_state["history"].tolist() == list(range(10**6))


def test_ranks_with_different_tags(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def use(engine: shoal.Engine) -> str:
        try:
            engine.save_checkpoint(tmp_path, tag=f"tag{engine.global_rank}")
        except AssertionError as error:  # as scripts written for DeepSpeed expect it
            return error.code if isinstance(error, CheckpointError) else "another"
        return "saved"

    assert on_ranks(run_of(checkpoint={"tag_validation": "Fail"}), use) == ["checkpoint-tag"] * 2
    assert not any(tmp_path.iterdir())
    assert on_ranks(run_of(), use) == ["saved"] * 2
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["tag0"]
    assert "the ranks' tags differ (tag0, tag1)" in caplog.text


# asynchronous saves


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_asynchronous_save_holds_the_state_of_its_call(stage: int, tmp_path: Path) -> None:
    run = run_of(stage, checkpoint={"async_save": True}, bf16={"enabled": True})

    def save(engine: shoal.Engine) -> State:
        micro_steps(engine, run, 0, 2)
        engine.save_checkpoint(tmp_path, client_state={"at": torch.ones(3)})
        state = state_of(engine)
        micro_steps(engine, run, 2, 3)
        return state

    saved = on_ranks(run, save)
    loaded = resume(run, tmp_path, at=2)
    assert differences(saved, loaded) == []
    assert torch.equal(loaded[0].client_state["at"], torch.ones(3))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["global_step2"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("change", ["step", "master", "state", "gathered", "load"])
def test_whatever_changes_the_state_waits_until_an_asynchronous_save_has_copied_it(
    stage: int, precision: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {} if precision == "fp32" else {precision: {"enabled": True}}
    run = run_of(stage, checkpoint={"async_save": True}, **keys)
    finish = Snapshot.finish

    def late(self: Snapshot) -> None:
        time.sleep(0.1)  # long enough to be overtaken by whoever does not wait
        finish(self)

    monkeypatch.setattr(Snapshot, "finish", late)

    def save(engine: shoal.Engine) -> State:
        micro_steps(engine, run, 0, 2)
        engine.save_checkpoint(tmp_path / "first")
        state = state_of(engine)
        engine.checkpoints.finish()
        zeros = {name: torch.zeros_like(value) for name, value in engine.module_state_dict().items()}
        engine.save_checkpoint(tmp_path / "second")
        parameter = next(p for p in engine.module.parameters() if p.requires_grad and p.dim() > 1)
        if change == "step":
            micro_steps(engine, run, 2, 3)
        elif change == "master":
            engine.access.set_full_parameter(parameter, torch.zeros(parameter.shape))
        elif change == "state":
            engine.access.set_full_optimizer_state(parameter, "exp_avg", torch.ones(parameter.shape))
        elif change == "gathered":
            with shoal.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
                parameter.fill_(1.0)
        else:
            engine.load_module_state_dict(zeros)
        engine.checkpoints.finish()
        return state

    saved = on_ranks(run, save)
    assert differences(saved, resume(run, tmp_path / "second", at=2)) == []


def test_a_second_asynchronous_save_waits_for_the_first_and_a_load_too(tmp_path: Path) -> None:
    run = run_of(2, checkpoint={"async_save": True})

    def use(engine: shoal.Engine) -> tuple[list[str], int]:
        def wait(phase: str) -> None:
            if phase == "shard_fsync":
                time.sleep(0.2)

        engine.checkpoints.on_phase = wait
        for index in range(3):
            micro_steps(engine, run, index, 1)
            engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, tag="global_step3")
        return sorted(path.name for path in tmp_path.iterdir() if path.is_dir()), engine.global_steps

    assert on_ranks(run, use) == [(["global_step1", "global_step2", "global_step3"], 3)] * 2


def test_engines_with_asynchronous_saves_leave_no_thread(tmp_path: Path) -> None:
    run = replace(run_of(1, checkpoint={"async_save": True}), world=1)
    before = threading.active_count()
    for index in range(20):
        engine = engine_of(run)
        micro_steps(engine, run, 0, 1)
        engine.save_checkpoint(tmp_path, tag=f"t{index}")
        engine.destroy()  # waits
        assert (tmp_path / f"t{index}" / "manifest.json").exists()
        with pytest.raises(UsageError):
            engine.save_checkpoint(tmp_path)
    assert threading.active_count() == before


ENDS_ITSELF = """
import sys, time, torch, shoal
model = torch.nn.Linear(300, 300)
settings = {"train_micro_batch_size_per_gpu": 1, "checkpoint": {"async_save": True}, "log_level": "error"}
engine, *_ = shoal.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings)
engine.backward(engine(torch.ones(1, 300)).sum())
engine.step()
engine.checkpoints.on_phase = lambda phase: time.sleep(0.5 if phase == "shard_write" else 0)
engine.save_checkpoint(sys.argv[1])
"""


def test_a_process_that_ends_in_good_order_waits_for_its_save(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS_ITSELF, str(tmp_path)], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert (tmp_path / "global_step1" / "manifest.json").exists()


# object stores


@pytest.mark.parametrize("is_async", [False, True])
def test_an_object_store_holds_checkpoints(is_async: bool) -> None:
    import fsspec

    url = f"memory://checkpoints-{is_async}"
    run = run_of(3, checkpoint={"async_save": is_async})
    saved = stop(run, url, at=2, client_state={"a": torch.ones(1)})
    stop(run, url, at=1)
    again = stop(run, url, at=2)  # the same tag once more, under new file names
    store = fsspec.filesystem("memory")
    names = sorted(path.rsplit("/", 1)[-1] for path in store.ls(f"/checkpoints-{is_async}/global_step2", detail=False))
    assert len(names) == 3 and names[0] == "manifest.json"
    assert differences(saved, again) == []
    loaded = resume(run_of(1, 3), url, at=2)
    assert differences(saved, loaded) == []
    resume(run, url, at=1, tag="global_step1")
    for error in refusals(run, url, tag="no"):  # type: ignore[arg-type]
        assert error.code == "checkpoint-missing"


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    saved = stop(run_of(), f"file://{tmp_path}/x", at=1)
    assert (tmp_path / "x" / "global_step1" / "manifest.json").exists()
    assert differences(saved, resume(run_of(), tmp_path / "x", at=1)) == []


def test_an_unknown_scheme_is_refused() -> None:
    for error in refusals(run_of(), "nothing://x"):  # type: ignore[arg-type]
        assert error.code == "checkpoint-storage"


# what the files hold


def test_safetensors_opens_the_files_and_finds_what_the_manifest_says(tmp_path: Path) -> None:
    run = replace(run_of(3, 3), factory=models.OddParameters)
    saved = stop(run, tmp_path, at=1, client_state={"t": torch.arange(3)})
    folder = tmp_path / "global_step1"
    manifest = manifests.parse((folder / "manifest.json").read_bytes(), "here")
    parts: dict[str, dict[str, torch.Tensor]] = {}
    num_keys = 0
    for index, file in enumerate(manifest.files):
        assert (folder / file.name).stat().st_size == file.nbytes
        with safe_open(folder / file.name, framework="pt") as opened:
            parts[file.name] = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        num_keys += len(parts[file.name])
        assert sum(len(t.chunks) for t in manifest.tensors if any(c[0] == index for c in t.chunks)) > 0
    assert num_keys == sum(len(tensor.chunks) for tensor in manifest.tensors)
    for tensor in manifest.tensors:
        whole = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for file, _, start, shape in tensor.chunks:
            key = f"{tensor.kind}/{tensor.name}"
            if shape != tensor.shape:
                key += "[" + ",".join(f"{s}:{s + n}" for s, n in zip(start, shape, strict=True)) + "]"
            where = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
            whole[where] = parts[manifest.files[file].name][key]
        if tensor.kind == "model":
            assert torch.equal(whole, saved[0].masters[tensor.name]), tensor.name
        elif tensor.kind == "optimizer/exp_avg":
            assert torch.equal(whole, saved[0].optimizer["exp_avg"][tensor.name]), tensor.name
    kinds = {tensor.kind for tensor in manifest.tensors}
    assert {"model", "optimizer/exp_avg", "optimizer/exp_avg_sq", "extra", "rank/2"} <= kinds


class Larger(Plain):
    def __init__(self) -> None:
        super().__init__(4, 96)


def nbytes_of(folder: Path) -> list[int]:
    manifest = manifests.parse((folder / "manifest.json").read_bytes(), "here")
    sizes = [0] * len(manifest.files)
    for tensor in manifest.tensors:
        if not tensor.kind.startswith(("rank/", "extra")):
            for file, _, _, shape in tensor.chunks:
                sizes[file] += math.prod(shape) * getattr(torch, tensor.dtype).itemsize
    return sizes


@pytest.mark.parametrize(
    ("world", "stage", "zero"),
    [(1, 0, {}), (3, 0, {}), (3, 1, {}), (4, 3, {}), (4, 3, {"mics_shard_size": 2}), (4, 1, {"mics_shard_size": 2})],
)
def test_no_rank_writes_more_than_its_share(world: int, stage: int, zero: dict[str, int], tmp_path: Path) -> None:
    """Master weights and two moments of 4 bytes: 12 bytes a parameter in all, however many ranks hold them."""
    run = Run(config(stage, bf16={"enabled": True}, zero_optimization=zero), world, Larger, adamw)
    stop(run, tmp_path, at=1)
    model = Larger()
    trained = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in model.unused.parameters())
    sizes = nbytes_of(tmp_path / "global_step1")
    assert sum(sizes) == 12 * trained + 4 * 12  # what is never used has no moments
    assert max(sizes) <= 1.02 * sum(sizes) / world
    on_disk = sum(path.stat().st_size for path in (tmp_path / "global_step1").iterdir())
    assert on_disk <= 1.03 * 12 * trained + world * 20_000  # generators' states are 5 KB a rank; headers, manifest


class Counting(LocalStorage):
    """Counts the bytes that are read of tensor files."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.nbytes = 0

    def open(self, path: str) -> Any:
        from contextlib import contextmanager

        outer, parent = self, super().open(path)

        @contextmanager
        def opened() -> Any:
            with parent as reader:
                if path.endswith(".safetensors"):
                    read_into = reader.read_into

                    def counted(offset: int, target: memoryview) -> None:
                        outer.nbytes += len(target)
                        read_into(offset, target)

                    reader.read_into = counted
                yield reader

        return opened()


def test_each_rank_reads_only_its_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice (to check, then to copy), and at most a block more at each range's ends."""
    block = 1 << 14
    monkeypatch.setattr("shoal.checkpoint.blocks.MAX_SMALL_BLOCK", block)
    run = Run(config(3, bf16={"enabled": True}), 4, Larger, adamw)
    stop(run, tmp_path, at=1)
    stores: list[Counting] = []

    def open_counting(url: Any) -> Counting:
        stores.append(Counting(Path(url)))
        return stores[-1]

    monkeypatch.setattr("shoal.engine.checkpoints.open_storage", open_counting)
    total = sum(path.stat().st_size for path in (tmp_path / "global_step1").glob("*.safetensors"))
    for world in (4, 2, 1):
        stores.clear()
        resume(replace(run, world=world), tmp_path, at=1)
        assert len(stores) == world
        for store in stores:
            assert store.nbytes < 2 * (total / world) + 80 * block
            assert store.nbytes > 1.9 * total / world * 0.9


# weights alone


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_weights_alone_are_one_file_that_safetensors_opens(stage: int, tmp_path: Path) -> None:
    run = replace(run_of(stage, bf16={"enabled": True}), factory=models.WithBuffers)

    def use(engine: shoal.Engine) -> dict[str, torch.Tensor]:
        micro_steps(engine, run, 0, 1)
        engine.save_16bit_model(tmp_path)
        engine.save_16bit_model(tmp_path, "again.safetensors")
        engine.save_16bit_model(tmp_path, "again.safetensors")
        engine.save_16bit_model(tmp_path, "pytorch_model.bin")
        values: dict[str, torch.Tensor] = engine.module_state_dict()
        return values

    values = on_ranks(run, use)[0]
    assert "head.weight" in values and values["shift"].dtype == torch.bfloat16
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        assert sorted(opened.keys()) == sorted(set(values) - {"head.weight"})  # tied: written once
        for key in opened.keys():  # noqa: SIM118
            assert torch.equal(opened.get_tensor(key), values[key])
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert sorted(loaded) == sorted(values)
    assert all(torch.equal(loaded[key], values[key]) for key in values)
    assert loaded["head.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_state_dict_is_taken_and_given_back(stage: int) -> None:
    source = make(models.WithBuffers, 5).state_dict()
    run = replace(run_of(stage, 3, bf16={"enabled": True}), factory=models.WithBuffers)

    def use(engine: shoal.Engine) -> tuple[State, dict[str, Any]]:
        engine.load_module_state_dict(source)
        return state_of(engine), engine.module_state_dict()

    for state, values in on_ranks(run, use):
        assert sorted(values) == sorted(source)
        for name, value in source.items():
            assert torch.equal(values[name], value.to(values[name].dtype)), name
            if name in state.masters:
                assert torch.equal(state.masters[name], value), name


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_parameters_take_a_state_dict_too(stage: int) -> None:
    source = {name: value + 1 for name, value in make(models.FrozenBlocks, 5).state_dict().items()}
    run = replace(run_of(stage, 2), factory=models.FrozenBlocks)

    def use(engine: shoal.Engine) -> dict[str, Any]:
        assert sum(not parameter.requires_grad for parameter in engine.module.parameters()) > 1
        engine.load_module_state_dict(source)
        values: dict[str, Any] = engine.module_state_dict()
        return values

    for values in on_ranks(run, use):
        assert all(torch.equal(values[name], value) for name, value in source.items())


def test_a_state_dict_of_another_model_is_refused_and_a_part_can_be_taken() -> None:
    source = make(two_blocks, 5).state_dict()
    part = {name: value for name, value in source.items() if name.startswith("blocks.0.")}
    wrong = {**source, "norm.weight": torch.zeros(3), "more": torch.zeros(1)}
    del wrong["norm.bias"]

    def use(engine: shoal.Engine) -> dict[str, Any]:
        before = engine.module_state_dict()
        with pytest.raises(CheckpointError) as caught:
            engine.load_module_state_dict(wrong)
        for words in ("norm.weight [3], the model has [12]", "missing: norm.bias", "unexpected: more"):
            assert words in caught.value.what
        assert all(torch.equal(value, before[name]) for name, value in engine.module_state_dict().items())
        engine.load_module_state_dict(part, strict=False)
        values: dict[str, Any] = engine.module_state_dict()
        assert all(torch.equal(values[name], (part if name in part else before)[name]) for name in values)
        return values

    on_ranks(run_of(3), use)
    on_ranks(run_of(1), use)


def test_frozen_parameters_can_be_left_out_of_the_weights() -> None:
    def use(engine: shoal.Engine) -> list[str]:
        return sorted(engine.module_state_dict(exclude_frozen_parameters=True))

    names = on_ranks(replace(run_of(), factory=models.Adapted), use)[0]
    assert names == sorted(f"blocks.{block}.{part}.weight" for block in range(3) for part in ("low", "high"))


# memory

MEASURES = """
import sys, torch, shoal

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024

def now():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024

def reset():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")

stage, folder = int(sys.argv[1]), sys.argv[2]
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(32)])
settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "log_level": "error",
            "zero_optimization": {"stage": stage}, "units": {"classes": ["Linear"]}}
engine, *_ = shoal.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings)
engine.backward(engine(torch.ones(1, 1024, dtype=torch.bfloat16)).float().sum())
engine.step()
for use in (
    lambda: torch.ones(10 << 20).sum(),  # 40 MiB: does the gauge see it?
    lambda: engine.save_checkpoint(folder, tag="t"),
    lambda: engine.load_checkpoint(folder, tag="t"),
):
    reset()
    before = now()
    use()
    print(f"{peak() - before:.1f}")
engine.destroy()
"""


@pytest.mark.parametrize("stage", [1, 3])
def test_saving_and_loading_take_little_host_memory(stage: int, tmp_path: Path) -> None:
    """33.6 M parameters: 403 MB of state. One unit's bucket in bf16 is 2.1 MB, one unit's state 12.6 MB."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURES, str(stage), str(tmp_path)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed leaves the process at once
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr
    gauge, saving, loading = map(float, done.stdout.split())
    assert 39 < gauge < 48
    assert saving < 16, f"{saving} MiB"
    assert loading < 16, f"{loading} MiB"


def test_blocks_that_were_saved_under_another_class_do_not_matter(tmp_path: Path) -> None:
    """Names and shapes count, not classes."""

    class Other(Block):
        pass

    class Model(Plain):
        block = Other

    saved = stop(run_of(), tmp_path, at=1)
    loaded = resume(replace(run_of(), factory=lambda: Model(2)), tmp_path, at=1)
    assert differences(saved, loaded) == []
