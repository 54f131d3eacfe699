"""What Trainer does on Shoal and not on DeepSpeed 0.19.8: weight-normed models born sharded, one Trainer for all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from tests.clients.scripts.common import gpt2, run_cases
from tests.clients.scripts.trainer_making import (
    ROWS,
    Recording,
    arguments,
    bare,
    decaying,
    reset,
    trainer_of,
    weights,
)


class Waves(Dataset[dict[str, torch.Tensor]]):
    """Noise in two classes."""

    def __init__(self, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.waves = torch.randn(num_rows, 400, generator=generator)
        self.labels = torch.randint(0, 2, (num_rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.waves)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_values": self.waves[index], "labels": self.labels[index]}


def speech(stage: int) -> Any:
    """A speech model with a weight-normed convolution, by ``from_pretrained``: with DeepSpeed an error at stage 3."""

    def run(folder: Path) -> dict[str, Any]:
        from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

        config = Wav2Vec2Config(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, conv_dim=(16, 16),
            conv_kernel=(10, 3), conv_stride=(5, 2), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
            vocab_size=32, classifier_proj_size=16, hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0,
            activation_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False,
        )  # fmt: skip
        if torch.distributed.get_rank() == 0:
            Wav2Vec2ForSequenceClassification(config).save_pretrained(folder / "model")
        torch.distributed.barrier()
        args = arguments(folder, decaying(stage, stage3_param_persistence_threshold=0), max_steps=4)
        model = Wav2Vec2ForSequenceClassification.from_pretrained(folder / "model")
        trainer = Recording(model=model, args=args, train_dataset=Waves(ROWS))
        trainer.train()
        return {"curves": trainer.curves(), "weights": weights(trainer)}

    return run


def one_trainer(*, is_evaluated: bool) -> Any:
    """Evaluates, then trains: Trainer must be told not to keep the engine that it evaluated with."""

    def run(folder: Path) -> dict[str, Any]:
        trainer = trainer_of(arguments(folder, bare(3), lr_scheduler_type="linear"), gpt2())
        ends = [trainer.evaluate()["eval_loss"]] if is_evaluated else []
        trainer.model_wrapped = trainer.model
        trainer.train()
        return {"curves": trainer.curves(), "ends": ends, "weights": weights(trainer)}

    return run


CASES = {
    "speech-stage2": speech(2),
    "speech-stage3": speech(3),
    "trained": one_trainer(is_evaluated=False),
    "evaluated-and-trained": one_trainer(is_evaluated=True),
}

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:], reset)
