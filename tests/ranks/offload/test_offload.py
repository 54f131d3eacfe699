"""Optimizer state and parameters in host memory, optimizer state on a disk: the same numbers, on another tier.

On CPU ranks the host's memory is the device's. Where a test says *apart*, the two are treated as different memories, so
that every copy between them is made, as on an accelerator.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.build.settings import ZeroSettings
from shoal.comm.threads import run_ranks
from shoal.errors import ConfigError, TierError
from shoal.observe.placement_table import Table, cells_of
from shoal.sharding.placement import Tier
from tests.helpers.any_two import any_two

VOCABULARY = 13


class Model(torch.nn.Module):
    """A tied head, a frozen matrix, two blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 6)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(2)])
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.head = torch.nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(self.frozen(hidden))


def config(stage: int, precision: str, optimizer: str, places: tuple[str, ...], accumulation: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    for place in places:
        zero[f"offload_{place}"] = {"device": "cpu", "pin_memory": True}
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": optimizer, "params": {"lr": 0.05, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "units": {"classes": ["Linear"]},
    }
    if precision != "fp32":
        found[precision] = {"enabled": True}
    return found


MODEL = Model()  # ranks as threads share the generator, so that each must not draw values of its own


def train(settings: dict[str, Any], folder: str | None = None, steps: int = 3) -> tuple[list[float], dict[str, Any]]:
    engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
    losses = []
    if folder is not None and Path(folder).exists():
        engine.load_checkpoint(folder)
    for step in range(steps * engine.gradient_accumulation_steps()):
        generator = torch.Generator().manual_seed(10 * step + engine.global_rank)
        tokens = torch.randint(VOCABULARY, (2, 5), generator=generator)
        loss = torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    if folder is not None and not Path(folder).exists():
        engine.save_checkpoint(folder)
    values = {name: engine.access.full_parameter(p) for name, p in engine.module.named_parameters() if p.requires_grad}
    values |= engine.module_state_dict()
    engine.destroy()
    return losses, values


def make_apart(monkeypatch: pytest.MonkeyPatch, is_apart: bool | None = True) -> None:
    """Gradients that autograd keeps are summed for the norm in another order, so neither side leaves them there."""
    settings = partial(ZeroSettings, is_host_separate=is_apart)
    monkeypatch.setattr("shoal.engine.settings.ZeroSettings", settings)


