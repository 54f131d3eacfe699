"""Mixture-of-experts models of Transformers through the engine: training, building on the meta device, loading."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from shoal.checkpoint.formats.huggingface import SafetensorsWeights
from shoal.checkpoint.loading_hf import load_hf
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import ShoalError
from tests.clients.test_expert_models import TOKENS, build

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")

pytestmark = pytest.mark.filterwarnings("default")

transformers.utils.logging.disable_progress_bar()  # its thread would stay

STEPS = 3


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "gradient_clipping": 0.5,
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        **more,
    }


def train_alone(model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        for tokens in TOKENS:
            (model(input_ids=tokens[None], labels=tokens[None]).loss / len(TOKENS)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(engine: Any, tokens: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    tokens = TOKENS[engine.axes.batch.rank][None] if tokens is None else tokens
    for _ in range(STEPS):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    values: dict[str, torch.Tensor] = engine.module_state_dict()
    return values


@pytest.mark.parametrize(
    ("family", "stage"), [("mixtral", 0), ("gpt_oss", 1), ("deepseek_v3", 2), ("mixtral", 3), ("llama4", 3)]
)
def test_a_family_trains_as_on_one_rank(family: str, stage: int) -> None:
    model = build(family)
    copies = [copy.deepcopy(model) for _ in TOKENS]
    expected = train_alone(model)

    def job() -> dict[str, torch.Tensor]:
        engine, *_ = shoal.initialize(model=copies[current_world().rank], config=settings(stage))
        return train(engine)

    for found in run_ranks(2, job):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("dbrx", {"expert_parallel": {"enabled": True, "autoep_size": 2, "rebalance_every": 1}}),
        ("llama4", {"parallel": {"tp": 2}, "train_micro_batch_size_per_gpu": 2}),
    ],
    ids=["DBRX, whose experts move", "Llama 4 beside tp"],
)
def test_a_family_with_a_layout_of_its_own_is_loaded_by_ranks_that_hold_their_experts(
    tmp_path: Path, family: str, more: dict[str, Any]
) -> None:
    model = build(family, use_cache=False)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = [type(model)(copy.deepcopy(model.config)) for _ in range(2)]
    expected = train_alone(model)

    def job() -> dict[str, torch.Tensor]:
        mine = empty[current_world().rank]
        engine, *_ = shoal.initialize(model=mine, config=settings(1, **more))
        load_hf(mine, tmp_path)
        return train(engine, TOKENS if "parallel" in more else None)

    for found in run_ranks(2, job):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=2e-6, msg=name)


LAYOUTS = ("one by one", "stacked")


def save(model: Any, folder: Path, layout: str) -> Path:
    """In the layout of the Hub, or in that of the model."""
    if layout == "stacked":
        from safetensors.torch import save_file

        folder.mkdir()
        save_file(
            {name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors"
        )
    else:
        model.save_pretrained(folder)
    return folder


class WholeExperts(TorchDispatchMode):
    """Records tensors with all experts of a layer that are not on the meta device."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type != "meta" and out.shape in self.shapes:
            self.found.append(str(func))
        return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_model_of_the_meta_device_is_loaded_by_ranks_that_hold_and_read_their_experts_only(
    tmp_path: Path, family: str, layout: str
) -> None:
    model = build(family)
    folder = save(model, tmp_path / "model", layout)
    names = SafetensorsWeights(folder).tensors
    assert any(".experts.7." in name for name in names) == (layout == "one by one")
    is_old = family == "mixtral" and layout == "one by one"
    assert any(".block_sparse_moe." in name for name in names) == is_old
    values = model.state_dict()
    experts = [value for name, value in values.items() if ".experts." in name]
    read: dict[int, Counter[bool]] = {rank: Counter() for rank in range(2)}
    original = SafetensorsWeights.read_range

    def read_range(self: Any, name: str, begin: int, end: int) -> torch.Tensor:
        read[current_world().rank][".experts." in name] += end - begin
        return original(self, name, begin, end)

    def job() -> tuple[dict[str, torch.Tensor], int]:
        with torch.device("meta"):
            empty = type(model)(copy.deepcopy(model.config))
        with WholeExperts({value.shape for value in experts}) as whole:
            engine, *_ = shoal.initialize(model=empty, config=settings(2))
            load_hf(empty, folder)
        assert whole.found == []
        stored = sum(p.numel() for name, p in empty.named_parameters() if ".experts." in name)
        return engine.module_state_dict(), stored

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsWeights, "read_range", read_range)
        for found, stored in run_ranks(2, job):
            assert stored == sum(value.numel() for value in experts) // 2
            for name, value in values.items():
                assert torch.equal(found[name], value), name
    for counts in read.values():
        assert counts[True] == sum(value.numel() for value in experts) // 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_of_zero_init_reads_its_shards_of_all_experts(tmp_path: Path, layout: str) -> None:
    model = build("mixtral")
    folder = save(model, tmp_path / "model", layout)
    model.config.architectures = ["MixtralForCausalLM"]

    def job() -> dict[str, torch.Tensor]:
        loaded = load_hf(copy.deepcopy(model.config), folder)
        engine, *_ = shoal.initialize(model=loaded, config=settings(3))
        values: dict[str, torch.Tensor] = engine.module_state_dict()
        return values

    for found in run_ranks(2, job):
        for name, value in model.state_dict().items():
            assert torch.equal(found[name], value), name


