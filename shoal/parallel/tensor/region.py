"""The regions in which ranks compute different parts: what is communicated where activations enter and leave them.

    plain                 enter: copy (backward: all_reduce)          leave: all_reduce (backward: copy)
    sequence parallel     enter: all_gather (backward: reduce_scatter) leave: reduce_scatter (backward: all_gather)

Under sequence parallelism the activations between the regions (norms, residuals, dropout) are split along the sequence,
from the first layer's input to the last layer's output. The sequence is the second to last dim: [B, L, D] or [L, D].
Of an input that entered, a rank keeps its own part for backward:

    forward     the region gathers the input once, for all column linears that read it
    backward    gathered again, for the weight's gradient, while the input's gradient is computed

The last linear's backward gathers for all of them; the first one's frees what was gathered.

Dropout must draw equal elements on activations that all ranks have, and different ones on split activations. The
default generators are in the same state on all ranks; ``RngFork`` seeds them differently while a split region is
computed. The seed is drawn from the CPU's generator, so a recomputed forward pass, which begins with the restored
state, draws it again.

Source: Megatron-LM, section 3 (arXiv:1909.08053); sequence parallelism: Korthikanti et al., section 4.2
(arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, Self

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.comm import autograd
from shoal.comm.autograd import (
    Gathering,
    Label,
    TensorMove,
    TracedLabel,
    begin_gather,
    once_differentiable,
    traced_move,
)
from shoal.comm.encoded import encoded
from shoal.comm.formats import WireFormat
from shoal.comm.protocol import Communicator
from shoal.compiler import untraced
from shoal.device import in_backward, is_fake
from shoal.errors import UsageError
from shoal.parallel.needed_gradients import needed_gradients
from shoal.parallel.products import PLAIN, LayerProducts, Products, add_bias, cast_for_autocast
from shoal.parallel.rng_tracker import current_state, set_current_state, state_of_seed
from shoal.parallel.saved_tensors import checkpoint_around

_SEED_OFFSET = 2718


class SharedByCopies:
    """A copy of a model communicates as the model does: its copies share this object."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class RngFork:
    """Another random state on each rank, from ``begin()`` to ``end()``, which may be called again without effect."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before: torch.Tensor | None = None

    @untraced
    def begin(self) -> None:
        """Draw a seed, the same on all ranks, and seed the device's default generator with it and the rank."""
        if self._before is not None:
            return
        drawn = torch.randint(2**48, (), device="cpu")
        seed = torch.initial_seed() % 2**48 if is_fake(drawn) else int(drawn.item())
        self._before = current_state()
        set_current_state(state_of_seed(seed + _SEED_OFFSET + self._rank))

    @untraced
    def end(self) -> None:
        """Restore the state that all ranks share."""
        if self._before is not None:
            set_current_state(self._before)
            self._before = None


