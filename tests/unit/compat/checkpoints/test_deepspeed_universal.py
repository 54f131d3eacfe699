"""DeepSpeed's universal checkpoints, read without it: those in the fixtures are of its own ds_to_universal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from shoal.checkpoint.formats import detect
from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.native import ShoalSource
from shoal.cli.app import app
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource
from shoal.compat.checkpoints.files import open_file
from shoal.errors import CheckpointError, NotBuiltError
from tests.fixtures.deepspeed.make_universal import UNIVERSAL_CASES
from tests.helpers.deepspeed_made import DTYPES, MADE, MATRICES, VECTORS, everything, made, universal
from tests.unit.compat.checkpoints.test_deepspeed import PROGRAM


@pytest.mark.parametrize("case", UNIVERSAL_CASES)
def test_every_tensor_equals_that_of_the_processes(case: str, tmp_path: Path) -> None:
    universal(case, tmp_path)
    held = load_file(MADE / case / "held.safetensors")
    found = everything(DeepSpeedSource(tmp_path))
    frozen = found.pop("model/shift")
    assert torch.equal(frozen, torch.linspace(-1, 1, 7).to(DTYPES[case.split("-")[1]]))
    assert set(found) == set(held)
    for name, tensor in found.items():
        assert torch.equal(tensor.view(-1), held[name].view(-1)), name
        assert tensor.dtype == (torch.int64 if name == "model/seen" else torch.float32), name


@pytest.mark.parametrize("case", UNIVERSAL_CASES)
def test_what_is_said_is_what_the_checkpoint_itself_says(case: str, tmp_path: Path) -> None:
    universal(case, tmp_path)
    about, expected = DeepSpeedSource(tmp_path).about, made(case).about
    assert about.client_state.pop("best").keys() == expected.client_state.pop("best").keys()
    assert about == expected
    assert about.num_ranks == 2
    assert about.scalars == {name: {"step": 3.0} for name in MATRICES + VECTORS}


def test_without_latest_it_is_the_one_that_latest_universal_names(tmp_path: Path) -> None:
    tag = universal("stage1-fp32", tmp_path)
    assert detect(tmp_path) == detect(tag) == "deepspeed"
    for folder, name in ((tmp_path, None), (tmp_path, tag.name), (tag, None)):
        assert DeepSpeedSource(folder, name).about.counters["global_steps"] == 3
    shutil.copytree(MADE / "stage1-bf16" / "checkpoint", tmp_path, dirs_exist_ok=True)
    assert DeepSpeedSource(tmp_path).about.parameters["embed.weight"].dtype == torch.bfloat16
    assert DeepSpeedSource(tmp_path, tag.name).about.parameters["embed.weight"].dtype == torch.float32


def test_shoal_convert_takes_it(tmp_path: Path) -> None:
    universal("stage3-fp32", tmp_path / "universal")
    command = ["convert", str(tmp_path / "universal"), str(tmp_path / "new"), "--to", "shoal"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found, held = everything(ShoalSource(tmp_path / "new")), load_file(MADE / "stage3-fp32" / "held.safetensors")
    assert all(torch.equal(found[name].view(-1), held[name].view(-1)) for name in held)


# What may differ


def rewrite(path: Path, value: Any) -> None:
    torch.save(value, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def test_rows_that_filled_up_a_vocabulary_are_zeros(tmp_path: Path) -> None:
    """The converter leaves them out of what a client's vocabulary_parameter_patterns name."""
    folder = universal("stage1-fp32", tmp_path)
    whole = DeepSpeedSource(folder).read(MODEL, "embed.weight")
    for key in ("fp32", "exp_avg", "exp_avg_sq"):
        path = folder / "zero" / "embed.weight" / f"{key}.pt"
        held = open_file(path, verify=True)
        rewrite(path, {"param": held["param"][:9].clone(), "cat_dim": 0, "vocab_tensor": True})
    source = DeepSpeedSource(folder)
    found = source.read(MODEL, "embed.weight")
    assert found.shape == (11, 7)
    assert torch.equal(found[:9], whole[:9]) and not found[9:].any()
    assert source.read("optimizer/exp_avg", "embed.weight").shape == (11, 7)


def test_a_step_that_is_an_integer_is_counted_as_torchs_optimizers_do(tmp_path: Path) -> None:
    folder = universal("stage1-fp32", tmp_path)
    rewrite(folder / "zero" / "norm.bias" / "step.pt", 7)
    value = DeepSpeedSource(folder).about.scalars["norm.bias"]["step"]
    assert (value.item(), value.dtype) == (7, torch.float32)


