"""What an engine knows about itself beside its tensors, to and from a checkpoint.

Counters, the schedule, the loss scale, the place in the data, each rank's generators, buffers that differ between the
ranks, gradients of an unfinished step.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from shoal.checkpoint import open_gradients
from shoal.checkpoint.holdings import buffers_of
from shoal.checkpoint.manifest import checksum
from shoal.engine.log import logger
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.engine.engine import Engine

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def shared(engine: Engine, *, exclude_frozen: bool) -> dict[str, Any]:
    """What is the same on every rank."""
    loader = engine.training_dataloader
    is_stateful = engine._config_object.data.stateful and hasattr(loader, "state_dict")
    return {
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "micro_in_step": engine._boundary.micro_in_step,
        "accumulation_steps": engine.gradient_accumulation_steps(),
        "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "schedule": _schedule_state(engine.lr_scheduler),
        "schedule_class": _schedule_class(engine.lr_scheduler),
        "loss_scale": engine._loss_scale.state_dict() if engine._loss_scale is not None else None,
        "data": loader.state_dict() if is_stateful else None,
        "by_step": engine.curriculum.state(),
        "excludes_frozen": exclude_frozen,
        "layout": open_gradients.layout_of(engine.bucket_states),
        "extra_state": {name: part.get_extra_state() for name, part in _with_extra_state(engine.module).items()},
    }


def own(engine: Engine, buffers: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What only this rank has. Communicates: the sums of the buffers."""
    return {
        "generators": _generators(engine),
        "buffers": _differing(engine, buffers),
        "gradients": open_gradients.take(engine.bucket_states),
        "losses": [float(loss) for loss in engine._losses.values],
        "styles": sorted(engine._losses.styles),
    }


def check(saved: Mapping[str, Any], mine: Mapping[str, Any] | None) -> None:
    """Raises: TypeError, KeyError: it is not what ``shared`` and ``own`` give."""
    for name, value in dict(saved.get("counters", {})).items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"counter {name!r} is {value!r}")
    for name in ("schedule", "loss_scale", "data", "extra_state", "by_step"):
        if not isinstance(saved.get(name), dict | None):
            raise TypeError(f"{name} is {type(saved[name]).__name__}")
    for part in dict(saved.get("by_step") or {}).values():
        if not isinstance(part["schedule"], dict) or not isinstance(part["place"], int | None):
            raise TypeError(f"by_step: {part}")
    if mine is None:
        return
    generators = mine["generators"]
    _ = generators["torch"], generators["python"]["words"], generators["numpy"]["keys"], mine["buffers"]
    for entry in mine["gradients"]:
        if not 0 <= entry["bucket"] < len(saved.get("layout") or ()):
            raise KeyError(f"gradients of bucket {entry['bucket']}")


def compare(
    engine: Engine, saved: Mapping[str, Any], *, is_strict: bool, has_schedule: bool
) -> tuple[list[str], list[str]]:
    """What of it does not fit this engine: problems, and notes on what does not matter or was allowed."""
    problems: list[str] = []
    notes: list[str] = []
    mine, theirs = _schedule_class(engine.lr_scheduler), saved.get("schedule_class")
    if has_schedule and theirs is not None and mine is not None and theirs != mine:
        problems.append(f"its schedule is {theirs}, this one is {mine} (load_lr_scheduler_states=False keeps this one)")
    elif has_schedule and (theirs is None) != (mine is None) and "schedule_class" in saved:
        notes.append(
            f"the checkpoint has a schedule ({theirs}), this run has none."
            if mine is None
            else f"the checkpoint has no schedule; {mine} starts at its beginning."
        )
    data, loader = saved.get("data"), engine.training_dataloader
    if data is not None and hasattr(loader, "load_state_dict"):
        here = loader.state_dict().get("num_samples")
        if here != data.get("num_samples"):
            problems.append(f"its place is in a data set of {data.get('num_samples')} samples, this one has {here}")
    if "by_step" in saved:
        notes += engine.curriculum.changes(saved["by_step"] or {})
    gone = sorted(set(saved.get("extra_state") or {}) - set(_with_extra_state(engine.module)))
    if gone:
        (problems if is_strict else notes).append(f"modules with a state of their own are gone: {', '.join(gone[:8])}")
    return problems, notes


