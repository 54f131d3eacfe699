"""Writes ``tests/fixtures/data_efficiency.json``: what DeepSpeed 0.19.8 chooses, analyses, batches and schedules.

    python -m tests.helpers.deepspeed_samples        with a Python that has DeepSpeed

The cases are here, so that the tests give Shoal the same.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

FIXTURE = Path(__file__).parents[1] / "fixtures" / "data_efficiency.json"
NUM_SAMPLES, SEED = 230, 77
# Two measures of the samples: a length and a rarity.
LENGTHS = [int(3 + 17 * (number * 7919 % 101) / 101) for number in range(NUM_SAMPLES)]
RARITIES = [int(100 + number * 104729 % 311) for number in range(NUM_SAMPLES)]
MEASURES = {"seqlen": LENGTHS, "rarity": RARITIES}


def metric(name: str, folder: Path, low: int, high: int, **more: Any) -> dict[str, Any]:
    kind = more.get("difficulty_type", "value")
    merged = "_percentile_merged" if kind == "percentile" else ""
    return {
        "index_to_sample_path": str(folder / name / f"{name}_index_to_sample{merged}"),
        "index_to_metric_path": str(folder / name / f"{name}_index_to_metric"),
        "difficulty_type": kind,
        "clustering_type": more.get("clustering_type", "schedule_based"),
        "min_difficulty": low,
        "max_difficulty": high,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 8, "difficulty_step": more.get("step", 1)},
    }


def curricula(folder: Path) -> dict[str, dict[str, Any]]:
    """Measures by name, of each case."""
    return {
        "by value": {"seqlen": metric("seqlen", folder, 5, 20, step=3)},
        "by percentile": {"rarity": metric("rarity", folder, 20, 100, difficulty_type="percentile", step=10)},
        "two measures": {
            "seqlen": metric("seqlen", folder, 8, 20, step=4),
            "rarity": metric("rarity", folder, 30, 100, difficulty_type="percentile", step=10),
        },
        "one cluster": {"seqlen": metric("seqlen", folder, 5, 20, clustering_type="single_cluster")},
        "one of two in one cluster": {
            "seqlen": metric("seqlen", folder, 5, 20, clustering_type="single_cluster"),
            "rarity": metric("rarity", folder, 30, 100, difficulty_type="percentile", step=10),
        },
    }


BATCHES = 14  # global batches of 3 ranks x 2 samples x 2 micro-batches
RANKS, MICRO, STEPS = 3, 2, 2
BATCHINGS: list[dict[str, Any]] = [
    {"max_tokens": 40},
    {"max_tokens": 40, "max_batch_size": 3},
    {"max_tokens": 40, "min_batch_size": 2, "sequence_picking_order": "seqlen"},
    {"max_tokens": 60, "sequence_picking_order": "random", "seed": 5, "effective_batch_size": 4},
    {"max_tokens": 60, "effective_batch_size": 2, "required_microbatches_of_same_size": True},
]

NUM_STEPS = 40


def random_ltd(low: int, high: int, steps: int, multiple: int, layers: tuple[int, int] = (12, 10)) -> dict[str, Any]:
    """Of a model of ``layers[0]`` layers, of which ``layers[1]`` drop tokens."""
    how = {"require_steps": steps, "seq_per_step": multiple}
    schedule = {"min_value": low, "max_value": high, "schedule_type": "fixed_linear", "schedule_config": how}
    numbers = {"total_layer_num": layers[0], "random_ltd_layer_num": layers[1], "global_batch_size": 6}
    return {**numbers, "random_ltd_schedule": schedule, "layer_token_lr_schedule": {"enabled": False}}


RANDOM_LTD = [
    random_ltd(128, 2048, 30, 16),
    random_ltd(100, 512, 7, 16),  # begins below ``low``
    random_ltd(8, 500, 33, 24, (4, 1)),  # ends at no multiple
    random_ltd(64, 64, 5, 8),
]
LINEAR = {"total_curriculum_step": 25, "difficulty_step": 8}
CURRICULA: list[dict[str, Any]] = [
    {"min_difficulty": 8, "max_difficulty": 100, "schedule_type": "fixed_linear", "schedule_config": LINEAR},
    {
        "min_difficulty": 16,
        "max_difficulty": 128,
        "schedule_type": "fixed_root",
        "schedule_config": {**LINEAR, "root_degree": 2},
    },
    {
        "min_difficulty": 1,
        "max_difficulty": 4,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [1, 2, 4], "max_step": [5, 11]},
    },
]


def samples() -> list[list[int]]:
    """A data set whose samples have ``LENGTHS`` tokens."""
    return [[(number + place) % 11 for place in range(length)] for number, length in enumerate(LENGTHS)]


def length_of(batch: Any) -> np.ndarray:
    return np.array([len(sample) for sample in batch], np.int64)


def counts_of(batch: Any) -> np.ndarray:
    return np.sum([np.bincount(sample, minlength=11) for sample in batch], axis=0)


def schedules() -> dict[str, Any]:
    """DeepSpeed's values of each step."""
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
    from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler

    found: dict[str, Any] = {"random_ltd": [], "curricula": []}
    for config in RANDOM_LTD:
        ltd = RandomLTDScheduler(config)
        states = []
        for step in range(NUM_STEPS):
            ltd.update_seq(step)  # as in each forward of a step
            ltd.update_seq(step)
            states.append(ltd.state_dict())
        found["random_ltd"].append(states)
    for config in CURRICULA:
        curriculum = CurriculumScheduler(config)
        found["curricula"].append([curriculum.update_difficulty(step) for step in range(1, NUM_STEPS)])
    return found


