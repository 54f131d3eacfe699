"""The experts of Hugging Face's models, divided among ranks; the router and everything else stay the model's own.

    experts.gate_up_proj [E, 2 I, D]    becomes    [E / ep, 2 I, D]: the experts of this rank
    experts.down_proj    [E, D, I]                 [E / ep, D, I]

Transformers 5 gives the experts of all its models one interface (``use_experts_implementation``): a module with stacked
parameters, called with the tokens, the experts that the router chose and their weights. Older models and those of
remote code have a list of modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from shoal.comm.protocol import Communicator
from shoal.compiler import untraced
from shoal.errors import NotBuiltError
from shoal.parallel.expert.dispatch import Compute, run_experts
from shoal.parallel.expert.extend import extend
from shoal.parallel.expert.grouped import add_bias_of_experts, grouped_linear
from shoal.parallel.expert.held import ExpertsHeld, SplitDim
from shoal.parallel.expert.own_layouts import rows_per_expert
from shoal.sharding.parameter_buffer import is_placeholder

_INTERFACE = ("num_experts", "has_gate", "has_bias", "is_transposed")  # set by Transformers' decorator
_ROWS = "compute_of_rows"
INTERFACE = "a module with stacked parameters (gate_up_proj or up_proj, down_proj), as Transformers 5 makes them"


class ExpertParallelStack(nn.Module):
    """Transformers' interface of stacked experts, of which this rank holds some."""

    experts_held: ExpertsHeld
    dispatch: Dispatch

    @untraced
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        compute = getattr(self, _ROWS, None) or _compute_of(self)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])  # those of DBRX are [batch, sequence, width]
        out = self.dispatch.run(tokens, top_k_index, top_k_weights, compute, self.experts_held)
        return out.view(hidden_states.shape)


class StackRows(nn.Module):
    """What computes the rows of stacked experts, as a module: their parameters may be gathered before its forward.

    Args:
        compute: the experts' own function.
    """

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return self._compute(rows, counts)


class ExpertParallelList(nn.ModuleList):
    """A list of experts, each a module, of which this rank holds some."""

    experts_held: ExpertsHeld
    dispatch: Dispatch

    @untraced
    def forward(self, hidden: torch.Tensor, expert_index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.dispatch.run(hidden, expert_index, weights, partial(_compute_list, self), self.experts_held)


@dataclass(frozen=True)
class Dispatch:
    """How tokens are sent to experts.

    Args:
        score_before: multiply the tokens by their weights before the experts, not the outputs after them.
        overlap: parts of the tokens; one is sent while another is computed.
    """

    score_before: bool = False
    overlap: int = 1

    def run(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, compute: Compute, held: ExpertsHeld
    ) -> torch.Tensor:
        return run_experts(
            hidden,
            index,
            weights,
            compute,
            held,
            score_before=self.score_before,
            overlap=self.overlap,
            may_drop=False,
        )


def _compute_of(experts: nn.Module) -> Compute:
    own: Compute | None = getattr(experts, "compute_rows", None)
    return own or partial(_compute_stack, experts)


def _compute_stack(module: nn.Module, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    experts = cast(Any, module)  # each model's own attributes
    held: ExpertsHeld = experts.experts_held
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _linear(experts, up, held.enter(rows), counts)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    is_split = held.tp is not None  # the bias is added once, after the sum
    out = held.leave(_linear(experts, "down_proj", inner, counts, adds_bias=not is_split))
    if is_split and experts.has_bias:
        out = add_bias_of_experts(out, experts.down_proj_bias, counts)
    return cast(torch.Tensor, experts.post_expert_norm(out) if getattr(experts, "has_post_expert_norm", False) else out)


def _linear(
    experts: Any, name: str, rows: torch.Tensor, counts: Sequence[int], *, adds_bias: bool = True
) -> torch.Tensor:
    weight = getattr(experts, name)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias and adds_bias else None
    return grouped_linear(rows, weight if experts.is_transposed else weight.transpose(1, 2), counts, bias)


def _compute_list(experts: nn.ModuleList, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    # Every expert is called, also without rows: all ranks gather and reduce at the same places.
    parts = rows.split(list(counts))
    return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])


def is_stack(module: nn.Module) -> bool:
    """Whether a module is of Transformers' interface, and none of Shoal's yet."""
    own = dict(module.named_parameters(recurse=False))
    down = own.get("down_proj")
    if down is None or not all(hasattr(module, name) for name in _INTERFACE) or hasattr(module, "experts_held"):
        return False
    up = own.get("gate_up_proj" if module.has_gate else "up_proj")
    return up is not None and down.dim() == up.dim() == 3 and len(down) == len(up) == module.num_experts


def check_experts(name: str, experts: nn.Module, comm: Communicator | None) -> None:
    """Raise what stands against dividing them.

    Raises: ConfigError: the ranks do not divide the experts. NotBuiltError: ``zero.Init`` has sharded a list of them.
    """
    if comm is None:
        return
    ExpertsHeld(_num_experts(experts), comm.size)
    if isinstance(experts, nn.ModuleList) and any(is_placeholder(parameter.data) for parameter in experts.parameters()):
        raise NotBuiltError(
            f"{name} is a list of experts that zero.Init has sharded, each over all ranks.",
            do="build the model on the meta device, or whole on the CPU: each rank keeps its experts only.",
            code="expert-parallel-init",
        )


def use_experts(
    experts: nn.Module, comm: Communicator | None, dispatch: Dispatch, *, is_gathered_if_used: bool = False
) -> None:
    """Let Shoal compute the experts. Stacked parameters stay whole; of a list this rank's experts are kept.

    Args:
        is_gathered_if_used: rows of stacked experts are computed by a module of its own.

    Memory: of a list, this rank's experts; the other modules are released.
    """
    if not isinstance(experts, nn.ModuleList):
        rows = rows_per_expert(experts)
        held = ExpertsHeld(_num_experts(experts), split_dims=_split_dims(experts) if rows == 1 else {}, rows=rows)
        extend(experts, ExpertParallelStack, experts_held=held, dispatch=dispatch)
        if is_gathered_if_used:
            held.compute_name = _ROWS
            setattr(experts, _ROWS, StackRows(_compute_of(experts)))
        return
    held = ExpertsHeld(len(experts), 1 if comm is None else comm.size, "listed")
    held.set_ranks(comm)
    own = [experts[expert] for expert in held.ids]
    del experts[:]
    experts.extend(own)
    extend(experts, ExpertParallelList, experts_held=held, dispatch=dispatch)


def _split_dims(experts: Any) -> dict[str, SplitDim]:
    inner, last = (2, 1) if experts.is_transposed else (1, 2)
    up, fused = ("gate_up_proj", 2) if experts.has_gate else ("up_proj", 1)
    is_interleaved = not getattr(experts, "is_concatenated", True)
    return {
        up: SplitDim(inner, fused, is_interleaved),
        f"{up}_bias": SplitDim(1, fused, is_interleaved),
        "down_proj": SplitDim(last),
    }


def _num_experts(experts: nn.Module) -> int:
    return len(experts) if isinstance(experts, nn.ModuleList) else int(cast(Any, experts).num_experts)
