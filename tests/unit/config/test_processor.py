"""The processor: its cores, and the line on 16-bit formats that it has no instructions for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import shoal
from shoal import processor
from shoal.config import load
from shoal.processor import Format, emulation_notes, has_instructions_for, num_cores
from tests.unit.cli.test_config_doctor import run

X86 = "processor\t: 0\nmodel name\t: A Processor\nflags\t\t: fpu avx2 {}\n\nprocessor\t: 1\nflags\t\t: fpu\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd {}\n"
BF16 = "bf16: this processor has no bf16 instructions"


def file(folder: Path, text: str) -> Path:
    path = folder / "cpuinfo"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "bf16", "fp16"),
    [
        (X86.format(""), False, False),
        (X86.format("avx512f avx512_bf16"), True, False),
        (X86.format("amx_bf16 avx512_fp16"), True, True),
        (X86.format("amx_tile amx_fp16"), False, True),
        (X86.format("my_avx512_bf16"), False, False),
        (ARM.format("fphp asimdhp"), False, True),
        (ARM.format("asimdhp bf16"), True, True),
        (ARM.format("avx512_bf16"), False, False),
        ("processor : 0\nfeatures : something else\n", None, None),
        ("", None, None),
    ],
)
def test_native_formats_are_read_from_the_flags(
    tmp_path: Path, text: str, bf16: bool | None, fp16: bool | None
) -> None:
    path = file(tmp_path, text)
    assert (has_instructions_for("bf16", path), has_instructions_for("fp16", path)) == (bf16, fp16)
    formats: tuple[Format, ...] = ("bf16", "fp16")
    slow = [name for name, is_native in zip(formats, (bf16, fp16), strict=True) if is_native is False]
    assert [line.partition(":")[0] for line in emulation_notes(formats, path)] == slow


def test_a_platform_without_the_file_makes_no_claim(tmp_path: Path) -> None:
    assert has_instructions_for("bf16", tmp_path / "none") is None
    assert emulation_notes(("bf16", "fp16"), tmp_path / "none") == []


def test_the_formats_of_a_configuration_are_those_of_its_forward_pass() -> None:
    assert load({}).low_precision_formats == ()
    assert load({"bf16": {"enabled": True}}).low_precision_formats == ("bf16",)
    assert load({"fp16": {"enabled": True}, "torch_autocast": {"enabled": True}}).low_precision_formats == (
        "fp16",
        "bf16",
    )
    assert load({"torch_autocast": {"enabled": True, "dtype": "fp32"}}).low_precision_formats == ()
    assert load({"torch_autocast": {"dtype": "fp16"}}).low_precision_formats == ()


def test_doctor_and_the_start_of_a_run_say_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(processor, "CPUINFO", file(tmp_path, X86.format("avx512_fp16")))
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 1, "bf16": {"enabled": true}}')
    assert BF16 in run(capsys, path)[1]
    assert BF16 in run(capsys, path, json=True)[1]
    with caplog.at_level(logging.INFO, "shoal"):
        engine, *_ = shoal.initialize(model=torch.nn.Linear(2, 2), config=path)
    engine.destroy()
    assert len([line for line in caplog.messages if line.startswith(BF16)]) == 1
    path.write_text('{"train_batch_size": 1, "fp16": {"enabled": true}}')
    assert "instructions" not in run(capsys, path)[1]


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1, 5, 9}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert num_cores() == 3
    monkeypatch.delattr("os.sched_getaffinity")
    assert num_cores() == 16
