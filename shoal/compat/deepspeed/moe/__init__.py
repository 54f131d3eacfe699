"""``deepspeed.moe``: mixtures of experts. Their parameters are known by a mark; spreading them is not built yet."""
