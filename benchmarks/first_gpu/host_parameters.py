"""Parameters on the host, and updates beside the device, train as plain PyTorch does on the same GPU.

Stage 3 with parameters on the host gathers, releases and copies on one GPU too. In fp32, after some steps of two
micro-batches, every parameter is compared with that of `torch.optim.AdamW` on the GPU. Two ranks, as threads on the
one GPU, shard everything at every stage.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

import shoal
from benchmarks.first_gpu.common import EPS, Finding, Setting, attempt, config, main, micro_step, model, tokens
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world

STEPS, BOUND = 4, 1e-4  # of 1e-3 learning rate: a parameter moves by about 4e-3
AHEAD = {"super_offload": True}
CASES: list[tuple[int, tuple[str, ...], int, dict[str, Any]]] = [
    (3, ("param",), 1, {}),
    (2, ("optimizer",), 1, {}),
    (2, ("optimizer",), 1, AHEAD),
    (3, ("param", "optimizer"), 1, {}),
    (3, ("param", "optimizer"), 1, AHEAD),
    *((stage, (), 2, {}) for stage in range(4)),
    (3, ("param", "optimizer"), 2, AHEAD),
]


def check(setting: Setting) -> Iterable[Finding]:
    torch.set_float32_matmul_precision("highest")
    plain = {size: _plain(setting, size) for size in (1, 2)}
    for stage, places, size, more in setting.some(CASES):
        what = f"stage {stage}, {' and '.join(places) or 'nothing'} on the host" + ", updates ahead" * bool(more)
        what += f", {size} ranks" * (size > 1)
        case = stage, places, size, more
        yield attempt(what, lambda c=case, w=what: _run(c, w, plain[c[2]], setting))  # type: ignore[misc]


def _run(case: tuple[int, tuple[str, ...], int, Any], what: str, right: dict[str, Any], setting: Setting) -> Finding:
    stage, places, size, more = case
    made = model(setting)  # on one thread: ranks share torch's generator

    def train() -> tuple[dict[str, torch.Tensor], int]:
        mine, rank = copy.deepcopy(made), current_world().rank
        settings = config(stage, *places, precision="fp32", accumulation=2)
        if more:
            settings["zero_optimization"]["offload_optimizer"] |= more
        engine = shoal.initialize(model=mine, config=settings)[0]
        for index in range(2 * STEPS):
            micro_step(engine, tokens(setting, 1000 * rank + index))
        step: Any = engine.sharding.step
        updates = step.cpu_optimizer
        found = {name: value.detach().cpu().clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return found, updates.num_ahead if updates is not None else 0

    if size == 1:
        found, num_ahead = train()
    else:
        found, num_ahead = run_ranks(size, train, device=setting.device)[0]
    far = max(float((found[name] - value).abs().max()) for name, value in right.items())
    measured = f"largest difference of a parameter {far:.1e}" + f", {num_ahead} updates ran ahead" * bool(more)
    is_ahead = num_ahead > 0 or not (more and setting.is_gpu)  # where the host is the device nothing runs ahead
    return Finding(what, far <= BOUND and is_ahead, measured, f"at most {BOUND:g}")


def _plain(setting: Setting, size: int) -> dict[str, torch.Tensor]:
    alone = model(setting).to(setting.device)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3, weight_decay=0.1, eps=EPS)
    for step in range(STEPS):
        for micro in range(2):
            for rank in range(size):
                batch = tokens(setting, 1000 * rank + 2 * step + micro)
                (alone(batch, batch) / (2 * size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().cpu() for name, value in alone.state_dict().items()}


if __name__ == "__main__":
    main(check, __doc__)
