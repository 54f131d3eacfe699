"""Runs that stop and go on: an engine trains, saves, ends; another loads and trains; what both know is compared whole.

Ranks are threads. What an engine holds is read through ``engine.access``, so that the saver's layout and the loader's
are compared as plain tensors by name.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.errors import CheckpointError
from tests.helpers.models import Late, Plain
from tests.helpers.training import Factory, adamw, batch, config, make


@dataclass(frozen=True)
class Run:
    """How one side is built.

    Args:
        optimizer: makes it from the trainable parameters; None: from the config.
        schedule: as ``initialize`` takes it.
        step: calls ``engine.step()``.
    """

    settings: dict[str, Any]
    world: int = 2
    factory: Factory = Plain
    optimizer: Callable[..., Any] | None = None
    schedule: Callable[..., Any] | None = None
    step: Callable[[shoal.Engine], None] = lambda engine: engine.step()
    seed: int = 0  # of the model's values
    rows: int | None = None  # of all ranks' micro-batches together: the same samples at any number of ranks


@dataclass
class State:
    """One rank's view; whole tensors by name."""

    losses: list[float]
    main_parameters: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, torch.Tensor]]  # by key, then name
    scalars: dict[str, dict[str, Any]]  # by name, then key; of parameters that this rank has a part of
    rates: list[float]
    counters: list[int]
    loss_scale: float
    client_state: Any = None
    earlier: State | None = None  # at the save, or right after the load
    groups: list[dict[str, Any]] = field(default_factory=list)


def engine_of(run: Run, **extra: Any) -> shoal.Engine:
    model = make(run.factory, run.seed)
    made = run.optimizer([p for p in model.parameters() if p.requires_grad]) if run.optimizer is not None else None
    return shoal.initialize(model=model, optimizer=made, lr_scheduler=run.schedule, config=run.settings, **extra)[0]


def two_blocks() -> Plain:
    return Plain(2)


def run_at_stage(stage: int = 3, world: int = 2, **sections: Any) -> Run:
    """Two blocks under AdamW."""
    return Run(config(stage, **sections), world, two_blocks, adamw)


def on_ranks(run: Run, use: Callable[[shoal.Engine], Any]) -> list[Any]:
    """``use(engine)`` on each rank, with a new engine of other values."""

    def rank() -> Any:
        engine = engine_of(replace(run, seed=1))
        try:
            return use(engine)
        finally:
            engine.destroy()

    return run_ranks(run.world, rank)


