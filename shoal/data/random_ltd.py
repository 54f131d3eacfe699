"""The schedule of random-LTD: how many tokens of a sequence a layer keeps in a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.config.data_efficiency import RandomLTD


class RandomLTDScheduler:
    """Grows from ``min_value`` to ``max_value`` tokens in equal steps, with DeepSpeed's names.

    >>> schedule = {"min_value": 16, "max_value": 32, "schedule_type": "fixed_linear",
    ...     "schedule_config": {"require_steps": 4, "seq_per_step": 8}}
    >>> scheduler = RandomLTDScheduler({"total_layer_num": 4, "random_ltd_layer_num": 2, "global_batch_size": 1,
    ...     "random_ltd_schedule": schedule})
    >>> [scheduler.update_seq(step) or scheduler.get_current_seq() for step in range(5)]
    [16, 16, 24, 24, 32]

    Args:
        config: ``total_layer_num``, ``random_ltd_layer_num``, ``global_batch_size`` and ``random_ltd_schedule``.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.model_layer_num = int(config["total_layer_num"])
        self.random_ltd_layer_num = int(config["random_ltd_layer_num"])
        self.global_batch_size = int(config["global_batch_size"])
        self.config_schedule = dict(config["random_ltd_schedule"])
        self.state: dict[str, Any] = {}
        self.reset_to_init()

    @classmethod
    def of(cls, section: RandomLTD, num_layers: int, num_dropping: int, global_batch: int) -> RandomLTDScheduler:
        """The schedule of a config's section, for a model of so many layers."""
        return cls(
            {
                "total_layer_num": num_layers,
                "random_ltd_layer_num": num_dropping,
                "global_batch_size": global_batch,
                "random_ltd_schedule": section.random_ltd_schedule.model_dump(),
            }
        )

    def reset_to_init(self) -> None:
        """Go to the beginning."""
        keys = ("min_value", "max_value", "schedule_type", "schedule_config")
        self.state |= {key: self.config_schedule[key] for key in keys}
        self.state |= {"current_value": self.state["min_value"], "consumed_layer_tokens": 0, "current_steps": -1}

    def get_value(self, global_steps: int) -> int:
        """Tokens of a step, counted from 0."""
        low, high, how = self.state["min_value"], self.state["max_value"], self.state["schedule_config"]
        grown = int(global_steps / how["require_steps"] * (high - low) + low)
        return int(min(grown // how["seq_per_step"] * how["seq_per_step"], high))

    def get_current_seq(self) -> int:
        """Tokens that a layer keeps now."""
        return int(self.state["current_value"])

    def set_current_seq(self, seq_length: int) -> None:
        """Set the tokens that a layer keeps."""
        self.state["current_value"] = seq_length

    def get_random_ltd_layer_num(self) -> int:
        """Layers that drop tokens."""
        return self.random_ltd_layer_num

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Go to a step. Returns: the tokens times layers that all steps until it take."""
        for step in range(train_iters):
            self.update_seq(step)
        return int(self.state["consumed_layer_tokens"])

    def update_seq(self, global_steps: int) -> None:
        """Go to a step, counted from 0."""
        if self.state["current_value"] < self.state["max_value"]:
            self.state["current_value"] = self.get_value(global_steps)
        if global_steps != self.state["current_steps"]:
            others = self.state["max_value"] * (self.model_layer_num - self.random_ltd_layer_num)
            of_sample = self.state["current_value"] * self.random_ltd_layer_num + others
            self.state["consumed_layer_tokens"] += self.global_batch_size * of_sample
            self.state["current_steps"] = global_steps

    def get_state(self) -> dict[str, Any]:
        """The schedule and its place."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Load a state of ``get_state``."""
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """The place, in numbers."""
        keys = ("consumed_layer_tokens", "current_steps", "current_value", "min_value", "max_value")
        return {key: self.state[key] for key in keys}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of ``state_dict``."""
        self.state |= dict(state_dict)
