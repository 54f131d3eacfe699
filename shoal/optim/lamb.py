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

from collections.abc import Generator, Hashable, Iterator, Sequence
from typing import Any

import torch

from shoal.comm.protocol import Communicator
from shoal.optim.options import check_options
from shoal.optim.tree_sum import CPU_CHUNK_LEVEL, GPU_CHUNK_LEVEL, SumTree, node_keys, partial_sums, plan_sums
from shoal.optim.whole import Loads, ParameterPart, PartTable, RangeViews, WholeTensorOptimizer, chunks
from shoal.streams import is_accelerator


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
        Memory: scratch of 2^16 elements (CPU) or 2^24 (GPU), a few times.
        """
        if not flats:
            return
        squares = self._squares_alone(flats) if comm is None else (yield from self._squares_shared(flats, comm))
        if tp is not None:
            squares = _sum_over_parts(squares, tp, flats[0].device)
        for flat, own in zip(flats, squares, strict=True):
            descend(flat, trust_ratios(own, flat.group))

    def _squares_alone(self, flats: Sequence[RangeViews]) -> list[torch.Tensor]:
        """Sums of squares of w and u of each range's parameters, which are whole. Shape: [parameters, 2] each."""
        squares = []
        for flat in flats:
            by_index = {part.parameter: part for part in flat.parts}
            # Of a parameter that is not updated in this step.
            zero = torch.zeros(2, dtype=torch.float32, device=flat.weight.device)
            nodes = [
                node
                for index in range(len(flat.shapes))
                for node in (_advance(flat, by_index[index]) if index in by_index else [zero])
            ]
            squares.append(torch.stack(nodes) if nodes else zero.new_zeros(0, 2))
        return squares

    def _squares_shared(
        self, flats: Sequence[RangeViews], comm: Communicator
    ) -> Generator[None, None, list[torch.Tensor]]:
        """The same, by one exchange of partial sums."""
        device, home = flats[0].device, flats[0].weight.device
        table = PartTable(flats, comm)
        numels = [shape.numel() for shape in table.shapes]
        plan = self._plans.get(table.key)
        if plan is None:
            plan = self._plans[table.key] = plan_sums([table.of(rank) for rank in range(comm.size)], numels, device)
        own, zero = table.of(comm.rank), torch.zeros(2, dtype=torch.float32, device=home)
        nodes, number = [], 0
        for flat in flats:
            by_index = {part.parameter: part for part in flat.parts}
            for index in range(len(flat.shapes)):
                if index in by_index:
                    nodes += _advance(flat, by_index[index])
                else:  # not updated in this step: it counts as zero on every rank
                    nodes += [zero] * len(node_keys(*own[number], numels[number]))
                number += 1
        nodes += [zero] * (plan.width - len(nodes))
        work = comm.exchange(torch.stack(nodes).view(-1).to(device), label="lamb.norms")
        yield
        squares = plan.finish(work.wait().view(comm.size, plan.width, 2)).to(home)
        return list(squares.split([len(flat.shapes) for flat in flats]))


def _sum_over_parts(squares: Sequence[torch.Tensor], tp: Communicator, device: torch.device) -> list[torch.Tensor]:
    numels = [own.shape[0] for own in squares]
    whole = tp.empty(2 * sum(numels), torch.float32, device)
    whole.copy_(torch.cat(list(squares)).view(-1))
    tp.blocking.all_reduce(whole, label="lamb.parts")
    return list(whole.view(-1, 2).to(squares[0].device).split(numels))


def _advance(flat: RangeViews, part: ParameterPart) -> list[torch.Tensor]:
    """Update the averages of one part, and return the partial sums of squares of w and u. Shape: [2] each."""
    gradient, group = flat.gradient, flat.group
    assert gradient is not None
    beta1, beta2 = group["betas"]
    shift = part.start - part.offset

    def squares(begin: int, end: int) -> torch.Tensor:
        here = slice(begin + shift, end + shift)
        grad = gradient[here].to(flat.weight.dtype)
        flat.state["exp_avg"][here].mul_(beta1).add_(grad, alpha=1 - beta1)
        flat.state["exp_avg_sq"][here].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        squares = torch.empty(2, end - begin, dtype=torch.float32, device=grad.device)
        for row, values in enumerate((flat.weight[here], direction(flat, here))):
            torch.square(values.float(), out=squares[row])
        return squares

    level = GPU_CHUNK_LEVEL if is_accelerator(flat.weight.device) else CPU_CHUNK_LEVEL
    return partial_sums(part.offset, part.offset + part.numel, part.shape.numel(), squares, level)


def direction(flat: RangeViews, here: slice) -> torch.Tensor:
    """``u`` of some elements. Computed twice in a step, not stored: scratch stays small. Shape: [stop - start]."""
    group = flat.group
    square = flat.state["exp_avg_sq"][here]
    scale = (square + group["eps"]).sqrt_() if group["eps_inside_sqrt"] else square.sqrt().add_(group["eps"])
    update = flat.state["exp_avg"][here] / scale
    if group["weight_decay"]:
        update.add_(flat.weight[here], alpha=group["weight_decay"])
    return update


def trust_ratios(squares: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Trust ratios from sums of squares. Shape: [parameters, 2] -> [parameters]."""
    norms = squares.sqrt()
    ratios = (norms[:, 0] / norms[:, 1]).clamp(group["min_coeff"], group["max_coeff"])
    return torch.where((norms > 0).all(dim=1), ratios, torch.ones_like(ratios))


def descend(flat: RangeViews, ratios: torch.Tensor) -> None:
    """Step along ``u``. ``ratios`` has one entry per parameter."""
    group = flat.group
    beta1, beta2 = group["betas"]
    for part, step in zip(flat.parts, flat.count(), strict=True):
        factor: Any = ratios[part.parameter] * group["lr"]
        if group["bias_correction"]:
            factor = factor * ((1 - beta2**step).sqrt() / (1 - beta1**step))
        for begin, end in chunks(part.start, part.stop, flat.weight.device):
            here = slice(begin, end)
            flat.weight[here].sub_(direction(flat, here).mul_(factor))
