"""Trainer and Accelerate with Ulysses and with AutoTP on the ranks there are, and plainly on the samples they see."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, ParallelismConfig
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

from tests.clients.scripts.common import LENGTH, Sequences, mean_over_ranks, run_cases, tensors_norm
from tests.clients.scripts.trainer_making import LR, ROWS, Recording, arguments, decaying, reset, trainer_of

BATCH, STEPS = 2, 4


def llama(seed: int = 17) -> Any:
    """A tied head, a vocabulary and a feed-forward width that do not divide, fewer heads of keys than of queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=51, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Positioned(Sequences):
    """With the positions that DeepSpeed's adapter of the data loader asks for."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "position_ids": torch.arange(LENGTH)}


def contiguous(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """DeepSpeed's adapter gives views, which the loss flattens by view(); a copy to an accelerator makes them whole."""
    return {name: tensor.contiguous() for name, tensor in batch.items()}


class WithContiguousInputs(Recording):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return contiguous(super()._prepare_inputs(inputs))


def ulysses() -> ParallelismConfig:
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    return ParallelismConfig(sp_backend="deepspeed", sp_size=torch.distributed.get_world_size(), sp_handler=handler)


def split(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "tensor_parallel": {"autotp_size": torch.distributed.get_world_size()}}


def described(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Saved weights: the shapes, and one number that changes with any of them. The tied head may be there or not."""
    state = {name: value for name, value in state.items() if name != "lm_head.weight"}
    return {
        "facts": {name: list(value.shape) for name, value in state.items()},
        "weights": {"norm": tensors_norm(state)},
    }


def trainer(kind: str, stage: int) -> Any:
    def run(folder: Path) -> dict[str, Any]:
        config = decaying(stage, stage3_param_persistence_threshold=0)
        changes: dict[str, Any] = {"max_steps": STEPS}
        if kind == "tp":
            config = split(config)
            del config["train_batch_size"]
        elif kind == "sp":
            changes["parallelism_config"] = ulysses()
        made = trainer_of(arguments(folder, config, **changes), llama(), WithContiguousInputs)
        made.train_dataset = Positioned(ROWS)
        made.train()
        made.save_model(str(folder / "saved"))
        saved = load_file(folder / "saved" / "model.safetensors") if made.is_world_process_zero() else {}
        return {"curves": made.curves(), **described(saved)}

    return run


def accelerate(kind: str, stage: int) -> Any:
    def run(folder: Path) -> dict[str, Any]:
        config: dict[str, Any] = {
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0,
                                  "stage3_gather_16bit_weights_on_model_save": True},
            "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": BATCH,
        }  # fmt: skip
        plugin = DeepSpeedPlugin(hf_ds_config=split(config) if kind == "tp" else config)
        accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=ulysses() if kind == "sp" else None)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, eps=1e-4)
        model, optimizer, batches = accelerator.prepare(
            model, optimizer, DataLoader(Positioned(ROWS), batch_size=BATCH)
        )
        losses: list[float] = []
        model.train()
        for batch in map(contiguous, batches):
            if kind == "sp":
                loss = deepspeed_sp_compute_loss(accelerator, model, batch, False, accelerator.parallelism_config)
            else:
                loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks(float(loss)))
            if len(losses) == STEPS:
                break
        state = accelerator.get_state_dict(model) or {}
        groups = deepspeed.utils.groups
        degrees = {
            # DeepSpeed makes this group only where a model is split.
            "tp": groups.get_tensor_model_parallel_world_size() if kind == "tp" else 1,
            "sp": groups._get_sequence_parallel_world_size(),
            "dp": accelerator.deepspeed_engine_wrapped.engine.dp_world_size,
        }
        return {"curves": {"loss": losses}, "degrees": degrees, **described(state)}

    return run


def by_init(kind: str, stage: int) -> Any:
    """``tp_model_init`` gives the degree in place of the config."""

    def run(folder: Path) -> dict[str, Any]:
        model = llama()
        if kind == "tp":
            model = deepspeed.tp_model_init(model, torch.distributed.get_world_size(), torch.float32)
        config = {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": {"stage": stage}}
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-4)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        losses = []
        for first in range(0, BATCH * STEPS, BATCH):
            rows = Sequences(ROWS).rows[first : first + BATCH]
            loss = engine(input_ids=rows, labels=rows).loss
            engine.backward(loss)
            engine.step()
            losses.append(mean_over_ranks(float(loss)))
        state = engine._consolidated_16bit_state_dict() or {}
        engine.destroy()
        return {"curves": {"loss": losses}, **described(state)}

    return run


CASES = {
    f"{name}-{kind}-stage{stage}": make(kind, stage)
    for name, make in (("trainer", trainer), ("accelerate", accelerate), ("init", by_init))
    for kind in ("plain", "sp", "tp")
    if (name, kind) != ("init", "sp")
    for stage in (1, 2, 3)
}

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:], reset)
