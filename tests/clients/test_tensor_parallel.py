"""Tensor parallelism on tiny models of Transformers: each family computes what it does unsplit.

6 query heads share 3 key-value heads, so that 4 ranks are more than key-value heads; 67 tokens divide by no number of
ranks, 50 neurons not by 4.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import ModelError
from shoal.mesh import Mesh
from shoal.parallel.tensor import Grid, parallelize, parallelize_grid, plan_for
from shoal.parallel.tensor.grid import GridKind
from shoal.sharding.parts import cut
from tests.helpers.tensor_cases import Outputs, compare, difference, randomize, tp_communicator

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")

pytestmark = pytest.mark.filterwarnings("default")

VOCABULARY = 67
_SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
_TOKENS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
_LLAMA = {**_SHAPE, **_TOKENS, "intermediate_size": 50, "num_key_value_heads": 3, "max_position_embeddings": 32}
_NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8}
_BIG_CODE = {
    "vocab_size": VOCABULARY,
    "n_positions": 32,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    **_TOKENS,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}

# the class, the config, its arguments
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 56, "n_layer": 2, "n_head": 7, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0, **_TOKENS},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "llama-tied-biases": (
        "LlamaForCausalLM", "LlamaConfig",
        {**_LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-multi-query": ("LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, "head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", _LLAMA),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_LLAMA, "intermediate_size": 48, "num_local_experts": 4}),
    "phimoe": (
        "PhimoeForCausalLM", "PhimoeConfig",
        {**_LLAMA, "intermediate_size": 48, "num_local_experts": 4, "router_jitter_noise": 0.0},
    ),
    # sinks: a parameter with one value per head
    "gpt-oss": (
        "GptOssForCausalLM", "GptOssConfig",
        {**_LLAMA, "intermediate_size": 48, "num_local_experts": 4, "head_dim": 8, "sliding_window": 4},
    ),
    "apertus": ("ApertusForCausalLM", "ApertusConfig", _LLAMA),  # an activation with parameters
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_LLAMA, "head_dim": 8}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_LLAMA, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "bloom": (
        "BloomForCausalLM", "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": 2, "n_head": 6, **_TOKENS, **_NO_DROPOUT},
    ),
    "falcon-multi-query": ("FalconForCausalLM", "FalconConfig", {**_SHAPE, **_TOKENS, **_NO_DROPOUT}),
    "falcon-groups": (
        "FalconForCausalLM", "FalconConfig",
        {**_SHAPE, **_TOKENS, **_NO_DROPOUT, "num_kv_heads": 3, "new_decoder_architecture": True},
    ),
    "falcon-alibi": (
        "FalconForCausalLM", "FalconConfig",
        {**_SHAPE, **_TOKENS, **_NO_DROPOUT, "multi_query": False, "alibi": True, "bias": True, "parallel_attn": False},
    ),
    "gpt-neox": (
        "GPTNeoXForCausalLM", "GPTNeoXConfig", {**_SHAPE, **_TOKENS, **_NO_DROPOUT, "intermediate_size": 50}
    ),
    "opt": (
        "OPTForCausalLM", "OPTConfig",
        {**_SHAPE, **_TOKENS, "ffn_dim": 50, "dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 32,
         "word_embed_proj_dim": 48},
    ),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _BIG_CODE),
    "gpt-bigcode-heads": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**_BIG_CODE, "multi_query": False}),
    "gpt-j": (
        "GPTJForCausalLM", "GPTJConfig",
        {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 6, "rotary_dim": 4,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **_TOKENS},
    ),
    # a bias that is returned beside the output of the attention
    "gpt-neox-japanese": ("GPTNeoXJapaneseForCausalLM", "GPTNeoXJapaneseConfig", {**_SHAPE, **_TOKENS, **_NO_DROPOUT}),
    "bert": (
        "BertForMaskedLM", "BertConfig",
        {**_SHAPE, "intermediate_size": 50, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _LLAMA),  # a norm over all heads: Transformers' plan gathers them
    "deepseek-v3": (
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {**_LLAMA, "num_key_value_heads": 6, "first_k_dense_replace": 2, **_MLA},
    ),
}  # fmt: skip

GENERATOR = torch.Generator().manual_seed(1)
TOKENS = torch.randint(1, VOCABULARY, (2, 8), generator=GENERATOR)
MASK = torch.ones_like(TOKENS).index_put((torch.tensor([1, 1]), torch.tensor([6, 7])), torch.tensor(0))


def build(family: str) -> nn.Module:
    model, config, arguments = FAMILIES[family]
    return randomize(getattr(transformers, model)(getattr(transformers, config)(**arguments)))


def forward(model: nn.Module) -> Outputs:
    output = model(input_ids=TOKENS, attention_mask=MASK, labels=TOKENS)
    return {"logits": output.logits, "loss": output.loss}


def loss_alone(model: nn.Module) -> Outputs:
    return {"loss": forward(model)["loss"]}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients_are_those_of_the_whole_model(family: str, size: int) -> None:
    compare(build(family), forward, size)


def test_sequence_parallelism_of_gathered_heads_is_refused() -> None:
    with pytest.raises(ModelError, match=r"q_proj cannot be split as column_gather_output: sequence parallelism needs"):
        compare(build("olmo2"), forward, 2, sequence_parallel=True)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "olmo2"])
def test_sequence_parallelism_changes_no_value(family: str) -> None:
    compare(build(family), forward, 4, sequence_parallel=True)


def with_routers_and_hidden_states(model: nn.Module) -> Outputs:
    """The loss has the routers' loss, whose padded tokens do not count, and a statistic of every hidden state."""
    routers = {"output_router_logits": True} if hasattr(model.config, "router_aux_loss_coef") else {}
    output = model(input_ids=TOKENS, attention_mask=MASK, labels=TOKENS, output_hidden_states=True, **routers)
    hidden = {f"hidden {place}": each for place, each in enumerate(output.hidden_states)}
    found = {f"router {place}": each for place, each in enumerate(output.get("router_logits") or ())}
    statistic = sum(each.std(1).mean() for each in hidden.values())
    return {**hidden, **found, "loss": output.loss + output.get("aux_loss", 0) + statistic}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "gpt2", "bert"])
