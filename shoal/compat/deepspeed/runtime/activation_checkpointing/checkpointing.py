"""``deepspeed.checkpointing``: activation recompute, by Shoal's ``shoal.checkpointing``."""

from __future__ import annotations

from shoal.parallel.recompute import (
    checkpoint,
    configure,
    get_cuda_rng_tracker,
    is_configured,
    model_parallel_cuda_manual_seed,
    non_reentrant_checkpoint,
    partition_activations_in_checkpoint,
    reset,
    set_num_layers,
)
from shoal.parallel.rng_tracker import RngTracker as CudaRNGStatesTracker

__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]
