"""Small mixture-of-experts models, as Transformers 4 and remote code have them: a list of experts, called in a loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, NUM_EXPERTS, TOP_K = 12, 4, 2


class Gated(nn.Module):
    """An expert with the names of its three weights."""

    def __init__(self, names: tuple[str, str, str], width: int = 20) -> None:
        super().__init__()
        self.names = names
        for name, sizes in zip(names, ((WIDTH, width), (width, WIDTH), (WIDTH, width)), strict=True):
            setattr(self, name, nn.Linear(*sizes, bias=False))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gate, down, up = (self.get_submodule(name) for name in self.names)
        out: torch.Tensor = down(F.silu(gate(rows)) * up(rows))
        return out


def looped(experts: nn.ModuleList, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Each expert on its tokens, one after the other."""
    out = torch.zeros_like(tokens)
    for number, expert in enumerate(experts):
        token, choice = torch.where(chosen == number)
        out = out.index_add(0, token, expert(tokens[token]) * weights[token, choice, None])
    return out


class MixtralLayer(nn.Module):
    """As Transformers 4 has it: softmax, normalised weights; returns the logits too."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Gated(("w1", "w2", "w3")) for _ in range(config.num_local_experts))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = hidden.view(-1, WIDTH)
        logits = self.gate(tokens)
        weights, chosen = torch.topk(logits.softmax(-1), TOP_K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return looped(self.experts, tokens, weights, chosen).view(hidden.shape), logits


class QwenLayer(nn.Module):
    """A shared expert with a gate; weights that are not normalised."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        names = ("gate_proj", "down_proj", "up_proj")
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Gated(names) for _ in range(config.num_experts))
        self.shared_expert = Gated(names)
        self.shared_expert_gate = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.view(-1, WIDTH)
        weights, chosen = torch.topk(self.gate(tokens).softmax(-1), TOP_K, dim=-1)
        shared = torch.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
        return (looped(self.experts, tokens, weights, chosen) + shared).view(hidden.shape)


class DeepseekGate(nn.Module):
    """The gate of DeepSeek-V3's own code: sigmoid, groups, a bias to choose by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(NUM_EXPERTS, WIDTH))
        self.e_score_correction_bias = nn.Parameter(torch.empty(NUM_EXPERTS))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = F.linear(tokens.float(), self.weight.float()).sigmoid()
        biased = (scores + self.e_score_correction_bias).view(len(tokens), 2, -1)
        group = biased.topk(2, dim=-1).values.sum(-1).argmax(-1)
        of_group = torch.stack([biased[row, number] for row, number in enumerate(group)])
        chosen = of_group.topk(TOP_K, dim=-1).indices + 2 * group[:, None]
        weights = scores.gather(1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5


class DeepseekLayer(nn.Module):
    """Shared experts without a gate; scaled weights."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        names = ("gate_proj", "down_proj", "up_proj")
        self.gate = DeepseekGate()
        self.experts = nn.ModuleList(Gated(names) for _ in range(config.n_routed_experts))
        self.shared_experts = Gated(names, 28)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.view(-1, WIDTH)
        chosen, weights = self.gate(tokens)
        return (looped(self.experts, tokens, weights, chosen) + self.shared_experts(tokens)).view(hidden.shape)


class Stack(nn.Module):
    """The interface of Transformers 5: stacked parameters; with biases and transposed as GPT-OSS, or neither."""

    def __init__(
        self, num_experts: int, *, is_transposed: bool, has_gate: bool, inner: int = 20, width: int = WIDTH
    ) -> None:
        super().__init__()
        self.num_experts, self.has_gate = num_experts, has_gate
        self.has_bias = self.is_transposed = is_transposed
        self.is_concatenated = False
        self.act_fn = nn.SiLU()
        up = "gate_up_proj" if has_gate else "up_proj"
        for name, sizes in ((up, (width, (1 + has_gate) * inner)), ("down_proj", (inner, width))):
            shape = sizes if is_transposed else sizes[::-1]
            self.register_parameter(name, nn.Parameter(torch.empty(num_experts, *shape)))
            if is_transposed:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(num_experts, sizes[1])))

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1) if self.is_concatenated else (both[..., ::2], both[..., 1::2])
        return self.act_fn(gate) * (up + 1)

    def _linear(self, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
        weight = self.get_parameter(name)[expert]
        out = rows @ (weight if self.is_transposed else weight.t())
        return out + self.get_parameter(f"{name}_bias")[expert] if self.has_bias else out

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = torch.where(chosen == expert)
            both = self._linear("gate_up_proj" if self.has_gate else "up_proj", expert, tokens[token])
            inner = self._apply_gate(both) if self.has_gate else self.act_fn(both)
            rows = self._linear("down_proj", expert, inner) * weights[token, choice, None]
            out = out.index_add(0, token, rows.to(out.dtype))
        return out


class StackLayer(nn.Module):
    """A router of its own beside stacked experts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = Stack(NUM_EXPERTS, is_transposed=config.is_transposed, has_gate=config.has_gate)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.view(-1, WIDTH)
        weights, chosen = torch.topk(self.router(tokens).softmax(-1), TOP_K, dim=-1)
        out: torch.Tensor = self.experts(tokens, chosen, weights)
        return out.view(hidden.shape)


class Block(nn.Module):
    """A residual around a layer, called by the name that the family gives it."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self.add_module(name, layer)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        (layer,) = self.children()
        out = layer(hidden)
        return hidden + (out[0] if isinstance(out, tuple) else out)


class Layers(nn.Module):
    """Two layers of one family."""

    def __init__(self, family: str) -> None:
        super().__init__()
        kind, name, settings = {**LISTED, **STACKED}[family]
        self.config = SimpleNamespace(model_type=family, num_experts_per_tok=TOP_K, **settings)
        self.layers = nn.ModuleList(Block(name, kind(self.config)) for _ in range(2))
        generator = torch.Generator().manual_seed(4)
        for parameter in self.parameters():
            parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


STACKED: dict[str, tuple[type[nn.Module], str, dict[str, Any]]] = {
    "plain": (StackLayer, "mlp", {"is_transposed": False, "has_gate": True}),
    "transposed with biases": (StackLayer, "mlp", {"is_transposed": True, "has_gate": True}),
    "without gate": (StackLayer, "mlp", {"is_transposed": False, "has_gate": False}),
}
LISTED: dict[str, tuple[type[nn.Module], str, dict[str, Any]]] = {
    "mixtral": (MixtralLayer, "block_sparse_moe", {"num_local_experts": NUM_EXPERTS}),
    "qwen2_moe": (QwenLayer, "mlp", {"num_experts": NUM_EXPERTS, "norm_topk_prob": False}),
    "deepseek_v3": (
        DeepseekLayer,
        "mlp",
        {
            "n_routed_experts": NUM_EXPERTS,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
}
