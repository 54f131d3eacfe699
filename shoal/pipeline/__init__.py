"""Pipeline parallelism: a model in stages, and the order in which ranks run them."""
