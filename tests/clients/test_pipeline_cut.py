"""Hugging Face models, cut into pipeline stages, compute what the whole model computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import ModelError
from shoal.pipeline.cut import cut
from tests.helpers.pipeline_stages import assert_same, cut_over, run_stages, run_whole

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")

pytestmark = pytest.mark.filterwarnings("default")

SHAPE = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 4}
DECODER = {**SHAPE, "intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 32}
DECODER |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 5, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
WINDOW = {"head_dim": 4, "sliding_window": 4}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 4, "num_heads": 4, "dropout_rate": 0.0}
LORA_OF = "base_model.model.model.layers"

CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", DECODER),
    "tied llama": ("LlamaConfig", {**DECODER, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {**GPT2, **NO_DROPOUT}),
    "qwen3": ("Qwen3Config", {**DECODER, **WINDOW, "use_sliding_window": True, "max_window_layers": 2}),
    "gemma2": ("Gemma2Config", {**DECODER, **WINDOW}),
    "gemma3": ("Gemma3TextConfig", {**DECODER, **WINDOW}),
    "mistral": ("MistralConfig", {**DECODER, "sliding_window": 4}),
    "mixtral": ("MixtralConfig", {**DECODER, "num_local_experts": 4}),
    "bloom": ("BloomConfig", {"vocab_size": 40, "hidden_size": 16, "n_layer": 5, "n_head": 4}),
    "opt": ("OPTConfig", {**SHAPE, "ffn_dim": 32, "dropout": 0.0, "word_embed_proj_dim": 8}),
    "phi3": ("Phi3Config", DECODER),
    "falcon": ("FalconConfig", SHAPE),
    "neox": ("GPTNeoXConfig", {**SHAPE, "intermediate_size": 32}),
}
RANKS = [[(0,), (1,)], [(0,), (1,), (2,)], [(0, 2), (1, 3)]]


def causal(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind, options = CAUSAL[name]
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**options)).train()


def batch_of(length: int = 8) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 40, (2, length))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def loss_of(output: Any, batch: Any) -> torch.Tensor:
    return output.loss


def assert_parity(model: nn.Module, ranks: list[tuple[int, ...]], batch: Any, exact: bool = True, **how: Any) -> Any:
    parts = cut_over(model, ranks, **how)
    whole = run_whole(model, [batch], loss_of)
    stages = run_stages(parts, [batch])
    if exact:
        assert_same(whole, stages)
    else:
        torch.testing.assert_close(stages, whole, rtol=1e-6, atol=1e-7)
    return parts


@pytest.mark.parametrize("name", CAUSAL)
def test_a_decoder_in_stages_is_bitwise_the_whole(name: str) -> None:
    model = causal(name)
    tied = None
    for ranks in RANKS:
        parts = assert_parity(copy.deepcopy(model), ranks, batch_of())
        tied = parts[0].tied
        sent = parts[0](0, None, batch_of())
        assert list(sent["arguments"]) == ["0"]  # the hidden states alone
        assert sum(len(list(part.parameters())) for part in parts) >= len(list(model.parameters()))
        for part in parts:
            part.eval()
        with torch.no_grad():
            whole = run_whole(copy.deepcopy(model).eval(), [batch_of(5), batch_of(7)], loss_of)
            stages = run_stages(parts, [batch_of(5), batch_of(7)])
        assert all(torch.equal(one, other) for one, other in zip(whole[0], stages[0], strict=True))
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert list((tied or {}).values()) == ([(0, 3)] if is_tied else [])


@pytest.mark.parametrize("ranks", RANKS[:2], ids=str)
def test_a_position_bias_and_the_encoders_output_cross_all_stages(ranks: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0)).train()
    # The shared embedding's gradient is a sum of three; its order differs.
    parts = assert_parity(model, ranks, batch_of(), exact=False)
    assert parts[0].tied == {"shared.weight": (0, len(ranks) - 1)}
    assert list(parts[0](0, None, batch_of())["arguments"]) == ["0", "2", "3", "5"]
    with torch.no_grad():
        assert len(parts[0](0, None, batch_of())["arguments"]) == 4


EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
ROUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {**DECODER, "num_local_experts": 4}),
    "qwen2 moe": ("Qwen2MoeConfig", {**DECODER, **EXPERTS, "shared_expert_intermediate_size": 8}),
    "qwen3 moe": ("Qwen3MoeConfig", {**DECODER, **EXPERTS}),
}


@pytest.mark.parametrize("interval", [0, 2])
@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("name", ROUTED)
def test_the_routers_loss_is_of_the_layers_of_all_stages(
    name: str, ranks: list[tuple[int, ...]], interval: int
) -> None:
    torch.manual_seed(0)
    kind, options = ROUTED[name]
    options = {**options, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**options)).train()
    parts = cut_over(model, ranks)
    for part in parts:
        part.activation_checkpoint_interval = interval
    batches = [batch_of(), batch_of()]
    assert_same(run_whole(copy.deepcopy(model), batches, loss_of), run_stages(parts, batches))
    with torch.no_grad():
        whole = run_whole(model.eval(), batches, loss_of)
        for part in parts:
            part.eval()
        assert torch.equal(torch.stack(run_stages(parts, batches)[0]), torch.stack(whole[0]))


def test_a_loss_of_all_hidden_states_is_that_of_the_whole_model() -> None:
    model: Any = causal("llama")
    model.config.output_hidden_states = True

    def loss_fn(output: Any, labels: Any) -> torch.Tensor:
        assert len(output.hidden_states) == 6
        return sum((state.pow(2).mean() for state in output.hidden_states), output.logits.mean())

    whole = copy.deepcopy(model)
    loss = loss_fn(whole(**batch_of()), None)
    loss.backward()
    stages = run_stages(cut_over(model, RANKS[1], loss_fn=loss_fn), [(batch_of(), None)])
    assert torch.equal(stages[0][0], loss.detach())
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(stages[1][name], parameter.grad, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_is_kept(use_reentrant: bool) -> None:
    model: Any = causal("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert_parity(model, RANKS[2], batch_of())


@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "gemma2"])
def test_two_blocks_are_recomputed_together(name: str) -> None:
    model = causal(name)
    parts = cut_over(model, RANKS[0])
    for part in parts:
        part.activation_checkpoint_interval = 2
    assert_same(run_whole(model, [batch_of()], loss_of), run_stages(parts, [batch_of()]))


def test_blocks_with_masks_of_two_kinds_are_not_recomputed_together() -> None:
    part = cut_over(causal("gemma2"), RANKS[0])[0]
    part.activation_checkpoint_interval = 2
    with pytest.raises(ModelError, match="its argument 'attention_mask' is a different one"):
        part(0, None, batch_of())


def test_adapters_of_peft_are_cut_with_their_blocks() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(causal("llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    parts = assert_parity(model, RANKS[1], batch_of())
    trained = [name for name, parameter in parts[1].named_parameters() if parameter.requires_grad]
    assert trained and all(name.startswith(LORA_OF) and "lora_" in name for name in trained)


def test_an_encoder_of_images_and_one_of_text_are_cut() -> None:
    torch.manual_seed(0)
    vit = transformers.ViTConfig(hidden_size=16, num_hidden_layers=4, num_attention_heads=4, intermediate_size=32)
    vit.image_size, vit.patch_size, vit.hidden_dropout_prob = 16, 4, 0.0
    batch = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    assert_parity(transformers.ViTForImageClassification(vit).train(), RANKS[1], batch)
    bert = transformers.BertConfig(**SHAPE, intermediate_size=32, hidden_dropout_prob=0.0, max_position_embeddings=32)
    bert.attention_probs_dropout_prob = 0.0
    parts = assert_parity(transformers.BertForMaskedLM(bert).train(), RANKS[1], batch_of())
    name = "bert.embeddings.word_embeddings.weight"  # a part of a module that the last stage does not have
    assert parts[0].tied == {name: (0, 2)}
    assert [n for n, _ in parts[2].named_parameters() if n.startswith("bert.embeddings")] == [name]


def test_a_model_whose_blocks_each_need_an_embedding_says_which_module_all_stages_need() -> None:
    torch.manual_seed(0)
    extra = {"head_dim": 4, "vocab_size_per_layer_input": 40, "hidden_size_per_layer_input": 4, "laurel_rank": 4}
    extra |= {"num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 5}
    config = transformers.Gemma3nTextConfig(**DECODER, **extra, activation_sparsity_pattern=[0.0] * 5)
    model = transformers.Gemma3nForCausalLM(config).train()
    with pytest.raises(ModelError, match=r"uses 'model.per_layer_projection_norm'.*\n.*\n.*pipeline.every_stage"):
        run_stages(cut_over(model, RANKS[0]), [batch_of()])
    names = ["embed_tokens", "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"]
    assert_parity(model, RANKS[1], batch_of(), exact=False, every_stage=[f"model.{name}" for name in names])


def test_a_model_on_the_meta_device_is_cut_before_it_has_memory() -> None:
    with torch.device("meta"):
        model = causal("llama")
    part = cut(model, 2, stages_of_rank=(1,))
    assert all(parameter.is_meta for parameter in part.parameters())
    own = {name.split(".")[2] for name, _ in part.named_parameters() if name.startswith("model.layers.")}
    assert own == {str(index) for index in range(part.starts[1], 5)}
