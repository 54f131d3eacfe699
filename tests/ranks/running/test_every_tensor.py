"""Every large tensor that an engine reaches between two phases of a step is in one buffer, and in the ledger."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.threads import run_ranks
from shoal.engine.engine import Engine
from tests.helpers.any_two import any_two
from tests.helpers.models import Plain
from tests.helpers.training import adamw, batch, config, start

LEAST_NBYTES = 1024
LEFT_OUT = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType)


def is_left_out(each: Any) -> bool:
    """True of code, and of what communicates: engines share it, and ranks that are threads reach each other by it."""
    return isinstance(each, LEFT_OUT) or type(each).__module__.startswith("shoal.comm.")


def storages_of(tensors: Iterator[torch.Tensor]) -> dict[int, int]:
    """Bytes by storage, of storages of at least ``LEAST_NBYTES``."""
    found = {}
    for tensor in tensors:
        if tensor.layout is torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            if storage.nbytes() >= LEAST_NBYTES:
                found[storage._cdata] = storage.nbytes()
    return found


def reached(engine: Engine) -> Iterator[torch.Tensor]:
    """Tensors that are reached from the engine by references, closures of its methods included."""
    seen: set[int] = set()
    left: list[Any] = [engine.sharded, engine.sharding, *engine.module.parameters()]
    while left:
        each = left.pop()
        if id(each) in seen or is_left_out(each):
            if isinstance(each, types.FunctionType) and id(each) not in seen and each.__closure__:
                left += [cell.cell_contents for cell in each.__closure__ if cell.cell_contents is not None]
            seen.add(id(each))
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
            if each.grad is not None:
                yield each.grad
            continue
        left += gc.get_referents(each)


def accounted(engine: Engine) -> list[tuple[str, torch.Tensor]]:
    """By buffer, its tensors: those of groups, and staging buffers; then the states of the optimizer's ranges."""
    found: list[tuple[str, torch.Tensor]] = []
    for group in engine.sharded.groups:
        for kind, buffer in group.buffers():
            name = f"{kind} of {group.label}"
            # A second shard, and a gather, fill the memory of the parameter buffer.
            found += [(name, buffer.shard)] if kind == "gathered" else [(name, buffer.full), (name, buffer.shard)]
        for part in group.ranges if group.is_trained else ():
            for key, value in group.state_of(part).items():
                if isinstance(value, torch.Tensor):
                    found.append((f"{key} of {group.label}, {part.start}", value))
    for staging in engine.sharded.staging:
        found += [(f"staging {id(buffer)}", buffer.full) for buffer in staging._all]
    return found


def check(engine: Engine, phase: str) -> None:
    owners: dict[int, set[str]] = {}
    for name, tensor in accounted(engine):
        owners.setdefault(tensor.untyped_storage()._cdata, set()).add(name)
    shared = {names for names in map(frozenset, owners.values()) if len(names) > 1}
    assert not {names for names in shared if not all(" of " in name and "," in name for name in names)}, phase
    step = engine.sharding.step
    known = set(owners)
    if step is not None and step._scratch is not None:
        known.add(step._scratch.untyped_storage()._cdata)
    nbytes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for _, tensor in accounted(engine)}
    entries = engine.memory_report().entries
    total = sum(entry.nbytes for entry in entries if entry.kind != "buffers in flight" or not entry.nbytes)
    if phase != "initialize":  # no gradient has memory yet
        scalars = sum(n for n in nbytes.values() if n <= 8)
        staging = sum(each.nbytes for each in engine.sharded.staging)
        assert total + staging == sum(nbytes.values()) - scalars, phase
    strangers = {key: n for key, n in storages_of(reached(engine)).items() if key not in known}
    assert not strangers, (phase, strangers)


@any_two({"stage": [0, 1, 2, 3], "precision": ["fp32", "bf16", "fp32 in 8 bits"], "accumulation": [1, 2]})
def test_every_large_tensor_is_in_one_buffer_after_each_phase(stage: int, precision: str, accumulation: int) -> None:
    def job() -> None:
        sections: dict[str, Any] = {"bf16": {"enabled": True}} if precision == "bf16" else {}
        if precision == "fp32 in 8 bits":
            sections["wire"] = {"reduce": "int8", "error_feedback": True, **({"gather": "int8"} if stage else {})}
        settings = config(stage, gradient_accumulation_steps=accumulation, **sections)
        engine = start(lambda: Plain(3, hidden=32), settings, adamw)
        rank = engine.global_rank
        check(engine, "initialize")
        for number in range(3):
            for micro in range(accumulation):
                loss = engine(*batch(2 * number + micro, rank, 2))
                engine.backward(loss)
                del loss
                gc.collect()
                check(engine, f"step {number}, micro-batch {micro}")
            engine.step()
            check(engine, f"step {number}")
        engine.destroy()

    run_ranks(2, job)


def test_a_tensor_that_is_in_no_buffer_is_found() -> None:
    def job() -> None:
        engine = start(lambda: Plain(1), config(2), adamw)
        engine.sharding.stray = torch.zeros(LEAST_NBYTES)  # type: ignore[attr-defined]
        with pytest.raises(AssertionError, match="here"):
            check(engine, "here")
        engine.destroy()

    run_ranks(1, job)


def test_the_walk_reaches_the_parameters_of_a_module() -> None:
    module = nn.Linear(32, 32)
    assert storages_of(iter(module.parameters()))
