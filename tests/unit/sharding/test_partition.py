"""How a model is cut into units."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.errors import ModelError
from shoal.sharding.partition import UnitRules, UnitSpec, partition
from tests.helpers.models import Plain, Shared, TiedBetweenBlocks

SMALL = UnitRules(min_block_numel=1, min_module_numel=1 << 17)


def members(specs: list[UnitSpec]) -> dict[str, int]:
    """Number of parameters of each unit."""
    return {spec.name: len(spec.parameters) for spec in specs}


def test_repeated_siblings_are_blocks_and_the_root_takes_what_is_left() -> None:
    assert members(partition(Plain(), SMALL)) == {"root": 5, "blocks.0": 6, "blocks.1": 6, "blocks.2": 6}
    root = partition(Plain(), SMALL)[0]
    assert root.parameters == ("embedding.weight", "norm.weight", "norm.bias", "unused.weight", "unused.bias")
    assert root.modules == ("",)


def test_siblings_that_are_too_small_are_left_to_the_root() -> None:
    assert members(partition(Plain(), UnitRules())) == {"root": 23}
    numel = 1 << 15
    wide = nn.Sequential(*[nn.Linear(numel // 64, 64, bias=False) for _ in range(3)])
    assert members(partition(wide, UnitRules())) == {"0": 1, "1": 1, "2": 1}
    assert members(partition(nn.Sequential(*[nn.Linear(63, 64, bias=False) for _ in range(3)]), UnitRules())) == {
        "root": 3
    }


def test_numbered_children_of_any_module_are_blocks_where_they_repeat() -> None:
    model = nn.Module()
    for name, layer in (("0", nn.Linear(64, 64)), ("1", nn.Linear(64, 64)), ("head", nn.Linear(64, 64))):
        model.add_module(name, layer)
    assert members(partition(model, SMALL)) == {"root": 2, "0": 2, "1": 2}


def test_large_modules_outside_the_blocks_are_units_of_their_own() -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(1 << 11, 64)
    model.small = nn.Linear(4, 4)
    model.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
    assert members(partition(model, SMALL)) == {"root": 2, "embedding": 1, "blocks.0": 2, "blocks.1": 2}


def test_names_and_classes_of_the_user_win() -> None:
    assert members(partition(Plain(), UnitRules(names=("blocks.*",)))) == {
        "root": 5,
        "blocks.0": 6,
        "blocks.1": 6,
        "blocks.2": 6,
    }
    assert members(partition(Plain(), UnitRules(names=("blocks.1", "norm")))) == {"root": 15, "blocks.1": 6, "norm": 2}
    assert set(members(partition(Plain(), UnitRules(classes=("Block",))))) == {
        "root",
        "blocks.0",
        "blocks.1",
        "blocks.2",
    }
    qualified = UnitRules(classes=("tests.helpers.models.Block",))
    assert members(partition(Plain(), qualified)) == members(partition(Plain(), UnitRules(classes=("Block",))))


def test_of_nested_matches_the_outermost_counts() -> None:
    assert members(partition(Plain(), UnitRules(names=("blocks.0", "blocks.0.up")))) == {"root": 17, "blocks.0": 6}


def test_the_hint_of_hugging_face_models_is_followed() -> None:
    class Hinted(Plain):
        _no_split_modules = ("Linear",)

    found = members(partition(Hinted(), UnitRules()))
    assert found["blocks.0.up"] == 2
    assert "blocks.0" not in found


def test_a_weight_that_two_units_share_belongs_to_the_root() -> None:
    specs = {spec.name: spec for spec in partition(TiedBetweenBlocks(), SMALL)}
    assert "blocks.0.up.weight" in specs["root"].parameters
    assert members(list(specs.values())) == {"root": 6, "blocks.0": 5, "blocks.1": 6, "blocks.2": 5}


def test_a_block_at_two_places_is_one_unit() -> None:
    assert members(partition(Shared(), SMALL)) == {"root": 5, "blocks.0": 6, "blocks.1": 6}


def test_containers_of_experts_are_never_split() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(8)])

    assert members(partition(nn.ModuleList([Mixture() for _ in range(2)]), SMALL)) == {"0": 16, "1": 16}
    assert members(partition(Mixture(), SMALL)) == {"root": 16}


def test_compiled_blocks_are_blocks() -> None:
    model = Plain()
    for index in range(3):
        model.blocks[index] = torch.compile(model.blocks[index], backend="eager")
    assert members(partition(model, SMALL)) == {"root": 5, "blocks.0": 6, "blocks.1": 6, "blocks.2": 6}


def test_small_parameters_stay_whole_up_to_the_models_limit() -> None:
    persistent = partition(Plain(), UnitRules(names=("blocks.*",), persistence_threshold=13))[0]
    assert persistent.is_persistent
    assert persistent.modules == ()
    assert len(persistent.parameters) == 13  # norms and biases of 12, and of unused 9 and 3
    limited = partition(Plain(), UnitRules(names=("blocks.*",), persistence_threshold=13, max_persistent_numel=24))[0]
    assert set(limited.parameters) == {"unused.weight", "unused.bias", "blocks.0.norm.weight"}


def test_every_parameter_is_in_exactly_one_unit() -> None:
    for model in (Plain(), Shared(), TiedBetweenBlocks()):
        names = [name for spec in partition(model, SMALL) for name in spec.parameters]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_unknown_names_and_classes_are_errors_with_a_suggestion() -> None:
    with pytest.raises(ModelError, match=r"no module is called 'block\.\*'") as caught:
        partition(Plain(), UnitRules(names=("block.*",)))
    assert caught.value.code == "unit-name-unknown"
    with pytest.raises(ModelError, match=r"'Blok'.*Block") as caught:
        partition(Plain(), UnitRules(classes=("Blok",)))
    assert caught.value.code == "unit-class-unknown"
    with pytest.raises(ModelError, match="ReLU has no parameters"):
        partition(nn.ReLU(), UnitRules())
