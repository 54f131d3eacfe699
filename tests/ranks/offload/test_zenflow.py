"""ZenFlow: important columns at once on the device, the other ones on the host after several gradients.

The host's memory is treated as another than the device's, as always with ZenFlow.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import OptimizerError
from tests.helpers.zenflow_reference import Reference
from tests.ranks.offload.test_offload import make_apart

torch.manual_seed(5)
MODEL = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 7))


def config(stage: int, zenflow: dict[str, Any] | None, *, precision: str = "fp32", **keys: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, "zenflow": zenflow}
    zero["offload_optimizer"] = {"device": "cpu"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "units": {"classes": ["Linear"]},
        **keys,
    }
    return settings if precision == "fp32" else {**settings, precision: {"enabled": True}}


def batches(number: int, size: int, rank: int) -> torch.Tensor:
    """This rank's part of a batch of 4 rows for each of 4 ranks."""
    whole = torch.randn(16, 12, generator=torch.Generator().manual_seed(number))
    return whole.chunk(size)[rank]


def train(
    settings: dict[str, Any], steps: int = 8, *, size: int = 2, folder: str = "", at: int = -1, first: int = 0
) -> dict[str, torch.Tensor]:
    """Train from step ``first`` on; save after ``at`` steps. With ``first`` it is loaded."""
    settings = {
        **settings,
        "train_micro_batch_size_per_gpu": 16 // size // settings.get("gradient_accumulation_steps", 1),
    }
    engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
    if first:
        engine.load_checkpoint(folder)
    dtype, parts = next(engine.module.parameters()).dtype, engine.gradient_accumulation_steps()
    losses = []
    for number in range(first, steps):
        for rows in batches(number, size, engine.global_rank).to(dtype).chunk(parts):
            loss = (engine(rows).float() - 1).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        if number + 1 == at:
            engine.save_checkpoint(folder)
    values = {"losses": torch.stack(losses)}
    for name, parameter in engine.module.named_parameters():
        values[f"main {name}"] = engine.access.full_parameter(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            values[f"{key} {name}"] = engine.access.full_optimizer_state(parameter, key)
    values |= {f"shown {name}": value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return values


def ranks(size: int, settings: dict[str, Any], **keys: Any) -> dict[str, torch.Tensor]:
    return run_ranks(size, partial(train, size=size, **keys), settings)[0]


def check_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], bound: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        distance = (value.double() - other[name].double()).abs().max()
        assert distance <= bound, (name, float(distance))


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation"), [(1, "bf16", 2), (2, "fp32", 1), (2, "fp16", 2), (3, "bf16", 1)]
)
def test_with_all_columns_it_is_the_offloaded_adamw(
    stage: int, precision: str, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.1}
    make_apart(monkeypatch)
    plain = ranks(2, config(stage, None, precision=precision, **keys))
    flow = {"topk_ratio": 1.0, "update_interval": 1}
    check_equal(plain, ranks(2, config(stage, flow, precision=precision, **keys)))


FLOWS = {
    "chosen anew": {
        "topk_ratio": 0.3, "update_interval": 2, "select_strategy": "step", "select_interval": 3, "offload": True,
        "full_warm_up_rounds": 2,
    },
    "sum of 3": {"topk_ratio": 0.3, "update_interval": 3},
    "late": {"topk_ratio": 0.3, "update_interval": 2, "overlap_step": True},
    "chosen anew, late": {
        "topk_ratio": 0.2, "update_interval": 2, "select_strategy": "epoch", "select_interval": 2, "steps_per_epoch": 2,
        "overlap_step": True, "full_warm_up_rounds": 1,
    },
}  # fmt: skip


