"""Replicas that take steps of their own and are synchronised by an outer optimizer, against one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.formats import format_named
from shoal.comm.world import current_world
from shoal.engine.parts.local_steps import LocalSteps
from shoal.sharding.outer_state import OUTER
from tests.helpers.models import Plain
from tests.helpers.training import (
    OptimizerFactory,
    Trained,
    adamw,
    batch,
    config,
    finish,
    main_parameters,
    make,
    run_steps,
    sgd,
    start,
)

Layout = list[tuple[str, int, int]]  # name, offset, numel
Layouts = list[tuple[str, int, int, Layout]]  # of each group: its unit, its numel, that of a shard
STEPS = 5


def local(every: int = 2, **keys: Any) -> dict[str, Any]:
    return {"every": every, **keys}


def settings(stage: int, section: dict[str, Any], replicas: int = 2, **sections: Any) -> dict[str, Any]:
    return config(stage, local_steps=section, parallel={"dp_replicate": replicas}, **sections)


def layouts_of(engine: shoal.Engine) -> Layouts:
    return [
        (unit.name, layout.numel, group.owned_numel, [(s.name, s.offset, s.numel) for s in layout.specs])
        for unit in engine.sharded.units
        for group in unit.trained
        for layout in [group.buffer.layout]
    ]


def train(made: dict[str, Any], optimizer: OptimizerFactory = sgd, steps: int = STEPS) -> tuple[Trained, Layouts]:
    engine = start(Plain, made, optimizer)
    layouts = layouts_of(engine)
    losses = run_steps(engine, steps)
    return finish(engine, losses), layouts


class Replica:
    """A model with its optimizer, trained on the micro-batches of some ranks."""

    def __init__(self, optimizer: OptimizerFactory, ranks: range, num_ranks: int) -> None:
        self.model = make(Plain)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = optimizer(self.model.parameters())
        self.ranks, self.num_ranks = ranks, num_ranks

    def step(self, first: int, num_micro: int, *, sums_each_time: bool) -> None:
        """Sums are taken in the order of the ranks: of each micro-batch (stages 2 and 3), or of each rank's sum."""

        def gradient(micro: int, rank: int) -> dict[str, torch.Tensor]:
            self.model.zero_grad()
            (self.model(*batch(first + micro, rank, self.num_ranks)) / num_micro).backward()
            return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

        def added(values: list[dict[str, torch.Tensor]], scale: float = 1.0) -> dict[str, torch.Tensor]:
            return {name: _in_order([each[name] for each in values]) * scale for name in values[0]}

        share = 1 / len(self.ranks)
        if sums_each_time:
            micros = [added([gradient(micro, rank) for rank in self.ranks], share) for micro in range(num_micro)]
            total = added(micros)
        else:
            total = added([added([gradient(micro, rank) for micro in range(num_micro)]) for rank in self.ranks], share)
        for name, parameter in self.parameters.items():
            parameter.grad = total.get(name)
        self.optimizer.step()


