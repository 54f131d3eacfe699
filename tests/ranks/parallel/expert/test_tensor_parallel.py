"""Experts split over tensor-parallel ranks: parameters equal those of one process that holds all experts whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shoal.comm.world import current_world
from shoal.errors import ConfigError, ModelError
from shoal.models import GPT, GPTConfig
from shoal.parallel.expert.held import modules_with_experts
from shoal.parallel.expert.layer import MoE
from shoal.parallel.expert.stacked import ExpertFeedForward
from tests.helpers.expert_cases import ExpertModel
from tests.helpers.expert_layers import TOP_K, WIDTH, Block, Gated, StackLayer
from tests.helpers.models import VOCABULARY
from tests.helpers.training import batch, config, make, sgd, start_with

STEPS = 5


class FeedForward(nn.Module):
    """Names that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(torch.tanh(self.one(rows)))
        return out


class Residual(nn.Module):
    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + self.moe(hidden)[0]
        return out


class Listed(nn.Module):
    """DeepSpeed's MoE layer: experts with two linears, and ones with three that a rule names.

    Args:
        asks: for experts that are split over all tensor-parallel ranks.
    """

    def __init__(self, ep_size: int, *, drops: bool = True, asks: bool = True) -> None:
        super().__init__()
        options: dict[str, Any] = {"top2_2nd_expert_sampling": False, "enable_expert_tensor_parallelism": asks}
        options["drop_tokens"] = drops
        gated = Gated(("gate_proj", "down_proj", "up_proj"))
        self.layers = nn.ModuleList(
            Residual(MoE(WIDTH, expert, 4, ep_size, k=2, min_capacity=1, capacity_factor=0.8, **options))
            for expert in (FeedForward(), gated)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Stacked(nn.Module):
    """Stacked experts of Transformers' interface: with biases, transposed and interleaved; and as most have them.

    Args:
        has_dense: a feed-forward layer comes first, which the plan splits.
        is_fused: gate and up lie one after the other, so that a rank has two ranges of both together.
    """

    def __init__(self, *, has_dense: bool = False, is_fused: bool = False) -> None:
        super().__init__()
        settings = [{"is_transposed": True, "has_gate": True}, {"is_transposed": False, "has_gate": False}]
        self.layers = nn.ModuleList(Block("mlp", StackLayer(SimpleNamespace(**each))) for each in settings)
        for layer in self.layers:
            layer.mlp.experts.is_concatenated = is_fused
            for parameter in layer.mlp.experts.parameters():
                nn.init.normal_(parameter, std=0.3)
        if has_dense:
            self.layers.insert(0, Block("dense", FeedForward()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Model(nn.Module):
    def __init__(
        self, form: str, ep_size: int = 1, *, drops: bool = True, asks: bool = True, has_dense: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.experts = (
            Listed(ep_size, drops=drops, asks=asks)
            if form == "listed"
            else Stacked(has_dense=has_dense, is_fused=form == "fused")
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            self.head(self.experts(self.embedding(tokens))).flatten(0, 1), targets.flatten()
        )


UNITS = {"names": ["experts.layers.*"]}
PLAN = {"head": "vocab_head", "embedding": "vocab"}
STACKED_PLAN = {**PLAN, "experts.layers.*.mlp.router": "replicate"}
DENSE_PLAN = {**STACKED_PLAN, "experts.layers.0.dense.one": "column", "experts.layers.0.dense.two": "row"}


def settings(form: str, stage: int, ep: int, **more: Any) -> dict[str, Any]:
    parallel = {"tp": 2, "tp_plan": PLAN if form == "listed" else STACKED_PLAN}
    experts = {"enabled": True, "autoep_size": ep, "expert_tensor_parallel_size": 2} if form != "listed" else {}
    return config(stage, gradient_clipping=0.1, parallel=parallel, expert_parallel=experts, units=UNITS, **more)


def alone(
    form: str,
    num_batch_ranks: int,
    steps: int = STEPS,
    *,
    drops: bool = True,
    length: int | None = None,
    accumulation: int = 1,
    has_dense: bool = False,
) -> tuple[dict[str, torch.Tensor], float]:
    """One process with all experts, which routes each rank's tokens by themselves."""
    model = make(partial(Model, form, drops=drops, has_dense=has_dense))
    stepped = sgd(model.parameters())
    norm = 0.0
    for step in range(steps):
        for micro, rank in itertools.product(range(accumulation), range(num_batch_ranks)):
            tokens = tokens_of(step * accumulation + micro, rank, num_batch_ranks, length)
            (model(*tokens) / (num_batch_ranks * accumulation)).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        stepped.step()
        stepped.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, norm


def tokens_of(step: int, rank: int, size: int, length: int | None) -> tuple[torch.Tensor, ...]:
    """Tokens and targets of a rank; of each sequence the first ``length``."""
    return tuple(each[:, :length] for each in batch(step, rank, size))


def train(engine: Any, steps: range, length: int | None = None) -> None:
    ranks, each = engine.axes.batch, engine.gradient_accumulation_steps()
    for step in range(steps.start * each, steps.stop * each):
        engine.backward(engine(*tokens_of(step, ranks.rank, ranks.size, length)))
        engine.step()


def assert_close(values: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert set(values) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(values[name].float(), value, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("form", ["listed", "stacked"])
@pytest.mark.parametrize(
    ("size", "ep", "stage", "more"),
    [
        (2, 1, 0, {}),
        (4, 1, 3, {}),
        (4, 2, 1, {}),
        (4, 2, 2, {}),
        (8, 2, 3, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
        (8, 2, 1, {"parallel": {"dp_replicate": 2}}),
    ],
)
def test_parameters_and_norm_equal_those_of_one_process(
    form: str, size: int, ep: int, stage: int, more: dict[str, Any], ranks: Callable[..., Any]
) -> None:
    expected, norm = alone(form, size // 2)

    def rank() -> tuple[dict[str, Any], float, dict[str, tuple[int, ...]]]:
        made = settings(form, stage, ep, **{key: value for key, value in more.items() if key != "parallel"})
        made["parallel"].update(more.get("parallel", {}))
        engine = start_with(make(partial(Model, form, ep)), made)
        shapes = {name: tuple(parameter.shape) for name, parameter in engine.module.named_parameters()}
        train(engine, range(STEPS))
        return engine.module_state_dict(), engine.get_global_grad_norm(), shapes

    for values, found_norm, shapes in ranks(size, rank):
        assert_close(values, expected)
        assert found_norm == pytest.approx(norm, rel=1e-6)
        if form == "listed":
            of_expert = "experts.layers.1.moe.deepspeed_moe.experts.deepspeed_experts.0."
            assert shapes[f"{of_expert}gate_proj.weight"] == (10, WIDTH)
            assert shapes[f"{of_expert}down_proj.weight"] == (WIDTH, 10)
        else:
            assert shapes["experts.layers.0.mlp.experts.gate_up_proj"] == (4 // ep, WIDTH, 20)
            assert shapes["experts.layers.1.mlp.experts.down_proj"] == (4 // ep, WIDTH, 10)
            assert shapes["experts.layers.0.mlp.experts.down_proj_bias"] == (4 // ep, WIDTH)


@pytest.mark.parametrize(("size", "ep", "stage"), [(2, 1, 1), (4, 2, 3)])
def test_a_sequence_that_is_split_over_the_same_ranks_gives_the_parameters_of_one_process(
    size: int, ep: int, stage: int, ranks: Callable[..., Any]
) -> None:
    """Experts in a list; stacked ones are in the composition matrix."""
    expected, norm = alone("listed", size // 2, drops=False, length=4)

    def rank() -> tuple[dict[str, Any], float, list[tuple[str, int]]]:
        made = settings("listed", stage, ep)
        made["parallel"]["tp_sequence_parallel"] = True
        engine = start_with(make(partial(Model, "listed", ep, drops=False)), made)
        with current_world().recorder.recording() as entries:
            train(engine, range(STEPS), length=4)
        sent = [(entry.label, entry.nbytes) for entry in entries if entry.axis == "tp" and "experts" in entry.label]
        return engine.module_state_dict(), engine.get_global_grad_norm(), sent

    for values, found_norm, sent in ranks(size, rank):
        assert_close(values, expected)
        assert found_norm == pytest.approx(norm, rel=1e-6)
        tokens = tokens_of(0, 0, size // 2, 4)[0].numel() // 2  # of each rank
        found = {label: nbytes for label, nbytes in sent if "layers" not in label}
        of_pairs = {"experts experts of tokens": tokens * 2 * 8, "experts weights": tokens * 2 * 4}
        of_hidden = dict.fromkeys(("experts tokens", "experts outputs backward"), tokens * WIDTH * 4)
        assert found == {**of_pairs, **of_hidden}
        assert len([label for label, _ in sent if label in found]) == 4 * 2 * STEPS  # in each of two layers


@pytest.mark.parametrize(
    ("form", "stage", "hot"),
    [("listed", 0, 0), ("listed", 3, 0), ("stacked", 2, 0), ("stacked", 3, 1), ("fused", 3, 0)],
)
def test_split_experts_that_change_ranks_change_no_result(
    form: str, stage: int, hot: int, ranks: Callable[..., Any]
) -> None:
    expected, _ = alone(form, 4)

    def rank() -> tuple[dict[str, Any], bool, int]:
        made = settings(form, stage, 2)
        made["expert_parallel"].update({"rebalance_every": 1, "hot_experts": hot})
        engine = start_with(make(partial(Model, form, 2)), made)
        before = [held.ids for _, _, held in modules_with_experts(engine.module)]
        train(engine, range(STEPS))
        moved = before != [held.ids for _, _, held in modules_with_experts(engine.module)]
        copied = [len(held.copies.experts) for _, _, held in modules_with_experts(engine.module) if held.copies]
        return engine.module_state_dict(), moved, sum(copied)

    found = ranks(8, rank)
    for values, _, num_copied in found:
        assert_close(values, expected)
        assert (num_copied > 0) == (hot > 0)
    assert hot or any(moved for _, moved, _ in found)


@pytest.mark.parametrize("form", ["listed", "stacked", "fused"])
def test_a_checkpoint_loads_with_experts_whole_and_at_other_degrees(
    form: str, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    expected, _ = alone(form, 2)

    def save() -> None:
        made = settings(form, 3, 2)
        made["expert_parallel"]["rebalance_every"] = int(form == "fused")
        engine = start_with(make(partial(Model, form, 2)), made)
        train(engine, range(3))
        engine.save_checkpoint(str(tmp_path))

    def load() -> dict[str, Any]:
        made = config(1, gradient_clipping=0.1, units=UNITS)
        if form != "listed":
            made["expert_parallel"] = {"enabled": True, "autoep_size": 2}
        engine = start_with(make(partial(Model, form, 2), seed=1), made)
        engine.load_checkpoint(str(tmp_path))
        train(engine, range(3, STEPS))
        return engine.module_state_dict()

    def load_split() -> dict[str, Any]:
        engine = start_with(make(partial(Model, form, 1), seed=1), settings(form, 2, 1))
        engine.load_checkpoint(str(tmp_path))
        train(engine, range(3, STEPS))
        return engine.module_state_dict()

    ranks(4, save)
    for values in [*ranks(2, load), *ranks(4, load_split)]:
        assert_close(values, expected)


def test_experts_of_shoals_gpt_are_split_and_train_as_whole_ones(ranks: Callable[..., Any]) -> None:
    shape = GPTConfig(
        vocab_size=VOCABULARY, sequence_length=8, num_layers=2, hidden_size=16, num_heads=2, num_experts=4
    )

    def rank(tp: int) -> dict[str, Any]:
        model = make(lambda: GPT(shape, experts=ExpertFeedForward))
        parallel = {"ep": 2, **({"tp": tp} if tp > 1 else {})}
        made = config(2, parallel=parallel, units={"names": ["blocks.*"]})
        made["expert_parallel"] = {"expert_tensor_parallel_size": tp}
        engine = start_with(model, made)
        for step in range(STEPS):
            group = engine.axes.batch
            tokens, targets = batch(step, group.rank, group.size)
            engine.backward(engine(tokens, targets))
            engine.step()
        return engine.module_state_dict()

    expected = ranks(2, partial(rank, 1))[0]
    for values in ranks(4, partial(rank, 2)):
        assert_close(values, expected)


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        (
            {"expert_parallel": {"expert_tensor_parallel_size": 4}},
            ConfigError,
            "tensor_parallel_size: 4 does not divide the 2 tensor-parallel ranks(.|\n)*write 1 or 2",
        ),
        ({"parallel": {"tp_grid": "2d"}}, ConfigError, "does not go with parallel.tp_grid"),
        ({"expert_parallel": {"autoep_size": 4}}, ConfigError, "4 does not divide the 2 ranks among which experts"),
    ],
)
def test_what_does_not_fit_is_refused(
    more: dict[str, Any], error: type[Exception], words: str, ranks: Callable[..., Any]
) -> None:
    def rank() -> None:
        made = settings("stacked", 0, 2)
        for section, keys in more.items():
            made[section].update(keys)
        with pytest.raises(error, match=words):
            start_with(make(partial(Model, "stacked")), made)

    ranks(4, rank)


def test_stacked_experts_that_do_not_say_which_dims_are_split_are_refused(ranks: Callable[..., Any]) -> None:
    def rank() -> None:
        made = config(0, parallel={"tp": 2, "ep": 2, "tp_plan": {"head": "vocab_head", "blocks.*.router": "replicate"}})
        made["expert_parallel"] = {"expert_tensor_parallel_size": 2}
        with pytest.raises(ModelError, match=r"nothing says how blocks\.0\.experts is split"):
            start_with(make(ExpertModel), made)

    ranks(4, rank)


def test_an_expert_in_a_list_with_other_linears_is_refused(ranks: Callable[..., Any]) -> None:
    def rank() -> None:
        model = make(partial(Model, "listed", 2))
        model.experts.layers[0].moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, 2, enable_expert_tensor_parallelism=True)
        with pytest.raises(ModelError, match="it has 1 linear layers that the tensor-parallel plan does not name"):
            start_with(model, settings("listed", 0, 2))

    ranks(4, rank)


def test_whole_experts_in_a_list_are_left_out_of_the_plan_of_tensor_parallelism(ranks: Callable[..., Any]) -> None:
    """Their names are those of a rule for feed-forward layers."""

    class Whole(nn.Module):
        def __init__(self, ep_size: int) -> None:
            super().__init__()
            expert = Gated(("gate_proj", "down_proj", "up_proj"))
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.layer = MoE(WIDTH, expert, 4, ep_size, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
            self.mlp = Gated(("gate_proj", "down_proj", "up_proj"))
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            hidden = self.mlp(self.layer(self.embedding(tokens))[0])
            return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())

    def rank(ep: int, tp: int) -> dict[str, Any]:
        made = config(1, units={"names": ["layer"]})
        if tp > 1:
            made["parallel"] = {"tp": tp}
            made["tensor_parallel"] = {"partition_config": {"strict_mode": False}}
        engine = start_with(make(partial(Whole, ep)), made)
        train(engine, range(2))
        return engine.module_state_dict()

    expected = ranks(2, partial(rank, 1, 1))[0]
    for values in ranks(4, partial(rank, 2, 2)):
        assert_close(values, expected)


@pytest.mark.parametrize("ep", [1, 2])
def test_recorded_collectives_and_bytes_held_equal_the_formula(ep: int, ranks: Callable[..., Any]) -> None:
    """Each layer of stacked experts: one all-reduce over tp of its rows, and one of their gradients in backward."""

    def rank() -> tuple[dict[str, list[int]], int]:
        engine = start_with(make(partial(Model, "stacked")), settings("stacked", 0, ep))
        nbytes = sum(4 * p.numel() for name, p in engine.module.named_parameters() if name.endswith("_proj"))
        with current_world().recorder.recording() as entries:
            train(engine, range(1))
        found: dict[str, list[int]] = {"experts out": [], "experts in backward": []}
        for entry in entries:
            if entry.label in found:
                assert (entry.op, entry.axis) == ("all_reduce", "tp")
                found[entry.label].append(entry.nbytes)
        return found, nbytes

    whole = make(partial(Model, "stacked"))
    stacks = sum(4 * p.numel() for name, p in whole.named_parameters() if name.endswith("_proj"))
    found = ranks(4, rank)
    for sent, nbytes in found:
        assert nbytes == stacks // (2 * ep)
        assert [len(sizes) for sizes in sent.values()] == [2, 2]
    rows = sum(sum(sent["experts out"]) for sent, _ in found) // (WIDTH * 4)
    # On 2 batch ranks, each of whose tokens both tensor-parallel ranks compute: 2 experts of each token, in 2 layers.
    assert rows == 2 * 2 * batch(0, 0, 2)[0].numel() * TOP_K * 2
    assert rows == sum(sum(sent["experts in backward"]) for sent, _ in found) // (WIDTH * 4)
