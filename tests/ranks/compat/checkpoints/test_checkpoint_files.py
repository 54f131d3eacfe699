"""What DeepSpeed's clients read from disk, on Shoal's checkpoints and on DeepSpeed's."""

from __future__ import annotations

import copy
import glob
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, load_model

import shoal
from shoal.checkpoint.formats import open_source
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat.checkpoints.writing import write_deepspeed
from shoal.compat.deepspeed import initialize
from shoal.compat.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    get_model_state_files,
    get_optim_files,
    load_state_dict_from_zero_checkpoint,
    main,
)
from shoal.errors import CheckpointError
from tests.fixtures.deepspeed.make import CASES
from tests.fixtures.deepspeed.model import build_model
from tests.helpers.models import Plain
from tests.helpers.places import FIXTURES
from tests.helpers.training import STAGES, adamw, batch, config, make

MADE = FIXTURES / "deepspeed"


class SecondFrozen(Plain):
    """The second block is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


STATE = {"epoch": 3, "best": (1, 2.5, None, True), "values": {"w": torch.arange(3), 7: ["x", -(2**70)]}, "lr": 0.1}


def saved(folder: Path, stage: int, **sections: Any) -> dict[str, torch.Tensor]:
    """Train for a step on two ranks and save. Returns: the main parameters."""

    def train() -> dict[str, torch.Tensor]:
        engine, *_ = initialize(
            model=make(Plain), optimizer=adamw, config=config(stage, **sections), dist_init_required=False
        )
        engine.backward(engine(*batch(0, current_world().rank, 2)))
        engine.step()
        assert engine.save_checkpoint(str(folder), client_state=STATE)
        engine.checkpointing.finish()
        values = {name: engine.access.full_parameter(p).clone() for name, p in engine.module.named_parameters()}
        engine.destroy()
        return values

    return run_ranks(2, train)[0]


def test_what_a_script_keeps_of_its_command_line_is_in_the_files_and_comes_back_from_them(tmp_path: Path) -> None:
    args = Namespace(device=torch.device("cuda:1"), rates=(0.1, 2), nested=SimpleNamespace(a=1))
    state = {"args": args, "best": np.float64(0.5), "curve": np.arange(3.0)}

    def save() -> None:
        engine, *_ = initialize(model=make(Plain), optimizer=adamw, config=config(2), dist_init_required=False)
        engine.backward(engine(*batch(0, current_world().rank, 2)))
        engine.step()
        engine.save_checkpoint(str(tmp_path / "saved"), client_state=state)
        engine.destroy()

    run_ranks(2, save)
    assert (tmp_path / "saved" / "zero_to_fp32.py").exists()
    file = tmp_path / "saved" / "global_step1" / "mp_rank_00_model_states.pt"
    found = torch.load(file, weights_only=False)
    assert (found["args"], found["best"], found["curve"].tolist()) == (args, 0.5, [0.0, 1.0, 2.0])
    write_deepspeed(open_source(tmp_path / "saved", None, "shoal"), tmp_path / "deepspeed")
    assert open_source(tmp_path / "deepspeed", None, "deepspeed").about.client_state["args"] == args


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_the_files_that_clients_look_for_lie_beside_ours(tmp_path: Path, stage: int, is_async: bool) -> None:
    saved(tmp_path, stage, bf16={"enabled": True}, checkpoint={"async_save": is_async})
    (tag,) = glob.glob(f"{tmp_path}/global_step*")
    assert os.path.basename(tag) == "global_step1" == (tmp_path / "latest").read_text()
    assert os.access(tmp_path / "zero_to_fp32.py", os.X_OK) and os.access(tmp_path / "zero_to_torch.py", os.X_OK)
    rank = "zero_pp_rank_0_" if stage == 3 else ""
    assert get_model_state_file(tag, stage) == f"{tag}/{rank}mp_rank_00_model_states.pt"
    assert get_model_state_files(tag) == [get_model_state_file(tag, stage)]
    # As Lightning reads them.
    client = torch.load(get_model_state_file(tag, stage), weights_only=True)
    assert client["global_steps"] == 1
    assert client["dp_world_size"] == 2
    assert ("module" in client) == (stage < 3 and not is_async)
    assert client["ds_config"]["zero_optimization"]["stage"] == stage
    assert torch.equal(client["values"].pop("w"), STATE["values"]["w"])
    assert client["values"] == {7: ["x", -(2**70)]}
    assert (client["epoch"], client["best"], client["lr"]) == (3, (1, 2.5, None, True), 0.1)
    if stage == 0:
        with pytest.raises(FileNotFoundError, match=r"no file '.*_optim_states.pt' is in"):
            get_optim_files(tag)
    else:
        (optimizer,) = get_optim_files(tag)
        assert os.path.basename(optimizer) == "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
        assert torch.load(optimizer, weights_only=True)["optimizer_state_dict"]["zero_stage"] == stage


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_the_model_file_contains_the_module(tmp_path: Path, stage: int, exclude: bool) -> None:
    def train() -> dict[str, torch.Tensor]:
        settings = config(stage, bf16={"enabled": True})
        engine, *_ = initialize(model=make(SecondFrozen), optimizer=adamw, config=settings, dist_init_required=False)
        engine.backward(engine(*batch(0, current_world().rank, 2)))
        engine.step()
        engine.save_checkpoint(str(tmp_path), exclude_frozen_parameters=exclude)
        values = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.destroy()
        return values

    expected = run_ranks(2, train)[0]
    if exclude:
        expected = {name: value for name, value in expected.items() if not name.startswith("blocks.1.")}
    found = torch.load(get_model_state_file(str(tmp_path / "global_step1"), stage), weights_only=True)["module"]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_module_can_be_left_out_of_the_model_file(tmp_path: Path, stage: int) -> None:
    saved(tmp_path, stage, checkpoint={"module_in_model_file": False})
    found = torch.load(get_model_state_file(str(tmp_path / "global_step1"), stage), weights_only=True)
    assert "module" not in found and found["global_steps"] == 1


def test_without_deepspeeds_name_nothing_lies_beside(tmp_path: Path) -> None:
    engine, *_ = shoal.initialize(model=make(Plain), optimizer=adamw, config=config(1))
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step0", "latest"]
    names = {path.name for path in (tmp_path / "global_step0").iterdir()}
    assert not any(name.endswith(".pt") for name in names)


@pytest.mark.parametrize("stage", STAGES)
def test_main_parameters_are_exported_whole_and_in_fp32(tmp_path: Path, stage: int) -> None:
    expected = saved(tmp_path, stage, bf16={"enabled": True})
    for tag in (None, "global_step1"):
        found = get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag)
        assert sorted(found) == sorted(make(Plain).state_dict())
        assert all(value.dtype == torch.float32 for value in found.values())
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    model = load_state_dict_from_zero_checkpoint(make(Plain, seed=5), tmp_path)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("dtype", ["bf16", "torch.float16", torch.bfloat16])
def test_weights_come_out_in_another_format(tmp_path: Path, dtype: Any) -> None:
    expected = saved(tmp_path / "saved", 2)
    kind = torch.float16 if dtype == "torch.float16" else torch.bfloat16
    convert_zero_checkpoint_to_state_dict(tmp_path / "saved", tmp_path / "out", dtype)
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(found[name], value.to(kind)) for name, value in expected.items())
    with pytest.raises(ValueError, match="Unsupported output dtype 'int8'"):
        convert_zero_checkpoint_to_state_dict(tmp_path / "saved", tmp_path / "int8", "int8")
    assert not (tmp_path / "int8").exists()
    if dtype == "bf16":
        script = [sys.executable, str(tmp_path / "saved" / "zero_to_torch.py"), str(tmp_path / "saved")]
        subprocess.run([*script, str(tmp_path / "safe"), "--dtype", "fp16", "--safe_serialization"], check=True)
        assert load_file(tmp_path / "safe" / "model.safetensors")[next(iter(expected))].dtype is torch.float16


@pytest.mark.parametrize("stage", [1, 3])
def test_what_lies_beside_is_there_on_every_rank_when_the_save_returns(tmp_path: Path, stage: int) -> None:
    def train() -> bool:
        engine, *_ = initialize(model=make(Plain), optimizer=adamw, config=config(stage), dist_init_required=False)
        prepare = engine.checkpointing.extra_files
        assert prepare is not None

        def slowly(*about: Any) -> Callable[[], None]:
            write = prepare(*about)
            return lambda: (time.sleep(0.3), write())[1]

        engine.checkpointing.extra_files = slowly
        engine.save_checkpoint(tmp_path)
        is_there = (tmp_path / "zero_to_fp32.py").exists()
        engine.destroy()
        return is_there

    assert run_ranks(2, train) == [True, True]


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_without_elements_come_out_in_their_shape(tmp_path: Path, stage: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1, bias=False))
    model[1].weight = torch.nn.Parameter(torch.empty(0, 2))

    def train() -> None:
        given = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        mine = copy.deepcopy(model)
        engine, *_ = initialize(model=mine, optimizer=adamw, config=given, dist_init_required=False)
        engine.backward(engine.module[0](torch.ones(1, 3)).sum())
        engine.step()
        engine.save_checkpoint(str(tmp_path))
        engine.destroy()

    run_ranks(2, train)
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "0.weight": (2, 3),
        "0.bias": (2,),
        "1.weight": (0, 2),
    }
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", safe_serialization=True)
    assert load_file(tmp_path / "out" / "model.safetensors")["1.weight"].shape == (0, 2)


def test_a_checkpoint_is_replaced_pruned_and_loaded_with_what_lies_beside_it(tmp_path: Path) -> None:
    def train() -> None:
        engine, *_ = initialize(
            model=make(Plain), optimizer=adamw, config=config(1, checkpoint={"keep_last": 2}), dist_init_required=False
        )
        rank = current_world().rank
        for index in range(3):
            engine.backward(engine(*batch(index, rank, 2)))
            engine.step()
            for _ in range(2):
                engine.save_checkpoint(tmp_path, client_state={"index": index})
        path, client = engine.load_checkpoint(tmp_path)
        assert path is not None
        assert path.endswith("global_step3")
        assert client == {"index": 2}
        engine.destroy()

    run_ranks(2, train)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["global_step2", "global_step3"]


def test_where_nothing_was_saved_nothing_is_loaded_as_in_deepspeed(tmp_path: Path) -> None:
    engine, *_ = initialize(model=make(Plain), optimizer=adamw, config=config(1), dist_init_required=False)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    with pytest.raises(CheckpointError, match="there is no checkpoint 'best'"):
        engine.load_checkpoint(tmp_path, "best")
    (tmp_path / "latest").write_text("global_step7")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        engine.load_checkpoint(tmp_path)
    engine.destroy()


@pytest.mark.parametrize("case", CASES)
def test_deepspeeds_own_checkpoints_give_the_same(case: str) -> None:
    held = load_file(MADE / case / "held.safetensors")
    found = get_fp32_state_dict_from_zero_checkpoint(MADE / case / "checkpoint")
    expected = set(build_model().state_dict()) - ({"shift"} if case == "stage3-bf16-no-frozen" else set())
    assert set(found) == expected
    assert found["head.weight"] is found["embed.weight"]
    for name in expected - {"shift", "head.weight"}:
        assert torch.equal(found[name].view(-1), held[f"model/{name}"].view(-1)), name
    without = get_fp32_state_dict_from_zero_checkpoint(MADE / case / "checkpoint", exclude_frozen_parameters=True)
    assert "embed.weight" in without
    if not case.startswith("stage0"):
        assert "shift" not in without


Write = Callable[[Path, Path], None]


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda source, to: convert_zero_checkpoint_to_fp32_state_dict(source, to), "pytorch_model.bin"),
        (
            lambda source, to: convert_zero_checkpoint_to_fp32_state_dict(source, to, safe_serialization=True),
            "model.safetensors",
        ),
        (lambda source, to: main([str(source), str(to), "-t", "global_step1"]), "pytorch_model.bin"),
        (lambda source, to: main([str(source), str(to), "--safe_serialization"]), "model.safetensors"),
    ],
)
def test_weights_are_written_as_a_folder(
    tmp_path: Path, write: Write, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = saved(tmp_path / "saved", 2)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal, where there is a bar
    write(tmp_path / "saved", tmp_path / "out")
    told = capsys.readouterr().err
    assert f"{len(expected)} tensors" in told and "written as float32" in told and "B/s" in told
    assert str(tmp_path / "out") in told.splitlines()[-1]
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    file = tmp_path / "out" / name
    found = load_file(file) if name.endswith("safetensors") else torch.load(file, weights_only=True)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("safe", [False, True])
def test_weights_replace_those_of_an_earlier_conversion(tmp_path: Path, safe: bool) -> None:
    expected = saved(tmp_path / "saved", 2)
    out = tmp_path / "out"
    out.mkdir()
    name = "model.safetensors" if safe else "pytorch_model.bin"
    (out / name).write_bytes(b"old")
    (out / "config.json").write_text("{}")
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", out, safe_serialization=safe)
    found = load_file(out / name) if safe else torch.load(out / name, weights_only=True)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert sorted(path.name for path in out.iterdir()) == sorted(["config.json", name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "saved"]
    with pytest.raises(CheckpointError):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "none", out, safe_serialization=safe)
    assert (out / name).stat().st_size > 100


def test_large_weights_are_written_as_several_files(tmp_path: Path) -> None:
    saved(tmp_path / "saved", 1)
    convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path / "saved", tmp_path / "out", max_shard_size="4KB", safe_serialization=True
    )
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    with pytest.raises(CheckpointError, match="'much' is no size"):
        convert_zero_checkpoint_to_fp32_state_dict(
            tmp_path / "saved", tmp_path / "other", max_shard_size="much", safe_serialization=True
        )


def test_the_script_beside_a_checkpoint_runs(tmp_path: Path) -> None:
    expected = saved(tmp_path / "saved", 3)
    script = tmp_path / "saved" / "zero_to_fp32.py"
    assert script.read_text().startswith("#!/usr/bin/env python\n")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "saved"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(shoal.__file__).parent.parent)},
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("stage", STAGES)
def test_every_whole_state_dict_has_the_keys_of_torchs_own_tied_ones_too(stage: int, tmp_path: Path) -> None:
    """The weights that a trainer exports into the checkpoint's folder are not what ``zero_to_fp32`` reads."""

    def train() -> dict[str, list[str]]:
        engine, *_ = initialize(
            model=make(Plain), optimizer=adamw, config=config(stage, bf16={"enabled": True}), dist_init_required=False
        )
        engine.backward(engine(*batch(0, current_world().rank, 2)))
        engine.step()
        engine.save_checkpoint(tmp_path)
        engine.save_16bit_model(tmp_path, "model.safetensors")
        engine.save_16bit_model(tmp_path)  # pytorch_model.bin
        given = {
            "module_state_dict": list(engine.module_state_dict()),
            "consolidated": list(engine._zero3_consolidated_16bit_state_dict() or {}),
        }
        engine.destroy()
        return given

    keys = run_ranks(2, train)[0]
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "converted.bin")
    whole = {
        "zero_to_fp32": get_fp32_state_dict_from_zero_checkpoint(tmp_path),
        "converted": torch.load(tmp_path / "converted.bin", weights_only=True),
        "save_16bit_model": torch.load(tmp_path / "pytorch_model.bin", weights_only=True),
    }
    model = make(Plain)
    expected = list(model.state_dict())
    assert "head.weight" in expected
    for name, found in {**keys, **{name: list(values) for name, values in whole.items()}}.items():
        assert sorted(found) == sorted(expected), name
    for values in whole.values():
        model.load_state_dict(values, strict=True)
        assert model.head.weight is model.embedding.weight
    assert any((value != value.bfloat16()).any() for value in whole["zero_to_fp32"].values())  # fp32, not rounded
    load_model(model, tmp_path / "model.safetensors", strict=True)
