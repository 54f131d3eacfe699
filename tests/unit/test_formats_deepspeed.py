"""DeepSpeed's own checkpoints, read without it: those in tests/fixtures/deepspeed were written by the real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.checkpoint.formats.deepspeed import DeepSpeedSource
from shoal.checkpoint.formats.deepspeed_files import open_file
from shoal.checkpoint.formats.deepspeed_state import Place, Spread
from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.portable import Source
from shoal.errors import CheckpointError, NotBuiltError
from tests.fixtures.deepspeed.make import CASES
from tests.fixtures.deepspeed.model import build_model

MADE = Path(__file__).resolve().parent.parent / "fixtures" / "deepspeed"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MATRICES = [
    "embed.weight", "blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight", "blocks.1.down.weight"
]  # fmt: skip
VECTORS = ["blocks.0.up.bias", "blocks.1.up.bias", "norm.weight", "norm.bias"]


def made(case: str) -> DeepSpeedSource:
    return DeepSpeedSource(MADE / case / "checkpoint")


@pytest.fixture
def copy(tmp_path: Path) -> Any:
    """``copy(case)``: a checkpoint to damage; gives its tag's folder."""

    def make(case: str) -> Path:
        shutil.copytree(MADE / case / "checkpoint", tmp_path / "checkpoint")
        return tmp_path / "checkpoint" / "global_step3"

    return make


def everything(source: Source) -> dict[str, torch.Tensor]:
    found = {}
    for kind in source.kinds():
        for name, info in source.tensors(kind).items():
            tensor = source.read(kind, name)
            assert (tensor.dtype, tuple(tensor.shape)) == (info.dtype, info.shape), (kind, name)
            found[f"{kind}/{name}"] = tensor
    return found


# What the processes held


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_what_the_processes_held(case: str) -> None:
    held = load_file(MADE / case / "held.safetensors")
    found = everything(made(case))
    dtype = DTYPES[case.split("-")[1]]
    frozen = found.pop("model/shift", None)
    if case == "stage3-bf16-no-frozen":
        assert frozen is None
    else:
        assert frozen is not None and torch.equal(frozen, torch.linspace(-1, 1, 7).to(dtype))
    assert set(found) == set(held)
    assert len(found) == (20 if case.endswith("sgd") else 29)
    for name, tensor in found.items():
        assert torch.equal(tensor.view(-1), held[name].view(-1)), name
        assert tensor.dtype == (torch.int64 if name == "model/seen" else torch.float32), name


