"""What FSDP2's users save with torch.distributed.checkpoint: read whole, and trained on by an engine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.checkpoint.formats.dcp import DcpSource
from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.native import write_shoal
from shoal.comm.threads import run_ranks
from tests.helpers.models import Plain
from tests.helpers.training import adamw, batch, config, make, run_steps, start


def _train_and_save(rank: int, size: int, folder: str) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.full((2, 5), float(rank + 1))).square().sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
    whole = {name: value.full_tensor() for name, value in weights.items()}
    for name, held in state["state"].items():
        whole[f"{name}.exp_avg"] = held["exp_avg"].full_tensor()
    return whole


@pytest.mark.gloo
def test_what_two_fsdp2_ranks_save_is_read_whole(tmp_path: Path, gloo: Callable[..., list[Any]]) -> None:
    expected = gloo(2, _train_and_save, str(tmp_path / "d"))[0]
    assert len([name for name in os.listdir(tmp_path / "d") if name.endswith(".distcp")]) == 2
    source = DcpSource(tmp_path / "d")
    assert list(source.tensors(MODEL)) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(source.kinds()) == [MODEL, "optimizer/exp_avg", "optimizer/exp_avg_sq"]
    for name in source.tensors(MODEL):
        assert torch.equal(source.read(MODEL, name), expected[name])
        assert torch.equal(source.read("optimizer/exp_avg", name), expected[f"{name}.exp_avg"])
        assert source.about.scalars[name] == {"step": 1.0}
    assert source.about.groups[0]["lr"] == 0.01
    assert set(source.about.group_of.values()) == {0}


@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_in_an_engine_where_plain_pytorch_left_off(tmp_path: Path, stage: int) -> None:
    """The model's head is tied, which PyTorch saves twice. Bound: AdamW's rounding over two steps."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    world = 2
    model = make(Plain)
    optimizer = adamw(model.parameters())

    def steps(first: int, number: int) -> list[float]:
        losses = []
        for index in range(first, first + number):
            optimizer.zero_grad()
            parts = [model(*batch(index, rank, world)) / world for rank in range(world)]
            sum(parts, torch.zeros(())).backward()
            optimizer.step()
            losses.append(sum(part.item() for part in parts))
        return losses

    steps(0, 3)
    weights, state = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "d", no_dist=True)
    write_shoal(DcpSource(tmp_path / "d"), tmp_path / "s")
    expected = steps(3, 2)

    def job() -> list[float]:
        engine = start(Plain, config(stage), adamw)
        engine.load_checkpoint(str(tmp_path / "s"))
        losses = run_steps(engine, 2, first=3)
        engine.destroy()
        return losses

    found = torch.tensor(run_ranks(world, job)).mean(0)
    assert found.tolist() == pytest.approx(expected, abs=2e-5)
