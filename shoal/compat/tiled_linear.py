"""``deepspeed.runtime.zero.tiling``: a linear layer as a grid of small ones, each a unit that stage 3 can shard alone.

TiledLinear(4, 6, in_splits=2, out_splits=3)

            in 0..2          in 2..4
out 0..2    linears[0][0]  + linears[0][1] + bias   =  columns 0..2 of the output
out 2..4    linears[1][0]  + linears[1][1] + bias   =  columns 2..4
out 4..6    linears[2][0]  + linears[2][1] + bias   =  columns 4..6
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shoal.access.gathered import GatheredParameters
from shoal.errors import ModelError
from shoal.parallel.sequence.chunks import cuts


class TiledLinear(nn.Module):
    """A linear layer of which one tile's weight is whole at a time.

    With ``input_is_already_split`` the input is a list, one tensor for each tile; without ``combine_out_splits`` the
    output is one. ``init_linear``: a layer of the same size whose values are copied. ``kwargs``: for ``linear_cls``.

    Raises: ModelError: more tiles than features, or none.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise TilesError(f"{name}_splits={splits}, with {features} features.", do=f"take 1 to {features}.")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = cuts(in_features, in_splits)
        self.out_parts = cuts(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(
                    self.in_parts[column + 1] - self.in_parts[column],
                    self.out_parts[row + 1] - self.out_parts[row],
                    bias=bias and column == in_splits - 1,  # added once, with the last tile of the sum
                    **kwargs,
                )
                for column in range(in_splits)
            )
            for row in range(out_splits)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """``input_``: shape [..., in_features], or a list of its tiles. Returns: [..., out_features], or its tiles."""
        parts = self._parts(input_)
        rows = [self._row(row, parts) for row in range(self.out_splits)]
        return self._combined(rows)

    def _parts(self, input_: Any) -> Sequence[torch.Tensor]:
        if not self.input_is_already_split:
            sizes = [end - begin for begin, end in zip(self.in_parts, self.in_parts[1:], strict=False)]
            return [input_] if self.in_splits == 1 else input_.split(sizes, dim=-1)
        parts = [input_] if isinstance(input_, torch.Tensor) else list(input_)
        if len(parts) != self.in_splits:
            raise TilesError(
                f"forward() was given {len(parts)} tensors, for {self.in_splits} tiles of the input.",
                do="give one tensor for each.",
            )
        return parts

    def _row(self, row: int, parts: Sequence[torch.Tensor]) -> Any:
        total = None
        for tile, part in zip(self._tiles(row), parts, strict=True):
            total = self._added(total, tile(part))
        return total

    def _added(self, total: Any, new: Any) -> Any:
        return new if total is None else total + new

    def _combined(self, rows: list[Any]) -> Any:
        if not self.combine_out_splits:
            return rows
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)

    def _tiles(self, row: int) -> list[nn.Module]:
        tiles = self.linears[row]
        assert isinstance(tiles, nn.ModuleList)
        return list(tiles)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Copy the values of a layer of the same size; rank 0's values count.

        Raises: TilesError: it has another size.
        """
        theirs = dict(other.named_parameters(recurse=False))
        shape = (self.out_features, self.in_features)
        if "weight" not in theirs or tuple(theirs["weight"].shape) != shape or ("bias" in theirs) != self.use_bias:
            raise TilesError(
                f"the layer to copy from has { ({k: tuple(v.shape) for k, v in theirs.items()}) }, wanted a weight"
                f" {shape} and {'a' if self.use_bias else 'no'} bias.",
                do="copy from a layer of the same size.",
            )
        with GatheredParameters([*theirs.values()]), GatheredParameters([*self.parameters()], modifier_rank=0):
            for row in range(self.out_splits):
                rows = slice(self.out_parts[row], self.out_parts[row + 1])
                for column, tile in enumerate(self._tiles(row)):
                    own = dict(tile.named_parameters(recurse=False))
                    own["weight"].copy_(theirs["weight"][rows, self.in_parts[column] : self.in_parts[column + 1]])
                    if "bias" in own:
                        own["bias"].copy_(theirs["bias"][rows])


class TiledLinearReturnBias(TiledLinear):
    """Of layers that return ``(output, bias)``, the bias to be added later: outputs and biases, each concatenated."""

    def _added(self, total: Any, new: Any) -> Any:
        output, bias = new
        if total is None:
            return output, bias
        return total[0] + output, bias if total[1] is None else total[1] if bias is None else total[1] + bias

    def _combined(self, rows: list[Any]) -> Any:
        outputs, biases = [output for output, _ in rows], [bias for _, bias in rows if bias is not None]
        if not self.combine_out_splits:
            return outputs, biases or None
        return torch.cat(outputs, dim=-1), torch.cat(biases, dim=-1) if biases else None


class TilesError(ModelError, RuntimeError):
    """Tiles that do not fit the layer. DeepSpeed raises a RuntimeError."""

    code = "tiles"
