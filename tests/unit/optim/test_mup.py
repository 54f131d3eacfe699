"""Rates by width: MuAdam, MuAdamW and MuSGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import shoal
from shoal.config import examine
from shoal.errors import OptimizerError
from shoal.optim.build import build


@dataclass
class Shape:
    """As ``mup.set_base_shapes`` records it: dims and how many times wider each is; 0: it does not grow."""

    growth: tuple[float, ...]

    def ninf(self) -> int:
        return sum(each > 0 for each in self.growth)

    def width_mult(self) -> float:
        return next((each for each in reversed(self.growth) if each), 1.0)

    def fanin_fanout_mult_ratio(self) -> float:
        return self.growth[1] / self.growth[0]


def parameters() -> dict[str, torch.nn.Parameter]:
    shapes = {"hidden": (2.0, 8.0), "input": (8.0, 0.0), "bias": (8.0,), "fixed": (0.0,)}
    made = {name: torch.nn.Parameter(torch.ones(*[4] * len(growth))) for name, growth in shapes.items()}
    for name, growth in shapes.items():
        made[name].infshape = Shape(growth)  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("kind", "decoupled", "rates", "decays"),
    [
        ("MuAdam", False, (0.1 / 8, 0.1, 0.1, 0.1), (0.8, 0.1, 0.1, 0.1)),
        ("muadamw", True, (0.1 / 8, 0.1, 0.1, 0.1), (0.1, 0.1, 0.1, 0.1)),
        ("MuSGD", False, (0.1 / 4, 0.8, 0.8, 0.1), (0.4, 0.1 / 8, 0.1 / 8, 0.1)),
    ],
)
def test_the_rate_of_a_parameter_follows_its_width(
    kind: str, decoupled: bool, rates: tuple[float, ...], decays: tuple[float, ...]
) -> None:
    tensors = parameters()
    given = {"lr": 0.1, "weight_decay": 0.1, "decoupled_wd": decoupled}
    optimizer, _ = build(kind, given, list(tensors.values()))
    of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for tensor, rate, decay in zip(tensors.values(), rates, decays, strict=True):
        assert of[id(tensor)]["lr"] == pytest.approx(rate)
        assert of[id(tensor)]["weight_decay"] == pytest.approx(decay)
    config = {"train_batch_size": 1, "optimizer": {"type": kind, "params": given}}
    assert examine(config).problems == []
    assert examine({**config, "optimizer": {"type": kind, "params": {"lrr": 1}}}).problems[0].path.endswith("lrr")


def test_a_model_without_base_shapes_is_an_error_that_names_the_call() -> None:
    with pytest.raises(OptimizerError, match=r"call mup\.set_base_shapes"):
        build("MuAdam", {}, [torch.nn.Parameter(torch.ones(2, 2))])
    tensor: Any = torch.nn.Parameter(torch.ones(2, 2, 2))
    tensor.infshape = Shape((2.0, 2.0, 2.0))
    with pytest.raises(OptimizerError, match="3 dims that grow"):
        build("MuSGD", {}, [tensor])


@pytest.mark.parametrize("stage", [0, 3])
def test_it_trains_at_every_stage(stage: int) -> None:
    model = torch.nn.Linear(4, 4)
    model.weight.infshape, model.bias.infshape = Shape((2.0, 2.0)), Shape((2.0,))  # type: ignore[assignment]
    settings = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "MuSGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    before = model.bias.detach().clone()
    engine, *_ = shoal.initialize(model=model, config=settings)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    torch.testing.assert_close(engine.module_state_dict()["bias"], before - 2.0)
    engine.destroy()
