"""Writers that die, are slow, or meet another job: training goes on, and what was saved stays."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.checkpoint import blocks, directory
from shoal.checkpoint.storage import LocalStorage
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.helpers.dying import SIZE, tiny
from tests.helpers.failing_saves import Outcome, attempt, load, save_and_finish, steps_in
from tests.helpers.resuming import State, differences, engine_of, micro_steps, state_of


class HeldUp:
    """Blocks an engine's writer: each save until its event is set."""

    def __init__(self, engine: shoal.Engine, num_saves: int = 1) -> None:
        self.may_write = [threading.Event() for _ in range(num_saves)]
        self._num_begun = 0
        engine.checkpointing.on_phase = self._wait

    def _wait(self, phase: str) -> None:
        if phase == "shard_write":
            self._num_begun += 1
            assert self.may_write[self._num_begun - 1].wait(60)


@pytest.mark.parametrize(("phase", "victim"), [("shard_write", 0), ("shard_write", 1), ("manifest", 0)])
@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_writer_that_dies_is_an_error_at_the_next_step_on_all_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, victim: int, phase: str, policy: str
) -> None:
    run = tiny(checkpoint={"async_save": True, "on_save_error": policy})
    have_died = threading.Barrier(SIZE)

    def rank() -> tuple[Outcome, int, int]:
        engine = engine_of(run)
        micro_steps(engine, run, 0, 1)

        def die(name: str) -> None:
            if name == phase and engine.global_rank == victim:
                raise SystemExit("the writer is gone")  # ends a thread without a word

        engine.checkpointing.on_phase = die
        outcomes = [attempt(lambda: engine.save_checkpoint(tmp_path))]
        for step in range(1, 3):  # the files, then the commit
            if (save := engine.checkpointing._in_flight) is not None and save._thread is not None:
                save._thread.join()
            have_died.wait()
            # mypy infers no lambda with a default.
            outcomes.append(attempt(lambda step=step: micro_steps(engine, run, step, 1) and "stepped"))  # type: ignore[misc]
        engine.checkpointing.on_phase = lambda name: None
        later = attempt(lambda: save_and_finish(engine, tmp_path))
        outcomes.append(later)
        steps = engine.global_steps
        threads = len([t for t in threading.enumerate() if t.name == "shoal-checkpoint"])
        engine.destroy()
        return outcomes, steps, threads

    for outcomes, steps, num_threads in run_ranks(SIZE, rank):
        assert outcomes[0] == ("returned", True)
        index = 1 if phase == "shard_write" else 2
        code, said = outcomes[index]
        if policy == "raise":
            assert code == "checkpoint"
            assert "SystemExit: the writer is gone" in said
        else:
            assert (code, said) == ("returned", "stepped")
        assert outcomes[3 - index] == ("returned", "stepped")
        assert outcomes[3] == ("returned", True)
        assert steps == 3, "the step was taken before the error was raised"
        assert num_threads == 0
    if policy == "warn":
        assert len([r for r in caplog.records if "the writer is gone" in r.getMessage()]) == SIZE
    assert steps_in(tmp_path) == ["global_step3"]


def test_a_system_without_threads_is_an_error_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(checkpoint={"async_save": True})
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "shoal-checkpoint" and current_world().rank == 1:
            raise RuntimeError("can't start new thread")
        start(self)

    def rank() -> Outcome:
        engine = engine_of(run)
        micro_steps(engine, run, 0, 1)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        outcomes = [attempt(lambda: engine.save_checkpoint(tmp_path)), attempt(engine.checkpointing.finish)]
        engine.axes.world.barrier(label="test: both have failed")
        monkeypatch.setattr(threading.Thread, "start", start)
        outcomes.append(attempt(lambda: save_and_finish(engine, tmp_path)))
        engine.destroy()
        return outcomes

    for outcomes in run_ranks(SIZE, rank):
        assert outcomes[0] == outcomes[2] == ("returned", True)
        assert "can't start new thread" in outcomes[1][1]
    assert steps_in(tmp_path) == ["global_step1"]


