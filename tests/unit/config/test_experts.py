"""The section `expert_parallel`: the degree, and keys that do not fit together."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config import ConfigProblems, load
from shoal.config.ranks import mesh_of
from shoal.errors import ConfigError


def test_both_keys_give_the_degree() -> None:
    for source in (
        {"expert_parallel": {"enabled": True, "autoep_size": 2}},
        {"parallel": {"ep": 2}},
        {"parallel": {"ep": 2}, "expert_parallel": {"enabled": True, "autoep_size": 2}},
        {"parallel": {"ep": 2}, "expert_parallel": {"enabled": True}},
    ):
        assert mesh_of(load(source), 4).ep == 2


def test_a_section_that_is_not_enabled_has_no_degree() -> None:
    assert mesh_of(load({"expert_parallel": {"autoep_size": 2}}), 4).ep == 1


def test_degrees_that_disagree_are_an_error() -> None:
    source = {"parallel": {"ep": 2}, "expert_parallel": {"enabled": True, "autoep_size": 4}}
    with pytest.raises(ConfigError, match=r"different degrees of ep: parallel.ep 2, expert_parallel.autoep_size 4"):
        mesh_of(load(source), 4)


def test_a_degree_that_does_not_divide_the_ranks_names_what_does() -> None:
    with pytest.raises(ConfigError, match=r"expert_parallel.autoep_size = 3 does not divide the 4 ranks") as caught:
        mesh_of(load({"expert_parallel": {"enabled": True, "autoep_size": 3}}), 4)
    assert caught.value.do == "write one of 1, 2, 4."


def test_one_rank_cannot_divide_experts() -> None:
    with pytest.raises(ConfigError, match=r"autoep_size: 2, and there is 1 rank among which experts") as caught:
        load({"expert_parallel": {"enabled": True, "autoep_size": 2}}, world_size=1)
    assert caught.value.do == "write 1, or start 2 ranks for each pipeline stage."


def test_a_degree_of_the_models_layers_is_named_as_theirs() -> None:
    with pytest.raises(ConfigError, match=r"parallel.ep: 4, and the model's layers have ep_size 2") as caught:
        load({"parallel": {"ep": 4}}, world_size=4, degrees={"ep": 2})
    assert caught.value.do == "leave parallel.ep out."
    with pytest.raises(ConfigError, match="ep_size of the model's layers: 2 does not divide the 3 ranks"):
        load({}, world_size=3, degrees={"ep": 2})


@pytest.mark.parametrize(
    ("keys", "path", "what"),
    [
        ({"preset_model": "mixtrall"}, "preset_model", "is not a preset; did you mean 'mixtral'?"),
        ({"router_pattern": "("}, "router_pattern", "is not a regular expression: "),
        ({"num_expert_groups": 4}, "num_expert_groups", "4, and num_limited_groups is None"),
        ({"gather_if_used": True, "hot_experts": 2}, "gather_if_used", "true, and hot_experts is 2"),
        ({"num_expert_groups": 2, "num_limited_groups": 4}, "num_expert_groups", "2, and num_limited_groups is 4"),
        ({"has_shared_experts": True}, "has_shared_experts", "neither shared_experts_pattern nor preset_model"),
        ({"load_balance_coeff": -1.0}, "load_balance_coeff", "-1 is not "),
        ({"score_func": "relu"}, "score_func", '"relu" is not '),
    ],
)
def test_keys_that_do_not_fit_are_named(keys: dict[str, Any], path: str, what: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        load({"expert_parallel": {"enabled": True, **keys}})
    (problem,) = caught.value.problems
    assert problem.path == f"expert_parallel.{path}"
    assert what in str(problem.what) + str(problem.do)


def test_keys_of_deepspeed_without_effect_are_accepted() -> None:
    keys = {"use_grouped_mm": False, "disable_triton_grouped_mm": True, "combine_impl": "legacy_bmm"}
    notes = load({"expert_parallel": {"enabled": True, "validate_folding_routing": True, **keys}}).notes()
    assert sum("expert_parallel." in line and "accepted, no effect" in line for line in notes) == 4


def test_null_for_the_third_weight_is_not_the_same_as_no_key() -> None:
    assert load({"expert_parallel": {"expert_w3": None}}).expert_parallel.expert_w3 is None
    assert load({}).expert_parallel.expert_w3 == "auto"
