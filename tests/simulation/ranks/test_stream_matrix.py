"""Settings together: streams wait for each other where they must; any two: ``make test-nightly``."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from shoal.comm.nccl import NcclCommunicator
from shoal.comm.protocol import Call
from tests.helpers.any_two import ALL_ROWS
from tests.helpers.composition import Combination, covering
from tests.helpers.stream_cases import of_matrix
from tests.helpers.stream_matrix import (
    STREAM_AXES,
    BlockOnTwoStreams,
    checks_of,
    named,
    plain,
    reports,
)

PAIRS = covering(2, STREAM_AXES, seed=2, most_ranks=4)  # this seed gives fewer than others
FIRST = PAIRS[:12]  # they have 85 of 100 pairs: each next row is the one that adds the most


@pytest.mark.timeout(150)  # a row takes 30 s on a slow machine; ranks that hang end by their own limit
@pytest.mark.parametrize("combination", PAIRS if ALL_ROWS else FIRST, ids=named)
def test_the_streams_of_settings_together_wait_where_they_must(combination: Combination) -> None:
    found = checks_of(combination)
    assert reports(found) == ""
    assert min(check.num_operations for check in found) > 500


def test_the_rows_of_each_run_have_every_setting() -> None:
    assert {axis: {row[axis] for row in FIRST} for axis in STREAM_AXES} == {a: {*v} for a, v in STREAM_AXES.items()}


@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_stream_of_the_model_that_is_not_waited_for_is_found(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    combination = {**plain(), "stage": stage, "stream": "of the model"}
    assert reports(checks_of(combination)) == ""
    monkeypatch.setattr(BlockOnTwoStreams, "waits", False)
    found = reports(checks_of(combination))
    assert "must wait for copy stream" in found and "stream_matrix.py" in found
    assert "must wait for the compute stream, before the second operation" in found


@pytest.mark.parametrize(
    "more",
    [
        {"stage": "2", "ranks": "1", "cp": "2", "state": "ahead", "parameters": "disk", "wire": "yes"},
        {"stage": "1", "state": "ahead", "parameters": "host", "precision": "fp16", "wire": "difference"},
        {"stage": "2", "state": "host", "recompute": "offload", "between": "evaluation", "stream": "of the model"},
        {"stage": "2", "hybrid": "mics", "accumulation": "2", "between": "save"},
        {"stage": "1", "state": "host", "accumulation": "2", "wire": "difference", "stream": "of the script"},
    ],
    ids=str,
)
def test_gathers_in_the_next_forward_wait_where_they_must(more: Combination) -> None:
    """``overlap_param_gather``; with an optimizer on the host the copy stream allocates what is gathered from."""
    assert reports(checks_of({**plain(), **more, "overlap": "yes"})) == ""


def test_after_an_error_in_a_pipeline_no_copy_of_a_gradient_is_under_way() -> None:
    """Recovery ends reductions, whose results an optimizer on the host then copies."""
    combination = {**plain(), "stage": "1", "pp": "2", "state": "ahead", "between": "exception"}
    assert reports(checks_of(combination)) == ""


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_outputs_and_gradients_of_a_pipeline_are_on_two_communicators(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank of two receives outputs and gradients over groups of their own, one message at a time."""
    labels: defaultdict[object, set[str]] = defaultdict(set)
    before = NcclCommunicator.issue

    def issue(comm: NcclCommunicator, call: Call) -> Any:
        if comm.axis == "pp":
            assert call.verb != "batch"
            if call.verb in ("send", "recv") and "structure" not in call.label:
                labels[comm].add(call.label.split()[2][0])  # "stage 1 F0"
        return before(comm, call)

    monkeypatch.setattr(NcclCommunicator, "issue", issue)
    more = {"gradient_accumulation_steps": 4, "pipeline": {"schedule": schedule}}
    assert reports(of_matrix({"pp": "2"}, more=more)) == ""
    assert sorted(map(sorted, labels.values())) == [["B"]] * 4 + [["F"]] * 4
