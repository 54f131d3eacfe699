"""``checkpoint.save_on_signal``: the step is ended and saved, and only then the process ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.engine.parts.save_on_signal import StopSignal
from shoal.errors import CheckpointError

SCRIPT = """
import os, signal, sys, time
import shoal, torch
folder = sys.argv[1]
config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
config["zero_optimization"] = {"stage": 2}
config["checkpoint"] = {"save_on_signal": True}
engine, *_ = shoal.initialize(model=torch.nn.Linear(4, 2), config=config)
engine.client_state_on_signal = lambda: {"epoch": 7}
engine.save_checkpoint(folder + "/saved")
for step in range(2000):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    open(f"{folder}/step{engine.global_rank}", "w").write(str(step + 1))
    time.sleep(0.02)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_rank_that_gets_the_signal_saves_with_the_others_and_ends_by_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[int] = []
    number = getattr(signal, name)
    before = signal.signal(number, lambda number, frame: came.append(number))
    try:
        settings: dict[str, Any] = {
            "train_batch_size": 1, "checkpoint": {"save_on_signal": True}, "optimizer": {"type": "AdamW"},
        }  # fmt: skip
        engine = shoal.initialize(model=torch.nn.Linear(4, 2), config=settings)[0]
        engine.client_state_on_signal = lambda: {"epoch": 7}
        engine.save_checkpoint(tmp_path)

        def step() -> None:
            engine.backward(engine(torch.ones(1, 4)).sum())
            engine.step()

        step()
        assert came == []
        os.kill(os.getpid(), number)
        assert came == []  # noted, until the step has ended
        step()
        assert came == [number]  # the handler of before
        saved, state = engine.load_checkpoint(tmp_path)
        assert saved is not None and saved.endswith("global_step2")
        assert state == {"epoch": 7}
        step()
        os.kill(os.getpid(), number)
        assert came == [number, number]  # nothing is noted any more
        engine.destroy()
    finally:
        signal.signal(number, before)


def test_a_client_state_that_a_signal_could_not_save_is_an_error_of_the_first_step() -> None:
    settings = {"train_batch_size": 1, "checkpoint": {"save_on_signal": True}, "optimizer": {"type": "AdamW"}}
    engine = shoal.initialize(model=torch.nn.Linear(4, 2), config=settings)[0]
    engine.client_state_on_signal = lambda: {"epoch": 7, "log": open}
    engine.backward(engine(torch.ones(1, 4)).sum())
    with pytest.raises(CheckpointError) as caught:
        engine.step()
    assert caught.value.where == "client_state/log"
    engine.destroy()


def test_without_a_folder_nothing_is_saved_and_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        settings = {"train_batch_size": 1, "checkpoint": {"save_on_signal": True}, "optimizer": {"type": "AdamW"}}
        engine = shoal.initialize(model=torch.nn.Linear(4, 2), config=settings)[0]
        os.kill(os.getpid(), signal.SIGTERM)
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        engine.destroy()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]
    assert "SIGTERM: nothing is saved: no folder is known" in caplog.text


def test_after_destroy_signals_do_what_they_did_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    settings = {"train_batch_size": 1, "checkpoint": {"save_on_signal": True}, "optimizer": {"type": "AdamW"}}
    engine = shoal.initialize(model=torch.nn.Linear(4, 2), config=settings)[0]
    assert signal.getsignal(signal.SIGTERM) != before
    engine.destroy()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_a_launcher_passes_on_counts_once_and_a_later_one_takes_its_course(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        stop = StopSignal((signal.SIGINT,))
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop.number, came) == (signal.SIGINT, [])
        monkeypatch.setattr("shoal.engine.parts.save_on_signal._SAME_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGINT)
        assert came == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_two_ranks_whose_launcher_is_told_to_stop_leave_a_checkpoint_of_one_step(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", "--stop-seconds", "60"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, str(tmp_path / "script.py"), str(tmp_path)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as job:  # fmt: skip
        deadline = time.monotonic() + 100
        while not (tmp_path / "step0").exists() and time.monotonic() < deadline and job.poll() is None:
            time.sleep(0.05)
        job.terminate()
        output, _ = job.communicate(timeout=90)
    assert job.returncode == 128 + signal.SIGTERM, output
    saved = sorted(path.name for path in (tmp_path / "saved").glob("global_step*"))
    assert len(saved) == 2, output
    step = max(int(name.removeprefix("global_step")) for name in saved)
    assert step >= 1
    assert f"step {step} is saved in" in output
    assert json.loads((tmp_path / "step0").read_text()) in (step, step - 1)
