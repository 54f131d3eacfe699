"""What a few blocks and micro-batches take, extended to all of them, for every section that a step feels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.models import GPT, GPTConfig
from shoal.planner.dry_model import dry_run_model

SHAPE = GPTConfig(vocab_size=4096, sequence_length=512, num_layers=20, hidden_size=1024, num_heads=8)
BLOCK = 12 * SHAPE.hidden_size**2
NEAR = {  # a block or two are gathered ahead, and none is kept
    "stage3_prefetch_bucket_size": BLOCK,
    "stage3_max_reuse_distance": BLOCK,
    "stage3_max_live_parameters": 3 * BLOCK,
}


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 1e-3, **params}}}


def zero(stage: int, device: str = "", **more: Any) -> dict[str, Any]:
    """``device``: "cpu", "nvme" or empty; of the optimizer, unless ``more`` has another."""
    offload = {"offload_optimizer": {"device": device}} if device else {}
    return {"zero_optimization": {"stage": stage, **(NEAR if stage == 3 else {}), **offload, **more}}


def fp8(recipe: str) -> dict[str, Any]:
    return {"fp8": {"recipe": recipe}}


FP16 = {"bf16": None, "fp16": {"enabled": True}}
AGAIN = {"activation_checkpointing": {"modules": ["Block"]}}
PARAMETERS_TOO = {"offload_param": {"device": "cpu"}}
SECTIONS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": zero(stage) for stage in range(4)},
    **{f"recomputation, stage {stage}": zero(stage) | AGAIN for stage in (1, 3)},
    **{name: zero(2) | optimizer(name) for name in ("SGD", "Lion", "Adagrad", "Lamb")},
    "Lamb, stage 3": zero(3) | optimizer("Lamb"),
    "OneBitAdam": zero(0) | FP16 | optimizer("OneBitAdam", freeze_step=1),
    "OneBitLamb": zero(0) | FP16 | optimizer("OneBitLamb", freeze_step=1),
    "fp16": zero(2) | FP16,
    "fp32": zero(2) | {"bf16": None},
    "autocast": zero(3) | {"bf16": None, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "16 bits alone": zero(1) | {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "clipping": zero(1) | {"gradient_clipping": 1.0},
    "accumulation": zero(2) | {"gradient_accumulation_steps": 6},
    "gathered in 8 bits": zero(3) | {"wire": {"gather": "int8"}},
    "reduced in 4 bits": zero(2) | {"wire": {"reduce": "int4"}},
    "error feedback": zero(1) | {"wire": {"reduce": "fp8", "error_feedback": True}},
    "differences": zero(1) | {"wire": {"difference": True, "gather": "int8"}},
    **{f"fp8 {recipe}": zero(1) | fp8(recipe) for recipe in ("tensorwise", "rowwise", "blockwise", "mxfp8")},
    "fp8 rowwise, stage 3, recomputation": zero(3) | fp8("rowwise") | AGAIN,
    "activations on the host": zero(1) | {"offload_activation": {"device": "cpu"}},
    **{f"state on the host, stage {stage}": zero(stage, "cpu") for stage in (1, 2, 3)},
    "a part of the state on the host": zero(3, "", offload_optimizer={"device": "cpu", "ratio": 0.3}),
    "parameters on the host": zero(3, "cpu", **PARAMETERS_TOO),
    "state on a disk": zero(2, "nvme"),
    "zenflow": zero(2, "cpu", zenflow={"topk_ratio": 0.05, "update_interval": 4, "full_warm_up_rounds": 0}),
    "a second shard": zero(3, zero_hpz_partition_size=8),
    "shards of a node": zero(3, mics_shard_size=8),
    "tp": zero(1) | {"parallel": {"tp": 4}},
    "tp, sequence parallel, stage 3": zero(3) | {"parallel": {"tp": 2, "tp_sequence_parallel": True}},
    "cp": zero(3) | {"parallel": {"cp": 4}},
    "sp": zero(2) | {"parallel": {"sp": 4}},
    "local steps": zero(1) | {"parallel": {"dp_replicate": 8}, "local_steps": {"every": 2}},
    "replicas": zero(3) | {"parallel": {"dp_replicate": 8}},
    "replica check": zero(1) | {"debug": {"replica_check_steps": 1}},
    "device check": zero(1) | {"device_check": {"every": 1, "factor": 10}},
    **{
        f"pipeline {schedule}, stage {stage}": zero(stage)
        | {"parallel": {"pp": 4}, "pipeline": {"schedule": schedule}, "gradient_accumulation_steps": 10}
        for schedule, stage in (("1f1b", 1), ("1f1b", 2), ("gpipe", 1), ("zb_h1", 1), ("zbv", 0))
    },
    "pipeline with the state on the host": zero(1, "cpu") | {"parallel": {"pp": 2}, "gradient_accumulation_steps": 8},
    "pipeline, recomputation, tp": zero(1)
    | {"parallel": {"pp": 2, "tp": 2}, "gradient_accumulation_steps": 8, **AGAIN},
}


@pytest.mark.parametrize("name", SECTIONS)
def test_few_blocks_tell_what_all_of_them_take(name: str, tmp_path: Path) -> None:
    """Times and bytes within 2 %; traffic within what an order of few elements changes."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "units": {"classes": ["Block"]},
        **optimizer("AdamW"),
        **SECTIONS[name],
    }
    config = {key: value for key, value in config.items() if value is not None}
    for section in config["zero_optimization"].values():
        if isinstance(section, dict) and section.get("device") == "nvme":
            section["nvme_path"] = str(tmp_path)
    short, whole = (dry_run_model(lambda: GPT(SHAPE), config, 32, repeats=each) for each in (True, False))
    assert short.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert short.memory.allocated == pytest.approx(whole.memory.allocated, rel=0.02)
    assert short.received == pytest.approx(whole.received, rel=0.003, abs=1e6)
