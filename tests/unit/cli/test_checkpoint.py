"""``shoal checkpoint list | verify | prune``, and a run that goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from shoal.checkpoint.native import ShoalSource, write_shoal
from shoal.checkpoint.portable import About, TensorInfo
from shoal.cli.app import app
from shoal.errors import CheckpointError


class Fixed:
    """A source of two small tensors."""

    def __init__(self, step: int, client_state: dict[str, object] | None = None) -> None:
        info = TensorInfo(torch.float32, (3, 5))
        self.about = About(
            parameters={"w": TensorInfo(torch.bfloat16, (3, 5))},
            group_of={"w": 0},
            groups=[{"lr": 0.5, "betas": (0.9, 0.95)}],
            scalars={"w": {"step": torch.tensor(float(step))}},
            optimizer="AdamW",
            counters={"global_steps": step},
            client_state=client_state or {},
        )
        self._tensors = {
            "model": {"w": info, "buffer": TensorInfo(torch.int64, ())},
            "optimizer/exp_avg": {"w": info},
        }

    def kinds(self) -> list[str]:
        return list(self._tensors)

    def tensors(self, kind: str) -> Mapping[str, TensorInfo]:
        return self._tensors[kind]

    def read(self, kind: str, name: str) -> torch.Tensor:
        if name == "buffer":
            return torch.tensor(7)
        return torch.arange(15.0).view(3, 5) + (100 if kind == "model" else 0)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *arguments])
    return result.exit_code, result.output


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_written_state_reads_back_to_the_bit(tmp_path: Path) -> None:
    write_shoal(Fixed(3, {"note": ("a", float("nan")), "t": torch.ones(2)}), tmp_path)
    source = ShoalSource(tmp_path)
    assert list(source.kinds()) == ["model", "optimizer/exp_avg"]
    assert torch.equal(source.read("model", "w"), torch.arange(15.0).view(3, 5) + 100)
    assert torch.equal(source.read("optimizer/exp_avg", "w"), torch.arange(15.0).view(3, 5))
    assert source.read("model", "buffer").item() == 7
    assert source.about.parameters["w"] == TensorInfo(torch.bfloat16, (3, 5))
    assert source.about.groups == [{"lr": 0.5, "betas": (0.9, 0.95)}]
    assert source.about.scalars["w"]["step"].item() == 3.0
    assert source.about.client_state["note"][0] == "a"
    assert source.about.client_state["note"][1] != source.about.client_state["note"][1]
    assert torch.equal(source.about.client_state["t"], torch.ones(2))


def test_reading_that_takes_long_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    write_shoal(Fixed(3), tmp_path)
    ShoalSource(tmp_path).read("model", "w")
    assert caplog.text == ""
    monkeypatch.setattr("shoal.checkpoint.reader._EVERY_SECONDS", 0.0)
    ShoalSource(tmp_path).read("model", "w")
    assert "reading parts of rank-00000.safetensors: 1 of 1" in caplog.text
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ShoalSource(tmp_path).read("model", "w")
    assert caplog.text == ""


def test_list_shows_the_newest_first_and_which_is_latest(tmp_path: Path) -> None:
    for step in (1, 2):
        write_shoal(Fixed(step), tmp_path)
    code, text = run("list", str(tmp_path))
    assert code == 0
    lines = [line for line in text.splitlines() if line.startswith("global_step")]
    assert [line.split()[0] for line in lines] == ["global_step2", "global_step1"]
    assert "latest" in lines[0]
    assert "latest" not in lines[1]


def test_the_folder_of_a_run_stands_for_its_folder_of_checkpoints(tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    write_shoal(Fixed(1), run_folder / "checkpoints")
    assert run("list", str(run_folder))[0] == 1  # not one of `shoal train`
    (run_folder / "job.json").write_text("{}")
    for command in (["list"], ["verify"], ["prune", "--keep", "1"]):
        assert run(*command, str(run_folder))[0] == 0
    assert "global_step1" in run("list", str(run_folder))[1]
    converted = CliRunner().invoke(app, ["convert", str(run_folder), str(tmp_path / "out.pt"), "--to", "state_dict"])
    assert converted.exit_code == 0, converted.output


def test_list_of_an_empty_folder_ends_with_1(tmp_path: Path) -> None:
    assert run("list", str(tmp_path))[0] == 1


def test_verify_names_the_file_and_the_parameter_that_are_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        write_shoal(Fixed(step), tmp_path)
    code, text = run("verify", str(tmp_path))
    assert (code, text.split("\n")[-3:-1]) == (0, ["global_step2: intact", "global_step1: intact"])
    file = tmp_path / "global_step2" / "rank-00000.safetensors"
    flip(file, file.stat().st_size - 3)
    code, text = run("verify", str(tmp_path))
    assert code == 1
    assert "global_step2: DAMAGED" in text
    assert "rank-00000.safetensors" in text
    assert "'w'[0:3, 0:5]" in text
    assert "global_step1: intact" in text
    assert run("verify", str(tmp_path), "--tag", "global_step1")[0] == 0


def test_prune_keeps_the_newest_and_each_nth(tmp_path: Path) -> None:
    for step in range(1, 7):
        write_shoal(Fixed(step), tmp_path)
    run("prune", str(tmp_path), "--keep", "2", "--keep-every", "3", "--dry-run")
    assert len(list(tmp_path.glob("global_step*"))) == 6
    code, _ = run("prune", str(tmp_path), "--keep", "2", "--keep-every", "3")
    assert code == 0
    assert sorted(path.name for path in tmp_path.glob("global_step*")) == [f"global_step{n}" for n in (3, 5, 6)]


def test_prune_does_not_count_a_damaged_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_shoal(Fixed(step), tmp_path)
    file = tmp_path / "global_step3" / "rank-00000.safetensors"
    flip(file, file.stat().st_size - 3)
    run("prune", str(tmp_path), "--keep", "1")
    assert sorted(path.name for path in tmp_path.glob("global_step*")) == ["global_step2", "global_step3"]


def test_a_missing_tag_names_those_that_are_there(tmp_path: Path) -> None:
    write_shoal(Fixed(4), tmp_path)
    with pytest.raises(CheckpointError, match="load one of: global_step4"):
        ShoalSource(tmp_path, "best")


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    common = ["train", "--model", "nano", "--out", out, "--sample-tokens", "0"]
    first = CliRunner().invoke(app, [*common, "--steps", "2"])
    assert first.exit_code == 0, first.output
    assert (tmp_path / "run/checkpoints/global_step2/manifest.json").exists()
    second = CliRunner().invoke(app, [*common, "--steps", "4", "--resume", out, "--stage", "1"])
    assert second.exit_code == 0, second.output
    assert "global_step2, step 2" in second.output.replace("\n", "")
    assert (tmp_path / "run/checkpoints/latest").read_text() == "global_step4"
