"""Tiny Hugging Face models, built from their configs, train under Shoal as they do in plain PyTorch.

The bound on parameters after three steps in fp32: 2e-5 with SGD, whose update is linear in the gradient.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
import shoal.errors
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")

pytestmark = pytest.mark.filterwarnings("default")

Batch = dict[str, torch.Tensor]
Factory = Callable[[], nn.Module]

VOCABULARY, SEQUENCE, ROWS, WORLD, STEPS = 64, 8, 2, 2, 3
BOUND = 2e-5

_RANDOM = threading.Lock()  # threads share torch's generator
_SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_TOKENS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
_DECODER = {**_SHAPE, **_TOKENS, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **_TOKENS,
    )
    return transformers.GPT2LMHeadModel(config).train()


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER)).train()


def tied_llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER, tie_word_embeddings=True)).train()


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **_DECODER, num_local_experts=8, num_experts_per_tok=1, output_router_logits=True, router_aux_loss_coef=0.0
    )
    return transformers.MixtralForCausalLM(config).train()


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).train()


class BertWithUnusedPooler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.BertConfig(**_SHAPE, intermediate_size=48, max_position_embeddings=32, **_NO_DROPOUT)
        self.bert = transformers.BertModel(config)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.bert(input_ids=input_ids).last_hidden_state)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        num_labels=10,
        **_NO_DROPOUT,
    )
    return transformers.ViTForImageClassification(config).train()


def checkpointed(factory: Factory, *, use_reentrant: bool) -> Factory:
    def build() -> nn.Module:
        model: Any = factory()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        return model

    return build


def adapted(factory: Factory, targets: list[str], *, use_reentrant: bool | None = None) -> Factory:
    """With LoRA on ``targets``; the base is frozen."""
    peft = pytest.importorskip("peft", reason="Hugging Face peft is not installed")

    def build() -> nn.Module:
        model: Any = factory()
        if use_reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
            model.config.use_cache = False
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")).train()

    return build


def make(factory: Factory, seed: int = 0) -> Any:
    with _RANDOM:
        torch.manual_seed(seed)
        return factory()


def text(index: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + index)
    tokens = torch.randint(2, VOCABULARY, (ROWS * WORLD, SEQUENCE), generator=generator)
    mine = tokens[rank * ROWS : (rank + 1) * ROWS]
    return {"input_ids": mine, "labels": mine.clone()}


def images(index: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + index)
    pixels = torch.randn(ROWS * WORLD, 3, 16, 16, generator=generator)
    labels = torch.randint(0, 10, (ROWS * WORLD,), generator=generator)
    rows = slice(rank * ROWS, (rank + 1) * ROWS)
    return {"pixel_values": pixels[rows], "labels": labels[rows]}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.01)


def config(stage: int, **sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **sections,
    }


def start(factory: Factory, stage: int, **sections: Any) -> Any:
    model = make(factory)
    return shoal.initialize(model=model, optimizer=sgd(model), config=config(stage, **sections))[0]


def whole(engine: Any) -> dict[str, torch.Tensor]:
    with shoal.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def train_alone(factory: Factory, batch: Callable[[int, int], Batch]) -> dict[str, torch.Tensor]:
    model = make(factory)
    optimizer = sgd(model)
    for index in range(STEPS):
        optimizer.zero_grad()
        torch.stack([model(**batch(index, rank))["loss"] for rank in range(WORLD)]).mean().backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_ranks(factory: Factory, batch: Callable[[int, int], Batch], stage: int) -> list[dict[str, torch.Tensor]]:
    def job() -> dict[str, torch.Tensor]:
        engine = start(factory, stage)
        for index in range(STEPS):
            engine.backward(engine(**batch(index, current_world().rank))["loss"])
            engine.step()
        found = whole(engine)
        engine.destroy()
        return found

    return run_ranks(WORLD, job)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = BOUND) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=atol, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    ("factory", "batch"),
    [
        (gpt2, text),
        (llama, text),
        (tied_llama, text),
        (mixtral, text),
        (t5, text),
        (BertWithUnusedPooler, text),
        (vit, images),
    ],
    ids=lambda value: value.__name__,
)
def test_every_stage_trains_the_model_as_one_process_does(factory: Factory, batch: Callable[[int, int], Batch]) -> None:
    alone = train_alone(factory, batch)
    for stage in (0, 1, 2, 3):
        results = train_ranks(factory, batch, stage)
        assert_close(results[0], alone)
        assert_close(results[1], results[0], atol=0.0)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("factory", [gpt2, llama, t5, mixtral], ids=lambda value: value.__name__)
def test_checkpointed_activations_change_nothing_under_sharded_parameters(
    factory: Factory, use_reentrant: bool
) -> None:
    build = checkpointed(factory, use_reentrant=use_reentrant)
    assert_close(train_ranks(build, text, 3)[0], train_alone(factory, text))


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize(("factory", "targets"), [(gpt2, ["c_attn"]), (llama, ["q_proj", "v_proj"])])
def test_adapters_on_a_frozen_sharded_base_train_as_in_one_process(
    factory: Factory, targets: list[str], use_reentrant: bool | None
) -> None:
    build = adapted(factory, targets, use_reentrant=use_reentrant)
    alone = train_alone(build, text)
    for stage in (0, 3):
        assert_close(train_ranks(build, text, stage)[0], alone)


@pytest.mark.parametrize("factory", [gpt2, llama, mixtral], ids=lambda value: value.__name__)
def test_generation_between_steps_gives_the_tokens_of_one_process(factory: Factory) -> None:
    prompt = text(50, 0)["input_ids"][:1, :4]

    def tokens(model: Any) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            made: torch.Tensor = model.generate(prompt, max_new_tokens=8, do_sample=False)
        model.train()
        return made

    model = make(factory)
    optimizer = sgd(model)
    expected = []
    for index in range(STEPS):
        optimizer.zero_grad()
        torch.stack([model(**text(index, rank))["loss"] for rank in range(WORLD)]).mean().backward()
        optimizer.step()
        expected.append(tokens(model))

    def job() -> list[torch.Tensor]:
        engine = start(factory, 3)
        found = []
        for index in range(STEPS):
            engine.backward(engine(**text(index, current_world().rank))["loss"])
            engine.step()
            found.append(tokens(engine))
        engine.destroy()
        return found

    for found in run_ranks(WORLD, job):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_the_loss_may_pass_through_a_frozen_engine() -> None:
    """The gradient flows through a sharded model that trains nothing, into one that does."""

    def inputs(index: int, rank: int) -> torch.Tensor:
        rows = torch.randn(ROWS * WORLD, SEQUENCE, 32, generator=torch.Generator().manual_seed(index))
        return rows[rank * ROWS : (rank + 1) * ROWS]

    def student() -> nn.Module:
        return nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)])

    critic, model = make(llama, 5).requires_grad_(False), make(student)
    optimizer = sgd(model)
    for index in range(STEPS):
        losses = [critic(inputs_embeds=model(inputs(index, r))).logits.pow(2).mean() for r in range(WORLD)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()

    def job() -> dict[str, torch.Tensor]:
        frozen = shoal.initialize(model=make(llama, 5).requires_grad_(False), config=config(3))[0]
        engine = start(student, 3)
        for index in range(STEPS):
            embedded = engine(inputs(index, current_world().rank))
            engine.backward(frozen(inputs_embeds=embedded).logits.pow(2).mean())
            engine.step()
        found = whole(engine)
        engine.destroy()
        frozen.destroy()
        return found

    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert_close(run_ranks(WORLD, job)[0], expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_one_model_run_twice_before_one_backward_trains_as_in_one_process(stage: int) -> None:
    def loss_of(model: Any, index: int, rank: int) -> torch.Tensor:
        chosen, rejected = model(**text(index, rank))["loss"], model(**text(index + 50, rank))["loss"]
        return -nn.functional.logsigmoid(rejected - chosen)

    model = make(llama)
    optimizer = sgd(model)
    for index in range(STEPS):
        optimizer.zero_grad()
        torch.stack([loss_of(model, index, rank) for rank in range(WORLD)]).mean().backward()
        optimizer.step()

    def job() -> dict[str, torch.Tensor]:
        engine = start(llama, stage)
        for index in range(STEPS):
            engine.backward(loss_of(engine, index, current_world().rank))
            engine.step()
        found = whole(engine)
        engine.destroy()
        return found

    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert_close(run_ranks(WORLD, job)[0], expected)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "torch_autocast"])
@pytest.mark.parametrize("factory", [gpt2, llama, t5], ids=lambda value: value.__name__)
def test_the_loss_goes_down_in_lower_precision(factory: Factory, precision: str) -> None:
    def job() -> list[float]:
        model = make(factory)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        settings = config(3, **{precision: {"enabled": True}})
        engine = shoal.initialize(model=model, optimizer=optimizer, config=settings)[0]
        losses = []
        for _ in range(12):
            loss = engine(**text(0, current_world().rank))["loss"]
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        return losses

    losses = run_ranks(WORLD, job)[0]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("factory", [gpt2, llama, tied_llama, mixtral], ids=lambda value: value.__name__)
def test_a_model_built_under_init_starts_bit_equal_to_one_built_directly(factory: Factory) -> None:
    expected = {name: parameter.detach() for name, parameter in make(factory).named_parameters()}

    def job() -> dict[str, torch.Tensor]:
        with shoal.zero.Init():
            model = make(factory)
        engine = shoal.initialize(model=model, optimizer=sgd(model), config=config(3))[0]
        found = whole(engine)
        engine.destroy()
        return found

    assert_close(run_ranks(1, job)[0], expected, atol=0.0)


@pytest.mark.parametrize("world", [1, WORLD])
@pytest.mark.parametrize(
    "factory", [gpt2, llama, t5, BertWithUnusedPooler, vit, mixtral], ids=lambda value: value.__name__
)
def test_a_model_from_the_meta_device_is_initialised_as_its_library_does(factory: Factory, world: int) -> None:
    """Embeddings, norms and residual projections get the library's own distribution, buffers their very values."""
    direct = make(factory)

    def job() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        with torch.device("meta"):
            model = factory()
        torch.manual_seed(0)
        engine = shoal.initialize(model=model, optimizer=sgd(model), config=config(3))[0]
        found = whole(engine)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        engine.destroy()
        return found, buffers

    found, buffers = run_ranks(world, job)[0]
    for name, parameter in direct.named_parameters():
        if parameter.numel() < 2:
            continue
        spread = parameter.std().item()
        if spread == 0.0:
            assert torch.equal(found[name], parameter), name
        elif parameter.numel() > 500:
            assert found[name].std().item() == pytest.approx(spread, rel=0.2), name
    for name, buffer in direct.named_buffers():
        assert torch.equal(buffers[name], buffer), name