def test_a_state_that_cannot_be_copied_to_its_end_is_an_error_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the check of streams: the next save writes to memory that the copies of this one are writing to."""
    run = tiny(checkpoint={"async_save": True})
    copy = blocks.Snapshot._copy
    num_copied = [0] * SIZE

    def copy_some(self: blocks.Snapshot, source: torch.Tensor, target: torch.Tensor) -> None:
        rank = current_world().rank
        num_copied[rank] += 1
        if rank == 1 and num_copied[rank] == 3:
            raise torch.OutOfMemoryError("no memory to decode into")
        copy(self, source, target)

    monkeypatch.setattr(blocks.Snapshot, "_copy", copy_some)

    def rank() -> list[Outcome]:
        engine = engine_of(run)
        micro_steps(engine, run, 0, 1)
        outcomes = [attempt(lambda: engine.save_checkpoint(tmp_path)), attempt(engine.checkpointing.finish)]
        outcomes.append(attempt(lambda: save_and_finish(engine, tmp_path)))
        engine.destroy()
        return outcomes

    for outcomes in run_ranks(SIZE, rank):
        assert outcomes[0] == outcomes[2] == ("returned", True)
        assert "no memory to decode into" in outcomes[1][1]
    assert steps_in(tmp_path) == ["global_step1"]


@pytest.mark.parametrize("stage", [1, 3])
def test_what_changes_right_after_an_asynchronous_save_returns_is_not_in_it(tmp_path: Path, stage: int) -> None:
    run = tiny(stage, bf16={"enabled": True}, checkpoint={"async_save": True})
    noted = {"best": torch.ones(3), "list": [1, 2]}

    def rank() -> State:
        engine = engine_of(run)
        micro_steps(engine, run, 0, 2)
        before = state_of(engine)
        client_state = {"best": torch.ones(3), "list": [1, 2]}
        held = HeldUp(engine)
        engine.save_checkpoint(tmp_path, client_state=client_state)
        # mypy takes the mixed values for objects.
        client_state["best"].fill_(9.0)  # type: ignore[attr-defined]
        client_state["list"].append(3)  # type: ignore[attr-defined]
        shards = engine.sharding.local_shards()
        everything = (*shards.model(), *shards.optimizer())
        for part in (part for shard in everything if not shard.is_private for part in shard.parts):
            part.fill_(123.0)
        for group in engine.sharding.groups:
            group.wait_for_readers()  # as every caller that changes state
        for part in (part for shard in everything if shard.is_private for part in shard.parts):
            part.fill_(123.0)
        assert engine.optimizer is not None
        assert engine.sharding.step is not None
        for group in engine.optimizer.param_groups:
            group["lr"] = 7.0
        for state in engine.sharding.step.optimizer.state.values():
            state["step"] += 100
        engine.global_steps += 50
        held.may_write[0].set()
        engine.checkpointing.finish()
        engine.destroy()
        return before

    saved = run_ranks(SIZE, rank)
    loaded = load(run, tmp_path)
    assert differences(saved, loaded) == []
    assert [s.counters for s in loaded] == [before.counters for before in saved]

    def client_state() -> Any:
        engine = engine_of(run)
        found = engine.load_checkpoint(tmp_path)[1]
        engine.destroy()
        return found

    for found in run_ranks(SIZE, client_state):
        assert torch.equal(found["best"], noted["best"])  # type: ignore[arg-type]
        assert found["list"] == noted["list"]


def test_a_second_save_waits_for_a_slow_first_one_and_takes_no_more_memory(tmp_path: Path) -> None:
    run = tiny(checkpoint={"async_save": True})

    def rank() -> tuple[list[bool], set[int], int]:
        engine = engine_of(run)
        may_write = HeldUp(engine, 3).may_write
        waited, buffers = [], set()
        most_threads = 0
        for step in range(3):
            micro_steps(engine, run, step, 1)
            if step:
                threading.Timer(0.1, may_write[step - 1].set).start()
            engine.save_checkpoint(tmp_path)
            waited.append(may_write[step - 1].is_set())
            assert engine.checkpointing._host is not None
            buffers.add(engine.checkpointing._host.data_ptr())
            most_threads = max(most_threads, len([t for t in threading.enumerate() if t.name == "shoal-checkpoint"]))
        may_write[-1].set()
        engine.destroy()  # waits for the last
        return waited, buffers, most_threads

    for waited, buffers, most_threads in run_ranks(SIZE, rank):
        assert waited == [False, True, True]
        assert len(buffers) <= 2  # Adam's state is there from the first step on: the second snapshot may be larger
        assert most_threads <= SIZE
    assert steps_in(tmp_path) == ["global_step1", "global_step2", "global_step3"]
    for step in (1, 2, 3):
        assert directory.verify(LocalStorage(tmp_path), f"global_step{step}") == []


def test_two_jobs_that_save_to_one_folder_do_not_mix(tmp_path: Path) -> None:
    """Each job is a world of one rank; the first one's write is blocked."""
    run = tiny(checkpoint={"async_save": True})
    first = engine_of(run)
    second = engine_of(run)
    held = HeldUp(first)
    micro_steps(first, run, 0, 1)
    first.save_checkpoint(tmp_path, tag="of the first".replace(" ", "-"))
    code, said = attempt(lambda: second.save_checkpoint(tmp_path, tag="of-the-second"))
    assert code == "checkpoint-locked"
    assert f"process {os.getpid()} on " in said
    held.may_write[0].set()
    first.checkpointing.finish()
    assert attempt(lambda: save_and_finish(second, tmp_path)) == ("returned", True)
    first.destroy()
    second.destroy()
    assert steps_in(tmp_path) == ["global_step0", "of-the-first"]
    assert all(not directory.verify(LocalStorage(tmp_path), name) for name in steps_in(tmp_path))


def test_the_last_good_checkpoint_stays_when_newer_ones_are_damaged(tmp_path: Path) -> None:
    run = tiny(checkpoint={"keep_last": 2})

    def rank() -> None:
        engine = engine_of(run)
        for step in range(4):
            micro_steps(engine, run, step, 1)
            engine.save_checkpoint(tmp_path)
            engine.axes.world.barrier(label="test: saved")
            if engine.global_rank == 0 and step in (1, 2):
                os.truncate(tmp_path / f"global_step{step + 1}" / "rank-00001.safetensors", 99)
            engine.axes.world.barrier(label="test: damaged")
        engine.destroy()

    run_ranks(SIZE, rank)
    assert steps_in(tmp_path) == ["global_step1", "global_step2", "global_step3", "global_step4"]
    whole = [found.folder for found in directory.list_checkpoints(LocalStorage(tmp_path)) if found.manifest is not None]
    assert whole == ["global_step4", "global_step1"]
