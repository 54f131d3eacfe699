"""``load_checkpoint`` of what DeepSpeed itself saved, its universal format too: no conversion in between."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.checkpoint.native import write_shoal
from shoal.checkpoint.storage import open_storage
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource
from shoal.compat.deepspeed import initialize
from shoal.compat.deepspeed.utils import safe_get_full_optimizer_state
from shoal.engine.engine import Engine
from shoal.errors import CheckpointError
from tests.fixtures.deepspeed.make import CASES
from tests.fixtures.deepspeed.model import build_model, groups_of
from tests.helpers.deepspeed_made import universal
from tests.ranks.compat.checkpoints.test_from_deepspeed import MADE, go_on

UNIVERSAL: dict[str, Any] = {"checkpoint": {"load_universal": True}}


def going_on(case: str, folder: Path, stage: int, size: int = 2, **more: Any) -> float:
    """How far the losses after loading are from DeepSpeed's, which went on itself."""
    sections = {name: CASES[case][name] for name in ("optimizer", "scheduler") if name in CASES[case]}
    run = json.loads((MADE / case / "run.json").read_text())["losses"][3:]
    found = run_ranks(size, go_on, folder, case.split("-")[1], stage, 3, {**sections, **more})
    assert found[0]["loaded"] == (3, 18, 0, 128.0 if "fp16" in case else 1.0)
    assert found[0]["client"].keys() == {"epoch", "best"}
    assert found[0]["seen"] == 6
    if size == 1:
        run = [[sum(losses) / 2] for losses in run]
    return max(abs(found[r]["losses"][step] - run[step][r]) for r in range(size) for step in range(3))


def engine_of(begin: Any = shoal.initialize, stage: int = 1, **more: Any) -> Engine:
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage}, **more}
    model = build_model()
    optimizer = torch.optim.AdamW(groups_of(model), betas=(0.9, 0.95))
    engine: Engine = begin(model=model, optimizer=optimizer, config=config)[0]
    return engine


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("case", ["stage0-fp32", "stage1-fp32", "stage2-fp32", "stage3-fp32"])
def test_a_run_goes_on_from_deepspeeds_own_folder_with_the_same_losses(case: str, stage: int) -> None:
    assert going_on(case, MADE / case / "checkpoint", stage) < 1e-6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", ["stage1-fp32", "stage3-fp32"])
def test_a_run_goes_on_from_a_universal_folder_with_the_same_losses(case: str, stage: int, tmp_path: Path) -> None:
    universal(case, tmp_path)
    assert going_on(case, tmp_path, stage, **UNIVERSAL) < 1e-6


@pytest.mark.parametrize("case", ["stage2-bf16-schedule", "stage2-fp16", "stage3-bf16-sub-groups"])
def test_in_16_bits_the_losses_from_a_universal_folder_differ_by_rounding(case: str, tmp_path: Path) -> None:
    universal(case, tmp_path)
    assert going_on(case, tmp_path, 3, **UNIVERSAL) < 4e-3


@pytest.mark.parametrize("case", ["stage1-fp32", "stage2-bf16-schedule"])
def test_deepspeed_that_goes_on_from_its_universal_folder_has_our_losses(case: str, tmp_path: Path) -> None:
    """At stages 1 and 2. At stage 3 DeepSpeed 0.19.8 gives every group the first one's settings, and counts a step for
    each group; Shoal goes on as the run would have."""
    universal(case, tmp_path)
    sections = {name: CASES[case][name] for name in ("optimizer", "scheduler") if name in CASES[case]}
    theirs = json.loads((MADE / case / "universal.json").read_text())["losses"]
    ours = run_ranks(2, go_on, tmp_path, case.split("-")[1], 2, 3, {**sections, **UNIVERSAL})
    assert [[each["losses"][step] for each in ours] for step in range(3)] == pytest.approx(
        [pytest.approx(losses, abs=1e-6) for losses in theirs]
    )


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 3])
def test_state_on_host_or_disk_is_loaded_too(stage: int, device: str, tmp_path: Path) -> None:
    universal("stage3-fp32", tmp_path / "saved")
    place = {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    section = {"stage": stage, "stage3_param_persistence_threshold": 0, "offload_optimizer": place}
    if stage == 3:
        section["offload_param"] = place
    assert going_on("stage3-fp32", tmp_path / "saved", stage, zero_optimization=section) < 1e-6


def test_one_rank_goes_on_with_what_two_saved(tmp_path: Path) -> None:
    universal("stage3-fp32", tmp_path)
    assert going_on("stage3-fp32", tmp_path, 3, size=1) < 1e-6


# Which one


@pytest.mark.usefixtures("deepspeed_classes")
def test_what_shoal_saved_since_is_newer(tmp_path: Path) -> None:
    shutil.copytree(MADE / "stage2-fp32" / "checkpoint", tmp_path, dirs_exist_ok=True)

    def job() -> list[int]:
        engine = engine_of()
        path, client_state = engine.load_checkpoint(tmp_path)
        assert path == f"{tmp_path}/global_step3" and client_state["epoch"] == 2
        assert engine.loaded_checkpoint_dp_world_size == 2
        engine.global_steps = 4
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, tag="global_step3")
        found = [engine.global_steps]
        engine.load_checkpoint(tmp_path)
        engine.destroy()
        return [*found, engine.global_steps]

    assert run_ranks(2, job) == [[3, 4], [3, 4]]