def test_a_parameter_that_never_had_a_gradient_has_weights_and_no_state(tmp_path: Path) -> None:
    folder = universal("stage1-fp32", tmp_path)
    for key in ("exp_avg", "exp_avg_sq", "step"):
        (folder / "zero" / "norm.bias" / f"{key}.pt").unlink()
    source = DeepSpeedSource(folder)
    assert "norm.bias" in source.tensors(MODEL)
    assert "norm.bias" not in source.tensors("optimizer/exp_avg")
    assert "norm.bias" not in source.about.scalars


# Tensor parallelism


def split_in_two(stage: int, folder: Path) -> Path:
    """What the real ds_to_universal made of a Llama that two tensor-parallel ranks trained."""
    made_of = MADE.parent / "clients" / "continued" / f"tensor-parallel-stage{stage}.zip"
    with zipfile.ZipFile(made_of) as archive:
        archive.extractall(folder)
    return folder / "whole"


@pytest.mark.parametrize("stage", [1, 3])
def test_what_tensor_parallelism_split_is_whole(stage: int, tmp_path: Path) -> None:
    folder = split_in_two(stage, tmp_path)
    source = DeepSpeedSource(folder)
    block = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (96, 8),
        "lm_head.weight": (96, 8),
        "model.norm.weight": (8,),
        f"{block}.input_layernorm.weight": (8,),
        f"{block}.post_attention_layernorm.weight": (8,),
        **{f"{block}.self_attn.{name}_proj.weight": (8, 8) for name in "qkvo"},
        f"{block}.mlp.gate_proj.weight": (12, 8),
        f"{block}.mlp.up_proj.weight": (12, 8),
        f"{block}.mlp.down_proj.weight": (8, 12),
    }
    assert {name: info.shape for name, info in source.about.parameters.items()} == shapes
    for kind in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        assert {name: info.shape for name, info in source.tensors(kind).items()} == shapes
    assert source.about.scalars == {name: {"step": 3.0} for name in shapes}
    assert source.about.num_ranks == 1 and source.about.optimizer == "AdamW"
    if stage == 1:
        parts = [torch.load(folder / f"mp_rank_0{r}_model_states.pt", weights_only=True)["module"] for r in range(2)]
        for name, dim in ((f"{block}.self_attn.k_proj.weight", 0), (f"{block}.mlp.down_proj.weight", 1)):
            assert torch.equal(source.read(MODEL, name), torch.cat([part[name].detach() for part in parts], dim))


def test_what_was_not_trained_has_to_be_the_same_on_all_tensor_parallel_ranks(tmp_path: Path) -> None:
    folder = split_in_two(1, tmp_path)
    path = folder / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    for name in ("model.norm.weight", "model.layers.0.mlp.down_proj.weight"):
        for members in state["param_shapes"]:
            members.pop(name, None)
        rewrite(path, state)
        if name == "model.norm.weight":  # every rank has it whole
            source = DeepSpeedSource(folder)
            assert source.about.group_of.get(name) is None and source.read(MODEL, name).shape == (8,)
        else:
            with pytest.raises(NotBuiltError, match=r"not trained \(model\.layers\.0\.mlp\.down_proj\.weight\)"):
                DeepSpeedSource(folder)


def test_a_tensor_of_several_in_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    folder = split_in_two(1, tmp_path)
    path = folder / "zero" / "model.layers.0.self_attn.q_proj.weight" / "fp32.pt"
    rewrite(path, {"param": open_file(path, verify=True)["param"].view(2, 4, 8)})
    with pytest.raises(NotBuiltError, match="a tensor whose shape is not kept"):
        DeepSpeedSource(folder)


def test_a_clients_description_of_several_parameters_in_one_is_read_and_not_written(tmp_path: Path) -> None:
    """Written as DeepSpeed would write it: an object of a class that is not imported here."""
    folder = universal("stage1-fp32", tmp_path)
    kind = type("SubparamShape", (), {"__module__": "deepspeed.checkpoint.universal_checkpoint"})
    said = kind()
    vars(said).update(patterns=["x"], shape=((5, 6), 7), partition_dim=0)
    path = folder / "zero" / "embed.weight" / "fp32.pt"
    value = open_file(path, verify=True)["param"].detach().clone()
    names = ("deepspeed", "deepspeed.checkpoint", "deepspeed.checkpoint.universal_checkpoint")
    modules = {name: types.ModuleType(name) for name in names}
    vars(modules[names[2]])["SubparamShape"] = kind
    with mock.patch.dict(sys.modules, modules):
        rewrite(path, {"param": value, "sub_param_shape": said})
    assert torch.equal(DeepSpeedSource(folder).read(MODEL, "embed.weight"), value)


