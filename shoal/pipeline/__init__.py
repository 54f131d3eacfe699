"""Pipeline parallelism: a model in stages, the orders in which ranks run them, and what they send each other."""