@pytest.mark.parametrize("case", CASES)
def test_the_model_and_its_groups_are_described(case: str) -> None:
    about = made(case).about
    dtype = DTYPES[case.split("-")[1]]
    expected = {
        name: (dtype, tuple(parameter.shape))
        for name, parameter in build_model().named_parameters()
        if not (name == "shift" and case == "stage3-bf16-no-frozen")
    }
    assert {name: (info.dtype, info.shape) for name, info in about.parameters.items()} == expected
    assert about.aliases == {"embed.weight": ("head.weight",)}
    assert about.group_of == dict.fromkeys(MATRICES, 0) | dict.fromkeys(VECTORS, 1)
    assert about.counters == {"global_steps": 3, "global_samples": 18, "skipped_steps": 0, "micro_steps": 3}
    assert about.counters == json.loads((MADE / case / "run.json").read_text())["counters"]
    assert about.client_state["epoch"] == 2
    assert about.client_state["best"]["loss"] == 1.5
    assert about.client_state["best"]["weights"].tolist() == [0, 1, 2]
    assert set(about.client_state) == {"epoch", "best"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hyperparameters_and_the_step_come_along(stage: int) -> None:
    about = made(f"stage{stage}-fp32").about
    assert about.optimizer == "AdamW"
    first, second = about.groups
    assert (first["lr"], first["weight_decay"], first["betas"], first["eps"]) == (0.01, 0.1, (0.9, 0.95), 1e-8)
    assert (second["lr"], second["weight_decay"]) == (0.02, 0.0)
    assert "params" not in first
    assert about.scalars == {name: {"step": 3.0} for name in MATRICES + VECTORS}
    assert about.notes == []


@pytest.mark.parametrize(
    ("case", "step"),
    [("stage2-fp32-offload", 3), ("stage3-bf16-offload", 3), ("stage1-bf16-fused", 3), ("stage0-bf16-fused", 4)],
)
def test_the_step_of_deepspeeds_own_optimizers_is_a_tensor_as_torchs(case: str, step: int) -> None:
    """At stage 0 in 16 bits DeepSpeed takes a first step without gradients, so it counts one more."""
    about = made(case).about
    value = about.scalars["norm.bias"]["step"]
    assert (value.item(), value.dtype, value.shape) == (step, torch.float32, ())
    assert about.optimizer == "AdamW"
    assert about.groups[0]["betas"] == (0.9, 0.95)
    assert "step" not in about.groups[0]


def test_an_optimizer_without_moments_has_its_momentum() -> None:
    source = made("stage2-fp32-sgd")
    assert list(source.kinds()) == ["model", "optimizer/momentum_buffer"]
    assert source.about.optimizer == "SGD"
    assert source.about.scalars == {}
    assert source.about.groups[0]["momentum"] == 0.9


def test_an_elastic_checkpoint_says_that_it_has_no_hyperparameters() -> None:
    about = made("stage2-fp32-elastic").about
    assert about.groups == [{}, {}]
    assert about.notes == ["An elastic checkpoint does not hold the groups' hyperparameters (lr, betas, ...)."]
    assert about.scalars["norm.bias"] == {"step": 3.0}


def test_a_schedule_comes_along_and_the_optimizer_is_named_by_the_config() -> None:
    about = made("stage2-bf16-schedule").about
    assert about.schedule == {"last_batch_iteration": 2}
    assert about.optimizer == "AdamW"


@pytest.mark.parametrize(("stage", "hysteresis"), [(0, 1), (1, 3), (2, 3), (3, 3)])
def test_the_loss_scale_of_fp16_is_shoals_state(stage: int, hysteresis: int) -> None:
    from shoal.optim.loss_scale import LossScale

    state = made(f"stage{stage}-fp16").about.loss_scale
    assert state == {"scale": 128.0, "iteration": 3, "last_overflow_iteration": -1, "hysteresis": hysteresis}
    scale = LossScale()
    scale.load_state_dict(state)
    assert scale.scale == 128.0
    assert made(f"stage{stage}-bf16").about.loss_scale is None


# Where it lies


def test_a_folder_its_tag_and_the_tag_folder_are_the_same_checkpoint() -> None:
    folder = MADE / "stage2-fp32" / "checkpoint"
    for source in (
        DeepSpeedSource(folder),
        DeepSpeedSource(str(folder), "global_step3"),
        DeepSpeedSource(folder / "global_step3"),
        DeepSpeedSource(f"file://{folder}"),
    ):
        assert source.about.counters["global_steps"] == 3


def test_a_tag_that_is_not_there_is_an_error_that_lists_the_others() -> None:
    folder = MADE / "stage2-fp32" / "checkpoint"
    with pytest.raises(CheckpointError, match=r"tag 'best' is not there. Tags in it: global_step3.") as caught:
        DeepSpeedSource(folder, "best")
    assert caught.value.code == "checkpoint-missing"


def test_without_latest_the_tag_has_to_be_said(copy: Any) -> None:
    folder = copy("stage2-fp32").parent
    (folder / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"no file 'latest', and no tag was named. Tags in it: global_step3"):
        DeepSpeedSource(folder)


@pytest.mark.parametrize("tag", ["../../stage1-fp32/checkpoint/global_step3", "/etc", "", "a/../.."])
def test_a_tag_leads_nowhere_else(tag: str, copy: Any) -> None:
    folder = copy("stage2-fp32").parent
    (folder / "latest").write_text(tag)
    with pytest.raises(CheckpointError) as caught:
        DeepSpeedSource(folder)
    assert caught.value.code == "checkpoint-unsafe"


def test_a_folder_of_something_else_is_said_to_be_that(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("step1")
    (tmp_path / "step1").mkdir()
    (tmp_path / "step1" / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="no checkpoint of DeepSpeed's"):
        DeepSpeedSource(tmp_path)


# Damage


def test_missing_optimizer_files_are_named(copy: Any) -> None:
    folder = copy("stage2-bf16")
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"1 of 2 ranks are missing: bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    ):
        DeepSpeedSource(folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_model_files_of_stage_3_are_named(rank: int, copy: Any) -> None:
    folder = copy("stage3-fp32")
    (folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"):
        DeepSpeedSource(folder)


def test_a_rank_of_any_number_takes_no_time(copy: Any) -> None:
    folder = copy("stage3-fp32")
    file = folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    file.rename(folder / "zero_pp_rank_99999999999999_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"99999999999998 model files are missing: zero_pp_rank_1_.* and others"):
        DeepSpeedSource(folder)


FILES = [
    ("stage2-fp32", "mp_rank_00_model_states.pt"),
    ("stage2-fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("stage3-fp32", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    ("stage3-fp32", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
]


@pytest.mark.parametrize(("case", "name"), FILES)
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.99])
def test_a_file_that_is_cut_short_is_named(case: str, name: str, kept: float, copy: Any) -> None:
    file = copy(case) / name
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(CheckpointError, match=name) as caught:
        DeepSpeedSource(file.parent)
    assert caught.value.code == "checkpoint-damaged"


@pytest.mark.parametrize(("case", "name"), FILES)
def test_a_flipped_bit_in_a_tensor_is_found_by_its_checksum(case: str, name: str, copy: Any) -> None:
    import zipfile

    file = copy(case) / name
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


def test_files_without_checksums_are_read(copy: Any) -> None:
    folder = copy("stage2-fp32")
    model = folder / "mp_rank_00_model_states.pt"
    state = torch.load(model, weights_only=True)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, model)
    finally:
        torch.serialization.set_crc32_options(True)
    assert DeepSpeedSource(folder).about.counters["global_steps"] == 3


@pytest.mark.parametrize("case", ["stage2-fp32", "stage3-fp32"])
def test_files_of_an_older_save_with_more_ranks_are_left_out(case: str, copy: Any) -> None:
    folder = copy(case)
    for file in list(folder.glob("zero_pp_rank_1_*")):
        shutil.copy(file, folder / file.name.replace("rank_1", "rank_2", 1))
    source = DeepSpeedSource(folder)
    assert any("1 optimizer files of ranks beyond 1" in note for note in source.about.notes)
    held = load_file(MADE / case / "held.safetensors")
    assert torch.equal(source.read(MODEL, "norm.bias"), held["model/norm.bias"])


def test_two_saves_mixed_under_one_tag_are_an_error(copy: Any) -> None:
    folder = copy("stage2-bf16")
    prefixed = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(prefixed, folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match="are both of rank 1"):
        DeepSpeedSource(folder)


def test_the_files_of_another_model_are_an_error(copy: Any) -> None:
    folder = copy("stage3-fp32")
    other = MADE / "stage3-bf16-sub-groups" / "checkpoint" / "global_step3"
    shutil.copy(
        other / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    )
    with pytest.raises(CheckpointError, match="4 flat groups, and the model file speaks of 2"):
        DeepSpeedSource(folder)


# What is not built, or asks for too much


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "mixture-of-experts layers"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "mixture-of-experts layers"),
        ("layer_03-model_00-model_states.pt", "pipeline parallelism"),
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism"),
        ("zero", "DeepSpeed's universal format"),
        ("offloaded_tensors", "state offloaded to NVMe"),
    ],
)
def test_what_is_not_built_yet_is_called_by_its_name(name: str, what: str, copy: Any) -> None:
    folder = copy("stage2-fp32")
    (folder / name).touch()
    with pytest.raises(NotBuiltError, match=f"with {what}.* is not read yet") as caught:
        DeepSpeedSource(folder)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("mp_world_size", 2, "tensor parallelism"),
        ("module", None, "pipeline parallelism"),
        ("num_experts", [4], "mixture-of-experts layers"),
    ],
)
def test_a_model_file_that_tells_of_what_is_not_built_is_refused(key: str, value: Any, what: str, copy: Any) -> None:
    model = copy("stage2-fp32") / "mp_rank_00_model_states.pt"
    torch.save(torch.load(model, weights_only=True) | {key: value}, model)
    with pytest.raises(NotBuiltError, match=what):
        DeepSpeedSource(model.parent)


