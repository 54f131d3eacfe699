"""What all ranks agree on before a step: norm, overflow, late gradients, and which parameters got a gradient at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.comm.protocol import Communicator
from shoal.device import read_vector
from shoal.errors import ModelError
from shoal.zero.bucket_state import BucketState
from shoal.zero.reducer import Reducer
from shoal.zero.settings import Axes


@dataclass(frozen=True)
class Agreement:
    """The same on every rank.

    Args:
        norm: of the reduced gradients as they lie in memory (loss scale and accumulation included).
        touched: by index of the bucket state, one byte per parameter.
        bad_loss_ranks: coordinates on the data-parallel axes whose loss is not finite.
        bad_gradient_ranks: coordinates whose shard of the gradient is not finite.
    """

    norm: float
    touched: dict[int, bytes]
    bad_loss_ranks: tuple[int, ...]
    bad_gradient_ranks: tuple[int, ...]

    @property
    def is_finite(self) -> bool:
        """Are all losses and gradients finite? A loss may be NaN though its gradient is not."""
        return math.isfinite(self.norm) and not self.bad_loss_ranks


def agree(
    states: Sequence[BucketState], reducer: Reducer, axes: Axes, device: torch.device, *, is_loss_finite: bool
) -> Agreement:
    """Bring the ranks to one view of the step.

    Communicates: one exchange of 4 numbers over all ranks; two more of a few bytes when some parameter got no
    gradient, or got one late.
    Order: blocks the host until the gradients are reduced.
    """
    late = [any(gradient.has_new() for gradient in entry.gradients) for entry in reducer.entries]
    missing = any(not all(state.gradient.touched) for state in states) if not any(late) else True
    rows = _exchange(
        axes.all, [_sum_of_squares(states), float(missing), float(any(late)), float(not is_loss_finite)], device
    )
    if any(row[2] for row in rows):
        flags = _exchange(axes.all, [float(flag) for flag in late], device)
        reducer.reduce_late([any(column) for column in zip(*flags, strict=True)])
        rows = _exchange(axes.all, [_sum_of_squares(states), *rows[axes.all.rank][1:]], device)
    touched = {index: bytes(state.gradient.touched) for index, state in enumerate(states)}
    if any(row[1] for row in rows):
        touched = _union(states, axes.all, device)
    # Replicas of a shard hold the same sum: one of them counts.
    inner = axes.inner.size
    total = math.fsum(row[0] for row in rows[:inner]) if all(math.isfinite(r[0]) for r in rows) else math.nan
    return Agreement(
        norm=math.sqrt(total) if math.isfinite(total) else math.nan,
        touched=touched,
        bad_loss_ranks=tuple(index for index, row in enumerate(rows) if row[3]),
        bad_gradient_ranks=tuple(index for index, row in enumerate(rows) if not math.isfinite(row[0])),
    )


def _sum_of_squares(states: Sequence[BucketState]) -> torch.Tensor:
    partial = [state.gradient.norm_squared() for state in states]
    if not partial:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([p.to(torch.float64) for p in partial]).sum()


def _exchange(comm: Communicator, values: Sequence[float | torch.Tensor], device: torch.device) -> list[list[float]]:
    vector = torch.stack(
        [
            v.to(device, torch.float64)
            if isinstance(v, torch.Tensor)
            else torch.tensor(v, dtype=torch.float64, device=device)
            for v in values
        ]
    )
    table = comm.exchange(vector, label="step").wait() if comm.size > 1 else vector.unsqueeze(0)
    numbers = read_vector(table.reshape(-1), when_fake=0.0)
    width = len(values)
    return [numbers[row * width : (row + 1) * width] for row in range(comm.size)]


def _union(states: Sequence[BucketState], comm: Communicator, device: torch.device) -> dict[int, bytes]:
    lengths = [len(state.gradient.touched) for state in states]
    mine = torch.tensor([float(flag) for state in states for flag in state.gradient.touched], device=device)
    if comm.size == 1:
        return {index: bytes(state.gradient.touched) for index, state in enumerate(states)}
    anywhere = comm.exchange(mine, label="which parameters got a gradient").wait().amax(dim=0)
    flags = bytes(int(value) for value in read_vector(anywhere, when_fake=1.0))
    found, start = {}, 0
    for index, length in enumerate(lengths):
        found[index] = flags[start : start + length]
        start += length
    return found


def first_bad_parameter(states: Sequence[BucketState]) -> str | None:
    """The name of the first parameter in this rank's shards whose reduced gradient is not finite."""
    for state in states:
        owned = state.gradient.owned()
        if bool(torch.isfinite(owned).all()):
            continue
        for segment in state.bucket.layout.segments_in(state.bucket.begin, state.bucket.end):
            if not bool(torch.isfinite(owned[segment.start : segment.stop]).all()):
                return state.bucket.layout.slots[segment.slot].name
    return None


class UnusedParametersError(ModelError, AssertionError):
    """Parameters without a gradient where the config refuses them. DeepSpeed asserts it, so an AssertionError too."""

    code = "unused-parameters"


def refuse_unused(states: Sequence[BucketState], view: Agreement, step: int) -> None:
    """Raises: UnusedParametersError: some got no gradient on any rank (``ignore_unused_parameters: false``)."""
    unused = [
        state.bucket.layout.slots[slot].name
        for index, state in enumerate(states)
        for slot, touched in enumerate(view.touched[index])
        if not touched
    ]
    if unused:
        raise UnusedParametersError(
            f"{len(unused)} parameters got no gradient on any rank: {', '.join(unused[:8])}"
            f"{' ...' if len(unused) > 8 else ''}.",
            where=f"step {step}, zero_optimization.ignore_unused_parameters = false",
            do="use them in the forward pass, freeze them, or set ignore_unused_parameters to true.",
        )
