"""A model over a grid of ranks (``grid``): its layers split in place, by the plan that splits them over one dim.

    grid = Grid.open(world, mesh, "2d")
    local = parallelize_grid(model, grid)     # or one block, with grid.split and grid.gather around it
    local["blocks.0.attention.qkv.weight"]    # which elements of the whole parameter this rank holds

    style of the plan    on the grid
    column               a linear from the outer layout to the inner one
    row                  a linear computed back, from the inner layout to the outer one
    prepare_input        nothing
    vocab, vocab_head    split over all ranks of the grid along the vocabulary; outside the layers only
    replicate, skip      whole on every rank; outside the layers only

Norms whose size is the width of the residual stream are computed on the grid. Lists of layers get their input split and
their output gathered: what is before and after them has whole activations on every rank.

    Y = X W^T + b                      gathered             multiplied          summed
    forward                            X, W                 Y = X W^T           Y
    backward, of the input             Y's gradient, W      dX = dY W           dX
    backward, of the weight            (dY), X              dW = dY^T X         dW

Each gather is one all-gather over q ranks (or d), each sum the reduce-scatter of the same bytes in the other direction.
Only the rank's own blocks of X and W are kept for backward, which gathers them again.

Source: SUMMA's three products (C = A B, A B^T, A^T B): arXiv:2104.05343, section 2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.autograd import all_gather, all_reduce, once_differentiable, reduce_scatter
from shoal.comm.protocol import Communicator
from shoal.compiler import untraced
from shoal.errors import ModelError
from shoal.parallel.needed_gradients import needed_gradients
from shoal.parallel.products import cast_for_autocast
from shoal.parallel.tensor.apply import Resolver, SplitLayer, parallelize
from shoal.parallel.tensor.attention import numel_of, split_heads
from shoal.parallel.tensor.families import is_conv1d
from shoal.parallel.tensor.grid import ActivationLayout, Grid, GridProduct, SliceOf
from shoal.parallel.tensor.hooks import GridStack
from shoal.parallel.tensor.parts import Ranges, SharedRows, even_ranges, length, merged, window
from shoal.parallel.tensor.plan import ParallelStyle, Plan, is_inside, join, plan_for, split_error
from shoal.parallel.tensor.region import SharedByCopies
from shoal.sharding.layout import ParameterSpec


def parallelize_grid(
    model: nn.Module, grid: Grid, plan: Plan | None = None, *, loss_parallel: bool = False
) -> dict[str, ParameterSpec]:
    """Split ``model``, or a block of one, over the ranks of ``grid``, in place.

    A model with lists of layers takes and returns whole activations. A module without one takes and returns this rank's
    parts: call ``grid.split`` before it and ``grid.gather`` after it.

    Args:
        plan: the style of each module by name; None: ``plan_for(model)``.
        loss_parallel: as ``parallelize``'s.

    Returns: by name, the elements of each split parameter that this rank holds, with its whole gradient. The others are
        whole, and so are their gradients, on every rank.
    Raises: ModelError: heads, widths or modules that the grid cannot split, before anything is changed.
    Communicates: nothing.
    Memory: this rank's parts; the memory of the whole parameters is released.
    """
    plan = plan_for(model) if plan is None else plan
    splitter = _GridSplitter(model, grid, plan)
    splitter.prepare()
    ends = {key: plan[key] for key in splitter.keys_of_ends()}
    parts: Mapping[str, ParameterSpec] = {}
    if ends or loss_parallel:
        parts = parallelize(model, grid.comm, ends, loss_parallel=loss_parallel, strict=False).parts
    return {**splitter.apply(), **parts}


_ENDS = ("vocab", "vocab_head", "column_gather_output")


class _GridSplitter(Resolver):
    """Splits layers and norms over a grid."""

    def __init__(self, model: nn.Module, grid: Grid, plan: Plan) -> None:
        super().__init__(model, plan)
        self.grid = grid
        self.lists = self.lists_of_layers()  # where there is none, the module itself is one layer

    def keys_of_ends(self) -> set[str]:
        """The keys of modules before and after the lists that are split along one dim."""
        return {
            self.keys[name] for name, style in self.styles.items() if style.kind in _ENDS and not self._is_inside(name)
        }

    def apply(self) -> dict[str, ParameterSpec]:
        """Change the model, and register hooks."""
        parts = self.change()
        for name in self.lists:
            layers = self.modules[name]
            assert isinstance(layers, nn.ModuleList)
            GridStack(name, layers, self.grid).register(self.modules[name.rpartition(".")[0]])
        return parts

    def split_attention(self, name: str, module: nn.Module) -> Mapping[str, Ranges]:
        ranges: dict[str, Ranges] = {}
        inner = self.grid.inner.elements
        for each in self.grid.product(is_back=False).weight_out:
            split = split_heads(name, module, self.styles, each.count, each.index)
            if split is None:
                return {}
            for child, own in split.ranges.items():
                numel = numel_of(self.modules[child], is_output=self.styles[child].kind == "column")
                if split.num_heads % each.count or length(own) * each.count != numel:
                    raise split_error(
                        f"{name} has {split.num_heads} attention heads, which, or whose key-value heads, do not divide"
                        f" over {each.count} ranks of a {self.grid.kind} grid.",
                        do=f"take a grid whose {each.count} divides both, or split over one dim.",
                    )
                ranges[child] = ranges.get(child, ()) + own
            if each == inner:
                self.heads.append(split)
                self.shared.update(split.shared)
        return ranges

    def add_layer(self, name: str, style: ParallelStyle, ranges: Ranges | None) -> None:
        if style.kind not in ("column", "row"):
            return
        module, product = self.modules[name], self.grid.product(is_back=style.kind == "row")
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding):
            raise _grid_misfit(name, f"{type(module).__name__} has no weight of a linear.")
        in_numel, out_numel = numel_of(module, is_output=False), numel_of(module, is_output=True)
        blocks = style.block_sizes(out_numel) if style.kind == "column" else (out_numel,)
        out = product.weight_out
        bias_count = product.output.vector.count if bias is not None else 1
        if not blocks or any(block % out[0].count for block in blocks) or out_numel % bias_count:
            raise _grid_misfit(name, f"its {out_numel} outputs do not divide by {max(out[0].count, bias_count)}.")
        if in_numel % product.weight_in.count:
            raise _grid_misfit(name, f"its {in_numel} inputs do not divide by {product.weight_in.count}.")
        if ranges is None or style.kind == "row":
            ranges = tuple(own for each in out for own in even_ranges(blocks, each.count, each.index))
        ranges = merged(ranges)
        local = (ranges, (product.weight_in.range_of(in_numel),))
        self.hold(join(name, "weight"), weight, local[::-1] if is_conv1d(module) else local)
        if bias is not None:
            self.hold(join(name, "bias"), bias, (self._bias_ranges(ranges, product.output.vector, out),))
        split = GridSplit(self._label(name), product, is_conv1d(module), self.shared.get(name))
        self.layers[name] = SplitLayer(module, GridParallelLinear, split)

    def _bias_ranges(self, rows: Ranges, vector: SliceOf, out: tuple[SliceOf, ...]) -> Ranges:
        """The elements of the bias on this rank: its slice of those of its outputs, fused blocks included."""
        width = length(rows) // len(out)  # of this rank's outputs
        elements = vector.count // out[0].count  # ranks that share them
        layer = 0 if len(out) == 1 else self.grid.inner.elements.index % len(out)
        part = SliceOf(vector.index % elements, elements).range_of(width)
        return window(rows, layer * width + part[0], layer * width + part[1])

    def check(self) -> None:
        """Add the norms of the whole width, and raise where a parameter would be read as if activations were whole."""
        columns = [name for name, style in self.styles.items() if style.kind == "column"]
        widths = {numel_of(self.modules[name], is_output=False) for name in columns}
        for name, module in self.modules.items():
            if self._is_inside(name):
                self._add_norm(name, module, widths)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if self._is_inside(name) and name not in self.part_of:
                raise _grid_misfit(name, "it is neither of a column or row linear nor of a norm of the whole width.")
            self.check_tied(name, parameter)

    def _add_norm(self, name: str, module: nn.Module, widths: set[int]) -> None:
        norm = _describe_norm(module)
        weight = getattr(module, "weight", None)
        is_of_heads = name.endswith(("q_norm", "k_norm"))  # in the inner layout
        if norm is None or is_of_heads or not isinstance(weight, torch.Tensor) or weight.shape[-1] not in widths:
            return
        layout, numel = self.grid.outer, weight.shape[-1]
        if weight.dim() != 1 or numel % layout.vector.count:
            raise _grid_misfit(name, f"its weight {tuple(weight.shape)} does not divide by {layout.vector.count}.")
        for each in ("weight", "bias"):
            if (parameter := getattr(module, each, None)) is not None:
                self.hold(join(name, each), parameter, ((layout.vector.range_of(numel),),))
        eps, is_centered = norm
        split = GridSplit(self._label(name), layout=layout, eps=eps, is_centered=is_centered)
        self.layers[name] = SplitLayer(module, GridParallelNorm, split)

    def _is_inside(self, name: str) -> bool:
        return not self.lists or is_inside(name, self.lists)

    def _label(self, name: str) -> str:
        return name or type(self.model).__name__


def _describe_norm(module: nn.Module) -> tuple[float, bool] | None:
    """Epsilon, and True if the mean is subtracted; None: no norm of a known kind."""
    if isinstance(module, nn.LayerNorm):
        return module.eps, True
    if isinstance(module, nn.RMSNorm):
        return module.eps if module.eps is not None else torch.finfo(module.weight.dtype).eps, False
    eps = getattr(module, "variance_epsilon", None)  # Llama's, Qwen's and Mistral's
    return (float(eps), False) if eps is not None and type(module).__name__.endswith("RMSNorm") else None


def _grid_misfit(name: str, what: str) -> ModelError:
    return split_error(
        f"{name} cannot be split over a grid of ranks: {what}",
        do="take another grid or plan, or split over one dim (shoal.parallel.tensor.parallelize).",
    )


def grid_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, product: GridProduct, *, label: str
) -> torch.Tensor:
    """This rank's part of ``X W^T + b``.

    Args:
        input: this rank's part of X, [tokens, ..., in].
        weight: this rank's part of W, [out, in].
        bias: this rank's slice of b; the output's layout says which.

    Communicates: with T tokens, a grid of q x q x d ranks (2-D: d = 1, 3-D: d = q) and the bytes of an element as unit,
        X = (q - 1) / q * T / q * in / d, W = (q - 1) / q * out / q * in / d, Y = (d - 1) / d * T / q * out / q:
        forward X + W + Y, backward 2 X + 2 W + Y received per rank. For a bias B = out / (q d) - out / (q q d) (3-D:
        out / q - out / q^3) forward, and as much backward.
    Memory: until the end of each pass the gathered X, W and the product; for backward ``input`` and ``weight``.
    """
    apply: Callable[..., torch.Tensor] = _GridProductFunction.apply
    output = apply(*cast_for_autocast(input, weight), product, label)  # gathered in autocast's lower precision
    if bias is None:
        return output
    return output + whole_vector(bias.to(output.dtype), product.output, label=f"{label} bias")


def whole_vector(part: torch.Tensor, layout: ActivationLayout, *, label: str) -> torch.Tensor:
    """The values of a parameter for this rank's elements, from the slices of the ranks that have the same elements."""
    for comm in layout.same_elements:
        part = all_gather(part, comm, label=label)
    return part


