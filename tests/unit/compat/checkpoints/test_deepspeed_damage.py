"""DeepSpeed's checkpoints that are damaged, mixed up, hostile or of a part that is not built: all are named."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.checkpoint.manifest import MODEL
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource
from shoal.compat.checkpoints.files import open_file
from shoal.errors import CheckpointError, NotBuiltError
from tests.helpers.any_two import ALL_ROWS
from tests.helpers.deepspeed_made import MADE, everything


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def with_rank_of_any_number(folder: Path) -> None:
    file = folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    file.rename(folder / "zero_pp_rank_99999999999999_mp_rank_00_model_states.pt")


def with_two_saves(folder: Path) -> None:
    prefixed = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(prefixed, folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")


def with_another_models_file(folder: Path) -> None:
    other = MADE / "stage3-bf16-sub-groups" / "checkpoint" / "global_step3"
    shutil.copy(
        other / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    )


def without_a_module(folder: Path) -> None:
    model = folder / "mp_rank_00_model_states.pt"
    torch.save(torch.load(model, weights_only=True) | {"module": None}, model)


def with_few_bytes_that_claim_to_be_many(folder: Path) -> None:
    model = folder / "mp_rank_00_model_states.pt"
    state = torch.load(model, weights_only=True)
    state["module"]["gain"] = torch.ones(1).expand(1 << 40)
    torch.save(state, model)


def with_a_file(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).touch()


@pytest.mark.parametrize(
    ("case", "change", "kind", "words"),
    [
        ("stage2-bf16", without("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"), CheckpointError,
         ["1 of 2 ranks are missing: bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"]),
        ("stage3-fp32", without("zero_pp_rank_0_mp_rank_00_model_states.pt"), CheckpointError,
         ["zero_pp_rank_0_mp_rank_00_model_states.pt"]),
        ("stage3-fp32", without("zero_pp_rank_1_mp_rank_00_model_states.pt"), CheckpointError,
         ["zero_pp_rank_1_mp_rank_00_model_states.pt"]),
        ("stage3-fp32", with_rank_of_any_number, CheckpointError,
         ["99999999999998 model files are missing: zero_pp_rank_1_", " and others"]),
        ("stage2-bf16", with_two_saves, CheckpointError, ["are both of rank 1"]),
        ("stage3-fp32", with_another_models_file, CheckpointError,
         ["4 flat groups, and the model file speaks of 2"]),
        ("stage2-fp32", with_a_file("expert_3_mp_rank_00_model_states.pt"), NotBuiltError,
         ["with mixture-of-experts layers in files without the layer's number", " cannot be read yet",
          "expert_3_mp_rank_00_model_states.pt"]),
        ("stage2-fp32", with_a_file("layer_03-seq_00-model_00-model_states.pt"), NotBuiltError,
         ["with pipeline parallelism over other axes", " cannot be read yet",
          "layer_03-seq_00-model_00-model_states.pt"]),
        ("stage2-fp32", with_a_file("offloaded_tensors"), NotBuiltError,
         ["with state offloaded to NVMe", " cannot be read yet", "offloaded_tensors"]),
        ("stage2-fp32", without_a_module, NotBuiltError, ["pipeline parallelism and without files of layers"]),
        ("stage2-fp32", with_few_bytes_that_claim_to_be_many, CheckpointError,
         ["gain is 4398046511104 bytes, of which the file holds 4"]),
    ],
)  # fmt: skip
def test_what_is_missing_mixed_up_not_built_or_too_large_is_named(
    case: str, change: Callable[[Path], None], kind: type[Exception], words: list[str], deepspeed_copy: Any
) -> None:
    folder = deepspeed_copy(case)
    change(folder)
    with pytest.raises(kind) as caught:
        DeepSpeedSource(folder)
    assert all(each in str(caught.value) for each in words)


FILES = [
    ("stage2-fp32", "mp_rank_00_model_states.pt"),
    ("stage2-fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("stage3-fp32", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    ("stage3-fp32", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
]


@pytest.mark.parametrize(("case", "name"), FILES)
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_named(case: str, name: str, kept: float, deepspeed_copy: Any) -> None:
    file = deepspeed_copy(case) / name
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(CheckpointError, match=name) as caught:
        DeepSpeedSource(file.parent)
    assert caught.value.code == "checkpoint-damaged"


@pytest.mark.parametrize(("case", "name"), FILES)
def test_a_flipped_bit_in_a_tensor_is_found_by_its_checksum(case: str, name: str, deepspeed_copy: Any) -> None:
    import zipfile

    file = deepspeed_copy(case) / name
    with zipfile.ZipFile(file) as archive:
        entry = max((e for e in archive.infolist() if "/data/" in e.filename), key=lambda e: e.file_size)
    data = bytearray(file.read_bytes())
    start = entry.header_offset + 30 + len(entry.filename)
    start += int.from_bytes(data[entry.header_offset + 28 : entry.header_offset + 30], "little")
    data[start + entry.file_size // 2] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="CRC") as caught:
        DeepSpeedSource(file.parent)
    assert caught.value.code == "checkpoint-damaged" and name in str(caught.value)
    DeepSpeedSource(file.parent, verify=False)


def test_files_without_checksums_are_read(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("stage2-fp32")
    model = folder / "mp_rank_00_model_states.pt"
    state = torch.load(model, weights_only=True)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, model)
    finally:
        torch.serialization.set_crc32_options(True)
    assert DeepSpeedSource(folder).about.counters["global_steps"] == 3


@pytest.mark.parametrize("case", ["stage2-fp32", "stage3-fp32"])
def test_files_of_an_older_save_with_more_ranks_are_left_out(case: str, deepspeed_copy: Any) -> None:
    folder = deepspeed_copy(case)
    for file in list(folder.glob("zero_pp_rank_1_*")):
        shutil.copy(file, folder / file.name.replace("rank_1", "rank_2", 1))
    source = DeepSpeedSource(folder)
    assert any("1 optimizer files of ranks beyond 1" in note for note in source.about.notes)
    held = load_file(MADE / case / "held.safetensors")
    assert torch.equal(source.read(MODEL, "norm.bias"), held["model/norm.bias"])


# What asks for too much


JUNK: list[Any] = [None, "x", -1, 10**30, 1.5, [], {}, [None], {"a": 1}, torch.tensor(0.0), torch.ones(2, 2), True]


def spoil(value: Any, random: Any, depth: int = 0) -> Any:
    """A copy in which one entry is another value, or gone."""
    if isinstance(value, dict | list) and value and (depth == 0 or random.random() < 0.8):
        changed = dict(value) if isinstance(value, dict) else list(value)
        key = random.choice(list(value)) if isinstance(value, dict) else random.randrange(len(value))
        if isinstance(changed, dict) and random.random() < 0.15:
            del changed[key]
        else:
            changed[key] = spoil(value[key], random, depth + 1)
        return changed
    return random.choice(JUNK)


@pytest.mark.parametrize(
    "case",
    [
        "stage0-bf16", "stage1-bf16", "stage2-fp16", "stage3-bf16-sub-groups", "tp2-stage1", "pp2-stage0",
        "pp2-tied-stage1", "autoep2-stage0-bf16", "autoep2-stage2", "autoep2-tp2-stage3",
    ],
)  # fmt: skip
def test_whatever_is_in_a_file_it_is_read_or_refused(case: str, deepspeed_copy: Any) -> None:
    import random

    folder = deepspeed_copy(case)
    generator = random.Random(0)
    refused = 0
    number = 60 if ALL_ROWS else 20
    for _ in range(number):
        file = generator.choice(sorted(folder.glob("*.pt")))
        before = file.read_bytes()
        state = open_file(file, verify=False)
        inner = state.get("optimizer_state_dict")
        if inner is not None:  # the fakes cannot be saved
            plain = {"loss_scaler": None, "param_slice_mappings": None, "zero_stage": int(inner.get("zero_stage", 0))}
            state = {"optimizer_state_dict": inner | plain}
        spoiled = spoil(state, generator)
        file.unlink()  # it is mapped
        torch.save(spoiled, file)
        try:
            everything(DeepSpeedSource(folder))
        except (CheckpointError, NotBuiltError):
            refused += 1
        file.unlink()
        file.write_bytes(before)
    assert number / 12 < refused < number


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.canary,)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_a_file_that_asks_for_a_function_is_refused_with_its_name_and_not_run(
    name: str, deepspeed_copy: Any, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    file = deepspeed_copy("stage2-fp32") / name
    torch.save({"module": {}, "optimizer_state_dict": {}, "extra": Payload(canary)}, file)
    with pytest.raises(CheckpointError, match=rf"{os.mkdir.__module__}\.mkdir") as caught:
        DeepSpeedSource(file.parent)
    assert caught.value.code == "checkpoint-unsafe"
    assert not canary.exists()
    torch.load(file, weights_only=False)
    assert canary.exists()  # the payload does what it should not


def test_classes_are_allowed_while_a_file_is_opened_and_not_after() -> None:
    file = MADE / "stage2-fp32/checkpoint/global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    before = set(torch.serialization.get_safe_globals())
    state = open_file(file, verify=True)["optimizer_state_dict"]
    assert state["zero_stage"] == 2
    assert state["loss_scaler"].values == {"cur_scale": 1.0, "dynamic": False}
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(Exception, match=r"LossScaler|fragment_address|ZeroStageEnum"):
        torch.load(file, weights_only=True)
    assert not any(module.partition(".")[0] == "deepspeed" for module in sys.modules)
