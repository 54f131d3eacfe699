"""How long a kernel takes on a GPU: what it computes, in tiles and waves, or the bytes that it moves.

product      A GPU computes a product [batch, m, k] x [batch, k, n] in tiles, as many at a time as it has
             multiprocessors: the last wave is as long as a full one, and each tile has a prologue, as long as
             ``prologue`` elements of k. Where tiles are few, k is split among multiprocessors.
attention    likewise, in tiles of 128 queries, at a part of the rate that forward and backward reach
others       ``latency``, and the bytes at the bandwidth of the memory, or at the one that the machine has for the
             operator, or for operands with gaps

Each is at least as long as moving its bytes, and as the shortest kernel.

Source: NVIDIA, "Matrix Multiplication Background User's Guide" (tiles, wave quantization); FlashAttention-2
(arXiv:2307.08691), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.flop_formulas import MATRIX, OTHER, torchs
from shoal.simulation.machines import GpuNode

_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_SPLITS = (1, 2, 4, 8, 16)
_QUERIES = 128  # of a tile of attention
_DIAGONAL = 512  # keys that causal attention computes for a query in addition to its half, and what unequal tiles cost
_GROUPED = ("_grouped_mm", "_scaled_grouped_mm")
_FROM_0 = ("mm", "_scaled_mm", "_scaled_mm_v2", "_int_mm", "bmm", *_GROUPED)  # their arguments
_PRODUCTS = dict.fromkeys(_FROM_0, 0) | {"addmm": 1, "baddbmm": 1}
# Words in the names of aten's operators that compute more than elements and sums.
_TAKE_FLOPS = frozenset(
    (
        *("mm", "bmm", "addmm", "addbmm", "matmul", "conv", "convolution", "linear", "bilinear", "trilinear"),
        *("attention", "rnn", "lstm", "gru", "fft", "linalg", "cholesky", "triangular", "cdist", "pdist", "ctc"),
    )
)


def is_product(operator: Any) -> bool:
    """True of an operator that cuBLAS computes."""
    return operator.overloadpacket.__name__ in _PRODUCTS


def lacks_formula(operator: Any) -> bool:
    """True of an operator that takes flops, or may (a custom one), of which nothing says how many."""
    packet = operator.overloadpacket
    if packet in torchs() or packet in MATRIX or packet in OTHER:
        return False
    if operator.namespace != "aten":
        return operator.namespace not in ("prims", "prim", "c10d", "_c10d_functional")
    words = packet.__name__.split("_")
    return not _TAKE_FLOPS.isdisjoint(words) and "check" not in words


@dataclass(frozen=True)
class Kernel:
    """One call of an operator.

    Attributes: ``nbytes``: read and written in all. ``flops``: of its products, masked ones included. ``shape``: of a
    product [batch, m, n, k], of attention [batch x heads, queries, keys, head size]; empty: it has no shape here.
    ``is_strided``: it reads a tensor whose elements do not follow each other in memory.
    """

    name: str
    dtype: torch.dtype
    nbytes: int
    flops: int = 0
    shape: tuple[int, ...] = ()
    is_causal: bool = False
    is_strided: bool = False

    @property
    def is_backward(self) -> bool:
        return "backward" in self.name

    @classmethod
    def of(cls, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, nbytes: int) -> Kernel:
        """An operator on the device that reads and writes ``nbytes`` in all."""
        name = operator.overloadpacket.__name__
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        flops = _flops(operator.overloadpacket, args, kwargs, result) if nbytes else 0
        if not flops:
            is_strided = any(not each.is_contiguous() and 0 not in each.stride() for each in tensors)
            return cls(name, tensors[0].dtype if tensors else torch.float32, nbytes, is_strided=is_strided)
        is_causal = "attention" in name and _is_causal(operator, args, kwargs)
        return cls(name, tensors[0].dtype, nbytes, flops, _shape(name, args, kwargs, result), is_causal)


def _flops(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    if (formula := torchs().get(packet)) is not None:
        return int(formula(*args, out_val=result, **kwargs))
    ours = MATRIX.get(packet)
    return 0 if ours is None else ours(tuple(args), dict(kwargs), result)


def _shape(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> tuple[int, ...]:
    if name in _PRODUCTS:
        left, right = (value.shape for value in args[_PRODUCTS[name] :][:2])
        if name in _GROUPED and len(left) == len(right) == 2:  # of weights: the groups divide what is summed over
            return int(result.shape[0]), int(left[0]), int(right[1]), -(-int(left[1]) // int(result.shape[0]))
        if name in _GROUPED and len(left) == 2:
            return int(right[0]), -(-int(left[0]) // int(right[0])), int(right[2]), int(left[1])
        return math.prod(left[:-2]), int(left[-2]), int(right[-1]), int(left[-1])
    if "attention" in name:
        query, key = args[1:3] if "backward" in name else args[:2]
        return math.prod(query.shape[:-2]), int(query.shape[-2]), int(key.shape[-2]), int(query.shape[-1])
    return ()


def _is_causal(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if attention leaves out each query's later keys: kernels compute half of the products."""
    place = next((at for at, each in enumerate(operator._schema.arguments) if each.name == "is_causal"), len(args))
    return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))


