"""Counts of flops against hand arithmetic; the profiler that DeepSpeed's users call, and the page that it prints."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shoal.errors import UsageError
from shoal.observe.flops import ModuleCounts, OperationCount
from shoal.observe.flops_profiler import FlopsProfiler, get_model_profile


def counted(function: Callable[[], Any]) -> tuple[int, int]:
    """Multiply-adds and flops of a call."""
    count = OperationCount()
    with count:
        function()
    assert not count.failed
    return count.macs, count.flops


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


@pytest.mark.parametrize("activation", [functional.silu, functional.mish])
def test_gradients_have_the_same_bits_where_backward_is_counted(activation: Callable[..., torch.Tensor]) -> None:
    """Rank 0 alone counts: ranks that hold the same parameters must go on with the same values."""
    x = normal(64, 64).requires_grad_()
    activation(x).square().sum().backward()
    expected, x.grad = x.grad, None
    loss = activation(x).square().sum()
    counted(loss.backward)
    assert torch.equal(x.grad, expected)


# products


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_linear_layer_is_its_product_and_its_bias_is_left_out(grad: Any, has_bias: bool) -> None:
    layer = nn.Linear(8, 16, bias=has_bias)
    with grad():
        assert counted(lambda: layer(normal(3, 4, 8))) == (3 * 4 * 8 * 16, 2 * 3 * 4 * 8 * 16)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_is_its_products_and_a_bias_for_each_output(groups: int) -> None:
    layer = nn.Conv2d(4, 6, kernel_size=3, stride=2, groups=groups)
    macs = 2 * 6 * 3 * 3 * (4 // groups) * 3 * 3  # rows, channels, 7 // 2 outputs each way, inputs of each
    assert counted(lambda: layer(normal(2, 4, 7, 7))) == (macs, 2 * macs + 2 * 6 * 3 * 3)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("stride", "padding", "output_padding", "side"), [(1, 0, 0, 10), (2, 1, 1, 16)])
def test_a_transposed_convolution_is_counted_at_its_inputs_and_its_bias_at_its_outputs(
    groups: int, stride: int, padding: int, output_padding: int, side: int
) -> None:
    layer = nn.ConvTranspose2d(4, 8, 3, stride=stride, padding=padding, output_padding=output_padding, groups=groups)
    macs = 2 * 8 * 8 * 4 * (8 // groups) * 3 * 3
    assert counted(lambda: layer(normal(2, 4, 8, 8))) == (macs, 2 * macs + 2 * 8 * side * side)


def test_a_transposed_convolution_with_an_output_size_is_counted_alike() -> None:
    layer = nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1)
    macs = 2 * 8 * 8 * 4 * 8 * 3 * 3
    expected = (macs, 2 * macs + 2 * 8 * 16 * 16)
    assert counted(lambda: layer(normal(2, 4, 8, 8), output_size=(2, 8, 16, 16))) == expected


@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_is_two_products_also_with_fewer_keys_than_queries(key_heads: int) -> None:
    query, key, value = normal(2, 4, 16, 8), normal(2, key_heads, 12, 8), normal(2, key_heads, 12, 8)
    macs = 2 * (2 * 4 * 16 * 12 * 8)
    attend = functional.scaled_dot_product_attention
    assert counted(lambda: attend(query, key, value, enable_gqa=True)) == (macs, 2 * macs)


def test_backward_of_attention_is_five_products() -> None:
    inputs = [normal(2, 4, 16, 8).requires_grad_() for _ in range(3)]
    loss = functional.scaled_dot_product_attention(*inputs).sum()
    assert counted(loss.backward)[0] == 5 * (2 * 4 * 16 * 16 * 8)


@pytest.mark.parametrize(
    ("left", "right", "macs"),
    [
        ((8,), (8,), 8),
        ((4, 8), (8,), 32),
        ((8,), (8, 5), 40),
        ((4, 8), (8, 5), 160),
        ((3, 4, 8), (3, 8, 5), 480),
        ((2, 1, 4, 8), (3, 8, 5), 960),
    ],
)
def test_a_product_is_a_multiply_add_for_each_result_and_each_term(
    left: tuple[int, ...], right: tuple[int, ...], macs: int
) -> None:
    assert counted(lambda: torch.matmul(normal(*left), normal(*right))) == (macs, 2 * macs)


@pytest.mark.parametrize("added", [(4, 5), (1, 5), (4, 1)])
def test_a_matrix_that_is_added_to_a_product_is_one_flop_for_each_result(added: tuple[int, ...]) -> None:
    assert counted(lambda: torch.addmm(normal(*added), normal(4, 8), normal(8, 5))) == (160, 340)
    assert counted(lambda: torch.baddbmm(normal(*added), normal(2, 4, 8), normal(2, 8, 5))) == (320, 680)


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad])
def test_recurrent_layers_are_counted_for_each_step_layer_and_direction(grad: Any) -> None:
    lstm = nn.LSTM(4, 8, num_layers=2, bidirectional=True)
    gru = nn.GRU(4, 8)
    with grad():
        # 5 steps of 2 rows; 4 gates of 8; the second layer's input is both directions' 16
        assert counted(lambda: lstm(normal(5, 2, 4)))[0] == 10 * 2 * (32 * (4 + 8) + 32 * (16 + 8))
        assert counted(lambda: gru(normal(5, 2, 4)))[0] == 10 * 24 * (4 + 8)


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad])
def test_an_encoder_layer_is_counted_also_where_pytorch_would_run_it_in_one_call(grad: Any) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    projections = 2 * 3 * (3 * 8 * 8 + 8 * 8 + 2 * 8 * 16)
    attention = 2 * (2 * 2 * 3 * 3 * 4)
    with grad():
        assert counted(lambda: layer(normal(2, 3, 8)))[0] == projections + attention
    assert torch.backends.mha.get_fastpath_enabled()


# everything else


@pytest.mark.parametrize(
    ("function", "flops"),
    [
        (lambda: torch.mul(normal(2, 3, 4), normal(4)), 24),
        (lambda: torch.mul(normal(8), normal(2, 8)), 16),
        (lambda: normal(4, 1, 7) * normal(1, 5, 7), 140),
        (lambda: 1 - normal(3, 4), 12),
        (lambda: normal(3, 4).add_(normal(4)), 12),
        (lambda: functional.relu(normal(3, 4)), 12),
        (lambda: functional.gelu(normal(3, 4)), 12),
        (lambda: normal(3, 4).softmax(-1), 12),
        (lambda: functional.avg_pool2d(normal(1, 2, 4, 4), 2), 32),
        (lambda: functional.max_pool1d(normal(2, 8), 2), 16),
        (lambda: functional.interpolate(normal(1, 2, 4, 4), scale_factor=2), 128),
        (lambda: functional.layer_norm(normal(3, 4), (4,)), 48),
        (lambda: nn.LayerNorm(4)(normal(3, 4)), 60),
        (lambda: nn.GroupNorm(2, 4)(normal(3, 4)), 60),
        (lambda: nn.BatchNorm1d(4, track_running_stats=False)(normal(3, 4)), 60),
        (lambda: nn.BatchNorm1d(4).eval()(normal(3, 4)), 24),
        (lambda: nn.BatchNorm1d(4, affine=False).eval()(normal(3, 4)), 12),
        (lambda: functional.dropout(normal(3, 4), 0.5), 24),
        (lambda: torch.tanh(normal(3, 4)), 0),
        (lambda: functional.embedding(torch.tensor([1, 2]), normal(4, 3)), 0),
    ],
)
def test_other_operations_are_flops_but_no_multiply_adds(function: Callable[[], Any], flops: int) -> None:
    assert counted(function) == (0, flops)


def test_a_formula_that_does_not_fit_is_named_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise ValueError("a shape that nobody thought of")

    monkeypatch.setitem(__import__("shoal.observe.flops", fromlist=["OTHER"]).OTHER, torch.ops.aten.relu, broken)
    count = OperationCount()
    with count:
        torch.relu(normal(3)) * 2
    assert count.failed == {"aten.relu"}
    assert count.flops == 3


# by module


class Shared(nn.Module):
    """One layer in three places, or three layers."""

    def __init__(self, *, is_shared: bool) -> None:
        super().__init__()
        first = nn.Linear(100, 100, bias=False)
        layers = [first if is_shared else nn.Linear(100, 100, bias=False) for _ in range(3)]
        self.blocks = nn.ModuleList([nn.Sequential(layer) for layer in layers])

    def forward(self, x: torch.Tensor) -> Any:
        return tuple(block(part) for block, part in zip(self.blocks, x.split(100, dim=1), strict=True))


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_layer_in_several_places_is_counted_for_each_call(is_shared: bool) -> None:
    model = Shared(is_shared=is_shared)
    flops, macs, params = get_model_profile(model, (1, 300), print_profile=False, as_string=False)
    assert (flops, macs, params) == (60_000, 30_000, 10_000 if is_shared else 30_000)


def test_a_module_has_what_its_parts_have_and_its_own() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.ModuleList([nn.Linear(8, 2)]))
    counts = ModuleCounts(model[0])
    counts.start()
    model[0](normal(5, 4))
    model[0](normal(5, 4))
    counts.stop()
    model[0](normal(5, 4))  # no longer counted
    assert [counts.of(each).macs for each in (model[0], model[0][0], model[0][1])] == [320, 320, 0]
    assert [counts.of(each).flops for each in (model[0], model[0][0], model[0][1])] == [720, 640, 80]
    assert counts.of(model[0]).calls == 2
    assert counts.of(model[0]).seconds >= counts.of(model[0][0]).seconds > 0


def test_a_list_of_modules_has_the_sum_of_what_is_in_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x)) + x

    model = Model()
    counts = ModuleCounts(model)
    counts.start()
    model(normal(1, 4))
    counts.stop()
    assert (counts.of(model.layers).macs, counts.of(model).flops) == (32, 68)


def test_ignored_classes_have_no_figures_and_their_parents_have_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_list=[nn.Linear])
    model(normal(1, 4))
    assert profiler.get_total_flops() == 36
    profiler.stop_profile()
    counts = profiler._running()
    assert [counts.of(each).flops for each in model] == [0, 4]
    profiler.end_profile()


def test_a_module_that_calls_itself_counts_its_work_once() -> None:
    class Deeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            x = self.layer(x)
            return self(x, depth - 1) if depth else x

    model = Deeper()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(normal(1, 4))
    profiler.stop_profile()
    assert profiler.macs == 3 * 16


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_compiled_blocks_are_counted_uncompiled_and_the_page_says_so(
    how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    if how == "in place":
        model[1].compile(backend="eager")
    else:
        model[1] = torch.compile(model[1], backend="eager")
    model(normal(2, 4))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(normal(2, 4))
    profiler.stop_profile()
    profiler.print_model_profile()
    assert (profiler.macs, profiler.flops) == (2 * (32 + 64), 4 * (32 + 64) + 16)
    assert "1 compiled modules ran uncompiled while they were counted" in capsys.readouterr().out


# the profiler


def everything_on(model: nn.Module) -> list[Any]:
    return [
        (dict(module._forward_pre_hooks), dict(module._forward_hooks), sorted(vars(module)))
        for module in model.modules()
    ]


def test_profiles_one_after_another_are_equal_and_leave_nothing_behind() -> None:
    class Attention(nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(query, key, value)

    model = Attention()
    before = everything_on(model), functional.scaled_dot_product_attention, torch.Tensor.__matmul__, torch.bmm
    profiler = FlopsProfiler(model)
    for _ in range(3):
        profiler.start_profile()
        model(*(normal(2, 4, 16, 8) for _ in range(3)))
        profiler.stop_profile()
        assert (profiler.get_total_flops(), profiler.get_total_macs()) == (65_536, 32_768)
        profiler.end_profile()
        after = everything_on(model), functional.scaled_dot_product_attention, torch.Tensor.__matmul__, torch.bmm
        assert after == before


@pytest.mark.parametrize("mode", ["forward", "generate"])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_model_that_fails_is_given_back_as_it_was_and_can_be_profiled_again(mode: Any, is_named: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2, bias=False)
            self.fails = True

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            result = self.linear(inputs)
            if self.fails:
                raise RuntimeError("in the middle")
            return result

        def generate(self, inputs: torch.Tensor) -> torch.Tensor:
            return self(self(inputs) @ normal(2, 4))

    model = Model()
    handle = model.register_forward_pre_hook(lambda module, args: None)
    before = everything_on(model)
    inputs: dict[str, Any] = {"kwargs": {"inputs": normal(1, 4)}} if is_named else {"args": [normal(1, 4)]}
    with pytest.raises(RuntimeError, match=r"in the middle"):
        get_model_profile(model, **inputs, mode=mode, warm_up=0, print_profile=False)
    assert everything_on(model) == before
    assert all(module.training for module in model.modules())
    model.fails = False
    once = get_model_profile(model, **inputs, mode=mode, print_profile=False, as_string=False)
    calls = 2 if mode == "generate" else 1
    assert once == (16 * calls, 8 * calls, 8)
    handle.remove()


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
            nn.Conv2d(16, 120, 5), nn.Tanh(),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.softmax(self.classifier(self.features(x).flatten(1)), dim=1)


def test_a_whole_network_has_deepspeeds_published_figures_and_they_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = LeNet().train()
    figures = get_model_profile(model, (1024, 1, 32, 32), top_modules=3, as_string=False)
    assert figures == (866_076_672, 426_516_480, 61_706)
    assert model.training
    out = capsys.readouterr().out
    assert re.search(r"params of model: +61\.71 K\n", out)
    assert re.search(r"fwd MACs per GPU: +426\.52 MMACs\n", out)
    assert re.search(r"fwd flops per GPU: +866\.08 M\n", out)
    # the tree: name, class, parameters, multiply-adds
    second = 10 * 10 * 16 * 6 * 25 * 1024
    assert re.search(rf"    3 +Conv2d +2\.42 K = 3\.92 % +{second / 1e6:.2f} MMACs = 57\.62 %", out)
    assert re.search(r" 2  Conv2d 50\.69 K, Linear 11\.01 K, Tanh 0  Conv2d 415\.33 MMACs, Linear 11\.18 MMACs", out)


def test_the_figures_come_as_text_too() -> None:
    assert get_model_profile(LeNet(), (1024, 1, 32, 32), print_profile=False) == ("866.08 M", "426.52 MMACs", "61.71 K")


def test_depth_and_number_of_modules_are_limits_and_the_tree_can_be_left_out(tmp_path: Path) -> None:
    profiler = FlopsProfiler(LeNet())
    profiler.start_profile()
    profiler.model(normal(1, 1, 32, 32))
    path = tmp_path / "new" / "profile.txt"
    profiler.print_model_profile(profile_step=7, module_depth=1, top_modules=2, output_file=str(path))
    page = path.read_text()
    assert "Flops Profiler: step 7" in page
    assert "classifier  Sequential" in page
    assert "Conv2d" not in page
    profiler.print_model_profile(detailed=False, output_file=str(path))
    assert "Conv2d" in path.read_text()
    assert "classifier" not in path.read_text()
    with pytest.raises(IsADirectoryError):
        profiler.print_model_profile(output_file=str(tmp_path))
    profiler.end_profile()


def test_an_engine_of_whom_ever_gives_its_ranks_to_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    engine = SimpleNamespace(
        world_size=8, dp_world_size=None, seq_dp_world_size=4, mp_world_size=1, has_moe_layers=False,
        train_micro_batch_size_per_gpu=lambda: 3, wall_clock_breakdown=lambda: False,
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(128, 128))
    profiler = FlopsProfiler(model, engine)
    profiler.start_profile()
    for _ in range(3):
        model(normal(64, 128))
    profiler.print_model_profile(detailed=False)
    profiler.end_profile()
    out = capsys.readouterr().out
    found = {
        label: re.search(rf"{label}:\s+(\S+)", out)
        for label in ("world size", "data parallel size", "batch size per GPU")
    }
    assert {label: match and match[1] for label, match in found.items()} == {
        "world size": "8", "data parallel size": "4", "batch size per GPU": "3",
    }  # fmt: skip
    assert profiler.flops == 3 * 2 * 64 * 128 * 128


def test_figures_that_are_not_there_are_an_error_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = FlopsProfiler(nn.Linear(2, 2))
    for ask in (
        profiler.get_total_flops,
        profiler.get_total_macs,
        profiler.get_total_duration,
        profiler.get_total_params,
    ):
        with pytest.raises(UsageError, match=r"the profiler has no figures"):
            ask()
    profiler.print_model_profile()
    profiler.print_model_aggregated_profile()
    profiler.stop_profile()
    profiler.end_profile()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"there is no input"),
        ({"input_shape": [1, 2]}, r"input_shape must be a tuple of at least one number, got \[1, 2\]"),
        ({"input_shape": ()}, r"input_shape must be a tuple"),
    ],
)
def test_a_profile_without_input_is_an_assertion(arguments: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        get_model_profile(nn.Linear(2, 2), **arguments)


def test_a_model_that_is_no_module_is_an_assertion() -> None:
    model: Any = len
    with pytest.raises(AssertionError, match=r"model must be a torch\.nn\.Module, got builtin_function_or_method"):
        get_model_profile(model, (1, 2))
