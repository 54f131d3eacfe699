"""The tests in tests/device: how many pass, and which do not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as tree
from collections.abc import Iterable
from pathlib import Path

from benchmarks.arena import ROOT
from benchmarks.first_gpu.common import Finding, Setting, main

SHOWN = 40  # tests that did not pass
RESERVE_SECONDS = 15.0  # for what is written after the tests


def check(setting: Setting) -> Iterable[Finding]:
    missing = [name for name in ("pytest", "pytest_timeout", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding("tests/device", None, f"not run: {', '.join(missing)} not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = "tests/device" if setting.is_gpu else "tests/device/test_recompute_gpu.py"
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", tests, f"--junitxml={report}"]
        if setting.is_gpu and importlib.util.find_spec("xdist") is not None:
            command += ["-n", "4"]  # the GPU takes turns among processes
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=max(10.0, setting.seconds - RESERVE_SECONDS),
            )
            output = done.stdout.decode()
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode()
        print(output)
        if report.exists():
            yield from findings_of(tree.parse(report).getroot())
        else:
            yield from unfinished(output)


def unfinished(output: str) -> Iterable[Finding]:
    """What the output of ``pytest -v`` says of tests that ran before it was ended."""
    lines = [line.split() for line in output.splitlines() if "::" in line]
    passed, failed = (
        [next(word for word in line if "::" in word) for line in lines if verdict in line]
        for verdict in ("PASSED", "FAILED")
    )
    yield Finding("tests/device", False, f"not finished: {len(passed)} passed, {len(failed)} failed", "all pass")
    for name in dict.fromkeys(failed[:SHOWN]):
        yield Finding(name[:200], False, "see the log")


def findings_of(report: tree.Element) -> Iterable[Finding]:
    """The counts of a JUnit report, and each test that failed."""
    cases = list(report.iter("testcase"))
    skipped = sum(case.find("skipped") is not None for case in cases)
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    passed = len(cases) - skipped - len(failed)
    yield Finding("tests/device", not failed, f"{passed} passed, {len(failed)} failed, {skipped} skipped", "all pass")
    for case in failed[:SHOWN]:
        problem = next(each for each in (case.find("failure"), case.find("error")) if each is not None)
        lines = (problem.get("message") or "").strip().splitlines()
        yield Finding(f"{case.get('classname')}::{case.get('name')}"[:200], False, (lines or ["no message"])[0][:200])


if __name__ == "__main__":
    main(check, __doc__)
