"""``data_efficiency.data_sampling`` by ``initialize``: the samples of a step, whatever ranks read them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat.data_pipeline import DistributedDataAnalyzer
from shoal.data.analysis import SINGLE, DataAnalyzer
from shoal.data.curriculum_loader import CurriculumLoader
from shoal.data.metric_files import Rows
from shoal.errors import CheckpointError, UsageError
from tests.helpers import deepspeed_samples as cases


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Sample k is the number k."""

    def __len__(self) -> int:
        return cases.NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("analysis")
    for measure, values in cases.MEASURES.items():
        DataAnalyzer(
            values,
            batch_size=50,
            metric_names=[measure],
            metric_functions=[lambda batch: torch.tensor(batch)],
            metric_types=[SINGLE],
            save_path=made,
            collate_fn=list,
        ).run_map_reduce()
    return made


def settings(folder: Path, micro: int, num_micro: int, **sampling: Any) -> dict[str, Any]:
    curriculum = {"enabled": True, "curriculum_metrics": cases.curricula(folder)["two measures"]}
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": num_micro,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-6}},
        "data_efficiency": {
            "enabled": True,
            "seed": cases.SEED,
            "data_sampling": {"enabled": True, "curriculum_learning": curriculum, **sampling},
        },
    }


def read(
    config: dict[str, Any], num: int, load: Path | None = None, save: Path | None = None, workers: int = 0
) -> tuple[list[list[int]], list[int]]:
    """This rank's samples of ``num`` micro-batches, and the step that each was of."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    engine, _, loader, _ = shoal.initialize(model=model, config=config, training_data=Samples())
    assert isinstance(loader, CurriculumLoader)
    steps = []
    engine.set_data_post_process_func(lambda batch, about: steps.append(about["curriculum_step"]) or batch)
    if load is not None:
        engine.load_checkpoint(load)
    found = []
    for batch in loader:
        found.append([int(value) for value in batch.flatten().tolist()])
        engine.backward(engine(batch).mean())
        engine.step()
        if len(found) == num:
            break
    if save is not None:
        engine.save_checkpoint(save)
    engine.destroy()
    return found, steps


def together(ranks: list[tuple[list[list[int]], list[int]]]) -> list[int]:
    """The samples in the order of the stream."""
    return [sample for micro in zip(*(found for found, _ in ranks), strict=True) for part in micro for sample in part]


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_read_deepspeeds_samples(folder: Path, workers: int) -> None:
    ranks = run_ranks(3, read, settings(folder, cases.MICRO, cases.STEPS, num_workers=workers), 8)
    expected = sampler_of(folder)
    assert together(ranks) == expected[: 8 * 3 * cases.MICRO]
    assert ranks[0][1] == [1, 1, 2, 2, 3, 3, 4, 4]


def sampler_of(folder: Path) -> list[int]:
    import json

    found = json.loads(cases.FIXTURE.read_text(encoding="utf-8"))["samples"]["two measures"]
    return [sample for batch in found for sample in batch]


@pytest.mark.parametrize("num", [4, 5], ids=["between steps", "in a step"])
def test_a_run_goes_on_with_other_ranks(folder: Path, tmp_path: Path, num: int) -> None:
    before = together(run_ranks(3, read, settings(folder, 2, 2, num_workers=2), num, None, tmp_path))
    after = together(run_ranks(2, read, settings(folder, 3, 2), 6, tmp_path))
    expected = sampler_of(folder)
    begin = 4 * 6  # a step in its middle begins again in another layout
    assert before == expected[: num * 6] and after == expected[begin : begin + 6 * 6]


def test_a_loader_without_a_curriculum_does_not_go_on_at_its_position(folder: Path, tmp_path: Path) -> None:
    config = settings(folder, 2, 1)
    run_ranks(1, read, config, 2, None, tmp_path)
    del config["data_efficiency"]

    def resume() -> None:
        engine, *_ = shoal.initialize(model=torch.nn.Linear(1, 1, bias=False), config=config, training_data=Samples())
        try:
            engine.load_checkpoint(tmp_path)
        finally:
            engine.destroy()

    with pytest.raises(CheckpointError, match="its samples were chosen by a curriculum by measures"):
        resume()


def test_batches_by_tokens_with_the_learning_rate_of_their_samples(folder: Path) -> None:
    batching = {"enabled": True, "max_tokens": 40, "metrics_path": str(folder)}
    config = settings(folder, 1, 2, dynamic_batching=batching)
    config["data_efficiency"]["data_sampling"]["curriculum_learning"] = {}

    def run() -> tuple[list[list[int]], list[float]]:
        engine, _, loader, _ = shoal.initialize(
            model=torch.nn.Linear(1, 1, bias=False), config=config, training_data=Samples()
        )
        found, rates = [], []
        for batch in loader:
            found.append([int(value) for value in torch.stack(batch).flatten().tolist()])
            rates.append(engine.get_lr()[0])
            engine.backward(engine(torch.stack(batch)).mean())
            engine.step()
        engine.destroy()
        return found, rates

    ranks = run_ranks(2, run)
    samples = sorted(sample for found, _ in ranks for batch in found for sample in batch)
    assert len(samples) == len(set(samples)) > cases.NUM_SAMPLES - 20
    assert all(sum(cases.LENGTHS[sample] for sample in batch) <= 40 for found, _ in ranks for batch in found)
    for number in range(0, len(ranks[0][0]), 2):
        size = sum(len(batch) for found, _ in ranks for batch in found[number : number + 2])
        for _, rates in ranks:
            assert rates[number] == pytest.approx(1e-6 * size / 4)


def test_ranks_share_an_analysis(tmp_path: Path) -> None:
    def analyse(rank: int) -> None:
        DistributedDataAnalyzer(
            cases.LENGTHS,
            num_workers=2,
            worker_id=rank,
            batch_size=9,
            metric_names=["seqlen"],
            metric_functions=[lambda batch: np.array(batch)],
            metric_types=[SINGLE],
            save_path=tmp_path,
            collate_fn=list,
        ).run_map_reduce()

    def run() -> None:
        analyse(current_world().rank)
        assert Rows(tmp_path / "seqlen" / "seqlen_sample_to_metric").together().tolist() == cases.LENGTHS

    run_ranks(2, run)


def test_workers_of_the_config_read_the_samples() -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}

    def samples(workers: int) -> list[list[float]]:
        engine, _, loader, _ = shoal.initialize(
            model=torch.nn.Linear(1, 1), config={**config, "data": {"num_workers": workers}}, training_data=Reader()
        )
        found = [batch.tolist() for batch in loader]
        engine.destroy()
        return found

    class Reader(Samples):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([float(index), float(os.getpid() != main)])

    main = os.getpid()
    alone, workers = samples(0), samples(2)
    assert [[sample[0] for sample in batch] for batch in alone] == [
        [sample[0] for sample in batch] for batch in workers
    ]
    assert not any(sample[1] for batch in alone for sample in batch)
    assert all(sample[1] for batch in workers for sample in batch)

    class Stream(torch.utils.data.IterableDataset[float]):
        def __iter__(self) -> Iterator[float]:
            return iter([1.0])

    with pytest.raises(UsageError, match="2 workers, and an IterableDataset"):
        shoal.initialize(
            model=torch.nn.Linear(1, 1), config={**config, "data": {"num_workers": 2}}, training_data=Stream()
        )
