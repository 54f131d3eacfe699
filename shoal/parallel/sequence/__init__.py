"""Attention over a sequence that several ranks hold: Ulysses (all-to-all over heads), ring, and both.

chunks      which positions a rank holds, the documents in its rows, and which tiles of scores its queries need
kernels     attention of one tile, with log-sum-exp, and its gradients
exchange    how keys and values reach other ranks: around a ring, by all-gather, or directly where they are needed alone
ring        attention to the keys and values of all ranks; outputs are merged by log-sum-exp
ulysses     heads for positions and back, by one all-to-all
context     the communicators that attention uses, set by ``with`` or by the engine
options     what attention is asked for, what an axis does not have; score functions and block masks
attention   ``shoal.attention``: plain, Ulysses, ring, or Ulysses x ring
huggingface the same under ``attn_implementation="shoal"`` of transformers
whole_sequence  what else in a model of transformers depends on the whole sequence
"""
