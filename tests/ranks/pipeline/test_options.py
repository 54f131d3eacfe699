"""Compiled blocks, losses by tokens, deferred gathers and weights in files, over pipeline stages."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat.deepspeed.checkpoint.ds_to_universal import main as ds_to_universal
from shoal.compat.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from shoal.pipeline.module import PipelineModule
from tests.helpers.compiling import compiling
from tests.helpers.pipeline_cases import alone, assert_as_alone, engine_of_layers, mean_square, trained_parameters
from tests.helpers.pipeline_layers import STEPS, WIDTH, batches, settings
from tests.helpers.training import make, sgd

NUM_CLASSES, ROWS = 5, 4


class Layer(nn.Sequential):
    """A class that PyTorch compiles, which leaves its own ones as they are."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)


def layers() -> list[nn.Module]:
    made = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    made[7].weight = made[0].weight
    return [Layer(layer, nn.Tanh()) for layer in made]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("zbv", 2)])
def test_gathers_after_the_step_run_beside_the_next_batch(stage: int, schedule: str, virtual: int) -> None:
    assert_as_alone(layers, 4, 2, stage, schedule, virtual, zero={"overlap_param_gather": True})


@pytest.mark.parametrize(("schedule", "virtual", "stage"), [("1f1b", 1, 3), ("zbv", 2, 1)])
def test_compiled_layers(schedule: str, virtual: int, stage: int) -> None:
    losses, _ = alone(layers, 2)

    def job() -> Any:
        engine = engine_of_layers(layers, 2, stage, schedule, virtual)
        engine.module.compile(backend="eager")
        return [float(engine.train_batch(batches(engine.axes.batch.rank, step, 4))) for step in range(STEPS)]

    with compiling():
        for found in run_ranks(4, job):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-6, atol=1e-6)


def test_the_backward_of_a_compiled_layer_runs_once_for_each_micro_batch_where_a_schedule_splits_it() -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    num_runs: Counter[int] = Counter()  # by rank

    def counted(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            num_runs[current_world().rank] += 1
            return graph(*args)

        return make_boxed_func(run)

    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=counted)

    def job() -> None:
        engine = engine_of_layers(layers, 2, 1, "zb_h1", 1)
        engine.module.compile(backend=backend)
        engine.train_batch(batches(0, 0, 4))

    with compiling():
        run_ranks(2, job)
    assert num_runs == {0: 4 * 4, 1: 4 * 4}  # layers of the stage, micro-batches


def test_a_schedule_of_a_file_trains_and_evaluates_any_number_of_micro_batches(tmp_path: Any) -> None:
    """Stage 0 and stage 1 are on the ranks whose lines have them."""
    file = tmp_path / "schedule.txt"
    file.write_text("1F0 1F1 1B1 1B0\n0F0 0F1 0B1 0B0\n")
    model = nn.Sequential(*make(layers))  # type: ignore[arg-type]
    ends = [sum(mean_square(model(x), y).item() for x, y in batches(0, 0, num)) / num for num in (2, 3)]

    def job() -> list[float]:
        module = make(lambda: PipelineModule(layers(), num_stages=2, loss_fn=mean_square, stage_to_rank=[1, 0]))
        config = settings(1, 2, 2, str(file), 1)
        engine = shoal.initialize(model=module, optimizer=sgd(module.parameters()), config=config)[0]
        assert engine.is_first_stage() == (engine.global_rank == 1)
        evaluated = float(engine.eval_batch(batches(0, 0, 3), num_micro_batches=3))
        return [float(engine.train_batch(batches(0, 0, 2))), evaluated]

    assert run_ranks(2, job) == [pytest.approx(ends, rel=1e-6)] * 2


def classifier() -> list[nn.Module]:
    return [*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, NUM_CLASSES)]


