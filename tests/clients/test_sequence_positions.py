"""An engine over ``sp`` or ``cp`` warns of Transformers models that compute with positions of other ranks elsewhere."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import shoal  # noqa: E402
from shoal.comm.threads import run_ranks  # noqa: E402
from shoal.errors import UsageError  # noqa: E402
from shoal.parallel.sequence.huggingface import register  # noqa: E402
from tests.clients.test_sequence_parallel import transformers_functions  # noqa: E402, F401
from tests.helpers.training import make  # noqa: E402

pytestmark = pytest.mark.usefixtures("transformers_functions")

SMALL: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA: dict[str, Any] = {
    **SMALL, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT: dict[str, Any] = {**SMALL, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0}
# Stage 3 shards every parameter, and releases it behind its unit.
RELEASED = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
HYBRID: dict[str, Any] = {**LLAMA, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
BLENDERBOT: dict[str, Any] = {
    **SMALL, "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    "max_position_embeddings": 64, "is_decoder": True, "is_encoder_decoder": False,
}  # fmt: skip


def warnings_of(
    kind: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture, *, stage: int = 3, axis: str = "sp",
    shifts: bool = False, setup: Any = None, precision: dict[str, Any] | None = None, counts: bool = False,
) -> tuple[list[str], list[list[float]]]:  # fmt: skip
    """The warnings of two steps over two ranks, and each rank's losses."""
    family = kind.partition("For")[0].removesuffix("LMHeadModel")
    register()

    def build() -> Any:
        config = getattr(transformers, f"{family}Config")(**options)
        config._attn_implementation = "shoal"
        return getattr(transformers, kind)(config).train()

    def job() -> list[float]:
        model = make(build)
        if setup is not None:
            setup(model)
        modes = [module.training for module in model.modules()]
        settings = {
            "train_micro_batch_size_per_gpu": 2, "parallel": {axis: 2},
            "zero_optimization": {"stage": stage, **RELEASED},
            "optimizer": {"type": "AdamW"}, **(precision or {}),
        }  # fmt: skip
        engine = shoal.initialize(model=model, config=settings)[0]
        context, losses = engine.sequence_context, []
        ids = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(1))
        batch = {"input_ids": ids, "position_ids": torch.arange(16).expand(2, 16)}
        if counts or "Bloom" in kind or "Blenderbot" in kind:
            del batch["position_ids"]
        mine = {name: context.shard(value) for name, value in batch.items()}
        for _ in range(2):
            if shifts:
                output = engine(**mine, labels=context.shard(ids)).loss
            else:
                output = engine(**mine).logits.float().square().mean()
            engine.backward(output)
            engine.step()
            losses.append(output.item())
        assert [module.training for module in model.modules()] == modes
        engine.destroy()
        return losses

    with caplog.at_level(logging.WARNING, logger="shoal"):
        losses = run_ranks(2, job)
    named = [record.getMessage() for record in caplog.records if "each rank of " in record.getMessage()]
    return named, losses


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True}}], ids=str)
@pytest.mark.parametrize(("stage", "axis"), [(1, "cp"), (3, "sp")])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("LlamaForCausalLM", LLAMA), ("GPT2LMHeadModel", GPT), ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 4})],
)
def test_models_that_compute_positions_alone_are_trained_without_a_word(
    kind: str, options: dict[str, Any], stage: int, axis: str, precision: dict[str, Any], caplog: Any
) -> None:
    found, losses = warnings_of(kind, options, caplog, stage=stage, axis=axis, precision=precision)
    assert found == []
    assert len(losses[0]) == 2


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("Lfm2ForCausalLM", HYBRID, "Lfm2ForCausalLM computes a position from others outside of attention"),
        ("Lfm2ForCausalLM", {**HYBRID, "initializer_range": 0.015}, "outside of attention (a convolution"),
        ("BloomForCausalLM", {**SMALL, "hidden_size": 32, "n_layer": 1, "n_head": 4}, "attention of its own"),
        ("BlenderbotSmallForCausalLM", BLENDERBOT, "counts positions itself, as if each rank's part were"),
        ("GPT2ForSequenceClassification", GPT, "returns nothing of each position"),
    ],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_what_else_needs_the_whole_sequence_is_said_once(
    kind: str, options: dict[str, Any], message: str, stage: int, caplog: Any
) -> None:
    found, _ = warnings_of(kind, options, caplog, stage=stage)
    assert [text for text in found if message in text] == found[:1]
    assert found[0].startswith("each rank of sp holds a part of every sequence, but ")


BERT = {**{name: LLAMA[name] for name in LLAMA if "key_value" not in name}, "attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("kind", "options"), [("BertForMaskedLM", BERT), ("RobertaForMaskedLM", BERT), ("GPT2LMHeadModel", GPT)]
)
def test_a_model_that_counts_positions_where_it_gets_none_is_an_error(
    kind: str, options: dict[str, Any], stage: int, caplog: Any
) -> None:
    assert warnings_of(kind, options, caplog, stage=stage)[0] == []
    with pytest.raises(UsageError, match=f"{kind} got no position_ids, and counts positions itself, .* sp ranks"):
        warnings_of(kind, options, caplog, stage=stage, counts=True)


@pytest.mark.parametrize("kind", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_an_encoder_and_decoder_that_takes_no_positions_is_an_error(kind: str, caplog: Any) -> None:
    bart = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    options = {**SMALL, "decoder_start_token_id": 1, **(bart if kind.startswith("Bart") else t5)}
    with pytest.raises(UsageError, match=f"{kind} takes no position_ids, and counts positions itself"):
        warnings_of(kind, options, caplog, counts=True)


def test_labels_that_each_rank_shifts_are_named(caplog: Any) -> None:
    found, _ = warnings_of("LlamaForCausalLM", LLAMA, caplog, shifts=True)
    assert len(found) == 1
    assert "pass them as shift_labels" in found[0]


def test_what_only_training_reads_outside_of_its_unit_is_found_after_the_check(caplog: Any) -> None:
    class Reading(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            if self.training:
                output.logits = output.logits * (1 + self.model.layers[0].mlp.gate_proj.weight.square().sum())
            return output

    def setup(model: Any) -> None:
        model.__class__ = Reading

    losses = [warnings_of("LlamaForCausalLM", LLAMA, caplog, stage=stage, setup=setup)[1] for stage in (1, 3)]
    assert losses[0] == losses[1]


def test_a_model_that_the_check_cannot_call_trains_on(caplog: Any) -> None:
    """Its forward raises where positions are equal, in the middle of a pass of stage 3."""

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        if not module.training:
            raise ValueError("only for training")

    def setup(model: Any) -> None:
        model.model.layers[1].mlp.register_forward_pre_hook(fail, with_kwargs=True)

    found, losses = warnings_of("LlamaForCausalLM", LLAMA, caplog, setup=setup)
    assert found == []
    assert losses == warnings_of("LlamaForCausalLM", LLAMA, caplog)[1]