def test_a_few_bytes_that_claim_to_be_a_large_tensor_are_refused(copy: Any) -> None:
    model = copy("stage2-fp32") / "mp_rank_00_model_states.pt"
    state = torch.load(model, weights_only=True)
    state["module"]["gain"] = torch.ones(1).expand(1 << 40)
    torch.save(state, model)
    with pytest.raises(CheckpointError, match="gain is 4398046511104 bytes, of which the file holds 4"):
        DeepSpeedSource(model.parent)


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


@pytest.mark.parametrize("case", ["stage0-bf16", "stage1-bf16", "stage2-fp16", "stage3-bf16-sub-groups"])
def test_whatever_is_in_a_file_it_is_read_or_refused(case: str, copy: Any) -> None:
    import random

    folder = copy(case)
    generator = random.Random(0)
    refused = 0
    for _ in range(60):
        file = generator.choice(sorted(folder.glob("*.pt")))
        before = file.read_bytes()
        state = open_file(file, verify=False)
        inner = state.get("optimizer_state_dict")
        if inner is not None:  # the stand-ins cannot be saved
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
    assert 5 < refused < 60


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.canary,)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_a_file_that_asks_for_a_function_is_refused_with_its_name_and_not_run(
    name: str, copy: Any, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    file = copy("stage2-fp32") / name
    torch.save({"module": {}, "optimizer_state_dict": {}, "extra": Payload(canary)}, file)
    with pytest.raises(CheckpointError, match=rf"{os.mkdir.__module__}\.mkdir") as caught:
        DeepSpeedSource(file.parent)
    assert caught.value.code == "checkpoint-unsafe"
    assert not canary.exists()
    torch.load(file, weights_only=False)
    assert canary.exists()  # the payload does what it should not


def test_the_stand_ins_are_granted_while_a_file_is_opened_and_not_after() -> None:
    file = MADE / "stage2-fp32/checkpoint/global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    before = set(torch.serialization.get_safe_globals())
    state = open_file(file, verify=True)["optimizer_state_dict"]
    assert state["zero_stage"] == 2
    assert state["loss_scaler"].values == {"cur_scale": 1.0, "dynamic": False}
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(Exception, match=r"LossScaler|fragment_address|ZeroStageEnum"):
        torch.load(file, weights_only=True)
    assert not any(module.partition(".")[0] == "deepspeed" for module in sys.modules)


# Less than everything


@pytest.mark.parametrize("case", ["stage1-bf16", "stage2-bf16"])
def test_without_optimizer_files_the_models_own_weights_are_read_with_a_note(case: str, copy: Any) -> None:
    folder = copy(case)
    held = load_file(MADE / case / "held.safetensors")
    for file in folder.glob("*_optim_states.pt"):
        file.unlink()
    source = DeepSpeedSource(folder)
    assert list(source.kinds()) == ["model"]
    weight = source.read(MODEL, "embed.weight")
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight.view(-1), held["model/embed.weight"].bfloat16())
    assert source.about.groups == () and source.about.group_of == {}
    assert source.about.notes == ["There are no optimizer files: the weights are the model's, without optimizer state."]


