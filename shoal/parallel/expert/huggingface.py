"""The experts of Hugging Face's models, divided among ranks; the router and everything else stay the model's own.

    experts.gate_up_proj [E, 2 I, D]    becomes    [E / ep, 2 I, D]: the experts of this rank
    experts.down_proj    [E, D, I]                 [E / ep, D, I]

Transformers 5 gives the experts of all its models one interface (``use_experts_implementation``): a module with stacked
parameters, called with the tokens, the experts that the router chose and their weights. Older models and those of
remote code have a list of modules. Two families stack experts without that interface and are given it (``adapt``):

    Llama 4    every expert gets every token, times its score: zero if the router did not choose the expert. The layer
               is replaced: chosen tokens only, weighted before the experts
    DBRX       ``experts.mlp`` has ``w1``, ``v1``, ``w2``, each ``[E x F, D]``: the experts' rows one after the other
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast

from torch import Tensor, nn

from shoal.comm.protocol import Communicator
from shoal.errors import NotBuiltError
from shoal.parallel.expert.dispatch import Compute
from shoal.parallel.expert.grouped import feed_forward, grouped_linear
from shoal.parallel.expert.held import ExpertsHeld, ListedExperts, SplitDim, Stack
from shoal.parallel.swiglu import swiglu
from shoal.sharding.storage import is_placeholder

_INTERFACE = ("num_experts", "has_gate", "has_bias", "is_transposed")  # set by Transformers' decorator
_ROWS = "compute_of_rows"

Dispatch = Callable[..., Tensor]  # ``run_experts``, with how the section ``expert_parallel`` sends tokens

INTERFACE = "a module with stacked parameters (gate_up_proj or up_proj, down_proj), as Transformers 5 makes them"


def extend(module: nn.Module, behaviour: type[nn.Module], **attributes: object) -> None:
    """Give a module the ``forward`` of ``behaviour``, and attributes: its class becomes a subclass of its own.

    The class keeps its name, by which rules of units and recomputation find modules, and ``isinstance`` its answers.
    """
    module.__class__ = _extended(type(module), behaviour)
    for name, value in attributes.items():
        setattr(module, name, value)


def _extend(base: type[nn.Module], behaviour: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (behaviour, base), names)


_extended = cast(Callable[[type[nn.Module], type[nn.Module]], type[nn.Module]], cache(_extend))


class ExpertParallelStack(nn.Module):
    """Transformers' interface of stacked experts, of which this rank holds some."""

    experts_held: ExpertsHeld
    dispatch: Dispatch

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        compute = self.get_submodule(_ROWS)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])  # those of DBRX are [batch, sequence, width]
        out = self.dispatch(tokens, top_k_index, top_k_weights, compute, self.experts_held)
        return out.view(hidden_states.shape)


class StackRows(nn.Module):
    """What computes the rows of stacked experts, as a module: their parameters may be gathered before its forward.

    Args:
        compute: the experts' own function.
    """

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        return self._compute(rows, counts)


def _compute_of(experts: nn.Module) -> Compute:
    compute: Compute | None = getattr(experts, "compute_rows", None)
    return compute or partial(_compute_stack, experts)


def _compute_stack(module: nn.Module, rows: Tensor, counts: Sequence[int]) -> Tensor:
    experts = cast(Any, module)  # each model's own attributes
    up_name = "gate_up_proj" if experts.has_gate else "up_proj"
    up, down = (getattr(experts, name) for name in (up_name, "down_proj"))
    if not experts.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    biases = [getattr(experts, f"{name}_bias") if experts.has_bias else None for name in (up_name, "down_proj")]
    activation = experts._apply_gate if experts.has_gate else experts.act_fn
    if experts.has_gate and _is_swiglu(module):
        activation = swiglu
    out = feed_forward(rows, counts, experts.experts_held, up, down, activation, *biases)
    return experts.post_expert_norm(out) if getattr(experts, "has_post_expert_norm", False) else out


