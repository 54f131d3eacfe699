"""``ds_to_universal`` under DeepSpeed's name: on Shoal's checkpoints, and on DeepSpeed's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal.compat.checkpoints.universal
from shoal.checkpoint import directory
from shoal.checkpoint.native import ShoalSource
from shoal.checkpoint.storage import open_storage
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat.deepspeed import initialize
from shoal.compat.deepspeed.checkpoint import (
    UNIVERSAL_CHECKPOINT_INFO,
    DeepSpeedCheckpoint,
    SubparamShape,
    constants,
    enable_universal_checkpoint,
)
from shoal.compat.deepspeed.checkpoint.ds_to_universal import main
from shoal.errors import CheckpointError, NotBuiltError
from tests.fixtures.deepspeed.model import build_model, groups_of, tokens_of
from tests.helpers.deepspeed_made import everything, made, universal
from tests.ranks.compat.checkpoints.test_from_deepspeed import MADE


def arguments(source: Path, target: Path, **more: Any) -> SimpleNamespace:
    """As DeepSpeed's own tests call it."""
    return SimpleNamespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
        **more,
    )


def train(folder: Path, stage: int, *, is_universal: bool, **wishes: Any) -> dict[str, Any]:
    """From a universal checkpoint, or from the beginning, and saved: 3 steps of all ranks' batches on these."""
    rank, size = current_world().rank, current_world().size
    model = build_model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 12 // size,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "units": {"classes": ["Block"]},
        "checkpoint": {"load_universal": is_universal},
    }
    optimizer = torch.optim.AdamW(groups_of(model), betas=(0.9, 0.95))
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    if is_universal:
        engine.load_checkpoint(str(folder), **wishes)
    losses = []
    first = engine.global_steps
    for step in range(first, first + 3):
        loss = engine(torch.cat([tokens_of(step, each) for each in range(rank, 4, size)]))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if not is_universal:
        client_state = {UNIVERSAL_CHECKPOINT_INFO: {}, "iteration": 3}
        engine.save_checkpoint(str(folder), tag="test_tag", client_state=client_state)
        for step in range(3, 6):
            loss = engine(torch.cat([tokens_of(step, each) for each in range(rank, 4, size)]))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    found = {"losses": losses, "steps": first}
    engine.destroy()
    return found


@pytest.mark.parametrize(("size", "stage"), [(2, 1), (2, 3), (4, 1), (4, 3), (1, 2)])
@pytest.mark.parametrize("saved", [1, 3])
def test_a_run_goes_on_from_the_universal_checkpoint_on_any_ranks(
    saved: int, size: int, stage: int, tmp_path: Path
) -> None:
    expected = run_ranks(2, lambda: train(tmp_path, saved, is_universal=False))
    main(arguments(tmp_path / "test_tag", tmp_path / "test_tag_universal"))
    assert (tmp_path / "latest_universal").read_text() == "test_tag_universal"
    assert (tmp_path / "latest").read_text() == "test_tag"
    found = run_ranks(size, lambda: train(tmp_path, stage, is_universal=True))
    assert {each["steps"] for each in found} == {3}
    for step in range(3):
        mean = sum(each["losses"][step] for each in found) / size
        assert mean == pytest.approx(sum(each["losses"][3 + step] for each in expected) / 2, abs=1e-5)


def test_by_its_tag_it_loads_too_and_without_the_optimizer(tmp_path: Path) -> None:
    run_ranks(2, lambda: train(tmp_path, 1, is_universal=False))
    main(arguments(tmp_path / "test_tag", tmp_path / "test_tag_universal"))
    wishes = {"tag": "test_tag_universal", "load_optimizer_states": False}
    assert run_ranks(2, lambda: train(tmp_path, 3, is_universal=True, **wishes))[0]["steps"] == 3


