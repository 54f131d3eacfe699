"""``deepspeed.runtime.config``: the configuration, read and checked by Shoal."""

from __future__ import annotations

from typing import Any

from shoal.comm.world import current_world
from shoal.compat.assertions import be_assertion
from shoal.compat.config_models import get_bfloat16_config
from shoal.compat.config_readers import READERS
from shoal.compat.monitors import DeepSpeedMonitorConfig, get_monitor_config
from shoal.config import Config, load
from shoal.config.batch import MICRO, STEPS, TRAIN, Batch, BatchMismatch, solve
from shoal.errors import ConfigError as DeepSpeedConfigError

ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adagrad", "adam", "adamw"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
DEEPSPEED_OPTIMIZERS = [
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    LAMB_OPTIMIZER,
    LION_OPTIMIZER,
    MUON_OPTIMIZER,
]


class BatchSizeError(DeepSpeedConfigError, AssertionError):
    """Batch sizes that contradict each other. Also an AssertionError, since DeepSpeed asserts it."""

    code = "config-batch"


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
        except DeepSpeedConfigError as error:
            be_assertion(error)
            raise

    def _configure_train_batch_size(self) -> None:
        """Compute those of the three batch sizes that are None, after they were set as attributes.

        Raises: BatchSizeError: they do not fit, or neither the global batch nor the micro-batch is given.
        """
        given = Batch(*(getattr(self, name) for name in (TRAIN, MICRO, STEPS)))
        try:
            if given.train is None and given.micro is None:
                raise BatchMismatch(f"neither {TRAIN} nor {MICRO} is given.", "give one of them.")
            if any(size is not None and size < 1 for size in (given.train, given.micro, given.accumulation)):
                raise BatchMismatch(f"{given} is not of positive sizes.", "give sizes of at least 1.")
            solved = solve(given, self.world_size)
        except BatchMismatch as problem:
            raise BatchSizeError(str(problem), do=problem.do) from None
        for name, size in zip((TRAIN, MICRO, STEPS), (solved.train, solved.micro, solved.accumulation), strict=True):
            setattr(self, name, size)

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


globals().update(READERS)

__all__ = [
    *READERS,
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "DEEPSPEED_OPTIMIZERS",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "LAMB_OPTIMIZER",
    "LION_OPTIMIZER",
    "MUON_OPTIMIZER",
    "get_bfloat16_config",
    "get_monitor_config",
]
