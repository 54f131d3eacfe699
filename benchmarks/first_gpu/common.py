"""What the checks share: findings, the device, a model to train, and how often the device is made to wait.

A check is a function that yields findings. ``main`` runs it and writes each one at once, so that those before a crash
or a time limit are kept. On a CPU everything runs but the calls of ``torch.cuda``, in small sizes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import shoal
from shoal.models.gpt import GPT, GPTConfig

T = TypeVar("T")
EPS = 1e-5  # of AdamW: large enough that the rounding of a tiny gradient is not an update of the other sign


@dataclass(frozen=True)
class Finding:
    """One line of the page.

    Args:
        held: None: measured, or skipped, without a claim.
        key: of the prediction that belongs to ``value``; empty: none does.
        value: what was measured, in the unit of the prediction.
    """

    what: str
    held: bool | None
    measured: str = ""
    expected: str = ""
    key: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Setting:
    """Where a check runs. ``is_tiny``: sizes that a CPU takes in seconds."""

    device: torch.device
    is_tiny: bool
    seconds: float  # after which the process is ended

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def some(self, cases: Sequence[T]) -> Sequence[T]:
        """All of them; in small sizes the last two."""
        return cases[-2:] if self.is_tiny else cases

    def sleep(self, cycles: int) -> None:
        """Make the current stream wait: two million cycles are about 1 ms."""
        if self.is_gpu:
            torch.cuda._sleep(cycles)

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.is_gpu else 0

    @contextmanager
    def synchronizations(self, mode: str) -> Iterator[None]:
        """Inside the block a call that makes the host wait is allowed ("default") or raises ("error")."""
        if not self.is_gpu:
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def milliseconds(self, run: Callable[[], Any], times: int = 10) -> float:
        """The mean of some calls, after two that do not count."""
        if self.is_tiny:
            times = 1
        for _ in range(2):
            run()
        if not self.is_gpu:
            return 0.0
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / times


Check = Callable[[Setting], Iterable[Finding]]


def attempt(what: str, run: Callable[[], Finding]) -> Finding:
    """What ``run`` finds; an exception is a finding that did not hold."""
    try:
        return run()
    except Exception as error:
        traceback.print_exc()
        return Finding(what, False, f"{type(error).__name__}: {error}".splitlines()[0][:300])


def main(check: Check, description: str | None, arguments: list[str] | None = None) -> None:
    """The program of one check: run it, and write its findings as JSON, one a line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--out", type=Path, help="write findings here too")
    given = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    device = torch.device("cuda", 0) if given.device == "cuda" else torch.device("cpu")
    setting = Setting(device, given.device == "cpu", given.seconds)
    out = given.out.open("w", buffering=1) if given.out else None
    for finding in check(setting):
        print(shown(finding), flush=True)
        if out is not None:
            out.write(json.dumps(asdict(finding)) + "\n")


def shown(finding: Finding) -> str:
    verdict = {True: "held", False: "DID NOT HOLD", None: "-"}[finding.held]
    return f"{verdict}: {finding.what}: {finding.measured}" + (
        f" (expected {finding.expected})" * bool(finding.expected)
    )


# a model and its training

SMALL = GPTConfig(vocab_size=512, sequence_length=128, num_layers=4, hidden_size=256, num_heads=4, tied=False)
TINY = GPTConfig(vocab_size=64, sequence_length=16, num_layers=2, hidden_size=32, num_heads=2, tied=False)


def model(setting: Setting, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(TINY if setting.is_tiny else SMALL)


def config(stage: int, *places: str, precision: str = "bf16", accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """A config of Shoal's. ``places``: of ``optimizer``, ``param``: what is stored in host memory."""
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero |= {f"offload_{place}": {"device": "cpu", "pin_memory": True} for place in places}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "eps": EPS}},
        "gradient_clipping": 0.0,
        "units": {"names": ["blocks.*"]},
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": zero,
        **more,
    }


def tokens(setting: Setting, index: int, shape: GPTConfig | None = None, rows: int = 2) -> torch.Tensor:
    """Micro-batch ``index``; shape [rows, sequence length]."""
    shape = shape or (TINY if setting.is_tiny else SMALL)
    generator = torch.Generator().manual_seed(index)
    return torch.randint(shape.vocab_size, (rows, shape.sequence_length), generator=generator).to(setting.device)


def micro_step(engine: shoal.Engine, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = engine(batch, batch)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def deterministic() -> None:
    """Kernels whose bits do not differ from run to run. Before the first use of cuBLAS."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
