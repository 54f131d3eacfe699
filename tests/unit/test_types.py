"""What type checkers know of an engine.

mypy reads this file with the library (``make lint``): where it finds no error, ``type: ignore`` is one.
"""

from __future__ import annotations

from typing import assert_type

import pytest
import torch
from torch import nn

import shoal


def test_a_misspelt_method_is_an_error_of_type_checkers_and_names_the_method_that_was_meant() -> None:
    model = nn.Linear(4, 4)
    engine, optimizer, loader, schedule = shoal.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config={"train_batch_size": 1}
    )
    assert_type(engine, shoal.Engine)
    assert_type(engine.global_steps, int)
    engine.backward(engine(torch.ones(1, 4)).sum())
    optimizer.zero_grad()
    assert loader is None and schedule is None
    with pytest.raises(AttributeError, match=r"and its model \(Linear\) have no .*; did you mean 'save_checkpoint'"):
        engine.save_checkpont("runs")  # type: ignore[operator]
    with pytest.raises(AttributeError):
        optimizer.zero_gard()  # type: ignore[union-attr]
    with pytest.raises(AttributeError, match=r"'nothing_like_it'$"):
        _ = engine.nothing_like_it
    assert engine.in_features == 4  # the model's
    with pytest.raises(AttributeError, match=r"is a name of DeepSpeed's.*\n.*use engine\.properties\.config\.fp16\."):
        engine.fp16_enabled()  # type: ignore[operator]
    with pytest.raises(AttributeError, match="needs a model in pipeline stages"):
        engine.train_batch()
    with pytest.raises(AttributeError):
        shoal.initialise(model=model)  # type: ignore[attr-defined]
    engine.destroy()


def test_the_parts_that_the_documentation_names_are_there_after_import_shoal() -> None:
    assert shoal.data.RepeatingLoader is not None and shoal.parallel is not None and shoal.models is not None
