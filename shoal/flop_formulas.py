"""Floating-point operations of torch's operators for which PyTorch has no formula, from a call's arguments and result.

MATRIX   multiply-adds, 2 flops each
OTHER    one flop for each element and the like
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Formula = Callable[[tuple[Any, ...], dict[str, Any], Any], int]  # of arguments, keyword arguments and result


def torchs() -> dict[Any, Any]:
    """PyTorch's formulas, by operator. From 2.14 on their module imports Triton, so no import of Shoal's reads them."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def _named(names: str) -> list[Any]:
    """PyTorch's operations of these names; one that this version does not have is left out."""
    return [getattr(torch.ops.aten, name) for name in names.split() if hasattr(torch.ops.aten, name)]


def _per_element(position: int, flops: int) -> Formula:
    """So many for each element of one argument."""
    return lambda args, kwargs, out: flops * int(args[position].numel())


def _product(left: int) -> Formula:
    """[..., k] x [k, n], where the arguments begin at ``left``."""
    return lambda args, kwargs, out: 2 * int(args[left].numel()) * int(args[left + 1].shape[-1])


def _grouped(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Products of groups of rows: [tokens, k] x [groups, k, n], or with the groups along another dim."""
    left, right = args[0], args[1]
    if left.dim() == 3 and right.dim() == 2:  # [groups, m, k] x [k, n of all groups]
        return 2 * int(out.numel()) * int(left.shape[-1])
    return _product(0)(args, kwargs, out)


def _attention(query: int, *, with_keys: int, with_values: int) -> Formula:
    """Products with the keys and with the values, so many of each. Shapes: [..., tokens, features of a head].

    Args:
        query: its place among the arguments, before keys and values.
    """

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        queries, keys, values = args[query : query + 3]
        products = 2 * math.prod(queries.shape[:-1]) * int(keys.shape[-2])
        return int(products) * (with_keys * int(queries.shape[-1]) + with_values * int(values.shape[-1]))

    return formula


def _recurrent(passes: int) -> Formula:
    """Each row of the input times each matrix of the layer; ``passes``: 1 forward, 2 backward."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        given = args[1] if isinstance(args[1], list | tuple) else args[1:3]
        rows = int(args[0].numel()) // int(args[0].shape[-1])
        return 2 * passes * rows * sum(int(weight.numel()) for weight in given if weight.dim() == 2)

    return formula


def _bias(position: int, *, min_dims: int) -> Formula:
    """An addition for each element of the result, where there is a bias of so many dims."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        bias = args[position] if len(args) > position else kwargs.get("bias")
        is_added = bias is not None and bias.dim() >= min_dims and kwargs.get("beta", 1) != 0
        return int(out.numel()) if is_added else 0

    return formula


def _norm(weight: int, is_training: Callable[[tuple[Any, ...]], bool] = lambda args: True) -> Formula:
    """Mean, variance, difference, quotient, and one more where there is a weight, at this place.

    With known mean and variance (a batch norm that does not train): a step for each element, two with a weight.
    """

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        has_weight = len(args) > weight and args[weight] is not None
        return int(args[0].numel()) * ((4 if is_training(args) else 1) + has_weight)

    return formula


# Multiply-adds, 2 flops each.
MATRIX: dict[Any, Formula] = {
    **dict.fromkeys(_named("_int_mm _scaled_mm_v2"), _product(0)),
    **dict.fromkeys(_named("_addmm_activation"), _product(1)),
    **dict.fromkeys(_named("mv dot vdot"), _per_element(0, 2)),
    **dict.fromkeys(_named("addmv"), _per_element(1, 2)),
    **dict.fromkeys(_named("_grouped_mm _scaled_grouped_mm"), _grouped),
    **dict.fromkeys(
        _named("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable"),
        _attention(0, with_keys=1, with_values=1),
    ),
    # The scores once more, and the gradients of scores, values, queries and keys.
    **dict.fromkeys(
        _named("_scaled_dot_product_flash_attention_for_cpu_backward"), _attention(1, with_keys=3, with_values=2)
    ),
    **dict.fromkeys(_named("mkldnn_rnn_layer _cudnn_rnn"), _recurrent(1)),
    **dict.fromkeys(_named("mkldnn_rnn_layer_backward _cudnn_rnn_backward"), _recurrent(2)),
}

_ARITHMETIC = "add add_ sub sub_ rsub mul mul_ div div_"
_ACTIVATIONS = (
    "relu relu_ leaky_relu leaky_relu_ elu elu_ silu silu_ gelu gelu_ hardtanh hardtanh_ _prelu_kernel _softmax"
)
_POOLS = (
    "avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices _adaptive_avg_pool2d _adaptive_avg_pool3d"
    " adaptive_max_pool2d adaptive_max_pool3d"
)
_UPSAMPLING = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d"
    " upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"
    " _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)

# One flop per element and the like: arithmetic, activations, norms, pooling, softmax, and the bias of a convolution. As
# in DeepSpeed, the bias of a Linear layer is left out, and so are tanh, exp and the losses.
OTHER: dict[Any, Formula] = {
    **dict.fromkeys(_named(f"{_ARITHMETIC} {_ACTIVATIONS} {_UPSAMPLING}"), lambda args, kwargs, out: int(out.numel())),
    **dict.fromkeys(_named(_POOLS), _per_element(0, 1)),
    # Not counted, and here so that PyTorch's counter runs them as they are: decomposed they round otherwise.
    **dict.fromkeys(_named("silu_backward mish_backward"), _per_element(1, 0)),
    **dict.fromkeys(_named("native_dropout"), _per_element(0, 2)),  # a division and a product, as on the CPU
    **dict.fromkeys(_named("addmm"), _bias(0, min_dims=2)),  # a vector is the bias of a Linear layer
    **dict.fromkeys(_named("baddbmm"), _bias(0, min_dims=0)),
    **dict.fromkeys(
        _named("convolution _convolution convolution_overrideable _slow_conv2d_forward"), _bias(2, min_dims=1)
    ),
    **dict.fromkeys(_named("native_layer_norm _fused_rms_norm"), _norm(2)),
    **dict.fromkeys(_named("native_group_norm"), _norm(1)),
    **dict.fromkeys(
        _named("native_batch_norm cudnn_batch_norm miopen_batch_norm"), _norm(1, lambda args: bool(args[5]))
    ),
    **dict.fromkeys(_named("_native_batch_norm_legit"), _norm(1)),
    **dict.fromkeys(_named("_batch_norm_with_update"), _norm(1)),
    **dict.fromkeys(_named("_native_batch_norm_legit_no_training _batch_norm_no_update"), _norm(1, lambda args: False)),
}
