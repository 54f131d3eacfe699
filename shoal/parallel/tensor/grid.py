"""A tensor parallel axis as a grid of ranks: 2-D (q x q), 2.5-D (q x q x d) and 3-D (q x q x q).

A rank has the coordinates (i, j, l), l varying fastest; in 2-D d is 1 and l is 0. A linear computes Y = X W^T + b, X
[tokens, in] and W [out, in]. No rank holds a whole tensor; every element of X, W, b and Y is on one rank. ``a:b`` is
part b of part a:

    kind        X on rank (i, j, l)          W                             Y
    2d, 2.5d    tokens i, elements j:l       out j, in i:l                 tokens i, elements j:l
    3d          tokens i:j, elements l       out j, in l:i                 tokens i:l, elements j
    3d, back    tokens i:l, elements j       out l, in j:i                 tokens i:j, elements l

    kind        gathered before the product            summed after it
    2d, 2.5d    X over j and W over i, along in        Y over l, along out
    3d          X over j, along tokens; W over i       Y over l, along tokens
    3d, back    X over l, along tokens; W over i       Y over j, along tokens

In 2-D and 2.5-D the layout of Y is that of X, so that layers chain. In 3-D it is another one, and the next linear,
computed ``back`` with j and l exchanged, returns to the first: a block's residual stream has the first layout, what is
between its two linears the second. Tokens are split along dim 0, and elements between two linears in whole heads:
attention is local.

Bytes that one transformer layer receives and keeps on each rank (``layer_cost``), 1-D against the grids:

    cost of a layer with T tokens, width h, p ranks    received in a step            activations kept
    1d                                                 8 (p - 1) / p T h             (4 + 12 / p) T h
    1d, sequence parallel                              10 (p - 1) / p T h            16 / p T h
    grid of q x q x d (2-D: d = 1, 3-D: d = q)         3 X + 3 W + 2 Y               16 / p T h
        X = (q - 1) / q   7 T h / (q d),  W = (q - 1) / q  12 h^2 / (q d),  Y = (d - 1) / d   9 T h / q^2

in elements, for a feed-forward width of 4 h; weights are 12 h^2 / p in each. What the grid sends of weights does not
grow with T, so it wins where a step has many more tokens than the layer is wide, and ranks are many. The attention's
scores are never kept; its sums over the keys, and of norms two numbers a token, are left out of the activations.

Source: 1-D: Megatron-LM, section 3 (arXiv:1909.08053), Korthikanti et al. (arXiv:2205.05198); SUMMA:
van de Geijn and Watts 1997, for Transformers arXiv:2104.05343; 2.5-D: Solomonik and Demmel 2011; 3-D: Agarwal et al.
1995, for Transformers arXiv:2105.14450.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Literal

import torch

from shoal.comm import autograd
from shoal.comm.protocol import Communicator
from shoal.comm.world import World
from shoal.errors import ConfigError, UsageError
from shoal.mesh import Mesh, factor_axis
from shoal.parallel.tensor.parts import Range

GridKind = Literal["2d", "2.5d", "3d"]
GridShape = tuple[int, int, int]  # q, q, d


def grid_shape(kind: GridKind, size: int) -> GridShape:
    """The grid of ``size`` ranks. Of 2.5-D the deepest with d <= q, which communicates least.

    >>> grid_shape("2d", 16), grid_shape("2.5d", 32), grid_shape("3d", 64)
    ((4, 4, 1), (4, 4, 2), (4, 4, 4))

    Raises: ConfigError: the ranks are no such grid; it names the nearest sizes that are.
    """
    shape = _shape_of(kind, size)
    if shape is None:
        lower = next((near for near in range(size - 1, 3, -1) if _shape_of(kind, near)), 0)
        higher = next(near for near in range(max(size, 3) + 1, 8 * size + 9) if _shape_of(kind, near))
        form = {"2d": "q x q", "2.5d": "q x q x d, d <= q", "3d": "q x q x q"}[kind]
        raise ConfigError(
            f"{size} tensor parallel ranks are no {kind} grid ({form}, q > 1).",
            do=f"set tp to {f'{lower} or {higher}' if lower else higher}.",
            code="mesh-size",
        )
    return shape


def _shape_of(kind: GridKind, size: int) -> GridShape | None:
    for q in range(2, isqrt(max(size, 0)) + 1):
        depth, rest = divmod(size, q * q)
        if rest == 0 and depth in {"2d": (1,), "2.5d": range(1, q + 1), "3d": (q,)}[kind]:
            return q, q, depth
    return None


@dataclass(frozen=True)
class SliceOf:
    """One of ``count`` equal slices of a dim."""

    index: int
    count: int

    def range_of(self, numel: int) -> Range:
        """The elements of the slice; the caller has checked that ``numel`` divides."""
        width = numel // self.count
        return self.index * width, (self.index + 1) * width


@dataclass(frozen=True, eq=False)
class ActivationLayout:
    """Where an activation [tokens, ..., elements] is, for one rank.

    Args:
        same_tokens: the ranks that have the other elements of these tokens.
        vector: this rank's slice of a parameter with one value per element (a bias, a norm's weight).
        same_elements: the ranks that have the same elements of other tokens: gathering the vector's slices over each
            in turn gives the values of this rank's elements.
    """

    tokens: SliceOf
    elements: SliceOf
    vector: SliceOf
    same_tokens: Communicator
    same_elements: tuple[Communicator, ...]


@dataclass(frozen=True, eq=False)
class GridProduct:
    """Which ranks compute a linear together, for one rank.

    Args:
        input_over, input_dim: the input is gathered over these ranks along this dim.
        weight_over: the weight is gathered over these ranks along its input elements.
        output_over, output_dim: the product is summed over these ranks, which take parts along this dim.
        weight_in: the input elements of the weight that this rank holds.
        weight_out: the output elements of the weight that this rank holds: slices in the order in which it holds them.
    """

    input_over: Communicator
    input_dim: int
    weight_over: Communicator
    output_over: Communicator
    output_dim: int
    weight_in: SliceOf
    weight_out: tuple[SliceOf, ...]
    output: ActivationLayout


class Grid:
    """The grid of one rank's tensor parallel axis.

    Args:
        comm: the communicator of all its ranks.
        comms: those along i, j and l.
        same_tokens: in 2-D and 2.5-D those along j and l together; in 3-D the one along l.
    """

    def __init__(
        self,
        kind: GridKind,
        shape: GridShape,
        comm: Communicator,
        comms: tuple[Communicator, ...],
        same_tokens: Communicator,
    ) -> None:
        self.kind, self.shape, self.comm = kind, shape, comm
        self._i, self._j, self._l = comms
        self._same_tokens = same_tokens

    @classmethod
    def open(cls, world: World, mesh: Mesh, kind: GridKind) -> Grid:
        """The grid that the axis ``tp`` of ``mesh`` is.

        Raises: ConfigError: the axis has no such number of ranks.
        Communicates: the first time, control messages over the whole world: every rank calls it in the same order.
        """
        shape = grid_shape(kind, mesh.tp)
        i, j, depth = (world.communicator(factor_axis("tp", shape, (factor,)), mesh) for factor in range(3))
        if kind == "3d":
            same_tokens = depth
        else:
            same_tokens = world.communicator(factor_axis("tp", shape, (1, 2)), mesh)
        return cls(kind, shape, world.communicator("tp", mesh), (i, j, depth), same_tokens)

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2]

    @property
    def rank(self) -> int:
        """This rank's coordinate on the whole axis."""
        return (self._i.rank * self.shape[1] + self._j.rank) * self.shape[2] + self._l.rank

    @property
    def outer(self) -> ActivationLayout:
        """The layout of a block's residual stream: the input of a linear, the output of one that is computed back."""
        return self.product(is_back=True).output

    @property
    def inner(self) -> ActivationLayout:
        """The layout between a block's two linears: the output of the first."""
        return self.product(is_back=False).output

    def product(self, *, is_back: bool) -> GridProduct:
        """How a linear is computed; ``is_back``: from the inner layout to the outer one."""
        q, _, d = self.shape
        i = self._i.rank
        if self.kind == "3d":
            over_in, over_out = (self._l, self._j) if is_back else (self._j, self._l)
            j, depth = over_in.rank, over_out.rank
            tokens, elements = SliceOf(i * q + depth, q * q), SliceOf(j, q)
            vector = SliceOf((j * q + i) * q + depth, q**3)
            output = ActivationLayout(tokens, elements, vector, over_in, (over_out, self._i))
            return GridProduct(over_in, 0, self._i, over_out, 0, SliceOf(depth * q + i, q * q), (elements,), output)
        j, depth = self._j.rank, self._l.rank
        elements = SliceOf(j * d + depth, q * d)
        vector = SliceOf(elements.index * q + i, self.size)
        output = ActivationLayout(SliceOf(i, q), elements, vector, self._same_tokens, (self._i,))
        out = tuple(SliceOf(j * d + layer, q * d) for layer in range(d))
        return GridProduct(self._j, -1, self._i, self._l, -1, SliceOf(i * d + depth, q * d), out, output)

    def split(self, tensor: torch.Tensor, *, label: str = "grid in") -> torch.Tensor:
        """This rank's part, in the outer layout, of an activation [tokens, ..., elements] that all ranks have.

        Raises: UsageError: the tokens or the elements do not divide.
        Communicates: forward: nothing; backward: as ``gather`` forward, so that every rank has the whole gradient.
        """
        layout = self.outer
        for dim, each in ((0, layout.tokens), (-1, layout.elements)):
            size = tensor.shape[dim]
            if size % each.count:
                raise UsageError(
                    f"dim {dim % tensor.dim()} of an activation of shape {tuple(tensor.shape)} does not divide by"
                    f" {each.count}, as a {self.kind} grid of {'x'.join(map(str, self.shape))} ranks needs.",
                    where=label,
                    do=f"pad it by {-size % each.count}, or take another grid.",
                    code="tensor-parallel",
                )
        for comm in reversed(layout.same_elements):
            tensor = autograd.split(tensor, comm, dim=0, label=label)
        return autograd.split(tensor, layout.same_tokens, dim=-1, label=label)

    def gather(self, tensor: torch.Tensor, *, label: str = "grid out") -> torch.Tensor:
        """The whole activation of which every rank has its part in the outer layout.

        Every rank must compute the same from it.

        Communicates: forward: all-gathers, in sum (p - 1) / p of the whole received per rank; backward: nothing.
        """
        layout = self.outer
        tensor = autograd.gather(tensor, layout.same_tokens, dim=-1, label=label)
        for comm in layout.same_elements:
            tensor = autograd.gather(tensor, comm, dim=0, label=label)
        return tensor