@any_two(
    {
        "size": [1, 2, 3],
        "precision": ["fp32", "bf16", "fp16"],
        "stage, places": [
            *((stage, ("optimizer",)) for stage in (1, 2, 3)),
            (3, ("param",)),
            (3, ("optimizer", "param")),
        ],
        "optimizer, accumulation": [("AdamW", 1), ("AdamW", 2), ("Lamb", 1)],
    }
)
def test_training_from_host_memory_gives_the_same_bits(
    size: int,
    precision: str,
    stage: int,
    places: tuple[str, ...],
    optimizer: str,
    accumulation: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_apart(monkeypatch, is_apart=False)
    plain = run_ranks(size, train, config(stage, precision, optimizer, (), accumulation))
    make_apart(monkeypatch)
    away = run_ranks(size, train, config(stage, precision, optimizer, places, accumulation))
    for (losses, values), (other_losses, other_values) in zip(plain, away, strict=True):
        assert losses == other_losses
        assert all(torch.equal(values[name], other_values[name]) for name in values)


def client_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


@pytest.mark.parametrize("places", [("optimizer",), ("optimizer", "param")])
def test_an_optimizer_that_is_not_fused_is_updated_by_the_cpu_optimizer_with_its_own_bits(
    places: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(places: tuple[str, ...]) -> tuple[dict[str, Any], float]:
        model = copy.deepcopy(MODEL)
        settings = config(3, "bf16", "AdamW", places, 1)
        del settings["optimizer"]
        engine, *_ = shoal.initialize(model=model, optimizer=client_adamw(model), config=settings)
        for step in range(3):
            tokens = torch.arange(10).view(2, 5) + step
            engine.backward(engine(tokens % VOCABULARY).float().square().mean())
            engine.step()
        values = engine.module_state_dict()
        cpu_optimizer = engine.sharding.step.cpu_optimizer
        seconds = 0.0 if cpu_optimizer is None else cpu_optimizer.update_seconds
        engine.destroy()
        return values, seconds

    make_apart(monkeypatch, is_apart=False)
    (plain, _), *_ = run_ranks(2, run, ())
    assert not [line for line in caplog.messages if line.startswith("offload_optimizer")]
    make_apart(monkeypatch)
    (away, seconds), *_ = run_ranks(2, run, places)
    assert seconds > 0  # of updates in the CPU optimizer's threads
    assert all(torch.equal(plain[name], away[name]) for name in plain)
    assert len([line for line in caplog.messages if "AdamW was built without fused=True" in line]) == 1


def test_an_optimizer_of_whole_matrices_says_where_it_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_apart(monkeypatch)
    run_ranks(2, train, config(2, "bf16", "Muon", ("optimizer",), 1), None, 1)
    assert len([line for line in caplog.messages if "Muon's matrices are orthogonalized on the device" in line]) == 1


def test_a_checkpoint_moves_between_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path / "c")
    straight = run_ranks(2, train, config(3, "bf16", "AdamW", (), 1), None, 6)
    first = run_ranks(2, train, config(3, "bf16", "AdamW", (), 1), folder)
    make_apart(monkeypatch)
    run_ranks(2, train, config(3, "bf16", "AdamW", ("optimizer", "param"), 1), folder, 0)
    moved = run_ranks(2, loaded, config(3, "bf16", "AdamW", ("optimizer", "param"), 1), folder)
    assert len(straight) == 2
    for (_, values), other in zip(first, moved, strict=True):
        assert all(torch.equal(values[name], other[name]) for name in values)


def loaded(settings: dict[str, Any], folder: str) -> dict[str, Any]:
    engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
    engine.load_checkpoint(folder)
    values = {name: engine.access.full_parameter(p) for name, p in engine.module.named_parameters() if p.requires_grad}
    values |= engine.module_state_dict()
    engine.destroy()
    return values


def held(settings: dict[str, Any]) -> tuple[dict[tuple[str, str], int], list[str]]:
    engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
    tokens = torch.arange(10).view(2, 5)
    engine.backward(engine(tokens).float().mean())
    engine.step()
    found: dict[tuple[str, str], int] = {}
    for entry in engine.memory_report().entries:
        found[entry.kind, entry.tier] = found.get((entry.kind, entry.tier), 0) + entry.nbytes
    tiers = [cells_of(row)[-1] for row in Table.of(group.row for group in engine.sharded.groups)]
    engine.destroy()
    return found, tiers


def test_the_ledger_and_the_table_show_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    make_apart(monkeypatch)
    found, tiers = run_ranks(2, held, config(3, "bf16", "AdamW", ("optimizer", "param"), 1))[0]
    assert found["master", "host"] > 0
    assert found["optimizer state", "host"] == 2 * found["master", "host"]
    assert found["parameter", "host"] > 0
    assert ("master", "device") not in found
    assert ("parameter", "device") not in found
    assert ("gradient", "device") not in found
    assert set(tiers) == {"host"}


def test_a_stage_that_cannot_offload_what_was_asked_is_an_error() -> None:
    # Parameters below stage 3 are a note, as in DeepSpeed: tests/unit/config/test_load.py.
    with pytest.raises(ConfigError, match="offload"):
        shoal.initialize(model=copy.deepcopy(MODEL), config=config(0, "fp32", "AdamW", ("optimizer",), 1))


def test_an_offloaded_tier_is_one_that_is_not_the_devices() -> None:
    cpu = torch.device("cpu")
    assert not ZeroSettings().is_offloaded(Tier.HOST, cpu)
    assert ZeroSettings().is_offloaded(Tier.HOST, torch.device("cuda"))
    assert not ZeroSettings().is_offloaded(Tier.DEVICE, torch.device("cuda"))
    assert ZeroSettings(is_host_separate=True).is_offloaded(Tier.HOST, cpu)


def on_disk(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    settings["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder)}
    return settings


@any_two(
    {
        "size": [1, 2, 3],
        "precision": ["fp32", "bf16", "fp16"],
        "stage": [1, 2, 3],
        "optimizer, accumulation": [("AdamW", 2), ("SGD", 1), ("Lamb", 1), ("Muon", 1)],
    }
)
def test_training_from_a_disk_gives_the_same_bits(
    size: int, precision: str, stage: int, optimizer: str, accumulation: int, tmp_path: Path
) -> None:
    plain = run_ranks(size, train, config(stage, precision, optimizer, (), accumulation))
    away = run_ranks(size, train, on_disk(config(stage, precision, optimizer, (), accumulation), tmp_path))
    for (losses, values), (other_losses, other_values) in zip(plain, away, strict=True):
        assert losses == other_losses
        assert all(torch.equal(values[name], other_values[name]) for name in values)
    assert list(tmp_path.iterdir()) == []


def test_disk_and_host_tiers_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_apart(monkeypatch, is_apart=False)
    plain = run_ranks(2, train, config(3, "bf16", "AdamW", (), 1))
    make_apart(monkeypatch)
    away = run_ranks(2, train, on_disk(config(3, "bf16", "AdamW", ("param",), 1), tmp_path))
    for (losses, values), (other_losses, other_values) in zip(plain, away, strict=True):
        assert losses == other_losses
        assert all(torch.equal(values[name], other_values[name]) for name in values)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_a_checkpoint_goes_to_and_from_a_disk(precision: str, first: bool, second: bool, tmp_path: Path) -> None:
    def settings(is_on_disk: bool) -> dict[str, Any]:
        plain = config(2, precision, "AdamW", (), 1)
        (tmp_path / "disk").mkdir(exist_ok=True)
        return on_disk(plain, tmp_path / "disk") if is_on_disk else plain

    straight = run_ranks(2, train, settings(False), None, 6)
    folder = str(tmp_path / "c")
    begun = run_ranks(2, train, settings(first), folder)
    ended = run_ranks(2, go_on, settings(second), folder)
    for (losses, values), (early, _), (late, other) in zip(straight, begun, ended, strict=True):
        assert losses == early + late
        assert all(torch.equal(values[name], other[name]) for name in values)


def go_on(settings: dict[str, Any], folder: str) -> tuple[list[float], dict[str, Any]]:
    """Steps 3 to 5, from a checkpoint."""
    engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
    engine.load_checkpoint(folder)
    losses = []
    for step in range(3, 6):
        generator = torch.Generator().manual_seed(10 * step + engine.global_rank)
        tokens = torch.randint(VOCABULARY, (2, 5), generator=generator)
        loss = torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    values = {name: engine.access.full_parameter(p) for name, p in engine.module.named_parameters() if p.requires_grad}
    values |= engine.module_state_dict()
    engine.destroy()
    return losses, values


def accessed(settings: dict[str, Any]) -> list[torch.Tensor]:
    engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
    tokens = torch.arange(10).view(2, 5)
    engine.backward(engine(tokens).float().square().mean())
    engine.step()
    weight = engine.module.blocks[0].weight
    found = [engine.access.full_parameter(weight), engine.access.full_optimizer_state(weight, "exp_avg")]
    engine.access.set_full_optimizer_state(weight, "exp_avg", torch.full((6, 6), 0.25))
    engine.access.set_full_parameter(weight, torch.full((6, 6), 0.5))
    found += [engine.access.full_parameter(weight), engine.access.full_optimizer_state(weight, "exp_avg")]
    with shoal.zero.GatheredParameters([weight], modifier_rank=0):
        weight.data.fill_(0.125)
    found += [engine.access.full_parameter(weight), weight.detach().clone() if engine.plan.zero.stage < 3 else found[0]]
    local = engine.access.local_optimizer_state(weight, "exp_avg")
    found += [torch.empty(0) if local is None else local.clone()]
    found += [value for value in engine.optimizer.state[weight].values() if value.dim()]
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_what_reads_and_writes_state_finds_it_on_the_disk(stage: int, tmp_path: Path) -> None:
    plain = run_ranks(2, accessed, config(stage, "bf16", "AdamW", (), 1))
    away = run_ranks(2, accessed, on_disk(config(stage, "bf16", "AdamW", (), 1), tmp_path))
    for values, others in zip(plain, away, strict=True):
        assert len(values) == len(others)
        assert all(torch.equal(value, other) for value, other in zip(values, others, strict=True))


def test_state_on_a_disk_is_in_the_ledger_and_few_buckets_of_it_in_memory(tmp_path: Path) -> None:
    found, tiers = run_ranks(2, held, on_disk(config(3, "bf16", "AdamW", (), 1), tmp_path))[0]
    assert found["master", "disk"] > 0
    assert found["optimizer state", "disk"] == 2 * found["master", "disk"]
    assert set(tiers) == {"device/device/disk"}


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    settings = on_disk(config(1, "fp32", "AdamW", (), 1), tmp_path / "none")
    with pytest.raises(TierError, match="none"):
        shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
