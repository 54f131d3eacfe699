"""Experts of a list on host or disk: those that no token uses are neither read nor gathered, and no bit changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.comm.world import current_world
from shoal.memory.disk import DiskTier
from shoal.parallel.expert.dispatch import run_experts
from shoal.parallel.expert.held import ExpertsHeld, ExpertUsage, modules_with_experts
from shoal.parallel.expert.layer import Experts
from shoal.pipeline.module import PipelineModule
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.partition import UnitRules
from tests.helpers.expert_layers import WIDTH as LAYERS_WIDTH
from tests.helpers.expert_layers import Layers
from tests.helpers.models import VOCABULARY
from tests.helpers.training import BF16, adamw, batch, config, make, sgd, start_with
from tests.ranks.offload.test_offload import make_apart

WIDTH, INNER, NUM_EXPERTS, NUM_BLOCKS = 64, 256, 8, 2
EXPERT_NUMEL, STEPS = 2 * WIDTH * INNER, 3
AHEAD = {"device": "cpu", "super_offload": True}
Used = Callable[[int, int], tuple[int, int]]  # the two experts that a micro-batch of a rank uses


def pair(step: int, rank: int) -> tuple[int, int]:
    return 1, 6


def by_rank_and_step(step: int, rank: int) -> tuple[int, int]:
    return (rank + step) % NUM_EXPERTS, (3 * rank + 2 * step + 1) % NUM_EXPERTS


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(rows)))


class Block(nn.Module):
    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        held = ExpertsHeld(NUM_EXPERTS, ep_size, stack=None)
        self.experts = Experts(Expert(), held.num_local, None, held)

    def forward(self, x: torch.Tensor, used: tuple[int, int]) -> torch.Tensor:
        x = x + torch.tanh(self.inner(x))
        rows = x.flatten(0, -2)
        index = torch.tensor(used).expand(len(rows), 2)
        weights = self.router(rows).softmax(-1).gather(-1, index).to(rows.dtype)
        held = self.experts.deepspeed_experts.experts_held
        return x + run_experts(rows, index, weights, self.experts, held).view_as(x)


class Model(nn.Module):
    def __init__(self, ep_size: int = 1, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(ep_size) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, used: tuple[int, int]) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, used, use_reentrant=False) if self.recomputes else block(x, used)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def settings_of(ep: int, folder: Path | None, **sections: Any) -> dict[str, Any]:
    tier = {"device": "cpu"} if folder is None else {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0}
    zero = {"offload_param": tier, **sections.pop("zero_optimization", {})}
    return config(
        3,
        gradient_clipping=0.5,
        parallel={"ep": ep, **sections.pop("parallel", {})},
        expert_parallel={"gather_if_used": True, **sections.pop("expert_parallel", {})},
        zero_optimization=zero,
        **sections,
    )


def train(
    settings: dict[str, Any], used: Used, recomputes: bool, optimizer: Any = adamw
) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = start_with(make(partial(Model, settings["parallel"]["ep"], recomputes)), settings, optimizer)
    rank, losses = current_world().rank, []
    for index in range(STEPS * engine.gradient_accumulation_steps()):
        loss = engine(*batch(index, rank, current_world().size), used(index, rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.eval()
    with torch.no_grad():
        losses.append(float(engine(*batch(99, rank, current_world().size), used(99, rank))))
    values = engine.module_state_dict()
    engine.destroy()
    return losses, values


def alone(used: Used, num_ranks: int) -> dict[str, torch.Tensor]:
    """One process with all experts, whose every expert is called."""
    model = make(Model)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        for rank in range(num_ranks):
            (model(*batch(step, rank, num_ranks), used(step, rank)) / num_ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("size", "ep", "is_on_disk", "recomputes", "sections"),
    [
        (1, 1, True, False, {}),
        (1, 1, True, True, {"gradient_accumulation_steps": 2}),
        (2, 1, True, False, {}),
        (2, 2, False, False, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
        (4, 2, True, True, BF16),
        (4, 2, True, False, {"zero_optimization": {"overlap_comm": False, "stage3_prefetch_bucket_size": 0}}),
        (4, 2, False, False, {"parallel": {"dp_replicate": 2}}),
        (4, 4, False, True, {"gradient_accumulation_steps": 2}),
        (2, 2, True, False, {"expert_parallel": {"rebalance_every": 1}}),
        (2, 1, True, False, {**BF16, "zero_optimization": {"offload_optimizer": AHEAD}}),
    ],
)
def test_the_bits_are_those_of_a_run_that_gathers_every_expert(
    size: int,
    ep: int,
    is_on_disk: bool,
    recomputes: bool,
    sections: dict[str, Any],
    ranks: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_apart(monkeypatch)
    settings = settings_of(ep, tmp_path if is_on_disk else None, **sections)
    run = partial(train, settings, by_rank_and_step, recomputes)
    found = ranks(size, run)
    with monkeypatch.context() as patch:
        patch.setattr(ExpertUsage, "used", lambda self, place: None)
        expected = ranks(size, run)
    for (losses, values), (other_losses, other_values) in zip(found, expected, strict=True):
        assert losses == other_losses
        assert all(torch.equal(values[name], other) for name, other in other_values.items())


@pytest.mark.parametrize(("size", "ep", "is_on_disk"), [(1, 1, True), (2, 1, False), (4, 2, True)])
def test_parameters_are_those_of_one_process_that_calls_every_expert(
    size: int, ep: int, is_on_disk: bool, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    settings = settings_of(ep, tmp_path if is_on_disk else None)
    expected = alone(by_rank_and_step, size)
    for _, values in ranks(size, partial(train, settings, by_rank_and_step, False, sgd)):
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize(("size", "ep"), [(1, 1), (2, 1), (4, 2)])
def test_with_2_of_8_experts_used_those_are_read_and_gathered_alone(
    size: int, ep: int, ranks: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[tuple[int, str]] = Counter()
    gathered: Counter[tuple[int, str]] = Counter()
    before_read, before_gather = DiskTier.read, ParameterGroup.gather

    def count_read(tier: DiskTier, extent: Any, tensor: torch.Tensor, offset: int = 0) -> Any:
        read[current_world().rank, extent.name] += tensor.numel()
        return before_read(tier, extent, tensor, offset)

    def count_gather(group: ParameterGroup, **keys: Any) -> Any:
        gathered[current_world().rank, group.label] += 1
        return before_gather(group, **keys)

    monkeypatch.setattr(DiskTier, "read", count_read)
    monkeypatch.setattr(ParameterGroup, "gather", count_gather)

    def rank() -> tuple[dict[str, int], dict[str, int]]:
        engine = start_with(make(partial(Model, ep)), settings_of(ep, tmp_path), sgd)
        mine, world_size = current_world().rank, current_world().size
        for step in range(STEPS):
            before = dict(read), dict(gathered)  # the last step, which prefetches, is measured
            engine.backward(engine(*batch(step, mine, world_size), pair(step, mine)))
            after = dict(read), dict(gathered)
            engine.step()
        engine.destroy()
        found = [
            {key[1]: count - old.get(key, 0) for key, count in new.items() if key[0] == mine and "expert" in key[1]}
            for old, new in zip(before, after, strict=True)
        ]
        return found[0], found[1]

    for number, (nbytes, times) in enumerate(ranks(size, rank)):
        ep_rank, num_local = number % ep, NUM_EXPERTS // ep
        places = [expert % num_local for expert in pair(0, 0) if expert // num_local == ep_rank]
        names = [f"blocks.{block}.experts.deepspeed_experts.{place}" for block in range(NUM_BLOCKS) for place in places]
        shard_nbytes = EXPERT_NUMEL * 4 // (size // ep)
        assert {name: count for name, count in times.items() if count} == dict.fromkeys(names, 2)
        of_disk = {name.removeprefix("parameters: "): count for name, count in nbytes.items() if count}
        assert of_disk == dict.fromkeys(names, 2 * shard_nbytes)  # once in forward, once in backward


@pytest.mark.parametrize("ep", [1, 2])
def test_the_experts_of_a_replaced_list_are_gathered_if_used(
    ep: int, ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_apart(monkeypatch)
    monkeypatch.setattr("shoal.engine.settings.UnitRules", partial(UnitRules, min_block_numel=1))
    gathered: Counter[str] = Counter()
    before = ParameterGroup.gather

    def count(group: ParameterGroup, **keys: Any) -> Any:
        gathered[group.label] += 1
        return before(group, **keys)

    def rank() -> tuple[list[float], dict[str, torch.Tensor]]:
        settings = settings_of(ep, None, units={"names": ["layers.*"]}, expert_parallel={"enabled": True})
        optimizer = {"type": "SGD", "params": {"lr": 0.1}}
        engine = start_with(Layers("mixtral"), {**settings, "optimizer": optimizer}, None)
        generator = torch.Generator().manual_seed(current_world().rank)
        losses = []
        for _ in range(3):
            hidden = torch.randn(1, LAYERS_WIDTH, generator=generator, dtype=torch.float64)  # one token in all
            loss = engine(hidden).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        values = engine.module_state_dict()
        engine.destroy()
        return losses, values

    monkeypatch.setattr(ParameterGroup, "gather", count)
    found, few = ranks(2, rank), gathered.total()
    gathered.clear()
    monkeypatch.setattr(ExpertUsage, "used", lambda self, place: None)
    for (losses, values), (other_losses, other_values) in zip(found, ranks(2, rank), strict=True):
        assert losses == other_losses
        assert all(torch.equal(values[name], other) for name, other in other_values.items())
    assert few < gathered.total()


class RoutedByInput(nn.Module):
    """A block whose micro-batches use different experts."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = int(x.detach().abs().sum() * 1000) % (NUM_EXPERTS - 1)
        out: torch.Tensor = self.block(x, (first, first + 1))
        return out


