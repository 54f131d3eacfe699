"""Floating-point operations of one call of PyTorch's, where PyTorch itself has no formula for them.

Two tables, by operation:

    MATRIX   multiply-adds, 2 flops each, of products that ``torch.utils.flop_counter`` does not know
    OTHER    one flop per element and the like: arithmetic, activations, norms, pooling, softmax, and the bias of a
             convolution. As in DeepSpeed, the bias of a Linear layer is left out, and so are tanh, exp and the losses.

A formula is called with the operation's arguments, its keyword arguments and its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Formula = Callable[[tuple[Any, ...], dict[str, Any], Any], int]

_aten = torch.ops.aten


def _named(names: str) -> list[Any]:
    """PyTorch's operations of these names; one that this version does not have is left out."""
    return [getattr(_aten, name) for name in names.split() if hasattr(_aten, name)]


# products


def _first_times_last(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """[..., k] x [k, n]."""
    return 2 * int(args[0].numel()) * int(args[1].shape[-1])


def _per_element(position: int) -> Formula:
    """A multiply-add for each element of one argument."""
    return lambda args, kwargs, out: 2 * int(args[position].numel())


def _added_product(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    return _first_times_last(args[1:], kwargs, out)


def _grouped(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Products of groups of rows: [tokens, k] x [groups, k, n], or with the groups along another dim."""
    left, right = args[0], args[1]
    if left.dim() == 3 and right.dim() == 2:  # [groups, m, k] x [k, n of all groups]
        return 2 * int(out.numel()) * int(left.shape[-1])
    return _first_times_last(args, kwargs, out)


def _attention(query: Any, key: Any, value: Any) -> tuple[int, int]:
    """Flops of the product with the keys, and of that with the values. Shapes: [..., tokens, features of a head]."""
    rows, num_keys = math.prod(query.shape[:-1]), int(key.shape[-2])
    return 2 * rows * num_keys * int(query.shape[-1]), 2 * rows * num_keys * int(value.shape[-1])


def _attention_forward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    return sum(_attention(*args[:3]))


def _attention_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """The scores once more, and the gradients of scores, values, queries and keys."""
    with_keys, with_values = _attention(*args[1:4])
    return 3 * with_keys + 2 * with_values


def _recurrent(passes: int) -> Formula:
    """Each row of the input times each matrix of the layer; ``passes``: 1 forward, 2 backward."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        given = args[1] if isinstance(args[1], list | tuple) else args[1:3]
        rows = int(args[0].numel()) // int(args[0].shape[-1])
        return 2 * passes * rows * sum(int(weight.numel()) for weight in given if weight.dim() == 2)

    return formula


MATRIX: dict[Any, Formula] = {
    **dict.fromkeys(_named("_int_mm"), _first_times_last),
    **dict.fromkeys(_named("_addmm_activation"), _added_product),
    **dict.fromkeys(_named("mv dot vdot"), _per_element(0)),
    **dict.fromkeys(_named("addmv"), _per_element(1)),
    **dict.fromkeys(_named("_grouped_mm"), _grouped),
    **dict.fromkeys(
        _named("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable"),
        _attention_forward,
    ),
    **dict.fromkeys(_named("_scaled_dot_product_flash_attention_for_cpu_backward"), _attention_backward),
    **dict.fromkeys(_named("mkldnn_rnn_layer _cudnn_rnn"), _recurrent(1)),
    **dict.fromkeys(_named("mkldnn_rnn_layer_backward _cudnn_rnn_backward"), _recurrent(2)),
}


# everything else


def _each_result(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    return int(out.numel())


def _each_input(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    return int(args[0].numel())


def _dropout(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """As on the CPU, where dropout is a division and a product."""
    return 2 * int(args[0].numel())


def _bias(position: int, *, min_dims: int) -> Formula:
    """An addition for each element of the result, where there is a bias of so many dims."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        bias = args[position] if len(args) > position else kwargs.get("bias")
        is_added = bias is not None and bias.dim() >= min_dims and kwargs.get("beta", 1) != 0
        return int(out.numel()) if is_added else 0

    return formula


def _norm(weight: int) -> Formula:
    """Mean, variance, difference, quotient, and one more where there is a weight; ``weight``: its place."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        has_weight = len(args) > weight and args[weight] is not None
        return int(args[0].numel()) * (5 if has_weight else 4)

    return formula


def _batch_norm(training: int) -> Formula:
    """As other norms while it trains; with known mean and variance, a step for each element, two with a weight."""

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        has_weight = args[1] is not None
        if training < 0 or not args[training]:
            return int(args[0].numel()) * (2 if has_weight else 1)
        return int(args[0].numel()) * (5 if has_weight else 4)

    return formula


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

OTHER: dict[Any, Formula] = {
    **dict.fromkeys(_named(f"{_ARITHMETIC} {_ACTIVATIONS} {_UPSAMPLING}"), _each_result),
    **dict.fromkeys(_named(_POOLS), _each_input),
    **dict.fromkeys(_named("native_dropout"), _dropout),
    **dict.fromkeys(_named("addmm"), _bias(0, min_dims=2)),  # a vector is the bias of a Linear layer
    **dict.fromkeys(_named("baddbmm"), _bias(0, min_dims=0)),
    **dict.fromkeys(
        _named("convolution _convolution convolution_overrideable _slow_conv2d_forward"), _bias(2, min_dims=1)
    ),
    **dict.fromkeys(_named("native_layer_norm _fused_rms_norm"), _norm(2)),
    **dict.fromkeys(_named("native_group_norm"), _norm(1)),
    **dict.fromkeys(_named("native_batch_norm cudnn_batch_norm miopen_batch_norm"), _batch_norm(5)),
    **dict.fromkeys(_named("_native_batch_norm_legit"), _norm(1)),
    **dict.fromkeys(_named("_batch_norm_with_update"), _norm(1)),
    **dict.fromkeys(_named("_native_batch_norm_legit_no_training _batch_norm_no_update"), _batch_norm(-1)),
}
