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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.errors import ModelError
from shoal.parallel.tensor.apply import has_dropout, keep_part, parallelize
from shoal.parallel.tensor.attention import AttentionSplit, numel_of, split_heads
from shoal.parallel.tensor.grid import Grid, SliceOf
from shoal.parallel.tensor.grid_layers import GridParallelLinear, GridParallelNorm, GridSplit
from shoal.parallel.tensor.hooks import replace_input
from shoal.parallel.tensor.layers import split_class
from shoal.parallel.tensor.parts import Range, even_ranges, length
from shoal.parallel.tensor.plan import ParallelStyle, Plan, join, match, parse_style, plan_for
from shoal.parallel.tensor.region import RngFork
from shoal.parallel.tensor.shared_heads import SharedRows, window
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.parts import cut


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


@dataclass
class _GridLayer:
    module: nn.Module
    behaviour: type[nn.Module]
    split: GridSplit


class _GridSplitter:
    """Resolves a plan for one model and one grid, checks it, and applies it."""

    def __init__(self, model: nn.Module, grid: Grid, plan: Plan) -> None:
        self.model, self.grid = model, grid
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.keys = match(plan, list(self.modules))
        self.styles = {name: parse_style(plan[key], key) for name, key in self.keys.items()}
        split = [name for name, style in self.styles.items() if style.kind in ("column", "row")]
        lists = [name for name, module in self.modules.items() if isinstance(module, nn.ModuleList)]
        # the outermost lists that have split layers; where there is none, the module itself is one layer
        lists = [name for name in lists if any(layer.startswith(f"{name}.") for layer in split)]
        self.lists = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        self.heads: list[AttentionSplit] = []
        self.shared: dict[str, SharedRows] = {}
        self.layers: dict[str, _GridLayer] = {}
        self.specs: dict[str, ParameterSpec] = {}

    def prepare(self) -> None:
        """Decide the part of every parameter; raise what is wrong with them."""
        ranges: dict[str, tuple[Range, ...]] = {}
        for name, module in self.modules.items():
            ranges.update(self._split_heads(name, module))
        for name, style in self.styles.items():
            if style.kind in ("column", "row"):
                self._add_linear(name, style, ranges.get(name))
        widths = {
            numel_of(self.modules[name], is_output=False)
            for name, style in self.styles.items()
            if style.kind == "column"
        }
        for name, module in self.modules.items():
            if self._is_inside(name):
                self._add_norm(name, module, widths)
        self._check_covered()

    def keys_of_ends(self) -> set[str]:
        """The keys of modules before and after the lists that are split along one dim."""
        return {
            self.keys[name] for name, style in self.styles.items() if style.kind in _ENDS and not self._is_inside(name)
        }

    def apply(self) -> dict[str, ParameterSpec]:
        """Replace parameters and classes, register hooks."""
        by_id = {
            id(p): self.specs[n] for n, p in self.model.named_parameters(remove_duplicate=False) if n in self.specs
        }
        for parameter in self.model.parameters():
            spec = by_id.get(id(parameter))
            if spec is not None:
                keep_part(parameter, partial(cut, spec=spec))
        for layer in self.layers.values():
            if not isinstance(layer.module, layer.behaviour):
                layer.module.__class__ = split_class(type(layer.module), layer.behaviour)
                # nn.Module declares tensors and modules as attributes; this one is data.
                layer.module.grid_split = layer.split  # type: ignore[assignment]
        for split in self.heads:
            split.apply()
        for name in self.lists:
            layers = self.modules[name]
            assert isinstance(layers, nn.ModuleList)
            _GridStack(name, layers, self.grid).register()
        return self.specs

    def _split_heads(self, name: str, module: nn.Module) -> dict[str, tuple[Range, ...]]:
        """The output elements of an attention's projections, slice by slice."""
        ranges: dict[str, tuple[Range, ...]] = {}
        inner = self.grid.inner.elements
        for each in self.grid.product(is_back=False).weight_out:
            split = split_heads(name, module, self.styles, each.count, each.index)
            if split is None:
                return {}
            for child, (own, of_shared) in split.ranges.items():
                if of_shared:
                    shared = SharedRows.of(own, of_shared, size=each.count, rank=each.index)
                    own = shared.held
                    if each == inner:
                        self.shared[child] = shared
                is_column = self.styles[child].kind == "column"
                numel = numel_of(self.modules[child], is_output=is_column)
                if split.num_heads % each.count or length(own) * each.count != numel:
                    raise ModelError(
                        f"{name} has {split.num_heads} attention heads, which, or whose key-value heads, do not divide"
                        f" over {each.count} ranks of a {self.grid.kind} grid.",
                        do=f"take a grid whose {each.count} divides both, or split over one dim.",
                        code="tensor-parallel",
                    )
                ranges[child] = ranges.get(child, ()) + own
            if each == inner:
                self.heads.append(split)
        return ranges

    def _add_linear(self, name: str, style: ParallelStyle, given: tuple[Range, ...] | None) -> None:
        module, product = self.modules[name], self.grid.product(is_back=style.kind == "row")
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding):
            raise _grid_misfit(name, f"{type(module).__name__} has no weight of a linear.")
        is_transposed = type(module).__name__.endswith("Conv1D")
        in_numel, out_numel = numel_of(module, is_output=False), numel_of(module, is_output=True)
        blocks = style.block_sizes(out_numel) if style.kind == "column" else (out_numel,)
        out = product.weight_out
        bias_count = product.output.vector.count if getattr(module, "bias", None) is not None else 1
        if not blocks or any(block % out[0].count for block in blocks) or out_numel % bias_count:
            raise _grid_misfit(name, f"its {out_numel} outputs do not divide by {max(out[0].count, bias_count)}.")
        if in_numel % product.weight_in.count:
            raise _grid_misfit(name, f"its {in_numel} inputs do not divide by {product.weight_in.count}.")
        if given is None or style.kind == "row":
            given = tuple(own for each in out for own in even_ranges(blocks, each.count, each.index))
        local = (_merged(given), (product.weight_in.range_of(in_numel),))
        self._hold(join(name, "weight"), weight, local[::-1] if is_transposed else local)
        bias = getattr(module, "bias", None)
        if bias is not None:
            self._hold(join(name, "bias"), bias, (self._bias_ranges(_merged(given), product.output.vector, out),))
        split = GridSplit(self._path(name), product, is_transposed, self.shared.get(name))
        self.layers[name] = _GridLayer(module, GridParallelLinear, split)

    def _bias_ranges(self, rows: tuple[Range, ...], vector: SliceOf, out: tuple[SliceOf, ...]) -> tuple[Range, ...]:
        """The elements of the bias on this rank: its slice of those of its outputs, fused blocks included."""
        width = length(rows) // len(out)  # of this rank's outputs
        elements = vector.count // out[0].count  # ranks that share them
        layer = 0 if len(out) == 1 else self.grid.inner.elements.index % len(out)
        part = SliceOf(vector.index % elements, elements).range_of(width)
        return window(rows, layer * width + part[0], layer * width + part[1])

    def _add_norm(self, name: str, module: nn.Module, widths: set[int]) -> None:
        norm = _describe_norm(module)
        weight = getattr(module, "weight", None)
        is_of_heads = name.endswith(("q_norm", "k_norm"))  # in the inner layout
        if norm is None or is_of_heads or not isinstance(weight, torch.Tensor) or weight.shape[-1] not in widths:
            return
        layout, numel = self.grid.outer, weight.shape[-1]
        if weight.dim() != 1 or numel % layout.vector.count:
            raise _grid_misfit(name, f"its weight {tuple(weight.shape)} does not divide by {layout.vector.count}.")
        for parameter in ("weight", "bias"):
            if getattr(module, parameter, None) is not None:
                own = (layout.vector.range_of(numel),)
                self._hold(join(name, parameter), getattr(module, parameter), (own,))
        eps, is_centered = norm
        split = GridSplit(self._path(name), layout=layout, eps=eps, is_centered=is_centered)
        self.layers[name] = _GridLayer(module, GridParallelNorm, split)

    def _hold(self, name: str, parameter: torch.Tensor, local: tuple[tuple[Range, ...], ...]) -> None:
        self.specs[name] = ParameterSpec.part(name, tuple(parameter.shape), local)

    def _check_covered(self) -> None:
        """Raise where a parameter would be computed with as if the activations were whole, or is split in two ways."""
        seen: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if self._is_inside(name) and name not in self.specs:
                raise _grid_misfit(name, "it is neither of a column or row linear nor of a norm of the whole width.")
            first = seen.setdefault(id(parameter), name)
            mine, other = (self.specs[each].local if each in self.specs else () for each in (name, first))
            if mine != other:
                raise _grid_misfit(name, f"it is also {first}, which would be split in another way.")

    def _is_inside(self, name: str) -> bool:
        return not self.lists or any(name.startswith(f"{each}.") for each in self.lists)

    def _path(self, name: str) -> str:
        return name or type(self.model).__name__


