"""Accelerate's ways to train with DeepSpeed: plugins, files, dummies, accumulation, saving, several models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from torch.utils.data import DataLoader, Subset

from tests.clients.scripts.common import Sequences, deepspeed_state, gpt2, run_cases, tensors_norm, write_json

ROWS, BATCH, LR = 48, 2, 3e-3


def auto_config(stage: int, **zero: Any) -> dict[str, Any]:
    """Every key that Accelerate knows how to fill is "auto"."""
    section: dict[str, Any] = {
        "stage": stage, "reduce_bucket_size": "auto", "overlap_comm": True, "contiguous_gradients": True,
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True, **zero,
    }  # fmt: skip
    return {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "zero_optimization": section,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def accelerator_for(config: Any, accumulation: int = 2, precision: str = "no", **plugin: Any) -> Accelerator:
    made = DeepSpeedPlugin(hf_ds_config=config, **plugin) if config is not None else DeepSpeedPlugin(**plugin)
    return Accelerator(deepspeed_plugin=made, gradient_accumulation_steps=accumulation, mixed_precision=precision)


def loader(rows: int = ROWS) -> DataLoader[Any]:
    return DataLoader(Sequences(rows), batch_size=BATCH)


def dummies(accelerator: Accelerator, model: Any, **scheduler: Any) -> tuple[Any, Any, Any, Any]:
    """The model with Accelerate's stand-ins for an optimizer and a schedule that the configuration makes."""
    optimizer = DummyOptim(model.parameters(), lr=LR, weight_decay=0.01)
    schedule = DummyScheduler(optimizer, **(scheduler or {"total_num_steps": 24, "warmup_num_steps": 2}))
    prepared: tuple[Any, Any, Any, Any] = accelerator.prepare(model, optimizer, loader(), schedule)
    return prepared


def own(accelerator: Accelerator, model: Any) -> tuple[Any, Any, Any, Any]:
    """The model with an optimizer and a schedule that the script makes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1.0 - step / 24))
    prepared: tuple[Any, Any, Any, Any] = accelerator.prepare(model, optimizer, loader(), schedule)
    return prepared


class Curves:
    """What a run shows step by step: the mean loss of its micro-batches on all ranks, the norm, the learning rate."""

    def __init__(self) -> None:
        self.loss: list[float] = []
        self.norm: list[float] = []
        self.lr: list[float] = []
        self._micro: list[torch.Tensor] = []

    def micro(self, accelerator: Accelerator, loss: torch.Tensor) -> None:
        self._micro.append(accelerator.gather(loss.detach().float().reshape(1)).mean())

    def step(self, norm: Any, lr: float) -> None:
        self.loss.append(float(torch.stack(self._micro).mean()))
        self._micro.clear()
        if norm is not None:
            self.norm.append(float(norm))
        self.lr.append(float(lr))

    def result(self) -> dict[str, list[float]]:
        return {key: value for key, value in (("loss", self.loss), ("norm", self.norm), ("lr", self.lr)) if value}


def train(
    accelerator: Accelerator, model: Any, optimizer: Any, batches: Any, schedule: Any, steps: int = 6, skip: int = 0
) -> Curves:
    curves = Curves()
    model.train()
    for index, batch in enumerate(batches):
        if index < skip:
            continue
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            curves.micro(accelerator, loss)
            norm = None
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            curves.step(norm, schedule.get_last_lr()[0])
        if len(curves.loss) == steps:
            break
    return curves


def weights(accelerator: Accelerator, model: Any) -> dict[str, Any]:
    """Facts of ``get_state_dict``: rank 0 has it all."""
    state = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return {}
    return {"names": len(state), "norm": round(tensors_norm(state), 4)}


def with_dummies(stage: int, precision: str = "no", **zero: Any) -> Any:
    def run(folder: Path) -> dict[str, Any]:
        accelerator = accelerator_for(auto_config(stage, **zero), precision=precision)
        model, optimizer, batches, schedule = dummies(accelerator, gpt2())
        curves = train(accelerator, model, optimizer, batches, schedule)
        return {"curves": curves.result(), "weights": weights(accelerator, model)}

    return run


def from_file(folder: Path) -> dict[str, Any]:
    """The configuration is a file; the schedule a callable that the dummy carries."""
    path = folder / "ds.json"
    write_json(path, without(auto_config(2), "scheduler"))
    accelerator = accelerator_for(str(path))

    def make(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 12)

    model, optimizer, batches, schedule = dummies(accelerator, gpt2(), lr_scheduler_callable=make)
    curves = train(accelerator, model, optimizer, batches, schedule)
    config = accelerator.deepspeed_config
    return {
        "curves": curves.result(),
        "facts": {
            "batch": [config["train_batch_size"], config["train_micro_batch_size_per_gpu"]],
            "type": type(accelerator.unwrap_model(model)).__name__,
            "is_engine": type(model) is deepspeed.DeepSpeedEngine,
            "skipped": bool(accelerator.optimizer_step_was_skipped),
        },
    }


def with_own(stage: int, accumulation: int = 2) -> Any:
    """No configuration at all: the plugin's arguments."""

    def run(folder: Path) -> dict[str, Any]:
        accelerator = accelerator_for(
            None,
            accumulation,
            zero_stage=stage,
            gradient_accumulation_steps=accumulation,
            gradient_clipping=0.5,
            zero3_init_flag=False,
            zero3_save_16bit_model=True,
        )
        model, optimizer, batches, schedule = own(accelerator, gpt2())
        curves = train(accelerator, model, optimizer, batches, schedule)
        return {"curves": curves.result(), "weights": weights(accelerator, model)}

    return run