def micro_steps(engine: shoal.Engine, run: Run, first: int, count: int) -> list[float]:
    """Micro-batches ``first`` to ``first + count``. Returns: this rank's losses."""
    losses = []
    for index in range(first, first + count):
        if isinstance(engine.module, Late):
            engine.module.is_joined = index >= 2
        if run.rows is None:
            inputs = batch(index, engine.global_rank, engine.world_size)
        else:
            assert run.rows % engine.world_size == 0
            size = run.rows // engine.world_size
            tokens, targets = batch(index, 0, run.rows // 2)  # ``batch`` has two rows a rank
            all_rows = [batch(index, part, run.rows // 2) for part in range(run.rows // 2)]
            tokens = torch.cat([rows[0] for rows in all_rows])
            targets = torch.cat([rows[1] for rows in all_rows])
            mine = slice(engine.global_rank * size, (engine.global_rank + 1) * size)
            inputs = tokens[mine], targets[mine]
        loss = engine(*inputs)
        engine.backward(loss)
        run.step(engine)
        losses.append(float(loss.detach()))
    return losses


def state_of(engine: shoal.Engine, losses: Sequence[float] = ()) -> State:
    """The state of the engine. Every rank calls."""
    held = {name: p for name, p in engine.module.named_parameters() if engine.access.knows(p)}
    step = engine.sharding.step
    mine: set[str] = set()
    scalars: dict[str, dict[str, Any]] = {}
    if step is not None:
        for value in step.optimizer.state.values():
            mine |= {key for key, item in value.items() if isinstance(item, torch.Tensor) and item.dim() == 1}
        scalars = copy.deepcopy(engine.sharding.local_shards().scalars())
    keys = sorted(set().union(*engine.axes.world.gather_objects(sorted(mine), label="test: keys")))
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key in keys:
        for name, parameter in held.items():
            value = engine.access.full_optimizer_state(parameter, key)
            if value is not None:
                found.setdefault(key, {})[name] = value.clone()
    return State(
        losses=list(losses),
        main_parameters={name: engine.access.full_parameter(p).clone() for name, p in held.items()},
        parameters={name: value.clone() for name, value in engine.module_state_dict().items()},
        optimizer=found,
        scalars=scalars,
        rates=engine.get_lr(),
        counters=[engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps],
        loss_scale=engine.loss_scale,
        groups=[{k: v for k, v in g.items() if k != "params"} for g in (engine.optimizer.param_groups if step else [])],
    )


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """0 to ``num_samples - 1``."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def stop(
    run: Run, folder: str | os.PathLike[str], *, at: int, until: int | None = None, looks: bool = False, **save: Any
) -> list[State]:
    """Train ``at`` micro-batches, save, and go on to ``until``; what each rank ends with (and its losses since).

    Args:
        looks: take the state at the save too.
    """

    def rank() -> State:
        engine = engine_of(run)
        try:
            micro_steps(engine, run, 0, at)
            engine.save_checkpoint(folder, **save)
            earlier = state_of(engine) if looks else None
            state = state_of(engine, micro_steps(engine, run, at, (until or at) - at))
            state.earlier = earlier
            return state
        finally:
            engine.destroy()

    return run_ranks(run.world, rank)


def resume(
    run: Run,
    folder: str | os.PathLike[str],
    *,
    at: int,
    until: int | None = None,
    dirty: int = 0,
    looks: bool = False,
    **load: Any,
) -> list[State]:
    """A new engine, of other values, loads and trains micro-batches ``at`` to ``until``.

    Args:
        dirty: micro-batches that it trains before it loads.
        looks: take the state after the load too.
    """
    other = replace(run, seed=run.seed + 1)

    def rank() -> State:
        engine = engine_of(other)
        try:
            micro_steps(engine, run, 100, dirty)
            _, client_state = engine.load_checkpoint(folder, **load)
            earlier = state_of(engine) if looks else None
            state = state_of(engine, micro_steps(engine, run, at, (until or at) - at))
            state.client_state, state.earlier = client_state, earlier
            return state
        finally:
            engine.destroy()

    return run_ranks(run.world, rank)


def together(states: Sequence[State]) -> dict[str, dict[str, Any]]:
    """All ranks' scalars, as plain numbers. Ranks that share a parameter have equal ones."""
    found: dict[str, dict[str, Any]] = {}
    for state in states:
        for name, values in state.scalars.items():
            for key, value in values.items():
                number = value.item() if isinstance(value, torch.Tensor) else value
                assert found.setdefault(name, {}).setdefault(key, number) == number, (name, key)
    return found


def differences(ours: Sequence[State], theirs: Sequence[State], *, is_same_precision: bool = True) -> list[str]:
    """What of the tensors and numbers is not the same to the bit; losses and counters aside.

    Args:
        is_same_precision: False: parameters and loss scale may differ, master weights may not.
    """
    found = []
    if together(ours) != together(theirs):
        found.append(f"scalars {together(ours)} and {together(theirs)}")
    for rank, other in enumerate(theirs):
        mine = ours[min(rank, len(ours) - 1)]
        tables = [
            ("master", mine.main_parameters, other.main_parameters),
            ("parameter", mine.parameters, other.parameters),
        ]
        if not is_same_precision:
            tables.pop()
        if sorted(mine.optimizer) != sorted(other.optimizer):
            found.append(f"optimizer state {sorted(mine.optimizer)} and {sorted(other.optimizer)}")
        else:
            tables += [(key, mine.optimizer[key], other.optimizer[key]) for key in mine.optimizer]
        for kind, a, b in tables:
            if list(a) != list(b):
                found.append(f"{kind} of {list(a)} and {list(b)}")
                continue
            found += [f"rank {rank}: {kind} {name}" for name in a if not torch.equal(a[name], b[name])]
        if mine.rates != other.rates:
            found.append(f"rates {mine.rates} and {other.rates}")
        if is_same_precision and mine.loss_scale != other.loss_scale:
            found.append(f"loss scale {mine.loss_scale} and {other.loss_scale}")
    return found


def assert_goes_on(run: Run, folder: str | os.PathLike[str], *, at: int, until: int, dirty: int = 0) -> list[State]:
    """A stop at ``at`` changes no bit of what is there at ``until``."""
    straight = stop(run, folder, at=at, until=until)
    resumed = resume(run, folder, at=at, until=until, dirty=dirty)
    assert [state.losses for state in resumed] == [state.losses for state in straight]
    assert [state.counters for state in resumed] == [state.counters for state in straight]
    assert differences(straight, resumed) == []
    return resumed


def refusals(run: Run, folder: str | os.PathLike[str], **load: Any) -> list[CheckpointError]:
    """Every rank's error; each finds its own state as it was, and trains on."""

    def use(engine: shoal.Engine) -> CheckpointError:
        micro_steps(engine, run, 0, 1)
        before = state_of(engine)
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(folder, **load)
        assert differences([before], [state_of(engine)]) == []
        micro_steps(engine, run, 1, 1)
        return caught.value

    return on_ranks(run, use)