class TensorRegion(SharedByCopies):
    """Where activations enter and leave split layers: the collectives, plain or sequence parallel.

    Args:
        splits_sequence: True if activations outside the split layers are split along the sequence.
        wire: the format in which sums and gathers of split layers are sent; None: as they are.

    Attributes:
        activations: the ranks as those sums and gathers use them; everything else uses ``comm``.
        is_split: True while layers run that have a split sequence.
        stacks: the names of the lists of layers between which the sequence is split.
        unfinished: what is wrong with the last forward, where it split the sequence and did not gather it.
    """

    def __init__(self, comm: Communicator, *, splits_sequence: bool = False, wire: WireFormat | None = None) -> None:
        self.comm = comm
        self.activations = encoded(comm, wire)
        self.may_split_sequence = splits_sequence
        self._divides = True
        self._labels: list[TracedLabel] = []
        self._has_equal_parts = True
        self.fork = RngFork(comm.rank)
        # By the tensors that entered whole, as long as they exist.
        self._gathered: MutableMapping[torch.Tensor, GatheredInput] = WeakTensorKeyDictionary()
        self._entered: tuple[torch.Tensor, torch.Tensor, TracedLabel] | None = None  # traced: whole, own, where
        self.is_split = False
        self.stacks: list[str] = []
        self.unfinished: UsageError | None = None

    def label(self, comm: Communicator, text: str) -> TracedLabel:
        """Of a collective of the split layers."""
        label = TracedLabel(comm, text)
        label.is_traced = self._has_equal_parts
        self._labels.append(label)
        return label

    def has_unequal_parts(self) -> None:
        """Ranks have parts of different sizes: collectives break graphs.

        Inductor orders the operators of a graph by the memory that they need: ranks would issue those that do not need
        each other's results in different orders.
        """
        self._has_equal_parts = False
        for label in self._labels:
            label.is_traced = False

    @property
    def splits_sequence(self) -> bool:
        """True if activations are split along the sequence in this pass.

        Without gradients, a sequence that does not divide (generation, token by token) is computed whole.
        """
        return self.may_split_sequence and (self._divides or torch.is_grad_enabled())

    def split_sequence(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        """This rank's part of the sequence of the first layer's input.

        Raises: UsageError: the sequence does not divide, and gradients are computed.
        """
        length, size = tensor.shape[_sequence_dim(tensor)], self.comm.size
        self._divides = length % size == 0
        if not self.splits_sequence:
            return tensor
        if not self._divides:
            raise UsageError(
                f"a sequence of {length} tokens does not divide by {size} tensor parallel ranks.",
                where=label,
                do=f"pad the sequence by {-length % size} tokens, or turn sequence parallelism off.",
                code="tensor-parallel",
            )
        return autograd.split(tensor, self.comm, dim=_sequence_dim(tensor), label=label)

    def gather_sequence(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        """The whole sequence of the last layer's output."""
        if not self.splits_sequence:
            return tensor
        return autograd.gather(tensor, self.comm, dim=_sequence_dim(tensor), label=label)

    def enter(self, tensor: torch.Tensor, label: Label) -> torch.Tensor:
        """The input of split layers, whole. Raises: UsageError: as ``check_split``."""
        self.check_split(label)
        if not self.splits_sequence:
            return self.copy(tensor, label)
        dim = _sequence_dim(tensor)
        whole = autograd.all_gather(tensor, self.activations, dim=dim, label=label)
        if not torch.compiler.is_dynamo_compiling():
            self._gathered[whole] = GatheredInput(tensor, InputGather(self.activations, dim, str(label)))
        elif isinstance(label, TracedLabel) and label.is_traced:
            self._entered = whole, tensor, label
        return whole

    def forget(self) -> None:
        """No further linear reads the input that entered last: a compiled graph does not return it."""
        self._entered = None

    def linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: LayerProducts
    ) -> torch.Tensor:
        """``F.linear``; of an input that was gathered on entry, this rank's part is kept for backward."""
        if torch.compiler.is_dynamo_compiling():
            if self._entered is None or self._entered[0] is not input:
                return layer.linear(input, weight, bias)
            return _traced_column(*self._entered, weight, bias, layer.products)
        gathered = self._gathered.get(input)
        if gathered is None or gathered.checkpoint is not checkpoint_around():
            return layer.linear(input, weight, bias)
        return column_linear_of(gathered, input, weight, bias, layer.products)

    def check_split(self, label: Label) -> None:
        """Raise where the input of split layers has the whole sequence, since the layer around them was not called."""
        if self.splits_sequence and not (self.is_split or torch.compiler.is_dynamo_compiling() or in_backward()):
            raise UsageError(
                "a module inside a layer was called instead of the layer, which splits its input along the sequence.",
                where=str(label),
                do="call the members of the list of layers, or turn sequence parallelism off.",
                code="tensor-parallel",
            )

    def copy(self, tensor: torch.Tensor, label: Label) -> torch.Tensor:
        """A tensor that all ranks have whole, also under sequence parallelism."""
        return autograd.copy(tensor, self.activations, label=label)

    def leave(self, tensor: torch.Tensor, label: Label) -> torch.Tensor:
        """The sum over the ranks; under sequence parallelism this rank's part of it."""
        if self.splits_sequence:
            return autograd.reduce_scatter(tensor, self.activations, dim=_sequence_dim(tensor), label=label)
        return autograd.all_reduce(tensor, self.activations, label=label)


def _sequence_dim(tensor: torch.Tensor) -> int:
    return tensor.dim() - 2


class InputGather:
    """Gathers one input again in backward, once for all linears that read it."""

    def __init__(self, comm: Communicator, dim: int, label: str) -> None:
        self.num_linears = 0
        self._comm, self._dim, self._label = comm, dim, f"{label} again backward"
        self._num_left = 0
        self._gathering: Gathering | None = None

    def begin(self, own: torch.Tensor) -> Gathering:
        """Start to gather ``own``, unless another linear has."""
        if self._gathering is None:
            self._num_left = self.num_linears
            self._gathering = begin_gather(own, self._comm, self._dim, self._label)
        gathering, self._num_left = self._gathering, self._num_left - 1
        if not self._num_left:
            self._gathering = None
        return gathering


class GatheredInput:
    """This rank's part of a gathered input, by dtype: autocast casts it once for all linears."""

    def __init__(self, own: torch.Tensor, gather: InputGather) -> None:
        self.gather = gather
        self.checkpoint = checkpoint_around()  # a recomputed function inside of this one keeps the whole input
        self._own = {own.dtype: own.detach()}

    def own(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._own:
            self._own[dtype] = next(iter(self._own.values())).to(dtype)
        return self._own[dtype]


def column_linear_of(
    gathered: GatheredInput,
    whole: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    products: Products = PLAIN,
) -> torch.Tensor:
    """``whole @ weight.t() + bias``, of which backward keeps this rank's part of ``whole``.

    Args:
        whole: [..., L, K], of which ``gathered`` has this rank's part.

    Communicates: in backward the all-gather of ``whole``, once for all linears that read it.
    """
    apply: Callable[..., torch.Tensor] = _ColumnOfGathered.apply
    whole, weight = cast_for_autocast(whole, weight)
    if weight.requires_grad and torch.is_grad_enabled():
        gathered.gather.num_linears += 1
    output = apply(whole, gathered.own(whole.dtype), weight, gathered.gather, products)
    return add_bias(output, bias)


class _ColumnOfGathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: torch.Tensor, own: torch.Tensor, weight: torch.Tensor, gather: InputGather, products: Products
    ) -> torch.Tensor:
        ctx.save_for_backward(own if weight.requires_grad else None, weight)
        ctx.gather, ctx.products = gather, products
        return products.output(whole, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own, weight = ctx.saved_tensors
        for_input, _, for_weight, *_ = needed_gradients(ctx)
        gathering = ctx.gather.begin(own) if for_weight else None
        of_input = ctx.products.of_input(gradient, weight) if for_input else None
        of_weight = None if gathering is None else ctx.products.of_weight(gradient, gathering.wait())
        return of_input, None, of_weight, None, None


def _traced_column(
    whole: torch.Tensor,
    own: torch.Tensor,
    label: TracedLabel,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    products: Products,
) -> torch.Tensor:
    """As ``column_linear_of``, for a compiler to trace: of gathers of one input in one graph it keeps the first."""
    apply: Callable[..., torch.Tensor] = _TracedColumn.apply
    own, whole, weight = cast_for_autocast(own.detach(), whole, weight)
    return add_bias(apply(whole, own, weight, label.number, label.comm.size, products), bias)


class _TracedColumn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        whole: torch.Tensor,
        own: torch.Tensor,
        weight: torch.Tensor,
        number: torch.Tensor,
        size: int,
        products: Products,
    ) -> torch.Tensor:
        ctx.save_for_backward(own, weight, number)
        ctx.size, ctx.products = size, products
        return products.output(whole, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own, weight, number = ctx.saved_tensors
        of_input = ctx.products.of_input(gradient, weight)
        gather = TensorMove("gather", (_sequence_dim(own),))
        whole = traced_move(own, number, ctx.size, gather, " again backward")
        return of_input, None, ctx.products.of_weight(gradient, whole), None, None, None
