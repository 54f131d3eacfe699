"""``data_efficiency.data_sampling``: analyses, samples and batches, as DeepSpeed 0.19.8 makes them of the same data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.config.config import load
from shoal.config.data_efficiency import SampleCurriculum
from shoal.config.problems import ConfigProblems
from shoal.data.analysis import ACCUMULATE, SINGLE, DataAnalyzer, rarity_of
from shoal.data.by_tokens import (
    VariableBatchSizeLR,
    batch_by_seqlens,
    get_dataloader_and_lr_scheduler_for_variable_batch_size,
)
from shoal.data.curriculum import CurriculumScheduler
from shoal.data.difficulty import DifficultySampler
from shoal.data.metric_files import Rows, write_rows
from shoal.data.random_ltd import RandomLTDScheduler
from shoal.errors import UsageError
from shoal.parallel.random_tokens import Draw, RandomTokens
from tests.helpers import deepspeed_samples as cases

FOUND: dict[str, Any] = json.loads(cases.FIXTURE.read_text(encoding="utf-8"))
GLOBAL_BATCH = cases.RANKS * cases.MICRO * cases.STEPS


def analyse(folder: Path, num_workers: int = 1, num_threads: int = 1) -> None:
    for measure, values in cases.MEASURES.items():
        workers = [
            DataAnalyzer(
                values,
                num_workers,
                worker,
                num_threads,
                batch_size=7,
                metric_names=[measure],
                metric_functions=[lambda batch: torch.tensor(batch, dtype=torch.int64)],
                metric_types=[SINGLE],
                metric_dtypes=[torch.int64],
                save_path=folder,
                collate_fn=list,
            )
            for worker in range(num_workers)
        ]
        for worker in workers:
            worker.run_map()
        workers[0].run_reduce()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("analysis")
    analyse(made)
    return made


def sampler(folder: Path, case: str, global_batch: int = GLOBAL_BATCH) -> DifficultySampler:
    metrics = cases.curricula(folder)[case]
    curriculum = SampleCurriculum.model_validate({"enabled": True, "curriculum_metrics": metrics}, strict=False)
    return DifficultySampler(curriculum, cases.SEED, cases.NUM_SAMPLES, global_batch)


@pytest.mark.usefixtures("all_cores")  # else torch's loader warns of several workers
@pytest.mark.parametrize(("num_workers", "num_threads"), [(1, 1), (3, 1), (2, 2)])
def test_an_analysis_has_the_rows_of_deepspeeds(tmp_path: Path, num_workers: int, num_threads: int) -> None:
    analyse(tmp_path, num_workers, num_threads)
    total = DataAnalyzer(
        cases.samples(),
        metric_names=["total"],
        metric_functions=[cases.counts_of],
        metric_types=[ACCUMULATE],
        save_path=tmp_path,
        batch_size=7,
        collate_fn=list,
    )
    total.run_map_reduce()
    for name, (dtype, rows) in FOUND["files"].items():
        (path,) = tmp_path.glob(f"*/{name}.idx")
        found = Rows(path.with_suffix(""))
        assert [row.tolist() for row in found] == rows, name
        assert found.together().dtype == np.dtype(dtype)


@pytest.mark.parametrize("case", FOUND["samples"])
def test_samples_of_each_step_are_deepspeeds(folder: Path, case: str) -> None:
    ours = sampler(folder, case)
    for step, expected in enumerate(FOUND["samples"][case], 1):
        assert ours.take(GLOBAL_BATCH) == expected, step


@pytest.mark.parametrize("case", FOUND["samples"])
@pytest.mark.parametrize("taken", [0, 5, GLOBAL_BATCH, 40 * GLOBAL_BATCH + 7])
def test_a_loaded_position_goes_on_where_it_was_saved(folder: Path, case: str, taken: int) -> None:
    whole = sampler(folder, case)
    whole.take(taken)
    saved = json.loads(json.dumps(whole.state_dict()))
    resumed = sampler(folder, case)
    resumed.take(3)
    resumed.load_state_dict(saved)
    assert resumed.take(30 * GLOBAL_BATCH) == whole.take(30 * GLOBAL_BATCH)
    assert resumed.state_dict() == whole.state_dict()


def test_a_position_goes_on_with_another_global_batch_after_what_was_drawn(folder: Path) -> None:
    whole = sampler(folder, "by value")
    whole.take(5)
    resumed = sampler(folder, "by value", GLOBAL_BATCH // 2)
    resumed.load_state_dict(whole.state_dict())
    assert resumed.take(GLOBAL_BATCH - 5) == whole.take(GLOBAL_BATCH - 5)
    assert set(resumed.take(GLOBAL_BATCH)) <= set(range(cases.NUM_SAMPLES))


def test_easy_samples_come_first_and_each_as_often_as_the_others(folder: Path) -> None:
    ours = sampler(folder, "by value")
    first = ours.take(GLOBAL_BATCH)
    assert max(cases.LENGTHS[sample] for sample in first) <= 6
    ours.take(9 * GLOBAL_BATCH)  # all samples from here on
    counts = np.bincount(ours.take(400 * GLOBAL_BATCH), minlength=cases.NUM_SAMPLES)
    assert counts.min() > 0.5 * counts.mean() and counts.max() < 2 * counts.mean()


def test_an_analysis_of_other_data_is_named(folder: Path) -> None:
    metrics = cases.curricula(folder)["by value"]
    curriculum = SampleCurriculum.model_validate({"enabled": True, "curriculum_metrics": metrics}, strict=False)
    with pytest.raises(UsageError, match=r"the analysis is of 230 samples, and the data set has 99"):
        DifficultySampler(curriculum, 1, 99, 4)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file .*gone.idx"):
        Rows(tmp_path / "gone")
    write_rows(tmp_path / "rows", np.arange(6), np.array([1, 2, 3]), np.uint8)
    assert [row.tolist() for row in Rows(tmp_path / "rows")] == [[0], [1, 2], [3, 4, 5]]
    data = tmp_path / "rows.bin"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"has 5 bytes for 6 numbers"):
        Rows(tmp_path / "rows")
    index = tmp_path / "rows.idx"
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"rows.idx has .* bytes in place of"):
        Rows(tmp_path / "rows")
    index.write_bytes(b"something else")
    with pytest.raises(UsageError, match="does not begin"):
        Rows(tmp_path / "rows")


def test_metrics_that_return_something_else_are_named(tmp_path: Path) -> None:
    def analyser(**arguments: Any) -> DataAnalyzer:
        given = {"metric_names": ["m"], "metric_functions": [lambda batch: np.zeros(2)], "metric_types": [SINGLE]}
        return DataAnalyzer([[1], [2]], save_path=tmp_path, batch_size=2, collate_fn=list, **{**given, **arguments})

    with pytest.raises(UsageError, match=r"metric 'm' returned float64 of shape .2. for 2 samples"):
        analyser().run_map()
    with pytest.raises(UsageError, match=r"metric_types .'mean'."):
        analyser(metric_types=["mean"])
    with pytest.raises(UsageError, match=r"lacks .*worker1_values.npy"):
        analyser(metric_functions=[lambda batch: np.zeros(len(batch), int)], num_workers=2).run_map_reduce()


def test_rarity_is_the_sum_of_the_tokens_costs() -> None:
    counts = np.array([90, 9, 1])
    rarity = rarity_of(counts)([[0, 1, 2], [0]])
    assert rarity.tolist() == [round(-np.log(0.9) - np.log(0.09) - np.log(0.01)), 0]


def test_all_problems_of_the_section_are_told_at_once() -> None:
    metric = {
        "min_difficulty": 1,
        "max_difficulty": 200,
        "schedule_type": "fixed_linear",
        "difficulty_type": "percentile",
    }
    ltd = {"enabled": True, "random_ltd_layer_id": [0, 9], "total_layer_num": 4, "random_ltd_layer_num": 3}
    section = {
        "data_sampling": {
            "curriculum_learning": {"enabled": True, "curriculum_metrics": {"seqlen": metric}},
            "dynamic_batching": {"enabled": True},
        },
        "data_routing": {"enabled": True, "random_ltd": ltd},
    }
    with pytest.raises(ConfigProblems) as caught:
        load({"train_batch_size": 4, "data_efficiency": section}, world_size=1)
    text = str(caught.value)
    for expected in (
        "curriculum_learning.enabled: true, and data_efficiency.data_sampling.enabled is false",
        "seqlen.schedule_config.total_curriculum_step: missing",
        "seqlen.index_to_sample_path: missing",
        "200, of 100 percentiles",
        "dynamic_batching.max_tokens: missing",
        "random_ltd_schedule.min_value: missing",
        "random_ltd_layer_num: 3, and random_ltd_layer_id lists 2",
        "[9] of 4 layers",
    ):
        assert expected in text, expected


@pytest.mark.parametrize("number", range(len(cases.RANDOM_LTD)))
def test_random_ltd_keeps_as_many_tokens_as_deepspeeds_in_each_step(number: int) -> None:
    scheduler = RandomLTDScheduler(cases.RANDOM_LTD[number])
    for step, expected in enumerate(FOUND["schedules"]["random_ltd"][number]):
        scheduler.update_seq(step)
        assert scheduler.state_dict() == expected, step


def test_positions_are_drawn_as_deepspeed_draws_them_and_other_tokens_pass_the_layer_by() -> None:
    """DeepSpeed draws without replacement, each position as probable, from a generator that its seed does not set."""
    draw = Draw(seed=5, step=3, kept=4, micro_batch=0)
    kept = draw.positions(0, 4000, 4000, 16, torch.device("cpu"))
    assert (kept.diff(dim=1) > 0).all()
    assert kept.flatten().bincount(minlength=16).sub(1000).abs().max() < 5 * 27  # of the standard deviation
    others = [replace(draw, **{name: 9}) for name in ("seed", "step", "micro_batch")]
    drawn = [each.positions(0, 8, 8, 16, kept.device) for each in others] + [draw.positions(1, 8, 8, 16, kept.device)]
    assert not any(torch.equal(each, kept[:8]) for each in drawn)
    tokens = RandomTokens(["layer"])
    tokens.draw = draw
    hidden = torch.randn(2, 16, 3, requires_grad=True)
    out = tokens.run("layer", lambda part: 3 * part + 1, (hidden,), {})
    is_kept = torch.zeros(2, 16, 1).scatter(1, kept[:2, :, None], 1.0).bool()
    assert torch.equal(out, torch.where(is_kept, 3 * hidden + 1, hidden))
    out.sum().backward()
    assert torch.equal(hidden.grad, torch.where(is_kept, 3.0, 1.0).expand_as(hidden))


@pytest.mark.parametrize("number", range(len(cases.CURRICULA)))
def test_lengths_of_a_curriculum_are_deepspeeds_in_each_step(number: int) -> None:
    scheduler = CurriculumScheduler(cases.CURRICULA[number])
    lengths = [scheduler.update_difficulty(step) for step in range(1, cases.NUM_STEPS)]
    assert lengths == FOUND["schedules"]["curricula"][number] and len(set(lengths)) > 2


@pytest.mark.parametrize("number", range(len(cases.BATCHINGS)), ids=lambda number: str(cases.BATCHINGS[number]))
def test_batches_by_tokens_are_deepspeeds_but_for_its_lost_last_sample(number: int) -> None:
    case, expected = cases.BATCHINGS[number], FOUND["batches"][number]
    ids, sizes, longest = batch_by_seqlens(cases.LENGTHS, **case)
    num_steps = len(expected["sizes"])
    assert num_steps <= len(sizes) <= num_steps + 1
    per_step = case.get("effective_batch_size", 1)
    together = [[number, batch] for number, batch in ids[: num_steps * per_step]]
    same = (num_steps - 1) * per_step  # DeepSpeed never takes the last sample, which may belong to the last step
    assert together[:same] == expected["batches"][:same]
    assert sizes[: num_steps - 1] == expected["sizes"][:-1] and longest[: num_steps - 1] == expected["longest"][:-1]
    samples = [sample for _, batch in ids for sample in batch]
    assert len(set(samples)) == len(samples)
    if per_step == 1 and "min_batch_size" not in case:
        assert sorted(samples) == list(range(cases.NUM_SAMPLES))
    assert all(sum(cases.LENGTHS[sample] for sample in batch) <= case["max_tokens"] for _, batch in ids)


def test_samples_that_fill_no_step_are_an_error() -> None:
    with pytest.raises(UsageError, match="2 samples give 1 micro-batches of at most 9 tokens"):
        batch_by_seqlens([4, 5, 20], 9, effective_batch_size=2)


@pytest.mark.parametrize(("method", "factor"), [("linear", 3.0), ("sqrt", 3.0**0.5), ("none", 1.0)])
def test_the_learning_rate_follows_the_samples_of_each_step(method: str, factor: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    base = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    schedule = VariableBatchSizeLR(base, 4, [4, 12], lr_scaling_method=method)
    found = []
    for _ in range(4):
        found.append(schedule.get_lr()[0])
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(torch.tensor(found), torch.tensor([1, 0.5 * factor, 0.25, 0.125 * factor]))
    saved = schedule.state_dict()
    schedule.step()
    schedule.load_state_dict(saved)
    assert schedule.get_lr() == [0.0625]


def test_a_loader_by_tokens_gives_each_rank_its_micro_batches() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    found = []
    for rank in range(2):
        loader, schedule, _ = get_dataloader_and_lr_scheduler_for_variable_batch_size(
            cases.samples(),
            cases.LENGTHS,
            40,
            2,
            dataloader_rank=rank,
            dataloader_num_replicas=2,
            lr_scheduler_or_optimizer=optimizer,
            required_microbatches_of_same_seqlen=True,
            sample_padding_fn=lambda sample, length: [*sample, *[0] * (length - len(sample))],
        )
        found.append(list(loader))
    assert len(found[0]) == len(found[1]) == len(schedule.batch_sizes)
    for step in zip(*found, strict=True):
        assert len({len(sample) for batch in step for sample in batch}) == 1
    assert sum(len(batch) for part in found for batch in part) == sum(schedule.batch_sizes)
