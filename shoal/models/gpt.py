"""A GPT: pre-norm blocks, rotary positions, causal attention, one loss; with experts as an option; and named shapes.

    tokens [B, L] -> embedding [B, L, D] -> blocks -> norm -> head -> logits [B, L, V] -> loss []

Letters: B sequences, L positions, D hidden size, H heads, E = D / H head size, V vocabulary size.

Every module that owns a parameter has ``reset_parameters()``, which fills all that it owns, and modules are built in
the order in which ``modules()`` lists them. So a model built on the meta device and filled module by module has the
same bits as one that was built directly from the same seed. Rotations are computed in each forward pass, once for all
blocks, so that there are no buffers to lose or to round.

With experts, a block's feed-forward layer is one that the caller gives (``shoal.parallel.expert.stacked``), and the
losses of the routers are summed from block to block.

A shape is known by name, or is the one nearest to a number of parameters:

>>> named_config("124m").num_parameters()
123587328
>>> parse_count("10M"), parse_count("1.5b"), parse_count("4096")
(10000000, 1500000000, 4096)

Source: GPT-2's shape and initialisation (Radford et al. 2019), rotary positions (arXiv:2104.09864).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import ModelError, UsageError
from shoal.text import did_you_mean

Attend = Callable[..., Tensor]  # as torch.nn.functional.scaled_dot_product_attention
HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [B, L, D], weight [V, D], targets [B, L] -> loss []
ExpertLayer = Callable[["GPTConfig"], nn.Module]  # whose forward is: hidden [B, L, D] -> the same, loss []

INIT_STD = 0.02
_ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Args:
        vocab_size: number of distinct tokens, V.
        sequence_length: the longest sequence in tokens, L.
        num_layers: number of blocks.
        hidden_size: width of the residual stream, D; divides by ``num_heads``, into an even head size.
        num_heads: attention heads per block, H.
        tied: True if the head's weight is the embedding's.
        dropout: probability that an element of a block's two outputs is zeroed while training.
        num_experts: feed-forward layers in each block, of which each token uses some; 0: one, for all tokens.
        experts_per_token: how many.
        auxiliary_loss: weight of the loss that balances the experts.
        z_loss: weight of the loss that keeps the routers' scores small.

    Raises: ModelError: a size that is not positive, a hidden size that does not divide, or too few experts.
    """

    vocab_size: int
    sequence_length: int
    num_layers: int
    hidden_size: int
    num_heads: int
    tied: bool = True
    dropout: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 2
    auxiliary_loss: float = 0.01
    z_loss: float = 0.001

    def __post_init__(self) -> None:
        for name in ("vocab_size", "sequence_length", "num_layers", "hidden_size", "num_heads"):
            value = vars(self)[name]
            if value < 1:
                raise ModelError(f"{name} is {value}, but a model needs at least 1.", where="GPTConfig")
        if self.hidden_size % (2 * self.num_heads):
            raise ModelError(
                f"hidden_size {self.hidden_size} does not divide into {self.num_heads} heads of an even size.",
                where="GPTConfig",
                do=f"take a hidden_size that is a multiple of {2 * self.num_heads}.",
            )
        if self.num_experts < 0 or (self.num_experts and not 1 <= self.experts_per_token <= self.num_experts):
            raise ModelError(
                f"{self.experts_per_token} experts per token of {self.num_experts} experts.",
                where="GPTConfig",
                do="take at least 1 expert per token, and at most all of them.",
            )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    def num_parameters(self) -> int:
        """The number of distinct parameters (a tied weight counts once)."""
        return self._count(self.num_experts or 1)

    def num_active_parameters(self) -> int:
        """Those that one token uses."""
        return self._count(self.experts_per_token if self.num_experts else 1)

    def _count(self, num_experts: int) -> int:
        hidden = self.hidden_size
        block = (4 + 8 * num_experts) * hidden * hidden + (2 + self.num_experts) * hidden
        embeddings = self.vocab_size * hidden * (1 if self.tied else 2)
        return self.num_layers * block + embeddings + hidden

    def flops_per_token(self) -> int:
        """Floating-point operations of forward and backward per trained token, matrix products only.

        Source: Megatron-LM (arXiv:2104.04473), section 5.1, without recomputation.
        """
        experts = self.experts_per_token if self.num_experts else 1
        block = (4 + 8 * experts) * self.hidden_size**2 + self.num_experts * self.hidden_size
        matrices = self.num_layers * block + self.vocab_size * self.hidden_size
        scores = 2 * self.num_layers * self.hidden_size * self.sequence_length
        return 6 * (matrices + scores)


