"""Functions that run tile by tile: outputs and gradients of one call, one tile's activations, each parameter once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import ModelError, UsageError
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel import recompute
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.tiled import tile_modules, tiled, tiled_sum
from tests.helpers.live_storages import LiveStorages
from tests.helpers.recompute_models import unconfigure


class FeedForward(nn.Module):
    def __init__(self, width: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.unused = nn.Linear(2, 2)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), self.dropout))


def gradients_of(module: nn.Module, x: Tensor, y: Tensor) -> list[Tensor | None]:
    """Of a sum in which positions count differently; then cleared."""
    weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
    (y.float() * weights).sum().backward()
    found = [x.grad, *(p.grad for p in module.parameters())]
    x.grad = None
    module.zero_grad()
    return found


@pytest.mark.parametrize("num_tiles", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("shape", [(11, 6), (2, 11, 6)])
def test_outputs_and_gradients_are_those_of_one_call(shape: tuple[int, ...], num_tiles: int) -> None:
    module, x = FeedForward(), torch.randn(shape, requires_grad=True)
    whole, made = module(x), tiled(module, x, num_tiles=num_tiles)
    torch.testing.assert_close(made, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients_of(module, x, made), gradients_of(module, x, whole), rtol=1e-5, atol=1e-6)


def test_exact_numbers_give_exact_bits() -> None:
    # Integers below 2**24 add up in fp32 without rounding, in any order.
    module = nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape))
    x = torch.randint(-4, 5, (2, 12, 4)).float().requires_grad_()
    gradient = torch.randint(-4, 5, (2, 12, 3)).float()
    inputs = [x, *module.parameters()]
    whole = torch.autograd.grad(module(x), inputs, gradient)
    made = torch.autograd.grad(tiled(module, x, num_tiles=5), inputs, gradient)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(made, whole, strict=True))


def test_each_parameter_gets_its_gradient_once() -> None:
    module, x = FeedForward(), torch.randn(2, 12, 6, requires_grad=True)
    arrived: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    tiled(module, x, num_tiles=4).sum().backward()
    assert {"down.weight", "up.bias", "up.weight"} <= set(arrived)
    assert len(set(arrived)) == len(arrived)
    assert module.unused.weight.grad is None  # no tile read it


def test_a_16_bit_parameters_gradient_is_summed_in_fp32() -> None:
    module = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    x = torch.ones(1, 1024, 1, dtype=torch.bfloat16)
    tiled(module, x, num_tiles=1024).float().sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.item() == 1024  # in bf16 the sum of ones stops at 256


def test_dropout_drops_the_same_elements_in_the_backward_pass() -> None:
    module, x = FeedForward(dropout=0.5), torch.randn(1, 8, 6, requires_grad=True)
    torch.manual_seed(3)
    made = tiled(module, x, num_tiles=4)
    after = torch.rand(1)
    torch.manual_seed(3)
    whole = torch.cat([module(part) for part in x.chunk(4, 1)], 1)
    assert torch.equal(after, torch.rand(1))
    torch.testing.assert_close(made, whole)
    torch.testing.assert_close(gradients_of(module, x, made), gradients_of(module, x, whole))


def test_dropout_by_a_named_random_state_drops_the_same_elements_in_the_backward_pass() -> None:
    module, x = FeedForward(dropout=0.5), torch.randn(1, 8, 6, requires_grad=True)

    def forked(part: Tensor) -> Tensor:
        with recompute.get_cuda_rng_tracker().fork():
            return module(part)

    try:
        recompute.model_parallel_cuda_manual_seed(3)
        made = tiled(forked, x, num_tiles=4, parameters=module.parameters())
        gradients = gradients_of(module, x, made)
        with recompute.get_cuda_rng_tracker().fork():
            after = torch.rand(1)
        recompute.model_parallel_cuda_manual_seed(3)
        whole = torch.cat([forked(part) for part in x.chunk(4, 1)], 1)
        with recompute.get_cuda_rng_tracker().fork():
            assert torch.equal(after, torch.rand(1))
    finally:
        unconfigure()
    torch.testing.assert_close(made, whole)
    torch.testing.assert_close(gradients, gradients_of(module, x, whole))


def test_autocast_counts_in_the_backward_pass_too() -> None:
    module, x = FeedForward(), torch.randn(1, 8, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made, whole = tiled(module, x, num_tiles=2), module(x)
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(gradients_of(module, x, made), gradients_of(module, x, whole), rtol=1e-2, atol=1e-2)


def test_a_plain_function_several_tensors_and_further_arguments() -> None:
    module, x = FeedForward(), torch.randn(2, 9, 6, requires_grad=True)
    mask, scale = torch.rand(2, 9, 1, requires_grad=True), torch.randn(6, requires_grad=True)

    def function(x: Tensor, mask: Tensor, power: int, scale: Tensor) -> Tensor:
        return module(x) * mask**power * scale

    inputs = [x, mask, scale, module.up.weight, module.down.weight]
    whole = torch.autograd.grad(function(x, mask, 2, scale).sum(), inputs)
    made = tiled(function, x, mask, num_tiles=4, arguments=(2, scale))
    torch.testing.assert_close(torch.autograd.grad(made.sum(), inputs), whole)


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_sums_and_stacks_of_losses(factor: float) -> None:
    head, x = nn.Linear(6, 13), torch.randn(2, 11, 6, requires_grad=True)
    targets = torch.randint(0, 13, (2, 11))
    inputs = [x, *head.parameters()]

    def loss(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(head(x).flatten(0, 1), targets.flatten(), reduction="sum")

    expected = torch.autograd.grad(factor * loss(x, targets), inputs)
    total = factor * tiled_sum(loss, x, targets, num_tiles=3)
    torch.testing.assert_close(total, factor * loss(x, targets))
    first = torch.autograd.grad(total, inputs, retain_graph=True)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(torch.autograd.grad(total, inputs), expected)  # computed again
    stacked = tiled(loss, x, targets, num_tiles=3, dim=1, output="stack")
    assert stacked.shape == (3,)
    parts = torch.tensor([1.0, 2.0, -1.0])
    by_hand = sum(
        p * loss(*z) for p, z in zip(parts, zip(x.chunk(3, 1), targets.chunk(3, 1), strict=True), strict=True)
    )
    torch.testing.assert_close(torch.autograd.grad(stacked, inputs, parts), torch.autograd.grad(by_hand, inputs))


def test_one_tiles_activations_exist_at_a_time() -> None:
    width, length = 8, 4096
    module, x = FeedForward(width), torch.randn(1, length, width, requires_grad=True)
    peaks = []
    for num_tiles in (1, 64):
        with LiveStorages() as storages:
            tiled(module, x, num_tiles=num_tiles).sum().backward()
        peaks.append(storages.peak)
    x_bytes = 4 * length * width
    assert peaks[0] > 8 * x_bytes
    assert peaks[1] < 4.5 * x_bytes


@pytest.mark.parametrize("recomputed", [False, True])
def test_modules_of_a_model_run_in_tiles_without_editing_it(recomputed: bool) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(97, 16, 2, 16, 2))
    tokens = torch.randint(0, 97, (2, 17))
    results = []
    for is_tiled in (False, True):
        made: list[Any] = [tile_modules(model, "blocks.*.feed_forward", tile_tokens=5)] if is_tiled else []
        made += [recompute_blocks(model, "Block")] if is_tiled and recomputed else []
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        results.append((loss.detach(), [p.grad for p in model.parameters()]))
        model.zero_grad()
        for each in reversed(made):
            each.remove()
    torch.testing.assert_close(results[1], results[0])
    assert "forward" not in vars(model.blocks[0].feed_forward)


def test_without_gradients_nothing_is_saved() -> None:
    module, x = FeedForward(), torch.randn(1, 8, 6)
    with torch.no_grad():
        assert tiled(lambda x: module(x), x, num_tiles=2).grad_fn is None
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    assert not tiled(module, x, num_tiles=2).requires_grad


def test_wrong_uses_are_refused() -> None:
    module, x = FeedForward(), torch.randn(2, 8, 6, requires_grad=True)
    with pytest.raises(UsageError, match="0 tiles of tensors that have 8 positions"):
        tiled(module, x, num_tiles=0)
    with pytest.raises(UsageError, match="3, 8 positions along dim 1"):
        tiled(module, x, x[:, :3], num_tiles=2, dim=1)
    with pytest.raises(UsageError, match=r"shape \(2, 1, 6\) for a tile of 4 positions"):
        tiled(lambda x: x.sum(1, keepdim=True), x, num_tiles=2)
    with pytest.raises(UsageError, match="return one number"):
        tiled_sum(lambda x: x, x, num_tiles=2)
    outer = 2 * x[:1, :1]
    with pytest.raises(UsageError, match=r"computed outside of it \(by MulBackward0\)"):
        tiled(lambda x: x * outer, x, num_tiles=2)
    with pytest.raises(ModelError, match="but it was to be tiled"):
        tile_modules(module, "Up", tile_tokens=2)
    with pytest.raises(UsageError, match="tile_tokens = 0"):
        tile_modules(module, "up", tile_tokens=0)
