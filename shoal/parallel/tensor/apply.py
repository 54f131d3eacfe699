"""Split a model over the ranks of the tensor parallel axis, in place.

    split = parallelize(model, world.communicator("tp", mesh))      # the plan of the model's family
    split.parts["model.layers.0.self_attn.q_proj.weight"].local    # which elements this rank holds, by dim

Everything is checked before anything is changed. Each rank takes its parts of its own values: the ranks must have the
same, or the model must be on the meta device or sharded by ``zero.Init``, which show shapes only. Afterwards the ranks'
inputs must be the same too.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.comm.formats import WireFormat
from shoal.comm.protocol import Communicator
from shoal.errors import ModelError
from shoal.parallel.tensor.attention import AttentionSplit, numel_of, split_heads
from shoal.parallel.tensor.families import ACTIVATIONS, OUTPUT_PARAMETERS, base_of, is_conv1d
from shoal.parallel.tensor.hooks import InputHook, SplitStack, fork_between, has_dropout
from shoal.parallel.tensor.layers import (
    ColumnParallelLinear,
    LayerSplit,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLoss,
    is_shifted_cross_entropy,
    split_class,
)
from shoal.parallel.tensor.overlap import InputColumns
from shoal.parallel.tensor.parts import Ranges, SharedRows, as_ranges, even_range, even_ranges, length
from shoal.parallel.tensor.plan import (
    Kind,
    ParallelStyle,
    Plan,
    is_inside,
    is_linear,
    join,
    match,
    parse_style,
    plan_error,
    plan_for,
    split_error,
)
from shoal.parallel.tensor.region import SharedByCopies, TensorRegion
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.parts import cut
from shoal.sharding.storage import is_placeholder, placeholder
from shoal.text import listed

_BEHAVIOURS: Mapping[Kind, type[nn.Module]] = {
    "column": ColumnParallelLinear,
    "column_gather_output": ColumnParallelLinear,
    "vocab_head": ColumnParallelLinear,
    "row": RowParallelLinear,
    "row_split_input": RowParallelLinear,
    "vocab": VocabParallelEmbedding,
}
"""The class whose ``forward`` a module of a style gets; other styles split nothing."""


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
    chunk_nbytes: int = 0,
    inner: Mapping[str, Communicator] | None = None,
    wire: WireFormat | None = None,
) -> TensorParallelModel:
    """Split ``model`` over the ranks of ``comm``, in place.

    Args:
        plan: the style of each module by name; None: ``plan_for(model)``.
        sequence_parallel: split the activations between the split layers along the sequence.
        loss_parallel: the model's head returns this rank's logits, from which its ``loss_function`` computes the loss.
            Off: the head gathers the logits.
        strict: a linear layer that the plan does not name is an error.
        overlap: communicate during the matrix products, in chunks, where possible (``shoal.parallel.tensor.overlap``);
            with ``sequence_parallel``, by parts if ``comm`` is a ``PartsCommunicator``.
        chunk_nbytes: with ``overlap``, the least bytes of a sum that runs during the next product.
        inner: by name, modules (of experts) inside of which layers are split over these ranks instead. Their inputs are
            whole, also under ``sequence_parallel``.
        wire: the format in which activations and their gradients are sent where split layers sum and gather them;
            None: as they are.

    Raises: ModelError: a plan that does not fit the model, before anything is changed.
    Communicates: nothing.
    Memory: this rank's parts; the memory of the whole parameters is released.
    """
    plan = plan_for(model) if plan is None else plan
    splitter = _Splitter(
        model, comm, plan, inner or {},
        sequence=sequence_parallel, strict=strict, chunk_nbytes=chunk_nbytes if overlap else None,
        gathers_logits=not loss_parallel, wire=wire,
    )  # fmt: skip
    loss = splitter.find_loss() if loss_parallel else None
    splitter.prepare()
    if comm.size == 1:
        return TensorParallelModel({}, frozenset(), splitter.plan)
    if loss is not None:
        loss[0]._modules.pop("loss_function", None)
        setattr(loss[0], "loss_function", loss[1])  # noqa: B010 - a property, or a plain attribute, of the model
    return splitter.apply()


@dataclass
class SplitLayer:
    """A module that is split: the class whose ``forward`` it gets, and what that class reads of it."""

    module: nn.Module
    behaviour: type[nn.Module]
    split: SharedByCopies


class Resolver(ABC):
    """One walk over a plan: finds the modules, decides the part of every parameter, and then changes the model.

    A subclass says how an attention's heads, and a layer of a style, are split.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.keys = match(plan, list(self.modules))
        self.styles = {name: parse_style(plan[key], key) for name, key in self.keys.items()}
        self.heads: list[AttentionSplit] = []
        self.shared: dict[str, SharedRows] = {}  # by module
        self.layers: dict[str, SplitLayer] = {}
        self.parts: dict[int, ParameterSpec] = {}  # by id of the parameter; without names
        self.part_of: dict[str, int] = {}  # the id, by each name of a parameter that is split under this name

    def prepare(self) -> None:
        """Decide the part of every parameter. Raises: ModelError: what is wrong with them."""
        ranges: dict[str, Ranges] = {}
        for name, module in self.modules.items():
            ranges.update(self.split_attention(name, module))
        for name, style in self.styles.items():
            self.add_layer(name, style, ranges.get(name))
        self.check()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            # A bias may have a second name that nothing reads (the head of BERT).
            if name.rpartition(".")[2] == "weight":
                self.check_tied(name, parameter)

    @abstractmethod
    def split_attention(self, name: str, module: nn.Module) -> Mapping[str, Ranges]:
        """The ranges of an attention's projections, by their names; none where ``module`` is no attention."""

    @abstractmethod
    def add_layer(self, name: str, style: ParallelStyle, ranges: Ranges | None) -> None:
        """Split a module along ``ranges``, or evenly where they are None; nothing for a style that splits nothing."""

    def check(self) -> None:
        """Raises: ModelError: a part of the model would not fit what was split. Nothing to check by default."""
        return

    def hold(self, name: str, parameter: torch.Tensor, local: tuple[Ranges, ...]) -> None:
        """This rank has the elements ``local`` of a parameter. Raises: ModelError: it has others under another name."""
        part = ParameterSpec.part("", tuple(parameter.shape), local)
        if self.parts.setdefault(id(parameter), part) != part:
            raise _tied(name, "in two ways")
        self.part_of[name] = id(parameter)

    def check_tied(self, name: str, parameter: nn.Parameter) -> None:
        """Raises: ModelError: a parameter is split under another name, and would be read as if it were whole."""
        if id(parameter) in self.parts and name not in self.part_of:
            split = next(other for other, identity in self.part_of.items() if identity == id(parameter))
            raise _tied(name, f"for {split.rpartition('.')[0]} alone")

    def lists_of_layers(self) -> list[str]:
        """The outermost lists with column or row layers."""
        split = [name for name, style in self.styles.items() if style.kind in ("column", "row")]
        lists: list[str] = []
        for name, module in self.modules.items():
            has_split = any(layer.startswith(f"{name}.") for layer in split)
            if isinstance(module, nn.ModuleList) and has_split and not is_inside(name, lists):
                lists.append(name)
        return lists

    def path(self, name: str) -> str:
        """The name of a layer itself, where ``name`` may be the LoRA layer around it."""
        return join(name, "base_layer") if hasattr(self.modules[name], "base_layer") else name

    def change(self) -> dict[str, ParameterSpec]:
        """Cut the parameters, and give layers and attentions their behaviour. Returns: the parts, by all names."""
        for parameter in self.model.parameters():
            part = self.parts.get(id(parameter))
            if part is not None:
                keep_part(parameter, part)
        for layer in self.layers.values():
            if not isinstance(layer.module, layer.behaviour):  # else it has another name too
                layer.module.__class__ = split_class(type(layer.module), layer.behaviour)
                # nn.Module declares tensors and modules as attributes; this one is data.
                layer.module.tensor_split = layer.split  # type: ignore[assignment]
                _set_sizes(layer)
        for split in self.heads:
            split.apply()
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: replace(self.parts[id(p)], name=name) for name, p in named if id(p) in self.parts}