def test_under_sequence_parallelism_the_model_returns_whole_sequences(family: str, size: int) -> None:
    compare(build(family), with_routers_and_hidden_states, size, sequence_parallel=True)


@pytest.mark.parametrize("family", ["gpt2", "llama-tied-biases", "bloom"])
def test_the_loss_of_split_logits_is_the_loss(family: str) -> None:
    compare(build(family), loss_alone, 2, loss_parallel=True)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["phi3", "qwen3", "falcon-groups", "falcon-alibi"])
def test_both_attentions_of_transformers_work(family: str, attention: str) -> None:
    model = build(family)
    model.set_attn_implementation(attention)
    compare(model, forward, 4)


def test_recomputed_layers_give_the_same_gradients() -> None:
    model = build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compare(model, loss_alone, 2, sequence_parallel=True)


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon-alibi"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_generation_gives_the_same_tokens(family: str, sequence_parallel: bool) -> None:
    model = build(family).eval()
    arguments = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones(2, 4, dtype=torch.int64)}
    expected = model.generate(TOKENS[:, :4], **arguments)

    def on_a_rank() -> None:
        mine = copy.deepcopy(model)
        parallelize(mine, tp_communicator(), sequence_parallel=sequence_parallel)
        assert torch.equal(mine.generate(TOKENS[:, :4], **arguments), expected)

    run_ranks(2, on_a_rank)


