"""Attention over a sequence that several ranks hold: Ulysses (all-to-all over heads), ring, and both.

chunks      which positions a rank holds, the documents in its rows, and which tiles of scores its queries need
kernels     attention of one tile, with log-sum-exp, and its gradients
ring        attention to the keys and values of all ranks, and how these reach it; outputs are merged by log-sum-exp
ulysses     heads for positions and back, by one all-to-all
context     the communicators that attention uses, set by ``with`` or by the engine
attention   ``shoal.attention``: plain, Ulysses, ring, or Ulysses x ring; its options, and which an axis does not have
huggingface the same under ``attn_implementation="shoal"`` of transformers
whole_sequence  what else in a model of transformers depends on the whole sequence
"""
