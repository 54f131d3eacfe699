"""Cross-entropy of a linear layer in chunks: what logits and ``F.cross_entropy`` give, without the logits' memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.errors import UsageError
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel.loss import LinearCrossEntropy, linear_cross_entropy
from tests.helpers.live_storages import LiveStorages

TOKENS, WIDTH, VOCABULARY = 37, 8, 53


def inputs(dtype: torch.dtype = torch.float64, *, ignored: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, targets."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    bias = torch.randn(VOCABULARY, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    targets[:ignored] = -100
    return hidden, weight, bias, targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    logits = F.linear(hidden, weight, bias).float()
    if (softcap := options.pop("softcap", None)) is not None:
        logits = softcap * torch.tanh(logits / softcap)
    z_loss, reduction = options.pop("z_loss", 0.0), options.get("reduction", "mean")
    loss = F.cross_entropy(logits, targets, **options)
    squares = z_loss * logits.logsumexp(-1).square() * (targets != options.get("ignore_index", -100))
    count = (targets != -100).sum()
    return loss + {"none": squares, "sum": squares.sum(), "mean": squares.sum() / count}[reduction]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"softcap": 2.0, "z_loss": 0.1, "label_smoothing": 0.2}]
)
def test_loss_and_gradients_are_those_of_logits_and_cross_entropy(
    options: dict[str, Any], reduction: Any, has_bias: bool
) -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    asked = (hidden, weight, bias) if has_bias else (hidden, weight)
    used = bias if has_bias else None
    ours = linear_cross_entropy(hidden, weight, targets, used, reduction=reduction, chunk_tokens=10, **options)
    theirs = plain(hidden, weight, targets, used, reduction=reduction, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    factor = torch.linspace(0.5, 2, TOKENS) if reduction == "none" else torch.tensor(3.0)
    mine = torch.autograd.grad(ours, asked, factor, retain_graph=True)
    for again in (mine, torch.autograd.grad(ours, asked, factor)):  # the second pass computes them again
        for got, expected in zip(again, torch.autograd.grad(theirs, asked, factor, retain_graph=True), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("trained", [(True, False), (False, True), (False, False)])
def test_frozen_inputs_get_no_gradient(trained: tuple[bool, bool]) -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    hidden.requires_grad_(trained[0])
    weight.requires_grad_(trained[1])
    loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.requires_grad == any(trained)
    if any(trained):
        loss.backward()
    assert [hidden.grad is not None, weight.grad is not None] == list(trained)


def test_no_token_to_learn_from_gives_zero_loss_and_zero_gradients() -> None:
    hidden, weight, _, targets = inputs(torch.float32, ignored=TOKENS)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert float(loss.detach()) == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_weights_gradient_is_summed_over_chunks_in_fp32(dtype: torch.dtype) -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    exact = torch.autograd.grad(plain(hidden, weight, targets, None, reduction="sum"), weight)[0]
    low_hidden, low_weight = (each.detach().to(dtype).requires_grad_() for each in (hidden, weight))
    loss = linear_cross_entropy(low_hidden, low_weight, targets, reduction="sum", chunk_tokens=1)
    loss.backward()
    assert loss.dtype == torch.float32
    assert low_weight.grad is not None
    assert low_weight.grad.dtype == dtype
    error = (low_weight.grad.float() - exact).norm() / exact.norm()
    assert error < {torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]


def test_under_autocast_it_computes_as_linear_does() -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, targets)
        theirs = plain(hidden, weight, targets, None)
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_it_holds_one_chunk_of_logits() -> None:
    tokens, width, vocabulary, chunk = 1024, 16, 500, 64
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    peaks = []
    for compute in (
        lambda: linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk),
        lambda: F.cross_entropy(F.linear(hidden, weight), targets),
    ):
        hidden.grad = weight.grad = None
        with LiveStorages() as storages:
            compute().backward()
        peaks.append(storages.peak)
    chunk_bytes, gradients_bytes = 4 * chunk * vocabulary, 4 * width * (tokens + vocabulary)
    assert peaks[0] < 2 * chunk_bytes + 1.2 * gradients_bytes
    assert peaks[1] > 6 * peaks[0]


def test_the_module_ties_its_weight_and_gives_logits_without_targets() -> None:
    embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
    head = LinearCrossEntropy(WIDTH, VOCABULARY, tied_to=embedding.weight, label_smoothing=0.1, chunk_tokens=7)
    targets = torch.randint(0, VOCABULARY, (2, 9))
    hidden = embedding(targets)
    logits = head(hidden)
    assert logits.shape == (2, 9, VOCABULARY)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(head(hidden, targets), expected)
    own = LinearCrossEntropy(WIDTH, VOCABULARY, has_bias=True)
    assert [name for name, _ in own.named_parameters()] == ["weight", "bias"]


@pytest.mark.parametrize("tied", [True, False])
def test_a_gpt_takes_it_in_place_of_logits_and_cross_entropy(tied: bool) -> None:
    config = GPTConfig(97, 16, 2, 16, 2, tied=tied)
    tokens = torch.randint(0, 97, (2, 17))
    results = []
    for loss in (None, linear_cross_entropy):
        torch.manual_seed(0)
        model = GPT(config, loss=loss)
        value = model(tokens[:, :-1], tokens[:, 1:])
        value.backward()
        results.append((value.detach(), [p.grad for p in model.parameters()]))
        assert model(tokens[:, :-1]).shape == (2, 16, 97)
    torch.testing.assert_close(results[0], results[1])


def test_inputs_that_do_not_fit_are_refused() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    with pytest.raises(UsageError, match="width 8, a weight of shape \\(53, 8\\) and 36 targets"):
        linear_cross_entropy(hidden, weight, targets[1:])
    with pytest.raises(UsageError, match=r"a bias of shape \(52,\)"):
        linear_cross_entropy(hidden, weight, targets, bias[1:])
    targets[7] = VOCABULARY
    with pytest.raises(UsageError, match=r"targets go from .* to 53, and the weight has 53 rows"):
        linear_cross_entropy(hidden, weight, targets)