def by_reference(flow: dict[str, Any], steps: int = 8) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(MODEL)
    names = [name for name, _ in model.named_parameters()]
    interval = flow["select_interval"] * flow.get("steps_per_epoch", 1) if "select_interval" in flow else None
    reference = Reference(
        list(model.parameters()),
        flow["topk_ratio"],
        flow["update_interval"],
        select_interval=interval,
        warm_up=flow.get("full_warm_up_rounds", 0),
        is_late=flow.get("overlap_step", False),
    )
    for number in range(steps):
        loss = (model(batches(number, 1, 0)) - 1).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        reference.step([gradient * min(1.0, 1 / (float(norm) + 1e-6)) for gradient in gradients])
    values = {f"shown {name}": value.clone() for name, value in model.state_dict().items()}
    for name, state in zip(names, reference.states, strict=True):
        values |= {f"main {name}": state["main"], f"exp_avg {name}": state["m"], f"exp_avg_sq {name}": state["v"]}
    return values


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("size", [1, 4])
def test_it_is_the_definition_in_plain_torch(flow: str, size: int) -> None:
    stages = [1, 2, 3] if size > 1 else [2]
    runs = [ranks(size, config(stage, FLOWS[flow])) for stage in stages]
    for other in runs[1:]:
        check_equal(runs[0], other)
    runs[0].pop("losses")
    check_equal(runs[0], by_reference(FLOWS[flow]), bound=2e-6)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(8, 12))


@pytest.mark.parametrize(
    ("data", "given", "expected"),
    [
        (torch.zeros(48, 12), None, 3),
        (torch.zeros(48, 12), 5, 5),
        (torch.zeros(16, 12), None, 1),
        (Stream(), None, None),
    ],
    ids=["training_data", "config", "less than a step", "stream"],
)
def test_an_epoch_is_that_of_the_training_data(data: Any, given: int | None, expected: int | None) -> None:
    def rank() -> int | None:
        settings = config(2, {"steps_per_epoch": given}, gradient_accumulation_steps=2)
        engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings, training_data=data)
        between = engine.sharding.step.cpu_optimizer.steps_between_choices()
        engine.destroy()
        return between

    assert run_ranks(2, rank) == [expected] * 2


AUTO = {"topk_ratio": 0.3, "auto_ratio": 0.6}


