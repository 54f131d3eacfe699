"""A pipeline trains as one process does: stages, schedules, ZeRO stages, tied weights, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.comm.threads import run_ranks
from shoal.running.runtime import ShardedModel
from tests.helpers.pipeline_layers import NUM_LAYERS, STEPS, alone, batches, engine_of


@pytest.mark.parametrize(
    ("size", "pp", "stage", "schedule", "virtual", "num_micro", "tied"),
    [
        (2, 2, 0, "1f1b", 1, 4, False),
        (2, 2, 1, "gpipe", 1, 3, True),
        (4, 2, 1, "1f1b", 1, 5, True),
        (4, 2, 2, "1f1b", 1, 2, True),
        (4, 2, 3, "1f1b", 1, 4, True),
        (4, 4, 2, "1f1b", 1, 1, True),
        (4, 2, 3, "interleaved_1f1b", 2, 4, True),
        (4, 2, 2, "interleaved_zero_bubble", 2, 4, True),
        (2, 2, 0, "zb_h1", 1, 4, True),
        (4, 2, 3, "zb_h1", 1, 4, True),
        (4, 2, 1, "zbv", 2, 4, True),
        (4, 2, 3, "zbv", 2, 5, False),
        (4, 2, 2, "dualpipev", 2, 4, True),
    ],
)
def test_parameters_and_losses_equal_one_process(
    size: int, pp: int, stage: int, schedule: str, virtual: int, num_micro: int, tied: bool
) -> None:
    expected, losses = alone(size // pp, num_micro, tied=tied)

    def job() -> Any:
        engine = engine_of(stage, pp, num_micro, schedule, virtual, tied=tied)
        found = [float(engine.train_batch(batches(engine.axes.batch.rank, step, num_micro))) for step in range(STEPS)]
        return found, {name: engine.access.full_parameter(p) for name, p in engine.module.named_parameters()}

    seen: set[str] = set()
    for found, values in run_ranks(size, job):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-6, atol=1e-6)
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)
        seen |= set(values)
    assert seen == set(expected)


Layout = tuple[int, int, int, str, int]  # ranks, pipeline ranks, ZeRO stage, schedule, stages a rank
LAYOUTS: list[Layout] = [
    (2, 2, 1, "1f1b", 1),
    (4, 4, 2, "gpipe", 1),
    (2, 2, 3, "interleaved_1f1b", 2),
    (4, 2, 3, "zbv", 2),
    (1, 1, 0, "1f1b", 1),
]


def run(layout: Layout, steps: range, folder: Any, *, loads: bool) -> dict[str, torch.Tensor]:
    size, pp, stage, schedule, virtual = layout
    num_micro = 4 * pp // size

    def job() -> Any:
        engine = engine_of(stage, pp, num_micro, schedule, virtual, tied=True)
        if loads:
            path, state = engine.load_checkpoint(folder)
            assert path is not None and state == {"steps": steps.start}
        rank = engine.axes.batch.rank
        for step in steps:
            micros = [batch for r in range(size // pp) for batch in batches(r, step, 4 * pp // size)]
            engine.train_batch(iter(micros[rank * num_micro : (rank + 1) * num_micro]))
        if not loads:
            engine.save_checkpoint(folder, client_state={"steps": steps.stop})
        return engine.module_state_dict()

    found = run_ranks(size, job)
    for other in found[1:]:
        assert {name: value.tolist() for name, value in other.items()} == {
            name: value.tolist() for name, value in found[0].items()
        }
    return found[0]


@pytest.mark.parametrize("saved", LAYOUTS[:3])
@pytest.mark.parametrize("loaded", LAYOUTS)
def test_a_checkpoint_of_one_layout_goes_on_in_another(saved: Layout, loaded: Layout, tmp_path: Any) -> None:
    values = run(saved, range(2), tmp_path, loads=False)
    went_on = run(loaded, range(2, 2), tmp_path, loads=True)
    assert set(went_on) == set(values)
    for name, value in values.items():
        torch.testing.assert_close(went_on[name], value, rtol=0, atol=0, msg=name)
    assert {"0.weight", f"{NUM_LAYERS - 1}.weight"} & set(values) == {"0.weight", f"{NUM_LAYERS - 1}.weight"}


@pytest.mark.parametrize("loaded", LAYOUTS[1:])
def test_training_goes_on_as_if_it_had_not_stopped(loaded: Layout, tmp_path: Any) -> None:
    first, size, pp = LAYOUTS[0], loaded[0], loaded[1]
    if size != pp:
        pytest.skip("the global batch is another one")
    run(first, range(2), tmp_path / "a", loads=False)
    went_on = run(loaded, range(2, 4), tmp_path / "a", loads=True)
    whole = run(first, range(4), tmp_path / "b", loads=False)
    for name, value in whole.items():
        torch.testing.assert_close(went_on[name], value, rtol=1e-6, atol=1e-6, msg=name)


def test_only_the_first_micro_batch_of_a_step_calls_hooks_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    ready = ShardedModel.gradient_ready

    def counted(self: ShardedModel, unit: Any, index: int) -> None:
        calls.append(index)
        ready(self, unit, index)

    monkeypatch.setattr(ShardedModel, "gradient_ready", counted)

    def job() -> tuple[int, int]:
        engine = engine_of(1, 2, 4, "1f1b", 1, tied=False)
        for step in range(3):
            engine.train_batch(batches(0, step, 4))
        return len(list(engine.module.parameters())), 3

    expected = sum(parameters * steps for parameters, steps in run_ranks(2, job))
    assert len(calls) == expected
