"""Puts a model, an optimizer and a config together; forward, backward, step."""

from shoal.engine.engine import Engine
from shoal.engine.initialize import initialize

__all__ = ["Engine", "initialize"]
