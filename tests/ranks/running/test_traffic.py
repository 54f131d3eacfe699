"""No needless communication: the collectives of a step are these, in this order, and their bytes are 2 Psi or 3 Psi.

At stage 3 backward begins with the root and the last block: they stay gathered, so one block of 0.4 Psi is gathered
twice, and 3 Psi are 2.4.

The model's sizes leave no padding. Psi = 10,240 parameters x 4 bytes: root 2,048 elements, two blocks of 4,096.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal import zero
from shoal.comm.recorder import Entry
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.helpers.models import VOCABULARY, cross_entropy
from tests.helpers.training import batch, config, run_steps, start, start_with

PSI = 40_960  # bytes


class Unpadded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY + 3, 64)
        self.blocks = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(2)])
        self.head = nn.Linear(64, VOCABULARY + 3, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return cross_entropy(self.head(x), targets)


def third_step(world: int, stage: int, **sections: Any) -> list[list[Entry]]:
    """What each rank issues in the third step, when orders have been recorded."""

    def job() -> list[Entry]:
        engine = start(Unpadded, config(stage, **sections))
        accumulation = engine.gradient_accumulation_steps()
        run_steps(engine, 2)
        with current_world().recorder.recording() as entries:
            run_steps(engine, 1, first=2 * accumulation)
        engine.destroy()
        return entries

    return run_ranks(world, job)


def calls(entries: list[Entry]) -> list[tuple[str, str, str]]:
    return [(entry.axis, entry.op, entry.label) for entry in entries]


def data_bytes(entries: list[Entry]) -> int:
    return sum(entry.nbytes for entry in entries if entry.kind == "data")


REDUCED_BACKWARDS = ["blocks.1", "blocks.0", "root"]
FORWARDS = ["root", "blocks.0", "blocks.1"]
GATHERED_AGAIN = "blocks.0"
CONTROL = ("dp", "exchange", "step")

EXPECTED = {
    0: [*(("dp", "all_reduce", unit) for unit in REDUCED_BACKWARDS), CONTROL],
    1: [
        *(("dp", "reduce_scatter", unit) for unit in REDUCED_BACKWARDS),
        CONTROL,
        *(("dp", "all_gather", unit) for unit in FORWARDS),
    ],
    2: [
        *(("dp", "reduce_scatter", unit) for unit in REDUCED_BACKWARDS),
        CONTROL,
        *(("dp", "all_gather", unit) for unit in FORWARDS),
    ],
    3: [
        *(("dp", "all_gather", unit) for unit in FORWARDS),
        ("dp", "all_gather", GATHERED_AGAIN),
        *(("dp", "reduce_scatter", unit) for unit in REDUCED_BACKWARDS),
        CONTROL,
    ],
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("stage", "psis"), [(0, 2), (1, 2), (2, 2), (3, 2.4)])
def test_a_step_moves_2_psi_at_stages_0_to_2_and_less_than_3_psi_at_stage_3_and_nothing_else(
    stage: int, psis: float, world: int
) -> None:
    for entries in third_step(world, stage):
        assert calls(entries) == EXPECTED[stage]
        assert data_bytes(entries) == round(psis * PSI) * (world - 1) // world
        assert [entry.nbytes for entry in entries if entry.kind == "control"] == [32 * (world - 1)]


class InARow(nn.Sequential):
    """The model's output is that of its last block."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(VOCABULARY + 3, 64), *(nn.Linear(64, 64, bias=False) for _ in range(3)))


@pytest.mark.parametrize("names", [["1", "2", "3"], ["2", "3"]])
def test_where_the_models_output_is_a_units_backward_reduces_that_unit_too(names: list[str]) -> None:
    def job() -> list[list[tuple[str, str, str]]]:
        engine = start(InARow, config(3, units={"names": names}))
        found: list[list[tuple[str, str, str]]] = []
        for step in range(3):
            tokens, _ = batch(step, current_world().rank, 2)
            with current_world().recorder.recording() as entries:
                engine.backward(engine(tokens).square().mean())
                assert all(parameter.grad is None for parameter in engine.module.parameters())
            found.append(calls(entries))
            with current_world().recorder.recording() as entries:
                engine.step()
            found.append(calls(entries))
        engine.destroy()
        return found

    for found in run_ranks(2, job):
        reduced = [("dp", "reduce_scatter", unit) for unit in (*reversed(names), "root")]
        assert [call for call in found[-2] if call[1] == "reduce_scatter"] == reduced
        assert found[-1] == [CONTROL]


