"""DeepSpeed's names, lent on request: ``import deepspeed`` is Shoal where somebody has asked for it."""
