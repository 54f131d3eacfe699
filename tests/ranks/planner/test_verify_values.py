"""The first value that ranks compute otherwise than one process is named; rounding is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.models import GPT, named_config
from shoal.planner.value_trace import Value, ValueTrace, sketch
from shoal.planner.verify_values import Comparison, compare, one_process

ROWS, LENGTH = 2, 32
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "train_micro_batch_size_per_gpu": ROWS}


def gpt() -> nn.Module:
    model = GPT(named_config("nano", sequence_length=LENGTH))
    model.attend_by(shoal.attention)
    return model


def tokens_of(step: int, micro: int) -> torch.Tensor:
    return torch.randint(0, 256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(100 * step + micro))


def traced(
    model: nn.Module, config: dict[str, Any], num_ranks: int, change: Callable[[nn.Module, int], None] | None = None
) -> list[Value]:
    """Two steps of copies of the model. ``change(model, rank)`` is called once it is sharded."""
    copies = [copy.deepcopy(model) for _ in range(num_ranks)]

    def rank() -> list[Value]:
        from shoal.comm.world import current_world

        mine = copies[current_world().rank]
        trace = ValueTrace()
        engine: Any = shoal.initialize(model=mine, config=config, parts=[trace])[0]
        if change is not None:
            change(engine.module, engine.global_rank)
        batches, context = engine.axes.batch, engine.sequence_context

        def arguments(step: int, micro: int) -> tuple[torch.Tensor, ...]:
            tokens = tokens_of(step, micro * batches.size + batches.rank)
            if context is None:
                return tokens, tokens
            return context.shard(tokens), context.shard(tokens), context.positions(LENGTH, tokens.device)

        for step in range(2):
            number = engine.gradient_accumulation_steps()
            if hasattr(engine, "train_batch"):
                engine.train_batch(arguments(step, micro) for micro in range(number))
                continue
            for micro in range(number):
                engine.backward(engine(*arguments(step, micro)))
                engine.step()
        engine.destroy()
        return trace.values

    return [value for values in run_ranks(num_ranks, rank) for value in values]


@pytest.fixture(scope="module")
def base() -> nn.Module:
    torch.manual_seed(0)
    return gpt()


def verified(
    model: nn.Module,
    config: dict[str, Any],
    num_ranks: int,
    change: Callable[[nn.Module, int], None] | None = None,
) -> Comparison:
    config = {**ADAM, **config}
    alone = one_process(config, num_ranks)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
            parameter.mul_(1 + torch.finfo(torch.float32).eps * signs)
    wide = {key: value for key, value in alone.items() if key != "bf16"}
    runs = traced(model, config, num_ranks, change), traced(model, alone, 1), traced(other, wide, 1)
    return compare(*runs)


@pytest.mark.parametrize(
    ("config", "num_ranks"),
    [
        ({"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}, 3),
        ({"parallel": {"tp": 2}, "zero_optimization": {"stage": 2}}, 4),
        ({"parallel": {"sp": 2}, "zero_optimization": {"stage": 3}}, 2),
        ({"parallel": {"cp": 2}}, 2),
        ({"parallel": {"pp": 2}, "gradient_accumulation_steps": 3}, 2),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, 2),
        ({"activation_checkpointing": {"modules": ["Block"]}, "zero_optimization": {"stage": 3}}, 2),
    ],
)
def test_what_is_right_differs_by_rounding_and_every_parameter_is_compared(
    base: nn.Module, config: dict[str, Any], num_ranks: int
) -> None:
    result = verified(base, config, num_ranks)
    assert result.is_equal, result.report()
    names = {name for name, _ in base.named_parameters()}
    for phase in ("gradient", "parameter"):
        compared = {(e.value.step, e.value.name) for e in result.differences if e.value.phase == phase}
        assert compared == {(step, name) for step in (1, 2) for name in names}
    num_micro = one_process({**ADAM, **config}, num_ranks)["gradient_accumulation_steps"]
    losses = [e for e in result.differences if e.value.phase == "loss"]
    assert len(losses) == 2 * num_micro
    assert result.split or "tp" not in config.get("parallel", {})


def test_compressed_gradients_part_at_the_gradient_of_the_first_step(base: nn.Module) -> None:
    result = verified(base, {"zero_optimization": {"stage": 2}, "wire": {"reduce": "int4"}}, 2)
    assert result.first is not None
    assert (result.first.value.step, result.first.value.phase) == (1, "gradient")
    assert 0.01 < result.first.relative < 0.5
    assert "The runs part at step 1: gradient of " in result.report()


def test_a_layer_that_one_rank_computes_otherwise_is_named(base: nn.Module) -> None:
    def change(model: nn.Module, rank: int) -> None:
        if rank == 1:
            block: Any = model.get_submodule("blocks.1.feed_forward")
            forward = block.up.forward
            block.up.forward = lambda hidden: forward(hidden) * 1.001

    result = verified(base, {"zero_optimization": {"stage": 1}}, 2, change)
    assert result.first is not None
    assert (result.first.value.name, result.first.value.micro) == ("blocks.1.feed_forward.up", 1)
    assert 5e-4 < result.first.relative < 2e-3
    assert "step 1, micro-batch 1: output of blocks.1.feed_forward.up" in result.report()


def test_ranks_that_attend_to_their_own_positions_alone_part_at_the_loss(base: nn.Module) -> None:
    local = copy.deepcopy(base)
    local.attend_by(nn.functional.scaled_dot_product_attention)  # type: ignore[operator]
    result = verified(local, {"parallel": {"sp": 2}}, 2)
    assert result.first is not None and result.first.value.phase == "loss"


def test_a_parameter_that_is_not_trained_is_missing(base: nn.Module) -> None:
    config = {**ADAM, "zero_optimization": {"stage": 2}}
    alone = traced(base, one_process(config, 2), 1)
    frozen = copy.deepcopy(base)
    frozen.get_parameter("blocks.0.feed_forward.up.weight").requires_grad_(False)
    result = compare(traced(frozen, config, 2), alone, alone)
    assert result.missing == ("blocks.0.feed_forward.up.weight",) and not result.is_equal
    assert "no rank has a gradient or value of: blocks.0.feed_forward.up.weight" in result.report()


def test_the_norm_of_a_sketch_is_about_that_of_the_tensor() -> None:
    generator = torch.Generator().manual_seed(3)
    for shape in ((1,), (63,), (200, 33), (64, 1000)):
        ratios = []
        for _ in range(20):
            a, b = (torch.randn(shape, generator=generator) for _ in range(2))
            difference = torch.tensor(sketch(a)) - torch.tensor(sketch(b))
            ratios.append(float(difference.norm() / (a - b).norm()))
        assert 0.85 < sum(ratios) / len(ratios) < 1.15