def uneven(folder: Path) -> dict[str, Any]:
    """Accumulation over 3 with 8 micro-batches an epoch: the loader's end closes a step early, twice."""
    accelerator = accelerator_for(without(auto_config(1), "optimizer", "scheduler"), 3)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, loader(32), schedule)
    curves = [train(accelerator, model, optimizer, batches, schedule) for _ in range(2)]
    return {
        "curves": {"loss": curves[0].loss + curves[1].loss, "norm": curves[0].norm + curves[1].norm},
        "weights": weights(accelerator, model),
    }


def resume(stage: int, *, is_own: bool = False, **zero: Any) -> Any:
    """Three steps, ``save_state``, three more; a new accelerator, ``load_state``, the same three again."""

    def run(folder: Path) -> dict[str, Any]:
        config = auto_config(stage, **zero)
        if is_own:
            config = without(config, "optimizer", "scheduler")
        prepare = own if is_own else dummies
        accelerator = accelerator_for(config)
        parts = prepare(accelerator, gpt2())
        before = train(accelerator, *parts, steps=3)
        accelerator.save_state(str(folder / "state"))
        after = train(accelerator, *parts, steps=3, skip=6)
        accelerator.free_memory()
        deepspeed_state()
        again = accelerator_for(config)
        parts = prepare(again, gpt2(seed=99))
        again.load_state(str(folder / "state"))
        resumed = train(again, *parts, steps=3, skip=6)
        again.wait_for_everyone()
        return {
            "curves": {
                **{key: value + after.result()[key] for key, value in before.result().items()},
                "resumed_loss": resumed.loss,
                "resumed_lr": resumed.lr,
            },
            "weights": weights(again, parts[0]),
        }

    return run


def gathering(stage: int) -> Any:
    """``gather``, ``gather_for_metrics`` with rows that do not divide, ``pad_across_processes``, evaluation, saving."""

    def run(folder: Path) -> dict[str, Any]:
        accelerator = accelerator_for(auto_config(stage))
        model, optimizer, batches, schedule = dummies(accelerator, gpt2())
        test = accelerator.prepare(DataLoader(Subset(Sequences(64, seed=3), range(10)), batch_size=2))
        curves = train(accelerator, model, optimizer, batches, schedule, steps=2)
        model.eval()
        losses, seen = [], []
        for batch in test:
            with torch.no_grad():
                output = model(**batch)
            losses.append(accelerator.gather(output.loss.reshape(1)))
            seen.append(accelerator.gather_for_metrics(batch["input_ids"][:, 0]))
        ragged = torch.ones(1, 2 + accelerator.process_index, dtype=torch.long)
        padded = accelerator.pad_across_processes(ragged, dim=1)
        accelerator.save_model(model, str(folder / "model"))
        unwrapped = accelerator.unwrap_model(model)
        unwrapped.save_pretrained(
            folder / "pretrained",
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )
        accelerator.wait_for_everyone()
        from safetensors.torch import load_file

        saved = load_file(folder / "model" / "model.safetensors")
        again = load_file(folder / "pretrained" / "model.safetensors")
        return {
            "curves": {"loss": curves.loss, "eval": torch.cat(losses).tolist()},
            "facts": {
                "first_tokens": torch.cat(seen).tolist(),
                "padded": list(padded.shape),
                "files": sorted(p.name for p in (folder / "model").iterdir()),
                "pretrained_files": sorted(p.name for p in (folder / "pretrained").iterdir()),
                "names": sorted(set(saved) - {"lm_head.weight"}),  # tied; DeepSpeed's stages 1 and 2 write it twice
                "same": sorted(saved) == sorted(again) and all(torch.equal(saved[n], again[n]) for n in saved),
                "is_parameters_class": type(unwrapped).__name__,
            },
            "weights": {"norm": round(tensors_norm({n: t for n, t in saved.items() if n != "lm_head.weight"}), 4)},
        }

    return run