def test_a_weight_penalty_in_the_loss_is_an_error_or_right_but_never_nan() -> None:
    def penalty(model: nn.Module) -> torch.Tensor:
        return 0.01 * torch.stack([parameter.pow(2).sum() for parameter in model.parameters()]).sum()

    model = make(gpt2)
    optimizer = sgd(model)
    optimizer.zero_grad()
    (torch.stack([model(**text(0, rank))["loss"] for rank in range(WORLD)]).mean() + penalty(model)).backward()
    optimizer.step()

    def job() -> tuple[str, dict[str, torch.Tensor]]:
        engine = start(gpt2, 3)
        mine = text(0, current_world().rank)
        engine.backward(engine(**mine)["loss"] + penalty(engine.module))
        with pytest.raises(shoal.errors.NonFiniteError) as caught:
            engine.step()
        with shoal.zero.GatheredParameters(list(engine.module.parameters())):
            engine.backward(engine(**mine)["loss"] + penalty(engine.module))
        engine.step()
        found = whole(engine)
        engine.destroy()
        return str(caught.value), found

    message, found = run_ranks(WORLD, job)[0]
    assert "GatheredParameters" in message
    assert_close(found, {name: parameter.detach() for name, parameter in model.named_parameters()})


def test_a_model_belongs_to_one_engine_at_a_time() -> None:
    def job() -> float:
        model = make(gpt2)
        twin = copy.deepcopy(model)
        mine = text(0, current_world().rank)
        engine = shoal.initialize(model=model, optimizer=sgd(model), config=config(3))[0]
        with pytest.raises(shoal.errors.ModelError, match="live engine"):
            shoal.initialize(model=model, optimizer=sgd(model), config=config(1))
        engine.destroy()
        engine = shoal.initialize(model=model, optimizer=sgd(model), config=config(1))[0]
        difference = engine(**mine)["loss"].item() - twin(**mine)["loss"].item()
        engine.destroy()
        return difference

    assert all(abs(difference) < 1e-6 for difference in run_ranks(WORLD, job))
