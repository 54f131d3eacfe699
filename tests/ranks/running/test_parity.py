"""The same numbers at every stage: bit-equal among the stages, and those of one process within rounding."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.processor import has_instructions_for
from tests.helpers.any_two import any_two
from tests.helpers.models import OddParameters, Plain
from tests.helpers.training import (
    STAGES,
    Trained,
    adamw,
    are_bit_equal,
    assert_like_alone,
    assert_ranks_agree,
    config,
    largest_difference,
    make,
    start_with,
    train_alone,
    train_by_hand,
    train_ranks,
)

CLIP = 0.5  # below the norm of every step here, so it always bites


@any_two({"clip": [0.0, CLIP], "accumulation": [1, 3], "world": [1, 2, 3, 4, 5]})
def test_fp32_stages_are_bit_equal_and_like_one_process(world: int, accumulation: int, clip: float) -> None:
    alone = train_alone(Plain, world=world, accumulation=accumulation, clip=clip)
    assert min(alone.norms) > CLIP
    by_stage: list[list[Trained]] = []
    for stage in STAGES:
        settings = config(stage, gradient_accumulation_steps=accumulation, gradient_clipping=clip)
        results = train_ranks(world, Plain, settings)
        assert_like_alone(results, alone, atol=1e-5)
        by_stage.append(results)
    # With accumulation stages 2 and 3 sum over ranks first and then over micro-batches, 0 and 1 the other way round.
    pairs = [(0, 1), (1, 2), (2, 3)] if accumulation == 1 else [(0, 1), (2, 3)]
    for low, high in pairs:
        for ours, theirs in zip(by_stage[low], by_stage[high], strict=True):
            assert ours.losses == theirs.losses, f"stages {low} and {high}"
            assert ours.norms == theirs.norms, f"stages {low} and {high}"
            assert are_bit_equal(ours.parameters, theirs.parameters), f"stages {low} and {high}"


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_fp32_adamw_is_bit_equal_at_all_stages_and_like_one_process_within_1e_4(world: int, accumulation: int) -> None:
    # Adam divides by the root of the gradient's own square, so a rounding error of a tiny gradient is not tiny in the
    # update (learning rate 1e-2): the bound is wider than that of SGD.
    alone = train_alone(OddParameters, adamw, world=world, accumulation=accumulation, clip=CLIP)
    found = {
        stage: train_ranks(
            world, OddParameters, config(stage, gradient_accumulation_steps=accumulation, gradient_clipping=CLIP), adamw
        )
        for stage in STAGES
    }
    for results in found.values():
        assert_like_alone(results, alone, atol=1e-4)
    assert are_bit_equal(found[0][0].parameters, found[1][0].parameters)
    assert are_bit_equal(found[2][0].parameters, found[3][0].parameters)
    if accumulation == 1:
        assert are_bit_equal(found[1][0].parameters, found[2][0].parameters)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_loss_backward_gives_the_numbers_of_engine_backward(world: int, accumulation: int) -> None:
    alone = train_alone(Plain, world=world, accumulation=accumulation, clip=CLIP)
    for stage in STAGES:
        settings = config(stage, gradient_accumulation_steps=accumulation, gradient_clipping=CLIP)
        results = train_ranks(world, Plain, settings, style="plain")
        assert_like_alone(results, alone, atol=1e-5)


def test_the_values_of_rank_0_are_everybodys() -> None:
    def job(stage: int) -> tuple[torch.Tensor, torch.Tensor]:
        rank = current_world().rank
        model = make(Plain, seed=rank)
        engine = start_with(model, config(stage))
        engine.destroy()
        return model.blocks[1].up.weight.detach().clone(), make(Plain, seed=0).blocks[1].up.weight.detach()

    for stage in STAGES:
        for held, of_rank_0 in run_ranks(3, job, stage):
            assert torch.equal(held, of_rank_0)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("precision", "dtype", "scale"),
    [("bf16", torch.bfloat16, 1.0), ("fp16", torch.float16, 256.0)],
    ids=["bf16", "fp16"],
)
def test_sixteen_bit_training_follows_an_fp32_main_parameter_reference(
    precision: str, dtype: torch.dtype, scale: float, world: int, accumulation: int
) -> None:
    section = {"enabled": True} if precision == "bf16" else {"enabled": True, "loss_scale": scale}
    # Four updates of at most 1e-2. A processor with fp16 instructions adds in fp16, in an order that the number of rows
    # chooses: then each update may be one rounding away.
    bound = 4e-2 * 2**-11 if precision == "fp16" and has_instructions_for("fp16") else 1e-6
    hand = train_by_hand(Plain, dtype, adamw, world=world, steps=4, accumulation=accumulation, clip=CLIP, scale=scale)
    found = []
    for stage in STAGES:
        settings = config(
            stage, gradient_accumulation_steps=accumulation, gradient_clipping=CLIP, **{precision: section}
        )
        results = train_ranks(world, Plain, settings, adamw, steps=4)
        assert_ranks_agree(results)
        found.append(results)
        assert {p.dtype for p in results[0].parameters.values()} == {dtype}
        assert largest_difference(results[0].main_parameters, hand.main_parameters) <= bound
        assert are_bit_equal(results[0].parameters, {n: m.to(dtype) for n, m in results[0].main_parameters.items()})
        losses = [sum(values) / world for values in zip(*(r.losses for r in results), strict=True)]
        assert max(abs(a - b) for a, b in zip(losses, hand.losses, strict=True)) <= 1e-3
    if accumulation == 1:
        for results in found[1:]:
            for ours, theirs in zip(results, found[0], strict=True):
                assert ours.losses == theirs.losses
                assert are_bit_equal(ours.main_parameters, theirs.main_parameters)
                assert are_bit_equal(ours.parameters, theirs.parameters)
