"""The schema: every key has its support, is found when misspelt, and is written out for editors and readers."""

from __future__ import annotations

import inspect
import json
import pathlib
import pickle
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from shoal.config import ConfigProblems, json_schema, load, schema_paths, support_of
from shoal.config.base import Section, below, keys_of, names_of, walk
from shoal.config.normalise import NEVER_EXISTED, normalise
from shoal.config.optimizer import BY_WIDTH, OPTIMIZERS, SCHEDULERS
from shoal.config.schema import Schema
from shoal.config.support import SUPPORT
from shoal.optim.build import RECIPES
from shoal.optim.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from tests.helpers.places import FIXTURES

RECIPES_OF_USERS = sorted((FIXTURES / "config_recipes").glob("*.json"))
PATHS = [path for path, _ in walk(Schema)]
LEAVES = schema_paths()


def test_the_schema_has_all_of_deepspeeds_keys() -> None:
    assert len(LEAVES) == 581
    assert len(LEAVES) == len(set(LEAVES))


def test_every_key_has_its_support_with_the_reason() -> None:
    without = [path for path in LEAVES if support_of(path).kind != "supported" and not support_of(path).reason]
    assert without == []


def test_every_key_has_a_description() -> None:
    assert [path for path, key in walk(Schema) if len(key.description) < 3] == []


def test_every_line_on_support_is_about_a_key_that_exists() -> None:
    plain = [re.sub(r"\[\]|\.<name>", "", path) for path in PATHS]
    for rule in SUPPORT:
        if rule.endswith(".**"):
            assert any(path.startswith(rule.removesuffix("**")) for path in plain), rule
        else:
            assert rule in PATHS


def test_every_switch_is_a_key() -> None:
    assert [rule for rule, support in SUPPORT.items() if support.switch and support.switch not in LEAVES] == []


def test_every_keys_own_default_is_read_and_asks_for_nothing() -> None:
    on_by_being_there = (
        "sparse_attention.",
        "weight_quantization.",
        "zero_optimization.zen",
        "zero_optimization.zeropp",
    )
    for path, key in walk(Schema):
        if key.model is None and key.default is not None and not path.startswith(on_by_being_there):
            load(filled(path, list(key.default) if isinstance(key.default, tuple) else key.default))


def filled(path: str, value: object) -> dict[str, Any]:
    """A file with one value at a path of the schema."""
    for part in reversed(path.split(".")):
        if part == "<name>":
            value = {"some_name": value}
        elif part.endswith("[]"):
            value = {part[:-2]: [value]}
        else:
            value = {part: value}
    assert isinstance(value, dict)
    return value


def sections() -> Iterator[tuple[str, type[Section]]]:
    yield "", Schema
    for path, key in walk(Schema):
        if key.model is not None:
            yield below(path, key), key.model


CLOSED = [(path, model) for path, model in sections() if model.model_config.get("extra") != "allow"]


@pytest.mark.parametrize(("path", "model"), CLOSED, ids=[path or "top" for path, _ in CLOSED])
def test_every_key_without_one_letter_is_an_error_that_suggests_the_key(path: str, model: type[Section]) -> None:
    names = [name for name in names_of(model) if len(name) > 2]
    longest = max(map(len, names), default=0)
    for position in range(longest):
        mutated = {name[:position] + name[position + 1 :]: name for name in names if position < len(name)}
        mutated = {wrong: name for wrong, name in mutated.items() if wrong not in names_of(model)}
        source = filled(path, dict.fromkeys(mutated, 0)) if path else dict.fromkeys(mutated, 0)
        found = {problem.path.rpartition(".")[2]: problem.do for problem in normalise(source, {}).problems}
        for wrong, name in mutated.items():
            assert repr(name) in found[wrong], (wrong, name)


def test_each_two_letter_axis_without_a_letter_is_an_error() -> None:
    with pytest.raises(ConfigProblems, match=r"parallel\.p: no such key in parallel"):
        load({"parallel": {"p": 2}})


def test_every_key_in_the_wrong_section_is_an_error_that_names_a_right_one() -> None:
    places: dict[str, set[str]] = {}
    for path in LEAVES:
        places.setdefault(path.rpartition(".")[2], set()).add(path)
    names = [name for name in places if name not in names_of(Schema) and name not in NEVER_EXISTED]
    with pytest.raises(ConfigProblems) as caught:
        load(dict.fromkeys(names, 1))
    suggested = {problem.path: set(re.findall(r"'([^']+)'", problem.do)) for problem in caught.value.problems}
    assert set(suggested) == set(names)
    assert [name for name in names if not suggested[name] & {*places[name], *names_of(Schema)}] == []


