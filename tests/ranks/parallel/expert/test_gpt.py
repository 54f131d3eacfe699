"""The GPT with experts under an engine: losses, parameters and collectives beside one process with all experts."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.config.parallel import ExpertParallel
from shoal.errors import ModelError
from shoal.models import GPT, GPTConfig
from shoal.parallel.expert.apply import prepare_experts
from shoal.parallel.expert.held import modules_with_experts
from shoal.parallel.expert.stacked import ExpertFeedForward
from shoal.parallel.low_precision.products import LowPrecisionProducts
from shoal.parallel.low_precision.recipes import RECIPES
from shoal.parallel.products import LayerProducts
from tests.helpers.models import SEQUENCE, VOCABULARY
from tests.helpers.training import BF16, GRADIENT_ORDERS, batch, config, make, sgd, start_with

STEPS = 5
NUM_EXPERTS, TOP_K, NUM_LAYERS, HIDDEN = 4, 2, 2, 16
SHAPE = GPTConfig(
    VOCABULARY, SEQUENCE, NUM_LAYERS, HIDDEN, 2, num_experts=NUM_EXPERTS, experts_per_token=TOP_K,
    auxiliary_loss=0.1, z_loss=0.01,
)  # fmt: skip
Trained = tuple[list[float], dict[str, torch.Tensor]]


def gpt() -> GPT:
    return GPT(SHAPE, experts=ExpertFeedForward)


@functools.cache
def alone(batches: int, micro: int = 1, recipe: str | None = None) -> Trained:
    """One process on the batches of all ranks: the mean of their losses, with the routers' loss of each.

    Args:
        recipe: in which the experts compute; None: as they are.
    """
    model = make(gpt)
    if recipe is not None:
        products = LayerProducts(LowPrecisionProducts(RECIPES[recipe]))
        products.is_on = True
        for _, _, held in modules_with_experts(model):
            held.products = products
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        total = 0.0
        for index in range(micro):
            for rank in range(batches):
                loss = model(*batch(step * micro + index, rank, batches)) / (batches * micro)
                loss.backward()
                total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def spread(size: int, stage: int, micro: int = 1, **sections: Any) -> list[Trained]:
    """On each rank, the losses and at the end the whole model."""
    asked = {"gradient_clipping": 0.5, "gradient_accumulation_steps": micro, **sections}
    has_stages = asked["parallel"].get("pp", 1) > 1

    def rank() -> Trained:
        engine = start_with(make(gpt), config(stage, **asked), sgd)
        ranks, losses = engine.axes.batch, []
        for step in range(STEPS):
            batches = [batch(step * micro + index, ranks.rank, ranks.size) for index in range(micro)]
            if has_stages:
                losses.append(float(engine.train_batch(iter(batches))))  # type: ignore[attr-defined]
                continue
            total = 0.0
            for each in batches:
                loss = engine(*each)
                engine.backward(loss)
                engine.step()
                total += loss.item() / micro
            losses.append(total)
        found = losses, engine.module_state_dict()
        engine.destroy()
        return found

    return run_ranks(size, rank)


@pytest.mark.parametrize(
    ("size", "stage", "micro", "parallel"),
    [
        (2, 0, 1, {"ep": 1}),
        (2, 0, 1, {"ep": 2}),
        (2, 1, 2, {"ep": 2}),
        (2, 2, 1, {"ep": 2}),
        (2, 3, 1, {"ep": 2}),
        (4, 3, 1, {"ep": 2}),
        (4, 3, 1, {"ep": 4}),
        (2, 3, 1, {"tp": 2}),
        (4, 1, 1, {"tp": 2, "ep": 2}),
        (4, 3, 1, {"tp": 2, "ep": 4}),
        (4, 1, 2, {"pp": 2, "ep": 2}),
        (4, 3, 2, {"pp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_losses_and_parameters_equal_those_of_one_process(
    size: int, stage: int, micro: int, parallel: dict[str, int]
) -> None:
    assert_trains_as_alone(size, stage, micro, parallel=parallel)


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"tp": 2, "ep": 4}, {"sp": 2}, {"cp": 2}], ids=str)
def test_the_losses_of_routers_are_of_the_whole_sequences_that_ranks_split(parallel: dict[str, Any]) -> None:
    size = max(parallel.values())

    def part(step: int, rank: int) -> list[torch.Tensor]:
        return [each[:, :4] for each in batch(step, rank, size // 2)]

    model = make(gpt)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        for rank in range(size // 2):
            (model(*part(step, rank)) / (size // 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def rank() -> dict[str, torch.Tensor]:
        parts = {"tp_sequence_parallel": True} if "tp" in parallel else {}
        ours = make(gpt)
        engine = start_with(ours, config(1, parallel={**parallel, **parts}), sgd)
        context = engine.sequence_context
        for step in range(STEPS):
            arguments = part(step, engine.axes.batch.rank)
            if context is not None:
                engine.module.attend_by(shoal.attention)
                arguments = [*map(context.shard, arguments), context.positions(4)]
            engine.backward(engine(*arguments))
            engine.step()
        return engine.module_state_dict()

    for found in run_ranks(size, rank):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("order", GRADIENT_ORDERS, ids=" ".join)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ep", [1, 2])
def test_keys_of_how_gradients_are_reduced_train_stacked_experts_as_one_process(
    ep: int, stage: int, order: dict[str, Any]
) -> None:
    assert_trains_as_alone(2, stage, 2, parallel={"ep": ep}, zero_optimization=order)


@pytest.mark.parametrize(
    ("recipe", "parallel"),
    [("rowwise", {"ep": 1}), ("tensorwise", {"ep": 1}), ("rowwise_with_gw_hp", {"ep": 2})],
    ids=str,
)
@pytest.mark.parametrize("stage", [1, 3])
def test_experts_in_few_bits_train_as_those_of_one_process(stage: int, recipe: str, parallel: dict[str, int]) -> None:
    """At ``ep`` 2 the tokens of both ranks share the scales of a weight's gradient, unless it has none."""
    assert_trains_as_alone(2, stage, 2, recipe, parallel=parallel, fp8={"recipe": recipe, "modules": ["*.experts"]})
    plain, ours = alone(2, 2)[1], alone(2, 2, recipe)[1]
    assert max(float((plain[name] - value).abs().max()) for name, value in ours.items()) > 1e-4


