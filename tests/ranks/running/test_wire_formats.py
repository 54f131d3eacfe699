"""Formats in which parameters and gradients are sent, against one process that does the same arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.formats import format_named
from shoal.comm.world import current_world
from shoal.engine import profiling
from shoal.mesh import factor_axis
from tests.helpers.any_two import any_two
from tests.helpers.models import Plain
from tests.helpers.training import (
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
STEPS = 3


def layouts_of(engine: shoal.Engine) -> list[tuple[str, int, Layout]]:
    """Of each parameter group: its label, its numel, where each parameter lies."""
    groups = [(group.label, group.buffer.layout) for group in engine.sharded.groups]
    return [(name, layout.numel, [(s.name, s.offset, s.numel) for s in layout.specs]) for name, layout in groups]


def train_with_layouts(stage: int, wire: dict[str, Any], num_micro: int = 1) -> tuple[Trained, Any]:
    engine = start(Plain, config(stage, wire=wire, gradient_accumulation_steps=num_micro))
    layouts = layouts_of(engine)
    return finish(engine, run_steps(engine, STEPS)), layouts


def through(form: Any, flat: torch.Tensor, num_ranks: int, error: torch.Tensor | None = None) -> torch.Tensor:
    """What arrives of ``flat``, whose range of each rank is encoded by itself."""
    rows, out = flat.view(num_ranks, -1), torch.empty_like(flat)
    form.decode(form.encode(rows, None if error is None else error.view(num_ranks, -1)), out.view(num_ranks, -1))
    return out


def emulate(
    stage: int, wire: dict[str, Any], layouts: list[tuple[str, int, Layout]], num_ranks: int, num_micro: int = 1
) -> dict[str, torch.Tensor]:
    """The parameters after ``STEPS`` steps of all ranks, in one process."""
    main, model = make(Plain), make(Plain)
    mains, copies = dict(main.named_parameters()), dict(model.named_parameters())
    optimizer = sgd(main.parameters())
    gather = format_named(wire["gather"]) if "gather" in wire else None
    reduce = format_named(wire["reduce"]) if "reduce" in wire else None
    has_error = wire.get("error_feedback", False)
    errors = {(label, rank): torch.zeros(numel) for label, numel, _ in layouts for rank in range(num_ranks)}
    seconds = {label: torch.zeros(numel) for label, numel, _ in layouts}

    def flat_of(values: dict[str, torch.Tensor], numel: int, layout: Layout) -> torch.Tensor:
        flat = torch.zeros(numel)
        for name, offset, size in layout:
            if name in values:
                flat[offset : offset + size] = values[name].detach().flatten()
        return flat

    def unflatten(flat: torch.Tensor, into: dict[str, torch.Tensor], layout: Layout) -> None:
        for name, offset, size in layout:
            into[name].data.copy_(flat[offset : offset + size].view_as(into[name]))

    def reduced(gradients: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """The mean over the ranks of each group."""
        means = []
        for label, numel, layout in layouts:
            total = torch.zeros(numel)
            for rank, values in enumerate(gradients):
                flat = flat_of(values, numel, layout)
                if reduce is not None:
                    flat = through(reduce, flat, num_ranks, errors[label, rank] if has_error else None)
                total = flat.clone() if rank == 0 else total.add_(flat)
            total.mul_(1 / num_ranks)
            if stage == 0 and reduce is not None:
                total = through(reduce, total, num_ranks, seconds[label] if has_error else None)
            means.append(total)
        return means

    for step in range(STEPS):
        if gather is not None and stage == 3:
            for _, numel, layout in layouts:
                unflatten(through(gather, flat_of(mains, numel, layout), num_ranks), copies, layout)
        elif gather is None or step == 0:
            for name, value in mains.items():
                copies[name].data.copy_(value)
        sums = [torch.zeros(numel) for _, numel, _ in layouts]
        kept: list[dict[str, torch.Tensor]] = [{} for _ in range(num_ranks)]
        for micro in range(num_micro):
            for rank in range(num_ranks):
                model.zero_grad()
                tokens, targets = batch(step * num_micro + micro, rank, num_ranks)
                (model(tokens, targets) / num_micro).backward()
                for name, p in copies.items():
                    if p.grad is None:
                        continue  # no rank uses it
                    before = kept[rank].get(name)
                    kept[rank][name] = p.grad.clone() if before is None else before + p.grad
            if stage >= 2 or micro == num_micro - 1:
                for total, mean in zip(sums, reduced(kept), strict=True):
                    total.add_(mean)
                kept = [{} for _ in range(num_ranks)]
        for total, (_, _, layout) in zip(sums, layouts, strict=True):
            for name, offset, size in layout:
                if copies[name].grad is not None:
                    mains[name].grad = total[offset : offset + size].view_as(mains[name]).clone()
        optimizer.step()
        if gather is not None and stage in (1, 2):
            for _, numel, layout in layouts:
                new = flat_of(mains, numel, layout)
                if wire.get("difference"):
                    base = flat_of(copies, numel, layout)
                    unflatten(base + through(gather, new - base, num_ranks), copies, layout)
                else:
                    unflatten(through(gather, new, num_ranks), copies, layout)
    return {name: value.detach() for name, value in mains.items()}


WIRES: list[dict[str, Any]] = [
    {"reduce": "int8"},
    {"gather": "int8"},
    {"gather": "bf16", "reduce": "fp8"},
    {"gather": "int8", "reduce": "int4_hadamard", "error_feedback": True},
    {"reduce": "1bit", "error_feedback": True},
    {"gather": "int4", "difference": True},
]


@any_two({"num_micro": [1, 2], "stage": [0, 1, 2, 3], "wire": WIRES})
def test_a_run_has_the_bits_of_one_process_that_does_the_same(
    stage: int, wire: dict[str, Any], num_micro: int, ranks: Callable[..., Any]
) -> None:
    if (stage == 0 and "reduce" not in wire) or (stage == 3 and "difference" in wire):
        return  # nothing is gathered; a configuration error
    wire = {key: value for key, value in wire.items() if stage > 0 or key != "gather"}
    results = ranks(2, train_with_layouts, stage, wire, num_micro)
    wanted = emulate(stage, wire, results[0][1], 2, num_micro)
    for trained, _ in results:
        for name, value in trained.main_parameters.items():
            assert torch.equal(value, wanted[name]), name


RESUMED = {"gather": "int8", "reduce": "1bit", "error_feedback": True}


def resumed(stage: int) -> dict[str, Any]:
    wire = {key: value for key, value in RESUMED.items() if stage > 0 or key != "gather"}
    return wire | {"gather": "int4", "difference": True} if stage in (1, 2) else wire


def resume(stage: int, to: int, folder: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The parameters of a run that went on after a save, and of one that was continued from it at stage ``to``."""
    engine = start(Plain, config(stage, wire=resumed(stage)), adamw)
    run_steps(engine, 2)
    engine.save_checkpoint(folder)
    run_steps(engine, 2, first=2)
    on = main_parameters(engine)
    engine.destroy()
    engine = start(Plain, config(to, wire=resumed(to)), adamw)
    assert engine.load_checkpoint(folder)[0] is not None
    assert not [key for state in engine.client_optimizer.state.values() for key in state if "wire" in key]
    run_steps(engine, 2, first=2)
    continued = main_parameters(engine)
    engine.destroy()
    return on, continued


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_resumed_run_has_the_bits_of_the_one_that_went_on(
    stage: int, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    for on, continued in ranks(2, resume, stage, stage, tmp_path):
        assert all(torch.equal(value, continued[name]) for name, value in on.items())


def errors_after_load(ranks_before: int, folder: Path, ranks: Callable[..., Any]) -> None:
    """What is lost is the same sum in another layout."""

    def totals(engine: shoal.Engine) -> dict[str, torch.Tensor]:
        """The mean over the ranks of what was lost, by parameter."""
        found, comm = {}, engine.axes.data
        for group in engine.sharded.trained_groups:
            mean = group.gradient.sent.errors[0].full.clone()
            comm.all_reduce(mean, scale=1 / comm.size, label="test").drain()
            for spec in group.buffer.layout.specs:
                found[spec.name] = mean[spec.offset : spec.offset + spec.numel].clone()
        return found

    def save() -> dict[str, torch.Tensor]:
        engine = start(Plain, config(3, wire=RESUMED), adamw)
        run_steps(engine, 2)
        before = totals(engine)
        engine.save_checkpoint(folder)
        assert all(torch.allclose(value, before[name], atol=1e-6) for name, value in totals(engine).items())
        engine.destroy()
        return before

    def load() -> dict[str, torch.Tensor]:
        engine = start(Plain, config(1, wire=RESUMED), adamw)
        engine.load_checkpoint(folder)
        return totals(engine)

    before = ranks(ranks_before, save)[0]
    for after in ranks(4, load):
        for name, value in after.items():
            assert torch.allclose(value, before[name], atol=1e-6)
            assert name == "unused" or value.any()


def test_what_was_lost_is_loaded_in_another_layout(ranks: Callable[..., Any], tmp_path: Path) -> None:
    errors_after_load(2, tmp_path, ranks)


# Bytes, nodes, tiers, and what goes wrong.


def sent_bytes(settings: dict[str, Any], num_micro: int = 1) -> tuple[list[tuple[str, str, int]], Any]:
    """What the last step's collectives of parameters and gradients were."""
    engine = start(Plain, settings)
    run_steps(engine, 1)
    with current_world().recorder.recording() as entries:
        run_steps(engine, 1, first=num_micro)
    layouts = layouts_of(engine)
    engine.destroy()
    return [(entry.op, entry.axis, entry.nbytes) for entry in entries if entry.kind == "data"], layouts


def encoded(name: str, numel: int) -> int:
    """Bytes of a row, by the table of ``comm.formats``; parts are aligned to 16 bytes."""
    bits, block = {"int8": (8, 256), "int4": (4, 256), "1bit": (1, 512), "bf16": (16, 0)}[name]
    codes = -(-numel // 32) * 32 * bits // 8 if block else numel * bits // 8
    scales = 4 * -(-numel // block) if block else 0
    return sum(-(-nbytes // 16) * 16 for nbytes in (codes, scales))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_receives_the_bytes_of_the_formula(stage: int, ranks: Callable[..., Any]) -> None:
    """Each collective is that of the run without formats, encoded. Of two ranks, each receives one shard."""
    wire = {"reduce": "int4", "block": 256, **({"gather": "int8"} if stage else {})}
    (plain, _), (found, _) = (ranks(2, sent_bytes, config(stage, **each))[0] for each in ({}, {"wire": wire}))
    wanted: list[tuple[str, int]] = []
    for op, _, nbytes in plain:
        if op == "all_gather":
            wanted.append(("all_gather", encoded("int8", nbytes // 4)))
        elif op == "reduce_scatter":
            wanted.append(("all_to_all", encoded("int4", nbytes // 4)))
        else:  # an all-reduce is made of two halves
            wanted += [(half, encoded("int4", nbytes // 8)) for half in ("all_to_all", "all_gather")]
    assert sorted((op, nbytes) for op, _, nbytes in found) == sorted(wanted)


def test_between_nodes_gradients_are_sent_in_fewer_bits(ranks: Callable[..., Any]) -> None:
    """qgZ: in 8 bits inside of a node of two ranks, in 4 bits between two nodes."""
    zero = {"stage": 2, "zero_quantized_gradients": True}
    settings = config(2, zero_optimization=zero, wire={"ranks_per_node": 2})
    for entries, layouts in ranks(4, sent_bytes, settings):
        inside, between = (factor_axis("dp_shard", (2, 2), (at,)) for at in (1, 0))
        shards = [numel // 4 for _, numel, _ in layouts]
        found = {each: sum(nbytes for _, axis, nbytes in entries if axis == each) for each in (inside, between)}
        assert found[inside] == sum(encoded("int8", 2 * numel) for numel in shards)
        assert found[between] == sum(encoded("int4", numel) for numel in shards)


def trained(settings: dict[str, Any], steps: int = 4) -> Trained:
    engine = start(Plain, settings, sgd)
    return finish(engine, run_steps(engine, steps))


DIFFERENCE = {"wire": {"gather": "int4", "difference": True}}
DIFFERENT: dict[str, dict[str, Any]] = {
    "hybrid": {"parallel": {"dp_replicate": 2}},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "host": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "late": {"zero_optimization": {"overlap_param_gather": True}},
    "host late": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "overlap_param_gather": True}},
    "super": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
}
OTHERS: dict[str, dict[str, Any]] = {
    "hpz": {"zero_optimization": {"zero_quantized_weights": True, "zero_hpz_partition_size": 2}},
    "hybrid": {"parallel": {"dp_replicate": 2}, "wire": {"gather": "int8", "reduce": "int8"}},
    "hybrid with error": {"parallel": {"dp_replicate": 2}, "wire": {"reduce": "int8", "error_feedback": True}},
    "nodes": {"wire": {"gather": "int8", "hierarchical_gather": True, "ranks_per_node": 2}},
    "loco": {"zero_optimization": {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.5}}},
    "bf16": {"bf16": {"enabled": True}, "wire": {"gather": "int8", "reduce": "int8", "error_feedback": True}},
    "fp16": {"fp16": {"enabled": True}, "wire": {"gather": "int8", "reduce": "int8", "error_feedback": True}},
    "host": {
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
        "wire": {"gather": "int8", "reduce": "int8", "error_feedback": True},
    },
    "one unit": {"wire": {"units": {"blocks.1": {"gather": "int8", "reduce": "fp8"}}}},
    **{f"difference {name}": section | DIFFERENCE for name, section in DIFFERENT.items()},
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", OTHERS)
def test_formats_compose_with_what_else_a_step_does(name: str, stage: int, ranks: Callable[..., Any]) -> None:
    """Within a tenth of how far the parameters have moved, of the run without formats."""
    if name.startswith("difference") and stage == 3:
        return  # a configuration error
    sections = {key: dict(value) for key, value in OTHERS[name].items()}
    plain = {key: value for key, value in sections.items() if key != "wire"}
    if "zero_optimization" in plain:
        kept = {key: value for key, value in plain["zero_optimization"].items() if key.startswith(("offload", "over"))}
        plain["zero_optimization"] = kept
    began = {key: value.detach() for key, value in make(Plain).named_parameters()}
    results, wanted = ranks(4, trained, config(stage, **sections)), ranks(4, trained, config(stage, **plain))
    moved = sum(float((value - began[key]).square().sum()) for key, value in wanted[0].main_parameters.items())
    for result in results:
        ours = result.main_parameters
        off = sum(float((ours[key] - value).square().sum()) for key, value in wanted[0].main_parameters.items())
        assert off <= 0.1**2 * moved
        assert all(torch.equal(value, results[0].main_parameters[key]) for key, value in ours.items())
    if name not in ("hpz",) or stage == 3:
        assert not all(torch.equal(v, wanted[0].main_parameters[k]) for k, v in results[0].main_parameters.items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_skips_the_step_and_leaves_no_trace_in_the_error(
    stage: int, ranks: Callable[..., Any]
) -> None:
    wire = {"reduce": "int4", "error_feedback": True}

    def skip() -> tuple[int, bool, bool]:
        engine = start(Plain, config(stage, wire=wire, precision={"nonfinite": "skip"}))
        run_steps(engine, 1)
        before = main_parameters(engine)
        loss = engine(*batch(5, current_world().rank, current_world().size))
        engine.backward(loss * (torch.inf if current_world().rank else 1.0))
        engine.step()
        after = main_parameters(engine)
        same = all(torch.equal(value, after[name]) for name, value in before.items())
        errors = [
            error.stored_values for group in engine.sharded.trained_groups for error in group.gradient.sent.errors
        ]
        return engine.skipped_steps, same, all(bool(error.isfinite().all()) for error in errors)

    assert ranks(2, skip) == [(1, True, True)] * 2


def test_an_error_follows_the_loss_scale_and_is_reset(ranks: Callable[..., Any]) -> None:
    wire = {"reduce": "int4", "error_feedback": True, "error_reset": 3}
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}

    def norms() -> list[float]:
        engine = start(Plain, config(2, wire=wire, fp16=fp16))
        found = []
        for step in range(3):
            run_steps(engine, 1, first=step)
            errors = [error for group in engine.sharded.trained_groups for error in group.gradient.sent.errors]
            found.append(sum(float(error.stored_values.norm()) for error in errors) / engine.loss_scale)
        return found

    for first, second, third in ranks(2, norms):
        assert 0 < second < 2.5 * first  # the scale doubled after the second step, and so did the error
        assert third == 0


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"wire": {"reduce": "int8", "block": 100}}, "wire.block"),
        ({"wire": {"reduce": "int8"}, "communication_data_type": "bf16"}, "communication_data_type"),
        ({"wire": {"reduce": "int3"}}, "wire.reduce"),
        ({"wire": {"reduce": "int8", "between_nodes": "int4", "ranks_per_node": 3}}, "ranks_per_node is 3"),
    ],
)
def test_what_does_not_fit_is_named(sections: dict[str, Any], said: str, ranks: Callable[..., Any]) -> None:
    with pytest.raises(shoal.ShoalError, match=said):
        ranks(2, trained, config(2, **sections))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_are_taken_as_they_are_and_taking_them_changes_nothing(stage: int, ranks: Callable[..., Any]) -> None:
    def take(is_taken: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        engine = start(Plain, config(stage, wire={"gather": "int4"}))
        run_steps(engine, 2)
        values = engine.module_state_dict() if is_taken else {}
        if is_taken:
            main = main_parameters(engine)
            assert all(torch.equal(value, values[name]) for name, value in main.items())
        run_steps(engine, 1, first=2)
        found = main_parameters(engine)
        engine.destroy()
        return values, found

    for (_, taken), (_, not_taken) in zip(ranks(2, take, True), ranks(2, take, False), strict=True):
        assert all(torch.equal(value, not_taken[name]) for name, value in taken.items())


@pytest.mark.parametrize(("encoded_takes", "is_said"), [(2.0, True), (1.05, False)])
def test_a_format_that_costs_more_time_than_it_saves_is_reported(
    encoded_takes: float,
    is_said: bool,
    ranks: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO", logger="shoal")
    measure, measured = profiling.gather_milliseconds, []

    def milliseconds(comm: Any, full: torch.Tensor, form: Any, synchronize: Any) -> float:
        measured.append(measure(comm, full, form, synchronize))
        return 1.0 if form is None else encoded_takes

    monkeypatch.setattr(profiling, "gather_milliseconds", milliseconds)
    ranks(2, trained, config(1, wire={"reduce": "int8"}), 1)
    assert len(measured) == 4 and min(measured) > 0
    assert ("takes 1.00 ms as they are and 2.00 ms as int8" in caplog.text) == is_said


def test_without_formats_nothing_is_timed(ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "gather_milliseconds", None)
    ranks(2, trained, config(1), 1)
