"""``shoal estimate`` of a Hugging Face folder: the model is never allocated, and its numbers are those of an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

import shoal
from shoal.cli.app import app


def test_a_folder_of_hugging_face_is_estimated_as_an_engine_holds_it(tmp_path: Path) -> None:
    LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=320
    ).save_pretrained(tmp_path)
    result = CliRunner().invoke(
        app, ["estimate", str(tmp_path), "--ranks", "1", "--sequence", "32", "--json", "--stage", "1"]
    )
    assert result.exit_code == 0, result.output
    row = json.loads(result.output)[0]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW"},
    }
    engine, *_ = shoal.initialize(model=model, config=config)
    tokens = torch.zeros(1, 32, dtype=torch.long)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    held = engine.memory_report().by_kind()
    engine.destroy()
    assert all(
        row["bytes"][f"{kind} (device)"] == pytest.approx(held[kind], rel=0.003)
        for kind in ("parameter", "master", "gradient", "optimizer state")
    )
    assert row["activations"] > 32 * 64 * 2 * 2


def test_recomputation_saves_activations(tmp_path: Path) -> None:
    LlamaConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4, vocab_size=64
    ).save_pretrained(tmp_path)
    found = []
    for more in ([], ["--recompute"]):
        result = CliRunner().invoke(app, ["estimate", str(tmp_path), "--sequence", "128", "--json", *more])
        found.append(json.loads(result.output)[0]["activations"])
    assert found[1] < found[0] / 3
