"""The load of the model's experts after each step, and what follows: biases, events, experts that change ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from shoal.engine.accumulation import Counters
from shoal.engine.log import say_on_rank_0
from shoal.engine.move_experts import can_move, move_experts
from shoal.engine.over_stages import from_stages
from shoal.engine.parts.part import Part
from shoal.engine.settings import Properties
from shoal.engine.sharding import Sharding
from shoal.errors import ConfigError, NotBuiltError
from shoal.observe.expert_load import load_events
from shoal.observe.monitor import Monitor, is_monitored
from shoal.parallel.expert.bias import ExpertLoad, bias_of, update_bias
from shoal.parallel.expert.held import ExpertsHeld, modules_with_experts
from shoal.parallel.expert.rebalance import ExpertCopies, ExpertsByRank, most_loaded, num_moved, plan_copies

_EVENTS_EVERY = 10  # steps, where the config has no steps_per_print


@dataclass
class _BalancedLayer:
    name: str  # of the module that holds the experts
    module: nn.Module
    whole: nn.Module  # experts and router
    held: ExpertsHeld
    load: ExpertLoad
    initial: ExpertsByRank
    current: ExpertsByRank

    @property
    def bias(self) -> torch.Tensor | None:
        """Found anew each time: a module that moves to another device gets new buffers."""
        return bias_of(self.whole, self.held.num_experts)


class ExpertBalance(Part):
    """Counts tokens by layer and expert, updates biases, and moves experts between ranks.

    Args:
        monitor: gets the loads, on rank 0; None: there is none.

    Raises: ConfigError: ``load_balance_coeff``, and no layer whose router has a bias. NotBuiltError:
        ``rebalance_every``, and experts with buffers.
    """

    def __init__(self, sharding: Sharding, properties: Properties, counters: Counters, monitor: Monitor | None) -> None:
        self._counters, self._monitor = counters, monitor
        config = properties.config
        self._sharding, self._axes = sharding, properties.axes
        self._rank, self._device = properties.rank, properties.device.torch_device
        self._layers = _layers_of(sharding)
        self._coeff = config.expert_parallel.load_balance_coeff or 0.0
        self._move_every = config.expert_parallel.rebalance_every
        every = config.steps_per_print
        self._events_every = int(every) if every and every > 0 and math.isfinite(every) else _EVENTS_EVERY
        self._has_events = is_monitored(config)
        # Tokens by expert, the layers one after the other: of the last step, and of this rank since experts moved.
        sizes = [layer.held.num_experts for layer in self._layers]
        self._last = torch.zeros(sum(sizes), dtype=torch.float64, device=self._device)
        self._since = torch.zeros_like(self._last)
        self._is_of_all_ranks = False
        self._has_layers: bool | None = None  # on some pipeline stage; None: not asked yet
        if self._coeff:
            self._check_biases()
        if self._move_every:
            self._check_buffers()
        self._max_copies = config.expert_parallel.hot_experts if self._move_every else 0
        for layer in self._layers if self._max_copies else ():
            if layer.held.stack and layer.held.stack.rows == 1 and layer.held.comm is not None:
                layer.held.copies = ExpertCopies(layer.module)

    def _check_biases(self) -> None:
        has_bias = any(layer.bias is not None for layer in self._layers)
        if not any(from_stages(self._axes.get("pp"), has_bias, "biases of experts")):
            raise ConfigError(
                f"expert_parallel.load_balance_coeff is {self._coeff}, and no layer with experts has a bias for its"
                " router.",
                do="set it to null, or use a model whose routers have the buffer e_score_correction_bias or expert_bias"
                " (shoal.parallel.expert.bias.add_bias).",
                code="expert-bias",
            )

    def _check_buffers(self) -> None:
        for layer in self._layers:
            if any(True for _ in layer.module.buffers()):
                raise NotBuiltError(
                    f"expert_parallel.rebalance_every: the experts of {layer.name} have buffers.",
                    do="set it to 0.",
                )

    @property
    def is_needed(self) -> bool:
        """True if the model has layers with experts, on this pipeline stage or maybe on another."""
        return bool(self._layers) or self._axes.get("pp") is not None

    # after a step

    def at_step(self, was_applied: bool) -> None:
        """Take the counts of the step; update the biases; move experts where it is time to.

        Communicates: with ``load_balance_coeff``: one all-reduce of the layers' counts. Each ``rebalance_every``
            steps: another, and the experts that move.
        Order: does not block the host, except where experts may move.
        """
        if not self._layers:
            return
        self._last = torch.cat([layer.load.take(self._device) / self._copies(layer) for layer in self._layers]).double()
        self._since += self._last
        self._is_of_all_ranks = False
        if self._coeff and was_applied:
            for layer, load in zip(self._layers, self._sums(), strict=True):
                if (bias := layer.bias) is not None:
                    update_bias(bias, load, self._coeff)
        step = self._counters.global_steps
        if self._move_every and step % self._move_every == 0 and self._axes.get("ep") is not None:
            self._rebalance(step)

    def _copies(self, layer: _BalancedLayer) -> int:
        """How many ranks have counted the same tokens."""
        ranks, mesh = layer.held.tensor, self._axes.mesh
        return mesh.etp if ranks.same is not None or ranks.splits_sequence else mesh.tp

    def _by_layer(self, loads: torch.Tensor) -> list[torch.Tensor]:
        return list(loads.split([layer.held.num_experts for layer in self._layers]))

    def _sums(self) -> list[torch.Tensor]:
        """The tokens of the last step over all ranks, by layer. Each shape: [experts]."""
        if not self._is_of_all_ranks and self._layers:
            self._axes.same_units.blocking.all_reduce(self._last, label="tokens per expert")
            self._is_of_all_ranks = True
        return self._by_layer(self._last)

    def load(self) -> dict[str, list[int]]:
        """The tokens of the last step, by layer and expert, of all ranks and pipeline stages. Every rank calls."""
        if self._has_layers is None:
            self._has_layers = any(from_stages(self._axes.get("pp"), bool(self._layers), "layers with experts"))
        if not self._has_layers:
            return {}
        loads = {
            layer.name: load.round().long().tolist() for layer, load in zip(self._layers, self._sums(), strict=True)
        }
        stages: list[dict[str, list[int]]] = from_stages(self._axes.get("pp"), loads, "tokens per expert")
        return {name: counts for stage in stages for name, counts in stage.items()}

    def after_step(self) -> None:
        """Write the loads for the monitor at each ``steps_per_print``.

        Communicates: at those steps, as ``load()``. Order: blocks the host.
        """
        if not self._has_events or self._counters.global_steps % self._events_every:
            return
        loads = self.load()
        if self._monitor is not None and loads:
            self._monitor.write_events(load_events(loads, self._counters.global_samples))

    # experts that change ranks

    def _rebalance(self, step: int) -> None:
        self._axes.same_units.blocking.all_reduce(self._since, label="tokens per expert")
        wanted: list[tuple[_BalancedLayer, ExpertsByRank]] = []
        was = now = 1.0
        has_new_copies = False
        for layer, load in zip(self._layers, self._by_layer(self._since.cpu()), strict=True):
            loads, copies = load.tolist(), layer.held.copies
            copied, by_rank = plan_copies(loads, layer.current, 0 if copies is None else self._max_copies)
            if copies is not None:
                has_new_copies |= set(copied) != set(copies.experts)
                copies.experts = copied
            loads = [0.0 if expert in copied else tokens for expert, tokens in enumerate(loads)]
            if by_rank != layer.current:
                was = max(was, most_loaded(loads, layer.current))
                now = max(now, most_loaded(loads, by_rank))
                wanted.append((layer, by_rank))
        self._since.zero_()
        if has_new_copies:
            num_copied = sum(len(layer.held.copies.experts) for layer in self._layers if layer.held.copies is not None)
            say_on_rank_0(self._rank, f"step {step}: every rank has copies of {num_copied} experts, over all layers.")
        if not wanted:
            return
        moved = sum(num_moved(layer.current, by_rank) for layer, by_rank in wanted)
        if not self._move(wanted):
            self._move_every = 0
            say_on_rank_0(self._rank, "experts are not moved: their optimizer state cannot be exchanged.")
            return
        say_on_rank_0(
            self._rank,
            f"step {step}: {moved} experts of {len(wanted)} layers changed ranks; the most loaded rank had {was:.2f}"
            f" times the mean, and would have had {now:.2f}.",
        )

    def _move(self, wanted: list[tuple[_BalancedLayer, ExpertsByRank]]) -> bool:
        """True if the experts were moved."""
        self._sharding.wait()
        homes = self._sharding.model.home_of
        groups = {homes[id(parameter)][0] for layer in self._layers for parameter in layer.module.parameters()}
        if not can_move([group for group in self._sharding.groups if group in groups], self._axes.comms["ep"]):
            return False
        self._axes.drain()  # peers may still be reading the parameters that are about to change
        for layer, by_rank in wanted:
            move_experts(self._sharding.model, layer.name, layer.module, layer.held, layer.current, by_rank)
            layer.current = by_rank
        return True

    def before_destroy(self) -> None:
        """Move all experts to where they were at first. Communicates: the experts that are elsewhere."""
        for layer in self._layers:
            layer.held.copies = None
        moved = [(layer, layer.initial) for layer in self._layers if layer.current != layer.initial]
        if moved and self._sharding.failure is None:
            self._move(moved)


def _layers_of(sharding: Sharding) -> list[_BalancedLayer]:
    """The layers with experts, which count their tokens from now on."""
    model = sharding.module
    modules = list(modules_with_experts(model))
    layers = []
    for name, module, held in modules:
        held.load = ExpertLoad(module, held.num_experts)
        parent = name.rpartition(".")[0]
        is_alone = sum(not parent or other.startswith(f"{parent}.") for other, _, _ in modules) == 1
        size = held.num_local
        by_rank = tuple(tuple(range(rank * size, (rank + 1) * size)) for rank in range(held.ep_size))
        whole = model.get_submodule(parent) if is_alone else module
        layers.append(_BalancedLayer(name, module, whole, held, held.load, by_rank, by_rank))
    return layers
