"""Checkpoints that are written for DeepSpeed, beside those in tests/fixtures/deepspeed that the real one wrote.

tests/clients/test_deepspeed_checkpoints.py has DeepSpeed itself resume from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shoal.checkpoint.native import ShoalSource, write_shoal
from shoal.checkpoint.portable import TensorInfo
from shoal.cli.app import app
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource
from shoal.compat.checkpoints.files import PickledRecord, open_file
from shoal.compat.checkpoints.writing import write_deepspeed
from shoal.errors import CheckpointError, NotBuiltError
from tests.fixtures.deepspeed.make_experts import EXPERT_CASES
from tests.helpers.deepspeed_made import MADE, MATRICES, VECTORS, everything, made

# How an optimizer computes, not what: a source does not keep it.
_HOW = {"foreach", "fused", "capturable", "differentiable", "step", "bias_correction"}


def differences(old: Any, new: Any, at: str = "") -> Iterator[str]:
    """Where two files differ. Numbers are equal whatever their type, since a step may be a tensor."""
    if isinstance(old, PickledRecord):
        assert type(old) is type(new), at
        old, new = old.values, new.values
    if isinstance(old, dict):
        for key in old.keys() | new.keys():
            if "/param_groups/" in f"{at}/" and key in _HOW:
                continue
            if key not in old or key not in new:
                yield f"{at}/{key} is in one of them"
            else:
                yield from differences(old[key], new[key], f"{at}/{key}")
    elif isinstance(old, list | tuple):
        assert len(old) == len(new), at
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{at}/{index}")
    elif isinstance(old, torch.Tensor) and old.dim():
        if (old.dtype, old.shape) != (new.dtype, new.shape) or not torch.equal(old, new):
            yield at
    elif old != new:
        yield f"{at}: {old} and {new}"


def written_beside(case: str, folder: Path) -> dict[str, list[str]]:
    """Where each file of a case differs from the one that is in the folder."""
    recorded = sorted((MADE / case / "checkpoint" / "global_step3").iterdir())
    assert [path.name for path in recorded] == sorted(path.name for path in (folder / "global_step3").iterdir())
    found = {}
    for path in recorded:
        old, new = open_file(path, verify=False), open_file(folder / "global_step3" / path.name, verify=True)
        found[path.name] = list(differences(old, new))
    return found


@pytest.mark.parametrize(
    "case",
    [
        "stage1-fp32", "stage1-fp16", "stage1-bf16-fused", "stage2-bf16", "stage2-fp16", "stage2-fp32-sgd",
        "stage2-fp32-offload", "stage2-bf16-schedule",
    ],
)  # fmt: skip
def test_the_files_of_stages_1_and_2_are_those_that_deepspeed_wrote(case: str, tmp_path: Path) -> None:
    assert write_deepspeed(made(case), tmp_path / "out") == []
    assert (tmp_path / "out" / "latest").read_text() == "global_step3"
    found = written_beside(case, tmp_path / "out")
    assert len(found) == 3
    assert not any(found.values()), found


@pytest.mark.parametrize("case", ["stage3-fp32", "stage3-bf16", "stage3-fp16", "stage3-bf16-sub-groups"])
def test_the_files_of_stage_3_differ_only_in_what_fills_the_last_parts(case: str, tmp_path: Path) -> None:
    """DeepSpeed leaves there what the memory held."""
    write_deepspeed(made(case), tmp_path / "out")
    found = written_beside(case, tmp_path / "out")
    assert len(found) == 4
    assert all("fp32_flat_groups" in each or "fragments" in each for each in chain(*found.values())), found
    old, new = everything(made(case)), everything(DeepSpeedSource(tmp_path / "out"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize("case", sorted(case for case in EXPERT_CASES if "stage0" not in case))
def test_the_files_of_models_with_experts_are_those_that_deepspeed_wrote(case: str, tmp_path: Path) -> None:
    assert write_deepspeed(made(case), tmp_path / "out") == []
    found = written_beside(case, tmp_path / "out")
    assert len(found) == 1 + made(case).about.num_ranks + 4 + 2
    assert not any(found.values()), found


@pytest.mark.parametrize("is_data_first", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 6])
def test_experts_are_whole_again_whatever_the_ranks(num_ranks: int, is_data_first: bool, tmp_path: Path) -> None:
    zero = {"round_robin_gradients": True, "parameter_alignment": True}
    config = {"zero_optimization": zero, "use_data_before_expert_parallelism": is_data_first}
    write_shoal(made("ep2-stage2-fp32"), tmp_path / "shoal")
    write_deepspeed(ShoalSource(tmp_path / "shoal"), tmp_path / "out", num_ranks=num_ranks, stage=1, config=config)
    old, new = everything(made("ep2-stage2-fp32")), everything(DeepSpeedSource(tmp_path / "out"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


def test_experts_that_deepspeed_cannot_resume_are_refused(tmp_path: Path) -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises(CheckpointError, match=match):
            write_deepspeed(source, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    source = made("ep2-stage2-fp32")
    refused("the stage is 3", stage=3)
    refused("group 2 of the optimizer, 'ep_size_2', .* 3 ranks cannot share", num_ranks=3)
    dense = next(name for name, group in source.about.group_of.items() if group == 0)
    source.about.group_of[dense] = 2
    refused("group 2 of the optimizer, 'ep_size_2', has experts and others")
    source = made("ep2-stage2-fp32")
    source.about.groups = [{**group, "name": "mine"} for group in source.about.groups]
    refused("group 2 of the optimizer, 'mine'")
    expert = next(name for name in source.about.group_of if ".deepspeed_experts." in name)
    del source.about.group_of[expert]
    refused(f"{expert} are experts' and frozen")


def test_round_robin_gradients_give_the_same_flat_tensors(tmp_path: Path) -> None:
    """DeepSpeed 0.19.8 itself writes other addresses than where they lie (``param_slice_mappings``)."""
    write_deepspeed(made("stage2-bf16-round-robin"), tmp_path / "out")
    found = written_beside("stage2-bf16-round-robin", tmp_path / "out")
    assert all("param_slice_mappings" in each for each in chain(*found.values())), found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_of_shoal_becomes_the_same_files(stage: int, tmp_path: Path) -> None:
    case = f"stage{stage}-fp32"
    config = made(case).about.config
    write_shoal(made(case), tmp_path / "shoal")
    write_deepspeed(ShoalSource(tmp_path / "shoal"), tmp_path / "out", config=config)
    found = list(chain(*written_beside(case, tmp_path / "out").values()))
    assert all("fp32_flat_groups" in each or "fragments" in each for each in found), found
    assert stage == 3 or not found


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        (1, {}), (2, {"round_robin_gradients": True}), (2, {"parameter_alignment": True}), (3, {}),
        (3, {"sub_group_size": 20}),
    ],
)  # fmt: skip
def test_every_tensor_is_whole_again_whatever_the_ranks(
    stage: int, zero: dict[str, Any], num_ranks: int, tmp_path: Path
) -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": zero, "gradient_clipping": "auto"}
    source = made("stage2-bf16")
    write_deepspeed(source, tmp_path / "out", num_ranks=num_ranks, stage=stage, config=config)
    found = DeepSpeedSource(tmp_path / "out")
    old, new = everything(source), everything(found)
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert found.about.num_ranks == num_ranks
    assert list(found.about.group_of) == MATRICES + VECTORS
    assert found.about.client_state["best"]["weights"].tolist() == [0, 1, 2]
    file = tmp_path / "out" / "global_step3" / f"bf16_zero_pp_rank_{num_ranks - 1}_mp_rank_00_optim_states.pt"
    state = open_file(file, verify=False)["optimizer_state_dict"]
    if zero == {"parameter_alignment": True}:  # 16 bytes: 8 elements of bf16
        assert state["param_alignment_paddings"] == [[3, 5, 5, 5, 0], [3, 3, 1, 0]]
    if zero == {"sub_group_size": 20}:
        parts = [sum(-(-n // num_ranks) for n in group) for group in ([77], [91], [91], [91], [91], [13, 13, 7, 7])]
        assert num_ranks != 3 or [flat.numel() for flat in state["fp32_flat_groups"]] == parts


def test_the_loss_scale_has_the_rules_of_the_run_that_loads_it(tmp_path: Path) -> None:
    fp16 = {"enabled": True, "loss_scale_window": 7, "hysteresis": 5, "min_loss_scale": 4}
    write_deepspeed(made("stage2-fp16"), tmp_path / "out", config={"fp16": fp16, "gradient_clipping": 0.5}, stage=2)
    file = tmp_path / "out" / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = open_file(file, verify=False)["optimizer_state_dict"]
    scaler = state["loss_scaler"].values
    assert (scaler["cur_scale"], scaler["cur_iter"], scaler["cur_hysteresis"]) == (128.0, 3, 3)
    assert (scaler["scale_window"], scaler["delayed_shift"], scaler["min_scale"]) == (7, 5, 4)
    assert (state["dynamic_loss_scale"], state["clip_grad"]) == (True, 0.5)


def test_parameters_with_fewer_steps_are_named(tmp_path: Path) -> None:
    source = made("stage2-fp32")
    source.about.scalars["norm.bias"] = {"step": torch.tensor(1.0)}
    del source.about.scalars["embed.weight"]
    notes = write_deepspeed(source, tmp_path / "out")
    assert [note.split("; ")[1] for note in notes] == [
        "embed.weight had another, or none, and take that of blocks.0.up.weight.",
        "norm.bias had another, or none, and take that of blocks.0.up.bias.",
    ]


def test_keys_of_other_parallel_ranks_are_noted(tmp_path: Path) -> None:
    config = {"tensor_parallel": {"autotp_size": 2}, "parallel": {"tp": 1, "pp": 4}, "zero_optimization": {"stage": 1}}
    (note,) = write_deepspeed(made("stage2-fp32"), tmp_path / "out", config=config)
    assert "data-parallel ranks: leave tensor_parallel.autotp_size, parallel.pp out of the configuration" in note


def test_what_deepspeeds_files_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    def refused(kind: type[Exception], match: str, **options: Any) -> None:
        with pytest.raises(kind, match=match):
            write_deepspeed(source, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    source = made("stage2-fp32")
    refused(CheckpointError, "the ZeRO stage is 0", stage=0)
    refused(CheckpointError, "0 ranks cannot load it", num_ranks=0)
    source.about.client_state["module"] = 1
    refused(CheckpointError, "the client state has 'module'")
    source = made("stage2-fp32")
    source.about.client_state["sampler"] = object()
    refused(CheckpointError, "is not a plain value")
    source = made("stage2-fp32")
    source.about.parameters["norm.bias"] = TensorInfo(torch.float32, (9,))
    refused(CheckpointError, r"model of norm.bias is \[7\], and norm.bias is \[9\]")
    source = made("stage2-fp32")
    source.about = replace(source.about, optimizer="Muon")
    refused(NotBuiltError, "Muon")
    source.about = replace(source.about, group_of={}, optimizer=None)
    refused(CheckpointError, "has weights but no optimizer parameter groups")


def test_the_command_writes_for_the_ranks_and_the_configuration_that_it_is_given(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}))
    write_shoal(made("stage2-bf16"), tmp_path / "shoal")
    command = ["convert", str(tmp_path / "shoal"), str(tmp_path / "out"), "--to"]
    refused = CliRunner().invoke(app, [*command, "dcp", "--ranks", "3"])
    assert refused.exit_code == 2 and "--to dcp takes no --ranks" in refused.output
    done = CliRunner().invoke(app, [*command, "deepspeed", "--ranks", "3", "--config", str(config)])
    assert done.exit_code == 0, done.output
    assert "left out" not in done.output
    names = sorted(path.name for path in (tmp_path / "out" / "global_step3").iterdir())
    assert names == [
        *(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(3)),
        *(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(3)),
    ]