def refused(folder: Path) -> dict[str, Any]:
    """Stage 3 that may not gather on saving: Accelerate's own ValueError."""
    accelerator = accelerator_for(auto_config(3, stage3_gather_16bit_weights_on_model_save=False))
    model, *_ = dummies(accelerator, gpt2())
    try:
        accelerator.get_state_dict(model)
    except ValueError as error:
        return {"facts": {"said": str(error)[:60]}}
    return {"facts": {"said": None}}


def teacher_and_student(folder: Path) -> dict[str, Any]:
    """Two plugins: a student that trains at stage 2 beside a teacher that only runs, at stage 3."""
    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config=auto_config(2)),
        "teacher": DeepSpeedPlugin(
            hf_ds_config={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
                          "train_micro_batch_size_per_gpu": BATCH},
        ),
    }  # fmt: skip
    accelerator = Accelerator(deepspeed_plugins=plugins, gradient_accumulation_steps=2)
    model, optimizer, batches, schedule = dummies(accelerator, gpt2())
    accelerator.state.select_deepspeed_plugin("teacher")
    with torch.no_grad():
        teacher = accelerator.prepare(gpt2(seed=5, n_layer=3))
    teacher.eval()
    accelerator.state.select_deepspeed_plugin("student")
    curves = Curves()
    for batch in batches:
        with torch.no_grad():
            wanted = teacher(**batch).logits.softmax(-1)
        with accelerator.accumulate(model):
            logits = model(**batch).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
            accelerator.backward(loss)
            curves.micro(accelerator, loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            curves.step(None, schedule.get_last_lr()[0])
        if len(curves.loss) == 4:
            break
    return {"curves": curves.result()}


def two_trained(folder: Path) -> dict[str, Any]:
    """Two plugins and two accelerators: both models train, at stages 2 and 3."""
    plugins = {
        "first": DeepSpeedPlugin(hf_ds_config=auto_config(2)),
        "second": DeepSpeedPlugin(hf_ds_config={**auto_config(3), "train_micro_batch_size_per_gpu": BATCH}),
    }
    first = Accelerator(deepspeed_plugins=plugins, gradient_accumulation_steps=1)
    second = Accelerator(gradient_accumulation_steps=1)
    a, a_optimizer, batches, a_schedule = dummies(first, gpt2())
    second.state.select_deepspeed_plugin("second")
    model = gpt2(seed=8)
    optimizer = DummyOptim(model.parameters(), lr=LR)
    b, b_optimizer, b_schedule = second.prepare(
        model, optimizer, DummyScheduler(optimizer, total_num_steps=24, warmup_num_steps=2)
    )
    a_curves, b_curves = Curves(), Curves()
    for _, batch in zip(range(4), batches, strict=False):
        for accelerator, net, step, rate, curves in (
            (first, a, a_optimizer, a_schedule, a_curves),
            (second, b, b_optimizer, b_schedule, b_curves),
        ):
            loss = net(**batch).loss
            accelerator.backward(loss)
            step.step()
            rate.step()
            step.zero_grad()
            curves.micro(accelerator, loss)
            curves.step(None, rate.get_last_lr()[0])
    return {"curves": {"loss": a_curves.loss, "second": b_curves.loss, "lr": a_curves.lr}}


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
OFFLOAD_BOTH = {**OFFLOAD, "offload_param": {"device": "cpu"}}

CASES = {
    "dummies-stage1": with_dummies(1),
    "dummies-stage2": with_dummies(2),
    "dummies-stage3": with_dummies(3),
    "dummies-stage1-bf16": with_dummies(1, "bf16"),
    "dummies-stage2-bf16": with_dummies(2, "bf16"),
    "dummies-stage3-bf16": with_dummies(3, "bf16"),
    "dummies-stage3-offload": with_dummies(3, **OFFLOAD_BOTH),
    "file": from_file,
    "own-stage0": with_own(0),
    "own-stage1": with_own(1),
    "own-stage2": with_own(2),
    "own-stage3": with_own(3),
    "own-stage2-no-accumulation": with_own(2, 1),
    "uneven": uneven,
    "resume-stage1": resume(1),
    "resume-stage2": resume(2),
    "resume-stage3": resume(3),
    "resume-own-stage2": resume(2, is_own=True),
    "resume-own-offload": resume(2, is_own=True, **OFFLOAD),
    "gathering-stage2": gathering(2),
    "gathering-stage3": gathering(3),
    "refused": refused,
    "teacher": teacher_and_student,
    "two-trained": two_trained,
}

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:], deepspeed_state)
