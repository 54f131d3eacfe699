"""Runs that DeepSpeed divided over tensor- and expert-parallel ranks go on in any layout, with DeepSpeed's own losses.

A table is of one kind of model. A row is a saved run, and the layout in which it goes on from step 3 to step 6.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.parallel.expert.layer import MoE
from tests.fixtures.deepspeed.autoep_model import WithReplacedExperts
from tests.fixtures.deepspeed.make_autoep import AUTOEP_CASES, PARTITION, section_of
from tests.fixtures.deepspeed.make_expert_slices import MADE_ANEW, SEQUENCES, SLICE_CASES, WithSlicedExperts, layers_of
from tests.fixtures.deepspeed.make_experts import EXPERT_CASES, WithExperts
from tests.fixtures.deepspeed.make_tensor_parallel import LAYERS
from tests.fixtures.deepspeed.model import WithFused, fill, groups_of, tokens_of
from tests.helpers.deepspeed_made import MADE, universal
from tests.helpers.training import make


class Layout(NamedTuple):
    """Where a run goes on.

    Args:
        has_own_groups: the script splits the experts off into groups of their own.
        is_split: each tensor-parallel rank has a part of every expert.
    """

    ranks: int
    stage: int
    ep: int = 1
    tp: int = 1
    has_own_groups: bool = False
    is_split: bool = False


class Run(NamedTuple):
    """What goes on.

    Args:
        groups: of the client's optimizer; None: the config has it.
        num_batches: of the data-parallel ranks that saved.
        rates: of the loaded groups; None: they are not compared.
    """

    model: nn.Module
    config: dict[str, Any]
    groups: Any
    num_batches: int
    num_sequences: int = 3
    rates: list[float] | None = None


def autoep(name: str, layout: Layout) -> Run:
    case = AUTOEP_CASES[name]
    model = make(lambda: WithReplacedExperts(case.family))
    config: dict[str, Any] = {
        "units": {"classes": ["ResidualLayer"]},
        "expert_parallel": {**section_of(case), "autoep_size": layout.ep},
        **({"bf16": {"enabled": True}} if case.is_bf16 else {}),
    }
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tp, "partition_config": PARTITION}
    if case.has_client_groups:
        return Run(model, config, groups_of(model), case.num_batches, rates=[0.01, 0.02])
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1.0, "betas": [0.9, 0.95], "torch_adam": True}}
    return Run(model, config, None, case.num_batches, rates=[0.01])


def experts(case: str, layout: Layout) -> Run:
    assert case in EXPERT_CASES
    model = make(lambda: WithExperts(MoE, layout.ep))
    config = {"units": {"classes": ["ExpertBlock"]}, **({"bf16": {"enabled": True}} if "bf16" in case else {})}
    rates = [0.01, 0.02] * (2 if layout.has_own_groups else 1)
    return Run(model, config, groups_with_experts(model, layout), len(losses_of(case)[0]), rates=rates)


def slices(case: str, layout: Layout) -> Run:
    fewest, _, _, is_bf16 = (SLICE_CASES | MADE_ANEW)[case]
    model = make(lambda: WithSlicedExperts(MoE, layout.ep, fewest, enable_expert_tensor_parallelism=layout.is_split))
    config: dict[str, Any] = {
        "units": {"classes": ["FusedBlock", "SlicedBlock"]},
        **({"bf16": {"enabled": True}} if is_bf16 else {}),
    }
    if layout.tp > 1:
        specs = layers_of(is_split=layout.is_split)
        partition = {"use_default_specs": False, "strict_mode": False, "layer_specs": specs}
        config["tensor_parallel"] = {"autotp_size": layout.tp, "partition_config": partition}
    return Run(model, config, groups_with_experts(model, layout), 2, SEQUENCES)


def tensor_parallel(case: str, layout: Layout) -> Run:
    model = fill(WithFused())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)  # all of it has to come from the checkpoint
    config: dict[str, Any] = {"units": {"classes": ["FusedBlock"]}}
    if layout.tp > 1:
        partition = {"use_default_specs": False, "layer_specs": LAYERS}
        config["tensor_parallel"] = {"autotp_size": layout.tp, "partition_config": partition}
    num_batches = 2 if case in ("tp2-stage2", "tp2-stage3") else 1
    return Run(model, config, groups_of(model), num_batches)


def split_groups(groups: list[dict[str, Any]]) -> Any:
    from shoal.compat.deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    return split_params_into_different_moe_groups_for_optimizer(groups)


def groups_with_experts(model: nn.Module, layout: Layout) -> Any:
    groups = groups_of(model)
    if not layout.has_own_groups:
        return groups
    split = split_groups([{"name": f"group {index}", **group} for index, group in enumerate(groups)])
    return split if isinstance(split, list) else [split]


def losses_of(case: str) -> Any:
    """DeepSpeed's losses from step 3 on, one for each data-parallel rank."""
    return json.loads((MADE / case / "run.json").read_text())["losses"][3:]


