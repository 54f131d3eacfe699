"""Parameters on a disk: the same numbers with any other offload; few of them in memory at a time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import ConfigError, OutOfMemoryError
from shoal.memory.disk_store import DiskStore
from shoal.offload.policy import Free
from tests.helpers.any_two import any_two
from tests.helpers.composing import MODEL as COMPOSED
from tests.helpers.live_storages import LiveStorages
from tests.ranks.offload.test_offload import MODEL, accessed, config, go_on, held, loaded, make_apart, train


def on_disk(settings: dict[str, Any], folder: Path, state: str = "none", **keys: Any) -> dict[str, Any]:
    """Parameters on the disk, optimizer state on ``state``."""
    zero = settings["zero_optimization"]
    zero["offload_param"] = {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0, **keys}
    zero["offload_optimizer"] = {"device": state, "nvme_path": str(folder)}
    return settings


def assert_same(plain: list[Any], away: list[Any]) -> None:
    for (losses, values), (other_losses, other_values) in zip(plain, away, strict=True):
        assert losses == other_losses
        assert list(values) == list(other_values)
        assert all(torch.equal(values[name], other_values[name]) for name in values)


@any_two(
    {
        "size": [1, 2, 3],
        "precision": ["fp32", "bf16", "fp16"],
        "state": ["none", "cpu", "nvme"],
        "is_apart": [False, True],
        "optimizer, accumulation": [("AdamW", 1), ("AdamW", 2), ("Muon", 1)],
    }
)
def test_training_with_parameters_on_a_disk_gives_the_same_bits(
    size: int,
    precision: str,
    state: str,
    is_apart: bool,
    optimizer: str,
    accumulation: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_apart(monkeypatch, is_apart=False)
    plain = run_ranks(size, train, config(3, precision, optimizer, (), accumulation))
    make_apart(monkeypatch, is_apart)
    settings = on_disk(config(3, precision, optimizer, (), accumulation), tmp_path, state)
    assert_same(plain, run_ranks(size, train, settings))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keys", [{"buffer_count": 1}, {"buffer_size": 1}, {"max_in_cpu": 50}, {"max_in_cpu": 10**9}])
def test_buffers_and_what_stays_in_memory_change_no_bit(keys: dict[str, int], tmp_path: Path) -> None:
    plain = run_ranks(2, train, config(3, "bf16", "AdamW", (), 1))
    assert_same(plain, run_ranks(2, train, on_disk(config(3, "bf16", "AdamW", (), 1), tmp_path, "nvme", **keys)))


def test_max_in_cpu_keeps_the_first_units_in_host_memory(tmp_path: Path) -> None:
    settings = on_disk(config(3, "bf16", "AdamW", (), 1), tmp_path, max_in_cpu=130)
    _, tiers = run_ranks(2, held, settings)[0]
    assert [tier.split("/")[0] for tier in tiers] == ["host", "host", "disk", "disk"]


def test_no_prefetch_and_a_disk_give_the_same_bits(tmp_path: Path) -> None:
    plain = run_ranks(2, train, config(3, "bf16", "AdamW", (), 1))
    settings = on_disk(config(3, "bf16", "AdamW", (), 1), tmp_path)
    settings["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
    assert_same(plain, run_ranks(2, train, settings))


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("state", ["none", "nvme"])
def test_a_checkpoint_goes_to_and_from_parameters_on_a_disk(
    first: bool, second: bool, state: str, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()

    def settings(is_on_disk: bool) -> dict[str, Any]:
        plain = config(3, "bf16", "AdamW", (), 1)
        return on_disk(plain, tmp_path / "disk", state) if is_on_disk else plain

    folder = str(tmp_path / "c")
    straight = run_ranks(2, train, settings(False), None, 6)
    begun = run_ranks(2, train, settings(first), folder)
    ended = run_ranks(2, go_on, settings(second), folder)
    for (losses, values), (early, _), (late, other) in zip(straight, begun, ended, strict=True):
        assert losses == early + late
        assert all(torch.equal(values[name], other[name]) for name in values)
    assert all(torch.equal(begun[0][1][n], v) for n, v in run_ranks(1, loaded, settings(second), folder)[0].items())


@pytest.mark.parametrize("state", ["none", "cpu", "nvme"])
def test_what_reads_and_writes_parameters_finds_them_on_the_disk(state: str, tmp_path: Path) -> None:
    plain = run_ranks(2, accessed, config(3, "bf16", "AdamW", (), 1))
    away = run_ranks(2, accessed, on_disk(config(3, "bf16", "AdamW", (), 1), tmp_path, state))
    for values, others in zip(plain, away, strict=True):
        assert all(torch.equal(value, other) for value, other in zip(values, others, strict=True))


def weights(settings: dict[str, Any], folder: str) -> list[torch.Tensor]:
    """Whole weights, by each way in and out of an engine."""
    engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
    values = {name: value * 2 for name, value in engine.module_state_dict().items()}
    engine.load_module_state_dict(values)
    engine.save_16bit_model(folder)
    found = list(engine.module_state_dict().values())
    engine.load_module_state_dict(
        values, custom_load_fn=lambda src, dst: [p.data.mul_(0.5) for p in dst.parameters()] and None
    )
    found += list(engine.module_state_dict().values())
    for parameter in engine.module.parameters():
        with shoal.zero.GatheredParameters(parameter, modifier_rank=0):
            parameter.data.add_(1.0)
    found += list(engine.module_state_dict().values())
    with torch.no_grad():
        found.append(engine(torch.arange(10).view(2, 5)))
    model = engine.module
    engine.destroy()
    return [*found, *(parameter.detach().clone() for parameter in model.parameters())]


def test_whole_weights_go_in_and_out_of_a_disk(tmp_path: Path) -> None:
    plain = run_ranks(2, weights, config(3, "fp32", "AdamW", (), 1), str(tmp_path / "plain"))
    (tmp_path / "disk").mkdir()
    settings = on_disk(config(3, "fp32", "AdamW", (), 1), tmp_path / "disk", "nvme")
    away = run_ranks(2, weights, settings, str(tmp_path / "away"))
    for values, others in zip(plain, away, strict=True):
        assert all(torch.equal(value, other) for value, other in zip(values, others, strict=True))
    assert (tmp_path / "plain/model.safetensors").read_bytes() == (tmp_path / "away/model.safetensors").read_bytes()


def test_the_ledger_and_the_table_show_parameters_on_the_disk(tmp_path: Path) -> None:
    found, tiers = run_ranks(2, held, on_disk(config(3, "bf16", "AdamW", (), 1), tmp_path))[0]
    plain, _ = run_ranks(2, held, config(3, "bf16", "AdamW", (), 1))[0]
    assert found["parameter", "disk"] == plain["parameter", "device"]
    assert ("parameter", "device") not in found
    assert set(tiers) == {"disk/device/device"}


def test_a_model_without_an_optimizer_runs_from_the_disk(tmp_path: Path) -> None:
    def outputs(settings: dict[str, Any]) -> list[torch.Tensor]:
        settings = {key: value for key, value in settings.items() if key != "optimizer"}
        engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
        with torch.no_grad():
            found = [engine(torch.arange(10).view(2, 5) + index) for index in range(3)]
        engine.destroy()
        return found

    plain = run_ranks(2, outputs, config(3, "bf16", "AdamW", (), 1))
    away = run_ranks(2, outputs, on_disk(config(3, "bf16", "AdamW", (), 1), tmp_path))
    assert all(
        torch.equal(a, b) for mine, theirs in zip(plain, away, strict=True) for a, b in zip(mine, theirs, strict=True)
    )
    assert list(tmp_path.iterdir()) == []


# At the start


class Deep(torch.nn.Module):
    """Eight equal layers without a bias, that initialise themselves on the meta device."""

    def __init__(self, num_layers: int = 8, width: int = 64) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(width, width, bias=False) for _ in range(num_layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_main_parameters_and_shards_go_to_the_disk_unit_by_unit_in_initialize(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks: list[int] = []
    take = DiskStore._acquire_memory

    def count(self: DiskStore, nbytes: int) -> torch.Tensor:
        buffer = take(self, nbytes)
        peaks.append(live.now() + self.host_nbytes)
        return buffer

    monkeypatch.setattr(DiskStore, "_acquire_memory", count)
    with torch.device("meta"):
        model = Deep()
    with LiveStorages() as live:
        settings = on_disk(config(3, precision, "AdamW", (), 1), tmp_path, "nvme")
        engine, *_ = shoal.initialize(model=model, config=settings)
        peak = live.peak
    layer = 64 * 64 * 4
    assert len(peaks) == 16
    # Whole state: 8 layers of parameters and main parameters. One new unit, and three buffers of each disk store.
    assert max(peak, *peaks) <= 8 * layer
    assert engine.sharded.disks.host_nbytes <= 6 * layer
    engine.destroy()
    assert list(tmp_path.iterdir()) == []


# Some here, some there


@any_two({"state": ["cpu", "nvme"], "ratio": [0.0, 0.3, 0.6], "precision": ["fp32", "bf16"], "stage": [1, 2, 3]})
def test_a_part_of_the_state_on_the_device_gives_the_same_bits(
    state: str, ratio: float, precision: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_apart(monkeypatch, is_apart=False)
    plain = run_ranks(2, train, config(stage, precision, "AdamW", (), 2))
    make_apart(monkeypatch)
    settings = config(stage, precision, "AdamW", (), 2)
    settings["zero_optimization"]["offload_optimizer"] = {"device": state, "nvme_path": str(tmp_path), "ratio": ratio}
    assert_same(plain, run_ranks(2, train, settings))
    _, tiers = run_ranks(2, held, settings)[0]
    kept = [tier for tier in tiers[:3] if tier == "device"]  # the last unit is frozen
    assert kept == tiers[: len(kept)]
    assert len(kept) == {0.0: 3, 0.3: 2, 0.6: 1}[ratio]


def test_a_checkpoint_moves_between_ratios(tmp_path: Path) -> None:
    def settings(ratio: float) -> dict[str, Any]:
        found = config(2, "bf16", "AdamW", (), 1)
        section = {"device": "nvme", "nvme_path": str(tmp_path / "disk"), "ratio": ratio}
        found["zero_optimization"]["offload_optimizer"] = section
        return found

    (tmp_path / "disk").mkdir()
    folder = str(tmp_path / "c")
    straight = run_ranks(2, train, config(2, "bf16", "AdamW", (), 1), None, 6)
    begun = run_ranks(2, train, settings(0.5), folder)
    ended = run_ranks(2, go_on, settings(0.2), folder)
    for (losses, _), (early, _), (late, _) in zip(straight, begun, ended, strict=True):
        assert losses == early + late


# By what is free


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (Free(10**9, 10**9, None), {"device"}),
        (Free(1_500, 10**9, None), {"device/host/host", "host", "host/device/device"}),
        (Free(1_000, 2_500, 10**9), {"host", "host/host/disk"}),
    ],
)
def test_auto_decides_the_same_on_all_ranks_and_gives_the_same_bits(
    free: Free,
    expected: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_apart(monkeypatch, is_apart=False)
    plain = run_ranks(2, train, config(3, "bf16", "AdamW", (), 1))
    make_apart(monkeypatch)

    def measured(device: Any, *, num_ranks_here: int, **_: Any) -> Free:
        assert num_ranks_here == 2
        more = 100 * current_world().rank  # the fullest rank counts
        return Free(free.device + more, free.host + more, free.disk)

    monkeypatch.setattr("shoal.engine.offload.measure", measured)
    settings = {**config(3, "bf16", "AdamW", (), 1), "offload": "auto"}
    if free.disk is not None:
        settings["zero_optimization"]["offload_param"] = {"nvme_path": str(tmp_path)}
    caplog.clear()
    assert_same(plain, run_ranks(2, train, settings))
    assert sum("offload auto, 4 units" in line for line in caplog.messages) == 1
    both = run_ranks(2, held, settings)
    assert both[0][1] == both[1][1]
    assert set(both[0][1]) == expected


def test_auto_measures_this_machine_and_keeps_a_small_model_on_the_device(tmp_path: Path) -> None:
    settings = {**config(3, "bf16", "AdamW", (), 1), "offload": "auto"}
    settings["zero_optimization"]["offload_optimizer"] = {"nvme_path": str(tmp_path)}
    found, tiers = run_ranks(2, held, settings)[0]
    assert set(tiers) == {"device"}
    assert not any(tier == "disk" for _, tier in found)


def test_auto_without_enough_memory_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    make_apart(monkeypatch)
    monkeypatch.setattr("shoal.engine.offload.measure", lambda *_, **__: Free(0, 100, None))

    def job() -> str:
        with pytest.raises(OutOfMemoryError, match="offload auto finds no room") as caught:
            shoal.initialize(
                model=copy.deepcopy(MODEL), config={**config(3, "bf16", "AdamW", (), 1), "offload": "auto"}
            )
        return caught.value.code

    assert run_ranks(2, job) == ["offload-auto-no-room"] * 2


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 0},
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        {"stage": 3, "offload_param": {"device": "cpu"}},
    ],
)
def test_auto_beside_what_decides_too_is_an_error(zero: dict[str, Any]) -> None:
    settings = {**config(3, "fp32", "AdamW", (), 1), "offload": "auto", "zero_optimization": zero}
    with pytest.raises(ConfigError, match="offload"):
        shoal.initialize(model=copy.deepcopy(MODEL), config=settings)


# The promise


def device_peak(num_layers: int, accumulation: int, places: dict[str, dict[str, Any]]) -> tuple[int, int]:
    """Of a third step: most bytes alive at one time beside those on the host, and the ledger's on the device."""
    settings = config(3, "bf16", "AdamW", (), accumulation)
    settings["zero_optimization"] |= {**places, "stage3_prefetch_bucket_size": LAYER}
    model = copy.deepcopy(MODELS[num_layers])
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    with LiveStorages() as live:
        engine, *_ = shoal.initialize(model=model, config=settings)
        for step in range(3):
            for micro in range(accumulation):
                if step == 2 and micro == 0:
                    live.reset_peak()
                engine.backward(engine(x).float().square().mean())
                engine.step()
        engine.sharding.wait()
        host = sum(e.nbytes for e in engine.memory_report().entries if e.tier == "host")
        host -= engine.sharded.disks.host_nbytes  # not made by an operation
        device = sum(e.nbytes for e in engine.memory_report().entries if e.tier == "device")
        found = live.peak - host, device
    engine.destroy()
    return found


