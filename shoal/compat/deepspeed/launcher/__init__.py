"""``deepspeed.launcher``: starting ranks."""