def test_experts_are_among_the_layers_that_are_taken_where_none_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shoal")
    spread(1, 1, parallel={"ep": 1}, fp8={"recipe": "rowwise", "keep": ["*.qkv", "*.out"]})
    assert any(f"fp8: {NUM_LAYERS} layers of" in record.getMessage() for record in caplog.records)


def assert_trains_as_alone(size: int, stage: int, micro: int, recipe: str | None = None, **sections: Any) -> None:
    parallel = sections["parallel"]
    batches = size // (parallel.get("tp", 1) * parallel.get("pp", 1))
    losses, expected = alone(batches, micro, recipe)
    found = spread(size, stage, micro, **sections)
    own = found if "pp" not in parallel else found[:1]  # of a pipeline each rank has the mean of all
    for step in range(STEPS):
        assert sum(rank[0][step] for rank in own) / len(own) == pytest.approx(losses[step], rel=1e-6)
    for _, values in found:
        assert "pp" in parallel or values.keys() == expected.keys()
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("parallel", [{"ep": 2}, {"ep": 2, "pp": 2}], ids=str)
def test_biases_balance_the_routers_alike_at_any_degree(parallel: dict[str, int]) -> None:
    sections = {"expert_parallel": {"load_balance_coeff": 0.05}}
    size, micro = 2 * parallel.get("pp", 1), parallel.get("pp", 1)
    expected = spread(2, 0, micro, parallel={"ep": 1}, **sections)[0][1]
    assert sum(bool(value.abs().sum()) for name, value in expected.items() if "expert_bias" in name) == NUM_LAYERS
    for _, values in spread(size, 1, micro, parallel=parallel, **sections):
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)


def test_names_that_no_layer_of_the_model_has_are_an_error() -> None:
    for keys in ({"moe_layer_pattern": "nothing"}, {"preset_model": "mixtral"}):
        with pytest.raises(ModelError, match=r"GPT has no expert layer. Looked for: modules whose names end in"):
            prepare_experts(gpt(), None, ExpertParallel(enabled=True, **keys))
    assert prepare_experts(gpt(), None, ExpertParallel(enabled=True)) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_recomputed_blocks_route_as_in_forward(stage: int) -> None:
    sections = {"activation_checkpointing": {"modules": ["Block"]}}
    for _, values in spread(2, stage, parallel={"ep": 2}, **sections):
        for name, value in alone(2)[1].items():
            torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_state_and_parameters_on_host_or_disk_train_alike(device: str, tmp_path: Path) -> None:
    place = {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    sections = {"zero_optimization": {"offload_optimizer": place, "offload_param": place}}
    for _, values in spread(2, 3, parallel={"ep": 2}, **sections):
        for name, value in alone(2)[1].items():
            torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-6, msg=name)


