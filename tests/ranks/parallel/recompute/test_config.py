"""``activation_checkpointing`` in the config: blocks are recomputed without editing the model, to the bit the same."""

from __future__ import annotations

import copy
from typing import Any

import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.models.gpt import GPT, GPTConfig

torch.manual_seed(0)
MODEL = GPT(GPTConfig(vocab_size=32, sequence_length=8, num_layers=3, hidden_size=16, num_heads=2))


def train(section: dict[str, Any], stage: int) -> tuple[list[float], dict[str, Any], dict[tuple[str, str], int]]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "activation_checkpointing": section,
    }
    engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=config)
    held: dict[tuple[str, str], int] = {}
    losses = []
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + engine.global_rank)
        tokens = torch.randint(32, (1, 8), generator=generator)
        loss = engine(tokens, tokens)
        for entry in engine.memory_report().entries:
            if entry.kind == "saved activations":
                held[entry.kind, entry.tier] = entry.nbytes
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    values = engine.module_state_dict()
    module = engine.module
    engine.destroy()
    assert module.blocks[0].forward.__func__ is type(module.blocks[0]).forward  # taken off again
    return losses, values, held


def test_blocks_named_in_the_config_are_recomputed_and_give_the_same_bits() -> None:
    for stage in (0, 3):
        plain = run_ranks(2, train, {}, stage)
        for section in ({"modules": ["Block"]}, {"modules": ["Block"], "cpu_checkpointing": True}):
            again = run_ranks(2, train, section, stage)
            for (losses, values, held), (others, other_values, other_held) in zip(plain, again, strict=True):
                assert losses == others
                assert all(torch.equal(values[name], other_values[name]) for name in values)
                assert held == {}
                # Three blocks keep their inputs, 1 x 8 x 16 of fp32 each, and once the tables of positions (256 bytes).
                tier = "host" if section.get("cpu_checkpointing") else "device"
                assert other_held == {("saved activations", tier): 3 * 8 * 16 * 4 + 256}


def test_the_module_is_found_under_deepspeeds_name() -> None:
    from shoal.parallel import recompute

    assert shoal.checkpointing.checkpoint is recompute.checkpoint


def test_what_a_script_has_configured_outlives_an_engine_that_asks_for_nothing() -> None:
    def run() -> bool:
        shoal.checkpointing.configure(None, checkpoint_in_cpu=True)
        mine = shoal.checkpointing.current_recompute()
        train({}, 0)
        return shoal.checkpointing.current_recompute() is mine

    assert run_ranks(2, run) == [True, True]