def ragged(rank: int, step: int, num_micro: int) -> Iterator[Any]:
    """Other numbers of labels that count in each micro-batch, in one of them none."""
    for micro in range(num_micro):
        generator = torch.Generator().manual_seed(1000 * rank + 100 * step + micro)
        labels = torch.randint(0, NUM_CLASSES, (ROWS,), generator=generator)
        labels[: (micro + rank) % (ROWS + 1)] = -100
        yield torch.randn(ROWS, WIDTH, generator=generator), labels


def sum_of_rows(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, labels, reduction="sum")


def mean_of_rows(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return sum_of_rows(output, labels) / (labels >= 0).sum().clamp(min=1)


@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 1), ("zb_h1", 3)])
def test_a_step_counts_each_token_once(schedule: str, stage: int) -> None:
    model = nn.Sequential(*make(classifier))  # type: ignore[arg-type]
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        micros = [micro for rank in range(2) for micro in ragged(rank, step, 6)]
        num_tokens = sum(int((labels >= 0).sum()) for _, labels in micros)
        loss = torch.stack([sum_of_rows(model(inputs), labels) for inputs, labels in micros]).sum() / num_tokens
        loss.backward()
        nn.utils.clip_grad_norm_(trained_parameters(model), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    def job() -> Any:
        engine = engine_of_layers(
            classifier, 2, stage, schedule, num_micro=6, loss_fn=mean_of_rows, loss_reduction="token"
        )
        found = [float(engine.train_batch(ragged(engine.axes.batch.rank, step, 6))) for step in range(STEPS)]
        return found, engine.module_state_dict()

    for found, values in run_ranks(4, job):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=1e-6)
        for name, value in model.named_parameters():
            torch.testing.assert_close(values[name], value.detach(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("filename", ["model.safetensors", "model.bin"])
@pytest.mark.parametrize("stage", [1, 3])
def test_the_weights_of_all_stages_are_written_to_one_file(stage: int, filename: str, tmp_path: Any) -> None:
    def job() -> Any:
        engine = engine_of_layers(layers, 2, stage)
        engine.train_batch(batches(engine.axes.batch.rank, 0, 4))
        engine.save_16bit_model(tmp_path, filename)
        return engine.module_state_dict()

    values = run_ranks(4, job)[0]
    model = nn.Sequential(*make(layers))  # type: ignore[arg-type]
    if filename.endswith("bin"):
        model.load_state_dict(torch.load(tmp_path / filename, weights_only=True))
    else:
        from safetensors.torch import load_model

        load_model(model, tmp_path / filename)
    for name, value in model.named_parameters():
        assert torch.equal(value.detach(), values[name])


@pytest.mark.parametrize("is_async", [False, True])
def test_tools_read_a_checkpoint_of_stages_and_one_rank_goes_on_from_the_universal_one(
    is_async: bool, tmp_path: Any
) -> None:
    def job(pp: int, *, loads: bool, steps: range) -> Any:
        section = {"async_save": is_async, "load_universal": loads}
        engine = engine_of_layers(layers, pp, 1, optimizer=torch.optim.AdamW, checkpoint=section)
        if loads:
            engine.load_checkpoint(tmp_path)
        for step in steps:
            engine.train_batch(batches(0, step, 4))
        values = engine.module_state_dict()
        if not loads:
            engine.save_checkpoint(tmp_path, tag="one")
            for step in range(steps.stop, steps.stop + 2):
                engine.train_batch(batches(0, step, 4))
        after = engine.module_state_dict()
        engine.destroy()
        return values, after

    values, after = run_ranks(2, lambda: job(2, loads=False, steps=range(2)))[0]
    for name, value in get_fp32_state_dict_from_zero_checkpoint(tmp_path).items():
        assert torch.equal(value, values[name])
    ds_to_universal(
        argparse.Namespace(
            input_folder=str(tmp_path / "one"),
            output_folder=str(tmp_path / "one_universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )
    for pp in (1, 2):
        _, found = run_ranks(pp, lambda pp=pp: job(pp, loads=True, steps=range(2, 4)))[0]
        for name, value in after.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)
