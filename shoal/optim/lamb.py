"""LAMB, exact on shards: Adam's direction, scaled per parameter by the ratio of the weights' norm to the direction's.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2        u = m / (sqrt(v) + eps) + weight_decay w
    r = clamp(|w| / |u|, min_coeff, max_coeff), 1 where a norm is zero
    w = w - lr sqrt(1 - b2^t) / (1 - b1^t) r u

The norms are sums over whole parameters in a fixed tree (``tree_sum``), so any number of ranks gives the same bits. Of
tensors that are split over tensor-parallel ranks they are the sums of the parts' sums.
The bias correction scales the step, as in DeepSpeed's FusedLamb, and not m and v as in the paper.

Source: You et al., Large Batch Optimization for Deep Learning, algorithm 2 (arXiv:1904.00962).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Iterator, Sequence
from typing import Any

import torch

from shoal.comm.protocol import Communicator
from shoal.device import numbers_on
from shoal.optim.options import check_options
from shoal.optim.tree_sum import PartialSums, SumTree, plan_sums
from shoal.optim.whole import (
    CPU_CHUNK_NUMEL,
    Interval,
    Loads,
    PartTable,
    RangeViews,
    WholeTensorOptimizer,
    numbered,
)
from shoal.streams import is_accelerator

GPU_BATCH_NUMEL = 1 << 23


class Lamb(WholeTensorOptimizer):
    """LAMB.

    Args:
        max_coeff, min_coeff: bounds of the trust ratio.
        bias_correction: scale the step by Adam's bias corrections.
        eps_inside_sqrt: ``sqrt(v + eps)`` in place of ``sqrt(v) + eps``.

    Raises: OptimizerError: a number outside its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        check_options(
            "Lamb",
            not_negative={"lr": lr, "eps": eps},
            betas=betas,
            others={
                f"min_coeff is {min_coeff} and max_coeff {max_coeff}, expected 0 <= min_coeff <= max_coeff": not (
                    0 <= min_coeff <= max_coeff
                )
            },
        )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        self._plans: dict[Hashable, SumTree] = {}
        self._sums: dict[Hashable, PartialSums] = {}
        super().__init__(params, defaults)

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _update(
        self, flats: Sequence[RangeViews], comm: Communicator | None, tp: Communicator | None, loads: Loads
    ) -> Iterator[None]:
        """Update ranges.

        Communicates: one exchange of 8 bytes for each parameter that a rank holds whole and at most 16 log2(numel) for
            each at its edges; and that of ``PartTable``, where the ranges do not say where parameters lie. Along
            ``tp`` one all_reduce of 8 bytes for each parameter.
        Memory: scratch of 2^16 elements (CPU) or 2^23 (GPU), a few times.
        """
        if not flats:
            return
        pieces, squares = self._squares_alone(flats) if comm is None else (yield from self._squares_shared(flats, comm))
        if tp is not None:
            squares = _sum_over_parts(squares, tp, flats[0].device)
        descend(flats, pieces, trust_ratios(flats, squares))

    def _squares_alone(self, flats: Sequence[RangeViews]) -> tuple[list[Pieces], torch.Tensor]:
        """Sums of squares of w and u of all parameters, which are whole. Shape: [parameters, 2]."""
        numels = [max(shape.numel(), 1) for flat in flats for shape in flat.shapes]
        return self._partial_squares(flats, [(0, numel) for numel in numels])

    def _squares_shared(
        self, flats: Sequence[RangeViews], comm: Communicator
    ) -> Generator[None, None, tuple[list[Pieces], torch.Tensor]]:
        """The same, by one exchange of partial sums."""
        device, home = flats[0].device, flats[0].weight.device
        table = PartTable(flats, comm)
        numels = [shape.numel() for shape in table.shapes]
        plan = self._plans.get(table.key)
        if plan is None:
            plan = self._plans[table.key] = plan_sums([table.of(rank) for rank in range(comm.size)], numels, device)
        pieces, nodes = self._partial_squares(flats, table.of(comm.rank), plan.width)
        work = comm.exchange(nodes.view(-1).to(device), label="lamb.norms")
        yield
        return pieces, plan.finish(work.wait().view(comm.size, plan.width, 2)).to(home)

    def _partial_squares(
        self, flats: Sequence[RangeViews], intervals: Sequence[Interval], width: int = 0
    ) -> tuple[list[Pieces], torch.Tensor]:
        """Update the averages, and sum the squares of w and u in this rank's intervals of all parameters.

        Returns: what was updated, a batch each; and the sums, [nodes or width, 2]. Parameters that are not updated in
            this step count as zero on every rank.
        """
        home = flats[0].weight.device
        groups = {id(flat.group): number for number, flat in enumerate(flats)}
        kinds = tuple((groups[id(flat.group)], flat.weight.dtype) for flat in flats for _ in flat.shapes)
        numels = [max(shape.numel(), 1) for flat in flats for shape in flat.shapes]
        parts = tuple((*interval, numel) for interval, numel in zip(intervals, numels, strict=True))
        key = parts, kinds, width, home
        if (sums := self._sums.get(key)) is None:
            sums = self._sums[key] = PartialSums(parts, kinds, _most(home), home, width=width)
        held = {number: (flat, part) for number, flat, part in numbered(flats) if part.numel}
        every, found = [], []
        for batch in sums.batches:
            memory = batch.layers.empty(2, home)
            updated = [(piece, at) for piece, at in zip(batch.pieces, batch.places, strict=True) if piece[0] in held]
            if updated:
                pieces = Pieces()
                for (number, begin, end), _ in updated:
                    flat, part = held[number]
                    pieces.add(number, flat, part.elements(begin, end))
                pieces.average()
                for row, values in zip(memory, (pieces.weights, pieces.directions()), strict=True):
                    targets = [row[at : at + len(each)] for (_, at), each in zip(updated, values, strict=True)]
                    torch._foreach_copy_(targets, values)
                memory[:, : batch.layers.numel].square_()
                every.append(pieces)
            found.append(batch.sums_of(memory))
        return every, sums.finish(found, 2)