@pytest.mark.parametrize("flow", ["sum of 3", "late", "chosen anew, late", "auto"])
@pytest.mark.parametrize(("sizes", "stage"), [((2, 2), 2), ((2, 4), 3), ((4, 1), 2)])
def test_a_run_continues_from_the_middle_of_an_interval(
    flow: str, sizes: tuple[int, int], stage: int, tmp_path: Path
) -> None:
    settings = config(stage, FLOWS.get(flow, AUTO))
    before, after = sizes
    whole = ranks(before, settings, folder=str(tmp_path), at=3)
    unsaved = ranks(before, settings)
    check_equal(whole, unsaved)
    again = ranks(after, settings, folder=str(tmp_path), first=3)
    whole["losses"] = whole["losses"][3:]
    if before != after:  # of other rows
        whole["losses"] = again["losses"]
    check_equal(whole, again, bound=0.0 if before == after else 2e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_with_an_interval_of_one_it_is_adamw_whatever_is_important(precision: str) -> None:
    settings = config(2, {"topk_ratio": 0.4, "update_interval": 1}, precision=precision, gradient_accumulation_steps=2)
    zero = {**settings["zero_optimization"], "zenflow": None}
    plain = ranks(2, {**settings, "zero_optimization": zero})
    # The last elements of a range, fewer than one vector of the processor, round otherwise.
    check_equal(plain, ranks(2, settings), bound=1e-6 if precision == "fp32" else 2**-8)


def skipping(folder: str) -> list[dict[str, torch.Tensor]]:
    """Two fp16 runs, with the same batches; in one of them a step in the middle of an interval overflows."""
    results = []
    for overflows in (False, True):
        settings = config(3, FLOWS["sum of 3"], precision="fp16", gradient_accumulation_steps=2)
        settings["fp16"] |= {"initial_scale_power": 4, "loss_scale_window": 1000}
        engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
        for number in range(5):
            for is_bad in [False, *([True] if overflows and number == 2 else [])][::-1]:
                for rows in batches(number, 4, engine.global_rank).half().chunk(2):
                    loss = (engine(rows).float() - 1).square().mean()
                    engine.backward(loss * (float("inf") if is_bad else 1.0))
                    engine.step()
        assert engine.skipped_steps == int(overflows)
        results.append({name: value.clone() for name, value in engine.module_state_dict().items()})
        engine.destroy()
    return results


def test_a_step_that_overflows_adds_nothing(tmp_path: Path) -> None:
    # The loss scale is halved, which changes no bit of gradients in its range but for subnormal numbers.
    for one, other in run_ranks(2, skipping, str(tmp_path)):
        check_equal(one, other, bound=2**-9)


class Two(nn.ModuleList):
    def forward(self, rows: torch.Tensor, uses_both: bool) -> torch.Tensor:
        return self[0](rows) + self[1](rows) if uses_both else self[0](rows)


def late_and_missing() -> tuple[torch.Tensor, torch.Tensor]:
    """One layer has no gradient in the first steps."""
    model = Two([copy.deepcopy(MODEL[0]), copy.deepcopy(MODEL[0])])
    engine, *_ = shoal.initialize(model=model, config=config(3, FLOWS["late"]) | {"units": {"names": ["0", "1"]}})
    before = [engine.access.full_parameter(p) for p in engine.module[1].parameters()]
    for number in range(7):
        engine.backward((engine(batches(number, 4, engine.global_rank), number > 2) - 1).square().mean())
        if number == 2:
            after = [engine.access.full_parameter(p) for p in engine.module[1].parameters()]
            assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        engine.step()
    last = [engine.access.full_parameter(p) for p in engine.module[1].parameters()]
    engine.destroy()
    return before[0], last[0]


def test_parameters_without_a_gradient_are_left_alone() -> None:
    for before, last in run_ranks(2, late_and_missing):
        assert not torch.equal(before, last)


def test_auto_updates_where_the_sum_has_grown() -> None:
    runs = {ratio: ranks(2, config(2, {"topk_ratio": 0.3, "auto_ratio": ratio})) for ratio in (0.0, 1.0)}
    each = ranks(2, config(2, {"topk_ratio": 0.3, "update_interval": 2}))
    # With 0 each sum is applied in the step after it: intervals of 1, after a first one of 2.
    assert any(not torch.equal(runs[0.0][name], runs[1.0][name]) for name in each if name.startswith("main"))
    check_equal(runs[1.0], ranks(2, config(3, {"topk_ratio": 0.3, "auto_ratio": 1.0})))


@pytest.mark.parametrize(("flow", "stage", "accumulation"), [("late", 2, 2), ("chosen anew", 3, 1), ("auto", 2, 1)])
def test_streams_and_threads_wait_for_each_other(flow: str, stage: int, accumulation: int) -> None:
    settings = config(stage, FLOWS.get(flow, AUTO), precision="bf16", gradient_accumulation_steps=accumulation)
    with shoal.check_streams() as check:
        engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
        for number in range(6 * accumulation):
            engine.backward(engine(batches(number, 4, 0).bfloat16()).float().square().mean())
            engine.step()
        engine.destroy()
    assert "0 faults" in check.report()


def columns_of_step(settings: dict[str, Any]) -> list[str]:
    engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
    labels = []
    for number in range(4):
        engine.backward(engine(batches(number, 4, engine.global_rank)).square().mean())
        with current_world().recorder.recording() as entries:
            engine.step()
        labels.append(sum(entry.nbytes for entry in entries if entry.label == "norms of columns"))
    engine.destroy()
    return labels


def test_ranks_exchange_norms_only_where_columns_are_chosen() -> None:
    flow = {"topk_ratio": 0.3, "update_interval": 1, "select_strategy": "step", "select_interval": 2}
    # 12 + 20 + 20 columns of 8 bytes, once out and once back, from the other one of two ranks.
    assert run_ranks(2, columns_of_step, config(3, flow)) == [[416, 0, 416, 0]] * 2


def test_an_optimizer_whose_update_cannot_be_divided_is_refused() -> None:
    settings = config(2, {"update_interval": 2}) | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with pytest.raises(OptimizerError, match="SGD is another optimizer"):
        shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
