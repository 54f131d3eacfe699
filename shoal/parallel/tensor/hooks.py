"""Hooks on modules around split layers: an input that enters once for several layers, the ends of a stack of layers.

Between the ends of a stack, and in split logits, ranks have parts of tensors. ``SplitTensors`` refuses a loss that
reads one as if it were whole:

    embedding --split--> layers.0 --> layers.1 --gather--> head --logits of a range--> cross entropy --> loss
                             |                               |                                            ^
                             +-- block.aux, a hook's list    +-- a loss of the script's own --------------+

Between layers that split the sequence a statistic over the tokens is of this rank's part of it. A loss of split logits
other than the one that the model computes is of a range of the vocabulary. The graph of the loss shows both. The search
ends at the gather and at the cross entropy, so that it visits the nodes of the head and of the loss.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.comm.autograd import is_gather
from shoal.compiler import untraced
from shoal.device import in_backward
from shoal.errors import ShoalError, UsageError
from shoal.parallel.loss import token_losses
from shoal.parallel.tensor.grid import Grid
from shoal.parallel.tensor.layers import LayerSplit
from shoal.parallel.tensor.overlap import InputColumns
from shoal.parallel.tensor.region import RngFork, SharedByCopies, TensorRegion

_INPUT_NAMES = ("hidden_states", "x", "input", "inputs")
# Of lists of layers, by id: where a forward begins on a pipeline stage, which runs the model's with some of the layers.
_BEGINS: ContextVar[Mapping[int, int] | None] = ContextVar("first running layers", default=None)


class InputHook(SharedByCopies):
    """A module's input enters the split region once, for all split layers inside.

    Hidden states of an encoder, which cross-attention reads, are copied: they are never split along the sequence.

    Args:
        forks: True if the ranks' random states differ from here to the first row parallel layer inside, or to the
            module's end.
        columns: what computes the columns that read the input; None: each computes itself.
    """

    def __init__(self, name: str, region: TensorRegion, *, forks: bool, columns: InputColumns | None = None) -> None:
        self._enters = region.label(region.activations, f"{name} in")
        self._encoder = region.label(region.activations, f"{name} in (encoder)")
        self._region = region
        self._forks = forks
        self._columns = columns

    def register(self, module: nn.Module) -> None:
        """Register the hooks on ``module``."""
        if self._forks or self._columns is not None:
            module.register_forward_pre_hook(untraced(self._enter), with_kwargs=True)
            module.register_forward_hook(untraced(self._end), always_call=True)
            return
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        if self._region.may_split_sequence:
            # One that is always called has a number in the guards of compiled code: no other block would pass them.
            module.register_forward_hook(self._end)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        columns, label = self._columns, self._enters
        args, kwargs = replace_input(
            args,
            kwargs,
            lambda x: self._region.enter(x, label) if columns is None else columns.enter(module, x, label),
        )
        encoder = kwargs.get("encoder_hidden_states")
        if isinstance(encoder, torch.Tensor):
            kwargs = {**kwargs, "encoder_hidden_states": self._region.copy(encoder, self._encoder)}
        if self._forks and module.training:
            self._region.fork.begin()
        return args, kwargs

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._region.forget()
        if self._forks:
            self._region.fork.end()
        if self._columns is not None:
            self._columns.end()


def fork_between(fork: RngFork, module: nn.Module, columns: Sequence[nn.Module]) -> None:
    """The ranks' random states differ from the first column to the first row parallel layer, or to the module's end."""

    def begin(column: nn.Module, args: Any, output: Any) -> None:
        if module.training:
            fork.begin()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        fork.end()

    for column in columns:
        column.register_forward_hook(untraced(begin))
    module.register_forward_hook(untraced(end), always_call=True)


class SplitStack(SharedByCopies):
    """A list of layers between which activations are split along the sequence.

    In a forward of the module around them, the first call of the first layer splits its input, and the next call of the
    last layer gathers its output. A layer that is called outside of this span splits its input and gathers its output.
    What else the modules around them return of each token (hidden states, logits of routers) is gathered too.

    Args:
        forks: True if random numbers are drawn between the first layer's input and the last layer's output.
    """

    def __init__(self, name: str, layers: nn.ModuleList, region: TensorRegion, *, forks: bool) -> None:
        self.name = name
        self._layers = layers
        self._region = region
        self._forks = forks
        self._is_in_parent = False  # the module around the layers runs
        self._is_single = False  # a layer outside of the span runs
        self._num_spans = 0  # in this forward of the module around the layers
        self._num_single = 0
        self._order: list[int] = []  # ids of the layers
        self._part: tuple[int, ...] = ()  # of the last output: [B, L of this rank], or [L of this rank]

    def register(self, parent: nn.Module, outer: Sequence[nn.Module]) -> None:
        """Register the hooks on the layers, on the module around them, and on those around it."""
        first, last = self._layers[0], self._layers[-1]
        self._order = [id(layer) for layer in self._layers]  # a pipeline stage drops some
        for layer in {id(layer): layer for layer in self._layers}.values():
            begin, end = partial(self._begin, is_first=layer is first), partial(self._end, is_last=layer is last)
            layer.register_forward_pre_hook(untraced(begin), with_kwargs=True)
            layer.register_forward_hook(untraced(end), always_call=True)
        self._region.stacks.append(self.name)
        parent.register_forward_pre_hook(untraced(self._enter_parent))
        parent.register_forward_hook(untraced(self._leave_parent), always_call=True)
        for module in outer:
            module.register_forward_hook(untraced(self._leave_outer))

    def _enter_parent(self, module: nn.Module, args: Any) -> None:
        begin = first_running(self._layers)
        is_inside = self._region.splits_sequence and self._is_split_before(begin)
        self._region.is_split, self._is_single = is_inside, False
        self._is_in_parent, self._num_spans, self._num_single = True, int(begin > 0), 0
        self._part, self._region.unfinished = (), None
        if is_inside and self._forks and module.training:
            self._region.fork.begin()

    def _is_split_before(self, begin: int) -> bool:
        """True if earlier pipeline stages, which call the layers before ``begin``, left the sequence split."""
        return begin > 0 and self._order[-1] not in self._order[:begin]

    def _leave_parent(self, module: nn.Module, args: Any, output: Any) -> Any:
        is_open, self._region.is_split, self._is_in_parent = self._region.is_split, False, False
        self._region.fork.end()  # a pipeline stage may end inside
        if not self._region.splits_sequence:
            return None
        if is_open:
            self._region.unfinished = UsageError(
                f"{self.name}.0 was called, and {self.name}.{len(self._layers) - 1}, whose output would be gathered,"
                " was not called after it: the sequence is still split over the tensor parallel ranks.",
                do="call the last layer, or turn sequence parallelism off.",
                code="tensor-parallel",
            )
            if output is not None:  # None: the module raises an error
                raise self._region.unfinished
        return self._leave_outer(module, args, output)

    def _leave_outer(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._whole(output) if self._part and self._region.splits_sequence else None

    def _whole(self, output: Any) -> Any:
        """``output``, in which tensors that have this rank's part of the sequence are gathered."""
        if isinstance(output, torch.Tensor):
            return self._gather_part(output) if output.is_floating_point() else output
        if isinstance(output, MutableMapping):  # a ModelOutput of Transformers too
            for name, value in list(output.items()):
                output[name] = self._whole(value)
            return output
        if type(output) in (tuple, list):
            values = [self._whole(value) for value in output]
            is_same = all(one is other for one, other in zip(values, output, strict=True))
            return output if is_same else type(output)(values)
        return output

    def _gather_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of [B, L of this rank, width], or [B * L of this rank, width] as routers have, gathered."""
        *rows, length = self._part
        label = f"{self.name} out"
        if tensor.dim() == len(self._part) + 1 and tensor.shape[:-1] == self._part:
            return self._region.gather_sequence(tensor, label)
        if rows and length > 1 and tensor.dim() == 2 and tensor.shape[0] == rows[0] * length:
            return self._region.gather_sequence(tensor.unflatten(0, self._part), label).flatten(0, 1)
        return tensor

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_first: bool) -> Any:
        is_recomputed = in_backward() and not self._is_in_parent
        if is_recomputed and self._num_single:
            raise UsageError(
                f"{self.name} are recomputed one by one by a function around them, and some were called again after"
                " the last one: which of the calls splits its input along the sequence is not known.",
                do="have them recomputed by activation_checkpointing.modules, or turn sequence parallelism off.",
                code="tensor-parallel",
            )
        if (self._region.is_split or is_recomputed) and not (is_first and is_recomputed):
            return None
        if not is_recomputed:
            self._is_single = not is_first or self._num_spans > 0
            self._num_single += self._is_single
            self._num_spans += self._is_in_parent
            self._region.is_split = True
        args, kwargs = replace_input(args, kwargs, lambda x: self._region.split_sequence(x, f"{self.name} in"))
        if self._forks and module.training:
            self._region.fork.begin()
        return args, kwargs

    def _end(self, module: nn.Module, args: Any, output: Any, *, is_last: bool) -> Any:
        if not (is_last or self._is_single) and output is not None:
            return None
        self._region.is_split = self._is_single = False
        self._region.fork.end()
        if output is None:  # the layer raised an error
            return None
        self._part = tuple((output if isinstance(output, torch.Tensor) else output[0]).shape[:-1])
        return _replace_hidden(output, lambda hidden: self._region.gather_sequence(hidden, f"{self.name} out"))


def first_running(layers: nn.Module) -> int:
    """The place in the list of the first layer that runs now: above 0, the layers before it run on other ranks."""
    return (_BEGINS.get() or {}).get(id(layers), 0)


@contextmanager
def running_from(layers: nn.Module, begin: int) -> Iterator[None]:
    """Inside the block a forward runs the layers from ``begin`` on."""
    token = _BEGINS.set({**(_BEGINS.get() or {}), id(layers): begin})
    try:
        yield
    finally:
        _BEGINS.reset(token)


class GridStack(SharedByCopies):
    """A list of layers between which activations are in the outer layout."""

    def __init__(self, name: str, layers: nn.ModuleList, grid: Grid) -> None:
        self._name, self._layers, self._grid = name, layers, grid
        self._fork = RngFork(grid.rank) if has_dropout(layers) else None
        self._batch = 0

    def register(self, parent: nn.Module) -> None:
        """Register the hooks on the layers, and on the module around them."""
        for at, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(untraced(partial(self._before, at=at)), with_kwargs=True)
        self._layers[-1].register_forward_hook(untraced(self._end), always_call=True)
        if self._fork is not None:
            parent.register_forward_hook(untraced(self._leave_parent), always_call=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, at: int) -> Any:
        if at == first_running(self._layers):
            if at == 0:
                args, kwargs = replace_input(args, kwargs, self._split)
            else:  # an earlier pipeline stage has split its input
                args, kwargs = replace_input(args, kwargs, self._take)
            if self._fork is not None and module.training:
                self._fork.begin()
        first, *others = args if args else (None,)
        return (first, *map(self._own, others)) if args else (), {
            name: self._own(value, name) for name, value in kwargs.items()
        }

    def _split(self, tensor: torch.Tensor) -> torch.Tensor:
        self._batch = tensor.shape[0]
        return self._grid.split(tensor, label=f"{self._name} in")

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        self._batch = tensor.shape[0] * self._grid.outer.tokens.count
        return tensor

    def _leave_parent(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._fork is not None:
            self._fork.end()  # a pipeline stage may end inside

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
        return _replace_hidden(output, lambda hidden: self._grid.gather(hidden, label=f"{self._name} out"))


def _replace_hidden(output: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A layer's output, whose hidden states are the tensor itself or the first of several."""
    return replace(output) if isinstance(output, torch.Tensor) else type(output)([replace(output[0]), *output[1:]])


