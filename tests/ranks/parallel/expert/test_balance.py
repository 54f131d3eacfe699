"""Loads, biases and experts that change ranks, in engines: training is the same wherever an expert is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.access.engine_parameters import safe_get_full_optimizer_state
from shoal.comm.threads import run_ranks
from shoal.errors import ConfigError, NotBuiltError
from shoal.parallel.expert.bias import add_bias
from shoal.parallel.expert.dispatch import run_experts
from shoal.parallel.expert.grouped import grouped_linear
from shoal.parallel.expert.held import modules_with_experts
from tests.helpers.expert_cases import NUM_EXPERTS, WIDTH, ExpertModel, ListedExperts, StackedExperts
from tests.helpers.models import SEQUENCE
from tests.helpers.training import BF16, adamw, batch, config, make, sgd, start_with

STEPS = 5


class Router(nn.Module):
    """Prefers experts 0 and 1, which one rank has at first."""

    def __init__(self, num_experts: int, k: int = 1) -> None:
        super().__init__()
        self.k = k
        self.weight = nn.Parameter(torch.randn(num_experts, WIDTH) / 8)
        self.preference: torch.Tensor
        self.register_buffer("preference", torch.tensor([0.6, 0.5] + [0.0] * (num_experts - 2)), persistent=False)
        self.bias = add_bias(self, num_experts)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = (hidden @ self.weight.T).sigmoid() + self.preference
        index = (scores + self.get_buffer("expert_bias")).topk(self.k).indices
        return index, scores.gather(1, index)


class ChosenStack(StackedExperts):
    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        def compute(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
            return grouped_linear(torch.relu(grouped_linear(rows, self.up, counts)), self.down, counts, self.bias)

        return run_experts(hidden, index, weights, compute, self.experts_held)


class ChosenList(ListedExperts):
    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        def compute(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
            return torch.cat([expert(own) for expert, own in zip(self, rows.split(list(counts)), strict=True)])

        return run_experts(hidden, index, weights, compute, self.experts_held)


class ChosenBlock(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = Router(NUM_EXPERTS)
        self.experts = experts

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = self.norm(hidden).flatten(0, -2)
        index, weights = self.gate(flat)
        return hidden + self.experts(flat, index, weights.to(flat.dtype)).view(hidden.shape)


class ChosenModel(ExpertModel):
    def __init__(self, ep_size: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            ChosenBlock(ChosenStack() if ep_size is None else ChosenList(ep_size)) for _ in range(2)
        )


def settings(
    stage: int, ep: int | None, *, every: int = 0, coeff: float | None = None, hot: int = 0, **more: Any
) -> dict[str, Any]:
    made = config(stage, gradient_clipping=0.5, **more)
    experts = {"rebalance_every": every, "load_balance_coeff": coeff, "hot_experts": hot}
    return {**made, "expert_parallel": experts, "parallel": {} if ep is None else {"ep": ep}}


def engine_of(form: str, stage: int, ep: int, optimizer: Any = sgd, **more: Any) -> Any:
    is_listed = form == "listed"
    model = make(partial(ChosenModel, ep if is_listed else None))
    return start_with(model, settings(stage, None if is_listed else ep, **more), optimizer)


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(*batch(step, engine.axes.batch.rank, engine.axes.batch.size))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def owners(engine: Any) -> list[tuple[int, ...]]:
    return [block.experts.experts_held.owners for block in engine.module.blocks]


HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
DISK = {"zero_optimization": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}}


@pytest.mark.parametrize(
    ("form", "size", "stage", "more"),
    [
        ("stacked", 2, 0, {}),
        ("listed", 2, 3, {}),
        ("stacked", 4, 1, {}),
        ("listed", 4, 2, HOST),
        ("stacked", 4, 3, DISK),
        ("stacked", 4, 3, BF16),
    ],
)
def test_training_with_and_without_moved_experts_is_the_same(
    tmp_path: Path, form: str, size: int, stage: int, more: dict[str, Any]
) -> None:
    if more is DISK:
        where = {"nvme_path": str(tmp_path)}
        more = {"zero_optimization": {name: section | where for name, section in DISK["zero_optimization"].items()}}
    is_rounded = more is BF16

    def rank(every: int) -> tuple[list[float], dict[str, Any], dict[str, Any], Any]:
        engine = engine_of(form, stage, 2, sgd if is_rounded else adamw, every=every, **more)
        losses = train(engine, range(STEPS))
        state = {
            name: safe_get_full_optimizer_state(parameter, "momentum_buffer" if is_rounded else "exp_avg_sq")
            for name, parameter in engine.module.named_parameters()
            if "experts" not in name or form == "stacked"
        }
        values, places = engine.module_state_dict(), owners(engine)
        engine.destroy()
        return losses, values, state, (places, owners(engine))

    still, moving = run_ranks(size, partial(rank, 0)), run_ranks(size, partial(rank, 2))
    atol = 2e-2 if is_rounded else 1e-6
    for (losses, values, state, (moved, restored)), (expected, fixed, fixed_state, _) in zip(
        moving, still, strict=True
    ):
        assert any(own != (0, 0, 1, 1) for own in moved)
        assert restored == [(0, 0, 1, 1)] * 2
        assert losses == pytest.approx(expected, rel=atol)
        assert set(values) == set(fixed)
        for name, value in (fixed | {f"state of {name}": value for name, value in fixed_state.items()}).items():
            own = (values | {f"state of {name}": value for name, value in state.items()})[name]
            torch.testing.assert_close(own, value, rtol=atol, atol=atol, msg=name)


@pytest.mark.parametrize(
    ("stage", "parallel"),
    [
        (2, {"tp": 2, "tp_plan": {"head": "vocab_head"}}),
        (3, {"dp_replicate": 2}),
        (1, {"pp": 2}),
    ],
)
def test_experts_move_beside_other_axes_and_loads_are_of_the_whole_model(stage: int, parallel: dict[str, Any]) -> None:
    def rank(every: int) -> tuple[list[int], dict[str, Any], dict[str, list[int]]]:
        made = settings(stage, 2, every=every, gradient_accumulation_steps=2)
        made["parallel"] |= parallel
        engine = start_with(make(ChosenModel), made)
        dp = engine.axes.batch
        for step in range(3):
            micros = [batch(2 * step + micro, dp.rank, dp.size) for micro in range(2)]
            if "pp" in parallel:
                engine.train_batch(iter(micros))
                continue
            for micro in micros:
                engine.backward(engine(*micro))
                engine.step()
        moved = [e for _, _, held in modules_with_experts(engine.module) for e in held.owners]
        return moved, engine.module_state_dict(), engine.expert_load()

    still, moving = run_ranks(4, partial(rank, 0)), run_ranks(4, partial(rank, 1))
    tokens = 2 * 2 * SEQUENCE * 4 // (parallel.get("tp", 1) * parallel.get("pp", 1))
    assert any(own != [0, 0, 1, 1] * (len(own) // 4) for own, _, _ in moving)
    for (_, values, load), (_, expected, fixed) in zip(moving, still, strict=True):
        assert load == fixed
        assert {name: sum(counts) for name, counts in load.items()} == {
            f"blocks.{block}.experts": tokens for block in range(2)
        }
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("size", "stage", "more"),
    [(2, 0, {}), (4, 3, {}), (4, 2, {"activation_checkpointing": {"modules": ["blocks.*"]}}), (4, 3, BF16)],
)
def test_copies_of_the_most_loaded_experts_change_nothing_but_what_is_sent(
    size: int, stage: int, more: dict[str, Any]
) -> None:
    def rank(hot: int) -> tuple[list[float], dict[str, Any], dict[str, list[int]], int, list[int]]:
        engine = engine_of("stacked", stage, 2, sgd, every=1, hot=hot, **more)
        losses = train(engine, range(2))
        with engine.world.recorder.recording() as entries:
            losses += train(engine, range(2, 4))
        sent = sum(entry.nbytes for entry in entries if entry.label == "experts dispatch")
        copies = [block.experts.experts_held.copies for block in engine.module.blocks]
        copied = [len(each.experts) for each in copies if each is not None]
        return losses, engine.module_state_dict(), engine.expert_load(), sent, copied

    without, having = run_ranks(size, partial(rank, 0)), run_ranks(size, partial(rank, 1))
    tolerance = 2e-2 if more is BF16 else 1e-6
    assert sum(sent for *_, sent, _ in having) < 0.8 * sum(sent for *_, sent, _ in without)
    for (losses, values, load, _, copied), (expected, fixed, fixed_load, _, _) in zip(having, without, strict=True):
        assert sum(copied) > 0
        assert losses == pytest.approx(expected, rel=tolerance)
        assert more is BF16 or load == fixed_load
        for name, value in fixed.items():
            torch.testing.assert_close(values[name], value, rtol=tolerance, atol=tolerance, msg=name)


def test_what_moves_is_the_moved_experts_with_their_optimizer_state() -> None:
    def rank() -> tuple[int, int]:
        engine = engine_of("stacked", 1, 2, adamw, every=1)
        first = engine.module.blocks[0].experts
        with engine.world.recorder.recording() as entries:
            train(engine, range(1))
        moved = sum(block.experts.experts_held.owners != (0, 0, 1, 1) for block in engine.module.blocks)
        per_expert = sum(parameter[0].numel() for parameter in first.parameters())
        # of one layer one expert of each rank: parameters on every rank, and two states of AdamW on this rank's shard
        received = sum(entry.nbytes for entry in entries if entry.label.endswith(": experts"))
        return received, moved * per_expert * 4

    found = run_ranks(4, rank)
    assert found[0][1] > 0
    # ranks 0 and 1 shard the state with ranks 2 and 3: each has a part of it, of 2 bytes of state per parameter's byte
    assert sum(received for received, _ in found) == 2 * found[0][1] * 2 * (1 + 2 / 2)


@pytest.mark.parametrize("form", ["stacked", "listed"])
def test_a_checkpoint_of_moved_experts_loads_where_they_have_not_moved(tmp_path: Path, form: str) -> None:
    def save() -> dict[str, Any]:
        engine = engine_of(form, 2, 2, adamw, every=1)
        train(engine, range(3))
        assert any(own != (0, 0, 1, 1) for own in owners(engine))
        engine.save_checkpoint(str(tmp_path), tag="mine")
        train(engine, range(3, STEPS))
        return engine.module_state_dict()

    def load(ep: int, stage: int) -> dict[str, Any]:
        engine = engine_of(form, stage, ep, adamw, every=0)
        engine.load_checkpoint(str(tmp_path), tag="mine")
        train(engine, range(3, STEPS))
        return engine.module_state_dict()

    expected = run_ranks(4, save)[0]
    for ep, stage in ((2, 3), (4, 1)):
        for name, value in run_ranks(4, partial(load, ep, stage))[0].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)


def test_the_load_is_of_all_ranks_and_micro_batches() -> None:
    def rank() -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        engine = engine_of("stacked", 1, 2, gradient_accumulation_steps=2)
        nothing = engine.expert_load()
        engine.train()
        for micro in range(2):
            engine.backward(engine(*batch(micro, engine.axes.batch.rank, 2)))
            engine.step()
        with torch.no_grad():
            engine.eval()(*batch(9, engine.axes.batch.rank, 2))
        return nothing, engine.expert_load()

    def alone() -> dict[str, list[int]]:
        model, counts = make(ChosenModel), Counter[tuple[str, int]]()

        def count(name: str, _module: Any, _args: Any, chosen: Any) -> None:
            counts.update((name, expert) for expert in chosen[0].flatten().tolist())

        for index, block in enumerate(model.blocks):
            block.gate.register_forward_hook(partial(count, f"blocks.{index}.experts"))
        for micro in range(2):
            model(*(torch.cat([batch(micro, r, 2)[i] for r in range(2)]) for i in range(2)))
        return {f"blocks.{i}.experts": [counts[f"blocks.{i}.experts", e] for e in range(NUM_EXPERTS)] for i in range(2)}

    expected = alone()
    for nothing, load in run_ranks(2, rank):
        assert nothing == {name: [0] * NUM_EXPERTS for name in expected}
        assert load == expected


def test_biases_move_against_the_load_alike_on_all_ranks_and_are_in_checkpoints(tmp_path: Path) -> None:
    def rank() -> tuple[list[list[float]], list[list[float]], dict[str, list[int]], list[list[float]]]:
        engine = engine_of("stacked", 2, 2, coeff=0.5)
        gates = [block.gate for block in engine.module.blocks]
        train(engine, range(1))
        load, first = engine.expert_load(), [gate.expert_bias.tolist() for gate in gates]
        train(engine, range(1, 3))
        engine.save_checkpoint(str(tmp_path), tag="mine")
        kept = [gate.expert_bias.tolist() for gate in gates]
        for gate in gates:
            gate.expert_bias.zero_()
        engine.load_checkpoint(str(tmp_path), tag="mine")
        return first, kept, load, [gate.expert_bias.tolist() for gate in gates]

    found = run_ranks(4, rank)
    for first, kept, load, loaded in found:
        for bias, tokens in zip(first, load.values(), strict=True):
            mean = sum(tokens) / len(tokens)
            assert bias == [0.5 * ((mean > count) - (mean < count)) for count in tokens]
        assert kept == loaded == found[0][1]


def test_loads_are_written_at_the_print_interval(tmp_path: Path) -> None:
    def rank() -> None:
        monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
        engine = engine_of("stacked", 1, 2, csv_monitor=monitor, steps_per_print=2)
        train(engine, range(4))
        engine.destroy()

    run_ranks(2, rank)
    rows = (tmp_path / "run" / "experts_blocks.1.experts_load_0.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "8", "16"]  # samples, as of the other values
    assert len(list((tmp_path / "run").glob("experts_*"))) == 2 * (1 + NUM_EXPERTS)


def test_what_cannot_be_balanced_is_an_error_on_every_rank() -> None:
    def without_bias() -> None:
        model = make(ChosenModel)
        for block in model.blocks:
            del block.gate.expert_bias
        start_with(model, settings(1, 2, coeff=0.001))

    with pytest.raises(ConfigError, match="no layer with experts has a bias") as caught:
        run_ranks(2, without_bias)
    assert caught.value.code == "expert-bias"

    def with_buffers() -> None:
        model = make(ChosenModel)
        model.blocks[1].experts.register_buffer("scale", torch.ones(NUM_EXPERTS))
        start_with(model, settings(1, 2, every=1))

    with pytest.raises(NotBuiltError, match=re.escape("the experts of blocks.1.experts have buffers")):
        run_ranks(2, with_buffers)
