"""A load that fails: every rank raises the same error, and the running state is unchanged, to the bit."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.errors import CheckpointError
from tests.helpers.checkpoint_maker import rewrite
from tests.helpers.dying import SIZE, tiny
from tests.helpers.models import Plain
from tests.helpers.resuming import Run, State, differences, engine_of, micro_steps, state_of
from tests.helpers.training import sgd

NOBODY = 65534
Spoil = Callable[[Path], object]


def run_of(stage: int) -> Run:
    return tiny(stage, bf16={"enabled": True}, gradient_accumulation_steps=2, scheduler={"type": "WarmupLR"})


def save(run: Run, folder: Path, *, steps: int = 1, tag: str | None = None) -> list[State]:
    """Save at the end of each of so many steps. Returns: the state at the first save."""

    def rank() -> State:
        engine = engine_of(run)
        states = []
        accumulation = engine.gradient_accumulation_steps()
        for step in range(steps):
            micro_steps(engine, run, step * accumulation, accumulation)
            states.append(state_of(engine))
            engine.save_checkpoint(folder, tag=tag)
        engine.destroy()
        return states[0]

    return run_ranks(SIZE, rank)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def generators() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]


def newer(raw: dict[str, Any]) -> None:
    raw |= {"format": 3, "versions": {"shoal": "9.1"}}


@pytest.fixture(params=[1, 3], ids=["stage 1", "stage 3"])
def stage(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_loads_that_fail_leave_the_running_state_as_it_was_on_every_rank(tmp_path: Path, stage: int) -> None:
    """Between the two micro-batches of a step: also the gradients that are open survive."""
    run = run_of(stage)
    good = tmp_path / "good"
    save(run, good)
    name = "global_step1"

    def spoiled(kind: str, spoil: Spoil) -> Path:
        folder = tmp_path / kind
        shutil.copytree(good, folder)
        spoil(folder / name)
        return folder

    other_model, other_optimizer = tmp_path / "other model", tmp_path / "other optimizer"
    save(replace(run, factory=lambda: Plain(3, 12)), other_model)
    save(replace(run, optimizer=sgd), other_optimizer)
    (tmp_path / "empty").mkdir()
    cases: list[tuple[Path, str | None, str, str]] = [
        (good, "global_step7", "checkpoint-missing", "load one of: global_step1"),
        (tmp_path / "nowhere", None, "checkpoint-missing", "no complete checkpoint"),
        (tmp_path / "empty", None, "checkpoint-missing", "no complete checkpoint"),
        (other_model, None, "checkpoint-mismatch", "blocks.2."),
        (
            other_model,
            None,
            "checkpoint-mismatch",
            "embedding.weight [13, 12] in the checkpoint, [13, 16] in the model",
        ),
        (other_optimizer, None, "checkpoint-mismatch", "its optimizer is SGD, this one is AdamW"),
        (spoiled("newer", lambda f: rewrite(f, newer)), name, "checkpoint-version", "written by Shoal 9.1"),
        (spoiled("flip 0", lambda f: flip(f / "rank-00000.safetensors")), None, "checkpoint-damaged", "rank-00000"),
        (spoiled("flip 1", lambda f: flip(f / "rank-00001.safetensors")), name, "checkpoint-damaged", "rank-00001"),
        (spoiled("cut", lambda f: os.truncate(f / "manifest.json", 99)), name, "checkpoint-damaged", "manifest"),
        (spoiled("lost", lambda f: (f / "rank-00001.safetensors").unlink()), name, "checkpoint-damaged", "is missing"),
    ]

    def rank(is_disturbed: bool) -> tuple[State, list[str]]:
        engine = engine_of(run)
        micro_steps(engine, run, 0, 3)
        problems: list[str] = []
        for folder, tag, code, said in cases if is_disturbed else ():
            before, generators_before = state_of(engine), generators()
            text = ""
            try:
                engine.load_checkpoint(folder, tag)
            except CheckpointError as error:
                text = f"[{error.code}] {error}"
            if not text.startswith(f"[{code}]") or said not in text:
                problems.append(f"{folder.name}: {text}")
            after = state_of(engine)
            problems += [f"{folder.name}: {found}" for found in differences([before], [after])]
            if before.counters != after.counters or before.groups != after.groups:
                problems.append(f"{folder.name}: counters {after.counters}, groups {after.groups}")
            if not same_generators(generators(), generators_before):
                problems.append(f"{folder.name}: a generator has moved")
        state = state_of(engine, micro_steps(engine, run, 3, 3))
        engine.destroy()
        return state, problems

    straight = run_ranks(SIZE, rank, False)
    disturbed = run_ranks(SIZE, rank, True)
    assert [problems for _, problems in disturbed] == [[], []]
    assert differences([state for state, _ in straight], [state for state, _ in disturbed]) == []
    assert [state.losses for state, _ in disturbed] == [state.losses for state, _ in straight]
    assert [state.counters for state, _ in disturbed] == [state.counters for state, _ in straight]


def same_generators(ours: list[Any], theirs: list[Any]) -> bool:
    return bool(torch.equal(ours[0], theirs[0])) and ours[1:] == theirs[1:]


def test_a_folder_that_this_user_may_not_read_is_a_clear_error_on_every_rank(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    run = run_of(1)
    folder = tmp_path / "run"
    save(run, folder)
    folder.chmod(0o700)

    def rank() -> tuple[str, str, list[str]]:
        engine = engine_of(run)
        micro_steps(engine, run, 0, 2)
        before = state_of(engine)
        comm = engine.axes.world
        comm.barrier(label="test: before")
        if engine.global_rank == 0:
            os.seteuid(NOBODY)  # of the whole process
        comm.barrier(label="test: nobody")
        try:
            engine.load_checkpoint(folder)
            code, text = "", ""
        except CheckpointError as error:
            code, text = error.code, str(error)
        finally:
            comm.barrier(label="test: after")
            if engine.global_rank == 0:
                os.seteuid(0)
            comm.barrier(label="test: root")
        found = differences([before], [state_of(engine)])
        engine.destroy()
        return code, text, found

    try:
        ranks = run_ranks(SIZE, rank)
    finally:
        os.seteuid(0)
    for code, text, found in ranks:
        assert code == "checkpoint-storage"
        assert "Permission denied" in text
        assert str(folder) in text
        assert found == []


def swap(folder: Path) -> None:
    one, other = folder / "rank-00000.safetensors", folder / "rank-00001.safetensors"
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def take_over(folder: Path) -> None:
    name = "rank-00001.safetensors"
    shutil.copy(folder.with_name("global_step1") / name, folder / name)


DAMAGES: dict[str, tuple[Spoil, str]] = {
    "flipped in rank 0's": (lambda folder: flip(folder / "rank-00000.safetensors"), "rank-00000.safetensors"),
    "flipped in rank 1's": (lambda folder: flip(folder / "rank-00001.safetensors"), "rank-00001.safetensors"),
    "flipped in the manifest": (lambda folder: flip(folder / "manifest.json"), "manifest cannot be read"),
    "swapped": (swap, "rank-0000"),
    "of another step": (take_over, "rank-00001.safetensors"),
    "empty": (lambda folder: os.truncate(folder / "rank-00001.safetensors", 0), "has 0 bytes"),
    "lies": (
        lambda folder: rewrite(
            folder, lambda raw: raw["files"][0].update(name="../global_step1/rank-00000.safetensors")
        ),
        "is not a plain name",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    spoil, said = DAMAGES[damage]
    run = tiny(3, log_level="warning")
    first = save(run, tmp_path, steps=2)
    spoil(tmp_path / "global_step2")
    canary = sorted(os.listdir(tmp_path))

    def rank() -> tuple[State, str, str]:
        engine = engine_of(replace(run, seed=1))
        text = ""
        try:
            engine.load_checkpoint(tmp_path, "global_step2")
        except CheckpointError as error:
            text = str(error)
        path, _ = engine.load_checkpoint(tmp_path)
        state = state_of(engine)
        engine.destroy()
        return state, text, path

    ranks = run_ranks(SIZE, rank)
    assert differences(first, [state for state, _, _ in ranks]) == []
    for _, text, path in ranks:
        assert said in text
        assert path == f"{tmp_path}/global_step1"
    warnings = [record.getMessage() for record in caplog.records]
    assert any("global_step2" in text and said in text for text in warnings)
    assert sorted(os.listdir(tmp_path)) == canary


def test_bits_flipped_anywhere_are_never_loaded(tmp_path: Path) -> None:
    """A sample, through the engine; ``test_checkpoint_hostile`` flips thousands below it."""
    run = tiny(1)
    save(run, tmp_path)
    folder = tmp_path / "global_step1"
    bits = [(path, bit) for path in sorted(folder.iterdir()) for bit in range(path.stat().st_size * 8)]
    chosen = random.Random(21).sample(bits, 24)

    def rank() -> list[str]:
        engine = engine_of(run)
        silent = []
        for path, bit in chosen:
            engine.axes.world.barrier(label="test: before")
            if engine.global_rank == 0:
                data = bytearray(path.read_bytes())
                data[bit // 8] ^= 1 << bit % 8
                path.write_bytes(data)
            engine.axes.world.barrier(label="test: flipped")
            said = attempt_load(engine, tmp_path)
            if path.name not in said:
                silent.append(f"{path.name} bit {bit}: {said}")
            engine.axes.world.barrier(label="test: loaded")
            if engine.global_rank == 0:
                data[bit // 8] ^= 1 << bit % 8
                path.write_bytes(data)
        engine.axes.world.barrier(label="test: mended")
        assert attempt_load(engine, tmp_path) == ""
        engine.destroy()
        return silent

    assert run_ranks(SIZE, rank) == [[], []]


def attempt_load(engine: shoal.Engine, folder: Path) -> str:
    try:
        engine.load_checkpoint(folder, "global_step1")
    except CheckpointError as error:
        return str(error)
    return ""
