"""Transformers' Trainer with DeepSpeed: "auto" values, resuming, best model, recompute, LoRA, generating, loading."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2LMHeadModel, TrainerCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from tests.clients.scripts.common import Sequences, gpt2, gpt2_config, over_ranks, run_cases, tensors_norm, write_json
from tests.clients.scripts.trainer_making import (
    ROWS,
    all_auto,
    arguments,
    bare,
    decaying,
    reset,
    settings,
    small_stage3,
    trainer_of,
    weights,
)


def trained(make_config: Callable[[], dict[str, Any]], model: Callable[[], Any] = gpt2, **changes: Any) -> Any:
    """A plain run."""

    def run(folder: Path) -> dict[str, Any]:
        args = arguments(folder, make_config(), **changes)
        trainer = trainer_of(args, model())
        trainer.train()
        return {"curves": trainer.curves(), "weights": weights(trainer)}

    return run


def path_and_own(folder: Path) -> dict[str, Any]:
    """The configuration as a path; optimizer and schedule are Trainer's."""
    path = folder / "ds.json"
    write_json(path, bare(2))
    args = arguments(folder, str(path), lr_scheduler_type="cosine", optim="adamw_torch", max_grad_norm=0.5)
    trainer = trainer_of(args, gpt2())
    trainer.train()
    return {"curves": trainer.curves(), "weights": weights(trainer)}


def evaluated_first(stage: int) -> Any:
    """One Trainer evaluates, another trains the same model, evaluates between steps and after, and predicts."""

    def run(folder: Path) -> dict[str, Any]:
        first = trainer_of(arguments(folder, all_auto(stage)), gpt2())
        before = first.evaluate()
        first.accelerator.free_memory()
        model = first.model
        del first
        reset()
        args = arguments(folder, all_auto(stage), eval_strategy="steps", eval_steps=2)
        trainer = trainer_of(args, model)
        trainer.train()
        after = trainer.evaluate()
        predicted = trainer.predict(Sequences(10, seed=3))
        return {
            "curves": {**trainer.curves(), "ends": [before["eval_loss"], after["eval_loss"]]},
            "facts": {"predictions": list(predicted.predictions.shape)},
            "weights": {"predicted": round(float((predicted.predictions.astype("float64") ** 2).mean()), 4)},
        }

    return run


def evaluated_only(folder: Path) -> dict[str, Any]:
    """Stage 3 without any training: the engine has no optimizer."""
    args = arguments(folder, small_stage3())
    trainer = trainer_of(args, gpt2())
    return {"curves": {"eval": [trainer.evaluate()["eval_loss"]]}}


def resumed(make_config: Callable[[], dict[str, Any]], **changes: Any) -> Any:
    """Six steps with a checkpoint after three; a new Trainer resumes from it and does the last three."""

    def run(folder: Path) -> dict[str, Any]:
        args = arguments(folder, make_config(), save_strategy="steps", save_steps=3, **changes)
        first = trainer_of(args, gpt2())
        first.train()
        whole, norm = first.curves(), weights(first)
        del first, args
        reset()
        args = arguments(folder, make_config(), save_strategy="no", **changes)
        second = trainer_of(args, gpt2(seed=99))
        second.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-3"))
        again = second.curves()
        saved = folder / "out" / "checkpoint-3"
        return {
            "curves": {**whole, "resumed_loss": again["loss"], "resumed_lr": again["lr"]},
            "weights": {**norm, "resumed": weights(second).get("norm")},
            "facts": {
                "step": second.state.global_step,
                "latest": (saved / "latest").read_text().strip(),
                "model": (saved / "model.safetensors").exists(),
            },
        }

    return run


def best_model(stage: int) -> Any:
    """``load_best_model_at_end``: the learning rate is so high that the first checkpoint is the best."""

    def run(folder: Path) -> dict[str, Any]:
        args = arguments(
            folder, bare(stage), max_steps=4, learning_rate=2.0, warmup_steps=0, lr_scheduler_type="constant",
            eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, save_total_limit=2,
            load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False,
        )  # fmt: skip
        trainer = trainer_of(args, gpt2())
        trainer.train()
        best = Path(trainer.state.best_model_checkpoint or "").name
        return {
            "curves": {"first": trainer.curves()["eval"][:1], "end": [trainer.evaluate()["eval_loss"]]},
            "facts": {"best": best},
        }

    return run


def model_only(stage: int) -> Any:
    """``save_only_model``: weights, and nothing to resume from; loads with ``from_pretrained``."""

    def run(folder: Path) -> dict[str, Any]:
        args = arguments(folder, bare(stage), save_strategy="steps", save_steps=3, save_only_model=True)
        trainer = trainer_of(args, gpt2())
        trainer.train()
        saved = folder / "out" / "checkpoint-6"
        result = {"curves": trainer.curves(), "weights": weights(trainer)}
        names = sorted(path.name for path in saved.iterdir() if not path.name.startswith("rng_state"))
        reset()
        loaded = GPT2LMHeadModel.from_pretrained(saved)
        result["weights"]["loaded"] = round(tensors_norm(dict(loaded.named_parameters())), 4)
        result["facts"] = {"files": names}
        return result

    return run


