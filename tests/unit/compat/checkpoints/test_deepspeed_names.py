"""DeepSpeed's stage 0 saves optimizer state without names: which state is whose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.manifest import MODEL
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource
from shoal.errors import CheckpointError


def save_stage_0(folder: Path, module: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> Path:
    state = {"module": module, "buffer_names": [], "optimizer": optimizer, "param_shapes": None, "global_steps": 1}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    return folder


def adam(shapes: list[list[tuple[int, ...]]], **more: Any) -> dict[str, Any]:
    """An optimizer's state whose tensor number n is full of n."""
    state, groups = {}, []
    for group in shapes:
        numbers = list(range(len(state), len(state) + len(group)))
        for number, shape in zip(numbers, group, strict=True):
            state[number] = {"step": torch.tensor(3.0), "exp_avg": torch.full(shape, float(number))}
        groups.append({"lr": 0.1, "params": numbers, **more})
    return {"state": state, "param_groups": groups}


MODULE = {"a": torch.ones(3), "b": torch.ones(3) * 2, "c": torch.ones(2, 3), "d": torch.ones(3) * 4}


def numbers_of(source: DeepSpeedSource) -> dict[str, float]:
    return {name: source.read("optimizer/exp_avg", name).mean().item() for name in source.tensors("optimizer/exp_avg")}


def test_groups_in_the_models_order_find_their_names_by_shape(tmp_path: Path) -> None:
    folder = save_stage_0(tmp_path, MODULE, adam([[(2, 3)], [(3,), (3,), (3,)]]))
    source = DeepSpeedSource(folder)
    assert numbers_of(source) == {"a": 1, "b": 2, "c": 0, "d": 3}
    assert source.about.group_of == {"a": 1, "b": 1, "c": 0, "d": 1}


def test_when_two_assignments_fit_the_names_have_to_be_said(tmp_path: Path) -> None:
    folder = save_stage_0(tmp_path, MODULE, adam([[(3,), (2, 3), (3,)]]))
    with pytest.raises(CheckpointError, match="2 assignments of names to its tensors fit") as caught:
        DeepSpeedSource(folder)
    assert caught.value.code == "checkpoint-unnamed"
    assert numbers_of(DeepSpeedSource(folder, names=[["b", "c", "d"]])) == {"b": 0, "c": 1, "d": 2}
    without = DeepSpeedSource(folder, names=())
    assert list(without.kinds()) == ["model"]
    assert without.about.notes == ["The optimizer's state was left out, as requested."]


def test_groups_in_another_order_are_an_error_and_names_help(tmp_path: Path) -> None:
    folder = save_stage_0(tmp_path, MODULE, adam([[(3,), (3,), (3,), (2, 3)]]))
    with pytest.raises(CheckpointError, match="no assignments"):
        DeepSpeedSource(folder)
    assert numbers_of(DeepSpeedSource(folder, names=[["d", "b", "a", "c"]])) == {"d": 0, "b": 1, "a": 2, "c": 3}


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ([["a", "b"], ["c"]], "2 groups were named, and the optimizer has 1"),
        ([["b", "x", "d"]], "the model has no parameter 'x'"),
        ([["b", "d", "c"]], "d is not the tensor at 1 of group 0"),
        ([["b", "c"]], "group 0 has more tensors than names"),
    ],
)
def test_names_that_do_not_fit_are_reported(names: list[list[str]], what: str, tmp_path: Path) -> None:
    folder = save_stage_0(tmp_path, MODULE, adam([[(3,), (2, 3), (3,)]]))
    with pytest.raises(CheckpointError, match=what):
        DeepSpeedSource(folder, names=names)


def test_an_optimizer_made_from_named_parameters_says_them_itself(tmp_path: Path) -> None:
    folder = save_stage_0(tmp_path, MODULE, adam([[(3,), (2, 3), (3,)]], param_names=["d", "c", "a"]))
    source = DeepSpeedSource(folder)
    assert numbers_of(source) == {"d": 0, "c": 1, "a": 2}
    assert source.about.groups == [{"lr": 0.1}]


def test_in_16_bits_the_values_tell_which_is_which(tmp_path: Path) -> None:
    module = {name: tensor.bfloat16() for name, tensor in MODULE.items()}
    state = {"optimizer_state_dict": adam([[(3,), (2, 3)], [(3,)]]), "cur_scale": 1.0}
    main_parameters = [[MODULE["b"] + 1e-4, MODULE["c"]], [MODULE["d"]]]
    source = DeepSpeedSource(save_stage_0(tmp_path, module, {**state, "fp32_groups": main_parameters}))
    assert numbers_of(source) == {"b": 0, "c": 1, "d": 2}
    assert source.read(MODEL, "b").tolist() == (MODULE["b"] + 1e-4).tolist()
    assert source.read(MODEL, "a").dtype == torch.bfloat16


def test_a_flat_group_of_16_bit_weights_is_split_by_its_values(tmp_path: Path) -> None:
    module = {name: tensor.half() for name, tensor in MODULE.items()}
    flat = torch.cat([MODULE["b"], MODULE["c"].view(-1), MODULE["d"]])
    state = {"optimizer_state_dict": adam([[(12,)]]), "fp32_groups_flat": [flat], "cur_scale": 8.0, "cur_iter": 5}
    state["optimizer_state_dict"]["state"][0]["exp_avg"] = torch.arange(12.0)
    source = DeepSpeedSource(save_stage_0(tmp_path, module, state))
    assert source.read("optimizer/exp_avg", "c").tolist() == [[3, 4, 5], [6, 7, 8]]
    assert source.read("optimizer/exp_avg", "d").tolist() == [9, 10, 11]
    assert source.about.scalars == {name: {"step": 3.0} for name in ("b", "c", "d")}
    assert source.about.loss_scale == {"scale": 8.0, "iteration": 5, "last_overflow_iteration": -1, "hysteresis": 1}


def test_a_parameter_without_dims_keeps_its_state(tmp_path: Path) -> None:
    module = {"scale": torch.tensor(2.0), "w": torch.ones(3)}
    optimizer = adam([[(), (3,)]])
    source = DeepSpeedSource(save_stage_0(tmp_path, module, optimizer))
    assert source.read("optimizer/exp_avg", "scale").shape == ()
    assert source.about.scalars["scale"] == {"step": 3.0}