class _GridProductFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, by: GridProduct, label: str) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.by, ctx.label = by, label
        whole = all_gather(input, by.input_over, dim=by.input_dim, label=f"{label} input")
        partial = F.linear(whole, all_gather(weight, by.weight_over, dim=1, label=f"{label} weight"))
        return reduce_scatter(partial, by.output_over, dim=by.output_dim, label=f"{label} output")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own, weight = ctx.saved_tensors
        by, label = ctx.by, f"{ctx.label} backward"
        gradient = all_gather(gradient, by.output_over, dim=by.output_dim, label=f"{label} output")
        of_input = of_weight = None
        for_input, for_weight, *_ = needed_gradients(ctx)
        if for_input:
            partial = gradient @ all_gather(weight, by.weight_over, dim=1, label=f"{label} weight")
            of_input = reduce_scatter(partial, by.input_over, dim=by.input_dim, label=f"{label} input")
        if for_weight:
            whole = all_gather(own, by.input_over, dim=by.input_dim, label=f"{label} input again")
            partial = gradient.flatten(0, -2).t() @ whole.flatten(0, -2)
            of_weight = reduce_scatter(partial, by.weight_over, dim=1, label=f"{label} weight's gradient")
        return of_input, of_weight, None, None


def grid_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    layout: ActivationLayout,
    *,
    eps: float,
    is_centered: bool,
    label: str,
) -> torch.Tensor:
    """This rank's part of a LayerNorm (``is_centered``) or an RMSNorm over elements that several ranks have.

    Args:
        weight, bias: this rank's slices of the norm's parameters; ``layout.vector`` says which.

    Communicates: an all-reduce of one fp32 number per token, of a LayerNorm two, of the sums over the elements, and in
        backward one all-reduce of as many, over the ranks with the same tokens; ``weight`` and ``bias`` as a linear's
        bias.
    """
    whole_weight = None if weight is None else whole_vector(weight, layout, label=f"{label} weight")
    apply: Callable[..., torch.Tensor] = _GridNormFunction.apply
    output = apply(input, whole_weight, layout.same_tokens, eps, is_centered, label)
    return output if bias is None else output + whole_vector(bias, layout, label=f"{label} bias")


