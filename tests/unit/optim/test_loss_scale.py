"""The loss scale: its sequences are DeepSpeed 0.19.8's (its DynamicLossScaler was run for the literals below)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.optim.loss_scale import Event, LossScale, LossScaleSettings


def scales(pattern: str, **settings: float) -> list[float]:
    """The scale after each step of ``pattern``: ``x`` overflows, ``.`` does not."""
    scale = LossScale(LossScaleSettings(**settings))  # type: ignore[arg-type]
    found = []
    for step in pattern:
        scale.update(step == "x")
        found.append(scale.scale)
    return found


@pytest.mark.parametrize(
    ("pattern", "settings", "expected"),
    [
        (
            "xx..xx...x....xx",
            {
                "initial_scale_power": 4,
                "loss_scale_window": 2,
                "hysteresis": 2,
                "consecutive_hysteresis": False,
                "min_loss_scale": 1,
            },
            [16.0, 8.0, 8.0, 8.0, 4.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 4.0],
        ),
        (
            "x.x.xx.x..xxxxxx....",
            {
                "initial_scale_power": 5,
                "loss_scale_window": 3,
                "hysteresis": 2,
                "consecutive_hysteresis": True,
                "min_loss_scale": 1,
            },
            [
                32.0,
                32.0,
                32.0,
                32.0,
                32.0,
                16.0,
                16.0,
                16.0,
                16.0,
                16.0,
                16.0,
                8.0,
                4.0,
                2.0,
                1.0,
                1.0,
                1.0,
                1.0,
                1.0,
                2.0,
            ],
        ),
        (
            "x.x.xx.x..xxxx......",
            {
                "initial_scale_power": 5,
                "loss_scale_window": 3,
                "hysteresis": 3,
                "consecutive_hysteresis": False,
                "min_loss_scale": 4,
            },
            [32.0, 32.0, 32.0, 32.0, 16.0, 8.0, 8.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0],
        ),
        (
            ".....xxxx...xx",
            {
                "initial_scale_power": 16,
                "loss_scale_window": 1,
                "hysteresis": 1,
                "consecutive_hysteresis": False,
                "min_loss_scale": 1,
            },
            [
                65536.0,
                131072.0,
                262144.0,
                524288.0,
                1048576.0,
                524288.0,
                262144.0,
                131072.0,
                65536.0,
                65536.0,
                131072.0,
                262144.0,
                131072.0,
                65536.0,
            ],
        ),
    ],
)
def test_the_sequence_of_scales_is_deepspeeds(pattern: str, settings: dict[str, float], expected: list[float]) -> None:
    assert scales(pattern, **settings) == expected


def test_the_defaults_are_deepspeeds() -> None:
    settings = LossScaleSettings()
    assert LossScale(settings).scale == 65536.0
    assert (settings.loss_scale_window, settings.hysteresis, settings.min_loss_scale) == (1000, 2, 1.0)
    assert not settings.consecutive_hysteresis


def test_the_first_growth_comes_after_the_window_and_one_more_step() -> None:
    scale = LossScale()
    events = [scale.update(overflow=False) for _ in range(1001)]
    assert set(events[:1000]) == {Event.KEPT}
    assert events[1000] is Event.GROWN
    assert scale.scale == 131072.0


def test_each_event_is_reported() -> None:
    scale = LossScale(LossScaleSettings(initial_scale_power=1, loss_scale_window=2, hysteresis=2))
    events = [scale.update(step == "x") for step in "xxx...xxx"]
    assert [event.value for event in events] == [
        "tolerated", "halved", "at_floor", "kept", "kept", "grown", "tolerated", "halved", "at_floor",
    ]  # fmt: skip
    assert scale.scale == 1.0


def test_a_static_scale_never_changes() -> None:
    scale = LossScale(LossScaleSettings(loss_scale=128.0))
    assert [scale.update(overflow) for overflow in (True, True, False)] == [
        Event.TOLERATED,
        Event.TOLERATED,
        Event.KEPT,
    ]
    assert scale.scale == 128.0


@given(
    before=st.lists(st.booleans(), max_size=40),
    after=st.lists(st.booleans(), max_size=40),
    window=st.integers(1, 6),
    hysteresis=st.integers(1, 3),
    consecutive=st.booleans(),
)
def test_a_restored_scale_goes_on_as_if_it_had_not_stopped(
    before: list[bool], after: list[bool], window: int, hysteresis: int, consecutive: bool
) -> None:
    settings = LossScaleSettings(
        initial_scale_power=6, loss_scale_window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive
    )
    straight, resumed = LossScale(settings), LossScale(settings)
    for overflow in before:
        straight.update(overflow)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    for overflow in after:
        assert straight.update(overflow) is resumed.update(overflow)
        assert straight.scale == resumed.scale


def test_loading_keeps_a_static_scale_of_the_settings() -> None:
    scale = LossScale(LossScaleSettings(loss_scale=8.0))
    scale.load_state_dict(LossScale().state_dict())
    assert scale.scale == 8.0


def test_all_wrong_settings_are_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        LossScaleSettings(initial_scale_power=200, loss_scale_window=0, hysteresis=0, min_loss_scale=0)
    for name in ("initial_scale_power is 200", "loss_scale_window is 0", "hysteresis is 0", "min_loss_scale is 0"):
        assert name in str(caught.value)
    with pytest.raises(ConfigError, match="loss_scale is -1"):
        LossScaleSettings(loss_scale=-1)
