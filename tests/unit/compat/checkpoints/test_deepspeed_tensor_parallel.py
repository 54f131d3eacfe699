"""Checkpoints of DeepSpeed's tensor-parallel runs are read whole, equal to what its own converter joins."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.checkpoint.manifest import MODEL
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource
from shoal.compat.checkpoints.tensor_parallel import TensorParallelLayout
from shoal.errors import CheckpointError, NotBuiltError
from tests.helpers.deepspeed_made import MADE, everything, made

INFORMATION = "universal_checkpoint_info"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tensors_equal_those_that_deepspeeds_converter_joins(stage: int) -> None:
    source = made(f"tp2-stage{stage}")
    held, found = load_file(MADE / f"tp2-stage{stage}" / "held.safetensors"), everything(source)
    assert len(held) >= 54 and {key for key in held if "fused.weight" in key}
    for key, tensor in held.items():
        assert torch.equal(found[key].view(-1), tensor.view(-1)), key
    assert set(found) - set(held) <= {"model/shift", "model/gain", "model/seen"}
    assert found["model/lm_head.weight"].shape == (11, 7) and found["model/blocks.0.down.weight"].shape == (7, 13)
    assert found["model/seen"] == 3
    assert torch.equal(found["model/shift"], torch.linspace(-1, 1, 7))
    assert source.about.scalars["norm.bias"]["step"] == 3
    assert source.about.num_ranks == (2 if stage == 1 else 4)
    assert source.about.client_state == {"epoch": 2}


def test_stage_0_is_read_with_the_names_of_the_groups() -> None:
    from tests.fixtures.deepspeed.model import WithFused, fill, groups_of

    model = fill(WithFused())
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    names = [[name_of[parameter] for parameter in group["params"]] for group in groups_of(model)]
    found = everything(DeepSpeedSource(MADE / "tp2-stage0" / "checkpoint", names=names))
    for key, tensor in load_file(MADE / "tp2-stage1" / "held.safetensors").items():
        torch.testing.assert_close(found[key], tensor.view(found[key].shape), rtol=1e-5, atol=1e-7, check_dtype=False)


def test_patterns_without_a_map_join_the_same(deepspeed_copy: Any) -> None:
    """As Megatron-DeepSpeed and AutoTP before 0.19 write them."""
    folder = deepspeed_copy("tp2-stage1")

    def change(information: dict[str, Any]) -> None:
        del information["affine_map"]
        information["tp_replicated_parameter_patterns"] = [
            r"blocks.\d+.down.bias", "embed.weight", "norm.weight", "norm.bias", "shift"
        ]  # fmt: skip
        information["parameter_with_row_parallelism_patterns"] = [r"blocks.\d+.back.weight", r"blocks.\d+.down.weight"]

    _edit(folder, change)
    held = load_file(MADE / "tp2-stage1" / "held.safetensors")
    for key, tensor in everything(DeepSpeedSource(folder)).items():
        if key in held:
            assert torch.equal(tensor, held[key].view(tensor.shape)), key


def test_weights_are_tied_where_the_first_ranks_file_alone_says_so(deepspeed_copy: Any) -> None:
    """As DeepSpeed saves a tied vocabulary-parallel embedding below stage 3."""
    folder = deepspeed_copy("tp2-stage1")
    for rank in range(2):
        file = folder / f"mp_rank_0{rank}_model_states.pt"
        state = torch.load(file, weights_only=False)
        state["module"]["logits.weight"] = state["module"]["lm_head.weight"]
        state["shared_params"] = {} if rank else {"logits.weight": "lm_head.weight"}
        torch.save(state, file)
    source = DeepSpeedSource(folder)
    assert source.about.aliases == {"lm_head.weight": ("logits.weight",)}
    assert "logits.weight" not in source.tensors(MODEL)
    held = load_file(MADE / "tp2-stage1" / "held.safetensors")
    assert torch.equal(source.read(MODEL, "lm_head.weight"), held["model/lm_head.weight"])


def _joined(information: dict[str, Any], name: str, *parts: torch.Tensor) -> torch.Tensor:
    layout = TensorParallelLayout(information, len(parts), "file")
    join = layout.join_of(name, [tuple(part.shape) for part in parts])
    whole = join.join(lambda rank: parts[rank].clone())
    assert tuple(whole.shape) == join.whole_shape
    return whole


def test_each_entry_of_the_patterns_joins_as_megatron_split() -> None:
    whole = torch.arange(48.0).view(12, 4)
    halves = whole.split([6, 6])
    assert torch.equal(_joined({}, "layers.0.up", *halves), whole)
    assert torch.equal(
        _joined({"parameter_with_row_parallelism_patterns": [r"\d+.x"]}, "0.x", *whole.chunk(2, 1)), whole
    )
    gate, up = whole.split([6, 6])
    parts = [torch.cat([gate[:3], up[:3]]), torch.cat([gate[3:], up[3:]])]
    assert torch.equal(_joined({"parameter_with_2_sub_params_cat_dim_0": ["glu"]}, "glu.weight", *parts), whole)
    query, key, value = whole.split([8, 2, 2])
    parts = [torch.cat([query[:4], key[:1], value[:1]]), torch.cat([query[4:], key[1:], value[1:]])]
    sub = {"patterns": ["qkv"], "shape": ((8, 2, 2), -1), "partition_dim": 0}
    assert torch.equal(_joined({"parameter_with_sub_params": [sub]}, "qkv.weight", *parts), whole)
    equal = {**sub, "shape": (2, -1)}
    parts = [torch.cat([gate[:3], up[:3]]), torch.cat([gate[3:], up[3:]])]
    assert torch.equal(_joined({"parameter_with_sub_params": [equal]}, "qkv.weight", *parts), whole)
    vocabulary = {"vocabulary_parameter_patterns": ["embed"], "original_vocab_size": 11}
    assert torch.equal(_joined(vocabulary, "embed.weight", *halves), whole[:11])
    assert torch.equal(
        _joined({"parameter_to_average_patterns": ["norm"]}, "norm", *halves), (halves[0] + halves[1]) / 2
    )
    assert torch.equal(_joined({"tp_replicated_parameter_patterns": ["norm"]}, "norm", halves[0], halves[0]), halves[0])


@pytest.mark.parametrize("pattern", ["(a+)+$", "a{9}", ".*", "[a-z]+", r"\w+", r"\d+" * 5])
def test_a_pattern_that_could_run_for_long_is_not_run(pattern: str) -> None:
    with pytest.raises(CheckpointError, match="is no pattern of parameter names that is run"):
        _joined({"tp_replicated_parameter_patterns": [pattern]}, "a" * 40, torch.ones(2), torch.ones(2))


# What is damaged, absent, or not written down


def test_a_file_of_a_rank_that_is_absent_is_named(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("tp2-stage1")
    (folder / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="the model file of tensor-parallel rank 1 is missing"):
        DeepSpeedSource(folder)
    (folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="2 tensor-parallel ranks saved it, and files of 1 are here"):
        DeepSpeedSource(folder)
    (folder / "mp_rank_00_model_states.pt").rename(folder / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="the model file of tensor-parallel rank 0 is missing"):
        DeepSpeedSource(folder)


def test_a_model_that_does_not_say_how_it_was_split_is_an_error_that_says_what_to_do(deepspeed_copy: Any) -> None:
    folder = deepspeed_copy("tp2-stage1")
    _edit(folder, None)
    with pytest.raises(CheckpointError, match="it does not say how tensors were split") as caught:
        DeepSpeedSource(folder)
    assert caught.value.code == "checkpoint-split"
    assert "convert it with DeepSpeed's ds_to_universal" in str(caught.value)


def _shift(information: dict[str, Any]) -> None:
    _blocks(information, "blocks.0.up.weight")[0]["source"][0] = 7


def _outside(information: dict[str, Any]) -> None:
    _blocks(information, "blocks.0.up.weight")[0]["dest"] = [1, [7, 1]]


def _lost(information: dict[str, Any]) -> None:
    del _blocks(information, "blocks.0.fused.weight")[0]


def _repeated(information: dict[str, Any]) -> None:
    block = _blocks(information, "blocks.0.up.weight")[0]
    block["shape"], block["dest"] = [1 << 40, 7], [0, [0, 0]]


def _scaled(information: dict[str, Any]) -> None:
    _blocks(information, "blocks.0.down.bias")[0]["scale"] = 0.5


def _blocks(information: dict[str, Any], name: str) -> Any:
    return information["affine_map"]["params"][f"^{re.escape(name)}$"]["ranks"][0]["pieces"]


@pytest.mark.parametrize(
    ("change", "what", "kind"),
    [
        (_outside, "the blocks of blocks.0.up.weight on rank 0 lie outside of its part", CheckpointError),
        (_lost, "133 of the 182 elements of blocks.0.fused.weight are in the files", CheckpointError),
        (_repeated, "the blocks of blocks.0.up.weight on rank 0 lie outside of its part", CheckpointError),
        (_scaled, "blocks.0.down.bias, of which a rank holds a multiple", NotBuiltError),
    ],
)
def test_a_map_that_does_not_make_a_whole_is_an_error(
    change: Callable[[dict[str, Any]], None], what: str, kind: type[Exception], deepspeed_copy: Any
) -> None:
    folder = deepspeed_copy("tp2-stage1")
    _edit(folder, change)
    with pytest.raises(kind, match=what):
        DeepSpeedSource(folder)


def test_a_map_is_followed(deepspeed_copy: Any) -> None:
    """Elements lie where the map says, not where the order of the ranks would put them."""
    folder = deepspeed_copy("tp2-stage1")
    before = DeepSpeedSource(folder).read(MODEL, "blocks.0.up.weight")
    _edit(folder, _shift)
    after = DeepSpeedSource(folder).read(MODEL, "blocks.0.up.weight")
    assert torch.equal(after[1:7], before[:6]) and torch.equal(after[8:], before[8:])


def _edit(folder: Any, change: Callable[[dict[str, Any]], None] | None) -> None:
    """Change what the model files say of the split; None: take it away."""
    for file in folder.glob("mp_rank_*_model_states.pt"):
        state = torch.load(file, weights_only=False)
        if change is None:
            del state[INFORMATION]
        else:
            change(state[INFORMATION])
        torch.save(state, file)
