"""``overlap_param_gather``: the step returns before parameters are gathered, and each use waits for its own unit.

With optimizer state on the host it returns before they are updated, too.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import zero
from shoal.comm.recorder import Entry
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from shoal.sharding.unit import UnitState
from tests.helpers.models import Plain
from tests.helpers.training import adamw, batch, config, named, run_steps, start, train_ranks
from tests.ranks.offload.test_offload import make_apart
from tests.ranks.running.test_traffic import CONTROL, FORWARDS, REDUCED_BACKWARDS, Unpadded, calls

HOST: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
KEYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "accumulation": {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1},
    "replicas": {"zero_optimization": {"mics_shard_size": 2}},
    "CPU optimizer": {"zero_optimization": HOST},
    "CPU optimizer, one rank": {"zero_optimization": HOST, "bf16": {"enabled": True}, "gradient_clipping": 0.1},
    "CPU optimizer, replicas": {"zero_optimization": {**HOST, "mics_shard_size": 2}, "gradient_accumulation_steps": 2},
    "CPU optimizer, fp16": {
        "zero_optimization": HOST,
        "fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1},
    },
    "CPU optimizer of a part": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
    "super_offload": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
    "disk": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
    "small sub-groups": {"zero_optimization": {"sub_group_size": 100}},
}


def overlapped(stage: int, *, is_on: bool = True, **keys: Any) -> dict[str, Any]:
    section = {"overlap_param_gather": is_on, **keys.pop("zero_optimization", {})}
    return config(stage, zero_optimization=section, **keys)


def evaluate(engine: shoal.Engine) -> None:
    engine(*batch(99, 0, 1))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", KEYS)
def test_it_changes_no_bit(stage: int, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = copy.deepcopy(KEYS[name])
    if name == "disk":
        keys["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path)
    make_apart(monkeypatch, is_apart="offload_optimizer" in keys.get("zero_optimization", {}))
    world = 4 if "replicas" in name else 1 if "one rank" in name else 2
    found = {
        is_on: train_ranks(world, Plain, overlapped(stage, is_on=is_on, **keys), adamw, steps=4, between=evaluate)
        for is_on in (False, True)
    }
    for plain, other in zip(found[False], found[True], strict=True):
        assert repr((other.losses, other.norms)) == repr((plain.losses, plain.norms))  # a skipped step has a NaN
        for name, value in plain.parameters.items():
            assert torch.equal(other.parameters[name], value)
            assert torch.equal(other.main_parameters[name], plain.main_parameters[name])


def states(stage: int) -> tuple[list[Entry], list[list[str]]]:
    """The collectives of a step; then the units being gathered after step(), and in the forward of each block."""
    engine = start(Unpadded, overlapped(stage))
    run_steps(engine, 2)
    seen: list[list[str]] = []

    def look(*_: Any) -> None:
        seen.append([unit.name for unit in engine.sharded.units if unit.state is UnitState.GATHERING])

    with current_world().recorder.recording() as entries:
        run_steps(engine, 1, first=2)
        look()
    for block in engine.module.blocks:
        block.register_forward_pre_hook(look)
    with current_world().recorder.recording() as forward:
        engine(*batch(3, 0, 1))
    assert forward == []
    engine.destroy()
    return entries, seen


@pytest.mark.parametrize("stage", [1, 2])
def test_the_collectives_are_the_same_and_each_unit_waits_for_its_own(stage: int) -> None:
    for entries, seen in run_ranks(2, states, stage):
        assert calls(entries) == [
            *(("dp", "reduce_scatter", unit) for unit in REDUCED_BACKWARDS),
            CONTROL,
            *(("dp", "all_gather", unit) for unit in FORWARDS),
        ]
        assert seen == [["root", "blocks.0", "blocks.1"], ["blocks.1"], []]


def reads(stage: int, how: str, is_on: bool, folder: str, zero_keys: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Read the parameters right after ``step()``."""
    engine = start(Unpadded, overlapped(stage, is_on=is_on, zero_optimization=zero_keys))
    run_steps(engine, 2)
    model = engine.module
    if how == "GatheredParameters":
        with zero.GatheredParameters(model.parameters()):
            found = {name: p.detach().clone() for name, p in named(engine).items()}
    elif how == "accessors":
        found = {name: zero.safe_get_full_fp32_param(p) for name, p in named(engine).items()}
    elif how == "state_dict":
        found = {name: value.clone() for name, value in model.state_dict().items()}
    elif how == "state_dict of a part":
        found = {name: value.clone() for name, value in model.blocks[1].state_dict().items()}
    elif how == "module_state_dict":
        found = engine.module_state_dict()
    elif how == "checkpoint":
        engine.save_checkpoint(folder)
        run_steps(engine, 1, first=2)
        engine.load_checkpoint(folder)
        found = {name: p.detach().clone() for name, p in named(engine).items()}
    elif how == "evaluation":
        with torch.no_grad():
            found = {"loss": engine(*batch(9, 0, 1))}
    elif how == "a part alone":
        with torch.no_grad():
            found = {"output": model.blocks[1](torch.ones(2, 64))}
    else:
        engine.destroy()
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.destroy()
    return found


