"""Where each kind of state is stored and what moves it.

Read in this order: placement, layout, storage, buffer, gradient, param_group, unit, partition, table,
memory_model.
"""
