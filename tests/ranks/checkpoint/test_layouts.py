"""What any layout saved, any other loads: whole tensors are the same to the bit, and both go on alike."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, note, settings
from hypothesis import strategies as st

from shoal.comm.threads import run_ranks
from tests.helpers import models
from tests.helpers.resuming import Run, State, differences, engine_of, micro_steps, resume, state_of, stop
from tests.helpers.training import batch, config

AT, UNTIL = 3, 5  # micro-batches before the save, and in all
ROWS = 12  # of each step, shared by 1 to 4 ranks

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16 without main parameters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
}
HYBRIDS: dict[str, dict[str, int]] = {"": {}, "mics": {"mics_shard_size": 2}, "hpz": {"zero_hpz_partition_size": 2}}


@dataclass(frozen=True)
class Layout:
    world: int
    stage: int
    precision: str = "fp32"
    hybrid: str = ""
    units: tuple[str, ...] = ("blocks.*",)
    bucket: int = 500_000_000
    persistence: int = 0

    def settings(self) -> dict[str, Any]:
        is_hybrid = self.world in (2, 4)
        return config(
            self.stage,
            train_micro_batch_size_per_gpu=ROWS // self.world,
            units={"names": list(self.units)},
            zero_optimization={
                "reduce_bucket_size": self.bucket,
                "stage3_param_persistence_threshold": self.persistence,
                **(HYBRIDS[self.hybrid] if is_hybrid else {}),
            },
            **PRECISIONS[self.precision],
        )


def two_groups(make: Any, **rest: Any) -> Any:
    """Matrices decay, other parameters do not."""

    def optimizer(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        every = list(parameters)
        matrices = [p for p in every if p.dim() > 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in every if p.dim() < 2]}]
        return make([g for g in groups if g["params"]], **rest)

    return optimizer


def one_group(make: Any, **rest: Any) -> Any:
    return lambda parameters: make(list(parameters), **rest)


# A larger eps than usual, so that rounding errors of tiny gradients stay tiny in the update.
OPTIMIZERS: dict[str, Any] = {
    "AdamW": two_groups(torch.optim.AdamW, lr=1e-2, eps=1e-3),
    "SGD": one_group(torch.optim.SGD, lr=0.05, momentum=0.9),
    "NAdam": two_groups(torch.optim.NAdam, lr=1e-2, eps=1e-3),
    "Adagrad": one_group(torch.optim.Adagrad, lr=1e-2, eps=1e-3),
}
WHOLE: dict[str, dict[str, Any]] = {
    "Lamb": {"type": "Lamb", "params": {"lr": 1e-2, "eps": 1e-3}},
    "Muon": {"type": "Muon", "params": {"lr": 1e-2, "adam_lr": 1e-2}},
}
FACTORIES: dict[str, Any] = {
    factory.__name__: factory
    for factory in (
        models.Plain,
        models.Adapted,
        models.FrozenBlocks,
        models.Shared,
        models.TiedBetweenBlocks,
        models.SeveralDtypes,
        models.OddParameters,
        models.Late,
        models.WithBuffers,
        models.FrozenIntegers,
        models.NotContiguous,
    )
}

LAYOUTS = st.builds(
    Layout,
    world=st.integers(1, 4),
    stage=st.integers(0, 3),
    precision=st.sampled_from(["fp32", "fp32", "bf16", "fp16", "autocast", "bf16 without main parameters"]),
    hybrid=st.sampled_from(["", "", "mics", "hpz"]),
    units=st.sampled_from([("blocks.*",), ("blocks",), ("blocks.0", "embedding"), ()]),
    bucket=st.sampled_from([1, 40, 500_000_000]),
    persistence=st.sampled_from([0, 5, 1000]),
)


def run_of(layout: Layout, model: str, optimizer: str) -> Run:
    settings = layout.settings()
    if optimizer in WHOLE:
        settings["optimizer"] = WHOLE[optimizer]
    return Run(settings, layout.world, FACTORIES[model], OPTIMIZERS.get(optimizer), rows=ROWS)


FEW = settings(max_examples=10) if settings.get_current_profile_name() != "thorough" else settings()


def transfer(saver: Layout, loader: Layout, model: str = "Plain", optimizer: str = "AdamW") -> None:
    first, second = run_of(saver, model, optimizer), run_of(loader, model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        straight = stop(first, folder, at=AT, until=UNTIL, looks=True)
        resumed = resume(second, folder, at=AT, until=UNTIL, dirty=1, looks=True)
    saved, loaded = [s.earlier for s in straight if s.earlier], [s.earlier for s in resumed if s.earlier]
    assert differences(saved, loaded, is_same_precision=saver.precision == loader.precision) == []
    for state in loaded:
        assert state.counters == saved[0].counters
        for name, master in state.main_parameters.items():
            held = state.parameters[name]
            assert held.dtype == torch.float64 or torch.equal(held, master.to(held.dtype)), name
    if saver == loader:
        assert differences(straight, resumed) == []
        assert [state.losses for state in resumed] == [state.losses for state in straight]
    elif saver.precision == loader.precision == "fp32" and model != "SeveralDtypes":  # it has bf16 parameters
        worst = largest_relative_difference(straight[0], resumed[0])
        note(f"largest relative difference after going on: {worst}")
        assert worst <= 1e-6
        means = [
            [sum(step) / len(side) for step in zip(*(s.losses for s in side), strict=True)]
            for side in (straight, resumed)
        ]
        assert means[0] == pytest.approx(means[1], rel=1e-6)


def largest_relative_difference(ours: State, theirs: State) -> float:
    """Of any main parameter, relative to the largest of its tensor (or 1)."""
    worst = 0.0
    for name, master in ours.main_parameters.items():
        if master.numel():
            scale = max(1.0, float(master.abs().max()))
            worst = max(worst, float((master - theirs.main_parameters[name]).abs().max()) / scale)
    return worst


@FEW
@given(
    saver=LAYOUTS,
    loader=LAYOUTS,
    model=st.sampled_from(sorted(FACTORIES)),
    optimizer=st.sampled_from([*OPTIMIZERS, *WHOLE]),
)
@example(Layout(4, 3), Layout(3, 1), "OddParameters", "AdamW")
@example(Layout(2, 1), Layout(1, 3), "Late", "AdamW")
@example(Layout(3, 3, "bf16"), Layout(2, 0), "Late", "NAdam")
@example(Layout(4, 3, hybrid="mics"), Layout(3, 2), "TiedBetweenBlocks", "SGD")
@example(Layout(3, 2), Layout(4, 3, hybrid="hpz"), "SeveralDtypes", "AdamW")
@example(Layout(1, 0), Layout(4, 1, units=()), "Plain", "Muon")
@example(Layout(3, 3), Layout(2, 2), "Late", "Muon")
@example(Layout(2, 3), Layout(1, 1), "Late", "Lamb")
@example(Layout(2, 3, "bf16 without main parameters"), Layout(3, 1), "Plain", "AdamW")
def test_any_layout_loads_what_any_other_saved(saver: Layout, loader: Layout, model: str, optimizer: str) -> None:
    if loader.precision == "bf16 without main parameters":  # would lose digits of fp32 main parameters
        saver = replace(saver, precision=loader.precision)
    if model == "Shared":
        # torch keeps one cache of autocast's casts for all threads. Where another rank empties it between two uses of
        # a weight, their gradients are added in another dtype: that is no two runs' same bits.
        saver, loader = (replace(x, precision="fp32") if x.precision == "autocast" else x for x in (saver, loader))
    if model == "SeveralDtypes":
        loader = replace(loader, precision=saver.precision)
    transfer(saver, loader, model, optimizer)


def test_a_run_moves_through_many_worlds_and_nothing_changes(tmp_path: Path) -> None:
    """8, 4, 3, 1 and 5 ranks, at other stages, each loading what the one before it saved."""
    route = [Layout(8, 3), Layout(4, 1, hybrid="mics"), Layout(3, 2), Layout(1, 0), Layout(5, 3, bucket=40)]
    runs = [
        replace(
            run_of(layout, "OddParameters", "AdamW"), rows=None, settings={**layout.settings(), "log_level": "error"}
        )
        for layout in route
    ]
    saved = stop(runs[0], tmp_path / "0", at=2)
    for index, run in enumerate(runs[1:]):

        def move(run: Run = run, index: int = index) -> State:
            engine = engine_of(replace(run, seed=1))
            engine.load_checkpoint(tmp_path / f"{index}")
            engine.save_checkpoint(tmp_path / f"{index + 1}")
            state = state_of(engine)
            engine.destroy()
            return state

        assert differences(saved, run_ranks(run.world, move)) == []
    again = resume(runs[0], tmp_path / f"{len(runs) - 1}", at=2, until=3)
    straight = resume(runs[0], tmp_path / "0", at=2, until=3)
    assert differences(straight, again) == []


class WithState(models.Plain):
    """Buffers that are transposed, expanded, not saved, and of no elements; and state of its own."""

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("transposed", torch.rand(3, 2).t())
        self.register_buffer("expanded", torch.rand(3, 1).expand(3, 4))
        self.register_buffer("passing", torch.rand(3), persistent=False)
        self.register_buffer("empty", torch.zeros(0, 2))
        self.history: dict[str, object] = {}

    def get_extra_state(self) -> dict[str, object]:
        return self.history

    def set_extra_state(self, state: dict[str, object]) -> None:
        self.history = state


@pytest.mark.parametrize("verify", [True, False])
def test_buffers_of_any_strides_and_a_modules_own_state_come_back(verify: bool, tmp_path: Path) -> None:
    settings = {**Layout(2, 1).settings(), "checkpoint": {"verify": verify}}
    run = Run(settings, 2, WithState, OPTIMIZERS["AdamW"])

    def save() -> dict[str, torch.Tensor]:
        engine = engine_of(run)
        micro_steps(engine, run, 0, 1)
        engine.module.history = {"seen": (1, torch.ones(2))}
        engine.save_checkpoint(tmp_path)
        buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        engine.destroy()
        return buffers

    def load() -> tuple[dict[str, torch.Tensor], Any, torch.Tensor]:
        engine = engine_of(replace(run, seed=1))
        passing = engine.module.passing.clone()
        engine.load_checkpoint(tmp_path)
        buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        history = engine.module.history
        engine.destroy()
        return buffers, history, passing

    expected = run_ranks(2, save)[0]
    for buffers, history, passing in run_ranks(3, load):
        assert torch.equal(buffers.pop("passing"), passing)
        assert set(buffers) == {"transposed", "expanded", "empty"}
        assert all(torch.equal(value, expected[name]) for name, value in buffers.items())
        assert history["seen"][0] == 1 and torch.equal(history["seen"][1], torch.ones(2))


def test_a_load_after_a_forward_without_a_backward(tmp_path: Path) -> None:
    run = run_of(Layout(2, 3), "Plain", "AdamW")
    straight = stop(run, tmp_path, at=2, until=3)

    def load() -> State:
        engine = engine_of(replace(run, seed=1))
        micro_steps(engine, run, 0, 1)
        loss = engine(*batch(7, 0, 1))
        engine.load_checkpoint(tmp_path)
        del loss
        state = state_of(engine, micro_steps(engine, run, 2, 1))
        engine.destroy()
        return state

    resumed = run_ranks(2, load)
    assert differences(straight, resumed) == []
    assert [state.losses for state in resumed] == [state.losses for state in straight]
