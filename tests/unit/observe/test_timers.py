"""Times by phase, under Shoal's names and DeepSpeed's."""

from __future__ import annotations

import time

import pytest
import torch

import shoal
from shoal.device import Device
from shoal.observe.timers import StepTimers


def timers(*, is_on: bool) -> StepTimers:
    return StepTimers(Device(torch.device("cpu")), is_on=is_on)


def test_a_phase_adds_up_until_the_step_ends() -> None:
    found = timers(is_on=True)
    for _ in range(2):
        with found.phase("forward"):
            time.sleep(0.01)
    assert found("fwd").elapsed(reset=False) == found("fwd_microstep").elapsed(reset=False) >= 20
    assert found("forward").mean() == pytest.approx(found("fwd").elapsed(reset=False) / 2)
    assert found.end_step() == {"forward": pytest.approx(found("fwd").elapsed(reset=False))}
    assert found.end_step() == {}
    assert found("fwd").elapsed() >= 20
    assert found("fwd").elapsed() == found("fwd").mean() == 0.0


def test_reading_a_time_resets_it_unless_it_is_told_not_to() -> None:
    found = timers(is_on=True)
    with found.phase("step"):
        time.sleep(0.001)
    assert found("step").elapsed(reset=False) > 0
    assert found("step_microstep").elapsed() > 0
    assert found("step").elapsed() == 0.0


def test_a_script_may_have_timers_of_its_own() -> None:
    found = timers(is_on=True)
    found("data").stop()  # was not started
    assert found("data").elapsed() == 0.0
    for _ in range(2):
        begin = time.perf_counter()
        found("data").start()
        time.sleep(0.002)
        found("data").stop(reset=True)
    first = found("data").elapsed(reset=False)
    assert 2 <= first <= 1000 * (time.perf_counter() - begin)  # of the second time alone
    assert found("data").mean() == first
    found("data").reset()
    assert found("data").elapsed() == 0.0


def test_timers_that_are_off_measure_nothing() -> None:
    found = timers(is_on=False)
    with found.phase("forward"):
        found("data").start()
    found("data").stop()
    assert (found("fwd").elapsed(), found("data").elapsed(), found.end_step()) == (0.0, 0.0, {})


@pytest.mark.usefixtures("deepspeed_classes")
@pytest.mark.parametrize("is_on", [True, False])
def test_an_engine_logs_the_times_of_its_phases(is_on: bool) -> None:
    settings = {
        "train_batch_size": 1, "wall_clock_breakdown": is_on, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }  # fmt: skip
    engine = shoal.initialize(model=torch.nn.Linear(2, 2), config=settings)[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    found = engine.get_wall_clock_timers()
    assert list(found) == (["fwd", "bwd", "bwd_allreduce", "step"] if is_on else [])
    assert all(milliseconds > 0 for milliseconds in found.values())
    assert (engine.timers("bwd").elapsed(reset=False) > 0) == is_on