class _Splitter(Resolver):
    """Splits layers along one dim.

    Args:
        sequence: also split the sequence between them.
        chunk_nbytes: as ``parallelize``'s; None: without ``overlap``. ``gathers_logits``: not its ``loss_parallel``.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        plan: Plan,
        inner: Mapping[str, Communicator],
        *,
        sequence: bool,
        strict: bool,
        chunk_nbytes: int | None,
        gathers_logits: bool,
        wire: WireFormat | None,
    ) -> None:
        super().__init__(model, plan)
        self.comm, self.chunk_nbytes, self.gathers_logits = comm, chunk_nbytes, gathers_logits
        self.inner = {f"{name}.": TensorRegion(ranks, wire=wire) for name, ranks in inner.items()}
        self.plan = {name: plan[key] for name, key in self.keys.items()}
        if strict:
            self._check_covered()
        self.prepared = [name for name, style in self.styles.items() if style.kind == "prepare_input"]
        columns = [name for name, style in self.styles.items() if style.kind == "column"]
        # What makes split activations without a prepared module around it, by the module that has it.
        self.splitting: dict[str, list[str]] = {}
        for name in (name for name in columns if not is_inside(name, self.prepared)):
            self.splitting.setdefault(name.rpartition(".")[0], []).append(name)
        self.plain = TensorRegion(comm, wire=wire)
        self.stack_region = TensorRegion(comm, splits_sequence=True, wire=wire) if sequence else self.plain
        self.stacks = self._stacks() if sequence else []
        self.columns: dict[str, InputColumns] = {}  # by prepared module

    def split_attention(self, name: str, module: nn.Module) -> Mapping[str, Ranges]:
        split = split_heads(name, module, self.styles, self.comm.size, self.comm.rank)
        if split is None:
            return {}
        self.heads.append(split)
        self.shared.update(split.shared)
        if not split.are_equal:
            self.region_of(name).has_unequal_parts()
        for parameter_name, parameter in split.head_parameters.items():
            self.hold(join(split.core_name, parameter_name), parameter, (as_ranges(split.heads.query, unit=1),))
        return split.ranges

    def apply(self) -> TensorParallelModel:
        """Change the model, and register hooks."""
        parts = self.change()
        for name in self.prepared:
            hook = InputHook(name, self.region_of(name), forks=self._forks(name), columns=self.columns.get(name))
            hook.register(self.modules[name])
        for name, columns in self.splitting.items():
            if self._forks(name):
                fork_between(self.region_of(name).fork, self.modules[name], [self.modules[each] for each in columns])
        for stack in self.stacks:
            parents = [self.modules[parent] for parent in _parents(stack.name)]
            # Among several lists a tensor's length does not tell whose part it is: each has one module's outputs.
            stack.register(parents[0], parents[1:] if len(self.stacks) == 1 else [])
        return TensorParallelModel(parts, self._partial() - frozenset(parts), self.plan, self.region_of)

    def region_of(self, name: str) -> TensorRegion:
        """The region of a module: sequence parallel between the first and the last layer of a stack."""
        inner = next((region for prefix, region in self.inner.items() if name.startswith(prefix)), self.plain)
        return self.stack_region if self._has_split_sequence(name) else inner

    def _has_split_sequence(self, name: str) -> bool:
        """True if the activations around a module or parameter are split along the sequence."""
        return is_inside(name, [stack.name for stack in self.stacks]) and not name.startswith(tuple(self.inner))

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
            shifts = is_shifted_cross_entropy(function, vocab_size, is_transformers=hasattr(owner, "loss_type"))
            if shifts is not None:
                return owner, VocabParallelLoss(self.comm, vocab_size, shifts=shifts)
            name = getattr(function, "__qualname__", type(function).__qualname__)
            what = f"the loss_function {name}, which does not compute the mean cross-entropy of logits and labels"
        raise split_error(
            f"the loss of {type(self.model).__name__} cannot be computed from split logits: it has {len(heads)} "
            f"vocabulary parallel heads and {what}.",
            do="turn loss_parallel off: the head then gathers the logits.",
        )

    def add_layer(self, name: str, style: ParallelStyle, ranges: Ranges | None) -> None:
        kind = style.kind
        if kind not in _BEHAVIOURS:
            return
        module, region = base_of(self.modules[name]), self.region_of(name)
        weight, comm, is_of_heads = getattr(module, "weight", None), region.comm, ranges is not None
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            raise _misfit(name, style, f"{type(module).__name__} has no weight of two dims")
        if isinstance(module, nn.Embedding) != (kind == "vocab"):
            raise _misfit(name, style, f"it is of the class {type(module).__name__}")
        is_transposed, splits_output = is_conv1d(module), _BEHAVIOURS[kind] is ColumnParallelLinear
        dim = 0 if kind == "vocab" else int(splits_output == is_transposed)
        numel = weight.shape[dim]
        blocks = style.block_sizes(numel) if kind == "column" else (numel,)
        if ranges is None:
            if not blocks or min(blocks) < comm.size:
                raise _misfit(name, style, f"the weight {tuple(weight.shape)} has {numel} elements on dim {dim}")
            ranges = even_ranges(blocks, comm.size, comm.rank)
        if kind in ("column_gather_output", "row_split_input") and self._has_split_sequence(name):
            raise _misfit(name, style, "sequence parallelism needs outputs that stay split up to a row layer")
        if kind in ("column", "row") and not is_of_heads and length(ranges) * comm.size != numel:
            region.has_unequal_parts()
        gathers = kind == "column_gather_output" or (kind == "vocab_head" and self.gathers_logits)
        if gathers and is_of_heads:
            raise _misfit(name, style, "the heads of this attention are split, so that its outputs stay split")
        around = next((parent for parent in self.prepared if is_inside(name, [parent])), None)
        columns = None
        if self.chunk_nbytes is not None and kind == "column" and around is not None:
            columns = self.columns.setdefault(around, InputColumns(around, self.region_of(around), self.chunk_nbytes))
        split = LayerSplit(
            self.path(name),
            region,
            is_transposed=is_transposed,
            communicates=around is None,
            shared=self.shared.get(name),
            widths=tuple(length(even_ranges(blocks, comm.size, rank)) for rank in range(comm.size))
            if gathers
            else None,
            own_input=ranges if kind == "row_split_input" else None,
            own_tokens=even_range(numel, comm.size, comm.rank) if kind == "vocab" else (0, 0),
            forks=any(is_inside(name, [each]) and self._forks(each) for each in (*self.prepared, *self.splitting)),
            chunk_nbytes=self.chunk_nbytes,
            keeps_logits=kind == "vocab_head" and not gathers,
            columns=columns,
        )
        self._add(module, split, kind, dim, ranges)
        if module is not self.modules[name]:
            self._add_adapters(name, split, kind, ranges)

    def _add(self, module: nn.Module, split: LayerSplit, kind: Kind, dim: int, ranges: Ranges) -> None:
        behaviour, weight, bias = _BEHAVIOURS[kind], module.weight, getattr(module, "bias", None)
        assert isinstance(weight, nn.Parameter)
        self.layers[split.name] = SplitLayer(module, behaviour, split)
        self.hold(join(split.name, "weight"), weight, ParameterSpec.along("", tuple(weight.shape), dim, ranges).local)
        if behaviour is ColumnParallelLinear and bias is not None:
            self.hold(join(split.name, "bias"), bias, (ranges,))

    def _add_adapters(self, name: str, base: LayerSplit, kind: Kind, ranges: Ranges) -> None:
        """Split LoRA's matrices as their base layer: B of a column, A of a row; the other one stays whole."""
        wrapper = self.modules[name]
        if getattr(wrapper, "lora_magnitude_vector", None):
            raise ModelError(f"{name} has a DoRA magnitude, which cannot be split.", do="set use_dora=False.")
        side, dim = ("lora_B", 0) if _BEHAVIOURS[kind] is ColumnParallelLinear else ("lora_A", 1)
        for adapter, module in getattr(wrapper, side, {}).items():
            split = LayerSplit(
                join(name, f"{side}.{adapter}"),
                base.region,
                communicates=base.communicates,
                shared=base.shared,
                forks=base.forks,
            )
            self._add(module, split, kind, dim, ranges)

    def _partial(self) -> frozenset[str]:
        """Names of whole parameters of which this rank computes a part of the gradient."""
        whole_in_region = {  # after the region's end, where all ranks compute the same
            id(parameter)
            for name, layer in self.layers.items()
            if layer.behaviour is RowParallelLinear
            for parameter in (getattr(layer.module, "bias", None), *self._parameters(name, "lora_B"))
        }
        columns = {name.rpartition(".")[0] for name, style in self.styles.items() if style.kind == "column"}
        partial_names = set()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            module = name.rpartition(".")[0]
            style = self.styles.get(module)
            is_of_output = id(parameter) in whole_in_region or name.endswith(OUTPUT_PARAMETERS)
            is_prepared = is_inside(name, self.prepared) and not is_of_output
            parent, _, last = module.rpartition(".")
            is_of_activation = last in ACTIVATIONS and parent in columns
            in_stack = self._has_split_sequence(name)
            is_asked_for = style is not None and style.kind == "replicate_sum_gradient"
            if is_prepared or is_of_activation or in_stack or is_asked_for:
                partial_names.add(name)
        return frozenset(partial_names)

    def _parameters(self, layer: str, submodule: str) -> list[nn.Parameter]:
        """The parameters of a submodule of the LoRA layer around ``layer``."""
        wrapper = self.modules[layer.removesuffix(".base_layer")]
        return list(getattr(wrapper, submodule, nn.ModuleDict()).parameters())

    def _forks(self, name: str) -> bool:
        """True if random numbers are drawn in a module, on activations that are split nowhere else."""
        return not self._has_split_sequence(name) and has_dropout(self.modules[name])

    def _check_covered(self) -> None:
        """Raise where a linear layer has no style, and no module around it is left whole, or ``stays_whole``."""

        def is_covered(name: str) -> bool:
            parents = [name, *_parents(name)[:-1]]
            if any(getattr(self.modules[parent], "stays_whole", False) for parent in parents):
                return True
            return any(self.styles[parent].kind != "prepare_input" for parent in parents if parent in self.styles)

        missing = [name for name, module in self.modules.items() if is_linear(module) and not is_covered(name)]
        if missing:
            raise plan_error(
                f"the tensor parallel plan says nothing of {len(missing)} linear layers: {listed(missing, 8)}.",
                do='add a key for each ("replicate" leaves it whole), or set strict=False to leave all of them whole.',
            )

    def _stacks(self) -> list[SplitStack]:
        stacks: list[SplitStack] = []
        for name in self.lists_of_layers():
            layers = self.modules[name]
            assert isinstance(layers, nn.ModuleList)
            norms = [inner for inner, each in layers.named_modules() if isinstance(each, _BatchNorm)]
            if norms:
                raise split_error(
                    f"{name}.{norms[0]} is a batch norm: it would take the mean over this rank's part of the sequence.",
                    do="turn sequence parallelism off, or use norms of each position.",
                )
            stacks.append(SplitStack(name, layers, self.stack_region, forks=has_dropout(layers)))
        if not stacks:
            raise split_error(
                f"{type(self.model).__name__} has no ModuleList of layers that the plan splits: no first layer whose "
                "input can be split along the sequence.",
                do="turn sequence parallelism off.",
            )
        return stacks


