"""Values that scripts import from DeepSpeed's modules of constants: keys of the configuration, launchers, defaults."""

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
TRAIN_BATCH_SIZE = "train_batch_size"
TRAIN_MICRO_BATCH_SIZE_PER_GPU = "train_micro_batch_size_per_gpu"
GRADIENT_ACCUMULATION_STEPS = "gradient_accumulation_steps"
STEPS_PER_PRINT = "steps_per_print"
GRADIENT_CLIPPING = "gradient_clipping"
OPTIMIZER = "optimizer"
SCHEDULER = "scheduler"
FP16 = "fp16"
BF16 = "bf16"
ZERO_ALLOW_UNTESTED_OPTIMIZER = "zero_allow_untested_optimizer"
ZERO_FORCE_DS_CPU_OPTIMIZER = "zero_force_ds_cpu_optimizer"
PRESCALE_GRADIENTS = "prescale_gradients"
GRADIENT_PREDIVIDE_FACTOR = "gradient_predivide_factor"
WALL_CLOCK_BREAKDOWN = "wall_clock_breakdown"
DUMP_STATE = "dump_state"
COMMUNICATION_DATA_TYPE = "communication_data_type"
DISABLE_ALLGATHER = "disable_allgather"
SPARSE_GRADIENTS = "sparse_gradients"
MAX_GRAD_NORM = "max_grad_norm"
BFLOAT16 = "bf16"
TYPE, OPTIMIZER_PARAMS, SCHEDULER_PARAMS = "type", "params", "params"
