"""Split the layers of a model over a grid of ranks, in place, by the plan that splits them over one dim.

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
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shoal.errors import ModelError
from shoal.parallel.tensor.apply import Resolver, SplitLayer, parallelize
from shoal.parallel.tensor.attention import numel_of, split_heads
from shoal.parallel.tensor.families import is_conv1d
from shoal.parallel.tensor.grid import Grid, SliceOf
from shoal.parallel.tensor.grid_layers import GridParallelLinear, GridParallelNorm, GridSplit
from shoal.parallel.tensor.hooks import GridStack
from shoal.parallel.tensor.parts import Ranges, even_ranges, length, merged, window
from shoal.parallel.tensor.plan import ParallelStyle, Plan, is_inside, join, plan_for, split_error
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
            GridStack(name, layers, self.grid).register()
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
