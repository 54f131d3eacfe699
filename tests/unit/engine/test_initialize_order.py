"""``initialize`` reads top to bottom: the model visits each part of the engine once, in the order of the file."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import shoal

ENGINE = Path(shoal.__file__).parent / "engine"


def test_the_model_returns_to_no_part_of_the_engine() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    visited: list[str] = []

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event != "call" or path.parent not in (ENGINE, ENGINE / "parts"):
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(frame.f_locals.get(name) is model for name in arguments) and visited[-1:] != [path.stem]:
            visited.append(path.stem)

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        engine = shoal.initialize(model=model, config=config)[0]
    finally:
        sys.setprofile(previous)
    engine.destroy()
    parts = ["model_parts", "client_optimizer", "offload", "activations", "compiled"]
    assert visited == ["entry", "initialize", *parts]
