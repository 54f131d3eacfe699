"""The kernels that only a GPU has, each beside a plain path: the largest difference, and the time of both.

Attention by flash and memory-efficient kernels with the log-sum-exp that ring attention merges, torch's grouped
product for experts (also where experts have no rows), rows of experts gathered and summed, tiles of attention merged,
the gated activation and codes of 8 bits (in Triton kernels), products of 8 bits against those of 16 (also of experts),
the loss in chunks (in a Triton kernel), the fused optimizer, and AdamW in one Triton kernel with the casts around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.first_gpu.common import Finding, Setting, attempt, main
from shoal.device import capability
from shoal.kernels.use import launch_obstacle
from shoal.optim import one_kernel_adam
from shoal.optim.one_kernel_adam import AdamRange
from shoal.parallel.expert import grouped
from shoal.parallel.expert.route import RowCounts
from shoal.parallel.loss import linear_cross_entropy
from shoal.parallel.low_precision.formats import ScaledFloat8
from shoal.parallel.low_precision.groups import take_groups
from shoal.parallel.low_precision.products import LowPrecisionProducts
from shoal.parallel.low_precision.recipes import RECIPES
from shoal.parallel.products import LayerProducts, Products
from shoal.parallel.sequence import ring
from shoal.parallel.sequence.attention import attention
from shoal.parallel.sequence.chunks import Tile
from shoal.parallel.sequence.kernels import PlainKernel, kernel_for
from shoal.parallel.swiglu import swiglu

# By capability, the recipes that torch's operators compute.
_RECIPES_OF = {(9, 0): ("tensorwise", "rowwise", "blockwise"), (10, 0): ("tensorwise", "rowwise", "mxfp8")}

Kernel = Callable[[], Sequence[Tensor]]


def check(setting: Setting) -> Iterable[Finding]:
    if setting.is_gpu:
        obstacle = launch_obstacle()
        yield Finding("Triton launches kernels", not obstacle, obstacle or "yes")
    for dtype, heads, bound in (
        (torch.bfloat16, (16, 16), 2e-2),
        (torch.bfloat16, (16, 4), 2e-2),
        (torch.float32, (16, 4), 2e-3),
    ):
        what = f"attention, {str(dtype)[6:]}, {heads[0]} heads on {heads[1]}"
        yield attempt(what, partial(_attention, setting, dtype, heads, bound, what))
    for counts in ([512, 512, 512, 512], [1024, 0, 1000, 24], [0, 0, 0, 2048]):
        what = f"grouped product, rows of experts {counts}"
        yield attempt(what, partial(_grouped, setting, counts, what))
    yield attempt("rows of experts", lambda: _rows_of_experts(setting))
    yield attempt("merged tiles of attention", lambda: _merged_tiles(setting))
    yield attempt("gated activation", lambda: _gated(setting))
    yield attempt("codes of 8 bits", lambda: _float8(setting))
    for recipe in ("tensorwise", "rowwise", "blockwise", "mxfp8"):
        what = f"products in 8 bits, {recipe}"
        yield attempt(what, partial(_products, setting, recipe, what))
    for recipe in ("rowwise", "rowwise_with_gw_hp"):
        what = f"grouped product in 8 bits, {recipe}"
        yield attempt(what, partial(_grouped_in_8_bits, setting, recipe, what))
    yield attempt("loss in chunks", lambda: _loss(setting))
    yield attempt("fused AdamW", lambda: _adamw(setting))
    yield attempt("AdamW in one kernel", lambda: _adamw_in_one_kernel(setting))


def _compare(what: str, ours: Kernel, plain: Kernel, bound: float, setting: Setting) -> Finding:
    far = max(
        float((mine.double() - right.double()).norm() / right.double().norm().clamp(min=1e-9))
        for mine, right in zip(ours(), plain(), strict=True)
    )
    times = f", {setting.milliseconds(ours):.3f} ms against {setting.milliseconds(plain):.3f} ms" * setting.is_gpu
    return Finding(what, far <= bound, f"relative difference {far:.1e}{times}", f"at most {bound:g}")


def _attention(setting: Setting, dtype: torch.dtype, heads: tuple[int, int], bound: float, what: str) -> Finding:
    length, size = (32, 8) if setting.is_tiny else (2048, 64)
    shapes = [(1, count, length, size) for count in (heads[0], heads[1], heads[1], heads[0])]
    *leaves, gradient = (torch.randn(shape, device=setting.device, dtype=dtype) for shape in shapes)
    query, key, value = (leaf.requires_grad_() for leaf in leaves)
    name = type(kernel_for(query, value)).__name__

    def ours() -> Sequence[Tensor]:
        out = attention(query, key, value, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out, (query, key, value), gradient)]

    def plain() -> Sequence[Tensor]:
        kernel, saved = PlainKernel(), (query.detach(), key.detach(), value.detach())
        out, lse = kernel.forward(saved[0], saved[1], saved[2], True, size**-0.5)
        return [out, *kernel.backward(gradient, (*saved, out, lse), True, size**-0.5)]

    return _compare(f"{what} ({name})", ours, plain, bound, setting)


def _grouped(setting: Setting, counts: list[int], what: str) -> Finding:
    width, inner = (16, 24) if setting.is_tiny else (1024, 2048)
    rows, weight, bias = (
        torch.randn(*shape, device=setting.device, dtype=torch.bfloat16).requires_grad_()
        for shape in ((sum(counts), width), (len(counts), width, inner), (len(counts), inner))
    )
    groups = grouped.GROUPS_IN_BF16

    def by(function: type[torch.autograd.Function], *arguments: object) -> Kernel:
        def run() -> Sequence[Tensor]:
            out: Tensor = function.apply(rows, weight, bias, counts, *arguments)
            return [out.detach(), *torch.autograd.grad(out, (rows, weight, bias), torch.ones_like(out))]

        return run

    if groups.takes(rows, weight) or not setting.is_gpu:
        return _compare(what, by(grouped._InOneKernel, groups), by(grouped._OneByOne), 1e-2, setting)
    return Finding(what, None, "torch's grouped kernel does not take these tensors on this GPU")


def _grouped_in_8_bits(setting: Setting, recipe: str, what: str) -> Finding:
    """128 experts of 256 rows, as a rank of Qwen3-30B-A3B with 4,096 tokens has them."""
    products = LowPrecisionProducts(RECIPES[recipe])
    if (reason := take_groups(products, setting.device)) is not None:
        is_known = capability(torch.empty(0, device=setting.device))[0] in (9, 10)
        return Finding(what, not is_known, f"a product for each expert: {reason}")
    counts, width, inner = RowCounts([256] * 128), 2048, 1536
    rows, weight = (
        torch.randn(*shape, device=setting.device, dtype=torch.bfloat16).requires_grad_()
        for shape in ((sum(counts), width), (len(counts), width, inner))
    )

    def by(kind: Products) -> Kernel:
        layer = LayerProducts(kind)
        layer.is_on = kind is products

        def run() -> Sequence[Tensor]:
            counts.products = layer
            out = grouped.grouped_linear(rows, weight, counts)
            return [out.detach(), *torch.autograd.grad(out, (rows, weight), torch.ones_like(out))]

        return run

    return _compare(what, by(products), by(Products()), 8e-2, setting)


def _rows_of_experts(setting: Setting) -> Finding:
    """6 bytes of each row of 16 bits to gather, 2 to sum. On an H100 of 3.35 TB/s: 0.4 ms for both."""
    num_tokens, k, width = (32, 2, 16) if setting.is_tiny else (8192, 8, 2048)
    tokens = torch.randn(num_tokens, width, device=setting.device, dtype=torch.bfloat16)
    dot_with = torch.randn(num_tokens * k, width, device=setting.device, dtype=torch.bfloat16)
    order = torch.randperm(num_tokens * k, device=setting.device)
    row_of, weights = order.argsort().view(-1, k), torch.rand(num_tokens, k, device=setting.device)
    rows, sums, scale = torch.empty_like(dot_with), torch.empty_like(tokens), weights.view(-1)[order]

    def by_kernel() -> Sequence[Tensor]:
        dots = grouped.gather_rows(tokens, order // k, scale, rows, dot_with)
        grouped.sum_rows(dot_with, row_of, weights, sums)
        assert dots is not None
        return [rows, dots, sums]

    def by_operators() -> Sequence[Tensor]:
        taken = tokens.float()[order // k]
        out = (dot_with.float()[row_of] * weights[..., None]).sum(1)
        return [taken * scale[:, None], (taken * dot_with).sum(1), out]

    return _compare("rows of experts", by_kernel, by_operators, 1e-2, setting)


def _merged_tiles(setting: Setting) -> Finding:
    """10 bytes an element of an output of 16 bits. On an H100 of 3.35 TB/s: 0.1 ms."""
    shape = (1, 2, 32, 8) if setting.is_tiny else (1, 32, 8192, 128)
    tile = Tile(None, 0, shape[2], 0, shape[2])
    first, second = (torch.randn(shape, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    of_first, of_second = (torch.randn(shape[:3], device=setting.device) for _ in range(2))

    def by_kernel() -> Sequence[Tensor]:
        merged = ring._MergedOutput(first, first)
        merged.add(tile, first, of_first.clone())
        merged.add(tile, second, of_second)
        return [merged.out, merged.lse]

    def by_operators() -> Sequence[Tensor]:
        total, lse = first.float(), of_first.clone()
        ring._merge(total, lse, second, of_second)
        return [total, lse]

    return _compare("merged tiles of attention", by_kernel, by_operators, 1e-5, setting)


def _gated(setting: Setting) -> Finding:
    """16 bytes an element of 16 bits in forward and backward. On an H100 of 3.35 TB/s: 0.3 ms, and 0.7 by operators."""
    rows, width = (32, 16) if setting.is_tiny else (16_384, 4096)
    gate_up = torch.randn(rows, 2 * width, device=setting.device, dtype=torch.bfloat16).requires_grad_()
    gradient = torch.randn(rows, width, device=setting.device, dtype=torch.bfloat16)

    def by(function: Callable[[Tensor], Tensor]) -> Kernel:
        def run() -> Sequence[Tensor]:
            out = function(gate_up)
            return [out.detach(), *torch.autograd.grad(out, gate_up, gradient)]

        return run

    def by_operators(tensor: Tensor) -> Tensor:
        gate, up = tensor.chunk(2, dim=-1)
        return functional.silu(gate) * up

    return _compare("gated activation", by(swiglu), by(by_operators), 2e-2, setting)


def _float8(setting: Setting) -> Finding:
    size = 32 if setting.is_tiny else 8192
    matrix = torch.randn(size, 2 * size, device=setting.device, dtype=torch.bfloat16).t()  # as of the weight's gradient
    form = ScaledFloat8(torch.float8_e4m3fn, (1, None))
    plain = partial(form.encode_by_operators, matrix)
    return _compare("codes of 8 bits", partial(form.encode, matrix), plain, 0.0, setting)


def _products(setting: Setting, recipe: str, what: str) -> Finding:
    """On a GPU whose products know the recipe by torch's operator; elsewhere the reason why not is the finding."""
    products = LowPrecisionProducts(RECIPES[recipe])
    if (reason := products.refusal(torch.bfloat16, setting.device)) is not None:
        is_known = recipe in _RECIPES_OF.get(capability(torch.empty(0, device=setting.device)), ())
        return Finding(what, not is_known, f"emulated: {reason}")
    rows, width, columns = (32, 32, 48) if setting.is_tiny else (4096, 4096, 16_384)
    x, weight = (torch.randn(size, width, device=setting.device, dtype=torch.bfloat16) for size in (rows, columns))
    gradient = torch.randn(rows, columns, device=setting.device, dtype=torch.bfloat16)

    def by(kind: Products) -> Kernel:
        return lambda: [kind.output(x, weight), kind.of_input(gradient, weight), kind.of_weight(gradient, x)]

    return _compare(what, by(products), by(Products()), 8e-2, setting)


