"""What the scripts share: small models from configs, data from a seed, and one RESULT line a case."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

VOCABULARY, LENGTH, SEED = 96, 16, 17

Case = Callable[[Path], dict[str, Any]]


def write_json(path: Path, value: Any) -> None:
    """Every rank writes the file and may read it at once: each puts a whole one in its place."""
    mine = path.with_name(f"{path.name}.{os.environ.get('RANK', '0')}")
    mine.write_text(json.dumps(value))
    os.replace(mine, path)


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Arithmetic rows modulo the vocabulary: something a small model learns within a few steps."""

    def __init__(self, num_rows: int, seed: int = SEED, length: int = LENGTH, vocabulary: int = VOCABULARY) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(vocabulary, (num_rows, 1), generator=generator)
        strides = torch.randint(1, 4, (num_rows, 1), generator=generator)
        self.rows = (starts + strides * torch.arange(length)) % vocabulary  # [num_rows, length]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.clone()}


def gpt2_config(**changes: Any) -> Any:
    """A GPT-2 of some 30 thousand parameters without dropout."""
    from transformers import GPT2Config

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0,
        "eos_token_id": 0, "pad_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    return GPT2Config(**{**settings, **changes})


def gpt2(seed: int = SEED, **changes: Any) -> Any:
    """A GPT-2 whose weights follow from the seed."""
    from transformers import GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(gpt2_config(**changes))


def tensors_norm(state: Mapping[str, torch.Tensor]) -> float:
    """The Euclidean norm over all tensors: one number that changes with any of them."""
    return float(sum(float(t.double().pow(2).sum()) for t in state.values() if t.is_floating_point()) ** 0.5)


def over_ranks(value: float) -> list[float]:
    """Every rank's number."""
    held = torch.zeros(torch.distributed.get_world_size(), dtype=torch.float64)
    held[torch.distributed.get_rank()] = value
    torch.distributed.all_reduce(held)
    return held.tolist()


def mean_over_ranks(value: float) -> float:
    """The mean of every rank's number."""
    values = over_ranks(value)
    return sum(values) / len(values)


def deepspeed_state() -> None:
    """Accelerate's state anew: DeepSpeed over Gloo.

    Without an accelerator Accelerate takes one process for all there is, unless its state was made with a backend.
    """
    from accelerate import PartialState
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")


def run_cases(cases: Mapping[str, Case], asked: Sequence[str], reset: Callable[[], None]) -> None:
    """Run each case; rank 0 prints ``RESULT {json}`` with its curves and facts, or with its error."""
    unknown = sorted(set(asked) - set(cases))
    if unknown:
        raise SystemExit(f"no case is called {', '.join(unknown)}; there are {', '.join(cases)}")
    shared = Path(os.environ["SHOAL_CASES_FOLDER"])
    gc.freeze()  # clients collect garbage often; what was imported is none
    is_first = int(os.environ.get("RANK", "0")) == 0
    for name in asked or cases:
        begin = time.monotonic()
        reset()
        torch.manual_seed(SEED)
        folder = shared / name.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            result = cases[name](folder)
        except Exception as error:
            said = traceback.format_exc()
            sys.stderr.write(f"case {name} failed\n{said}\n")
            result = {"error": f"{type(error).__name__}: {error}"[:2000]}
        if is_first:
            result = {"case": name, **result, "seconds": round(time.monotonic() - begin, 2)}
            print("RESULT " + json.dumps(result), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
