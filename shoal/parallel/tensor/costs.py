"""Bytes that one transformer layer receives and holds on each tensor parallel rank: 1-D against 2-D, 2.5-D and 3-D.

    cost of a layer with T tokens, width h, p ranks    received in a step            activations kept
    1d                                                 8 (p - 1) / p T h             (4 + 12 / p) T h
    1d, sequence parallel                              10 (p - 1) / p T h            16 / p T h
    grid of q x q x d (2-D: d = 1, 3-D: d = q)         3 X + 3 W + 2 Y               16 / p T h
        X = (q - 1) / q   7 T h / (q d),  W = (q - 1) / q  12 h^2 / (q d),  Y = (d - 1) / d   9 T h / q^2

in elements, for a feed-forward width of 4 h; weights are 12 h^2 / p in each. What the grid sends of weights does not
grow with T, so it wins where a step has many more tokens than the layer is wide, and ranks are many. The attention's
scores are never kept; its sums over the keys, and of norms two numbers a token, are left out of the activations.

Source: 1-D: Megatron-LM, section 3 (arXiv:1909.08053), Korthikanti et al. (arXiv:2205.05198); the grids: ``grid``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.parallel.tensor.grid import GridKind, GridShape, grid_shape

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
        weights: held; gradients and optimizer state are in proportion.
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