def _in_order(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total.add_(value)
    return total


def through(form: Any, flat: torch.Tensor, num_rows: int, error: torch.Tensor | None = None) -> torch.Tensor:
    """What arrives of ``flat``, of which each replica sums a part, encoded by itself."""
    rows, out = flat.view(num_rows, -1), torch.empty_like(flat)
    form.decode(form.encode(rows, None if error is None else error.view(num_rows, -1)), out.view(num_rows, -1))
    return out


def emulate(
    stage: int,
    section: dict[str, Any],
    layouts: Layouts,
    optimizer: OptimizerFactory = sgd,
    *,
    num_replicas: int = 2,
    ranks_of_one: int = 2,
    num_micro: int = 1,
    steps: int = STEPS,
) -> list[dict[str, torch.Tensor]]:
    """The parameters of each replica after ``steps`` steps, in one process."""
    ranks = [range(at * ranks_of_one, (at + 1) * ranks_of_one) for at in range(num_replicas)]
    replicas = [Replica(optimizer, each, num_replicas * ranks_of_one) for each in ranks]
    anchors = dict(make(Plain).named_parameters())
    outer = {
        unit: torch.optim.SGD(
            [anchors[name] for of, _, _, layout in layouts if of == unit for name, _, _ in layout],
            lr=section.get("outer_lr", 0.7),
            momentum=section.get("outer_momentum", 0.9),
            nesterov=section.get("nesterov", True),
        )
        for unit, _, _, _ in layouts
    }
    form = format_named(section["wire"]) if "wire" in section else None
    errors = {(unit, at): torch.zeros(numel) for unit, numel, _, _ in layouts for at in range(num_replicas)}
    has_error = section.get("error_feedback", False)
    fragments = section.get("fragments", 1)

    def flat_of(replica: Replica, numel: int, layout: Layout) -> torch.Tensor:
        flat = torch.zeros(numel)
        for name, offset, size in layout:
            flat[offset : offset + size] = (anchors[name].data - replica.parameters[name].data).flatten()
        return flat

    def mean(unit: str, numel: int, owned: int, layout: Layout) -> torch.Tensor:
        flats = [flat_of(replica, numel, layout) for replica in replicas]
        if form is None:
            return _in_order(flats) / num_replicas
        parts = []
        for begin in range(0, numel, owned):
            mine = [errors[unit, at][begin : begin + owned] if has_error else None for at in range(num_replicas)]
            sent = [
                through(form, flat[begin : begin + owned], num_replicas, error)
                for flat, error in zip(flats, mine, strict=True)
            ]
            total, lost = _in_order(sent) / num_replicas, torch.zeros(owned)
            part = through(form, total, num_replicas, lost if has_error else None)
            size = owned // num_replicas
            for at, error in enumerate(mine):
                if error is not None:
                    error[at * size : (at + 1) * size].add_(lost[at * size : (at + 1) * size], alpha=num_replicas)
            parts.append(part)
        return torch.cat(parts)

    for step in range(1, steps + 1):
        for replica in replicas:
            replica.step((step - 1) * num_micro, num_micro, sums_each_time=stage >= 2)
        for number, unit in enumerate(dict.fromkeys(unit for unit, _, _, _ in layouts)):
            if (step - number % fragments * section["every"] // fragments) % section["every"]:
                continue
            for of, numel, owned, layout in layouts:
                if of != unit:
                    continue
                gradient = mean(of, numel, owned, layout)
                for name, offset, size in layout:
                    anchors[name].grad = gradient[offset : offset + size].view_as(anchors[name]).clone()
            outer[unit].step()
            for replica in replicas:
                for of, _, _, layout in layouts:
                    for name, _, _ in layout if of == unit else ():
                        replica.parameters[name].data.copy_(anchors[name].data)
    return [{name: value.detach() for name, value in replica.parameters.items()} for replica in replicas]


SECTIONS: dict[str, dict[str, Any]] = {
    "every 2": local(),
    "each step": local(1, outer_lr=1.0, outer_momentum=0.0, nesterov=False),
    "plain momentum": local(nesterov=False, outer_lr=0.5),
    "fragments": local(3, fragments=2),
    "int8": local(wire="int8"),
    "int4 with error": local(wire="int4_hadamard", error_feedback=True),
    "1bit fragments": local(2, wire="1bit", fragments=2, error_feedback=True),
}


AT_EACH_STAGE = ("fragments", "int4 with error")
CASES = [(name, stage) for name in SECTIONS for stage in (range(4) if name in AT_EACH_STAGE else [2])]


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_two_replicas_of_two_ranks_have_the_bits_of_one_process(
    name: str, stage: int, ranks: Callable[..., Any]
) -> None:
    results = ranks(4, train, settings(stage, SECTIONS[name]))
    wanted = emulate(stage, SECTIONS[name], results[0][1])
    for rank, (trained, _) in enumerate(results):
        for key, value in wanted[rank // 2].items():
            assert torch.equal(trained.main_parameters[key], value), (rank, key)


@pytest.mark.parametrize("stage", [1, 2])
def test_micro_batches_are_accumulated_in_each_replica(stage: int, ranks: Callable[..., Any]) -> None:
    section = local(2, fragments=2)
    results = ranks(4, train, settings(stage, section, gradient_accumulation_steps=2), adamw, 3)
    wanted = emulate(stage, section, results[0][1], adamw, num_micro=2, steps=3)
    for rank, (trained, _) in enumerate(results):
        for key, value in wanted[rank // 2].items():
            assert torch.allclose(trained.main_parameters[key], value, atol=1e-6), (rank, key)


def test_at_stage_0_each_rank_is_a_replica_unless_the_keys_name_groups(ranks: Callable[..., Any]) -> None:
    results = ranks(3, train, config(0, local_steps=local(wire="int8", error_feedback=True)), sgd, 4)
    alone = {"num_replicas": 3, "ranks_of_one": 1, "steps": 4}
    section = local()
    wanted = emulate(0, section, results[0][1], **alone)
    far = max(float((results[0][0].main_parameters[key] - value).abs().max()) for key, value in wanted[0].items())
    assert 0 < far < 0.02
    assert all(
        torch.equal(value, results[1][0].main_parameters[key]) for key, value in results[0][0].main_parameters.items()
    )
    exact = ranks(3, train, config(0, local_steps=section), sgd, 4)
    for trained, _ in exact:
        assert all(torch.allclose(trained.main_parameters[key], value, atol=1e-6) for key, value in wanted[0].items())


# Norms and steps that are skipped.


def test_norm_and_clipping_are_those_of_a_replica(ranks: Callable[..., Any]) -> None:
    def norms() -> tuple[float | None, dict[str, torch.Tensor]]:
        engine = start(Plain, settings(2, local(100), gradient_clipping=0.1))
        run_steps(engine, 1)
        return engine.get_global_grad_norm(), main_parameters(engine)

    results = ranks(4, norms)
    for at in (0, 1):
        replica = Replica(sgd, range(2 * at, 2 * at + 2), 4)
        replica.optimizer.step = lambda: None  # type: ignore[method-assign]
        replica.step(0, 1, sums_each_time=True)
        norm = float(torch.nn.utils.clip_grad_norm_(replica.parameters.values(), 0.1))
        for found, parameters in results[2 * at : 2 * at + 2]:
            assert found == pytest.approx(norm, rel=1e-5)
            for name, p in replica.parameters.items():
                if p.grad is not None:
                    began = dict(make(Plain).named_parameters())[name]
                    step = 0.1 * (p.grad + 0.01 * began)
                    assert torch.allclose(parameters[name], began - step, atol=1e-6), name
    assert results[0][0] != results[2][0]


@pytest.mark.parametrize("stage", [0, 3])
def test_an_overflow_in_one_replica_skips_the_step_of_all(stage: int, ranks: Callable[..., Any]) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}

    def skip() -> tuple[int, float, bool, list[float]]:
        engine = start(Plain, settings(stage, local(3), fp16=fp16), adamw)
        run_steps(engine, 1)
        before = main_parameters(engine)
        world = current_world()
        loss = engine(*batch(5, world.rank, world.size))
        engine.backward(loss * (1e30 if world.rank == 0 else 1.0))
        engine.step()
        after = main_parameters(engine)
        is_same = all(torch.equal(value, after[name]) for name, value in before.items())
        run_steps(engine, 1, first=2)  # the end of the round
        last = main_parameters(engine)
        return engine.skipped_steps, engine.loss_scale, is_same, [float(value.sum()) for value in last.values()]

    results = ranks(4, skip)
    assert [result[:3] for result in results] == [(1, 128.0, True)] * 4
    assert all(result[3] == results[0][3] for result in results)
    assert all(map(math.isfinite, results[0][3]))


# What is sent and kept.


def test_over_a_round_replicas_send_their_parameters_once(ranks: Callable[..., Any]) -> None:
    """Of two replicas, each sends and receives as many bytes as its range has in fp32; in int4 an eighth and scales."""

    def sent(section: dict[str, Any] | None) -> tuple[dict[str, int], int, list[int]]:
        made = settings(2, section) if section else config(2, parallel={"dp_replicate": 2})
        engine = start(Plain, made)
        run_steps(engine, 4)
        totals: dict[str, int] = {}
        by_step = []
        for step in range(4, 8):
            with current_world().recorder.recording() as entries:
                run_steps(engine, 1, first=step)
            for entry in entries:
                if entry.kind == "data":
                    totals[entry.axis] = totals.get(entry.axis, 0) + entry.nbytes
            by_step.append(sum(e.nbytes for e in entries if e.axis == "dp_replicate" and e.kind == "data"))
        return totals, sum(group.owned_numel for group in engine.sharded.trained_groups), by_step

    plain, numel, _ = ranks(4, sent, None)[0]
    found, _, by_step = ranks(4, sent, local(4))[0]
    assert plain["dp_replicate"] == 4 * found["dp_replicate"] == 4 * 4 * numel
    assert by_step == [0, 0, 0, 4 * numel]
    # After a synchronisation parameters are gathered once more.
    assert found["dp_shard"] == plain["dp_shard"] + 4 * numel
    _, _, in_parts = ranks(4, sent, local(4, fragments=2))[0]
    assert in_parts[0] == in_parts[2] == 0
    assert in_parts[1] + in_parts[3] == 4 * numel
    encoded, _, _ = ranks(4, sent, local(4, wire="int4", block=64))[0]
    assert numel / 2 < encoded["dp_replicate"] < 1.3 * numel


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_ledger_lists_the_outer_state(stage: int, ranks: Callable[..., Any]) -> None:
    def held(section: dict[str, Any]) -> tuple[int, int, bool]:
        engine = start(Plain, settings(stage, section, bf16={"enabled": True}))
        entries = [entry for entry in engine.memory_report().entries if entry.kind == "outer state"]
        is_formula = all(entry.nbytes == entry.formula for entry in entries)
        numel = sum(group.owned_numel for group in engine.sharded.trained_groups)
        return sum(entry.nbytes for entry in entries), numel, is_formula

    for nbytes, numel, is_formula in ranks(4, held, local()):
        assert (nbytes, is_formula) == (2 * 4 * numel, True)
    for nbytes, numel, is_formula in ranks(4, held, local(wire="int8", error_feedback=True)):
        assert (nbytes, is_formula) == (3 * 4 * numel, True)


# Checkpoints.

SAVED = local(2, wire="int8", error_feedback=True, fragments=2)


def outer_states(engine: shoal.Engine) -> dict[str, torch.Tensor]:
    """What this rank has of anchors and momenta, by kind and parameter, with where it begins."""
    found = {}
    for group in engine.sharded.trained_groups:
        for kept in group.kept:
            for kind in OUTER:
                for segment in group.buffer.layout.segments_in(group.buffer.begin, group.buffer.end):
                    if kind in kept.saved:
                        name = group.buffer.layout.specs[segment.slot].name
                        values = kept.saved[kind][segment.start : segment.stop].clone()
                        found[f"{kind} {name} {segment.offset}"] = values
    return found


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "int8 state"), (3, "fp32")])
def test_a_resumed_run_has_the_bits_of_the_one_that_went_on(
    stage: int, precision: str, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """Saved in the middle of a round, and loaded into an engine that has taken another step."""
    more: dict[str, Any] = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "int8 state": {"precision": {"state_dtype": "int8"}},
    }[precision]

    def resume() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = start(Plain, settings(stage, local(4, wire="int8", error_feedback=True), **more), adamw)
        run_steps(engine, 6)
        apart = main_parameters(engine)
        engine.save_checkpoint(tmp_path)
        assert not all(torch.equal(value, apart[name]) for name, value in main_parameters(engine).items())
        run_steps(engine, 4, first=6)
        on = main_parameters(engine) | outer_states(engine)
        engine.destroy()
        engine = start(Plain, settings(stage, local(4, wire="int8", error_feedback=True), **more), adamw)
        run_steps(engine, 1, first=20)
        engine.load_checkpoint(tmp_path)
        run_steps(engine, 4, first=6)
        continued = main_parameters(engine) | outer_states(engine)
        engine.destroy()
        return on, continued

    results = ranks(4, resume)
    for on, continued in results:
        assert on.keys() == continued.keys()
        assert all(torch.equal(value, continued[name]) for name, value in on.items())


