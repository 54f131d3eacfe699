"""The section `pipeline`: ranks from it or from `parallel.pp`, and values that do not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.config import ConfigProblems, load
from shoal.config.ranks import mesh_of


def loaded(pipeline: dict[str, Any], world_size: int = 8, **more: Any) -> Any:
    return load({"train_micro_batch_size_per_gpu": 2, "pipeline": pipeline, **more}, world_size=world_size)


@pytest.mark.parametrize(
    "keys",
    [
        {"pipeline": {"stages": 4}},
        {"parallel": {"pp": 4}},
        {"pipeline": {"stages": 4}, "parallel": {"pp": 4}},
        {"pipeline": {"stages": 4, "schedule": "zbv"}, "parallel": {"pp": "auto"}},
    ],
)
def test_either_key_gives_the_pipeline_ranks_of_the_mesh(keys: dict[str, Any]) -> None:
    config = load({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, **keys}, world_size=8)
    assert (mesh_of(config, 8).pp, mesh_of(config, 8).dp_shard) == (4, 2)
    assert config.train_batch_size == 2 * 3 * 2


@pytest.mark.parametrize("pp", [1, 2])
def test_two_keys_that_disagree_are_an_error(pp: int) -> None:
    with pytest.raises(ConfigProblems, match=f"degrees of pp: parallel.pp {pp}, pipeline.stages 4") as error:
        loaded({"stages": 4}, parallel={"pp": pp})
    assert error.value.code == "mesh"


def test_a_mesh_given_beside_the_config_must_agree_too() -> None:
    with pytest.raises(ConfigProblems, match=r"degrees of pp: parallel.pp 2, pipeline.stages 4"):
        load({"pipeline": {"stages": 4}}, world_size=8, degrees={"pp": 2})


def test_pipeline_stages_divide_the_ranks() -> None:
    with pytest.raises(ConfigProblems, match="8 ranks do not divide by pp 3 = 3") as error:
        loaded({"stages": 3})
    assert error.value.problems[0].path == "pipeline.stages"
    assert loaded({"stages": 1}).pipeline.stages == 1


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(ConfigProblems) as error:
        loaded(
            {
                "stages": 0,
                "schedule": "1f1",
                "partition": "type:Bl(ock",
                "activation_checkpoint_interval": -1,
                "stage": 2,
            }
        )
    assert {problem.path for problem in error.value.problems} == {
        "pipeline.stages",
        "pipeline.schedule",
        "pipeline.partition",
        "pipeline.activation_checkpoint_interval",
        "pipeline.stage",
    }


@pytest.mark.parametrize(
    ("pipeline", "path", "said"),
    [
        ({"schedule": "1f1b", "virtual_stages": 2}, "pipeline.virtual_stages", "interleaved_1f1b"),
        ({"schedule": "dualpipev", "virtual_stages": 4}, "pipeline.virtual_stages", "set virtual_stages to 2"),
        ({"schedule": "gpip"}, "pipeline.schedule", "did you mean 'gpipe'?"),
        ({"schedule": "nowhere/schedule.txt"}, "pipeline.schedule", "one of gpipe, 1f1b"),
        ({"schedule": "x" * 5000}, "pipeline.schedule", "one of gpipe, 1f1b"),
        ({"partition": "parameter"}, "pipeline.partition", "did you mean 'parameters'?"),
        ({"partition": "type:"}, "pipeline.partition", "type:REGEX"),
        ({"stages": 4, "split_points": ["a", "b"]}, "pipeline.split_points", "4 pipeline stages have 3 boundaries"),
        ({"stages": 2, "schedule": "zbv", "split_points": ["a"]}, "pipeline.split_points", "4 pipeline stages have 3"),
    ],
)
def test_values_that_do_not_fit_say_what_does(pipeline: dict[str, Any], path: str, said: str) -> None:
    with pytest.raises(ConfigProblems) as error:
        loaded(pipeline)
    (problem,) = error.value.problems
    assert problem.path == path
    assert said in f"{problem.what} {problem.do}"


def test_a_schedule_is_a_name_in_any_spelling_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("0F0 0B0")
    for schedule in ("1F1B", "Interleaved1F1B", "zero_bubble", "ZB-H1", "DualPipeV", str(tmp_path / "mine.txt")):
        assert loaded({"schedule": schedule}).pipeline.schedule == schedule
    assert loaded({"partition": "type:Block|Embedding", "split_points": "auto"}).pipeline.split_points == "auto"
    assert loaded({"stages": 2, "split_points": ["blocks.2"]}).pipeline.split_points == ("blocks.2",)