def has_dropout(module: nn.Module) -> bool:
    """True if the module or one inside it has a dropout with a probability above 0."""
    for inner in module.modules():
        if isinstance(inner, nn.Dropout) and inner.p > 0:
            return True
        if any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(inner).items()):
            return True
    return False


def replace_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], replace: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the first one, or the one called as modules call their input, replaced by ``replace(it)``."""
    if args:
        return (replace(args[0]), *args[1:]), kwargs
    name = next((name for name in _INPUT_NAMES if name in kwargs), next(iter(kwargs)))
    return args, {**kwargs, name: replace(kwargs[name])}


_SEQUENCE = (
    "the loss reads activations between layers that split the sequence, other than through the output of the last"
    " layer: they, and a mean or an attribute that is made of them, are of this rank's part of the sequence.",
    "return the tensor, [B, L, width] or [B * L, width], from the module around the layers, which hands it out whole,"
    " and compute the loss from it; or turn parallel.tp_sequence_parallel off.",
)
_LOGITS = (
    "the loss is computed from this rank's part of the logits, other than by the model's loss_function.",
    "pass labels to the model, or compute the loss by shoal.parallel.tensor.vocab_parallel_cross_entropy; or turn"
    " parallel.tp_loss_parallel off.",
)


class SplitTensors:
    """Knows a model's tensors of which each tensor-parallel rank holds a part."""

    def __init__(self, model: nn.Module) -> None:
        all_splits = (getattr(module, "tensor_split", None) for module in model.modules())
        splits = [split for split in all_splits if isinstance(split, LayerSplit)]
        self.region = next((split.region for split in splits if split.region.stacks), None)
        stacks = [] if self.region is None else self.region.stacks
        self._sequences = tuple(f"{name}{after}" for name in stacks for after in (".", " in"))
        self._heads = tuple(f"{split.name} in" for split in splits if split.keeps_logits)

    def refuse(self, loss: torch.Tensor) -> None:
        """Raises: UsageError: the loss reads such a tensor as if it were whole."""
        region = self.region
        if region is not None:
            _search(loss, self._sequences, lambda node: is_gather(node, region.comm), *_SEQUENCE)
        if self._heads:
            _search(loss, self._heads, _is_loss, *_LOGITS)

    def explain(self, error: Exception) -> None:
        """Raises: UsageError: ``error`` left the sequence split, or a module around the layers raised it."""
        if self.region is None or isinstance(error, ShoalError):
            return
        if self.region.unfinished is not None:
            raise self.region.unfinished from error
        selves = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        module = next((each for each in reversed(selves) if isinstance(each, nn.Module)), None)
        inner = [] if module is None else [name for name, _ in module.named_modules() if name]
        is_around = any(f".{stack}".endswith(f".{name}") for stack in self.region.stacks for name in inner)
        if is_around and isinstance(error, RuntimeError | ValueError | IndexError):
            raise UsageError(
                f"{type(module).__name__} raised {type(error).__name__}: {str(error)[:300].rstrip('.')}. The layers of"
                f" {', '.join(self.region.stacks)} split the sequence: what the module reads between them is this"
                " rank's part.",
                do="if one rank raises it too, it is the model's own. Else read the output of the last layer only,"
                " return the others' from the module around the layers, or turn parallel.tp_sequence_parallel off.",
                code="tensor-parallel",
            ) from error


def _is_loss(node: Any) -> bool:
    """True for the cross entropy of split logits, and for functions of the script, which may communicate."""
    source = getattr(getattr(type(node), "_forward_cls", None), "__module__", "torch")
    return source == token_losses.__module__ or not source.startswith(("shoal.", "torch"))


def _search(loss: torch.Tensor, labels: tuple[str, ...], is_end: Callable[[Any], bool], what: str, do: str) -> None:
    """Raises: UsageError: a node with a label that begins so is reached, by no node at which the search ends."""
    nodes = [loss.grad_fn]  # the nearest first
    seen = set(nodes)
    for node in nodes:
        if node is None or is_end(node):
            continue
        label = getattr(node, "label", None)
        if isinstance(label, str) and label.startswith(labels):
            raise UsageError(what, where=label.rpartition(" ")[0], do=do, code="tensor-parallel")
        for before, _ in node.next_functions:
            if before not in seen:
                seen.add(before)
                nodes.append(before)
