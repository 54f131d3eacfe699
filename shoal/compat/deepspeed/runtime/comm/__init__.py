"""``deepspeed.runtime.comm``: collectives that DeepSpeed's optimizers are made of."""