def test_at_stage_3_the_optimizer_files_are_needed(copy: Any) -> None:
    folder = copy("stage3-bf16")
    for file in folder.glob("*_optim_states.pt"):
        file.unlink()
    with pytest.raises(CheckpointError, match="no optimizer files, and at stage 3 the weights are in them"):
        DeepSpeedSource(folder)


@pytest.mark.parametrize("case", ["stage1-fp32", "stage3-bf16"])
def test_before_the_first_step_there_are_weights_and_groups_and_no_state(case: str, copy: Any) -> None:
    folder = copy(case)
    for file in folder.glob("*_optim_states.pt"):
        state = open_file(file, verify=True)
        inner = state["optimizer_state_dict"]
        inner["optimizer_state_dict" if case.startswith("stage3") else "base_optimizer_state"]["state"] = {}
        inner |= {"zero_stage": int(inner["zero_stage"]), "loss_scaler": None, "param_slice_mappings": None}
        rewrite(file, {"optimizer_state_dict": inner})
    source = DeepSpeedSource(folder)
    assert list(source.kinds()) == ["model"]
    assert source.about.groups[1]["lr"] == 0.02
    assert source.about.scalars == {}
    assert source.read(MODEL, "norm.bias").dtype == torch.float32


def test_a_parameter_without_elements_keeps_its_shape_at_stage_3(copy: Any) -> None:
    folder = copy("stage3-bf16")
    for file in folder.glob("*_model_states.pt"):
        state = open_file(file, verify=True)
        state["module"]["none"] = torch.empty(0, dtype=torch.bfloat16)
        state["frozen_param_shapes"]["none"] = torch.Size([0, 4])
        state["frozen_param_fragments"]["none"] = torch.empty(0, dtype=torch.bfloat16)
        rewrite(file, state)
    source = DeepSpeedSource(folder)
    assert source.about.parameters["none"].shape == (0, 4)
    assert source.read(MODEL, "none").shape == (0, 4)


