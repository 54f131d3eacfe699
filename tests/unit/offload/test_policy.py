"""Which tier each unit gets: the file's keys, and what is free."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import OutOfMemoryError
from shoal.offload.policy import Free, Tiers, fit_to_memory, from_config
from shoal.sharding.memory_model import UnitMemory
from shoal.sharding.placement import Tier

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


def unit(name: str = "u", numel: int = 100, **more: Any) -> UnitMemory:
    """A unit of stage 3 in bf16, of ``numel`` elements a rank on two ranks."""
    sizes: dict[str, Any] = {
        "stored_numel": numel,
        "trained_numel": numel,
        "parameter_nbytes": 2 * numel,
        "gathered_nbytes": 4 * numel,
        "gradient_nbytes": 2 * numel,
        "reduce_nbytes": 4 * numel,
        "state_nbytes": 12 * numel,
        "offloaded_state_nbytes": 12 * numel,
        "transfer_nbytes": 4 * numel,
        "can_move_parameters": True,
    }
    return UnitMemory(name, **{**sizes, **more})


def states(tiers: list[Tiers] | tuple[Tiers, ...]) -> list[Tier]:
    return [each.state for each in tiers]


def parameters(tiers: list[Tiers] | tuple[Tiers, ...]) -> list[Tier]:
    return [each.parameter for each in tiers]


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (1.0, [HOST] * 4),
        (0.75, [DEVICE, HOST, HOST, HOST]),
        (0.5, [DEVICE, DEVICE, HOST, HOST]),
        (0.45, [DEVICE, DEVICE, HOST, HOST]),  # at most 1 - ratio
        (0.0, [DEVICE] * 4),
    ],
)
def test_the_first_units_state_stays_on_the_device_up_to_one_minus_the_ratio(
    ratio: float, expected: list[Tier]
) -> None:
    found = from_config([unit() for _ in range(4)], DEVICE, HOST, ratio=ratio)
    assert states(found) == expected
    assert parameters(found) == [DEVICE] * 4


def test_a_unit_that_is_too_large_to_stay_lets_later_ones_stay() -> None:
    sizes = [unit("embedding", 1000), unit("a"), unit("b"), unit("c")]
    assert states(from_config(sizes, DEVICE, DISK, ratio=0.8)) == [DISK, DEVICE, DEVICE, DISK]


def test_the_first_parameters_stay_in_host_memory_up_to_max_in_cpu() -> None:
    sizes = [unit() for _ in range(4)]
    assert parameters(from_config(sizes, DISK, HOST, max_host_numel=250)) == [HOST, HOST, DISK, DISK]
    assert parameters(from_config(sizes, DISK, HOST)) == [DISK] * 4
    assert parameters(from_config(sizes, HOST, HOST, max_host_numel=250)) == [HOST] * 4


def test_replicated_parameters_stay_on_the_device() -> None:
    whole = unit(can_move_parameters=False)
    assert from_config([whole], DISK, HOST, max_host_numel=10**9) == [Tiers(DEVICE, HOST)]


# Of four units of 100 elements: parameters 800 bytes, state 4800; kept on the device 800 for two gathered ones, 800 for
# gradients and 800 for two whole ones on their way, and 30 % of what is free.
FOUR = [unit(name) for name in "abcd"]
KEPT = 800 + 800 + 800


@pytest.mark.parametrize(
    ("free", "expected_parameters", "expected_states"),
    [
        (Free(12_000, 10_000, None), [DEVICE] * 4, [DEVICE] * 4),  # 70 % of 12,000 - 2,400 = 6,000 >= 5,600
        (Free(9_000, 10_000, None), [DEVICE] * 4, [DEVICE, DEVICE, HOST, HOST]),  # 3,900: 3,100 beside parameters
        (Free(4_300, 10_000, None), [DEVICE] * 3 + [HOST], [HOST] * 4),  # 610
        (Free(9_000, 2_700, 10_000), [DEVICE] * 4, [DEVICE, DEVICE, HOST, DISK]),  # 2,430: 800 for travelling
        (Free(3_500, 4_100, 10_000), [HOST] * 4, [HOST, DISK, DISK, DISK]),  # 3,690: 1,600 for travelling
        (Free(20_000, 0, 0), [DEVICE] * 4, [DEVICE] * 4),
        (Free(9_000, 0, 10_000), [DEVICE] * 4, [DEVICE, DEVICE, DISK, DISK]),  # a CPU: its memory is the host's
    ],
)
def test_the_device_is_fitted_first_then_the_host_then_the_disk(
    free: Free, expected_parameters: list[Tier], expected_states: list[Tier]
) -> None:
    fitted = fit_to_memory(FOUR, free)
    assert parameters(fitted.tiers) == expected_parameters
    assert states(fitted.tiers) == expected_states
    assert fitted.gathered_nbytes == 800
    assert fitted.gradient_nbytes == 1600
    assert fitted.activation_nbytes == int(0.3 * free.device)


def test_what_is_taken_is_never_more_than_what_is_free() -> None:
    for device in range(3_500, 13_000, 97):
        for host in [0, *range(2_000, 9_000, 1_013)]:
            fitted = fit_to_memory(FOUR, Free(device, host, 100_000))
            used = dict(fitted.used)
            assert used.get(DEVICE, 0) + KEPT + fitted.activation_nbytes <= device or used.get(DEVICE, 0) == 0
            assert used.get(HOST, 0) <= host


@pytest.mark.parametrize("free", [Free(3_500, 0, None), Free(9_000, 500, None), Free(9_000, 500, 1_000)])
def test_too_little_space_is_an_error_with_both_sizes(free: Free) -> None:
    with pytest.raises(OutOfMemoryError, match=r"optimizer state|parameters") as caught:
        fit_to_memory(FOUR, free)
    assert caught.value.code == "offload-auto-no-room"
    assert "are needed" in caught.value.what
    assert "left are device" in caught.value.what


def test_the_line_says_what_was_decided_and_from_what() -> None:
    text = str(fit_to_memory(FOUR, Free(9_000, 10_000, None)))
    assert "4 units: parameters of 4 on the device; optimizer state of 2 on the device, 2 on the host" in text
    assert "device 3.1 KiB of 8.8 KiB, host 3.1 KiB of 9.8 KiB" in text
    assert "2.6 KiB for activations, 800 B for two gathered units, 1.6 KiB for gradients" in text


def test_the_least_of_two_ranks_is_what_both_have() -> None:
    assert Free(5, 7, 9).least(Free(6, 3, 8)) == Free(5, 3, 8)
    assert Free(5, 7, None).least(Free(6, 3, 8)) == Free(5, 3, None)
