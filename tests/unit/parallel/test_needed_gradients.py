"""A backward pass for some inputs alone computes no product for the others, and has the bits of one for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.parallel.expert.grouped import add_bias_of_experts, grouped_linear
from shoal.parallel.expert.route import RowCounts
from shoal.parallel.loss import linear_cross_entropy
from shoal.parallel.products import LayerProducts
from tests.unit.parallel.low_precision.test_products import products_of

COUNTS = [3, 0, 5]


class CountsProducts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "_scaled_mm")
        return func(*args, **(kwargs or {}))


def drawn(*shape: int) -> torch.Tensor:
    return (torch.rand(shape) - 0.5).requires_grad_()


def few_bits() -> LayerProducts:
    layer = LayerProducts(products_of("rowwise"))
    layer.is_on = True
    return layer


def one_by_one() -> tuple[torch.Tensor, list[torch.Tensor]]:
    inputs = [drawn(8, 4), drawn(3, 4, 6), drawn(3, 6)]
    return grouped_linear(inputs[0], inputs[1], COUNTS, inputs[2]).square().sum(), inputs


def in_few_bits() -> tuple[torch.Tensor, list[torch.Tensor]]:
    counts = RowCounts(COUNTS)
    counts.products = few_bits()
    inputs = [drawn(8, 16), drawn(3, 16, 32)]
    return grouped_linear(inputs[0], inputs[1], counts).square().sum(), inputs


def biases() -> tuple[torch.Tensor, list[torch.Tensor]]:
    inputs = [drawn(8, 4), drawn(3, 4)]
    return add_bias_of_experts(inputs[0], inputs[1], COUNTS).square().sum(), inputs


def layer_of_few_bits() -> tuple[torch.Tensor, list[torch.Tensor]]:
    inputs = [drawn(8, 16), drawn(32, 16)]
    return few_bits().linear(*inputs).square().sum(), inputs


def loss() -> tuple[torch.Tensor, list[torch.Tensor]]:
    inputs = [drawn(8, 4), drawn(9, 4)]
    targets = torch.tensor([0, 1, 2, -100, 4, 5, 6, 8])
    return linear_cross_entropy(inputs[0] * 1, inputs[1], targets, chunk_tokens=4), inputs


# Products of a pass for all, then of one for the inputs and one for the rest. The loss has computed them in forward;
# its second pass computes the logits of two chunks and the gradient of the weight again.
CASES: list[tuple[Callable[[], tuple[torch.Tensor, list[torch.Tensor]]], list[int]]] = [
    (one_by_one, [4, 2, 2]),
    (in_few_bits, [4, 2, 2]),
    (biases, [0, 0, 0]),
    (layer_of_few_bits, [2, 1, 1]),
    (loss, [0, 0, 4]),
]


@pytest.mark.parametrize(("make", "nums"), CASES, ids=lambda each: getattr(each, "__name__", ""))
def test_each_pass_computes_what_it_takes(
    make: Callable[[], tuple[torch.Tensor, list[torch.Tensor]]], nums: list[int]
) -> None:
    found, grads = [], []
    for halves in ([slice(None)], [slice(1), slice(1, None)]):
        torch.manual_seed(0)
        out, inputs = make()
        grads.append([])
        for half in halves:
            with CountsProducts() as products:
                grads[-1] += torch.autograd.grad(out, inputs[half], retain_graph=True)
            found.append(products.num)
    assert found == nums
    for whole, part in zip(*grads, strict=True):
        torch.testing.assert_close(
            whole, part, rtol=0 if make is not loss else 1e-6, atol=0 if make is not loss else 1e-7
        )
