"""Parallelism of tensors, sequences and experts; recomputation, offload and tiling of activations; chunked losses."""
