"""``deepspeed.profiling``: profilers."""
