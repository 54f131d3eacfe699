"""Machines as data: each is whole, a name may carry a network, and a wrong file says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from shoal.errors import UsageError
from shoal.simulation import machines
from shoal.simulation.machines import machine_names, machine_of, nearest_machine

GIB = 2**30


def test_the_machines_are_those_that_are_documented_and_have_plausible_figures() -> None:
    expected = "v100-16g v100-32g a100-40g a100-80g h100 h200 b200 gb200 mi300x mi325x l40s rtx4090"
    assert machine_names() == expected.split()
    for name in machine_names():
        machine = machine_of(name)
        assert 15 * GIB < (machine.gpu_nbytes or 0) < 257 * GIB
        fp32, fp16 = machine.flops(torch.float32), machine.flops(torch.float16)
        assert fp32 < fp16 <= machine.flops(torch.bfloat16) or name.startswith("v100")
        assert machine.links.network <= machine.links.local < machine.memory_bandwidth


def test_a_dtype_without_a_figure_has_that_of_fp32() -> None:
    machine = machine_of("v100-32g")
    assert machine.flops(torch.bfloat16) == machine.flops(torch.float32) == 0.75 * 15.7e12


@pytest.mark.parametrize(
    ("network", "per_gpu"), [("10gbe", 1.25e9 / 8), ("400g", 50e9 / 8), ("8x400g", 50e9), ("4X100Gb", 50e9 / 8)]
)
def test_a_name_may_say_another_network(network: str, per_gpu: float) -> None:
    machine = machine_of(f"a100-80g@{network}")
    assert machine.links.network == pytest.approx(0.9 * per_gpu)
    assert machine.links.local == machine_of("a100-80g").links.local


def test_a_file_with_the_figures_of_one_machine_is_read(tmp_path: Path) -> None:
    figures = yaml.safe_load(Path(machines._FILE).read_text())["h100"]
    figures["gpu"]["memory"] = 10 * GIB
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(figures))
    assert machine_of(file).gpu_nbytes == machine_of(str(file)).gpu_nbytes == 10 * GIB
    assert machine_of(file).name == "small"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda figures: figures["gpu"].pop("memory"), r"gpu\.memory: Field required"),
        (lambda figures: figures["node"]["link"].update(peak=-1), r"node\.link\.peak: .*greater than 0"),
        (lambda figures: figures["node"].update(gpu=8), r"node\.gpu: Extra inputs"),
        (lambda figures: figures["gpu"]["flops"].pop("float32"), r"flops\.float32: Field required"),
        (lambda figures: figures["gpu"]["flops"].update(half2={"peak": 1, "reached": 1}), r"'half2' is no dtype"),
    ],
)
def test_a_figure_that_is_missing_or_wrong_is_named(tmp_path: Path, change: object, message: str) -> None:
    figures = yaml.safe_load(Path(machines._FILE).read_text())["h100"]
    change(figures)  # type: ignore[operator]
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump(figures))
    with pytest.raises(UsageError, match=message):
        machine_of(file)


@pytest.mark.parametrize(("name", "message"), [("h300", "no figures"), ("h100@fast", "names no network")])
def test_an_unknown_name_or_network_is_an_error(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        machine_of(name)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        machine_of(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("device", "gib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "h100"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80g"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        ("NVIDIA T4", 15, None),
    ],
)
def test_a_gpu_is_found_by_its_name_and_memory(device: str, gib: int, name: str | None) -> None:
    assert nearest_machine(device, gib << 30) == name
