"""Which format buffers have beside 16-bit parameters."""

from __future__ import annotations

import torch
from torch import nn

from shoal.build.materialize import buffer_formats, widen

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Router(nn.Module):
    _keep_in_fp32_modules_strict = ("bias_*", "table")
    _keep_in_fp32_modules = ("scale",)

    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.register_buffer("bias_of_experts", torch.zeros(2, dtype=dtype))
        self.register_buffer("scale", torch.zeros(2, dtype=dtype))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))


def model() -> nn.Module:
    made = nn.Module()
    made.first, made.norm, made.router = nn.Linear(2, 2), nn.BatchNorm1d(2), Router()
    made.register_buffer("table", torch.zeros(2, dtype=BF16))
    made.register_buffer("frequencies", torch.zeros(2))
    return made


def test_buffers_keep_their_format_but_for_the_statistics_of_a_norm_and_those_that_a_module_names() -> None:
    named = {"router.bias_of_experts": FP32}
    assert buffer_formats(model(), BF16) == {"norm.running_mean": BF16, "norm.running_var": BF16, **named}
    under_fp16 = {"norm.running_mean": FP16, "norm.running_var": FP16, "router.scale": FP32, **named}
    assert buffer_formats(model(), FP16) == under_fp16
    assert buffer_formats(model(), None) == {}


def test_a_format_for_buffers_is_that_of_all_but_the_named_ones() -> None:
    found = buffer_formats(model(), BF16, FP16)
    assert found.pop("router.bias_of_experts") == FP32
    assert found == dict.fromkeys(
        ["norm.running_mean", "norm.running_var", "router.scale", "table", "frequencies"], FP16
    )


def test_a_list_of_names_stands_in_for_the_models() -> None:
    assert "router.bias_of_experts" not in buffer_formats(model(), BF16, names=[])
    found = buffer_formats(model(), BF16, names=["r*ter.s", "ble"])
    assert {name for name, dtype in found.items() if dtype == FP32} == {"router.scale", "table"}


def test_widening_leaves_everything_else_as_it_is() -> None:
    changed = model()
    widen(changed, BF16)
    assert changed.router.bias_of_experts.dtype == FP32
    assert {changed.router.scale.dtype, changed.table.dtype} == {BF16}
    widen(changed, FP32, ["table"])
    assert changed.table.dtype == BF16
    widen(changed, BF16, ["table"])
    assert changed.table.dtype == FP32
