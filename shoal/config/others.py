"""``hybrid_engine`` and ``sparse_attention``."""

from __future__ import annotations

from shoal.config.base import Section, key


class HybridEngine(Section):
    """One model that trains and generates in turn."""

    enabled: bool = key(False, "switch between training and generation")
    max_out_tokens: int = key(512, "longest output", ge=1)
    inference_tp_size: int = key(1, "tensor-parallel ranks for generation", ge=1)
    release_inference_cache: bool = key(False, "free the cache after generation")
    pin_parameters: bool = key(True, "page-lock parameters on the host")
    tp_gather_partition_size: int = key(8, "parameters gathered at a time", ge=1)
    enable_cuda_graph: bool = key(False, "generate by CUDA graphs")


class SparseAttention(Section):
    """Attention to some blocks only."""

    mode: str = key("fixed", "dense, fixed, variable, bigbird or bslongformer")
    block: int = key(16, "side of a block", ge=1)
    different_layout_per_head: bool = key(False, "each head has a layout of its own")
    num_local_blocks: int = key(4, "blocks of the local window", ge=1)
    num_global_blocks: int = key(1, "blocks that all attend to", ge=0)
    attention: str = key("bidirectional", "bidirectional or unidirectional")
    horizontal_global_attention: bool = key(False, "global blocks attend to all")
    num_different_global_patterns: int = key(1, "different global layouts", ge=1)
    num_random_blocks: int = key(0, "random blocks in a row", ge=0)
    local_window_blocks: tuple[int, ...] = key((4,), "sizes of local windows")
    global_block_indices: tuple[int, ...] = key((0,), "which blocks are global")
    global_block_end_indices: tuple[int, ...] | None = key(None, "ends of ranges of global blocks")
    num_sliding_window_blocks: int = key(3, "blocks of the sliding window", ge=1)
