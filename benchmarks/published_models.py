"""The models of published training runs, with the operators that their code ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.gpt import GPT, Block, GPTConfig, Linear, rotate


@dataclass(frozen=True)
class Shape:
    """Of a model.

    Attributes: ``family``: gpt, mpt or llama. ``attention``: flash; written: products with the scores in memory;
    transformers: these and GELU operator by operator, as Transformers' GPT-2 in 2022.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    tied: bool
    attention: str = "flash"
    dropout: float = 0.0


class FusedLoss(torch.autograd.Function):
    """flash-attn's cross-entropy: a kernel that reads the logits, and one that overwrites them with their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.amax(-1).float().mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        return logits.detach().mul_(gradients[0].to(logits.dtype)), None


def dropped(given: Tensor, probability: float) -> Tensor:
    """Dropout by the operator that a GPU has for it."""
    return torch.native_dropout(given, probability, True)[0] if probability else given


class Scores(nn.Module):
    """Attention with its scores in memory, as Megatron-LM had it until 2022: its softmax scales and masks.

    Args:
        is_plain: scaling and mask are operators.
    """

    def __init__(self, dropout: float, *, is_plain: bool) -> None:
        super().__init__()
        self.dropout, self.is_plain = dropout, is_plain

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        scores = query.flatten(0, 1) @ key.flatten(0, 1).transpose(1, 2)
        if self.is_plain:
            mask = torch.ones(scores.shape[1:], dtype=torch.bool)
            scores = torch.where(mask, scores / query.shape[-1] ** 0.5, torch.full([], -1e4, dtype=scores.dtype))
        scores = torch.softmax(scores, -1)
        return (dropped(scores, self.dropout) @ value.flatten(0, 1)).view_as(query)


class PlainAttention(nn.Module):
    """Without rotary positions, with a bias."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads, self.dropout = shape.heads, shape.dropout
        self.attention = (
            F.scaled_dot_product_attention
            if shape.attention == "flash"
            else Scores(shape.dropout, is_plain=shape.attention == "transformers")
        )
        bias = shape.family == "gpt"
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=bias)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=bias)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, _documents: None = None) -> Tensor:
        qkv = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = (each.transpose(1, 2) for each in qkv.unbind(2))
        mixed = self.attention(query, key, value, is_causal=True)
        return dropped(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout)


class PlainFeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        bias = shape.family == "gpt"
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=bias)
        self.is_plain, self.dropout = shape.attention == "transformers", shape.dropout

    def forward(self, hidden: Tensor) -> Tensor:
        up = self.up(hidden)
        if self.is_plain:
            inner = 0.5 * up * (1 + torch.tanh(0.8 * (up + 0.044715 * torch.pow(up, 3.0))))
        else:
            inner = F.gelu(up, approximate="tanh")
        return dropped(self.down(inner), self.dropout)


class GroupedAttention(nn.Module):
    """Llama's: rotary positions, several queries for a key."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = self.head_dim = shape.hidden // shape.heads
        self.q_proj = Linear(shape.hidden, shape.hidden)
        self.k_proj = Linear(shape.hidden, shape.kv_heads * self.size)
        self.v_proj = Linear(shape.hidden, shape.kv_heads * self.size)
        self.o_proj = Linear(shape.hidden, shape.hidden)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, _documents: None = None) -> Tensor:
        heads = [
            each(hidden).unflatten(-1, (-1, self.size)) for each in (self.q_proj, self.k_proj, self.v_proj)
        ]  # [B, L, H, E]
        query, key = (rotate(each.unsqueeze(2), cos, sin).squeeze(2) for each in heads[:2])
        times = query.shape[2] // key.shape[2]
        key, value = (each.repeat_interleave(times, 2) for each in (key, heads[2]))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).flatten(2)))


class GatedFeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.ffn)
        self.up_proj = Linear(shape.hidden, shape.ffn)
        self.down_proj = Linear(shape.ffn, shape.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden)))


TP_PLAN = {
    **{f"blocks.*.attention.{name}_proj": "column" for name in "qkv"},
    **{f"blocks.*.feed_forward.{name}_proj": "column" for name in ("gate", "up")},
    "blocks.*.attention.o_proj": "row",
    "blocks.*.feed_forward.down_proj": "row",
    "embedding": "vocab",
    "head": "vocab_head",
}

PLAIN_TP_PLAN = {key: value for key, value in TP_PLAN.items() if "feed_forward" not in key} | {
    "blocks.*.feed_forward.up": "column",
    "blocks.*.feed_forward.down": "row",
}


def build(shape: Shape) -> GPT:
    """The model. Its blocks are ``Block``s of Shoal's GPT with other parts."""
    model = GPT(GPTConfig(shape.vocab, shape.sequence, shape.layers, shape.hidden, shape.heads, shape.tied))
    if shape.family == "mpt":
        model.loss_function = FusedLoss.apply
    for each in model.blocks:
        block = cast(Block, each)
        if shape.family == "llama":
            block.attention = cast(nn.Module, GroupedAttention(shape))  # type: ignore[assignment]
            block.feed_forward = GatedFeedForward(shape)
            block.attention_norm = nn.RMSNorm(shape.hidden)  # type: ignore[assignment]
            block.feed_forward_norm = nn.RMSNorm(shape.hidden)  # type: ignore[assignment]
        else:
            kind = PlainAttention if shape.kv_heads == shape.heads else GroupedAttention
            block.attention = kind(shape)  # type: ignore[assignment]
            block.feed_forward = PlainFeedForward(shape)
    return model
