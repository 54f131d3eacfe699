"""The section `pipeline`: a model cut into pipeline stages, and the order in which ranks run them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from shoal.config.base import Auto, Section, key
from shoal.config.parallel import Degree
from shoal.config.problems import Problem
from shoal.text import did_you_mean

# By name, the pipeline stages that one rank may have; 0: any number.
SCHEDULES = {
    "gpipe": 0,
    "1f1b": 1,
    "interleaved_1f1b": 0,
    "interleaved_zero_bubble": 0,
    "zb_h1": 1,
    "zbv": 2,
    "dualpipev": 2,
}
INTERLEAVED = {"1f1b": "interleaved_1f1b", "zb_h1": "interleaved_zero_bubble"}
PARTITIONS = ("best", "parameters", "uniform", "memory", "time")


class Pipeline(Section):
    """A model cut into pipeline stages. `parallel.pp` gives the ranks as well."""

    stages: Degree = key("auto", "pipeline-parallel ranks; auto: parallel.pp")
    virtual_stages: int = key(1, "pipeline stages of one rank; zbv and dualpipev always have 2", ge=1)
    partition: str = key(
        "best", "how layers are divided: best (by parameters), parameters, uniform, memory, time, or type:REGEX"
    )
    split_points: tuple[str, ...] | Auto = key(
        "auto", "names of the modules that begin the second stage and those after it; auto: by partition"
    )
    first_stage: tuple[str, ...] = key((), "names of modules outside the blocks that the first stage calls")
    last_stage: tuple[str, ...] = key((), "names of modules outside the blocks that the last stage calls")
    every_stage: tuple[str, ...] = key((), "names of modules outside the blocks that every stage calls")
    schedule: str = key(
        "1f1b", f"order of the micro-batches' work: {', '.join(SCHEDULES)}, or the path of a file with one line a rank"
    )
    seed_layers: bool = key(False, "give each layer a seed of its own")
    activation_checkpoint_interval: int = key(
        0, "recompute activations in segments of this many layers; 0: never", ge=0
    )
    pipe_partitioned: bool = key(True, "send activations in tensor-parallel parts")
    grad_partitioned: bool = key(True, "send gradients in tensor-parallel parts")
    use_reentrant: bool | None = key(None, "reentrant activation checkpointing; null is true in DeepSpeed, false here")


def schedule_name(text: str) -> str | None:
    """The name in ``SCHEDULES`` that a text means, in any case, with - or _ or neither; None: a path.

    >>> schedule_name("Interleaved1F1B"), schedule_name("zero_bubble"), schedule_name("ZB-H1"), schedule_name("a.txt")
    ('interleaved_1f1b', 'interleaved_zero_bubble', 'zb_h1', None)
    """
    plain = text.casefold().replace("-", "").replace("_", "")
    plain = {"zerobubble": "interleavedzerobubble", "zbvzerobubble": "zbv"}.get(plain, plain)
    return {name.replace("_", ""): name for name in SCHEDULES}.get(plain)


def virtual_stages_problem(schedule: str, virtual_stages: int) -> tuple[str, str] | None:
    """Why a schedule of ``SCHEDULES`` cannot have so many stages on a rank, and what to do; None: it can.

    ``virtual_stages`` is 1 where the config has no such key, so schedules that always have two accept 1.
    """
    allowed = SCHEDULES[schedule]
    if not allowed or virtual_stages in (1, allowed):
        return None
    what = f"{allowed} pipeline stage{'s' * (allowed > 1)} a rank, and virtual_stages is {virtual_stages}"
    other = f", or use the schedule {INTERLEAVED[schedule]}" if schedule in INTERLEAVED else ""
    return what, f"set virtual_stages to {allowed}{other}."


def pipeline_problems(pipeline: Pipeline) -> Iterator[Problem]:
    """What the keys of the section allow one by one, and not together."""
    name = schedule_name(pipeline.schedule)
    if name is not None:
        problem = virtual_stages_problem(name, pipeline.virtual_stages)
        if problem:
            yield Problem("pipeline.virtual_stages", f"{name} has {problem[0]}.", problem[1], code="pipeline-schedule")
    elif not os.path.isfile(pipeline.schedule):  # pathlib raises where a name is too long
        hint = did_you_mean(pipeline.schedule, SCHEDULES) or "."
        what = f'"{pipeline.schedule}" is neither a schedule nor a file{hint}'
        do = f"write one of {', '.join(SCHEDULES)}, or the path of a file with one line a rank."
        yield Problem("pipeline.schedule", what, do, code="pipeline-schedule")
    kind, _, pattern = pipeline.partition.partition(":")
    if kind.casefold() == "type" and pattern:
        try:
            re.compile(pattern)
        except re.error as error:
            what = f'"{pipeline.partition}": {pattern!r} is not a regular expression: {error}.'
            yield Problem("pipeline.partition", what, "correct the expression after type:.")
    elif pipeline.partition.casefold() not in PARTITIONS:
        hint = did_you_mean(pipeline.partition, PARTITIONS) or "."
        what = f'"{pipeline.partition}" is not a way to divide layers{hint}'
        do = f"write one of {', '.join(PARTITIONS)}, or type:REGEX, such as type:Block."
        yield Problem("pipeline.partition", what, do)
    if pipeline.split_points != "auto" and isinstance(pipeline.stages, int) and name is not None:
        num_stages = pipeline.stages * (SCHEDULES[name] or pipeline.virtual_stages)
        if len(pipeline.split_points) != num_stages - 1:
            what = f"{len(pipeline.split_points)} modules, and {num_stages} pipeline stages have {num_stages - 1}"
            yield Problem(
                "pipeline.split_points", f"{what} boundaries.", "name the first module of each stage but the first."
            )
