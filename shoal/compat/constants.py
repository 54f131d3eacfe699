"""Values that scripts import from DeepSpeed's modules of constants. Keys that are their own names are in ``names``."""

from __future__ import annotations

from datetime import timedelta

# deepspeed.constants
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=30)
CROSS_RANK, CROSS_SIZE, LOCAL_RANK = "CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK"

# deepspeed.launcher.constants
PDSH_LAUNCHER, OPENMPI_LAUNCHER, MPICH_LAUNCHER = "pdsh", "openmpi", "mpich"
IMPI_LAUNCHER, SLURM_LAUNCHER, MVAPICH_LAUNCHER = "impi", "slurm", "mvapich"
PDSH_MAX_FAN_OUT = 1024

# deepspeed.runtime.swap_tensor: the smallest tensor that DeepSpeed moves. Shoal's disk tier takes any size.
MIN_SWAPPABLE_BYTES = 1 << 20

# deepspeed.runtime.constants
ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT, ROUTE_ENCODE = "train", "eval", "predict", "encode"
OPTIMIZER_PARAMS = SCHEDULER_PARAMS = "params"

# deepspeed.checkpoint.constants: keys, and parts of the names of files. Those of AutoEP, which is not a part of Shoal,
# are not here.
CHECKPOINT_PARALLEL_DIMS = "checkpoint_parallel_dimensions"
CHECKPOINT_PP_DEGREE, CHECKPOINT_TP_DEGREE = "pp_degree", "tp_degree"
MODEL_FILE_PREFIX, MODEL_FILE_SUFFIX = "mp_rank_", "_model_states.pt"
ZERO_FILE_PREFIX, OPTIM_FILE_SUFFIX = "zero_pp_rank_", "_optim_states.pt"
BF16_ZERO_FILE_PREFIX, FP16_ZERO_FILE_PREFIX = "bf16_zero_pp_rank_", "fp16_zero_pp_rank_"
LAYER_FILE_PREFIX = "layer_"
FP32_WEIGHT_KEY = "fp32"
UNIVERSAL_CHECKPOINT_VERSION_KEY, UNIVERSAL_CHECKPOINT_VERSION_VALUE = "universal_checkpoint_version", 0.4