def _loss(setting: Setting) -> Finding:
    tokens, width, vocabulary = (64, 16, 96) if setting.is_tiny else (4096, 1024, 32_768)
    hidden = torch.randn(tokens, width, device=setting.device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocabulary, width, device=setting.device, dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=setting.device)

    def ours() -> Sequence[Tensor]:
        loss = linear_cross_entropy(hidden, weight, targets)
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    def plain() -> Sequence[Tensor]:
        loss = functional.cross_entropy(functional.linear(hidden, weight).float(), targets)
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    return _compare("loss in chunks", ours, plain, 2e-2, setting)


def _adamw(setting: Setting) -> Finding:
    numel = 1000 if setting.is_tiny else 50_000_000
    values, gradient = (torch.randn(numel, device=setting.device) for _ in range(2))
    parameters = [values.clone().requires_grad_() for _ in range(2)]
    for parameter in parameters:
        parameter.grad = gradient
    optimizers = [torch.optim.AdamW([p], lr=1e-3, fused=i == 0, foreach=False) for i, p in enumerate(parameters)]

    def by(index: int) -> Kernel:
        def run() -> Sequence[Tensor]:
            optimizers[index].step()
            return [parameters[index].detach()]

        return run

    return _compare("fused AdamW", by(0), by(1), 1e-5, setting)


