"""DeepSpeed's checkpoints of models with experts, read without it: the real one wrote those in tests/fixtures."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from shoal.checkpoint.formats import open_source
from shoal.checkpoint.load import with_groups
from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.native import manifest_of
from shoal.cli.app import app
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource
from shoal.errors import CheckpointError, NotBuiltError
from tests.fixtures.deepspeed.make_experts import EXPERT_CASES
from tests.helpers.deepspeed_made import DTYPES, MADE, everything, made

EXPERTS = "blocks.{}.moe.deepspeed_moe.experts.deepspeed_experts.{}.{}"
SHAPES = {"up.weight": (13, 7), "up.bias": (13,), "down.weight": (7, 13)}


@pytest.mark.parametrize("case", sorted(EXPERT_CASES))
def test_every_tensor_equals_that_of_the_processes(case: str) -> None:
    held = load_file(MADE / case / "held.safetensors")
    found = everything(made(case))
    assert torch.equal(found.pop("model/shift"), torch.linspace(-1, 1, 7).to(DTYPES[case.split("-")[2]]))
    if "stage0" in case:  # there DeepSpeed saves no tie, and copies each tensor
        head = found.pop("model/head.weight")
        assert torch.equal(head, found["model/embed.weight"].to(head.dtype))
    assert set(found) == set(held)
    assert len(found) == 3 * (10 + 3 * 6) + 2
    for name, tensor in found.items():
        assert torch.equal(tensor.view(-1), held[name].view(-1)), name


@pytest.mark.parametrize("case", sorted(EXPERT_CASES))
def test_each_expert_has_its_global_name_and_its_group(case: str) -> None:
    about = made(case).about
    for block, number in enumerate((4, 2)):
        for expert in range(number):
            for rest, shape in SHAPES.items():
                name = EXPERTS.format(block, expert, rest)
                assert about.parameters[name].shape == shape
                assert about.parameters[name].dtype == DTYPES[case.split("-")[2]]
                assert about.group_of[name] == (3 if rest == "up.bias" else 2)
                # DeepSpeed's optimizer around bf16 without ZeRO makes a step of its own at the start.
                assert about.scalars[name] == {"step": 4.0 if case == "ep2-stage0-bf16" else 3.0}
    assert EXPERTS.format(1, 2, "up.bias") not in about.parameters
    assert [group["lr"] for group in about.groups] == [0.01, 0.02, 0.01, 0.02]
    assert about.optimizer == "AdamW"
    assert about.notes == []
    assert about.client_state == {"epoch": 2}


def test_groups_of_experts_are_joined_where_the_optimizer_here_has_none() -> None:
    manifest, _ = manifest_of(made("ep2-stage2-fp32"), "tag", "")
    joined = with_groups(manifest, 2)
    assert [group["lr"] for group in joined.groups] == [0.01, 0.02]
    group_of = {record.name: record.group for record in joined.parameters}
    assert group_of[EXPERTS.format(0, 3, "up.weight")] == 0
    assert group_of[EXPERTS.format(0, 3, "up.bias")] == 1
    assert (group_of["embed.weight"], group_of["norm.bias"], group_of["shift"]) == (0, 1, None)
    assert with_groups(manifest, 4) is manifest
    assert with_groups(manifest, 3) is manifest


def test_the_names_of_the_groups_may_be_said_for_the_whole_model_at_stage_0() -> None:
    about = made("ep2-stage0-fp32").about
    joined: list[list[str]] = [[], []]
    split: list[list[str]] = [[], [], [], []]
    for name, group in about.group_of.items():
        joined[group % 2].append(name)
        split[group].append(name)
    by_rank = [sorted(group, key=lambda name: "experts.0." not in name) for group in joined]
    for names in (joined, split, by_rank):
        source = DeepSpeedSource(MADE / "ep2-stage0-fp32" / "checkpoint", names=names)
        assert source.about.group_of == about.group_of
        held = everything(made("ep2-stage0-fp32"))
        assert all(torch.equal(tensor, held[name]) for name, tensor in everything(source).items())
    left_out = DeepSpeedSource(MADE / "ep2-stage0-fp32" / "checkpoint", names=())
    assert list(left_out.kinds()) == [MODEL]


@pytest.mark.parametrize("case", ["ep2-stage0-fp32", "ep2-stage2-bf16"])
def test_shoal_convert_reads_them(case: str, tmp_path: Path) -> None:
    source = str(MADE / case / "checkpoint")
    result = CliRunner().invoke(app, ["convert", source, str(tmp_path / "out"), "--to", "shoal"])
    assert result.exit_code == 0, result.output
    before, after = everything(made(case)), everything(open_source(tmp_path / "out"))
    assert before.keys() <= after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    def copy(case: str) -> Path:
        shutil.copytree(MADE / case / "checkpoint" / "global_step3", tmp_path / "tag")
        return tmp_path / "tag"

    return copy


def test_a_missing_file_of_an_expert_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("ep2-stage2-fp32")
    (folder / "layer_0_expert_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="files of 1 experts of layer 0 are missing: layer_0_expert_2_mp_rank_00"):
        DeepSpeedSource(folder)


def test_an_expert_that_the_model_does_not_have_is_an_error(copied: Callable[[str], Path]) -> None:
    folder = copied("ep2-stage2-fp32")
    name = "layer_{}_expert_{}_mp_rank_00_model_states.pt"
    shutil.copy(folder / name.format(1, 1), folder / name.format(1, 2))
    with pytest.raises(CheckpointError, match="the model has no expert 2 in layer 1"):
        DeepSpeedSource(folder)


def test_the_file_of_another_expert_is_an_error(copied: Callable[[str], Path]) -> None:
    folder = copied("ep2-stage2-fp32")
    name = "layer_0_expert_{}_mp_rank_00_model_states.pt"
    shutil.copy(folder / name.format(1), folder / name.format(2))
    with pytest.raises(NotBuiltError, match=r"deepspeed_experts\.1\.up\.weight' as a parameter of expert 2"):
        DeepSpeedSource(folder)


def test_a_missing_optimizer_of_an_expert_parallel_rank_is_an_error(copied: Callable[[str], Path]) -> None:
    folder = copied("ep2-stage0-fp32")
    (folder / "expp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"the optimizers of expert-parallel ranks \[1\] are here, not of 2"):
        DeepSpeedSource(folder)


def test_optimizers_of_stage_0_and_of_stage_2_under_one_tag_are_an_error(copied: Callable[[str], Path]) -> None:
    folder = copied("ep2-stage2-fp32")
    name = "expp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(MADE / "ep2-stage0-fp32" / "checkpoint" / "global_step3" / name, folder)
    with pytest.raises(CheckpointError, match="two saves went to one tag"):
        DeepSpeedSource(folder)
