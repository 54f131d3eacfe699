"""Every file of tests/ranks whose ranks are threads runs on the simulated accelerator: streams wait where they must."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.places import ROOT
from tests.helpers.stream_files import NO_THREADS

FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/ranks/**/test_*.py"))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("file", FILES)
def test_the_streams_of_a_file_of_tests_wait_where_they_must(file: str) -> None:
    command = [sys.executable, "-m", "tests.helpers.stream_files", file]
    found = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    if found.returncode == NO_THREADS:
        pytest.skip("its ranks are processes")
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]
