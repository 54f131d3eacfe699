"""``load_checkpoint`` of what DeepSpeed's tensor-parallel ranks saved of a model with experts, into any layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.parallel.expert.layer import MoE
from tests.fixtures.deepspeed.make_expert_slices import MADE_ANEW, SEQUENCES, SLICE_CASES, WithSlicedExperts, layers_of
from tests.fixtures.deepspeed.model import groups_of, tokens_of
from tests.ranks.test_checkpoint_of_experts_of_deepspeed import split_groups
from tests.ranks.training import make
from tests.unit.deepspeed_made import MADE

NUM_BATCHES = 2  # of the data-parallel ranks that saved


def go_on(
    case: str, tp: int, ep_size: int, stage: int, is_split: bool, has_own_groups: bool, made: Path = MADE
) -> dict[str, Any]:
    """Load on this rank, and train three steps, on one batch of the ranks that saved after another."""
    world = current_world()
    size = world.size // tp
    fewest, _, _, is_bf16 = (SLICE_CASES | MADE_ANEW)[case]
    model = make(lambda: WithSlicedExperts(MoE, ep_size, fewest, enable_expert_tensor_parallelism=is_split))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_accumulation_steps": NUM_BATCHES // size,
        "gradient_clipping": 0.0,
        "units": {"classes": ["FusedBlock", "SlicedBlock"]},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({"bf16": {"enabled": True}} if is_bf16 else {}),
    }
    if tp > 1:
        partition = {"use_default_specs": False, "strict_mode": False, "layer_specs": layers_of(is_split=is_split)}
        config["tensor_parallel"] = {"autotp_size": tp, "partition_config": partition}
    groups = groups_of(model)
    if has_own_groups:
        groups = split_groups([{"name": f"group {index}", **group} for index, group in enumerate(groups)])
    engine = shoal.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1.0), config=config)[0]
    _, client_state = engine.load_checkpoint(made / case / "checkpoint")
    assert client_state == {"epoch": 2}
    full = engine.module_state_dict()
    losses = []
    for step in range(3, 6):
        own = []
        for each in range(world.rank // tp, NUM_BATCHES, size):
            loss = engine(tokens_of(step, each)[:SEQUENCES])
            engine.backward(loss)
            engine.step()
            own.append(loss.item())
        losses.append(own)
    engine.destroy()
    return {"full": full, "losses": losses}


def test_a_save_under_its_tag_replaces_it(tmp_path: Path) -> None:
    case = "ep2-tp2-stage0-whole"
    shutil.copytree(MADE / case / "checkpoint", tmp_path, dirs_exist_ok=True)
    model = make(lambda: WithSlicedExperts(MoE, 1, 2))
    config = {"train_micro_batch_size_per_gpu": SEQUENCES}
    engine = shoal.initialize(model=model, optimizer=torch.optim.AdamW(groups_of(model)), config=config)[0]
    engine.load_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path, tag="global_step3")
    engine.load_checkpoint(tmp_path)
    engine.destroy()
    left = {path.name for path in (tmp_path / "global_step3").iterdir()}
    assert "manifest.json" in left and not any("expert" in name or "expp" in name for name in left)


@pytest.mark.parametrize(
    ("case", "ranks", "tp", "ep_size", "stage", "is_split", "has_own_groups"),
    [
        ("ep2-tp2-stage0-whole", 1, 1, 1, 0, False, False),
        ("ep2-tp2-stage0-whole", 2, 1, 2, 3, False, True),
        ("ep2-tp2-stage2-whole", 2, 1, 1, 2, False, True),
        ("ep2-tp2-stage2-whole", 4, 2, 2, 1, True, False),
        ("ep4-tp2-stage1-whole", 2, 1, 2, 2, False, False),
        ("ep4-tp2-stage1-whole", 4, 2, 4, 3, False, True),
        ("ep2-tp2-stage0-split", 2, 1, 1, 1, False, False),
        ("ep2-tp2-stage0-split", 2, 1, 2, 0, False, True),
        ("ep2-tp2-stage1-split", 2, 1, 2, 3, False, False),
        ("ep2-tp2-stage1-split", 4, 2, 2, 2, True, True),
        ("ep2-tp2-stage1-split", 2, 2, 2, 1, False, False),
        ("ep1-tp2-stage2-split", 1, 1, 1, 2, False, False),
        ("ep1-tp2-stage2-split", 2, 2, 1, 3, True, False),
    ],
)
def test_a_tensor_parallel_run_with_experts_goes_on_in_any_layout(
    case: str, ranks: int, tp: int, ep_size: int, stage: int, is_split: bool, has_own_groups: bool
) -> None:
    run = json.loads((MADE / case / "run.json").read_text())["losses"][3:]
    held = load_file(MADE / case / "held.safetensors")
    found: list[dict[str, Any]] = run_ranks(ranks, go_on, case, tp, ep_size, stage, is_split, has_own_groups)
    for name in [name for name in held if name.startswith("model/") and name not in ("model/seen", "model/gain")]:
        of_rank = found[0]["full"][name.removeprefix("model/")]
        assert torch.equal(held[name].to(of_rank.dtype).view(-1), of_rank.view(-1)), name
    for step in range(3):
        for rank in range(ranks):
            expected = run[step][rank // tp :: ranks // tp]
            tolerance = 4e-3 if SLICE_CASES[case][3] else 1e-5
            assert found[rank]["losses"][step] == pytest.approx(expected, abs=tolerance), (step, rank)
