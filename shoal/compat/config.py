"""``deepspeed.runtime.config``: the configuration, checked by Shoal."""

from __future__ import annotations

from typing import Any

from shoal.comm.world import current_world
from shoal.compat.assertions import be_assertion
from shoal.compat.monitors import DeepSpeedMonitorConfig
from shoal.config import Config, load
from shoal.errors import ConfigError

ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adagrad", "adam", "adamw"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
DEEPSPEED_OPTIMIZERS = ["adagrad", "adam", "adamw", "lamb", "lion", "muon"]


class DeepSpeedConfig:
    """A checked configuration: its keys are attributes.

    Args:
        config: a path, a dict, JSON text or base64.
        mpu: says how many data-parallel ranks share the batch; None: all ranks.

    Raises: ConfigError: every problem at once; an AssertionError too, since DeepSpeed asserts some.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self.world_size: int = mpu.get_data_parallel_world_size() if mpu is not None else current_world().size
        try:
            self.checked: Config = load(
                config,
                world_size=self.world_size,
                replaced=("optimizer", "scheduler"),  # a client may pass its own to initialize()
            )
        except ConfigError as error:
            be_assertion(error)
            raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "checked":
            raise AttributeError(name)
        checked = self.checked
        if name == "_param_dict":
            return checked.raw
        if name == "monitor_config":
            return DeepSpeedMonitorConfig(checked.tensorboard, checked.wandb, checked.csv_monitor, checked.comet)
        if name == "zero_config":
            return checked.zero_optimization
        if name in type(checked).model_fields or hasattr(type(checked), name):
            return getattr(checked, name)
        raise AttributeError(f"the configuration has no key {name!r}")
