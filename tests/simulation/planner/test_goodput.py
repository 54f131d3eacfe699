"""Checkpoints and failures: the interval that wastes least, and what numbers of GPUs get done."""

from __future__ import annotations

import pytest

from shoal.errors import UsageError
from shoal.models import GPT, GPTConfig
from shoal.planner.goodput import checkpoint_interval, goodput, waste

HOUR = 3600.0


@pytest.mark.parametrize(("stop", "restart", "mtbf"), [(30.0, 300.0, 3 * HOUR), (300.0, 600.0, 24 * HOUR)])
def test_dalys_interval_wastes_least(stop: float, restart: float, mtbf: float) -> None:
    best = checkpoint_interval(stop, restart, mtbf)
    least = min((waste(float(each), stop, restart, mtbf), each) for each in range(10, int(mtbf), 10))
    assert waste(best, stop, restart, mtbf) == pytest.approx(least[0], rel=0.01)
    assert best == pytest.approx((2 * stop * mtbf) ** 0.5, rel=0.1)  # Young's


def test_more_gpus_do_more_until_they_fail_too_often() -> None:
    shape = GPTConfig(vocab_size=512, sequence_length=256, num_layers=2, hidden_size=256, num_heads=4)
    space = dict.fromkeys(("tp", "pp", "stage"), (1,)) | {"shards": ("all",), "micro": (4,)}
    options = {"sequence": 256, "global_batch": 16, "space": space, "num_trials": 1, "checkpoint_seconds": 60.0}
    few, many = goodput(lambda: GPT(shape), [1, 4], **options)
    assert (few.num_ranks, many.num_ranks) == (1, 4)
    assert few.seconds > many.seconds
    assert few.waste < many.waste < 0.1
    assert many.rows_per_second == pytest.approx(16 / many.seconds * (1 - many.waste))
    assert many.interval == pytest.approx(few.interval / 2, rel=0.02)  # as the square root of their number
    (often,) = goodput(lambda: GPT(shape), [4], gpu_mtbf=600.0, restart_seconds=600.0, **options)
    assert often.waste == 1
    with pytest.raises(UsageError, match="gpu_mtbf"):
        goodput(lambda: GPT(shape), [1], gpu_mtbf=0, **options)