def test_one_rank_moves_nothing() -> None:
    for stage in (0, 1, 2, 3):
        assert [data_bytes(entries) for entries in third_step(1, stage)] == [0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("stage", "psis"), [(0, 2), (1, 2), (2, 2), (3, 2.4)])
def test_16_bit_training_moves_half_of_the_bytes(stage: int, psis: float, precision: str) -> None:
    for entries in third_step(2, stage, **{precision: {"enabled": True}}):
        assert data_bytes(entries) == round(psis * PSI) // 2 // 2
        assert {entry.dtype for entry in entries if entry.kind == "data"} == {
            torch.bfloat16 if precision == "bf16" else torch.float16
        }


@pytest.mark.parametrize(
    ("stage", "times"),
    # In (N - 1) / N Psi. Stages 0 and 1 reduce once a step, 2 and 3 once a micro-batch; 3 gathers 1.4 Psi in each.
    [(0, 2), (1, 2), (2, 4), (3, 7.2)],
)
def test_three_micro_batches_cost_what_the_placement_between_them_says(stage: int, times: float) -> None:
    for entries in third_step(2, stage, gradient_accumulation_steps=3):
        assert data_bytes(entries) == round(times * PSI) // 2


def test_communication_data_type_is_the_dtype_of_the_reduction() -> None:
    for stage in (0, 1, 2, 3):
        for entries in third_step(2, stage, communication_data_type="bf16"):
            reductions = [entry for entry in entries if entry.op in ("reduce_scatter", "all_reduce")]
            assert {entry.dtype for entry in reductions} == {torch.bfloat16}
            assert sum(entry.nbytes for entry in reductions) == (2 if stage == 0 else 1) * PSI // 2 // 2


def test_mics_gathers_within_its_group_and_sums_shards_over_the_groups() -> None:
    for entries in third_step(4, 3, zero_optimization={"mics_shard_size": 2}):
        # Each axis has its order; how far one is ahead of the other is a matter of overlap.
        by_axis = {
            axis: [call[1:] for call in calls(entries) if call[0] == axis] for axis in ("dp_shard", "dp_replicate")
        }
        assert by_axis["dp_shard"] == [
            *(("all_gather", unit) for unit in FORWARDS),
            ("all_gather", GATHERED_AGAIN),
            *(("reduce_scatter", unit) for unit in REDUCED_BACKWARDS),
        ]
        assert by_axis["dp_replicate"] == [("all_reduce", unit) for unit in REDUCED_BACKWARDS]
        assert calls(entries)[-1] == CONTROL
        # 1.4 gathers and 1 reduction over 2 ranks: 2.4 x 1/2; 1 all_reduce of half over 2 ranks: 2 x 1/2 x 1/2.
        assert data_bytes(entries) == round(2.4 * PSI) // 2 + PSI // 2


def test_mics_with_accumulation_sums_over_the_groups_once_a_step() -> None:
    for entries in third_step(4, 3, gradient_accumulation_steps=3, zero_optimization={"mics_shard_size": 2}):
        outer = [entry.label for entry in entries if entry.axis == "dp_replicate"]
        assert outer == ["blocks.1", "blocks.0", "root"]


def test_hpz_gathers_for_backward_within_its_group() -> None:
    for entries in third_step(4, 3, zero_optimization={"zero_hpz_partition_size": 2}):
        assert calls(entries) == [
            *(("dp", "all_gather", unit) for unit in FORWARDS),
            ("fsdp:2x2/1", "all_gather", GATHERED_AGAIN),
            *(("dp", "reduce_scatter", unit) for unit in REDUCED_BACKWARDS),
            CONTROL,
        ]
        assert data_bytes(entries) == 2 * PSI * 3 // 4 + round(0.4 * PSI) // 2


