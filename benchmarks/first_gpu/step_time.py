"""A training step of GPT-2 XL's shape (1.5 billion parameters, bf16), Shoal beside its peers on one GPU.

Each runs alone in a process of its own: plain PyTorch, DDP, FSDP2, DeepSpeed where it is installed, and Shoal's stages,
also with states on the host. Tokens per second, model FLOPs utilization, the peak of the allocator, and the loss, which
has to be that of plain PyTorch.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable
from statistics import median

import torch

from benchmarks.arena import ContenderError, Team, reason
from benchmarks.contenders import Task
from benchmarks.first_gpu.common import Finding, Setting, main
from benchmarks.first_gpu.predict import ROWS, SHAPE
from shoal.text import format_bytes

STEPS = 8
CONTENDERS = [
    "plain",
    "shoal-3",
    "fsdp2-stage3",
    "shoal-2",
    "ddp",
    "shoal-1",
    "shoal-0",
    "deepspeed-3",
    "deepspeed-2",
    "shoal-host",
    "deepspeed-host",
    "fsdp2-host",
    "deepspeed-1",
    "fsdp2-stage2",
]
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # bf16 without sparsity, by the GPU's name
RESERVE_SECONDS = 30.0  # a contender is begun where more than this is left


def check(setting: Setting) -> Iterable[Finding]:
    end = time.monotonic() + setting.seconds - RESERVE_SECONDS
    loss = None
    for name in setting.some(CONTENDERS[:2]) if setting.is_tiny else CONTENDERS:
        if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
            yield Finding(name, None, "not installed here")
            continue
        if time.monotonic() > end:
            yield Finding(name, None, "no time was left")
            continue
        try:
            finding, its_loss = _measure(name, setting, end + RESERVE_SECONDS, loss)
        except ContenderError as error:
            # A peer that does not run here says nothing about Shoal.
            yield Finding(name, False if name.startswith("shoal") else None, reason(str(error))[:200])
            continue
        loss = its_loss if loss is None else loss
        yield finding


def _measure(name: str, setting: Setting, deadline: float, right: float | None) -> tuple[Finding, float]:
    task = _task(setting)
    team = Team(name, task, 1, deadline)
    try:
        team.wait_until_ready()
        answer = team.run(1 if setting.is_tiny else STEPS)[0][0]
    finally:
        team.close()
    seconds, loss = median(answer["seconds"]), answer["loss"]
    tokens = task.sequences * task.sequence_length
    text = f"{1e3 * seconds:.1f} ms, {tokens / seconds:,.0f} tokens/s, peak {format_bytes(answer['peak_bytes'])}"
    if setting.is_gpu and (peak := _peak_flops()) is not None:
        text += f", MFU {100 * SHAPE.flops_per_token() * tokens / seconds / peak:.1f} %"
    is_near = right is None or abs(loss - right) <= 2e-2 * abs(right)
    expected = f"loss {right:.3f}" if right is not None else ""
    key = name.replace("shoal-host", "shoal-2-optimizer") if name.startswith("shoal") else ""
    return Finding(name, is_near, f"{text}, loss {loss:.3f}", expected, key, 1e3 * seconds), loss


def _task(setting: Setting) -> Task:
    if setting.is_tiny:
        return Task(num_layers=1, hidden_size=32, num_heads=2, vocab_size=64, sequence_length=16)
    return Task(
        sequences=ROWS,
        num_layers=SHAPE.num_layers,
        hidden_size=SHAPE.hidden_size,
        num_heads=SHAPE.num_heads,
        vocab_size=SHAPE.vocab_size,
        sequence_length=SHAPE.sequence_length,
        device="cuda",
        threads=8,
    )


def _peak_flops() -> float | None:
    name = torch.cuda.get_device_name()
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


if __name__ == "__main__":
    main(check, __doc__)