# What lies there


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, lambda: train(folder, 1, is_universal=False))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A folder with a checkpoint ``test_tag``, to change."""
    main(arguments(saved / "test_tag", tmp_path / "test_tag"))
    (tmp_path / "latest_universal").unlink()
    return tmp_path


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


def test_files_have_a_second_name_and_the_manifest_is_another(folder: Path) -> None:
    main(arguments(folder / "test_tag", folder / "out"))
    before, after = inodes(folder / "test_tag"), inodes(folder / "out")
    assert before.keys() == after.keys()
    assert "rank-00001.safetensors" in after and "mp_rank_00_model_states.pt" in after
    assert {name for name in before if before[name] != after[name]} == {"manifest.json"}
    found = {entry.folder: entry.manifest for entry in directory.list_checkpoints(open_storage(folder))}
    assert found["out"] is not None and (found["out"].tag, found["out"].is_for_resuming) == ("out", False)


def test_it_stays_whole_when_the_other_is_removed(folder: Path) -> None:
    main(arguments(folder / "test_tag", folder / "out"))
    expected = everything(ShoalSource(folder, "test_tag"))
    open_storage(folder).remove("test_tag")
    assert directory.verify(open_storage(folder), "out") == []
    found = everything(ShoalSource(folder, "out"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_without_links_files_are_copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(shoal.compat.checkpoints.universal.os, "link", refuse)
    main(arguments(folder / "test_tag", folder / "out"))
    before, after = inodes(folder / "test_tag"), inodes(folder / "out")
    assert not set(before.values()) & set(after.values())
    assert directory.verify(open_storage(folder), "out") == []


def test_a_second_time_replaces_the_first(folder: Path) -> None:
    for _ in range(2):
        main(arguments(folder / "test_tag", folder / "elsewhere" / "out"))
    assert sorted(path.name for path in (folder / "elsewhere").iterdir()) == ["latest_universal", "out"]
    assert directory.verify(open_storage(folder / "elsewhere"), "out") == []


def test_an_output_that_is_no_checkpoint_is_left_alone(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="'out' already exists and is not a checkpoint"):
        main(arguments(folder / "test_tag", folder / "out"))
    assert [path.name for path in (folder / "out").iterdir()] == ["notes.txt"]
    assert not (folder / "latest_universal").exists()


def test_the_input_itself_is_no_output(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is both the input and the output"):
        main(arguments(folder / "test_tag", folder / "test_tag"))


def test_a_damaged_input_leaves_nothing_behind(folder: Path) -> None:
    (folder / "test_tag" / "rank-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is missing"):
        main(arguments(folder / "test_tag", folder / "out"))
    assert sorted(path.name for path in folder.iterdir()) == ["test_tag"]


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"weights\.pt is state_dict, not a checkpoint"):
        main(arguments(tmp_path / "weights.pt", tmp_path / "out"))


# DeepSpeed's


@pytest.mark.parametrize("kind", ["plain", "universal"])
def test_a_folder_of_deepspeeds_is_converted(kind: str, tmp_path: Path) -> None:
    source = universal("stage3-fp32", tmp_path / "theirs") if kind == "universal" else None
    source = source or MADE / "stage3-fp32" / "checkpoint" / "global_step3"
    main(arguments(source, tmp_path / "global_step3_universal"))
    assert (tmp_path / "latest_universal").read_text() == "global_step3_universal"
    assert not (tmp_path / "latest").exists()
    found, expected = everything(ShoalSource(tmp_path, "global_step3_universal")), everything(made("stage3-fp32"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert run_ranks(2, lambda: train(tmp_path, 1, is_universal=True))[0]["steps"] == 3


# The command


def test_the_command_line(folder: Path) -> None:
    command = [sys.executable, "-m", "shoal.compat.deepspeed", "-m", "deepspeed.checkpoint.ds_to_universal"]
    places = ["--input_folder", str(folder / "test_tag"), "--output_folder", str(folder / "test_tag_universal")]
    done = subprocess.run(
        [*command, *places, "--num_extract_workers", "2", "--keep_temp_folder"],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--keep_temp_folder has no effect" in done.stderr
    assert "test_tag loads in every layout as is." in done.stderr
    assert (folder / "latest_universal").read_text() == "test_tag_universal"


# Names around it


def test_a_checkpoints_degrees_and_files(folder: Path) -> None:
    ours = DeepSpeedCheckpoint(folder / "test_tag")
    theirs = DeepSpeedCheckpoint(str(MADE / "stage2-fp32" / "checkpoint" / "global_step3"))
    for found in (ours, theirs):
        assert (found.tp_degree, found.pp_degree, found.dp_degree, found.original_world_size) == (1, 1, 2, 2)
        assert [os.path.basename(path) for path in found.mp_rank_files] == ["mp_rank_00_model_states.pt"]
        assert found.layer_files == [] and not found.is_change_dp_degree()
    assert (ours.get_iteration(), theirs.get_iteration()) == (3, 0)
    assert ours.get_checkpoint_info(UNIVERSAL_CHECKPOINT_INFO) == {}
    assert theirs.get_checkpoint_info("epoch") == 2 and theirs.get_args() is None
    assert len(theirs.zero_files) == 2


@pytest.mark.parametrize(
    ("dimensions", "layers", "degrees"),
    [
        ({"pp_degree": 2, "tp_degree": 1}, [], (1, 2)),
        ({"pp_degree": 1, "tp_degree": 2}, [], (2, 1)),
        (None, [], (2, 1)),
        (None, ["layer_01-model_00", "layer_12-model_00", "layer_02-model_00"], (1, 2)),
        (None, ["layer_01-model_00", "layer_01-model_01"], (2, 1)),
    ],
)
def test_degrees_of_what_is_not_read(dimensions: Any, layers: list[str], degrees: Any, tmp_path: Path) -> None:
    for part in range(2):
        state = {"checkpoint_parallel_dimensions": dimensions, "args": ["--x"], "iteration": 7}
        torch.save(state, tmp_path / f"mp_rank_0{part}_model_states.pt")
        for rank in range(3):
            (tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_0{part}_optim_states.pt").touch()
    for name in layers:
        (tmp_path / f"{name}-model_states.pt").touch()
    found = DeepSpeedCheckpoint(tmp_path)
    assert (found.tp_degree, found.pp_degree) == degrees
    assert (found.dp_degree, found.world_size) == (3, 6)
    assert found.layer_keys == list(dict.fromkeys(name[:8] for name in sorted(layers)))
    assert (found.get_iteration(), found.get_args()) == (7, ["--x"])


def test_what_of_it_is_not_there_is_said_by_name(folder: Path, tmp_path: Path) -> None:
    found = DeepSpeedCheckpoint(folder / "test_tag", dp_degree=2)
    with pytest.raises(NotBuiltError, match=r"DeepSpeedCheckpoint\.get_zero_checkpoint_state"):
        found.get_zero_checkpoint_state(0, 0, 0)
    with pytest.raises(NotBuiltError, match="a degree of 4 for 2"):
        DeepSpeedCheckpoint(folder / "test_tag", dp_degree=4)
    with pytest.raises(AssertionError, match="has no file mp_rank_"):
        DeepSpeedCheckpoint(tmp_path / "nothing")
    with pytest.raises(NotBuiltError, match="enable_universal_checkpoint"):
        enable_universal_checkpoint([])


def test_keys_are_those_of_deepspeeds_files() -> None:
    state = torch.load(MADE / "stage2-fp32/checkpoint/global_step3/mp_rank_00_model_states.pt", weights_only=True)
    of_model = ("PARAM_SHAPES", "BUFFER_NAMES", "FROZEN_PARAM_SHAPES", "FROZEN_PARAM_FRAGMENTS", "DS_VERSION")
    assert {vars(constants)[name] for name in of_model} <= set(state)
    shape = SubparamShape(patterns=["qkv"], shape=((4, 2, 2), 8), partition_dim=0)
    assert SubparamShape(**vars(shape)) == shape
