"""``deepspeed.runtime``: the engine and what belongs to it."""