@pytest.mark.parametrize(
    "how",
    [
        "GatheredParameters",
        "accessors",
        "state_dict",
        "state_dict of a part",
        "module_state_dict",
        "checkpoint",
        "evaluation",
        "a part alone",
        "destroy",
    ],
)
@pytest.mark.parametrize(("zero_keys", "world"), [({}, 2), (HOST, 2), (HOST, 1)], ids=["device", "host", "host alone"])
def test_what_reads_parameters_right_after_the_step_waits_by_itself(
    how: str, zero_keys: dict[str, Any], world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_apart(monkeypatch, is_apart=bool(zero_keys))
    plain = run_ranks(world, reads, 2, how, False, str(tmp_path / "plain"), zero_keys)
    found = run_ranks(world, reads, 2, how, True, str(tmp_path / "other"), zero_keys)
    for one, other in zip(plain, found, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("zero_keys", [{}, HOST], ids=["beside", "host"])
def test_a_bare_parameter_that_a_torch_function_gets_is_gathered_and_may_be_changed(zero_keys: dict[str, Any]) -> None:
    def job(is_on: bool) -> list[Any]:
        engine = start(Unpadded, overlapped(1, is_on=is_on, zero_optimization=zero_keys))
        found: list[Any] = [run_steps(engine, 1)]
        weight = engine.module.blocks[0].weight
        if current_world().rank == 0:
            found.append(engine.module.head.weight.data.sum())
        with torch.no_grad():
            weight.mul_(0.5)
            found.append(weight.clone())
        found += run_steps(engine, 2, first=1)
        engine.destroy()
        return [*found, *(p.detach().clone() for p in engine.module.parameters())]

    for on, off in zip(run_ranks(2, job, True), run_ranks(2, job, False), strict=True):
        assert all(
            torch.equal(torch.as_tensor(one), torch.as_tensor(other)) for one, other in zip(on, off, strict=True)
        )


def test_inside_a_mode_of_the_scripts_a_bare_parameter_reads_as_nan_and_refuses_writes() -> None:
    def job() -> None:
        engine = start(Unpadded, overlapped(1))
        with torch.device("cpu"):
            run_steps(engine, 1)
        weight = engine.module.blocks[0].weight
        assert weight.isnan().all()
        with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
            weight.add_(1.0)
        with pytest.raises(UsageError, match="cannot be copied"):
            copy.deepcopy(engine.module)
        engine(*batch(2, 0, 1))
        assert not weight.isnan().any()
        copy.deepcopy(engine.module)
        engine.destroy()

    run_ranks(2, job)


def changes(is_on: bool) -> list[float]:
    """Change parameters between two steps, inside ``GatheredParameters`` and by an accessor."""
    engine = start(Plain, overlapped(2, is_on=is_on, bf16={"enabled": True}))
    losses = run_steps(engine, 1)
    with torch.no_grad(), zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
        for parameter in engine.module.parameters():
            parameter.clamp_(-0.05, 0.05)
    losses += run_steps(engine, 1, first=1)
    for parameter in engine.module.parameters():
        zero.safe_set_full_fp32_param(parameter, zero.safe_get_full_fp32_param(parameter) * 0.5)
    losses += run_steps(engine, 2, first=2)
    engine.destroy()
    return losses


def test_changes_between_two_steps_count() -> None:
    assert run_ranks(2, changes, True) == run_ranks(2, changes, False)


class ReadsAhead(Unpadded):
    """Its forward reads a block's weight before it calls the block."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scale = self.blocks[1].weight.float().square().mean()
        return super().forward(tokens, targets) * (1.0 + scale)


def test_a_parameter_that_is_read_outside_of_its_unit_is_waited_for() -> None:
    plain = train_ranks(2, ReadsAhead, overlapped(2, is_on=False), steps=4)
    found = train_ranks(2, ReadsAhead, overlapped(2), steps=4)
    assert [one.losses for one in found] == [one.losses for one in plain]


def test_frozen_parameters_stay_readable() -> None:
    class PartlyFrozen(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0].requires_grad_(False)

    def job(is_on: bool) -> tuple[list[float], bool]:
        engine = start(PartlyFrozen, overlapped(2, is_on=is_on))
        losses = run_steps(engine, 3)
        is_readable = not any(p.isnan().any() for p in engine.module.blocks[0].parameters())
        engine.destroy()
        return losses, is_readable

    found = run_ranks(2, job, True)
    assert found == run_ranks(2, job, False)
    assert all(is_readable for _, is_readable in found)


def test_one_rank_has_nothing_to_gather() -> None:
    def job() -> bool:
        engine = start(Unpadded, overlapped(2))
        run_steps(engine, 1)
        is_whole = all(isinstance(p, nn.Parameter) and not p.isnan().any() for p in engine.module.parameters())
        engine.destroy()
        return is_whole

    assert run_ranks(1, job) == [True]


# updates on the host


def uses(stage: int) -> bool:
    """A step and a forward. Updates wait for the end of the step, and the last block's for the first one's forward."""
    engine = start(Unpadded, overlapped(stage, zero_optimization=HOST), adamw)
    run_steps(engine, 2)
    engine.sharding.wait()
    is_stepped, is_used = threading.Event(), threading.Event()
    last = engine.sharded.units[-1].trained[0].main.data_ptr()
    host_step = engine.sharding.step.cpu_optimizer._step
    start_range = host_step.start

    def gated(kind: Any, param: torch.Tensor, *args: Any, **keys: Any) -> Any:
        assert (is_used if param.data_ptr() == last else is_stepped).wait(30)
        return start_range(kind, param, *args, **keys)

    host_step.start = gated
    engine.module.blocks[0].register_forward_hook(lambda *_: is_used.set() if is_stepped.is_set() else None)
    run_steps(engine, 1, first=2)
    with torch._C.DisableTorchFunction():  # a read that is noticed waits
        is_hidden = all(bool(parameter.isnan().all()) for parameter in engine.module.parameters())
    is_stepped.set()
    engine(*batch(3, 0, 1))
    engine.destroy()
    return is_hidden


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_step_waits_for_no_update_on_the_host_and_each_use_for_its_own(
    stage: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_apart(monkeypatch)
    assert run_ranks(world, uses, stage) == [True] * world


class SkipsOnOneRank(Unpadded):
    """Each forward, another rank leaves out another block."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if (self.calls + number + current_world().rank) % 2:
                x = x + torch.tanh(block(x))
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def test_ranks_may_use_other_units(monkeypatch: pytest.MonkeyPatch) -> None:
    make_apart(monkeypatch)
    plain, found = (
        train_ranks(
            2, SkipsOnOneRank, overlapped(2, is_on=is_on, zero_optimization=HOST), adamw, steps=4, between=evaluate
        )
        for is_on in (False, True)
    )
    assert [one.losses for one in found] == [one.losses for one in plain]
    assert all(torch.equal(value, found[0].parameters[name]) for name, value in plain[0].parameters.items())


def test_an_update_that_fails_is_raised_by_the_next_forward_and_by_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_apart(monkeypatch)

    def fails(*_args: Any, **_keys: Any) -> Any:
        raise MemoryError("no room for the scratch")

    def job() -> None:
        engine = start(Unpadded, overlapped(2, zero_optimization=HOST), adamw)
        run_steps(engine, 1)
        engine.sharding.step.cpu_optimizer._step.start = fails
        run_steps(engine, 1, first=1)
        for call in (
            lambda: engine(*batch(2, 0, 1)),
            engine.module.state_dict,
            engine.module_state_dict,
            engine.destroy,
        ):
            with pytest.raises(MemoryError, match="no room for the scratch"):
                call()

    run_ranks(1, job)
