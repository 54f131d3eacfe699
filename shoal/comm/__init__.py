"""The seam to the other ranks: the only place that issues a collective."""

from shoal.comm.world import World, current_world, init_distributed

__all__ = ["World", "current_world", "init_distributed"]
