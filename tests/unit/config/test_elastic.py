"""Elasticity: the batch that many numbers of ranks share, what a configuration makes of it, DeepSpeed's functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.cli.app import doctor
from shoal.compat.elastic import compute_elastic_config, elasticity_enabled
from shoal.config import load
from shoal.config.elastic import (
    ElasticBatch,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    shared_batch,
)
from shoal.config.schema import Elasticity
from shoal.errors import ConfigError

TEN_THOUSAND: dict[str, Any] = {
    "enabled": True, "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32, "max_gpus": 1500, "min_time": 20, "version": 0.1,
}  # fmt: skip
SHARERS = [
    32, 34, 36, 48, 51, 64, 68, 72, 96, 102, 136, 144, 153, 192, 204, 272, 288, 306, 408, 576, 612, 816, 1224,
]  # fmt: skip
SMALL: dict[str, Any] = {
    "enabled": True, "max_train_batch_size": 13, "micro_batch_sizes": [1, 2], "max_gpus": 8, "version": 0.1,
}  # fmt: skip


def section(**keys: Any) -> Elasticity:
    return Elasticity(enabled=True, **{"version": 0.1, **keys})


# the arithmetic


def test_ten_thousand_samples_are_shared_by_23_numbers_of_ranks() -> None:
    assert compute_elastic_config({"elasticity": TEN_THOUSAND}, "0.19.8") == (9792, SHARERS)
    assert compute_elastic_config({"elasticity": TEN_THOUSAND}, "0.19.8", 64) == (9792, SHARERS, 17)


def test_every_sharer_divides_the_batch_and_no_candidate_is_shared_by_more() -> None:
    for micros in ((8, 10, 12), (1, 2, 3, 7), (5,), (4, 6, 9)):
        found = shared_batch(section(max_train_batch_size=100, micro_batch_sizes=micros))
        assert found.total <= 100
        by_hand = [n for n in range(1, 101) if any(found.total % (micro * n) == 0 for micro in micros)]
        assert list(found.ranks) == by_hand
        for ranks in found.ranks:
            one = shared_batch(section(max_train_batch_size=100, micro_batch_sizes=micros), ranks)
            assert one.micro == max(micro for micro in micros if found.total % (micro * ranks) == 0)


def test_the_least_common_multiple_counts_only_within_the_limit() -> None:
    found = shared_batch(section(max_train_batch_size=32, micro_batch_sizes=(1, 2, 3, 7)), 4)
    assert found == ElasticBatch(24, (1, 2, 3, 4, 6, 8, 12, 24), 3)  # 42 would be the multiple


@pytest.mark.parametrize(("prefers_larger", "total"), [(True, 36), (False, 24)])
def test_of_equal_choices_the_larger_or_the_smaller(prefers_larger: bool, total: int) -> None:
    # the candidates are 4 x 6, 6 x 6 and 12 x 2; 2 and 3 ranks share each
    wanted = section(
        max_train_batch_size=36, micro_batch_sizes=(4, 6), min_gpus=2, max_gpus=3, prefer_larger_batch=prefers_larger
    )
    assert shared_batch(wanted) == ElasticBatch(total, (2, 3))


@pytest.mark.parametrize(
    ("per_model", "micros", "micro"), [(1, [4, 8], 4), (2, [4, 8], 8), (4, [4, 8], 8), (4, [8], 8)]
)
def test_version_02_counts_data_parallel_ranks_of_whole_nodes(
    per_model: int, micros: list[int], micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    nodes = {
        "enabled": True, "version": 0.2, "max_train_batch_size": 64, "micro_batch_sizes": micros, "min_gpus": 16,
        "max_gpus": 16, "num_gpus_per_node": 8, "model_parallel_size": per_model,
    }  # fmt: skip
    expected = (64, [16 // per_model], micro)
    assert compute_elastic_config({"elasticity": nodes}, "0.19.8", return_microbatch=True) == expected
    assert compute_elastic_config({"elasticity": nodes}, "0.19.8", world_size=16) == expected


def test_version_02_gives_other_numbers_of_ranks_a_batch_of_their_own() -> None:
    wanted = section(version=0.2, max_train_batch_size=20, micro_batch_sizes=(2, 3))
    assert shared_batch(wanted) == ElasticBatch(18, (1, 2, 3, 6, 9))
    assert shared_batch(wanted, 5) == ElasticBatch(20, (5,), 2, is_shared=False)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="smallest global batch of 11 ranks is 22, more than"):
        shared_batch(wanted, 11)


# DeepSpeed's functions


@pytest.mark.parametrize("version", ["0.3.8", "0.10.0", "0.19.8+shoal.0.1.0", "1.0"])
def test_newer_versions_are_taken(version: str) -> None:
    assert compute_elastic_config({"elasticity": TEN_THOUSAND}, version)[0] == 9792


@pytest.mark.parametrize("version", ["0.2", "0.3.7"])
def test_older_versions_are_not(version: str) -> None:
    with pytest.raises(ElasticityError, match=f"{version} is older than 0.3.8"):
        compute_elastic_config({"elasticity": TEN_THOUSAND}, version)


WRONG: dict[str, dict[str, Any]] = {
    "off": {"enabled": False},
    "no largest batch": {"max_train_batch_size": None},
    "no micro-batches": {"micro_batch_sizes": None},
    "empty": {"micro_batch_sizes": []},
    "negative sizes": {"micro_batch_sizes": [1, 4, -1, 2, -10]},
    "one size": {"micro_batch_sizes": 5},
    "no sizes": {"micro_batch_sizes": ["a", None, 0.5]},
    "half a sample": {"micro_batch_sizes": [2, 0.5, 4]},
    "larger than the batch": {"micro_batch_sizes": [10001]},
    "negative ranks": {"min_gpus": -1},
    "no ranks": {"max_gpus": -1},
    "backwards": {"min_gpus": 9, "max_gpus": 8},
    "future": {"version": "0.3"},
    "between": {"version": 0.15},
    "models in version 0.1": {"model_parallel_size": 4, "num_gpus_per_node": 8},
    "models over nodes": {"model_parallel_size": 16, "num_gpus_per_node": 8, "version": 0.2},
    "nobody shares it": {"min_gpus": 1400, "max_gpus": 1401},
    "unknown": {"min_nodes": 1},
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_section_is_a_config_error_of_elasticity(case: str) -> None:
    wrong = {key: value for key, value in {**TEN_THOUSAND, **WRONG[case]}.items() if value is not None}
    with pytest.raises(ElasticityConfigError):
        compute_elastic_config({"elasticity": wrong}, "0.19.8", world_size=16 if wrong["version"] == 0.2 else 0)


def test_a_missing_section_and_another_type() -> None:
    with pytest.raises(ElasticityConfigError, match="no section"):
        compute_elastic_config({}, "0.19.8")
    with pytest.raises(ValueError, match="not a dict"):
        compute_elastic_config("ds.json", "0.19.8")  # type: ignore[arg-type]  # what is refused
    assert not elasticity_enabled({}) and not elasticity_enabled({"elasticity": {}})
    assert elasticity_enabled({"elasticity": {"enabled": True}})


def test_a_number_of_ranks_that_does_not_share_names_those_beside_it() -> None:
    with pytest.raises(ElasticityIncompatibleWorldSize, match=r"128 ranks do not share .*\n.*start 102 or 136 ranks"):
        compute_elastic_config({"elasticity": TEN_THOUSAND}, "0.19.8", world_size=128)


def test_the_number_of_ranks_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for version in (0.1, 0.2):
        with pytest.raises(ElasticityConfigError, match="number of ranks is not known"):
            compute_elastic_config({"elasticity": TEN_THOUSAND | {"version": version}}, "1", return_microbatch=True)
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert compute_elastic_config({"elasticity": TEN_THOUSAND}, "1", return_microbatch=True) == (9792, SHARERS, 17)
    assert compute_elastic_config({"elasticity": TEN_THOUSAND | {"version": 0.2}}, "1") == (9792, SHARERS)
    monkeypatch.setenv("WORLD_SIZE", "128")
    with pytest.raises(ElasticityIncompatibleWorldSize):
        compute_elastic_config({"elasticity": TEN_THOUSAND}, "1", return_microbatch=True)


# the configuration


@pytest.mark.parametrize(("ranks", "micro", "steps"), [(1, 2, 6), (2, 2, 3), (3, 2, 2), (4, 1, 3), (6, 2, 1)])
def test_the_batch_sizes_come_from_elasticity(ranks: int, micro: int, steps: int) -> None:
    config = load({"elasticity": SMALL}, world_size=ranks)
    sizes = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    assert sizes == (12, micro, steps)
    assert {config.origin(name) for name in ("train_batch_size", "gradient_accumulation_steps")} == {"derived"}
    assert "elasticity: global batch 12 on 1, 2, 3, 4, 6 ranks (5 numbers, at most 6)." in config.notes()


def test_sizes_beside_it_are_an_error_and_can_be_ignored() -> None:
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        with pytest.raises(ElasticityError, match=rf"elasticity\.enabled: true, and {name} given too") as caught:
            load({name: 2, "elasticity": SMALL}, world_size=2)
        assert isinstance(caught.value, ConfigError)
        config = load({name: 2, "elasticity": SMALL | {"ignore_non_elastic_batch_info": True}}, world_size=2)
        assert (config.train_batch_size, config.gradient_accumulation_steps) == (12, 3)
        assert f"{name} = 2: no effect here: elasticity decides the batch sizes." in config.notes()
    assert load({"train_batch_size": "auto", "elasticity": SMALL}, world_size=2).train_batch_size == 12
    assert load({"train_batch_size": 8, "elasticity": SMALL | {"enabled": False}}, world_size=2).train_batch_size == 8


def test_ranks_that_share_no_batch_are_an_error_with_those_that_do() -> None:
    with pytest.raises(
        ElasticityError, match=r"elasticity: 5 ranks do not share the global batch 12(.|\n)*4 or 6 ranks"
    ):
        load({"elasticity": SMALL}, world_size=5)
    config = load({"elasticity": SMALL | {"version": 0.2}}, world_size=5)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (10, 2)
    assert "elasticity: global batch 10 for 5 ranks alone, which do not share one with others." in config.notes()


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ElasticityError) as caught:
        load({"zero_optimization": {"stage": 7}, "elasticity": {"enabled": True, "max_train_batch_size": 0}})
    assert "zero_optimization.stage" in str(caught.value) and "elasticity.max_train_batch_size" in str(caught.value)
    with pytest.raises(ElasticityError, match=r"elasticity\.micro_batch_sizes(.|\n)*missing"):
        load({"elasticity": {"enabled": True, "max_train_batch_size": 8}})


def test_keys_without_effect_are_reported() -> None:
    notes = load({"elasticity": SMALL | {"min_time": 20, "num_gpus_per_node": 4}}, world_size=2).notes()
    assert any(note.startswith("elasticity.min_time = 20: accepted, no effect") for note in notes)
    assert "elasticity.num_gpus_per_node = 4: no effect here: elasticity.version 0.1 counts ranks only." in notes


def test_doctor_shows_what_was_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"elasticity": TEN_THOUSAND}))
    doctor(file, 64)
    shown = capsys.readouterr().out
    assert "elasticity: global batch 9792 on 32, 34, 36, 48, 51, 64, 68, 72, 96, 102, 136, 144, ... ranks" in shown
    values = [line.split()[1] for line in shown.splitlines() if line.split()[:1] == ["gradient_accumulation_steps"]]
    assert values == ["9"]  # 9792 / 64 / 17
    doctor(file)
    assert "elasticity: global batch 9792 on 32, 34" in capsys.readouterr().out


# the engine


@pytest.mark.usefixtures("deepspeed_classes")
def test_the_engine_trains_with_the_batch_that_was_chosen() -> None:
    model = torch.nn.Linear(2, 2)
    config = {"elasticity": SMALL, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine = shoal.initialize(model=model, config=config)[0]
    assert engine.get_batch_info() == (12, 2, 6)
    assert engine.elasticity_enabled() and engine.is_elastic_model_parallel_supported()
    engine.destroy()


def test_a_scheduler_that_planned_with_another_section_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"elasticity": SMALL, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(SMALL))
    shoal.initialize(model=torch.nn.Linear(2, 2), config=config)[0].destroy()
    for key, value in (("max_train_batch_size", 27), ("micro_batch_sizes", [1]), ("version", 0.2)):
        monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(SMALL | {key: value}))
        with pytest.raises(ElasticityError, match=rf"elasticity\.{key} is .* here and"):
            shoal.initialize(model=torch.nn.Linear(2, 2), config=config)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", "{")
    with pytest.raises(ElasticityConfigError, match="is no JSON"):
        shoal.initialize(model=torch.nn.Linear(2, 2), config=config)