def _sum_over_parts(squares: torch.Tensor, tp: Communicator, device: torch.device) -> torch.Tensor:
    whole = tp.empty(squares.numel(), torch.float32, device)
    whole.copy_(squares.view(-1))
    tp.blocking.all_reduce(whole, label="lamb.parts")
    return whole.view(-1, 2).to(squares.device)


class Pieces:
    """Elements of some parameters of one group that are updated together: 1-D views, one of each list a piece.

    Attributes: ``numbers``: of the parameters, among those of all ranges.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.weights: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.averages: list[torch.Tensor] = []
        self.squares: list[torch.Tensor] = []
        self._ranges: list[tuple[RangeViews, slice]] = []

    @property
    def group(self) -> dict[str, Any]:
        return self._ranges[0][0].group

    def add(self, number: int, flat: RangeViews, here: slice) -> None:
        assert flat.gradient is not None
        self.numbers.append(number)
        self.weights.append(flat.weight[here])
        self.gradients.append(flat.gradient[here])
        self.averages.append(flat.state["exp_avg"][here])
        self.squares.append(flat.state["exp_avg_sq"][here])
        self._ranges.append((flat, here))

    def of_state(self, key: str) -> list[torch.Tensor]:
        """These elements of a further state."""
        return [flat.state[key][here] for flat, here in self._ranges]

    def average(self) -> None:
        """Add the gradients to their averages, once."""
        beta1, beta2 = self.group["betas"]
        gradients = [each.to(weight.dtype) for each, weight in zip(self.gradients, self.weights, strict=True)]
        torch._foreach_mul_(self.averages, beta1)
        torch._foreach_add_(self.averages, gradients, alpha=1 - beta1)
        torch._foreach_mul_(self.squares, beta2)
        torch._foreach_addcmul_(self.squares, gradients, gradients, value=1 - beta2)

    def directions(self) -> list[torch.Tensor]:
        """``u``. Computed twice in a step, not stored: scratch stays small."""
        found: list[torch.Tensor] = list(torch._foreach_div(self.averages, roots(self.squares, self.group)))
        if self.group["weight_decay"]:
            torch._foreach_add_(found, self.weights, alpha=self.group["weight_decay"])
        return found


def roots(squares: list[torch.Tensor], group: dict[str, Any]) -> list[torch.Tensor]:
    """What averages are divided by."""
    if group["eps_inside_sqrt"]:
        found = torch._foreach_add(squares, group["eps"])
        torch._foreach_sqrt_(found)
    else:
        found = torch._foreach_sqrt(squares)
        torch._foreach_add_(found, group["eps"])
    return list(found)


def whole_parts(flats: Sequence[RangeViews]) -> list[Pieces]:
    """Batches of parts, none of which is divided."""
    batches: list[Pieces] = []
    numel, before = 0, None
    for number, flat, part in numbered(flats):
        kind = id(flat.group), flat.weight.dtype
        numel += part.numel
        if kind != before or numel > _most(flat.weight.device):
            batches.append(Pieces())
            numel, before = part.numel, kind
        batches[-1].add(number, flat, slice(part.start, part.stop))
    return batches


def _most(device: torch.device) -> int:
    """Elements that are updated together."""
    return GPU_BATCH_NUMEL if is_accelerator(device) else CPU_CHUNK_NUMEL


def trust_ratios(flats: Sequence[RangeViews], squares: torch.Tensor) -> torch.Tensor:
    """Trust ratios from sums of squares. Shape: [parameters, 2] -> [parameters]."""
    bounds = [(flat.group["min_coeff"], flat.group["max_coeff"]) for flat in flats for _ in flat.shapes]
    on_host = torch.tensor(bounds, dtype=torch.float32, device="cpu").view(-1, 2)
    least, most = on_host.to(squares.device, non_blocking=True).unbind(1)
    norms = squares.sqrt()
    ratios = (norms[:, 0] / norms[:, 1]).clamp(least, most)
    return torch.where((norms > 0).all(dim=1), ratios, torch.ones_like(ratios))


def descend(
    flats: Sequence[RangeViews], batches: Sequence[Pieces], ratios: torch.Tensor, *, last_square: float = math.inf
) -> None:
    """Step along ``u``. ``ratios`` has one entry per parameter.

    Args:
        last_square: the last step that averages the squares.
    """
    factors = _factors(flats, ratios, last_square)
    for pieces in batches:
        updates = pieces.directions()
        for update, number in zip(updates, pieces.numbers, strict=True):
            update.mul_(factors[number])
        torch._foreach_sub_(pieces.weights, updates)


def _factors(flats: Sequence[RangeViews], ratios: torch.Tensor, last_square: float) -> dict[int, torch.Tensor]:
    """What ``u`` of each parameter that is updated is multiplied by. 0-d each."""
    steps = [step for flat in flats for step in flat.count()]
    of_groups: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for (number, flat, _), step in zip(numbered(flats), steps, strict=True):
        of_groups.setdefault(id(flat.group), []).append((number, step))
    groups = {id(flat.group): flat.group for flat in flats}
    found: dict[int, torch.Tensor] = {}
    for key, rows in of_groups.items():
        group, numbers = groups[key], [number for number, _ in rows]
        factors = ratios.index_select(0, numbers_on(ratios.device, numbers)) * group["lr"]
        if group["bias_correction"]:
            (beta1, beta2), counted = group["betas"], torch.stack([step for _, step in rows])
            corrections = (1 - beta2 ** counted.clamp(max=last_square)).sqrt() / (1 - beta1**counted)
            factors = factors.double() * corrections.to(ratios.device, non_blocking=True)
        found.update(zip(numbers, factors.unbind(), strict=True))
    return found