def ungathered(folder: Path) -> dict[str, Any]:
    """Stage 3 that may not gather on saving: ``save_model`` writes a checkpoint instead of weights."""
    config = decaying(3, stage3_gather_16bit_weights_on_model_save=False)
    trainer = trainer_of(arguments(folder, config, max_steps=2), gpt2())
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    names = {path.name for path in (folder / "saved").iterdir()}
    return {
        "curves": {"loss": trainer.curves()["loss"]},
        "facts": {"has_weights": bool({"model.safetensors", "pytorch_model.bin"} & names), "latest": "latest" in names},
    }


def recomputed(stage: int, *, is_reentrant: bool) -> Any:
    return trained(
        lambda: decaying(stage, stage3_param_persistence_threshold=0),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": is_reentrant},
    )


def lora(stage: int, *, is_mixed: bool = False, resumes: bool = False) -> Any:
    """PEFT's LoRA: few parameters train, the others are frozen."""

    def adapted() -> Any:
        from peft import LoraConfig, get_peft_model

        base = gpt2().to(torch.bfloat16) if is_mixed else gpt2()
        torch.manual_seed(5)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], lora_dropout=0.0, task_type="CAUSAL_LM",
                            fan_in_fan_out=True, init_lora_weights="gaussian")  # fmt: skip
        return get_peft_model(base, config)

    def run(folder: Path) -> dict[str, Any]:
        changes = {"bf16": is_mixed, "learning_rate": 2e-2}
        if resumes:
            changes |= {"save_strategy": "steps", "save_steps": 3}
        trainer = trainer_of(arguments(folder, decaying(stage), **changes), adapted())
        trainer.train()
        curves = trainer.curves()
        trainer.save_model(str(folder / "adapter"))
        trainer.accelerator.wait_for_everyone()
        from safetensors.torch import load_file

        saved = load_file(folder / "adapter" / "adapter_model.safetensors")
        result = {
            "curves": curves,
            "weights": {"adapter": round(tensors_norm(saved), 4)},
            "facts": {"adapter_names": sorted(saved)},
        }
        if resumes:
            del trainer
            reset()
            again = trainer_of(arguments(folder, decaying(stage), bf16=is_mixed, learning_rate=2e-2), adapted())
            again.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-3"))
            result["curves"]["resumed_loss"] = again.curves()["loss"]
        return result

    return run


class Generating(TrainerCallback):
    """Greedy continuations after every second step."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % 2:
            return
        engine = self.trainer.deepspeed
        engine.eval()
        prompt = Sequences(2, seed=9)[0]["input_ids"][None, :4]
        made = engine.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False,
            synced_gpus=is_deepspeed_zero3_enabled(),
        )  # fmt: skip
        self.tokens.append(made[0].tolist())
        engine.train()


def generating(stage: int) -> Any:
    """``generate`` between steps; at the end the same by the unsharded weights."""

    def run(folder: Path) -> dict[str, Any]:
        callback = Generating()
        trainer = trainer_of(
            arguments(folder, decaying(stage, stage3_param_persistence_threshold=0), learning_rate=2e-2, max_steps=12),
            gpt2(), callbacks=[callback],
        )  # fmt: skip
        callback.trainer = trainer
        trainer.train()
        return {"curves": trainer.curves(), "facts": {"tokens": callback.tokens}}

    return run


def seq2seq(stage: int) -> Any:
    """Seq2SeqTrainer: ``predict_with_generate`` in evaluations between steps of an encoder-decoder."""

    def run(folder: Path) -> dict[str, Any]:
        from transformers import BartConfig, BartForConditionalGeneration, Seq2SeqTrainer, Seq2SeqTrainingArguments

        config = BartConfig(
            vocab_size=96, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, dropout=0.0,
            attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=2, forced_eos_token_id=2,
        )  # fmt: skip
        chosen = settings(folder, decaying(stage), eval_strategy="steps", eval_steps=3)
        args = Seq2SeqTrainingArguments(**chosen, predict_with_generate=True, generation_max_length=8)
        torch.manual_seed(17)
        model = BartForConditionalGeneration(config)
        seen: list[list[int]] = []

        def metrics(prediction: Any) -> dict[str, float]:
            seen.append(list(prediction.predictions.shape))
            return {"first": float(prediction.predictions[:, 1].mean())}

        trainer = Seq2SeqTrainer(
            model=model, args=args, train_dataset=Sequences(ROWS), eval_dataset=Sequences(10, seed=3),
            compute_metrics=metrics,
        )  # fmt: skip
        trainer.train()
        logs = trainer.state.log_history
        return {
            "curves": {
                "loss": [log["loss"] for log in logs if "loss" in log],
                "eval": [log["eval_loss"] for log in logs if "eval_loss" in log],
            },
            "facts": {"shapes": seen},
        }

    return run


class Watch:
    """The most memory that this process held anonymously, beyond what it held when the watch began; in bytes."""

    def __enter__(self) -> Watch:
        import threading

        gc.collect()
        self._begin = self.most = self._now()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.grown = self.most - self._begin

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        return 0


def pretrained(folder: Path) -> dict[str, Any]:
    """``from_pretrained`` under stage 3: what a rank holds while it loads and afterwards; then training goes on.

    Exact where freed memory leaves the process at once: MALLOC_MMAP_THRESHOLD_=65536, in processes of its own.
    """
    big = {"n_embd": 384, "n_layer": 12, "n_positions": 64}
    if torch.distributed.get_rank() == 0:
        gpt2(**big).save_pretrained(folder / "model", max_shard_size="20MB")
    torch.distributed.barrier()
    args = arguments(folder, decaying(3), max_steps=2, learning_rate=1e-4)
    with Watch() as watch:
        model = GPT2LMHeadModel.from_pretrained(folder / "model")
    nbytes = sum(getattr(p, "ds_numel", p.numel()) * 4 for p in model.parameters())
    held = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())
    shapes = {tuple(getattr(p, "ds_shape", p.shape)) for p in model.parameters()}
    trainer = trainer_of(args, model)
    trainer.train()
    return {
        "curves": trainer.curves(),
        "facts": {"num_bytes": nbytes, "num_shapes": len(shapes)},
        "memory": {
            "peak_of_model": [round(x / nbytes, 3) for x in over_ranks(watch.grown)],
            "visible_of_model": held / nbytes,
        },
    }


def from_config(folder: Path) -> dict[str, Any]:
    """A model from its configuration under stage 3, then filled: every rank draws other numbers, rank 0's count."""
    args = arguments(folder, small_stage3())
    torch.manual_seed(17 + torch.distributed.get_rank())
    from transformers import AutoModelForCausalLM

    trainer = trainer_of(args, AutoModelForCausalLM.from_config(gpt2_config()))
    trainer.train()
    return {"curves": trainer.curves(), "weights": weights(trainer)}


