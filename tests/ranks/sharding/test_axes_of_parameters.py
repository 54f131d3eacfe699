"""Axes are facts of the parameter: an axis that the library does not know trains like those that it knows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world, fake_world
from shoal.engine import initialize
from shoal.engine.model_parts import Specs, axes_of
from shoal.mesh import Mesh
from shoal.sharding.axes import Axes
from shoal.sharding.layout import ParameterSpec
from tests.helpers.models import Plain
from tests.helpers.training import (
    Trained,
    are_bit_equal,
    assert_like_alone,
    assert_ranks_agree,
    batch,
    config,
    finish,
    main_parameters,
    start,
    train_alone,
)

CLIP = 0.5  # below every norm here
EXTRA = frozenset({"extra"})


@pytest.fixture
def toy_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of ``tp`` are those of an axis ``extra``; along it each has a summand of every gradient."""

    def axes_of_toy(*args: Any, **kwargs: Any) -> Axes:
        axes = axes_of(*args, **kwargs)
        named = {name.replace("tp", "extra"): comm for name, comm in axes.comms.items() if name != "tp_fold"}
        return replace(axes, comms=named)

    def parts_of_toy(model: nn.Module, *args: Any) -> Specs:
        whole = {name: ParameterSpec.whole(name, tuple(p.shape)) for name, p in model.named_parameters()}
        return {name: replace(spec, summand_over=EXTRA) for name, spec in whole.items()}

    monkeypatch.setattr(initialize, "axes_of", axes_of_toy)
    monkeypatch.setattr(initialize, "parts_of", parts_of_toy)


@pytest.mark.usefixtures("toy_axis")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("replicate", [1, 2])
def test_a_toy_axis_with_summands_of_the_gradient_trains_as_the_doubled_batch(
    stage: int, replicate: int, tmp_path: Path
) -> None:
    def job() -> Trained:
        settings = config(stage, parallel={"tp": 2, "dp_replicate": replicate}, gradient_clipping=CLIP)
        engine = start(Plain, settings)
        assert {axis for group in engine.sharded.groups for axis in group.axes.partial} >= EXTRA
        world, losses, norms = current_world(), [], []
        for index in range(3):
            loss = engine(*batch(index, world.rank, world.size))
            engine.backward(loss / 2)  # each of the two ranks has a half of the rows over which the loss is a mean
            engine.step()
            losses.append(float(loss.detach()))
            norms.append(engine.get_global_grad_norm() or 0.0)
        engine.save_checkpoint(str(tmp_path))
        trained = finish(engine, losses)
        trained.norms = norms
        return trained

    def continued() -> dict[str, torch.Tensor]:
        engine = start(Plain, config(2))
        engine.load_checkpoint(str(tmp_path))
        return main_parameters(engine)

    alone = train_alone(Plain, world=4, clip=CLIP)
    assert min(alone.norms) > CLIP
    results = run_ranks(4, job)
    assert_ranks_agree(results)
    assert_like_alone(results, alone, atol=1e-5)
    assert are_bit_equal(run_ranks(2, continued)[0], results[0].main_parameters)


def along(**sets: str) -> ParameterSpec:
    return ParameterSpec("weight", (2,), 2, 0, 0, **{name: frozenset(axes.split()) for name, axes in sets.items()})


def test_what_follows_from_the_sets_of_a_parameter() -> None:
    """Of rank 3 of 16: the axis that shards, those over which the gradient is summed, and who has the same range."""
    mesh = Mesh.of(16, dp_replicate=2, tp=4, ep=2, etp=2)
    with fake_world(16, 3) as world:
        axes = axes_of(mesh, partial(world.communicator, mesh=mesh))
    for spec, shard, data, summed, copies, parts in [
        (along(), "dp_shard", 4, ["dp_replicate"], (0, 2), None),
        (along(split_over="tp"), "dp_shard", 4, ["dp_replicate"], (0, 2), "tp"),
        (along(summand_over="tp"), "dp_shard", 4, ["dp_replicate", "tp"], (3, 8), None),
        (along(copies_over="tp"), "dp_shard", 4, ["dp_replicate"], (3, 8), None),
        (along(split_over="etp", copies_over="tp_fold"), "dp_shard", 4, ["dp_replicate"], (1, 4), "etp"),
        (along(summand_over="tp_fold", copies_over="etp"), "dp_shard", 4, ["dp_replicate", "tp_fold"], (3, 8), None),
        (along(split_over="ep", copies_over="etp"), "expert_dp", 4, ["dp_replicate"], (1, 4), "ep"),
        (along(split_over="expert_model"), "expert_dp", 4, ["dp_replicate"], (0, 2), "expert_model"),
        (along(others_over="ep", split_over="etp"), "expert_dp", 4, ["dp_replicate"], (0, 2), "etp"),
    ]:
        group = axes.of_group(spec, is_state_sharded=True)
        found = group.shard, group.data.size, list(group.partial), group.replica
        assert found == (shard, data, summed, copies), spec.axes
        assert group.parts is axes.comms.get(parts or ""), spec.axes
        whole = axes.of_group(spec, is_state_sharded=False)
        assert whole.comms[shard] is whole.data, spec.axes


def test_sets_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="in two of the sets"):
        along(split_over="tp", copies_over="tp")
    with pytest.raises(ValueError, match="name the axis that is made of them"):
        along(split_over="ep etp")
