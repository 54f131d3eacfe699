"""Learning rate schedules: their values are DeepSpeed 0.19.8's (its schedules were run for the literals below)."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch

from shoal.config import Config, ConfigProblems, load
from shoal.errors import ConfigError, OptimizerError
from shoal.optim.schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_schedule,
)


def two_groups(kind: Any = torch.optim.Adam, **settings: Any) -> torch.optim.Optimizer:
    """An optimizer with groups at rates 0.5 and 0.25."""
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    return kind([{"params": [params[0]], "lr": 0.5}, {"params": [params[1]], "lr": 0.25}], **settings)


# name, parameters, the rates of both groups after 0, 1, 2, ... steps, the first group's first beta (OneCycle)
# fmt: off
CASES: list[Any] = [
    (
        "WarmupLR", {},
        [0.0, 0.0, 0.050171665944, 0.0795202091199, 0.100343331888, 0.116495000723, 0.129691875064, 0.140849673336,
         0.150514997832, 0.15904041824, 0.166666666667, 0.173565447526, 0.179863541008, 0.185657225384, 0.19102133928,
         0.196015209843],
        [0.0, 0.0, 0.025085832972, 0.03976010456, 0.050171665944, 0.0582475003613, 0.064845937532, 0.0704248366679,
         0.075257498916, 0.0795202091199, 0.0833333333333, 0.0867827237632, 0.089931770504, 0.0928286126922,
         0.0955106696399, 0.0980076049213],
        None,
    ),
    (
        "WarmupLR", {"warmup_num_steps": 2},
        [0.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
        [0.0, 0.0, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25],
        None,
    ),
    (
        "WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"},
        [0.0, 0.0, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
        [0.0, 0.0, 0.125, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25],
        None,
    ),
    (
        "WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 7, "warmup_type": "linear"},
        [0.01, 0.01, 0.0228571428571, 0.0357142857143, 0.0485714285714, 0.0614285714286, 0.0742857142857,
         0.0871428571429, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
        [0.01, 0.01, 0.0228571428571, 0.0357142857143, 0.0485714285714, 0.0614285714286, 0.0742857142857,
         0.0871428571429, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
        None,
    ),
    (
        "WarmupLR", {"warmup_min_lr": [0.01, 0.02], "warmup_max_lr": [0.1, 0.2], "warmup_num_steps": 5},
        [0.01, 0.01, 0.0487608902266, 0.0714345575037, 0.0875217804532, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1,
         0.1, 0.1],
        [0.02, 0.02, 0.0975217804532, 0.142869115007, 0.175043560906, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2,
         0.2, 0.2],
        None,
    ),
    (
        "WarmupDecayLR", {"total_num_steps": 20, "warmup_num_steps": 5},
        [0.0, 0.0, 0.000430676558073, 0.000682606194486, 0.000861353116147, 0.001, 0.001, 0.000933333333333,
         0.000866666666667, 0.0008, 0.000733333333333, 0.000666666666667, 0.0006, 0.000533333333333, 0.000466666666667,
         0.0004],
        [0.0, 0.0, 0.000430676558073, 0.000682606194486, 0.000861353116147, 0.001, 0.001, 0.000933333333333,
         0.000866666666667, 0.0008, 0.000733333333333, 0.000666666666667, 0.0006, 0.000533333333333, 0.000466666666667,
         0.0004],
        None,
    ),
    (
        "WarmupDecayLR", {"total_num_steps": 3, "warmup_num_steps": 5, "warmup_min_lr": 0.0001, "warmup_max_lr": 0.3,
         "warmup_type": "linear"},
        [0.0001, 0.0001, 0.06008, 0.12006, 0.18004, 0.24002, 0.0001, 0.0001, 0.0001, 0.0001, 0.0001, 0.0001, 0.0001,
         0.0001, 0.0001, 0.0001],
        [0.0001, 0.0001, 0.06008, 0.12006, 0.18004, 0.24002, 0.0001, 0.0001, 0.0001, 0.0001, 0.0001, 0.0001, 0.0001,
         0.0001, 0.0001, 0.0001],
        None,
    ),
    (
        "WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 5},
        [0.0, 0.0, 0.215338279037, 0.341303097243, 0.430676558073, 0.5, 0.494537446493, 0.478388525774,
         0.452259023169, 0.417290923325, 0.3750125, 0.327271523169, 0.276154502605, 0.223895497395, 0.172778476831,
         0.1250375],
        [0.0, 0.0, 0.107669139518, 0.170651548621, 0.215338279037, 0.25, 0.247268723247, 0.239194262887,
         0.226129511584, 0.208645461662, 0.18750625, 0.163635761584, 0.138077251303, 0.111947748697, 0.0863892384156,
         0.06251875],
        None,
    ),
    (
        "WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 5, "warmup_min_ratio": 0.1, "cos_min_ratio":
         0.2, "warmup_type": "linear"},
        [0.0, 0.05, 0.14, 0.23, 0.32, 0.41, 0.495629520147, 0.482709091529, 0.461803398875, 0.433826121272, 0.4,
         0.361803398875, 0.320905692654, 0.279094307346, 0.238196601125, 0.2],
        [0.0, 0.025, 0.07, 0.115, 0.16, 0.205, 0.247814760073, 0.241354545764, 0.230901699437, 0.216913060636, 0.2,
         0.180901699437, 0.160452846327, 0.139547153673, 0.119098300563, 0.1],
        None,
    ),
    (
        "LRRangeTest", {},
        [0.001, 0.0010005, 0.001001, 0.0010015, 0.001002, 0.0010025, 0.001003, 0.0010035, 0.001004, 0.0010045,
         0.001005, 0.0010055, 0.001006, 0.0010065, 0.001007, 0.0010075],
        [0.001, 0.0010005, 0.001001, 0.0010015, 0.001002, 0.0010025, 0.001003, 0.0010035, 0.001004, 0.0010045,
         0.001005, 0.0010055, 0.001006, 0.0010065, 0.001007, 0.0010075],
        None,
    ),
    (
        "LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0, "lr_range_test_staircase":
         True},
        [0.001, 0.001, 0.001, 0.003, 0.003, 0.003, 0.005, 0.005, 0.005, 0.007, 0.007, 0.007, 0.009, 0.009, 0.009,
         0.011],
        [0.001, 0.001, 0.001, 0.003, 0.003, 0.003, 0.005, 0.005, 0.005, 0.007, 0.007, 0.007, 0.009, 0.009, 0.009,
         0.011],
        None,
    ),
    (
        "LRRangeTest", {"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_step_size": 3},
        [0.1, 0.133333333333, 0.166666666667, 0.2, 0.233333333333, 0.266666666667, 0.3, 0.333333333333,
         0.366666666667, 0.4, 0.433333333333, 0.466666666667, 0.5, 0.533333333333, 0.566666666667, 0.6],
        [0.2, 0.266666666667, 0.333333333333, 0.4, 0.466666666667, 0.533333333333, 0.6, 0.666666666667,
         0.733333333333, 0.8, 0.866666666667, 0.933333333333, 1.0, 1.06666666667, 1.13333333333, 1.2],
        None,
    ),
    (
        "OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4},
        [0.1, 0.325, 0.55, 0.775, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
        [0.1, 0.325, 0.55, 0.775, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
        [0.8, 0.875, 0.85, 0.825, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        "OneCycle", {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": 1.0, "cycle_first_step_size": 5,
         "cycle_second_step_size": 7, "decay_step_size": 3, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01},
        [0.1, 0.28, 0.46, 0.64, 0.82, 1.0, 0.871428571429, 0.742857142857, 0.614285714286, 0.485714285714,
         0.357142857143, 0.228571428571, 0.1, 0.0857142857143, 0.075, 0.0666666666667, 0.06, 0.0545454545455],
        [0.2, 0.36, 0.52, 0.68, 0.84, 1.0, 0.885714285714, 0.771428571429, 0.657142857143, 0.542857142857,
         0.428571428571, 0.314285714286, 0.2, 0.171428571429, 0.15, 0.133333333333, 0.12, 0.109090909091],
        [0.8, 0.88, 0.86, 0.84, 0.82, 0.8, 0.814285714286, 0.828571428571, 0.842857142857, 0.857142857143,
         0.871428571429, 0.885714285714, 0.9, 0.903, 0.906, 0.909, 0.912, 0.915],
    ),
    (
        "OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 6, "cycle_second_step_size":
         9, "cycle_first_stair_count": 3, "decay_step_size": 2, "decay_lr_rate": 0.5},
        [0.1, 0.1, 0.4, 0.4, 0.7, 0.7, 1.0, 0.7, 0.7, 0.7, 0.4, 0.4, 0.4, 0.1, 0.1, 0.1, 0.08, 0.0666666666667],
        [0.1, 0.1, 0.4, 0.4, 0.7, 0.7, 1.0, 0.7, 0.7, 0.7, 0.4, 0.4, 0.4, 0.1, 0.1, 0.1, 0.08, 0.0666666666667],
        [0.8, 0.9, 0.866666666667, 0.866666666667, 0.833333333333, 0.833333333333, 0.8, 0.833333333333,
         0.833333333333, 0.833333333333, 0.866666666667, 0.866666666667, 0.866666666667, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        "OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 6, "cycle_second_step_size":
         0, "cycle_momentum": False},
        [0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
        [0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
        None,
    ),
]
# fmt: on


@pytest.mark.filterwarnings("ignore:.*total_num_steps 3 is less")
@pytest.mark.parametrize(("name", "params", "first", "second", "momenta"), CASES)
def test_rates_are_deepspeeds(
    name: str, params: dict[str, Any], first: list[float], second: list[float], momenta: list[float] | None
) -> None:
    optimizer = two_groups()
    schedule = build_schedule(name, params, optimizer)
    for step in range(len(first)):
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([first[step], second[step]], rel=1e-10, abs=1e-14)
        if momenta is not None:
            assert optimizer.param_groups[0]["betas"] == (pytest.approx(momenta[step], rel=1e-10), 0.99)
        schedule.step()


def test_two_warmup_steps_give_zero_then_the_full_rate_twice() -> None:
    optimizer = two_groups()
    schedule = WarmupLR(optimizer, warmup_num_steps=2)
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    # the first update and the second run at 0: the rate at construction, then warmup(0)
    assert rates == [0.0, 0.0, 0.5]
    fresh = two_groups()
    schedule = WarmupLR(fresh, warmup_num_steps=2)
    seen = []
    for _ in range(3):
        schedule.step()
        seen.append(schedule.get_last_lr()[0])
    assert seen == [0.0, 0.5, 0.5]


@pytest.mark.parametrize("num_steps", [1, 0, -3, 2.0])
def test_fewer_than_two_warmup_steps_count_as_two(num_steps: Any) -> None:
    optimizer = two_groups()
    schedule = WarmupLR(optimizer, warmup_num_steps=num_steps)
    schedule.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5, 0.25]


def test_the_last_rate_is_known_before_the_first_step_where_deepspeed_knows_it() -> None:
    assert WarmupLR(two_groups()).get_last_lr() == [0.0, 0.0]
    assert LRRangeTest(two_groups()).get_last_lr() == [0.001, 0.001]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda: WarmupLR(two_groups(), last_batch_iteration=3),
        lambda: OneCycle(two_groups(), 0.1, 1.0),
    ],
)
def test_asking_for_a_rate_too_early_is_the_assertion_error_that_transformers_expects(schedule: Any) -> None:
    with pytest.raises(AssertionError, match="need to call step"):
        schedule().get_last_lr()


MAKERS = [
    lambda optimizer: WarmupLR(optimizer, warmup_num_steps=5),
    lambda optimizer: WarmupDecayLR(optimizer, 12, warmup_num_steps=5),
    lambda optimizer: WarmupCosineLR(optimizer, 12, warmup_num_steps=5),
    lambda optimizer: OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=4, decay_step_size=2, decay_lr_rate=0.5),
    lambda optimizer: LRRangeTest(optimizer, lr_range_test_step_size=3),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("stop", [0, 1, 4, 9])
def test_a_resumed_run_has_the_rates_of_one_that_did_not_stop(make: Any, stop: int) -> None:
    optimizer, later = two_groups(), two_groups()
    straight, resumed = make(optimizer), make(later)
    for _ in range(stop):
        straight.step()
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    for _ in range(8):
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in later.param_groups]
        straight.step()
        resumed.step()
        assert straight.get_last_lr() == resumed.get_last_lr()


def test_a_state_of_deepspeeds_loads() -> None:
    schedule = WarmupLR(two_groups(), warmup_num_steps=5)
    schedule.load_state_dict({"last_batch_iteration": 100})
    assert schedule.get_last_lr() == [0.5, 0.25]


def test_a_step_to_a_given_iteration_goes_there() -> None:
    schedule = WarmupLR(two_groups(), warmup_num_steps=10, warmup_type="linear")
    schedule.step(4)
    assert schedule.get_last_lr() == pytest.approx([0.2, 0.1])
    schedule.step()
    assert schedule.last_batch_iteration == 5


def test_rates_kept_in_tensors_are_written_in_place() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.5))
    rate = optimizer.param_groups[0]["lr"]
    schedule = WarmupCosineLR(optimizer, 10, warmup_num_steps=2)
    schedule.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5
    assert schedule.get_last_lr() == [0.5]


def test_the_optimizer_inside_a_wrapper_is_found() -> None:
    class Wrapper:
        optimizer = two_groups()

    assert WarmupLR(Wrapper()).optimizer is Wrapper.optimizer
    with pytest.raises(OptimizerError, match="got int"):
        WarmupLR(3)


def test_one_cycle_cycles_the_momentum_of_sgd() -> None:
    optimizer = two_groups(torch.optim.SGD, momentum=0.5)
    schedule = OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=4)
    schedule.step()
    # i = 0 is a quarter of the way up: 0.9 - 0.1 / 4
    assert [group["momentum"] for group in optimizer.param_groups] == pytest.approx([0.875, 0.875])
    assert "betas" not in optimizer.param_groups[0]


def test_one_cycle_says_the_betas_of_groups_that_have_them() -> None:
    schedule = OneCycle(two_groups(torch.optim.Adam), 0.1, 1.0, cycle_first_step_size=4)
    schedule.step()
    assert schedule.get_mom() == [(pytest.approx(0.875), 0.99)] * 2


def test_one_cycle_without_any_momentum_says_so() -> None:
    with pytest.warns(UserWarning, match="neither betas nor a momentum"):
        schedule = OneCycle(two_groups(torch.optim.SGD), 0.1, 1.0)
    assert schedule.get_mom() is None


def test_a_run_shorter_than_its_warmup_says_so() -> None:
    with pytest.warns(UserWarning, match="total_num_steps 3 is less than warmup_num_steps 5"):
        WarmupDecayLR(two_groups(), 3, warmup_num_steps=5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: WarmupLR(o, warmup_type="exp"), "warmup_type is 'exp'"),  # type: ignore[arg-type]
        (lambda o: WarmupLR(o, warmup_num_steps=1.5), "warmup_num_steps is 1.5"),  # type: ignore[arg-type]
        (lambda o: WarmupLR(o, warmup_min_lr=[0.0, 0.0, 0.0]), "3 values, but the optimizer has 2"),
        (lambda o: LRRangeTest(o, lr_range_test_step_size=0), "lr_range_test_step_size is 0"),
        (lambda o: OneCycle(o, 0.1, 1.0, cycle_first_step_size=0), "cycle_first_step_size is 0"),
        (lambda o: OneCycle(o, 0.1, 1.0, cycle_second_step_size=-1), "cycle_second_step_size is -1"),
    ],
)
def test_a_wrong_number_is_named_with_its_value(make: Any, message: str) -> None:
    with pytest.raises(OptimizerError, match=message):
        make(two_groups())


def test_the_valid_names_are_deepspeeds() -> None:
    assert VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


def test_any_torch_schedule_is_built_by_name() -> None:
    optimizer = two_groups()
    schedule = build_schedule("cosineannealinglr", {"T_max": 10}, optimizer)
    assert type(schedule) is torch.optim.lr_scheduler.CosineAnnealingLR
    assert schedule.optimizer is optimizer


def load_schedule(name: str, **params: Any) -> Config:
    return load({"scheduler": {"type": name, "params": params}})


def test_all_wrong_parameters_are_one_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigProblems) as caught:
        load_schedule("WarmupDecayLR", warmup_max_rl=1.0, speed=2)
    text = str(caught.value)
    assert "warmup_max_rl: no such key in scheduler.params. -> did you mean 'warmup_max_lr'" in text
    assert "speed: no such key" in text
    assert "total_num_steps: missing" in text
    with pytest.raises(ConfigError, match=r'scheduler\.params\.warmup_num_steps: "auto" cannot be derived'):
        load_schedule("WarmupLR", warmup_min_lr=0.0, warmup_num_steps="auto").params_of("scheduler")
    with pytest.raises(OptimizerError, match=r"scheduler\.params of 'WarmupLR'"):
        build_schedule("WarmupLR", {"warmup_max_rl": 1.0}, two_groups())


def test_an_unknown_schedule_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigProblems, match=r"""no schedule "WarmupRL".\n.*\n  do: did you mean 'WarmupLR'"""):
        load_schedule("WarmupRL")
    with pytest.raises(OptimizerError, match="there is no schedule 'WarmupRL'"):
        build_schedule("WarmupRL", {}, two_groups())


@pytest.mark.parametrize("name", ["LambdaLR", "ReduceLROnPlateau", "SequentialLR"])
def test_a_schedule_that_json_cannot_describe_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigProblems, match="create it in Python and pass it as lr_scheduler="):
        load_schedule(name)


def test_a_mistake_inside_torch_is_reported_with_the_schedule() -> None:
    with pytest.raises(OptimizerError, match=r"scheduler.params of 'OneCycleLR'"):
        build_schedule("OneCycleLR", {"max_lr": 1.0, "total_steps": -1}, two_groups())


def test_only_rank_0_of_a_launched_job_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launcher's variables: a schedule may be made before the ranks have met."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    made = partial(WarmupDecayLR, torch.optim.SGD([torch.zeros(1)], lr=1.0), total_num_steps=1, warmup_num_steps=5)
    monkeypatch.setenv("RANK", "1")
    made()  # warnings are errors in tests
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match="no steps are left"):
        made()
