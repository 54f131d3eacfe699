"""``deepspeed.monitor``: values over steps."""
