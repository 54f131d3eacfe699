"""Degrees of the mesh from the config, an mpu, or mesh_param."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shoal.config import load
from shoal.config.ranks import mesh_of
from shoal.engine.entry import given_degrees
from shoal.errors import ConfigError

MODEL = nn.Linear(1, 1)


class Mpu:
    """Megatron's protocol, as far as a grid has it."""

    def __init__(self, **sizes: int) -> None:
        for name, size in sizes.items():
            setattr(self, f"get_{name}_world_size", lambda size=size: size)


@pytest.mark.parametrize(
    ("mpu", "expected"),
    [
        (Mpu(model_parallel=2, data_parallel=4), {"tp": 2}),
        (Mpu(tensor_model_parallel=2, pipeline_model_parallel=1, data_parallel=4), {"tp": 2}),
        (Mpu(sequence_parallel=4, data_parallel=2), {"sp": 4}),
        (Mpu(data_parallel=8), {}),
        (object(), {}),
    ],
)
def test_an_mpu_gives_degrees(mpu: Any, expected: dict[str, int]) -> None:
    assert given_degrees(MODEL, mpu, None, 8) == expected


def test_an_mpu_or_a_pair_that_does_not_fit_the_ranks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="tp 2 x data-parallel 2 = 4 ranks, and there are 8"):
        given_degrees(MODEL, Mpu(model_parallel=2, data_parallel=2), None, 8)
    assert given_degrees(MODEL, None, (2, 4), 8) == {"sp": 4}
    with pytest.raises(ConfigError, match=r"mesh_param = \(3, 2\) = 6 ranks"):
        given_degrees(MODEL, None, (3, 2), 8)


def test_the_mesh_follows_from_the_config() -> None:
    def mesh(num_ranks: int, **keys: Any) -> tuple[int, ...]:
        config = {"train_micro_batch_size_per_gpu": 1, **keys}
        found = mesh_of(load(config, world_size=num_ranks), num_ranks)
        return found.dp_replicate, found.dp_shard, found.cp, found.sp, found.tp

    assert mesh(8) == (1, 8, 1, 1, 1)
    assert mesh(8, parallel={"tp": 2}) == (1, 4, 1, 1, 2)
    assert mesh(8, tensor_parallel={"autotp_size": 4}) == (1, 2, 1, 1, 4)
    assert mesh(16, parallel={"tp": 2, "cp": 2}, sequence_parallel_size=2, data_parallel_size=2) == (1, 2, 2, 2, 2)
    assert mesh(8, parallel={"tp": 2, "dp_replicate": 2}, zero_optimization={"stage": 3}) == (2, 2, 1, 1, 2)
    assert mesh(8, zero_optimization={"stage": 3, "mics_shard_size": 2}) == (4, 2, 1, 1, 1)


@pytest.mark.parametrize(
    ("num_ranks", "keys", "said"),
    [
        (6, {"parallel": {"tp": 4}}, "6 ranks do not divide by tp 4 = 4"),
        (8, {"parallel": {"tp": 2}, "tensor_parallel": {"autotp_size": 4}}, "different degrees of tp"),
        (8, {"sequence_parallel_size": 2, "data_parallel_size": 2}, r"8 ranks / \(sp 2\) = 4"),
        (8, {"parallel": {"tp": 2, "dp_shard": 3}}, "3 does not divide 4 data-parallel ranks"),
    ],
)
def test_degrees_that_do_not_fit_are_problems_of_the_config(num_ranks: int, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load({"train_micro_batch_size_per_gpu": 1, **keys}, world_size=num_ranks)


def test_batch_sizes_count_data_parallel_ranks_and_with_autotp_all_ranks() -> None:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    assert load({**sizes, "parallel": {"tp": 2}}, world_size=4).train_batch_size == 4
    assert load({**sizes, "tensor_parallel": {"autotp_size": 2}}, world_size=4).train_batch_size == 8
    with pytest.raises(ConfigError, match=r"data-parallel 2 = 4 ranks / \(tp 2\)"):
        load({**sizes, "train_batch_size": 8, "parallel": {"tp": 2}}, world_size=4)
