"""Forward and backward never make the host wait for the device, and step() does so once, for norm, flags and loss.

`torch.cuda.set_sync_debug_mode("error")` raises at a call that waits. The one read of what an exchange gave is allowed,
and counted. With states on the host an update waits for its gradient, on the thread of the updates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import shoal
from benchmarks.first_gpu.common import Finding, Setting, attempt, config, main, micro_step, model, tokens
from shoal.comm import protocol

reading: Any = protocol  # whose one read is replaced
CASES = [*((stage, ()) for stage in range(4)), (2, ("optimizer",)), (3, ("optimizer",)), (3, ("param",))]


def check(setting: Setting) -> Iterable[Finding]:
    for stage, places in setting.some(CASES):
        what = f"stage {stage}, {' and '.join(places) or 'nothing'} on the host"
        yield attempt(what, lambda s=stage, p=places, w=what: _run(s, p, w, setting))  # type: ignore[misc]


def _run(stage: int, places: tuple[str, ...], what: str, setting: Setting) -> Finding:
    engine = shoal.initialize(model=model(setting), config=config(stage, *places, gradient_clipping=0.1))[0]
    batch = tokens(setting, 0)
    for _ in range(3):
        micro_step(engine, batch)
    reads = 0
    read = reading.read_vector

    def allowed(*args: Any, **kwargs: Any) -> list[float]:
        nonlocal reads
        reads += 1
        with setting.synchronizations("default"):
            values: list[float] = read(*args, **kwargs)
        return values

    setting.synchronize()
    reading.read_vector = allowed
    try:
        with setting.synchronizations("error"):
            micro_step(engine, batch)
    finally:
        reading.read_vector = read
        setting.synchronize()
    engine.destroy()
    return Finding(what, reads == 1, f"{reads} synchronizations, all in step()", "1")


if __name__ == "__main__":
    main(check, __doc__)