def rewrite(file: Path, state: Any) -> None:
    """Not in place: what is written may be mapped from it."""
    torch.save(state, file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)


@pytest.mark.parametrize("case", ["stage1-fp32", "stage2-fp16", "stage2-bf16-round-robin"])
def test_files_that_do_not_say_where_parameters_lie_are_read_by_arithmetic(case: str, copy: Any) -> None:
    folder = copy(case)
    for file in folder.glob("*_optim_states.pt"):
        state = open_file(file, verify=True)
        inner = state["optimizer_state_dict"]
        del inner["param_slice_mappings"], inner["param_alignment_paddings"]
        inner |= {"zero_stage": int(inner["zero_stage"]), "loss_scaler": None}
        rewrite(file, {"optimizer_state_dict": inner})
    held = load_file(MADE / case / "held.safetensors")
    found = everything(DeepSpeedSource(folder))
    assert len(found) == 30
    assert all(torch.equal(found[name].view(-1), held[name].view(-1)) for name in held)


def test_a_tensor_that_is_not_there_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="shift"):
        made("stage2-fp32").read("optimizer/exp_avg", "shift")


def test_what_is_read_is_the_callers_own(copy: Any) -> None:
    source = made("stage2-fp32")
    for name in ("embed.weight", "shift", "gain"):
        source.read(MODEL, name).zero_()
        assert source.read(MODEL, name).abs().sum() > 0


# Layout


def test_a_parameter_of_7_over_3_ranks_lies_in_parts_of_3_3_and_1() -> None:
    assert list(Spread(flat=2, start=10, numel=7, size=3)) == [
        Place(0, 2, 10, 3),
        Place(1, 2, 10, 3),
        Place(2, 2, 10, 1),
    ]
    assert list(Spread(flat=0, start=4, numel=2, size=4)) == [Place(0, 0, 4, 1), Place(1, 0, 4, 1)]
    assert list(Spread(flat=0, start=4, numel=0, size=4)) == [Place(0, 0, 4, 0)]


# Stage 0: names


