"""Stacked experts on host or disk: of each parameter only the experts that a token uses are read and gathered."""

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
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.comm.world import current_world
from shoal.memory.disk import DiskTier
from shoal.parallel.expert.dispatch import run_experts
from shoal.parallel.expert.held import ExpertUsage
from shoal.parallel.expert.stacked import StackedExperts
from shoal.pipeline.module import PipelineModule
from shoal.sharding.partition import UnitRules
from shoal.simulation.check import StreamCheck
from tests.helpers.expert_layers import WIDTH as STACK_WIDTH
from tests.helpers.expert_layers import Stack
from tests.helpers.models import VOCABULARY
from tests.helpers.training import BF16, adamw, batch, config, make, sgd, start_with
from tests.ranks.offload.test_offload import make_apart
from tests.ranks.parallel.expert.test_experts_gathered_if_used import AHEAD, STEPS, Used, by_rank_and_step, settings_of
from tests.ranks.parallel.expert.test_experts_gathered_if_used import Model as ModelOfLists

WIDTH, INNER, NUM_EXPERTS, NUM_BLOCKS = 64, 256, 8, 2
PAIR = (1, 6)
MATRIX_NBYTES = 4 * WIDTH * INNER


class OfStack(nn.Module):
    """A block with Shoal's stacked experts, or with those of Transformers' interface."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        width = WIDTH if form == "shoal" else STACK_WIDTH
        self.inner = nn.Linear(width, width)
        self.router = nn.Linear(width, NUM_EXPERTS)
        self.experts: Any
        if form == "shoal":
            self.experts = StackedExperts(NUM_EXPERTS, width, INNER)
        else:
            self.experts = Stack(NUM_EXPERTS, is_transposed=form == "transposed", has_gate=True)
            for parameter in self.experts.parameters():
                nn.init.normal_(parameter, std=0.1)

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        x = x + torch.tanh(self.inner(x))
        rows = x.flatten(0, -2)
        index = torch.tensor(used).expand(len(rows), len(used))
        weights = self.router(rows).softmax(-1).gather(-1, index).to(rows.dtype)
        if self.form == "shoal":
            return x + run_experts(rows, index, weights, self.experts, self.experts.experts_held).view_as(x)
        out: torch.Tensor = self.experts(rows, index, weights)
        return x + out.view_as(x)


class StackModel(nn.Module):
    def __init__(self, form: str = "shoal", recomputes: bool = False) -> None:
        super().__init__()
        width = WIDTH if form == "shoal" else STACK_WIDTH
        self.recomputes = recomputes
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(OfStack(form) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, used, use_reentrant=False) if self.recomputes else block(x, used)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.engine.settings.UnitRules", partial(UnitRules, min_block_numel=1))


def train(
    settings: dict[str, Any], used: Used, form: str, recomputes: bool, optimizer: Any = adamw
) -> tuple[list[float], dict[str, torch.Tensor]]:
    settings = {**settings, "expert_parallel": {**settings["expert_parallel"], "enabled": form != "shoal"}}
    engine = start_with(make(partial(StackModel, form, recomputes)), settings, optimizer)
    assert sum(unit.if_used is not None for unit in engine.sharded.units) == NUM_BLOCKS
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


def all_in_one(used: Used, form: str, num_ranks: int) -> dict[str, torch.Tensor]:
    """One process with all experts."""
    model = make(partial(StackModel, form))
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        for rank in range(num_ranks):
            (model(*batch(step, rank, num_ranks), used(step, rank)) / num_ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("size", "ep", "form", "is_on_disk", "recomputes", "sections"),
    [
        (1, 1, "shoal", True, False, {}),
        (1, 1, "plain", True, True, {"gradient_accumulation_steps": 2}),
        (1, 1, "transposed", False, False, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
        (2, 1, "shoal", True, False, {}),
        (2, 1, "transposed", True, True, BF16),
        (3, 1, "plain", False, False, {"gradient_accumulation_steps": 2}),
        (2, 1, "plain", True, False, {"zero_optimization": {"zero_hpz_partition_size": 2}}),
        (2, 2, "plain", False, False, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
        (4, 2, "shoal", True, True, BF16),
        (4, 2, "transposed", True, False, {"zero_optimization": {"stage3_prefetch_bucket_size": 0}}),
        (4, 2, "plain", True, False, {"zero_optimization": {"overlap_comm": False}}),
        (4, 2, "shoal", False, False, {"parallel": {"dp_replicate": 2}}),
        (4, 2, "plain", True, False, {"expert_parallel": {"overlap": 2}}),
        (4, 4, "plain", False, True, {"gradient_accumulation_steps": 2}),
        (4, 2, "shoal", True, False, {"expert_parallel": {"rebalance_every": 1}}),
        (2, 1, "plain", True, False, {**BF16, "zero_optimization": {"offload_optimizer": AHEAD}}),
    ],
)
def test_the_bits_are_those_of_a_run_that_gathers_whole_stacks(
    size: int,
    ep: int,
    form: str,
    is_on_disk: bool,
    recomputes: bool,
    sections: dict[str, Any],
    ranks: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_apart(monkeypatch)
    settings = settings_of(ep, tmp_path if is_on_disk else None, **sections)
    run = partial(train, settings, by_rank_and_step, form, recomputes)
    found = ranks(size, run)
    with monkeypatch.context() as patch:
        patch.setattr(ExpertUsage, "used", lambda self, place: None)
        expected = ranks(size, run)
    for (losses, values), (other_losses, other_values) in zip(found, expected, strict=True):
        assert losses == other_losses
        assert all(torch.equal(values[name], other) for name, other in other_values.items())


@pytest.mark.parametrize("form", ["shoal", "plain", "transposed"])
@pytest.mark.parametrize(("size", "ep", "is_on_disk"), [(1, 1, True), (2, 1, False), (4, 2, True)])
def test_parameters_are_those_of_one_process_with_all_stacks(
    form: str, size: int, ep: int, is_on_disk: bool, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    settings = settings_of(ep, tmp_path if is_on_disk else None)
    expected = all_in_one(by_rank_and_step, form, size)
    for _, values in ranks(size, partial(train, settings, by_rank_and_step, form, False, sgd)):
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("size", "ep", "shards"),
    # of the flat buffer (all ``up``, then all ``down``): matrices of experts 1 and 6 that lie in each rank's shard
    [(1, 1, [4]), (2, 1, [2, 2]), (4, 1, [1, 1, 1, 1]), (2, 2, [2, 2]), (4, 2, [1, 1, 1, 1])],
)
def test_with_2_of_8_stacked_experts_used_their_bytes_alone_are_read_and_gathered(
    size: int, ep: int, shards: list[int], ranks: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[tuple[int, str]] = Counter()
    before_read = DiskTier.read

    def count_read(tier: DiskTier, extent: Any, tensor: torch.Tensor, offset: int = 0) -> Any:
        read[current_world().rank, extent.name] += tensor.numel()
        return before_read(tier, extent, tensor, offset)

    monkeypatch.setattr(DiskTier, "read", count_read)

    def rank() -> tuple[dict[str, int], list[tuple[str, int]]]:
        engine = start_with(make(StackModel), settings_of(ep, tmp_path), sgd)
        mine, world_size = current_world().rank, current_world().size
        for step in range(STEPS):
            with current_world().recorder.recording() as entries:
                before = dict(read)
                engine.backward(engine(*batch(step, mine, world_size), PAIR))
                after = dict(read)
            engine.step()
        engine.destroy()
        nbytes = {key[1]: count - before.get(key, 0) for key, count in after.items() if key[0] == mine}
        return {name: count for name, count in nbytes.items() if "expert" in name and count}, [
            (entry.label, entry.nbytes) for entry in entries if entry.op == "all_gather" and "expert" in entry.label
        ]

    for (nbytes, gathers), num_matrices in zip(ranks(size, rank), shards, strict=True):
        first, last = (f"blocks.{block}.experts" for block in range(NUM_BLOCKS))
        nbytes_of_used = num_matrices * MATRIX_NBYTES
        # in forward and in backward; the last block stays gathered in between
        assert nbytes == {f"parameters: {first}": 2 * nbytes_of_used, f"parameters: {last}": nbytes_of_used}
        called = [first, last, first] if size > ep else []
        assert gathers == [(name, (size // ep - 1) * nbytes_of_used) for name in called]


class RoutedByValue(nn.Module):
    """A block whose micro-batches use different experts."""

    def __init__(self) -> None:
        super().__init__()
        self.block = OfStack("shoal")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = int(x.detach().abs().sum() * 1000) % (NUM_EXPERTS - 1)
        out: torch.Tensor = self.block(x, (first, first + 1))
        return out


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_micro_batches_under_way_read_what_each_of_them_uses(
    schedule: str, ranks: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model() -> PipelineModule:
        layers = [nn.Embedding(VOCABULARY, WIDTH), RoutedByValue(), RoutedByValue(), nn.Linear(WIDTH, VOCABULARY)]
        return PipelineModule(layers, num_stages=2, loss_fn=lambda out, y: functional.cross_entropy(out[:, -1], y))

    def rank() -> list[float]:
        optimizer = {"type": "SGD", "params": {"lr": 0.1}}
        pipeline = {"schedule": schedule}
        settings = settings_of(
            1, tmp_path, gradient_accumulation_steps=4, parallel={"pp": 2}, optimizer=optimizer, pipeline=pipeline
        )
        del settings["units"]
        engine = shoal.initialize(model=make(model), config=settings)[0]
        assert sum(unit.if_used is not None for unit in engine.sharded.units) == 1
        batches = iter([(batch(index, 0, 1)[0], batch(index, 0, 1)[1][:, -1]) for index in range(12)])
        losses = [float(engine.train_batch(batches)) for _ in range(3)]
        engine.destroy()
        return losses

    found = ranks(2, rank)
    monkeypatch.setattr(ExpertUsage, "used", lambda self, place: None)
    assert found == ranks(2, rank)


def test_two_graphs_at_once_have_the_experts_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second backward needs experts that the first did not gather, while the unit is gathered for it."""

    def run() -> dict[str, torch.Tensor]:
        engine = start_with(make(StackModel), settings_of(1, tmp_path), sgd)
        for step in range(STEPS):
            tokens = batch(step, 0, 1)
            engine.backward(engine(*tokens, (1, 6)) + engine(*tokens, (2, 3)) * 2)
            engine.step()
        values: dict[str, torch.Tensor] = engine.module_state_dict()
        engine.destroy()
        return values

    found = run()
    monkeypatch.setattr(ExpertUsage, "used", lambda self, place: None)
    assert all(torch.equal(value, found[name]) for name, value in run().items())


