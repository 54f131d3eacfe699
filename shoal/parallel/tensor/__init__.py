"""Tensor parallelism: layers split over the ranks of an axis, along one dim or over a grid, by a plan."""

from shoal.parallel.tensor.apply import TensorParallelModel, parallelize
from shoal.parallel.tensor.grid import Grid
from shoal.parallel.tensor.grid_apply import parallelize_grid
from shoal.parallel.tensor.layers import vocab_parallel_cross_entropy
from shoal.parallel.tensor.plan import Plan, plan_for

__all__ = [
    "Grid",
    "Plan",
    "TensorParallelModel",
    "parallelize",
    "parallelize_grid",
    "plan_for",
    "vocab_parallel_cross_entropy",
]
