"""Hugging Face models train in pipeline stages as plain PyTorch trains them on one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.build.materialize import Materializer
from shoal.build.plan import ModuleAsBuilt
from shoal.comm.fake import SingleCommunicator
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.data import InMemorySource, TokenStream
from shoal.errors import UsageError
from shoal.mesh import Mesh
from shoal.parallel.sequence.huggingface import register
from shoal.pipeline.cut import cut
from shoal.sharding.axes import Axes, DataAxes
from shoal.sharding.layout import ParameterSpec
from tests.clients.test_sequence_parallel import transformers_functions  # noqa: F401

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")

pytestmark = pytest.mark.filterwarnings("default")

VOCABULARY, LENGTH, MICRO, STEPS = 40, 8, 3, 2
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
LLAMA = {**SHAPE, "intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 32}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 4, "num_heads": 2}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}

BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "max_position_embeddings": 32,
}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}

VIT = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", LLAMA),
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "T5ForConditionalGeneration": ("T5Config", T5),
}
ROUTED = {**LLAMA, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "MixtralForCausalLM": ("MixtralConfig", {**ROUTED, "num_local_experts": 4}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**ROUTED, "num_experts": 4, "moe_intermediate_size": 8}),
}


def build(kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config, options = {**MODELS, **EXPERTS}.get(kind, ("ViTConfig", VIT))
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**{**options, **changes}))
    return model.train()


def batch_of(index: int) -> dict[str, torch.Tensor]:
    """Rows of which some labels count nothing, other numbers in each micro-batch."""
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(index))
    labels = ids.clone()
    labels[0, : 2 * (index % 4)] = -100
    return {"input_ids": ids, "labels": labels}


def config_of(pp: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_clipping": 0.0,
        "parallel": {"pp": pp},
        **more,
    }


def in_stages(model: nn.Module, size: int, config: dict[str, Any]) -> list[tuple[list[float], Any]]:
    """Each rank's losses, and the values of the whole model."""

    def job() -> Any:
        engine: Any = shoal.initialize(model=copy.deepcopy(model), config=copy.deepcopy(config))[0]
        rank = engine.axes.batch.rank
        losses = []
        for step in range(STEPS):
            first = MICRO * (2 * step + rank)
            losses.append(float(engine.train_batch(batch_of(first + micro) for micro in range(MICRO))))
        return losses, engine.module_state_dict()

    return run_ranks(size, job)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_each_target_of_a_step_counts_the_same(kind: str, size: int) -> None:
    whole = build(kind)
    optimizer, losses = torch.optim.SGD(whole.parameters(), 0.5), []
    for step in range(STEPS):
        rows = [batch_of(MICRO * (2 * step + rank) + micro) for rank in range(size // 2) for micro in range(MICRO)]
        loss = whole(**{key: torch.cat([row[key] for row in rows]) for key in rows[0]}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    expected = whole.state_dict()
    for found, values in in_stages(build(kind), size, config_of(2, loss_reduction="token")):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", [*MODELS, "ViTForImageClassification"])
def test_stages_from_the_meta_device_start_with_the_values_of_one_process(kind: str, is_tied: bool) -> None:
    def materialized(num_stages: int, stage: int) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = build(kind, tie_word_embeddings=is_tied)
        whole = [ModuleAsBuilt.of(name, module) for name, module in model.named_modules()]
        part = cut(model, num_stages, stages_of_rank=(stage,)) if num_stages > 1 else model
        torch.manual_seed(0)
        axes = Axes(Mesh.of(1), {"dp": SingleCommunicator("dp")}, DataAxes("dp", "dp"), {})
        specs = {name: ParameterSpec.whole(name, tuple(each.shape)) for name, each in part.named_parameters()}
        whole_model = whole if num_stages > 1 else ()
        Materializer(part, torch.device("cpu"), axes, specs, is_sharded=False, whole=whole_model).finish({})
        return dict(part.named_parameters())

    expected = materialized(1, 0)
    for num_stages in (2, 3):
        names = set()
        for stage in range(num_stages):
            found = materialized(num_stages, stage)
            names |= found.keys()
            for name, value in found.items():
                assert torch.equal(value, expected[name]), name
        assert names == expected.keys()


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_of_stages_initialises_the_head_as_the_model_says(stage: int) -> None:
    def job() -> Any:
        with torch.device("meta"):
            model = build("LlamaForCausalLM")
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        engine: Any = shoal.initialize(model=model, config=config_of(2, zero_optimization=zero))[0]
        assert not any(parameter.is_meta for parameter in engine.module.parameters())
        return engine.module_state_dict()

    for values in run_ranks(4, job):
        assert 0.018 < float(values["lm_head.weight"].std()) < 0.022
        assert values.keys() == build("LlamaForCausalLM").state_dict().keys()


@pytest.mark.parametrize(("size", "pp", "stage"), [(1, 1, 0), (2, 1, 3), (2, 2, 1)])
def test_adapters_from_the_meta_device_start_with_the_values_of_their_library(size: int, pp: int, stage: int) -> None:
    peft = pytest.importorskip("peft")

    def build_adapted() -> Any:
        lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(build("LlamaForCausalLM"), lora)

    def job() -> Any:
        with torch.device("meta"):
            model = build_adapted()
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        engine: Any = shoal.initialize(model=model, config=config_of(pp, zero_optimization=zero))[0]
        return engine.module_state_dict()

    expected = build_adapted().state_dict()
    for found in run_ranks(size, job):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            spread = float(value.float().std(correction=0))
            assert float(found[name].float().std(correction=0)) == pytest.approx(spread, rel=0.3, abs=1e-6), name


@pytest.mark.parametrize("axis", ["sp", "cp"])
@pytest.mark.parametrize(
    ("kind", "config", "options", "message"),
    [
        ("BartForConditionalGeneration", "BartConfig", BART, "Bart.* takes no position_ids"),
        ("BertForMaskedLM", "BertConfig", {**SHAPE, "intermediate_size": 32}, "BertForMaskedLM got no position_ids"),
    ],
    ids=["bart", "bert"],
)
def test_models_that_count_positions_themselves_are_refused_over_sp_and_cp(
    kind: str, config: str, options: dict[str, Any], message: str, axis: str
) -> None:
    model = getattr(transformers, kind)(getattr(transformers, config)(**options))

    def job() -> None:
        parallel = {"pp": 2, axis: 2}
        engine: Any = shoal.initialize(model=copy.deepcopy(model), config={**config_of(2), "parallel": parallel})[0]
        with pytest.raises(UsageError, match=message):
            engine.train_batch(iter([batch_of(micro) for micro in range(MICRO)]))

    run_ranks(4, job)


@pytest.mark.usefixtures("transformers_functions")
@pytest.mark.parametrize("axis", ["sp", "cp"])
def test_parts_of_sequences_count_each_target_once(axis: str) -> None:
    register()
    whole = build("LlamaForCausalLM")
    batch = batch_of(3)
    shifted = nn.functional.pad(batch["labels"], (0, 1), value=-100)[..., 1:]
    loss = whole(**batch).loss
    loss.backward()
    torch.optim.SGD(whole.parameters(), 0.5).step()
    expected = whole.state_dict()
    model = build("LlamaForCausalLM", attn_implementation="shoal")

    def job() -> Any:
        config = config_of(2, loss_reduction="token", gradient_accumulation_steps=1)
        config["parallel"][axis] = 2
        engine: Any = shoal.initialize(model=copy.deepcopy(model), config=config)[0]
        mine = {**batch, "shift_labels": shifted, "position_ids": torch.arange(LENGTH).expand(2, LENGTH)}
        mine = {name: engine.sequence_context.shard(value) for name, value in mine.items()}
        return float(engine.train_batch(iter([mine]))), engine.module_state_dict()

    for found, values in run_ranks(4, job):
        assert found == pytest.approx(float(loss.detach()), rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(("schedule", "interval"), [("1f1b", 0), ("zb_h1", 0), ("1f1b", 1), ("1f1b", 2)])
@pytest.mark.parametrize("kind", EXPERTS)
def test_the_loss_of_the_routers_of_all_layers_trains_them(kind: str, schedule: str, interval: int) -> None:
    whole = build(kind)
    optimizer, losses = torch.optim.SGD(whole.parameters(), 0.5), []
    for step in range(STEPS):
        total = 0.0
        for micro in range(MICRO):
            loss = whole(**batch_of(2 * MICRO * step + micro)).loss / MICRO
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    expected = whole.state_dict()
    pipeline = {"schedule": schedule, "activation_checkpoint_interval": interval}
    for found, values in in_stages(build(kind), 2, config_of(2, pipeline=pipeline)):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.usefixtures("transformers_functions")
@pytest.mark.parametrize(
    ("degrees", "schedule", "more"),
    [
        ({"pp": 2}, "1f1b", {}),
        ({"pp": 4}, "zb_h1", {}),  # two stages read no tokens
        ({"pp": 2}, "interleaved_1f1b", {"activation_checkpointing": {"modules": ["*layers.*"]}}),
        ({"pp": 2, "tp": 2}, "1f1b", {}),
        ({"pp": 2, "sp": 2}, "zbv", {}),
        ({"pp": 2, "cp": 2}, "1f1b", {"activation_checkpointing": {"modules": ["*layers.*"]}}),
    ],
    ids=str,
)
def test_packed_documents_train_in_stages_as_with_a_mask_on_one_rank(
    degrees: dict[str, int], schedule: str, more: dict[str, Any]
) -> None:
    register()
    documents = InMemorySource([[3 + (7 * n + each) % 37 for each in range(2 + n % 5)] for n in range(60)])
    data = TokenStream(documents, LENGTH, packing="first_fit")
    whole = build("LlamaForCausalLM", attn_implementation="eager", use_cache=False)
    optimizer, losses = torch.optim.SGD(whole.parameters(), 0.5), []
    for step in range(STEPS):
        batch: Any = data.batch(range(2 * MICRO * step, 2 * MICRO * (step + 1)))
        ids = torch.tensor([[sum(at >= b for b in row) for at in range(LENGTH)] for row in batch.documents.begins])
        mask = (ids[:, None, :, None] == ids[:, None, None]).tril()
        bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        logits = whole(batch.tokens, attention_mask=bias, position_ids=batch.positions).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    expected = whole.state_dict()
    is_spread = bool({"sp", "cp"} & set(degrees))
    model = build("LlamaForCausalLM", attn_implementation="shoal" if is_spread else "sdpa", use_cache=False)

    def job() -> Any:
        virtual = 2 if schedule in ("interleaved_1f1b", "zbv") else 1
        config = config_of(2, loss_reduction="token", **more)
        config |= {"parallel": degrees, "pipeline": {"schedule": schedule, "virtual_stages": virtual}}
        engine: Any = shoal.initialize(model=copy.deepcopy(model), config=config, training_data=data)[0]

        def arguments(batch: Any) -> dict[str, torch.Tensor]:
            tokens, targets, positions, _ = batch.shard(engine.sequence_context)
            return {"input_ids": tokens, "labels": targets, "shift_labels": targets, "position_ids": positions}

        engine.set_batch_fn(arguments)
        with current_world().recorder.recording() as entries:
            found = [float(engine.train_batch()) for _ in range(STEPS)]
        gathers = [entry for entry in entries if entry.label == "gather of a sequence"]
        return found, engine.module_state_dict(), gathers

    for found, values, gathers in run_ranks(2 if degrees == {"pp": 2} else 4, job):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
        assert not gathers  # the documents are known