def restore(
    engine: Engine,
    saved: Mapping[str, Any],
    mine: Mapping[str, Any] | None,
    name: str,
    *,
    has_schedule: bool,
    num_ranks: int,
) -> None:
    """Set what ``shared`` and ``own`` gave.

    Args:
        mine: None: this rank was not there.
        name: of the checkpoint, for a warning.
        num_ranks: of which there is such a state; 0: of none, as in every other format, and generators go on as they
            are.
    """
    for counter, value in saved.get("counters", {}).items():
        if counter in _COUNTERS:
            setattr(engine, counter, int(value))
    if has_schedule and saved.get("schedule") is not None and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(saved["schedule"])
    if saved.get("loss_scale") is not None and engine._loss_scale is not None:
        engine._loss_scale.load_state_dict(saved["loss_scale"])
        if engine.sharded_optimizer is not None:
            engine.sharded_optimizer.loss_scale = engine._loss_scale.scale
    parts = _with_extra_state(engine.module)
    for part, value in (saved.get("extra_state") or {}).items():
        if part in parts:
            parts[part].set_extra_state(value)
    if saved.get("data") is not None and hasattr(engine.training_dataloader, "load_state_dict"):
        engine.training_dataloader.load_state_dict(saved["data"])
    engine.curriculum.restore(saved.get("by_step") or {}, engine.global_steps)
    engine._forget_losses()
    engine._boundary.micro_in_step = int(saved.get("micro_in_step", 0))
    if mine is None:
        rank = engine.axes.all.rank
        if num_ranks:
            logger.warning("rank %d was not there when %s was saved: its generators start anew.", rank, name)
            torch.manual_seed(int(torch.initial_seed()) + rank)
        open_gradients.put(engine.bucket_states, [], None)
        return
    _set_generators(engine, mine["generators"])
    buffers = buffers_of(engine.module)
    with torch.no_grad():
        for buffer, value in mine["buffers"].items():
            if buffer in buffers and not torch.equal(buffers[buffer].cpu(), value):
                buffers[buffer].copy_(value)
    open_gradients.put(engine.bucket_states, mine["gradients"], saved.get("layout"))
    if mine["gradients"]:
        engine._has_backward = True
        engine._losses.values = [torch.tensor(loss, device=engine.device) for loss in mine["losses"]]
        engine._losses.styles = set(mine["styles"])


def _schedule_class(schedule: Any) -> str | None:
    return type(schedule).__name__ if schedule is not None and hasattr(schedule, "state_dict") else None


def _schedule_state(schedule: Any) -> Any:
    if _schedule_class(schedule) is None:
        return None
    state = schedule.state_dict()
    if not isinstance(state, Mapping):
        raise UsageError(f"{type(schedule).__name__}.state_dict() is no dict.", code="schedule-state")
    # What a schedule computes with (functions) comes from the script again.
    return {key: value for key, value in state.items() if not callable(value)}


def _with_extra_state(module: nn.Module) -> dict[str, nn.Module]:
    return {
        name: part
        for name, part in module.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }


def _generators(engine: Engine) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        **engine._device.generator_states(),
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "kind": kind,
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "rest": [position, has_gauss, float(cached)],
        },
    }


def _set_generators(engine: Engine, saved: Mapping[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    engine._device.set_generator_states({key: value for key, value in saved.items() if key == "cuda"})
    python = saved["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    numpy = saved["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], keys, *numpy["rest"]))


def _differing(engine: Engine, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's buffers that are not what rank 0's are (running statistics, say)."""
    comm = engine.axes.all
    if comm.size == 1 or not buffers:
        return {}
    sums = {
        name: checksum(buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, buffer in buffers.items()
    }
    first = comm.gather_objects(sums, label="checkpoint: buffers")[0]
    return {name: buffer for name, buffer in buffers.items() if first.get(name) != sums[name]}
