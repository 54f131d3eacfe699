"""``deepspeed.checkpoint.deepspeed_checkpoint``: a tag's folder: its degrees, files, and the client's values.

    tag's folder of                 tp, pp                   dp                          files
    DeepSpeed                       as its model files say   ranks that saved a part     each rank's
    Shoal, under DeepSpeed's name   1, 1                     ranks that saved it         rank 0's

Tensors are read by ``shoal.checkpoint.formats.open_source``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from shoal.compat.absent import absent_function, not_built
from shoal.compat.checkpoints.files import open_file
from shoal.compat.deepspeed.checkpoint.constants import (
    CHECKPOINT_PARALLEL_DIMS,
    CHECKPOINT_PP_DEGREE,
    CHECKPOINT_TP_DEGREE,
    UNIVERSAL_CHECKPOINT_INFO,
)
from shoal.engine.log import logger
from shoal.errors import CheckpointError

EMBEDDING_LAYER_INDEX = 0
FINAL_LAYER_NORM_INDEX = -1
ARGS_KEY = "args"
CHECKPOINT_INFO_KEY = "checkpoint_info"
ITERATION_KEY = "iteration"

_READ = "read tensors by shoal.checkpoint.formats.open_source(folder), or convert by `shoal convert`."
_RESHAPE = "leave the degrees out: a checkpoint of any layout loads in any other."


class _NoCheckpointError(CheckpointError, AssertionError):
    """DeepSpeed asserts that it is one, so an AssertionError too."""

    code = "checkpoint-missing"


def _refused(name: str) -> Any:
    return absent_function(f"deepspeed.checkpoint.DeepSpeedCheckpoint.{name}", _READ)


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
            key: state.get(key) for key in (ARGS_KEY, CHECKPOINT_INFO_KEY, UNIVERSAL_CHECKPOINT_INFO)
        } | {ITERATION_KEY: state.get(ITERATION_KEY, 0)}
        numbers = {re.findall(r"layer_(\d+)-", os.path.basename(path))[0] for path in self.layer_files}
        self.layer_keys = [f"layer_{number}" for number in sorted(numbers, key=int)]
        self.layer_count = len(self.layer_keys)
        # Older files do not say: with layers in files of their own, each stage of a pipeline has model files.
        dimensions = state.get(CHECKPOINT_PARALLEL_DIMS) or {}
        num_parts = len(self.mp_rank_files)
        self.tp_degree = int(dimensions.get(CHECKPOINT_TP_DEGREE) or self._num_slices() or num_parts)
        self.pp_degree = int(dimensions.get(CHECKPOINT_PP_DEGREE) or num_parts // self.tp_degree)
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
        """False: nothing is reshaped here. So with the next two."""
        return False

    def is_change_pp_degree(self) -> bool:
        return False

    def is_change_dp_degree(self) -> bool:
        return False

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

    def validate_files(self) -> None:
        """Raise an error that names the files that no longer exist."""
        for file in self.file_list:
            if not os.path.isfile(file):
                logger.error("%s is gone.", file)

    get_zero_checkpoint_state = _refused("get_zero_checkpoint_state")
    get_zero_files = _refused("get_zero_files")
    get_2d_parallel_files = _refused("get_2d_parallel_files")
    get_2d_parallel_state = _refused("get_2d_parallel_state")
    get_embedding_files = _refused("get_embedding_files")
    get_embedding_layer_id = _refused("get_embedding_layer_id")
    get_embedding_state = _refused("get_embedding_state")
    get_final_norm_files = _refused("get_final_norm_files")
    get_final_norm_layer_id = _refused("get_final_norm_layer_id")
    get_final_norm_state = _refused("get_final_norm_state")
    get_pp_transformer_map = _refused("get_pp_transformer_map")
    get_transformer_state = _refused("get_transformer_state")
    show_2d_mapping = _refused("show_2d_mapping")
    show_pp_transformer_map = _refused("show_pp_transformer_map")
    show_tp_embedding_map = _refused("show_tp_embedding_map")
    show_tp_final_norm_map = _refused("show_tp_final_norm_map")
    show_transformer_file_map = _refused("show_transformer_file_map")


__all__ = [
    "ARGS_KEY",
    "CHECKPOINT_INFO_KEY",
    "EMBEDDING_LAYER_INDEX",
    "FINAL_LAYER_NORM_INDEX",
    "ITERATION_KEY",
    "DeepSpeedCheckpoint",
]
