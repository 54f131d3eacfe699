"""The load of the model's experts after each step, and what the engine does with it: biases and events."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from shoal.engine.over_stages import from_stages
from shoal.engine.properties import Properties
from shoal.errors import ConfigError
from shoal.observe.expert_load import load_events
from shoal.observe.monitor import Event, is_monitored
from shoal.parallel.expert.bias import bias_of, update_bias
from shoal.parallel.expert.held import ExpertsHeld, modules_with_experts
from shoal.parallel.expert.load import ExpertLoad

_EVENTS_EVERY = 10  # steps, where the config has no steps_per_print


@dataclass(frozen=True)
class _Layer:
    name: str  # of the module that holds the experts
    held: ExpertsHeld
    load: ExpertLoad
    whole: nn.Module  # of the layer: experts and router

    @property
    def bias(self) -> torch.Tensor | None:
        """Found anew each time: a module that moves to another device gets new buffers."""
        return bias_of(self.whole, self.held.num_experts)


class ExpertBalance:
    """Counts tokens by layer and expert, and updates the biases that balance them.

    Args:
        model: its layers with experts count from now on.
        coeff: how far a step moves the biases; None: it does not.

    Raises: ConfigError: a coefficient, and no layer whose router has a bias.
    """

    def __init__(self, model: nn.Module, properties: Properties, coeff: float | None) -> None:
        self._axes, self._device = properties.axes, properties.device.torch_device
        self._comm = self._axes.pipeline_stage
        self._coeff = coeff or 0.0
        self._layers = []
        found = list(modules_with_experts(model))
        for name, module, held in found:
            held.load = ExpertLoad(module, held.num_experts)
            parent = name.rpartition(".")[0]
            is_alone = sum(other.startswith(f"{parent}.") or not parent for other, _, _ in found) == 1
            self._layers.append(_Layer(name, held, held.load, model.get_submodule(parent) if is_alone else module))
        config = properties.config
        every = config.steps_per_print
        is_finite = every is not None and math.isfinite(every) and every > 0
        self._events_every = int(every or 0) if is_finite else _EVENTS_EVERY
        self._has_events = is_monitored(config)
        self._last: torch.Tensor | None = None  # tokens of the last step, by expert, the layers one after the other
        self._is_of_all_ranks = False
        if self._coeff and not any(from_stages(self._axes.pp, self._has_bias, "biases of experts")):
            raise ConfigError(
                f"expert_parallel.load_balance_coeff is {coeff}, and no layer with experts has a bias for its router.",
                do="set it to null, or use a model whose routers have the buffer e_score_correction_bias or expert_bias"
                " (shoal.parallel.expert.bias.add_bias).",
                code="expert-bias",
            )

    @property
    def _has_bias(self) -> bool:
        return any(layer.bias is not None for layer in self._layers)

    def after_step(self, *, was_applied: bool) -> None:
        """Take the counts of the step; update the biases.

        Communicates: with a coefficient: one all-reduce of the layers' counts. Order: does not block the host.
        """
        if not self._layers:
            return
        self._last = torch.cat([layer.load.take(self._device) for layer in self._layers]).float()
        self._is_of_all_ranks = False
        if not self._coeff or not was_applied:
            return
        for layer, load in zip(self._layers, self._sums(), strict=True):
            bias = layer.bias
            if bias is not None:
                update_bias(bias, load, self._coeff)

    def _sums(self) -> list[torch.Tensor]:
        """The tokens of the last step over all ranks, by layer. Each shape: [experts]."""
        sizes = [layer.held.num_experts for layer in self._layers]
        if self._last is None:
            self._last = torch.zeros(sum(sizes), device=self._device)
        if not self._is_of_all_ranks:
            self._comm.all_reduce(self._last, label="tokens per expert").drain()
            self._is_of_all_ranks = True
        return list(self._last.split(sizes))

    def load(self) -> dict[str, list[int]]:
        """The tokens of the last step, by layer and expert, of all ranks and pipeline stages. Every rank calls."""
        own = {layer.name: load.long().tolist() for layer, load in zip(self._layers, self._sums(), strict=True)}
        stages: list[dict[str, list[int]]] = from_stages(self._axes.pp, own, "tokens per expert")
        return {name: counts for stage in stages for name, counts in stage.items()}

    def events(self, step: int, x: int) -> list[Event]:
        """The loads, for a monitor, at each ``steps_per_print``; else none.

        Args:
            x: of the events.

        Communicates: at those steps, as ``load()``. Order: blocks the host.
        """
        if not self._has_events or step % self._events_every:
            return []
        return load_events(self.load(), x)