# The vocabulary of the larger shapes is GPT-2's 50,257 rounded up to a multiple of 128, which divides well.
NAMED_SHAPES: dict[str, GPTConfig] = {
    "nano": GPTConfig(256, 64, num_layers=2, hidden_size=64, num_heads=2),
    "tiny": GPTConfig(256, 128, num_layers=4, hidden_size=128, num_heads=4),
    "mini": GPTConfig(256, 256, num_layers=6, hidden_size=256, num_heads=4),
    "small-34m": GPTConfig(8192, 256, num_layers=8, hidden_size=512, num_heads=8, tied=False),
    "124m": GPTConfig(50304, 1024, num_layers=12, hidden_size=768, num_heads=12),
    "350m": GPTConfig(50304, 1024, num_layers=24, hidden_size=1024, num_heads=16),
    "774m": GPTConfig(50304, 1024, num_layers=36, hidden_size=1280, num_heads=20),
    "1.5b": GPTConfig(50304, 1024, num_layers=48, hidden_size=1600, num_heads=25),
    "2.7b": GPTConfig(50304, 2048, num_layers=32, hidden_size=2560, num_heads=32),
    "6.7b": GPTConfig(50304, 2048, num_layers=32, hidden_size=4096, num_heads=32),
    "13b": GPTConfig(50304, 2048, num_layers=40, hidden_size=5120, num_heads=40),
    "30b": GPTConfig(50304, 2048, num_layers=48, hidden_size=7168, num_heads=56),
    "66b": GPTConfig(50304, 2048, num_layers=64, hidden_size=9216, num_heads=72),
    "175b": GPTConfig(50304, 2048, num_layers=96, hidden_size=12288, num_heads=96),
}

_WIDTH_PER_LAYER = 64  # hidden size over layers of GPT-2's and GPT-3's smaller shapes
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


class Embedding(nn.Embedding):
    """Token embedding, normal with standard deviation 0.02."""

    weight: nn.Parameter  # [V, D]

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class Linear(nn.Linear):
    """A matrix without a bias, normal with a given standard deviation."""

    def __init__(self, in_features: int, out_features: int, std: float = INIT_STD) -> None:
        self.std = std  # set first: the base class's constructor calls reset_parameters()
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Head(nn.Module):
    """From hidden states to logits, with a weight of its own or the embedding's.

    Args:
        loss: of hidden states, weight and targets; see ``GPT``.
    """

    weight: nn.Parameter  # [V, D]

    def __init__(self, config: GPTConfig, tied_to: nn.Parameter | None, loss: HeadLoss | None = None) -> None:
        super().__init__()
        self.loss = loss
        self.is_tied = tied_to is not None
        if tied_to is not None:
            self.weight = tied_to
        else:
            self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weight, unless it is tied: then the embedding, its owner, does."""
        if not self.is_tied:
            nn.init.normal_(self.weight, std=INIT_STD)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """The logits; or, with targets, what ``loss`` computes without them."""
        if targets is not None and self.loss is not None:
            return self.loss(hidden, self.weight, targets)
        return F.linear(hidden, self.weight)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention: Attend = F.scaled_dot_product_attention
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = Linear(config.hidden_size, config.hidden_size, residual_std(config))

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, documents: Any = None) -> Tensor:
        qkv = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1))  # [B, L, 3, H, E]
        query, key = rotate(qkv[:, :, :2], cos, sin).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, L, E] each
        value = qkv[:, :, 2].transpose(1, 2).contiguous()  # a view would keep all of qkv until backward
        packed = {} if documents is None else {"documents": documents}
        mixed = self.attention(query, key, value, is_causal=True, **packed)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Two matrices around a GELU, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden_size, 4 * config.hidden_size)
        self.down = Linear(4 * config.hidden_size, config.hidden_size, residual_std(config))

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(hidden), approximate="tanh"))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to its input.

    Args:
        experts: makes the feed-forward layer; None: ``FeedForward``, which all tokens use.
    """

    def __init__(self, config: GPTConfig, experts: ExpertLayer | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, bias=False)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, bias=False)
        self.feed_forward = FeedForward(config) if experts is None else experts(config)
        self.dropout = config.dropout

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, loss: Tensor | None = None, documents: Any = None
    ) -> Any:
        """
        Args:
            hidden: [B, L, D].
            cos, sin: [L, E / 2] or [B, L, E / 2], in the dtype of ``hidden``.
            loss: with experts: [], the sum of the routers' losses of the blocks before.
            documents: as ``GPT.forward`` takes them.

        Returns: [B, L, D]; with experts also the sum of the routers' losses up to here.
        """
        hidden = hidden + self._drop(self.attention(self.attention_norm(hidden), cos, sin, documents))
        if loss is None:
            return hidden + self._drop(self.feed_forward(self.feed_forward_norm(hidden)))
        out, own = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + self._drop(out), loss + own

    def _drop(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, self.dropout, self.training) if self.dropout else hidden


