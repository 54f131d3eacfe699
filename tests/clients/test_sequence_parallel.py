"""A small Llama of transformers whose attention runs over ranks has the losses and gradients of one process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import shoal  # noqa: E402
from shoal.comm.threads import run_ranks  # noqa: E402
from shoal.comm.world import current_world  # noqa: E402
from shoal.compat.sequence_parallel import (  # noqa: E402
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
    initialize_sequence_parallel,
)
from shoal.errors import UsageError  # noqa: E402
from shoal.mesh import Mesh  # noqa: E402
from shoal.parallel.sequence.context import SequenceContext, sequence_parallel, set_sequence_context  # noqa: E402
from shoal.parallel.sequence.huggingface import register  # noqa: E402
from tests.helpers.training import make  # noqa: E402

VOCABULARY, LENGTH = 64, 16
ONE_AT_A_TIME = threading.Lock()


@pytest.fixture(autouse=True)
def transformers_functions() -> Iterator[None]:
    """What transformers has under its names, again."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    tables = [each._global_mapping for each in (AttentionMaskInterface, AttentionInterface)]
    before = [dict(table) for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)


def llama(implementation: str = "sdpa", **options: Any) -> Any:
    # With a cache transformers does not see that rows are packed.
    shape = {
        "use_cache": False,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, **{**shape, "num_key_value_heads": 2, **options})
    with ONE_AT_A_TIME:  # ranks that are threads have one random generator
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    """Two whole rows: ``plain``, ``packed`` by position_ids, or ``padded``."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(LENGTH).expand(2, LENGTH)}
    if kind == "packed":
        batch["position_ids"] = torch.tensor([[*range(5), *range(11)], [*range(9), *range(7)]])
    if kind == "packed as the parts":
        batch["position_ids"] = torch.arange(LENGTH // 2).repeat(2, 2)
    if kind == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, 11:] = 0
        batch["attention_mask"][1, :3] = 0
        batch["labels"][batch["attention_mask"] == 0] = -100
        batch["labels"][1, 3] = -100  # what padding predicts differs
    return batch


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def summed_loss(model: Any, batch: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def shifted(labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]


def check_parity(context: SequenceContext, kind: str, implementation: str, recompute: bool = False) -> None:
    batch = batch_of(kind)
    whole = llama()
    expected = summed_loss(whole, batch, shifted(batch["labels"]))
    expected.backward()

    model = llama(implementation)
    if recompute:
        model.train().activation_checkpointing_enable()
    mine = {key: context.shard(value) for key, value in batch.items()}
    before = set_sequence_context(context)
    loss = summed_loss(model, mine, context.shard(shifted(batch["labels"])))
    loss.backward()
    set_sequence_context(before)
    sums = [loss.detach().clone().view(1), *(parameter.grad for parameter in model.parameters())]
    for tensor in sums:
        for comm in (context.sp, context.cp):
            if comm is not None:
                comm.all_reduce(tensor.view(-1), label="check").drain()
    assert sums[0].item() == pytest.approx(expected.item(), rel=1e-6)
    for (name, wanted), found in zip(gradients(whole).items(), sums[1:], strict=True):
        assert (found - wanted).norm() / wanted.norm() < 2e-6, name


@pytest.mark.parametrize("kind", ["plain", "packed", "padded", "packed as the parts"])
@pytest.mark.parametrize("axis", ["sp", "cp"])
def test_a_llama_over_two_ranks_equals_one_process(kind: str, axis: str) -> None:
    register()

    def run() -> None:
        comm = current_world().communicator("dp", Mesh.of(2))
        check_parity(SequenceContext(**{axis: comm}), kind, "shoal")

    run_ranks(2, run)


def test_a_llama_over_two_by_two_ranks_that_recomputes_its_layers_equals_one_process() -> None:
    register()

    def run() -> None:
        world, mesh = current_world(), Mesh(dp_shard=2, sp=2)
        context = SequenceContext(sp=world.communicator("sp", mesh), cp=world.communicator("dp_shard", mesh))
        check_parity(context, "packed", "shoal", recompute=True)

    run_ranks(4, run)


def test_without_a_context_the_model_generates_as_with_sdpa() -> None:
    register()
    ids = batch_of("plain")["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(llama("shoal").generate(ids, **options), llama().generate(ids, **options))


def test_positions_that_each_rank_counts_from_zero_are_refused() -> None:
    register()

    def run() -> None:
        context = SequenceContext(sp=current_world().communicator("dp", Mesh.of(2)))
        with sequence_parallel(context), pytest.raises(UsageError, match="each of 2 ranks counts its position_ids"):
            llama("shoal")(input_ids=torch.ones(1, 8, dtype=torch.int64))

    run_ranks(2, run)


def family(name: str, implementation: str, window: int = 5) -> Any:
    """A small model with a sliding window: every layer's (mistral), or every other layer's with soft caps (gemma2)."""
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": window, "use_cache": False,
    }  # fmt: skip
    if name.startswith("gemma"):
        options |= {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
    if name == "gemma2":
        options |= {"attn_logit_softcapping": 0.3, "query_pre_attn_scalar": 8}
    if name == "qwen3":
        options |= {"head_dim": 8, "layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}
    if name == "gpt_oss":  # with attention sinks
        options |= {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 4}
    if name == "phimoe":  # its mask has the window, and its attention function is not told
        options |= {"num_local_experts": 4, "router_jitter_noise": 0.0}
    kinds = {"mistral": "Mistral", "gemma2": "Gemma2", "gemma3_text": "Gemma3Text", "qwen3": "Qwen3"}
    kind = {**kinds, "gpt_oss": "GptOss", "phimoe": "Phimoe"}[name]
    config = getattr(transformers, f"{kind}Config")(**options)
    with ONE_AT_A_TIME:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        for parameter in model.parameters():  # scores that differ, so that a window and a soft cap count
            parameter.data.normal_(std=0.3)
        return model


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(["mistral", "gemma2", "gemma3_text", "qwen3"], ["packed", "padded"]),
        # Transformers' eager attention does not see the packed rows of these.
        *itertools.product(["gpt_oss", "phimoe"], ["plain", "padded"]),
    ],
)
def test_models_with_sliding_windows_soft_caps_and_sinks_equal_one_process(name: str, kind: str) -> None:
    """Against transformers' eager attention. On rows with packed documents and padding, over sp and over cp."""
    register()
    whole = family(name, "eager")
    batch = batch_of(kind)
    expected = summed_loss(whole, batch, shifted(batch["labels"]))
    expected.backward()
    without = family(name, "eager", window=LENGTH)
    assert abs(summed_loss(without, batch, shifted(batch["labels"])) - expected) > 1e-3

    def run() -> None:
        comm = current_world().communicator("dp", Mesh.of(2))
        for context in (SequenceContext(sp=comm), SequenceContext(cp=comm)):
            model = family(name, "shoal")
            mine = {key: context.shard(value) for key, value in batch.items()}
            with sequence_parallel(context):
                loss = summed_loss(model, mine, context.shard(shifted(batch["labels"])))
                loss.backward()
            sums = [loss.detach().clone().view(1), *(parameter.grad for parameter in model.parameters())]
            for tensor in sums:
                comm.all_reduce(tensor.view(-1), label="check").drain()
            assert sums[0].item() == pytest.approx(expected.item(), rel=1e-6)
            for (parameter, wanted), found in zip(gradients(whole).items(), sums[1:], strict=True):
                assert (found - wanted).norm() <= 5e-6 * wanted.norm(), parameter

    run_ranks(2, run)


