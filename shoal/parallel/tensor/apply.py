"""Split a model over the ranks of the tensor parallel axis, in place.

    split = parallelize(model, world.communicator("tp", mesh))      # the plan of the model's family
    split.parts["model.layers.0.self_attn.q_proj.weight"].local    # which elements this rank holds, by dim

Everything is checked before anything is changed. Each rank takes its parts of its own values: the ranks must have the
same, or the model must be on the meta device or sharded by ``zero.Init``, which show shapes only. Afterwards the ranks'
inputs must be the same too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.comm.protocol import Communicator
from shoal.errors import ModelError
from shoal.parallel.tensor.attention import AttentionSplit, numel_of, split_heads
from shoal.parallel.tensor.cross_entropy import VocabParallelLoss, shifts_labels
from shoal.parallel.tensor.families import ACTIVATIONS, OUTPUT_PARAMETERS
from shoal.parallel.tensor.hooks import InputHook, Stack
from shoal.parallel.tensor.layers import (
    ColumnParallelLinear,
    LayerSplit,
    RowParallelLinear,
    VocabParallelEmbedding,
    split_class,
)
from shoal.parallel.tensor.overlap import InputColumns
from shoal.parallel.tensor.parts import Range, as_ranges, even_range, even_ranges, length
from shoal.parallel.tensor.plan import ParallelStyle, Plan, is_linear, join, match, parse_style, plan_for
from shoal.parallel.tensor.region import TensorRegion
from shoal.parallel.tensor.shared_heads import SharedRows
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.parameter_buffer import is_placeholder, placeholder
from shoal.sharding.parts import cut

_COLUMNS = ("column", "column_gather_output", "vocab_head")
_ROWS = ("row", "row_split_input")


@dataclass(frozen=True)
class TensorParallelModel:
    """What a rank holds of a model that was split.

    Args:
        parts: by parameter name, of a tied parameter under all its names; one that is absent is whole on every rank.
        partial: names of whole parameters of which each rank has a part of the gradient: the sum over the ranks is the
            gradient.
        styles: by module name, the style that was applied.
        region_of: the region of a module, by its name; None: nothing was split.
    """

    parts: Mapping[str, ParameterSpec]
    partial: frozenset[str]
    styles: Mapping[str, str] = field(default_factory=dict)
    region_of: Callable[[str], TensorRegion] | None = None


def parallelize(
    model: nn.Module,
    comm: Communicator,
    plan: Plan | None = None,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    strict: bool = True,
    overlap: bool = False,
    inner: Mapping[str, Communicator] | None = None,
) -> TensorParallelModel:
    """Split ``model`` over the ranks of ``comm``, in place.

    Args:
        plan: the style of each module by name; None: ``plan_for(model)``.
        sequence_parallel: split the activations between the split layers along the sequence.
        loss_parallel: the model's head returns this rank's logits, from which its ``loss_function`` computes the loss.
            Off: the head gathers the logits.
        strict: a linear layer that the plan does not name is an error.
        overlap: communicate beside the matrix products, in chunks, where possible (``shoal.parallel.tensor.overlap``).
        inner: by name, modules (of experts) inside of which layers are split over these ranks instead. Their inputs are
            whole, also under ``sequence_parallel``.

    Raises: ModelError: a plan that does not fit the model, before anything is changed.
    Communicates: nothing.
    Memory: this rank's parts; the memory of the whole parameters is released.
    """
    plan = plan_for(model) if plan is None else plan
    splitter = _Splitter(model, comm, plan, sequence_parallel, strict, inner or {})
    loss = splitter.find_loss() if loss_parallel else None
    splitter.prepare(gathers_logits=not loss_parallel, overlaps=overlap)
    if comm.size == 1:
        return TensorParallelModel({}, frozenset(), splitter.plan)
    if loss is not None:
        setattr(loss[0], "loss_function", loss[1])  # noqa: B010 - a property, or a plain attribute, of the model
    return splitter.apply()


@dataclass
class _Layer:
    """One module that is split, and the ranges along the split dim."""

    module: nn.Module
    kind: str
    dim: int
    ranges: tuple[Range, ...]
    splits_bias: bool = False
    split: LayerSplit | None = None


class _Splitter:
    """Resolves a plan for one model, checks it, and applies it."""

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        plan: Plan,
        sequence: bool,
        strict: bool,
        inner: Mapping[str, Communicator],
    ) -> None:
        self.model, self.comm = model, comm
        self.inner = {f"{name}.": TensorRegion(ranks) for name, ranks in inner.items()}
        self.modules = dict(model.named_modules(remove_duplicate=False))
        keys = match(plan, list(self.modules))
        self.plan = {name: plan[key] for name, key in keys.items()}
        self.styles = {name: parse_style(plan[key], key) for name, key in keys.items()}
        if strict:
            self._check_covered()
        self.prepared = [name for name, style in self.styles.items() if style.kind == "prepare_input"]
        self.plain = TensorRegion(comm)
        self.stack_region = TensorRegion(comm, splits_sequence=True) if sequence else self.plain
        self.stacks = self._find_stacks() if sequence else []
        self.heads: list[AttentionSplit] = []
        self.layers: dict[str, _Layer] = {}
        self.columns: dict[str, InputColumns] = {}  # by prepared module
        self.parts: dict[int, ParameterSpec] = {}  # by id of the parameter; without names

    def prepare(self, *, gathers_logits: bool, overlaps: bool) -> None:
        """Decide the ranges of every layer; raise what is wrong with them."""
        ranges: dict[str, tuple[tuple[Range, ...], tuple[Range, ...]]] = {}
        for name, module in self.modules.items():
            split = split_heads(name, module, self.styles, self.comm.size, self.comm.rank)
            if split is not None:
                self.heads.append(split)
                ranges.update(split.ranges)
                for parameter_name, parameter in split.head_parameters.items():
                    self._hold(split.core_name, parameter_name, parameter, 0, as_ranges(split.heads.query, unit=1))
        for name, style in self.styles.items():
            if style.kind in (*_COLUMNS, *_ROWS, "vocab"):
                self._add_layer(name, style, ranges.get(name), gathers_logits, overlaps)
        self._check_tied()

    def apply(self) -> TensorParallelModel:
        """Replace parameters and classes, register hooks."""
        for parameter in self.model.parameters():
            part = self.parts.get(id(parameter))
            if part is not None:
                keep_part(parameter, partial(cut, spec=part))
        behaviours: dict[str, type[nn.Module]] = {
            **dict.fromkeys(_COLUMNS, ColumnParallelLinear),
            **dict.fromkeys(_ROWS, RowParallelLinear),
        }
        replaced: set[int] = set()
        for layer in self.layers.values():
            if id(layer.module) not in replaced:
                replaced.add(id(layer.module))
                behaviour = behaviours.get(layer.kind, VocabParallelEmbedding)
                layer.module.__class__ = split_class(type(layer.module), behaviour)
                # nn.Module declares tensors and modules as attributes; this one is data.
                layer.module.tensor_split = layer.split  # type: ignore[assignment]
                _set_sizes(layer)
        for name in self.prepared:
            hook = InputHook(name, self.region_of(name), forks=self._forks(name), columns=self.columns.get(name))
            hook.register(self.modules[name])
        for split in self.heads:
            split.apply()
        for stack in self.stacks:
            parents = [self.modules[parent] for parent in _parents(stack.name)]
            # Among several lists a tensor's length does not tell whose part it is: each has one module's outputs.
            stack.register(parents[0], parents[1:] if len(self.stacks) == 1 else [])
        named = self.model.named_parameters(remove_duplicate=False)
        parts = {name: replace(self.parts[id(p)], name=name) for name, p in named if id(p) in self.parts}
        return TensorParallelModel(parts, self._partial() - frozenset(parts), self.plan, self.region_of)

    def region_of(self, name: str) -> TensorRegion:
        """The region of a module: sequence parallel between the first and the last layer of a stack."""
        inner = next((region for prefix, region in self.inner.items() if name.startswith(prefix)), self.plain)
        return self.stack_region if self._has_split_sequence(name) else inner

    def _has_split_sequence(self, name: str) -> bool:
        """Whether the activations around a module or parameter are split along the sequence."""
        return any(stack.contains(name) for stack in self.stacks) and not name.startswith(tuple(self.inner))

    def find_loss(self) -> tuple[nn.Module, VocabParallelLoss]:
        """The module with the loss function that a vocabulary parallel head needs, and what replaces the function.

        Raises: ModelError: the model does not call such a function, or it is not the mean cross-entropy.
        """
        heads = [name for name, style in self.styles.items() if style.kind == "vocab_head"]
        # A wrapper of PEFT hands the attributes of the model inside out, but does not take them.
        owner = next((each for each in self.modules.values() if _calls_loss_function(each)), None)
        shifts, what = None, "no loss_function that its forward calls"
        if len(heads) == 1 and owner is not None:
            vocab_size, function = numel_of(self.modules[heads[0]], is_output=True), owner.loss_function
            shifts = shifts_labels(function, vocab_size, is_transformers=hasattr(owner, "loss_type"))
            if shifts is not None:
                owner._modules.pop("loss_function", None)
                return owner, VocabParallelLoss(self.comm, vocab_size, shifts=shifts)
            name = getattr(function, "__qualname__", type(function).__qualname__)
            what = f"the loss_function {name}, which does not compute the mean cross-entropy of logits and labels"
        raise ModelError(
            f"the loss of {type(self.model).__name__} cannot be computed from split logits: it has {len(heads)} "
            f"vocabulary parallel heads and {what}.",
            do="turn loss_parallel off: the head then gathers the logits.",
            code="tensor-parallel",
        )

    def _add_layer(
        self,
        name: str,
        style: ParallelStyle,
        given: tuple[tuple[Range, ...], tuple[Range, ...]] | None,
        gathers_logits: bool,
        overlaps: bool,
    ) -> None:
        module = _linear(self.modules[name])
        region = self.region_of(name)
        weight, comm, kind = getattr(module, "weight", None), region.comm, style.kind
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            raise _misfit(name, style, f"{type(module).__name__} has no weight of two dims")
        if isinstance(module, nn.Embedding) != (kind == "vocab"):
            raise _misfit(name, style, f"it is of the class {type(module).__name__}")
        is_transposed = type(module).__name__.endswith("Conv1D")
        dim = 0 if kind == "vocab" else int(is_transposed) if kind in _COLUMNS else 1 - int(is_transposed)
        numel = weight.shape[dim]
        blocks = style.block_sizes(numel) if kind == "column" else (numel,)
        if given is None and (not blocks or min(blocks) < comm.size):
            raise _misfit(name, style, f"the weight {tuple(weight.shape)} has {numel} elements on dim {dim}")
        if kind in ("column_gather_output", "row_split_input") and self._has_split_sequence(name):
            raise _misfit(name, style, "sequence parallelism needs outputs that stay split up to a row layer")
        ranges, of_shared = given if given is not None else (even_ranges(blocks, comm.size, comm.rank), ())
        if of_shared and length(of_shared) < comm.size:
            raise _misfit(name, style, f"its key-value heads have {length(of_shared)} elements")
        shared = SharedRows.of(ranges, of_shared, size=comm.size, rank=comm.rank) if of_shared else None
        layer = _Layer(module, kind, dim, ranges if shared is None else shared.held, splits_bias=kind in _COLUMNS)
        gathers = kind == "column_gather_output" or (kind == "vocab_head" and gathers_logits)
        if gathers and given is not None:
            raise _misfit(name, style, "the heads of this attention are split, so that its outputs stay split")
        layer.split = LayerSplit(
            self._path(name),
            region,
            is_transposed=is_transposed,
            communicates=not self._is_prepared(name),
            shared=shared,
            widths=_widths(blocks, comm.size) if gathers else None,
            own_input=ranges if kind == "row_split_input" else None,
            own_tokens=even_range(numel, comm.size, comm.rank) if kind == "vocab" else (0, 0),
            forks=any(name.startswith(f"{parent}.") and self._forks(parent) for parent in self.prepared),
            overlaps=overlaps,
            keeps_logits=kind == "vocab_head" and not gathers_logits,
            columns=self._columns_around(name) if overlaps and kind == "column" else None,
        )
        self._add(self._path(name), layer)
        if module is not self.modules[name]:
            self._add_adapters(name, layer)

    def _columns_around(self, name: str) -> InputColumns | None:
        """What computes the columns that read the input of the prepared module around ``name``."""
        around = next((parent for parent in self.prepared if name.startswith(f"{parent}.")), None)
        if around is None:
            return None
        return self.columns.setdefault(around, InputColumns(around, self.region_of(around)))

    def _add(self, name: str, layer: _Layer) -> None:
        self.layers[name] = layer
        self._hold(name, "weight", layer.module.weight, layer.dim, layer.ranges)
        if layer.splits_bias and getattr(layer.module, "bias", None) is not None:
            self._hold(name, "bias", layer.module.bias, 0, layer.ranges)

    def _hold(self, module: str, name: str, parameter: object, dim: int, ranges: tuple[Range, ...]) -> None:
        assert isinstance(parameter, nn.Parameter)
        part = ParameterSpec.along("", tuple(parameter.shape), dim, ranges)
        if self.parts.setdefault(id(parameter), part) != part:
            raise _tied(join(module, name), "in two ways")

    def _check_tied(self) -> None:
        """Raise where a module would compute with a part of a weight, not knowing that it is one."""
        for name, module in self.modules.items():
            if id(module._parameters.get("weight")) in self.parts and name not in self.layers:
                split = next(other for other, layer in self.layers.items() if layer.module.weight is module.weight)
                raise _tied(join(name, "weight"), f"for {split} alone")

    def _add_adapters(self, name: str, base: _Layer) -> None:
        """Split LoRA's matrices as their base layer: B of a column, A of a row; the other one stays whole."""
        wrapper = self.modules[name]
        if getattr(wrapper, "lora_magnitude_vector", None):
            raise ModelError(f"{name} has a DoRA magnitude, which cannot be split.", do="set use_dora=False.")
        is_column = base.kind in _COLUMNS
        for adapter, module in getattr(wrapper, "lora_B" if is_column else "lora_A", {}).items():
            path = join(name, f"lora_{'B' if is_column else 'A'}.{adapter}")
            assert base.split is not None
            split = LayerSplit(
                path,
                base.split.region,
                communicates=base.split.communicates,
                shared=base.split.shared,
                forks=base.split.forks,
            )
            dim = 0 if is_column else 1
            self._add(path, _Layer(module, base.kind, dim, base.ranges, is_column, split))

    def _partial(self) -> frozenset[str]:
        """Names of whole parameters of which this rank computes a part of the gradient."""
        whole_in_region = {  # after the region's end, where all ranks compute the same
            id(parameter)
            for name, layer in self.layers.items()
            if layer.kind in _ROWS
            for parameter in (getattr(layer.module, "bias", None), *self._parameters(name, "lora_B"))
        }
        split = {name.rpartition(".")[0] for name, layer in self.layers.items() if layer.kind == "column"}
        found = set()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            module = name.rpartition(".")[0]
            style = self.styles.get(module)
            is_of_output = id(parameter) in whole_in_region or name.endswith(OUTPUT_PARAMETERS)
            is_prepared = self._is_prepared(name) and not is_of_output
            parent, _, last = module.rpartition(".")
            is_of_activation = last in ACTIVATIONS and parent in split
            in_stack = self._has_split_sequence(name)
            is_asked_for = style is not None and style.kind == "replicate_sum_gradient"
            if is_prepared or is_of_activation or in_stack or is_asked_for:
                found.add(name)
        return frozenset(found)

    def _parameters(self, layer: str, submodule: str) -> list[nn.Parameter]:
        """The parameters of a submodule of the LoRA layer around ``layer``."""
        wrapper = self.modules[layer.removesuffix(".base_layer")]
        return list(getattr(wrapper, submodule, nn.ModuleDict()).parameters())

    def _is_prepared(self, name: str) -> bool:
        return any(name.startswith(f"{parent}.") for parent in self.prepared)

    def _forks(self, name: str) -> bool:
        """Whether random numbers are drawn in a prepared module, on activations that are split nowhere else."""
        return not self._has_split_sequence(name) and has_dropout(self.modules[name])

    def _path(self, name: str) -> str:
        return join(name, "base_layer") if hasattr(self.modules[name], "base_layer") else name

    def _check_covered(self) -> None:
        """Raise where a linear layer has no style, and no module around it is left whole, or ``stays_whole``."""

        def is_covered(name: str) -> bool:
            parents = [name, *_parents(name)[:-1]]
            if any(getattr(self.modules[parent], "stays_whole", False) for parent in parents):
                return True
            return any(self.styles[parent].kind != "prepare_input" for parent in parents if parent in self.styles)

        missing = [name for name, module in self.modules.items() if is_linear(module) and not is_covered(name)]
        if missing:
            listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise ModelError(
                f"the tensor parallel plan says nothing of {len(missing)} linear layers: {listed}.",
                do='add a key for each ("replicate" leaves it whole), or set strict=False to leave all of them whole.',
                code="tensor-parallel-plan",
            )

    def _find_stacks(self) -> list[Stack]:
        split = [name for name, style in self.styles.items() if style.kind in ("column", "row")]
        stacks: list[Stack] = []
        for name, module in self.modules.items():
            is_inside = any(stack.contains(name) for stack in stacks)
            is_split = any(layer.startswith(f"{name}.") for layer in split)
            if isinstance(module, nn.ModuleList) and is_split and not is_inside:
                norms = [inner for inner, each in module.named_modules() if isinstance(each, _BatchNorm)]
                if norms:
                    raise ModelError(
                        f"{name}.{norms[0]} is a batch norm: it would take the mean over this rank's part of the"
                        " sequence.",
                        do="turn sequence parallelism off, or use norms of each position.",
                        code="tensor-parallel",
                    )
                stacks.append(Stack(name, module, self.stack_region, forks=has_dropout(module)))
        if not stacks:
            raise ModelError(
                f"{type(self.model).__name__} has no ModuleList of layers that the plan splits: no first layer whose "
                "input can be split along the sequence.",
                do="turn sequence parallelism off.",
                code="tensor-parallel",
            )
        return stacks