def test_the_weights_that_shoal_saves_are_whole_and_load_in_transformers(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    copies = [copy.deepcopy(model) for _ in TOKENS]

    def job() -> None:
        engine, *_ = shoal.initialize(model=copies[current_world().rank], config=settings(3))
        engine.save_16bit_model(tmp_path)

    run_ranks(2, job)
    model.config.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("size", "stage", "more"),
    [
        (2, 3, {"parallel": {"tp": 2}, "train_micro_batch_size_per_gpu": 2}),
        (4, 1, {"parallel": {"pp": 2}}),
        (2, 2, {"activation_checkpointing": {"modules": ["MixtralDecoderLayer"]}}),
        (2, 1, {"expert_parallel": {"enabled": True, "autoep_size": 2, "overlap": 2, "preset_model": "mixtral"}}),
        (2, 2, {"expert_parallel": {"enabled": True, "autoep_size": 2, "rebalance_every": 1}}),
    ],
    ids=["tp", "pp", "recomputation", "overlap", "rebalancing"],
)
def test_a_family_trains_as_on_one_rank_beside(size: int, stage: int, more: dict[str, Any]) -> None:
    model = build("mixtral", use_cache=False)
    copies = [copy.deepcopy(model) for _ in range(size)]
    expected = train_alone(model)

    def job() -> dict[str, torch.Tensor]:
        engine, *_ = shoal.initialize(model=copies[current_world().rank], config=settings(stage, **more))
        if engine.axes.get("pp") is None:
            return train(engine, TOKENS.chunk(engine.axes.batch.size)[engine.axes.batch.rank])
        tokens = TOKENS[engine.axes.batch.rank][None]
        for _ in range(STEPS):
            engine.train_batch(iter([{"input_ids": tokens, "labels": tokens}]))
        values: dict[str, torch.Tensor] = engine.module_state_dict()
        return values

    for found in run_ranks(size, job):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=2e-6, msg=name)


def test_bf16_trains_and_a_checkpoint_loads_on_other_expert_parallel_ranks(tmp_path: Path) -> None:
    model = build("deepseek_v3")
    models = [copy.deepcopy(model) for _ in range(3)]

    def before() -> tuple[dict[str, torch.Tensor], float]:
        engine, *_ = shoal.initialize(model=models[current_world().rank], config=settings(3, bf16={"enabled": True}))
        train(engine)
        engine.save_checkpoint(tmp_path)
        tokens = TOKENS[:1]
        return engine.module_state_dict(), float(engine(input_ids=tokens, labels=tokens).loss.detach())

    def after() -> tuple[dict[str, torch.Tensor], float]:
        alone = {"expert_parallel": {"enabled": True}, "bf16": {"enabled": True}}
        engine, *_ = shoal.initialize(model=models[2], config=settings(1, **alone))
        engine.load_checkpoint(tmp_path)
        tokens = TOKENS[:1]
        return engine.module_state_dict(), float(engine(input_ids=tokens, labels=tokens).loss.detach())

    saved = run_ranks(2, before)
    ((values, loss),) = run_ranks(1, after)
    assert values.keys() == saved[0][0].keys()
    assert all(torch.equal(value, saved[0][0][name]) for name, value in values.items())
    assert loss == pytest.approx(saved[0][1], rel=1e-2)


def test_a_bias_without_auxiliary_loss_moves_against_the_load_and_is_the_same_on_all_ranks() -> None:
    section = {"enabled": True, "autoep_size": 2, "load_balance_coeff": 0.01}

    def job() -> list[torch.Tensor]:
        engine, *_ = shoal.initialize(model=build("mixtral"), config=settings(1, expert_parallel=section))
        train(engine)
        load = engine.expert_load()
        assert [sum(counts) for counts in load.values()] == [2 * TOKENS.numel()] * 2
        return [buffer.clone() for name, buffer in engine.named_buffers() if name.endswith("expert_bias")]

    first, second = run_ranks(2, job)
    assert len(first) == 2 and all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    for bias in first:
        assert 0 < float(bias.abs().max()) <= 0.03 + 1e-6


def test_a_router_that_gives_nan_is_named() -> None:
    model = build("mixtral")
    model.model.layers[1].mlp.gate.weight.data[3] = float("nan")

    def job() -> None:
        engine, *_ = shoal.initialize(model=copy.deepcopy(model), config=settings(0, precision={"nonfinite": "raise"}))
        with pytest.raises(ShoalError, match=r"model.layers.1.mlp.experts"):
            train(engine)

    run_ranks(2, job)


@pytest.mark.parametrize("size", [1, 2])
def test_a_second_engine_takes_the_model_of_the_first(size: int) -> None:
    section = {"enabled": True, "autoep_size": size}
    model = build("mixtral")
    copies = [copy.deepcopy(model) for _ in range(size)]

    def job() -> dict[str, torch.Tensor]:
        mine = copies[current_world().rank]
        for _ in range(2):
            engine, *_ = shoal.initialize(model=mine, config=settings(2, expert_parallel=section))
            values: dict[str, torch.Tensor] = engine.module_state_dict()
            engine.destroy()
        return values

    for found in run_ranks(size, job):
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
