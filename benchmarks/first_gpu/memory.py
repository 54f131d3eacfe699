"""The ledger beside the allocator: bytes by kind that Shoal says it holds, and what torch.cuda says is allocated.

A model of 100 million parameters in bf16 with AdamW: predicted are the bytes of the formulas (16 a parameter on one
rank, less where states are on the host), and the ledger's sum on the device. Gradients are freed after a step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch

import shoal
from benchmarks.first_gpu.common import TINY, Finding, Setting, attempt, config, main, micro_step, tokens
from shoal.models.gpt import GPT, GPTConfig
from shoal.text import format_bytes

SHAPE = GPTConfig(vocab_size=32_768, sequence_length=256, num_layers=8, hidden_size=768, num_heads=12, tied=False)
CASES = [*((stage, ()) for stage in range(4)), (2, ("optimizer",)), (3, ("param",)), (3, ("param", "optimizer"))]


def check(setting: Setting) -> Iterable[Finding]:
    for stage, places in setting.some(CASES):
        what = f"stage {stage}, {' and '.join(places) or 'nothing'} on the host"
        yield attempt(what, lambda s=stage, p=places, w=what: _run(s, p, w, setting))  # type: ignore[misc]


def _run(stage: int, places: tuple[str, ...], what: str, setting: Setting) -> Finding:
    shape = TINY if setting.is_tiny else SHAPE
    gc.collect()  # what is left of the engine before
    one = torch.ones(16, 16, dtype=torch.bfloat16, device=setting.device, requires_grad=True)
    # cuBLAS allocates a workspace with the first product of each thread, also of the one of backward, and keeps it.
    torch.autograd.grad(torch.mm(one, one).sum(), one)
    del one
    before = setting.allocated()
    if setting.is_gpu:
        torch.cuda.reset_peak_memory_stats(setting.device)
    made = GPT(shape)
    engine = shoal.initialize(model=made, config=config(stage, *places))[0]
    batch = tokens(setting, 0, shape)
    for _ in range(3):
        micro_step(engine, batch)
    setting.synchronize()
    ledger = engine.memory_report()
    on_device = {
        kind: sum(entry.nbytes for entry in ledger.entries if entry.kind == kind and entry.tier == "device")
        for kind in ledger.by_kind()
    }
    held = sum(on_device.values()) - on_device["gradient"]
    allocated = setting.allocated() - before
    peak = ledger.reading.peak
    engine.destroy()
    if not setting.is_gpu:
        return Finding(what, None, f"ledger {format_bytes(sum(ledger.by_kind().values()))}")
    # Tokens, loss and rounding up to 512 bytes a block are a few MiB at most.
    is_near = abs(allocated - held) <= 0.02 * held + 8 * 2**20
    kinds = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in on_device.items() if nbytes)
    return Finding(what, is_near, f"allocated {format_bytes(allocated)}, peak {format_bytes(peak)}", f"{kinds}")


if __name__ == "__main__":
    main(check, __doc__)
