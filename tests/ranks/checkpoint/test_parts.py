"""Parts of an engine's state: what a load may leave out, and the weights alone, as a file and as a state dict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model
from torch import nn

import shoal
from shoal.checkpoint import manifest as manifests
from shoal.comm.threads import run_ranks
from shoal.errors import CheckpointError
from tests.helpers import models
from tests.helpers.resuming import State, micro_steps, on_ranks, run_at_stage, state_of, stop, two_blocks
from tests.helpers.training import config, make


def test_the_module_alone_leaves_counters_optimizer_and_schedule(tmp_path: Path) -> None:
    run = replace(run_at_stage(), schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    saved = stop(run, tmp_path, at=3, client_state={"a": 1})[0]

    def use(engine: shoal.Engine) -> tuple[State, State]:
        micro_steps(engine, run, 0, 1)
        before = state_of(engine)
        _, client_state = engine.load_checkpoint(tmp_path, load_module_only=True)
        assert client_state == {"a": 1}
        return before, state_of(engine)

    for before, after in on_ranks(run, use):
        assert all(torch.equal(after.main_parameters[name], value) for name, value in saved.main_parameters.items())
        assert all(torch.equal(after.parameters[name], value) for name, value in saved.parameters.items())
        assert after.counters == before.counters == [1, 4, 1, 0]
        assert after.rates == before.rates == [0.5e-2]
        for key, values in before.optimizer.items():
            assert all(torch.equal(after.optimizer[key][name], value) for name, value in values.items())


def test_optimizer_state_and_schedule_can_be_left_out(tmp_path: Path) -> None:
    run = replace(run_at_stage(2), schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    saved = stop(run, tmp_path, at=2)[0]

    def use(engine: shoal.Engine) -> State:
        engine.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
        return state_of(engine)

    for after in on_ranks(run, use):
        assert all(torch.equal(after.main_parameters[name], value) for name, value in saved.main_parameters.items())
        assert after.optimizer == {}
        assert after.rates == [1e-2]
        assert after.counters == saved.counters


def test_a_custom_function_loads_the_values(tmp_path: Path) -> None:
    saved = stop(run_at_stage(bf16={"enabled": True}), tmp_path, at=1)[0]
    for stage in (0, 2, 3):
        run = run_at_stage(stage, bf16={"enabled": True})

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
            for name, value in saved.main_parameters.items():
                assert torch.equal(after.parameters[name], (value * 2).bfloat16()), name
                assert torch.equal(after.main_parameters[name].bfloat16(), after.parameters[name]), name


def test_frozen_parameters_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = replace(run_at_stage(), factory=models.Adapted)
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
    assert "frozen parameters are not in the checkpoint" in caplog.text


def test_an_engine_without_an_optimizer_loads_the_weights(tmp_path: Path) -> None:
    saved = stop(run_at_stage(2, bf16={"enabled": True}), tmp_path, at=2)[0]

    def rank() -> dict[str, torch.Tensor]:
        engine = shoal.initialize(model=make(two_blocks, 1), config=config(3, bf16={"enabled": True}))[0]
        engine.load_checkpoint(tmp_path)
        values = engine.module_state_dict()
        engine.destroy()
        return values

    for values in run_ranks(3, rank):
        assert all(torch.equal(value, saved.parameters[name]) for name, value in values.items())


# weights alone


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_weights_alone_are_one_file_that_safetensors_opens(stage: int, tmp_path: Path) -> None:
    run = replace(run_at_stage(stage, bf16={"enabled": True}), factory=models.WithBuffers)

    def use(engine: shoal.Engine) -> dict[str, torch.Tensor]:
        micro_steps(engine, run, 0, 1)
        engine.save_16bit_model(tmp_path)
        engine.save_16bit_model(tmp_path, "again.safetensors")
        engine.save_16bit_model(tmp_path, "again.safetensors")
        engine.save_16bit_model(tmp_path, "pytorch_model.bin")
        values: dict[str, torch.Tensor] = engine.module_state_dict()
        return values

    values = on_ranks(run, use)[0]
    assert "head.weight" in values and values["head.weight"].dtype == torch.bfloat16
    assert values["shift"].dtype == torch.float32  # buffers keep their format
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        assert sorted(opened.keys()) == sorted(set(values) - {"head.weight"})  # tied: written once
        for key in opened.keys():  # noqa: SIM118  # safetensors' file is no dict
            assert torch.equal(opened.get_tensor(key), values[key])
        assert opened.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    fresh = run.factory().bfloat16()
    assert load_model(fresh, tmp_path / "model.safetensors", strict=True) == (set(), [])
    assert fresh.head.weight is fresh.embedding.weight
    assert torch.equal(fresh.head.weight, values["head.weight"])
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert sorted(loaded) == sorted(values)
    assert all(torch.equal(loaded[key], values[key]) for key in values)
    assert loaded["head.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()


def test_weights_go_into_a_folder_of_their_own_and_what_cannot_be_written_is_an_error_on_every_rank(
    tmp_path: Path,
) -> None:
    (tmp_path / "taken").write_text("a file")

    def use(engine: shoal.Engine) -> CheckpointError:
        engine.save_16bit_model(tmp_path, "new/deep/model.safetensors")
        with pytest.raises(CheckpointError) as caught:
            engine.save_16bit_model(tmp_path, "taken/model.safetensors")
        return caught.value

    errors = on_ranks(run_at_stage(2), use)
    assert [error.code for error in errors] == ["checkpoint-write"] * len(errors)
    assert all("taken/model.safetensors" in error.where for error in errors)
    with safe_open(tmp_path / "new/deep/model.safetensors", framework="pt") as opened:
        assert "embedding.weight" in opened.keys()  # noqa: SIM118  # safetensors' file is no dict
    assert (tmp_path / "taken").read_text() == "a file"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_state_dict_is_taken_and_given_back(stage: int) -> None:
    source = make(models.WithBuffers, 5).state_dict()
    run = replace(run_at_stage(stage, 3, bf16={"enabled": True}), factory=models.WithBuffers)

    def use(engine: shoal.Engine) -> tuple[State, dict[str, Any]]:
        engine.load_module_state_dict(source)
        return state_of(engine), engine.module_state_dict()

    for state, values in on_ranks(run, use):
        assert sorted(values) == sorted(source)
        for name, value in source.items():
            assert torch.equal(values[name], value.to(values[name].dtype)), name
            if name in state.main_parameters:
                assert torch.equal(state.main_parameters[name], value), name


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_parameters_take_a_state_dict_too(stage: int) -> None:
    source = {name: value + 1 for name, value in make(models.FrozenBlocks, 5).state_dict().items()}
    run = replace(run_at_stage(stage, 2), factory=models.FrozenBlocks)

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

    on_ranks(run_at_stage(3), use)
    on_ranks(run_at_stage(1), use)


def test_frozen_parameters_can_be_left_out_of_the_weights() -> None:
    def use(engine: shoal.Engine) -> list[str]:
        return sorted(engine.module_state_dict(exclude_frozen_parameters=True))

    names = on_ranks(replace(run_at_stage(), factory=models.Adapted), use)[0]
    assert names == sorted(f"blocks.{block}.{part}.weight" for block in range(3) for part in ("low", "high"))
