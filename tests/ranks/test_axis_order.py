"""Another order of the axes gives ranks other places, and no other numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.config import load
from shoal.config.ranks import mesh_of
from shoal.errors import ConfigError
from shoal.mesh import Coordinate
from tests.helpers.composition import FOLDED, plainest, settings_of
from tests.helpers.composition_runs import Model, batch, check_run

PLAIN = plainest()
INSIDE = ("dp_shard", "cp", "sp", "tp", "dp_replicate", "pp")  # pipeline stages are neighbours
REVERSED = ("tp", "sp", "cp", "dp_shard", "dp_replicate", "pp")


@pytest.mark.parametrize(
    ("order", "more"),
    [
        (INSIDE, {"ranks": "2", "tp": "2 split", "pp": "2", "stage": "2"}),
        (INSIDE, {"ranks": "2", "pp": "2", "stage": "1", "schedule": "zbv", "clipping": "yes", "between": "resume"}),
        (INSIDE, {"ranks": "4", "pp": "2", "stage": "3", "hybrid": "replicas"}),
        (REVERSED, {"ranks": "2", "tp": "2", "cp": "2", "stage": "3", "between": "resume"}),
        (REVERSED, {"ranks": "2", "sp": "2", "cp": "2", "stage": "3", "hybrid": "hpz", "heads": "6 and 3"}),
        (REVERSED, {"ranks": "4", "tp": "2", "stage": "2", "hybrid": "mics", "state": "host"}),
        (REVERSED, {"ranks": "2", "tp": "2", "sp": "2", "stage": "3", "experts": "ep 2", "clipping": "yes"}),
        (("ep", *REVERSED), {"ranks": "2", "tp": "2", "sp": "2", "stage": "2", "experts": "ep 4"}),
        (("ep", *INSIDE), {"ranks": "4", "pp": "2", "stage": "1", "experts": "ep 2", "built": "zero.Init"}),
    ],
    ids=str,
)
def test_ranks_in_another_order_end_where_one_process_ends(order: tuple[str, ...], more: dict[str, str]) -> None:
    settings, run = settings_of({**PLAIN, "accumulation": "2", **more})
    settings["parallel"] = {**settings.get("parallel", {}), "order": list(order)}
    check_run(settings, run)


def test_experts_split_over_some_tensor_parallel_ranks_in_another_order_end_where_one_process_ends() -> None:
    plain = plainest(FOLDED)
    more = {"ranks": "2", "tp": "4 split", "experts": "ep 2", "stage": "3", "clipping": "yes"}
    settings, run = settings_of({**plain, **more}, FOLDED)
    settings["parallel"] = {**settings["parallel"], "order": ["ep", "tp", "dp_shard"]}
    check_run(settings, run)


def steps(order: list[str], folder: Path, is_saving: bool = False) -> Any:
    """Losses of a rank at its coordinate, before and after a load of what another order has saved."""
    settings, run = settings_of({**PLAIN, "ranks": "2", "tp": "2", "pp": "2", "stage": "1", "accumulation": "2"})
    settings["parallel"] = {**settings["parallel"], "order": order or "auto"}
    engine = shoal.initialize(model=Model(run), config=settings)[0]
    rank = current_world().rank
    if not is_saving:
        engine.load_checkpoint(str(folder), tag="one")
    losses = [
        engine.train_batch(batch(run, 2 * step + at, engine.axes.batch.rank) for at in range(2)) for step in range(3)
    ]
    if is_saving:
        engine.save_checkpoint(str(folder), tag="one")
    where = engine.axes.mesh.coordinate(rank)
    engine.destroy()
    return where, torch.stack(losses)


def test_losses_are_bit_equal_and_a_checkpoint_of_one_order_loads_in_another(tmp_path: Path) -> None:
    usual = dict(run_ranks(8, steps, [], tmp_path, True))
    other = dict(run_ranks(8, steps, ["dp_shard", "tp", "pp"], tmp_path / "other", True))
    assert set(usual) == set(other)
    assert all(torch.equal(usual[where], other[where]) for where in usual)
    again = dict(run_ranks(8, steps, [], tmp_path))
    for order in (["dp_shard", "tp", "pp"], ["tp", "pp", "dp_shard"]):
        loaded = dict(run_ranks(8, steps, order, tmp_path))
        assert all(torch.equal(again[where], loaded[where]) for where in usual), order


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (["dp_shard", "pq", "tp"], r"parallel.order.*'pq' is no basic axis"),
        (["dp_shard", "tp", "pp", "pp"], r"parallel.order.*'pp' is there 2 times"),
        (["tp", "pp"], r"parallel.order.*without dp_shard = 2"),
    ],
)
def test_a_wrong_order_is_an_error_of_the_configuration(order: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load({"train_batch_size": 8, "parallel": {"pp": 2, "tp": 2, "order": order}}, world_size=8)


def test_the_mesh_of_a_configuration_has_its_order() -> None:
    config = load(
        {"train_batch_size": 8, "parallel": {"pp": 2, "tp": 2, "order": ["tp", "dp_shard", "pp"]}}, world_size=8
    )
    assert mesh_of(config, 8).coordinate(1) == Coordinate(pp=1, dp_replicate=0, dp_shard=0, cp=0, sp=0, tp=0)
