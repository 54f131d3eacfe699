"""``accelerate launch`` under ``shoal run --as-deepspeed``: flags, Accelerate's own file, DeepSpeed's file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.clients.running import BOUNDS, ClientRun, differences, golden, run_command

pytest.importorskip("accelerate")
pytest.importorskip("transformers")


SCRIPT = "accelerate_plain"


def launch(folder: Path, case: str, *, as_deepspeed: bool = True) -> ClientRun:
    """Run the plain script as the case says."""
    runner = [sys.executable, "-m", "shoal", "run", "--as-deepspeed"] if as_deepspeed else []
    return run_command([*runner, *ARGUMENTS[case](folder)], f"{SCRIPT}.py", case, *CHOICES.get(case, ()))


def by_flags(folder: Path) -> list[str]:
    return [
        "accelerate", "launch", "--use_deepspeed", "--num_processes", "2", "--num_machines", "1", "--mixed_precision",
        "no", "--zero_stage", "3", "--gradient_accumulation_steps", "2", "--gradient_clipping", "1.0",
        "--zero3_init_flag", "true", "--zero3_save_16bit_model", "true", "--offload_optimizer_device", "none",
        "--offload_param_device", "none", "--dynamo_backend", "no",
    ]  # fmt: skip


def by_file(folder: Path) -> list[str]:
    """Accelerate's file, as ``accelerate config`` writes it, naming DeepSpeed's."""
    theirs = folder / "ds.json"
    theirs.write_text(
        json.dumps(
            {
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {
                        "warmup_min_lr": "auto",
                        "warmup_max_lr": "auto",
                        "warmup_num_steps": "auto",
                        "total_num_steps": "auto",
                    },
                },
                "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
                "gradient_accumulation_steps": 2,
                "gradient_clipping": "auto",
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": "auto",
            }
        )
    )
    ours = folder / "accelerate.yaml"
    ours.write_text(
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: DEEPSPEED\ndowncast_bf16: 'no'\n"
        f"deepspeed_config:\n  deepspeed_config_file: {theirs}\n  zero3_init_flag: false\n"
        "machine_rank: 0\nmain_training_function: main\nnum_machines: 1\nnum_processes: 2\nuse_cpu: false\n"
    )
    return ["accelerate", "launch", "--config_file", str(ours)]


ARGUMENTS = {"flags-stage3": by_flags, "file-stage2-bf16": by_file}
CHOICES = {"file-stage2-bf16": ("dummies",)}


@pytest.mark.parametrize("case", sorted(ARGUMENTS))
def test_accelerate_launch_gives_what_it_gives_with_deepspeed(case: str, tmp_path: Path) -> None:
    run = launch(tmp_path, case)
    bound = BOUNDS["bf16" if "bf16" in case else "fp32"]
    assert differences(run.case(case), golden(SCRIPT)["cases"][case], bound) == []