def save_stage_0(folder: Path, module: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> Path:
    state = {"module": module, "buffer_names": [], "optimizer": optimizer, "param_shapes": None, "global_steps": 1}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    return folder


def adam(shapes: list[list[tuple[int, ...]]], **more: Any) -> dict[str, Any]:
    """An optimizer's state whose tensor number n is full of n."""
    state, groups = {}, []
    for group in shapes:
        numbers = list(range(len(state), len(state) + len(group)))
        for number, shape in zip(numbers, group, strict=True):
            state[number] = {"step": torch.tensor(3.0), "exp_avg": torch.full(shape, float(number))}
        groups.append({"lr": 0.1, "params": numbers, **more})
    return {"state": state, "param_groups": groups}


MODULE = {"a": torch.ones(3), "b": torch.ones(3) * 2, "c": torch.ones(2, 3), "d": torch.ones(3) * 4}


def numbers_of(source: DeepSpeedSource) -> dict[str, float]:
    return {name: source.read("optimizer/exp_avg", name).mean().item() for name in source.tensors("optimizer/exp_avg")}


def test_groups_in_the_models_order_find_their_names_by_shape(tmp_path: Path) -> None:
    folder = save_stage_0(tmp_path, MODULE, adam([[(2, 3)], [(3,), (3,), (3,)]]))
    source = DeepSpeedSource(folder)
    assert numbers_of(source) == {"a": 1, "b": 2, "c": 0, "d": 3}
    assert source.about.group_of == {"a": 1, "b": 1, "c": 0, "d": 1}


def test_when_two_assignments_fit_the_names_have_to_be_said(tmp_path: Path) -> None:
    folder = save_stage_0(tmp_path, MODULE, adam([[(3,), (2, 3), (3,)]]))
    with pytest.raises(CheckpointError, match="2 assignments of names to its tensors fit") as caught:
        DeepSpeedSource(folder)
    assert caught.value.code == "checkpoint-unnamed"
    assert numbers_of(DeepSpeedSource(folder, names=[["b", "c", "d"]])) == {"b": 0, "c": 1, "d": 2}
    without = DeepSpeedSource(folder, names=())
    assert list(without.kinds()) == ["model"]
    assert without.about.notes == ["The optimizer's state was left out, as names=() asks."]


def test_groups_in_another_order_are_an_error_and_names_help(tmp_path: Path) -> None:
    folder = save_stage_0(tmp_path, MODULE, adam([[(3,), (3,), (3,), (2, 3)]]))
    with pytest.raises(CheckpointError, match="no assignments"):
        DeepSpeedSource(folder)
    assert numbers_of(DeepSpeedSource(folder, names=[["d", "b", "a", "c"]])) == {"d": 0, "b": 1, "a": 2, "c": 3}


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ([["a", "b"], ["c"]], "2 groups were named, and the optimizer has 1"),
        ([["b", "x", "d"]], "the model has no parameter 'x'"),
        ([["b", "d", "c"]], "d is not the tensor at 1 of group 0"),
        ([["b", "c"]], "group 0 has more tensors than names"),
    ],
)
def test_names_that_do_not_fit_are_told(names: list[list[str]], what: str, tmp_path: Path) -> None:
    folder = save_stage_0(tmp_path, MODULE, adam([[(3,), (2, 3), (3,)]]))
    with pytest.raises(CheckpointError, match=what):
        DeepSpeedSource(folder, names=names)


def test_an_optimizer_made_from_named_parameters_says_them_itself(tmp_path: Path) -> None:
    folder = save_stage_0(tmp_path, MODULE, adam([[(3,), (2, 3), (3,)]], param_names=["d", "c", "a"]))
    source = DeepSpeedSource(folder)
    assert numbers_of(source) == {"d": 0, "c": 1, "a": 2}
    assert source.about.groups == [{"lr": 0.1}]


def test_in_16_bits_the_values_tell_which_is_which(tmp_path: Path) -> None:
    module = {name: tensor.bfloat16() for name, tensor in MODULE.items()}
    state = {"optimizer_state_dict": adam([[(3,), (2, 3)], [(3,)]]), "cur_scale": 1.0}
    masters = [[MODULE["b"] + 1e-4, MODULE["c"]], [MODULE["d"]]]
    source = DeepSpeedSource(save_stage_0(tmp_path, module, {**state, "fp32_groups": masters}))
    assert numbers_of(source) == {"b": 0, "c": 1, "d": 2}
    assert source.read(MODEL, "b").tolist() == (MODULE["b"] + 1e-4).tolist()
    assert source.read(MODEL, "a").dtype == torch.bfloat16


