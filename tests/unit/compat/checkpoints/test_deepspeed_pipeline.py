"""Checkpoints of DeepSpeed's pipelines are read whole: every tensor equals what its ranks held."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.checkpoint.formats import open_source
from shoal.checkpoint.manifest import MODEL
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource
from shoal.errors import CheckpointError
from tests.helpers.deepspeed_made import MADE, everything
from tests.unit.checkpoint.test_convert import shell

EMBEDDING = "tied_modules.embed.weight"


def names_of_case(case: str) -> list[list[str]]:
    held = load_file(MADE / case / "held.safetensors")
    names = [key.removeprefix("model/") for key in held if key.startswith("model/") and not key.endswith("seen")]
    matrices = [name for name in names if held[f"model/{name}"].dim() > 1]
    return [matrices, [name for name in names if name not in matrices]]


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        ("pp2-stage0", 2), ("pp2-stage1", 4), ("pp2-tied-stage0", 2), ("pp2-tied-stage0-bf16", 2),
        ("pp2-tied-stage1", 4), ("pp2-tied-stage1-bf16", 4), ("pp2-tp2-stage1", 4),
    ],
)  # fmt: skip
def test_tensors_equal_those_that_the_ranks_held(case: str, num_ranks: int) -> None:
    names = names_of_case(case) if case == "pp2-tied-stage0" else None
    source = DeepSpeedSource(MADE / case / "checkpoint", names=names)
    held, found = load_file(MADE / case / "held.safetensors"), everything(source)
    assert set(found) == set(held)
    for key, tensor in held.items():
        assert torch.equal(found[key], tensor), key
    about = source.about
    assert (about.num_ranks, about.client_state, about.counters["global_steps"]) == (num_ranks, {"epoch": 2}, 3)
    assert {about.group_of["5.weight"], about.group_of["1.up.bias"]} == {1}
    assert about.groups[1]["lr"] == 0.02
    assert about.scalars["4.up.weight"]["step"] == 3
    assert about.parameters["1.up.weight"].dtype == (torch.bfloat16 if "bf16" in case else torch.float32)
    assert "1.seen" not in about.parameters


def test_a_tied_weight_that_no_file_names_is_an_error_unless_its_state_is_left_out() -> None:
    folder = MADE / "pp2-tied-stage0" / "checkpoint"
    with pytest.raises(CheckpointError, match="no ways to give the pipeline stages their layers") as caught:
        DeepSpeedSource(folder)
    assert caught.value.code == "checkpoint-unnamed"
    source = DeepSpeedSource(folder, names=())
    held = load_file(MADE / "pp2-tied-stage0" / "held.safetensors")
    assert torch.equal(source.read(MODEL, "0.weight"), held[f"model/{EMBEDDING}"])
    assert list(source.kinds()) == [MODEL]


@pytest.mark.parametrize("case", ["pp2-tied-stage1", "pp2-tp2-stage1"])
def test_it_is_converted_from_the_command_line(case: str, tmp_path: Path) -> None:
    done = shell(MADE / case / "checkpoint", tmp_path / "out", "--to", "shoal")
    assert done.exit_code == 0, done.output
    held = load_file(MADE / case / "held.safetensors")
    assert {key: tensor.tolist() for key, tensor in everything(open_source(tmp_path / "out")).items()} == {
        key: tensor.tolist() for key, tensor in held.items()
    }


@pytest.mark.parametrize(
    ("case", "file", "what"),
    [
        ("pp2-stage1", "layer_03-model_states.pt", "the files of layers 3 are missing"),
        ("pp2-tp2-stage1", "layer_04-model_01-model_states.pt", "layer 4 has files of some tensor-parallel ranks only"),
        ("pp2-stage1", "zero_pp_rank_1_mp_rank_01_optim_states.pt", "the optimizer files of 1 of 2 ranks are missing"),
        ("pp2-stage0", "mp_rank_00_model_states.pt", "no file of tensor-parallel rank 0"),
        ("pp2-stage0", "mp_rank_01_model_states.pt", "2 pipeline stages saved it, and model files of 1 are here"),
        ("pp2-stage0", "layer_05-model_states.pt", "no ways to give the pipeline stages their layers"),
    ],
)
def test_a_file_that_is_missing_is_named(case: str, file: str, what: str, deepspeed_copy: Any) -> None:
    folder = deepspeed_copy(case)
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=what):
        DeepSpeedSource(folder)


def test_stages_of_two_saves_are_an_error(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("pp2-tp2-stage1")
    for part in (2, 3):
        shutil.copy(folder / f"mp_rank_0{part - 2}_model_states.pt", folder / f"mp_rank_0{part}_model_states.pt")
    with pytest.raises(CheckpointError, match="is not whole"):
        DeepSpeedSource(folder)


def test_a_layer_that_can_be_either_of_two_tied_ones_is_an_error(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("pp2-tied-stage1")
    for file in folder.glob("mp_rank_*"):
        state = torch.load(file, weights_only=False)
        state["param_shapes"][0]["tied_modules.other.weight"] = torch.Size([11, 7])
        torch.save(state, file)
    with pytest.raises(CheckpointError, match="layer 0 can be any of the tied layers embed, other"):
        DeepSpeedSource(folder)