def _adamw_in_one_kernel(setting: Setting) -> Finding:
    """28 bytes an element against 48. On an H100 of 3.35 TB/s: 0.42 ms against 0.72 ms for 50 million elements."""
    numel = 1000 if setting.is_tiny else 50_000_000
    values, gradient = (torch.randn(numel, device=setting.device) for _ in range(2))
    mains = [torch.nn.Parameter(values.clone()) for _ in range(2)]
    narrow = [torch.empty(numel, device=setting.device, dtype=torch.bfloat16) for _ in range(3)]
    gradient, scratch = narrow.pop().copy_(gradient), torch.empty_like(values)
    ours, theirs = (torch.optim.AdamW([main], lr=1e-3, fused=True) for main in mains)

    def by_kernel() -> Sequence[Tensor]:
        one_kernel_adam.update(ours, ours.param_groups[0], [AdamRange(mains[0], gradient, narrow[0])], 0.5)
        return [mains[0].detach(), narrow[0]]

    def by_operators() -> Sequence[Tensor]:
        mains[1].grad = scratch.copy_(gradient).mul_(0.5)
        theirs.step()
        narrow[1].copy_(mains[1].detach())
        return [mains[1].detach(), narrow[1]]

    return _compare("AdamW in one kernel", by_kernel, by_operators, 1e-5, setting)


if __name__ == "__main__":
    main(check, __doc__)
