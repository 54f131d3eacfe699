"""``deepspeed.checkpoint``: a reader of a tag's folder (its degrees, files, and the client's values), and helpers.

    tag's folder of                 tp, pp                   dp                          files
    DeepSpeed                       as its model files say   ranks that saved a part     each rank's
    Shoal, under DeepSpeed's name   1, 1                     ranks that saved it         rank 0's

Tensors are read by ``shoal.checkpoint.formats.open_source``.

    python -m deepspeed.checkpoint.ds_to_universal --input_folder run/global_step10 \\
        --output_folder run/global_step10_universal

The output is a checkpoint of Shoal's: a checkpoint of Shoal's loads in every layout unchanged, so its files get a
second name; one of DeepSpeed's is converted. ``latest_universal`` names it, and ``checkpoint.load_universal`` loads it.
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.compat.absent import absent_function, not_built
from shoal.compat.checkpoints.files import open_file
from shoal.compat.checkpoints.universal import make_universal
from shoal.engine.log import logger, make_audible
from shoal.errors import CheckpointError

EMBEDDING_LAYER_INDEX = 0
FINAL_LAYER_NORM_INDEX = -1
ARGS_KEY = "args"
CHECKPOINT_INFO_KEY = "checkpoint_info"
ITERATION_KEY = "iteration"

_READ = "read tensors by shoal.checkpoint.formats.open_source(folder), or convert by `shoal convert`."
_REFUSED = (
    "get_2d_parallel_files get_2d_parallel_state get_embedding_files get_embedding_layer_id get_embedding_state"
    " get_final_norm_files get_final_norm_layer_id get_final_norm_state get_pp_transformer_map get_transformer_state"
    " get_zero_checkpoint_state get_zero_files show_2d_mapping show_pp_transformer_map show_tp_embedding_map"
    " show_tp_final_norm_map show_transformer_file_map"
)
_RESHAPE = "leave the degrees out: a checkpoint of any layout loads in any other."


class _NoCheckpointError(CheckpointError, AssertionError):
    """DeepSpeed asserts that it is one, so an AssertionError too."""

    code = "checkpoint-missing"


class DeepSpeedCheckpoint:
    """A reader of one checkpoint, without its tensors.

    Args:
        dir: a tag's folder.
        tp_degree, pp_degree, dp_degree: those it has; others are refused, since nothing is reshaped here.

    Raises:
        CheckpointError: no ``mp_rank_*`` file lies there, or it is damaged.
        NotBuiltError: other degrees were requested.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        dp_degree: int | None = None,
        final_layer_norm_idx: int = FINAL_LAYER_NORM_INDEX,
    ) -> None:
        self.dir = os.fspath(dir)
        self.final_layer_norm_idx = final_layer_norm_idx
        files = sorted(path for path in Path(dir).rglob("*") if path.is_file()) if os.path.isdir(dir) else []
        self.file_list = [str(path) for path in files]
        self.layer_files = [str(path) for path in files if re.fullmatch(r"layer_\d+-model_.*", path.name)]
        self.mp_rank_files = [str(path) for path in files if path.name.startswith("mp_rank_")]
        self.zero_files = [str(path) for path in files if re.match(r"(bf16_|fp16_)?zero_pp_rank_", path.name)]
        if not self.mp_rank_files:
            raise _NoCheckpointError(
                f"{self.dir} has no file mp_rank_*.",
                do="name a tag's folder of stages 0 to 2; shoal.checkpoint.formats.open_source() opens one of stage 3.",
            )
        state = open_file(Path(self.mp_rank_files[0]), verify=False)
        # Tensors are mapped from the file and dropped: only other values are stored.
        self.global_state = {
            key: state.get(key) for key in (ARGS_KEY, CHECKPOINT_INFO_KEY, "universal_checkpoint_info")
        } | {ITERATION_KEY: state.get(ITERATION_KEY, 0)}
        numbers = {re.findall(r"layer_(\d+)-", os.path.basename(path))[0] for path in self.layer_files}
        self.layer_keys = [f"layer_{number}" for number in sorted(numbers, key=int)]
        self.layer_count = len(self.layer_keys)
        # Older files do not say: with layers in files of their own, each stage of a pipeline has model files.
        dimensions = state.get("checkpoint_parallel_dimensions") or {}
        num_parts = len(self.mp_rank_files)
        self.tp_degree = int(dimensions.get("tp_degree") or self._num_slices() or num_parts)
        self.pp_degree = int(dimensions.get("pp_degree") or num_parts // self.tp_degree)
        self.dp_degree = int(state.get("dp_world_size") or len(self.zero_files) // num_parts or 1)
        degrees = ((tp_degree, self.tp_degree), (pp_degree, self.pp_degree), (dp_degree, self.dp_degree))
        for asked, saved in degrees:
            if asked not in (None, saved):
                raise not_built(
                    f"deepspeed.checkpoint.DeepSpeedCheckpoint with a degree of {asked} for {saved}", _RESHAPE
                )
        self.original_world_size = self.world_size = self.tp_degree * self.pp_degree * self.dp_degree

    def _num_slices(self) -> int:
        """The number of files of the first layer; 0: layers have no files of their own."""
        first = f"{self.layer_keys[0]}-" if self.layer_keys else None
        return sum(first is not None and os.path.basename(path).startswith(first) for path in self.layer_files)

    def is_change_tp_degree(self) -> bool:
        """False: nothing is reshaped here."""
        return False

    is_change_pp_degree = is_change_dp_degree = is_change_tp_degree

    def get_iteration(self) -> Any:
        """``iteration`` of the client's state; 0 where it saved none."""
        return self.global_state[ITERATION_KEY]

    def get_args(self) -> Any:
        """``args`` of the client's state."""
        return self.get_checkpoint_info(ARGS_KEY)

    def get_checkpoint_info(self, info_key: str = CHECKPOINT_INFO_KEY) -> Any:
        """A value at the top of the model file; None: there is none."""
        if info_key not in self.global_state:
            self.global_state[info_key] = open_file(Path(self.mp_rank_files[0]), verify=False).get(info_key)
        return self.global_state[info_key]


for _name in _REFUSED.split():
    setattr(DeepSpeedCheckpoint, _name, absent_function(f"deepspeed.checkpoint.DeepSpeedCheckpoint.{_name}", _READ))


# deepspeed.checkpoint.universal_checkpoint


@dataclass
class SubparamShape:
    """One parameter that contains several, as a client saves it under ``UNIVERSAL_CHECKPOINT_INFO``.

    ``shape`` has a tuple of sizes at ``partition_dim``, along which they are concatenated.
    """

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int


# deepspeed.checkpoint.utils


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """The same dicts, lists and tuples, each tensor with a storage of its own size on ``device``."""
    if isinstance(item, torch.Tensor):
        moved = item.detach().to(device)
        is_tight = moved.untyped_storage().nbytes() == moved.numel() * moved.element_size()
        return moved if is_tight and moved is not item else moved.clone()
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(clone_tensors_for_torch_save(value, device) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


# deepspeed.checkpoint.ds_to_universal


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make a checkpoint that every layout loads.")
    parser.add_argument("--input_folder", required=True, help="a checkpoint: the tag's folder")
    parser.add_argument("--output_folder", required=True, help="the folder to make; its name is the tag")
    parser.add_argument("--num_extract_workers", type=int, default=4, help="no effect: one tensor at a time")
    parser.add_argument("--num_merge_workers", type=int, default=2, help="no effect: one tensor at a time")
    parser.add_argument("--keep_temp_folder", action="store_true", help="no effect: there is none")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="no effect: it is always checked")
    parser.add_argument("--inject_missing_state", action="store_true", help="no effect: none is needed")
    return parser.parse_args()


def make_folder(args: Any) -> None:
    """Make ``args.output_folder`` of ``args.input_folder``; DeepSpeed's other options have no effect.

    Raises: CheckpointError: the input is no checkpoint, or is damaged; or the output is there and is none.
    """
    make_audible(None)
    unused = {name: getattr(args, name, False) for name in ("keep_temp_folder", "inject_missing_state")}
    unused["no_strict"] = not getattr(args, "strict", True)
    for name in (name for name, is_set in unused.items() if is_set):
        logger.warning("--%s has no effect: a tensor is read, checked and written at a time.", name)
    made = make_universal(args.input_folder, args.output_folder)
    for note in made.notes:
        logger.warning("%s", note)
    if made.format == "shoal":
        logger.info(
            "%s loads in every layout as is. %s is the same checkpoint: %d files have a second name, %d are copies.",
            args.input_folder,
            args.output_folder,
            made.linked,
            made.copied,
        )
    else:
        logger.info(
            "%s, which DeepSpeed saved, is a checkpoint of Shoal's in %s.", args.input_folder, args.output_folder
        )


def to_universal() -> None:
    """The command ``ds_to_universal``."""
    make_folder(parse_arguments())
