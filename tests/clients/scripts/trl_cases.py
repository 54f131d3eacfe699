"""TRL's SFT, DPO and GRPO trainers on a tiny decoder that is made from a config, with and without LoRA."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.clients.scripts.common import Case, deepspeed_state, run_cases

WORDS = 60
ROWS = 24
KEPT = ("loss", "grad_norm", "learning_rate", "reward", "rewards/margins", "kl")


def reset() -> None:
    gc.collect()
    unset_hf_deepspeed_config()
    deepspeed_state()


def tokenizer() -> PreTrainedTokenizerFast:
    names = ["<pad>", "<eos>", "<unk>", *[f"w{index}" for index in range(WORDS)]]
    inner = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    made: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    return made


def model(folder: Path) -> str:
    """The model as files, so that the trainers load it with from_pretrained (under zero.Init at stage 3)."""
    path = folder / "model"
    if int(os.environ["RANK"]) == 0:
        torch.manual_seed(7)
        shape = LlamaConfig(
            vocab_size=WORDS + 3,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=1,
            tie_word_embeddings=False,
        )
        LlamaForCausalLM(shape).save_pretrained(path)
        tokenizer().save_pretrained(path)
        (path / "done").touch()
    while not (path / "done").exists():
        pass
    return str(path)


def sentence(generator: torch.Generator, length: int) -> str:
    return " ".join(f"w{index}" for index in torch.randint(WORDS, (length,), generator=generator).tolist())


def rows(algorithm: str) -> Dataset:
    generator = torch.Generator().manual_seed(3)
    if algorithm == "sft":
        return Dataset.from_list([{"text": sentence(generator, 12)} for _ in range(ROWS)])
    if algorithm == "dpo":
        return Dataset.from_list(
            [
                {
                    "prompt": sentence(generator, 4),
                    "chosen": " " + sentence(generator, 6),
                    "rejected": " " + sentence(generator, 6),
                }
                for _ in range(ROWS)
            ]
        )
    return Dataset.from_list([{"prompt": sentence(generator, 4)} for _ in range(ROWS)])


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def zero(stage: int) -> dict[str, Any]:
    only_at_3 = {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": 0}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            **(only_at_3 if stage == 3 else {}),
        },
    }


def trained(
    algorithm: str, stage: int, *, lora: bool = False, bf16: bool = False, recompute: str | None = None
) -> Case:
    """Train for a few steps and save; the log is the curve."""

    def case(folder: Path) -> dict[str, Any]:
        set_seed(5)
        common: dict[str, Any] = {
            "output_dir": str(folder / "out"),
            "deepspeed": zero(stage),
            "accelerator_config": {"use_configured_state": True},
            "use_cpu": True,
            "bf16": bf16,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": 5,
            "learning_rate": 5e-3,
            "lr_scheduler_type": "linear",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "gradient_checkpointing": recompute is not None,
            "gradient_checkpointing_kwargs": {"use_reentrant": recompute == "reentrant"} if recompute else None,
            "seed": 5,
            "model_init_kwargs": {"dtype": "bfloat16" if bf16 else "float32"},
        }
        adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        rest: dict[str, Any] = {
            "train_dataset": rows(algorithm),
            "processing_class": tokenizer(),
            "peft_config": adapters if lora else None,
        }
        trainer: Any
        if algorithm == "sft":
            settings: Any = SFTConfig(max_length=16, **common)
            trainer = SFTTrainer(args=settings, model=model(folder), **rest)
        elif algorithm == "dpo":
            settings = DPOConfig(max_length=16, **common)
            trainer = DPOTrainer(args=settings, model=model(folder), **rest)
        else:
            common.update(max_steps=3)
            settings = GRPOConfig(num_generations=2, max_completion_length=6, top_k=1, beta=0.1, **common)
            trainer = GRPOTrainer(args=settings, reward_funcs=reward, model=model(folder), **rest)
        trainer.train()
        log = [row for row in trainer.state.log_history if "loss" in row]
        trainer.save_model(str(folder / "saved"))
        curves = {name: [row[name] for row in log] for name in KEPT if all(name in row for row in log)}
        files = {path.name for path in (folder / "saved").iterdir()} - {"zero_to_torch.py"}
        return {"curves": curves, "facts": {"files": sorted(files)}}

    return case


CASES = {
    "sft-stage2": trained("sft", 2),
    "sft-stage3": trained("sft", 3),
    "sft-stage2-lora": trained("sft", 2, lora=True),
    "sft-stage3-lora": trained("sft", 3, lora=True),
    "sft-stage3-bf16": trained("sft", 3, bf16=True),
    "sft-stage3-recompute": trained("sft", 3, recompute="reentrant"),
    "sft-stage3-lora-recompute": trained("sft", 3, lora=True, recompute="reentrant"),
    "sft-stage3-lora-non-reentrant": trained("sft", 3, lora=True, recompute="non-reentrant"),
    "dpo-stage2": trained("dpo", 2),
    "dpo-stage3": trained("dpo", 3),
    "dpo-stage2-lora": trained("dpo", 2, lora=True),
    "dpo-stage3-lora": trained("dpo", 3, lora=True),
    "dpo-stage3-bf16": trained("dpo", 3, bf16=True),
    "grpo-stage2": trained("grpo", 2),
    "grpo-stage3": trained("grpo", 3),
}

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:], reset)
