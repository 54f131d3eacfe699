"""``load_hf``: the same bits as a plain load, and of sharded parameters each rank reads its own range only."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal import zero
from shoal.checkpoint.formats.huggingface import write_huggingface
from shoal.checkpoint.loading_hf import load_hf
from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.storage import _LocalReader
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import CheckpointError, UsageError
from shoal.mesh import Mesh
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel.tensor import Grid, parallelize, parallelize_grid
from shoal.sharding import parts
from shoal.sharding.layout import ParameterSpec
from tests.helpers.formats_source import MemorySource
from tests.helpers.models import HIDDEN, Adapted, FrozenIntegers, OddParameters, Plain, SeveralDtypes, WithBuffers
from tests.helpers.tensor_cases import tp_communicator
from tests.helpers.training import STAGES, are_bit_equal, config, make, run_steps, start


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of a model whose head is tied: the head's name is not there."""
    return {name: value.detach().clone() for name, value in model.state_dict().items() if name != "head.weight"}


def write(folder: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> Path:
    write_huggingface(MemorySource({MODEL: tensors}), folder, dtype=dtype, max_file_nbytes=3000)
    return folder


@contextmanager
def counting_bytes() -> Iterator[Counter[str]]:
    """Bytes that each thread reads of files, beside headers: those lie at offsets 0 and 8."""
    read: Counter[str] = Counter()
    original = _LocalReader.read_into

    def read_into(self: _LocalReader, offset: int, target: memoryview) -> None:
        if offset > 8:
            read[threading.current_thread().name] += target.nbytes
        original(self, offset, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_LocalReader, "read_into", read_into)
        yield read


def build_sharded(factory: type[nn.Module] = Plain) -> nn.Module:
    with zero.Init():
        return factory()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, whole. Every rank calls."""
    with zero.GatheredParameters(list(model.parameters())):
        found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {**found, **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


MODELS = [Plain, OddParameters, WithBuffers, SeveralDtypes, FrozenIntegers]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("factory", MODELS)
def test_a_model_of_zero_init_gets_the_bits_of_a_plain_load(
    tmp_path: Path, world: int, factory: type[nn.Module]
) -> None:
    expected = make(factory, seed=7)
    write(tmp_path / "m", weights_of(expected))

    def job() -> dict[str, torch.Tensor]:
        return whole(load_hf(build_sharded(factory), tmp_path / "m"))

    for found in run_ranks(world, job):
        assert are_bit_equal(found, tensors_of(expected))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_rank_reads_its_range_of_every_parameter_and_nothing_else(tmp_path: Path, world: int) -> None:
    tensors = weights_of(make(Plain, seed=7))
    write(tmp_path / "m", tensors)

    def job() -> None:
        model = build_sharded()
        load_hf(model, tmp_path / "m")

    with counting_bytes() as read:
        run_ranks(world, job)
    total = sum(value.numel() * 4 for value in tensors.values())
    assert total == 8400
    assert sum(read.values()) == total
    for rank in range(world):
        lengths = [-(-value.numel() // world) for value in tensors.values()]
        owned = [min(n, max(0, v.numel() - rank * n)) for n, v in zip(lengths, tensors.values(), strict=True)]
        assert read[f"rank-{rank}"] == 4 * sum(owned)
        assert abs(read[f"rank-{rank}"] - total / world) < 150


@pytest.mark.parametrize("kind", ["1d", "2d"])
def test_a_split_model_gets_its_parts_and_reads_only_the_rows_that_they_are_of(tmp_path: Path, kind: str) -> None:
    saved = GPT(GPTConfig(67, 8, num_layers=1, hidden_size=48, num_heads=6))
    folder = write(tmp_path / "weights", weights_of(saved))

    def on_a_rank() -> int:
        torch.manual_seed(9)
        model = GPT(saved.config)
        if kind == "1d":
            split = parallelize(model, tp_communicator()).parts
        else:
            split = parallelize_grid(model, Grid.open(current_world(), Mesh.of(4, tp=4), "2d"))
        load_hf(model, folder, parts=split)
        num_bytes = 0
        for name, parameter in saved.named_parameters():
            part = split.get(name, ParameterSpec.whole(name, tuple(parameter.shape)))
            assert torch.equal(model.get_parameter(name), parts.cut(parameter, part)), name
            num_bytes += parameter.nbytes * part.shape[0] // part.global_shape[0]
        out = "blocks.0.attention.out.weight"
        wrong = {**split, out: replace(split[out], global_shape=(49, 48))}
        with pytest.raises(CheckpointError, match=rf"{out} is \[48, 48\] in the folder and \[49, 48\]"):
            load_hf(model, folder, parts=wrong)
        return num_bytes

    with counting_bytes() as read:
        expected = run_ranks(4, on_a_rank)
    assert sorted(read.values()) == sorted(expected)


FEW, COLUMNS = ((1, 3), (6, 7)), ((0, 2),)


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ((((0, 7),), FEW, COLUMNS), [(16 * row, 16 * row + 16) for row in range(7)]),
        ((((2, 5),), FEW, COLUMNS), [(32, 48), (48, 64), (64, 80)]),
        ((FEW[:1], ((0, 8),), COLUMNS), [(16, 32), (32, 48)]),
        ((((0, 7),), ((0, 8),), ((1, 2),)), [(20 * row, min(20 * row + 20, 112)) for row in range(6)]),
        ((((3, 3),), ((0, 8),), COLUMNS), [(48, 48)]),
    ],
)
def test_a_part_is_read_in_blocks_of_its_rows(
    monkeypatch: pytest.MonkeyPatch, local: Any, expected: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(parts, "_READ_NUMEL", 20)
    whole = torch.arange(7 * 8 * 2).view(7, 8, 2)
    asked: list[tuple[int, int]] = []

    def read_range(begin: int, end: int) -> torch.Tensor:
        asked.append((begin, end))
        return whole.view(-1)[begin:end]

    part = ParameterSpec.part("weight", (7, 8, 2), local)
    assert torch.equal(parts.read_part(part, read_range), parts.cut(whole, part))
    assert asked == expected


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_live_engine_goes_on_from_the_loaded_weights(tmp_path: Path, stage: int, world: int) -> None:
    source = make(Plain, seed=7)
    write(tmp_path / "m", weights_of(source))

    def job() -> tuple[dict[str, torch.Tensor], list[float]]:
        engine = start(Plain, config(stage))
        load_hf(engine.module, tmp_path / "m")
        found = whole(engine.module)
        main_parameters = {name: engine.access.full_parameter(p) for name, p in engine.module.named_parameters()}
        assert are_bit_equal(main_parameters, {name: found[name] for name in main_parameters})
        losses = run_steps(engine, 2)
        engine.destroy()
        return found, losses

    def fresh() -> list[float]:
        engine = start(lambda: load_hf(Plain(), tmp_path / "m"), config(stage))
        losses = run_steps(engine, 2)
        engine.destroy()
        return losses

    expected = run_ranks(world, fresh)
    for (found, losses), plain in zip(run_ranks(world, job), expected, strict=True):
        assert are_bit_equal(found, tensors_of(source))
        assert losses == plain


class WideAdapted(Adapted):
    def __init__(self) -> None:
        super().__init__(hidden=96)


def test_at_stage_3_a_live_engines_rank_reads_what_it_owns(tmp_path: Path) -> None:
    tensors = weights_of(make(WideAdapted, seed=7))
    write(tmp_path / "m", tensors)
    total = sum(value.numel() * 4 for value in tensors.values())

    def job() -> dict[str, torch.Tensor]:
        engine = start(WideAdapted, config(3))
        load_hf(engine.module, tmp_path / "m")
        found = whole(engine.module)
        engine.destroy()
        return found

    with counting_bytes() as read:
        results = run_ranks(2, job)
    assert sum(read.values()) == total
    assert all(0.45 * total < read[f"rank-{rank}"] < 0.55 * total for rank in range(2))
    for found in results:  # frozen parameters too
        assert are_bit_equal(found, tensors_of(make(WideAdapted, seed=7)))


@pytest.mark.parametrize("stage", [1, 3])
def test_main_parameters_keep_the_precision_of_the_file(tmp_path: Path, stage: int) -> None:
    source = make(Plain, seed=7)
    write(tmp_path / "m", weights_of(source))

    def job() -> bool:
        engine = start(Plain, config(stage, bf16={"enabled": True}))
        load_hf(engine.module, tmp_path / "m")
        main_parameters = {name: engine.access.full_parameter(p) for name, p in engine.module.named_parameters()}
        values = whole(engine.module)
        engine.destroy()
        expected = tensors_of(source)
        return are_bit_equal(main_parameters, expected) and are_bit_equal(
            values, {name: value.bfloat16() for name, value in expected.items()}
        )

    assert run_ranks(2, job) == [True, True]


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_dtype_casts_the_model_first(tmp_path: Path, is_sharded: bool) -> None:
    source = make(Plain, seed=7)
    write(tmp_path / "m", weights_of(source))

    def job() -> dict[str, torch.Tensor]:
        model = build_sharded() if is_sharded else make(Plain)
        load_hf(model, tmp_path / "m", dtype=torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model.head.weight is model.embedding.weight
        return whole(model)

    for found in run_ranks(2, job):
        assert are_bit_equal(found, {name: value.bfloat16() for name, value in tensors_of(source).items()})


def test_a_file_of_another_dtype_is_cast_to_the_parameters(tmp_path: Path) -> None:
    source = make(Plain, seed=7)
    write(tmp_path / "m", weights_of(source), torch.float16)
    model = load_hf(make(Plain), tmp_path / "m")
    assert are_bit_equal(tensors_of(model), {name: v.half().float() for name, v in tensors_of(source).items()})


def test_a_tied_weight_is_found_by_any_of_its_names(tmp_path: Path) -> None:
    source = make(Plain, seed=7)
    tensors = weights_of(source)
    tensors["head.weight"] = tensors.pop("embedding.weight")
    write(tmp_path / "m", tensors)
    model = load_hf(make(Plain), tmp_path / "m")
    assert torch.equal(model.embedding.weight, source.embedding.weight)
    assert model.head.weight is model.embedding.weight


class WithPrefix(nn.Module):
    base_model_prefix = "body"
    _keys_to_ignore_on_load_unexpected = [r"rotary\."]

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)


def test_a_base_models_names_fit_a_model_with_a_head(tmp_path: Path) -> None:
    tensors = {"weight": torch.ones(2, 2), "bias": torch.ones(2), "rotary.inv_freq": torch.ones(3)}
    write(tmp_path / "m", tensors)
    assert load_hf(WithPrefix(), tmp_path / "m").body.weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]


# differences


def test_all_differences_are_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    tensors = weights_of(make(Plain, seed=7))
    tensors["blocks.0.up.weight"] = torch.ones(2, 3)
    tensors["extra.weight"] = torch.ones(2)
    del tensors["norm.bias"], tensors["unused.weight"]
    write(tmp_path / "m", tensors)

    def job() -> str:
        model = build_sharded()
        before = whole(model)
        with pytest.raises(CheckpointError) as caught:
            load_hf(model, tmp_path / "m")
        assert are_bit_equal(whole(model), before)
        return str(caught.value)

    for text in run_ranks(2, job):
        assert text.splitlines() == [
            "[checkpoint-mismatch] the weights are of another model than Plain:",
            "  missing in the folder (2):",
            "    norm.bias",
            "    unused.weight",
            "  not in the model (1):",
            "    extra.weight",
            "  shapes differ (1):",
            "    blocks.0.up.weight is [2, 3] in the folder and [24, 12] in the model",
            f"  where: {tmp_path / 'm'}",
            "  do: load a folder of this model; strict=False skips names that are missing or not in the model.",
        ]


def test_without_strict_names_may_differ_and_shapes_may_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = make(Plain, seed=7)
    tensors = weights_of(source)
    del tensors["norm.bias"]
    tensors["extra.weight"] = torch.ones(2)
    write(tmp_path / "m", tensors)
    model = make(Plain)
    nn.init.constant_(model.norm.bias, 3.0)
    with caplog.at_level("INFO", logger="shoal"):
        load_hf(model, tmp_path / "m", strict=False)
    assert caplog.messages[-1] == (
        f"loaded {len(tensors) - 1} tensors of Plain from {tmp_path / 'm'};"
        " 1 of the model keep their values: norm.bias; 1 of the folder are left out: extra.weight."
    )
    assert torch.equal(model.norm.weight, source.norm.weight)
    assert model.norm.bias.tolist() == [3.0] * HIDDEN
    tensors["norm.weight"] = torch.ones(HIDDEN + 1)
    write(tmp_path / "n", tensors)
    with pytest.raises(CheckpointError, match=r"norm.weight is \[13\] in the folder and \[12\] in the model"):
        load_hf(model, tmp_path / "n", strict=False)


def test_what_cannot_be_filled_is_said(tmp_path: Path) -> None:
    write(tmp_path / "m", weights_of(make(Plain)))
    with torch.device("meta"):
        model = Plain()
    with pytest.raises(UsageError, match="meta device") as caught:
        load_hf(model, tmp_path / "m")
    assert caught.value.code == "load-hf-meta"

    def job() -> None:
        engine = start(Plain, config(3))
        with pytest.raises(UsageError, match="dtypes come from the config"):
            load_hf(engine.module, tmp_path / "m", dtype=torch.bfloat16)
        with zero.GatheredParameters(engine.module.head.weight):
            with pytest.raises(UsageError, match="inside GatheredParameters"):
                load_hf(engine.module, tmp_path / "m")
        engine.destroy()

    run_ranks(2, job)


def test_what_is_loaded_inside_an_open_context_replaces_what_code_has_set_there(tmp_path: Path) -> None:
    source = make(Plain, seed=7)
    write(tmp_path / "m", weights_of(source))

    def job() -> dict[str, torch.Tensor]:
        with zero.Init():
            model = Plain()
            nn.init.zeros_(model.norm.weight)
            load_hf(model, tmp_path / "m")
        with zero.GatheredParameters(model.norm.weight):
            with pytest.raises(UsageError, match="inside GatheredParameters"):
                load_hf(model, tmp_path / "m")
        return whole(model)

    for found in run_ranks(2, job):
        assert are_bit_equal(found, tensors_of(source))


def test_a_configuration_needs_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m", weights_of(make(Plain)))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="needs 'transformers'") as caught:
        load_hf({"hidden": 3}, tmp_path / "m")
    assert caught.value.code == "load-hf-transformers"
