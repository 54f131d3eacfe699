"""``shoal doctor``: the support of each key, problems, notes and the effective values."""

from __future__ import annotations

import argparse
import json
import pathlib
from types import SimpleNamespace

import pytest
import torch
import typer

from shoal.cli.app import doctor
from shoal.cli.machine import Finding
from shoal.config import add_config_arguments
from shoal.errors import UsageError
from tests.helpers.places import FIXTURES

RECIPES = FIXTURES / "config_recipes"


def run(capsys: pytest.CaptureFixture[str], *args: object, **options: object) -> tuple[int, str]:
    try:
        doctor(*args, **options)  # type: ignore[arg-type]
        code = 0
    except typer.Exit as stop:
        code = stop.exit_code
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_good_file_passes_and_shows_support_values_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, RECIPES / "zero2_config_accelerate.json", 2)
    assert code == 0
    assert "no effect: gradients always lie in one flat bucket for each unit" in out
    assert "a client has to replace it" in out
    assert "Nothing is wrong." in out
    assert [line.split() for line in out.splitlines() if line.strip().startswith("train_batch_size")] == [
        ["train_batch_size", '"auto"', "2", "is", "used"],
    ]


DEFAULT_OF_TRANSFORMERS = """
{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
 "gradient_clipping": "auto", "steps_per_print": 100, "wall_clock_breakdown": false,
 "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2}, "bf16": {"enabled": "auto"},
 "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
 "zero_optimization": {"stage": 3, "overlap_comm": true, "contiguous_gradients": true, "reduce_bucket_size": "auto",
  "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
  "stage3_gather_16bit_weights_on_model_save": true}}
"""


def test_what_a_file_of_23_keys_sets_takes_at_most_40_lines_and_the_rest_is_there_on_request(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(DEFAULT_OF_TRANSFORMERS)
    code, out = run(capsys, path)
    assert code == 0
    assert len(out.splitlines()) <= 40
    for key in ("steps_per_print", "optimizer.params.eps", "zero_optimization.stage3_prefetch_bucket_size"):
        assert len([line for line in out.splitlines() if line.split()[:1] == [key]]) == 1
    assert "Effective values" not in out
    code, out = run(capsys, path, all_=True)
    assert "zero_optimization.round_robin_gradients" in out
    assert len(out.splitlines()) > 400


def with_missing_part(folder: pathlib.Path) -> pathlib.Path:
    """The recipe for ZeRO-3 with offload, and a part that is not built."""
    path = folder / "ds.json"
    recipe = (RECIPES / "zero3_offload_config_accelerate.json").read_text()
    path.write_text(recipe.replace("{", '{"graph_harvesting": true,', 1))
    return path


def test_a_file_that_asks_for_a_missing_part_fails_and_still_shows_everything(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    code, out = run(capsys, with_missing_part(tmp_path))
    assert code == 1
    assert "not built yet: CUDA graphs" in out
    assert "1. graph_harvesting (line 1)" in out
    assert "--world-size computes them" in out


def test_a_wrong_file_lists_all_problems(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"fp16": {"enabled": 3},\n "zero_optimizaton": {}}')
    code, out = run(capsys, path)
    assert code == 1
    assert "2 problems" in out
    assert "fp16.enabled (line 1): 3 is not true or false." in out
    assert "zero_optimizaton (line 2): no such key. -> did you mean 'zero_optimization'?" in out


def test_what_is_printed_for_programs_is_json(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    code, out = run(capsys, with_missing_part(tmp_path), 4, json=True)
    said = json.loads(out)
    assert code == 1
    assert said["effective"]["train_batch_size"] == {"value": 4, "origin": "derived"}
    assert [problem["path"] for problem in said["problems"]] == ["graph_harvesting"]
    assert {"path": "zero_optimization.stage", "value": 3, "verdict": "supported", "reason": "", "asks": True} in said[
        "keys"
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_file_that_is_not_json_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, as_json: bool
) -> None:
    (tmp_path / "ds.json").write_text("{nonsense")
    code, out = run(capsys, tmp_path / "ds.json", json=as_json)
    assert code == 1
    assert "not JSON: expected ':' after the key 'nonsense'" in out
    assert "Traceback" not in out


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file '.*nowhere.json'"):
        doctor(tmp_path / "nowhere.json")


def test_without_a_file_the_machine_is_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out = run(capsys)
    assert code == 0
    said = dict(line.split("  ", 1) for line in out.splitlines() if "  " in line.strip())
    assert torch.__version__ in said["torch"]
    assert "Nothing is wrong." in out
    code, out = run(capsys, json=True)
    assert {"name": "127.0.0.1", "value": "accepts connections", "problem": ""} in json.loads(out)
    monkeypatch.setattr(
        "shoal.cli.machine._loopback", lambda: Finding("127.0.0.1", "no connection", "ranks meet there.")
    )
    code, out = run(capsys)
    assert code == 1
    assert "problem: 127.0.0.1: ranks meet there." in out


def test_gpus_are_named_as_their_driver_does_and_what_keeps_kernels_from_running_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [SimpleNamespace(name=f"NVIDIA H{each}00", total_memory=each << 35) for each in (1, 2)]
    for name, value in (("is_available", True), ("device_count", 2), ("current_accelerator", torch.device("cuda"))):
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    module = SimpleNamespace(get_device_properties=lambda index: gpus[index])
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr("shoal.cli.machine.num_accelerators", lambda: 2)
    monkeypatch.setattr("shoal.cli.machine.launch_obstacle", lambda: "no C compiler")
    _, out = run(capsys)
    said = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.strip()}
    assert said["cuda:0"] == "NVIDIA H100, 32 GiB" and said["cuda:1"] == "NVIDIA H200, 64 GiB"
    assert "no C compiler" in said["kernels"]


def test_the_json_schema_is_printed_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, None, schema=True)
    assert code == 0
    assert json.loads(out)["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_the_arguments_of_deepspeeds_scripts_are_read() -> None:
    parser = add_config_arguments(argparse.ArgumentParser())
    read = parser.parse_args(["--deepspeed", "--deepspeed_config", "a.json", "--deepscale"])
    assert vars(read) == {
        "deepspeed": True,
        "deepspeed_config": "a.json",
        "deepscale": True,
        "deepscale_config": None,
    }
