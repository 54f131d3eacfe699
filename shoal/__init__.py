"""Shoal trains PyTorch models that do not fit, or do not go fast enough, on one device.

>>> import shoal                                                                             # doctest: +SKIP
>>> engine, optimizer, loader, schedule = shoal.initialize(model=model, config="ds_config.json")  # doctest: +SKIP
>>> loss = engine(batch); engine.backward(loss); engine.step()                                # doctest: +SKIP
"""

from shoal import comm, errors, zero
from shoal.comm.world import init_distributed
from shoal.config import add_config_arguments
from shoal.engine import Engine, initialize
from shoal.errors import ShoalError

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "ShoalError",
    "__version__",
    "add_config_arguments",
    "comm",
    "errors",
    "init_distributed",
    "initialize",
    "zero",
]
