"""Pipeline parallelism: a model in stages, micro-batches between them, and the schedule that orders both."""