def test_what_deepspeed_saved_since_is_loaded_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of()
    engine.save_checkpoint(tmp_path, tag="ours")
    shutil.copytree(MADE / "stage2-fp32" / "checkpoint", tmp_path, dirs_exist_ok=True)
    with caplog.at_level(logging.WARNING, "shoal"):
        engine.load_checkpoint(tmp_path)
    engine.destroy()
    assert engine.global_steps == 3
    assert "latest names 'global_step3', which DeepSpeed saved: it is loaded. Pass tag='ours'" in caplog.text


def test_load_universal_takes_what_latest_universal_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    universal("stage2-fp16", tmp_path)
    first = engine_of()
    first.save_checkpoint(tmp_path, tag="newer")
    first.destroy()
    for section, steps in (({}, 0), (UNIVERSAL, 3)):
        caplog.clear()
        engine = engine_of(**section)
        with caplog.at_level(logging.WARNING, "shoal"):
            engine.load_checkpoint(tmp_path)
        assert engine.global_steps == steps
        engine.destroy()
    assert "latest_universal names 'global_step3_universal', which is loaded instead of 'newer'" in caplog.text


def test_load_universal_without_such_a_file_loads_the_newest(tmp_path: Path) -> None:
    engine = engine_of(**UNIVERSAL)
    engine.global_steps = 5
    engine.save_checkpoint(tmp_path)
    engine.global_steps = 0
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 5
    engine.destroy()


@pytest.mark.parametrize("named", ["../elsewhere", "gone"])
def test_a_latest_universal_that_leads_nowhere_is_an_error(named: str, tmp_path: Path) -> None:
    engine = engine_of(**UNIVERSAL)
    engine.save_checkpoint(tmp_path / "run")
    engine.save_checkpoint(tmp_path, tag="elsewhere")
    (tmp_path / "run" / "latest_universal").write_text(named)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(tmp_path / "run")
    assert caught.value.code == ("checkpoint-unsafe" if named[0] == "." else "checkpoint-missing")
    engine.destroy()


# Saving over it


def test_a_save_under_its_tag_replaces_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(MADE / "stage2-fp32" / "checkpoint", tmp_path, dirs_exist_ok=True)
    engine = engine_of()
    engine.load_checkpoint(tmp_path)
    with caplog.at_level(logging.WARNING, "shoal"):
        engine.save_checkpoint(tmp_path, tag="global_step3")
    engine.load_checkpoint(tmp_path)
    engine.destroy()
    assert "global_step3 is a checkpoint that DeepSpeed saved; it is replaced." in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["global_step3"]
    assert (tmp_path / "global_step3" / "manifest.json").exists()


def test_other_files_beside_it_keep_it_from_being_replaced(tmp_path: Path) -> None:
    shutil.copytree(MADE / "stage2-fp32" / "checkpoint", tmp_path, dirs_exist_ok=True)
    (tmp_path / "global_step3" / "notes.txt").write_text("mine")
    engine = engine_of()
    with pytest.raises(CheckpointError, match="'global_step3' already exists and is not a checkpoint"):
        engine.save_checkpoint(tmp_path, tag="global_step3")
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 3
    engine.destroy()


@pytest.mark.parametrize("phase", ["rename", "latest", "gc"])
def test_a_save_that_dies_while_it_replaces_it_loses_nothing(phase: str, tmp_path: Path) -> None:
    folder = universal("stage1-fp32", tmp_path)
    storage = open_storage(tmp_path)
    aside = f"{folder.name}.old-0123456789ab"
    if phase == "rename":  # between the two renames
        storage.rename(folder.name, aside)
    else:
        storage.rename(folder.name, aside)
        write_shoal(DeepSpeedSource(tmp_path, aside), tmp_path, folder.name)
        if phase == "latest":
            (tmp_path / "latest").unlink()
    engine = engine_of(**UNIVERSAL)
    path, _ = engine.load_checkpoint(tmp_path)
    assert path == f"{tmp_path}/{aside if phase == 'rename' else folder.name}"
    assert engine.global_steps == 3
    engine.save_checkpoint(tmp_path, tag="next")
    left = {entry.name for entry in tmp_path.iterdir() if entry.is_dir()}
    assert left == ({aside, "next"} if phase == "rename" else {folder.name, "next"})
    engine.destroy()