def test_in_bf16_the_losses_differ_by_rounding() -> None:
    losses = alone(2)[0]
    found = spread(2, 3, parallel={"ep": 2}, **BF16)
    for step in range(STEPS):
        assert sum(rank[0][step] for rank in found) / 2 == pytest.approx(losses[step], abs=0.02)


@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_sends_its_rows_twice_forward_and_twice_backward(size: int) -> None:
    tokens = torch.arange(16).view(4, 4) % VOCABULARY

    def rank() -> tuple[int, int]:
        engine = start_with(make(gpt), config(1, parallel={"ep": size}), sgd)
        for block in engine.module.blocks:  # every expert gets equally many choices, whatever the tokens are
            block.feed_forward.router.forward = balanced
        with current_world().recorder.recording() as entries:
            engine.backward(engine(tokens, tokens))
        rows = [entry for entry in entries if entry.op == "all_to_all" and entry.kind == "data"]
        engine.destroy()
        return len(rows), sum(entry.nbytes for entry in rows)

    expected = tokens.numel() * TOP_K * HIDDEN * 4 * (size - 1) // size
    for number, nbytes in run_ranks(size, rank):
        assert number == 4 * NUM_LAYERS
        assert nbytes == 4 * NUM_LAYERS * expected


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_holds_the_memory_of_the_formula(stage: int) -> None:
    """4 ranks, ep 2: experts are in 2 parts, and each part is sharded over the 2 ranks that hold it."""
    shape = dataclasses.replace(SHAPE, hidden_size=64)
    experts = NUM_LAYERS * NUM_EXPERTS * 8 * 64 * 64
    dense = shape.num_parameters() - experts

    def rank() -> dict[str, int]:
        engine = start_with(make(lambda: GPT(shape, experts=ExpertFeedForward)), config(stage, parallel={"ep": 2}), sgd)
        engine.backward(engine(*batch(0, current_world().rank, 4)))
        engine.step()
        held: dict[str, int] = {}
        for entry in engine.memory_report().entries:
            held[entry.kind] = held.get(entry.kind, 0) + entry.nbytes
        engine.destroy()
        return held

    for held in run_ranks(4, rank):
        kinds = {"parameter": stage == 3, "gradient": stage >= 2, "optimizer state": stage >= 1}
        for kind, is_sharded in kinds.items():
            formula = 4 * (experts / 4 + dense / 4 if is_sharded else experts / 2 + dense)
            # Parameters begin at multiples of 64 elements, so that a rank may own a few more or less.
            assert held[kind] == pytest.approx(formula, rel=0.01), kind


def balanced(rows: torch.Tensor) -> torch.Tensor:
    """Scores by which token t goes to experts t and t + 1, modulo the number of experts."""
    token = torch.arange(len(rows))[:, None]
    expert = torch.arange(NUM_EXPERTS)
    first, second = expert == token % NUM_EXPERTS, expert == (token + 1) % NUM_EXPERTS
    return 2.0 * first + second + 0 * rows[:, :1]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_of_two_expert_parallel_ranks_goes_on_at_another_degree(stage: int, tmp_path: Path) -> None:
    def run(ep: int, first: int, last: int) -> dict[str, torch.Tensor]:
        engine = start_with(make(gpt), config(stage, gradient_clipping=0.5, parallel={"ep": ep}), sgd)
        if first:
            engine.load_checkpoint(str(tmp_path))
        for step in range(first, last):
            engine.backward(engine(*batch(step, current_world().rank, current_world().size)))
            engine.step()
        if not first:
            engine.save_checkpoint(str(tmp_path))
        values = engine.module_state_dict()
        engine.destroy()
        return values

    run_ranks(2, run, 2, 0, 2)
    expected = alone(2)[1]
    for values in run_ranks(2, run, 1, 2, STEPS):
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-6, msg=name)
