"""Any two settings together train as one process in plain PyTorch does; three together: tests/nightly."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from shoal.errors import ShoalError
from shoal.sharding.partition import UnitRules
from shoal.sharding.unit import Unit
from tests.helpers.composition import (
    AXES,
    FOLDED,
    REFUSALS,
    WHOLE,
    Combination,
    all_pairs,
    covering,
    is_allowed,
    named,
    num_ranks,
    plainest,
    refused,
    settings_of,
)
from tests.helpers.composition_runs import check, check_run, train

PAIRS = all_pairs()
INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2}, "run": {"blocks": 4}}


def cases(combinations: list[Combination]) -> list[Any]:
    """Each a test; one that compiles has the time for that on a busy machine.

    Of four ranks each compiles by itself: there the other settings run uncompiled, and all of them in tests/nightly.
    """
    slow = [pytest.mark.timeout(240)]
    combinations = [{**each, "compile": "no"} if num_ranks(each) > 2 else each for each in combinations]
    return [
        pytest.param(each, id=named(each), marks=slow if each.get("compile") == "yes" else ()) for each in combinations
    ]


@pytest.mark.parametrize("combination", cases(PAIRS))
def test_any_two_settings_together_end_where_one_process_ends(combination: Combination) -> None:
    check(combination)


VIRTUAL = plainest() | {"pp": "2", "schedule": "zbv"}


@pytest.mark.parametrize(
    "more",
    [
        {"stage": "2", "tp": "2 split"},
        {"stage": "3", "ranks": "4", "hybrid": "replicas"},
        {"stage": "2", "ranks": "4", "hybrid": "mics", "state": "host"},
    ],
    ids=str,
)
def test_gradients_reduced_between_passes_of_virtual_stages_are_summed_once_over_other_axes(more: Combination) -> None:
    """Three settings, of which pairs find no fault."""
    check({**VIRTUAL, **more})


PACKED = covering(
    2,
    {
        "schedule": {**AXES["schedule"], "interleaved": INTERLEAVED},
        **{axis: {value: AXES[axis][value] for value in ("1", "2")} for axis in ("tp", "sp", "cp")},
        "recompute": {value: AXES["recompute"][value] for value in ("no", "blocks")},
        "documents": {value: AXES["documents"][value] for value in ("packed", "ids")},
    },
    most_ranks=2,  # of a stage
)


@pytest.mark.parametrize("more", [pytest.param(each, id=" ".join(each.values())) for each in PACKED])
def test_packed_documents_reach_every_pipeline_stage(more: Combination) -> None:
    axes = {**AXES, "schedule": {**AXES["schedule"], "interleaved": INTERLEAVED}}
    plain = plainest()
    check_run(*settings_of({**plain, "stage": "1", "ranks": "1", "pp": "2", "accumulation": "2", **more}, axes))


@pytest.mark.parametrize(
    "more",
    [
        {"stage": "1", "ranks": "1", "pp": "2", "schedule": "zbv", "tp": "4 split", "experts": "ep 2"},
        {"stage": "2", "ranks": "1", "pp": "2", "tp": "4", "experts": "ep 1", "optimizer": "momentum"},
        {"stage": "3", "ranks": "2", "tp": "4", "experts": "ep 4", "built": "zero.Init", "between": "resume"},
        {"stage": "3", "ranks": "2", "tp": "4 split", "experts": "ep 1", "built": "zero.Init", "hybrid": "hpz"},
        {"stage": "3", "ranks": "2", "tp": "4 split", "experts": "ep 2", "parameters": "host", "gathering": "late"},
        {"stage": "2", "ranks": "2", "tp": "4 split", "experts": "ep 1", "hybrid": "replicas", "loss": "token"},
        {"stage": "1", "ranks": "2", "tp": "4 split", "experts": "ep 2", "hybrid": "mics", "buckets": "narrow"},
        {"stage": "3", "ranks": "1", "sp": "2", "tp": "4 split", "experts": "ep 2", "recompute": "blocks"},
        {"stage": "0", "ranks": "1", "cp": "2", "tp": "4", "experts": "ep 4", "backward": "loss"},
        {"stage": "2", "ranks": "2", "tp": "4 split", "experts": "ep 4", "precision": "bf16", "state": "host"},
    ],
    ids=str,
)
def test_experts_split_over_some_tensor_parallel_ranks_go_with_the_other_axes(more: Combination) -> None:
    plain = plainest(FOLDED)
    check_run(*settings_of({**plain, "clipping": "yes", "accumulation": "2", **more}, FOLDED))


@pytest.mark.parametrize(
    "more",
    [
        {"stage": "3", "ranks": "4", "tp": "2 split", "experts": "ep 2 split", "hybrid": "hpz", "state": "ratio"},
        {"stage": "2", "ranks": "4", "tp": "2", "state": "host", "host memory": "apart", "heads": "6 and 3"},
        {"stage": "1", "ranks": "2", "pp": "2", "schedule": "zb_h1", "hybrid": "mics", "overlap": "yes"},
        {"stage": "3", "ranks": "2", "state": "disk", "parameters": "disk", "between": "resume", "spare": "unused"},
        {"stage": "3", "ranks": "2", "tp": "2", "optimizer": "Lamb", "experts": "ep 2", "spare": "frozen"},
    ],
    ids=named,
)
def test_optimizers_of_whole_tensors_go_with_the_other_axes(more: Combination, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.running.step.BATCH_NUMEL", 400)  # a few units in a call, of which several are under way
    plain = plainest(WHOLE)
    check_run(*settings_of({**plain, "clipping": "yes", **more}, WHOLE))


def test_a_parameter_that_one_of_a_ranks_stages_reads_waits_for_its_update() -> None:
    """Its unit's module is a list, which nothing calls, and the other stage does not read it."""
    more = {"stage": "2", "ranks": "1", "pp": "2", "schedule": "zbv", "units": "root", "sharing": "module"}
    check({**plainest(), **more, "state": "host", "overlap": "yes"})


