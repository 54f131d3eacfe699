"""DeepSpeed's own checkpoints, read without it: those in tests/fixtures/deepspeed were written by the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.checkpoint.manifest import MODEL
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource
from shoal.compat.checkpoints.files import open_file
from shoal.compat.checkpoints.state import EqualParts, FlatRange
from shoal.errors import CheckpointError
from tests.fixtures.deepspeed.make import CASES
from tests.fixtures.deepspeed.model import build_model
from tests.helpers.deepspeed_made import DTYPES, MADE, MATRICES, VECTORS, everything, made

# The values of the processes


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_equals_that_of_the_processes(case: str) -> None:
    held = load_file(MADE / case / "held.safetensors")
    found = everything(made(case))
    dtype = DTYPES[case.split("-")[1]]
    frozen = found.pop("model/shift", None)
    if case == "stage3-bf16-no-frozen":
        assert frozen is None
    else:
        assert frozen is not None and torch.equal(frozen, torch.linspace(-1, 1, 7).to(dtype))
    assert set(found) == set(held)
    assert len(found) == (20 if case.endswith("sgd") else 29)
    for name, tensor in found.items():
        assert torch.equal(tensor.view(-1), held[name].view(-1)), name
        assert tensor.dtype == (torch.int64 if name == "model/seen" else torch.float32), name


@pytest.mark.parametrize("case", CASES)
def test_the_model_and_its_groups_are_described(case: str) -> None:
    about = made(case).about
    dtype = DTYPES[case.split("-")[1]]
    expected = {
        name: (dtype, tuple(parameter.shape))
        for name, parameter in build_model().named_parameters()
        if not (name == "shift" and case == "stage3-bf16-no-frozen")
    }
    assert {name: (info.dtype, info.shape) for name, info in about.parameters.items()} == expected
    assert about.aliases == {"embed.weight": ("head.weight",)}
    assert about.group_of == dict.fromkeys(MATRICES, 0) | dict.fromkeys(VECTORS, 1)
    assert about.counters == {"global_steps": 3, "global_samples": 18, "skipped_steps": 0, "micro_steps": 3}
    assert about.counters == json.loads((MADE / case / "run.json").read_text())["counters"]
    assert about.client_state["epoch"] == 2
    assert about.client_state["best"]["loss"] == 1.5
    assert about.client_state["best"]["weights"].tolist() == [0, 1, 2]
    assert set(about.client_state) == {"epoch", "best"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hyperparameters_and_the_step_come_along(stage: int) -> None:
    about = made(f"stage{stage}-fp32").about
    assert about.optimizer == "AdamW"
    first, second = about.groups
    assert (first["lr"], first["weight_decay"], first["betas"], first["eps"]) == (0.01, 0.1, (0.9, 0.95), 1e-8)
    assert (second["lr"], second["weight_decay"]) == (0.02, 0.0)
    assert "params" not in first
    assert about.scalars == {name: {"step": 3.0} for name in MATRICES + VECTORS}
    assert about.notes == []


@pytest.mark.parametrize(
    ("case", "step"),
    [("stage2-fp32-offload", 3), ("stage3-bf16-offload", 3), ("stage1-bf16-fused", 3), ("stage0-bf16-fused", 4)],
)
def test_the_step_of_deepspeeds_own_optimizers_is_a_tensor_as_torchs(case: str, step: int) -> None:
    """At stage 0 in 16 bits DeepSpeed takes a first step without gradients, so it counts one more."""
    about = made(case).about
    value = about.scalars["norm.bias"]["step"]
    assert (value.item(), value.dtype, value.shape) == (step, torch.float32, ())
    assert about.optimizer == "AdamW"
    assert about.groups[0]["betas"] == (0.9, 0.95)
    assert "step" not in about.groups[0]


def test_an_optimizer_without_moments_has_its_momentum() -> None:
    source = made("stage2-fp32-sgd")
    assert list(source.kinds()) == ["model", "optimizer/momentum_buffer"]
    assert source.about.optimizer == "SGD"
    assert source.about.scalars == {}
    assert source.about.groups[0]["momentum"] == 0.9


def test_an_elastic_checkpoint_says_that_it_has_no_hyperparameters() -> None:
    about = made("stage2-fp32-elastic").about
    assert about.groups == [{}, {}]
    assert about.notes == ["An elastic checkpoint does not hold the groups' hyperparameters (lr, betas, ...)."]
    assert about.scalars["norm.bias"] == {"step": 3.0}


def test_a_schedule_comes_along_and_the_optimizer_is_named_by_the_config() -> None:
    about = made("stage2-bf16-schedule").about
    assert about.schedule == {"last_batch_iteration": 2}
    assert about.optimizer == "AdamW"


@pytest.mark.parametrize(("stage", "hysteresis"), [(0, 1), (1, 3), (2, 3), (3, 3)])
def test_the_loss_scale_of_fp16_is_shoals_state(stage: int, hysteresis: int) -> None:
    from shoal.optim.loss_scale import LossScale

    state = made(f"stage{stage}-fp16").about.loss_scale
    assert state == {"scale": 128.0, "iteration": 3, "last_overflow_iteration": -1, "hysteresis": hysteresis}
    scale = LossScale()
    scale.load_state_dict(state)
    assert scale.scale == 128.0
    assert made(f"stage{stage}-bf16").about.loss_scale is None


# Where it lies


def test_a_folder_its_tag_and_the_tag_folder_are_the_same_checkpoint() -> None:
    folder = MADE / "stage2-fp32" / "checkpoint"
    for source in (
        DeepSpeedSource(folder),
        DeepSpeedSource(str(folder), "global_step3"),
        DeepSpeedSource(folder / "global_step3"),
        DeepSpeedSource(f"file://{folder}"),
    ):
        assert source.about.counters["global_steps"] == 3


def test_a_tag_that_is_not_there_is_an_error_that_lists_the_others() -> None:
    folder = MADE / "stage2-fp32" / "checkpoint"
    with pytest.raises(CheckpointError, match=r"tag 'best' is not there. Tags in it: global_step3.") as caught:
        DeepSpeedSource(folder, "best")
    assert caught.value.code == "checkpoint-missing"


def test_without_latest_the_tag_has_to_be_said(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("stage2-fp32").parent
    (folder / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"no file 'latest', and no tag was named. Tags in it: global_step3"):
        DeepSpeedSource(folder)


@pytest.mark.parametrize("tag", ["../../stage1-fp32/checkpoint/global_step3", "/etc", "", "a/../.."])
def test_a_tag_leads_nowhere_else(tag: str, deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("stage2-fp32").parent
    (folder / "latest").write_text(tag)
    with pytest.raises(CheckpointError) as caught:
        DeepSpeedSource(folder)
    assert caught.value.code == "checkpoint-unsafe"


def test_a_folder_of_something_else_is_said_to_be_that(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("step1")
    (tmp_path / "step1").mkdir()
    (tmp_path / "step1" / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="no checkpoint of DeepSpeed's"):
        DeepSpeedSource(tmp_path)


# Less than everything


@pytest.mark.parametrize("case", ["stage1-bf16", "stage2-bf16"])
def test_without_optimizer_files_the_models_own_weights_are_read_with_a_note(case: str, deepspeed_copy: Any) -> None:
    folder = deepspeed_copy(case)
    held = load_file(MADE / case / "held.safetensors")
    for file in folder.glob("*_optim_states.pt"):
        file.unlink()
    source = DeepSpeedSource(folder)
    assert list(source.kinds()) == ["model"]
    weight = source.read(MODEL, "embed.weight")
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight.view(-1), held["model/embed.weight"].bfloat16())
    assert source.about.groups == () and source.about.group_of == {}
    assert source.about.notes == ["There are no optimizer files: the weights are the model's, without optimizer state."]


def test_at_stage_3_the_optimizer_files_are_needed(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("stage3-bf16")
    for file in folder.glob("*_optim_states.pt"):
        file.unlink()
    with pytest.raises(CheckpointError, match="no optimizer files, and at stage 3 the weights are in them"):
        DeepSpeedSource(folder)


@pytest.mark.parametrize("case", ["stage1-fp32", "stage3-bf16"])
def test_before_the_first_step_there_are_weights_and_groups_and_no_state(case: str, deepspeed_copy: Any) -> None:
    folder = deepspeed_copy(case)
    for file in folder.glob("*_optim_states.pt"):
        state = open_file(file, verify=True)
        inner = state["optimizer_state_dict"]
        inner["optimizer_state_dict" if case.startswith("stage3") else "base_optimizer_state"]["state"] = {}
        inner |= {"zero_stage": int(inner["zero_stage"]), "loss_scaler": None, "param_slice_mappings": None}
        rewrite(file, {"optimizer_state_dict": inner})
    source = DeepSpeedSource(folder)
    assert list(source.kinds()) == ["model"]
    assert source.about.groups[1]["lr"] == 0.02
    assert source.about.scalars == {}
    assert source.read(MODEL, "norm.bias").dtype == torch.float32


def test_a_parameter_without_elements_keeps_its_shape_at_stage_3(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("stage3-bf16")
    for file in folder.glob("*_model_states.pt"):
        state = open_file(file, verify=True)
        state["module"]["none"] = torch.empty(0, dtype=torch.bfloat16)
        state["frozen_param_shapes"]["none"] = torch.Size([0, 4])
        state["frozen_param_fragments"]["none"] = torch.empty(0, dtype=torch.bfloat16)
        rewrite(file, state)
    source = DeepSpeedSource(folder)
    assert source.about.parameters["none"].shape == (0, 4)
    assert source.read(MODEL, "none").shape == (0, 4)


def rewrite(file: Path, state: Any) -> None:
    """Not in place: what is written may be mapped from it."""
    torch.save(state, file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)


@pytest.mark.parametrize("case", ["stage1-fp32", "stage2-fp16", "stage2-bf16-round-robin"])
def test_files_that_do_not_say_where_parameters_lie_are_read_by_arithmetic(case: str, deepspeed_copy: Any) -> None:
    folder = deepspeed_copy(case)
    for file in folder.glob("*_optim_states.pt"):
        state = open_file(file, verify=True)
        inner = state["optimizer_state_dict"]
        del inner["param_slice_mappings"], inner["param_alignment_paddings"]
        inner |= {"zero_stage": int(inner["zero_stage"]), "loss_scaler": None}
        rewrite(file, {"optimizer_state_dict": inner})
    held = load_file(MADE / case / "held.safetensors")
    found = everything(DeepSpeedSource(folder))
    assert len(found) == 30
    assert all(torch.equal(found[name].view(-1), held[name].view(-1)) for name in held)


def test_a_tensor_that_is_not_there_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="shift"):
        made("stage2-fp32").read("optimizer/exp_avg", "shift")


def test_what_is_read_is_the_callers_own(deepspeed_copy: Any) -> None:
    source = made("stage2-fp32")
    for name in ("embed.weight", "shift", "gain"):
        source.read(MODEL, name).zero_()
        assert source.read(MODEL, name).abs().sum() > 0


# Layout


def test_a_parameter_of_7_over_3_ranks_lies_in_parts_of_3_3_and_1() -> None:
    assert list(EqualParts(flat=2, start=10, numel=7, ranks=(0, 1, 2))) == [
        FlatRange(0, 2, 10, 3),
        FlatRange(1, 2, 10, 3),
        FlatRange(2, 2, 10, 1),
    ]
    assert list(EqualParts(flat=0, start=4, numel=2, ranks=range(4))) == [FlatRange(0, 0, 4, 1), FlatRange(1, 0, 4, 1)]
    assert list(EqualParts(flat=0, start=4, numel=0, ranks=range(4))) == [FlatRange(0, 0, 4, 0)]


# Memory


PROGRAM = """
import sys, threading, time
import torch
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1])

