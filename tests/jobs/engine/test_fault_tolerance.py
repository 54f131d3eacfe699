"""Replicas that are jobs of their own: killed, left out, started again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import ModelError
from tests.helpers.replicas import Task, lose_and_replace_the_second, running, settings, trained_alone


def test_a_replica_that_is_killed_in_the_sum_is_left_out_and_joins_again_with_the_same_bits(tmp_path: Path) -> None:
    with running(tmp_path, 2, settings(1)) as run:
        steps = run.steps(lose_and_replace_the_second(run))
        assert steps[-1]["step"] == len(steps)
        alone = trained_alone(run, 1)
    assert [line["digest"] for line in steps] == [bits for bits, _ in alone]
    assert [line["loss"] for line in steps] == pytest.approx([loss for _, loss in alone], rel=1e-6)


class Flips(Task):
    """The last rank of one replica flips a bit of a parameter before its sixth step. Says how it ended."""

    def __init__(self, which: int, out: Path) -> None:
        super().__init__()
        self._which, self._out, self._number = which, out, 0

    def model(self, seed: int) -> nn.Module:
        self._number = seed
        return super().model(seed)

    def backward(self, engine: shoal.Engine, inputs: torch.Tensor) -> bool:
        is_last = engine.world.rank == engine.world.size - 1
        if self._number == self._which and engine.global_steps == 5 and is_last:
            next(engine.module.parameters()).data.view(torch.int32)[0, 0] ^= 1
        return super().backward(engine, inputs)

    def step(self, engine: shoal.Engine, *, is_last: bool) -> None:
        try:
            super().step(engine, is_last=is_last)
        except ModelError as error:
            (self._out / f"error-{self._number}").write_text(str(error))
            raise


def test_a_replica_whose_bits_differ_is_left_out_by_the_others(tmp_path: Path) -> None:
    config = settings(1, debug={"replica_check_steps": 3})
    with running(tmp_path, 3, config, task=Flips(1, tmp_path), size=2) as run:
        numbers = [run.start() for _ in range(3)]
        run.wait_for(lambda: run.has_ended(1), any_may_end=True)
        run.end(1)
        run.stop([0, 2])
        run.check_samples()
        run.check_alike([0, 2])
        assert [len(line["contributors"]) for line in run.steps(0)][:7] == [3, 3, 3, 3, 3, 2, 2]
        assert len(run.steps(1)) == 5 and numbers == [0, 1, 2]
    error = (tmp_path / "error-1").read_text()
    assert "[replicas-differ] the replicas hold other bits where they should hold the same: in parameter '0.w" in error
    assert re.search(r"1 replica of 3 \(\d\) has others than the rest\.\n  where: step 6\n", error), error
    assert not (tmp_path / "error-0").exists() and not (tmp_path / "error-2").exists()
