"""PEFT with mixed formats: adapters in fp32 on a base in bf16, as PEFT makes them, under Trainer and under Accelerate.

Each case trains, saves the adapter, resumes from its own checkpoint after three of six steps, and puts the saved
adapter on a whole base. With ``SHOAL_PLAIN=1`` the same runs without an engine: one process, every rank's rows in one
batch.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import DeepSpeedPlugin
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from tests.clients.scripts.common import (
    Case,
    Sequences,
    deepspeed_state,
    gpt2,
    mean_over_ranks,
    run_cases,
    tensors_norm,
)

ROWS, BATCH, STEPS, LR = 48, 2, 6, 2e-2
IS_PLAIN = os.environ.get("SHOAL_PLAIN") == "1"
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def reset() -> None:
    gc.collect()
    unset_hf_deepspeed_config()
    if IS_PLAIN:
        for name in LAUNCHERS:  # Accelerate would take them for several processes
            os.environ.pop(name, None)
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    else:
        deepspeed_state()


def zero(stage: int, *, is_cast: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": is_cast},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def base(folder: Path) -> Any:
    """The base in bf16, as ``from_pretrained`` loads it: sharded at stage 3."""
    path = folder / "base"
    if int(os.environ.get("RANK", "0")) == 0 and not path.exists():
        with torch.no_grad():
            gpt2().to(torch.bfloat16).save_pretrained(folder / "making")
        (folder / "making").rename(path)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return GPT2LMHeadModel.from_pretrained(path, dtype=torch.bfloat16)


def adapted(folder: Path, seed: int, **more: Any) -> Any:
    """The base with LoRA, whose weights PEFT keeps in fp32 (``autocast_adapter_dtype``)."""
    model = base(folder)
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], lora_dropout=0.0, task_type="CAUSAL_LM",
                        fan_in_fan_out=True, init_lora_weights="gaussian", **more)  # fmt: skip
    made = get_peft_model(model, config, autocast_adapter_dtype=True)
    formats = {name.partition("lora_")[1]: parameter.dtype for name, parameter in made.named_parameters()}
    assert formats == {"lora_": torch.float32, "": torch.bfloat16}
    return made


def facts_of_adapter(folder: Path, saved: Path) -> tuple[dict[str, Any], float]:
    """What the saved adapter holds, and the loss of a whole base that wears it."""
    unset_hf_deepspeed_config()
    tensors = load_file(saved / "adapter_model.safetensors")
    whole = PeftModel.from_pretrained(
        GPT2LMHeadModel.from_pretrained(folder / "base", dtype=torch.bfloat16), saved, autocast_adapter_dtype=True
    )
    rows = Sequences(10, seed=3).rows
    with torch.no_grad():
        loss = float(whole(input_ids=rows, labels=rows).loss)
    return {"names": sorted(tensors), "norm": round(tensors_norm(tensors), 4)}, loss


class Recording(Trainer):
    """Trainer that keeps each step's loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss) if IS_PLAIN else mean_over_ranks(float(loss)))
        return loss


def under_trainer(stage: int, *, is_cast: bool, **more: Any) -> Case:
    def trainer_for(folder: Path, seed: int, **changes: Any) -> Recording:
        model = None if is_cast else adapted(folder, seed, **more)
        settings: dict[str, Any] = {
            "output_dir": str(folder / "out"), "per_device_train_batch_size": BATCH * (2 if IS_PLAIN else 1),
            "per_device_eval_batch_size": 5, "max_steps": STEPS, "learning_rate": LR, "lr_scheduler_type": "linear",
            "logging_steps": 1, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False, "seed": 17,
            "train_sampling_strategy": "sequential", "dataloader_pin_memory": False, "use_cpu": True,
            "bf16": is_cast, "optim": "adamw_torch", **changes,
        }  # fmt: skip
        if not IS_PLAIN:
            settings |= {
                "deepspeed": zero(stage, is_cast=is_cast),
                "accelerator_config": {"use_configured_state": True},
            }
        args = TrainingArguments(**settings)
        return Recording(model=model or adapted(folder, seed, **more), args=args, train_dataset=Sequences(ROWS),
                         eval_dataset=Sequences(10, seed=3))  # fmt: skip

    def run(folder: Path) -> dict[str, Any]:
        trainer = trainer_for(folder, 5, save_strategy="steps", save_steps=3)
        trainer.train()
        ends = trainer.evaluate()["eval_loss"]
        trainer.save_model(str(folder / "adapter"))
        trainer.accelerator.wait_for_everyone()
        losses, logs = trainer.losses, trainer.state.log_history
        del trainer
        reset()
        again = trainer_for(folder, 6, save_strategy="no")
        again.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-3"))
        facts, worn = facts_of_adapter(folder, folder / "adapter")
        return {
            "curves": {
                "loss": losses,
                "norm": [float(log["grad_norm"]) for log in logs if "grad_norm" in log],
                "resumed_loss": again.losses,
                "ends": [ends, worn],
            },
            "weights": {"adapter": facts["norm"]},
            "facts": {"names": facts["names"]},
        }

    return run


