"""``deepspeed.runtime.sequence_parallel.parallel_state_sp``: groups of sequence parallelism; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_function

_DO = (
    "sequence parallelism is not built yet: use activation checkpointing for long sequences, or a smaller micro-batch."
)

initialize_sequence_parallel = absent_function(
    "deepspeed.runtime.sequence_parallel.parallel_state_sp.initialize_sequence_parallel", _DO
)
get_sequence_parallel_group = absent_function(
    "deepspeed.runtime.sequence_parallel.parallel_state_sp.get_sequence_parallel_group", _DO
)
get_sequence_parallel_world_size = absent_function(
    "deepspeed.runtime.sequence_parallel.parallel_state_sp.get_sequence_parallel_world_size", _DO
)
get_sequence_parallel_rank = absent_function(
    "deepspeed.runtime.sequence_parallel.parallel_state_sp.get_sequence_parallel_rank", _DO
)
get_sequence_data_parallel_group = absent_function(
    "deepspeed.runtime.sequence_parallel.parallel_state_sp.get_sequence_data_parallel_group", _DO
)
get_sequence_data_parallel_world_size = absent_function(
    "deepspeed.runtime.sequence_parallel.parallel_state_sp.get_sequence_data_parallel_world_size", _DO
)
get_sequence_data_parallel_rank = absent_function(
    "deepspeed.runtime.sequence_parallel.parallel_state_sp.get_sequence_data_parallel_rank", _DO
)

__all__ = [
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "initialize_sequence_parallel",
]