def test_enabled_belongs_to_a_section() -> None:
    with pytest.raises(ConfigProblems, match="it belongs elsewhere"):
        load({"enabled": True})


# Arguments that the constructors do not have.
EXTRAS = {
    "Adam": {"torch_adam", "adam_w_mode", "bias_correction", "fp32_optimizer_states", "set_grad_none"},
    "AdamW": {"torch_adam", "adam_w_mode", "bias_correction", "fp32_optimizer_states", "set_grad_none"},
    "Adagrad": {"fp32_optimizer_states"},
    "Lion": {"fp32_optimizer_states", "set_grad_none"},
    "Lamb": {"amsgrad"},
    "OneBitAdam": {"amsgrad", "eps_inside_sqrt", "cuda_aware", "comm_backend_name"},
    "ZeroOneAdam": {"amsgrad", "eps_inside_sqrt", "cuda_aware", "comm_backend_name"},
    "OneBitLamb": {"amsgrad", "cuda_aware", "comm_backend_name"},
    "Muon": {"muon_lr", "adam_lr", "adam_w_mode", "torch_adam", "fp32_optimizer_states"},
}


def arguments_of(factory: type) -> set[str]:
    return {*inspect.signature(factory).parameters} - {"params", "optimizer", "use_muon"}


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in BY_WIDTH])
def test_the_optimizers_arguments_are_the_optimizers_own(name: str) -> None:
    accepted = arguments_of(RECIPES[name][0]) | EXTRAS.get(name, set())
    assert set(names_of(OPTIMIZERS[name])) == accepted


@pytest.mark.parametrize("factory", [LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR])
def test_the_schedules_arguments_are_the_schedules_own(factory: type) -> None:
    assert arguments_of(factory) == set(keys_of(SCHEDULERS[factory.__name__]))


VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def test_the_json_schema_is_a_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("path", RECIPES_OF_USERS, ids=lambda path: path.stem)
def test_the_json_schema_passes_the_recipes(path: pathlib.Path) -> None:
    VALIDATOR.validate(json.loads(path.read_text()))


@pytest.mark.parametrize(
    "source",
    [
        {},
        {"zero_optimization": True, "bfloat16": {"enabled": "true"}},
        {"zero_optimization": {"prefetch_bucket_size": 2e8, "offload_param": {"device": None}}},
        {"steps_per_print": "Infinity", "communication_data_type": "bfloat16"},
        {"scheduler": None, "zero_optimization.reduce_bucket_size": 1},
        {"compression_training": {"weight_quantization": {"different_groups": {"g": {"params": {"start_bits": 8}}}}}},
        {"tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": ["q"], "partition_type": "row"}]}}},
    ],
)
def test_the_json_schema_passes_what_is_read(source: dict[str, Any]) -> None:
    VALIDATOR.validate(source)
    assert normalise(source, {}).problems == []


@pytest.mark.parametrize(
    "source",
    [
        {"zero_optimizaton": {"stage": 3}},
        {"zero_optimization": {"stage": 4}},
        {"fp16": {"enabled": "yes"}},
        {"gradient_clipping": -1},
        {"fp16": {"enabled": True, "loss_scale": -1}},
        {"zero_optimization": {"reduce_bucket_size": 1.5}},
    ],
)
def test_the_json_schema_fails_what_is_an_error(source: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(source)
    with pytest.raises(ConfigProblems):
        load(source)


def test_the_json_schema_describes_every_key_with_its_support() -> None:
    schema = json_schema()
    stage = schema["properties"]["zero_optimization"]["anyOf"][0]["properties"]["stage"]
    assert stage["default"] == 0
    assert stage["description"].endswith("Shoal: supported.")
    assert {"const": "auto"} in stage["anyOf"]
    assert schema["properties"]["bfloat16"]["deprecated"] is True


def test_a_configuration_is_pickled_with_the_sections_of_the_table() -> None:
    config = load({"hybrid_engine": {"max_out_tokens": 9}, "zero_optimization": {"zenflow": None}})
    again = pickle.loads(pickle.dumps(config))  # noqa: S301
    assert again.effective() == config.effective()
    assert again.effective()["hybrid_engine"]["max_out_tokens"] == 9
