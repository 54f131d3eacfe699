"""Experts that DeepSpeed's tensor-parallel ranks saved, whole on one of them or split over all, are read whole."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from shoal.checkpoint.formats import open_source
from shoal.checkpoint.manifest import MODEL
from shoal.cli.app import app
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource
from shoal.errors import CheckpointError, NotBuiltError
from shoal.parallel.expert.layer import MoE
from tests.fixtures.deepspeed.make_expert_slices import SLICE_CASES, WithSlicedExperts
from tests.fixtures.deepspeed.model import groups_of
from tests.helpers.deepspeed_made import MADE, everything, universal
from tests.helpers.training import make

EXPERTS = "blocks.{}.moe.deepspeed_moe.experts.deepspeed_experts.{}.{}"
SHAPES = {"up.weight": (13, 7), "up.bias": (13,), "down.weight": (7, 13), "down.bias": (7,)}
WHOLE, SPLIT = "ep2-tp2-stage2-whole", "ep2-tp2-stage1-split"
INFORMATION = "universal_checkpoint_info"


def opened(case: str) -> DeepSpeedSource:
    """At stage 0 in fp32 shapes alone do not tell the names."""
    names = None
    if case == "ep2-tp2-stage0-whole":
        model = make(lambda: WithSlicedExperts(MoE, 1, 2))
        name_of = {parameter: name for name, parameter in model.named_parameters()}
        names = [[name_of[parameter] for parameter in group["params"]] for group in groups_of(model)]
    return DeepSpeedSource(MADE / case / "checkpoint", names=names)


@pytest.mark.parametrize("case", SLICE_CASES)
def test_every_tensor_equals_that_of_all_processes(case: str) -> None:
    held, found = load_file(MADE / case / "held.safetensors"), everything(opened(case))
    shift = found.pop("model/shift")
    assert torch.equal(shift, torch.linspace(-1, 1, 7).to(shift.dtype))
    assert set(found) == set(held)
    assert len(found) == 3 * (19 + 4 * (4 + max(2, SLICE_CASES[case][0]))) + 2
    for name, tensor in found.items():
        assert torch.equal(tensor.view(-1), held[name].view(-1)), name


@pytest.mark.parametrize("case", SLICE_CASES)
def test_each_expert_has_its_name_its_group_its_step_and_its_shape(case: str) -> None:
    ep_size, stage, _, is_bf16 = SLICE_CASES[case]
    about = opened(case).about
    experts = [name for name in about.parameters if ".deepspeed_experts." in name]
    numbers = {1: 4, 2: max(2, ep_size)}
    assert experts == [
        EXPERTS.format(b, e, rest) for b, number in numbers.items() for e in range(number) for rest in SHAPES
    ]
    for name in experts:
        rest = name.rpartition("experts.")[2].partition(".")[2]
        assert about.parameters[name].shape == SHAPES[rest]
        assert about.parameters[name].dtype == (torch.bfloat16 if is_bf16 else torch.float32)
        assert about.group_of[name] == (3 if rest.endswith("bias") else 2)
        assert about.scalars[name] == {"step": 4.0 if is_bf16 and stage == 0 else 3.0}
    assert [group["lr"] for group in about.groups] == [0.01, 0.02, 0.01, 0.02]
    assert (about.num_ranks, about.optimizer, about.notes) == (4, "AdamW", [])
    assert about.client_state == {"epoch": 2}


@pytest.mark.parametrize("case", [WHOLE, SPLIT, "ep4-tp2-stage1-whole"])
@pytest.mark.parametrize("to", ["shoal", "deepspeed"])
def test_shoal_convert_joins_them(case: str, to: str, tmp_path: Path) -> None:
    source = str(MADE / case / "checkpoint")
    result = CliRunner().invoke(app, ["convert", source, str(tmp_path / "out"), "--to", to])
    assert result.exit_code == 0, result.output
    before, after = everything(opened(case)), everything(open_source(tmp_path / "out"))
    assert before.keys() <= after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    if to == "shoal":
        result = CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path / "out")])
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", ["list", "verify"])
def test_shoal_checkpoint_says_that_deepspeed_saved_it(command: str) -> None:
    result = CliRunner().invoke(app, ["checkpoint", command, str(MADE / WHOLE / "checkpoint")])
    assert result.exit_code == 1
    assert "global_step3 there was saved by DeepSpeed, and `shoal convert` verifies and reads it" in result.stderr


def test_split_experts_of_one_expert_parallel_rank_are_read_from_the_universal_format(tmp_path: Path) -> None:
    """With more ranks, and of whole experts, ds_to_universal itself fails."""
    case = "ep1-tp2-stage2-split"
    old, new = everything(opened(case)), everything(DeepSpeedSource(universal(case, tmp_path)))
    assert old.keys() == new.keys() and len(old) == 132
    assert [key for key in old if not torch.equal(old[key], new[key])] == []


def test_weights_are_read_without_optimizer_files(copied: Callable[[str], Path]) -> None:
    for case in (WHOLE, SPLIT):
        folder = copied(case)
        for file in folder.glob("*optim_states.pt"):
            file.unlink()
        source = DeepSpeedSource(folder)
        held = load_file(MADE / case / "held.safetensors")
        assert list(source.kinds()) == [MODEL]
        for name in source.tensors(MODEL):
            tensor = source.read(MODEL, name)
            if name != "shift":
                assert torch.equal(tensor.view(-1), held[f"model/{name}"].to(tensor.dtype).view(-1)), name


def test_patterns_of_one_expert_hold_for_all(copied: Callable[[str], Path]) -> None:
    """As a model that sets ``universal_checkpoint_info`` itself writes them."""
    folder = copied(SPLIT)

    def change(state: dict[str, Any]) -> None:
        information = state[INFORMATION]
        experts = r"blocks.\d+.moe.deepspeed_moe.experts.deepspeed_experts.0."
        exact = [each for each in information["tp_replicated_parameter_patterns"] if "_experts" not in each]
        rows = [each for each in information["parameter_with_row_parallelism_patterns"] if "_experts" not in each]
        information["affine_map"]["params"] = {
            name: value for name, value in information["affine_map"]["params"].items() if "_experts" not in name
        }
        information["tp_replicated_parameter_patterns"] = [*exact, experts + "down.bias"]
        information["parameter_with_row_parallelism_patterns"] = [*rows, experts + "down.weight"]

    edit(folder / "mp_rank_00_model_states.pt", change)
    held = load_file(MADE / SPLIT / "held.safetensors")
    for name, tensor in everything(DeepSpeedSource(folder)).items():
        if name in held:
            assert torch.equal(tensor.view(-1), held[name].view(-1)), name


# What is damaged, absent, or not written down


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    def copy(case: str) -> Path:
        return Path(shutil.copytree(MADE / case / "checkpoint" / "global_step3", tmp_path / case))

    return copy


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


def test_a_missing_file_of_an_expert_is_an_error(copied: Callable[[str], Path]) -> None:
    folder = copied(WHOLE)
    (folder / "layer_0_expert_2_mp_rank_01_model_states.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"files of 1 experts of layer 0 are missing: layer_0_expert_2_mp_rank_\*_"
    ):
        DeepSpeedSource(folder)
    folder = copied(SPLIT)
    (folder / "layer_0_expert_2_mp_rank_01_model_states.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"expert 2 of layer 0 has files of tensor-parallel ranks \[0\], and other"
    ):
        DeepSpeedSource(folder)
    (folder / "layer_0_expert_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(
        CheckpointError, match="files of 1 experts of layer 0 are missing: layer_0_expert_2_mp_rank_00_"
    ):
        DeepSpeedSource(folder)


def test_a_missing_optimizer_of_an_expert_parallel_rank_is_an_error(copied: Callable[[str], Path]) -> None:
    folder = copied("ep2-tp2-stage0-whole")
    (folder / "expp_rank_1_mp_rank_01_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"no expp_rank_\*_mp_rank_01_optim_states.pt is here"):
        DeepSpeedSource(folder)
    folder = copied("ep2-tp2-stage0-split")
    (folder / "expp_rank_1_mp_rank_01_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"the optimizers of expert-parallel ranks \[0\] are here, not of 2"):
        DeepSpeedSource(folder)


def test_an_optimizer_of_another_expert_parallel_rank_is_an_error(copied: Callable[[str], Path]) -> None:
    folder = copied("ep2-tp2-stage0-whole")
    file = folder / "expp_rank_1_mp_rank_01_optim_states.pt"
    file.rename(folder / "expp_rank_2_mp_rank_01_optim_states.pt")
    with pytest.raises(CheckpointError, match=r"expert-parallel ranks \[2\] are here, not of \[0\]") as caught:
        DeepSpeedSource(folder, names=opened_names())
    assert caught.value.code == "checkpoint-damaged"


def opened_names() -> list[list[str]]:
    group_of = opened("ep2-tp2-stage0-whole").about.group_of
    return [[name for name, group in group_of.items() if group % 2 == index] for index in range(2)]


def test_files_that_deepspeed_leaves_out_with_few_expert_parallel_ranks_are_explained(
    copied: Callable[[str], Path],
) -> None:
    folder = copied(WHOLE)
    (folder / "mp_rank_01_model_states.pt").unlink()
    words = "the model file of tensor-parallel rank 1 is missing"
    with pytest.raises(CheckpointError, match=words) as caught:
        DeepSpeedSource(folder)
    assert "their ep_size is below the number of these ranks: train with a larger ep_size" in caught.value.do
    folder = copied("ep2-tp2-stage0-split")
    for file in folder.glob("*_mp_rank_01_*"):
        file.unlink()
    (folder / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="2 tensor-parallel ranks saved it, and files of 1 are here") as caught:
        DeepSpeedSource(folder)
    assert "or enable_expert_tensor_parallelism" in caught.value.do


def test_optimizer_state_of_an_expert_in_files_of_several_tensor_parallel_ranks_is_refused(
    copied: Callable[[str], Path],
) -> None:
    folder = copied(WHOLE)
    for file in folder.glob("*optim_states.pt"):
        torch.save({"optimizer_state_dict": {"partition_count": [2, 2, 4, 4]}}, file)
    with pytest.raises(NotBuiltError, match="ep_size is no multiple of this number") as caught:
        DeepSpeedSource(folder)
    assert "without the *_optim_states.pt files" in caught.value.do


def test_copies_that_differ_are_an_error(copied: Callable[[str], Path]) -> None:
    folder, name = copied(SPLIT), EXPERTS.format(1, 2, "down.bias")
    file = folder / "layer_0_expert_2_mp_rank_01_model_states.pt"
    edit(file, lambda state: state.update({name: state[name] * 1.001}))
    DeepSpeedSource(folder)  # by rounding
    edit(file, lambda state: state.update({name: state[name].flip(0)}))
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} should be the same on every tensor-parallel rank"):
        DeepSpeedSource(folder)
    DeepSpeedSource(folder, verify=False)


def test_experts_whose_split_is_not_described_are_an_error(copied: Callable[[str], Path]) -> None:
    folder = copied(SPLIT)

    def change(state: dict[str, Any]) -> None:
        for key, value in state[INFORMATION].items():
            if isinstance(value, list):
                state[INFORMATION][key] = [each for each in value if "_experts" not in str(each)]
        params = state[INFORMATION]["affine_map"]["params"]
        for each in [each for each in params if "_experts" in each]:
            del params[each]

    edit(folder / "mp_rank_00_model_states.pt", change)
    with pytest.raises(
        CheckpointError, match="experts are split over 2 tensor-parallel ranks, and no pattern"
    ) as caught:
        DeepSpeedSource(folder)
    assert caught.value.code == "checkpoint-split"