def test_an_unused_expert_is_nan_inside_the_forward_and_whole_for_the_user(tmp_path: Path) -> None:
    engine = start_with(make(StackModel), settings_of(1, tmp_path), sgd)
    experts = engine.module.blocks[0].experts
    seen: list[list[bool]] = []
    experts.register_forward_pre_hook(lambda module, *_: seen.append(module.up.isfinite().all(-1).all(-1).tolist()))
    tokens = batch(0, 0, 1)
    for _ in range(2):  # the first forward looks for parameters that are read outside of their unit
        engine.backward(engine(*tokens, PAIR))
        engine.step()
    assert seen[-1] == [expert in PAIR for expert in range(NUM_EXPERTS)]
    with shoal.zero.GatheredParameters([experts.up]):
        assert experts.up.isfinite().all()
    loss = engine(*tokens, PAIR)  # the last block stays gathered for backward: two experts of it
    with shoal.zero.GatheredParameters([engine.module.blocks[1].experts.up]):
        assert engine.module.blocks[1].experts.up.isfinite().all()
    engine.backward(loss)
    engine.destroy()


def test_stacks_on_a_disk_load_from_a_checkpoint_of_stacks_on_the_device(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    def save() -> dict[str, torch.Tensor]:
        engine = start_with(make(StackModel), config(3, parallel={"ep": 2}, gradient_clipping=0.5), adamw)
        mine = current_world().rank
        engine.backward(engine(*batch(0, mine, 2), by_rank_and_step(0, mine)))
        engine.step()
        engine.save_checkpoint(str(tmp_path / "saved"))
        return go_on(engine)

    def load() -> dict[str, torch.Tensor]:
        engine = start_with(make(StackModel), settings_of(1, tmp_path / "disk"), adamw)
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


@pytest.mark.parametrize("form", ["shoal", "plain", "list"])
@pytest.mark.parametrize(("size", "is_on_disk"), [(1, True), (2, False), (2, True)])
def test_the_streams_of_experts_gathered_if_used_wait_where_they_must(
    form: str, size: int, is_on_disk: bool, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    settings = settings_of(1, tmp_path if is_on_disk else None)
    settings["expert_parallel"]["enabled"] = form == "plain"
    model: Any = partial(ModelOfLists, 1) if form == "list" else partial(StackModel, form)

    def rank() -> StreamCheck:
        mine = current_world().rank
        with shoal.check_streams(raises=False) as check:
            engine = start_with(make(model), settings, adamw)
            assert any(unit.if_used is not None for unit in engine.sharded.units)
            for step in range(STEPS):
                before = check.host_reads
                engine.backward(engine(*batch(step, mine, size), by_rank_and_step(step, mine)))
                after = check.host_reads
                engine.step()
            engine.destroy()
        # The host reads the rows of each expert, and tells the other hosts which experts have some.
        assert sum(number for number in (after - before).values()) == NUM_BLOCKS
        return check

    assert [str(finding) for check in ranks(size, rank) for finding in check.findings] == []


def test_a_model_without_such_experts_is_told_that_the_key_has_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shoal")
    settings = settings_of(1, tmp_path, expert_parallel={"gather_if_used": True})
    start_with(make(StackModel), settings, sgd).destroy()
    assert "gather_if_used" not in caplog.text
    start_with(nn.Sequential(nn.Linear(8, 8)), {**settings, "units": {}}, sgd).destroy()
    assert "expert_parallel.gather_if_used = true: accepted, no effect: the model has no such experts." in caplog.text
