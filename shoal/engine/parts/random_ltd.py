"""``data_efficiency.data_routing.random_ltd``: layers that run on a random part of the tokens, more in later steps.

Source: Yao et al. 2022, random-LTD (arXiv:2211.11586).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from shoal.compiler import untraced
from shoal.config.data_efficiency import RandomLTD
from shoal.data.random_ltd import RandomLTDScheduler
from shoal.device import in_backward, in_transform
from shoal.engine.accumulation import Accumulation
from shoal.engine.parts.part import Part
from shoal.engine.settings import Properties
from shoal.errors import ConfigError, NotBuiltError, UsageError
from shoal.parallel.random_tokens import Draw, RandomTokens
from shoal.parallel.recompute_blocks import RecomputedBlocks, find_blocks

_SECTION = "data_efficiency.data_routing.random_ltd"


class RandomLayerTokenDrop(Part):
    """The layers of one engine that run on a part of the tokens, in training.

    Made after other parts that wrap blocks, so that a recomputed block is inside and is recomputed on the same tokens.

    Raises: ConfigError: the model has no such layers, or not as many. NotBuiltError: positions are split over ranks.
    """

    name = "random_ltd"

    def __init__(self, model: nn.Module, properties: Properties, accumulation: Accumulation) -> None:
        section = properties.config.data_efficiency.random_ltd
        assert section is not None
        self._accumulation, self._batch = accumulation, properties.axes.batch
        self._model, self._seed = model, properties.config.data_efficiency.seed
        _check_axes(properties)
        found = find_blocks(model)
        kind = Counter(map(type, found.values())).most_common(1)[0][0] if found else nn.Module
        blocks = {name: block for name, block in found.items() if type(block) is kind}
        self.layers = chosen = _chosen(list(blocks), section)
        self.scheduler = RandomLTDScheduler.of(section, len(blocks), len(chosen), accumulation.global_batch)
        is_sequence_first = section.hidden_state_order == "seq_batch_dim"
        self._tokens = RandomTokens(chosen, section.model_mask_name or "attention_mask", is_sequence_first)
        self._installed = RecomputedBlocks({name: blocks[name] for name in chosen}, _CheckedRunner(self, self._tokens))
        self.num_open = 0  # forward passes since the last backward pass
        kept = section.random_ltd_schedule
        self.notes = [
            f"random_ltd: {len(chosen)} of {len(blocks)} layers run on {kept.min_value} tokens of a sequence at first,"
            f" on {kept.max_value} after {kept.schedule_config.require_steps} steps."
        ]

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tokens.draw = None
        if not self._model.training or in_transform():
            return
        self.num_open += 1
        step = self._accumulation.counters.global_steps
        self.scheduler.update_seq(step)
        micro_batch = self._accumulation.num_open * self._batch.size + self._batch.rank
        self._tokens.draw = Draw(self._seed, step, self.scheduler.get_current_seq(), micro_batch)

    def before_backward(self, loss: Any) -> None:
        self._open_in_backward, self.num_open = self.num_open, 0

    def check_recomputed(self, name: str) -> None:
        """Raises: UsageError: a layer is recomputed, and it is not known for which of several forward passes."""
        if in_backward() and max(self._open_in_backward, self.num_open) > 1:
            raise UsageError(
                f"random-LTD: layer {name} is recomputed by its own checkpointing after {self._open_in_backward}"
                " forward passes: which tokens it had is not known.",
                do="recompute by the section activation_checkpointing; or call backward() after each forward pass.",
                code="random-ltd-recompute",
            )

    _open_in_backward = 0

    def state(self) -> Mapping[str, Any]:
        return self.scheduler.state_dict()

    def load_state(self, saved: Mapping[str, Any]) -> None:
        self.scheduler.load_state_dict(dict(saved))

    def before_destroy(self) -> None:
        self._installed.remove()


class _CheckedRunner:
    def __init__(self, part: RandomLayerTokenDrop, tokens: RandomTokens) -> None:
        self._part, self._tokens = part, tokens

    @partial(untraced, recursive=False)
    def run(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._part.check_recomputed(name)
        return self._tokens.run(name, function, args, kwargs)


def _chosen(blocks: list[str], section: RandomLTD) -> list[str]:
    """Names of the layers that drop tokens."""
    if len(blocks) < (section.total_layer_num or 1):
        raise ConfigError(
            f"the model has {len(blocks)} blocks.",
            where=f"{_SECTION}.total_layer_num",
            do="set it to the number of the model's blocks, or leave it out.",
            code="random-ltd-layers",
        )
    layers = section.random_ltd_layer_id
    numbers = list(range(1, len(blocks) - 1)) if layers is None else sorted(set(layers))
    if not numbers or not 0 <= numbers[0] <= numbers[-1] < len(blocks):
        raise ConfigError(
            f"layers {numbers} of the {len(blocks)} blocks {blocks[:3]}...",
            where=f"{_SECTION}.random_ltd_layer_id",
            do="list numbers of blocks, counted from 0.",
            code="random-ltd-layers",
        )
    return [blocks[number] for number in numbers]


def _check_axes(properties: Properties) -> None:
    axes = properties.axes
    parallel = properties.config.parallel
    split = [axis for axis in ("sp", "cp", "pp") if axes.get(axis) is not None]
    if split or (axes.get("tp") is not None and parallel.tp_sequence_parallel):
        raise NotBuiltError(
            f"random-LTD with positions or layers that are split over ranks ({', '.join(split) or 'tp'}).",
            where=_SECTION,
            do="disable it, or use data and tensor parallelism (parallel.tp_sequence_parallel: false).",
            code="random-ltd-axes",
        )