# Parts of it


@pytest.mark.parametrize("begin", [shoal.initialize, initialize], ids=["shoal", "deepspeed"])
def test_weights_alone(begin: Any, tmp_path: Path) -> None:
    universal("stage3-fp32", tmp_path)

    def job() -> None:
        engine = engine_of(begin, stage=3)
        engine.load_checkpoint(tmp_path, load_module_only=True)
        assert engine.global_steps == 0
        assert engine.optimizer.param_groups[1]["lr"] == 0.02
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert engine.global_steps == 3
        values = []
        engine.load_checkpoint(tmp_path, custom_load_fn=lambda src, dst: values.append(src["embed.weight"].sum()))
        weight = engine.module_state_dict()["embed.weight"]
        assert values[0] == weight.sum()
        engine.destroy()

    run_ranks(2, job)


def test_generators_go_on_as_they_are(tmp_path: Path) -> None:
    """DeepSpeed saves none."""
    engine = engine_of()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    engine.load_checkpoint(MADE / "stage2-fp32" / "checkpoint")
    assert torch.equal(torch.rand(4), expected)
    engine.destroy()


def test_at_stage_0_names_are_those_of_the_engines_groups(tmp_path: Path) -> None:
    """Without names two parameters of one shape could be either of two."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    values = [torch.full((4, 4), 1.0), torch.ones(4), torch.full((4, 4), 3.0), torch.full((4,), 4.0)]
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    order = [2, 0, 3, 1]
    state = {
        index: {"step": 2.0, "exp_avg": values[at] + 0.5, "exp_avg_sq": values[at]} for index, at in enumerate(order)
    }
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1, 2, 3], "decoupled_weight_decay": True}]}
    (tmp_path / "old").mkdir()
    torch.save(
        {
            "module": dict(zip(names, values, strict=True)),
            "optimizer": optimizer,
            "global_steps": 2,
            "dp_world_size": 1,
        },
        tmp_path / "old" / "mp_rank_00_model_states.pt",
    )
    (tmp_path / "latest").write_text("old")
    parameters = list(model.parameters())
    given = torch.optim.AdamW([parameters[at] for at in order])
    engine = shoal.initialize(model=model, optimizer=given, config={"train_micro_batch_size_per_gpu": 1})[0]
    engine.load_checkpoint(tmp_path)
    found = [safe_get_full_optimizer_state(parameter, "exp_avg") for parameter in parameters]
    assert [float(value.mean()) for value in found if value is not None] == [1.5, 1.5, 3.5, 4.5]
    engine.destroy()


# What is wrong with it


@pytest.mark.parametrize(("key", "rank"), [("fp32", 0), ("exp_avg", 1)])
def test_a_damaged_file_is_found_by_the_rank_that_reads_it_and_raised_on_all(
    key: str, rank: int, tmp_path: Path
) -> None:
    path = universal("stage1-fp32", tmp_path) / "zero" / "embed.weight" / f"{key}.pt"
    data = bytearray(path.read_bytes())
    at = data.index(torch.load(path, weights_only=True)["param"].detach().numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)

    def job() -> tuple[CheckpointError, bool]:
        engine = engine_of()
        before = engine.module_state_dict()
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(tmp_path)
        after = engine.module_state_dict()
        engine.destroy()
        return caught.value, all(torch.equal(before[name], after[name]) for name in before)

    for error, is_same in run_ranks(2, job):
        assert is_same and f"{key}.pt is damaged: Bad CRC-32" in error.what
        assert error.where == f"{path}; found by rank {rank}"


def test_another_model_is_listed_name_by_name(tmp_path: Path) -> None:
    universal("stage3-fp32", tmp_path)

    def job() -> str:
        engine = shoal.initialize(model=torch.nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1})[0]
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(tmp_path)
        engine.destroy()
        assert caught.value.code == "checkpoint-mismatch"
        assert current_world().size == 2
        return str(caught.value)

    assert "the checkpoint does not have 2: weight, bias" in run_ranks(2, job)[1]


def test_what_is_not_read_yet_is_said_by_name_on_every_rank(tmp_path: Path) -> None:
    shutil.copytree(MADE / "stage1-fp32" / "checkpoint", tmp_path, dirs_exist_ok=True)
    (tmp_path / "global_step3" / "layer_00-seq_00-model_states.pt").touch()

    def job() -> None:
        engine = engine_of()
        with pytest.raises(CheckpointError, match=r"with pipeline parallelism over .* cannot be read yet") as caught:
            engine.load_checkpoint(tmp_path)
        assert caught.value.code == "not-built"
        engine.destroy()

    run_ranks(2, job)
