"""Replicas that are jobs of their own: killed, left out, started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.replicas import running, settings, trained_alone


def test_a_replica_that_is_killed_in_the_sum_is_left_out_and_joins_again_with_the_same_bits(tmp_path: Path) -> None:
    with running(tmp_path, 2, settings(1)) as run:
        first, second = run.start(), run.start("mean 3")
        run.wait_until_dead(second)
        third = run.start()
        run.wait_for(lambda: len(run.steps(third)) > 3)
        run.stop([first, third])
        run.check_samples()
        run.check_alike([second, third])
        steps = run.steps(first)
        counts = [len(line["contributors"]) for line in steps]
        assert counts[:4] == [2, 2, 2, 1] and counts[-1] == 2 and [line["step"] for line in steps][-1] == len(steps)
        alone = trained_alone(run, 1)
    assert [line["digest"] for line in steps] == [bits for bits, _ in alone]
    assert [line["loss"] for line in steps] == pytest.approx([loss for _, loss in alone], rel=1e-6)
