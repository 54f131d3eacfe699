"""Weights that lie beside a checkpoint: the checkpoint is read, and the shell says what was read and what was not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.checkpoint.formats import detect, open_source
from shoal.checkpoint.formats.dcp_writing import write_dcp
from shoal.checkpoint.formats.huggingface import write_huggingface
from shoal.checkpoint.formats.plain import write_plain
from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.native import ShoalSource, write_shoal
from shoal.checkpoint.portable import Source
from shoal.errors import CheckpointError
from tests.helpers.deepspeed_made import MADE
from tests.helpers.formats_source import are_equal, everything, trained
from tests.unit.checkpoint.test_convert import shell

DEEPSPEED = MADE / "stage2-bf16" / "checkpoint"


def make_deepspeed(folder: Path) -> None:
    shutil.copytree(DEEPSPEED, folder)


def make_shoal(folder: Path) -> None:
    write_shoal(trained(), folder, "mine")


def add_safetensors(folder: Path, source: Source) -> None:
    write_huggingface(source, folder.parent / "hf", dtype=torch.bfloat16)
    shutil.move(folder.parent / "hf" / "model.safetensors", folder)


def add_shards(folder: Path, source: Source) -> None:
    write_huggingface(source, folder.parent / "hf", dtype=torch.bfloat16, max_file_nbytes=60)
    for file in (folder.parent / "hf").iterdir():
        shutil.move(file, folder)


def add_bin(folder: Path, source: Source) -> None:
    write_plain(source, folder / "pytorch_model.bin", torch.bfloat16)


CHECKPOINTS = {"shoal": make_shoal, "deepspeed": make_deepspeed, "dcp": lambda folder: write_dcp(trained(), folder)}
BESIDE = {"model.safetensors": add_safetensors, "shards": add_shards, "pytorch_model.bin": add_bin}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("format", CHECKPOINTS)
def test_the_checkpoint_is_read_and_not_the_weights_beside_it(tmp_path: Path, format: str, beside: str) -> None:
    folder = tmp_path / "in"
    CHECKPOINTS[format](folder)
    alone = open_source(folder)
    held = everything(alone)
    BESIDE[beside](folder, alone)
    assert detect(folder) == format
    found = open_source(folder)
    assert all(are_equal(everything(found)[kind], held[kind]) for kind in held)
    done = shell(folder, tmp_path / "out", "--to", "shoal")
    assert done.exit_code == 0, done.output
    converted = ShoalSource(tmp_path / "out")
    assert set(converted.kinds()) == set(alone.kinds()) > {MODEL}
    assert converted.about.counters == alone.about.counters
    assert f"reads {format}: {alone.about.path}" in done.stderr
    assert "with optimizer state (exp_avg, exp_avg_sq)" in done.stderr
    shown = "model-00001-of-" if beside == "shards" else beside
    assert f"not read: {shown}" in done.stderr


@pytest.mark.parametrize("format", ["shoal", "deepspeed"])
def test_the_same_where_a_tag_or_its_folder_is_named(tmp_path: Path, format: str) -> None:
    CHECKPOINTS[format](tmp_path / "in")
    tag = (tmp_path / "in" / "latest").read_text()
    add_safetensors(tmp_path / "in", trained())
    assert detect(tmp_path / "in", tag) == format
    assert open_source(tmp_path / "in", tag).kinds() == open_source(tmp_path / "in").kinds()
    assert detect(tmp_path / "in" / tag) == format
    done = shell(tmp_path / "in", tmp_path / "out", "--to", "fp32", "--tag", tag)
    assert done.exit_code == 0, done.output
    weights = everything(open_source(tmp_path / "in", tag))[MODEL]
    written = torch.load(tmp_path / "out", weights_only=True)
    assert all(torch.equal(written[name], value) for name, value in weights.items())


def test_the_step_is_named_and_what_has_no_place_in_the_target(tmp_path: Path) -> None:
    make_deepspeed(tmp_path / "in")
    done = shell(tmp_path / "in", tmp_path / "out", "--to", "dcp")
    assert done.exit_code == 0, done.output
    assert f"reads deepspeed: {tmp_path}/in/global_step3, step 3, saved by 2 ranks, with optimizer state" in done.stderr
    assert "dcp has no place for counters (step), client state; left" in done.stderr
    assert "not read" not in done.stderr


def test_a_folder_of_weights_says_that_no_optimizer_is_in_it(tmp_path: Path) -> None:
    write_huggingface(trained(), tmp_path / "in")
    add_bin(tmp_path / "in", trained())
    assert detect(tmp_path / "in") == "huggingface"
    done = shell(tmp_path / "in", tmp_path / "out", "--to", "shoal")
    assert f"reads huggingface: {tmp_path}/in, without optimizer state" in done.stderr
    assert "not read: pytorch_model.bin" in done.stderr


def test_weights_are_read_where_they_are_asked_for(tmp_path: Path) -> None:
    make_deepspeed(tmp_path / "in")
    add_safetensors(tmp_path / "in", trained())
    done = shell(tmp_path / "in", tmp_path / "out", "--to", "fp32", "--from", "huggingface")
    assert done.exit_code == 0, done.output
    assert "reads huggingface" in done.stderr
    assert "latest names" not in done.stderr
    assert "layer.weight" in torch.load(tmp_path / "out", weights_only=True)


def test_weights_are_read_where_latest_names_a_checkpoint_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "latest").write_text("global_step500")
    add_safetensors(tmp_path / "in", trained())
    assert detect(tmp_path / "in") == "huggingface"
    done = shell(tmp_path / "in", tmp_path / "out", "--to", "fp32")
    assert done.exit_code == 0, done.output
    assert "'global_step500', which does not exist" in done.stderr


def test_a_damaged_checkpoint_is_an_error_and_no_reason_to_read_the_weights_beside(tmp_path: Path) -> None:
    make_shoal(tmp_path / "in")
    (tmp_path / "in" / "mine" / "manifest.json").unlink()
    add_safetensors(tmp_path / "in", trained())
    with pytest.raises(CheckpointError, match="no complete Shoal checkpoint"):
        open_source(tmp_path / "in")


@pytest.mark.parametrize("newer", ["shoal", "deepspeed"])
def test_of_both_kinds_in_one_folder_the_one_that_latest_names_is_read(tmp_path: Path, newer: str) -> None:
    write: dict[str, Callable[[], object]] = {
        "shoal": lambda: write_shoal(trained(), tmp_path, "a"),
        "deepspeed": lambda: shutil.copytree(DEEPSPEED, tmp_path, dirs_exist_ok=True),
    }
    for name in sorted(write, key=newer.__eq__):
        write[name]()
    assert detect(tmp_path) == newer
    assert detect(tmp_path, "a") == "shoal"
    assert detect(tmp_path, "global_step3") == "deepspeed"
    assert "layer.weight" in open_source(tmp_path, "a").tensors(MODEL)
    assert "embed.weight" in open_source(tmp_path, "global_step3").tensors(MODEL)