@pytest.mark.parametrize("family", ["llama", "gpt2", "llama-multi-query"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_lora_matrices_are_split_with_their_base_layers(family: str, sequence_parallel: bool) -> None:
    peft = pytest.importorskip("peft")
    names = {"gpt2": ["c_attn", "c_proj", "c_fc"]}.get(family, ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"])
    config = peft.LoraConfig(r=3, target_modules=names, lora_dropout=0.0, fan_in_fan_out=family == "gpt2")
    compare(randomize(peft.get_peft_model(build(family), config)), forward, 4, sequence_parallel=sequence_parallel)


def test_the_plan_of_phi3_splits_inside_the_fused_blocks_where_transformers_gathers() -> None:
    assert plan_for(build("phi3")) == {
        "model.layers.*.self_attn": "prepare_input",
        "model.layers.*.self_attn.qkv_proj": "column",
        "model.layers.*.self_attn.o_proj": "row",
        "model.layers.*.mlp.gate_up_proj": "column:2",
        "model.layers.*.mlp.down_proj": "row",
        "model.embed_tokens": "vocab",
        "lm_head": "vocab_head",
    }


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_the_plans_of_transformers_are_followed_as_they_are(family: str) -> None:
    model = build(family)
    plan = {**model.config.base_model_tp_plan, "lm_head": "colwise_gather_output"}
    compare(model, forward, 4, plan=plan)


SPECS: list[dict[str, Any]] = [
    {"patterns": [r".*self_attn\.o_proj\.weight$", r".*mlp\.down_proj\.weight$"], "partition_type": "row"},
    {"patterns": [r".*self_attn\.qkv_proj\.weight$"], "shape": [[48, 24, 24], -1], "partition_dim": 0},
    {"patterns": [r".*mlp\.gate_up_proj\.weight$"], "partition_type": "column", "shape": [2, -1]},
    {"patterns": [r"lm_head\.weight$"], "partition_type": "skip"},
    {"patterns": [r".*nowhere"], "partition_type": "column", "model_types": ["llama"]},
]


def test_layer_specs_of_deepspeed_make_a_plan() -> None:
    model = build("phi3")
    plan = plan_for(model, layer_specs=SPECS, use_default_specs=False)
    assert plan == {
        "model.layers.*.self_attn.o_proj": "row",
        "model.layers.*.mlp.down_proj": "row",
        "model.layers.*.self_attn.qkv_proj": "column:48,24,24",
        "model.layers.*.mlp.gate_up_proj": "column:2",
        "lm_head": "skip",
    }
    compare(model, forward, 2, plan=plan)
    assert plan_for(model, layer_specs=SPECS)["model.embed_tokens"] == "vocab"


_WIDTHS = {"hidden_size": 64, "n_embd": 64, "word_embed_proj_dim": 64, "intermediate_size": 128, "ffn_dim": 128}
_HEADS = {"num_attention_heads": 8, "n_head": 8, "num_key_value_heads": 4, "num_kv_heads": 4}


def build_even(family: str) -> nn.Module:
    """The family with sizes that divide by a grid."""
    model, config, arguments = FAMILIES[family]
    even = {name: value for name, value in {**_WIDTHS, **_HEADS}.items() if name in arguments}
    return randomize(getattr(transformers, model)(getattr(transformers, config)(**{**arguments, **even}))).double()


@pytest.mark.parametrize(("kind", "size"), [("2d", 4), ("3d", 8)])
@pytest.mark.parametrize(
    "family",
    ["gpt2", "llama-tied-biases", "phi3", "bloom", "falcon-groups", "falcon-multi-query", "gpt-neox", "bert"],
)
def test_a_grid_of_ranks_computes_what_the_whole_model_does(family: str, kind: GridKind, size: int) -> None:
    model = build_even(family)
    tokens, mask = TOKENS.repeat(2, 1), MASK.repeat(2, 1)
    copies = [copy.deepcopy(model) for _ in range(size)]
    expected = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
    expected.backward()

    def on_a_rank() -> None:
        grid = Grid.open(current_world(), Mesh.of(size, tp=size), kind)
        mine = copies[grid.rank]
        local = parallelize_grid(mine, grid)
        loss = mine(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        loss.backward()
        assert difference(loss, expected) < 1e-6  # Phi-3's is computed in fp32
        for (name, parameter), whole in zip(mine.named_parameters(), model.parameters(), strict=True):
            if whole.grad is not None:
                want = cut(whole.grad, local[name]) if name in local else whole.grad
                assert parameter.grad is not None, name
                # Transformers' RMSNorm computes in fp32; the gradient of a key's bias is zero but for rounding.
                floor = max(float(whole.grad.abs().max()), 1e-3)
                assert difference(parameter.grad, want, floor) < 2e-6, name

    run_ranks(size, on_a_rank)


@pytest.mark.parametrize("family", ["qwen3", "gemma", "olmo2", "deepseek-v3", "mixtral"])
def test_what_a_grid_cannot_split_is_refused(family: str) -> None:
    model = build_even(family).float()

    def on_a_rank() -> None:
        with pytest.raises(ModelError, match=r"do not divide over 2 ranks|cannot be split over a grid"):
            parallelize_grid(model, Grid.open(current_world(), Mesh.of(4, tp=4), "2d"))

    run_ranks(4, on_a_rank)


def label_smoothing(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Any:
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum", label_smoothing=0.1)
    return total / (num_items_in_batch or (targets != -100).sum())


def test_a_loss_other_than_cross_entropy_is_not_replaced() -> None:
    model = build("llama")
    model.loss_function = label_smoothing

    def on_a_rank() -> None:
        mine = copy.deepcopy(model)
        with pytest.raises(ModelError, match="the loss_function label_smoothing, which does not compute the mean"):
            parallelize(mine, tp_communicator(), loss_parallel=True)
        assert mine.loss_function is label_smoothing

    run_ranks(2, on_a_rank)
    compare(model, loss_alone, 2)
    with pytest.raises(ModelError, match="no loss_function that its forward calls"):
        compare(build("bert"), loss_alone, 2, loss_parallel=True)


@pytest.mark.parametrize("items", [None, 5])
@pytest.mark.parametrize("family", ["llama", "adapted"])
def test_the_loss_of_split_logits_counts_the_given_items_and_is_found_behind_adapters(
    family: str, items: int | None
) -> None:
    model = build("llama" if family == "adapted" else family)
    if family == "adapted":
        peft = pytest.importorskip("peft")
        model = randomize(peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"])))
    given = {} if items is None else {"num_items_in_batch": items}

    def loss(model: nn.Module) -> Outputs:
        return {"loss": model(input_ids=TOKENS, attention_mask=MASK, labels=TOKENS, **given).loss}

    compare(model, loss, 2, loss_parallel=True)