@pytest.mark.parametrize(
    "more",
    [
        {"ranks": "2", "tp": "2", "pp": "2", "experts": "ep 2 split", "hybrid": "hpz", "parameters": "disk"},
        {"tp": "2 split", "sp": "2", "experts": "ep 4", "parameters": "host", "recompute": "host"},
        {"ranks": "4", "experts": "ep 2", "hybrid": "mics", "parameters": "disk", "state": "disk", "clipping": "yes"},
        {"ranks": "2", "cp": "2", "experts": "ep 1", "parameters": "disk", "compile": "yes"},
        {"ranks": "2", "experts": "ep 2", "parameters": "host", "between": "resume"},
    ],
    ids=named,
)
def test_experts_gathered_if_used_end_where_one_process_ends(
    more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.engine.settings.UnitRules", partial(UnitRules, min_block_numel=1))
    plain = plainest()
    settings, run = settings_of({**plain, "stage": "3", "accumulation": "2", **more})
    settings["expert_parallel"] = {**settings["expert_parallel"], "gather_if_used": True}
    of_experts: list[Unit] = []
    build = Unit.__init__

    def note(unit: Unit, *args: Any, **keys: Any) -> None:
        build(unit, *args, **keys)
        if unit.if_used is not None:
            of_experts.append(unit)

    monkeypatch.setattr(Unit, "__init__", note)
    check_run(settings, run)
    assert of_experts


@pytest.mark.parametrize(("combination", "code"), [pytest.param(c, code, id=named(c)) for c, code in refused()])
def test_settings_that_exclude_each_other_are_refused_with_a_code(combination: Combination, code: str) -> None:
    with pytest.raises(ShoalError) as caught:
        train(*settings_of(combination))
    assert caught.value.code == code


def test_every_two_values_of_different_axes_are_covered_or_refused() -> None:
    axes = list(AXES)
    for index, one in enumerate(axes):
        for other in axes[index + 1 :]:
            found = {(row[one], row[other]) for row in PAIRS}
            for pair in ((a, b) for a in AXES[one] for b in AXES[other]):
                assert (pair in found) == is_allowed(dict(zip((one, other), pair, strict=True)))
    assert {axis for each in REFUSALS for axis in each.values} <= set(AXES)


def test_any_three_values_that_no_number_of_ranks_completes_are_left_out() -> None:
    """Replicas with local steps of experts that are split over tensor-parallel ranks, in a pipeline: 16 ranks."""
    axes = {axis: AXES[axis] for axis in ("ranks", "tp", "pp", "experts", "hybrid")}
    found = {(row["pp"], row["experts"], row["hybrid"]) for row in covering(3, axes)}
    assert ("2", "ep 2 split", "local steps") not in found
    assert {("1", "ep 2 split", "local steps"), ("2", "ep 2", "local steps"), ("2", "ep 2 split", "mics")} <= found


def test_three_values_are_completed_where_the_first_choice_of_the_other_axes_does_not_fit() -> None:
    """Four expert-parallel ranks with one data-parallel rank: the axes that are chosen last must not be of one rank."""
    axes = {axis: AXES[axis] for axis in ("stage", "ranks", "tp", "sp", "cp", "experts", "hybrid")}
    found = {(row["stage"], row["ranks"], row["experts"]) for row in covering(3, axes)}
    assert {(str(stage), "1", "ep 4") for stage in range(4)} <= found


def test_one_more_axis_is_one_more_line() -> None:
    axes = {**AXES, "order": {"1": {}, "2": {"run": {"order": 2}}}}
    rows = covering(2, axes)
    assert {(row["order"], row["stage"]) for row in rows} == {(order, stage) for order in "12" for stage in "0123"}
    assert len(rows) <= len(PAIRS) + 6


def test_a_value_that_is_refused_with_every_value_of_another_axis_is_an_error() -> None:
    hopeless = {"stage": {"0": {}}, "state": {"host": {}, "disk": {}}, "heads": AXES["heads"]}
    with pytest.raises(ValueError, match="is refused together with every value of another axis"):
        covering(2, hopeless)
