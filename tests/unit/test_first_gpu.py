"""The kit for the first day with a GPU: each check's logic in small sizes on the CPU, and the page."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as tree
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.arena import ROOT
from benchmarks.first_gpu import (
    delays,
    device_tests,
    exposed,
    host_parameters,
    kernels,
    memory,
    nccl,
    predict,
    step_time,
    synchronizations,
)
from benchmarks.first_gpu.__main__ import LIMITS, PARTS, Outcome, page, run
from benchmarks.first_gpu.common import Finding, Setting

CPU = Setting(torch.device("cpu"), True, 60.0)


@pytest.mark.parametrize(
    ("check", "number"),
    [(host_parameters, 2), (synchronizations, 2), (nccl, 5), (memory, 2), (kernels, 19), (exposed, 2)],
    ids=lambda value: getattr(value, "__name__", "").rpartition(".")[2] or None,
)
def test_a_check_runs_in_small_sizes_and_nothing_is_found_wrong(check: Any, number: int) -> None:
    found = list(check.check(CPU))
    assert len(found) == number
    assert [finding for finding in found if finding.held is False] == []


def test_delays_trains_with_the_same_bits_in_every_mode_and_reads_the_save_that_ran_beside_it() -> None:
    case = (3, ("param", "optimizer"), 2)
    answers = [delays.run_case(case, mode, CPU) for mode in ("as it is", "computing late")]
    assert answers[0] == answers[1]
    assert answers[0]["last"] != answers[0]["saved"]


def test_a_late_copy_sleeps_in_the_stream_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.memory.stream_copies import StreamCopies
    from tests.helpers.fake_streams import GPU, FakeStreams

    streams, slept = FakeStreams(monkeypatch), []
    monkeypatch.setattr(Setting, "sleep", lambda self, cycles: slept.append(streams.current.name))
    with delays.late_copies(CPU):
        StreamCopies(GPU).copy(torch.zeros(2), torch.zeros(2))
    StreamCopies(GPU).copy(torch.zeros(2), torch.zeros(2))
    assert len(slept) == 1 and slept[0] != "compute"


def test_the_step_of_a_contender_is_compared_with_the_loss_of_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"plain": 4.0, "shoal-3": 9.0}

    class Team:
        def __init__(self, name: str, *_: Any) -> None:
            self.name = name

        def wait_until_ready(self) -> None: ...

        def run(self, steps: int) -> Any:
            return [{"seconds": [0.5], "loss": losses[self.name], "peak_bytes": 2**30}], 0.0

        def close(self) -> None: ...

    monkeypatch.setattr(step_time, "Team", Team)
    plain, ours = step_time.check(CPU)
    assert plain.held and "32 tokens/s" in plain.measured
    assert ours.held is False and ours.key == "shoal-3" and ours.value == 500.0


def test_exposed_time_is_that_in_which_no_kernel_computes() -> None:
    spans = [
        ("gemm", "kernel", 0, 10),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 5, 10),  # 5 of its 10 are hidden
        ("ncclDevKernel_AllGather", "kernel", 12, 6),  # 3 beside the copy, 3 alone
        ("Memcpy DtoD", "gpu_memcpy", 20, 2),  # a kernel's work, after 2 in which nothing runs
    ]
    events = [{"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur} for name, cat, ts, dur in spans]
    found = exposed.exposed_times([*events, {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 0, "dur": 99}])
    assert {kind: 1e3 * value for kind, value in found.items()} == pytest.approx(
        {"all": 22, "compute": 12, "communication": 6, "copies": 2, "idle": 2}
    )
    assert exposed.exposed_times([])["all"] == 0.0


def test_failed_tests_are_listed_with_their_messages() -> None:
    report = tree.fromstring(
        "<testsuites><testsuite><testcase classname='a' name='passes'/><testcase classname='a' name='skips'><skipped/>"
        "</testcase><testcase classname='a' name='fails'><failure message='no stream&#10;more'/></testcase></testsuite>"
        "</testsuites>"
    )
    counts, failed = device_tests.findings_of(report)
    assert counts.held is False and counts.measured == "1 passed, 1 failed, 1 skipped"
    assert (failed.what, failed.measured) == ("a::fails", "no stream")


def test_tests_that_were_ended_are_counted_from_their_output() -> None:
    output = "x.py::one PASSED [ 1%]\n[gw0] [ 2%] FAILED x.py::two \n[gw1] [ 3%] PASSED x.py::three\nx.py::four "
    counts, failed = device_tests.unfinished(output)
    assert counts.measured == "not finished: 2 passed, 1 failed"
    assert failed.what == "x.py::two"


def test_a_check_that_crashes_or_hangs_keeps_what_it_found(tmp_path: Path) -> None:
    write = (
        "import json, sys, time; open(sys.argv[2], 'w').write(json.dumps({'what': 'x', 'held': True}) + '\\n'); "
        "print('said'); sys.stdout.flush(); "
    )
    crashed = run("crashed", [sys.executable, "-c", write + "sys.exit(3)"], 20.0, tmp_path)
    assert (crashed.problem, crashed.findings) == ("ended with exit code 3", [Finding("x", True)])
    hung = run("hung", [sys.executable, "-c", write + "time.sleep(60)"], 4.0, tmp_path)
    assert hung.problem == "was ended after 4 s" and "said" in hung.output


def test_the_page_says_what_held_and_what_did_not_against_what_was_predicted() -> None:
    found = [
        Finding("shoal-3", True, "120.0 ms", key="shoal-3", value=120.0),
        Finding("a | b", False, "other bits", "the same"),
        Finding("waits for copies", None, "4.0 ms", key="shoal-3/copies ms", value=4.0),
    ]
    text = page(
        [Outcome("step_time", found, 3.0), Outcome("nccl", [], 9.0, "was ended after 9 s", "a line")],
        {"shoal-3": {"ms": 100.0, "copies ms": 8.0}, "shoal-2": {"missing": "NotImplementedError: not there"}},
        "one GPU",
    )
    assert "**1 held, 1 did not, 1 of 2 checks did not end well.**" in text
    assert "- step_time: a / b: other bits" in text and "- nccl: was ended after 9 s" in text
    assert "| held | shoal-3 | 120.0 ms |  | 100.0 ms (measured 1.20 of it) |" in text
    assert "8.0 ms (measured 0.50 of it)" in text
    assert "Predictions are missing: NotImplementedError: not there." in text
    assert "none was made" in page([], {}, "")


def prediction(stage: int, places: tuple[str, ...], machine: str) -> dict[str, float]:
    """A predictor that a user names."""
    if stage == 0:
        raise ValueError("not stage 0")
    return {"ms": float(stage)}


def test_another_predictor_may_be_named_and_may_fail(tmp_path: Path) -> None:
    out = tmp_path / "predicted.json"
    predict.main(["--by", f"{__name__}:prediction", "--cases", "shoal-0", "shoal-3", "--out", str(out)])
    assert '"missing": "ValueError: not stage 0"' in out.read_text() and '"ms": 3.0' in out.read_text()


def test_all_checks_together_take_less_than_20_minutes_and_each_part_of_them_less_than_10() -> None:
    assert sum(LIMITS.values()) < 20 * 60
    assert sorted(check for part in PARTS for check in part) == sorted(LIMITS)
    assert all(sum(LIMITS[check] for check in part) < 10 * 60 for part in PARTS)


def test_a_package_that_is_missing_is_named_in_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['pydantic'] = None\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "benchmarks.first_gpu", "--device", "cpu"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.startswith(f"{sys.executable} has no pydantic, which Shoal needs.")
