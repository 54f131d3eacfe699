"""Attention over a sequence that several ranks hold: Ulysses (all-to-all over heads), ring, and both.

chunks      which positions a rank holds, and which tiles of scores its queries need of another rank's keys
documents   the documents that are packed in a row
kernels     attention of one tile, with log-sum-exp, and its gradients
ring        keys and values move from rank to rank; outputs are merged by log-sum-exp
ulysses     heads for positions and back, by one all-to-all
context     the communicators that attention uses, set by ``with`` or by the engine
attention   ``shoal.attention``: plain, Ulysses, ring, or Ulysses x ring
huggingface the same under ``attn_implementation="shoal"`` of transformers
"""