def keep_part(parameter: nn.Parameter, part: ParameterSpec) -> None:
    """Free the memory of a parameter and of its gradient but for a part. A placeholder stays one."""
    gradient, data, parameter.grad = parameter.grad, parameter.data, None
    if is_placeholder(data):
        parameter.data = placeholder(part.shape, data.dtype, data.device)
        return
    parameter.data = cut(data, part).clone(memory_format=torch.contiguous_format)
    if gradient is not None:
        parameter.grad = cut(gradient, part).clone(memory_format=torch.contiguous_format)


def _calls_loss_function(module: nn.Module) -> bool:
    """True if the module has a ``loss_function`` itself, and, one of Transformers', a forward that reads it."""
    kinds = type(module).__mro__
    if not hasattr(module, "loss_type"):
        return "loss_function" in {*vars(module), *module._modules, *(name for kind in kinds for name in vars(kind))}
    forwards = [inspect.unwrap(vars(kind)["forward"]) for kind in kinds if "forward" in vars(kind)]
    return any("loss_function" in forward.__code__.co_names for forward in forwards)


def _parents(name: str) -> list[str]:
    """The names of the modules around a module, from the inside to the whole model."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in reversed(range(len(parts)))]


def _set_sizes(layer: SplitLayer) -> None:
    """Set the sizes that torch's and Transformers' modules print and that LoRA reads."""
    if not isinstance(layer.split, LayerSplit):
        return
    module, weight = layer.module, layer.module.weight
    assert isinstance(weight, torch.Tensor)
    rows, columns = weight.shape
    sizes = {"num_embeddings": rows, "out_features": rows, "in_features": columns, "nx": rows, "nf": columns}
    for name, size in sizes.items():
        if hasattr(module, name):
            setattr(module, name, size)
    padding = getattr(module, "padding_idx", None)
    if isinstance(module, VocabParallelEmbedding) and padding is not None:
        start, stop = layer.split.own_tokens
        # nn.Module declares tensors and modules as attributes; this one is a number or None.
        module.padding_idx = padding - start if start <= padding < stop else None  # type: ignore[assignment]


def _tied(parameter: str, how: str) -> ModelError:
    return plan_error(
        f"the parameter {parameter} is tied, and the plan splits it {how}.",
        do='split tied modules alike: "vocab" for the embedding and "vocab_head" for the head.',
    )


def _misfit(name: str, style: ParallelStyle, why: str) -> ModelError:
    blocks = "" if style.blocks == (1,) else f" in blocks of {style.blocks}"
    return plan_error(
        f"{name} cannot be split as {style.kind}{blocks}: {why}.",
        do="correct its key in the plan, or take fewer tensor parallel ranks.",
    )
