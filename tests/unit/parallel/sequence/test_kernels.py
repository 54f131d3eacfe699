"""What a tile's kernel on GPUs calls."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import _fa3 as flash_attention_3

from shoal import attention
from shoal.parallel.sequence import kernels
from shoal.parallel.sequence.kernels import FlashKernel


def test_flash_attention_3_can_take_the_place_of_torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """``activate_flash_attention_impl`` replaces torch's two operators: the tiles call these, with what it takes."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def records(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = args, kwargs
            return (args[0], args[0][..., 0].float()) if name == "forward" else args[1:4]

        return call

    aten = SimpleNamespace(
        _scaled_dot_product_flash_attention=records("forward"),
        _scaled_dot_product_flash_attention_backward=records("backward"),
    )
    monkeypatch.setattr(kernels, "_aten", aten)
    query, key = torch.zeros(1, 4, 6, 8, dtype=torch.bfloat16), torch.zeros(1, 2, 6, 8, dtype=torch.bfloat16)
    out, lse = FlashKernel().forward(query, key, key, True, 0.5)
    FlashKernel().backward(out, (query, key, key, out, lse), True, 0.5)
    forward = inspect.signature(flash_attention_3._fa3_scaled_dot_product_flash_attention_forward_impl_default)
    backward = inspect.signature(flash_attention_3._fa3_scaled_dot_product_flash_attention_backward_impl)
    given = forward.bind(*calls["forward"][0], **calls["forward"][1]).arguments
    assert given["query"] is query and given["key"] is key and given["is_causal"] and given["scale"] == 0.5
    given = backward.bind(*calls["backward"][0], **calls["backward"][1]).arguments
    assert given["out"] is out and given["value"] is key and (given["max_q"], given["max_k"]) == (6, 6)
    assert given["logsumexp"].dtype == torch.float32 and given["dropout_p"] == 0.0 and given["is_causal"]


@pytest.mark.parametrize("has_mask", [False, True])
def test_autocast_rounds_no_scores(has_mask: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([4.0, 4.0, 1.0])[:, None, None, None, None]  # large scores: 16 bits round them by much
    tensors = (torch.randn(3, 1, 2, 16, 32, generator=generator) * scale).bfloat16().requires_grad_()
    mask = torch.ones(16, 16, dtype=torch.bool).tril()

    def run(is_autocast: bool) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            options: dict[str, Any] = {"mask": mask} if has_mask else {"is_causal": True}
            out = attention(*tensors, softcap=50.0, **options)
        return out, torch.autograd.grad(out.sum(), tensors)[0]

    assert all(torch.equal(one, other) for one, other in zip(run(True), run(False), strict=True))
