"""The time of a run by category: a log that is written, and logs of several starts that are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import UsageError
from shoal.observe import goodput
from shoal.observe.goodput import GoodputLog, read_goodput


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def sections(time: float, steps: int, /, **seconds: float) -> dict[str, Any]:
    return {"time": time, "event": "sections", "step": steps, "seconds": seconds}


def start(began: float, time: float, init: float, ranks: int = 2) -> dict[str, Any]:
    return {"time": time, "event": "start", "began": began, "init": init, "step": 0, "ranks": ranks}


def test_work_after_the_checkpoint_that_the_next_start_loads_is_lost(tmp_path: Path) -> None:
    path = write(
        tmp_path / "log",
        start(100.0, 105.0, init=3.0),
        sections(126.0, 20, step=20.0, data=1.0),
        sections(128.0, 20, checkpoint=2.0),
        sections(139.0, 30, step=10.0, data=1.0),  # its second half is lost with the steps before: killed at 139
        start(150.0, 154.0, init=3.0),
        sections(155.0, 0, data=1.0),
        sections(156.0, 20, checkpoint=1.0),
        sections(177.0, 40, step=20.0, data=1.0, evaluation=0.0),
    )
    with path.open("a") as file:
        file.write('{"time": 18')  # cut off by the kill
    found = read_goodput(path)
    assert dict(found.seconds) == pytest.approx(
        {
            "productive": 40.0, "data": 3.0, "compile": 0.0, "evaluation": 0.0, "checkpoint save": 2.0,
            "checkpoint restore": 1.0, "start-up": 3.0, "initialization": 6.0, "lost progress": 11.0,
            "recovery": 11.0, "elastic change": 0.0,
        }
    )  # fmt: skip
    assert found.total == pytest.approx(77.0)  # from 100 to 177
    assert (found.num_starts, found.num_steps) == (2, 40)
    assert found.share == pytest.approx(40 / 77)
    assert found.rows()[0] == ("productive", "40.0", "51.9%", "forward, backward and step, of steps that count")


def test_a_line_whose_steps_are_lost_in_part_counts_in_part(tmp_path: Path) -> None:
    path = write(
        tmp_path / "log",
        start(0.0, 1.0, init=1.0),
        sections(11.0, 10, step=10.0),
        start(11.0, 12.0, init=1.0),
        sections(12.5, 4, checkpoint=0.5),
        sections(18.5, 10, step=6.0),
    )
    found = read_goodput(path)
    assert found.seconds["productive"] == pytest.approx(10.0)
    assert found.seconds["lost progress"] == pytest.approx(6.0)


def test_a_start_with_other_ranks_is_an_elastic_change(tmp_path: Path) -> None:
    path = write(tmp_path / "log", start(0.0, 1.0, 1.0), start(31.0, 32.0, 1.0, ranks=4))
    found = read_goodput(path)
    assert (found.seconds["elastic change"], found.seconds["recovery"]) == (30.0, 0.0)


@pytest.mark.parametrize(("text", "said"), [(None, "cannot be read"), ("", "has no start"), ("[", "has no start")])
def test_a_file_that_is_no_log_is_refused(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "log").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_goodput(tmp_path / "log")


def test_a_log_sums_sections_and_writes_at_times_and_at_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(goodput.time, "time", lambda: now[0])
    monkeypatch.setattr(goodput, "_process_began", lambda otherwise: otherwise - 2.0)
    log = GoodputLog(tmp_path / "new" / "log", 2)
    for seconds, section, step in [
        (3.0, "data", 0), (1.0, "step", 0), (4.0, "data", 1), (1.0, "step", 1), (4.0, "data", 2),
        (0.5, "checkpoint", 2), (2.0, "data", 2), (0.5, "step", 2), (1.0, "data", 3),
    ]:  # fmt: skip
        now[0] += seconds
        log.enter(section, step)
    log.close()
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "new" / "log").read_text().splitlines()]
    assert [line.get("seconds", line.get("init")) for line in lines] == [
        3.0, {"data": 2.0, "step": 8.0}, {"data": 0.5}, {"checkpoint": 2.0}, {"data": 0.5, "step": 1.0},
    ]  # fmt: skip
    found = read_goodput(tmp_path / "new" / "log")
    assert found.total == pytest.approx(2.0 + 17.0)
    assert found.seconds["productive"] == pytest.approx(9.0)
    assert found.seconds["checkpoint save"] == pytest.approx(2.0)


def test_an_engine_writes_its_sections_and_goes_on_in_the_same_file(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "goodput": {"file": str(tmp_path / "log")},
    }
    for attempt in range(2):
        engine, *_ = shoal.initialize(model=torch.nn.Linear(4, 1), config=config)
        if attempt:
            engine.load_checkpoint(tmp_path / "saved")
        with torch.no_grad():
            engine(torch.ones(1, 4))
        for _ in range(3):
            engine.backward(engine(torch.ones(1, 4)).sum())
            engine.step()
            if engine.global_steps == 2:
                engine.save_checkpoint(tmp_path / "saved")
        engine.destroy()
    found = read_goodput(tmp_path / "log")
    assert (found.num_starts, found.num_steps) == (2, 5)
    for category in ("productive", "initialization", "evaluation", "checkpoint save", "checkpoint restore"):
        assert found.seconds[category] > 0.0, category
    assert found.seconds["lost progress"] > 0.0  # the third step of the first start
