"""``offload_states`` and ``reload_states``: states leave the device between two steps and come back as they were.

On CPU ranks the host's memory is the device's; *apart* treats the two as different, so that every copy is made.
"""

from __future__ import annotations

import copy
import gc
import logging
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import shoal
from shoal.build.settings import ZeroSettings
from shoal.comm.threads import run_ranks
from shoal.engine import offload_states
from shoal.errors import OutOfMemoryError, UsageError
from shoal.sharding.offloaded_gradient import OffloadedGradient
from tests.ranks.offload.test_offload import MODEL, VOCABULARY, config, make_apart

KINDS = ["optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer"]


class States(StrEnum):
    """As DeepSpeed has them."""

    optim_states = "optim_states"
    hp_params = "hp_params"


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    make_apart(monkeypatch)


def start(settings: dict[str, Any]) -> shoal.Engine:
    return shoal.initialize(model=copy.deepcopy(MODEL), config=settings)[0]


def loss_of(engine: shoal.Engine, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * index + engine.global_rank)
    tokens = torch.randint(VOCABULARY, (2, 5), generator=generator)
    return torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())


def micro_batch(engine: shoal.Engine, index: int) -> float:
    loss = loss_of(engine, index)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def values_of(engine: shoal.Engine) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[f"master {name}"] = engine.access.full_parameter(parameter).clone()
            state = engine.access.full_optimizer_state(parameter, "exp_avg")
            if state is not None:
                found[f"exp_avg {name}"] = state.clone()
    return found | engine.module_state_dict()


