"""Attention over a sequence that several ranks hold: Ulysses (all-to-all over heads), ring, and both.

chunks      which positions a rank holds, and which tiles of scores its queries need of another rank's keys
documents   the documents that are packed in a row
kernels     attention of one tile, with log-sum-exp, and its gradients
exchange    how keys and values reach other ranks: around a ring, by all-gather, or (direct) where they are needed alone
ring        attention to the keys and values of all ranks; outputs are merged by log-sum-exp
ulysses     heads for positions and back, by one all-to-all
context     the communicators that attention uses, set by ``with`` or by the engine
options     what attention is asked for, and what an axis does not have
flexible    score functions and block masks, as torch's flex attention takes them
attention   ``shoal.attention``: plain, Ulysses, ring, or Ulysses x ring
huggingface the same under ``attn_implementation="shoal"`` of transformers
"""
