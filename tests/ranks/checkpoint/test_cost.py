"""What a checkpoint's files hold, and what saving and loading cost: each rank's bytes written and read, host memory."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.storage import LocalStorage
from tests.helpers import models
from tests.helpers.models import Plain
from tests.helpers.resuming import Run, resume, run_at_stage, stop
from tests.helpers.training import adamw, config


def test_safetensors_opens_the_files_and_finds_what_the_manifest_says(tmp_path: Path) -> None:
    run = replace(run_at_stage(3, 3), factory=models.OddParameters)
    saved = stop(run, tmp_path, at=1, client_state={"t": torch.arange(3)})
    folder = tmp_path / "global_step1"
    manifest = manifests.parse((folder / "manifest.json").read_bytes(), "here")
    parts: dict[str, dict[str, torch.Tensor]] = {}
    num_keys = 0
    for index, file in enumerate(manifest.files):
        assert (folder / file.name).stat().st_size == file.nbytes
        with safe_open(folder / file.name, framework="pt") as opened:
            parts[file.name] = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  # no dict
        num_keys += len(parts[file.name])
        assert sum(len(t.chunks) for t in manifest.tensors if any(c[0] == index for c in t.chunks)) > 0
    assert num_keys == sum(len(tensor.chunks) for tensor in manifest.tensors)
    for tensor in manifest.tensors:
        whole = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for file, _, start, shape in tensor.chunks:
            key = f"{tensor.kind}/{tensor.name}"
            if shape != tensor.shape:
                key += "[" + ",".join(f"{s}:{s + n}" for s, n in zip(start, shape, strict=True)) + "]"
            where = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
            whole[where] = parts[manifest.files[file].name][key]
        if tensor.kind == "model":
            assert torch.equal(whole, saved[0].main_parameters[tensor.name]), tensor.name
        elif tensor.kind == "optimizer/exp_avg":
            assert torch.equal(whole, saved[0].optimizer["exp_avg"][tensor.name]), tensor.name
    kinds = {tensor.kind for tensor in manifest.tensors}
    assert {"model", "optimizer/exp_avg", "optimizer/exp_avg_sq", "extra", "rank/2"} <= kinds


class Larger(Plain):
    def __init__(self) -> None:
        super().__init__(4, 96)


def nbytes_of(folder: Path) -> list[int]:
    manifest = manifests.parse((folder / "manifest.json").read_bytes(), "here")
    sizes = [0] * len(manifest.files)
    for tensor in manifest.tensors:
        if not tensor.kind.startswith(("rank/", "extra")):
            for file, _, _, shape in tensor.chunks:
                sizes[file] += math.prod(shape) * getattr(torch, tensor.dtype).itemsize
    return sizes


@pytest.mark.parametrize(
    ("world", "stage", "zero"),
    [(1, 0, {}), (3, 0, {}), (3, 1, {}), (4, 3, {}), (4, 3, {"mics_shard_size": 2}), (4, 1, {"mics_shard_size": 2})],
)
def test_no_rank_writes_more_than_its_share(world: int, stage: int, zero: dict[str, int], tmp_path: Path) -> None:
    """Main parameters and two moments of 4 bytes: 12 bytes a parameter in all, on any number of ranks."""
    run = Run(config(stage, bf16={"enabled": True}, zero_optimization=zero), world, Larger, adamw)
    stop(run, tmp_path, at=1)
    model = Larger()
    trained = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in model.unused.parameters())
    sizes = nbytes_of(tmp_path / "global_step1")
    assert sum(sizes) == 12 * trained + 4 * 12  # what is never used has no moments
    assert max(sizes) <= 1.02 * sum(sizes) / world
    on_disk = sum(path.stat().st_size for path in (tmp_path / "global_step1").iterdir())
    assert on_disk <= 1.03 * 12 * trained + world * 20_000  # generators' states are 5 KB a rank; headers, manifest


class Counting(LocalStorage):
    """Counts the bytes that are read of tensor files."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.nbytes = 0

    def open(self, path: str) -> Any:
        from contextlib import contextmanager

        outer, parent = self, super().open(path)

        @contextmanager
        def opened() -> Any:
            with parent as reader:
                if path.endswith(".safetensors"):
                    read_into = reader.read_into

                    def counted(offset: int, target: memoryview) -> None:
                        outer.nbytes += len(target)
                        read_into(offset, target)

                    reader.read_into = counted
                yield reader

        return opened()


def test_each_rank_reads_only_its_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice (to check, then to copy), and at most a block more at each range's ends."""
    block = 1 << 14
    monkeypatch.setattr("shoal.checkpoint.blocks.MAX_SMALL_BLOCK", block)
    run = Run(config(3, bf16={"enabled": True}), 4, Larger, adamw)
    stop(run, tmp_path, at=1)
    stores: list[Counting] = []

    def open_counting(url: Any) -> Counting:
        stores.append(Counting(Path(url)))
        return stores[-1]

    monkeypatch.setattr("shoal.engine.checkpointing.open_storage", open_counting)
    total = sum(path.stat().st_size for path in (tmp_path / "global_step1").glob("*.safetensors"))
    for world in (4, 2, 1):
        stores.clear()
        resume(replace(run, world=world), tmp_path, at=1)
        assert len(stores) == world
        for store in stores:
            assert store.nbytes < 2 * (total / world) + 80 * block
            assert store.nbytes > 1.9 * total / world * 0.9


# memory


MEASURES = """
import sys, torch, shoal

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024

def now():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024

def reset():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")

stage, folder = int(sys.argv[1]), sys.argv[2]
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(32)])
settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "log_level": "error",
            "zero_optimization": {"stage": stage}, "units": {"classes": ["Linear"]}}
engine, *_ = shoal.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings)
engine.backward(engine(torch.ones(1, 1024, dtype=torch.bfloat16)).float().sum())
engine.step()
for use in (
    lambda: torch.ones(10 << 20).sum(),  # 40 MiB: does the gauge see it?
    lambda: engine.save_checkpoint(folder, tag="t"),
    lambda: engine.load_checkpoint(folder, tag="t"),
):
    reset()
    before = now()
    use()
    print(f"{peak() - before:.1f}")
engine.destroy()
"""


@pytest.mark.parametrize("stage", [1, 3])
def test_saving_and_loading_take_little_host_memory(stage: int, tmp_path: Path) -> None:
    """33.6 M parameters: 403 MB of state. One unit's bucket in bf16 is 2.1 MB, one unit's state 12.6 MB."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURES, str(stage), str(tmp_path)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed leaves the process at once
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    gauge, saving, loading = map(float, done.stdout.split())
    assert 39 < gauge < 48
    assert saving < 16, f"{saving} MiB"
    assert loading < 16, f"{loading} MiB"