def test_a_flat_group_of_16_bit_weights_is_cut_where_its_values_say(tmp_path: Path) -> None:
    module = {name: tensor.half() for name, tensor in MODULE.items()}
    flat = torch.cat([MODULE["b"], MODULE["c"].view(-1), MODULE["d"]])
    state = {"optimizer_state_dict": adam([[(12,)]]), "fp32_groups_flat": [flat], "cur_scale": 8.0, "cur_iter": 5}
    state["optimizer_state_dict"]["state"][0]["exp_avg"] = torch.arange(12.0)
    source = DeepSpeedSource(save_stage_0(tmp_path, module, state))
    assert source.read("optimizer/exp_avg", "c").tolist() == [[3, 4, 5], [6, 7, 8]]
    assert source.read("optimizer/exp_avg", "d").tolist() == [9, 10, 11]
    assert source.about.scalars == {name: {"step": 3.0} for name in ("b", "c", "d")}
    assert source.about.loss_scale == {"scale": 8.0, "iteration": 5, "last_overflow_iteration": -1, "hysteresis": 1}


def test_a_parameter_without_dims_keeps_its_state(tmp_path: Path) -> None:
    module = {"scale": torch.tensor(2.0), "w": torch.ones(3)}
    optimizer = adam([[(), (3,)]])
    source = DeepSpeedSource(save_stage_0(tmp_path, module, optimizer))
    assert source.read("optimizer/exp_avg", "scale").shape == ()
    assert source.about.scalars["scale"] == {"step": 3.0}


# Memory

PROGRAM = """
import sys, threading, time
import torch
from shoal.checkpoint.formats.deepspeed import DeepSpeedSource

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1])

DeepSpeedSource(sys.argv[2])
base, most, done = anonymous(), 0, False
def watch():
    global most
    while not done:
        most = max(most, anonymous())
        time.sleep(0.0005)
thread = threading.Thread(target=watch)
thread.start()
source = DeepSpeedSource(sys.argv[1])
total = 0
for kind in source.kinds():
    for name in source.tensors(kind):
        tensor = source.read(kind, name)
        total += tensor.nbytes
        most = max(most, anonymous())
done = True
thread.join()
print(total, (most - base) * 1024)
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_reading_takes_the_memory_of_one_parameter_not_of_the_model(stage: int, tmp_path: Path) -> None:
    """200 MB in 51 tensors of 4 MB; only what is not shared with the file counts."""
    count, numel, ranks = 17, 1 << 20, 2
    names = {f"layers.{index}.weight": torch.Size([1024, 1024]) for index in range(count)}
    part = count * numel // ranks
    for rank in range(ranks):
        moments = {"step": 1.0, "exp_avg": torch.ones(part), "exp_avg_sq": torch.ones(part)}
        base = {"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        state: dict[str, Any] = {"zero_stage": stage, "partition_count": ranks}
        if stage == 3:
            state |= {"fp32_flat_groups": [torch.ones(part)], "optimizer_state_dict": base}
        else:
            state |= {"single_partition_of_fp32_groups": [torch.ones(part)], "base_optimizer_state": base}
        torch.save({"optimizer_state_dict": state}, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    module = {name: torch.empty(0) if stage == 3 else torch.ones(()).expand(shape) for name, shape in names.items()}
    model = {"module": module, "buffer_names": [], "param_shapes": [names], "dp_world_size": ranks, "shared_params": {}}
    for rank in range(ranks):
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(model, tmp_path / name)
    small = MADE / f"stage{stage}-fp32" / "checkpoint"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(small)],
        capture_output=True, text=True, timeout=50, check=False,
        # So that malloc keeps nothing that was given back; by itself it keeps up to 32 MiB.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    total, extra = (int(word) for word in done.stdout.split())
    assert total == 3 * count * numel * 4 == 213_909_504
    assert extra < 12 << 20  # a tensor, the next one before it is dropped, and the file's index
