"""A step of a combination of the matrix by type."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from shoal.simulation.verify import TypeReport, verify
from tests.helpers.compiling import CountsGraphs
from tests.helpers.composition import AXES, Combination, Values, on_disk, settings_of
from tests.helpers.composition_runs import Trainer

# What no dry run can do: compiled code is not seen, files, the choice of experts to move and starts of documents have
# values, and parameters of fake tensors cannot be cast in place by ``model.to()``.
_NEEDS_VALUES: dict[str, tuple[str, ...]] = {
    "compile": ("yes",),
    "between": ("resume", "resume async"),
    "experts": ("ep 2 moved",),
    "passed in": ("the compute dtype",),
    "documents": ("packed", "ids"),
}
TYPED_AXES: dict[str, Values] = {
    axis: {value: made for value, made in values.items() if value not in _NEEDS_VALUES.get(axis, ())}
    for axis, values in AXES.items()
}
PLAIN: Combination = {axis: next(iter(values)) for axis, values in AXES.items()}


def typed_step(combination: Combination) -> TypeReport:
    """What a step has. Wire formats and recipes are the real ones."""
    settings, run = settings_of(combination)
    settings.pop("debug", None)  # ranks that compare what they hold alike read values
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        settings = on_disk(settings, name)

        def train() -> None:
            torch.set_autocast_cache_enabled(False)
            trainer = Trainer(settings, run, Path(name), CountsGraphs("aot_eager"))
            trainer.step(0)
            trainer.engine.destroy()

        return verify(train, run.world_size, num_stages=run.pp)
