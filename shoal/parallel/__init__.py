"""Parallelism and memory of activations, beside ZeRO: so far, recomputation and offload of activations."""