LAYER = 256 * 256
MODELS = {number: Deep(number, 256) for number in (4, 16)}


@any_two({"accumulation": [1, 2], "size": [1, 2], "tier": ["cpu", "nvme"]})
def test_device_memory_is_two_units_and_their_activations_whatever_the_number_of_layers(
    accumulation: int, size: int, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_apart(monkeypatch)
    section = {"device": tier, "nvme_path": str(tmp_path)}
    places = {"offload_optimizer": section, "offload_param": {**section, "max_in_cpu": 0}}
    few = run_ranks(size, device_peak, 4, accumulation, places)[0]
    many = run_ranks(size, device_peak, 16, accumulation, places)[0]
    unit = 2 * LAYER
    # Activations of a row of 256 elements, placeholders and counts of steps: 12 layers have less than 32 KiB. Two
    # shards that a slower peer still reads may be more; 12 layers' gradients would be 6 units.
    assert many[0] - few[0] <= (32 << 10) + (unit if size > 1 else 0)
    assert many[1] == few[1]
    # Two gathered units, one's gradient, and whole ones on their way to the sum; a communicator's own scratch.
    assert many[0] <= 7.25 * unit + (2 << 20)


def without_a_block(settings: dict[str, Any]) -> list[torch.Tensor]:
    """The second block gets no gradient in the second step."""
    engine, *_ = shoal.initialize(model=copy.deepcopy(COMPOSED), config=settings)
    tokens = torch.arange(8).view(2, 4)
    for without in (None, 1, None):
        engine.backward(engine(tokens, without=without).float().square().mean())
        engine.step()
    found = list(engine.module_state_dict().values())
    engine.destroy()
    return found


@pytest.mark.parametrize("optimizer", ["Lamb", "Muon", "AdamW"])
@pytest.mark.parametrize("state", ["none", "nvme"])
def test_a_unit_that_a_step_does_not_use_stays_on_the_disk(optimizer: str, state: str, tmp_path: Path) -> None:
    settings = config(3, "bf16", optimizer, (), 1)
    settings["units"] = {"classes": ["Block"]}
    plain = run_ranks(2, without_a_block, settings)
    away = run_ranks(2, without_a_block, on_disk(settings, tmp_path, state))
    for values, others in zip(plain, away, strict=True):
        assert all(torch.equal(value, other) for value, other in zip(values, others, strict=True))