def test_micro_batches_of_a_pipeline_gather_what_each_of_them_uses(
    ranks: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model() -> PipelineModule:
        layers = [nn.Embedding(VOCABULARY, WIDTH), RoutedByInput(), RoutedByInput(), nn.Linear(WIDTH, VOCABULARY)]
        return PipelineModule(layers, num_stages=2, loss_fn=lambda out, y: functional.cross_entropy(out[:, -1], y))

    def rank() -> list[float]:
        optimizer = {"type": "SGD", "params": {"lr": 0.1}}
        settings = settings_of(1, tmp_path, gradient_accumulation_steps=4, parallel={"pp": 2}, optimizer=optimizer)
        del settings["units"]
        engine = shoal.initialize(model=make(model), config=settings)[0]
        assert sum("expert" in unit.name for unit in engine.sharded.units) == NUM_EXPERTS
        batches = iter([(batch(index, 0, 1)[0], batch(index, 0, 1)[1][:, -1]) for index in range(12)])
        losses = [float(engine.train_batch(batches)) for _ in range(3)]
        engine.destroy()
        return losses

    found = ranks(2, rank)
    monkeypatch.setattr(ExpertUsage, "used", lambda self, place: None)
    assert found == ranks(2, rank)


def test_a_leaf_module_and_weight_norm_keep_experts_whole(tmp_path: Path) -> None:
    def units(change: Callable[[Model], object], **zero: Any) -> int:
        model = make(Model)
        change(model)
        engine = start_with(model, settings_of(1, tmp_path, zero_optimization=zero), sgd)
        loss = engine(*batch(0, 0, 1), pair(0, 0))
        engine.backward(loss)
        engine.step()
        assert loss.isfinite()
        found = sum("expert" in unit.name for unit in engine.sharded.units)
        engine.destroy()
        assert all(held.usage is None for _, _, held in modules_with_experts(model))
        return found

    assert units(lambda model: None, leaf_module={"classes": ["Experts"]}) == 0
    assert units(lambda model: None) == NUM_BLOCKS * NUM_EXPERTS
    assert units(lambda model: setattr(model.blocks[0], "_z3_leaf", True)) == NUM_EXPERTS
    expert = "experts.deepspeed_experts.0.up"
    assert units(lambda model: weight_norm(model.blocks[0].get_submodule(expert))) == NUM_BLOCKS * NUM_EXPERTS - 1


def test_a_checkpoint_of_experts_on_a_disk_loads_at_another_ep_on_the_device(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    def save() -> dict[str, torch.Tensor]:
        engine = start_with(make(partial(Model, 2)), settings_of(2, tmp_path / "disk"), adamw)
        mine = current_world().rank
        engine.backward(engine(*batch(0, mine, 2), by_rank_and_step(0, mine)))
        engine.step()
        engine.save_checkpoint(str(tmp_path / "saved"))
        return go_on(engine)

    def load() -> dict[str, torch.Tensor]:
        engine = start_with(make(Model), config(3, gradient_clipping=0.5), adamw)
        engine.load_checkpoint(str(tmp_path / "saved"))
        return go_on(engine)

    def go_on(engine: Any) -> dict[str, torch.Tensor]:
        mine = current_world().rank
        engine.backward(engine(*batch(1, mine, 2), by_rank_and_step(1, mine)))
        engine.step()
        values: dict[str, torch.Tensor] = engine.module_state_dict()
        engine.destroy()
        return values

    (tmp_path / "disk").mkdir()
    expected, found = ranks(2, save)[0], ranks(2, load)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


def on_gloo(_rank: int, _size: int, folder: str) -> dict[str, torch.Tensor]:
    return train(settings_of(1, Path(folder)), by_rank_and_step, False, sgd)[1]


def test_over_gloo_the_parameters_are_those_of_threads(
    gloo: Callable[..., Any], ranks: Callable[..., Any], tmp_path: Path
) -> None:
    values = gloo(2, on_gloo, str(tmp_path))[0]
    _, expected = ranks(2, train, settings_of(1, tmp_path), by_rank_and_step, False, sgd)[0]
    for name, value in expected.items():
        torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-6, msg=name)
