"""What the common families call the parts of their attention and feed-forward modules, and what changes in them: data.

A rule names submodules; a module that has all of them (and the values of ``when``) is one that the rule describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

Layout = Literal["heads", "separate", "blocks", "groups"]
"""How the output of an attention's projections is made of heads.

heads:     every projection: a block per query head (BLOOM, GPT-NeoX: [q k v]; MLA: what follows the latents)
separate:  the first projection: H query heads; the others: K key-value heads each (Llama, OPT, BERT)
blocks:    one projection: [H query heads | K key heads | K value heads] (GPT-2, Phi-3, Falcon with multi-query)
groups:    one projection: K groups [H / K query heads, key, value] (Falcon's new architecture)
"""

HEAD_ATTRIBUTES: Mapping[str, str] = {
    "num_heads": "heads",
    "n_heads": "heads",
    "n_head": "heads",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "num_kv_heads": "kv_heads",
    "num_key_value_groups": "groups",
    "n_rep": "groups",
    "split_size": "width",  # GPT-2: where query, key and value are cut
    "all_head_size": "width",  # BERT
}
"""Attributes of an attention module that the split changes where the module has them, and what each becomes:
``heads``, ``kv_heads`` and ``groups`` of this rank, or ``width``, the elements of this rank's query heads."""

HEAD_PARAMETERS = ("sinks",)
"""Parameters of an attention module with one value per query head: GPT-OSS's attention sinks, and what came after."""

OUTPUT_PARAMETERS = ("dense_bias",)
"""Parameters of an attention module that are added to its output, where all ranks compute the same: the bias that
GPT-NeoX-Japanese returns with the output."""

ACTIVATIONS = ("act_fn", "act", "activation", "activation_fn")
"""Modules between the two layers of a feed-forward module, which see this rank's part of the hidden elements: xIELU of
Apertus has parameters."""


@dataclass(frozen=True)
class AttentionRule:
    """An attention module: its projections, how heads lie in them, and what else depends on the number of heads.

    Args:
        projections: submodules whose output is split; for ``separate`` the query's first.
        out: the submodule whose input is split.
        layout: how the projections' outputs are made of heads.
        core: the submodule that computes the attention and has its attributes; "" for the module itself.
        when: attributes of the module, with the values for which the rule applies.
        attributes: more HEAD_ATTRIBUTES; ``config.NAME`` changes the module's view of its config.
        head_arguments: arguments of ``forward`` with one entry per head, of which a rank takes its own.
    """

    projections: tuple[str, ...]
    out: str
    layout: Layout
    core: str = ""
    when: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    head_arguments: tuple[str, ...] = ()

    def describes(self, module: nn.Module) -> bool:
        """True if the module has the submodules and values of this rule, and normalizes head by head if at all."""
        has_values = all(getattr(module, name, None) == value for name, value in self.when.items())
        return (
            has_values
            and all(_has_layer(module, path) for path in (*self.projections, self.out))
            and not _normalizes_all_heads(module)
        )

    def styles(self) -> dict[str, str]:
        """The style of each submodule; of ``core``, where it is the module itself, under the name ""."""
        return {self.core: "prepare_input", **dict.fromkeys(self.projections, "column"), self.out: "row"}


ATTENTION_RULES: tuple[AttentionRule, ...] = (
    # DeepSeek's MLA: the latent projections before these stay whole
    AttentionRule(("q_b_proj", "kv_b_proj"), "o_proj", "heads"),
    AttentionRule(("q_proj", "kv_b_proj"), "o_proj", "heads"),
    # Llama, Qwen 2 and 3, Mistral, Mixtral, Gemma, and most that came after them
    AttentionRule(("q_proj", "k_proj", "v_proj"), "o_proj", "separate"),
    AttentionRule(("q_proj", "k_proj", "v_proj"), "out_proj", "separate", attributes={"embed_dim": "width"}),  # OPT
    AttentionRule(("q_proj", "k_proj", "v_proj"), "dense", "separate"),  # Phi
    AttentionRule(("self.query", "self.key", "self.value"), "output.dense", "separate", core="self"),  # BERT, RoBERTa
    # Phi-3 cuts queries off by the config's number of heads
    AttentionRule(("qkv_proj",), "o_proj", "blocks", attributes={"config.num_attention_heads": "heads"}),
    # GPTBigCode (StarCoder) cuts one head of keys off, or has [q k v] per head
    AttentionRule(("c_attn",), "c_proj", "blocks", when={"multi_query": True}, attributes={"embed_dim": "width"}),
    AttentionRule(("c_attn",), "c_proj", "heads", when={"multi_query": False}),
    AttentionRule(("c_attn",), "c_proj", "blocks"),  # GPT-2
    AttentionRule(("qkv",), "out", "blocks"),  # shoal.models.gpt
    AttentionRule(
        ("query_key_value",), "dense", "groups", when={"new_decoder_architecture": True},
        head_arguments=("alibi", "attention_mask"),
    ),  # Falcon 40B
    AttentionRule(
        ("query_key_value",), "dense", "blocks", when={"new_decoder_architecture": False, "multi_query": True},
        head_arguments=("alibi", "attention_mask"),
    ),  # Falcon 7B
    # BLOOM, GPT-NeoX, Falcon without multi-query: [q k v] per head; alibi, and a mask that contains it, per head too
    AttentionRule(("query_key_value",), "dense", "heads", head_arguments=("alibi", "attention_mask")),
)  # fmt: skip


@dataclass(frozen=True)
class FeedForwardRule:
    """A feed-forward module: what is split by columns (with the number of fused blocks), and what by rows."""

    up: tuple[str, ...]
    down: str
    num_blocks: int = 1

    def describes(self, module: nn.Module) -> bool:
        """True if the module has the submodules of this rule."""
        return all(_has_layer(module, path) for path in (*self.up, self.down))

    def styles(self) -> dict[str, str]:
        """As AttentionRule's."""
        column = f"column:{self.num_blocks}" if self.num_blocks > 1 else "column"
        prepared = {"": "prepare_input"} if len(self.up) > 1 else {}
        return {**prepared, **dict.fromkeys(self.up, column), self.down: "row"}


FEED_FORWARD_RULES: tuple[FeedForwardRule, ...] = (
    FeedForwardRule(("gate_proj", "up_proj"), "down_proj"),  # Llama and most that came after it
    FeedForwardRule(("gate_up_proj",), "down_proj", num_blocks=2),  # Phi-3
    FeedForwardRule(("fc1",), "fc2"),  # OPT, Phi
    FeedForwardRule(("c_fc",), "c_proj"),  # GPT-2
    FeedForwardRule(("fc_in",), "fc_out"),  # GPT-J
    FeedForwardRule(("dense_h_to_4h",), "dense_4h_to_h"),  # BLOOM, Falcon, GPT-NeoX
    FeedForwardRule(("intermediate.dense",), "output.dense"),  # BERT
    FeedForwardRule(("w1", "w3"), "w2"),  # Mixtral's experts, Llama as Meta wrote it
    FeedForwardRule(("up",), "down"),  # shoal.models.gpt
)

HEAD_SIZE_ATTRIBUTES = ("v_head_dim", "head_dim", "head_size", "attention_head_size")
"""Attributes with the size of a head of the output projection's input; without one, the number of heads is read."""

REPLICATED_LINEARS = (
    "score", "classifier", "qa_outputs", "v_head", "value_head", "summary",
    "pooler.dense", "transform.dense", "lm_head.dense", "seq_relationship",
    "project_in", "project_out", "mlp.gate", "mlp.gate.wg", "mlp.router", "feed_forward.router", "shared_expert_gate",
    "q_a_proj", "kv_a_proj_with_mqa",
)  # fmt: skip
"""Ends of the names of linear modules that stay whole: small heads, routers, latent projections."""


def base_of(module: nn.Module) -> nn.Module:
    """The layer inside of a LoRA layer; another module itself."""
    base = getattr(module, "base_layer", module)
    assert isinstance(base, nn.Module)
    return base


def is_conv1d(module: nn.Module) -> bool:
    """True for GPT-2's linear layer, whose weight is [in, out]."""
    return type(module).__name__.endswith("Conv1D")


def _has_layer(module: nn.Module, path: str) -> bool:
    """True if the module has at this dotted path a submodule with a weight, wrapped by a LoRA layer or not."""
    for name in path.split("."):
        child = module._modules.get(name)
        if child is None:
            return False
        module = child
    return hasattr(base_of(module), "weight")


def _normalizes_all_heads(module: nn.Module) -> bool:
    """True if a norm (OLMo 2's) reads all query heads together, so that they must be gathered."""
    weight = getattr(getattr(module, "q_norm", None), "weight", None)
    head_size = next((vars(module)[name] for name in HEAD_SIZE_ATTRIBUTES if name in vars(module)), None)
    return weight is not None and head_size is not None and weight.numel() > head_size
