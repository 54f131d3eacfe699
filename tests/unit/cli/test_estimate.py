"""``shoal estimate``: which models it takes, what it prints, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shoal.cli.app import app
from shoal.errors import UsageError

GIB = 2**30


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["estimate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def rows(*arguments: str) -> list[dict[str, object]]:
    return json.loads(run(*arguments, "--json").output)  # type: ignore[no-any-return]


def test_a_model_of_6_7_billion_parameters_needs_16_bytes_a_parameter_divided_as_the_stage_says() -> None:
    numel = 6_648_836_096  # 32 blocks of 4,096, tied embedding
    found = {row["stage"]: row["bytes"] for row in rows("6.7b", "--ranks", "8") if row["offload_optimizer"] == "none"}
    states = {
        stage: sum(value for kind, value in nbytes.items() if not kind.startswith(("gathered", "buffers")))
        for stage, nbytes in found.items()  # type: ignore[attr-defined]
    }
    formula = {0: 16.0, 1: 4 + 12 / 8, 2: 2 + 14 / 8, 3: 16 / 8}
    for stage, each in formula.items():
        assert states[stage] == pytest.approx(each * numel, rel=0.001)


def test_it_says_which_rows_fit_and_names_the_first() -> None:
    output = run("6.7b", "--ranks", "8", "--memory", "40GB", "--sequence", "2048").output
    fits = [line.split()[0] + line.split()[-1] for line in output.splitlines() if line.rstrip().endswith(("yes", "no"))]
    assert fits[0] == "0no"
    assert fits[-1] == "3yes"
    assert '"zero_optimization": {"stage": ' in " ".join(output.split())
    assert "1 x 2048 tokens" in output


def test_nothing_fits_says_what_else_helps() -> None:
    assert "Nothing fits in 1GB: use more ranks" in run("6.7b", "--ranks", "2", "--memory", "1GB").output


def test_a_function_of_a_script_gives_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_model.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(400)])"
    )
    monkeypatch.chdir(tmp_path)
    (only,) = rows("my_model:make", "--stage", "1", "--ranks", "4", "--precision", "fp32")[:1]
    assert only["bytes"]["parameter (device)"] == pytest.approx(4 * 400 * 4096 * 4097, rel=0.001)  # type: ignore[index]
    assert only["activations"] is None
    output = run("my_model:make", "--stage", "1").output
    assert "Activations are not counted" in output


def test_the_file_gives_precision_accumulation_and_batch(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
                "bf16": {"enabled": True},
                "optimizer": {"type": "Lion", "params": {"lr": "auto"}},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            }
        )
    )
    without, with_offload = rows("tiny", "--config", str(path), "--stage", "2", "--ranks", "2")
    held: dict[str, int] = without["bytes"]  # type: ignore[assignment]
    assert held["gradient (device)"] == held["parameter (device)"]  # summed in fp32, and divided by two
    assert held["optimizer state (device)"] == held["master (device)"]  # Lion has one
    assert with_offload["offload_optimizer"] == "cpu"
    assert "4 x 128 tokens" in run("tiny", "--config", str(path)).output


def test_the_disk_is_a_row_where_it_is_asked_for() -> None:
    assert [row["offload_param"] for row in rows("tiny", "--stage", "3", "--disk")][-1] == "nvme"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "no folder or file"),
        (["json:no_such"], "cannot be called"),
        (["os:getcwd"], "returned a str"),
        (["tiny", "--memory", "much"], "is not a size"),
        (["tiny", "--memory", "80"], "'80' is not a size with a unit"),
        (["tiny", "--precision", "int4"], "expected bf16"),
    ],
)
def test_what_it_cannot_use_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(*arguments)