class _GridNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        comm: Communicator,
        eps: float,
        is_centered: bool,
        label: str,
    ) -> torch.Tensor:
        numel = input.shape[-1] * comm.size
        normed = input.float() if input.dtype.itemsize < 4 else input
        if is_centered:
            normed = normed - all_reduce(normed.sum(-1, keepdim=True), comm, label=f"{label} mean") / numel
        squares = all_reduce(normed.square().sum(-1, keepdim=True), comm, label=f"{label} variance")
        scale = torch.rsqrt(squares / numel + eps)
        normed = normed * scale
        ctx.save_for_backward(normed.to(input.dtype), scale, weight)
        ctx.comm, ctx.is_centered, ctx.label = comm, is_centered, label
        return (normed if weight is None else normed * weight).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normed, scale, weight = ctx.saved_tensors
        of_normed = gradient.to(scale.dtype) if weight is None else gradient.to(scale.dtype) * weight
        sums = [(of_normed * normed).sum(-1, keepdim=True)]
        if ctx.is_centered:
            sums.append(of_normed.sum(-1, keepdim=True))
        means = all_reduce(torch.cat(sums, -1), ctx.comm, label=f"{ctx.label} backward") / (
            normed.shape[-1] * ctx.comm.size
        )
        of_input = of_normed - normed * means[..., :1]
        if ctx.is_centered:
            of_input = of_input - means[..., 1:]
        of_weight = None
        if weight is not None and ctx.needs_input_grad[1]:
            of_weight = (gradient.to(scale.dtype) * normed).flatten(0, -2).sum(0).to(weight.dtype)
        return (of_input * scale).to(gradient.dtype), of_weight, None, None, None, None