def test_units_with_a_short_reuse_distance_are_gathered_once() -> None:
    for entries in third_step(2, 3, zero_optimization={"stage3_max_reuse_distance": 1_000_000_000}):
        assert calls(entries) == [
            *(("dp", "all_gather", unit) for unit in FORWARDS),
            *(("dp", "reduce_scatter", unit) for unit in REDUCED_BACKWARDS),
            CONTROL,
        ]


def test_what_backward_begins_with_is_released_where_too_much_would_be_gathered() -> None:
    for entries in third_step(2, 3, zero_optimization={"stage3_max_live_parameters": 1}):
        assert calls(entries) == [
            *(("dp", "all_gather", unit) for unit in FORWARDS),
            *(("dp", "all_gather", unit) for unit in ["root", "blocks.1"]),
            ("dp", "reduce_scatter", "blocks.1"),
            ("dp", "all_gather", "blocks.0"),
            *(("dp", "reduce_scatter", unit) for unit in ["blocks.0", "root"]),
            CONTROL,
        ]


def test_a_forward_without_a_backward_leaves_nothing_that_outlives_a_change_of_the_parameters() -> None:
    def job(stage: int) -> list[float]:
        engine = start(Unpadded, config(stage))
        losses = run_steps(engine, 2)

        def forward_alone(index: int) -> None:
            losses.append(float(engine(*batch(index, 0, 1)).detach()))

        engine.backward(engine(*batch(2, 0, 1)))
        forward_alone(3)
        engine.step()
        forward_alone(3)
        for name, parameter in engine.module.named_parameters():
            engine.access.set_full_parameter(parameter, torch.full(parameter.shape, 0.01 * len(name)))
        forward_alone(3)
        engine.load_module_state_dict({name: v * 0.5 for name, v in engine.module_state_dict().items()})
        forward_alone(3)
        engine.destroy()
        return losses

    assert run_ranks(2, job, 3) == run_ranks(2, job, 2)


def test_prefetch_brings_gathers_forward_but_adds_none() -> None:
    for entries in third_step(2, 3, zero_optimization={"stage3_prefetch_bucket_size": 0}):
        assert data_bytes(entries) == round(2.4 * PSI) // 2


def test_evaluation_gathers_each_unit_once() -> None:
    def job(stage: int) -> list[Entry]:
        engine = start(Unpadded, config(stage))
        run_steps(engine, 1)
        for _ in range(3):
            with torch.no_grad(), current_world().recorder.recording() as entries:
                engine(*batch(9, 0, 1))
        engine.destroy()
        return entries

    for stage in (0, 1, 2):
        assert run_ranks(2, job, stage) == [[], []]
    for entries in run_ranks(2, job, 3):
        assert calls(entries) == [("dp", "all_gather", unit) for unit in FORWARDS]


def test_start_up_broadcasts_every_parameter_once() -> None:
    def job(stage: int) -> list[Entry]:
        with current_world().recorder.recording() as entries:
            engine = start(Unpadded, config(stage))
        engine.destroy()
        return entries

    for stage in (0, 1, 2, 3):
        _, received = run_ranks(2, job, stage)
        assert sum(entry.nbytes for entry in received if entry.op == "broadcast") == PSI


# The start


@pytest.mark.parametrize("how", ["zero.Init", "built directly"])
def test_initialize_sends_each_parameter_once(how: str) -> None:
    """All ranks gather what ``zero.Init`` left on each; what each has built for itself is sent by rank 0."""

    def job() -> list[Entry]:
        with zero.Init(enabled=how == "zero.Init"):
            model = Unpadded()
        with current_world().recorder.recording() as entries:
            engine = start_with(model, config(3))
        engine.destroy()
        return entries

    received = run_ranks(2, job)[1]
    sent = [(entry.op, entry.label, entry.nbytes) for entry in received if entry.op != "gather_objects"]
    if how == "zero.Init":
        assert sent == [("all_gather", "zero.Init", nbytes) for nbytes in (8_192, 8_192, 2_048, 2_048)]
    else:
        assert sent == [
            ("broadcast", unit, nbytes)
            for unit, nbytes in [("blocks.0", 16_384), ("blocks.1", 16_384), ("root", 8_192)]
        ]
