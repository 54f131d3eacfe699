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


def check(setting: Setting) -> Iterable[Finding]:
    missing = [name for name in ("pytest", "pytest_timeout", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding("tests/device", None, f"not run: {', '.join(missing)} not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = "tests/device" if setting.is_gpu else "tests/device/test_recompute_gpu.py"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, f"--junitxml={report}"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not report.exists():
            yield Finding("tests/device", False, (done.stdout.strip().splitlines() or ["no output"])[-1][:300])
            return
        yield from findings_of(tree.parse(report).getroot())


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
