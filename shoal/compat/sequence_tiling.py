"""DeepSpeed's tiled computing (``runtime.sequence_parallel.ulysses_sp``) and its loss over a divided sequence.

    DeepSpeed                       here
    sequence_tiled_compute(...)     shoal.parallel.tiled: tiled or tiled_sum
    TiledMLP.apply(...)             tiled
    TiledFusedLogitsLoss.apply(...) tiled_sum

``compute_params`` may be left None everywhere: the parameters are found. Their gradients come to autograd once, after
the last tile, so no attribute of a parameter says whether its gradient is ready.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shoal.comm.world import communicator_of
from shoal.errors import UsageError
from shoal.parallel.loss import sequence_parallel_cross_entropy
from shoal.parallel.tiled import Output, num_tiles_of, tiled, tiled_sum

Parameters = Sequence[nn.Parameter]


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: dict[str, torch.Tensor],
    kwargs_to_pass: dict[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Parameters | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """``fn(**kwargs_to_shard, **kwargs_to_pass)``, computed in ``shards`` tiles along dim 1, of length ``seqlen``.

    Args:
        grad_requiring_tensor_key: no effect: every tensor that requires a gradient gets one.
        output_unshard_dimension: of the outputs, where they are concatenated; 0: ``fn`` returns a number.
        output_reduction: of the whole output: "mean", "sum" or None.

    Raises: UsageError: another reduction, or tensors of another length.
    """
    _check_reduction(output_reduction, ("mean", "sum", None))
    _check_length(kwargs_to_shard, seqlen)
    names = [*kwargs_to_shard, *kwargs_to_pass]

    def call(*values: Any) -> torch.Tensor:
        return fn(**dict(zip(names, values, strict=True)))

    kind: Output = "tiles"
    if output_unshard_dimension == 0:
        kind = "sum" if output_reduction else "stack"
    output = tiled(
        call,
        *kwargs_to_shard.values(),
        num_tiles=shards,
        dim=1,
        arguments=tuple(kwargs_to_pass.values()),
        parameters=compute_params,
        output=kind,
    )
    if output_reduction is None:
        return output
    if output_unshard_dimension:
        return output.mean() if output_reduction == "mean" else output.sum()
    return output / num_tiles_of(seqlen, shards) if output_reduction == "mean" else output


class SequenceTiledCompute:
    """``sequence_tiled_compute`` as DeepSpeed's autograd function is called."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Parameters | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> torch.Tensor:
        """``args``: the values of ``keys_to_shard``, then those of ``keys_to_pass``."""
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, args, strict=False)),
            dict(zip(keys_to_pass, args[len(keys_to_shard) :], strict=True)),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledMLP:
    """A feed-forward layer in tiles of positions."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        self: Any,
        x: torch.Tensor,
        shards: int,
        compute_params: Parameters | None = None,
    ) -> torch.Tensor:
        """``fn(self, x)``, with ``x`` of shape [..., positions, width]."""
        return tiled(functools.partial(fn, self), x, num_tiles=shards, dim=-2, parameters=compute_params)


class TiledFusedLogitsLoss:
    """A loss in tiles of tokens, whose gradients are computed in the forward pass."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        self: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Parameters | None,
        output_reduction: str,
    ) -> torch.Tensor:
        """The sum, or the mean, of ``fn(self, x, y)`` (with a mask: ``fn(self, x, y, mask)``) over the tiles.

        Of shapes [batch, positions, ...] ``fn`` sees one dim in place of the first two. The reduction "mean" is right
        only where all tiles have as many tokens that count; else "sum".

        Raises: UsageError: another reduction, or shapes that do not fit.
        """
        _check_reduction(output_reduction, ("mean", "sum"))
        given = [x, y] if mask is None else [x, y, mask]
        if x.dim() < 2 or any(each.shape[:2] != x.shape[:2] for each in given):
            raise UsageError(
                f"x, y and mask have the shapes {', '.join(str(tuple(each.shape)) for each in given)}.",
                where="TiledFusedLogitsLoss",
                do="pass tensors whose first two dims are the same: batch and positions.",
                code="tiles",
            )
        flat = [each.flatten(0, 1) for each in given]
        call = functools.partial(fn, self)
        total = tiled_sum(call, *flat, num_tiles=shards, dim=0, parameters=compute_params)
        return total / num_tiles_of(flat[0].shape[0], shards) if output_reduction == "mean" else total


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, sp_group: Any
) -> torch.Tensor:
    """The loss of every token of the whole sequence, on each rank.

    Args:
        vocab_parallel_logits: [positions / ranks, batch, vocabulary]; ``target``: without the last dim.

    Returns: [positions, batch], fp32. Communicates: an all_gather of one number a token.
    """
    return sequence_parallel_cross_entropy(vocab_parallel_logits, target, communicator_of(sp_group))


def _check_reduction(reduction: str | None, known: Sequence[str | None]) -> None:
    if reduction not in known:
        raise UsageError(
            f"output_reduction is {reduction!r}.", do=f"take one of {', '.join(map(repr, known))}.", code="tiles"
        )


def _check_length(tensors: dict[str, torch.Tensor], seqlen: int) -> None:
    wrong = {name: tuple(each.shape) for name, each in tensors.items() if each.dim() < 2 or each.shape[1] != seqlen}
    if wrong:
        name, shape = next(iter(wrong.items()))
        raise UsageError(
            f"seqlen is {seqlen}, and {name!r} has the shape {shape}.",
            where="sequence_tiled_compute",
            do="pass tensors of shape [batch, seqlen, ...] in kwargs_to_shard.",
            code="tiles",
        )
