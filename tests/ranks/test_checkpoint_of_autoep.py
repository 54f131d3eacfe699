"""``load_checkpoint`` of what DeepSpeed saved of a model whose experts AutoEP had divided, into any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.fixtures.deepspeed.autoep_model import WithReplacedExperts
from tests.fixtures.deepspeed.make_autoep import AUTOEP_CASES, PARTITION, section_of
from tests.fixtures.deepspeed.model import groups_of, tokens_of
from tests.ranks.training import make
from tests.unit.deepspeed_made import MADE, universal


def go_on(name: str, ep_size: int, stage: int, tp: int, folder: Path) -> dict[str, Any]:
    """Load on this rank, and train three steps. Of the batches of the ranks that saved, fewer ranks take several."""
    case, world = AUTOEP_CASES[name], current_world()
    size = world.size // tp
    tensor_parallel = {"autotp_size": tp, "partition_config": PARTITION}
    model = make(lambda: WithReplacedExperts(case.family))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": case.num_batches // size,
        "gradient_clipping": 0.0,
        "units": {"classes": ["ResidualLayer"]},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "expert_parallel": {**section_of(case), "autoep_size": ep_size},
        **({"bf16": {"enabled": True}} if case.is_bf16 else {}),
        **({"tensor_parallel": tensor_parallel} if tp > 1 else {}),
    }
    optimizer = torch.optim.AdamW(groups_of(model), lr=1.0) if case.has_client_groups else None
    if optimizer is None:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1.0, "betas": [0.9, 0.95], "torch_adam": True}}
    engine = shoal.initialize(model=model, optimizer=optimizer, config=config)[0]
    _, client_state = engine.load_checkpoint(folder)
    assert client_state == {"epoch": 2}
    rates = [0.01, 0.02] if case.has_client_groups else [0.01]
    assert [group["lr"] for group in engine.optimizer.param_groups] == rates
    full = engine.module_state_dict()
    losses = []
    for step in range(3, 6):
        own = []
        for each in range(world.rank // tp, case.num_batches, size):
            loss = engine(tokens_of(step, each))
            engine.backward(loss)
            engine.step()
            own.append(loss.item())
        losses.append(own)
    engine.destroy()
    return {"full": full, "losses": losses}


@pytest.mark.parametrize(
    ("name", "ranks", "ep_size", "stage", "tp"),
    [
        ("autoep2-stage0", 1, 1, 0, 1),
        ("autoep2-stage0", 2, 2, 3, 1),
        ("autoep2-stage0-groups", 2, 2, 1, 1),
        ("autoep2-stage0-bf16", 2, 2, 2, 1),
        ("autoep1-stage1", 2, 2, 2, 1),
        ("autoep2-stage1-bf16", 1, 1, 1, 1),
        ("autoep2-stage1-data-first", 4, 2, 3, 1),
        ("autoep2-stage2", 2, 1, 3, 1),
        ("autoep2-stage2", 4, 2, 2, 2),
        ("autoep2-stage2-listed", 2, 2, 3, 1),
        ("autoep2-stage2-listed", 1, 1, 0, 1),
        ("autoep2-stage2-transposed", 2, 2, 1, 1),
        ("autoep4-stage2", 2, 2, 3, 1),
        ("autoep4-stage2", 4, 4, 0, 1),
        ("autoep2-stage3", 2, 2, 2, 1),
        ("autoep2-stage3", 1, 1, 3, 1),
        ("autoep1-stage3-bf16", 2, 2, 3, 1),
        ("autoep2-stage3-listed", 2, 2, 1, 1),
        ("autoep4-tp2-stage0", 1, 1, 3, 1),
        ("autoep4-tp2-stage0", 4, 2, 0, 2),
        ("autoep2-tp2-stage1", 2, 2, 3, 1),
        ("autoep2-tp2-stage1", 4, 4, 1, 2),
        ("autoep4-tp2-stage2", 2, 2, 2, 1),
        ("autoep4-tp2-stage2", 2, 2, 3, 2),
        ("autoep2-tp2-stage3", 2, 1, 1, 1),
        ("autoep2-tp2-stage3", 4, 2, 3, 2),
    ],
)
def test_an_autoep_run_goes_on_in_any_layout_with_deepspeeds_losses(
    name: str, ranks: int, ep_size: int, stage: int, tp: int
) -> None:
    compare(name, ranks, ep_size, stage, tp, MADE / name / "checkpoint")


@pytest.mark.parametrize(
    ("name", "ranks", "ep_size", "stage"),
    [("autoep2-stage1-data-first", 2, 2, 3), ("autoep2-stage1-bf16", 1, 1, 2), ("autoep2-stage3", 2, 1, 1)],
)
def test_an_autoep_run_goes_on_from_its_universal_checkpoint(
    name: str, ranks: int, ep_size: int, stage: int, tmp_path: Path
) -> None:
    compare(name, ranks, ep_size, stage, 1, universal(name, tmp_path).parent)


def compare(name: str, ranks: int, ep_size: int, stage: int, tp: int, folder: Path) -> None:
    """Compare the weights that are loaded, and the following losses, with DeepSpeed's."""
    case = AUTOEP_CASES[name]
    run = json.loads((MADE / name / "run.json").read_text())["losses"][3:]
    found = run_ranks(ranks, go_on, name, ep_size, stage, tp, folder)
    for key, value in load_file(MADE / name / "held.safetensors").items():
        if key.startswith("model/"):
            of_rank = found[0]["full"][key.removeprefix("model/")]
            assert torch.equal(value.to(of_rank.dtype).view(-1), of_rank.reshape(-1)), key
    for step in range(3):
        for rank in range(ranks):
            expected = [run[step][each] for each in range(rank // tp, case.num_batches, ranks // tp)]
            assert found[rank]["losses"][step] == pytest.approx(expected, abs=4e-3 if case.is_bf16 else 1e-5)
