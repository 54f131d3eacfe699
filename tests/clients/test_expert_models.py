"""Expert parallelism on tiny models of Transformers: each family computes what it does unchanged, on 1 and 2 ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.config import load
from shoal.errors import ConfigError, ModelError
from shoal.mesh import Mesh
from shoal.parallel.expert.apply import prepare_experts
from shoal.parallel.expert.divide import divide
from shoal.parallel.expert.held import modules_with_experts
from shoal.parallel.expert.router import TokenChoiceTopKRouter
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.parts import cut

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")

pytestmark = pytest.mark.filterwarnings("default")

TOKENS = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(1))
_SHAPE = {
    "vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": None,
    "pad_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
_QWEN = {**_SHAPE, "num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 8}
_DEEPSEEK = {
    **_SHAPE, "n_routed_experts": 8, "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8, "head_dim": 4,
}  # fmt: skip

# the class of the config, its arguments
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {**_SHAPE, "num_local_experts": 8}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_QWEN, "shared_expert_intermediate_size": 24, "norm_topk_prob": False}),
    "qwen3_moe": ("Qwen3MoeConfig", _QWEN),
    "deepseek_v2": ("DeepseekV2Config", {**_DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3Config", _DEEPSEEK),
    "gpt_oss": ("GptOssConfig", {**_SHAPE, "num_local_experts": 8, "head_dim": 8, "sliding_window": 16}),
    "llama4": (
        "Llama4TextConfig",
        {
            **_SHAPE,
            "num_local_experts": 8,
            "intermediate_size": 24,
            "intermediate_size_mlp": 40,
            "head_dim": 8,
            "interleave_moe_layer_step": 2,
            "num_hidden_layers": 4,
            "attention_chunk_size": 4,
        },
    ),
    "dbrx": (
        "DbrxConfig",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "vocab_size": 67,
            "max_seq_len": 32,
            "bos_token_id": 0,
            "eos_token_id": None,
            "pad_token_id": 0,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 2},
        },
    ),
    "olmoe": ("OlmoeConfig", {**_SHAPE, "num_experts": 8}),
}


def build(family: str, **changes: Any) -> nn.Module:
    """A tiny model, with weights large enough that every mistake changes the loss."""
    kind, arguments = FAMILIES[family]
    config = getattr(transformers, kind)(**{**arguments, **changes})
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    generator = torch.Generator().manual_seed(3)
    for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction_bias"))]:
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.data = tensor.data + 0.1 * noise if tensor.dim() == 1 else 0.15 * noise
    return model


def use_experts(model: nn.Module, **section: Any) -> dict[str, ParameterSpec]:
    """What the engine does with a model: on all ranks of the world."""
    world = current_world()
    comm = world.communicator("ep", Mesh.of(world.size, ep=world.size)) if world.size > 1 else None
    prepare_experts(model, comm, load({"expert_parallel": {"enabled": True, **section}}).expert_parallel)
    return divide(model, comm)


def compare(model: nn.Module, size: int, inputs: dict[str, Any] | None = None, **section: Any) -> None:
    """Compare outputs, loss and gradients on ranks that have different tokens with those of the model unchanged."""
    batches = TOKENS.chunk(size)
    copies = [copy.deepcopy(model) for _ in batches]
    expected = [model(input_ids=tokens, labels=tokens, **(inputs or {})) for tokens in batches]
    sum(each.loss for each in expected).backward()
    wanted = dict(model.named_parameters())

    def on_a_rank() -> dict[str, torch.Tensor]:
        rank = current_world().rank
        mine = copies[rank]
        specs = use_experts(mine, **section)
        assert [name for name, _ in mine.named_parameters()] == list(wanted)
        for _, module, held in modules_with_experts(mine):
            assert all(len(each) == 8 // size * held.stack.rows for each in module.parameters())
            assert held.ids == tuple(range(rank * 8 // size, (rank + 1) * 8 // size))
        outputs = mine(input_ids=batches[rank], labels=batches[rank], **(inputs or {}))
        torch.testing.assert_close(outputs.loss, expected[rank].loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(outputs.logits, expected[rank].logits, rtol=1e-5, atol=1e-5)
        assert (outputs.get("router_logits") is None) == (expected[rank].get("router_logits") is None)
        for ours, theirs in zip(
            outputs.get("router_logits") or (), expected[rank].get("router_logits") or (), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        outputs.loss.backward()
        found = {}
        for name, parameter in mine.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if name in specs:
                theirs = wanted[name].grad
                assert theirs is not None
                close(gradient, cut(theirs, specs[name]), name)
            else:
                found[name] = gradient
        return found

    ranks = run_ranks(size, on_a_rank)
    for name, parameter in wanted.items():
        if name in ranks[0]:
            theirs = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            close(sum(rank[name] for rank in ranks), theirs, name)


def close(ours: Any, theirs: torch.Tensor, name: str) -> None:
    difference = float((ours - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-2)
    assert difference < 5e-6, (name, difference)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_what_it_does_unchanged(family: str, size: int) -> None:
    compare(build(family), size)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_router_logits_and_the_auxiliary_loss_are_the_models(family: str) -> None:
    model = build(family, router_aux_loss_coef=0.5)
    compare(model, 2, {"output_router_logits": True})
    plain = model(input_ids=TOKENS, labels=TOKENS).loss
    assert float((model(input_ids=TOKENS, labels=TOKENS, output_router_logits=True).loss - plain).abs()) > 0.1


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_all_tokens_on_one_expert_of_each_choice(family: str, size: int) -> None:
    model = build(family, num_experts_per_tok=1, **({"n_group": 1, "topk_group": 1} if family == "deepseek_v3" else {}))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("router.bias", "correction_bias")):
            tensor.data[5] += 100
        elif name.endswith("mlp.gate.weight") and family == "mixtral":
            tensor.data *= 0  # equal scores: the first
    compare(model, size)


@pytest.mark.parametrize("family", list(FAMILIES)[:7])
def test_shoals_router_scores_as_the_familys(family: str) -> None:
    """A key that says what the model does already puts Shoal's router in the place of the model's."""
    model = build(family)
    mine = copy.deepcopy(model)
    prepare_experts(mine, None, load({"expert_parallel": {"enabled": True, "top_k": 2}}).expert_parallel)
    assert sum(isinstance(module, TokenChoiceTopKRouter) for module in mine.modules()) in (1, 2)
    torch.testing.assert_close(mine(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_a_key_about_the_router_changes_it() -> None:
    model = build("mixtral")
    for section in ({"top_k": 3}, {"score_func": "sigmoid"}, {"route_norm": False}, {"routed_scaling_factor": 2.0}):
        mine = copy.deepcopy(model)
        prepare_experts(mine, None, load({"expert_parallel": {"enabled": True, **section}}).expert_parallel)
        assert not torch.allclose(mine(TOKENS).logits, model(TOKENS).logits, rtol=1e-3)


def test_tokens_are_weighted_before_the_experts_where_the_config_says_so() -> None:
    model = build("mixtral")
    mine = copy.deepcopy(model)
    prepare_experts(mine, None, load({"expert_parallel": {"enabled": True, "score_apply": "pre"}}).expert_parallel)
    assert not torch.allclose(mine(TOKENS).logits, model(TOKENS).logits, rtol=1e-3)


def test_a_bias_without_auxiliary_loss_is_added_to_choose_only() -> None:
    model = build("mixtral")
    section = load({"expert_parallel": {"enabled": True, "load_balance_coeff": 1e-3}}).expert_parallel
    mine, other = copy.deepcopy(model), copy.deepcopy(model)
    prepare_experts(mine, None, section)
    torch.testing.assert_close(mine(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)
    biases = [buffer for name, buffer in mine.named_buffers() if name.endswith("gate.expert_bias")]
    assert [tuple(bias.shape) for bias in biases] == [(8,), (8,)]
    for layer, bias in zip(other.model.layers, biases, strict=True):
        bias[:2] = 1e3  # so that both tokens choose these; their weights stay those of the scores
        layer.mlp.gate.weight.data[2:] = 0
        layer.mlp.gate.weight.data[2:, :] = -1e3 * layer.mlp.gate.weight.data[:1].sign()
    probabilities = mine.model.layers[0].mlp.gate(torch.ones(1, 32))
    assert sorted(probabilities[2][0].tolist()) == [0, 1]
    wide = probabilities[0].softmax(-1)[0, probabilities[2][0]]
    torch.testing.assert_close(probabilities[1][0], wide / wide.sum())


def test_a_dense_layer_before_the_mixtures_stays() -> None:
    model = build("deepseek_v3")
    found = prepare_experts(model, None, load({"expert_parallel": {"enabled": True}}).expert_parallel)
    assert found == ["model.layers.1.mlp.experts"]


def test_a_preset_that_does_not_match_names_the_missing_attribute() -> None:
    section = load({"expert_parallel": {"enabled": True, "preset_model": "gpt_oss"}}).expert_parallel
    with pytest.raises(ModelError, match="MixtralSparseMoeBlock has no attribute 'router', its router") as caught:
        prepare_experts(build("mixtral"), None, section)
    assert caught.value.where == "model.layers.0.mlp"


def test_a_model_without_experts_is_an_error_that_lists_what_was_looked_for() -> None:
    config = transformers.LlamaConfig(**{k: v for k, v in _SHAPE.items() if k != "num_experts_per_tok"})
    model = transformers.LlamaForCausalLM(config)
    section = load({"expert_parallel": {"enabled": True}}).expert_parallel
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has no expert layer. Looked for: a module with stacked"):
        prepare_experts(model, None, section)
    section = load({"expert_parallel": {"enabled": True, "preset_model": "mixtral"}}).expert_parallel
    with pytest.raises(ModelError, match=r"modules whose names end in .* with the attributes 'gate' and 'experts'"):
        prepare_experts(model, None, section)


def test_a_key_about_routers_that_nothing_names_is_an_error() -> None:
    section = load({"expert_parallel": {"enabled": True, "top_k": 1}}).expert_parallel
    with pytest.raises(ModelError, match=r"expert_parallel.top_k is about routers, and it is not known which modules"):
        prepare_experts(build("olmoe"), None, section)
    named = {"moe_layer_pattern": r"layers\.\d+\.mlp", "router_pattern": "gate", "expert_pattern": "experts"}
    model = build("olmoe")
    section = load({"expert_parallel": {"enabled": True, "top_k": 2, "route_norm": True, **named}}).expert_parallel
    prepare_experts(model, None, section)
    assert torch.isfinite(model(TOKENS).logits).all()


def test_ranks_that_do_not_divide_the_experts_are_an_error() -> None:
    def job() -> None:
        with pytest.raises(ConfigError, match="8 experts cannot be divided among 3"):
            use_experts(build("mixtral"))

    run_ranks(3, job)