def test_a_mask_for_a_window_that_no_layer_uses_is_no_reason_to_refuse() -> None:
    """Qwen 2 MoE's default: it makes a mask for a window of 0 too, and its layers are all of full attention."""
    register()
    options = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen2MoeForCausalLM._from_config(
        transformers.Qwen2MoeConfig(**options), attn_implementation="shoal"
    )
    batch = batch_of("plain")
    targets = shifted(batch["labels"])
    with torch.no_grad():
        expected = summed_loss(model, batch, targets).item()

    def run() -> None:
        comm = current_world().communicator("dp", Mesh.of(2))
        for context in (SequenceContext(sp=comm), SequenceContext(cp=comm)):
            mine = {key: context.shard(value) for key, value in batch.items()}
            with sequence_parallel(context), torch.no_grad():
                loss = summed_loss(model, mine, context.shard(targets)).view(1)
            comm.all_reduce(loss, label="check").drain()
            assert loss.item() == pytest.approx(expected, rel=1e-6)

    run_ranks(2, run)


ROTARY: dict[str, dict[str, Any]] = {
    "Llama": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    "Phi3": {
        "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 1.5],
        "original_max_position_embeddings": LENGTH // 2, "factor": 2.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("axis", ["sp", "cp"])
@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_frequencies_are_those_of_the_longest_sequence_on_every_rank(kind: str, axis: str) -> None:
    """The positions of one rank do not go beyond the length at which the frequencies change."""
    register()
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    limit = LENGTH // 2 if kind == "Llama" else LENGTH
    options = {**shape, "vocab_size": VOCABULARY, "max_position_embeddings": limit, "pad_token_id": 0}

    def build() -> Any:
        extra = {"original_max_position_embeddings": LENGTH // 2} if kind == "Phi3" else {}
        config = getattr(transformers, f"{kind}Config")(**options, **extra, rope_parameters=dict(ROTARY[kind]))
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="shoal")
        for parameter in model.parameters():
            parameter.data.normal_(std=0.3)
        return model

    batch = {name: value for name, value in batch_of("plain").items() if name != "labels"}
    with torch.no_grad():
        wanted = make(build)(**batch).logits
        short = make(build)(**{name: value[:, : LENGTH // 2] for name, value in batch.items()}).logits
        assert (short - wanted[:, : LENGTH // 2]).abs().max() > 1e-2

    def run() -> None:
        settings = {"train_micro_batch_size_per_gpu": 2, "parallel": {axis: 2}, "optimizer": {"type": "AdamW"}}
        engine: Any = shoal.initialize(model=make(build), config=settings)[0]
        context = engine.sequence_context
        for _ in range(2):
            logits = engine(**{name: context.shard(value) for name, value in batch.items()}).logits
            torch.testing.assert_close(logits, context.shard(wanted), rtol=1e-4, atol=1e-4)
        model = engine.module
        engine.destroy()
        with torch.no_grad():
            torch.testing.assert_close(model(**batch).logits, wanted, rtol=1e-4, atol=1e-4)

    run_ranks(2, run)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_a_soft_cap_and_sinks_on_one_rank_are_those_of_eager_attention(kind: str) -> None:
    register()
    batch = {key: value for key, value in batch_of("padded").items() if key != "labels"}
    at = batch["attention_mask"].bool()
    with torch.no_grad():
        wanted, got = (family(kind, name).eval()(**batch).logits[at] for name in ("eager", "shoal"))
    assert torch.allclose(got, wanted, atol=1e-4)


def test_in_eval_mode_a_model_with_a_window_computes_alone() -> None:
    register(only_training=True)
    batch = {key: value for key, value in batch_of("padded").items() if key != "labels"}
    at = batch["attention_mask"].bool()

    def run() -> None:
        with torch.no_grad():
            wanted = family("gemma2", "eager").eval()(**batch).logits[at]
            with sequence_parallel(SequenceContext(sp=current_world().communicator("dp", Mesh.of(2)))):
                assert torch.allclose(family("gemma2", "shoal").eval()(**batch).logits[at], wanted, atol=1e-4)

    run_ranks(2, run)


def test_what_attention_over_ranks_does_not_have_is_refused() -> None:
    """Chunks of Llama 4's kind shorter than the sequence; a window beside a function of transformers without one."""
    from transformers.masking_utils import create_chunked_causal_mask

    register()
    sdpa = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    transformers.AttentionInterface.register("another", sdpa)
    register("another", core="another")

    def run() -> None:
        config = llama("shoal").config
        context = SequenceContext(sp=current_world().communicator("dp", Mesh.of(2)))
        given = {"inputs_embeds": torch.zeros(1, 8, 4), "attention_mask": None, "past_key_values": None}
        with sequence_parallel(context):
            config.attention_chunk_size = 16
            assert create_chunked_causal_mask(config, **given) is None
            config.attention_chunk_size = 8
            with pytest.raises(UsageError, match=r"functions \(chunked_overlay\) that attention over ranks does not"):
                create_chunked_causal_mask(config, **given)
            with pytest.raises(UsageError, match=r"sliding_window=5(.|\n)*16 positions"):
                family("mistral", "another")(
                    input_ids=torch.ones(1, 8, dtype=torch.int64), position_ids=context.positions(16)[None]
                )

    run_ranks(2, run)


@pytest.mark.parametrize(
    ("core", "length"), [("sdpa", LENGTH), ("eager_like", LENGTH), ("sdpa", 13), ("eager_like", 13)]
)
def test_register_with_transformers_and_the_adapter_give_the_gradients_of_one_process(core: str, length: int) -> None:
    """Each rank loads a batch of its own; both ranks compute both, each its positions of them; 13 are padded to 14."""
    if core == "eager_like":
        sdpa = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
        transformers.AttentionInterface.register(core, sdpa)
    register(core, core=None if core == "sdpa" else core, only_training=True)
    plain = {key: value[:, :length] for key, value in batch_of("plain").items()}
    batches = [plain, {key: value.flip(0) for key, value in plain.items()}]
    batches[1]["input_ids"] = batches[1]["labels"] = (batches[1]["input_ids"] + 7) % VOCABULARY
    whole = llama()
    for batch in batches:
        summed_loss(whole, batch, shifted(batch["labels"])).backward()

    def run() -> None:
        world = current_world()
        initialize_sequence_parallel(2)
        model = llama(core).train()
        group = world.process_group("sp", Mesh.of(2, sp=2))
        own = {key: value for key, value in batches[world.rank].items() if key != "position_ids"}
        adapter = UlyssesSPDataLoaderAdapter([own], world.rank, group, 2, "cpu")
        assert len(adapter) == 2
        for batch in adapter:
            assert set(batch) == {"input_ids", "position_ids", "shift_labels"}
            summed_loss(
                model, {key: batch[key] for key in ("input_ids", "position_ids")}, batch["shift_labels"]
            ).backward()
        comm = world.communicator("sp", Mesh.of(2, sp=2))
        for (name, wanted), parameter in zip(gradients(whole).items(), model.parameters(), strict=True):
            comm.all_reduce(parameter.grad.view(-1), label="check").drain()
            assert (parameter.grad - wanted).norm() / wanted.norm() < 2e-6, name
        # In eval mode the model computes alone.
        padded = {key: value for key, value in batch_of("padded").items() if key != "labels"}
        with torch.no_grad():
            at = padded["attention_mask"].bool()
            assert torch.allclose(model.eval()(**padded).logits[at], llama().eval()(**padded).logits[at], atol=1e-5)

    run_ranks(2, run)


def test_a_model_that_the_ranks_do_not_fit_is_refused() -> None:
    for options, message in [
        ({"core_attn_implementation": "eager"}, "no attention function called 'eager'"),
        ({"sequence_parallel_size": 8}, "4 attention heads cannot be spread over 8 ranks"),
        ({"seq_length": 15, "seq_length_is_variable": False}, "pad it by 1 to 16"),
    ]:
        arguments: dict[str, Any] = {"core_attn_implementation": "sdpa", "sequence_parallel_size": 2, **options}
        with pytest.raises(UsageError, match=message):
            UlyssesSPAttentionHF.register_with_transformers(llama(), micro_batch_size=1, **arguments)


MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4},
}


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("axis", ["sp", "cp"])
@pytest.mark.parametrize("family", MIXTURES)
def test_the_auxiliary_loss_of_routers_is_of_whole_sequences(family: str, axis: str, is_padded: bool) -> None:
    register()
    batch = batch_of("padded" if is_padded else "plain")
    labels = shifted(batch.pop("labels")).contiguous()
    options = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False, "router_aux_loss_coef": 0.5,
        "output_router_logits": True, "pad_token_id": 0, **MIXTURES[family],
    }  # fmt: skip

    def build() -> Any:
        config = getattr(transformers, f"{family}Config")(**options)
        with ONE_AT_A_TIME:
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="shoal")
        for parameter in model.parameters():
            parameter.data *= 3
        return model.train()

    whole = build()
    expected = whole(**batch, labels=labels, shift_labels=labels)
    expected.loss.backward()

    def rank() -> None:
        model = build()
        settings = {
            "train_micro_batch_size_per_gpu": 2, "parallel": {axis: 2}, "loss_reduction": "token",
            "zero_optimization": {"stage": 1}, "gradient_clipping": 0.0,
        }  # fmt: skip
        engine = shoal.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), config=settings)[0]
        mine = engine.sequence_context.shard(labels)
        cut = {name: engine.sequence_context.shard(value) for name, value in batch.items()}
        output = engine(**cut, labels=mine, shift_labels=mine)
        assert output.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-6)
        engine.backward(output.loss, num_tokens=(mine != -100).sum())
        engine.step()
        for (name, before), after in zip(whole.named_parameters(), engine.module_state_dict().values(), strict=True):
            if before.grad is not None:
                moved = before.detach() - after
                assert (moved - before.grad).norm() < 2e-6 + 5e-5 * before.grad.norm(), name
        engine.destroy()

    run_ranks(2, rank)
