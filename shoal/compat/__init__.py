"""DeepSpeed's names for Shoal. After ``install()`` ``deepspeed`` is an alias: ``import deepspeed`` is Shoal."""