def keep_part(parameter: nn.Parameter, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Free the memory of a parameter and of its gradient but for a part. A placeholder stays one."""
    gradient, data, parameter.grad = parameter.grad, parameter.data, None
    if is_placeholder(data):
        shape = part(torch.empty(data.shape, device="meta")).shape
        parameter.data = placeholder(tuple(shape), data.dtype, data.device)
        return
    parameter.data = part(data).clone(memory_format=torch.contiguous_format)
    if gradient is not None:
        parameter.grad = part(gradient).clone(memory_format=torch.contiguous_format)


def _calls_loss_function(module: nn.Module) -> bool:
    """Whether the module has a ``loss_function`` itself, and, one of Transformers', a forward that reads it."""
    kinds = type(module).__mro__
    if not hasattr(module, "loss_type"):
        return "loss_function" in {*vars(module), *module._modules, *(name for kind in kinds for name in vars(kind))}
    forwards = [inspect.unwrap(vars(kind)["forward"]) for kind in kinds if "forward" in vars(kind)]
    return any("loss_function" in forward.__code__.co_names for forward in forwards)


def _parents(name: str) -> list[str]:
    """The names of the modules around a module, from the inside to the whole model."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in reversed(range(len(parts)))]


def has_dropout(module: nn.Module) -> bool:
    """Whether the module or one inside it has a dropout with a probability above 0."""
    for inner in module.modules():
        if isinstance(inner, nn.Dropout) and inner.p > 0:
            return True
        if any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(inner).items()):
            return True
    return False


def _widths(blocks: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The elements of each of ``size`` ranks."""
    return tuple(length(even_ranges(blocks, size, rank)) for rank in range(size))


def _linear(module: nn.Module) -> nn.Module:
    base = getattr(module, "base_layer", module)
    assert isinstance(base, nn.Module)
    return base


def _set_sizes(layer: _Layer) -> None:
    """The sizes that torch's and Transformers' modules print and that LoRA reads."""
    names = {"vocab": ("num_embeddings",)}.get(
        layer.kind, ("out_features", "nf") if layer.kind in _COLUMNS else ("in_features", "nx")
    )
    for name in names:
        if hasattr(layer.module, name):
            setattr(layer.module, name, length(layer.ranges))
    padding = getattr(layer.module, "padding_idx", None)
    if layer.kind == "vocab" and padding is not None:
        ((start, stop),) = layer.ranges
        # nn.Module declares tensors and modules as attributes; this one is a number or None.
        layer.module.padding_idx = padding - start if start <= padding < stop else None  # type: ignore[assignment]


def _tied(parameter: str, how: str) -> ModelError:
    return ModelError(
        f"the parameter {parameter} is tied, and the plan splits it {how}.",
        do='split tied modules alike: "vocab" for the embedding and "vocab_head" for the head.',
        code="tensor-parallel-plan",
    )


def _misfit(name: str, style: ParallelStyle, why: str) -> ModelError:
    blocks = "" if style.blocks == (1,) else f" in blocks of {style.blocks}"
    return ModelError(
        f"{name} cannot be split as {style.kind}{blocks}: {why}.",
        do="correct its key in the plan, or take fewer tensor parallel ranks.",
        code="tensor-parallel-plan",
    )