# Damage


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("norm.bias/fp32.pt", "the weights of norm.bias are missing"),
        ("optimizer_state.pt", "optimizer_state.pt cannot be opened"),
    ],
)
def test_a_file_that_is_missing_is_named(file: str, what: str, tmp_path: Path) -> None:
    folder = universal("stage1-fp32", tmp_path)
    (folder / "zero" / file).unlink()
    with pytest.raises(CheckpointError, match=what):
        DeepSpeedSource(folder)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"param": torch.zeros(6)}, r"shape \[6\], and norm.bias is \[7\]"),
        ({"param": [1.0]}, "a tensor was expected, not a list"),
        ({"weight": torch.zeros(7)}, "entry 'param' is missing"),
        (torch.zeros(8), r"shape \[8\], and norm.bias is \[7\]"),
    ],
)
def test_another_parameters_file_is_damage(value: Any, what: str, tmp_path: Path) -> None:
    folder = universal("stage1-fp32", tmp_path)
    rewrite(folder / "zero" / "norm.bias" / "exp_avg.pt", value)
    with pytest.raises(CheckpointError, match=what) as caught:
        DeepSpeedSource(folder)
    assert caught.value.code == "checkpoint-damaged"
    assert "norm.bias/exp_avg.pt" in caught.value.where


def test_fewer_rows_without_a_word_of_a_vocabulary_are_damage(tmp_path: Path) -> None:
    folder = universal("stage1-fp32", tmp_path)
    rewrite(folder / "zero" / "embed.weight" / "fp32.pt", {"param": torch.zeros(9, 7), "cat_dim": 0})
    with pytest.raises(CheckpointError, match="it has 9 rows of 11"):
        DeepSpeedSource(folder)


def test_a_byte_that_flipped_is_found_before_anything_is_read(tmp_path: Path) -> None:
    path = universal("stage1-fp32", tmp_path) / "zero" / "norm.bias" / "fp32.pt"
    data = bytearray(path.read_bytes())
    at = data.index(torch.load(path, weights_only=True)["param"].detach().numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"fp32\.pt is damaged: Bad CRC-32"):
        DeepSpeedSource(tmp_path)
    assert DeepSpeedSource(tmp_path, verify=False).about.counters["global_steps"] == 3


@pytest.mark.parametrize("name", ["../../../outside", "/outside"])
def test_a_parameters_name_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    folder = universal("stage1-fp32", tmp_path)
    path = folder / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    state["param_shapes"][1][name] = torch.Size([7])
    rewrite(path, state)
    with pytest.raises(CheckpointError, match="outside' is not the name of a folder in it") as caught:
        DeepSpeedSource(folder)
    assert caught.value.code == "checkpoint-unsafe"


def test_experts_of_one_expert_parallel_rank_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """With more ranks ds_to_universal itself fails."""
    folder = universal("ep1-stage1-fp32", tmp_path)
    old, new = everything(made("ep1-stage1-fp32")), everything(DeepSpeedSource(folder))
    assert old.keys() == new.keys() and len(old) == 87
    assert [key for key in old if not torch.equal(old[key], new[key])] == []
    path = folder / "mp_rank_00_model_states.pt"
    rewrite(path, {**open_file(path, verify=True), "num_experts": [8, 4]})
    with pytest.raises(NotBuiltError, match="12 experts in the universal format, without all"):
        DeepSpeedSource(folder)


def test_experts_of_autoep_are_not_built(tmp_path: Path) -> None:
    folder = universal("stage1-fp32", tmp_path)
    path = folder / "zero" / "norm.bias" / "fp32.pt"
    rewrite(path, {**open_file(path, verify=True), "is_expert_param": True})
    with pytest.raises(NotBuiltError, match="mixture-of-experts layers"):
        DeepSpeedSource(folder)


# Memory


@pytest.mark.parametrize("stage", [2, 3])
def test_reading_takes_the_memory_of_one_parameter_not_of_the_model(stage: int, tmp_path: Path) -> None:
    """200 MB in 51 tensors of 4 MB; only what is not shared with the file counts."""
    names = {f"layers.{index}.weight": torch.Size([1024, 1024]) for index in range(17)}
    module = {name: torch.empty(0) if stage == 3 else torch.ones(()).expand(shape) for name, shape in names.items()}
    model = {"module": module, "buffer_names": [], "param_shapes": [names], "dp_world_size": 1, "shared_params": {}}
    torch.save(model, tmp_path / f"{'zero_pp_rank_0_' if stage == 3 else ''}mp_rank_00_model_states.pt")
    for name in names:
        (tmp_path / "zero" / name).mkdir(parents=True)
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            value = torch.ones(1 << 20)
            held = value if stage == 3 else {"param": value.view(1024, 1024)}
            torch.save(held, tmp_path / "zero" / name / f"{key}.pt")
    torch.save({"param_groups": [{"lr": 0.1, "params": [0]}]}, tmp_path / "zero" / "optimizer_state.pt")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(universal("stage1-fp32", tmp_path / "small"))],
        capture_output=True, text=True, timeout=50, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    total, extra = (int(word) for word in done.stdout.split())
    assert total == 3 * 17 * (4 << 20)
    assert extra < 12 << 20  # a tensor, and the next one before it is dropped
