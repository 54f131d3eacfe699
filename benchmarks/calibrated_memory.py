"""Memory of CPU ranks: of their processes, and predicted by a dry run on the machine that `shoal calibrate` writes.

python -m benchmarks.calibrated_memory                      # measures the machine first
python -m benchmarks.calibrated_memory --machine here.yaml --only gpt --kinds 3,3+recompute

``tensors``: the most that torch's CPU allocator had in a step, by its own profiler, in addition to what is in shared
memory; a dry run's ``allocated``. ``process``: the most that was resident in a step (``VmHWM``), with memory that ranks
share counted once; a dry run's ``device_nbytes``, the process without a model included.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks.worker import _forget_peak, _memory, _proportional
from shoal.comm.world import current_world
from shoal.launch import LocalJob, run_local
from shoal.models import GPT, GPTConfig
from shoal.planner.calibrate import calibrate, process_nbytes
from shoal.planner.dry_model import dry_run_model
from shoal.planner.model_of import token_batch
from shoal.planner.short_training import take_step
from shoal.simulation.memory import ROUNDING

RANKS, ROWS, WARM = 2, 2, 2


def _gpt(**given: int) -> Callable[[], nn.Module]:
    shape = {"vocab_size": 2048, "sequence_length": 512, "num_layers": 4, "hidden_size": 384, "num_heads": 6, **given}
    return lambda: GPT(GPTConfig(**shape))


def _transformer(name: str, **given: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(name, vocab_size=4096, **given)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        return model

    return build


_LLAMA = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 6}
_LLAMA |= {"num_key_value_heads": 2, "max_position_embeddings": 512}
MODELS = {
    "gpt": _gpt(),
    "gpt deep": _gpt(num_layers=12, hidden_size=192),
    "gpt wide": _gpt(num_layers=2, hidden_size=768, num_heads=12),
    "gpt long": _gpt(sequence_length=2048, num_layers=2, hidden_size=256, num_heads=4),
    "gpt words": _gpt(vocab_size=32768, num_layers=2, hidden_size=256, num_heads=4),
    "gpt2": _transformer("gpt2", n_embd=384, n_layer=4, n_head=6, n_positions=512),
    "opt": _transformer("opt", hidden_size=384, ffn_dim=1536, num_hidden_layers=4, num_attention_heads=6,
                        word_embed_proj_dim=384, max_position_embeddings=512),
    "llama": _transformer("llama", **_LLAMA),
    "qwen3": _transformer("qwen3", **_LLAMA, head_dim=64),
    "gemma2": _transformer("gemma2", **_LLAMA, head_dim=64),
}  # fmt: skip
_BLOCKS = {"gpt2": "GPT2Block", "opt": "OPTDecoderLayer", "llama": "LlamaDecoderLayer", "qwen3": "Qwen3DecoderLayer",
           "gemma2": "Gemma2DecoderLayer"}  # fmt: skip
KINDS = ("0", "1", "2", "3", "2+offload", "3+offload", "1+recompute", "3+recompute")


def config(model: str, kind: str) -> dict[str, Any]:
    stage, _, more = kind.partition("+")
    zero: dict[str, Any] = {"stage": int(stage)}
    if more == "offload":
        zero["offload_optimizer"] = {"device": "cpu"}
    made = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    if more == "recompute":
        made["activation_checkpointing"] = {"modules": [_BLOCKS.get(model, "Block")]}
    return made


def _once(key: str) -> int:
    """Resident bytes; memory shared by n ranks counts as 1/n."""
    return _memory(key) - _memory("RssShmem") + _proportional("Pss_Shmem")


def _trained(name: str, module: nn.Module, kind: str) -> tuple[Any, Callable[[], None]]:
    given = token_batch(module, ROWS, None)
    engine = shoal.initialize(model=module, config=config(name, kind))[0]

    def step() -> None:
        take_step(engine, [given])

    for _ in range(WARM):
        step()
    return engine, step


def _most_tensors(name: str, kind: str) -> int:
    """Bytes of torch's CPU allocator at most, as its profiler counts them, and of blocks in shared memory."""
    shared = 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        engine, step = _trained(name, MODELS[name](), kind)
        step()
        peers = getattr(engine.world._transport, "_local_peers", None)
        if peers is not None:
            shared = sum(block.place[2] for block in peers.allocator._blocks.values())
    most, todo = 0, list(profile.profiler.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag.name == "Allocation":
            most = max(most, event.extra_fields.total_allocated)
    engine.destroy()
    return most + shared


def worker(name: str, kind: str, out: str) -> None:
    """One rank, measured in a step after the first ones."""
    torch.set_num_threads(1)
    MODELS[name]()  # with the code that builds it
    if kind.endswith("recompute"):
        importlib.import_module("torch._dynamo")  # which checkpointing imports, 75 MiB
    current_world()
    measured = {"base": process_nbytes()}
    engine, step = _trained(name, MODELS[name](), kind)
    _forget_peak()
    step()
    measured["process"] = _once("VmHWM")
    engine.destroy()
    measured["tensors"] = _most_tensors(name, kind)
    if engine.world.rank == 0:
        Path(out).write_text(json.dumps(measured))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", help="the file of shoal calibrate; without it, this machine is measured")
    parser.add_argument("--only", default="", help="models, by commas")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "KIND", "OUT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(*given.worker)
        return
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        machine = given.machine or calibrate(Path(folder) / "here.yaml", RANKS)
        heads = [f"{what} MiB | predicted | off" for what in ("process", "above its start", "tensors")]
        print(f"| model | stage | {' | '.join(heads)} |\n" + "|---" * 11 + "|")
        for name in given.only.split(",") if given.only else MODELS:
            for kind in given.kinds.split(","):
                out = str(Path(folder) / "memory.json")
                program = [sys.executable, "-m", "benchmarks.calibrated_memory", "--worker", name, kind, out]
                outcome = run_local(LocalJob(program, RANKS, environment={"MALLOC_MMAP_THRESHOLD_": "131072"}))
                if outcome.exit_code:
                    raise SystemExit(outcome.report)
                measured = json.loads(Path(out).read_text())
                dry = dry_run_model(MODELS[name], config(name, kind), RANKS, machine=machine, repeats=False).memory
                pairs = (
                    (measured["process"], measured["base"] + dry.reserved),
                    (measured["process"] - measured["base"], dry.reserved),
                    (measured["tensors"], sum(dry.by_kind.values()) - dry.by_kind.get(ROUNDING, 0)),
                )
                texts = [f"{a / 2**20:.1f} | {b / 2**20:.1f} | {b / a - 1:+.1%}" for a, b in pairs]
                print(f"| {name} | {kind} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