def _is_swiglu(experts: nn.Module) -> bool:
    """True if Transformers' own gate, or Llama 4's, activates by silu."""
    gate: Any = type(experts)._apply_gate  # type: ignore[attr-defined]
    is_known = gate is Llama4Interface._apply_gate or gate.__name__ == "_default_apply_gate"
    return is_known and type(experts.act_fn).__name__ in ("SiLUActivation", "SiLU")


class Llama4Layer(nn.Module):
    """The layer around the experts of Llama 4."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        layer = cast(Any, self)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        routed = layer.router(tokens)
        if len(routed) == 3:  # of Shoal's router
            logits, weights, chosen = routed
        else:
            scores, logits = routed
            chosen = logits.topk(layer.top_k, dim=-1).indices
            weights = scores.gather(-1, chosen)
        return layer.shared_expert(tokens) + layer.experts(tokens, chosen, weights.to(tokens.dtype)), logits


class Llama4Interface(nn.Module):
    """The common interface for the experts of Llama 4."""

    has_gate, has_bias, is_transposed = True, False, True
    score_before = True
    act_fn: Callable[[Tensor], Tensor]

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * self.act_fn(gate)


class DbrxInterface(nn.Module):
    """The common interface for the experts of DBRX."""

    def compute_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        mlp = cast(Any, self).mlp
        gate, up, down = (weight.view(-1, mlp.ffn_hidden_size, mlp.hidden_size) for weight in (mlp.w1, mlp.v1, mlp.w2))
        inner = mlp.activation_fn(grouped_linear(rows, gate.transpose(1, 2), counts))
        return grouped_linear(inner * grouped_linear(rows, up.transpose(1, 2), counts), down, counts)


def has_own_layout(experts: nn.Module) -> bool:
    """True if experts are of Llama 4 or DBRX, and not Shoal's yet."""
    return type(experts).__name__ in ("Llama4TextExperts", "DbrxExperts") and not hasattr(experts, "experts_held")


def adapt(layer: nn.Module, experts: nn.Module) -> None:
    """Give experts of Llama 4 and DBRX the common interface, in place. Others are not changed."""
    if not has_own_layout(experts):
        return
    if type(experts).__name__ == "DbrxExperts":
        extend(experts, DbrxInterface)
    else:
        extend(layer, Llama4Layer)
        extend(experts, Llama4Interface)


def is_stack(module: nn.Module) -> bool:
    """True if a module is of Transformers' interface, and not Shoal's yet."""
    parameters = dict(module.named_parameters(recurse=False))
    down = parameters.get("down_proj")
    if down is None or not all(hasattr(module, name) for name in _INTERFACE) or hasattr(module, "experts_held"):
        return False
    up = parameters.get("gate_up_proj" if module.has_gate else "up_proj")
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


def use_experts(experts: nn.Module, comm: Communicator | None, dispatch: Dispatch) -> None:
    """Let Shoal compute the experts. Stacked parameters stay whole; of a list this rank's experts are kept.

    Memory: of a list, this rank's experts; the other modules are released.
    """
    if isinstance(experts, nn.ModuleList):
        held = ExpertsHeld(len(experts), 1 if comm is None else comm.size, stack=None)
        held.set_ranks(comm)
        local = [experts[expert] for expert in held.ids]
        del experts[:]
        experts.extend(local)
        extend(experts, ListedExperts, experts_held=held)
        return
    if isinstance(experts, DbrxInterface):
        stack = Stack({}, _ROWS, rows=int(cast(Any, experts).ffn_hidden_size))
    else:
        stack = Stack(_split_dims(experts), _ROWS)
    held = ExpertsHeld(_num_experts(experts), stack=stack)
    extend(experts, ExpertParallelStack, experts_held=held, dispatch=dispatch)
    setattr(experts, _ROWS, StackRows(_compute_of(experts)))


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