class GPT(nn.Module):
    """A decoder-only language model; ``blocks`` are its repeated parts.

    Args:
        loss: of the last hidden states, the head's weight and the targets, as
            ``shoal.parallel.loss.linear_cross_entropy``; None: logits, then cross-entropy.
        experts: makes the feed-forward layers of a model with ``num_experts``, as
            ``shoal.parallel.expert.stacked.ExpertFeedForward``.

    Raises: ModelError: experts without such a layer.
    """

    def __init__(self, config: GPTConfig, *, loss: HeadLoss | None = None, experts: ExpertLayer | None = None) -> None:
        super().__init__()
        if config.num_experts and experts is None:
            raise ModelError(
                f"the shape has {config.num_experts} experts, and no layer was given for them.",
                where="GPT",
                do="pass experts=shoal.parallel.expert.stacked.ExpertFeedForward.",
            )
        self.config = config
        self.loss_function: Callable[[Tensor, Tensor], Tensor] = cross_entropy
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        experts = experts if config.num_experts else None
        self.blocks = nn.ModuleList(Block(config, experts) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size, bias=False)
        self.head = Head(config, self.embedding.weight if config.tied else None, loss)

    def attend_by(self, attention: Attend) -> None:
        """Let every block compute attention by a function with the arguments of ``scaled_dot_product_attention``."""
        for block in self.blocks:
            cast(Block, block).attention.attention = attention

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Any = None,
    ) -> Tensor:
        """The mean loss per target when targets are given, else the logits.

        While training a model with experts, the loss includes those of the routers.

        Args:
            tokens: [B, L], int64.
            targets: [B, L], int64: the token that follows each position; -100 where there is none to learn from.
            positions: [L] or [B, L], int64, of the tokens in their sequence or document; None: from 0.
            documents: packed in the rows, as ``shoal.attention`` takes them, by which the model then attends
                (``attend_by``); None: one a row.

        Returns: loss, [] in fp32; or logits, [B, L, V].
        Raises: UsageError: more positions than ``sequence_length``.
        """
        length = tokens.shape[1]
        if length > self.config.sequence_length:
            raise UsageError(
                f"{length} tokens in a sequence, but the model was built for {self.config.sequence_length}.",
                where="GPT.forward",
                do="shorten the sequence, or build the model with a longer sequence_length.",
            )
        hidden = self.embedding(tokens)
        if positions is None:
            positions = torch.arange(length, device=hidden.device)
        cos, sin = rotations(positions, self.config.head_size, hidden.dtype)
        # As the sum of later blocks it has a gradient: a compiler then makes one graph for all blocks.
        auxiliary = torch.zeros((), dtype=torch.float32, device=hidden.device, requires_grad=hidden.requires_grad)
        for block in self.blocks:
            if self.config.num_experts:
                hidden, auxiliary = block(hidden, cos, sin, auxiliary, documents)
            else:
                hidden = block(hidden, cos, sin, None, documents)
        if targets is not None and self.head.loss is not None:
            loss: Tensor = self.head(self.norm(hidden), targets)
        else:
            logits: Tensor = self.head(self.norm(hidden))
            if targets is None:
                return logits
            loss = self.loss_function(logits, targets)
        return loss + auxiliary if self.config.num_experts and self.training else loss

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        num_new: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue every sequence by ``num_new`` tokens.

        Args:
            tokens: [B, L], int64, L at least 1; only the last ``sequence_length`` are looked at.
            temperature: 0 takes the likeliest token; below 1 sharpens the distribution, above 1 flattens it.
            top_k: draw from the k likeliest tokens only.
            generator: the source of chance, on the model's device.

        Returns: [B, L + num_new].
        Communicates: under ZeRO-3, what ``num_new`` forward passes do. So call it on all ranks alike.
        """
        was_training = self.training
        self.eval()
        try:
            for _ in range(num_new):
                logits = self(tokens[:, -self.config.sequence_length :])[:, -1].float()  # [B, V]
                tokens = torch.cat([tokens, _draw(logits, temperature, top_k, generator)], dim=1)
        finally:
            self.train(was_training)
        return tokens


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss, in fp32, per target that is not -100."""
    return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))


