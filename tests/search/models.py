"""The search's models: small ones of Transformers, and small ones in plain PyTorch, each with batches and a loss.

Nothing of Shoal is imported here: the reference trains these models too.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = dict[str, torch.Tensor]
VOCABULARY, LENGTH, ROWS, LAYERS = 64, 16, 2, 4
IGNORED = -100

_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
_IDS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
_WIDE = {**_SIZES, **_IDS, "intermediate_size": 32, "max_position_embeddings": 32}
_DECODER = {**_WIDE, "num_key_value_heads": 2}
_ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_MIXTRAL = {**_DECODER, "num_local_experts": 4}
_QWEN_MOE = {
    **_DECODER,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "decoder_sparse_step": 1,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
    "max_position_embeddings": 32,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    **_IDS,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 32,
    "num_layers": LAYERS,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """A model of the search.

    Args:
        config: the class of Transformers' configuration; None: ``Own``.
        auto: the class of Transformers that builds the model.
        block: the class of its blocks.
        heads: attention heads, and heads of keys.
        is_shifted: the loss shifts the labels.
        has_experts: Transformers' experts, which may be divided among ranks.
        exact: the attention of the reference.
        lora: the projections that get adapters.
        takes_positions: has ``position_ids``.
        has_sequences: its attention can be that over ranks.
        has_documents: its own attention tells documents apart by their positions.
    """

    config: str | None
    options: dict[str, Any] = field(default_factory=dict)
    auto: str = "AutoModelForCausalLM"
    block: str = "Block"
    heads: tuple[int, int] = (4, 4)
    is_shifted: bool = True
    has_experts: bool = False
    exact: str = "sdpa"
    lora: tuple[str, ...] = ()
    takes_positions: bool = True
    has_sequences: bool = True
    has_documents: bool = True


_QV = ("q_proj", "v_proj")


def _decoder(config: str, block: str, *, heads: tuple[int, int] = (4, 2), **options: Any) -> Family:
    experts = any(name in options for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    exact = "eager" if config == "Gemma2Config" else "sdpa"
    return Family(config, {**_DECODER, **options}, block=block, heads=heads, has_experts=experts, exact=exact, lora=_QV)


FAMILIES: dict[str, Family] = {
    "own": Family(None),
    "own smoothing": Family(None, {"loss": "smoothing"}),
    "own aux": Family(None, {"loss": "aux"}),
    "own deep": Family(None, {"loss": "deep"}),
    "own skip": Family(None, {"loss": "skip"}),
    "own hook": Family(None, {"loss": "hook"}),
    "own tied": Family(None, {"is_tied": True}),
    "own late": Family(None, {"is_late": True}),
    "own frozen": Family(None, {"is_frozen": True}),
    "own untied heads": Family(None, {"heads": 6, "keys": 2}, heads=(6, 2)),
    "llama": _decoder("LlamaConfig", "LlamaDecoderLayer"),
    "llama tied": _decoder("LlamaConfig", "LlamaDecoderLayer", tie_word_embeddings=True),
    "mistral window": _decoder("MistralConfig", "MistralDecoderLayer", sliding_window=5),
    "gemma2": _decoder("Gemma2Config", "Gemma2DecoderLayer", head_dim=4, sliding_window=5),
    "gemma3": _decoder("Gemma3TextConfig", "Gemma3DecoderLayer", head_dim=4, sliding_window=5),
    "qwen2": _decoder("Qwen2Config", "Qwen2DecoderLayer"),
    "qwen3": _decoder("Qwen3Config", "Qwen3DecoderLayer", head_dim=4),
    "phi3": Family("Phi3Config", _DECODER, block="Phi3DecoderLayer", heads=(4, 2)),
    "gpt2": Family(
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": LAYERS, "n_head": 4, **_IDS, **_NO_DROPOUT},
        block="GPT2Block",
        lora=("c_attn",),
    ),
    "neox": Family(
        "GPTNeoXConfig",
        {**_WIDE, "attention_dropout": 0.0, "hidden_dropout": 0.0},
        block="GPTNeoXLayer",
        lora=("query_key_value",),
    ),
    "opt": Family(
        "OPTConfig",
        {**_SIZES, **_IDS, "ffn_dim": 32, "dropout": 0.0, "word_embed_proj_dim": 16, "max_position_embeddings": 32},
        block="OPTDecoderLayer",
        has_documents=False,
        lora=_QV,
    ),
    "falcon": Family(
        "FalconConfig",
        {**_SIZES, **_IDS},
        block="FalconDecoderLayer",
        heads=(4, 1),
        has_sequences=False,
        lora=("query_key_value",),
    ),
    "bloom": Family(
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": LAYERS, "n_head": 4, **_IDS},
        block="BloomBlock",
        exact="eager",
        takes_positions=False,
        has_sequences=False,
    ),
    "mixtral": _decoder("MixtralConfig", "MixtralDecoderLayer", num_local_experts=4),
    "mixtral aux": _decoder("MixtralConfig", "MixtralDecoderLayer", num_local_experts=4, **_ROUTERS),
    "qwen2 moe": _decoder("Qwen2MoeConfig", "Qwen2MoeDecoderLayer", **_QWEN_MOE),
    "qwen2 moe aux": _decoder("Qwen2MoeConfig", "Qwen2MoeDecoderLayer", **_QWEN_MOE, **_ROUTERS),
    "qwen3 moe aux": _decoder("Qwen3MoeConfig", "Qwen3MoeDecoderLayer", **_QWEN_MOE, **_ROUTERS, head_dim=4),
    "gpt-oss": Family(
        "GptOssConfig",
        {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4, "sliding_window": 5},
        block="GptOssDecoderLayer",
        has_documents=False,
        heads=(4, 2),
        has_experts=True,
        exact="eager",
        lora=_QV,
    ),
    "deepseek v3": Family(
        "DeepseekV3Config",
        {
            **_WIDE,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
        },
        block="DeepseekV3DecoderLayer",
        has_experts=True,
    ),
    "bert": Family(
        "BertConfig",
        {**_WIDE, **_BERT},
        auto="AutoModelForMaskedLM",
        block="BertLayer",
        is_shifted=False,
        lora=("query", "value"),
    ),
    "roberta": Family(
        "RobertaConfig",
        {**_WIDE, **_BERT, "max_position_embeddings": 34},
        auto="AutoModelForMaskedLM",
        block="RobertaLayer",
        is_shifted=False,
    ),
    "bart": Family(
        "BartConfig",
        _BART,
        auto="AutoModelForSeq2SeqLM",
        block="BartDecoderLayer",
        is_shifted=False,
        takes_positions=False,
        lora=_QV,
    ),
    "t5": Family(
        "T5Config",
        _T5,
        auto="AutoModelForSeq2SeqLM",
        block="T5Block",
        has_sequences=False,
        is_shifted=False,
        takes_positions=False,
        lora=("q", "v"),
    ),
}

Attention = Callable[..., torch.Tensor]


class Block(nn.Module):
    """Attention and a feed-forward layer. ``aux``: the mean square of its output, for a loss that uses it."""

    def __init__(self, width: int, heads: int, keys: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.norm = nn.LayerNorm(width)
        self.q_proj = nn.Linear(width, heads * self.head_size)
        self.k_proj = nn.Linear(width, keys * self.head_size, bias=False)
        self.v_proj = nn.Linear(width, keys * self.head_size, bias=False)
        self.o_proj = nn.Linear(heads * self.head_size, width, bias=False)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.aux: torch.Tensor | None = None
        self.has_aux = False
        self.attention: Attention | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        query, key, value = (
            layer(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.attention is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            mixed = self.attention(query, key, value, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        if self.has_aux:
            self.aux = x.float().square().mean()
        return x


class Own(nn.Module):
    """A decoder with learned positions, and a loss of its own.

    Args:
        loss: "plain"; "smoothing"; "aux": blocks leave a value for the loss behind; "deep": the head's loss of every
            block's output; "skip": the output of an early block is added to a late one's; "hook": forward hooks
            collect what the loss adds.
        is_late: a layer that only batches with ``late`` use.
        attention: takes query, key, value and ``is_causal``; None: PyTorch's.
    """

    def __init__(
        self,
        *,
        loss: str = "plain",
        heads: int = 4,
        keys: int = 2,
        is_tied: bool = False,
        is_late: bool = False,
        is_frozen: bool = False,
    ) -> None:
        super().__init__()
        width = 4 * heads
        self.loss = loss
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, keys) for _ in range(LAYERS))
        self.last_norm = nn.LayerNorm(width)
        self.late = nn.Linear(width, width) if is_late else None
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        if is_frozen:
            self.blocks[1].requires_grad_(False)
            self.positions.requires_grad_(False)
        for block in self.blocks:
            block.has_aux = loss == "aux"
            if loss == "hook":
                block.register_forward_hook(self._keep)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor,
        late: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.embedding(input_ids) + self.positions(position_ids)
        states: list[torch.Tensor] = []
        self.collected: list[torch.Tensor] = []
        for number, block in enumerate(self.blocks):
            if self.loss == "skip" and number == LAYERS - 1:
                x = x + states[0]
            x = block(x)
            states.append(x)
        if self.late is not None and late is not None:
            x = x + self.late(x)
        loss = self._loss(x, labels)
        if self.loss == "deep":
            loss = (loss + sum(self._loss(state, labels) for state in states[:-1])) / LAYERS
        elif self.loss == "aux":
            loss = loss + 0.3 * sum(block.aux for block in self.blocks)
        elif self.loss == "hook":
            loss = loss + 0.3 * sum(output.float().square().mean() for output in self.collected)
        return loss

    def _keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.collected.append(output)

    def _loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.last_norm(x)).flatten(0, 1).float()
        smoothing = 0.1 if self.loss == "smoothing" else 0.0
        return F.cross_entropy(logits, labels.flatten(), label_smoothing=smoothing)


def build(name: str, *, attention: Any = None, lora: bool = False) -> nn.Module:
    """A model in fp32 with values of its own, the same each time.

    Args:
        attention: for an ``Own`` the function, else the name of Transformers' implementation; None: the exact one.
    """
    family = FAMILIES[name]
    if family.config is None:
        model: Any = Own(**family.options)
        for block in model.blocks:
            block.attention = attention
    else:
        import transformers

        config = getattr(transformers, family.config)(**family.options)
        config.use_cache = False
        auto = getattr(transformers, family.auto)
        model = auto.from_config(config, attn_implementation=attention or family.exact)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    fill(model, generator)
    if lora:
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(family.lora), lora_dropout=0.0)
        )
        fill(model, generator)
    return model.train()


@torch.no_grad()
def fill(model: nn.Module, generator: torch.Generator) -> None:
    """Weights of a size that gives every parameter a gradient; norms near 1, vectors near 0."""
    for name, parameter in model.named_parameters():
        values = torch.rand(parameter.shape, generator=generator) - 0.5
        if parameter.dim() < 2:
            parameter.copy_(values * 0.2 + (1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0))
        else:
            parameter.copy_(values * (6 / parameter.shape[-1]) ** 0.5)


def batch(name: str, index: int, *, ragged: bool, padded: bool, has_positions: bool, packed: bool = False) -> Batch:
    """Micro-batch ``index`` as one process gets it.

    Args:
        ragged: some targets do not count, another number in each batch.
        padded: rows end early, with an attention mask.
        has_positions: ``position_ids`` are given.
        packed: they begin anew within a row, where another document begins.
    """
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = tokens.clone()
    if family.config is None or not family.is_shifted:
        labels = torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=generator)
    if ragged:  # the first row has a target for every part of the sequence
        labels[1:][torch.rand(labels[1:].shape, generator=generator) < 0.3 + 0.4 * (index % 2)] = IGNORED
    found = {"input_ids": tokens, "labels": labels}
    if padded:
        mask = torch.ones_like(tokens)
        mask[1, LENGTH - 1 - index % 5 :] = 0
        labels[mask == 0] = IGNORED
        found["attention_mask"] = mask
    if has_positions:
        found["position_ids"] = torch.arange(LENGTH).expand(ROWS, LENGTH).clone()
        for row, begin in enumerate((3 + index % 5, 9 + index % 4)[:ROWS] if packed else ()):
            found["position_ids"][row, begin:] -= begin
    return found


def targets(name: str, inputs: Batch) -> torch.Tensor:
    """What each position is to predict; IGNORED where nothing counts."""
    labels = inputs["labels"]
    is_shifted = FAMILIES[name].config is not None and FAMILIES[name].is_shifted
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:] if is_shifted else labels


def loss_of(model: Any, inputs: Batch) -> torch.Tensor:
    """The model's own loss."""
    output = model(**inputs)
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


def skeleton(name: str, like: nn.Module, attention: str | None) -> nn.Module:
    """A model built as its constructor builds it, whose values are not those of ``like`` yet."""
    family = FAMILIES[name]
    if family.config is None:
        model: Any = Own(**family.options)
        for block, other in zip(model.blocks, like.blocks, strict=True):  # type: ignore[arg-type]
            block.attention = other.attention
        return model
    import transformers

    config: Any = copy.deepcopy(like.config)
    auto = getattr(transformers, family.auto)
    model = auto.from_config(config, attn_implementation=attention or config._attn_implementation)
    return model.train()
