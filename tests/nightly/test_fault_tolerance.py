"""Replicas that are killed at each place of a step, in each layout; two at once; and all but a new one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from tests.helpers.replicas import Samples, loss_of, model_of, running, settings, trained_alone

BF16 = {"bf16": {"enabled": True}}
TWO_MICRO_BATCHES = {"gradient_accumulation_steps": 2}
OFFLOADED: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
}


@pytest.mark.parametrize(
    ("place", "size", "stage", "sections"),
    [
        ("forward", 1, 0, {}),
        ("arrive", 1, 3, {}),
        ("mean", 1, 2, TWO_MICRO_BATCHES),
        ("vote", 1, 1, BF16),
        ("after", 1, 1, {}),
        ("mean", 2, 1, {}),
        ("mean", 2, 3, BF16),
        ("after", 2, 2, OFFLOADED),
        ("forward", 2, 0, TWO_MICRO_BATCHES),
        ("mean", 1, 1, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    ],
)  # fmt: skip
def test_the_rest_goes_on_alike(place: str, size: int, stage: int, sections: dict[str, Any], tmp_path: Path) -> None:
    with running(tmp_path, 3, settings(stage, **sections), size) as run:
        survivors, victim = [run.start(), run.start()], run.start(f"{place} 3")
        run.wait_until_dead(victim)
        again = run.start()
        run.wait_for(lambda: len(run.steps(again)) > 3)
        run.stop([*survivors, again])
        run.check_samples()
        run.check_alike([*survivors, victim, again])
        counts = [len(line["contributors"]) for line in run.steps(survivors[0])]
        # A vote comes after the sum: its samples are used, and the step after goes on without it.
        assert counts[:3] == [3, 3, 3] and min(counts) == 2 and counts[-1] == 3
        assert (counts[3] == 3) is (place == "vote")
        if size == 1 and not sections:
            alone = trained_alone(run, stage)
            steps = run.steps(survivors[0])
            assert [line["loss"] for line in steps] == pytest.approx([loss for _, loss in alone], rel=1e-6)
            assert [line["digest"] for line in steps] == [bits for bits, _ in alone]


def test_two_of_three_are_killed_at_once_and_come_back_one_after_the_other(tmp_path: Path) -> None:
    with running(tmp_path, 3, settings(2)) as run:
        first, *victims = run.start(), run.start("mean 4"), run.start("mean 4")
        for victim in victims:
            run.wait_until_dead(victim)
        again = run.start()
        run.wait_for(lambda: len(run.steps(again)) > 3)
        last = run.start()
        run.wait_for(lambda: len(run.steps(last)) > 3)
        run.stop([first, again, last])
        run.check_samples()
        run.check_alike([*victims, again, last])


def test_a_replica_that_has_just_joined_goes_on_alone(tmp_path: Path) -> None:
    with running(tmp_path, 1, settings(1)) as run:
        first = run.start("after 200")
        run.wait_for(lambda: len(run.steps(first)) > 3)
        second = run.start()
        run.wait_until_dead(first)
        run.wait_for(lambda: len(run.steps(second)) > 3 and run.steps(second)[-1]["step"] > 210)
        run.stop([second])
        run.check_alike([])


@pytest.mark.parametrize(("place", "size", "stage"), [("mean 7", 1, 1), ("forward 6", 1, 0), ("arrive 7", 2, 3)])
def test_local_steps_do_the_same_at_a_synchronisation(place: str, size: int, stage: int, tmp_path: Path) -> None:
    config = settings(stage, local_steps={"every": 4}, parallel={"dp_shard": size})
    with running(tmp_path, 3, config, size) as run:
        survivors, victim = [run.start(), run.start()], run.start(place)
        run.wait_until_dead(victim)
        again = run.start()
        run.wait_for(lambda: len(run.steps(again)) > 12)
        run.stop([*survivors, again])
        run.check_samples(every=4)
        run.check_alike([*survivors, victim, again], every=4)
        counts = [len(line["contributors"]) for line in run.steps(survivors[0]) if line["step"] % 4 == 0]
        assert counts[:2] == [3, 2] and counts[-1] == 3
        assert run.steps(again)[0]["step"] % 4 == 0  # the state of a synchronisation


def test_with_local_steps_the_losses_are_those_of_rounds_without_the_replica_that_was_killed(tmp_path: Path) -> None:
    with running(tmp_path, 2, settings(0, local_steps={"every": 4})) as run:
        first, second = run.start(), run.start("mean 7")
        run.wait_until_dead(second)
        run.wait_for(lambda: len(run.steps(first)) > 16)
        run.stop([first])
        steps, taken = run.steps(first)[:16], run.taken()
        serials = [steps[3]["contributors"], steps[7]["contributors"]]
        seed = run.seed()
    mine, (other,) = serials[1][0], set(serials[0]) - set(serials[1])
    engines = {s: shoal.initialize(model=model_of(seed), config=settings(0))[0] for s in (mine, other)}
    anchor = [p.detach().clone() for p in engines[mine].module.parameters()]
    momentum, losses = [torch.zeros_like(value) for value in anchor], []
    for step in range(16):
        for serial in (mine, other) if step < 4 else (mine,):
            inputs = torch.stack([Samples()[index][0] for index in taken[step, serial, 0]])
            engines[serial].backward(loss_of(engines[serial](inputs)))
            engines[serial].step()
        losses.append(engines[mine].accumulation.step_loss)
        if step % 4 == 3:
            there = [engines[serial].module for serial in ((mine, other) if step < 4 else (mine,))]
            with torch.no_grad():
                for value, moment, *parameters in zip(anchor, momentum, *(m.parameters() for m in there), strict=True):
                    gradient = sum(value - parameter for parameter in parameters) / len(parameters)
                    moment.mul_(0.9).add_(gradient)
                    value.sub_(gradient + 0.9 * moment, alpha=0.7)
                    parameters[0].copy_(value)
    for engine in engines.values():
        engine.destroy()
    assert [line["loss"] for line in steps] == pytest.approx(losses, rel=1e-4)


def test_a_replica_that_is_stopped_is_left_out_after_the_time_out_and_told_so(tmp_path: Path) -> None:
    with running(tmp_path, 2, settings(1), timeout_seconds=4) as run:
        first, second = run.start(), run.start()
        run.wait_for(lambda: len(run.steps(first)) > 3)
        (stopped,) = run.processes[second]
        os.kill(stopped.pid, signal.SIGSTOP)
        num_steps = len(run.steps(first))
        run.wait_for(lambda: len(run.steps(first)) > num_steps + 5)
        os.kill(stopped.pid, signal.SIGCONT)
        stopped.join(30)
        assert stopped.exitcode == 1  # [quorum-lost]
        run.stop([first])
        run.check_alike([second])
        run.check_samples()