def kernel_seconds(kernel: Kernel, gpu: GpuNode) -> float:
    """Of a kernel that runs alone."""
    bandwidth = gpu.operator_bandwidths.get(kernel.name, gpu.memory_bandwidth)
    if kernel.is_strided:
        bandwidth = min(bandwidth, gpu.operator_bandwidths.get("strided", bandwidth))
    seconds = gpu.kernel_latency + kernel.nbytes / bandwidth
    if kernel.flops and "attention" in kernel.name:
        seconds = max(seconds, gpu.kernel_latency + _attention_seconds(kernel, gpu))
    elif kernel.flops and kernel.shape:
        seconds = max(seconds, gpu.kernel_latency + _product_seconds(kernel, gpu))
    elif kernel.flops:
        seconds = max(seconds, gpu.kernel_latency + kernel.flops / gpu.flops(kernel.dtype))
    return max(seconds, gpu.kernel_seconds)


def _product_seconds(kernel: Kernel, gpu: GpuNode) -> float:
    batch, m, n, k = kernel.shape
    rate = gpu.flops(kernel.dtype) / gpu.multiprocessors
    best = math.inf
    for tile_m, tile_n in _TILES:
        tiles = batch * -(-m // tile_m) * -(-n // tile_n)
        # A smaller tile reads more of its operands for each product.
        slow = 1.0 if tile_m * tile_n > 128 * 128 else 1.06 if tile_m * tile_n == 128 * 128 else 1.35
        for split in _SPLITS if tiles < gpu.multiprocessors else (1,):
            depth = -(-k // split) + gpu.tile_prologue
            waves = -(-tiles * split // gpu.multiprocessors)
            sums = 8.0 * batch * m * n * (split - 1) / gpu.memory_bandwidth  # partial results in fp32
            best = min(best, waves * 2 * tile_m * tile_n * depth * slow / rate + sums)
    return best


def _attention_seconds(kernel: Kernel, gpu: GpuNode) -> float:
    rate = gpu.flops(kernel.dtype) * (gpu.attention_backward if kernel.is_backward else gpu.attention_forward)
    if not kernel.shape:
        return kernel.flops / rate
    heads, queries, keys, size = kernel.shape
    tiles = heads * -(-queries // _QUERIES)
    waves = math.ceil(tiles / gpu.multiprocessors) * gpu.multiprocessors / tiles
    share = (1 + min(_DIAGONAL / queries, 1.0)) / 2 if kernel.is_causal and queries == keys else 1.0
    # Exponentials take as long for small heads as for large ones.
    return kernel.flops * share * waves * (0.86 + 0.14 * 128 / size if size < 128 else 1.0) / rate
