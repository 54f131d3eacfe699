"""What all ranks synchronize before a step: norm, overflow, late gradients, and which parameters have a gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from shoal.comm.protocol import Communicator
from shoal.errors import ModelError
from shoal.running.reducer import Reducer
from shoal.running.step import HasGrad
from shoal.sharding.axes import Axes
from shoal.sharding.gradient_norm import sums_of_squares
from shoal.sharding.param_group import ParameterGroup
from shoal.text import counted, listed

_GRADIENTS = "which parameters have a gradient"


@dataclass(frozen=True)
class GlobalStatus:
    """The same on every rank, but for ``norm`` and ``mean_loss``.

    Args:
        norm: of the reduced gradients as they lie in memory (loss scale and accumulation included); of this rank's
            replica where replicas take steps of their own, and NaN on all ranks if one rank's is not finite.
        has_grad: by parameter group, one byte per parameter: did a gradient arrive on some rank?
        bad_loss_ranks: ranks whose loss is not finite.
        bad_gradient_ranks: ranks whose range of the gradient is not finite.
        mean_loss: this rank's; None: the engine saw no loss.
        num_tokens: of all ranks' micro-batches; None: they are not counted.
        losses: of every rank; 0 where a rank saw none.
        tokens: of every rank; 1 where they are not counted.
        signal: the number of a signal that some rank has got; 0: none.
    """

    norm: float
    has_grad: HasGrad
    bad_loss_ranks: tuple[int, ...]
    bad_gradient_ranks: tuple[int, ...]
    mean_loss: float | None
    num_tokens: float | None = None
    losses: tuple[float, ...] = ()
    tokens: tuple[float, ...] = ()
    signal: int = 0

    @property
    def is_finite(self) -> bool:
        """True if all losses and gradients are finite. A loss may be NaN though its gradient is not."""
        return math.isfinite(self.norm) and not self.bad_loss_ranks


def synchronize_status(
    groups: Sequence[ParameterGroup],
    reducer: Reducer,
    axes: Axes,
    device: torch.device,
    mean_loss: torch.Tensor | None,
    num_tokens: torch.Tensor | None = None,
    signal: int | None = None,
) -> GlobalStatus:
    """Exchange the status of the step.

    Args:
        mean_loss: of this rank's micro-batches, where it was computed. Shape: []; None: the engine saw no loss.
        num_tokens: of this rank's micro-batches. Shape: []; None, on all ranks: they are not counted.
        signal: the number of one that this rank has got; 0: none; None, on all ranks: it is not exchanged.

    Communicates: one exchange of 4 numbers over all ranks, one more with tokens and one with signals; two more of a few
    bytes when some parameter has no gradient, or when one arrived late.
    Order: blocks the host until the gradients are reduced, once; nothing before that does.
    """
    is_late = [any(gradient.has_unreduced() for gradient in unit.gradients) for unit in reducer.units]
    is_missing = any(is_late) or not all(all(group.gradient.has_grad) for group in groups)
    flags = [float(is_missing), float(any(is_late)), 0.0 if mean_loss is None else mean_loss]
    flags += [] if num_tokens is None else [num_tokens]
    flags += [] if signal is None else [float(signal)]
    rows = _exchange(axes.world, [_sum_of_squares(groups, device), *flags], device)
    mine = rows[axes.world.rank][1:]
    if any(row[2] for row in rows):
        reducer.reduce_late([bool(flag) for flag in _on_any_rank(is_late, axes.same_units, "late gradients")])
        rows = _exchange(axes.world, [_sum_of_squares(groups, device), *mine], device)
    has_grad = {group: bytes(group.gradient.has_grad) for group in groups}
    if any(row[1] for row in rows):
        if axes.same_units.size > 1:
            merged = iter(_on_any_rank(b"".join(has_grad.values()), axes.same_units, _GRADIENTS))
            has_grad = {group: bytes(islice(merged, len(of_group))) for group, of_group in has_grad.items()}
        for group in groups:
            for comm in group.axes.across:
                has_grad[group] = _on_any_rank(has_grad[group], comm, _GRADIENTS)
    is_finite = all(math.isfinite(row[0]) for row in rows)
    total = math.fsum(rows[rank][0] for rank in axes.one_gradient) if is_finite else math.nan
    return GlobalStatus(
        norm=math.sqrt(total) if math.isfinite(total) else math.nan,
        has_grad=has_grad,
        bad_loss_ranks=tuple(index for index, row in enumerate(rows) if not math.isfinite(row[3])),
        bad_gradient_ranks=tuple(index for index, row in enumerate(rows) if not math.isfinite(row[0])),
        mean_loss=None if mean_loss is None else mine[2],
        # Ranks that hold other parts of the layers count the same tokens; of the pipeline stages the last one counts.
        num_tokens=None
        if num_tokens is None
        else math.fsum(row[4] for row in rows) * axes.data.size / axes.same_units.size,
        losses=tuple(row[3] for row in rows),
        tokens=tuple(1.0 if num_tokens is None else row[4] for row in rows),
        signal=0 if signal is None else int(max(row[-1] for row in rows)),
    )


def _sum_of_squares(groups: Sequence[ParameterGroup], device: torch.device) -> torch.Tensor:
    """Of the ranges that this rank owns: it is the first of those that hold the range."""
    weighted = [(group.gradient, weight) for group in groups if (weight := _weight(group))]
    computed = iter(sums_of_squares([g.norm_part() for g, _ in weighted if g.offloaded_norm_squared is None]))
    squares = [next(computed) if g.offloaded_norm_squared is None else g.offloaded_norm_squared for g, _ in weighted]
    squares = [
        square if weight == 1 else square * weight for square, (_, weight) in zip(squares, weighted, strict=True)
    ]
    if not squares:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(squares).to(torch.float64).sum()


def _weight(group: ParameterGroup) -> float:
    """Of this rank's part of the norm: of gradients that are left partial the ranks' mean square counts."""
    if not group.gradient.is_left_partial:
        return float(group.axes.counts_norm)
    return 1 / (group.axes.replica[1] * group.buffer.comm.size)


def _exchange(comm: Communicator, values: Sequence[float | torch.Tensor], device: torch.device) -> list[list[float]]:
    # A number becomes the argument of a kernel that fills: copying it from host memory would block the host.
    vector = torch.stack(
        [
            value.to(device, torch.float64)
            if isinstance(value, torch.Tensor)
            else torch.full((), value, dtype=torch.float64, device=device)
            for value in values
        ]
    )
    numbers = comm.read(comm.exchange(vector, label="step").wait(), when_fake=0.0)
    width = len(values)
    return [numbers[row * width : (row + 1) * width] for row in range(comm.size)]


def _on_any_rank(flags: Sequence[int], comm: Communicator, label: str) -> bytes:
    return bytes(int(max(column)) for column in zip(*comm.exchange_on_host(flags, label=label), strict=True))


def first_bad_parameter(groups: Sequence[ParameterGroup]) -> str | None:
    """The name of the first parameter in this rank's ranges whose reduced gradient is not finite."""
    for group in groups:
        owned, buffer = group.gradient.owned(), group.buffer
        if bool(torch.isfinite(owned).all()):
            continue
        for segment in buffer.layout.segments_in(buffer.begin, buffer.end):
            if not bool(torch.isfinite(owned[segment.start : segment.stop]).all()):
                return buffer.layout.specs[segment.slot].name
    return None


class UnusedParametersError(ModelError, AssertionError):
    """Parameters without a gradient where the config refuses them. DeepSpeed asserts it, so an AssertionError too."""

    code = "unused-parameters"


def refuse_unused(status: GlobalStatus, step: int) -> None:
    """Raises: UnusedParametersError: some have no gradient on any rank (``ignore_unused_parameters: false``)."""
    unused = [
        group.buffer.layout.specs[slot].name
        for group, flags in status.has_grad.items()
        for slot, has_grad in enumerate(flags)
        if not has_grad
    ]
    if unused:
        raise UnusedParametersError(
            f"{counted(len(unused), 'parameter')} got no gradient on any rank: {listed(unused)}.",
            where=f"step {step}, zero_optimization.ignore_unused_parameters = false",
            do="use them in the forward pass, freeze them, or set ignore_unused_parameters to true.",
        )