@dataclass(frozen=True, eq=False)
class GridSplit(SharedByCopies):
    """How one linear or norm is computed on the grid, which its class of this file reads.

    Args:
        product: of a linear.
        is_transposed: the weight is [in, out] (GPT-2's Conv1D).
        shared: of a linear, the heads that ranks with other elements need too; None: there are none.
        layout: of a norm.
        eps, is_centered: of a norm.
    """

    name: str
    product: GridProduct | None = None
    is_transposed: bool = False
    shared: SharedRows | None = None
    layout: ActivationLayout | None = None
    eps: float = 0.0
    is_centered: bool = False


class GridParallelLinear(nn.Module):
    """A linear whose weight, input and output are blocks of a grid."""

    tensor_split: GridSplit
    weight: nn.Parameter

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        split, bias = self.tensor_split, getattr(self, "bias", None)
        assert split.product is not None
        weight = self.weight.t() if split.is_transposed else self.weight
        output = grid_linear(input, weight, bias, split.product, label=split.name)
        if split.shared is None:
            return output
        return split.shared.complete(output, split.product.output.same_tokens, f"{split.name} shared heads")


class GridParallelNorm(nn.Module):
    """A LayerNorm or an RMSNorm over elements that several ranks have."""

    tensor_split: GridSplit

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        split = self.tensor_split
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        assert split.layout is not None
        return grid_norm(
            input, weight, bias, split.layout, eps=split.eps, is_centered=split.is_centered, label=split.name
        )