DeepSpeedSource(sys.argv[2])
base, most, done = anonymous(), 0, False
def watch():
    global most
    while not done:
        most = max(most, anonymous())
        time.sleep(0.0005)
thread = threading.Thread(target=watch)
thread.start()
source = DeepSpeedSource(sys.argv[1])
total = 0
for kind in source.kinds():
    for name in source.tensors(kind):
        tensor = source.read(kind, name)
        total += tensor.nbytes
        most = max(most, anonymous())
done = True
thread.join()
print(total, (most - base) * 1024)
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_reading_takes_the_memory_of_one_parameter_not_of_the_model(stage: int, tmp_path: Path) -> None:
    """200 MB in 51 tensors of 4 MB; only what is not shared with the file counts."""
    count, numel, ranks = 17, 1 << 20, 2
    names = {f"layers.{index}.weight": torch.Size([1024, 1024]) for index in range(count)}
    part = count * numel // ranks
    for rank in range(ranks):
        moments = {"step": 1.0, "exp_avg": torch.ones(part), "exp_avg_sq": torch.ones(part)}
        base = {"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        state: dict[str, Any] = {"zero_stage": stage, "partition_count": ranks}
        if stage == 3:
            state |= {"fp32_flat_groups": [torch.ones(part)], "optimizer_state_dict": base}
        else:
            state |= {"single_partition_of_fp32_groups": [torch.ones(part)], "base_optimizer_state": base}
        torch.save({"optimizer_state_dict": state}, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    module = {name: torch.empty(0) if stage == 3 else torch.ones(()).expand(shape) for name, shape in names.items()}
    model = {"module": module, "buffer_names": [], "param_shapes": [names], "dp_world_size": ranks, "shared_params": {}}
    for rank in range(ranks):
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(model, tmp_path / name)
    small = MADE / f"stage{stage}-fp32" / "checkpoint"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(small)],
        capture_output=True, text=True, timeout=50, check=False,
        # So that malloc keeps nothing that was given back; by itself it keeps up to 32 MiB.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    total, extra = (int(word) for word in done.stdout.split())
    assert total == 3 * count * numel * 4 == 213_909_504
    assert extra < 12 << 20  # a tensor, the next one before it is dropped, and the file's index