def train(settings: dict[str, Any], moves: dict[int, list[str] | None]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Six micro-batches. ``moves``: before which of them what leaves and comes back."""
    engine = start(settings)
    losses = []
    for index in range(6):
        if index in moves:
            engine.offload_states(include=moves[index])
            engine.reload_states()
        losses.append(micro_batch(engine, index))
    values = values_of(engine)
    engine.destroy()
    return losses, values


def same(one: tuple[list[float], dict[str, torch.Tensor]], other: tuple[list[float], dict[str, torch.Tensor]]) -> bool:
    return one[0] == other[0] and all(torch.equal(value, other[1][name]) for name, value in one[1].items())


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (1, 3), (3, 0), (3, 1), (3, 2), (3, 3)])
@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", 2), ("fp16", 1)])
@pytest.mark.usefixtures("apart")
def test_what_left_and_came_back_trains_on_with_the_same_bits(
    size: int, stage: int, precision: str, accumulation: int
) -> None:
    settings = config(stage, precision, "AdamW", (), accumulation)
    straight = run_ranks(size, train, settings, {})
    moved = run_ranks(
        size, train, settings, {0: None, 2: None, 3: None, 5: ["lp_params"]}
    )  # 3 and 5: in a step's middle
    assert all(same(one, other) for one, other in zip(straight, moved, strict=True))


@cache
def trained_without_moves(optimizer: str) -> list[Any]:
    return run_ranks(2, train, config(3, "bf16", optimizer, (), 2), {})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["Lamb", "Muon", "SGD"])
@pytest.mark.usefixtures("apart")
def test_each_kind_alone_moves_with_every_optimizer(kind: str, optimizer: str) -> None:
    settings = config(3, "bf16", optimizer, (), 2)
    moved = run_ranks(2, train, settings, {1: [kind], 4: [kind]})
    assert all(same(one, other) for one, other in zip(trained_without_moves(optimizer), moved, strict=True))


def test_gradients_that_autograd_keeps_move_too(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(1, "fp32", "AdamW", (), 2)
    straight = run_ranks(1, train, settings, {})
    monkeypatch.setattr("shoal.engine.settings.ZeroSettings", partial(ZeroSettings, is_host_separate=True))
    moved = run_ranks(1, train, settings, {1: None, 3: ["lp_grads"]})
    assert same(straight[0], moved[0])


def tiers(engine: shoal.Engine) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for entry in engine.memory_report().entries:
        if entry.nbytes:
            key = entry.kind, entry.tier
            found[key] = found.get(key, 0) + entry.nbytes
    return found


def storages(engine: shoal.Engine) -> list[StorageWeakRef]:
    buffers = [group.buffer for group in engine.sharded.groups]
    tensors = [b.shard if b.is_sharded else b.full for b in buffers]
    assert engine.optimizer is not None
    for state in engine.sharding.groups:
        tensors.append(state.main)
        if not isinstance(state.gradient, OffloadedGradient):  # which takes a staging buffer when it is asked
            tensors.append(state.gradient.memory())
        tensors += [
            value
            for piece in state.ranges
            for value in engine.optimizer.optimizer.state[piece.param].values()
            if value.dim()
        ]
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def watched(settings: dict[str, Any], include: Any) -> Any:
    engine = start(settings)
    micro_batch(engine, 0)
    gc.collect()
    before, held = tiers(engine), storages(engine)
    engine.offload_states(include=include)
    alive = sum(not each.expired() for each in held)
    away = tiers(engine)
    engine.reload_states()
    after = tiers(engine)
    engine.destroy()
    return before, away, after, alive, len(held)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.usefixtures("apart")
def test_nothing_is_left_on_the_device_and_the_ledger_shows_where_it_went(stage: int) -> None:
    for before, away, after, alive, _ in run_ranks(2, watched, config(stage, "bf16", "AdamW", (), 1), None):
        assert alive == 0
        assert not [kind for kind, tier in away if tier == "device"]
        for kind in ("parameter", "master", "optimizer state"):
            assert away[kind, "host"] == before[kind, "device"]
        assert ("gradient", "host") not in away  # between two steps there is none
        assert {key: n for key, n in before.items() if key[0] != "buffers in flight"} == {
            key: n for key, n in after.items() if key[0] != "buffers in flight"
        }


@pytest.mark.usefixtures("apart")
def test_what_is_not_named_stays() -> None:
    before, away, *_ = run_ranks(2, watched, config(2, "bf16", "AdamW", (), 1), [States.optim_states])[0]
    assert away["optimizer state", "host"] == before["optimizer state", "device"]
    assert away["master", "device"] == before["master", "device"]
    assert away["parameter", "device"] == before["parameter", "device"]


@pytest.mark.usefixtures("apart")
def test_what_the_config_keeps_on_the_host_stays_there() -> None:
    settings = config(3, "bf16", "AdamW", ("optimizer", "param"), 1)
    before, away, after, *_ = run_ranks(2, watched, settings, ["optim_states", "hp_params", "lp_params"])[0]
    assert before == away == after
    straight = run_ranks(2, train, settings, {})
    moved = run_ranks(2, train, settings, {1: None, 4: None})
    assert all(same(one, other) for one, other in zip(straight, moved, strict=True))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.usefixtures("apart")
def test_updates_under_way_on_the_host_end_before_anything_moves(stage: int, is_ahead: bool) -> None:
    settings = config(stage, "bf16", "AdamW", ("optimizer",), 2)
    settings["zero_optimization"]["offload_optimizer"]["super_offload"] = is_ahead
    straight = run_ranks(2, train, settings, {})
    moved = run_ranks(2, train, settings, {0: None, 2: None, 3: None, 5: ["lp_params"]})
    assert all(same(one, other) for one, other in zip(straight, moved, strict=True))


@pytest.mark.usefixtures("apart")
def test_state_on_a_disk_stays_there(tmp_path: Path) -> None:
    settings = config(2, "bf16", "AdamW", (), 1)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    straight = run_ranks(2, train, settings, {})
    moved = run_ranks(2, train, settings, {1: None, 4: None})
    assert all(same(one, other) for one, other in zip(straight, moved, strict=True))


# while it is away


def refused(settings: dict[str, Any], include: Any) -> list[str]:
    """Which calls refuse."""
    engine = start(settings)
    micro_batch(engine, 0)
    loss = loss_of(engine, 1)
    engine.offload_states(include=include)
    problems = []
    calls: dict[str, Any] = {
        "forward": lambda: loss_of(engine, 1),
        "backward": lambda: engine.backward(loss),
        "plain backward": loss.backward,
        "step": engine.step,
        "load": lambda: engine.load_module_state_dict({}),
    }
    for name, call in calls.items():
        if include is not None and name not in ("forward", "step", "load"):
            continue
        try:
            call()
        except UsageError as error:
            problems.append(f"{name}: {error.code}" if error.code != "states-away" else name)
    engine.reload_states()
    losses = [micro_batch(engine, index) for index in (2, 3)]
    assert all(torch.isfinite(torch.tensor(losses)))
    engine.destroy()
    return problems


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("is_apart", [False, True])
def test_training_calls_refuse_until_it_is_back(stage: int, is_apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_apart:
        make_apart(monkeypatch)
    found = run_ranks(2, refused, config(stage, "bf16", "AdamW", (), 1), None)
    assert found == [["forward", "backward", "plain backward", "step", "load"]] * 2
    found = run_ranks(2, refused, config(stage, "bf16", "AdamW", (), 1), ["optim_states", "hp_params"])
    assert found == [["step", "load"]] * 2  # parameters are there: the model can be evaluated


def read_away(settings: dict[str, Any], folder: str) -> Any:
    engine = start(settings)
    micro_batch(engine, 0)
    here = values_of(engine)
    engine.offload_states()
    away = values_of(engine)
    engine.save_checkpoint(folder)
    weight = engine.module.blocks[0].weight
    engine.access.set_full_parameter(weight, torch.full((6, 6), 0.5))
    engine.access.set_full_optimizer_state(weight, "exp_avg", torch.full((6, 6), 0.25))
    with shoal.zero.GatheredParameters([engine.module.blocks[1].weight], modifier_rank=0):
        engine.module.blocks[1].weight.data.fill_(0.125)
    engine.reload_states()
    changed = values_of(engine)
    engine.load_checkpoint(folder)
    loaded = values_of(engine)
    engine.destroy()
    return here, away, changed, loaded


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.usefixtures("apart")
def test_checkpoints_and_accessors_find_it_on_the_host(stage: int, precision: str, tmp_path: Path) -> None:
    settings = config(stage, precision, "AdamW", (), 1)
    for here, away, changed, loaded in run_ranks(2, read_away, settings, str(tmp_path / "c")):
        assert all(torch.equal(value, away[name]) for name, value in here.items())
        assert all(torch.equal(value, loaded[name]) for name, value in here.items())
        assert bool((changed["master blocks.0.weight"] == 0.5).all())
        assert bool((changed["blocks.0.weight"] == 0.5).all())
        assert bool((changed["exp_avg blocks.0.weight"] == 0.25).all())
        assert bool((changed["master blocks.1.weight"] == 0.125).all())
        assert bool((changed["blocks.1.weight"] == 0.125).all())


def gradient_away(settings: dict[str, Any], folder: str) -> None:
    engine = start(settings)
    engine.backward(loss_of(engine, 0))
    weight = engine.module.blocks[0].weight
    before = engine.access.full_gradient(weight)
    assert before is not None
    before = before.clone()
    engine.offload_states()
    with pytest.raises(UsageError, match="reload_states"):
        engine.access.full_gradient(weight)
    assert any(kind == "gradient" and tier == "host" for kind, tier in tiers(engine))
    engine.save_checkpoint(folder)
    engine.reload_states()
    after = engine.access.full_gradient(weight)
    assert after is not None
    assert torch.equal(before, after)
    engine.zero_grad()
    engine.load_checkpoint(folder)
    loaded = engine.access.full_gradient(weight)
    assert loaded is not None
    assert torch.equal(before, loaded)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.usefixtures("apart")
def test_a_gradient_of_a_step_under_way_moves_and_is_saved(stage: int, tmp_path: Path) -> None:
    run_ranks(2, gradient_away, config(stage, "bf16", "AdamW", (), 2), str(tmp_path / "c"))


# what cannot be


def test_on_a_cpu_a_line_says_that_nothing_moved(caplog: pytest.LogCaptureFixture) -> None:
    engine = start(config(1, "bf16", "AdamW", (), 1))
    micro_batch(engine, 0)
    held, before = storages(engine), tiers(engine)
    with caplog.at_level(logging.INFO, logger="shoal"):
        engine.offload_states()
    assert "nothing was moved: cpu computes in host memory" in caplog.text
    assert not any(each.expired() for each in held)
    assert tiers(engine) == before
    engine.reload_states()
    micro_batch(engine, 1)
    engine.destroy()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"include": ["params"]}, "states-kind"),
        ({"include": "optimizer"}, "states-kind"),
        ({"device": "nvme"}, "states-device"),
        ({"device": "cuda:1"}, "states-device"),
    ],
)
def test_a_kind_or_a_place_that_there_is_not_is_an_error(arguments: dict[str, Any], code: str) -> None:
    engine = start(config(1, "bf16", "AdamW", (), 1))
    with pytest.raises(UsageError) as caught:
        engine.offload_states(**arguments)
    assert caught.value.code == code
    micro_batch(engine, 0)
    engine.offload_states(device="none")
    micro_batch(engine, 1)
    engine.destroy()


@pytest.mark.usefixtures("apart")
def test_a_host_that_is_too_small_is_an_error_and_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(config(1, "bf16", "AdamW", (), 1))
    micro_batch(engine, 0)
    before = tiers(engine)
    monkeypatch.setattr("shoal.engine.offload_states.host_available_nbytes", lambda: 100)
    with pytest.raises(OutOfMemoryError, match="host memory is too small"):
        engine.offload_states()
    assert tiers(engine) == before
    micro_batch(engine, 1)
    engine.destroy()


@pytest.mark.usefixtures("apart")
def test_memory_that_runs_out_half_way_brings_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    straight = train(config(1, "bf16", "AdamW", (), 1), {})
    engine = start(config(1, "bf16", "AdamW", (), 1))
    losses = [micro_batch(engine, index) for index in range(3)]
    empty, calls = offload_states.aligned_empty, []

    def failing(nbytes: int, **arguments: Any) -> torch.Tensor:
        calls.append(nbytes)
        if len(calls) == 5:
            raise OutOfMemoryError("no more")
        return empty(nbytes, **arguments)

    monkeypatch.setattr(offload_states, "aligned_empty", failing)
    with pytest.raises(OutOfMemoryError, match="no more"):
        engine.offload_states()
    losses += [micro_batch(engine, index) for index in range(3, 6)]
    assert same(straight, (losses, values_of(engine)))
    engine.destroy()


@pytest.mark.usefixtures("apart")
def test_a_device_that_is_too_small_keeps_it_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    straight = train(config(3, "bf16", "AdamW", (), 1), {})
    engine = start(config(3, "bf16", "AdamW", (), 1))
    losses = [micro_batch(engine, index) for index in range(3)]
    engine.offload_states()
    back, calls = offload_states._copied_to_device, []

    def failing(source: torch.Tensor, device: torch.device) -> torch.Tensor:
        calls.append(source)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return back(source, device)

    monkeypatch.setattr(offload_states, "_copied_to_device", failing)
    with pytest.raises(OutOfMemoryError, match="reload_states"):
        engine.reload_states()
    with pytest.raises(UsageError, match="reload_states"):
        loss_of(engine, 3)
    engine.reload_states()
    losses += [micro_batch(engine, index) for index in range(3, 6)]
    assert same(straight, (losses, values_of(engine)))
    engine.destroy()


def gathered(settings: dict[str, Any]) -> None:
    engine = start(settings)
    with shoal.zero.GatheredParameters(list(engine.module.parameters())):
        with pytest.raises(UsageError, match="gathered"):
            engine.offload_states()
    micro_batch(engine, 0)
    engine.destroy()


@pytest.mark.usefixtures("apart")
def test_pinned_units_are_an_error() -> None:
    run_ranks(2, gathered, config(3, "bf16", "AdamW", (), 1))


def kept(settings: dict[str, Any]) -> list[int]:
    engine = start(settings)
    for unit in engine.sharded.units:
        unit.gather()
    found = [engine.sharded.order.live.numel]
    engine.empty_partition_cache()
    found.append(engine.sharded.order.live.numel)
    micro_batch(engine, 3)
    engine.destroy()
    return found


def test_gathered_parameters_without_pins_are_released() -> None:
    for before, after in run_ranks(2, kept, config(3, "bf16", "AdamW", (), 1)):
        assert before > 0
        assert after == 0


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.usefixtures("apart")
def test_an_engine_with_offloaded_states_can_be_destroyed(stage: int) -> None:
    def ends(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
        engine = start(settings)
        micro_batch(engine, 0)
        values = engine.module_state_dict()
        engine.offload_states()
        engine.destroy()
        assert all(torch.equal(value, values[name]) for name, value in engine.module.state_dict().items())
        return values

    assert len(run_ranks(2, ends, config(stage, "bf16", "AdamW", (), 1))) == 2
