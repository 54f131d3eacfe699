"""A dry run of any two settings sends, holds and reads what ranks do that compute values."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.comm.recorder import Entry
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.parallel import activations
from tests.helpers.any_two import ALL_ROWS
from tests.helpers.compiling import CountsGraphs
from tests.helpers.composition import Combination, Values, covering, on_disk, settings_of
from tests.helpers.stream_matrix import STREAM_AXES, CheckedTrainer, accelerator_of_thread, named

# What no dry run can do: files and the choice of experts have values.
DRY_AXES: dict[str, Values] = {
    axis: {value: made for value, made in values.items() if value not in ("resume", "exception", "save")}
    for axis, values in STREAM_AXES.items()
}
PAIRS = covering(2, DRY_AXES, seed=2, most_ranks=4)
SOME = PAIRS if ALL_ROWS else PAIRS[3:5]


# Checks of values in the first steps, whose host reads a dry run has not: batches that are alike on ranks.
CHECKS = ("digest.py",)


@dataclass
class Step:
    """What one step of a rank sends, by call; what it holds after it, in bytes; and where its host reads the device."""

    sent: list[tuple[Any, ...]]
    held: Counter[tuple[str, str]]
    reads: Counter[str]


def sent_of(entry: Entry) -> tuple[Any, ...]:
    """Without the bytes of what a router decides: a dry run has as many rows for each expert."""
    nbytes = None if entry.axis == "ep" and entry.op == "all_to_all" else entry.nbytes
    return entry.axis, entry.op, entry.label, nbytes, entry.dtype, entry.kind


class StepTrainer(CheckedTrainer):
    def steps(self) -> list[Step]:
        found = []
        for step in range(3):
            before = accelerator_of_thread().host_reads.copy()
            with current_world().recorder.recording() as entries:
                self.step(step)
            reads = accelerator_of_thread().host_reads - before
            held: Counter[tuple[str, str]] = Counter()
            for entry in self.engine.memory_report().entries:
                held[entry.kind, entry.tier] += entry.nbytes
            # The rest of these two is scratch of communicators, which is the transport's, and what disks read ahead.
            held["buffers in flight", "device"] = sum(each.nbytes for each in self.engine.sharded.staging)
            del held["buffers in flight", "host"], held["registered, free", "device"]
            sent = [
                sent_of(entry)
                for entry in entries
                # Objects, and the forms of messages between stages, which a dry run's stages hand over without sending.
                if entry.op != "gather_objects" and not entry.label.endswith("structure")
            ]
            places = {re.sub(r":\d+", "", place): num for place, num in reads.items()}
            counted = Counter({place: num for place, num in places.items() if not any(map(place.count, CHECKS))})
            found.append(Step(sent, +held, counted))
            if step == 1:
                getattr(self, self.run.between)()
        self.engine.destroy()
        return found


def steps_of(combination: Combination) -> tuple[dict[int, list[Step]], dict[int, list[Step]]]:
    settings, run = settings_of(combination, DRY_AXES)
    run = replace(run, blocks=2 if run.blocks == 3 else run.blocks)
    settings.pop("debug", None)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "LEAST_NBYTES", 0)
        settings = on_disk(settings, name)

        def train() -> list[Step]:
            return StepTrainer(settings, run, Path(name), CountsGraphs("aot_eager")).steps()

        def rank() -> list[Step]:
            with shoal.check_streams(raises=False):
                return train()

        real = run_ranks(run.world_size, rank, timeout=120)
        dry: dict[int, list[Step]] = {}
        if run.pp > 1:
            shoal.dry_run_pipeline(lambda _: dry.__setitem__(current_world().rank, train()), run.world_size, run.pp)
        else:
            for number in sorted({0, run.world_size - 1}):
                with shoal.dry_run(run.world_size, number):
                    dry[number] = train()
    return {number: real[number] for number in dry}, dry


@pytest.mark.timeout(240)
@pytest.mark.parametrize("combination", SOME, ids=map(named, SOME))
def test_a_step_of_a_dry_run_is_that_of_ranks(combination: Combination) -> None:
    real, dry = steps_of(combination)
    for number, steps in dry.items():
        for step, (found, expected) in enumerate(zip(steps, real[number], strict=True)):
            assert found.sent == expected.sent, (number, step)
            assert found.held == expected.held, (number, step)
        assert found.reads == expected.reads and found.reads.total() > 0, number
    assert any(step.sent for steps in dry.values() for step in steps)
