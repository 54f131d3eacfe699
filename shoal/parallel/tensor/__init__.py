"""Tensor parallelism, 1-D: layers split over the ranks of an axis, by a plan."""

from shoal.parallel.tensor.apply import TensorParallelModel, parallelize
from shoal.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from shoal.parallel.tensor.parts import Part
from shoal.parallel.tensor.plan import Plan, plan_for

__all__ = ["Part", "Plan", "TensorParallelModel", "parallelize", "plan_for", "vocab_parallel_cross_entropy"]