TensorParallelKind = Literal["1d", "1d-sequence"] | GridKind


@dataclass(frozen=True)
class LayerShape:
    """A transformer layer without biases: two LayerNorms, fused qkv, out, up, down.

    Args:
        tokens: T, of the micro-batch.
        hidden, feed_forward: widths.
        itemsize: bytes of an element of weights and activations; a norm's sums have at least 4.
    """

    tokens: int
    hidden: int
    feed_forward: int
    itemsize: int = 4

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Input and output elements of each linear."""
        hidden = self.hidden
        return (hidden, 3 * hidden), (hidden, hidden), (hidden, self.feed_forward), (self.feed_forward, hidden)


@dataclass(frozen=True)
class LayerCost:
    """Bytes per rank of one layer.

    Args:
        received: in forward and backward.
        weights: of this rank; gradients and optimizer state are in proportion.
        activations: kept from forward to backward.
        gathered: the largest memory of what one linear gathers and of its product before it is summed, freed after it.
    """

    received: float
    weights: float
    activations: float
    gathered: float


def layer_cost(kind: TensorParallelKind, size: int, shape: LayerShape) -> LayerCost:
    """The cost of one layer, forward and backward, on ``size`` ranks.

    Raises: ConfigError: the ranks are no grid of this kind.
    """
    if kind == "1d" or kind == "1d-sequence":
        return _on_a_line(size, shape, splits_sequence=kind == "1d-sequence")
    return _on_a_grid(kind, grid_shape(kind, size), shape)


def _on_a_line(size: int, shape: LayerShape, *, splits_sequence: bool) -> LayerCost:
    stream = shape.tokens * shape.hidden * shape.itemsize
    weights = sum(a * b for a, b in shape.linears) / size + 2 * shape.hidden
    inside = shape.tokens * (4 * shape.hidden + 2 * shape.feed_forward) * shape.itemsize / size
    outside = 4 * stream / (size if splits_sequence else 1)
    gathered = stream if splits_sequence else 0
    moves = 10 if splits_sequence else 8  # the inputs of qkv and up are gathered again in backward
    return LayerCost(moves * (size - 1) / size * stream, weights * shape.itemsize, inside + outside, gathered)


def _on_a_grid(kind: GridKind, grid: GridShape, shape: LayerShape) -> LayerCost:
    q, _, d = grid
    size = q * q * d
    received = 0.0
    gathered = 0.0
    for ins, outs in shape.linears:
        whole_x, whole_w = shape.tokens / q * ins / d, ins / d * outs / q
        product = shape.tokens / q * outs / q
        received += 3 * (q - 1) / q * (whole_x + whole_w) + 2 * (d - 1) / d * product
        gathered = max(gathered, whole_x + whole_w + product)
    return LayerCost(
        received * shape.itemsize + 2 * norm_bytes(kind, grid, shape),
        (sum(a * b for a, b in shape.linears) + 2 * shape.hidden) / size * shape.itemsize,
        shape.tokens * (8 * shape.hidden + 2 * shape.feed_forward) / size * shape.itemsize,
        gathered * shape.itemsize,
    )


def norm_bytes(kind: GridKind, grid: GridShape, shape: LayerShape) -> float:
    """Bytes that a LayerNorm without a bias receives: four numbers a token, all-reduced, and the weight both ways."""
    q, _, d = grid
    same_tokens, tokens = (q, shape.tokens / q**2) if kind == "3d" else (q * d, shape.tokens / q)
    numbers = 4 * 2 * (same_tokens - 1) / same_tokens * tokens * max(shape.itemsize, 4)
    same_elements = q * q * d // same_tokens
    vector = shape.hidden / same_tokens * (same_elements - 1) / same_elements
    return numbers + 2 * vector * shape.itemsize
