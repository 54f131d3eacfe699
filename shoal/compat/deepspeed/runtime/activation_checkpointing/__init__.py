"""``deepspeed.runtime.activation_checkpointing``: recompute of activations."""
