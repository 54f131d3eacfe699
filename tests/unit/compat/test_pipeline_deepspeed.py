"""DeepSpeed's names of the pipeline: the modules they are in, and its schedules as data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

import shoal
from shoal.compat import finder
from shoal.compat.pipe_schedule import DataParallelSchedule, InferenceSchedule, PipeInstruction, TrainSchedule


@pytest.fixture
def deepspeed_alias() -> Iterator[None]:
    finder.install(children=False)
    yield
    finder.uninstall()


@pytest.mark.usefixtures("deepspeed_alias")
def test_the_names_of_deepspeed_are_shoals_classes() -> None:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe import ProcessTopology
    from deepspeed.runtime.pipe.module import PipelineError
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    assert deepspeed.PipelineModule is PipelineModule is shoal.PipelineModule
    assert (LayerSpec, TiedLayerSpec) == (shoal.LayerSpec, shoal.TiedLayerSpec)
    assert issubclass(PipeDataParallelTopology, ProcessTopology)
    with pytest.raises(PipelineError):
        PipelineModule([])


def text(steps: Any) -> list[str]:
    """Each step as letters: load, forward, backward, send and receive; then buffers."""
    short = {
        "LoadMicroBatch": "L",
        "ForwardPass": "F",
        "BackwardPass": "B",
        "SendActivation": "sa",
        "RecvActivation": "ra",
        "SendGrad": "sg",
        "RecvGrad": "rg",
        "ReduceGrads": "reduce",
        "ReduceTiedGrads": "tied",
        "OptimizerStep": "step",
    }
    return [" ".join(f"{short[i.name]}{i.kwargs.get('buffer_id', '')}" for i in step) for step in steps]


def test_a_training_schedule_is_1f1b() -> None:
    assert text(TrainSchedule(micro_batches=3, stages=2, stage_id=0)) == [
        "L0 F0",
        "sa0",
        "L1 F1",
        "rg0 sa1 B0",
        "L0 F0",
        "rg1 sa0 B1",
        "",
        "rg0 B0 tied reduce step",
    ]
    assert text(TrainSchedule(micro_batches=3, stages=2, stage_id=1)) == [
        "",
        "ra0 L0 F0",
        "B0",
        "sg0 ra1 L1 F1",
        "B1",
        "sg1 ra0 L0 F0",
        "B0",
        "sg0 tied reduce step",
    ]
    assert text(TrainSchedule(2, 1, 0)) == ["L0 F0", "B0", "L1 F1", "B1 tied reduce step"]
    assert [TrainSchedule(8, 4, stage).num_pipe_buffers() for stage in range(4)] == [4, 3, 2, 2]


def test_an_inference_schedule_overlaps_sends_with_the_next_micro_batch() -> None:
    schedules = [InferenceSchedule(3, 3, stage) for stage in range(3)]
    assert text(schedules[0]) == ["L0 F0", "L1 sa0 F1", "L0 sa1 F0", "sa0", ""]
    assert text(schedules[1]) == ["", "ra0 F0", "ra1 sa0 F1", "ra0 sa1 F0", "sa0"]
    assert text(schedules[2]) == ["", "", "L0 ra0 F0", "L1 ra1 F1", "L0 ra0 F0"]
    assert list(schedules[0]) == list(schedules[0])  # iterated again


@pytest.mark.parametrize("kind", [TrainSchedule, InferenceSchedule])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_sends_match_receives_of_the_same_step(kind: Any, micro_batches: int, stages: int) -> None:
    steps = [list(kind(micro_batches, stages, stage)) for stage in range(stages)]

    def count(step: list[PipeInstruction], name: str) -> int:
        return [instruction.name for instruction in step].count(name)

    for before, after in pairwise(steps):
        for left, right in zip(before, after, strict=True):
            assert count(left, "SendActivation") == count(right, "RecvActivation")
            assert count(left, "RecvGrad") == count(right, "SendGrad")
    for of_stage in steps:
        assert sum(count(step, "ForwardPass") for step in of_stage) == micro_batches


def test_a_data_parallel_schedule_steps_after_the_last_micro_batch() -> None:
    schedule = DataParallelSchedule(micro_batches=2, stages=1, stage_id=0)
    assert text(schedule) == ["L0 F0 B0", "L0 F0 B0 reduce step"]
    assert (schedule.num_pipe_buffers(), schedule.num_stages, schedule.is_last_stage) == (1, 1, True)
    assert repr(next(iter(schedule))[0]) == "LoadMicroBatch(buffer_id=0)"
