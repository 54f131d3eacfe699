"""Asynchronous saves: they hold the state of their call, and whatever would change it, or end, waits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shoal
from shoal.checkpoint.blocks import Snapshot
from shoal.errors import UsageError
from shoal.memory.host import PAGE
from tests.helpers.resuming import State, differences, engine_of, micro_steps, on_ranks, resume, run_at_stage, state_of


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_asynchronous_save_has_the_state_of_its_call(stage: int, tmp_path: Path) -> None:
    run = run_at_stage(stage, checkpoint={"async_save": True}, bf16={"enabled": True})

    def save(engine: shoal.Engine) -> State:
        micro_steps(engine, run, 0, 2)
        engine.save_checkpoint(tmp_path, client_state={"at": torch.ones(3)})
        state = state_of(engine)
        micro_steps(engine, run, 2, 3)
        return state

    saved = on_ranks(run, save)
    loaded = resume(run, tmp_path, at=2)
    assert differences(saved, loaded) == []
    assert torch.equal(loaded[0].client_state["at"], torch.ones(3))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["global_step2"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
@pytest.mark.parametrize("is_async", [True, False])
def test_an_asynchronous_save_copies_at_the_priority_of_training_and_writes_at_a_lower_one(
    is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_at_stage(2, checkpoint={"async_save": is_async})
    found: list[tuple[str, int]] = []
    finish = Snapshot.finish

    def note(phase: str) -> None:
        found.append((phase, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    def noted(self: Snapshot) -> None:
        note("copy")
        finish(self)

    monkeypatch.setattr(Snapshot, "finish", noted)

    def save(engine: shoal.Engine) -> int:
        micro_steps(engine, run, 0, 1)
        engine.checkpointing.on_phase = note
        engine.save_checkpoint(tmp_path)
        while is_async and [phase for phase, _ in found].count("shard_fsync") < engine.world_size:
            time.sleep(0.01)  # a rank that waits for its thread gives it the first priority again
        engine.checkpointing.finish()
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    (own,) = set(on_ranks(run, save))
    lower = {phase for phase, nice in found if nice != own}
    assert lower == ({"shard_write", "shard_fsync"} if is_async else set())
    assert {phase for phase, _ in found} >= {"shard_write", "shard_fsync", "exchange"}
    assert is_async == ("copy" in dict(found))


def test_the_copy_of_an_asynchronous_save_begins_on_a_page_so_that_it_can_be_written_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_at_stage(2, checkpoint={"async_save": True})
    found: list[int] = []
    finish = Snapshot.finish
    monkeypatch.setattr(Snapshot, "finish", lambda self: (found.append(self.image.data_ptr() % PAGE), finish(self))[1])

    def save(engine: shoal.Engine) -> None:
        micro_steps(engine, run, 0, 1)
        engine.save_checkpoint(tmp_path)
        engine.checkpointing.finish()

    found_ranks = len(on_ranks(run, save))
    assert found == [0] * found_ranks


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("change", ["step", "master", "state", "gathered", "load"])
def test_whatever_changes_the_state_waits_until_an_asynchronous_save_has_copied_it(
    stage: int, precision: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {} if precision == "fp32" else {precision: {"enabled": True}}
    run = run_at_stage(stage, checkpoint={"async_save": True}, **keys)
    finish = Snapshot.finish

    def late(self: Snapshot) -> None:
        time.sleep(0.1)  # long enough that a rank that does not wait is earlier
        finish(self)

    monkeypatch.setattr(Snapshot, "finish", late)

    def save(engine: shoal.Engine) -> State:
        micro_steps(engine, run, 0, 2)
        engine.save_checkpoint(tmp_path / "first")
        state = state_of(engine)
        engine.checkpointing.finish()
        zeros = {name: torch.zeros_like(value) for name, value in engine.module_state_dict().items()}
        engine.save_checkpoint(tmp_path / "second")
        parameter = next(p for p in engine.module.parameters() if p.requires_grad and p.dim() > 1)
        if change == "step":
            micro_steps(engine, run, 2, 3)
        elif change == "master":
            engine.access.set_full_parameter(parameter, torch.zeros(parameter.shape))
        elif change == "state":
            engine.access.set_full_optimizer_state(parameter, "exp_avg", torch.ones(parameter.shape))
        elif change == "gathered":
            with shoal.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
                parameter.fill_(1.0)
        else:
            engine.load_module_state_dict(zeros)
        engine.checkpointing.finish()
        return state

    saved = on_ranks(run, save)
    assert differences(saved, resume(run, tmp_path / "second", at=2)) == []


def test_a_second_asynchronous_save_waits_for_the_first_and_a_load_too(tmp_path: Path) -> None:
    run = run_at_stage(2, checkpoint={"async_save": True})

    def use(engine: shoal.Engine) -> tuple[list[str], int]:
        def wait(phase: str) -> None:
            if phase == "shard_fsync":
                time.sleep(0.2)

        engine.checkpointing.on_phase = wait
        for index in range(3):
            micro_steps(engine, run, index, 1)
            engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, tag="global_step3")
        return sorted(path.name for path in tmp_path.iterdir() if path.is_dir()), engine.global_steps

    assert on_ranks(run, use) == [(["global_step1", "global_step2", "global_step3"], 3)] * 2


def test_engines_with_asynchronous_saves_leave_no_thread(tmp_path: Path) -> None:
    run = replace(run_at_stage(1, checkpoint={"async_save": True}), world=1)
    before = threading.active_count()
    for index in range(20):
        engine = engine_of(run)
        micro_steps(engine, run, 0, 1)
        engine.save_checkpoint(tmp_path, tag=f"t{index}")
        engine.destroy()  # waits
        assert (tmp_path / f"t{index}" / "manifest.json").exists()
        with pytest.raises(UsageError):
            engine.save_checkpoint(tmp_path)
    assert threading.active_count() == before


ENDS_ITSELF = """
import sys, time, torch, shoal
model = torch.nn.Linear(300, 300)
settings = {"train_micro_batch_size_per_gpu": 1, "checkpoint": {"async_save": True}, "log_level": "error"}
engine, *_ = shoal.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings)
engine.backward(engine(torch.ones(1, 300)).sum())
engine.step()
engine.checkpointing.on_phase = lambda phase: time.sleep(0.5 if phase == "shard_write" else 0)
engine.save_checkpoint(sys.argv[1])
"""


def test_a_process_that_ends_in_good_order_waits_for_its_save(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS_ITSELF, str(tmp_path)], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert (tmp_path / "global_step1" / "manifest.json").exists()
