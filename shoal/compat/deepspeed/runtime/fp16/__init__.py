"""``deepspeed.runtime.fp16``: loss scales and the classes of optimizer wrappers."""