def under_accelerate(stage: int, *, is_cast: bool, **more: Any) -> Case:
    def start(folder: Path, seed: int) -> tuple[Any, ...]:
        kept = None
        model = None if is_cast else adapted(folder, seed, **more)
        if IS_PLAIN:
            accelerator = Accelerator(mixed_precision="bf16" if is_cast else "no", cpu=True)
        else:
            config = zero(stage, is_cast=is_cast)
            plugin = DeepSpeedPlugin(hf_ds_config=config)
            accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16" if is_cast else "no")
            assert accelerator.distributed_type == DistributedType.DEEPSPEED
            kept = HfDeepSpeedConfig(config)  # from_pretrained asks it while it lives
        model = model or adapted(folder, seed, **more)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step * (2 if IS_PLAIN else 1) / 24)
        loader = DataLoader(Sequences(ROWS), batch_size=BATCH * (2 if IS_PLAIN else 1))
        return accelerator, *accelerator.prepare(model, optimizer, loader, schedule), kept

    def train(accelerator: Any, model: Any, optimizer: Any, batches: Any, schedule: Any, first: int) -> Any:
        losses, norms = [], []
        for index, batch in enumerate(batches):
            if not first <= index < first + STEPS // 2:
                continue
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item() if IS_PLAIN else mean_over_ranks(loss.item()))
        return losses, norms

    def run(folder: Path) -> dict[str, Any]:
        accelerator, model, optimizer, batches, schedule, kept = start(folder, 5)
        losses, norms = train(accelerator, model, optimizer, batches, schedule, 0)
        accelerator.save_state(str(folder / "state"))
        more_losses, more_norms = train(accelerator, model, optimizer, batches, schedule, STEPS // 2)
        model.eval()
        rows = Sequences(10, seed=3).rows
        with torch.no_grad():
            ends = float(model(input_ids=rows, labels=rows).loss)
        state = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(
            folder / "adapter", is_main_process=accelerator.is_main_process, state_dict=state
        )
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        del accelerator, model, optimizer, batches, schedule, kept, state
        reset()
        again, model, optimizer, batches, schedule, _kept = start(folder, 6)
        again.load_state(str(folder / "state"))
        resumed, _ = train(again, model, optimizer, batches, schedule, STEPS // 2)
        again.wait_for_everyone()
        facts, worn = facts_of_adapter(folder, folder / "adapter")
        return {
            "curves": {
                "loss": losses + more_losses, "norm": norms + more_norms, "resumed_loss": resumed,
                "ends": [ends, worn],
            },
            "weights": {"adapter": facts["norm"]},
            "facts": {"names": facts["names"]},
        }  # fmt: skip

    return run


KINDS: dict[str, dict[str, Any]] = {"lora": {}, "dora": {"use_dora": True}, "saved": {"modules_to_save": ["ln_f"]}}

CASES: dict[str, Case] = {
    f"{client}-stage{stage}-{'bf16' if is_cast else 'mixed'}-{kind}": make(stage, is_cast=is_cast, **KINDS[kind])
    for client, make in (("trainer", under_trainer), ("accelerate", under_accelerate))
    for stage in (2, 3)
    for is_cast in (False, True)
    for kind in KINDS
}

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:], reset)
