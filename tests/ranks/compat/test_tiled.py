"""A linear layer in tiles gives what the whole layer gives, by itself and sharded at stage 3."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.compat.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias
from shoal.errors import ModelError


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("ins", "outs"), [(1, 1), (2, 3), (4, 1), (1, 5), (3, 4)])
def test_tiles_give_what_the_whole_layer_gives(ins: int, outs: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(5, 7, bias=has_bias)
    tiled = TiledLinear(5, 7, bias=has_bias, in_splits=ins, out_splits=outs, init_linear=copy.deepcopy(whole))
    x = torch.randn(2, 3, 5, requires_grad=True)
    theirs, mine = whole(x), tiled(x)
    torch.testing.assert_close(mine, theirs)
    (wanted,) = torch.autograd.grad(theirs.square().sum(), x)
    (got,) = torch.autograd.grad(mine.square().sum(), x)
    torch.testing.assert_close(got, wanted)
    assert sum(p.numel() for p in tiled.parameters()) == 35 + 7 * has_bias


def test_tiles_of_the_input_and_of_the_output_can_stay_separate() -> None:
    torch.manual_seed(0)
    whole = nn.Linear(4, 6)
    tiled = TiledLinear(
        4, 6, in_splits=2, out_splits=3, input_is_already_split=True, combine_out_splits=False, init_linear=whole
    )
    x = torch.randn(2, 4)
    rows = tiled(list(x.split(2, dim=-1)))
    assert [tuple(row.shape) for row in rows] == [(2, 2)] * 3
    torch.testing.assert_close(torch.cat(rows, dim=-1), whole(x))
    with pytest.raises(RuntimeError, match="given 1 tensors, for 2 tiles"):
        tiled(x)


class BiasApart(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.linear(x, self.weight), self.bias


def test_layers_that_give_their_bias_back_are_put_together_beside_it() -> None:
    torch.manual_seed(0)
    whole = nn.Linear(4, 6)
    tiled = TiledLinearReturnBias(4, 6, in_splits=2, out_splits=3, linear_cls=BiasApart, init_linear=whole)
    x = torch.randn(2, 4)
    output, bias = tiled(x)
    torch.testing.assert_close(output + bias, whole(x))
    assert torch.equal(bias, whole.bias)


@pytest.mark.parametrize("splits", [{"in_splits": 0}, {"in_splits": 5}, {"out_splits": 7}])
def test_more_tiles_than_features_are_an_error_of_both_kinds(splits: dict[str, int]) -> None:
    for kind in (RuntimeError, ModelError):
        with pytest.raises(kind, match=r"_splits=\d, with \d features"):
            TiledLinear(4, 6, **splits)


def test_a_layer_of_another_size_is_not_copied() -> None:
    for other in (nn.Linear(4, 5), nn.Linear(4, 6, bias=False)):
        with pytest.raises(ModelError, match=r"wanted a weight \(6, 4\) and a bias"):
            TiledLinear(4, 6, init_linear=other)


def test_a_sharded_layer_in_tiles_trains_as_the_whole_one() -> None:
    torch.manual_seed(0)
    whole = nn.Linear(4, 6)
    x = torch.randn(3, 4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "units": {"classes": ["Linear"]},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    tiled = TiledLinear(4, 6, in_splits=2, out_splits=3, init_linear=whole)

    def job() -> tuple[torch.Tensor, list[float]]:
        model = copy.deepcopy(tiled)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = shoal.initialize(model=model, optimizer=optimizer, config=config)[0]
        for _ in range(3):
            engine.backward(engine(x).square().mean())
            engine.step()
        with torch.no_grad():
            output = engine(x).clone()
        model.copy_params_from(whole)
        with torch.no_grad():
            again = engine(x).clone()
        engine.destroy()
        return output, again

    found = run_ranks(2, job)
    first = whole(x).detach().clone()
    for _, again in found:
        torch.testing.assert_close(again, first)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        whole(x).square().mean().backward()
        optimizer.step()
    for output, _ in found:
        torch.testing.assert_close(output, whole(x).detach())