CASES = {
    "auto-stage1": trained(lambda: decaying(1)),
    "auto-stage2": trained(lambda: decaying(2)),
    "auto-stage3": trained(lambda: decaying(3)),
    "warmup-stage2": trained(lambda: all_auto(2)),
    "small-stage3": trained(small_stage3),
    "stage0": trained(lambda: decaying(0)),
    "auto-stage1-bf16": trained(lambda: decaying(1), bf16=True),
    "auto-stage2-bf16": trained(lambda: decaying(2), bf16=True),
    "auto-stage3-bf16": trained(small_stage3, bf16=True),
    "path": path_and_own,
    "own-stage3": trained(lambda: bare(3), lr_scheduler_type="linear"),
    "offload-stage2": trained(lambda: decaying(2, offload_optimizer={"device": "cpu", "pin_memory": True})),
    "offload-stage3": trained(
        lambda: decaying(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    ),
    "offload-own-stage2": trained(lambda: bare(2, offload_optimizer={"device": "cpu"}), lr_scheduler_type="linear"),
    "epochs": trained(lambda: decaying(2), max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=5),
    "evaluated-stage2": trained(lambda: decaying(2), eval_strategy="steps", eval_steps=2),
    "evaluated-first-stage3": evaluated_first(3),
    "evaluated-only": evaluated_only,
    "resumed-stage1": resumed(lambda: decaying(1)),
    "resumed-stage2": resumed(lambda: decaying(2)),
    "resumed-stage3": resumed(lambda: decaying(3)),
    "resumed-own-stage2": resumed(lambda: bare(2), lr_scheduler_type="linear"),
    "resumed-own-offload": resumed(lambda: bare(2, offload_optimizer={"device": "cpu"}), lr_scheduler_type="linear"),
    "best-stage2": best_model(2),
    "best-stage3": best_model(3),
    "model-only-stage2": model_only(2),
    "model-only-stage3": model_only(3),
    "ungathered": ungathered,
    "recomputed-stage2": recomputed(2, is_reentrant=True),
    "recomputed-stage3": recomputed(3, is_reentrant=True),
    "recomputed-stage3-non-reentrant": recomputed(3, is_reentrant=False),
    "lora-stage2": lora(2),
    "lora-stage3": lora(3, resumes=True),
    "lora-stage2-bf16": lora(2, is_mixed=True),
    "lora-stage3-bf16": lora(3, is_mixed=True),
    "generating-stage2": generating(2),
    "generating-stage3": generating(3),
    "seq2seq-stage2": seq2seq(2),
    "seq2seq-stage3": seq2seq(3),
    "pretrained": pretrained,
    "from-config": from_config,
}


if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:], reset)