@pytest.mark.parametrize(("num_ranks", "replicas"), [(1, 1), (2, 1), (3, 3), (4, 4)])
def test_replicas_join_and_leave_in_the_middle_of_a_round(
    num_ranks: int, replicas: int, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    def save() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = start(Plain, settings(2, SAVED), adamw)
        run_steps(engine, 3)
        engine.save_checkpoint(tmp_path)
        return main_parameters(engine), outer_states(engine)

    def go_on(stage: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = start(Plain, settings(stage, SAVED, replicas), adamw)
        engine.load_checkpoint(tmp_path)
        loaded, outer = main_parameters(engine), outer_states(engine)
        run_steps(engine, 3, first=3)
        engine.part(LocalSteps).synchronize()  # type: ignore[union-attr]
        return loaded, outer, main_parameters(engine)

    saved = ranks(4, save)
    assert saved[0][0].keys() == saved[2][0].keys()
    whole = {name: values for _, outer in saved[:2] for name, values in outer.items()}
    results = ranks(num_ranks, go_on, 3)
    for loaded, _, last in results:
        assert all(torch.equal(value, saved[2][0][name]) for name, value in loaded.items())
        assert all(torch.equal(value, results[0][2][name]) for name, value in last.items())
        assert all(bool(value.isfinite().all()) for value in last.values())
    found = {name: values for _, outer, _ in results for name, values in outer.items()}
    kinds = OUTER if replicas > 1 else OUTER[:2]
    for kind in kinds:
        for name in saved[0][0]:
            assert torch.equal(_joined(found, kind, name), _joined(whole, kind, name)), (kind, name)
    for (*_, one), (*_, other) in zip(results, ranks(num_ranks, go_on, 1), strict=True):
        assert all(torch.allclose(value, other[name], atol=1e-5) for name, value in one.items())


def _joined(parts: dict[str, torch.Tensor], kind: str, name: str) -> torch.Tensor:
    mine = {int(key.split()[2]): values for key, values in parts.items() if key.split()[:2] == [kind, name]}
    return torch.cat([mine[offset] for offset in sorted(mine)])


@pytest.mark.parametrize("source", ["checkpoint", "state_dict", "a part", "function"])
def test_weights_that_are_loaded_alone_begin_a_round(source: str, ranks: Callable[..., Any], tmp_path: Path) -> None:
    def copy(src: Any, dst: torch.nn.Module) -> None:
        for name, value in src.items():
            dst.get_parameter(name).data.copy_(value)

    def load() -> bool:
        engine = start(Plain, settings(2, SAVED), adamw)
        run_steps(engine, 3)
        engine.save_checkpoint(tmp_path)
        run_steps(engine, 2, first=3)
        values = {name: torch.ones_like(value) for name, value in make(Plain).state_dict().items()}
        if source == "checkpoint":
            engine.load_checkpoint(tmp_path, load_module_only=True)
        elif source == "a part":
            engine.load_module_state_dict(dict([values.popitem()]), strict=False)
        else:
            engine.load_module_state_dict(values, custom_load_fn=copy if source == "function" else None)
        mine = torch.cat([value.flatten() for value in main_parameters(engine).values()])
        others = engine.axes.world.gathered(mine, label="test")
        assert all(torch.equal(mine, other) for other in others)
        groups = engine.sharded.trained_groups
        states = [kept.saved for group in groups for kept in group.kept if OUTER[0] in kept.saved]
        is_anchored = all(torch.equal(s[OUTER[0]], g.main) for s, g in zip(states, groups, strict=True))
        return is_anchored and not any(state[kind].any() for state in states for kind in OUTER[1:])

    assert all(ranks(4, load))


def test_a_checkpoint_without_replicas_apart_is_loaded_and_the_other_way_round(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    def change(before: dict[str, Any], after: dict[str, Any], folder: Path) -> tuple[bool, list[float]]:
        engine = start(Plain, before, adamw)
        run_steps(engine, 3)
        engine.save_checkpoint(folder)
        was = main_parameters(engine)
        engine.destroy()
        engine = start(Plain, after, adamw)
        engine.load_checkpoint(folder)
        assert not [key for state in engine.client_optimizer.state.values() for key in state if "outer" in key]
        now = main_parameters(engine)
        return all(torch.equal(value, now[name]) for name, value in was.items()), run_steps(engine, 3, first=3)

    plain = config(2, parallel={"dp_replicate": 2})
    for name, before, after in (("to", plain, settings(2, local())), ("from", settings(2, local()), plain)):
        for is_same, losses in ranks(4, change, before, after, tmp_path / name):
            assert is_same
            assert all(map(math.isfinite, losses))


@pytest.mark.parametrize(("stage", "sections"), [(1, {"bf16": {"enabled": True}}), (3, {})])
def test_streams_wait_for_each_other(
    stage: int, sections: dict[str, Any], ranks: Callable[..., Any], tmp_path: Path
) -> None:
    made = settings(stage, local(2, wire="int8", error_feedback=True), debug={"check_streams": True}, **sections)

    def run() -> None:
        engine = start(Plain, made, adamw)
        run_steps(engine, 3)
        engine.save_checkpoint(tmp_path)
        run_steps(engine, 1, first=3)
        engine.destroy()  # raises StreamError

    ranks(2, run)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"local_steps": local()}, "local_steps.every"),
        ({"local_steps": local(2, fragments=3), "parallel": {"dp_replicate": 2}}, "local_steps.fragments"),
        ({"local_steps": local(9, fragments=9), "parallel": {"dp_replicate": 2}}, "there are 4 units"),
        ({"local_steps": local(wire="int8", block=100), "parallel": {"dp_replicate": 2}}, "local_steps.block"),
    ],
)
def test_what_does_not_fit_is_named(sections: dict[str, Any], said: str, ranks: Callable[..., Any]) -> None:
    with pytest.raises(shoal.ShoalError, match=said) as caught:
        ranks(4, train, config(2, **sections))
    assert "local-steps" in str(caught.value)
