"""Configurations, arguments and a recording Trainer for the cases of `trainer_cases.py`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.clients.scripts.common import Sequences, deepspeed_state, mean_over_ranks, tensors_norm

ROWS, LR = 48, 3e-3  # samples; learning rate


def reset() -> None:
    gc.collect()
    unset_hf_deepspeed_config()
    deepspeed_state()


def all_auto(stage: int, **zero: Any) -> dict[str, Any]:
    """Every key that Trainer knows how to fill is "auto"."""
    return {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        "zero_optimization": {
            "stage": stage, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True, **zero,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }  # fmt: skip


def decaying(stage: int, **zero: Any) -> dict[str, Any]:
    config = all_auto(stage, **zero)
    config["scheduler"] = {
        "type": "WarmupDecayLR",
        "params": {**config["scheduler"]["params"], "total_num_steps": "auto"},
    }
    return config


def bare(stage: int, **zero: Any) -> dict[str, Any]:
    """Without optimizer and scheduler: Trainer makes them."""
    return {key: value for key, value in all_auto(stage, **zero).items() if key not in ("optimizer", "scheduler")}


def small_stage3() -> dict[str, Any]:
    """Nothing stays gathered: each parameter is sharded."""
    return decaying(3, stage3_param_persistence_threshold=0)


def settings(folder: Path, config: Any, **changes: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "output_dir": str(folder / "out"), "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2, "max_steps": 6, "learning_rate": LR, "warmup_steps": 2, "weight_decay": 0.01,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "deepspeed": config, "disable_tqdm": True,
        "accelerator_config": {"use_configured_state": True}, "remove_unused_columns": False, "seed": 17,
        "train_sampling_strategy": "sequential", "dataloader_pin_memory": False, "use_cpu": True,
    }  # fmt: skip
    return {**common, **changes}


def arguments(folder: Path, config: Any, **changes: Any) -> TrainingArguments:
    return TrainingArguments(**settings(folder, config, **changes))


class Recording(Trainer):
    """Trainer that also keeps each micro-batch's loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.micro.append(float(loss))
        return loss

    def curves(self) -> dict[str, list[float]]:
        """The micro-batches' losses (mean over ranks) and what Trainer logged."""
        logs = self.state.log_history
        return {
            "loss": [mean_over_ranks(value) for value in self.micro],
            "logged": [log["loss"] for log in logs if "loss" in log],
            "norm": [float(log["grad_norm"]) for log in logs if log.get("grad_norm") is not None],
            "lr": [log["learning_rate"] for log in logs if "learning_rate" in log],
            "eval": [log["eval_loss"] for log in logs if "eval_loss" in log],
        }


def trainer_of(args: TrainingArguments, model: Any, kind: type[Recording] = Recording, **kwargs: Any) -> Recording:
    return kind(model=model, args=args, train_dataset=Sequences(ROWS), eval_dataset=Sequences(10, seed=3), **kwargs)


def weights(trainer: Trainer) -> dict[str, Any]:
    state = trainer.accelerator.get_state_dict(trainer.deepspeed)
    if not trainer.is_world_process_zero():
        return {}
    return {"norm": round(tensors_norm({n: t for n, t in state.items() if n != "lm_head.weight"}), 4)}
