"""Types and arguments of ``optimizer`` and ``scheduler``: one check for ``doctor`` and ``initialize``."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

import shoal
from shoal.config import Config, ConfigProblems, examine, load
from shoal.optim.loss_scale import LossScale, LossScaleSettings
from tests.helpers.config_reading import problems
from tests.unit.cli.test_config_doctor import run

MISSPELT = {"optimizer": {"type": "AdmW"}, "scheduler": {"type": "WarmupDecay"}}
SAID = {
    "optimizer.type": "there is no optimizer \"AdmW\". did you mean 'AdamW' or 'Adam' or 'RAdam'?",
    "scheduler.type": "there is no schedule \"WarmupDecay\". did you mean 'WarmupDecayLR' or 'WarmupLR'?",
}


def optimizer(kind: object, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind: object, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


def test_a_misspelt_type_is_an_error_of_load_and_of_initialize() -> None:
    assert problems(MISSPELT) == SAID
    with pytest.raises(ConfigProblems) as caught:
        shoal.initialize(model=torch.nn.Linear(2, 2), config=MISSPELT)
    assert {each.path: f"{each.what} {each.do}" for each in caught.value.problems} == SAID


def test_a_misspelt_type_is_an_error_of_doctor(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(MISSPELT | {"gradient_clipping": -1}))
    code, out = run(capsys, path)
    assert code == 1
    for key, number in (("gradient_clipping", 1), ("optimizer.type", 2), ("scheduler.type", 3)):
        row = next(line for line in out.splitlines() if line.strip().startswith(key))
        assert row.rstrip().endswith(f"wrong: see problem {number}")
    code, out = run(capsys, path, json=True)
    rows = {row["path"]: (row["verdict"], row["reason"]) for row in json.loads(out)["keys"]}
    assert code == 1
    assert rows["gradient_clipping"] == ("wrong", "-1 is not a number, at least 0.")
    assert rows["optimizer.type"] == ("wrong", 'there is no optimizer "AdmW".')


def test_a_type_in_whose_place_the_script_has_an_object_is_not_checked() -> None:
    assert isinstance(load(MISSPELT, replaced=("optimizer", "scheduler")), Config)
    model = torch.nn.Linear(2, 2)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(given, 1)
    engine, *_ = shoal.initialize(
        model=model, optimizer=given, lr_scheduler=schedule, config={"train_batch_size": 1, **MISSPELT}
    )
    engine.destroy()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (optimizer("AdamW", betas=[0.9, 1.0]), {"optimizer.params.betas": "each a number, at least 0 and less than 1"}),
        (optimizer("AdamW", betas=[0.9]), {"optimizer.params.betas": "[0.9] is not a list of 2"}),
        (optimizer("AdamW", foreach=True, fused=True), {"optimizer.params.fused": "leave one out"}),
        (optimizer("SGD", lr=0.1, nesterov=True), {"optimizer.params.nesterov": "needs a momentum"}),
        (optimizer("Lamb", amsgrad=True), {"optimizer.params.amsgrad": "Lamb does not have"}),
        (optimizer("Muon", ns_method="exact"), {"optimizer.params.ns_method": 'is not "gram" or "standard"'}),
        (optimizer("Muon", muon_lr=-1.0), {"optimizer.params.muon_lr": "at least 0"}),
        (optimizer("Muon", adam_w_mode=False), {"optimizer.params.adam_w_mode": "always get AdamW"}),
        (optimizer("LBFGS"), {"optimizer.type": "is not elementwise"}),
        (
            optimizer("NAdam", momentum_decy=1, lr=1),
            {"optimizer.params.momentum_decy": "did you mean 'momentum_decay'?"},
        ),
        (optimizer("nadam", lr=-1.0), {"optimizer.params": "Invalid learning rate: -1.0"}),
        (scheduler("WarmupLR", warmup_type="cubic"), {"scheduler.params.warmup_type": 'is not "log" or "linear"'}),
        (scheduler("WarmupDecayLR"), {"scheduler.params.total_num_steps": "WarmupDecayLR needs it"}),
        (scheduler("WarmupCosineLR"), {"scheduler.params.total_num_steps": "WarmupCosineLR needs it"}),
        (
            scheduler("OneCycle", cycle_second_step_size=-1),
            {
                "scheduler.params.cycle_second_step_size": "at least 0",
                "scheduler.params.cycle_min_lr": "OneCycle needs it",
                "scheduler.params.cycle_max_lr": "OneCycle needs it",
            },
        ),
        (scheduler("LambdaLR"), {"scheduler.type": "its rate is a Python function"}),
        (scheduler("StepLR", gama=0.1), {"scheduler.params.gama": "did you mean 'gamma'?"}),
        (scheduler("StepLR", gamma=0.1), {"scheduler.params.step_size": "StepLR needs it"}),
        (scheduler("OneCycleLR", max_lr=1.0, total_steps=-1), {"scheduler.params": "total_steps"}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_names_and_values_of_arguments_are_checked(source: dict[str, Any], said: dict[str, str]) -> None:
    found = problems(source)
    assert set(found) == set(said)
    for path, part in said.items():
        assert part in found[path]


@pytest.mark.parametrize(
    "source",
    [
        optimizer("nadam", lr="auto", momentum_decay=0.1),
        optimizer("Adam_W", lr=1e-3),
        optimizer("RMSprop", lr=1e-3, alpha=0.9),
        optimizer("SGD", lr=0.1, nesterov=True, momentum=0.9),
        {"optimizer": {"type": None}},
        scheduler("WarmupDecayLR", total_num_steps="auto"),
        scheduler("CyclicLR", base_lr=0.1, max_lr=[0.1, 0.2]),
        scheduler("steplr", step_size=3),
    ],
    ids=str,
)
def test_arguments_that_can_be_right_pass(source: dict[str, Any]) -> None:
    assert isinstance(load(source), Config)


def test_torch_is_not_imported_for_a_type_of_the_schema() -> None:
    import subprocess
    import sys

    run = f"import sys, shoal.config as c; c.load({optimizer('AdamW', lr=1e-3)!r}); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True).stdout == "False\n"


def flowing(more: dict[str, Any] | None = None, device: str = "cpu", **flow: Any) -> dict[str, Any]:
    zero = {"stage": 3, "offload_optimizer": {"device": device}, "zenflow": flow}
    return {**(more or {}), "zero_optimization": {**zero, **(more or {}).get("zero_optimization", {})}}


FLOWS: list[tuple[dict[str, Any], str]] = [
    ({"device": "none"}, "zenflow"),
    ({"more": {"zero_optimization": {"offload_param": {"device": "cpu"}}}}, "offload_param"),
    ({"more": {"precision": {"state_dtype": "int8"}}}, "precision.state_dtype"),
    ({"more": {"fault_tolerance": {"quorum": "host:1"}}}, "fault_tolerance.quorum"),
    ({"select_interval": 3}, "zenflow.select_interval"),
    ({"select_strategy": "step"}, "zenflow.select_interval"),
    ({"select_strategy": "step", "select_interval": 2, "update_interval": 3}, "zenflow.update_interval"),
]


@pytest.mark.parametrize(
    ("source", "code", "path"),
    [
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload-stage", "offload_optimizer.device"),
        *((flowing(**keys), "zenflow", path) for keys, path in FLOWS),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, "loss-scale", "fp16.hysteresis"),
        ({"fp16": {"enabled": True, "initial_scale_power": 128}}, "loss-scale", "fp16.initial_scale_power"),
        ({"fp16": {"enabled": True, "initial_scale_power": -1}}, "loss-scale", "fp16.initial_scale_power"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "loss-scale", "fp16.loss_scale_window"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "loss-scale", "fp16.min_loss_scale"),
        ({"parallel": {"dp_shard": 3}}, "mesh", "parallel.dp_shard"),
        ({"parallel": {"dp_replicate": 3}}, "mesh", "parallel.dp_replicate"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}, "mesh", "zero_optimization.mics_shard_size"),
        ({"zero_optimization": {"zero_hpz_partition_size": 3}}, "mesh", "zero_hpz_partition_size"),
        ({"parallel": {"dp_shard": 2}, "zero_optimization": {"mics_shard_size": 4}}, "mesh", "mics_shard_size"),
        ({"parallel": {"dp_shard": 2}, "zero_optimization": {"zero_hpz_partition_size": 2}}, "mesh", "hpz"),
    ],
)
def test_what_the_engine_refuses_is_a_problem_with_the_engines_code(
    source: dict[str, Any], code: str, path: str
) -> None:
    with pytest.raises(ConfigProblems) as caught:
        load(source, world_size=4)
    assert path in caught.value.problems[0].path
    assert (len(caught.value.problems), caught.value.code) == (1, code)


@pytest.mark.parametrize("switch", [{"enabled": False}, {"enabled": True, "loss_scale": 128}])
def test_values_of_the_adaptive_scale_are_ignored_where_it_is_not_used(switch: dict[str, Any]) -> None:
    keys = {"initial_scale_power": -1, "loss_scale_window": 0, "hysteresis": -1, "min_loss_scale": 0}
    assert load({"fp16": {**switch, **keys}}).fp16.loss_scale_window == 0
    if switch["enabled"]:
        assert LossScale(LossScaleSettings(loss_scale=128, **keys)).scale == 128


def test_shard_groups_that_fit_pass() -> None:
    for parallel in ({"dp_shard": 2, "dp_replicate": 2}, {"dp_shard": 4}, {"dp_replicate": 1}, {"dp_shard": "auto"}):
        assert isinstance(load({"parallel": parallel}, world_size=4), Config)


def test_keys_that_exclude_each_other_are_reported_beside_wrong_values() -> None:
    source = {"gradient_clipping": -1, "fp16": {"enabled": True, "hysteresis": 0}, "bf16": {"enabled": True}}
    assert set(problems(source)) == {"gradient_clipping", "bf16.enabled", "fp16.hysteresis"}


def test_a_wrong_value_causes_no_second_problem() -> None:
    source = {"zero_optimization": {"stage": 7, "offload_optimizer": {"device": "cpu"}}, "offload": "auto"}
    assert [each for each in problems(source) if "stage" in each] == ["zero_optimization.stage"]
    assert set(problems({"data_types": {"param_dtype": "bf16"}, "bf16": {"enabled": "maybe"}})) == {"bf16.enabled"}
    layers = {"tensor_parallel": {"partition_config": {"layer_specs": [{"partition_type": "rows"}]}}}
    assert list(problems(layers)) == ["tensor_parallel.partition_config.layer_specs[0].partition_type"]


def test_sub_group_size_is_obeyed() -> None:
    seen = examine({"zero_optimization": {"stage": 2, "sub_group_size": 5}})
    assert {each.path: each.support.kind for each in seen.keys}["zero_optimization.sub_group_size"] == "supported"
