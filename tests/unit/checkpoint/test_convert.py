"""``shoal convert`` from the shell: what lies there is found out, converted, and what is lost is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from shoal.checkpoint.formats import detect, open_source
from shoal.checkpoint.formats.dcp_writing import write_dcp
from shoal.checkpoint.formats.huggingface import write_huggingface
from shoal.checkpoint.formats.plain import write_plain
from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.native import write_shoal
from shoal.cli.convert import convert
from shoal.errors import CheckpointError
from tests.helpers.formats_source import are_equal, everything, trained

KEPT = everything(trained())
FORMATS = ("shoal", "huggingface", "state_dict", "dcp")


def shell(*arguments: object) -> Result:
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(convert)
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def make(format: str, path: Path) -> None:
    if format == "shoal":
        write_shoal(trained(), path, "mine")
    elif format == "huggingface":
        write_huggingface(trained(), path, dtype=torch.float32, max_file_nbytes=112)
    elif format == "dcp":
        write_dcp(trained(), path)
    else:
        write_plain(trained(), path)


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", [*FORMATS, "fp32"])
def test_every_format_becomes_every_other(tmp_path: Path, source: str, target: str) -> None:
    make(source, tmp_path / "in")
    assert detect(tmp_path / "in") == source
    done = shell(
        tmp_path / "in", tmp_path / "out", "--to", target, *(["--dtype", "float32"] if target in FORMATS[1:3] else [])
    )
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "out") in done.stdout
    assert f"{source} to {target}" in done.stderr
    assert detect(tmp_path / "out") == ("state_dict" if target == "fp32" else target)
    found = open_source(tmp_path / "out")
    assert are_equal(everything(found)[MODEL], KEPT[MODEL])
    assert found.about.aliases == {"embedding.weight": ("head.weight",)}
    keeps = {"shoal", "dcp"}
    if source in keeps and target in keeps:
        assert set(found.kinds()) == KEPT.keys()
        assert all(are_equal(everything(found)[kind], KEPT[kind]) for kind in KEPT)
        assert found.about.groups == trained().about.groups
        assert found.about.group_of == trained().about.group_of
        assert found.about.scalars == trained().about.scalars
    elif source in keeps:
        assert f"optimizer state (exp_avg, exp_avg_sq) has no place in {target}; left out." in done.stderr


def test_a_model_is_written_as_it_computes_where_no_dtype_is_given(tmp_path: Path) -> None:
    make("shoal", tmp_path / "in")
    assert shell(tmp_path / "in", tmp_path / "out", "--to", "huggingface").exit_code == 0
    assert open_source(tmp_path / "out").read(MODEL, "layer.weight").dtype == torch.bfloat16


def test_one_of_several_checkpoints_is_chosen_by_its_tag(tmp_path: Path) -> None:
    make("shoal", tmp_path / "in")
    write_shoal(trained(), tmp_path / "in", "newer")
    assert shell(tmp_path / "in", tmp_path / "a", "--to", "fp32", "--tag", "mine").exit_code == 0
    done = shell(tmp_path / "in", tmp_path / "b", "--to", "fp32", "--tag", "none")
    assert done.exit_code == 1
    assert "none" in done.stderr
    make("state_dict", tmp_path / "plain")
    done = shell(tmp_path / "plain", tmp_path / "c", "--to", "dcp", "--tag", "mine")
    assert done.exit_code == 1
    assert "is state_dict, which has none" in done.stderr


def test_a_target_that_is_there_is_refused_and_left_alone(tmp_path: Path) -> None:
    make("state_dict", tmp_path / "in")
    (tmp_path / "out").write_text("mine")
    done = shell(tmp_path / "in", tmp_path / "out", "--to", "fp32")
    assert done.exit_code == 1
    assert "[checkpoint-target]" in done.stderr
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("target", ["shoal", "dcp"])
def test_a_dtype_makes_no_sense_where_training_goes_on(tmp_path: Path, target: str) -> None:
    make("state_dict", tmp_path / "in")
    done = shell(tmp_path / "in", tmp_path / "out", "--to", target, "--dtype", "bfloat16")
    assert done.exit_code == 1
    assert "leave --dtype out" in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint_is_said_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("hello")
    for place, words in [
        (tmp_path, "in no format that Shoal reads: it contains 'readme.txt'"),
        (tmp_path / "readme.txt", "neither a safetensors file nor a file of torch.save"),
        (tmp_path / "none", "does not exist"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            detect(place)
        done = shell(place, tmp_path / "out", "--to", "fp32")
        assert done.exit_code == 1
        assert words in done.stderr
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="it contains nothing"):
        detect(tmp_path / "empty")


def test_a_damaged_source_leaves_nothing_behind(tmp_path: Path) -> None:
    make("huggingface", tmp_path / "in")
    file = tmp_path / "in" / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert shell(tmp_path / "in", tmp_path / "out", "--to", "fp32").exit_code == 1
    assert os.listdir(tmp_path) == ["in"]


# memory

PROGRAM = """
import os, shutil, sys, threading, time, torch
from shoal.checkpoint.formats import open_source
from shoal.checkpoint.formats.dcp_writing import write_dcp
from shoal.checkpoint.formats.huggingface import write_huggingface
from shoal.checkpoint.formats.plain import write_plain
from shoal.checkpoint.native import write_shoal
from shoal.checkpoint.portable import About, TensorInfo
import torch.distributed.checkpoint

