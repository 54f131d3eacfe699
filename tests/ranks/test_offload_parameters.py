"""Parameters that rest on a disk: the same numbers, whatever else rests where; few of them in memory at a time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from tests.ranks.test_offload import MODEL, accessed, config, go_on, held, loaded, make_apart, train


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


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("state", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize(("optimizer", "accumulation"), [("AdamW", 1), ("AdamW", 2), ("Muon", 1)])
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
