"""Files next to Shoal's own in a checkpoint, for clients that look for DeepSpeed's.

    FOLDER/latest                                                   the tag (Shoal's own save writes it)
    FOLDER/zero_to_fp32.py                                          gives the fp32 weights of the folder's checkpoints
    FOLDER/zero_to_torch.py                                         gives them in another format too
    FOLDER/TAG/mp_rank_00_model_states.pt                           stages 0 to 2: the module's state dict, counters
                                                                    and the client state, as scripts read them there
    FOLDER/TAG/zero_pp_rank_0_mp_rank_00_model_states.pt            stage 3: the same without the module
    FOLDER/TAG/[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt     stages 1 to 3: the stage

Shoal itself reads none of them. The module is left out by a save while training goes on, since its values change
meanwhile, and where checkpoint.module_in_model_file is false: with fp32 master weights and Adam's moments it is a
sixth more bytes (a third where the weights themselves are fp32), all of them written by rank 0. At stage 3 DeepSpeed
has empty tensors there, which no reader uses.
They are rank 0's alone, and ``torch.load(weights_only=True)`` reads them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shoal.checkpoint.formats.torch_file_writing import write_values
from shoal.checkpoint.storage import LocalStorage, Storage
from shoal.compat.distribution import alias_version
from shoal.engine.engine import Engine

SCRIPTS = {"zero_to_fp32.py": ("fp32 weights", "main"), "zero_to_torch.py": ("weights", "main_to_torch")}
_SCRIPT_TEXT = '''#!/usr/bin/env python
"""Writes the {what} of a checkpoint of this folder:  {name} FOLDER OUTPUT [-t TAG]"""

from shoal.compat.zero_to_fp32 import {main}

if __name__ == "__main__":
    {main}()
'''


def model_file(stage: int) -> str:
    """The name of rank 0's model file."""
    return f"{'zero_pp_rank_0_' if stage == 3 else ''}mp_rank_00_model_states.pt"


def optimizer_file(*, is_bf16: bool) -> str:
    """The name of rank 0's optimizer file."""
    return f"{'bf16_' if is_bf16 else ''}zero_pp_rank_0_mp_rank_00_optim_states.pt"


def prepare(
    engine: Engine, storage: Storage, tag: str, client_state: Mapping[str, Any], exclude_frozen: bool
) -> Callable[[], None]:
    """Take what the files hold; what is returned writes them.

    Raises: CheckpointError: the client state holds more than plain values and tensors.
    """
    stage = engine.zero_optimization_stage()
    settings = json.loads(json.dumps(engine.config, default=str))
    version = alias_version()
    counters = {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "dp_world_size": engine.dp_world_size,
        "mp_world_size": 1,
        "ds_config": settings,
        "ds_version": version,
        **client_state,
    }
    optimizer_state = {
        "optimizer_state_dict": {"zero_stage": stage, "partition_count": engine.dp_world_size},
        "ds_config": settings,
        "ds_version": version,
    }
    saving = engine.properties.config.checkpoint
    is_async = saving.async_save
    contents = counters
    if stage < 3 and saving.module_in_model_file and not is_async:
        contents = {"module": _module(engine, exclude_frozen=exclude_frozen), **counters}
    taken = _bytes_of(contents) if is_async else None  # the client state may change before it is written

    def write() -> None:
        with storage.replacing(f"{tag}/{model_file(stage)}") as sink:
            if taken is not None:
                sink.write(memoryview(taken))
            else:
                write_values(sink, contents)
        if stage > 0:
            name = optimizer_file(is_bf16=bool(engine.properties.config.bf16.enabled))
            storage.replace(f"{tag}/{name}", _bytes_of(optimizer_state))
        if isinstance(storage, LocalStorage):
            for name, (what, main) in SCRIPTS.items():
                script = storage.root / name
                script.write_text(_SCRIPT_TEXT.format(name=name, what=what, main=main), encoding="utf-8")
                script.chmod(0o755)

    return write


def _module(engine: Engine, *, exclude_frozen: bool) -> dict[str, torch.Tensor]:
    """The model's own tensors, not copies: below stage 3 they are whole."""
    frozen = {name for name, p in engine.module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    state = engine.module.state_dict()
    return {name: value for name, value in state.items() if not (exclude_frozen and name in frozen)}


def _bytes_of(value: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    write_values(stream, value)
    return stream.getvalue()