# 6 tensors of 36 MiB: each large enough that the allocator gives its memory back at once.
NUMEL, NUMBER = 9 << 20, 6

class Made:
    infos = {f"layer.{index}.weight": TensorInfo(torch.float32, (1024, NUMEL // 1024)) for index in range(NUMBER)}
    about = About(parameters=infos)
    def kinds(self): return ("model",)
    def tensors(self, kind): return self.infos if kind == "model" else {}
    def read(self, kind, name): return torch.full((1024, NUMEL // 1024), float(name.split(".")[1]))

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))

class Peak(threading.Thread):
    def __enter__(self):
        self.before = self.most = anonymous(); self.is_on = True; self.start(); return self
    def run(self):
        while self.is_on:
            self.most = max(self.most, anonymous()); time.sleep(0.0005)
    def __exit__(self, *_):
        self.is_on = False; self.join()

folder = sys.argv[1]
writers = {"huggingface": write_huggingface, "state_dict": write_plain, "dcp": write_dcp, "shoal": write_shoal}
small = type("Small", (Made,), {"infos": {"a": TensorInfo(torch.float32, (4,))}, "read": lambda *_: torch.ones(4)})
small.about = About(parameters=small.infos)
for name, write in writers.items():
    write(small(), f"{folder}/{name}-small")  # what is imported and cached at first use
    with Peak(daemon=True) as peak:
        write(Made(), f"{folder}/{name}")
    wrote = peak.most - peak.before
    source = open_source(f"{folder}/{name}")
    assert len(source.tensors("model")) == NUMBER
    with Peak(daemon=True) as peak:
        for key in source.tensors("model"):
            assert source.read("model", key)[-1, -1] == float(key.split(".")[1])
    print(name, wrote, peak.most - peak.before)
    (shutil.rmtree if os.path.isdir(f"{folder}/{name}") else os.remove)(f"{folder}/{name}")
"""


def test_peak_memory_of_writing_and_reading_200_mb_is_at_most_two_tensors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    peaks = {name: (int(wrote), int(read)) for name, wrote, read in (line.split() for line in done.stdout.splitlines())}
    assert peaks.keys() == {"huggingface", "state_dict", "dcp", "shoal"}
    tensor = 36 << 20
    for name, (wrote, read) in peaks.items():
        assert wrote < 2.2 * tensor, (name, wrote)
        assert read < 2.2 * tensor, (name, read)
