"""A long run holds what a short one does: from the eighth step on no objects of any type are more after each step."""

from __future__ import annotations

import gc
import threading
from collections import Counter

import pytest
import torch

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.helpers import composition_runs
from tests.helpers.any_two import ALL_ROWS
from tests.helpers.composition import Combination, all_pairs, named, settings_of

PAIRS = [{**row, "compile": "no"} for row in all_pairs()]
ROWS = PAIRS if ALL_ROWS else [PAIRS[1]]
COUNTED_AFTER = (8, 14, 20)  # steps
# What is kept of the last calls, and of layouts of sequences, up to a number.
BOUNDED = {"Group", "Tile", "Documents", "tuple", "Counter"}


def held() -> Counter[str]:
    """The objects of this process by their type."""
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects())


@pytest.mark.timeout(900)  # eight ranks that are threads take their turns
@pytest.mark.parametrize("combination", ROWS, ids=map(named, ROWS))
def test_a_long_run_holds_what_a_short_one_does(combination: Combination, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, run = settings_of(combination)
    meeting = threading.Barrier(run.world_size, timeout=800)
    found: list[Counter[str]] = []

    def train(self: composition_runs.Trainer) -> tuple[torch.Tensor, composition_runs.Values]:
        for step in range(max(COUNTED_AFTER)):
            self.step(step)
            if step + 1 in COUNTED_AFTER:
                meeting.wait()
                if current_world().rank == 0:
                    found.append(held())
                meeting.wait()
        self.engine.destroy()
        return torch.zeros(2), {}

    monkeypatch.setattr(composition_runs.Trainer, "train", train)
    monkeypatch.setattr(
        composition_runs, "run_ranks", lambda *args, **more: run_ranks(*args, **{**more, "timeout": 800})
    )
    composition_runs.train(settings, run)
    early, middle, late = found
    growing = {kind: late[kind] - middle[kind] for kind in late if early[kind] < middle[kind] < late[kind]}
    # What grows by less than one a step is a cache that fills.
    assert {kind: num for kind, num in growing.items() if kind not in BOUNDED and num >= 6} == {}