class _GridStack:
    """A list of layers between which activations are in the outer layout."""

    def __init__(self, name: str, layers: nn.ModuleList, grid: Grid) -> None:
        self._name, self._layers, self._grid = name, layers, grid
        self._fork = RngFork(grid.rank) if has_dropout(layers) else None
        self._batch = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _GridStack:
        return self

    def register(self) -> None:
        """Register the hooks on the layers."""
        for layer in self._layers:
            layer.register_forward_pre_hook(self._before, with_kwargs=True)
        self._layers[-1].register_forward_hook(self._end, always_call=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module is self._layers[0]:
            args, kwargs = replace_input(args, kwargs, self._split)
            if self._fork is not None and module.training:
                self._fork.begin()
        first, *others = args if args else (None,)
        return (first, *map(self._own, others)) if args else (), {
            name: self._own(value, name) for name, value in kwargs.items()
        }

    def _split(self, tensor: torch.Tensor) -> torch.Tensor:
        self._batch = tensor.shape[0]
        return self._grid.split(tensor, label=f"{self._name} in")

    def _own(self, value: Any, name: str = "") -> Any:
        """This rank's samples of a mask or of rotations [B, L, ...]: those of the attention, in the inner layout.

        BLOOM's ``alibi`` is [B * H, 1, L].
        """
        if isinstance(value, tuple):
            return tuple(map(self._own, value))
        if not isinstance(value, torch.Tensor) or value.dim() < 3 or self._batch == 1:
            return value
        size = value.shape[0]
        if size != self._batch and not (name == "alibi" and size % self._batch == 0):
            return value
        start, stop = self._grid.inner.tokens.range_of(size)
        return value[start:stop]

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._fork is not None:
            self._fork.end()
        if output is None:  # the layer raised an error
            return None
        if isinstance(output, torch.Tensor):
            return self._grid.gather(output, label=f"{self._name} out")
        return type(output)([self._grid.gather(output[0], label=f"{self._name} out"), *output[1:]])


def _describe_norm(module: nn.Module) -> tuple[float, bool] | None:
    """Epsilon, and whether the mean is subtracted; None: no norm of a known kind."""
    if isinstance(module, nn.LayerNorm):
        return module.eps, True
    if isinstance(module, nn.RMSNorm):
        return module.eps if module.eps is not None else torch.finfo(module.weight.dtype).eps, False
    eps = getattr(module, "variance_epsilon", None)  # Llama's, Qwen's and Mistral's
    return (float(eps), False) if eps is not None and type(module).__name__.endswith("RMSNorm") else None


def _merged(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    """``ranges`` in their order, neighbours that touch merged."""
    merged: list[Range] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return tuple(merged)


def _grid_misfit(name: str, what: str) -> ModelError:
    return ModelError(
        f"{name} cannot be split over a grid of ranks: {what}",
        do="take another grid or plan, or split over one dim (shoal.parallel.tensor.parallelize).",
        code="tensor-parallel",
    )