def go_on(start: Callable[[str, Layout], Run], case: str, layout: Layout, folder: Path) -> dict[str, Any]:
    """Load on this rank, and train three steps. Of the batches of the ranks that saved, fewer ranks take several."""
    world, run = current_world(), start(case, layout)
    size = world.size // layout.tp
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": run.num_sequences,
        "gradient_accumulation_steps": run.num_batches // size,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": layout.stage, "stage3_param_persistence_threshold": 0},
        **run.config,
    }
    optimizer = None if run.groups is None else torch.optim.AdamW(run.groups, lr=1.0)
    engine = shoal.initialize(model=run.model, optimizer=optimizer, config=config)[0]
    _, client_state = engine.load_checkpoint(folder)
    assert client_state == {"epoch": 2}
    if run.rates is not None:
        assert [group["lr"] for group in engine.optimizer.param_groups] == run.rates
    full = engine.module_state_dict()
    losses = []
    for step in range(3, 6):
        of_step = []
        for each in range(world.rank // layout.tp, run.num_batches, size):
            loss = engine(tokens_of(step, each)[: run.num_sequences])
            engine.backward(loss)
            engine.step()
            of_step.append(loss.item())
        losses.append(of_step)
    assert engine.global_steps == 6
    engine.destroy()
    return {"full": full, "losses": losses}


def compare(
    start: Callable[[str, Layout], Run],
    case: str,
    layout: Layout,
    folder: Path | None = None,
    *,
    held: str | None = None,
    without: str = "$^",
    rtol: float = 0,
) -> None:
    """Compare the weights that are loaded, and the following losses, with DeepSpeed's.

    Args:
        folder: None: the case's.
        held: the case whose weights they are; None: this one.
        without: fits the names that are not compared.
    """
    ranks, tp = layout.ranks, layout.tp
    of_ranks: list[dict[str, Any]] = run_ranks(ranks, go_on, start, case, layout, folder or MADE / case / "checkpoint")
    expected = losses_of(case)
    is_bf16 = any(value.dtype is torch.bfloat16 for value in of_ranks[0]["full"].values())
    for step in range(3):
        for rank in range(ranks):
            mine = pytest.approx(expected[step][rank // tp :: ranks // tp], abs=4e-3 if is_bf16 else 1e-5)
            assert of_ranks[rank]["losses"][step] == mine, (step, rank)
    weights = load_file(MADE / (held or case) / "held.safetensors")
    names = [name for name in weights if name.startswith("model/") and not re.search(without, name)]
    assert names
    for name in names:
        loaded = of_ranks[0]["full"][name.removeprefix("model/")].reshape(-1)
        torch.testing.assert_close(loaded, weights[name].to(loaded.dtype).view(-1), rtol=rtol, atol=0, msg=name)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("autoep2-stage0", Layout(1, stage=0)),
        ("autoep2-stage0", Layout(2, stage=3, ep=2)),
        ("autoep2-stage0-groups", Layout(2, stage=1, ep=2)),
        ("autoep2-stage0-bf16", Layout(2, stage=2, ep=2)),
        ("autoep1-stage1", Layout(2, stage=2, ep=2)),
        ("autoep2-stage1-bf16", Layout(1, stage=1)),
        ("autoep2-stage1-data-first", Layout(4, stage=3, ep=2)),
        ("autoep2-stage2", Layout(2, stage=3)),
        ("autoep2-stage2", Layout(4, stage=2, ep=2, tp=2)),
        ("autoep2-stage2-listed", Layout(2, stage=3, ep=2)),
        ("autoep2-stage2-listed", Layout(1, stage=0)),
        ("autoep2-stage2-transposed", Layout(2, stage=1, ep=2)),
        ("autoep4-stage2", Layout(2, stage=3, ep=2)),
        ("autoep4-stage2", Layout(4, stage=0, ep=4)),
        ("autoep2-stage3", Layout(2, stage=2, ep=2)),
        ("autoep2-stage3", Layout(1, stage=3)),
        ("autoep1-stage3-bf16", Layout(2, stage=3, ep=2)),
        ("autoep2-stage3-listed", Layout(2, stage=1, ep=2)),
        ("autoep4-tp2-stage0", Layout(1, stage=3)),
        ("autoep4-tp2-stage0", Layout(4, stage=0, ep=2, tp=2)),
        ("autoep2-tp2-stage1", Layout(2, stage=3, ep=2)),
        ("autoep2-tp2-stage1", Layout(4, stage=1, ep=4, tp=2)),
        ("autoep4-tp2-stage2", Layout(2, stage=2, ep=2)),
        ("autoep4-tp2-stage2", Layout(2, stage=3, ep=2, tp=2)),
        ("autoep2-tp2-stage3", Layout(2, stage=1)),
        ("autoep2-tp2-stage3", Layout(4, stage=3, ep=2, tp=2)),
    ],
)
def test_a_run_whose_experts_autoep_has_replaced(case: str, layout: Layout) -> None:
    compare(autoep, case, layout)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("autoep2-stage1-data-first", Layout(2, stage=3, ep=2)),
        ("autoep2-stage1-bf16", Layout(1, stage=2)),
        ("autoep2-stage3", Layout(2, stage=1)),
    ],
)
def test_such_a_run_from_its_universal_checkpoint(case: str, layout: Layout, tmp_path: Path) -> None:
    compare(autoep, case, layout, universal(case, tmp_path).parent)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("ep2-stage0-fp32", Layout(2, stage=1, ep=2)),
        ("ep1-stage0-fp32", Layout(2, stage=3, ep=2)),
        ("ep1-stage0-fp32", Layout(2, stage=1, ep=2, has_own_groups=True)),
        ("ep2-stage0-fp32", Layout(1, stage=3, has_own_groups=True)),
        ("ep2-stage0-bf16", Layout(2, stage=2, has_own_groups=True)),
        ("ep1-stage2-fp32", Layout(2, stage=3)),
        ("ep1-stage1-fp32", Layout(2, stage=2, ep=2, has_own_groups=True)),
        ("ep2-stage2-fp32", Layout(1, stage=0)),
        ("ep2-stage1-fp32", Layout(2, stage=3, ep=2, has_own_groups=True)),
        ("ep2-stage2-fp32-4-ranks", Layout(4, stage=2, ep=2)),
        ("ep2-stage2-fp32-4-ranks", Layout(2, stage=3, ep=2, has_own_groups=True)),
        ("ep2-stage1-fp32-data-first", Layout(4, stage=1, ep=2)),
        ("ep2-stage2-bf16", Layout(2, stage=2, ep=2, has_own_groups=True)),
    ],
)
def test_a_run_with_experts(case: str, layout: Layout) -> None:
    compare(experts, case, layout, without="seen|gain")


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("ep2-tp2-stage0-whole", Layout(1, stage=0)),
        ("ep2-tp2-stage0-whole", Layout(2, stage=3, ep=2, has_own_groups=True)),
        ("ep2-tp2-stage2-whole", Layout(2, stage=2, has_own_groups=True)),
        ("ep2-tp2-stage2-whole", Layout(4, stage=1, ep=2, tp=2, is_split=True)),
        ("ep4-tp2-stage1-whole", Layout(2, stage=2, ep=2)),
        ("ep4-tp2-stage1-whole", Layout(4, stage=3, ep=4, tp=2, has_own_groups=True)),
        ("ep2-tp2-stage0-split", Layout(2, stage=1)),
        ("ep2-tp2-stage0-split", Layout(2, stage=0, ep=2, has_own_groups=True)),
        ("ep2-tp2-stage1-split", Layout(2, stage=3, ep=2)),
        ("ep2-tp2-stage1-split", Layout(4, stage=2, ep=2, tp=2, has_own_groups=True, is_split=True)),
        ("ep2-tp2-stage1-split", Layout(2, stage=1, ep=2, tp=2)),
        ("ep1-tp2-stage2-split", Layout(1, stage=2)),
        ("ep1-tp2-stage2-split", Layout(2, stage=3, tp=2, is_split=True)),
    ],
)
def test_a_tensor_parallel_run_with_experts(case: str, layout: Layout) -> None:
    compare(slices, case, layout, without="^model/(seen|gain)$")


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("tp2-stage0", Layout(1, stage=1)),
        ("tp2-stage1", Layout(1, stage=0)),
        ("tp2-stage1", Layout(2, stage=3, tp=2)),
        ("tp2-stage2", Layout(2, stage=3)),
        ("tp2-stage2", Layout(2, stage=1, tp=2)),
        ("tp2-stage3", Layout(2, stage=0)),
        ("tp2-stage3", Layout(4, stage=2, tp=2)),
        ("tp2-stage3", Layout(2, stage=3, tp=2)),
    ],
)
def test_a_tensor_parallel_run(case: str, layout: Layout) -> None:
    if case == "tp2-stage0":
        # DeepSpeed's converter takes no checkpoint of stage 0, whose weights are those of stage 1 but for rounding.
        compare(tensor_parallel, case, layout, held="tp2-stage1", without="seen|gain", rtol=1e-5)
    else:
        compare(tensor_parallel, case, layout, without="seen|gain")


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
