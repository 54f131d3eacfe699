"""Recomputed modules of Transformers' models whose blocks add to key-value caches: the same bits as without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.sequence import context
from shoal.parallel.sequence.huggingface import register
from tests.helpers.compiling import CountsGraphs, compiling

transformers = pytest.importorskip("transformers")

VOCABULARY = 64


@pytest.fixture(scope="module")
def t5() -> Any:
    torch.manual_seed(0)
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
    tokens = {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "pad_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, **tokens, dropout_rate=0.0)).train()


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**shape, vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=0)
    return transformers.LlamaForCausalLM(config).train()


def train(model: Any, sections: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 0.1}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, **sections}
    engine: Any = shoal.initialize(model=copy.deepcopy(model), config=config)[0]
    losses = []
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + engine.global_rank)
        tokens = torch.randint(3, VOCABULARY, (2, 7), generator=generator)
        mask = torch.ones_like(tokens)
        mask[0, 5:] = 0
        loss = engine(input_ids=tokens, attention_mask=mask, labels=tokens.roll(1, 0)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    values = engine.module_state_dict()
    engine.destroy()
    return losses, values


STAGE_3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


@pytest.mark.parametrize(
    ("family", "section", "more"),
    [
        ("t5", {"modules": ["T5Block"]}, {}),
        ("t5", {"modules": ["T5Block"], "policy": "matmul"}, STAGE_3),
        ("t5", {"modules": ["T5Block"], "cpu_checkpointing": True}, {}),
        ("t5", {"modules": ["T5LayerSelfAttention", "T5LayerFF"]}, {}),
        ("t5", {"modules": ["encoder", "decoder.block.1"]}, {"offload_activation": {"device": "cpu"}}),
        ("t5", {"memory_budget": "1KB"}, {}),
        ("llama", {"modules": ["LlamaDecoderLayer"]}, {}),
        ("llama", {"modules": ["LlamaAttention"], "policy": "matmul"}, STAGE_3),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_blocks_that_add_to_a_cache_are_recomputed_to_the_same_bits(
    family: str, section: dict[str, Any], more: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(family)
    plain = run_ranks(2, train, model, {})
    again = run_ranks(2, train, model, {"activation_checkpointing": section, **more})
    for (losses, values), (other_losses, other_values) in zip(plain, again, strict=True):
        assert other_losses == losses
        assert all(torch.equal(other_values[name], value) for name, value in values.items())


def test_a_recomputation_reads_the_cache_as_it_was_before_the_block(llama: Any) -> None:
    """A prefix, as prefix tuning makes it, and two recomputations of one forward."""
    model = copy.deepcopy(llama)
    tokens = torch.randint(3, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        prefix = model(tokens, use_cache=True).past_key_values

    def gradients() -> tuple[list[torch.Tensor], int]:
        model.zero_grad()
        cache = copy.deepcopy(prefix)
        loss = model(tokens, past_key_values=cache, labels=tokens).loss
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()], cache.get_seq_length()

    plain, length = gradients()
    recomputed = recompute_blocks(model)
    assert len(recomputed) == 3
    again, length_again = gradients()
    recomputed.remove()
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert length == length_again == 10


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_attention_of_one_rank_is_in_the_graph_of_a_compiled_block_that_the_model_recomputes(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    monkeypatch.setattr(context._Known, "has_been_set", False)  # as in a process whose sequences were never spread
    backend, compile_ = CountsGraphs("aot_eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, *, mode: compile_(function, backend=backend, dynamic=False))
    model = copy.deepcopy(llama)
    model.set_attn_implementation("shoal")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    expected, _ = train(model, {})
    with compiling():
        torch._dynamo.utils.counters.clear()
        losses, _ = train(model, {"compile": {"enabled": True}})
        breaks = dict(torch._dynamo.utils.counters["graph_break"])
    assert losses == expected
    assert backend.num_graphs == 1
    assert breaks == {}
