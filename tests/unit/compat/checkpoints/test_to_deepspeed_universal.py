"""Universal checkpoints that are written for DeepSpeed, beside those that its ds_to_universal wrote.

tests/clients/test_deepspeed_checkpoints.py has tensor- and pipeline-parallel runs of DeepSpeed resume from them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from shoal.checkpoint.native import ShoalSource, write_shoal
from shoal.cli.app import app
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource
from shoal.compat.checkpoints.files import open_value
from shoal.compat.checkpoints.universal import write_deepspeed_universal
from shoal.errors import CheckpointError
from tests.helpers.deepspeed_made import MADE, MATRICES, VECTORS, everything, made, universal


@pytest.mark.parametrize(
    "case", ["stage1-fp32", "stage2-fp16", "stage3-bf16-sub-groups", "pp2-tied-stage1", "tp2-stage2"]
)
def test_every_tensor_number_and_group_is_read_again(case: str, tmp_path: Path) -> None:
    config = {**made(case).about.config}
    write_shoal(made(case), tmp_path / "shoal")
    write_deepspeed_universal(ShoalSource(tmp_path / "shoal"), tmp_path / "out", config=config)
    assert (tmp_path / "out" / "latest_universal").read_text() == "global_step3"
    source = DeepSpeedSource(tmp_path / "out")
    old, new = everything(made(case)), everything(source)
    assert old.keys() == new.keys()
    assert [key for key in old if not torch.equal(old[key], new[key])] == []
    about, first = source.about, made(case).about
    assert (about.counters, about.loss_scale, about.schedule) == (first.counters, first.loss_scale, first.schedule)
    assert about.client_state.keys() == first.client_state.keys()
    assert [group["lr"] for group in about.groups] == [group["lr"] for group in first.groups]
    assert {name: float(each["step"]) for name, each in about.scalars.items()} == dict.fromkeys(first.group_of, 3.0)


def test_the_files_of_a_parameter_are_those_that_ds_to_universal_wrote(tmp_path: Path) -> None:
    recorded = universal("stage1-fp32", tmp_path / "recorded") / "zero"
    write_deepspeed_universal(made("stage1-fp32"), tmp_path / "out")
    written = tmp_path / "out" / "global_step3" / "zero"
    for name in (*MATRICES, *VECTORS):
        assert sorted(path.name for path in (recorded / name).iterdir()) == sorted(
            path.name for path in (written / name).iterdir()
        )
        for path in (recorded / name).iterdir():
            old, new = open_value(path, verify=False), open_value(written / name / path.name, verify=True)
            if path.stem == "step":
                assert torch.equal(old, new) and old.dtype == new.dtype
            else:
                assert old.keys() == new.keys() and old["cat_dim"] == new["cat_dim"] == 0
                assert torch.equal(old["param"], new["param"])


def test_row_parallel_weights_are_marked_and_wrong_patterns_refused(tmp_path: Path) -> None:
    source = made("pp2-tp2-stage1")
    write_deepspeed_universal(source, tmp_path / "out", row_parallel=[r"\d+\.down\.weight"])
    zero = tmp_path / "out" / "global_step3" / "zero"
    assert open_value(zero / "1.down.weight" / "exp_avg.pt", verify=True)["cat_dim"] == 1
    assert open_value(zero / "1.up.weight" / "exp_avg.pt", verify=True)["cat_dim"] == 0
    for pattern, match in (("down", "fits no trained"), (r".*\.bias", "one dim"), ("(", "no regular expression")):
        with pytest.raises(CheckpointError, match=match):
            write_deepspeed_universal(source, tmp_path / "wrong", row_parallel=[pattern])


def test_what_deepspeed_would_not_load_is_refused_or_noted(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not written in its universal"):
        write_deepspeed_universal(made("ep2-stage2-fp32"), tmp_path / "out")
    with pytest.raises(CheckpointError, match="state of Adam only"):
        write_deepspeed_universal(made("stage2-fp32-sgd"), tmp_path / "out", stage=3)
    notes = write_deepspeed_universal(made("stage3-fp32"), tmp_path / "out")
    assert "shift, gain, seen are in the model file's 'module'" in notes[0]
    assert "first group's hyperparameters" in notes[1]


def test_convert_writes_the_format_and_refuses_options_of_others(tmp_path: Path) -> None:
    source = str(MADE / "tp2-stage2" / "checkpoint")
    done = CliRunner().invoke(app, ["convert", source, str(tmp_path / "out"), "--to", "deepspeed_universal"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "global_step3" / "zero" / "optimizer_state.pt").is_file()
    for options in (
        ["deepspeed_universal", "--ranks", "4"],
        ["deepspeed", "--row-parallel", "x"],
        ["dcp", "--stage", "1"],
    ):
        done = CliRunner().invoke(app, ["convert", source, str(tmp_path / "wrong"), "--to", *options])
        assert done.exit_code == 2 and options[1] in done.output, done.output
