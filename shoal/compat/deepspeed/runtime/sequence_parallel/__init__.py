"""``deepspeed.runtime.sequence_parallel``: sequence parallelism."""
