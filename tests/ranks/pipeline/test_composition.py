"""Precision, offload, recomputation, evaluation, traffic and failures of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from tests.helpers.pipeline_layers import NUM_LAYERS, ROWS, STEPS, WIDTH, batches, engine_of

HOST = {"zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}


def trained(size: int, pp: int, stage: int, schedule: str, virtual: int, *, tied: bool = True, **more: Any) -> Any:
    def job() -> Any:
        engine = engine_of(stage, pp, 4, schedule, virtual, tied=tied, **more)
        losses = [float(engine.train_batch(batches(engine.axes.batch.rank, step, 4))) for step in range(STEPS)]
        return losses, engine.module_state_dict(), engine.get_global_grad_norm()

    return run_ranks(size, job)[0]


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}, FP16, {"loss_reduction": "mean"}])
@pytest.mark.parametrize(
    ("stage", "schedule", "virtual"),
    [(0, "gpipe", 1), (1, "1f1b", 1), (2, "interleaved_1f1b", 2), (3, "1f1b", 1)],
)
def test_pipelines_of_any_number_of_stages_have_the_same_bits(
    stage: int, schedule: str, virtual: int, more: dict[str, Any]
) -> None:
    # In 16 bits, autograd rounds the sum of a tied weight's two gradients, and stages add them as they are.
    tied = not {"bf16", "fp16"} & set(more)
    losses, values, norm = trained(1, 1, stage, "gpipe", 1, tied=tied, **more)
    in_stages = trained(2, 2, stage, schedule, virtual, tied=tied, **more)
    assert losses == in_stages[0]
    torch.testing.assert_close(norm, in_stages[2], rtol=1e-6, atol=0)  # summed in another order
    for name, value in values.items():
        torch.testing.assert_close(in_stages[1][name], value, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (2, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
        (3, HOST),
        (3, {"zero": {"stage3_max_live_parameters": 50}}),
        (2, {"zero": {"offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}),
        (3, {"activation_checkpointing": {"modules": ["1", "2", "5"]}}),
        (3, {"parallel": {"dp_replicate": 2}}),
    ],
)
@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("zbv", 2)])
def test_offload_recomputation_and_hybrid_sharding_change_nothing(
    stage: int, more: dict[str, Any], schedule: str, virtual: int
) -> None:
    precision = {"bf16": more["bf16"]} if "bf16" in more else {}
    losses, values, _ = trained(4, 2, stage, schedule, virtual, **precision)
    found = trained(4, 2, stage, schedule, virtual, **more)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(losses), rtol=1e-6, atol=0)
    for name, value in values.items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-6, atol=1e-6, msg=name)


def test_evaluation_gives_the_loss_of_one_process_on_every_rank() -> None:
    def job() -> Any:
        engine = engine_of(3, current_world().size, 4, "1f1b", 1, tied=True)
        loss, outputs = engine.eval_batch(batches(0, 0, 4), return_logits=True)
        trained = engine.train_batch(batches(0, 0, 4))
        return float(loss), float(trained), None if outputs is None else [list(o.shape) for o in outputs]

    for rank, (loss, trained, shapes) in enumerate(run_ranks(2, job)):
        assert loss == pytest.approx(trained, rel=1e-6)
        assert shapes == ([[ROWS, WIDTH]] * 4 if rank == 1 else None)


def entries(
    size: int,
    pp: int,
    stage: int,
    num_micro: int,
    schedule: str = "1f1b",
    virtual: int = 1,
    *,
    tied: bool = False,
    **more: Any,
) -> list[list[Any]]:
    def job() -> Any:
        engine = engine_of(stage, pp, num_micro, schedule, virtual, tied=tied, **more)
        for step in range(2):
            engine.train_batch(batches(engine.axes.batch.rank, step, num_micro))
        with current_world().recorder.recording() as found:
            engine.train_batch(batches(engine.axes.batch.rank, 2, num_micro))
        return found, sum(group.buffer.layout.numel for group in engine.sharded.groups) * 4

    return run_ranks(size, job)


def test_one_send_crosses_a_boundary_for_each_direction_and_micro_batch() -> None:
    for rank, (found, _) in enumerate(entries(3, 3, 1, 5)):
        sent = [entry.label for entry in found if entry.op == "send" and entry.axis == "pp"]
        received = [entry for entry in found if entry.op == "recv" and entry.axis == "pp"]
        neighbours = 2 if rank == 1 else 1
        assert len(sent) == len(received) == neighbours * 5
        assert all(entry.nbytes == ROWS * WIDTH * 4 for entry in received)


@pytest.mark.parametrize(("stage", "gathers"), [(2, 1), (3, 1)])
def test_a_step_moves_two_psi_whatever_the_number_of_micro_batches(stage: int, gathers: int) -> None:
    for found, psi in entries(4, 2, stage, 6):
        data = [entry for entry in found if entry.kind == "data" and entry.axis != "pp"]
        half = sum(entry.nbytes for entry in data if entry.op == "reduce_scatter")
        assert half == psi / 2
        gathered = sum(entry.nbytes for entry in data if entry.op == "all_gather")
        assert gathered == gathers * psi / 2
        assert {entry.op for entry in data} == {"reduce_scatter", "all_gather"}


@pytest.mark.parametrize(("schedule", "crossing"), [("interleaved_1f1b", 3), ("zbv", 2), ("gpipe", 3)])
def test_virtual_stages_send_over_boundaries_between_ranks_alone(schedule: str, crossing: int) -> None:
    found = [entry for rank, _ in entries(2, 2, 1, 4, schedule, 2) for entry in rank if entry.axis == "pp"]
    sent = [entry for entry in found if entry.op == "send"]
    assert len(sent) == len([entry for entry in found if entry.op == "recv"]) == crossing * 2 * 4


def test_a_tied_weight_is_summed_once_whatever_the_number_of_micro_batches() -> None:
    for found, _ in entries(2, 2, 1, 6, tied=True):
        tied = [entry for entry in found if entry.axis.startswith("tied:") and entry.kind == "data"]
        assert [(entry.axis, entry.op) for entry in tied] == [("tied:0,1", "all_reduce")]
        assert WIDTH * WIDTH * 4 <= tied[0].nbytes <= WIDTH * WIDTH * 4 + 128  # padded


def test_parameters_beyond_the_limit_are_gathered_and_reduced_in_each_pass() -> None:
    num_micro = 6
    for found, psi in entries(4, 2, 3, num_micro, zero={"stage3_max_live_parameters": 50}):
        data = [entry for entry in found if entry.kind == "data" and entry.axis != "pp"]
        received = {op: sum(e.nbytes for e in data if e.op == op) for op in {entry.op for entry in data}}
        assert received == {"all_gather": 2 * num_micro * psi / 2, "reduce_scatter": num_micro * psi / 2}


@pytest.mark.parametrize("limit", [50, 10**6])
def test_a_second_sharding_inside_a_stage_changes_no_bit_and_backward_gathers_from_it(limit: int) -> None:
    zero = {"stage3_max_live_parameters": limit}
    losses, values, norm = trained(8, 2, 3, "1f1b", 1, zero=zero)
    found = trained(8, 2, 3, "1f1b", 1, zero={**zero, "zero_hpz_partition_size": 2})
    assert (found[0], found[2]) == (losses, norm)
    assert all(torch.equal(found[1][name], value) for name, value in values.items())
    for recorded, psi in entries(8, 2, 3, 6, zero={**zero, "zero_hpz_partition_size": 2}):
        gathered = {e.axis: 0 for e in recorded if e.op == "all_gather" and e.kind == "data"}
        for entry in recorded:
            if entry.op == "all_gather" and entry.kind == "data":
                gathered[entry.axis] += entry.nbytes
        once = limit > psi  # the stage is gathered once a step; else the forward of each micro-batch gathers
        expected = {"dp": psi * 3 / 4} if once else {"dp": 6 * psi * 3 / 4, "fsdp:2x2/1": 6 * psi / 2}
        assert gathered == pytest.approx(expected, rel=0.2)  # padded


def test_a_batch_that_is_too_short_is_an_error_on_all_stages_and_the_next_one_runs() -> None:
    def job() -> Any:
        engine = engine_of(2, 2, 4, "1f1b", 1, tied=True)
        num_here = 4 if current_world().rank < 2 else 3
        with pytest.raises(UsageError, match="ended before the 4 micro-batches of a step: 3 on pipeline rank 1"):
            engine.train_batch(batches(0, 0, num_here))
        with pytest.raises(StopIteration):
            engine.train_batch(iter([]))
        loss = float(engine.train_batch(batches(0, 0, 4)))
        other = [list(value.shape) for value in engine.module.parameters()]
        return loss, other

    first, *others = run_ranks(4, job)
    assert all(loss == first[0] for loss, _ in others)


@pytest.mark.parametrize(
    ("stage", "schedule", "virtual"), [(1, "1f1b", 1), (1, "zb_h1", 1), (3, "interleaved_1f1b", 2)]
)
@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("failing", [0, 3])
def test_a_stage_that_raises_is_named_on_all_ranks_and_the_next_batch_runs(
    stage: int, schedule: str, virtual: int, is_backward: bool, failing: int
) -> None:
    expected = trained(4, 2, stage, schedule, virtual)[0][0]

    def job() -> Any:
        engine = engine_of(stage, 2, 4, schedule, virtual, tied=True)
        layer = engine.module._modules[str(NUM_LAYERS - 2 if engine.is_last_stage() else 1)]
        calls = [0]

        def fail(*_: Any) -> None:
            calls[0] += 1
            if calls[0] == 2:
                raise ArithmeticError("out of luck")

        is_failing = current_world().rank == failing
        handle = None
        if is_failing:
            handle = layer.register_full_backward_hook(fail) if is_backward else layer.register_forward_hook(fail)
        kind = "B1|W1|I1" if is_backward else "F1"
        match = "out of luck" if is_failing else f"rank {failing} raised ArithmeticError in .*({kind}) .*out of luck"
        error: type[Exception] = ArithmeticError if is_failing else UsageError
        with pytest.raises(error, match=match):
            engine.train_batch(batches(engine.axes.batch.rank, 0, 4))
        if handle is not None:
            handle.remove()
        return float(engine.train_batch(batches(engine.axes.batch.rank, 0, 4)))

    for loss in run_ranks(4, job):
        assert loss == pytest.approx(expected, rel=1e-6)


def test_calls_of_a_model_that_is_not_in_stages_are_refused() -> None:
    def job() -> None:
        engine = engine_of(1, 2, 4, "1f1b", 1, tied=True)
        for call in (lambda: engine(torch.zeros(1)), lambda: engine.backward(torch.zeros(())), engine.step):
            with pytest.raises(UsageError, match="train_batch"):
                call()

    run_ranks(2, job)
