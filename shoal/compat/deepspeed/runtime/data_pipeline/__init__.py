"""``deepspeed.runtime.data_pipeline``: the schedule of curriculum learning; sampling and routing are not built."""
