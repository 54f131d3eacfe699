"""From a model and a config to its units, groups and buffers: the plan, and what carries it out."""
