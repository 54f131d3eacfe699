"""Quantised weights: every range of them is the values times their scales, and what is not known is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from shoal.checkpoint.formats.huggingface import SafetensorsWeights
from shoal.checkpoint.formats.model_weights import DequantizedWeights
from shoal.checkpoint.loading_hf import load_hf
from shoal.errors import CheckpointError

FP8 = torch.float8_e4m3fn
BLOCKS = {"quant_method": "fp8", "weight_block_size": [4, 8]}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
PER_ROW = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def write(folder: Path, tensors: dict[str, torch.Tensor], section: dict[str, Any] | None) -> Path:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if section is not None:
        (folder / "config.json").write_text(json.dumps({"text_config": {"quantization_config": section}}))
    return folder


def random_fp8(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(FP8)


# the section of the config, the shape of values, the scales, and the block that one of them is for
CASES: dict[str, tuple[dict[str, Any] | None, tuple[int, ...], torch.Tensor, tuple[int, int]]] = {
    "whole blocks": (BLOCKS, (8, 16), torch.rand(2, 2), (4, 8)),
    "blocks that the matrix cuts": (BLOCKS, (9, 12), torch.rand(3, 2), (4, 8)),
    "rows that another block would divide": (BLOCKS, (6, 16), torch.rand(2, 2), (4, 8)),
    "stacked experts": (BLOCKS, (3, 9, 12), torch.rand(3, 3, 2), (4, 8)),
    "bf16 scales": (BLOCKS, (8, 16), torch.rand(2, 2).bfloat16(), (4, 8)),
    "e8m0 scales": (BLOCKS, (8, 16), torch.tensor([[1, 2], [0.25, 8]]).to(torch.float8_e8m0fnu), (4, 8)),
    "exponents as bytes": (None, (8, 16), torch.tensor([[127, 120], [1, 250]], dtype=torch.uint8), (4, 8)),
    "one scale": (PER_TENSOR, (6, 5), torch.tensor(0.3), (6, 5)),
    "a scale of each row": (PER_ROW, (6, 5), torch.rand(6, 1), (1, 5)),
}


@pytest.mark.parametrize("case", CASES)
def test_each_range_of_fp8_is_its_values_times_the_scales_of_their_blocks(tmp_path: Path, case: str) -> None:
    section, shape, scales, block = CASES[case]
    values = random_fp8(*shape)
    name = "_scale" if section is PER_ROW else "_scale_inv"
    tensors = {"a.weight": values, f"a.weight{name}": scales, "a.activation_scale": torch.tensor(2.0)}
    wide = torch.exp2(scales.double() - 127) if scales.dtype is torch.uint8 else scales.double()
    wide = wide.expand(1, 1) if wide.dim() == 0 else wide
    wide = wide.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., : shape[-2], : shape[-1]]
    expected = (values.double() * wide).float().view(-1)
    with SafetensorsWeights(write(tmp_path, tensors, section)) as stored:
        weights = DequantizedWeights(stored)
        assert list(weights.tensors) == ["a.weight"]
        assert weights.tensors["a.weight"].shape == shape
        check_ranges(weights, "a.weight", expected)


def check_ranges(weights: DequantizedWeights, name: str, expected: torch.Tensor) -> None:
    draw = random.Random(2)
    ranges = [(0, len(expected)), (5, 5), *(sorted(draw.sample(range(len(expected) + 1), 2)) for _ in range(30))]
    for begin, end in ranges:
        assert torch.equal(weights.read_range(name, begin, end), expected[begin:end]), (begin, end)


def test_each_range_of_mxfp4_is_of_the_transposed_experts(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (3, 5, 64), generator=generator)
    exponents = torch.randint(100, 140, (3, 5, 2), generator=generator)
    sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, codes & 1
    magnitude = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * torch.exp2(exponent.double() - 1))
    scale = torch.exp2(exponents.double() - 127).repeat_interleave(32, -1)
    expected = ((1 - 2 * sign) * magnitude * scale).float().transpose(1, 2).reshape(-1)
    packed = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8).view(3, 5, 2, 16)
    tensors = {"e.down_proj_blocks": packed, "e.down_proj_scales": exponents.to(torch.uint8)}
    with SafetensorsWeights(write(tmp_path, tensors, {"quant_method": "mxfp4"})) as stored:
        weights = DequantizedWeights(stored)
        assert {name: tensor.shape for name, tensor in weights.tensors.items()} == {"e.down_proj": (3, 64, 5)}
        check_ranges(weights, "e.down_proj", expected)
        stored.num_bytes_read = 0
        DequantizedWeights(stored).read_range("e.down_proj", 320, 640)
        assert stored.num_bytes_read == 5 * 32 + 5 * 2  # the second expert only


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised as bitsandbytes; Shoal reads fp8"),
        ({"quant_method": "awq"}, "quantised as awq"),
        ({"quant_method": "gptq", "bits": 4}, "quantised as gptq"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "quantised as compressed-tensors, format pack-quantized",
        ),
    ],
)
def test_a_quantisation_that_is_not_read_is_named(tmp_path: Path, section: dict[str, Any], message: str) -> None:
    folder = write(tmp_path, {"weight": torch.zeros(2, 3)}, section)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_hf(nn.Linear(3, 2, bias=False), folder)
    assert "dequantize" in str(caught.value.do) and caught.value.code == "checkpoint-quantized"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": random_fp8(2, 3)}, r"'weight' is float8_e4m3fn in the folder, without scales that Shoal knows"),
        ({"weight": torch.ones(2, 3, dtype=torch.int8)}, r"'weight' is int8 in the folder"),
        ({"weight": random_fp8(2, 3), "weight_scale_inv": torch.ones(2, 2)}, r"\[2, 3\], and its scales \[2, 2\]"),
        ({"weight_blocks": torch.ones(2, 3, 1, 16, dtype=torch.uint8)}, "'weight_scales' is missing; mxfp4 has"),
    ],
)
def test_values_whose_scales_are_missing_or_do_not_fit_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    model = nn.Linear(3, 2, bias=False)
    before = model.weight.detach().clone()
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=message):
            load_hf(model, write(tmp_path, tensors, None), strict=strict)
    assert torch.equal(model.weight, before)