def main() -> None:
    from deepspeed import comm as dist
    from deepspeed.runtime.data_pipeline.data_sampling import data_analyzer, data_sampler, variable_batch_size_and_lr
    from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset

    class Group:
        def size(self) -> int:
            return RANKS

    dist.barrier = dist.broadcast = lambda *args, **kwargs: None  # rank 0 decides everything
    data_sampler.get_accelerator().current_device_name = lambda: "cpu"
    found: dict[str, Any] = {"files": {}, "samples": {}, "batches": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        import torch

        for measure, values in MEASURES.items():
            data_analyzer.DataAnalyzer(
                values,
                batch_size=7,
                metric_names=[measure],
                metric_functions=[lambda batch: torch.tensor(batch, dtype=torch.int64)],
                metric_types=["single_value_per_sample"],
                metric_dtypes=[torch.int64],
                save_path=str(folder),
                collate_fn=list,
            ).run_map_reduce()
        data_analyzer.DataAnalyzer(
            samples(),
            batch_size=7,
            metric_names=["total"],
            metric_functions=[lambda batch: torch.from_numpy(counts_of(batch))],
            metric_types=["accumulate_value_over_samples"],
            metric_dtypes=[torch.int64],
            save_path=str(folder),
            collate_fn=list,
        ).run_map_reduce()
        for path in sorted(path for path in folder.glob("*/*.idx") if "_thread" not in path.stem):
            rows = MMapIndexedDataset(str(path.with_suffix("")), skip_warmup=True)
            found["files"][path.stem] = [str(rows.dtype.__name__), [row.tolist() for row in rows]]
        for case, metrics in curricula(folder).items():
            config = {
                "seed": SEED,
                "data_sampling": {
                    "num_epochs": 1000,
                    "curriculum_learning": {
                        "enabled": True,
                        "data_cluster_path": str(folder / f"clusters {case}"),
                        "curriculum_metrics": metrics,
                    },
                },
            }
            sampler = data_sampler.DeepSpeedDataSampler(config, NUM_SAMPLES, MICRO, 0, RANKS, Group(), STEPS, 0)
            chosen = []
            for _ in range(BATCHES):
                sampler.get_next_global_batch()
                chosen.append([int(sample) for sample in sampler.batch])
            found["samples"][case] = chosen
    for case in BATCHINGS:
        batches, sizes, longest = variable_batch_size_and_lr.batch_by_seqlens(LENGTHS, **case)
        found["batches"].append(
            {
                "batches": [[int(number), [int(each) for each in batch]] for number, batch in batches],
                "sizes": [int(size) for size in sizes],
                "longest": [int(length) for length in longest],
            }
        )
    found["schedules"] = schedules()
    FIXTURE.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