def rotations(positions: Tensor, head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [.., L, E / 2] each, of the angles of ``positions``, [.., L]; computed in fp32, then rounded."""
    steps = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions.device) / head_size  # [E / 2]
    angles = positions.float()[..., None] * torch.exp(steps * -math.log(_ROTARY_BASE))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + E / 2) of a head by its position's angle.

    Args:
        heads: [B, L, n, H, E].
        cos, sin: [L, E / 2] or [B, L, E / 2].
    """
    cos, sin = cos[..., None, None, :], sin[..., None, None, :]
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def residual_std(config: GPTConfig) -> float:
    """Smaller for what is added to the residual stream, so that its variance does not grow with depth."""
    return INIT_STD / math.sqrt(2 * config.num_layers)


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token per row, [B, 1], from logits [B, V]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), num_samples=1, generator=generator)


def named_config(name: str, *, vocab_size: int | None = None, sequence_length: int | None = None) -> GPTConfig:
    """The shape of that name, with another vocabulary or sequence length where given.

    Raises: ModelError: no shape has the name.
    """
    shape = NAMED_SHAPES.get(name.lower())
    if shape is None:
        raise ModelError(
            f"no model shape is called {name!r}{did_you_mean(name.lower(), NAMED_SHAPES) or '.'}",
            do=f"take one of {', '.join(NAMED_SHAPES)}, or a number of parameters such as 10M.",
        )
    return replace(
        shape,
        vocab_size=shape.vocab_size if vocab_size is None else vocab_size,
        sequence_length=shape.sequence_length if sequence_length is None else sequence_length,
    )


def nearest_config(num_parameters: int, *, vocab_size: int = 256, sequence_length: int = 256) -> GPTConfig:
    """The shape, of usual proportions, whose number of parameters is nearest.

    Widths are multiples of 64 (of 16 below 128); heads have 64 elements (32 in models narrower than 256, 16 below 64).
    A shape may be up to twice as deep or as wide as usual if that comes nearer.

    Raises: ModelError: so few parameters that no shape comes within a factor of 2.
    """
    best: tuple[float, GPTConfig] | None = None
    for hidden in [16, 32, 48, 64, 80, 96, 112, *range(128, 32768, 64)]:
        usual = hidden / _WIDTH_PER_LAYER
        head_size = 64 if hidden >= 256 and hidden % 64 == 0 else 32 if hidden % 32 == 0 else 16
        for layers in range(max(1, math.floor(usual / 2)), math.ceil(usual * 2) + 1):
            shape = GPTConfig(vocab_size, sequence_length, layers, hidden, hidden // head_size)
            distance = abs(math.log(shape.num_parameters() / num_parameters))
            cost = distance + 0.02 * abs(math.log(layers / usual))
            if best is None or cost < best[0]:
                best = (cost, shape)
        if 12 * hidden**2 * max(1, math.floor(usual / 2)) > 2 * num_parameters:
            break
    assert best is not None
    if not 0.5 <= best[1].num_parameters() / num_parameters <= 2:
        raise ModelError(
            f"no shape with a vocabulary of {vocab_size} has about {num_parameters} parameters; "
            f"the nearest has {best[1].num_parameters()}.",
            do="ask for more parameters, or take a smaller vocabulary.",
        )
    return best[1]


def parse_count(text: str) -> int:
    """A number with an optional suffix k, m, b or t (thousand to 10 ** 12), in either case.

    Raises: ModelError: it is no such number, or not positive.
    """
    cleaned = text.strip().lower().replace("_", "").replace(",", "")
    factor = _SUFFIXES.get(cleaned[-1:], 1)
    digits = cleaned[:-1] if factor > 1 else cleaned
    try:
        count = round(float(digits) * factor)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ModelError(f"{text!r} is not a number of parameters.", do="write it as 4096, 10M or 1.5B.")
    return count
