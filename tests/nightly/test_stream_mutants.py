"""Every wait of the library is deleted, one after the other: the check of streams reports it, or it is explained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.places import ROOT
from tests.helpers.stream_mutants import RAN, reason

VERDICTS = {"found", "error", "covered", "known", "orders nothing", "not reached", "open"}


@pytest.mark.timeout(7200)
def test_every_wait_that_is_deleted_is_noticed_or_explained(tmp_path: Path) -> None:
    out = tmp_path / "mutants.json"
    subprocess.run([sys.executable, "-m", "tests.helpers.stream_mutants", "--out", str(out)], cwd=ROOT, check=True)
    found = json.loads(out.read_text())
    outcomes = found["outcomes"]
    assert found["faults"] == []  # a test that fails without a deletion says nothing about one
    assert {each["verdict"] for each in outcomes} <= VERDICTS
    needs_reason = [each for each in outcomes if each["verdict"] in ("not reached", "orders nothing", "open")]
    assert [each for each in needs_reason if reason(each["site"]) is None] == []
    # A site whose reason is a second wait ran in some scenario, and made no order there.
    assert [each for each in needs_reason if each["verdict"] != "orders nothing" and reason(each["site"]) in RAN] == []
    assert sum(each["verdict"] in ("found", "error") for each in outcomes) >= 100
