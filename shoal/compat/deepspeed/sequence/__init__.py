"""``deepspeed.sequence``: sequence parallelism, which is not built yet."""
